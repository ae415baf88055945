"""Why a watch has no step, or no more steps: which optimizer stepped in place of those it has."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradsight.core import moments
from gradsight.core.beside import process_compiles
from gradsight.core.group import rank
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_hook
from gradsight.core.optimizers import calls_of_step, innermost_optimizer, parameters_of
from gradsight.core.passes import BackwardPass
from gradsight.core.problems import Problems
from gradsight.session.line import StepLine

_SURE = 10
"""Steps of an optimizer that nobody watches, before it is said that none of them is recorded.

Whoever calls `Watch.step()` may do so from the second step on, or at every few.
"""
_NO_OPTIMIZER = (
    "watch() was given no optimizer, and Watch.step() was not called. Give it the optimizer, "
    "watch(model, optimizer), once there is one (Hugging Face's Trainer makes its own in train(): "
    "call trainer.create_optimizer() first), or call Watch.step() after backward() in your loop."
)
_COMPILED = (
    "A step that is compiled as a whole, with torch.autograd.grad and the update inside, calls "
    "nothing that Gradsight could see: compile forward and loss alone, and call backward() and "
    "optimizer.step() outside of the compiled function; every step is recorded then."
)


class MissingSteps:
    """Stands by until the line has made its first step; says why where it never does."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizers: Sequence[Any],
        line: StepLine,
        problems: Problems,
        guard: Guard,
        is_watched_elsewhere: Callable[[Optimizer], bool],
        attached: bool = False,
    ) -> None:
        """`attached`: a command watches every optimizer of a script; an idle one is no mistake."""
        self._attached = attached
        self._is_watched_elsewhere = is_watched_elsewhere
        self._last = ""
        self._parameters = {id(tensor): tensor for tensor in parameters}
        self._watched = [innermost_optimizer(each) for each in optimizers]
        self._line = line
        self._problems = problems
        self._guard = guard
        self._said = False
        self._saw_gradients = False
        self._strangers: dict[str, int] = {}
        """Steps of optimizers that hold parameters of the model and are not watched, by class."""
        self._since = 0
        """Their steps since an optimizer that is watched has stepped."""
        self._said_since = False

    def start(self) -> None:
        """Begin to look."""
        moments.listen(self, self._guard, list(self._parameters.values()))
        put_hook(self._guard, register_optimizer_step_post_hook, self._stepped)

    def also_watched(self, optimizer: Optimizer) -> None:
        """The watch has got another optimizer."""
        given = parameters_of(optimizer)
        stay = [each for each in self._watched if parameters_of(each) - given]
        self._watched = [*stay, optimizer]

    def report(self) -> None:
        """The run is over: say why there is no step, where there is none. Rank 0 does."""
        self._report_once("no step was recorded")
        # A single one may be half of a step, of which the other half was recorded.
        if self._since > 1:
            self._report_others()

    # What torch tells.

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """A backward pass has written gradients of the model."""
        self._saw_gradients = True

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Some optimizer of this process has stepped."""
        if any(optimizer is each for each in self._watched):
            self._since = 0
            return
        is_known = self._is_watched_elsewhere(optimizer) or any(map(calls_of_step, self._watched))
        if is_known or (self._line.has_stepped and not self._watched):
            return
        given = (tensor for group in optimizer.param_groups for tensor in group["params"])
        if not any(id(tensor) in self._parameters for tensor in given):
            return
        name = type(optimizer).__name__
        if self._line.has_stepped:
            self._since += 1
            self._last = name
            if self._since == _SURE:
                self._report_others()
            return
        self._strangers[name] = self._strangers.get(name, 0) + 1
        if sum(self._strangers.values()) == _SURE:
            self._report_once("no step is recorded so far")

    # The words.

    def _report_once(self, fact: str) -> None:
        known = self._line.has_stepped or self._guard.faults or self._said
        hides_steps = process_compiles() and not self._saw_gradients
        if known or rank() != 0 or (self._attached and not hides_steps):
            return
        self._said = True
        self._problems.report("no-steps", f"{fact}: {self._reason()}", step=0)

    def _report_others(self) -> None:
        if self._said_since or self._guard.faults or self._attached or rank() != 0:
            return
        self._said_since = True
        self._problems.report(
            "other-optimizer",
            f"after the last recorded step, {self._last} has stepped with parameters of the model "
            f"({self._since} times so far). watch() was not given this optimizer, so its steps are "
            "not recorded. Give watch() every optimizer, or open a new watch after making one.",
        )

    def _reason(self) -> str:
        if self._strangers:
            name, steps = next(iter(self._strangers.items()))
            seen = f"{name} has made {steps} steps with parameters of the model"
            if not self._watched:
                return f"{seen}, but {_NO_OPTIMIZER}"
            return (
                f"{seen}, but it is not the optimizer that watch() was given, and that one never "
                "stepped. Give watch() the optimizer that trains the model."
            )
        seen = "no gradient of the model was seen after any backward()"
        if self._saw_gradients:
            seen = "gradients of the model were seen"
        if not self._watched:
            return f"{seen}; {_NO_OPTIMIZER}"
        names = " and ".join(type(each).__name__ for each in self._watched)
        if not self._saw_gradients and process_compiles():
            return f"{seen}, and {names} never stepped. {_COMPILED}"
        return (
            f"{seen}, and {names} never stepped. Train the model that is watched, with the "
            "optimizer that watch() was given, before the watch is closed."
        )
