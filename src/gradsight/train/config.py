"""What `gradsight train` can be told: nested dataclasses, whose fields are the options. No torch."""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from cyclopts import Group, Parameter

from gradsight.errors import UsageError

Flag = Annotated[bool, Parameter(negative="")]
DATA, MODEL = Group("Data", sort_key=1), Group("Model", sort_key=2)
TRAINING, LOOKING = Group("Training", sort_key=3), Group("Evaluation and logging", sort_key=4)
MACHINE, FILES = Group("Machine", sort_key=5), Group("Files", sort_key=6)
INSTRUMENTS = Group("Instruments", sort_key=7)


@dataclass(frozen=True)
class ModelShape:
    """Departures from the architecture, under the names of Hugging Face's GPT2Config."""

    n_layer: int | None = None
    """Blocks, instead of the architecture's."""
    n_head: int | None = None
    """Attention heads, instead of the architecture's."""
    n_embd: int | None = None
    """Width, instead of the architecture's."""
    vocab_size: int | None = None
    """Tokens known, instead of the architecture's."""
    dropout: float = 0.0
    """Dropout, of which GPT-2 has three kinds."""


@dataclass(frozen=True)
class AdamW:
    """The optimizer's settings beside the learning rate."""

    weight_decay: float = 0.1
    """Of matrices; biases and norms do not decay."""
    beta1: float = 0.9
    """Memory of the mean."""
    beta2: float = 0.95
    """Memory of the squares."""
    eps: float = 1e-8
    """Added to the root of the squares."""
    min_lr_ratio: float = 0.1
    """Where the cosine ends, as a share of the learning rate."""


@dataclass(frozen=True)
class GradDump:
    """Gradients on disk."""

    enabled: Flag = False
    """Whether gradients are dumped."""
    start_step: int = 0
    """The first step that is dumped."""
    end_step: int | None = None
    """The last step that may be dumped."""
    step_interval: int = 1
    """Every so many steps."""
    save_first_n: int | None = None
    """Only so many first rows of each gradient."""
    keep_last: int | None = None
    """Let older dumps go."""
    max_bytes: int | None = None
    """Let older dumps go above so many bytes."""
    asynchronous: Flag = True
    """Whether training waits only for a copy in memory."""
    dump_on: Literal["warning", "critical"] | None = None
    """Also dump a step that is judged so."""


@dataclass(frozen=True)
class Ghost:
    """Scores of samples; on with --method GradDotProd."""

    precondition: Literal["adam"] | None = None
    """Scale the direction as the optimizer scales the gradient."""
    refresh_every: int = 1
    """Compute the validation gradient anew every so many steps."""
    exact_grad: Flag = False
    """Gradients bit for bit those of --method Regular, a little slower."""
    per_parameter: Flag = False
    """Also the scores of each parameter."""
    self_check: Flag = True
    """Compare with the slow exact twin at the first step."""


@dataclass(frozen=True)
class Watching:
    """The record of the run and its judgement."""

    histogram_interval: int = 50
    """Histograms of gradients every so many steps."""
    health: Flag = True
    """Whether steps are judged."""
    recorder: Literal["true", "false", "batch"] = "true"
    """Diagnose an incident on the spot; batch: also keep its batch."""
    sinks: tuple[str, ...] = ()
    """Also log to console, wandb, tensorboard or trackio."""


@dataclass(frozen=True)
class Callbacks:
    """The instruments."""

    grad_dump: GradDump = GradDump()
    ghost: Ghost = Ghost()
    watch: Watching = Watching()


@dataclass(frozen=True)
class Trainer:
    """The trainer's parts."""

    callbacks: Annotated[Callbacks, Parameter(group=INSTRUMENTS)] = Callbacks()


