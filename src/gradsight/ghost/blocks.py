"""One observed block after another: directions, the traced pass, its scores."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.beside import is_compiled
from gradsight.core.function_modes import take_off_ended
from gradsight.core.guard import raise_as_gradsight_error
from gradsight.core.moments import missed_passes
from gradsight.core.problems import say
from gradsight.core.samples import tensors_in
from gradsight.core.sharing import ModelGroup, reshard
from gradsight.errors import GradsightError, GradsightWarning, UsageError
from gradsight.ghost.arguments import NOT_SCORED
from gradsight.ghost.directions import Directions
from gradsight.ghost.first_block_check import FirstBlockCheck, ObservedPass
from gradsight.ghost.joined_calls import JoinedCalls
from gradsight.ghost.observation import Expected, Observation, block_guard
from gradsight.ghost.one_pass import OnePass, OnePassRefusal
from gradsight.ghost.open_pass import LossScales
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.refresh import RefreshSchedule
from gradsight.ghost.refusals import PassGuard
from gradsight.ghost.row_parts import RowParts
from gradsight.ghost.sample_axis import LayoutMemory
from gradsight.ghost.score_log import BlockScores, ScoreLog
from gradsight.ghost.scores import Scores
from gradsight.ghost.scratch import Scratch
from gradsight.ghost.targets import Targets
from gradsight.ghost.tracer import RuleOptions, TraceOptions
from gradsight.measure.host_copy import HostCopy

AT_ONCE = 4
"""Products of one layer that one pass makes at once: its memory is to be that of plain training."""


class GhostNotice(GradsightWarning):
    """Scores are exact but take longer, because there is no fast rule; given once."""


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
        self._scores: Scores | None = None
        self.model = model
        self._group = targets.group
        self._schedule = schedule
        self._log = log
        self._options = options
        self._memory = LayoutMemory(options.batch_dim or 0)
        self._scratch = Scratch()
        self._joined_scratch = Scratch(AT_ONCE)
        self._check = FirstBlockCheck(
            self._group, self._memory, options.rules, enabled=options.self_check
        )
        self.guard = block_guard()
        """Puts back what an open block has changed."""
        self._observation: Observation | None = None
        # An engine that is dropped in mid-pass must not go on to observe the model.
        weakref.finalize(self, self.guard.close).atexit = False
        self._one_pass: OnePass | None = None
        self._step = 0
        self._losses_of = -1
        self._samples = 0
        self._noticed: set[str] = set()
        """Operations without a fast rule that the user knows of."""
        self._noticed_passes = False
        self._noticed_compiled = False
        self._closed = False
        # From the beginning: in scaler.scale(engine.loss(batch)) torch's function is looked up
        # before there is a block.
        self.scales = LossScales(self)

    @property
    def scores(self) -> Scores | None:
        """Those of the last block."""
        return self._scores

    def end_later(self, ids: list[int | str] | None, domains: list[str | None] | None) -> None:
        """Finish a block at the end of the user's own backward, from which a refusal comes."""
        what = NOT_SCORED
        if self._one_pass is not None:
            what += ", and .grad may not be that of training without the engine: clear it"
        try:
            self.end(ids, domains)
        except Exception as error:
            raise_as_gradsight_error(error, what)

    @property
    def group(self) -> ModelGroup:
        """The processes that train the model together."""
        return self._group

    def begin(self, size: int | None, step: int | None) -> Observation:
        """Start a block of two passes: fresh directions if they are due, then the eyes open."""
        self._start(step)
        self._one_pass = None
        if self._schedule.refresh_if_due(self._step, self.parameters):
            losses = [self.targets.losses[name] for name in self.targets.names]
            self._log.history.add_losses(self._step, losses)
        guard = PassGuard(None, judges_loss=self._check.first)
        options = self._trace(self._directions(), guard, None)
        expected = Expected(size, self._options.batch_dim)
        return self._observe(options, expected)

    def begin_joined(
        self, parts: RowParts, step: int | None, *, splits_loss: bool
    ) -> tuple[Observation, OnePass]:
        """Start a block of one pass over joined rows."""
        self._start(step)
        names = None
        if self._options.per_parameter:
            names = tuple(self.parameters.trainable)
        scales = self._schedule.scales_of_pass(self.parameters)
        one_pass = OnePass(parts, self.targets.names, names, scales)
        self._one_pass = one_pass
        self.targets.directions.clear()
        if self._check.first and self._group.size == 1:
            # The first block is compared with directions that were found in passes of their own.
            self._schedule.refresh_now(self.parameters)
        options = self._trace_joined(one_pass, splits_loss)
        expected = Expected(parts.total, self._options.batch_dim)
        return self._observe(options, expected), one_pass

    def rehearsal(self, parts: RowParts, *, splits_loss: bool) -> tuple[Observation, OnePass]:
        """An observation of one pass that is no part of training; the twin is asked in it."""
        self.parameters = self.parameters.renewed()
        one_pass = OnePass(parts, self.targets.names, None)
        options = self._trace_joined(one_pass, splits_loss)
        expected = Expected(parts.total, self._options.batch_dim)
        return Observation(self.parameters, options, expected, self._check), one_pass

    def _trace_joined(self, one_pass: OnePass, splits_loss: bool) -> TraceOptions:
        joined = JoinedCalls(one_pass, splits_loss=splits_loss)
        guard = PassGuard(joined, judges_loss=self._check.first)
        return self._trace(one_pass.directions, guard, one_pass)

    def step_to_come(self, given: int | None) -> int:
        """The step that the next block belongs to."""
        return self._log.step(given)

    def refuse_other_targets(self) -> None:
        """An error unless every process has the same validation rows: one pass shares nothing."""
        if self._group.size == 1:
            return
        sums = torch.stack([fingerprint(batch) for batch in self.targets.batches.values()])
        mean = self._group.sum(sums.clone()) / self._group.size
        differs = float((sums - mean.to(sums)).abs().max() > 1e-9 * (1.0 + sums.abs().max()))
        if float(self._group.sum(torch.tensor(differs))) > 0:
            raise OnePassRefusal(
                "the processes hold different validation rows, of which one pass would take each "
                "process's own for the target: give all of them the same."
            )

    def _start(self, step: int | None) -> None:
        take_off_ended()
        if self._closed:
            raise UsageError("this GhostEngine is closed")
        if self.is_open:
            raise UsageError("an observed block is still open: blocks cannot be nested")
        if missed_passes():
            raise GradsightError(
                "samples cannot be scored in this process any more, because Gradsight failed "
                "during an earlier backward pass: see standard error. Close every engine and every "
                "watch, then make a new engine; or train without one."
            )
        if self._group.sharded:
            # An evaluation before the block may have left it whole.
            reshard(self.model)
        self.parameters = self.parameters.renewed()
        self._step = self._log.step(step)
        self._log.begin(self._step)

    def _trace(
        self, directions: Directions, guard: PassGuard, one_pass: OnePass | None
    ) -> TraceOptions:
        scratch = self._scratch if one_pass is None else self._joined_scratch
        return TraceOptions(
            directions,
            self._memory,
            self._options.rules,
            one_pass,
            guard,
            scratch,
            trusts_shapes=not self._options.self_check,
        )

    def _observe(self, options: TraceOptions, expected: Expected) -> Observation:
        observation = Observation(self.parameters, options, expected, self._check, self.guard)
        self._check.start_block(self.parameters, list(self.targets.directions.values()))
        observation.start()
        self._observation = observation
        return observation

    @property
    def is_open(self) -> bool:
        """Whether a block is being observed."""
        return self._observation is not None and not self._observation.tracer.is_over

    def abandon(self) -> None:
        """Stop a block that failed; nothing is scored."""
        self.guard.close()
        if self._observation is not None:
            self._observation.release()
            self._observation = None
        # What could not be taken away inside of the operation that was refused.
        take_off_ended()

    def end(self, ids: list[int | str] | None, domains: list[str | None] | None) -> None:
        """Finish a block: its scores, as shares of the gradient of the global batch."""
        if not self.is_open:
            raise UsageError("no observed block is open")
        observation = self._observation
        assert observation is not None
        self._observation = None
        self.guard.close()
        try:
            self._finish(observation, ids, domains)
        finally:
            observation.release()

    def finish_step(self, iteration: int) -> None:
        """An iteration of the batch-wise protocol is over."""
        self._log.save_finished(iteration + 1)

    def beside_training(self) -> Observation:
        """An observation of a pass that is no part of training, for verify()."""
        self.parameters = self.parameters.renewed()
        if not self.targets.directions:
            self.targets.refresh(self.parameters)
        options = self._trace(self._directions(), PassGuard(None, judges_loss=False), None)
        expected = Expected(None, self._options.batch_dim)
        return Observation(self.parameters, options, expected, self._check)

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A GradScaler has multiplied a loss."""
        if self._observation is not None and self._observation.scale is None:
            self._observation.loss_scaled(scaler)

    def close(self) -> None:
        """Give up an open block, and let go of directions and memory."""
        self._closed = True
        self.abandon()
        self.targets.directions.clear()
        self._scratch = Scratch()
        self._joined_scratch = Scratch()

    def _directions(self) -> Directions:
        parameters = None
        if self._options.per_parameter:
            parameters = tuple(self.parameters.trainable)
        return Directions(
            self.targets.directions,
            self.targets.names,
            parameters=parameters,
            group=self._group,
        )

    def _finish(
        self,
        observation: Observation,
        ids: list[int | str] | None,
        domains: list[str | None] | None,
    ) -> None:
        table = observation.scores().clone()
        table = table.view(len(self.targets.names), -1, table.shape[1])
        self._judge(ObservedPass(table.sum(1), observation.scale, observation.calls))
        self._memory.forget_unproven()
        self._notice_slow(observation)
        self._notice_compiled()
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

    def _judge(self, observed: ObservedPass) -> None:
        """Refuse scores that cannot be right."""
        directions = list(self.targets.directions.values())
        if self._one_pass is None:
            self._check.end_block(observed, self.parameters, directions)
            return
        try:
            self._check.end_block(observed, self.parameters, directions)
        except OnePassRefusal:
            raise
        except GradsightError as error:
            raise OnePassRefusal(str(error)) from None
        finally:
            self.targets.directions.clear()
        self._take_losses(observed.scores)

    def _take_losses(self, scores: Tensor) -> None:
        """Refuse one pass without a direction; keep its targets' losses."""
        assert self._one_pass is not None
        refuse_no_direction(scores, self.targets.names)
        if self._losses_of != self._step:
            self._losses_of = self._step
            losses = [self._one_pass.losses[name] for name in self.targets.names]
            self._log.history.add_losses(self._step, losses)

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
        mode = "two_pass" if self._one_pass is None else "concat"
        self._scores = Scores(self._step, ids, by_target, by_parameter, kind, mode)

    def _notice_compiled(self) -> None:
        """Warn once if the model is compiled, because Gradsight scores it uncompiled."""
        if self._noticed_compiled or not is_compiled(self.model):
            return
        self._noticed_compiled = True
        say(
            "the compiled model runs eagerly while its samples are scored. The scores are exact; "
            "only speed is lost.",
            stacklevel=6,
        )

    def _notice_slow(self, observation: Observation) -> None:
        """Name, once, what takes longer than it would with fast rules."""
        if observation.passes_by_sample is not None:
            if not self._noticed_passes:
                self._noticed_passes = True
                text = (
                    "samples are scored by one backward pass each, which is exact but slower, "
                    f"because {observation.passes_by_sample}"
                )
                say(text, 6, GhostNotice)
            return
        slow = observation.tracer.slow
        new = set(slow) - self._noticed
        if not new:
            return
        self._noticed |= new
        names = sorted({parameter for operation in new for parameter in slow[operation]})
        listed = ", ".join(names[:4])
        if len(names) > 4:
            listed += f" and {len(names) - 4} more"
        text = (
            f"no fast rule for {', '.join(sorted(new))}: the scores of {listed} are exact, but "
            "take longer"
        )
        say(text, 6, GhostNotice)


