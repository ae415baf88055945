"""Every rule against the universal way, over shapes, layouts and options that models of the table
do not have.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsight.ghost.directions import Directions
from gradsight.ghost.rules import RULES
from gradsight.ghost.sample_axis import LayoutMemory, Place, SampleLayout, candidates
from gradsight.ghost.tracer import RuleOptions, TraceOptions, Tracer

B = 3


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float64
    )


def scores(
    run: Callable[..., Tensor],
    parameters: list[Tensor],
    x: Tensor,
    options: RuleOptions,
    rules: bool,
    preferred: int = 0,
) -> tuple[Tensor, list[Tensor], Tracer]:
    """The scores [parameters, B] of one operation under a random output gradient, and the
    gradients.
    """
    leaves = [p.clone().requires_grad_() for p in parameters]
    names = {id(p): f"p{i}" for i, p in enumerate(leaves)}
    direction = {f"p{i}": rand(*p.shape, seed=50 + i) for i, p in enumerate(leaves)}
    probe = torch.zeros(len(leaves), B, dtype=torch.float64, requires_grad=True)
    directions = Directions({"target": direction}, ("target",), parameters=tuple(direction))
    tracing = TraceOptions(directions, LayoutMemory(preferred), options)
    tracer = Tracer(tracing, lambda t: names.get(id(t)), probe)
    kept = dict(RULES)
    if not rules:
        RULES.clear()
    try:
        with tracer:
            y = run(x, *leaves)
        grads = torch.autograd.grad(y, [*leaves, probe], rand(*y.shape, seed=99))
    finally:
        RULES.update(kept)
    return grads[-1], list(grads[:-1]), tracer


CALLS: dict[str, tuple[Callable[..., Tensor], list[Tensor], Tensor, int]] = {
    "linear": (F.linear, [rand(4, 5), rand(4)], rand(B, 2, 6, 5), 0),
    "linear without bias": (F.linear, [rand(4, 5)], rand(B, 5), 0),
    "linear, time first": (F.linear, [rand(4, 5), rand(4)], rand(7, B, 5), 1),
    "linear, flattened": (F.linear, [rand(4, 5), rand(4)], rand(B * 7, 5), 0),
    "linear, flattened time first": (F.linear, [rand(4, 5), rand(4)], rand(7 * B, 5), 1),
    "addmm": (lambda x, b, w: torch.addmm(b, x, w), [rand(4), rand(5, 4)], rand(B * 2, 5), 0),
    "matmul": (torch.matmul, [rand(5, 4)], rand(B, 7, 5), 0),
    "matmul by a batch of matrices": (lambda x, w: x @ w, [rand(2, 5, 4)], rand(B, 2, 7, 5), 0),
    "matmul from the left": (lambda x, w: w @ x, [rand(4, 7)], rand(B, 7, 5), 0),
    "einsum": (lambda x, w: torch.einsum("btd,de->bte", x, w), [rand(5, 4)], rand(B, 7, 5), 0),
    "bmm": (lambda x, w: torch.bmm(x, w.expand(B, -1, -1)), [rand(5, 4)], rand(B, 7, 5), 0),
    "embedding": (
        lambda x, w: F.embedding(x, w), [rand(9, 4)], torch.arange(B * 3).view(B, 3) % 9, 0,
    ),
    "embedding with padding": (
        lambda x, w: F.embedding(x, w, padding_idx=-2),
        [rand(5, 4)], torch.arange(B * 3).view(B, 3) % 5, 0,
    ),
    "embedding_bag": (
        lambda x, w: F.embedding_bag(x, w), [rand(9, 4)], torch.arange(B * 3).view(B, 3) % 9, 0,
    ),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b), [rand(5), rand(5)], rand(B, 7, 5), 0,
    ),
    "layer_norm over two": (
        lambda x, w, b: F.layer_norm(x, (7, 5), w, b), [rand(7, 5), rand(7, 5)], rand(B, 7, 5), 0,
    ),
    "layer_norm, time first": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b), [rand(5), rand(5)], rand(7, B, 5), 1,
    ),
    "layer_norm without bias": (lambda x, w: F.layer_norm(x, (5,), w), [rand(5)], rand(B, 7, 5), 0),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), [rand(5)], rand(B, 7, 5), 0),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b), [rand(4), rand(4)], rand(B, 4, 5, 5), 0,
    ),
    "group_norm of vectors": (
        lambda x, w, b: F.group_norm(x, 2, w, b), [rand(4), rand(4)], rand(B, 4), 0,
    ),
    "batch_norm, fixed": (
        lambda x, w, b: F.batch_norm(x, torch.ones(4).double(), 2 * torch.ones(4).double(), w, b),
        [rand(4), rand(4)], rand(B, 4, 5), 0,
    ),
    "conv1d": (
        lambda x, w, b: F.conv1d(x, w, b, 2, 1, 2), [rand(4, 2, 3), rand(4)], rand(B, 2, 70), 0,
    ),
    "conv2d, groups": (
        lambda x, w: F.conv2d(x, w, None, (1, 2), (1, 0), 1, 2),
        [rand(4, 2, 3, 2)], rand(B, 4, 9, 9), 0,
    ),
    "conv2d, same": (
        lambda x, w, b: F.conv2d(x, w, b, padding="same"),
        [rand(4, 3, 3, 3), rand(4)], rand(B, 3, 9, 9), 0,
    ),
    "conv3d": (
        lambda x, w, b: F.conv3d(x, w, b), [rand(2, 2, 2, 2, 2), rand(2)], rand(B, 2, 5, 5, 5), 0,
    ),
    "conv2d, frames flattened": (
        lambda x, w, b: F.conv2d(x, w, b), [rand(2, 2, 3, 3), rand(2)], rand(2 * B, 2, 9, 9), 0,
    ),
    "add": (lambda x, p: x + p, [rand(5)], rand(B, 7, 5), 0),
    "add from the left": (lambda x, p: p + x, [rand(7, 1)], rand(B, 7, 5), 0),
    "add to one row": (lambda x, p: x + p, [rand(1, 7, 5)], rand(B, 7, 5), 0),
    "add per sample": (lambda x, p: x + p.expand(B, -1, -1), [rand(1, 7, 5)], rand(B, 7, 5), 0),
    "add, time first": (lambda x, p: x + p, [rand(7, 1, 5)], rand(7, B, 5), 1),
    "add, flattened": (lambda x, p: x + p, [rand(5)], rand(B * 7, 5), 0),
    "add a number": (lambda x, p: x + p, [rand()], rand(B, 7), 0),
    "sub": (lambda x, p: x - p, [rand(5)], rand(B, 7, 5), 0),
    "sub from": (lambda x, p: p - x, [rand(5)], rand(B, 7, 5), 0),
    "mul": (lambda x, p: x * p, [rand(5)], rand(B, 7, 5), 0),
    "mul, widening": (lambda x, p: x * p, [rand(4, 1, 1)], rand(B, 1, 7, 5), 0),
    "mul, fewer dimensions": (lambda x, p: x * p, [rand(B, 7, 5)], rand(B, 1, 5), 0),
    "mul, time first": (lambda x, p: p * x, [rand(7, 1, 1)], rand(7, B, 5), 1),
    "mul, flattened": (lambda x, p: p * x, [rand(5)], rand(7 * B, 5), 1),
    "div": (lambda x, p: x / p, [1.5 + rand(5).abs()], rand(B, 7, 5), 0),
    "in place": (lambda x, p: F.relu((x * 2).add_(p)), [rand(5)], rand(B, 7, 5), 0),
    "assigned": (lambda x, p: _assign(x, p), [rand(5)], rand(B, 7, 5), 0),
    "derived": (lambda x, p: F.linear(x, (p.T * 2).flip(0)), [rand(5, 4)], rand(B, 7, 5), 0),
}  # fmt: skip


def _assign(x: Tensor, p: Tensor) -> Tensor:
    y = x * 1.0
    y[:, 2] = p
    return y * x


@pytest.mark.parametrize(
    "options",
    [RuleOptions(), RuleOptions(route="materialise"), RuleOptions(exact_grad=True)],
    ids=["rule", "materialise", "exact"],
)
@pytest.mark.parametrize("name", CALLS)
def test_rule_equals_the_universal_way(name: str, options: RuleOptions) -> None:
    run, parameters, x, preferred = CALLS[name]
    fast, grads, _ = scores(run, parameters, x, options, rules=True, preferred=preferred)
    slow, plain, _ = scores(run, parameters, x, options, rules=False, preferred=preferred)
    assert torch.allclose(fast, slow, rtol=1e-10, atol=1e-10), (fast, slow)
    for grad, expected in zip(grads, plain, strict=True):
        assert torch.allclose(grad, expected, rtol=1e-10, atol=1e-10)
    directions = [rand(*p.shape, seed=50 + i) for i, p in enumerate(parameters)]
    whole = torch.stack([(d * g).sum() for d, g in zip(directions, plain, strict=True)])
    assert torch.allclose(fast.sum(1), whole, rtol=1e-10, atol=1e-10)
    assert float(fast.abs().max()) > 1e-3


def test_fast_rules_do_not_go_the_universal_way() -> None:
    slow = {
        "embedding_bag",
        "sub from",
        "div",
        "in place",
        "assigned",
        "mul, fewer dimensions",
        "mul, widening",
    }
    for name in CALLS.keys() - slow:
        run, parameters, x, preferred = CALLS[name]
        _, _, tracer = scores(run, parameters, x, RuleOptions(), rules=True, preferred=preferred)
        assert not tracer.slow, (name, tracer.slow)


def test_descending_into_multihead_attention() -> None:
    """Its projections take the linear rule: query, key and value as one tensor, or as three."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, bias=True).double()
    parameters = [p.detach() for p in attention.parameters()]
    names = [n for n, _ in attention.named_parameters()]
    for one in (True, False):

        def run(x: Tensor, *leaves: Tensor, one: bool = one) -> Tensor:
            key = x if one else x.roll(1, -1)
            return torch.func.functional_call(
                attention, dict(zip(names, leaves, strict=True)), (x, key, key)
            )[0]

        fast, _, tracer = scores(
            run, parameters, rand(5, B, 6), RuleOptions(), rules=True, preferred=1
        )
        slow, _, _ = scores(run, parameters, rand(5, B, 6), RuleOptions(), rules=False, preferred=1)
        assert torch.allclose(fast, slow, atol=1e-12)
        assert not tracer.slow


