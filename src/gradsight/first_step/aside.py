"""The passes beside training that a first step is judged by; everything is left as it was found."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradsight.core.beside import (
    copied_arguments,
    replaying,
    why_noticed,
    without_collectives,
    writes_undone,
)
from gradsight.core.calls import RecordedCall
from gradsight.core.devices import accelerators
from gradsight.core.guard import Guard
from gradsight.core.samples import find_samples, tensors_in, with_rows
from gradsight.core.shards import is_sharded
from gradsight.core.sharing import is_fully_sharded
from gradsight.core.source import owner_of
from gradsight.errors import in_one_line
from gradsight.first_step.culprit import Mixing
from gradsight.first_step.dependence import depends_on_input, is_input
from gradsight.first_step.documents import documents_of, is_positions, named_arguments
from gradsight.first_step.layout import by_position, by_row, is_graph, sure_rows
from gradsight.first_step.leaks import (
    SEES,
    Traced,
    across_documents,
    across_rows,
    copied_targets,
    look_ahead,
)
from gradsight.first_step.operations import Operations, Probe, SeenTargets
from gradsight.first_step.recorder import SeenPass
from gradsight.first_step.targets import Placement, find_placements
from gradsight.values.first_step import FirstStep, Leak

_PASSES = 8
"""Backward passes that look for later positions."""
_SMALL_ROWS = 2
_FEWEST_ROWS = 8
"""Rows of a batch whose step takes more memory than a pass on two of them, on an accelerator."""
_SMALL_PASSES = 2
_SEED = 5
_REST = ("GS602", "GS603", "GS607")
ASIDE_CODES = ("GS601", "GS602", "GS603", "GS604", "GS607")
"""What only a pass of ours can tell."""
_NO_TARGETS = (
    "the loss is not computed by a loss function of torch.nn.functional, so Gradsight does not "
    "know the target of each position"
)


@dataclass(frozen=True, slots=True)
class AsideOptions:
    """How much may be done beside training."""

    seconds: float | None = None
    """At most so long; None: as long as it takes, on the whole batch, with weights that are zero
    made random. Else two rows, and the weights as they are."""

    @property
    def is_small(self) -> bool:
        """Whether a run is to go on as if nothing had happened."""
        return self.seconds is not None


class _TooLong(Exception):
    """There is no more time."""


class _TooLarge(Exception):
    """It might take more of a device's memory than the step did; its text is the reason."""


def look_aside(
    module: nn.Module, call: RecordedCall, seen: SeenPass, options: AsideOptions
) -> FirstStep:
    """Run a call of a module again, and see what its outputs depend on."""
    reason = _cannot_run(module) or why_noticed(module)
    if reason is not None:
        return left_out(reason)
    try:
        return _Look(module, call, seen, options).look()
    except _TooLong:
        return left_out("it would take longer than a step")
    except _TooLarge as error:
        return left_out(str(error))
    except Exception as error:
        if not any(owner_of(each.filename) == "torch" for each in extract_tb(error.__traceback__)):
            raise  # a fault of ours, which the guard tells
        # The user's model, called in another way than it is used to.
        return left_out(f"the model cannot be run again: {in_one_line(error)}")


def left_out(reason: str, codes: Sequence[str] = ASIDE_CODES) -> FirstStep:
    """What is known where nothing could be run aside."""
    return FirstStep(left_out=tuple((code, reason) for code in codes))


def _cannot_run(module: nn.Module) -> str | None:
    if any(is_sharded(parameter) for parameter in module.parameters()):
        how = "FSDP2" if is_fully_sharded(module) else "tensor parallelism"
        return f"parameters are sharded over ranks ({how}): an extra pass would need all ranks"
    kinds = {type(each).__name__ for each in module.modules()}
    if kinds & {"FullyShardedDataParallel", "DataParallel"}:
        return "the model is wrapped in what cannot be called by one rank alone"
    if any(parameter.is_meta for parameter in module.parameters()):
        return "parameters have no values"
    return None


