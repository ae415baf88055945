"""The code blocks of a Markdown page, and a way to run them in the order of the page.

python      runs in the page's one interpreter; under a first line `# name.py` it becomes that file
sh          runs in bash, in the page's folder
text        is output: not run
"""

import subprocess
import sys
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


def run_page(page: Path) -> None:
    """Run the blocks of a page in the current folder; the first that fails ends it."""
    names = {"__name__": "__main__"}
    sys.path[0] = ""  # as in an interpreter that was started in the page's folder
    for block in blocks(page):
        if block.language == "text" or is_make(block):
            continue
        print(f"--- {page.name}:{block.line}", flush=True)
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            # Padded, so that a traceback names the page's own lines.
            source = "\n" * block.line + block.text
            exec(compile(source, str(page), "exec"), names)
        else:
            sys.stdout.flush()
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)


def is_make(block: Block) -> bool:
    """Whether a block holds nothing but targets of the Makefile, this test's own among them."""
    return all(line.startswith("make ") for line in block.text.splitlines())


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