@pytest.mark.parametrize(
    "layout",
    [
        SampleLayout(0),
        SampleLayout(1),
        SampleLayout(0, "major"),
        SampleLayout(0, "minor"),
        SampleLayout(1, "minor"),
    ],
)
def test_matrices_hold_the_rows_of_each_sample(layout: SampleLayout) -> None:
    shape = [6, 6, 2]
    if layout.kind == "plain":
        shape[layout.dim] = B
    numbers = torch.arange(72).reshape(6, 6, 2)[: shape[0], : shape[1]]
    matrices = layout.matrices(numbers, B)
    assert matrices.shape == (B, numbers.numel() // B // 2, 2)
    index = torch.arange(shape[layout.dim])
    owner = {"plain": index, "major": index // (len(index) // B), "minor": index % B}[layout.kind]
    for i in range(B):
        own = numbers.index_select(layout.dim, index[owner == i])
        assert sorted(matrices[i].flatten().tolist()) == sorted(own.flatten().tolist())


def test_layouts_are_remembered_where_shapes_mislead() -> None:
    memory = LayoutMemory()
    key = ("linear", "w")
    first = Place(key, (7, 4), 4, 0)
    assert memory.find(first) == SampleLayout(1)
    assert not memory.is_proven(first)
    memory.prove([first])
    assert memory.is_proven(first)
    square, picked = Place(key, (4, 4), 4, 0), Place(key, (7, 4), 4, 5)
    assert memory.find(square) == SampleLayout(1)
    assert not memory.is_proven(square), "other shapes"
    assert not memory.is_proven(picked), "other rows"
    assert candidates(torch.Size([8, 3]), 4) == [
        SampleLayout(0, "major"),
        SampleLayout(0, "minor"),
        None,
    ]
    assert candidates(torch.Size([5, 3]), 4) == [None]
