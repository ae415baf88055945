"""config.json: as it is, and with its checksum put right."""

import json

from fuzz.mutate import scratch

from gradsight.core import rundir
from gradsight.core.documents import document_text, load_json
from gradsight.errors import GradsightError
from gradsight.store.reader import Run, open_run
from gradsight.store.store import open_store

FOLDER = scratch()


def target(data: bytes) -> None:
    """Read it, and what a run makes of it."""
    (FOLDER / rundir.CONFIG).write_bytes(data)
    try:
        _use(_run())
    except GradsightError:
        body = load_json(data, "config.json")
        if not isinstance(body, dict):
            raise
        for key in ("checksum", "format", "reader"):
            body.pop(key, None)
        (FOLDER / rundir.CONFIG).write_text(document_text(body))
        _use(_run())


def _use(run: Run) -> None:
    try:
        _ = run.config
        list(run.histograms("*"))
        list(run.parameter_stats("a.weight"))
    finally:
        run.close()


def _run() -> Run:
    if not (FOLDER / rundir.RECORD).exists():
        open_store(FOLDER).close()
    return open_run(FOLDER)


def corpus() -> list[bytes]:
    """With a checksum, and without."""
    body = {
        "settings": {"watch": {"health": True}},
        "versions": {"gradsight": "0.1"},
        "world_size": 1,
        "parameters": [{"name": "a.weight", "shape": [2, 3], "dtype": "float32"}],
    }
    return [document_text(body).encode(), json.dumps(body).encode()]
