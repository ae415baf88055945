"""The code blocks of a Markdown page, as one script in the order of the page.

python      is part of the script; under a first line `# name.py` it becomes that file
sh          runs in bash
text        is output: not run
"""

from dataclasses import dataclass
from pathlib import Path
from re import MULTILINE, fullmatch, match, search

LANGUAGES = {"python", "sh", "text"}


@dataclass(frozen=True)
class Block:
    """A fenced block: what it is written in, where it begins, and its text."""

    language: str
    line: int
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block stands for."""
        named = match(r"# (\w+\.py)\n", self.text)
        return named and named[1]


def blocks(page: Path) -> list[Block]:
    """All code blocks of a page; a block that nothing would run is refused."""
    found = []
    language, start, lines = "", 0, list[str]()
    previous = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = fullmatch(r"\s*```(.*)", line)
        if fence and not start:
            language, start, lines = fence[1], number, []
            if language not in LANGUAGES:
                raise ValueError(f"{page.name}:{number}: a block of {language!r} runs nowhere")
        elif fence:
            found.append(Block(language, start, "\n".join(lines) + "\n"))
            start = 0
        elif start:
            lines.append(line)
        elif not previous.strip() and search(r"^ {4}\S", line, MULTILINE):
            raise ValueError(f"{page.name}:{number}: an indented block runs nowhere")
        previous = line
    if start:
        raise ValueError(f"{page.name}:{start}: the block does not end")
    return found


def script(page: Path) -> str:
    """The blocks of a page as a Python script; each is on its own lines of the page."""
    lines = [""] * len(page.read_text().splitlines())
    for block in blocks(page):
        if block.language == "text" or is_make(block):
            continue
        if block.file:
            lines[block.line] = f"open({block.file!r}, 'w').write({block.text!r})"
        elif block.language == "python":
            written = block.text.splitlines()
            lines[block.line : block.line + len(written)] = written
        else:
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            lines[block.line] = f"__import__('subprocess').run({command!r}, check=True)"
    return "\n".join(lines) + "\n"


def is_make(block: Block) -> bool:
    """Whether a block holds nothing but targets of the Makefile, this test's own among them."""
    return all(line.startswith("make ") for line in block.text.splitlines())
