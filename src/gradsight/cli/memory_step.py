"""The training step that a memory command is asked about, by its options."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from cyclopts import Parameter

from gradsight.cli.build_function import load_build
from gradsight.cli.config_model import (
    USUAL_BATCH,
    config_step,
    dtype_of,
    load_config,
    names_build_function,
    usual_length,
)
from gradsight.errors import UsageError
from gradsight.memory.lora_options import TYPES
from gradsight.train.models import (
    architecture,
    refuse_without_transformers,
    training_step,
)

AS_BUILT = "as build() makes it"
Optimizer = Literal["adamw", "adam", "sgd", "adagrad", "rmsprop", "none"]


@dataclass(frozen=True)
class ModelChoice:
    """A model that was named on the command line, and the batch of its step."""

    title: str
    batch_size: int | None
    """None where the build function makes a batch that we do not know the size of."""
    block_size: int | None
    sized: Callable[[int | None], Callable[[], Any]] | None
    """The build function for a batch size (None: the usual one); None where it has but one."""
    only: Callable[[], Any] | None = None
    in_type: bool = False
    """Whether the build function makes the model in the type that was asked for."""
    type_origin: str = "the default"
    """Where the parameters' type comes from if --dtype does not name one."""

    def build(self, batch_size: int | None = None) -> Callable[[], Any]:
        """The build function, for a batch of this size where it can be chosen."""
        if self.sized is None:
            assert self.only is not None
            return self.only
        return self.sized(batch_size)


@Parameter(name="*", name_transform=lambda name: name)
@dataclass(frozen=True)
class StepOptions:
    """The training step in question."""

    architecture: str | None = None
    """A built-in model: char, GPT2-Small, GPT2-Medium or GPT2-Large, from Hugging Face's
    configuration.
    """
    batch_size: int | None = None
    """Samples in a batch on each device, of a built-in model, of a configuration (default 1), or
    of a build function that takes batch_size.
    """
    block_size: int | None = None
    """Tokens in a sample, of the same models. Default of a configuration: 1024, or the number of
    its positions if that is smaller.
    """
    dropout: float = 0.0
    """Dropout of a built-in model."""
    optimizer: Optimizer = "adamw"
    """The optimizer of the step; none: forward and backward only."""
    blocks: str | None = None
    """The modules that count as blocks, with commas between their names, where they are not found
    by themselves.
    """

    @property
    def block_names(self) -> list[str] | None:
        if self.blocks is None:
            return None
        return [name.strip() for name in self.blocks.split(",")]

    @property
    def optimizer_name(self) -> str | None:
        if self.optimizer == "none":
            return None
        return self.optimizer

    def build(self, place: str | None, architecture: str | None = None) -> Callable[[], Any]:
        """The build function of a file, of a configuration or of a built-in model."""
        return self.choice(place, architecture).build(self.batch_size)

    def choice(
        self, place: str | None, architecture: str | None = None, dtype: str | None = None
    ) -> ModelChoice:
        """The model that is meant, with its batch as far as that can be said."""
        self._refuse_nonsense()
        name = architecture or self.architecture
        if (place is None) == (name is None):
            raise UsageError(
                "give either a model (a configuration or file.py:build) or --architecture, for "
                "example --architecture GPT2-Small"
            )
        if place is None:
            assert name is not None
            samples, tokens = self.batch_shape(name)
            refuse_without_transformers(name)
            return ModelChoice(name, samples, tokens, partial(self.sized, name))
        if names_build_function(place):
            return self._from_file(place)
        return self._from_config(place, dtype)

    def _refuse_nonsense(self) -> None:
        for option in ("batch_size", "block_size"):
            size = getattr(self, option)
            if size is not None and size < 1:
                raise UsageError(f"--{option} must be 1 or more, got {size}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be at least 0 and below 1, got {self.dropout}")

    def _from_file(self, place: str) -> ModelChoice:
        """A build function, with the sizes that it takes."""
        build = load_build(place)
        taken = inspect.signature(build).parameters
        given = {"batch_size": self.batch_size, "block_size": self.block_size}
        sizes = {name: size for name, size in given.items() if size is not None}
        if self.dropout or any(name not in taken for name in sizes):
            raise UsageError(
                "--batch_size, --block_size and --dropout are for --architecture; "
                "file.py:build makes its own batch and model, unless it takes batch_size and "
                "block_size as arguments"
            )
        if "batch_size" not in taken:
            only = partial(build, **sizes)
            return ModelChoice(place, None, self.block_size, None, only, type_origin=AS_BUILT)

        def sized(size: int | None) -> Callable[[], Any]:
            if size is None:
                return partial(build, **sizes)
            return partial(build, **{**sizes, "batch_size": size})

        return ModelChoice(place, self.batch_size, self.block_size, sized, type_origin=AS_BUILT)

    def _from_config(self, place: str, dtype: str | None) -> ModelChoice:
        """A Hugging Face configuration."""
        if self.dropout:
            raise UsageError("--dropout is for --architecture; a configuration has its own")
        config = load_config(place)
        named = dtype_of(config)
        samples = self.batch_size or USUAL_BATCH
        tokens = self.block_size or usual_length(config)

        def sized(size: int | None) -> Callable[[], Any]:
            return config_step(config, size or samples, tokens, TYPES[dtype or named or "fp32"])

        origin = "the default" if named is None else "from the configuration"
        return ModelChoice(place, samples, tokens, sized, in_type=True, type_origin=origin)

    def title(self, place: str | None) -> str:
        """The step's name in the output."""
        if place is not None:
            return place
        assert self.architecture is not None
        batch, length = self.batch_shape(self.architecture)
        return f"{self.architecture}, batch {batch} x {length} tokens"

    def batch_shape(self, name: str) -> tuple[int, int]:
        """Samples and tokens in a batch of a built-in model."""
        shape = architecture(name)
        return self.batch_size or shape.batch_size, self.block_size or shape.block_size

    def sized(self, name: str, batch_size: int | None) -> Callable[[], Any]:
        """The build function of a built-in model with another batch size."""
        return training_step(
            name, batch_size=batch_size, block_size=self.block_size, dropout=self.dropout
        )
