"""The language of policies, sizes, and what a selective block keeps."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from gradsight.errors import UsageError
from gradsight.memory.policy import (
    FULL,
    NONE,
    SELECTIVE,
    Mode,
    parse_policy,
    policy_text,
)
from gradsight.memory.selective import Keeper, is_expensive
from gradsight.values.memory import CheckpointingPlan
from gradsight.values.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", [NONE, NONE, NONE]),
        ("full", [FULL, FULL, FULL]),
        ("selective", [SELECTIVE, SELECTIVE, SELECTIVE]),
        ("first:0", [NONE, NONE, NONE]),
        ("first:2", [FULL, FULL, NONE]),
        ("full:0,selective@1.5:2", [FULL, NONE, Mode("selective", 1.5)]),
        ("selective:0-1, full:2", [SELECTIVE, SELECTIVE, FULL]),
        (CheckpointingPlan("first:1", ("a", "b", "c"), 1, 0.0, 1, 1), [FULL, NONE, NONE]),
    ],
)
def test_policies(policy: object, expected: list[Mode]) -> None:
    assert parse_policy(policy, 3) == expected  # type: ignore[arg-type]
    assert parse_policy(policy_text(expected), 3) == expected


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("ful", "'ful' is not a policy; known are 'full', 'selective'"),
        ("first:x", "is not a policy"),
        ("first:4", "names block 3, but the model has 3 blocks, numbered from 0"),
        ("full:2-7", "names block 7, but the model has 3 blocks"),
        ("full:0-1,selective:1", "names block 1 twice"),
        ("full:2-1", "ends before it starts: 2-1"),
        ("full@3", "is not a policy"),
        ("selective@1e+", "is not a number of operations per byte"),
        ("", "is not a policy"),
        (7, "a policy is text or a CheckpointingPlan, got int"),
    ],
)
def test_bad_policies(policy: object, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("+", r"\+")):
        parse_policy(policy, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "size", ["six", "6 parsecs", "", "GB", "1.2.3GB", "-3GB", "1e999GB", None, True, [1]]
)
def test_what_is_not_a_size(size: object) -> None:
    with pytest.raises(UsageError, match="size of memory"):
        parse_size(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "count"),
    [("6GB", 6 * 10**9), ("1.5GiB", 3 * 2**29), ("12", 12), (7, 7), ("2 kb", 2000), ("3B", 3)],
)
def test_sizes(size: str | int, count: int) -> None:
    assert parse_size(size) == count


def test_sizes_read_well() -> None:
    assert [format_size(n) for n in (0, 999, 1e3, 12.34e6, 1.234e9, 70.7e9, 2e12)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "12.3 MB",
        "1.23 GB",
        "70.7 GB",
        "2.00 TB",
    ]


def test_random_operators_are_never_kept() -> None:
    """Were attention with dropout left out of the recomputation, every later random draw would be
    another one.
    """
    x = torch.zeros(1, 1, 2, 2)
    for op in (
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    ):
        assert is_expensive(op.default, (x, x, x), {})
        assert is_expensive(op.default, (x, x, x, 0.0), {})
        assert not is_expensive(op.default, (x, x, x, 0.1), {})
    assert not is_expensive(
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        (x, x, x, None, True, 0.2),
        {},
    )
    assert not is_expensive(torch.ops.aten.native_dropout.default, (x, 0.5, True), {})


def test_what_is_kept() -> None:
    mm, x = torch.ops.aten.mm.default, torch.zeros(8, 64)
    context = SimpleNamespace(op_output=torch.zeros(8, 8))

    def kept(mode: Mode) -> bool:
        return Keeper(mode)(context, mm, x, x.T) is CheckpointPolicy.MUST_SAVE

    cost = 2 * 8 * 64 * 8 / (8 * 8 * 4)
    assert kept(SELECTIVE)
    assert kept(Mode("selective", cost))
    assert not kept(Mode("selective", cost + 1))
    assert (
        Keeper(SELECTIVE)(context, torch.ops.aten.gelu.default, x)
        is CheckpointPolicy.PREFER_RECOMPUTE
    )
