"""The code blocks of a Markdown page, as one script in the order of the page.

python      part of the script; a block whose first line is `# name.py` becomes that file
sh          runs in bash; a line that ends with `# exits with N` must do so, every other with 0
text        what the sh block right above it prints on standard output
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from re import MULTILINE, escape, fullmatch, match, search, sub

LANGUAGES = {"python", "sh", "text"}
LEFT_OUT = "..."
"""A line of shown output that stands for any number of lines."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line where it begins, and its text."""

    language: str
    line: int
    text: str

    @property
    def file(self) -> str | None:
        """The file whose content the block shows."""
        named = match(r"# (\w+\.py)\n", self.text)
        return named and named[1]

    @property
    def output_file(self) -> str:
        """The file into which the script writes what this block prints."""
        return f"output_of_line_{self.line}.txt"

    @property
    def is_setup(self) -> bool:
        """Whether a block only calls make or pip, which a test cannot do to its own environment."""
        lines = self.text.splitlines()
        return self.language == "sh" and all(match("make |pip install ", line) for line in lines)


def blocks(page: Path) -> list[Block]:
    """Return all code blocks of a page; raise for a block that nothing would run."""
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


def shown_outputs(page: Path) -> Iterator[tuple[Block, str]]:
    """Yield each sh block whose output the page shows, with that output."""
    for command, output in pairwise(blocks(page)):
        if (command.language, output.language) == ("sh", "text"):
            yield command, output.text


def script(page: Path) -> str:
    """Return the blocks of a page as a Python script; each is on its own lines of the page."""
    lines = [""] * len(page.read_text().splitlines())
    with_output = {command.line for command, _ in shown_outputs(page)}
    for block in blocks(page):
        if block.language == "text" or block.is_setup:
            continue
        if block.file:
            lines[block.line] = f"open({block.file!r}, 'w').write({block.text!r})"
        elif block.language == "python":
            written = block.text.splitlines()
            lines[block.line : block.line + len(written)] = written
        else:
            command = ["bash", "-euo", "pipefail", "-c", _with_exit_codes(block.text)]
            output = f"open({block.output_file!r}, 'w')" if block.line in with_output else "None"
            lines[block.line] = (
                f"__import__('subprocess').run({command!r}, check=True, stdout={output})"
            )
    return "\n".join(lines) + "\n"


def _with_exit_codes(text: str) -> str:
    """Replace each comment `# exits with N` by a check of the exit code."""
    check = r'code=0; \1 || code=$?; [ $code -eq \2 ] || { echo "exit code $code" >&2; false; }'
    return sub(r"(?m)^(.+?) +# exits with (\d+).*$", check, text)


def is_shown(shown: str, printed: str) -> bool:
    """Whether the printed lines are those that a page shows; `...` stands for any lines."""
    pattern = "".join(
        r"(?:.*\n)*" if line == LEFT_OUT else escape(line) + r"\n" for line in _lines(shown)
    )
    return fullmatch(pattern, "".join(f"{line}\n" for line in _lines(printed))) is not None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]
