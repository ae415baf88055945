"""The embedded corpus: the Python standard library's own source, which every machine has. Its packages are the domains."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradsight.errors import GradsightError

Bytes = npt.NDArray[np.uint8]

_LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3", "ensurepip"}
_SMALLEST_DOMAIN = 100_000
_PAGE = 4096
SPLITS = ("train", "val", "test")
_SPLIT_OF_PAGE = ("train",) * 8 + ("val", "test")


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, by split and domain."""

    parts: dict[str, dict[str, Bytes]]

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains, in a fixed order."""
        return tuple(self.parts["train"])


def standard_library() -> Corpus:
    """The packages of the standard library with enough source. Of ten pages, eight train, one validates, one tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, dict[str, Bytes]] = {split: {} for split in SPLITS}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name not in _LEFT_OUT):
        text = b"\n".join(file.read_bytes() for file in _sources(folder))
        if len(text) >= _SMALLEST_DOMAIN:
            for split, pages in _split(text).items():
                parts[split][folder.name] = np.frombuffer(pages, dtype=np.uint8)
    if not parts["train"]:
        raise GradsightError(f"there is no Python source under {root}: this Python came without its library's text")
    return Corpus(parts)


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not _LEFT_OUT & set(path.relative_to(folder).parts):
            yield path


def _split(text: bytes) -> dict[str, bytes]:
    pages = [text[start : start + _PAGE] for start in range(0, len(text), _PAGE)]
    kept = {split: [page for number, page in enumerate(pages) if _SPLIT_OF_PAGE[number % 10] == split] for split in SPLITS}
    return {split: b"".join(found) for split, found in kept.items()}


def sample_windows(text: Bytes, length: int, count: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """`count` random stretches of `length` bytes."""
    starts = generator.integers(0, len(text) - length, size=count)
    windows: npt.NDArray[np.int64] = text[starts[:, None] + np.arange(length)].astype(np.int64)
    return windows
