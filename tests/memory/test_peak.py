"""The counted peak against the allocator's own events, and what the bytes are called."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradsight import measure_peak_memory, verify_checkpointing
from gradsight.errors import UsageError
from gradsight.memory.counter import StorageCounter
from gradsight.memory.peak import KINDS, cuda_memory_use, memory_use
from memory.allocator import OperatorMarks, allocator_peak
from memory.measured_step import step_of


@pytest.mark.parametrize("policy", [None, "full"])
def test_the_count_is_the_allocators(
    build: Callable[[], tuple[Any, ...]], policy: str | None
) -> None:
    """To the byte on any processor, but for numbers that torch wraps into tensors of 8 bytes.

    Scratch inside operators, which depends on the processor, is no part of either side.
    """
    step = step_of(build(), policy)
    gc.collect()
    counter = StorageCounter()

    def counted() -> None:
        with OperatorMarks(), counter:
            step()

    allocated = allocator_peak(counted)
    unseen = counter.at(-1) + allocated.between_operators - counter.peak()
    assert 0 <= unseen <= 96, "the allocator saw what the count did not"
    use = memory_use(counter)
    assert sum(use.by_kind.values()) == use.peak_bytes == counter.peak()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_16_bits_may_use_more_inside(dtype: torch.dtype) -> None:
    x = torch.ones(8, 8, dtype=dtype)
    assert "products in 16 bits" in measure_peak_memory(lambda: x @ x).notes[0]
    assert measure_peak_memory(lambda: x.float() @ x.float()).notes == ()


def test_an_operator_that_uses_memory_inside_is_named() -> None:
    def build() -> tuple[Any, ...]:
        return nn.LSTM(64, 64, 2), (torch.randn(20, 8, 64),), lambda m, b: m(*b)[0].square().mean()

    use = measure_peak_memory(step_of(build()))
    assert use.operator_bytes is None
    assert use.notes == ("not in this number: what LSTM uses inside",)


def test_kinds_by_hand() -> None:
    model, batch = nn.Linear(100, 10, bias=False), torch.randn(20, 100)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(batch).square().sum().backward()
        optimizer.step()

    step()
    weight, state, inputs = 4000, 2 * 4000 + 4, 20 * 100 * 4
    use = measure_peak_memory(step)
    assert set(use.by_kind) == set(KINDS)
    assert use.by_kind["parameters"] == weight
    assert use.by_kind["optimizer"] == state
    assert use.by_kind["inputs"] == inputs
    assert use.by_kind["gradients"] == weight


def test_activations_are_what_backward_finds() -> None:
    x = torch.randn(1000, requires_grad=True)

    def work() -> None:
        y = x.exp().exp().exp()  # each result is kept for its own backward
        y.sum().backward()

    use = measure_peak_memory(work)
    assert 3 * 4000 <= use.by_kind["activations"] <= 3 * 4000 + 8
    assert use.activation_share == use.by_kind["activations"] / use.peak_bytes


def test_without_backward_nothing_is_an_activation() -> None:
    assert measure_peak_memory(lambda: torch.zeros(100).exp().exp()).by_kind["activations"] == 0


def test_tensors_from_before_count_from_the_start() -> None:
    early, late = torch.zeros(1000), torch.zeros(500)

    def work() -> None:
        early.exp()  # 4000 more, gone at once
        late.sum()  # first seen after the peak

    assert measure_peak_memory(work).peak_bytes == 4000 + 4000 + 2000


def test_what_is_freed_inside_does_not_count_on() -> None:
    held = [torch.zeros(1000)]

    def work() -> None:
        held[0].sum()
        held.clear()
        torch.zeros(900)

    assert measure_peak_memory(work).peak_bytes == 4000 + 4


def test_tensors_made_from_python_and_numpy_count_from_when_they_are_made() -> None:
    def work() -> None:
        torch.zeros(1000)
        torch.tensor([1.0] * 500).add_(1)
        torch.from_numpy(np.zeros(500, dtype=np.float32)).add_(1)

    assert measure_peak_memory(work).peak_bytes == 4000


def test_views_and_in_place_cost_nothing() -> None:
    x = torch.zeros(10, 100)
    assert measure_peak_memory(lambda: x.view(-1)[5:].add_(1).unsqueeze(0)).peak_bytes == 4000


def test_storages_resized_by_hand_are_followed() -> None:
    def work() -> None:
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        torch.zeros(900)
        x.untyped_storage().resize_(4000)

    assert measure_peak_memory(work).peak_bytes == 4000
    assert torch.UntypedStorage.resize_.__name__ != "resized"


def test_sparse_gradients_are_counted() -> None:
    table = nn.Embedding(100, 8, sparse=True)
    use = measure_peak_memory(lambda: table(torch.tensor([1, 2])).sum().backward())
    assert use.by_kind["gradients"] >= 2 * 8 * 4


def test_counting_leaves_nothing_behind() -> None:
    model = nn.Linear(3, 3)
    measure_peak_memory(lambda: model(torch.ones(1, 3)).sum().backward())
    assert not model.weight._post_accumulate_grad_hooks
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ZeroDivisionError):
        measure_peak_memory(lambda: 1 / 0)
    assert torch.UntypedStorage.resize_.__name__ != "resized"


def test_flops_are_counted() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    assert measure_peak_memory(lambda: (x @ x.T).sum().backward()).flops == 3 * 2 * 8 * 16 * 8


def test_cuda_figures_are_the_allocators() -> None:
    counter = StorageCounter()
    with counter:
        torch.zeros(100)
    for entry in counter.log:
        entry.device = "cuda"
    use = cuda_memory_use(counter, 1024)
    assert (use.peak_bytes, use.device, use.by_kind["temporaries"], use.operator_bytes) == (
        1024,
        "cuda",
        1024,
        624,
    )


def test_only_functions_are_measured() -> None:
    with pytest.raises(
        UsageError, match=r"runs a function without arguments, got Linear$|got Tensor"
    ):
        measure_peak_memory(torch.zeros(3))


def grown_by_hand() -> None:
    x = torch.empty(0)
    x.resize_(100_000)
    x.resize_(300_000)
    torch.ones(50_000)


def grown_by_an_operator() -> None:
    place = torch.empty(0)
    torch.mm(torch.ones(200, 200), torch.ones(200, 200), out=place)
    torch.ones(50_000)


def shrunk_and_grown() -> None:
    x = torch.ones(200_000)
    x.untyped_storage().resize_(0)
    torch.ones(150_000)
    x.untyped_storage().resize_(400_000)


@pytest.mark.parametrize("fn", [grown_by_hand, grown_by_an_operator, shrunk_and_grown])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_storages_that_operators_resize_are_followed(fn: Callable[[], None]) -> None:
    fn()  # what the first call alone makes does not count
    # The allocator has the old storage and the new one beside each other while it copies.
    measured = measure_peak_memory(fn).peak_bytes
    between = allocator_peak(lambda: _marked(fn)).between_operators
    assert measured == between


def _marked(fn: Callable[[], None]) -> None:
    with OperatorMarks():
        fn()


def compiled(calls: list[int]) -> Any:
    """A model whose compiled code counts its calls."""

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    return torch.compile(model, backend=backend)


def test_a_compiled_model_is_compiled_again_afterwards() -> None:
    calls: list[int] = []
    model = compiled(calls)
    batch = torch.randn(4, 8)
    use = measure_peak_memory(lambda: model(batch).sum().backward())
    assert not calls
    assert any("compiled code ran eagerly" in note for note in use.notes)
    model(batch).sum().backward()
    assert len(calls) == 1
    build = lambda: (compiled(calls), batch, lambda m, b: m(b).sum())  # noqa: E731
    assert verify_checkpointing(build, optimizer=None).gradients_identical
    calls.clear()
    model(batch).sum().backward()
    assert len(calls) == 1
    assert not measure_peak_memory(lambda: torch.ones(3)).notes
    torch._dynamo.reset()