@Parameter(name="*", name_transform=lambda name: name)
@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run computes, and where it is kept."""

    data: Annotated[str | None, Parameter(group=DATA)] = None
    """A text file, a folder of text (sub-folders are domains), a .bin of uint16 tokens, or a folder
    of such files. Without it: the source of Python's standard library.
    """
    data_weights: Annotated[str | None, Parameter(group=DATA)] = None
    """Sample ids to keep, one per line, or a CSV of sample_id,weight; `gradsight influence
    --export` writes both.
    """
    tokenizer: Annotated[str | None, Parameter(group=DATA)] = None
    """A tokenizer.json of Hugging Face's, by which the tokens of a .bin are shown as text."""
    block_size: Annotated[int | None, Parameter(group=DATA)] = None
    """Tokens in a sample; by default the architecture's."""
    architecture: Annotated[str, Parameter(group=MODEL)] = "char"
    """char (about 10M parameters, bytes), GPT2-Small, GPT2-Medium or GPT2-Large."""
    gradient_checkpointing: Annotated[Flag, Parameter(group=MODEL)] = False
    """true or false: recompute activations in backward instead of keeping them."""
    model: Annotated[ModelShape, Parameter(group=MODEL)] = ModelShape()
    method: Annotated[Literal["GradDotProd", "Regular"], Parameter(group=TRAINING)] = "GradDotProd"
    """GradDotProd scores every training sample against the validation batch; Regular only trains.
    """
    batch_size: Annotated[int, Parameter(group=TRAINING)] = 4
    """Samples per process and micro-batch."""
    gradient_accumulation_steps: Annotated[int, Parameter(group=TRAINING)] = 1
    """Micro-batches per step."""
    max_steps: Annotated[int, Parameter(name=["--max_steps", "--max_iters"], group=TRAINING)] = 1000
    """Optimizer steps of the whole run."""
    learning_rate: Annotated[float, Parameter(group=TRAINING)] = 6e-4
    """The highest, after warm-up; a cosine leads down from it."""
    warmup_steps: Annotated[int, Parameter(group=TRAINING)] = 20
    """Steps in which the learning rate rises."""
    grad_clip: Annotated[float, Parameter(group=TRAINING)] = 1.0
    """Largest norm of the gradient; 0 is off."""
    seed: Annotated[int, Parameter(group=TRAINING)] = 0
    """Of weights, dropout and the order of samples."""
    optimizer: Annotated[AdamW, Parameter(group=TRAINING)] = AdamW()
    val_batch_size: Annotated[int, Parameter(group=LOOKING)] = 4
    """Validation samples that training samples are scored against."""
    dot_prod_save_interval: Annotated[int, Parameter(group=LOOKING)] = 10
    """Write scores every so many steps."""
    eval_interval: Annotated[int, Parameter(group=LOOKING)] = 100
    """Losses of train, val and test every so many steps, at the start and at the end."""
    eval_samples: Annotated[int, Parameter(group=LOOKING)] = 32
    """Samples of each split that an evaluation looks at."""
    log_interval: Annotated[int, Parameter(group=LOOKING)] = 10
    """A line, and memory, every so many steps."""
    log_grad_dist_every: Annotated[int, Parameter(group=LOOKING)] = 5
    """The distribution of gradients every so many epochs and at the end; 0 is off."""
    parallel: Annotated[Literal["ddp", "fsdp"], Parameter(group=MACHINE)] = "ddp"
    """How several processes share the work."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(group=MACHINE)] = "auto"
    """Where to train; auto takes a GPU where there is one."""
    model_dtype: Annotated[Literal["float32", "bfloat16"], Parameter(group=MACHINE)] = "float32"
    """Of the weights."""
    train_dtype: Annotated[Literal["float32", "bfloat16"], Parameter(group=MACHINE)] = "float32"
    """Of the computation; bfloat16 is autocast."""
    startup_report: Annotated[Flag, Parameter(group=MACHINE)] = True
    """true or false: predict memory before the start."""
    results_dir: Annotated[str, Parameter(group=FILES)] = "Results"
    """Where experiments are kept."""
    experiment: Annotated[str | None, Parameter(group=FILES)] = None
    """The name of this run's folder; by default method and architecture."""
    checkpoint_interval: Annotated[int, Parameter(group=FILES)] = 100
    """Save what --resume needs every so many steps, and at the end; 0: only at the end."""
    keep_checkpoints: Annotated[int, Parameter(group=FILES)] = 2
    """How many checkpoints stay."""
    trainer: Trainer = Trainer()

    def __post_init__(self) -> None:
        _refuse_bounds(self)

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.experiment or f"{self.method}-{self.architecture}"


