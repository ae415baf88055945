"""Plants a fault in every function of ours that a few watched loops run through.

    python tests/session/planted_faults.py [--all]

Functions are found by tracing, not by hand: whatever runs between the return of `watch` and the end
of `close`, but the guard itself and the first function that torch or the user calls. A fault is
raised at one call of a function (or at that one and all that follow); then the loop must have
trained as it does without us, everything must be as it was, and the fault must have been told.
"""

import argparse
import faulthandler
import functools
import io
import json
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from opcode import opmap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import gradsight
from gradsight.core import moments
from gradsight.core.calls import SUSPENDED, is_suspended
from gradsight.core.carried import drop
from gradsight.store import store as stores

PACKAGE = str(Path(gradsight.__file__).parent)
BORDER = f"{PACKAGE}/core/guard.py"
STEPS = 12
BAD = 5
"""The step whose batch holds a NaN."""
LOUD = 9
"""The step with a loss far too large."""
A_FEW = 0.04
"""The share of functions that a short campaign plants faults in."""
TOO_LONG = 120
"""Seconds after which a planted fault has made something wait for ever."""


WORDS = "sown on purpose"


class Planted(RuntimeError):
    """The fault."""

    def __init__(self) -> None:
        super().__init__(WORDS)


class Seen:
    """A sink of the user's."""

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Take a number."""


@dataclass
class Subject:
    """A model to train, in the same way every time."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Tensor]

    @classmethod
    def make(cls, optimizer: Callable[..., torch.optim.Optimizer]) -> "Subject":
        torch.manual_seed(7)
        # Dropout, so that a random number drawn once too often changes every weight.
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2))
        batches = [torch.randn(5, 4) for _ in range(STEPS)]
        batches[BAD][2, 1] = float("nan")
        batches[LOUD] *= 1000
        return cls(model, optimizer(model.parameters()), batches)

    def loss(self, step: int) -> Tensor:
        return self.model(self.batches[step]).square().mean()

    def mend(self) -> None:
        """What a careful user does about a NaN."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.05, max_iter=2)


Loop = Callable[[Subject, Any], None]


def by_optimizer(subject: Subject, watched: Any) -> None:
    for step in range(STEPS):
        subject.optimizer.zero_grad()
        if watched is not None:
            watched.ids(list(range(5)))
        loss = subject.loss(step)
        loss.backward()
        subject.mend()
        subject.optimizer.step()
        if watched is not None:
            watched.log(loss=loss, lr=0.05)
            watched.log_scalar("epoch", 1.0, step)
    if watched is not None:
        watched.close()


def by_scaler(subject: Subject, watched: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        subject.optimizer.zero_grad()
        scaler.scale(subject.loss(step)).backward()
        scaler.unscale_(subject.optimizer)
        nn.utils.clip_grad_norm_(subject.model.parameters(), 1.0)
        scaler.step(subject.optimizer)
        scaler.update()
    if watched is not None:
        watched.close()


def by_closure(subject: Subject, watched: Any) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            subject.optimizer.zero_grad()
            loss = subject.loss(step)
            loss.backward()
            subject.mend()
            return loss

        subject.optimizer.step(closure)
    if watched is not None:
        watched.close()


class Enough(Exception):
    """Of the user's: ends a loop."""


def by_hand(subject: Subject, watched: Any) -> None:
    """Ends by an exception of the user's, through the watch."""
    try:
        if watched is not None:
            with watched:
                _by_hand(subject, watched)
        else:
            _by_hand(subject, None)
    except Enough:
        pass


def _by_hand(subject: Subject, watched: Any) -> None:
    for step in range(STEPS):
        subject.optimizer.zero_grad()
        loss = subject.loss(step)
        loss.backward()
        if watched is not None:
            watched.step(loss=loss)
        subject.mend()
        subject.optimizer.step()
    raise Enough


