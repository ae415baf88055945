"""The ghost engine beside a training loop that must not stop for it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gradsight.errors import GradsightError
from gradsight.ghost.engine import GhostEngine
from gradsight.store.run_problems import RunProblems
from gradsight.train.batches import Batch


class Scoring:
    """Scores micro-batches where there is an engine; goes on without where it cannot score."""

    def __init__(self, engine: GhostEngine | None, problems: RunProblems) -> None:
        self._engine = engine
        self._problems = problems
        self._step = 0

    @contextmanager
    def observe(self, batch: Batch, step: int) -> Iterator[None]:
        """Around the one backward pass of a micro-batch."""
        passed = False
        self._step = step
        try:
            with ExitStack() as stack:
                if self._engine is not None:
                    self._enter(stack, self._engine, batch, step)
                yield
                passed = True
        except GradsightError as error:
            # The pass itself broke off: there is no whole gradient to go on with.
            if not passed:
                raise
            self._report("scoring", f"samples are no longer scored, from step {step} on: {error}")
            self._engine = None

    def _enter(self, stack: ExitStack, engine: GhostEngine, batch: Batch, step: int) -> None:
        try:
            stack.enter_context(engine.observe(batch.sample_ids, batch.domains, step))
        except (
            GradsightError
        ) as error:  # the target's gradient is not finite: there is no direction to score along
            self._report("scoring", f"step {step} is not scored: {error}")

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
