"""A safetensors file of a sampled dump, read beside an intact manifest."""

from fuzz import manifest, torch_record

DUMP = 1
FILE = "0.weight_first2.safetensors"


def target(data: bytes) -> None:
    """Verify it, look at it, load it whole and in part."""
    torch_record.read_beside_manifest(manifest.dumps()[DUMP], FILE, data)


def corpus() -> list[bytes]:
    """The file of a real dump."""
    return [(manifest.dumps()[DUMP] / FILE).read_bytes()]