ALIASES = {"max_iters": "max_steps"}
_POSITIVE = (
    "batch_size", "gradient_accumulation_steps", "max_steps", "val_batch_size", "dot_prod_save_interval", "eval_interval",
    "eval_samples", "log_interval", "keep_checkpoints", "block_size", "model.n_layer", "model.n_head", "model.n_embd",
    "model.vocab_size", "trainer.callbacks.ghost.refresh_every", "trainer.callbacks.watch.histogram_interval",
    "trainer.callbacks.grad_dump.step_interval",
)  # fmt: skip
_NOT_NEGATIVE = (
    "learning_rate",
    "warmup_steps",
    "grad_clip",
    "log_grad_dist_every",
    "checkpoint_interval",
    "seed",
)


def _refuse_bounds(settings: Settings) -> None:
    """Refuse numbers that cannot be meant."""
    values = dict(flat(settings))
    for name in _POSITIVE:
        if values[name] is not None and values[name] < 1:
            raise UsageError(f"--{name} must be 1 or more, got {values[name]}")
    for name in _NOT_NEGATIVE:
        if not (values[name] >= 0 and math.isfinite(values[name])):
            raise UsageError(f"--{name} must be 0 or more, got {values[name]}")
    if not 0 <= settings.model.dropout < 1:
        raise UsageError(
            f"--model.dropout must be at least 0 and below 1, got {settings.model.dropout}"
        )
    if settings.experiment is not None and (
        not settings.experiment.strip("./ ") or "/" in settings.experiment
    ):
        raise UsageError(
            f"--experiment is the name of a folder inside --results_dir, got {settings.experiment!r}"
        )


def flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option by its dotted name, with its value."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def to_dict(settings: Settings) -> dict[str, Any]:
    """Nested plain values, for config.json."""
    return dataclasses.asdict(settings)


def from_dict(values: Mapping[str, Any], where: str) -> Settings:
    """Settings from nested plain values: what is missing has its default, what is unknown or wrong
    is an error.
    """
    return _build(Settings, values, where, "")  # type: ignore[no-any-return]


def _build(kind: Any, values: Any, where: str, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise UsageError(
            f"{where}: {prefix.rstrip('.') or 'it'} should hold settings by name, but holds {values!r}"
        )
    hints, given = get_type_hints(kind), {}
    for key, value in values.items():
        name = ALIASES.get(key, key) if not prefix else key
        if name not in hints:
            raise UsageError(
                f"{where}: unknown setting {prefix + str(key)!r}.{nearest(prefix + str(key))}"
            )
        nested = dataclasses.is_dataclass(hints[name])
        full = f"{prefix}{name}"
        given[name] = (
            _build(hints[name], value, where, f"{full}.")
            if nested
            else _value(hints[name], value, where, full)
        )
    return kind(**given)


def _value(kind: Any, value: Any, where: str, name: str) -> Any:
    """A plain value as the option's type takes it."""
    if str(kind).startswith("tuple"):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise UsageError(f"{where}: {name} should be a list of names, got {value!r}")
        return tuple(items)
    choices = [
        choice
        for part in (kind, *get_args(kind))
        for choice in get_args(part)
        if isinstance(choice, str)
    ]
    types = [part for part in (kind, *get_args(kind)) if isinstance(part, type)]
    if isinstance(value, bool) and "true" in choices:  # YAML reads the words true and false so
        value = str(value).lower()
    if isinstance(value, str) and float in types:  # YAML takes 1e-4 for text
        value = _number(value)
    fits = (
        (value is None and NoneType in types)
        or (isinstance(value, str) and (str in types or value in choices))
        or (isinstance(value, bool) and bool in types)
        or (isinstance(value, int) and not isinstance(value, bool) and int in types)
        or (isinstance(value, int | float) and not isinstance(value, bool) and float in types)
    )
    if not fits:
        wanted = ", ".join(choices) or " or ".join(
            part.__name__ for part in types if part is not NoneType
        )
        raise UsageError(f"{where}: {name} should be {wanted}, got {value!r}")
    return float(value) if float in types and value is not None else value


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def nearest(name: str) -> str:
    """A question for the option that was probably meant."""
    known = [*dict(flat(Settings())), *ALIASES]
    found = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {found[0]}?" if found else ""
