"""What a prediction, a plan or a verification leaves behind in caches of the user's: nothing."""

import functools
import gc
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gradsight import plan_checkpointing, predict_peak_memory, verify_checkpointing
from gradsight.errors import GradsightError

Mask = Callable[[int], torch.Tensor]
CACHES: dict[str, Mask] = {}


def cache(function: Mask) -> Mask:
    """Add a cache to the table: a function that makes a mask once and keeps it."""
    CACHES[function.__name__] = function
    return function


def made(size: int) -> torch.Tensor:
    return torch.ones(size, size).tril()


@cache
@functools.lru_cache
def lru_cache(size: int) -> torch.Tensor:
    return made(size)


@cache
@functools.cache
def unbounded_cache(size: int) -> torch.Tensor:
    return made(size)


IN_DICT: dict[int, torch.Tensor] = {}


@cache
def in_a_dict(size: int) -> torch.Tensor:
    if size not in IN_DICT:
        IN_DICT[size] = made(size)
    return IN_DICT[size]


PAIRS: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


@cache
def in_a_dict_of_tuples(size: int) -> torch.Tensor:
    if size not in PAIRS:
        PAIRS[size] = (made(size), made(size))
    return PAIRS[size][0]


BY_KIND: dict[str, dict[int, torch.Tensor]] = {"causal": {}}


@cache
def in_a_dict_of_dicts(size: int) -> torch.Tensor:
    if size not in BY_KIND["causal"]:
        BY_KIND["causal"][size] = made(size)
    return BY_KIND["causal"][size]


PARTS: dict[int, dict[str, torch.Tensor]] = {}


@cache
def as_a_dict_in_a_dict(size: int) -> torch.Tensor:
    if size not in PARTS:
        PARTS[size] = {"mask": made(size)}
    return PARTS[size]["mask"]


@dataclass
class Kept:
    mask: torch.Tensor


OBJECTS: dict[int, Kept] = {}


@cache
def in_an_object_in_a_dict(size: int) -> torch.Tensor:
    if size not in OBJECTS:
        OBJECTS[size] = Kept(made(size))
    return OBJECTS[size].mask


IN_LIST: list[torch.Tensor] = []


@cache
def in_a_list(size: int) -> torch.Tensor:
    if not IN_LIST:
        IN_LIST.append(made(size))
    return IN_LIST[0]


RECENT: deque[torch.Tensor] = deque(maxlen=2)


@cache
def in_a_deque(size: int) -> torch.Tensor:
    if not RECENT:
        RECENT.append(made(size))
    return RECENT[0]


GLOBAL: torch.Tensor | None = None


@cache
def in_a_global(size: int) -> torch.Tensor:
    global GLOBAL
    if GLOBAL is None:
        GLOBAL = made(size)
    return GLOBAL


@cache
def in_a_new_global(size: int) -> torch.Tensor:
    if "NEW" not in globals():
        globals()["NEW"] = made(size)
    return globals()["NEW"]


class Holder:
    mask: torch.Tensor | None = None

    def __init__(self) -> None:
        self.own: torch.Tensor | None = None
        self.masks: dict[int, torch.Tensor] = {}


HOLDER = Holder()


@cache
def in_a_class(size: int) -> torch.Tensor:
    if Holder.mask is None:
        Holder.mask = made(size)
    return Holder.mask


@cache
def in_an_attribute(size: int) -> torch.Tensor:
    if HOLDER.own is None:
        HOLDER.own = made(size)
    return HOLDER.own


@cache
def in_a_dict_of_an_object(size: int) -> torch.Tensor:
    if size not in HOLDER.masks:
        HOLDER.masks[size] = made(size)
    return HOLDER.masks[size]


