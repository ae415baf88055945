"""The ghost engine beside a training loop that must not stop for it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from gradsight.errors import GradsightError
from gradsight.ghost.engine import GhostEngine
from gradsight.store.run_problems import RunProblems
from gradsight.train.batches import Batch

Rows = tuple[Tensor, ...]
"""What the loss function takes: inputs, targets, and the weights of rows where they have some."""


class Scoring:
    """Scores micro-batches where there is an engine; goes on without where it cannot score."""

    def __init__(self, engine: GhostEngine | None, problems: RunProblems) -> None:
        self._engine = engine
        self._problems = problems
        self._step = 0
        self._stopped = False
        """Whether samples can no longer be scored; what was scored before is still saved."""
        self._joined = False
        """Whether the last pass had the validation rows in it, and its step is not over."""

    @contextmanager
    def observe(self, batch: Batch, step: int) -> Iterator[Rows]:
        """Around the one backward pass of a micro-batch; gives the rows that it is to be of."""
        passed = False
        if step != self._step:
            self._end_joined_step()
        self._step = step
        try:
            with ExitStack() as stack:
                rows = batch.for_loss
                if self._engine is not None and not self._stopped:
                    rows = self._enter(stack, self._engine, batch)
                yield rows
                passed = True
        except GradsightError as error:
            # The pass itself broke off: there is no whole gradient to go on with.
            if not passed:
                raise
            self._report("scoring", f"samples are no longer scored, from step {step} on: {error}")
            self._stopped = True

    def _enter(self, stack: ExitStack, engine: GhostEngine, batch: Batch) -> Rows:
        try:
            # Rows with weights of their own have a loss that the protocol does not know.
            if engine.mode != "two_pass" and batch.weights is None:
                return stack.enter_context(self._with_validation_rows(engine, batch))
            stack.enter_context(engine.observe(batch.sample_ids, batch.domains, self._step))
        except (
            GradsightError
        ) as error:  # the target's gradient is not finite: there is no direction to score along
            self._report("scoring", f"step {self._step} is not scored: {error}")
        return batch.for_loss

    @contextmanager
    def _with_validation_rows(self, engine: GhostEngine, batch: Batch) -> Iterator[Rows]:
        """One pass over the training and the validation rows; of the latter no gradient stays."""
        inputs, targets = batch.inputs, batch.targets
        engine.attach_train_batch(inputs, targets, self._step, batch.sample_ids, batch.domains)
        try:
            yield engine.prepare_forward_input(inputs, targets)
        except BaseException:
            engine.abandon()
            raise
        engine.prepare_gradients()
        self._joined = True

    def _end_joined_step(self) -> None:
        if self._joined and self._engine is not None:
            self._joined = False
            self._engine.aggregate_and_log()

    def save(self, step: int) -> None:
        """Write the scores of all steps before this one."""
        if self._engine is not None:
            try:
                self._engine.save(step)
            except (GradsightError, OSError) as error:
                self._report("score-files", f"{error}: scores are lost")

    def close(self) -> None:
        """Write what is left."""
        if self._engine is not None:
            try:
                self._engine.close()
            except (GradsightError, OSError) as error:
                self._report("score-files", f"{error}: scores are lost")

    def _report(self, key: str, text: str) -> None:
        self._problems.report(key, f"{text.rstrip('.')}. Training goes on", self._step)
