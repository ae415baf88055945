"""Is a run on the disk what was written? Record, tail, config, scores, incidents. No torch.

Reads every byte and writes none. Files without a checksum are read as far as that goes, and named.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from gradsight.core import limits, rundir
from gradsight.core.documents import load_document, load_object
from gradsight.core.places import names_in, open_file, read_file
from gradsight.errors import RunError, WrongPlace
from gradsight.store import incident_format, schema
from gradsight.store.record_view import RecordView
from gradsight.store.scores import is_sealed, read_score_file, score_files
from gradsight.store.tail_file import TailReader
from gradsight.values.findings import Damage

_MEANING = {
    rundir.RECORD: "steps, statistics and findings read from it may be wrong",
    rundir.TAIL: "the steps from there on are lost; those before are not touched by it",
    rundir.CONFIG: "settings and names of parameters read from it may be wrong",
    rundir.SCORES: "the scores of its steps may be wrong, and are left out of reports",
    rundir.INCIDENTS: "what it tells of its step may be wrong, and it cannot be replayed",
}
"""What damage to a file means for whoever reads the run."""
Verified = Damage | str
"""What is wrong with a file, or something to know of one that is intact."""


def verify_record(run_dir: Path) -> Iterator[Verified]:
    """The record and its tail, as one: also of a run that was killed, or is being written."""
    try:
        view = RecordView(run_dir)
    except WrongPlace:
        raise
    except RunError as error:
        damage = _damage(run_dir, rundir.RECORD, error)
        yield damage
        if damage.path == rundir.RECORD:
            yield from _verify_tail_alone(run_dir)
        return
    try:
        if view.has_torn_tail():
            yield f"{rundir.TAIL} ends inside of a frame: the run was killed, or is being written"
        for table in sorted(schema.TABLES.keys() - {"meta"}):
            for _ in view.rows(table):
                pass
    except RunError as error:
        yield _damage(run_dir, rundir.RECORD, error)
    finally:
        view.close()


def _verify_tail_alone(run_dir: Path) -> Iterator[Damage]:
    """The tail of a record that cannot be read."""
    try:
        handle = open_file(run_dir, rundir.TAIL)
    except (OSError, RunError):
        return
    try:
        for _ in TailReader(handle, str(run_dir / rundir.TAIL)).frames():
            pass
    except RunError as error:
        yield _damage(run_dir, rundir.TAIL, error)
    finally:
        os.close(handle)


def verify_documents(run_dir: Path) -> Iterator[Verified]:
    """config.json, and what `gradsight check` leaves."""
    present = set(names_in(run_dir))
    for name in (rundir.CONFIG, rundir.CHECK, rundir.SCRIPT):
        if name not in present:
            continue
        try:
            data = read_file(run_dir, name, limits.DOCUMENT_BYTES)
            load_document(data, str(run_dir / name))
            if "checksum" not in load_object(data, name):
                yield f"{name} has no checksum"
        except (OSError, RunError) as error:
            yield _damage(run_dir, name, error)


def verify_scores(run_dir: Path) -> Iterator[Verified]:
    """Every score file."""
    for file in score_files(run_dir):
        name = f"{rundir.SCORES}/{file.name}"
        try:
            read_score_file(file)
            if not is_sealed(file):
                yield f"{name} has no checksum"
        except FileNotFoundError:
            pass  # a writer has put another file into its place meanwhile
        except (OSError, RunError) as error:
            yield _damage(run_dir, name, error)
    for name in names_in(run_dir, rundir.SCORES):
        if name.endswith(".damaged"):
            yield f"{rundir.SCORES}/{name} was damaged already when the run went on without it"


def verify_incidents(run_dir: Path) -> Iterator[Verified]:
    """Every incident, with all its files."""
    for name in names_in(run_dir, rundir.INCIDENTS):
        if not name.startswith("step") or name.endswith(".partial"):
            continue
        folder = run_dir / rundir.INCIDENTS / name
        try:
            # Not through the path alone: the folder itself may be a link.
            names_in(run_dir, PurePath(rundir.INCIDENTS, name))
            body = incident_format.read_incident(folder)
            for file in body.get("files") or ():
                incident_format.checked_file(folder, body, file)
        except (OSError, RunError) as error:
            yield _damage(run_dir, f"{rundir.INCIDENTS}/{name}", error)


def _damage(run_dir: Path, name: str, error: Exception) -> Damage:
    """The damage that an error tells of: of the file that it begins with, if it names one."""
    text = str(error)
    for named in (rundir.TAIL, rundir.RECORD):
        if text.startswith(f"{run_dir / named} "):
            name = named
    text = text.removeprefix(f"{run_dir / name} ").removeprefix("is damaged: ")
    return Damage(name, f"{text}: {_MEANING.get(name.split('/')[0], 'it cannot be trusted')}")
