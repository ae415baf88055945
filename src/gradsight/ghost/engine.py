"""The ghost engine: which training samples push which target's loss where, while training runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core.guard import entry
from gradsight.core.parameters import unwrapped
from gradsight.core.rundir import directory_path, make_run_dir
from gradsight.core.sharing import ModelGroup
from gradsight.core.torch_names import refuse_unknown_torch
from gradsight.errors import GradsightError, UsageError
from gradsight.ghost.arguments import (
    NOT_SCORED,
    check_choice,
    check_loss_fn,
    check_model,
    check_precondition,
    check_switch,
    checked_domains,
    checked_ids,
    checked_optimizer,
    named_targets,
)
from gradsight.ghost.blocks import BlockScorer, GhostNotice, ScoringOptions
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.pass_choice import PassChoice
from gradsight.ghost.prediction_check import (
    CarriedMoment,
    LossHistory,
    Momentum,
    PredictionCheck,
)
from gradsight.ghost.protocol import BatchProtocol
from gradsight.ghost.refresh import RefreshSchedule, Staleness
from gradsight.ghost.score_log import PendingScores, SaveOptions, ScoreLog
from gradsight.ghost.scores import Scores, VerifyReport
from gradsight.ghost.targets import Targets, check_targets
from gradsight.ghost.tracer import RuleOptions
from gradsight.ghost.training_passes import Announced, TrainingPasses
from gradsight.ghost.verify import compare_with_twin
from gradsight.store.scores import ScoreFile
from gradsight.values.whole_numbers import whole_number

__all__ = ["GhostEngine", "GhostNotice"]

Batch = TypeVar("Batch")
"""Whatever the user's loss function takes."""
Inputs = TypeVar("Inputs")
Labels = TypeVar("Labels")


