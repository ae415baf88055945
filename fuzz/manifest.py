"""manifest.json of a dump: the text as it is, and signed again as a stranger would."""

import functools
from pathlib import Path

from fuzz.mutate import scratch

from gradsight.core.documents import load_json
from gradsight.dump.manifest import _checksum, decode
from gradsight.dump.reader import _metadata
from gradsight.errors import GradsightError
from gradsight.show.memory_and_dumps import dumps_line, dumps_section

NAME = Path("manifest.json")


def target(data: bytes) -> None:
    """Read it, and say what a report says of it."""
    body = load_json(data, str(NAME))
    try:
        decode(dict(body) if isinstance(body, dict) else body, NAME)
    except GradsightError:
        if not isinstance(body, dict):
            raise
        # With a right checksum, whatever else is wrong comes to light.
        body.pop("crc32", None)
        metadata = _metadata(decode({**body, "crc32": _checksum(body)}, NAME))
        dumps_section([metadata])
        dumps_line([metadata])


def corpus() -> list[bytes]:
    """A full dump, and a sampled one."""
    return [(folder / NAME).read_bytes() for folder in dumps()]


@functools.cache
def dumps() -> list[Path]:
    """The folders of a full and of a sampled dump."""
    import torch

    from gradsight import GradientDumper

    root = scratch()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    folders = []
    for name, first_n in (("full", None), ("sampled", 2)):
        with GradientDumper(root / name, save_first_n=first_n) as dumper:
            folder = dumper.dump(model, 3)
        assert folder is not None
        folders.append(folder)
    return folders