class _Look:
    """One look at one call."""

    def __init__(
        self, module: nn.Module, call: RecordedCall, seen: SeenPass, options: AsideOptions
    ) -> None:
        self._module = module
        self._call = call
        self._seen = seen
        self._options = options
        self._ends = perf_counter() + (options.seconds or 1e9)
        self._generator = torch.Generator().manual_seed(_SEED)
        self._guard = Guard(None, "preflight", "an operation could not be examined")
        self._seen_so_far = FirstStep()

    def look(self) -> FirstStep:
        call = self._fewer_rows() if self._options.is_small else self._call
        with ExitStack() as stack:
            stack.enter_context(replaying(self._module, call))
            stack.enter_context(writes_undone())
            stack.enter_context(without_collectives())
            stack.enter_context(_statistics_fixed(self._module))
            if not self._options.is_small:
                stack.enter_context(_nothing_zero(self._module, self._generator))
            args, kwargs, inputs = _probed(call)
            operations = Operations(self._guard, probing=True)
            mixing = Mixing(self._guard)
            with mixing, operations:
                output = self._module(*args, **kwargs)
            self._check_time()
            probes = [*inputs, *operations.probes]
            outputs = with_rows(tensors_in(output), operations.scores)
            if not outputs and any(each.requires_grad for each in tensors_in(output)):
                return left_out(
                    "the model returns only single numbers, such as its loss, and Gradsight saw no "
                    "call of a torch loss function with logits inside it"
                )
            if not outputs:
                return left_out("the model gives nothing that a gradient could come back to")
            placements = self._placements(self._seen.looked_up, self._seen.targets)
            if not placements:
                placements = self._placements(operations.looked_up, operations.targets)
            looked_up = (*self._seen.looked_up, *operations.looked_up)
            is_sequence = any(each.dim() == 2 and each.shape[1] > 1 for each in looked_up)
            if is_sequence and not self._seen.targets and not operations.targets:
                self._seen_so_far = left_out(_NO_TARGETS, ("GS601", "GS604"))
            try:
                self._judge(call, operations, probes, outputs, placements)
            except _TooLong:
                return self._with_culprit(mixing)
            rest = self._dependence(call, operations, probes, outputs)
            return replace(self._with_culprit(mixing), **rest)

    def _with_culprit(self, mixing: Mixing) -> FirstStep:
        """What was seen so far, with what lets positions see later ones if any do."""
        positions = self._seen_so_far.positions
        if positions is None or positions.ratio <= SEES:
            return self._seen_so_far
        culprit = mixing.culprit(self._module)
        return replace(self._seen_so_far, positions=replace(positions, culprit=culprit))

    def _check_time(self, left: Sequence[str] = ASIDE_CODES) -> None:
        """Stop where time is up; `left` is what then stays unknown."""
        if perf_counter() > self._ends:
            missing = left_out("it would take longer than a step", left).left_out
            self._seen_so_far = replace(self._seen_so_far, left_out=missing)
            raise _TooLong

    def _fewer_rows(self) -> RecordedCall:
        """The same call with its first two rows."""
        call = self._call
        given = [each for each in tensors_in(*call.args, *call.kwargs.values()) if each.dim()]
        is_on_accelerator = bool(accelerators(self._module.parameters()))
        # Nodes of a graph are no rows that could be left out. (Square masks are usual elsewhere.)
        is_dense = len(_dense(given)) == len(given)
        if not is_dense or (
            given and given[0].is_floating_point() and is_graph(self._module, given)
        ):
            if is_on_accelerator:
                raise _TooLarge("a graph or a sparse input might not fit in memory twice")
            return call
        found = find_samples(call.args, call.kwargs, None, None, self._module)
        # Beside two rows the gradients and the optimizer's state are held: together that can be
        # more than the step of a batch of a few rows had needed.
        if found.batch < _FEWEST_ROWS and is_on_accelerator:
            raise _TooLarge(
                f"with fewer than {_FEWEST_ROWS} rows in a batch, an extra pass may need more "
                "memory than the step itself"
            )
        if found.batch <= _SMALL_ROWS:
            return call
        flat = list(found.flat)
        for position, dim in found.dims.items():
            share = flat[position].shape[dim] // found.batch
            flat[position] = flat[position].narrow(dim, 0, share * _SMALL_ROWS)
        args, kwargs = replace(found, flat=flat).whole()
        return replace(call, args=args, kwargs=kwargs)

    def _placements(
        self, looked_up: Sequence[Tensor], targets: Sequence[SeenTargets]
    ) -> list[Placement]:
        """For each input that the targets are found in: how they lie to it."""
        found = _placed_in(looked_up, targets)
        if not found:
            given = _dense(tensors_in(*self._call.args, *self._call.kwargs.values()))
            series = [each for each in given if each.is_floating_point() and each.dim() in (2, 3)]
            found = _placed_in([each.detach() for each in series], targets)
        return found

    # What the gradients say.

    def _judge(
        self,
        call: RecordedCall,
        operations: Operations,
        probes: Sequence[Probe],
        outputs: Sequence[Tensor],
        placements: Sequence[Placement],
    ) -> None:
        self._judge_positions(call, probes, outputs, placements)
        self._check_time(_REST)
        documents = self._documents(call, operations, probes, outputs)
        self._seen_so_far = replace(self._seen_so_far, documents=documents)
        self._check_time(("GS602", "GS607"))
        rows = self._rows(call, operations, probes, outputs, placements)
        self._seen_so_far = replace(self._seen_so_far, rows=rows)
        self._check_time(("GS607",))

    def _judge_positions(
        self,
        call: RecordedCall,
        probes: Sequence[Probe],
        outputs: Sequence[Tensor],
        placements: Sequence[Placement],
    ) -> None:
        """Whether outputs see their targets, in any of the inputs that contain these."""
        leaks = []
        for placement in placements:
            if placement.ahead:
                leak = self._look_ahead(call, probes, outputs, placement)
                if leak is not None:
                    leaks.append(leak)
        # A decoder that is given the targets moved by one, and sees no later one, is as it should
        # be. If the targets are in another input too, they are there on purpose: to be encoded.
        best = min(leaks, key=lambda leak: leak.ratio, default=None)
        self._seen_so_far = replace(self._seen_so_far, positions=best)
        if best is not None and best.ratio <= SEES:
            return
        for placement in placements:
            if placement.ahead or placement.source.is_floating_point():
                continue
            traced = next(iter(self._traced(call, probes, outputs, placement)), None)
            if traced is None:
                continue
            copied = copied_targets(traced, placement.share, self._generator)
            has_other = _has_other_input(self._module, self._call, placement.source)
            copied = replace(copied, has_other_input=has_other, time_first=placement.time_first)
            # Where both orders of rows and time fit, the causal one is right.
            self._seen_so_far = replace(self._seen_so_far, copied=copied)
            if copied.is_causal and copied.sees_itself:
                # That is the fault; the inputs that contain the target a place later are not.
                self._seen_so_far = replace(self._seen_so_far, positions=None)
                return

    def _look_ahead(
        self,
        call: RecordedCall,
        probes: Sequence[Probe],
        outputs: Sequence[Tensor],
        placement: Placement,
    ) -> Leak | None:
        """Look for later positions; an output of unclear shape is read in every way that it fits.

        Where classes, rows and positions are equally many, a wrong reading finds classes or rows
        that see later positions. The right one has the smallest gradient there.
        """
        passes = _SMALL_PASSES if self._options.is_small else _PASSES
        best: Leak | None = None
        for traced in self._traced(call, probes, outputs, placement):
            leak = look_ahead(traced, placement.ahead, passes, self._generator)
            if leak is not None and (best is None or leak.ratio < best.ratio):
                best = leak
            if best is not None and best.ratio <= SEES:
                return best
        return best

    def _traced(
        self,
        call: RecordedCall,
        probes: Sequence[Probe],
        outputs: Sequence[Tensor],
        placement: Placement,
    ) -> Iterator[Traced]:
        """The output by positions, in each way that it fits, with the probes at its targets."""
        source = placement.source
        chosen = []
        for probe in probes:
            given = probe.source
            if given.dim() < 2:
                continue
            part = source
            if self._options.is_small and given.shape != source.shape:
                # The selected rows may be positions, because both dimensions look alike.
                part = source[: given.shape[0], : given.shape[1]]
            if given.shape == part.shape and torch.equal(given, part):
                chosen.append(probe.zeros)
        if not chosen:
            return
        lengths = chosen[0].shape[:2]
        rows, length = reversed(lengths) if placement.time_first else lengths
        for output in outputs:
            layouts = by_position(output, rows, length, placement.time_first)
            for placed in layouts:
                counts = placement.counts[:rows, : placed.shape[1]]
                counts = counts & _not_padding(call, counts)
                yield Traced(placed, counts, tuple(chosen), placement.time_first)
            if layouts:
                return

    def _documents(
        self,
        call: RecordedCall,
        operations: Operations,
        probes: Sequence[Probe],
        outputs: Sequence[Tensor],
    ) -> Leak | None:
        named = named_arguments(self._module, call)
        documents = documents_of(named, operations.looked_up)
        if documents is None:
            return None
        rows, length = documents.shape
        chosen = [
            probe.zeros
            for probe in probes
            if probe.zeros.shape[:2] == documents.shape and not is_positions(probe.source, named)
        ]
        for output in outputs:
            layouts = by_position(output, rows, length, False)
            if layouts and chosen:
                counts = torch.ones(rows, layouts[0].shape[1], dtype=torch.bool)
                traced = Traced(layouts[0], counts, tuple(chosen))
                return across_documents(traced, documents, self._generator)
        return None

    def _rows(
        self,
        call: RecordedCall,
        operations: Operations,
        probes: Sequence[Probe],
        outputs: Sequence[Tensor],
        placements: Sequence[Placement],
    ) -> Leak | None:
        if _mixes_by_design(self._module):
            return None
        given = tensors_in(*call.args, *call.kwargs.values())
        inputs = [each for each in given if each.dim()]
        targets = [*self._seen.targets, *operations.targets]
        if placements:
            # More than one placement of an input: either dimension may be the rows.
            found = [
                across_rows([each.output], each.probes, self._generator, each.time_first)
                for placement in placements
                if placement.source is placements[0].source
                for each in self._traced(call, probes, outputs, placement)
                if each.output.shape[0] > 1
            ]
            # As for positions: the right reading is the one that shows least.
            return min((leak for leak in found if leak), key=lambda leak: leak.ratio, default=None)
        rows = self._rows_of(inputs, targets)
        if rows is None:
            return None
        placed = [by_row(output, rows, targets) for output in outputs]
        own = [each for each in placed if each is not None]
        chosen = [probe.zeros for probe in probes if probe.zeros.shape[:1] == (rows,)]
        if not own or not chosen:
            return None
        return across_rows(own, chosen, self._generator)

    def _rows_of(self, inputs: Sequence[Tensor], targets: Sequence[SeenTargets]) -> int | None:
        whole = tensors_in(*self._call.args, *self._call.kwargs.values())
        rows = sure_rows(self._module, [each for each in whole if each.dim()], targets)
        if rows is None or not self._options.is_small:
            return rows
        return min(rows, inputs[0].shape[0])

    def _dependence(
        self,
        call: RecordedCall,
        operations: Operations,
        probes: Sequence[Probe],
        outputs: Sequence[Tensor],
    ) -> dict[str, Any]:
        zeros = [probe.zeros for probe in probes]
        targets = [each.values for each in (*self._seen.targets, *operations.targets)]
        found = depends_on_input(self._module, call, outputs, zeros, targets)
        known = {"depends": found.depends, "independence": found.why_not}
        return {**known, "dead_layer": found.dead_layer}


