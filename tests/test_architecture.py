"""The shape of the package: one front door, imports in one direction, nothing heavy at import time."""

import ast
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import gradsight

PACKAGE = Path(gradsight.__file__).parent

FRONT_DOOR = [
    "DomainMixer",
    "GhostEngine",
    "GradientDumper",
    "GradsightError",
    "InfluenceSampler",
    "MemoryMonitor",
    "MetricsTracker",
    "Schedule",
    "StopTraining",
    "apply_checkpointing",
    "check_gradient_health",
    "get_checkpoint_metadata",
    "load_keys",
    "log_gradient_distribution",
    "measure_peak_memory",
    "open_run",
    "plan_checkpointing",
    "predict_peak_memory",
    "preflight",
    "read_scores",
    "verify_checkpointing",
    "watch",
]

ORDER = [
    {"errors"},
    {"values"},
    {"core"},
    {"measure", "store"},
    {"health", "incidents", "dump", "ghost", "memory", "first_step", "show"},
    {"session"},
    {"train", "integrations"},
    {"attach"},
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


INSTRUMENTS = {"health", "incidents", "dump", "ghost", "memory", "first_step"}
HANDLES = {
    "GhostEngine",
    "GradientDumper",
    "Guard",
    "ModelGroup",
    "ProcessGroup",
    "Problems",
    "Reduction",
    "RunProblems",
    "SampleTexts",
    "SinkQueue",
    "Store",
    "Watch",
}
"""Classes that parts hand to each other to be used, not to be read; everything else is a value."""


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "gradsight"


def modules(package: Path = PACKAGE) -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in package.rglob("*.py"):
        parts = ("gradsight", *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imports() -> list[tuple[str, str]]:
    """Every import of our own modules, also those inside functions and for types alone."""
    found = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} uses a relative import"
                if node.module == "gradsight":
                    found += [(name, f"gradsight.{alias.name}") for alias in node.names]
                else:
                    found.append((name, node.module or ""))
            elif isinstance(node, ast.Import):
                found += [(name, alias.name) for alias in node.names]
    return [(name, module) for name, module in found if module.split(".")[0] == "gradsight"]


@pytest.mark.internal
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


@pytest.mark.internal
def test_imports_point_one_way() -> None:
    wrong = [
        f"{name} -> {module}"
        for name, module in imports()
        if not may_import(part(name), part(module))
    ]
    assert not wrong, wrong


@pytest.mark.internal
def test_the_direction_rule_can_fail() -> None:
    assert not may_import("measure", "session")
    assert not may_import("health", "incidents")
    assert not may_import("values", "core")
    assert not may_import("show", "core")
    assert not may_import("train", "cli")
    assert not may_import("session", "gradsight")


@pytest.mark.internal
def test_every_part_is_on_the_map() -> None:
    parts = {part(name) for name in modules()} - {"gradsight"}
    assert parts <= set(LEVEL), parts - set(LEVEL)
    assert {name for names in ORDER for name in names} - {"gradsight"} <= parts


@pytest.mark.internal
def test_no_part_is_in_a_cycle() -> None:
    edges = {(part(name), part(module)) for name, module in imports()}
    reached = {(a, b) for a, b in edges if a != b and "gradsight" not in (a, b)}
    while True:
        further = {(a, d) for a, b in reached for c, d in reached if b == c} - reached
        if not further:
            break
        reached |= further
    assert {a for a, b in reached if a == b} == set()


@pytest.mark.internal
def test_instruments_are_strangers() -> None:
    wrong = [
        f"{name} -> {module}"
        for name, module in imports()
        if {part(name), part(module)} <= INSTRUMENTS and part(name) != part(module)
    ]
    assert not wrong, wrong


def is_value(node: ast.ClassDef) -> bool:
    """Whether a class is a frozen dataclass, or no record at all: an error or a protocol."""
    for decorator in node.decorator_list:
        for keyword in getattr(decorator, "keywords", ()):
            if keyword.arg == "frozen" and getattr(keyword.value, "value", False):
                return True
    bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
    return any(
        base == "Protocol" or base.endswith(("Error", "Exception", "Warning")) for base in bases
    )


def annotated_names(function: ast.FunctionDef) -> set[str]:
    """The names in a function's annotations, quoted ones too."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    annotations = [each.annotation for each in every if each.annotation is not None]
    if function.returns is not None:
        annotations.append(function.returns)
    names = set()
    for annotation in annotations:
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # Help texts of the commands are in their annotations too, and are no Python.
                with contextlib.suppress(SyntaxError):
                    quoted = ast.walk(ast.parse(node.value))
                    names |= {each.id for each in quoted if isinstance(each, ast.Name)}
    return names


def mutable_between_parts(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """By class: the modules of other parts whose signatures name it, where it is not frozen."""
    classes = {
        (module, node.name): node
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    crossing: dict[str, set[str]] = {}
    for module, tree in trees.items():
        imported = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module is not None
            for alias in node.names
            if (node.module, alias.name) in classes and part(node.module) != part(module)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                for name in annotated_names(node) & set(imported):
                    if not is_value(classes[imported[name]]):
                        crossing.setdefault(imported[name][1], set()).add(module)
    return crossing


@pytest.mark.internal
def test_what_travels_between_parts_is_frozen() -> None:
    crossing = mutable_between_parts(modules())
    assert set(crossing) <= HANDLES, {
        name: crossing[name] for name in crossing if name not in HANDLES
    }
    assert set(crossing) == HANDLES, f"no handles any more: {HANDLES - set(crossing)}"


def test_the_rule_of_frozen_values_can_fail() -> None:
    trees = {
        "gradsight.values.loose": ast.parse("@dataclass\nclass Loose:\n    step: int"),
        "gradsight.values.fixed": ast.parse("@dataclass(frozen=True)\nclass Fixed:\n    step: int"),
        "gradsight.session.user": ast.parse(
            "from gradsight.values.loose import Loose\n"
            "from gradsight.values.fixed import Fixed\n"
            "def use(one: Fixed, other: 'Loose | None') -> None: ..."
        ),
    }
    assert mutable_between_parts(trees) == {"Loose": {"gradsight.session.user"}}


def test_front_door_is_frozen() -> None:
    assert sorted(gradsight.__all__) == FRONT_DOOR
    for name in FRONT_DOOR:
        assert getattr(gradsight, name).__name__ == name


def test_the_front_door_stands_whatever_was_imported_before() -> None:
    code = "import gradsight.session.watching, gradsight; from gradsight import watch; assert watch is gradsight.watch; watch.__code__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'wacth'; it has .*watch"):
        _ = gradsight.wacth


def test_unknown_integration_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no integration 'keras'; there are accelerate, hf"):
        _ = gradsight.integrations.keras


@pytest.mark.parametrize(
    "code",
    [
        "import gradsight",
        "import gradsight; gradsight.integrations",
        "from gradsight.cli import main; main(['--help'])",
        "from gradsight.cli import main; main(['report', '--help'])",
        "from gradsight.cli import main; main(['check', '--help'])",
        "from gradsight.cli import main; main(['compare', '--help'])",
        "from gradsight.cli import main; main(['replay', '--help'])",
        "from gradsight.cli import main; main(['dump', 'show', '--help'])",
        "from gradsight.cli import main; main(['train', '--help'])",
        "from gradsight.cli import main; main(['train', '--data', 'nowhere'])",
    ],
)
def test_no_torch_without_need(code: str) -> None:
    check = f"{code}\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import gradsight.store.reader",
        "import gradsight.show.markdown",
        "import gradsight.show.serve.app, gradsight.show.serve.server",
        "import gradsight.health.judge",
        "import gradsight.values.wording",
        "import gradsight.dump.reader, gradsight.dump.verify, gradsight.dump.diff, gradsight.dump.statistics",
        "from gradsight.train.samples import open_samples; open_samples({'architecture': 'char'}).text(0)",
    ],
)
def test_modules_without_need_for_torch(code: str) -> None:
    test_no_torch_without_need(code)


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
