"""Every public parameter is documented."""

import inspect
import re

import pytest

import gradsight


def documented(thing: object) -> set[str]:
    """The parameters that a docstring has an entry for: `name: ...`, or several with commas."""
    text = inspect.getdoc(thing) or ""
    if isinstance(thing, type):
        text += "\n" + (inspect.getdoc(thing.__init__) or "")
    entries = re.findall(r"^((?:\w+, )*\w+): ", text, re.MULTILINE)
    return {name for entry in entries for name in entry.split(", ")}


@pytest.mark.parametrize("name", sorted(set(gradsight.__all__) - {"GradsightError"}))
def test_every_parameter_is_explained(name: str) -> None:
    thing = getattr(gradsight, name)
    parameters = [each for each in inspect.signature(thing).parameters if not each.startswith("_")]
    assert parameters
    assert [each for each in parameters if each not in documented(thing)] == []
