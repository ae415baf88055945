"""The settings of `gradsight train`: nested dataclasses, whose fields are the options. No torch."""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from cyclopts import Group, Parameter

from gradsight.errors import UsageError
from gradsight.values.whole_numbers import LARGEST

# cyclopts would add a --no- twin for every switch.
DeviceName = Literal["auto", "cpu", "cuda"]
Flag = Annotated[bool, Parameter(negative="")]
DATA = Group("Data", sort_key=1)
MODEL = Group("Model", sort_key=2)
TRAINING = Group("Training", sort_key=3)
LOOKING = Group("Evaluation and logging", sort_key=4)
MACHINE = Group("Machine", sort_key=5)
FILES = Group("Files", sort_key=6)
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
    format: Literal["parquet", "pkl"] = "parquet"
    """pkl: beside each file, the same columns as a pickled dict of numpy arrays."""


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
    of such files. Without it: the source of Python's standard library."""
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
    """GradDotProd scores each training sample against the validation batch; Regular trains only."""
    batch_size: Annotated[int, Parameter(group=TRAINING)] = 4
    """Samples per process and micro-batch."""
    gradient_accumulation_steps: Annotated[int, Parameter(group=TRAINING)] = 1
    """Micro-batches per step."""
    max_steps: Annotated[int, Parameter(name=["--max_steps", "--max_iters"], group=TRAINING)] = 1000
    """Optimizer steps of the whole run."""
    epochs: Annotated[int | None, Parameter(group=TRAINING)] = None
    """Passes over the data, instead of --max_steps: as many steps as they take."""
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
    ghost_mode: Annotated[Literal["auto", "concat", "two_pass"], Parameter(group=LOOKING)] = "auto"
    """The validation batch in one pass with the training batch (concat), or in a pass of its own
    (two_pass); auto takes the cheaper one that can be had."""
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
    device: Annotated[DeviceName, Parameter(group=MACHINE)] = "auto"
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
    "batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "epochs",
    "val_batch_size",
    "dot_prod_save_interval",
    "eval_interval",
    "eval_samples",
    "log_interval",
    "keep_checkpoints",
    "block_size",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.vocab_size",
    "trainer.callbacks.ghost.refresh_every",
    "trainer.callbacks.watch.histogram_interval",
    "trainer.callbacks.grad_dump.step_interval",
)
_NOT_NEGATIVE = (
    "trainer.callbacks.grad_dump.start_step",
    "learning_rate",
    "warmup_steps",
    "grad_clip",
    "log_grad_dist_every",
    "checkpoint_interval",
    "seed",
)


def _refuse_bounds(settings: Settings) -> None:
    """Refuse numbers that cannot be meant."""
    values = dict(options_of(settings))
    for name in _POSITIVE:
        if values[name] is not None and values[name] < 1:
            raise UsageError(f"--{name} must be 1 or more, got {values[name]}")
    for name, value in values.items():
        if isinstance(value, int) and value > LARGEST:
            raise UsageError(f"--{name} must be below 2**63, got {value}")
    for name in _NOT_NEGATIVE:
        if not (values[name] >= 0 and math.isfinite(values[name])):
            raise UsageError(f"--{name} must be 0 or more, got {values[name]}")
    if settings.epochs is not None and settings.max_steps != Settings.max_steps:
        raise UsageError(
            f"--epochs {settings.epochs} and --max_steps {settings.max_steps} both say when the "
            f"run ends: give one of them"
        )
    dropout = settings.model.dropout
    if not 0 <= dropout < 1:
        raise UsageError(f"--model.dropout must be at least 0 and below 1, got {dropout}")
    folder = settings.experiment
    if folder is not None and (not folder.strip("./ ") or "/" in folder):
        raise UsageError(
            f"--experiment is the name of a folder inside --results_dir, got {folder!r}"
        )


def options_of(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option by its dotted name, with its value."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from options_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def to_dict(settings: Settings) -> dict[str, Any]:
    """Nested plain values, for config.json."""
    return dataclasses.asdict(settings)


def from_dict(values: Mapping[str, Any], where: str) -> Settings:
    """Settings from nested plain values, as a config file holds them.

    What is missing has its default; what is unknown or wrong is an error.
    """
    # Not left to cyclopts, which would take the text "5" for a number and 1 for a switch.
    return _build(Settings, values, where, "")  # type: ignore[no-any-return]


def _build(kind: Any, values: Any, where: str, prefix: str) -> Any:
    """A dataclass of settings; `prefix` is its dotted place among all settings."""
    if not isinstance(values, Mapping):
        place = prefix.rstrip(".") or "it"
        raise UsageError(f"{where}: {place} should hold settings by name, but holds {values!r}")
    hints = get_type_hints(kind)
    given = {}
    for key, value in values.items():
        name = key if prefix else ALIASES.get(key, key)
        if name not in hints:
            unknown = f"{prefix}{key}"
            raise UsageError(f"{where}: unknown setting {unknown!r}.{_did_you_mean(unknown)}")
        if dataclasses.is_dataclass(hints[name]):
            given[name] = _build(hints[name], value, where, f"{prefix}{name}.")
        else:
            given[name] = _value(hints[name], value, f"{where}: {prefix}{name}")
    return kind(**given)


def _value(kind: Any, value: Any, where: str) -> Any:
    """A plain value as the option's type takes it."""
    if str(kind).startswith("tuple"):
        return _names(value, where)
    members = (kind, *get_args(kind))
    types = [member for member in members if isinstance(member, type)]
    choices = [word for member in members for word in get_args(member) if isinstance(word, str)]
    if isinstance(value, bool) and "true" in choices:  # YAML reads the words true and false so
        value = str(value).lower()
    if isinstance(value, str) and float in types:  # YAML takes 1e-4 for text
        value = _number(value)
    if value in choices or type(value) in types:
        return value
    if float in types and type(value) is int:
        return float(value)
    wanted = ", ".join(choices)
    if not choices:
        wanted = " or ".join(known.__name__ for known in types if known is not NoneType)
    raise UsageError(f"{where} should be {wanted}, got {value!r}")


def _names(value: Any, where: str) -> tuple[str, ...]:
    """Several names, or a single one."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{where} should be a list of names, got {value!r}")
    return tuple(names)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _did_you_mean(name: str) -> str:
    """A question for the option that was probably meant."""
    known = [*dict(options_of(Settings())), *ALIASES]
    near = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {near[0]}?" if near else ""
