"""The recorded calls of an incident, and the header of their tensors, before anything is run."""

import json
import zlib

import torch
from fuzz.mutate import scratch

from gradsight.core.calls import RecordedCall
from gradsight.core.documents import load_json, load_object
from gradsight.incidents.arguments import pack_passes, unpack_passes
from gradsight.incidents.replay import _tensors
from gradsight.store.incident_format import (
    BATCH,
    FORMAT,
    VERSION,
    batch_entries,
    checksum_of,
    decode_document,
)
from gradsight.train.models import bounded_settings

FOLDER = scratch()
CPU = torch.device("cpu")
CALL = RecordedCall(
    args=(torch.zeros(2, 3, dtype=torch.int64), [1.5, None, torch.float16]),
    kwargs={"labels": torch.ones(2), "device": torch.device("cpu")},
    rng={"cpu": torch.zeros(8, dtype=torch.uint8)},
    buffers={},
    autocast=("cpu", "bfloat16"),
    training=True,
    caller="a.py:3",
    output_gradients=(torch.ones(2), None),
    sample_ids=(1, "two"),
)


def target(data: bytes) -> None:
    """A list: the calls' structure. An object: the run's settings. Else the tensors' file."""
    if data[:1] == b"[":
        structure = load_json(data, "incident.json")
        body = decode_document(_document({"passes": structure}), FOLDER)
        unpack_passes(body["passes"] or [], pack_passes([CALL])[1])
        return
    if data[:1] == b"{":
        bounded_settings(load_object(data, "config.json"), 1000)
        return
    (FOLDER / BATCH).write_bytes(data)
    known = {BATCH: {"bytes": len(data), "crc32": zlib.crc32(data)}}
    batch_entries(FOLDER, {"files": known})
    _tensors(FOLDER, {"files": known}, BATCH, CPU)


def _document(body: dict[str, object]) -> bytes:
    # As a stranger writes it: NaN and all.
    document = {"format": FORMAT, "version": VERSION, "crc32": checksum_of(body), "incident": body}
    return json.dumps(document).encode()


def corpus() -> list[bytes]:
    """The structure of a call, the settings of a run, and the tensors of the call."""
    from safetensors.torch import save

    structure, tensors = pack_passes([CALL])
    settings = {"architecture": "char", "model": {"n_layer": 2, "n_embd": 8}, "block_size": 16}
    return [
        json.dumps(structure).encode(),
        json.dumps({**settings, "model_dtype": "float32"}).encode(),
        save(tensors),
    ]
