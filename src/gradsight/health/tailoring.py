"""Advice that fits the run: its optimizer and learning rate, its trainer, its loss scaling."""

import itertools
import re

from gradsight.health.fixes import (
    BFLOAT16,
    CLIP,
    FROM_SCRATCH,
    HIGHER_RATE,
    LOWER_LIMIT,
    LOWER_RATE,
    WARM_UP,
    WEAKER_DECAY,
    folded,
)
from gradsight.health.registry import Advice
from gradsight.health.trainers import Trainer
from gradsight.health.window import Window

_SETTINGS = {
    "transformers": {
        LOWER_RATE: "learning_rate={rate}",
        HIGHER_RATE: "learning_rate={rate}",
        WARM_UP: "warmup_steps=100",
        CLIP: "max_grad_norm=1.0",
        LOWER_LIMIT: "max_grad_norm=1.0",
        WEAKER_DECAY: "weight_decay=0.01",
        BFLOAT16: "bf16=True",
    },
    "lightning": {
        CLIP: "gradient_clip_val=1.0",
        LOWER_LIMIT: "gradient_clip_val=1.0",
        BFLOAT16: 'precision="bf16-mixed"',
    },
}
"""By library: the argument of its trainer that stands for a section of a fix."""

_PLACES = {
    "transformers": {
        "before the loop": ("before trainer.train()", "trainer.model"),
        "in the loop, after loss.backward()": (
            "in on_pre_optimizer_step of a TrainerCallback",
            'kwargs["model"]',
        ),
        "in the loop, after optimizer.step()": (
            "in on_optimizer_step of a TrainerCallback",
            'kwargs["model"]',
        ),
    },
    "lightning": {
        "before the loop": ("before trainer.fit()", "model"),
        "in the loop, before the forward pass": ("at the start of training_step", "self"),
        "in the loop, instead of the forward pass": ("in training_step", "self"),
        "in the loop, before loss.backward()": ("at the end of training_step", "self"),
        "in the loop, after loss.backward()": ("in on_after_backward", "self"),
        "in the loop, after optimizer.step()": ("in on_train_batch_end", "self"),
    },
}
"""By library: where the places of a loop are for its users, and what the model is called there."""

_OF_A_LOOP = {
    "transformers": r"inputs|targets|loader|loss_fn|loss|scaler",
    "lightning": r"loader|loss_fn|scaler",
}
"""By library: names of a loop that its users do not have."""

_BATCH = {
    "transformers": """
# before trainer.train(): print a batch as the model gets it
print(next(iter(trainer.get_train_dataloader())))
""",
    "lightning": """
# in training_step: print the batch
print(batch)
""",
}
"""By library: what replaces a section that changes the loop, which is the trainer's."""

_PLACE = re.compile(
    r"^# (before the loop|instead of the loop|in the model|in a loss of your own"
    r"|in the loop, (?:before|after|instead of) [^:\n]+)(, and [^:]+)?(?=[:\n])",
    re.MULTILINE,
)
_MODEL = re.compile(r"(?<![\w.\"'])model\b")
_UNSCALE = "scaler.unscale_(optimizer)    # once per step, before clipping\n"


def fitted(advice: Advice, window: Window) -> Advice:
    """Return the advice with this run's optimizer, learning rate and trainer."""
    subject = window.subject
    words, fix = advice.recommendation, f"\n{advice.fix}\n"
    for section in FROM_SCRATCH if subject.is_pretrained else ():
        fix = fix.replace(section, "\n")
    if subject.optimizer is not None and subject.optimizer.is_scheduled:
        # Two schedulers of one optimizer undo each other.
        fix = fix.replace(WARM_UP, "\n")
    rate = _rate_to_use(fix, window)
    if rate is not None and subject.optimizer is not None:
        name = subject.optimizer.name
        words += f" {name} has a learning rate of {window.rate:.3g} at this step: use {rate:.3g}."
    if subject.trainer is not None:
        fix = _for_trainer(fix, subject.trainer, rate)
    fix = _with_optimizer(fix, window, rate)
    if subject.trainer is None and window.step.scale is not None:
        clipped = [line for line in fix.splitlines(True) if line.startswith(_CLIPPED)]
        if clipped and "unscale_" not in fix:
            fix = fix.replace(clipped[0], _UNSCALE + clipped[0], 1)
    return Advice(words, re.sub(r"\n{3,}", "\n\n", fix)).tidy()


