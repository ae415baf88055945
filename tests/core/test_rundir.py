"""The names in a run directory are written down once."""

import ast
from pathlib import Path

import gradsight
from gradsight.core import rundir

PACKAGE = Path(gradsight.__file__).parent
NAMES = {
    rundir.RECORD,
    rundir.TAIL,
    rundir.CONFIG,
    rundir.REPORT,
    rundir.DUMPS,
    rundir.SCORES,
    rundir.SCORE_FILES,
    rundir.TRAINING_LOG,
    rundir.CHECKPOINTS,
    rundir.CHECK,
    rundir.SCRIPT,
}
"""`incidents` and `tensorboard` are words of other things too."""


def places(source: str) -> set[str]:
    """The names of run directories among the string constants of a module."""
    constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return {node.value for node in constants if isinstance(node.value, str)} & NAMES


def test_no_other_module_spells_a_name() -> None:
    spelling = {
        path.relative_to(PACKAGE).as_posix(): places(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    assert spelling.pop("core/rundir.py") == NAMES
    assert not {path: names for path, names in spelling.items() if names}


def test_the_search_can_find() -> None:
    assert places("file = run_dir / 'config.json'") == {"config.json"}


def test_score_files_match_their_pattern() -> None:
    assert Path(rundir.score_file(30)).match(rundir.SCORE_FILES)


def test_a_run_is_known_by_its_record(tmp_path: Path) -> None:
    assert not rundir.is_run(tmp_path)
    (tmp_path / rundir.RECORD).touch()
    assert rundir.is_run(tmp_path)
