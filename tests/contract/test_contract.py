"""The public contract is as stored in contract.txt."""

import difflib
from pathlib import Path

import pytest

import warm
from contract.contract import SECTIONS

READER = Path(__file__).with_name("contract.py")
STORED = Path(__file__).with_name("contract.txt")
HOW_TO_ACCEPT = """
The public contract has changed. If users should see this change, run
    python tests/contract/contract.py > tests/contract/contract.txt
and commit the file with the change and its reason.
"""


def stored_section(title: str) -> str:
    """Return the part of the stored text from a title to the next one."""
    parts = STORED.read_text().split("# ")
    return "# " + next(part for part in parts if part.startswith(f"{title}\n")).rstrip("\n") + "\n"


@pytest.mark.parametrize("title", SECTIONS)
def test_public_contract_is_unchanged(title: str) -> None:
    """A process of its own reads the contract: a help screen is as wide as the first one was."""
    stored = stored_section(title).splitlines()
    done = warm.run([READER, title], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    changes = list(
        difflib.unified_diff(stored, found, "contract.txt", "this package", "", "", 2, "")
    )
    if changes:
        pytest.fail("\n".join([HOW_TO_ACCEPT, *changes]), pytrace=False)


def test_stored_contract_has_only_known_sections() -> None:
    titles = [line[2:] for line in STORED.read_text().splitlines() if line.startswith("# ")]
    assert titles == list(SECTIONS)