@dataclass(frozen=True)
class Watched:
    """A loop, and how it is watched."""

    loop: Loop
    optimizer: Callable[..., torch.optim.Optimizer]
    by_hand: bool = False
    recorder: Any = True
    dumps: bool = False

    def dumper(self, run_dir: Path) -> Any:
        return gradsight.GradientDumper(
            run_dir, enabled=self.dumps, step_interval=4, keep_last=2, dump_on="critical"
        )

    def open(self, subject: Subject, run_dir: Path, dumper: Any) -> Any:
        return gradsight.watch(
            subject.model,
            None if self.by_hand else subject.optimizer,
            run_dir=run_dir,
            sinks=[Seen()],
            histograms=gradsight.Schedule(step_interval=4),
            recorder=self.recorder,
            dump=dumper if self.dumps else None,
        )


LOOPS = {
    "optimizer": Watched(by_optimizer, sgd, dumps=True, recorder="batch"),
    "scaler": Watched(by_scaler, sgd),
    "closure": Watched(by_closure, lbfgs),
    "by hand": Watched(by_hand, sgd, by_hand=True, recorder="batch"),
}


USERS = {"by_optimizer", "by_scaler", "closure", "by_hand", "_by_hand"}
"""The functions here that stand for a user's."""


# Watching what runs.


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE)


def is_first(frame: FrameType) -> bool:
    """Whether torch, the user or the interpreter has called this, and not something of ours.

    What the user does in a closure that we call is the user's own.
    """
    outer = frame.f_back
    while outer is not None and outer.f_code.co_name not in USERS:
        # A function mode stands between the user and every function of torch's.
        if is_ours(outer.f_code) and outer.f_code.co_name != "__torch_function__":
            return False
        outer = outer.f_back
    return True


def is_candidate(frame: FrameType, event: str) -> bool:
    code = frame.f_code
    if event != "call" or not is_ours(code) or code.co_filename == BORDER:
        return False
    # A frame is entered at RESUME, whose argument is 0 but where a generator goes on.
    operation = code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return operation == bytes([opmap["RESUME"], 0]) and not is_first(frame)


@contextmanager
def profiled(profile: Any) -> Iterator[None]:
    """Have all threads that start from now on, and this one, watched."""
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Counter:
    """Counts the calls of every function of ours while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.calls: dict[CodeType, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and is_candidate(frame, event):
            self.calls[frame.f_code] = self.calls.get(frame.f_code, 0) + 1


class Planter:
    """Raises at one call of one function."""

    def __init__(self, code: CodeType, number: int, error: BaseException) -> None:
        self.on = False
        self.raised = False
        self._code = code
        self._left = number
        self._error = error

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on or self.raised or frame.f_code is not self._code:
            return
        if is_candidate(frame, event):
            self._left -= 1
            if self._left == 0:
                self.raised = True
                raise self._error


class Lasting:
    """Raises at one call of one function and at every later one, in place of the function."""

    def __init__(self, code: CodeType, number: int) -> None:
        self.on = False
        self.raised = False
        self._left = number
        self._places: list[tuple[Any, str, Any]] = []
        parts = code.co_qualname.split(".")
        owner: Any = sys.modules[module_of(code)]
        for part in parts[:-1]:
            owner = getattr(owner, part)
        raw = vars(owner)[parts[-1]]
        # Also where it was imported by name.
        modules = [each for name, each in list(sys.modules.items()) if name.startswith("gradsight")]
        for place in [owner, *modules]:
            for name, value in list(vars(place).items()):
                if value is raw:
                    self._places.append((place, name, raw))
        self._stand_in = self._replaced(raw)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Nothing: a profile is not needed for this."""

    def __enter__(self) -> "Lasting":
        for place, name, _ in self._places:
            setattr(place, name, self._stand_in)
        return self

    def __exit__(self, *_: object) -> None:
        for place, name, raw in self._places:
            setattr(place, name, raw)

    def _replaced(self, raw: Any) -> Any:
        if isinstance(raw, property):
            return property(self._failing(raw.fget))
        if isinstance(raw, classmethod | staticmethod):
            return type(raw)(self._failing(raw.__func__))
        return self._failing(raw)

    def _failing(self, function: Any) -> Any:
        @functools.wraps(function, updated=())
        def failing(*args: Any, **kwargs: Any) -> Any:
            if self.on and not is_first(sys._getframe()):
                self._left -= 1
                if self._left <= 0:
                    self.raised = True
                    raise Planted
            return function(*args, **kwargs)

        return failing


