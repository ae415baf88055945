"""The training step that a memory command is asked about, by its options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gradsight.cli.build_function import load_build
from gradsight.errors import UsageError
from gradsight.train.models import architecture, training_step

Device = Annotated[
    Literal["cpu", "cuda"],
    Parameter(help="cuda: what CUDA's operators keep; no GPU is needed for that."),
]
Optimizer = Literal["adamw", "adam", "sgd", "adagrad", "rmsprop", "none"]


@Parameter(name="*", name_transform=lambda name: name)
@dataclass(frozen=True)
class StepOptions:
    """The training step in question."""

    architecture: str | None = None
    """A built-in model: char, GPT2-Small, GPT2-Medium or GPT2-Large, from Hugging Face's
    configuration.
    """
    batch_size: int | None = None
    """Samples in a batch of a built-in model."""
    block_size: int | None = None
    """Tokens in a sample of a built-in model."""
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
        """The build function of a file, or of a built-in model."""
        for option in ("batch_size", "block_size"):
            size = getattr(self, option)
            if size is not None and size < 1:
                raise UsageError(f"--{option} must be 1 or more, got {size}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be at least 0 and below 1, got {self.dropout}")
        name = architecture or self.architecture
        if (place is None) == (name is None):
            raise UsageError(
                "give either file.py:build or --architecture, for example --architecture GPT2-Small"
            )
        if place is not None:
            if self.batch_size or self.block_size or self.dropout:
                raise UsageError(
                    "--batch_size, --block_size and --dropout are for --architecture; "
                    "file.py:build makes its own batch and model"
                )
            return load_build(place)
        assert name is not None
        return training_step(
            name, batch_size=self.batch_size, block_size=self.block_size, dropout=self.dropout
        )

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

    def sized(self, name: str, batch_size: int) -> Callable[[], Any]:
        """The build function of a built-in model with another batch size."""
        return training_step(
            name, batch_size=batch_size, block_size=self.block_size, dropout=self.dropout
        )
