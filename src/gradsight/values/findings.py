"""A judged fact. No torch."""

from dataclasses import dataclass

from gradsight.values.diagnoses import Diagnosis


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
    """The guilty operation and the guilty samples, where the step was diagnosed when it happened.
    """
    incident: str | None = None
    """The folder that the flight recorder wrote for it, as a path inside the run directory."""


@dataclass(frozen=True, slots=True)
class IncidentRule:
    """What the flight recorder does about the findings of a check."""

    kept: str = "when critical"
    """Which of them get an incident: "when critical", "always" or "never"."""
    known_early: bool = False
    """Whether such a step can be known before the optimizer uses its gradient."""
