"""What counts as a whole number, and what an error says of everything else."""

import numpy as np
import pytest
import torch

from gradsight.errors import UsageError
from gradsight.values.whole_numbers import LARGEST, whole_number


@pytest.mark.parametrize("given", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_numbers_of_any_kind(given: object) -> None:
    number = whole_number(given, "step")
    assert (number, type(number)) == (3, int)


def test_the_largest() -> None:
    assert whole_number(LARGEST, "step") == LARGEST
    with pytest.raises(UsageError, match=r"step must be below 2\*\*63, got 10000"):
        whole_number(10**30, "step")


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (2.5, r"2\.5"),
        (2.0, r"2\.0"),
        ("3", "'3'"),
        (True, "True"),
        (None, "None"),
        (-1, "-1"),
        ([1], r"list \[1\]"),
        (torch.tensor([1, 2]), r"Tensor tensor\(\[1, 2\]\)"),
        (torch.tensor(2.5), r"Tensor tensor\(2\.5000\)"),
        ("x" * 100, "'x*\\.\\.\\.$"),
    ],
)
def test_everything_else_is_refused(given: object, got: str) -> None:
    with pytest.raises(UsageError, match=f"step must be a whole number of 0 or more, got {got}"):
        whole_number(given, "step")
