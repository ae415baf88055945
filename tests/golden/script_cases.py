"""What `gradsight check` says about the scripts of tests/attach/situations.

Each must also fulfil the expectations that are written beside the script.
"""

from functools import partial
from typing import Any

from attach.situations import Situation, all_situations, run
from golden.results import Group


def check(situation: Situation) -> dict[str, Any]:
    """Return what must stay the same about the outcome."""
    outcome = run(situation)
    mistakes = outcome.mistakes(situation)
    assert not mistakes, "\n".join([*mistakes, outcome.output, outcome.errors])
    fields = ("code", "severity", "first_step", "parameters", "caused_by")
    return {
        "exit code": outcome.exit_code,
        "models": {
            name: {
                "steps": model["steps"],
                "findings": [{key: each[key] for key in fields} for each in model["findings"]],
            }
            for name, model in outcome.report["models"].items()
        },
        "skipped": sorted(outcome.skipped),
    }


_SITUATIONS = all_situations()
GROUP = Group(
    "scripts",
    {name: partial(check, each) for name, each in _SITUATIONS.items()},
    tolerance=0.0,
    slow=frozenset(name for name, each in _SITUATIONS.items() if each.slow),
)
