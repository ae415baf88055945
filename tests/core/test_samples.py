"""Tensors are found in whatever a model is called with or returns, and samples in tensors."""

from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsight.core.samples import (
    NotSeparable,
    find_samples,
    nearly_equal,
    rows_of_sample,
    tensors_in,
)

A, B = torch.zeros(1), torch.ones(2)
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Output:
    logits: Tensor
    note: str = ""
    loss: Tensor | None = None


VALUES: dict[str, Any] = {
    "themselves": (A, B),
    "a list among numbers": ([A, 1, None, "x", B],),
    "a dictionary in its order": ({"z": A, "a": B},),
    "an ordered dictionary": (OrderedDict(z=A, a=B),),
    "a dictionary that only behaves like one": (UserDict(x=A, y=[B]),),
    "a named tuple": (Pair(A, B),),
    "a queue": (deque([A, B]),),
    "an object": (Output(A, "note", B),),
    "nested": ([{"x": (A, [Output(B)])}],),
    "beside what holds none": (nn.Linear(2, 2), A, Tensor, slice(3), torch.float32, B),
}


@pytest.mark.parametrize("name", VALUES)
def test_tensors_are_found_in_their_order(name: str) -> None:
    assert [id(tensor) for tensor in tensors_in(*VALUES[name])] == [id(A), id(B)]


class Layout(nn.Module):
    batch_first = False


@pytest.mark.parametrize(
    ("args", "size", "root", "expected"),
    [
        ([torch.zeros(4, 3)], None, nn.Linear(3, 3), ({0: 0}, 4)),
        ([torch.zeros(7, 4, 3), torch.zeros(5, 4)], None, nn.Linear(3, 3), ({0: 1, 1: 1}, 4)),
        ([torch.zeros(7, 4, 3)], None, Layout(), ({0: 1}, 4)),
        ([torch.zeros(7, 4)], 4, nn.Linear(3, 3), ({0: 1}, 4)),
        ([torch.zeros(8, 3)], 4, nn.Linear(3, 3), ({0: 0}, 4)),
    ],
)
def test_where_the_samples_are(
    args: list[Tensor], size: int | None, root: nn.Module, expected: tuple[dict[int, int], int]
) -> None:
    call = find_samples(args, {}, size, None, root)
    assert (call.dims, call.batch) == expected


def test_a_call_with_one_sample_alone() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    call = find_samples([x], {"scale": 2.0}, None, None, nn.Linear(2, 2))
    args, kwargs = call.row(2)
    assert torch.equal(args[0], x[2:3])
    assert kwargs == {"scale": 2.0}


def test_no_samples() -> None:
    with pytest.raises(NotSeparable, match="was called without a tensor of at least one dimension"):
        find_samples([3], {}, None, None, nn.Linear(2, 2))
    with pytest.raises(NotSeparable, match=r"expected 5 samples .* got the shapes \(4, 2\)"):
        find_samples([torch.zeros(4, 2)], {}, 5, None, nn.Linear(2, 2))


def test_a_samples_part_of_the_output() -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    assert rows_of_sample(whole, whole[2:4], 1, 3) == (slice(2, 4),)
    interleaved = torch.stack([whole[1], whole[4]])
    assert rows_of_sample(whole, interleaved, 1, 3) == (slice(1, None, 3),)
    with pytest.raises(NotSeparable, match="sample 1 alone gives another output than in the batch"):
        rows_of_sample(whole, whole[2:4] + 1, 1, 3)
    with pytest.raises(
        NotSeparable, match=r"has shape \(6, 2\) for 3 samples but \(6, 1\) for one"
    ):
        rows_of_sample(whole, whole[:, :1], 1, 3)


def test_what_is_not_finite_must_be_so_in_both() -> None:
    infinite = torch.tensor([1.0, float("inf")])
    assert nearly_equal(infinite, infinite.clone())
    assert not nearly_equal(infinite, torch.tensor([float("inf"), 1.0]))
    assert not nearly_equal(infinite, torch.tensor([2.0, float("inf")]))
