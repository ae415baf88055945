"""Which step it is, what the optimizer did, and when scores go to disk."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsight.core.sharing import Ranks
from gradsight.ghost.clipping import ClipMeter
from gradsight.ghost.ledger import Entry, Ledger, to_host, write
from gradsight.ghost.parameters import Parameters
from gradsight.ghost.prediction_check import Diary
from gradsight.store.run_problems import RunProblems


class Books:
    """Keeps the scores of a run by step, with learning rate and clipping, and saves them every
    `save_interval` steps.
    """

    def __init__(
        self,
        ledger: Ledger,
        diary: Diary,
        ranks: Ranks,
        optimizer: Optimizer | None,
        directory: Path | None,
        save_interval: int,
    ) -> None:
        self.ledger, self.diary = ledger, diary
        self.save_interval = save_interval
        self._ranks, self._optimizer, self._directory = ranks, optimizer, directory
        self._clip = ClipMeter()
        self._blocks = self._optimizer_steps = self._saved_before = 0
        self._last = -1
        run_dir = directory.parent if directory is not None and ranks.rank == 0 else None
        self._problems = RunProblems(run_dir)
        self._hooks = [] if optimizer is None else [
            optimizer.register_step_pre_hook(self._before_optimizer),
            optimizer.register_step_post_hook(self._after_optimizer),
        ]  # fmt: skip

    def step(self, given: int | None) -> int:
        """The number of the step that a block belongs to: as given, or by the optimizer's steps, or
        one per block.
        """
        if given is not None:
            return given
        return self._blocks if self._optimizer is None else self._optimizer_steps

    def begin(self, step: int) -> None:
        """A block of this step begins: earlier steps are complete."""
        if self._directory is None:
            self.ledger.drop(step)
        else:
            self.save_finished(step)

    def add(
        self,
        step: int,
        ids: list[int | str],
        domains: list[str | None],
        table: Tensor,
        totals: Tensor,
        direction: str,
    ) -> None:
        """Keep a block's scores."""
        lr = self._learning_rate()
        self.ledger.entries.append(Entry(step, ids, domains, to_host(table), direction, lr))
        self.diary.add_scores(step, totals.sum(1), lr)
        self._blocks += 1
        self._last = max(self._last, step)

    def look_at_gradients(self, parameters: Parameters, scale: Tensor | None) -> None:
        """Remember the gradients as backward left them, to see what clipping makes of them."""
        if self._optimizer is not None:
            self._clip.after_backward(list(parameters.trainable.values()), scale)

    def save_finished(self, step: int) -> None:
        """Write the file that is due when this step begins. A failure is said once; training goes
        on.
        """
        due = step - step % self.save_interval
        if self._directory is None or due <= self._saved_before:
            return
        self._saved_before = due
        try:
            self.save(due)
        except Exception as error:
            text = f"{type(error).__name__}: {error}; training goes on, these scores are lost"
            self._problems.report("scores", text, step)

    def save(self, iteration: int | None) -> Path | None:
        """Write the scores of all steps before this one (None: of all); returns the path on the
        first process.
        """
        rows = self.ledger.take(iteration)
        name = self._last + 1 if iteration is None else iteration
        if self._directory is None or (iteration is None and not rows and self._ranks.size == 1):
            return None
        return write(self._directory, name, rows, self.ledger, self._ranks)

    def close(self) -> None:
        """Save what is left and take the hooks off the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.save(None)

    def _learning_rate(self) -> float | None:
        """The learning rate, where all parameters have the same."""
        if self._optimizer is None:
            return None
        rates = {float(group["lr"]) for group in self._optimizer.param_groups}
        return rates.pop() if len(rates) == 1 else None

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        coef = self._clip.at_step(
            fused=bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        )
        step = self.ledger.entries[-1].step if self.ledger.entries else None
        for entry in self.ledger.entries:
            if entry.step == step:
                entry.clip_coef = coef
        if self.diary.steps:
            self.diary.steps[-1].clip_coef = coef

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizer_steps += 1
        if self._ranks.size == 1 and self.ledger.entries:
            self.save_finished(self._last + 1)
