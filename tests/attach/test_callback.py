"""Hugging Face's Trainer with the one line of the documentation: the verdict is that of `check`."""

from pathlib import Path

import pytest

import gradsight
import warm
from attach.situations import HEADER, all_situations, check
from attach.situations.trainers import CASES, trained

CALLBACK = "callbacks=[GradsightCallback(run_dir='watched')]"
IMPORT = """from gradsight.integrations.hf import GradsightCallback
from gradsight.session import first_look
first_look._LEAST_SECONDS = 60.0  # the machine may be busy
"""
ONLY_CHECK = {"GS306"}
"""It compares the networks of a script, which only `check` and `run` know."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_callback_and_check_say_the_same(name: str, tmp_path: Path) -> None:
    labels, options, _, _ = CASES[name]
    script = tmp_path / "watched.py"
    script.write_text(HEADER + IMPORT + trained(labels, options, CALLBACK), encoding="utf-8")
    done = warm.run(
        [str(script)], preload=["transformers"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    run = gradsight.open_run(tmp_path / "watched")
    checked = check(all_situations()[f"Hugging Face's Trainer: {name}"], tmp_path)
    assert {each.code for each in run.findings()} == {each["code"] for each in checked.findings}
    skipped = {each.code: each.reason for each in run.abstentions() if each.code not in ONLY_CHECK}
    assert skipped == {
        code: reason for code, reason in checked.skipped.items() if code not in ONLY_CHECK
    }
