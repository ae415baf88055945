"""The incidents of a run as records, those of several ranks put together. No torch."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsight.core import limits, rundir
from gradsight.core.places import kind_below, names_in, refuse_links
from gradsight.errors import RunError
from gradsight.store.diagnoses import merge_diagnoses, unpack_diagnosis
from gradsight.store.incident_format import DOCUMENT, read_incident
from gradsight.values.diagnoses import Diagnosis, Incident
from gradsight.values.findings import Finding

_NAME = re.compile(r"step(?P<step>[0-9]{1,18})-(?P<code>[^.]+)")
"""How an incident's folder is called; one that is still being written has an ending."""


def read_incidents(run_dir: Path) -> list[Incident]:
    """Every incident of a run, in the order of steps; one that is damaged says so."""
    if kind_below(run_dir, rundir.INCIDENTS) != "folder":
        return []
    root = run_dir / rundir.INCIDENTS
    names = [name for name in names_in(root) if _NAME.fullmatch(name)]
    parts = _parts_by_step(names)
    own = {name for each in parts.values() for name in each}
    steps_with_whole = {_step_of(name) for name in names if name not in own}
    shown = [name for name in names if name not in own or _step_of(name) not in steps_with_whole]
    shown.sort(key=_order)
    reading = _Reading(root)
    return [reading.incident(name, parts) for name in shown[: limits.INCIDENTS]]


def merged(folder: Path, body: dict[str, Any]) -> Diagnosis | None:
    """The diagnosis of an incident together with what other ranks found at the same step."""
    own = unpack_diagnosis(body.get("diagnosis"))
    names = [part.name for part in rank_parts(folder)]
    return _Reading(folder.parent).together(own, names)


def rank_parts(folder: Path) -> list[Path]:
    """The folders that other ranks wrote beside this incident."""
    parts = _parts_by_step(names_in(folder.parent)).get(_step_of(folder.name), [])
    # No link is followed: it might lead to another run's incident, or anywhere.
    folders = [name for name in parts if kind_below(folder.parent, name) == "folder"]
    return [folder.parent / name for name in folders if name != folder.name]


def with_ranks(run_dir: Path, findings: Sequence[Finding]) -> list[Finding]:
    """Findings with what every rank has found out about them, from their incidents."""
    if kind_below(run_dir, rundir.INCIDENTS) != "folder":
        return list(findings)
    root = run_dir / rundir.INCIDENTS
    parts = _parts_by_step(names_in(root))
    reading = _Reading(root)
    return [_with_ranks(finding, reading, parts) for finding in findings]


def _with_ranks(finding: Finding, reading: "_Reading", parts: Mapping[str, list[str]]) -> Finding:
    folder, _, name = (finding.incident or "").partition("/")
    others = [part for part in parts.get(_step_of(name), []) if part != name]
    if finding.diagnosis is None or folder != rundir.INCIDENTS or not others:
        return finding
    # Other ranks write their parts when they are done, which may be after the finding was stored.
    return replace(finding, diagnosis=reading.together(finding.diagnosis, others))


class _Reading:
    """Reads incidents of one folder, no more of them than one look takes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._room = limits.INCIDENTS_BYTES
        self._known: dict[str, Diagnosis | None] = {}
        """What ranks found, by the names of their parts: several findings may share one."""

    def incident(self, name: str, parts: Mapping[str, list[str]]) -> Incident:
        """One incident, with the parts of other ranks."""
        step, code = _order(name)
        path = str(self._root / name)
        try:
            body = self._document(name)
            own = unpack_diagnosis(body.get("diagnosis"), f"the diagnosis of {path}")
            others = [part for part in parts.get(_step_of(name), []) if part != name]
            return Incident(
                step=step,
                code=code,
                path=path,
                reason=str(body.get("reason") or ""),
                diagnosis=self.together(own, others),
                replayable=body.get("passes") is not None,
            )
        except RunError as error:
            return Incident(step, code, path, damage=str(error))

    def together(self, own: Diagnosis | None, parts: Sequence[str]) -> Diagnosis | None:
        """A diagnosis and those of other ranks; a part that is damaged is left out."""
        found = [] if own is None else [own]
        for name in parts:
            if name not in self._known:
                self._known[name] = self._part(name)
            diagnosis = self._known[name]
            if diagnosis is not None:
                found.append(diagnosis)
        return merge_diagnoses(found)

    def _part(self, name: str) -> Diagnosis | None:
        try:
            return unpack_diagnosis(self._document(name).get("diagnosis"))
        except RunError:
            return None

    def _document(self, name: str) -> dict[str, Any]:
        folder = refuse_links(self._root, name)
        with suppress(OSError):  # reading it says what is wrong
            self._room -= os.lstat(folder / DOCUMENT).st_size
        if self._room < 0:
            raise RunError(f"{folder} was not read: there are too many incidents for one look")
        return read_incident(folder)


def _parts_by_step(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of the parts that ranks wrote, by the step in them; in the order of ranks."""
    parts: dict[str, list[str]] = {}
    for name in names:
        if re.fullmatch(r"step[0-9]{1,18}-rank[0-9]{1,9}", name):
            parts.setdefault(_step_of(name), []).append(name)
    return {step: found[: limits.RANKS] for step, found in parts.items()}


def _step_of(name: str) -> str:
    return name.partition("-")[0]


def _order(name: str) -> tuple[int, str]:
    """The step of an incident and its code."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match["step"]), match["code"]
