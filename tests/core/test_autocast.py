"""Which autocast is on is told as torch has it, and can be had again."""

import torch

from gradsight.core.autocast import (
    autocast_as,
    autocast_dtype,
    autocast_to,
    current_autocast,
    is_autocast_to,
)


def test_off() -> None:
    assert current_autocast() is None
    assert autocast_dtype("cpu") is None
    assert not is_autocast_to(torch.float16)


def test_on() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        assert current_autocast() == ("cpu", "float16")
        assert autocast_dtype("cpu") is torch.float16
        assert is_autocast_to(torch.float16)
        assert not is_autocast_to(torch.bfloat16)


def test_the_same_again() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = current_autocast()
    with autocast_as(before, ["cpu"]):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
    assert current_autocast() is None


def test_none_again_inside_of_another() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast_as(None, ["cpu", "meta"]):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_switched_off_by_no_type() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast_to("cpu", None):
        assert autocast_dtype("cpu") is None
