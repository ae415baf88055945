"""The list of torch's private names is the code's."""

import ast
import re
from pathlib import Path

import pytest
import torch

import gradsight
from gradsight.core import torch_names
from gradsight.core.torch_names import NAMES, refuse_unknown_torch
from gradsight.errors import GradsightError

pytestmark = pytest.mark.internal  # they read the source of the package

PACKAGE = Path(gradsight.__file__).parent
OTHER_NAMES = {"nn": "torch.nn", "dist": "torch.distributed", "F": "torch.nn.functional"}
PRIVATE = re.compile(r"^torch(\.\w+)*\._[a-zA-Z]\w*")
NOT_NEEDED = ("torch.ops.", "torch._dynamo", "torch._C._autograd._top", "torch.distributed._comp")
"""Looked up where they are simulated, or used only where torch has them."""


def dotted(node: ast.AST) -> str | None:
    """The dotted name of an attribute, with torch's parts under their own names."""
    if isinstance(node, ast.Name):
        return OTHER_NAMES.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    return None


def private_names(tree: ast.Module) -> set[str]:
    """Every private name of torch that a module uses."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node) or "")
    return {name for name in found if PRIVATE.match(name) and not name.startswith(NOT_NEEDED)}


def used() -> set[str]:
    names = set()
    for path in PACKAGE.rglob("*.py"):
        names |= private_names(ast.parse(path.read_text()))
    # `torch._C._functorch.peek` holds `torch._C` and `torch._C._functorch` too.
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def test_the_list_is_the_code_s() -> None:
    listed = {name for names in NAMES.values() for name in names}
    missing = {name for name in used() if not any(known.startswith(name) for known in listed)}
    assert not missing, f"add to NAMES: {sorted(missing)}"
    code = used()
    unused = {name for name in listed if not any(name.startswith(each) for each in code)}
    assert not unused, f"nobody uses: {sorted(unused)}"


def test_a_private_name_is_found_in_code() -> None:
    tree = ast.parse("from torch.nn import _x\nimport torch\ntorch._C._secret()\nnn._y\ntorch.nn.z")
    assert private_names(tree) >= {"torch.nn._x", "torch._C._secret", "torch.nn._y"}
    assert "torch.nn.z" not in private_names(tree)


@pytest.mark.parametrize("instrument", sorted(NAMES))
def test_this_torch_has_them_all(instrument: str) -> None:
    assert torch.__version__.partition("+")[0] == torch_names.TESTED
    refuse_unknown_torch(instrument)


def test_a_torch_without_one_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "watch", ("torch._C._gone", "torch._nowhere.thing"))
    refuse_unknown_torch.cache_clear()
    with pytest.raises(GradsightError, match=r"lacks torch\._C\._gone, torch\._nowhere\.thing"):
        gradsight.watch(torch.nn.Linear(1, 1))
    monkeypatch.undo()
    refuse_unknown_torch.cache_clear()
    gradsight.watch(torch.nn.Linear(1, 1)).close()
