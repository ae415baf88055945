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
