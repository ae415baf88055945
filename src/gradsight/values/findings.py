"""A judged fact of training, a fault of our own that it survived, a damaged file. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from gradsight.errors import GradsightError
from gradsight.values.diagnoses import Diagnosis

ONE_LOOK = "one look"
TREND = "trend"
WIRING = "wiring"
PRECISION = "precision and scale"
RANKS_AND_DATA = "ranks and data"
FIRST_STEP = "first step"
OTHER = "other"
_FAMILIES = {
    "GS1": ONE_LOOK,
    "GS2": TREND,
    "GS3": WIRING,
    "GS4": PRECISION,
    "GS5": RANKS_AND_DATA,
    "GS6": FIRST_STEP,
}


def family_of(code: str) -> str:
    """The family of a code by its hundreds; a user's own codes are of the family "other".

    >>> family_of("GS103"), family_of("GS503"), family_of("GS999")
    ('one look', 'ranks and data', 'other')
    """
    return _FAMILIES.get(code[:3], OTHER)


@dataclass(frozen=True, slots=True)
class Finding:
    """A judged fact: what, how bad, where, since when, why we say so, and what to do."""

    code: str
    name: str
    severity: str
    """ "warning" or "critical"."""
    parameters: tuple[str, ...]
    first_step: int
    evidence: str
    message: str
    recommendation: str
    fix: str
    diagnosis: Diagnosis | None = None
    """The guilty operation and samples, where the step was diagnosed when it happened."""
    incident: str | None = None
    """The folder that the flight recorder wrote for it, as a path inside the run directory."""
    family: str = ""
    """What the check looks at: "one look", "trend", "wiring", and so on."""
    made_step: int = -1
    """The step at which it was recognised; a trend has begun earlier, at `first_step`."""
    caused_by: str | None = None
    """The code of the finding of the same report that this one follows from; None: of none."""

    def __post_init__(self) -> None:
        if self.made_step < 0:
            object.__setattr__(self, "made_step", self.first_step)
        # Records written before there were families lack it, and so do findings made by hand.
        if not self.family:
            # A frozen record can be completed in this way only.
            object.__setattr__(self, "family", family_of(self.code))


class StopTraining(GradsightError):
    """Training was to be stopped for a finding: `watch(..., on_finding="stop")`.

    finding: what was found.
    """

    passes_guard: ClassVar[bool] = True
    """It is what the user asked for, no fault of ours."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(
            f"step {finding.first_step}: {finding.code} {finding.name}: {finding.evidence}"
        )


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What the judge will find of a step whose gradient the optimizer has not used yet."""

    code: str
    name: str
    severity: str


@dataclass(frozen=True, slots=True)
class IncidentRule:
    """What the flight recorder does about the findings of a check."""

    kept: str = "when critical"
    """Which of them get an incident: "when critical", "always" or "never"."""
    known_early: bool = False
    """Whether such a step can be known before the optimizer uses its gradient."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of Gradsight's own that training survived: said once, counted, reported."""

    key: str
    message: str
    first_step: int
    count: int


@dataclass(frozen=True)
class Damage:
    """A file that is not as it was written."""

    path: str
    """Relative to the run directory."""
    what: str
    """What is wrong, and what that means."""