_CLIPPED = ("gradients = [p.grad for", "torch.nn.utils.clip_grad_norm_(", "norm = torch.nn.utils")


def _rate_to_use(fix: str, window: Window) -> float | None:
    """The learning rate that the fix should set; None if it sets none."""
    optimizer = window.subject.optimizer
    if optimizer is None or not window.rate:
        return None
    if LOWER_RATE in fix:
        return window.rate / 10
    return max(10 * window.rate, optimizer.usual_rate) if HIGHER_RATE in fix else None


def _with_optimizer(fix: str, window: Window, rate: float | None) -> str:
    """Replace code that changes the rate by the line that makes the optimizer, if known."""
    optimizer, trainer = window.subject.optimizer, window.subject.trainer
    if optimizer is None or optimizer.call is None or rate is None:
        return fix
    place, given = "# before the loop, where you make the optimizer", "model.parameters()"
    if trainer is not None and trainer.library == "lightning":
        place, given = "# in configure_optimizers", "self.parameters()"
    for section, what in ((LOWER_RATE, "a tenth of the rate"), (HIGHER_RATE, "a higher rate")):
        call = optimizer.call.format(given=given, lr=f"{rate:.3g}")
        fix = fix.replace(section, f"\n{place}: {what}\n{folded(call)}\n")
    return fix


def _for_trainer(fix: str, trainer: Trainer, rate: float | None) -> str:
    """Set arguments of the trainer, and name its own places for the rest."""
    arguments: dict[str, None] = {}
    for section, argument in _SETTINGS[trainer.library].items():
        if section not in fix or ("{rate}" in argument and not (trainer.sets_rate and rate)):
            continue
        arguments[argument.format(rate=f"{rate:.3g}" if rate else "")] = None
        fix = fix.replace(section, "\n")
    parts = [_part_for_trainer(each, trainer) for each in _parts(fix)]
    if arguments:
        lines = "".join(f"    {argument},\n" for argument in arguments)
        place = f"# where you make the {trainer.settings} (keep your other arguments)"
        parts.insert(0, f"\n{place}\n{trainer.settings}(\n{lines})\n")
    return "".join(dict.fromkeys(parts))


def _parts(fix: str) -> list[str]:
    """The sections of a fix, each with its place."""
    places = [each.start() for each in _PLACE.finditer(fix)]
    if not places and fix.strip():
        return [fix]
    return [
        "\n" + fix[start:end].strip("\n") + "\n"
        for start, end in itertools.pairwise([*places, len(fix)])
    ]


def _part_for_trainer(part: str, trainer: Trainer) -> str:
    if part in (LOWER_RATE, HIGHER_RATE):
        return part  # the optimizer is the user's, and is replaced later
    found = _PLACE.search(part)
    code = "\n".join(line for line in part.splitlines() if not line.startswith("#"))
    if found is None or found[1] in ("in the model", "in a loss of your own"):
        return part
    known = _PLACES[trainer.library].get(found[1])
    if known is None or re.search(rf"(?<![\w.])({_OF_A_LOOP[trainer.library]})\b", code):
        return _BATCH[trainer.library]
    place, model = known
    uses_optimizer = re.search(r"\boptimizer\b", code) is not None
    if uses_optimizer and trainer.library == "lightning":
        place, model = "in configure_optimizers, after the optimizer is made", "self"
    lines = part.replace(found[0], f"# {place}", 1).strip("\n").splitlines()
    lines = [line if line.startswith("#") else _MODEL.sub(model, line) for line in lines]
    if uses_optimizer and trainer.library == "transformers":
        body = next(number for number, line in enumerate(lines) if not line.startswith("#"))
        lines.insert(body, "optimizer = trainer.create_optimizer()")
    return "\n" + "\n".join(lines) + "\n"