def module_of(code: CodeType) -> str:
    path = Path(code.co_filename).relative_to(Path(PACKAGE).parent).with_suffix("")
    return ".".join(path.parts).removesuffix(".__init__")


# One try.


_left: list[threading.Thread] = []
"""Threads that an earlier failure has left behind: they are not counted again."""


def state(subject: Subject) -> dict[str, Any]:
    """Whatever a watch may have switched, replaced or hung up."""
    modules = list(subject.model.modules())
    optimizer = subject.optimizer
    return {
        "weights": [p.detach().numpy().tobytes() for p in subject.model.parameters()],
        "random numbers": torch.get_rng_state().numpy().tobytes(),
        "modes": [module.training for module in modules],
        "forward hooks": [
            (list(module._forward_hooks), list(module._forward_pre_hooks)) for module in modules
        ],
        "tensor hooks": [p._backward_hooks for p in subject.model.parameters()],
        "optimizer hooks": (
            list(optimizer._optimizer_step_pre_hooks),
            list(optimizer._optimizer_step_post_hooks),
        ),
        "global hooks": list(_global_optimizer_post_hooks),
        "backward": torch.autograd.backward,
        "scaler": [vars(torch.amp.GradScaler)[name] for name in ("scale", "unscale_", "step")],
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "excepthook": sys.excepthook,
        "gradients on": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "passes": (moments.inside_backward(), is_suspended()),
        "listeners": len(moments._listeners),
        "open records": list(stores._open),
        "threads": [thread.name for thread in threads()],
    }


def leave_out_threads_of_others() -> None:
    """Those that run now are no business of the test that begins: nobody waits for their end."""
    _left[:] = threading.enumerate()


def threads() -> list[threading.Thread]:
    """Those of ours that do not end; one that was told to may take a moment."""
    alive = [each for each in threading.enumerate() if "gradsight" in each.name]
    alive = [each for each in alive if each not in _left]
    for thread in alive:
        thread.join(5)
    return [thread for thread in alive if thread.is_alive()]


def plain(watched: Watched) -> dict[str, Any]:
    """How the loop ends without us."""
    subject = Subject.make(watched.optimizer)
    watched.loop(subject, None)
    return state(subject)


@dataclass
class Told:
    """What was said, and where."""

    warned: list[str] = field(default_factory=list)
    stderr: str = ""
    recorded: str = ""

    def has(self, text: str) -> bool:
        return text in self.stderr or text in self.recorded or any(text in w for w in self.warned)


def attempt(watched: Watched, profile: Any, warnings_as: str = "always") -> tuple[Any, Told]:
    """One watched loop with a profile on; its state afterwards, and what was told."""
    told = Told()
    stream = io.StringIO()
    subject = Subject.make(watched.optimizer)
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stderr(stream),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter(warnings_as)  # type: ignore[arg-type]
        # The pipes and sockets of others are none of ours.
        warnings.simplefilter("ignore", ResourceWarning)
        run_dir = Path(folder) / "run"
        with watched.dumper(run_dir) as dumper, profiled(profile):
            opened = watched.open(subject, run_dir, dumper)
            profile.on = True
            try:
                watched.loop(subject, opened)
            finally:
                profile.on = False
                if opened is not None:
                    opened.close()
        after = state(subject)
        told.recorded = _recorded(run_dir)
    told.warned = [str(each.message) for each in caught or ()]
    told.stderr = stream.getvalue()
    return after, told


