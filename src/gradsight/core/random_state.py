# mypy: allow-untyped-calls
"""The states of random generators: torch's, numpy's, Python's, and those that modules hold."""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradsight.core.devices import (
    can_draw,
    generator_devices,
    generator_state,
    set_generator_state,
)

RandomSource = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""What a module may hold as an attribute and draw from."""


def torch_states(devices: Iterable[torch.device] | None = None) -> dict[str, Tensor]:
    """The states of torch's generators, by device: "cpu", "cuda:0".

    devices: the accelerators in question; all of this machine's where none are named.
    """
    states = {"cpu": torch.get_rng_state()}
    for device in generator_devices() if devices is None else devices:
        states[str(device)] = generator_state(device)
    return states


def set_torch_states(states: Mapping[str, Tensor]) -> None:
    """Put torch's generators into these states; those of devices that are not here are left out."""
    for name, state in states.items():
        device = torch.device(name)
        if can_draw(device):
            set_generator_state(device, state)


def random_sources(model: nn.Module) -> dict[str, RandomSource]:
    """The generators that modules hold as attributes, by dotted name."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if _is_source(value.__class__)
    }


def sources_in_code(function: Any) -> dict[str, RandomSource]:
    """The generators that a function's code reaches by a global name or a closure, by that name."""
    code = getattr(function, "__code__", None)
    if code is None:  # not a function of Python's
        return {}
    named = {name: function.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that nothing was put into yet
            named[name] = cell.cell_contents
    return {name: value for name, value in named.items() if _is_source(value.__class__)}


@lru_cache(maxsize=4096)
def _is_source(kind: type) -> bool:
    # Remembered by type: the ghost engine asks for all attributes of all modules at each step.
    return issubclass(kind, RandomSource)


def source_state(source: RandomSource) -> Any:
    """The state of one generator, whatever its kind."""
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if isinstance(source, random.Random):
        return source.getstate()
    return source.get_state()


def set_source_state(source: RandomSource, state: Any) -> None:
    """Put one generator into a state that `source_state` gave."""
    if isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif isinstance(source, random.Random):
        source.setstate(state)
    else:
        source.set_state(state)


def as_bytes(state: Any) -> bytes:
    """A generator's state as bytes, to be compared.

    >>> as_bytes(torch.get_rng_state()) == as_bytes(torch.get_rng_state())
    True
    """
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    return pickle.dumps(state)


@contextmanager
def drawing_again(states: Mapping[str, Tensor] | None) -> Iterator[None]:
    """The same random numbers as from these states; afterwards torch's generators are as found."""
    if states is None:
        yield
        return
    before = {device: generator_state(torch.device(device)) for device in {"cpu", *states}}
    try:
        set_torch_states(states)
        yield
    finally:
        set_torch_states(before)


def all_states(modules: Iterable[nn.Module] = ()) -> list[tuple[Callable[[Any], None], Any]]:
    """The states of all generators: torch's, numpy's, Python's, and those these modules hold."""
    states: list[tuple[Callable[[Any], None], Any]] = [
        (set_torch_states, torch_states()),
        (np.random.set_state, np.random.get_state()),
        (random.setstate, random.getstate()),
    ]
    held = [each for module in modules for each in vars(module).values()]
    sources = [each for each in held if _is_source(each.__class__)]
    return states + [(partial(set_source_state, each), source_state(each)) for each in sources]


def seed_foreign(seed: int) -> None:
    """Seed numpy's and Python's own generators."""
    np.random.seed(seed)
    random.seed(seed)


def foreign_states() -> tuple[bytes, bytes]:
    """The states of numpy's and Python's own generators, to be compared."""
    return as_bytes(np.random.get_state()), as_bytes(random.getstate())


def set_all_states(states: Iterable[tuple[Callable[[Any], None], Any]]) -> None:
    """Put every generator back into a state that `all_states` gave."""
    for put, state in states:
        put(state)


@contextmanager
def randomness_kept(modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Leave every generator as it was: torch's, numpy's, Python's, and those these modules hold."""
    states = all_states(modules)
    try:
        yield
    finally:
        set_all_states(states)
