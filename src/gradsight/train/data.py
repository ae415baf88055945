"""Text and tokens, by split and domain. Without a path: the Python standard library's own source,
which every machine has.

Text is bytes. Of ten pages eight train, one validates, one tests. Tokens (.bin, uint16, as nanoGPT
writes them) stay on disk: of a file, the last tenth tests and the one before validates, unless its
name says which split it is (train.bin, web_val.bin).
"""

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.errors import GradsightError, UsageError

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Parts = dict[str, dict[str, Tokens]]

_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "ensurepip",
}
_SMALLEST_DOMAIN = 100_000
_PAGE = 4096
SPLITS = ("train", "val", "test")
_SPLIT_OF_PAGE = ("train",) * 8 + ("val", "test")
_SPLIT_IN_NAME = re.compile(r"(?:(.+)[-_.])?(train|val|validation|test)")


@dataclass(frozen=True)
class Corpus:
    """Tokens by split and domain."""

    parts: Parts

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains, in a fixed order."""
        return tuple(self.parts["train"])


def open_corpus(path: str | Path | None) -> Corpus:
    """The corpus at a path, or the embedded one."""
    if path is None:
        return standard_library()
    path = Path(path)
    if not path.exists():
        raise UsageError(f"--data {path}: there is no such file or folder")
    bins = [path] if path.suffix == ".bin" else sorted(path.rglob("*.bin")) if path.is_dir() else []
    corpus = Corpus(_token_parts(path, bins) if bins else _text_parts(_texts(path)))
    if not corpus.parts["train"]:
        raise UsageError(f"--data {path}: there is no text in it, and no .bin file of tokens")
    return corpus


def standard_library() -> Corpus:
    """The packages of the standard library with enough source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {}
    for folder in sorted(
        path for path in root.iterdir() if path.is_dir() and path.name not in _LEFT_OUT
    ):
        text = b"\n".join(file.read_bytes() for file in _sources(folder))
        if len(text) >= _SMALLEST_DOMAIN:
            texts[folder.name] = text
    if not texts:
        raise GradsightError(
            f"there is no Python source under {root}: this Python came without its library's text"
        )
    return Corpus(_text_parts(texts))


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not _LEFT_OUT & set(path.relative_to(folder).parts):
            yield path


# Text.


def _texts(path: Path) -> dict[str, bytes]:
    """The text of each domain: a file is one, as is each sub-folder; files beside sub-folders share
    the folder's name.
    """
    if path.is_file():
        return {path.stem: _read(path)} if _is_text(path) else {}
    files: dict[str, list[Path]] = {}
    for file in sorted(found for found in path.rglob("*") if found.is_file()):
        inside = file.relative_to(path).parts
        if not any(part.startswith(".") for part in inside) and _is_text(file):
            files.setdefault(inside[0] if len(inside) > 1 else path.resolve().name, []).append(file)
    return {
        domain: b"\n".join(_read(file) for file in found) for domain, found in sorted(files.items())
    }


def _is_text(file: Path) -> bool:
    """Text has no zero byte near its start."""
    try:
        with file.open("rb") as opened:
            start = opened.read(8192)
    except OSError as error:
        raise UsageError(f"--data {file} cannot be read: {error.strerror}") from error
    return bool(start) and b"\0" not in start


def _read(file: Path) -> bytes:
    return file.read_bytes()


def _text_parts(texts: dict[str, bytes]) -> Parts:
    parts: Parts = {split: {} for split in SPLITS}
    for domain, text in texts.items():
        for split, pages in _split(text).items():
            parts[split][domain] = np.frombuffer(pages, dtype=np.uint8)
    return parts


def _split(text: bytes) -> dict[str, bytes]:
    """Pages dealt out to the splits; a short text has shorter pages, so that each split gets some."""
    size = max(1, min(_PAGE, len(text) // 10))
    pages = [text[start : start + size] for start in range(0, len(text), size)]
    kept = {
        split: [page for number, page in enumerate(pages) if _SPLIT_OF_PAGE[number % 10] == split]
        for split in SPLITS
    }
    return {split: b"".join(found) for split, found in kept.items()}


# Tokens.


def _token_parts(root: Path, files: list[Path]) -> Parts:
    found: dict[str, dict[str, list[Tokens]]] = {split: {} for split in SPLITS}
    for file in files:
        domain, split = _domain_and_split(root, file)
        tokens = _open_tokens(file)
        for name, part in ({split: tokens} if split else _tenths(tokens)).items():
            found[name].setdefault(domain, []).append(part)
    joined: Parts = {split: {} for split in SPLITS}
    for split, domains in found.items():
        joined[split] = {
            name: parts[0] if len(parts) == 1 else np.concatenate(parts)
            for name, parts in sorted(domains.items())
        }
    return joined


def _domain_and_split(root: Path, file: Path) -> tuple[str, str | None]:
    """web_val.bin is val of web; web/val.bin too; web.bin is web, not split yet."""
    match = _SPLIT_IN_NAME.fullmatch(file.stem)
    folder = file.parent.name if root.is_dir() and file.parent != root else None
    if match is None or root.is_file():
        return folder or file.stem, None
    split = "val" if match[2] == "validation" else match[2]
    return folder or match[1] or root.resolve().name, split


def _open_tokens(file: Path) -> Tokens:
    size = file.stat().st_size
    if size == 0 or size % 2:
        raise UsageError(
            f"--data {file}: expected uint16 tokens, two bytes each, but the file has {size} bytes"
        )
    tokens: Tokens = np.memmap(file, dtype="<u2", mode="r")
    return tokens


def _tenths(tokens: Tokens) -> dict[str, Tokens]:
    first, second = len(tokens) * 8 // 10, len(tokens) * 9 // 10
    return {"train": tokens[:first], "val": tokens[first:second], "test": tokens[second:]}
