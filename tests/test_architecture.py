"""The shape of the package: one front door, imports in one direction, nothing heavy at import time."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradsight

PACKAGE = Path(gradsight.__file__).parent

FRONT_DOOR = [
    "GhostEngine",
    "GradientDumper",
    "GradsightError",
    "MemoryMonitor",
    "MetricsTracker",
    "Schedule",
    "apply_checkpointing",
    "check_gradient_health",
    "get_checkpoint_metadata",
    "load_keys",
    "log_gradient_distribution",
    "measure_peak_memory",
    "open_run",
    "plan_checkpointing",
    "predict_peak_memory",
    "verify_checkpointing",
    "watch",
]

ORDER = [
    {"errors"},
    {"values"},
    {"core"},
    {"measure", "store"},
    {"health", "incidents", "dump", "ghost", "memory", "show"},
    {"session"},
    {"attach", "train", "integrations"},
    {"cli"},
    {"__main__"},
    {"gradsight"},  # the front door, which nobody inside goes through
]
"""Each part may import those of earlier lines; parts of one line are strangers."""
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
SHOW_MAY_USE = {"errors", "values", "store"}


def may_import(importer: str, imported: str) -> bool:
    """Whether a module of one part may import another part."""
    if importer == imported:
        return True
    if importer == "show":
        return imported in SHOW_MAY_USE
    return LEVEL[imported] < LEVEL[importer]


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "gradsight"


def imports() -> list[tuple[str, str]]:
    """Every import of our own modules, also those inside functions."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(
            ("gradsight", *path.relative_to(PACKAGE).with_suffix("").parts)
        ).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} uses a relative import"
                found += (
                    [(name, f"{node.module}.{alias.name}") for alias in node.names]
                    if node.module == "gradsight"
                    else [(name, node.module or "")]
                )
            elif isinstance(node, ast.Import):
                found += [(name, alias.name) for alias in node.names]
    return [(name, module) for name, module in found if module.split(".")[0] == "gradsight"]


def test_only_core_knows_torch_distributed() -> None:
    """The writer of distributed checkpoints names that format's own types; nothing else does."""
    knowing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(
            name.startswith("torch.distributed")
            for name in (getattr(node, "module", None) or "", *(a.name for a in node.names))
        )
    }
    assert {path for path in knowing if not path.startswith("core/")} == {"dump/full.py"}


def test_imports_point_one_way() -> None:
    wrong = {
        (name, module) for name, module in imports() if not may_import(part(name), part(module))
    }
    assert wrong == set()


def test_the_direction_rule_can_fail() -> None:
    assert not may_import("measure", "session")
    assert not may_import("health", "incidents")
    assert not may_import("values", "core")
    assert not may_import("show", "core")
    assert not may_import("train", "cli")


def test_front_door_is_frozen() -> None:
    assert sorted(gradsight.__all__) == FRONT_DOOR
    for name in FRONT_DOOR:
        assert getattr(gradsight, name).__name__ == name


def test_the_front_door_stands_whatever_was_imported_before() -> None:
    code = "import gradsight.session.watch_session, gradsight; from gradsight import watch; assert watch is gradsight.watch; watch.__code__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'wacth'; it has .*watch"):
        _ = gradsight.wacth


@pytest.mark.parametrize(
    "code",
    [
        "import gradsight",
        "import gradsight.store.reader",
        "import gradsight.show.markdown",
        "from gradsight.cli import main; main(['--help'])",
        "from gradsight.cli import main; main(['report', '--help'])",
        "from gradsight.cli import main; main(['check', '--help'])",
        "from gradsight.cli import main; main(['replay', '--help'])",
        "import gradsight.health.judge",
        "import gradsight.values.wording",
        "import gradsight.dump.reader, gradsight.dump.verify, gradsight.dump.diff, gradsight.dump.statistics",
        "from gradsight.cli import main; main(['dump', 'show', '--help'])",
        "from gradsight.cli import main; main(['train', '--help'])",
        "from gradsight.cli import main; main(['train', '--data', 'nowhere'])",
        "from gradsight.train.samples import open_samples; open_samples({'architecture': 'char'}).text(0)",
    ],
)
def test_no_torch_without_need(code: str) -> None:
    check = f"{code}\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_module_is_the_command() -> None:
    by_module = subprocess.run(
        [sys.executable, "-m", "gradsight", "--help"], capture_output=True, text=True
    )
    by_name = subprocess.run(
        [Path(sys.executable).with_name("gradsight"), "--help"], capture_output=True, text=True
    )
    assert by_module.returncode == by_name.returncode == 0
    assert by_module.stdout == by_name.stdout
    assert "report" in by_name.stdout


def test_wrong_usage_is_64() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradsight", "reprot"], capture_output=True, text=True
    )
    assert done.returncode == 64
    assert "report" in done.stderr + done.stdout
