"""The marker `internal` is on the tests that reach an internal module, and on no other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

HELPERS = {
    "conftest.py": """
        import pytest
        from gradsight.values import steps

        pytest_plugins = ["internals"]

        @pytest.fixture
        def guarded(): return steps.Step

        @pytest.fixture
        def plain(): return 1

        @pytest.fixture
        def twice_removed(guarded): return guarded
    """,
    "helpers/__init__.py": "from helpers.tables import INTERNAL as REEXPORTED",
    "helpers/tables.py": """
        import gradsight
        from gradsight.values.steps import Step

        ROWS = []
        PUBLIC = lambda: gradsight.watch
        INTERNAL = {"step": Step}
        CHANGED = {}
        CHANGED["step"] = Step

        def uses_public(): return PUBLIC
        def calls_another(): return inner()
        def inner(): return INTERNAL
        class Base: made_of = Step
    """,
    "helpers/registered.py": """
        from gradsight.values import steps

        TABLE = {}
        def enter(function): TABLE[function.__name__] = function

        @enter
        def registered(): return steps
    """,
    "autouse/conftest.py": """
        import pytest

        @pytest.fixture(autouse=True)
        def _patience():
            from gradsight.session import first_look
    """,
    "optional/conftest.py": """
        import contextlib, pytest

        @pytest.fixture(autouse=True)
        def _patience():
            with contextlib.suppress(ImportError):
                from gradsight.session import first_look
    """,
    "workers/reaches.py": "import helpers.tables\nprint(helpers.tables.inner())",
    "workers/public.py": "import gradsight\nprint(gradsight.watch)",
}
"""Files that the tests below use."""

INTERNAL = {
    "import_from": "from gradsight.values.steps import Step\ndef test(): Step",
    "import_as": "import gradsight.values.steps as records\ndef test(): records.Step",
    "subpackage": "from gradsight import values\ndef test(): values",
    "attribute": "import gradsight\ndef test(): gradsight.values.steps",
    "in_function": "def test():\n    import gradsight.values.steps",
    "from_in_function": "def test():\n    from gradsight import values",
    "not_main": "from gradsight.cli import all_commands\ndef test(): all_commands()",
    "private_integration": "def test():\n    from gradsight.integrations import door",
    "decorator": "import pytest\nfrom gradsight import values\n@pytest.mark.parametrize('a', [values])\ndef test(a): a",
    "argument": "from gradsight import values\ndef test(a=values): a",
    "script": "SCRIPT = '''\nfrom gradsight import values\n'''\ndef test(): SCRIPT",
    "script_in_f_string": "def test(): f'from gradsight.values import {1}'",
    "patch": "def test(monkeypatch): monkeypatch.setattr('gradsight.values.steps.Step', 1)",
    "helper": "from helpers.tables import calls_another\ndef test(): calls_another()",
    "helper_module": "from helpers import tables\ndef test(): tables.calls_another()",
    "helper_in_function": "def test():\n    from helpers import tables\n    tables.calls_another()",
    "reexported": "import helpers\ndef test(): helpers.REEXPORTED",
    "changed_table": "from helpers.tables import CHANGED\ndef test(): CHANGED",
    "registered": "from helpers.registered import TABLE\ndef test(): TABLE",
    "whole_module": "from helpers import tables\ndef test(): vars(tables)",
    "base_class": "from helpers.tables import Base\nclass Mine(Base): ...\ndef test(): Mine()",
    "method": "from gradsight import values\nclass TestIt:\n    def test(self): values",
    "fixture": "def test(guarded): guarded",
    "fixture_of_fixture": "def test(twice_removed): twice_removed",
    "named_fixture": "import pytest\n@pytest.mark.usefixtures('guarded')\ndef test(): ...",
    "autouse/of_folder": "def test(): ...",
    "worker": "from pathlib import Path\nHERE = Path(__file__).parent\ndef test(): HERE / 'workers' / 'reaches.py'",
    "private_attribute": "import gradsight\ndef test(): gradsight.watch(None)._instruments",
    "private_option": "import gradsight\ndef test(): gradsight.GhostEngine(_route='project')",
    "by_hand": "import pytest\n@pytest.mark.internal\ndef test(): ...",
}
PUBLIC = {
    "name": "import gradsight\ndef test(): gradsight.watch, gradsight.__version__",
    "from_package": "def test():\n    from gradsight import preflight, open_run",
    "errors": "from gradsight.errors import RunError\ndef test(): RunError",
    "command": "from gradsight.cli import main\ndef test(): main(['--help'])",
    "module_command": "def test(): ['-m', 'gradsight', 'report']",
    "integration": "def test():\n    from gradsight.integrations.hf import GradsightCallback",
    "integrations": "from gradsight import integrations\ndef test(): integrations.lightning",
    "unused_import": "from gradsight.values import steps\ndef other(): steps\ndef test(): ...",
    "helper": "from helpers.tables import uses_public\ndef test(): uses_public()",
    "fixture": "def test(plain): plain",
    "optional/import": "def test(): ...",
    "docstring": "def test():\n    '''Compare with gradsight.values.steps.'''",
    "script": "def test(): 'import gradsight; gradsight.watch'",
    "worker": "def test(): 'workers/public.py'",
    "private_attribute_of_torch": "def test(tensor=None): tensor._version",
    "own_private_attribute": "class Mine:\n    def read(self): return self._instruments\ndef test(): Mine().read()",
    "file_name": "def test(): 'gradsight.json', 'run.gradsight.io'",
}


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Return for each example file whether its test is collected by `-m internal`."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = internal: marked\n")
    sources = {
        **HELPERS,
        **{_file("internal", name): source for name, source in INTERNAL.items()},
        **{_file("public", name): source for name, source in PUBLIC.items()},
    }
    for name, source in sources.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(re.sub(r"^ {8}", "", source, flags=re.M))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--import-mode=importlib"]
    paths = os.pathsep.join([str(folder), str(TESTS), *sys.path])
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", "internal"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: f"{name}::" in done.stdout for name in sources}


def _file(kind: str, name: str) -> str:
    folder, _, name = name.rpartition("/")
    return f"{folder}/test_{kind}_{name}.py".removeprefix("/")


@pytest.mark.parametrize("name", INTERNAL)
def test_internal_modules_are_found(name: str, marked: dict[str, bool]) -> None:
    assert marked[_file("internal", name)]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_tests_are_kept(name: str, marked: dict[str, bool]) -> None:
    assert not marked[_file("public", name)]
