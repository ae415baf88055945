"""The ghost engine: which training samples push which target's loss where, in the training run
itself.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import rundir
from gradsight.core.parameters import unwrapped
from gradsight.core.sharing import Ranks, reshard
from gradsight.errors import GradsightError, GradsightWarning, UsageError
from gradsight.ghost.concat import Concatenation, refuse_concat
from gradsight.ghost.first_block_check import Proof
from gradsight.ghost.gram import Factor
from gradsight.ghost.ledger import Ledger
from gradsight.ghost.observation import Observation, mixes_samples, refuse_mixing
from gradsight.ghost.parameters import Parameters
from gradsight.ghost.passes import ModelCall
from gradsight.ghost.precondition import adam_scales
from gradsight.ghost.prediction_check import Diary, Honesty, Momentum
from gradsight.ghost.protocol import BatchProtocol
from gradsight.ghost.rules.registry import DECLINED
from gradsight.ghost.sample_axis import LayoutMemory
from gradsight.ghost.score_log import Books
from gradsight.ghost.scores import Scores, VerifyReport
from gradsight.ghost.scratch import Scratch
from gradsight.ghost.tangent_sources import Tangents, keep
from gradsight.ghost.targets import LossFn, Staleness, Targets, check_targets
from gradsight.ghost.tracer import Options, Plan, Tracer
from gradsight.ghost.verify import compare

ONLY_TARGET = "validation"


class GhostNotice(GradsightWarning):
    """Said once: which parameters have no fast rule."""


class GhostEngine:
    """Scores every training sample by <direction, its gradient>, the direction being a validation
    target's gradient.

    loss_fn(model, batch) returns the mean loss; val_data is the batch of the only target, or
    targets names several.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        val_data: Any = None,
        *,
        targets: Mapping[str, Any] | None = None,
        optimizer: Optimizer | None = None,
        mode: str = "two_pass",
        refresh_every: int = 1,
        precondition: str | None = None,
        per_parameter: bool = False,
        exact_grad: bool = False,
        self_check: bool = True,
        run_dir: str | Path | None = None,
        save_interval: int = 10,
        batch_dim: int | None = None,
        route: str | None = None,
    ) -> None:
        self._batches = _one_of(val_data, targets)
        _check_options(mode, refresh_every, precondition, optimizer, save_interval, route)
        self.model, self.root, self.loss_fn, self.mode = model, unwrapped(model), loss_fn, mode
        self._ranks = Ranks(model)
        self._parameters = Parameters(self.root)
        if not self._parameters.trainable:
            raise UsageError(
                "the model has no trainable parameter: there is no gradient to score samples by"
            )
        check_targets(self._batches, self._parameters.device)
        if mode == "concat":
            refuse_concat(self.root, self._ranks.size)
        self.staleness: list[Staleness] = []
        """How far each direction had turned when it was refreshed, with refresh_every above 1."""
        self._targets = Targets(model, self.root, loss_fn, self._batches, self._ranks)
        self._optimizer, self._precondition, self._refresh_every = (
            optimizer,
            precondition,
            refresh_every,
        )
        self._per_parameter, self._batch_dim = per_parameter, batch_dim
        self._options = Options(exact_grad, route)
        self._memory, self._scratch = LayoutMemory(batch_dim or 0), Scratch()
        self._proof = Proof(self.root, self._ranks, self._memory, self_check, self._options)
        names = tuple(self._parameters.all) if per_parameter else None
        ledger = Ledger(
            self._targets.names, names, frozenset(self._parameters.trainable), precondition
        )
        directory = None if run_dir is None else Path(run_dir) / rundir.SCORES
        self._books = Books(
            ledger,
            Diary(self._targets.names, Momentum.of(optimizer)),
            self._ranks,
            optimizer,
            directory,
            save_interval,
        )
        self._protocol = BatchProtocol(self)
        self._open: Observation | None = None
        self._concatenation: Concatenation | None = None
        self._scores: Scores | None = None
        self._direction = "plain"
        self._refreshed_at: int | None = None
        self._step = self._samples = 0
        self._noticed: set[str] = set()
        self._closed = False

    @contextmanager
    def observe(
        self,
        sample_ids: Sequence[int | str] | None = None,
        domains: Sequence[str | None] | None = None,
        step: int | None = None,
    ) -> Iterator["GhostEngine"]:
        """Score the samples of the one backward pass inside the block: loss = loss_fn(model,
        batch); loss.backward().

        One block per micro-batch. sample_ids are by default a running number; step is by default
        counted by the optimizer's steps, or by blocks where no optimizer was given.
        """
        if self.mode == "concat":
            raise UsageError(
                "mode='concat' needs training and validation rows in one batch: use attach_train_batch, prepare_forward_input, "
                "prepare_gradients and aggregate_and_log, or mode='two_pass' with observe()"
            )
        ids = (
            None
            if sample_ids is None
            else sample_ids.tolist()
            if isinstance(sample_ids, Tensor)
            else list(sample_ids)
        )
        self.begin(None if ids is None else len(ids), step)
        try:
            yield self
        except BaseException:
            self.abandon()
            raise
        self.end(ids, None if domains is None else list(domains))

    @property
    def scores(self) -> Scores:
        """The scores of the last block."""
        if self._scores is None:
            raise UsageError("there are no scores yet: run a training pass inside observe() first")
        return self._scores

    def honesty(self) -> dict[str, Honesty]:
        """By target: the predicted change of its loss against the measured one, over the observed
        steps.
        """
        return self._books.diary.honesty(self._ranks)

    def verify(self, batch: Any) -> VerifyReport:
        """Score a batch with the engine and with the slow exact twin, dropout off; nothing in the
        model or in .grad changes.
        """
        if self._ranks.sharded:
            raise UsageError(
                "verify() runs the model in one process; under fully_shard the self-check of the first step does it"
            )
        self._parameters = Parameters(self.root)
        if not self._targets.directions:
            self._targets.refresh(self._parameters)

        def watch(before_call: Callable[[ModelCall], None]) -> Observation:
            plan = Plan(keep(self._look_up), self._memory, self._options, factors=self._factors)
            return self._observation(plan, None, before_call)

        return compare(
            self.model, self.root, self.loss_fn, batch, self._targets, self._parameters, watch
        )

    # --- the protocol of loops that build their own forward pass ---

    def attach_train_batch(
        self, X: Any, Y: Any, iteration: int, batch_idx: int | Sequence[int | str] | Tensor
    ) -> None:
        """Announce the batch of an iteration; batch_idx is its number, or its sample ids."""
        self._protocol.attach(X, Y, iteration, batch_idx)

    def prepare_forward_input(self, X: Any, Y: Any) -> tuple[Any, Any]:
        """What to run the model on: the batch itself, or in mode "concat" the batch followed by the
        validation rows.
        """
        return self._protocol.forward_input(X, Y)

    def prepare_gradients(self) -> None:
        """After backward: .grad is the training gradient alone, and the scores are taken."""
        self._protocol.gradients()

    def aggregate_and_log(self) -> None:
        """After the optimizer's step: hand the scores over, save them if they are due, and let go
        of what the step held.
        """
        self._protocol.aggregate()

    def should_save(self, iteration: int) -> bool:
        """Whether a file is due at this iteration."""
        return iteration > 0 and iteration % self._books.save_interval == 0

    def save(self, iteration: int) -> Path | None:
        """Write the scores of all steps before this one that are not saved yet to
        iter_{iteration:06d}.parquet.
        """
        return self._books.save(iteration)

    def close(self) -> None:
        """Save what is left, and leave model and optimizer as they were found."""
        if not self._closed:
            self._closed = True
            self.abandon()
            self._books.close()
            self._targets.directions.clear()
            self._scratch = Scratch()
            self._ranks.close()

    # --- one block, step by step: for observe() and the protocol ---

    def begin(
        self, size: int | None, step: int | None, concatenation: Concatenation | None = None
    ) -> None:
        """Start a block: fresh directions if they are due, then eyes on every operation."""
        if self._closed:
            raise UsageError("this GhostEngine is closed")
        if self._open is not None:
            raise UsageError("an observed block is still open: blocks cannot be nested")
        if self._ranks.sharded:
            reshard(self.model)
        self._parameters = Parameters(self.root)
        self._step = self._books.step(step)
        self._books.begin(self._step)
        self._concatenation = concatenation
        if concatenation is None:
            self._refresh()
        else:
            self._targets.directions.clear()
        look_up = keep(self._look_up)
        plan = Plan(
            look_up,
            self._memory,
            self._options,
            factors=self._factors,
            scratch=self._scratch,
            on_source=look_up if self._ranks.sharded else None,
            on_backward=self._before_backward,
            on_call=_refuse_only if concatenation is None else concatenation.on_call,
        )
        observation = self._observation(plan, size, self._before_call)
        self._proof.start_block(self._parameters, list(self._targets.directions.values()))
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
        observation, self._open = self._open, None
        if observation is None:
            raise UsageError("no observed block is open")
        observation.stop()
        try:
            self._finish(observation, ids, domains)
        finally:
            observation.release()

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
        table = table.view(len(self._targets.names), -1, table.shape[1])
        self._proof.end_block(
            observation, table.sum(1), self._parameters, list(self._targets.directions.values())
        )
        self._notice_slow(observation.tracer.plan)
        batch = table.shape[2]
        ids = list(range(self._samples, self._samples + batch)) if ids is None else ids
        for what, given in (("sample_id", ids), ("domain", domains)):
            if given is not None and len(given) != batch:
                raise UsageError(
                    f"expected one {what} per sample: {batch} samples, got {len(given)} {what}s"
                )
        self._samples += batch
        self._keep(table / self._ranks.size, ids, domains or [None] * batch)
        self._books.look_at_gradients(
            self._parameters, observation.scales[-1] if observation.scales else None
        )

    def finish_step(self, iteration: int) -> None:
        """An iteration of the protocol is over."""
        self._concatenation = None
        self._books.save_finished(iteration + 1)

    def concatenation(self) -> Concatenation:
        """One pass over training and validation rows; the validation data must be pairs (X, Y)."""
        for name, batch in self._batches.items():
            if not (
                isinstance(batch, tuple | list)
                and len(batch) == 2
                and all(isinstance(t, Tensor) for t in batch)
            ):
                raise UsageError(
                    f"mode='concat' needs validation data as a pair (X, Y) of tensors; target {name!r} is "
                    f"{type(batch).__name__}"
                )
        refuse_concat(self.root, self._ranks.size)
        return Concatenation(
            self._targets, {n: (b[0], b[1]) for n, b in self._batches.items()}, self._parameters
        )

    def _observation(
        self, plan: Plan, size: int | None, before_call: Callable[[ModelCall], None]
    ) -> Observation:
        slots = len(self._targets.names) * (
            len(self._parameters.trainable) if self._per_parameter else 1
        )
        tracer = Tracer(plan, self._parameters.name)
        return Observation(
            self.root, self._parameters, tracer, slots, size, self._batch_dim, before_call
        )

    def _before_call(self, call: ModelCall) -> None:
        if self._open is not None:
            self._proof.before_call(call, self._parameters, self._open.tracer)

    def _before_backward(self, loss: Tensor) -> None:
        if self._open is None:
            return
        with torch.enable_grad():
            if self._proof.first and mixes_samples(
                loss, self._open.outputs, self._open.tracer.batch
            ):
                raise GradsightError(
                    "the loss mixes samples: the gradient at one sample's output depends on another sample's output, "
                    "as in contrastive "
                    "losses, so no sample has a gradient of its own. Train without the engine, or use a mean over samples."
                )
            if self._concatenation is not None:
                self._concatenation.on_backward(loss)
        self._open.outputs.clear()

    def _refresh(self) -> None:
        """Compute the directions anew where they are due."""
        at = self._refreshed_at
        if at is not None and at <= self._step < at + self._refresh_every:
            return
        scales = None
        if self._precondition == "adam" and self._optimizer is not None:
            scales = adam_scales(self._optimizer, self._parameters.trainable)
        kind = "plain" if scales is None else self._precondition or "plain"
        turned = self._targets.refresh(self._parameters, scales, compare=self._refresh_every > 1)
        if kind == self._direction:
            self.staleness += [
                Staleness(self._step, name, float(value)) for name, value in turned.items()
            ]
        self._direction, self._refreshed_at = kind, self._step
        self._books.diary.add_losses(
            self._step, [self._targets.losses[name] for name in self._targets.names]
        )

    def _look_up(self, name: str) -> Tangents:
        """A parameter's part of every direction that is known, with the slot that it counts for."""
        found = []
        order = list(self._parameters.trainable) if self._per_parameter else [name]
        for k, target in enumerate(self._targets.names):
            part = self._targets.directions.get(target, {}).get(name)
            if part is not None:
                found.append((k * len(order) + order.index(name), self._ranks.gather_shards(part)))
        return tuple(found)

    def _factors(self, name: str) -> list[list[Factor]] | None:
        """The factors of a parameter's part of each direction, in the order of slots."""
        return (
            None
            if self._per_parameter
            else self._targets.factors.look_up(self._targets.names, name)
        )

    def _keep(self, table: Tensor, ids: list[int | str], domains: list[str | None]) -> None:
        """The block's scores from its table [targets, parameters or 1, B]."""
        names, totals = self._targets.names, table.sum(1)
        by_parameter = {}
        if self._per_parameter:
            by_parameter = {
                t: dict(zip(self._parameters.trainable, table[k], strict=True))
                for k, t in enumerate(names)
            }
        self._books.add(
            self._step,
            ids,
            domains,
            table if self._per_parameter else totals,
            totals,
            self._direction,
        )
        self._scores = Scores(
            self._step, ids, dict(zip(names, totals, strict=True)), by_parameter, self._direction
        )

    def _notice_slow(self, plan: Plan) -> None:
        """Name, once, the parameters that no fast rule covers."""
        new = set(plan.slow) - self._noticed
        if new:
            self._noticed |= new
            names = sorted({parameter for operation in new for parameter in plan.slow[operation]})
            listed = ", ".join(names[:4]) + (
                f" and {len(names) - 4} more" if len(names) > 4 else ""
            )
            text = f"no fast rule for {', '.join(sorted(new))}: the scores of {listed} are exact, but take longer"
            warnings.warn(text, GhostNotice, stacklevel=5)


