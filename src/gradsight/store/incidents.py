"""The incidents of a run as records, those of several ranks put together. No torch."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsight.core import rundir
from gradsight.errors import RunError
from gradsight.store.diagnoses import merge_diagnoses, unpack_diagnosis
from gradsight.store.incident_format import read_document
from gradsight.values.diagnoses import Diagnosis, Incident
from gradsight.values.findings import Finding

_DAMAGE = (RunError, KeyError, TypeError, ValueError)
"""What reading an incident can raise: it may have been cut off, or come from a stranger."""


def read_incidents(run_dir: Path) -> list[Incident]:
    """Every incident of a run, in the order of steps; one that is damaged says so."""
    incidents = []
    for folder in (run_dir / rundir.INCIDENTS).glob("step*-*"):
        number, _, code = folder.name.removeprefix("step").partition("-")
        if not number.isdigit() or code.endswith(".partial"):
            continue
        if _is_rank_part(code) and _has_whole(folder):
            continue
        incidents.append(_read(folder, int(number), code))
    return sorted(incidents, key=lambda incident: (incident.step, incident.code))


def merged(folder: Path, body: dict[str, Any]) -> Diagnosis | None:
    """The diagnosis of an incident together with what other ranks found at the same step."""
    own = unpack_diagnosis(body.get("diagnosis"))
    diagnoses = _rank_diagnoses(folder)
    if own is not None:
        diagnoses.insert(0, own)
    return merge_diagnoses(diagnoses)


def rank_parts(folder: Path) -> list[Path]:
    """The folders that other ranks wrote beside this incident."""
    step = folder.name.partition("-")[0]
    parts = [part for part in sorted(folder.parent.glob(f"{step}-rank*")) if not part.suffix]
    return [part for part in parts if part.name != folder.name]


def with_ranks(run_dir: Path, findings: Sequence[Finding]) -> list[Finding]:
    """Findings with what every rank has found out about them, from their incidents."""
    return [_with_ranks(run_dir, finding) for finding in findings]


def _with_ranks(run_dir: Path, finding: Finding) -> Finding:
    if finding.diagnosis is None or finding.incident is None:
        return finding
    folder = run_dir / finding.incident
    if not folder.is_dir():
        return finding
    # Other ranks write their parts when they are done, which may be after the finding was stored.
    diagnosis = merge_diagnoses([finding.diagnosis, *_rank_diagnoses(folder)])
    return replace(finding, diagnosis=diagnosis)


def _is_rank_part(code: str) -> bool:
    """Whether this is one rank's part of an incident."""
    return re.fullmatch(r"rank\d+", code) is not None


def _has_whole(part: Path) -> bool:
    """Whether rank 0 has written the incident that a part belongs to."""
    step = part.name.partition("-")[0]
    siblings = [folder for folder in part.parent.glob(f"{step}-*") if not folder.suffix]
    return any("-rank" not in folder.name for folder in siblings)


def _read(folder: Path, step: int, code: str) -> Incident:
    try:
        body = read_document(folder)
        return Incident(
            step=step,
            code=code,
            path=str(folder),
            reason=str(body.get("reason", "")),
            diagnosis=merged(folder, body),
            replayable="passes" in body,
        )
    except _DAMAGE as error:
        return Incident(step, code, str(folder), damage=str(error))


def _rank_diagnoses(folder: Path) -> list[Diagnosis]:
    """What other ranks found; a part that is damaged is left out."""
    diagnoses = []
    for part in rank_parts(folder):
        try:
            diagnosis = unpack_diagnosis(read_document(part).get("diagnosis"))
        except _DAMAGE:
            continue
        if diagnosis is not None:
            diagnoses.append(diagnosis)
    return diagnoses
