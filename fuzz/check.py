"""check.json and script.json, which `gradsight check` leaves and `gradsight report` reads."""

import json

from gradsight.cli.check_result import CheckResult, load_check, load_script
from gradsight.core.documents import load_json
from gradsight.show.run_report import script_section


def target(data: bytes) -> None:
    """Read it as what it looks like, and say what a report says of it."""
    if isinstance(load_json(data, "it"), dict):
        kept = load_check(data, "check.json")
        script_section(CheckResult(list(kept.command), kept.exit_code).notes())
        return
    optimizers = load_script(data, "script.json")
    result = CheckResult(["train.py"], 0, optimizers=optimizers)
    script_section(result.notes())


def corpus() -> list[bytes]:
    """One of each."""
    optimizer = {
        "optimizer": "AdamW", "model": "Net", "made": ["train.py", 3], "steps": ["train.py", 9],
        "lr": 0.1, "scheduler": True, "step_calls": [],
    }  # fmt: skip
    kept = {"status": "healthy", "script": {"command": ["python", "train.py"], "exit_code": 0}}
    return [json.dumps(kept).encode(), json.dumps([optimizer, {"optimizer": "SGD"}]).encode()]
