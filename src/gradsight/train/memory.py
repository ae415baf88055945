"""What a run says about memory: before it starts, and when there was not enough."""

import os
import resource
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradsight.core.devices import is_accelerator, total_bytes
from gradsight.errors import UsageError
from gradsight.memory.monitor import available_memory, total_memory
from gradsight.memory.predict import largest_batch, predict_peak_memory
from gradsight.memory.startup import HEADROOM, startup_report
from gradsight.train.config import Settings, to_dict
from gradsight.train.evaluate import NextTokenLoss
from gradsight.train.models import ARCHITECTURES, architecture, model_from_settings
from gradsight.values.sizes import format_size

_SHORTEST = 16
"""The shortest block that is worth proposing."""
_MOST_MICRO_BATCHES = 1000
"""More than anybody wants: the batch was a slip of the hand."""
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """What a run is expected to take, before it starts."""

    lines: list[str]
    """Device, parameters, expected peak, recommended batch size, as text."""
    peak_bytes: int


def expected_memory(settings: Settings, device: torch.device, samples: int) -> ExpectedMemory:
    """The startup report."""
    policy = _policy(settings)
    report = startup_report(
        build_for(settings), settings.batch_size, policy=policy, device=device.type
    )
    lines = str(replace(report, samples=samples)).splitlines()
    if settings.method == "GradDotProd":
        size = format_size(report.expected.by_kind["parameters"])
        lines.insert(3, f"Scoring samples: {size} more, for the validation batch's gradient")
    return ExpectedMemory(lines, report.expected.peak_bytes)


def refuse_what_cannot_fit(settings: Settings, device: torch.device, config: Path) -> None:
    """Refuse a step that takes more memory than there is, before the kernel ends the process."""
    room = total_memory(device.type)
    size = settings.batch_size
    if settings.method == "GradDotProd":
        size = max(size, settings.val_batch_size)
    together = 1
    if device.type == "cpu":  # all processes of the machine share its memory
        together = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The prediction takes seconds: it is left to those few settings that look dangerous.
    if room is None or together * _at_most(settings, size) <= room:
        return
    use = predict_peak_memory(
        build_for(settings)(size), policy=_policy(settings), device=device.type
    )
    if together * use.peak_bytes > room:
        options = f"--batch_size {settings.batch_size}"
        if size != settings.batch_size:
            options = f"--val_batch_size {size}"
        raise UsageError(
            "\n".join(
                [
                    f"{options} with --block_size {settings.block_size} would take "
                    f"{format_size(together * use.peak_bytes)}, and there are "
                    f"{format_size(room)} on {device.type} in all.",
                    *_what_fits(settings, device, config),
                ]
            )
        )


def _at_most(settings: Settings, size: int) -> int:
    """Bytes of a step, roughly and rather too many: about 1.4 times those of the prediction."""
    usual = architecture(settings.architecture)
    layers = settings.model.n_layer or usual.layers
    width = settings.model.n_embd or usual.width
    vocabulary = settings.model.vocab_size or usual.vocabulary
    tokens = size * (settings.block_size or usual.block_size)
    parameters = 12 * layers * width**2 + vocabulary * width
    # Weights, gradients, two of AdamW's, one for scoring; forty numbers per unit of each block, and
    # four per logit.
    return 4 * (5 * parameters + tokens * (40 * layers * width + 4 * vocabulary))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; the CPU's allocator says so in words only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def advice(settings: Settings, device: torch.device, config: Path) -> str:
    """Commands that would fit instead; they build on the run's config.json where there is one."""
    lines = [
        f"out of memory on {device.type} with --batch_size {settings.batch_size} "
        f"and --block_size {settings.block_size}.",
        *_what_fits(settings, device, config),
    ]
    return "\n".join(lines)


def _what_fits(settings: Settings, device: torch.device, config: Path) -> list[str]:
    room = int(HEADROOM * _room(device))
    base = "gradsight train YOUR_OPTIONS"
    if config.is_file():
        base = f"gradsight train --config {shlex.quote(str(config))} --overwrite"
    lines = [
        "What should fit:",
        f"  {base} {_smaller_batch(settings, device, room)}",
    ]
    if (length := _shorter_block(settings, device, room)) is not None:
        lines.append(f"  {base} --block_size {length}")
    if (name := _smaller_architecture(settings)) is not None:
        lines.append(f"  {base} --architecture {name}")
    if _fits_checkpointed(settings, device, room):
        lines += [
            "Or recompute activations instead of keeping them:",
            f"  {base} --gradient_checkpointing true",
        ]
    return lines


def _fits_checkpointed(settings: Settings, device: torch.device, room: int) -> bool:
    """Whether the same step would fit if activations were recomputed that are kept now."""
    if settings.gradient_checkpointing:
        return False
    build = build_for(settings)(settings.batch_size)
    return predict_peak_memory(build, policy="full", device=device.type).peak_bytes <= room


def build_for(settings: Settings) -> Callable[[int], Callable[[], Any]]:
    """The training step at any batch size, for the predictor."""
    plain = to_dict(settings)
    length = settings.block_size or architecture(settings.architecture).block_size

    def build_for(size: int) -> Callable[[], Any]:
        def build() -> Any:
            tokens = torch.randint(0, 2, (size, length + 1))
            loss = NextTokenLoss(settings.train_dtype, torch.device("cpu"))
            return model_from_settings(plain), (tokens[:, :-1], tokens[:, 1:]), loss

        return build

    return build_for


def _policy(settings: Settings) -> str | None:
    """The checkpointing policy that the settings ask for."""
    return "full" if settings.gradient_checkpointing else None


def _room(device: torch.device) -> int:
    """The memory that this process could have in all."""
    total = total_bytes(device) if is_accelerator(device) else None
    if total is not None:
        return total
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    room = (available_memory() or held) + held
    if limit == resource.RLIM_INFINITY:
        return room
    return min(room, limit)


def _smaller_batch(settings: Settings, device: torch.device, room: int) -> str:
    """The largest batch that fits, with as many micro-batches as make the same step of it."""
    policy = _policy(settings)
    fits = largest_batch(build_for(settings), room, policy=policy, device=device.type)
    # At most half: memory has run out with the present size, whatever is predicted for it.
    size = max(1, min(fits, settings.batch_size // 2))
    micro = -(-settings.batch_size * settings.gradient_accumulation_steps // size)
    if micro > _MOST_MICRO_BATCHES:
        return f"--batch_size {size}"
    return f"--batch_size {size} --gradient_accumulation_steps {micro}"


def _shorter_block(settings: Settings, device: torch.device, room: int) -> int | None:
    """The longest half, quarter, ... of the block that fits."""
    policy = _policy(settings)
    length = (settings.block_size or 0) // 2
    while length >= _SHORTEST:
        build = build_for(replace(settings, block_size=length))(settings.batch_size)
        if predict_peak_memory(build, policy=policy, device=device.type).peak_bytes <= room:
            return length
        length //= 2
    return None


def _smaller_architecture(settings: Settings) -> str | None:
    """The architecture that is one size smaller, if there is one."""
    names = list(ARCHITECTURES)
    index = names.index(settings.architecture)
    return names[index - 1] if index else None