def _recorded(run_dir: Path) -> str:
    """All that a reader is told of faults: problems, and notes of incidents."""
    run = gradsight.open_run(run_dir)
    texts = [problem.message for problem in run.problems()]
    texts += [path.read_text() for path in run_dir.rglob("incident.json")]
    texts += [str(finding.diagnosis) for finding in run.findings()]
    return "\n".join(texts)


def differences(expected: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in expected.items() if after[name] != value]


def functions(watched: Watched) -> dict[CodeType, int]:
    """Every function of ours that the loop runs through, with its number of calls."""
    counter = Counter()
    attempt(watched, counter)
    return counter.calls


def plant_once(
    watched: Watched, expected: dict[str, Any], code: CodeType, number: int, warnings_as: str
) -> str | None:
    """What a fault at this call does that it must not; None where all is well."""
    return _planted(watched, expected, Planter(code, number, Planted()), warnings_as)


def plant_for_good(
    watched: Watched, expected: dict[str, Any], code: CodeType, number: int, warnings_as: str
) -> str | None:
    """The same for a function that fails from this call on."""
    # What can only be closed by the function that fails stays open.
    kept = {name: value for name, value in expected.items() if name not in MAY_STAY_OPEN}
    try:
        with Lasting(code, number) as planter:
            return _planted(watched, kept, planter, warnings_as)
    finally:
        _clean_up()


MAY_STAY_OPEN = ("threads", "open records")


def _planted(
    watched: Watched, expected: dict[str, Any], planter: Any, warnings_as: str
) -> str | None:
    faulthandler.dump_traceback_later(TOO_LONG, exit=True)
    try:
        after, told = attempt(watched, planter, warnings_as)
    except Exception as error:
        _clean_up()
        return f"raised {type(error).__name__}: {error}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    wrong = differences(expected, after)
    if wrong:
        _clean_up()
        return f"left changed: {', '.join(wrong)}"
    if planter.raised and not told.has(WORDS):
        return "was not told"
    return None


def _clean_up() -> None:
    """A failure must not make those that follow fail."""
    leave_out_threads_of_others()
    stores._open.clear()
    torch.set_grad_enabled(True)
    torch.set_anomaly_enabled(False)
    if is_suspended():
        drop(SUSPENDED)
    for listener in list(moments._listeners):
        moments.leave(listener)


def name_of(code: CodeType) -> str:
    place = code.co_filename.removeprefix(f"{PACKAGE}/")
    return f"{place}:{code.co_qualname}"


def campaign(share: float = 1.0, seed: int = 0, names: Any = tuple(LOOPS)) -> tuple[int, list[str]]:
    """Plant a fault in (a share of) the functions of every loop; tries and failures."""
    tries = 0
    failures: list[str] = []
    choose = random.Random(seed)
    for name in names:
        watched = LOOPS[name]
        expected = plain(watched)
        found = functions(watched)
        for code in sorted(found, key=name_of):
            if choose.random() >= share:
                continue
            for number in sorted({1, choose.randint(1, found[code]), found[code]}):
                for way in ways(code):
                    tries += 1
                    wrong = WAYS[way](watched, expected, code, number)
                    if wrong is not None:
                        what = f"{name}, {way}: {name_of(code)} call {number}"
                        failures.append(f"{what}: {wrong}")
    return tries, failures


WAYS = {
    "once": functools.partial(plant_once, warnings_as="always"),
    "once, warnings are errors": functools.partial(plant_once, warnings_as="error"),
    "for good": functools.partial(plant_for_good, warnings_as="always"),
}


def ways(code: CodeType) -> list[str]:
    """Functions inside functions have no place where another could be put."""
    return list(WAYS)[: 2 if "<" in code.co_qualname else 3]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every function, not a few")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tries, failures = campaign(1.0 if given.all else A_FEW, given.seed)
    print(*failures, sep="\n")
    promise = "a fault of ours never reaches the loop"
    print(json.dumps({"promise": promise, "tries": tries, "failures": len(failures)}))
    sys.exit(bool(failures))
