"""One observed block after another: directions, the traced pass, its scores."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradsight.core.sharing import ModelGroup, reshard
from gradsight.errors import GradsightWarning, UsageError
from gradsight.ghost.concat import Concatenation
from gradsight.ghost.directions import Directions
from gradsight.ghost.first_block_check import FirstBlockCheck, ObservedPass
from gradsight.ghost.observation import Expected, Observation
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.refresh import RefreshSchedule
from gradsight.ghost.refusals import PassGuard
from gradsight.ghost.sample_axis import LayoutMemory
from gradsight.ghost.score_log import BlockScores, ScoreLog
from gradsight.ghost.scores import Scores
from gradsight.ghost.scratch import Scratch
from gradsight.ghost.targets import Targets
from gradsight.ghost.tracer import RuleOptions, TraceOptions, Tracer
from gradsight.measure.host_copy import HostCopy


class GhostNotice(GradsightWarning):
    """Said once: which parameters have no fast rule."""


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """How blocks are scored."""

    rules: RuleOptions
    per_parameter: bool
    self_check: bool
    batch_dim: int | None


class BlockScorer:
    """Scores one observed block at a time: `begin`, the user's pass, then `end` or `abandon`."""

    def __init__(
        self,
        model: nn.Module,
        parameters: ScoredParameters,
        targets: Targets,
        schedule: RefreshSchedule,
        log: ScoreLog,
        options: ScoringOptions,
    ) -> None:
        self.parameters = parameters
        self.targets = targets
        self.scores: Scores | None = None
        """Those of the last block."""
        self._model = model
        self._group = targets.group
        self._schedule = schedule
        self._log = log
        self._options = options
        self._memory = LayoutMemory(options.batch_dim or 0)
        self._scratch = Scratch()
        self._check = FirstBlockCheck(
            self._group, self._memory, options.rules, enabled=options.self_check
        )
        self._open: Observation | None = None
        self._concatenation: Concatenation | None = None
        self._step = 0
        self._samples = 0
        self._noticed: set[str] = set()
        self._closed = False

    @property
    def group(self) -> ModelGroup:
        """The processes that train the model together."""
        return self._group

    def begin(
        self, size: int | None, step: int | None, concatenation: Concatenation | None = None
    ) -> None:
        """Start a block: fresh directions if they are due, then every operation is traced."""
        if self._closed:
            raise UsageError("this GhostEngine is closed")
        if self._open is not None:
            raise UsageError("an observed block is still open: blocks cannot be nested")
        if self._group.sharded:
            # An evaluation before the block may have left it whole.
            reshard(self._model)
        self.parameters = ScoredParameters(self.parameters.root)
        self._step = self._log.step(step)
        self._log.begin(self._step)
        self._concatenation = concatenation
        if concatenation is not None:
            self.targets.directions.clear()
        elif self._schedule.refresh_if_due(self._step, self.parameters):
            losses = [self.targets.losses[name] for name in self.targets.names]
            self._log.history.add_losses(self._step, losses)
        options = TraceOptions(
            self._directions(),
            self._memory,
            self._options.rules,
            guard=PassGuard(concatenation, judges_loss=self._check.first),
            scratch=self._scratch,
        )
        expected = Expected(size, self._options.batch_dim)
        observation = Observation(self.parameters, options, expected, self._check)
        self._check.start_block(self.parameters, list(self.targets.directions.values()))
        observation.start()
        self._open = observation

    def abandon(self) -> None:
        """Stop a block that failed; nothing is scored."""
        if self._open is not None:
            self._open.stop()
            self._open.release()
            self._open = None

    def end(self, ids: list[int | str] | None, domains: list[str | None] | None) -> None:
        """Finish a block: its scores, as shares of the gradient of the global batch."""
        observation = self._open
        self._open = None
        if observation is None:
            raise UsageError("no observed block is open")
        observation.stop()
        try:
            self._finish(observation, ids, domains)
        finally:
            observation.release()

    def finish_step(self, iteration: int) -> None:
        """An iteration of the batch-wise protocol is over."""
        self._concatenation = None
        self._log.save_finished(iteration + 1)

    def beside_training(self) -> Observation:
        """An observation of a pass that is no part of training, for verify()."""
        self.parameters = ScoredParameters(self.parameters.root)
        if not self.targets.directions:
            self.targets.refresh(self.parameters)
        options = TraceOptions(self._directions(), self._memory, self._options.rules)
        return Observation(self.parameters, options, Expected(None, self._options.batch_dim))

    def close(self) -> None:
        """Give up an open block, and let go of directions and memory."""
        self._closed = True
        self.abandon()
        self.targets.directions.clear()
        self._scratch = Scratch()

    def _directions(self) -> Directions:
        parameters = None
        if self._options.per_parameter:
            parameters = tuple(self.parameters.trainable)
        return Directions(
            self.targets.directions,
            self.targets.names,
            parameters=parameters,
            group=self._group,
            factors=self.targets.factors,
        )

    def _finish(
        self,
        observation: Observation,
        ids: list[int | str] | None,
        domains: list[str | None] | None,
    ) -> None:
        table = observation.scores().clone()
        if self._concatenation is not None:
            self._concatenation.check_clean(table)
            table = table[:, : self._concatenation.rows]
        table = table.view(len(self.targets.names), -1, table.shape[1])
        observed = ObservedPass(
            table.sum(1), observation.scale, observation.calls, observation.tracer.keys
        )
        self._check.end_block(observed, self.parameters, list(self.targets.directions.values()))
        self._notice_slow(observation.tracer)
        batch = table.shape[2]
        if ids is None:
            ids = self._running_numbers(batch)
        _refuse_other_count("sample_id", ids, batch)
        if domains is None:
            domains = [None] * batch
        _refuse_other_count("domain", domains, batch)
        self._samples += batch
        # The gradient is the mean over the processes, so a sample's share of it is smaller too.
        self._keep(table / self._group.size, ids, domains)
        self._log.look_at_gradients(self.parameters, observation.scale)

    def _running_numbers(self, batch: int) -> list[int | str]:
        """The numbers of samples that have no id of their own, no two alike in the whole run."""
        size = self._group.size
        # Earlier runs count too, and several processes take turns.
        first = self._log.samples_before + self._samples * size + self._group.rank
        return [first + row * size for row in range(batch)]

    def _keep(self, table: Tensor, ids: list[int | str], domains: list[str | None]) -> None:
        """Keep the block's scores, a table [targets, parameters or 1, B]."""
        targets = self.targets.names
        totals = table.sum(1)
        kind = self._schedule.kind
        by_parameter = {}
        if self._options.per_parameter:
            for target, parts in zip(targets, table, strict=True):
                by_parameter[target] = dict(zip(self.parameters.trainable, parts, strict=True))
        else:
            table = totals
        kept = HostCopy.of(table.detach().clone())
        self._log.add(BlockScores(self._step, ids, domains, kept, kind), totals)
        by_target = dict(zip(targets, totals, strict=True))
        self.scores = Scores(self._step, ids, by_target, by_parameter, kind)

    def _notice_slow(self, tracer: Tracer) -> None:
        """Name, once, the parameters that no fast rule covers."""
        new = set(tracer.slow) - self._noticed
        if not new:
            return
        self._noticed |= new
        names = sorted({parameter for operation in new for parameter in tracer.slow[operation]})
        listed = ", ".join(names[:4])
        if len(names) > 4:
            listed += f" and {len(names) - 4} more"
        text = (
            f"no fast rule for {', '.join(sorted(new))}: the scores of {listed} are exact, but "
            "take longer"
        )
        warnings.warn(text, GhostNotice, stacklevel=5)


def _refuse_other_count(what: str, given: Sequence[object], batch: int) -> None:
    if len(given) != batch:
        raise UsageError(
            f"expected one {what} per sample: {batch} samples, got {len(given)} {what}s"
        )
