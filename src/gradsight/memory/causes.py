"""The likely cause of a step that checkpointing changed.

A cause is a function from the evidence to words, or None. They are asked in the order of this file:
what is certain before what is probable.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from gradsight.core.random_state import RandomSource, random_sources, sources_in_code
from gradsight.memory.differences import StepDifferences


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about the difference."""

    model: nn.Module
    differences: StepDifferences
    guilty: str | None = None
    """The module whose recomputation gave something else, by name."""
    error: str = ""
    """The message, where the checkpointed step raised."""
    reproducible: bool = True
    """Whether the plain step, run twice, is the same."""

    def modules(self) -> dict[str, nn.Module]:
        """The guilty module and its parts, by name; all modules where none was found."""
        if self.guilty is None:
            return dict(self.model.named_modules())
        return dict(self.model.get_submodule(self.guilty).named_modules(prefix=self.guilty))

    def owners_of_buffers(self) -> dict[str, nn.Module]:
        """The modules whose buffers differ."""
        names = [name.rpartition(".")[0] for name in self.differences.buffers]
        return {name: self.model.get_submodule(name) for name in names}


ERRORS_OF_ANOTHER_PATH = (
    "number of tensors",
    "different metadata",
    "more tensors",
    "not found in storage",
)
"""Parts of the messages in which torch says that a recomputation made other tensors."""

ERRORS_OF_CHANGED_INPUTS = (
    "modified by an inplace operation",
    "writes in place to what it is given",
    "was given was written to",
)
"""Parts of the messages, torch's and ours, that an input of a block was written to."""

Cause = Callable[[Evidence], str | None]
CAUSES: list[Cause] = []


def cause(function: Cause) -> Cause:
    """Add a cause to the ones that are asked."""
    CAUSES.append(function)
    return function


def likely_cause(evidence: Evidence) -> str:
    """The first cause that fits, with what to do about it."""
    for ask in CAUSES:
        if words := ask(evidence):
            return words
    return (
        f"something{_in_guilty_module(evidence)} gives another result when it is run again: look "
        "for state that its forward changes, and for randomness outside torch's own generator"
    )


def _in_guilty_module(evidence: Evidence) -> str:
    if not evidence.guilty:
        return ""
    return f" in {evidence.guilty}"


@cause
def changed_in_place(evidence: Evidence) -> str | None:
    """An input of a block is no longer what it was."""
    if not any(text in evidence.error for text in ERRORS_OF_CHANGED_INPUTS):
        return None
    return (
        "a tensor that a block was given is changed in place before the block is recomputed (an "
        "argument by keyword is the usual one): clone it before changing it, for example "
        "mask = mask + 1 instead of mask += 1"
    )


@cause
def another_path(evidence: Evidence) -> str | None:
    """The recomputation did not even make the same tensors."""
    if not any(text in evidence.error for text in ERRORS_OF_ANOTHER_PATH):
        return None
    return (
        "a block runs other operations the second time: look for counters, caches and random "
        "branches in its forward"
    )


@cause
def batch_statistics(evidence: Evidence) -> str | None:
    """Running statistics are updated by the forward pass and again by the recomputation."""
    for name, module in evidence.owners_of_buffers().items():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            return (
                f"BatchNorm statistics: {name} updates its running mean and variance in forward "
                "and again in recomputation. Leave it out of the checkpointed blocks (blocks=...), "
                "or use GroupNorm or track_running_stats=False"
            )
    return None


@cause
def spectral_norm(evidence: Evidence) -> str | None:
    """Each run makes a step of power iteration."""
    for name, module in evidence.owners_of_buffers().items():
        if "SpectralNorm" in type(module).__name__ or hasattr(module, "weight_u"):
            return (
                f"spectral norm: {name} makes a step of power iteration in forward and another in "
                "recomputation, so the weight is not the same. Leave it out of the checkpointed "
                "blocks, or cache it with torch.nn.utils.parametrize.cached()"
            )
    return None


@cause
def rrelu(evidence: Evidence) -> str | None:
    """RReLU fills its slopes in place, and recomputation stops before it does.

    It ends at the last tensor that backward needs.
    """
    for name, module in evidence.modules().items():
        if isinstance(module, nn.RReLU):
            return (
                f"RReLU: the slopes that {name} drew are lost in recomputation, which stops before "
                "it fills them again. Use LeakyReLU or PReLU, or leave the block out of the "
                "checkpointed ones (blocks=...)"
            )
    return None


@cause
def own_generator(evidence: Evidence) -> str | None:
    """Checkpointing sets back torch's own generator and no other."""
    moved = {
        name: source
        for name, source in random_sources(evidence.model).items()
        if name in evidence.differences.random
    }
    for name, source in moved.items():
        return _words_on_own(name, source)
    return None


def _words_on_own(name: str, source: RandomSource) -> str:
    kind = f"{type(source).__module__.split('.')[0]}.{type(source).__name__}"
    return (
        f"own generator: {name} is a {kind}, and only torch's own generator is set back for "
        "recomputation. Draw from that one, or draw outside the checkpointed block and pass "
        "the result in"
    )


@cause
def numpy_randomness(evidence: Evidence) -> str | None:
    """numpy's generator went further than in the plain step."""
    for name, module in (("numpy's generator", "numpy"), ("Python's generator", "Python's random")):
        if name in evidence.differences.random:
            return (
                f"{module} randomness{_in_guilty_module(evidence)}: it is drawn anew in "
                "recomputation, because only torch's own generator is set back. Draw with torch, "
                "or outside the checkpointed block"
            )
    return None


@cause
def generator_in_the_code(evidence: Evidence) -> str | None:
    """No generator that was looked at moved, but the code near the difference has another one."""
    for name, source in _sources_near(evidence).items():
        return _words_on_own(name, source)
    return None


@cause
def not_reproducible(evidence: Evidence) -> str | None:
    """The plain step is another one each time, so nothing can be said about checkpointing."""
    if evidence.reproducible:
        return None
    return (
        "the plain step itself is different each time it is built and run: seed every source of "
        "randomness in build(), and on CUDA try torch.use_deterministic_algorithms(True)"
    )


def _sources_near(evidence: Evidence) -> dict[str, RandomSource]:
    """Generators that the guilty module's code reaches; those it holds were looked at already."""
    if evidence.guilty is None:
        return {}
    module = evidence.model.get_submodule(evidence.guilty)
    found = sources_in_code(type(module).forward)
    if not evidence.error:
        return found
    # Where the step raised there was nothing to compare.
    held = random_sources(module)
    return {
        f"{evidence.guilty}.{name}".lstrip("."): source for name, source in held.items()
    } | found
