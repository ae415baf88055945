"""One module knows kinds of devices, and what it knows is right on both devices of the tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gradsight
from device.simulated import simulated
from gradsight.core import devices
from gradsight.core.autocast import current_autocast
from gradsight.core.random_state import randomness_kept, torch_states

pytestmark = pytest.mark.internal  # they read the source of the package

SOURCE = Path(gradsight.__file__).parent
KINDS = ("cuda", "mps", "xpu", "hpu", "npu")
KNOW_DEVICES = ("core/devices.py", "memory/cuda.py")


def kinds_in(tree: ast.Module) -> Iterator[int]:
    """Lines where a kind of device is a value, or torch's module of one is touched."""
    for_users: set[int] = set()
    for node in ast.walk(tree):
        is_literal = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_literal or is_text:
            for_users.update(id(each) for each in ast.walk(node))
    for node in ast.walk(tree):
        if id(node) in for_users:
            continue
        if isinstance(node, ast.Attribute) and node.attr in (*KINDS, "is_cuda", "is_mps", "is_xpu"):
            yield node.lineno
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and value.partition(":")[0] in KINDS and " " not in value:
            yield node.lineno


def test_one_module_knows_kinds_of_devices() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) not in KNOW_DEVICES
        for line in kinds_in(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ['x.type == "cuda"', "torch.cuda.synchronize()", "x.is_cuda", 'torch.device("mps:0")']
)
def test_a_line_that_knows_one_is_found(line: str) -> None:
    assert list(kinds_in(ast.parse(line))) == [1]
    assert not list(kinds_in(ast.parse('def f(x: Literal["cuda"]):\n    """On cuda."""')))


def test_numbers_come_and_go(device: torch.device) -> None:
    there = devices.sent_to(torch.arange(3.0), device)
    assert there.device == device
    host = devices.host_memory((3,), torch.float32, device)
    host.copy_(there, non_blocking=True)
    if devices.is_accelerator(device):
        devices.record_event(device).synchronize()
    assert host.tolist() == [0, 1, 2]


def test_generators_of_every_device_are_put_back(device: torch.device) -> None:
    before = torch_states()
    assert len(before) == (3 if devices.is_accelerator(device) else 1)
    with randomness_kept():
        torch.rand(2, device=device)
    after = torch_states()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_float64_is_a_capability() -> None:
    assert devices.widest_float(torch.device("cpu")) is torch.float64
    for has_it in (True, False):
        with simulated(float64=has_it) as there:
            found = devices.widest_float(there.device)
            assert found is (torch.float64 if has_it else torch.float32)


def test_autocast_of_any_kind_is_seen() -> None:
    with simulated() as there, torch.autocast(there.type, dtype=torch.bfloat16):
        assert current_autocast() == (there.type, "bfloat16")
