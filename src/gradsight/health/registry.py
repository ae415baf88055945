"""Checks by code: functions of a window, filed by a decorator, with thresholds as keywords.

    @check("GS999", "name", "warning", advice=Advice(recommendation="...", fix="..."))
    def name(window: Window, *, limit: float = 1.0, patience: int = 3) -> Iterator[Fact]:
        \"\"\"What it looks at, in one line.

        Why: why it matters.
        \"\"\"

`asked` says when it is asked and what it cannot do without; its `gate` is what must hold of the
window for it to find anything: most steps are ordinary, and asked no more than that. `incident`
says what the flight recorder does about its findings. `patience` is how many judgings in a row must
agree before a finding is made; without it, one is enough.
"""

import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradsight.errors import UsageError
from gradsight.values.findings import family_of
from gradsight.values.whole_numbers import whole_number

When = Literal["step", "stretch", "look", "ranks", "digests", "first", "passes", "networks"]
"""Every step; every ten steps, for trends; after a closer look; after ranks were compared; once,
with the report on the first step; after backward passes were recorded; at the end, after the
networks of a script were compared with its optimizers.
"""
CheckFunction = Callable[..., Iterable["Fact"]]


@dataclass(frozen=True, slots=True)
class Fact:
    """What a check has seen at this step."""

    evidence: str
    parameters: tuple[str, ...] = ()
    severity: str | None = None
    """Another severity than the check's own."""
    first_step: int | None = None
    """Where it began, if that was before this step."""
    advice: "Advice | None" = None
    """What to do, where this case is known better than the check's own advice."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a finding, in a sentence and as code."""

    recommendation: str
    fix: str
    """Uses no names but those of `GIVEN` in `health/fixes.py`, and its own."""
    if_clipped: "Advice | None" = None
    """The advice for a run that clips its gradients already."""

    def tidy(self) -> "Advice":
        """The same without empty lines around its code."""
        other = None if self.if_clipped is None else self.if_clipped.tidy()
        return Advice(self.recommendation, self.fix.strip("\n"), other)


@dataclass(frozen=True, slots=True)
class Asked:
    """When a check is asked, and what it cannot do without."""

    when: When = "step"
    needs: tuple[str, ...] = ("norms",)
    """The signals without which it abstains; `MISSING` has the words for each."""
    gate: Callable[[Any], bool] | None = None
    """What must hold of the window for the check to find anything: cheap, and asked first."""
    at_failure: bool = False
    """Whether it is asked once more if the script fails on a loss that is not finite."""


@dataclass(frozen=True, slots=True)
class AsIncident:
    """What the flight recorder does about a finding of this check."""

    kept: Literal["when critical", "always", "never"] = "when critical"
    """Which findings get an incident."""
    alarm: Callable[..., bool] | None = None
    """Knows such a step by an `EarlyLook`, before the optimizer uses the gradient.

    The step is then diagnosed while everything is still as it was. Takes the check's settings too.
    """


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its words and its function."""

    code: str
    name: str
    severity: str
    asked: Asked
    incident: AsIncident
    advice: Advice
    function: CheckFunction
    defaults: Mapping[str, Any]

    @property
    def family(self) -> str:
        """The family of its code: what the check looks at."""
        return family_of(self.code)

    @property
    def meaning(self) -> str:
        """What it means when this check finds something: the first line of its docstring."""
        return (inspect.getdoc(self.function) or self.name).splitlines()[0]


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """A check that is at work, and its thresholds."""

    check: Check
    thresholds: Mapping[str, Any]

    @property
    def patience(self) -> int:
        """How many judgings in a row must agree before a finding is made."""
        return int(self.thresholds.get("patience", 1))


CHECKS: dict[str, Check] = {}

MISSING = {
    "norms": "no gradient norms were measured",
    "optimizer": "no optimizer is known: give it to watch(model, optimizer)",
    "loss": "no loss was seen",
    "lr": "no learning rate is known: give the optimizer to watch(model, optimizer), or log it",
    "unigram": (
        "the loss is no plain cross-entropy of classes, or the run was too short to know how often "
        "each class occurs"
    ),
    "guess": "the loss is no plain cross-entropy, so it is not known where it should start",
    "clipping": "it was not seen what the optimizer used",
    "scale": "no GradScaler is in use",
    "clearing": (
        "no watched optimizer held a dense gradient from backward() in two consecutive steps"
    ),
    "batches": "no call of the model with tensors was seen in training mode",
    "ranks": (
        "no rank's own gradients were seen: there is one process, or no DistributedDataParallel "
        "(FSDP2 hides them)"
    ),
    "rank digests": (
        "ranks were not compared: there is one process, the run was too short, or a rank did not "
        "answer"
    ),
    "details": "no step was measured in detail",
    "first step": "no call of the model was seen before its first backward passes",
    "passes": "no backward pass of the model was seen",
    "networks": (
        "the networks of the script were not compared with its optimizers: `gradsight check` and "
        "`gradsight run` do that, in runs of 20 steps or more (45 if the run was cut short)"
    ),
}
"""Why a check has to abstain, by the signal it lacks."""


def check(
    code: str,
    name: str,
    severity: Literal["warning", "critical"],
    *,
    advice: Advice,
    asked: Asked = Asked(),
    incident: AsIncident = AsIncident(),
) -> Callable[[CheckFunction], CheckFunction]:
    """File a function as the check of this code."""

    def file(function: CheckFunction) -> CheckFunction:
        if code in CHECKS:
            raise UsageError(f"{code} is taken by the check {CHECKS[code].name!r}")
        parameters = list(inspect.signature(function).parameters.values())[1:]
        defaults = {parameter.name: parameter.default for parameter in parameters}
        words = advice.tidy()
        CHECKS[code] = Check(code, name, severity, asked, incident, words, function, defaults)
        return function

    return file


def chosen(settings: object) -> list[CheckSettings]:
    """The checks to run with their thresholds, by code.

    `settings`: True, {code: settings or False}, or the path of a TOML file.
    """
    wanted = _wanted(settings)
    for code in wanted:
        if code not in CHECKS:
            raise UsageError(f"there is no check {code!r}; there are {', '.join(sorted(CHECKS))}")
    return [
        CheckSettings(each, _merged(each, wanted.get(code, True)))
        for code, each in sorted(CHECKS.items())
        if wanted.get(code) is not False
    ]


def _wanted(settings: object) -> Mapping[str, Any]:
    if settings is True or settings is None:
        return {}
    if isinstance(settings, (str, Path)):
        return read_settings(Path(settings))
    if isinstance(settings, Mapping):
        return settings
    raise UsageError(
        "health must be True, False, {code: settings} or a TOML file, "
        f"got {type(settings).__name__}"
    )


def _merged(each: Check, given: object) -> dict[str, Any]:
    if given is True:
        return dict(each.defaults)
    if not isinstance(given, Mapping):
        raise UsageError(f"the settings of {each.code} must be False or a mapping, got {given!r}")
    for name, value in given.items():
        if name not in each.defaults:
            known = (
                ", ".join(f"{key}={default}" for key, default in each.defaults.items()) or "none"
            )
            raise UsageError(f"{each.code} ({each.name}) has no setting {name!r}; it has {known}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise UsageError(f"{each.code}: {name} must be a number, got {value!r}")
        if name == "patience":
            whole_number(value, f"{each.code}: patience", least=1)
    return {**each.defaults, **given}


def read_settings(file: Path) -> Mapping[str, Any]:
    """Settings by code from a TOML file.

    Tables `[GS201]` with thresholds, `GS405 = false` to silence.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the health settings {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the health settings {file} are not TOML: {error}") from error
