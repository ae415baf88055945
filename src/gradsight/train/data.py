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
"""Bytes that a package of the standard library must have to be a domain."""
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
    token_files = _token_files(path)
    parts = _token_parts(path, token_files) if token_files else _text_parts(_texts(path))
    if not parts["train"]:
        raise UsageError(f"--data {path}: there is no text in it, and no .bin file of tokens")
    return Corpus(parts)


def standard_library() -> Corpus:
    """The packages of the standard library with enough source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {}
    for folder in sorted(root.iterdir()):
        if not folder.is_dir() or folder.name in _LEFT_OUT:
            continue
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
    """The text of each domain: a file is one, as is each sub-folder.

    Files beside sub-folders make one domain, which has the folder's own name.
    """
    if path.is_file():
        return {path.stem: path.read_bytes()} if _is_text(path) else {}
    texts: dict[str, list[bytes]] = {}
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path).parts
        hidden = any(part.startswith(".") for part in inside)
        if hidden or not file.is_file() or not _is_text(file):
            continue
        domain = inside[0] if len(inside) > 1 else path.resolve().name
        texts.setdefault(domain, []).append(file.read_bytes())
    return {domain: b"\n".join(parts) for domain, parts in sorted(texts.items())}


def _is_text(file: Path) -> bool:
    """Text has no zero byte near its start."""
    try:
        with file.open("rb") as opened:
            start = opened.read(8192)
    except OSError as error:
        raise UsageError(f"--data {file} cannot be read: {error.strerror}") from error
    return bool(start) and b"\0" not in start


def _text_parts(texts: dict[str, bytes]) -> Parts:
    parts: Parts = {split: {} for split in SPLITS}
    for domain, text in texts.items():
        for split, pages in _split(text).items():
            parts[split][domain] = np.frombuffer(pages, dtype=np.uint8)
    return parts


def _split(text: bytes) -> dict[str, bytes]:
    """Pages dealt out to the splits; a short text has shorter pages: each split gets some."""
    size = max(1, min(_PAGE, len(text) // 10))
    pages: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for number, start in enumerate(range(0, len(text), size)):
        pages[_SPLIT_OF_PAGE[number % 10]].append(text[start : start + size])
    return {split: b"".join(dealt) for split, dealt in pages.items()}


# Tokens.


def _token_files(path: Path) -> list[Path]:
    if path.suffix == ".bin":
        return [path]
    return sorted(path.rglob("*.bin")) if path.is_dir() else []


def _token_parts(root: Path, files: list[Path]) -> Parts:
    pieces: dict[str, dict[str, list[Tokens]]] = {split: {} for split in SPLITS}
    for file in files:
        domain, split = _domain_and_split(root, file)
        tokens = _open_tokens(file)
        parts = {split: tokens} if split else _tenths(tokens)
        for name, part in parts.items():
            pieces[name].setdefault(domain, []).append(part)
    return {
        split: {domain: _joined(parts) for domain, parts in sorted(domains.items())}
        for split, domains in pieces.items()
    }


def _joined(parts: list[Tokens]) -> Tokens:
    """One array; a single part stays on the disk, where it is mapped from."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _domain_and_split(root: Path, file: Path) -> tuple[str, str | None]:
    """web_val.bin is val of web; web/val.bin too; web.bin is web, not split yet."""
    match = _SPLIT_IN_NAME.fullmatch(file.stem)
    folder = ""
    if root.is_dir() and file.parent != root:
        folder = file.parent.name
    if match is None or root.is_file():
        return folder or file.stem, None
    split = match[2].replace("validation", "val")
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
