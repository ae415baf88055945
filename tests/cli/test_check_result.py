"""What `gradsight check` prints of a script's runs and of its end."""

import io
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gradsight.cli.check_result import CheckResult, load_script, read_result
from gradsight.errors import RunError
from gradsight.show.summary import Summary
from gradsight.values.findings import Finding
from gradsight.values.health_report import HealthReport
from gradsight.values.steps import Step


def finding(code: str, severity: str, caused_by: str | None = None) -> Finding:
    texts = ("evidence", "message", "do this", "")
    return Finding(code, "a name", severity, ("weight",), 3, *texts, caused_by=caused_by)


def run(*findings: Finding, steps: int = 4, clipped: int = 0, lr: float | None = None) -> Summary:
    recorded = [
        Step(
            number,
            0.0,
            lr=None if lr is None else lr * (steps - number) / steps,
            clip_coef=0.5 if number < clipped else 1.0,
        )
        for number in range(steps)
    ]
    status = max(
        (each.severity for each in findings), key=("warning", "critical").index, default="healthy"
    )
    health = HealthReport(steps - 1, status, 1.0, 0, 0, 0, 2, findings, steps=steps)
    return Summary(recorded, {}, {}, None, [], {}, health)


def printed(result: CheckResult) -> str:
    return "\n".join(result.lines(io.StringIO()))


def test_a_script_that_dies_before_it_trains_is_asked_nothing() -> None:
    result = CheckResult(["python", "a.py"], 1, error="ImportError: no module named x")
    text = " ".join(printed(result).split())
    assert "failed with exit code 1 before its first optimizer step: ImportError: no" in text
    assert "nothing to judge" not in text
    assert result.exit_code() == result.exit_code("never") == 3


def test_a_script_that_ends_without_a_step_is_asked_for_an_optimizer() -> None:
    text = " ".join(printed(CheckResult(["python", "a.py"], 0)).split())
    assert "no optimizer step was seen: nothing to judge" in text


def adam(**more: object) -> dict[str, object]:
    """An optimizer as script.json describes it."""
    return {"optimizer": "Adam", "model": "net", "made": ["/a/train.py", 3], **more}


def test_a_rate_that_the_script_changes_is_told_by_its_largest_value() -> None:
    optimizer = adam(steps=["/a/train.py", 9], lr=0.0, scheduler=False)
    changed = CheckResult(["python", "train.py"], 0, {"net": run(lr=0.5)}, [optimizer])
    assert changed.notes()[0].endswith("lr up to 0.5, set by the script.")
    constant = CheckResult(["python", "train.py"], 0, {"net": run()}, [optimizer | {"lr": 0.1}])
    assert constant.notes()[0].endswith("lr 0.1, no scheduler.")


def test_a_place_outside_the_script_is_told_from_the_working_directory_on() -> None:
    here = Path.cwd()
    optimizer = adam(made=[str(here / "train.py"), 3], steps=[str(here / "lib" / "misc.py"), 9])
    text = CheckResult(["python", "train.py"], 0, {"net": run()}, [optimizer]).notes()[0]
    assert "made at train.py:3, steps at lib/misc.py:9" in text
    elsewhere = adam(steps=["/elsewhere/lib/misc.py", 9])
    text = CheckResult(["python", "train.py"], 0, {"net": run()}, [elsewhere]).notes()[0]
    assert "made at train.py:3, steps at misc.py:9" in text


def test_steps_that_a_scaler_skipped_are_counted() -> None:
    summary = run()
    steps = [replace(step, scale=2.0, skipped=step.step == 1) for step in summary.steps]
    scaled = replace(summary, steps=steps)
    line = CheckResult([], 0, {"net": scaled}).notes()[-1]
    assert line.endswith("Loss scaling: yes (1 skipped by the GradScaler).")
    line = CheckResult([], 0, {"net": scaled, "critic": run()}).notes()[-1]
    assert line.endswith("Loss scaling: yes (1 skipped by the GradScaler in net).")


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (4, "failed with exit code 4 after 4 optimizer steps"),
        (-signal.SIGKILL, "was killed by signal 9 after 4 optimizer steps"),
        (-signal.SIGINT, "was interrupted after 4 optimizer steps"),
    ],
)
def test_a_failure_comes_first_and_is_not_called_healthy(code: int, how: str) -> None:
    result = CheckResult(["python", "a.py"], code, {"net": run()})
    first, *others = printed(result).splitlines()[2:]
    assert first == f"❌ The script {how}"
    assert others[0] == "No finding in 4 steps before the failure"
    assert result.exit_code() == 3


def test_the_most_severe_finding_comes_first() -> None:
    runs = {
        "fine": run(),
        "warned": run(finding("GS202", "warning")),
        "broken": run(finding("GS103", "critical")),
    }
    result = CheckResult(["python", "a.py"], 0, runs)
    assert list(result.judged) == ["broken", "warned", "fine"]
    assert result.root_codes == ["GS103", "GS202"]
    text = printed(result)
    assert text.index("GS103") < text.index("GS202") < text.index("no finding")
    assert result.exit_code() == 2
    assert result.exit_code("never") == 0


def test_a_consequence_is_not_among_the_codes_to_silence() -> None:
    follows = finding("GS101", "critical", caused_by="GS401")
    result = CheckResult([], 0, {"net": run(finding("GS401", "warning"), follows)})
    assert result.root_codes == ["GS401"]
    assert "❌ GS401 a name, since step 3, leads to GS101 (critical)" in printed(result)


def test_clipping_is_counted_for_each_model() -> None:
    assert "Clipping: 1 of 4 steps." in printed(CheckResult([], 0, {"net": run(clipped=1)}))
    runs = {"actor": run(), "critic": run(clipped=3, steps=6), "alpha": run()}
    assert "Clipping: critic in 3 of 6 steps. Loss" in printed(CheckResult([], 0, runs))
    runs.pop("critic")
    assert "Clipping: none, in any model. Loss" in printed(CheckResult([], 0, runs))


def test_a_scheduled_rate_is_shown_at_its_largest() -> None:
    optimizer = {
        "optimizer": "AdamW", "model": "net", "made": ["/x/train.py", 3],
        "steps": ["/x/train.py", 9], "lr": 0.0, "scheduler": True,
    }  # fmt: skip
    result = CheckResult([], 0, {"net": run(lr=0.1)}, [optimizer])
    assert (
        "AdamW of net: made at train.py:3, steps at train.py:9, lr up to 0.1 with a scheduler."
        in " ".join(printed(result).split())
    )


def test_names_stay_whole() -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight_of_a_long_name"
    optimizer = {"optimizer": "SGD", "model": name, "made": None, "steps": None, "scheduler": False}
    result = CheckResult([], 0, {name: run()}, [optimizer])
    assert any(name in line for line in printed(result).splitlines())


def test_why_there_is_nothing_to_train() -> None:
    frozen = {"optimizer": "none", "frozen": "PeftModel", "adapters": True}
    text = " ".join(printed(CheckResult([], 0, optimizers=[frozen])).split())
    assert "No parameter of PeftModel requires a gradient" in text
    assert "is_trainable=True" in text


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    result = read_result(tmp_path, ["python", "a.py"], 1, "ValueError: no")
    result.write(tmp_path)
    again = read_result(tmp_path)
    assert (again.command, again.code, again.error) == (["python", "a.py"], 1, "ValueError: no")
    assert "ValueError: no" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[{"optimizer": 3}]', '[{"optimizer": "SGD", "made": 3}]']
)
def test_a_damaged_list_of_optimizers(text: str) -> None:
    with pytest.raises(RunError):
        load_script(text.encode(), "script.json")