def _refuse_only(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    refuse_mixing(func, args, kwargs)
    return DECLINED


def _one_of(val_data: Any, targets: Mapping[str, Any] | None) -> dict[str, Any]:
    if (val_data is None) == (targets is None):
        raise UsageError("pass exactly one of val_data (a batch) and targets (batches by name)")
    return {ONLY_TARGET: val_data} if targets is None else dict(targets)


def _check_options(
    mode: str,
    refresh_every: int,
    precondition: str | None,
    optimizer: Optimizer | None,
    save_interval: int,
    route: str | None,
) -> None:
    if mode not in {"two_pass", "concat"}:
        raise UsageError(f"mode must be 'two_pass' or 'concat', got {mode!r}")
    if refresh_every < 1 or save_interval < 1:
        raise UsageError(
            f"refresh_every and save_interval must be 1 or more, got {refresh_every} and {save_interval}"
        )
    if mode == "concat" and refresh_every != 1:
        raise UsageError(
            "refresh_every needs mode='two_pass': with 'concat' the validation rows are in every pass"
        )
    if precondition not in {None, "adam"}:
        raise UsageError(f"precondition must be None or 'adam', got {precondition!r}")
    if precondition == "adam" and optimizer is None:
        raise UsageError(
            "precondition='adam' needs the optimizer, whose second moments it uses: GhostEngine(..., optimizer=optimizer)"
        )
    if precondition == "adam" and mode == "concat":
        raise UsageError("precondition='adam' needs mode='two_pass'")
    if route not in {None, "materialise", "project", "gram"}:
        raise UsageError(f"route must be None, 'materialise', 'project' or 'gram', got {route!r}")