def fingerprint(batch: Any) -> Tensor:
    """Numbers by which two validation batches can be told apart: weighted sums of all entries."""
    total = torch.zeros((), dtype=torch.float64)
    for number, tensor in enumerate(tensors_in(batch)):
        values = tensor.detach().to("cpu", torch.float64).reshape(-1)
        places = torch.arange(1, len(values) + 1, dtype=torch.float64)
        total = total + (values * (places + number).sin()).sum()
    return total


def refuse_no_direction(scores: Tensor, targets: Sequence[str]) -> None:
    """An error where no score along a target, [targets, B], is finite: it has no direction."""
    # Read on the CPU alone: elsewhere it would wait for the device, and NaN speaks for itself.
    if scores.device.type != "cpu":
        return
    for target, row in zip(targets, scores, strict=True):
        if len(row) and not bool(torch.isfinite(row).any()):
            raise GradsightError(
                f"the gradient of target {target!r} holds NaN or Inf, or that of every training "
                "sample does, so no sample can be scored along it. Look at the losses; training "
                "itself can go on without the engine."
            )


def _refuse_other_count(what: str, given: Sequence[object], batch: int) -> None:
    if len(given) != batch:
        raise UsageError(
            f"expected one {what} per sample: {batch} samples, got {len(given)} {what}s"
        )