@cache
def in_a_default(size: int, masks: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    if size not in masks:
        masks[size] = made(size)
    return masks[size]


@cache
def on_a_function(size: int) -> torch.Tensor:
    if not hasattr(on_a_function, "mask"):
        on_a_function.mask = made(size)  # type: ignore[attr-defined]
    return on_a_function.mask  # type: ignore[attr-defined, no-any-return]


def closure() -> Mask:
    masks: dict[int, torch.Tensor] = {}

    def in_a_closure(size: int) -> torch.Tensor:
        if size not in masks:
            masks[size] = made(size)
        return masks[size]

    return in_a_closure


def closure_of_a_name() -> Mask:
    mask: torch.Tensor | None = None

    def in_a_nonlocal_name(size: int) -> torch.Tensor:
        nonlocal mask
        if mask is None:
            mask = made(size)
        return mask

    return in_a_nonlocal_name


cache(closure())
cache(closure_of_a_name())


class Masked(nn.Module):
    """A block that asks a cache for its mask."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mask(x.shape[0]) @ torch.tanh(self.layer(x))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def builder(*masks: Mask) -> Callable[[], tuple[Any, ...]]:
    return lambda: (nn.Sequential(*(Masked(mask) for mask in masks)), torch.randn(6, 8), loss)


def use(build: Callable[[], tuple[Any, ...]]) -> torch.Tensor:
    model, batch, _ = build()
    value = loss(model, batch)
    value.backward()
    return value


BEFORE: set[int] = set()
"""Fakes that other tests of this process have left, by identity."""


@pytest.fixture(autouse=True)
def _know_the_fakes_of_others() -> None:
    BEFORE.clear()
    BEFORE.update(map(id, fakes()))


def fakes() -> list[Any]:
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) is FakeTensor]
    return [thing for thing in found if id(thing) not in BEFORE]


def test_caches_are_real_after_a_prediction() -> None:
    build = builder(*CACHES.values())
    predict_peak_memory(build, policy="full")
    assert not fakes()
    assert type(use(build)) is torch.Tensor
    masks = {name: ask(6) for name, ask in CACHES.items()}
    assert all(type(mask) is torch.Tensor for mask in masks.values())
    predict_peak_memory(build)
    replaced = [name for name, ask in CACHES.items() if ask(6) is not masks[name]]
    assert not replaced, "what was real before is the same afterwards"


@pytest.mark.slow
def test_after_a_plan_and_in_a_verification() -> None:
    build = builder(lru_cache, in_a_dict, in_a_global)
    plan_checkpointing(build, "1MB")
    assert not fakes()
    assert verify_checkpointing(build).gradients_identical
    assert type(use(build)) is torch.Tensor


def needs_data(size: int) -> torch.Tensor:
    mask = in_a_dict(size)
    too_large_to_be_known = mask.sum().expand(4096, 4096).contiguous()
    return mask if too_large_to_be_known.sum() > 3 else mask + 1


@pytest.mark.slow
def test_after_a_model_that_is_refused() -> None:
    IN_DICT.clear()
    build = builder(needs_data, needs_data)
    with pytest.raises(GradsightError, match="needs real data"):
        predict_peak_memory(build)
    assert not fakes()
    assert type(use(build)) is torch.Tensor


def test_a_model_from_before_is_left_alone() -> None:
    torch.manual_seed(0)
    build = builder(in_a_dict, in_a_dict)
    model, batch, _ = build()
    model.eval()
    use(lambda: (model, batch, loss))
    gradients = [parameter.grad for parameter in model.parameters()]
    fresh = predict_peak_memory(build, policy="full")
    assert predict_peak_memory(lambda: (model, batch, loss), policy="full") == fresh
    plan_checkpointing(lambda: (model, batch, loss), "1MB")
    assert not model.training
    assert [parameter.grad for parameter in model.parameters()] == gradients
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_an_import_makes_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_module_with_a_mask.py").write_text("import torch\nMASK = torch.ones(6, 6)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def imported(size: int) -> torch.Tensor:
        import a_module_with_a_mask  # type: ignore[import-not-found]

        return a_module_with_a_mask.MASK  # type: ignore[no-any-return]

    predict_peak_memory(builder(imported, imported))
    assert type(sys.modules["a_module_with_a_mask"].MASK) is torch.Tensor


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        predict_peak_memory(builder(lru_cache, lru_cache))
        assert gc.get_freeze_count() >= before
    finally:
        gc.unfreeze()
