"""The file of a full dump, as torch writes such records: read beside an intact manifest."""

from pathlib import Path

from fuzz import manifest

from gradsight.dump.manifest import read
from gradsight.dump.reader import load_keys
from gradsight.dump.statistics import measure
from gradsight.dump.values import StoredValues
from gradsight.dump.verify import verify

DUMP = 0
FILE = "__0_0.distcp"


def target(data: bytes) -> None:
    """Verify it, look at it, load it whole and in part."""
    read_beside_manifest(manifest.dumps()[DUMP], FILE, data)


def corpus() -> list[bytes]:
    """The file of a real dump."""
    return [(manifest.dumps()[DUMP] / FILE).read_bytes()]


def read_beside_manifest(folder: Path, name: str, data: bytes) -> None:
    """Everything that reads a dump's files."""
    (folder / name).write_bytes(data)
    verify(folder)
    described = read(folder)
    for key, entry in described.tensors.items():
        measure(StoredValues(folder, key, entry))
        list(load_keys(folder, [key]))
        list(load_keys(folder, [key], index=slice(0, 1)))