def _probed(call: RecordedCall) -> tuple[tuple[Any, ...], dict[str, Any], list[Probe]]:
    """Copies of the arguments; to those that are real numbers, zeros are added."""
    probes: list[Probe] = []

    def probe(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if value.layout is not torch.strided:
            return value
        zeros = torch.zeros_like(value, requires_grad=True)
        probes.append(Probe(zeros, value.detach()))
        return value.detach() + zeros

    leaves, structure = tree_flatten(copied_arguments(call))
    # Not by torch's tree_map: a fault in `probe` would be taken for one of the model.
    args, kwargs = tree_unflatten([probe(leaf) for leaf in leaves], structure)
    return args, kwargs, probes


def _placed_in(sources: Sequence[Tensor], targets: Sequence[SeenTargets]) -> list[Placement]:
    distinct: list[Tensor] = []
    for source in sources:
        if not any(each.shape == source.shape and torch.equal(each, source) for each in distinct):
            distinct.append(source)
    return [found for source in distinct for found in find_placements(source, targets)]


def _has_other_input(module: nn.Module, call: RecordedCall, source: Tensor) -> bool:
    """Whether the model is given another input beside the one that is its target."""
    named = named_arguments(module, call)
    given = _dense(tensors_in(*(value for name, value in named.items() if is_input(name))))
    return any(
        each.dim() >= 2
        and each.shape[0] > 1
        and not (each.shape == source.shape and torch.equal(each, source))
        for each in given
    )


def _dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each for each in tensors if each.layout is torch.strided]


def _not_padding(call: RecordedCall, counts: Tensor) -> Tensor:
    """Which positions are no padding: queries of padding may see anything, and nobody uses them."""
    mask = call.kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != counts.shape[0]:
        return torch.ones_like(counts)
    if mask.shape[1] < counts.shape[1]:
        return torch.ones_like(counts)
    return (mask[:, : counts.shape[1]] > 0).to(counts.device)


def _mixes_by_design(module: nn.Module) -> bool:
    """Whether a layer compares rows on purpose: named for batches, or without kept statistics."""
    for each in module.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            if not each.track_running_stats:
                return True
        elif "batch" in type(each).__name__.lower():
            return True
    return False


@contextmanager
def _statistics_fixed(root: nn.Module) -> Iterator[None]:
    """BatchNorm uses what it has kept: rows see each other through it on purpose."""
    norms = [each for each in root.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.training = False  # put back by whoever runs a pass beside training
    yield


@contextmanager
def _nothing_zero(root: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Weights that start at zero are random in here: what they will let through is seen now."""
    for parameter in root.parameters():
        if parameter.is_floating_point() and parameter.numel() and not bool(parameter.any()):
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            # Other memory, which is taken away again behind the pass.
            parameter.data = noise.to(parameter.data)
    yield
