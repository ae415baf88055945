"""The incidents of a run as records, what several ranks found put together. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsight.core import rundir
from gradsight.errors import RunError
from gradsight.store.diagnoses import merge_diagnoses, unpack_diagnosis
from gradsight.store.incident_format import read_document
from gradsight.values.diagnoses import Diagnosis, Incident
from gradsight.values.findings import Finding


def read_incidents(run_dir: Path) -> list[Incident]:
    """Every incident of a run, in the order of steps; one that is damaged says so."""
    found = []
    for folder in (run_dir / rundir.INCIDENTS).glob("step*-*"):
        number, _, code = folder.name.removeprefix("step").partition("-")
        if number.isdigit() and not code.endswith(".partial") and not _is_part(run_dir, folder):
            found.append(_read(folder, int(number), code))
    return sorted(found, key=lambda incident: (incident.step, incident.code))


def _is_part(run_dir: Path, folder: Path) -> bool:
    """Whether this is what one rank found, beside the incident that rank 0 has written."""
    step, _, code = folder.name.partition("-")
    if not (code.startswith("rank") and code[4:].isdigit()):
        return False
    return any(
        "-rank" not in other.name
        for other in (run_dir / rundir.INCIDENTS).glob(f"{step}-*")
        if not other.suffix
    )


def _read(folder: Path, step: int, code: str) -> Incident:
    try:
        body = read_document(folder)
        diagnosis, replayable = merged(folder, body), "passes" in body
        return Incident(step, code, str(folder), str(body.get("reason", "")), diagnosis, replayable)
    except (RunError, KeyError, TypeError, ValueError) as error:
        return Incident(step, code, str(folder), damage=str(error))


def merged(folder: Path, body: dict[str, Any]) -> Diagnosis | None:
    """The diagnosis of an incident together with what other ranks found at the same step."""
    own = unpack_diagnosis(body.get("diagnosis"))
    return merge_diagnoses([part for part in (own, *_parts(folder)) if part is not None])


def rank_parts(folder: Path) -> list[Path]:
    """What other ranks wrote beside this incident."""
    step = folder.name.partition("-")[0]
    return [
        part
        for part in sorted(folder.parent.glob(f"{step}-rank*"))
        if part.name != folder.name and not part.suffix
    ]


def _parts(folder: Path) -> Iterator[Diagnosis | None]:
    for part in rank_parts(folder):
        try:
            yield unpack_diagnosis(read_document(part).get("diagnosis"))
        except (RunError, KeyError, TypeError, ValueError):
            continue


def with_ranks(run_dir: Path, findings: Sequence[Finding]) -> list[Finding]:
    """Findings with what every rank has found out about them, from their incidents."""
    result = []
    for finding in findings:
        folder = run_dir / finding.incident if finding.incident is not None else None
        if folder is None or finding.diagnosis is None or not folder.is_dir():
            result.append(finding)
            continue
        parts = [finding.diagnosis, *(part for part in _parts(folder) if part is not None)]
        result.append(replace(finding, diagnosis=merge_diagnoses(parts)))
    return result
