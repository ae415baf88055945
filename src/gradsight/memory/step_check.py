# mypy: allow-untyped-calls
"""One step plain and one checkpointed, run beside training and compared before anything is applied.

`verify_checkpointing` builds a model for each of its steps; this one has only the user's own, so
whatever a step touches is put back after it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from gradsight.core.beside import step_beside_training
from gradsight.core.random_state import (
    RandomSource,
    as_bytes,
    set_source_state,
    source_state,
    sources_in_code,
)
from gradsight.core.shards import is_sharded
from gradsight.errors import GradsightError
from gradsight.memory.blocks import NamedModule
from gradsight.memory.causes import Evidence, likely_cause
from gradsight.memory.checkpointed import CheckpointedForward, CheckpointingHandle
from gradsight.memory.differences import (
    DivergenceFinder,
    StepDifferences,
    StepSnapshot,
    compare_snapshots,
    fingerprint,
    take_snapshot,
)
from gradsight.memory.given import WrittenInPlace
from gradsight.memory.policy import NONE, Mode
from gradsight.memory.workload import StepFailed, Workload

Chosen = list[tuple[NamedModule, Mode]]
NOTHING = StepDifferences(loss=False, gradients=(), buffers=(), random=())


@dataclass(frozen=True, slots=True)
class StepCheck:
    """The step in question, and what is to be checkpointed in it."""

    workload: Workload
    chosen: Chosen

    def refuse_differences(self) -> None:
        """Run both steps; where they differ, raise an error that names the guilty block."""
        plain = self._step([])
        try:
            differences = compare_snapshots(plain, self._step(self._checkpointed()))
        except WrittenInPlace:
            raise  # it names the block and what to do
        except StepFailed as error:
            cause = error.__cause__ or error
            first_line = str(cause).strip().partition("\n")[0]
            words = f"the checkpointed step raised {type(cause).__name__}: {first_line}"
            raise self._refusal(
                plain, words, Evidence(self._model, NOTHING, error=str(cause))
            ) from error
        if differences:
            raise self._refusal(plain, differences.first(), Evidence(self._model, differences))

    @property
    def _model(self) -> nn.Module:
        return self.workload.model

    def _checkpointed(self) -> Chosen:
        return [(named, mode) for named, mode in self.chosen if mode != NONE]

    def _step(self, checkpointed: Chosen) -> StepSnapshot:
        """What a step leaves, with these blocks checkpointed; nothing of it stays."""
        # A copy: what the step writes to the batch is gone as well.
        workload = replace(self.workload, batch=_copied(self.workload.batch))
        sources = self._sources_in_code()
        with _states_kept(sources), step_beside_training(self._model):
            with CheckpointingHandle(checkpointed):
                loss = workload.loss()
                with StepFailed.said("the backward pass"):
                    _gradients(self._model, loss)
            snapshot = take_snapshot(self._model, loss)
            states = {name: as_bytes(source_state(source)) for name, source in sources.items()}
            return replace(snapshot, random={**snapshot.random, **states})

    def _refusal(self, plain: StepSnapshot, words: str, evidence: Evidence) -> GradsightError:
        """The error for the user, with the block and the likely cause."""
        reproducible = not compare_snapshots(plain, self._step([]))
        module, block = self._guilty(plain, evidence.differences, reproducible)
        evidence = replace(evidence, guilty=module or block, reproducible=reproducible)
        where = ""
        if block is not None:
            kind = type(self._model.get_submodule(block)).__name__
            where = f" The block {block!r} ({kind}) is not the same when it is recomputed."
        return GradsightError(
            f"checkpointing changes this model's step, so none is applied: {words}.{where} "
            f"Likely cause: {likely_cause(evidence)}"
        )

    def _guilty(
        self, plain: StepSnapshot, differences: StepDifferences, reproducible: bool
    ) -> tuple[str | None, str | None]:
        """The module whose recomputation differs, and the block that it lies in."""
        names = [name for (name, _), _ in self._checkpointed()]
        finder = DivergenceFinder([named for named, _ in self._checkpointed()])
        comparer = OutputComparer()
        with comparer.comparing(), finder, suppress(GradsightError):
            self._step(self._checkpointed())
        if comparer.differing:
            block = next(name for name in names if name in comparer.differing)
            inside = finder.guilty is not None and f"{finder.guilty}.".startswith(f"{block}.")
            return (finder.guilty if inside else None), block
        for changed in (*differences.buffers, *differences.random):
            for block in names:
                if changed.startswith(f"{block}."):
                    return None, block
        if not reproducible:
            return None, None
        return None, next((name for name in names if self._differs_alone(name, plain)), None)

    def _differs_alone(self, block: str, plain: StepSnapshot) -> bool:
        """Whether the step differs with this one block checkpointed."""
        alone = [(named, mode) for named, mode in self._checkpointed() if named[0] == block]
        try:
            return bool(compare_snapshots(plain, self._step(alone)))
        except GradsightError:
            return True

    def _sources_in_code(self) -> dict[str, RandomSource]:
        """Generators that the code of the model and the loss reaches by name."""
        found = sources_in_code(self.workload.loss_fn)
        for kind in {type(module) for module in self._model.modules()}:
            found |= sources_in_code(kind.forward)
        return found


class OutputComparer:
    """Compares what every block returns in forward and in recomputation.

    It looks at blocks whole, where no part of theirs need have a hook: randomness in a block's own
    last line is seen as well.
    """

    def __init__(self) -> None:
        self.differing: set[str] = set()
        self._seen: dict[str, set[int]] = {}

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Inside, checkpointed blocks are compared, and recomputed to their end."""
        plain = CheckpointedForward.plain

        def compared(stand_in: CheckpointedForward, *args: Any, **kwargs: Any) -> Any:
            out = plain(stand_in, *args, **kwargs)
            self._look(stand_in.name, fingerprint(out))
            return out

        setattr(CheckpointedForward, "plain", compared)  # noqa: B010
        try:
            with set_checkpoint_early_stop(False):
                yield
        finally:
            setattr(CheckpointedForward, "plain", plain)  # noqa: B010

    def _look(self, block: str, made: int) -> None:
        in_forward = torch._C._current_graph_task_id() == -1
        if in_forward:
            self._seen.setdefault(block, set()).add(made)
        elif made not in self._seen.get(block, ()):
            self.differing.add(block)


def _gradients(model: nn.Module, loss: torch.Tensor) -> None:
    """Fill the parameters' gradients without what others hang on backward."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(is_sharded(parameter) for parameter in trainable):
        loss.backward()  # fully_shard hands gradients over in backward alone
        return
    found = torch.autograd.grad(loss, trainable, allow_unused=True)
    for parameter, gradient in zip(trainable, found, strict=True):
        parameter.grad = gradient


def _copied(batch: Any) -> Any:
    """A copy of the batch, or the batch itself where it cannot be copied."""
    with suppress(Exception):
        return copy.deepcopy(batch)
    return batch


@contextmanager
def _states_kept(sources: dict[str, RandomSource]) -> Iterator[None]:
    """Leave these generators as they were."""
    before = {name: source_state(source) for name, source in sources.items()}
    try:
        yield
    finally:
        for name, source in sources.items():
            set_source_state(source, before[name])