class GhostEngine:
    """Scores every training sample by <direction, its gradient>.

    The direction is the gradient of a validation target's mean loss. A positive score says that the
    sample helps the target: under SGD without clipping its step changes the target's loss by
    -lr * score, to first order.

        engine = GhostEngine(model, loss_fn, val_batch, optimizer=optimizer, run_dir="runs/a")
        for batch in loader:
            with engine.observe():
                loss_fn(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Batch], Tensor],
        val_data: Batch | None = None,
        *,
        targets: Mapping[str, Batch] | None = None,
        optimizer: Optimizer | None = None,
        mode: str = "auto",
        refresh_every: int = 1,
        precondition: str | None = None,
        per_parameter: bool = False,
        exact_grad: bool = False,
        self_check: bool = True,
        run_dir: str | Path | None = None,
        save_interval: int = 10,
        save_format: str = "parquet",
        start_step: int | None = None,
        batch_dim: int | None = None,
        _route: str | None = None,
    ) -> None:
        """Prepare to score the samples that a model is trained on.

        model: the model as it is trained: plain, compiled, under DistributedDataParallel or
            fully_shard.
        loss_fn: loss_fn(model, batch) returns the scalar mean loss of a batch.
        val_data: the batch of the only target, then called "validation". Exactly one of val_data
            and targets is given.
        targets: several validation batches by name; every sample gets a score for each.
        optimizer: the one that trains the model. Its steps number the blocks, its learning rate and
            the clipping before it are saved with the scores. Without it every block is a step.
        mode: "concat" puts the validation rows into the training pass, in `loss` and in the
            batch-wise protocol: one forward and one backward over all rows. "two_pass" computes the
            targets' gradients first, in passes of their own in evaluation mode. "auto" is one pass
            where it can be had and is cheaper, else two, said once with the reason.
        refresh_every: how many steps a direction is used for before it is computed anew. What that
            costs in truth is told by `staleness`.
        precondition: "adam" scales the direction by the optimizer's 1 / (sqrt(v) + eps), through
            which Adam acts on the weights; it needs the optimizer. Before its first step the scores
            are plain, and marked so. None: plain.
        per_parameter: also keep each parameter's part of every score.
        exact_grad: leave .grad bit for bit as plain training has it, a little slower. By default it
            is within 1e-6 (norm-wise, in fp32), because the weight gradient is summed from the
            samples' own.
        self_check: compare the first batch, and each batch with new shapes, with a slow reference
            implementation. If the fast scores are wrong, each sample is scored by its own backward
            pass. False: for models that cannot run on one sample alone.
        run_dir: where scores are saved, as grad_dotprods/iter_*.parquet. None: they are not.
            A directory that holds scores or a record is continued; under a watch on it, steps are
            the watch's.
        save_interval: how many steps go into one file.
        save_format: "pkl" writes a pickle beside each file, with the same columns as a dict of
            numpy arrays, for tools that expect one. Nothing of ours ever opens it.
        start_step: the number of the first step. Scores that were saved for it and for later steps
            are replaced. None: after the last step that run_dir holds, or 0.
        batch_dim: the dimension of the model's inputs that holds the samples, where it cannot be
            told from the shapes.
        """
        refuse_unknown_torch("ghost")
        check_model(model)
        check_loss_fn(loss_fn)
        batches = named_targets(val_data, targets)
        check_choice(mode, "mode", "auto", "concat", "two_pass")
        check_choice(save_format, "save_format", "parquet", "pkl")
        refresh_every = whole_number(refresh_every, "refresh_every", least=1)
        save_interval = whole_number(save_interval, "save_interval", least=1)
        if start_step is not None:
            start_step = whole_number(start_step, "start_step")
        if batch_dim is not None:
            batch_dim = whole_number(batch_dim, "batch_dim")
        check_switch(per_parameter, "per_parameter")
        check_switch(exact_grad, "exact_grad")
        check_switch(self_check, "self_check")
        _check_route(_route)
        self.model = model
        self.root = unwrapped(model)
        self.loss_fn = loss_fn
        self.mode = mode
        self._group = ModelGroup(model)
        parameters = ScoredParameters(self.root)
        optimizer = checked_optimizer(optimizer, parameters.all)
        check_precondition(precondition, optimizer)
        folder = None
        if run_dir is not None:
            folder = directory_path(run_dir, "run_dir")
            _make_on_first_rank(folder, self._group)
        check_targets(batches, parameters.device)
        against = None
        if exact_grad:
            against = "exact_grad=True needs the weight gradient as plain training makes it"
        elif refresh_every > 1:
            against = "refresh_every above 1 uses a direction again, which one pass does not keep"
        elif precondition is not None and self._group.sharded:
            against = "precondition='adam' needs second moments that are spread over processes"
        choice = PassChoice(mode, against)
        self._targets = Targets(model, loss_fn, batches, self._group)
        schedule = RefreshSchedule(self._targets, refresh_every, optimizer, precondition)
        self._schedule = schedule
        names = None
        if per_parameter:
            names = tuple(parameters.all)
        carried = None
        if precondition is not None and optimizer is not None:
            carried = CarriedMoment(self._targets, optimizer, parameters.trainable)
        columns = ScoreFile(names, has_direction=precondition is not None)
        pending = PendingScores(self._targets.names, frozenset(parameters.trainable), columns)
        self._log = ScoreLog(
            pending,
            LossHistory(self._targets.names, Momentum.of(optimizer), carried),
            self._group,
            optimizer,
            SaveOptions(folder, save_interval, start_step, pickles=save_format == "pkl"),
        )
        options = ScoringOptions(
            RuleOptions(exact_grad, _route), per_parameter, self_check, batch_dim
        )
        self._blocks = BlockScorer(model, parameters, self._targets, schedule, self._log, options)
        self._guard = self._blocks.guard
        self._passes = TrainingPasses(self._blocks, loss_fn, choice)
        self._protocol = BatchProtocol(self._blocks, self._passes)
        self._closed = False

    @contextmanager
    def observe(
        self,
        sample_ids: Sequence[int | str] | None = None,
        domains: Sequence[str | None] | None = None,
        step: int | None = None,
    ) -> Iterator["GhostEngine"]:
        """Score the samples of the one backward pass inside the block.

        In it: loss = loss_fn(model, batch); loss.backward(). One block per micro-batch. sample_ids
        are by default a running number; step is by default counted by the optimizer's steps, or by
        blocks where no optimizer was given.
        """
        if self.mode == "concat":
            raise UsageError(
                "mode='concat' needs training and validation rows in one batch, and observe() "
                "sees the training rows alone: use engine.loss(batch), or attach_train_batch, "
                "prepare_forward_input, prepare_gradients and aggregate_and_log, or "
                "mode='two_pass' with observe()"
            )
        given = self._begin(sample_ids, domains, step)
        try:
            yield self
        except BaseException:
            self._guard.attempt(self._blocks.abandon)  # the user's error comes out
            raise
        self._end(*given)

    @entry(NOT_SCORED)
    def _begin(
        self,
        sample_ids: Sequence[int | str] | None,
        domains: Sequence[str | None] | None,
        step: int | None,
    ) -> tuple[list[int | str] | None, list[str | None] | None]:
        """Begin a block; return its sample ids and domains."""
        ids, names, step = _checked(sample_ids, domains, step)
        self._blocks.begin(None if ids is None else len(ids), step)
        return ids, names

    @entry(NOT_SCORED)
    def _end(self, ids: list[int | str] | None, domains: list[str | None] | None) -> None:
        self._blocks.end(ids, domains)

    @entry(NOT_SCORED)
    def loss(
        self,
        batch: object,
        *,
        sample_ids: Sequence[int | str] | None = None,
        domains: Sequence[str | None] | None = None,
        step: int | None = None,
    ) -> Tensor:
        """The loss of a batch, whose backward pass is scored.

        loss = engine.loss(batch); multiply it as you like; loss.backward(): then `scores` is there.
        Its value is that of loss_fn(model, batch), and .grad becomes that of plain training. The
        batch is a tensor, or a tuple, list or dict of tensors, with the samples in dimension 0.
        """
        ids, names, step = _checked(sample_ids, domains, step)
        return self._passes.loss(Announced(batch, ids, names, step))

    @property
    def scores(self) -> Scores:
        """The scores of the last block."""
        scores = self._blocks.scores
        if scores is None:
            raise UsageError("there are no scores yet: run a training pass inside observe() first")
        return scores

    @property
    def staleness(self) -> list[Staleness]:
        """How far each direction had turned when it was refreshed, with refresh_every above 1."""
        return self._schedule.staleness

    @entry("predicted and measured changes cannot be compared")
    def honesty(self) -> dict[str, PredictionCheck]:
        """By target, the predicted change of its loss against the measured one, over all steps."""
        return self._log.history.checks(self._group)

    @entry("the scores cannot be verified")
    def verify(self, batch: object) -> VerifyReport:
        """Score a batch with the engine and with the slow exact twin, dropout off.

        Nothing in the model or in .grad changes. Under fully_shard all processes call it, each with
        a batch of its own.
        """
        observation = self._blocks.beside_training()
        return compare_with_twin(
            self.model, self.loss_fn, batch, self._targets, observation, self._blocks.parameters
        )

    @entry("the open block cannot be given up")
    def abandon(self) -> None:
        """Give up the block that is open, if any; nothing of it is scored."""
        self._blocks.abandon()

    # --- the protocol of loops that build their own forward pass ---

    @entry(NOT_SCORED)
    def attach_train_batch(
        self,
        X: object,
        Y: object,
        iteration: int,
        batch_idx: int | Sequence[int | str] | Tensor,
        domains: Sequence[str | None] | None = None,
    ) -> None:
        """Announce a batch of an iteration; batch_idx is its number, or its sample ids.

        The micro-batches of an iteration are announced one after the other, each when the gradients
        of the one before are prepared.
        """
        self._protocol.attach(X, iteration, batch_idx, domains)

    @entry(NOT_SCORED)
    def prepare_forward_input(self, X: Inputs, Y: Labels) -> tuple[Inputs, Labels]:
        """What to run the model on: the batch, in mode "concat" followed by the validation rows."""
        inputs, labels = self._protocol.forward_input(X, Y)
        return inputs, labels

    @entry(NOT_SCORED)
    def prepare_gradients(self) -> None:
        """After backward: .grad is the training gradient alone, and the scores are taken."""
        self._protocol.gradients()

    @entry(NOT_SCORED)
    def aggregate_and_log(self) -> None:
        """After the optimizer's step: hand the scores over, and save them if they are due."""
        self._protocol.aggregate()

    def should_save(self, iteration: int) -> bool:
        """Whether a file is due at this iteration."""
        number = whole_number(iteration, "iteration")
        return number > 0 and number % self._log.saving.interval == 0

    @entry("the scores cannot be saved")
    def save(self, iteration: int) -> Path | None:
        """Write the unsaved scores of all steps before this one to iter_{iteration:06d}.parquet."""
        return self._log.save(whole_number(iteration, "iteration"))

    @entry("the last scores may be lost; the model and the optimizer are as before")
    def close(self) -> None:
        """Save what is left, and leave model and optimizer as they were found."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:  # in reverse order, whatever fails
            stack.callback(self._group.close)
            stack.callback(self._log.close)
            stack.callback(self._log.guard.close)
            stack.callback(self._blocks.close)
            stack.callback(self._blocks.scales.close)


def _checked(
    sample_ids: object, domains: object, step: object
) -> tuple[list[int | str] | None, list[str | None] | None, int | None]:
    """Return the sample ids, domains and step of a block, as plain values."""
    ids = None
    if sample_ids is not None:
        ids = checked_ids(sample_ids)
    names = None
    if domains is not None:
        names = checked_domains(domains, ids)
    number = None
    if step is not None:
        number = whole_number(step, "step")
    return ids, names, number


def _make_on_first_rank(run_dir: Path, group: ModelGroup) -> None:
    """Make the run directory; where the process that writes cannot, the others say so too."""
    fault: GradsightError | None = None
    if group.is_first:
        try:
            make_run_dir(run_dir)
        except GradsightError as error:
            fault = error
    fault = group.from_first(fault)
    if fault is not None:
        raise fault


def _check_route(route: str | None) -> None:
    """An error for a route that does not exist: benchmarks and tests force one."""
    if route not in {None, "materialise", "project"}:
        raise UsageError(f"route must be None, 'materialise' or 'project', got {route!r}")
