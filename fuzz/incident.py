"""incident.json: the text as it is, and signed again as a stranger would; its words in reports."""

import json
from pathlib import Path

from fuzz.mutate import scratch

from gradsight.core.documents import load_json
from gradsight.errors import GradsightError
from gradsight.store.diagnoses import merge_diagnoses, unpack_diagnosis
from gradsight.store.incident_format import DOCUMENT, checksum_of, decode_document, encode_document
from gradsight.store.incidents import read_incidents
from gradsight.values.texts import cleaned, for_terminal
from gradsight.values.wording import diagnosis_lines, markdown_lines

RUN = scratch()
FOLDER = RUN / "incidents" / "step5-GS103"


def target(data: bytes) -> None:
    """Read it as a command does, and as a run does."""
    document = load_json(data, DOCUMENT)
    try:
        decode_document(data, Path(DOCUMENT))
    except GradsightError:
        body = document.get("incident") if isinstance(document, dict) else None
        if not isinstance(body, dict):
            raise
        data = json.dumps({**document, "crc32": checksum_of(body)}).encode()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / DOCUMENT).write_bytes(data)
    read_incidents(RUN)
    body = decode_document(data, Path(DOCUMENT))
    diagnosis = unpack_diagnosis(body.get("diagnosis"))
    if diagnosis is not None:
        merged = merge_diagnoses([diagnosis, diagnosis])
        assert merged is not None
        markdown_lines(merged)
        diagnosis_lines(cleaned(merged, for_terminal))


def corpus() -> list[bytes]:
    """An incident with everything in it."""
    sample = {"row": 1, "sample_id": "doc-3", "micro_batch": 0, "rank": 0}
    tensor = {"shape": [2, 3], "dtype": "float32", "smallest": 0.0, "largest": 1.0}
    operation = {
        "operation": "log", "phase": "forward", "module": "0", "place": "a.py:3",
        "source": "x.log()", "inputs": [{**tensor, "nan": 0, "inf": 1}], "micro_batch": 0,
        "detail": "", "rank": 0,
    }  # fmt: skip
    diagnosis = {
        "operation": operation,
        "samples": [{**sample, "norm": "inf", "share": None}, {**sample, "norm": 2.0, "share": 1}],
        "seconds": 0.2, "notes": ["a note"], "micro_batches": 1,
    }  # fmt: skip
    body = {
        "step": 5, "code": "GS103", "reason": "NaN", "rank": 0, "world_size": 1, "scale": 1.0,
        "kind": "nonfinite", "first_pass": 0, "replay": None, "passes": [{"args": ["value", 1]}],
        "versions": {"torch": "2"}, "state": {"0.weight": [[2, 3], "float32"]},
        "files": {"batch.safetensors": {"bytes": 10, "crc32": 3}}, "diagnosis": diagnosis,
    }  # fmt: skip
    return [encode_document(body).encode(), encode_document({**body, "diagnosis": None}).encode()]
