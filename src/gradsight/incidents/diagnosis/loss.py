"""A fault outside the model: between its outputs and backward(), where no call can be run again."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gradsight.core.calls import CallNumber, RecordedCall
from gradsight.core.samples import tensors_in
from gradsight.incidents.diagnosis.finder import forward_name
from gradsight.incidents.diagnosis.numbers import nonfinite_in, summary
from gradsight.incidents.diagnosis.places import source_of
from gradsight.incidents.kept_calls import BackwardGraph
from gradsight.incidents.loss_lines import nodes_since
from gradsight.incidents.loss_values import LossValues, function_of
from gradsight.values.diagnoses import BROKEN_OPERAND, GuiltyOperation, TensorSummary
from gradsight.values.wording import short_place

RISKY = frozenset(
    {
        "log", "log2", "log10", "log1p", "xlogy", "div", "reciprocal", "sqrt", "rsqrt", "pow",
        "exp", "expm1", "norm", "linalg_vector_norm", "acos", "asin", "atan2", "acosh", "atanh",
        "tan", "lgamma", "cdist", "logsumexp", "prod", "std", "var", "erfinv", "ctc_loss",
    }
)  # fmt: skip
"""Operations that make something non-finite out of finite numbers, or whose derivative does."""
STEEP = frozenset(
    {
        "sqrt", "pow", "norm", "linalg_vector_norm", "std", "var", "acos", "asin", "atan2",
        "cdist", "prod",
    }
)  # fmt: skip
"""Those of them that are finite where their derivative is not."""
OPEN = frozenset(
    {
        "mul", "add", "sub", "rsub", "div", "where", "mm", "bmm", "addcmul", "addcdiv", "lerp",
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "soft_margin_loss", "maximum", "minimum",
    }
)  # fmt: skip
"""Operations that carry on what is not finite in another operand: NaN labels, for example."""
_MOST_NODES = 10_000


@dataclass(frozen=True, slots=True)
class Guess:
    """The operation of the loss that is blamed, and how surely."""

    operation: str
    detail: str
    inputs: tuple[TensorSummary, ...] = ()
    nodes: tuple[Any, ...] = ()
    """The autograd nodes that it may be."""


def fault_in_loss(
    call: RecordedCall,
    outputs: Sequence[Tensor],
    others: Sequence[RecordedCall],
    loss_root: Tensor | None,
) -> GuiltyOperation:
    """The guilty operation between the model's outputs and backward, as far as it can be told.

    To be asked where the outputs are finite and the gradients at them are not.
    """
    root = loss_root if call.loss_root is None else call.loss_root
    guess = _guess(call, outputs, others, root)
    place = _place_of(guess, call)
    inputs = guess.inputs
    if not inputs:
        pairs = zip(outputs, call.output_gradients or (), strict=True)
        inputs = tuple(summary(y) for y, c in pairs if c is not None and nonfinite_in(c))
    number = call.number or CallNumber(0)
    return GuiltyOperation(
        guess.operation,
        "loss",
        None,
        place,
        source_of(place),
        inputs,
        number.micro_batch,
        guess.detail,
        call=number.named_call,
        calls=number.calls,
    )


def fault_in_graph(
    graph: BackwardGraph, outputs: Collection[tuple[str, tuple[int, ...]]] = ()
) -> GuiltyOperation | None:
    """Return the operation that broke a loss, or None if unsure.

    outputs: the kinds of the outputs of the model's calls in that step, all of which are finite.
    """
    if graph.values is None:
        return None
    stops = _sources_like(graph.nodes, outputs)
    fault = _first_fault(graph.nodes, stops, graph.values)
    if fault is None:
        return None
    node, why, given = fault
    place = graph.lines.get(node, graph.backward_caller)
    inputs = () if given is None else (given,)
    phase = "loss" if outputs else "forward"
    return GuiltyOperation(_name(node), phase, None, place, source_of(place), inputs, 0, why)


def _sources_like(
    nodes: Sequence[Any], outputs: Collection[tuple[str, tuple[int, ...]]]
) -> set[Any]:
    """The nodes from before these that made tensors like the outputs of the model."""
    own = set(nodes)
    return {
        source
        for node in nodes
        for source, place in node.next_functions
        if source is not None
        and source not in own
        and not source.name().endswith("AccumulateGrad")
        and (source.name(), tuple(source._input_metadata[place].shape)) in outputs
    }


def _guess(
    call: RecordedCall,
    outputs: Sequence[Tensor],
    others: Sequence[RecordedCall],
    loss_root: Tensor | None,
) -> Guess:
    """The operation that is sure, else the likely ones, else only that it is the loss."""
    where = _told_of_outputs(outputs)
    stops = [node for node in call.output_nodes or () if node is not None]
    if loss_root is None or not stops:
        return Guess("loss", where)
    inside = _output_nodes(others)
    ends = _ends(loss_root, others)
    nodes = list(dict.fromkeys(n for end in ends for n in _between(end, stops, inside)))
    if not nodes:
        return Guess("loss", where)
    state = nonfinite_in(loss_root)
    if state:
        where += f"; the loss is {state}"
    else:
        where += "; the loss is finite, so the fault is in a derivative"
    weights = [each for each in map(_broken_parameter, nodes) if each is not None]
    if weights:
        told = f"it goes through another model, whose weights are not finite; {where}"
        return Guess("loss", told, tuple(map(summary, weights[:1])), tuple(nodes))
    values = call.loss_values
    fault = None if values is None or not state else _first_fault(nodes, stops, values)
    if fault is not None:
        node, why, given = fault
        inputs = () if given is None else (given,)
        return Guess(_name(node), f"{why}; {where}", inputs, (node,))
    for node, value in _again(nodes, call.output_nodes or (), outputs):
        if _breaks(function_of(node), value):
            return Guess(_name(node), where, (summary(value),), (node,))
    suspects = _suspects(nodes, call, state)
    if state and values is not None:
        suspects = [node for node in suspects if values.states.get(node) != ""]
    likely = list(dict.fromkeys(_name(node) for node in suspects))
    if len(likely) == 1:
        sure = f"likely: no other operation of the loss can do it; {where}"
        if not any(map(_is_risky, suspects)):
            sure += f"; {_operand_of(likely[0])}"
        return Guess(likely[0], sure, nodes=tuple(suspects))
    if likely:
        where += f"; likely {' or '.join(_with_lines(suspects, call))}"
    return Guess("loss", where, nodes=tuple(suspects or nodes))


def _first_fault(
    nodes: Sequence[Any], stops: Collection[Any], values: LossValues
) -> tuple[Any, str, TensorSummary | None] | None:
    """Return the first operation with a non-finite result: its node, the reason, its input.

    `stops` are the nodes of the model's outputs, which are finite.
    """
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        name = _name(node)
        if node in values.elsewhere:
            why = _operand_of(name)
            return node, why, values.elsewhere[node]
        if node in values.zero_divisors:
            return node, "it divides by 0", values.zero_divisors[node]
        state = values.states.get(node)
        sources = [source for source, _ in node.next_functions if source is not None]
        if not state or not all(x in stops or _is_finite(x, values) for x in sources):
            continue
        if state == "nan" and _is_open(node) and not _is_risky(node):
            why = _operand_of(name)
        else:
            why = f"it makes {'NaN' if state == 'nan' else 'an infinity'} out of finite numbers"
        return node, why, values.inputs.get(node)
    return None


def fault_beside_outputs(
    calls: Sequence[RecordedCall], loss_root: Tensor | None
) -> GuiltyOperation | None:
    """Return the operation that broke the gradient of a finite loss without using an output.

    A gradient penalty, for example, reaches the parameters without the model's outputs.
    """
    for call in calls:
        root = loss_root if call.loss_root is None else call.loss_root
        lines = call.loss_lines or {}
        if root is None or not lines or nonfinite_in(root):
            continue
        steep = [node for node in lines if _name(node) in STEEP and _is_risky(node)]
        names = {_name(node) for node in steep}
        place = _range([lines[node] for node in steep])
        if len(names) == 1 and place is not None:
            number = call.number or CallNumber(0)
            detail = (
                "likely: no other operation of the loss has such a derivative; when the step is "
                "run again, the outputs of the model and the loss are finite"
            )
            return GuiltyOperation(
                names.pop(), "loss", None, place, source_of(place), (), number.micro_batch, detail
            )
    return None


def only_steep_operation(loss_root: Tensor | None) -> GuiltyOperation | None:
    """Return the only operation below a finite loss whose derivative can be infinite.

    None if there are several or none. Nothing is known of the calls of the model, so that the
    operation may lie in one of them.
    """
    if loss_root is None or nonfinite_in(loss_root):
        return None
    nodes = nodes_since(loss_root, 0)
    risky = [node for node in nodes if _is_risky(node)]
    names = {_name(node) for node in risky}
    if len(names) != 1 or not names <= STEEP or len(nodes) >= _MOST_NODES:
        return None
    detail = (
        "likely: the loss is finite, and no other operation has a derivative that can be infinite"
    )
    return GuiltyOperation(names.pop(), "backward", None, None, None, (), 0, detail)


def _broken_parameter(node: Any) -> Tensor | None:
    """The parameter that a node adds a gradient to, if it is not finite."""
    if not node.name().endswith("AccumulateGrad") or not nonfinite_in(node.variable):
        return None
    variable: Tensor = node.variable
    return variable


def _is_finite(source: Any, values: LossValues) -> bool:
    if source.name().endswith("AccumulateGrad"):
        return not nonfinite_in(source.variable)
    return values.states.get(source) == ""


def _suspects(nodes: Sequence[Any], call: RecordedCall, state: str) -> list[Any]:
    """The nodes that may have done it, in the order of their making."""
    ordered = list(reversed(nodes))
    risky = [node for node in ordered if _is_risky(node)]
    if not state:  # what is infinite itself would have shown in the loss
        own = [node for node in risky if isinstance(node, BackwardCFunction)]
        steep = [node for node in risky if _name(node) in STEEP]
        return own + steep or risky
    gradients = [each for each in call.output_gradients or () if each is not None]
    some_are_finite = any(bool(each.isfinite().any()) for each in gradients)
    return [
        node
        for node in ordered
        if (_is_risky(node) or _is_open(node))
        # What breaks a single number, breaks every gradient that flows through it.
        and not (some_are_finite and _is_of_one_number(node))
    ]


def _name(node: Any) -> str:
    """The operation of a node, as its user would write it.

    >>> x = torch.ones(1, requires_grad=True)
    >>> _name(torch.sqrt(x).grad_fn)
    'sqrt'
    """
    name: str = node.name()
    if isinstance(node, BackwardCFunction):
        return f"{name.removesuffix('Backward')}.apply"
    return forward_name(name)


def _is_open(node: Any) -> bool:
    """Whether an operation takes something that no gradient flows to: a label, a weight."""
    name = forward_name(node.name())
    if name in {"nll_loss", "nll_loss2d"}:
        return _has_class_weights(node)
    return name in OPEN and any(source is None for source, _ in node.next_functions)


def _has_class_weights(node: Any) -> bool:
    """Whether a cross entropy weighs its classes: weights that are all zero make it 0 / 0."""
    try:
        return node._saved_weight is not None
    except RuntimeError:  # there were some, and backward has freed them
        return True


def _is_of_one_number(node: Any) -> bool:
    """Whether an operation makes one number of one."""
    sources = [source for source, _ in node.next_functions if source is not None]
    made = [math.prod(meta.shape) for each in (node, *sources) for meta in each._input_metadata]
    return bool(made) and max(made) == 1


def _with_lines(nodes: Sequence[Any], call: RecordedCall) -> list[str]:
    """The operations of nodes, each with the lines that made it where they are known."""
    lines: dict[str, dict[str, None]] = {}
    for node in nodes:
        known = lines.setdefault(_name(node), {})
        place = (call.loss_lines or {}).get(node)
        if place is not None:
            known[short_place(place)] = None
    return [f"{name} ({', '.join(known)})" if known else name for name, known in lines.items()]


def _place_of(guess: Guess, call: RecordedCall) -> str | None:
    """The line that made the operation; the lines that it is among, where more cannot be said."""
    lines = [(call.loss_lines or {}).get(node) for node in guess.nodes]
    if lines and None not in lines:
        among = _range([line for line in lines if line is not None])
        if among is not None:
            return among
    if call.caller is None or call.backward_caller is None:
        return call.caller or call.backward_caller
    if _number(call.caller) <= _number(call.backward_caller):
        return _range([call.caller, call.backward_caller]) or call.caller
    return call.caller


def _range(places: Sequence[str]) -> str | None:
    """Places of one file as "file:line" or "file:first-last"; None for those of several.

    >>> _range(["a.py:3", "a.py:7", "a.py:3"]), _range(["a.py:3"]), _range(["a.py:3", "b.py:3"])
    ('a.py:3-7', 'a.py:3', None)
    """
    files = {place.rpartition(":")[0] for place in places}
    if len(files) != 1:
        return None
    numbers = sorted(map(_number, places))
    lines = str(numbers[0])
    if numbers[-1] != numbers[0]:
        lines += f"-{numbers[-1]}"
    return f"{files.pop()}:{lines}"


def _number(place: str) -> int:
    return int(place.rpartition(":")[2])


def _told_of_outputs(outputs: Sequence[Tensor]) -> str:
    if any(nonfinite_in(y) for y in outputs):
        return (
            "the outputs hold infinities that the model wrote on purpose, "
            "the gradients that came back are not finite"
        )
    return "the outputs are finite, the gradients that came back are not"


def _is_risky(node: Any) -> bool:
    if isinstance(node, BackwardCFunction):  # of the script's own: nobody knows what it does
        return True
    name = forward_name(node.name())
    if name == "pow" and isinstance(node._saved_exponent, int | float):
        return bool(node._saved_exponent < 1)
    return name in RISKY


def _ends(loss_root: Tensor, others: Sequence[RecordedCall]) -> list[Any]:
    """The autograd nodes where code outside the model ends: at the loss, and before other calls."""
    tensors = [loss_root]
    for other in others:
        tensors += tensors_in(*other.args, *other.kwargs.values())
    return list(dict.fromkeys(tensor.grad_fn for tensor in tensors))


def _output_nodes(calls: Sequence[RecordedCall]) -> set[Any]:
    return {node for call in calls for node in call.output_nodes or () if node is not None}


def _between(end: Any, stops: Sequence[Any], inside: set[Any]) -> list[Any]:
    """The autograd nodes from an end down to the outputs, nearest to the end first.

    Nothing if the outputs are not reached. The nodes `inside` are outputs of other calls of the
    model.
    """
    if end is None or end in stops or end in inside:
        return []
    nodes: dict[Any, None] = {end: None}
    waiting = [end]
    reached = False
    while waiting and len(nodes) < _MOST_NODES:
        for node, _ in waiting.pop(0).next_functions:
            reached = reached or node in stops
            if node is not None and node not in nodes and node not in stops and node not in inside:
                nodes[node] = None
                waiting.append(node)
    if not reached:
        return []
    return list(nodes)


def _again(
    nodes: Sequence[Any], stops: Sequence[Any], outputs: Sequence[Tensor]
) -> list[tuple[Any, Tensor]]:
    """Nodes with their input, where known operations compute it from the outputs; nearest first."""
    # Backward has freed what the nodes had saved: their inputs are computed again.
    values = {stop: y.detach() for stop, y in zip(stops, outputs, strict=False) if stop is not None}
    pairs = []
    for node in reversed(nodes):
        function = function_of(node)
        sources = [source for source, _ in node.next_functions if source is not None]
        if function is not None and len(sources) == 1 and sources[0] in values:
            pairs.append((node, values[sources[0]]))
            values[node] = function(values[sources[0]])
    return pairs


def _breaks(function: Any, value: Tensor) -> bool:
    """Whether the operation or its derivative is not finite at this finite value."""
    if nonfinite_in(value):
        return False
    x = value.detach().clone().requires_grad_()
    y = function(x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return bool(nonfinite_in(y) or nonfinite_in(slope))


def _operand_of(operation: str) -> str:
    return f"an operand of {operation} {BROKEN_OPERAND} (labels, a constant)"
