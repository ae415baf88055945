"""A run directory that holds a run already: it is continued, by the model that it is of."""

from collections.abc import Sequence
from typing import Any

from gradsight.core.notices import notice
from gradsight.core.parameters import Named
from gradsight.errors import UsageError
from gradsight.store.run_files import read_run_config
from gradsight.store.store import Store

_SHOWN = 3
"""Differences that an error names."""


def refuse_another_model(store: Store, parameters: Sequence[Named]) -> None:
    """Two models in one record would be one run with steps that nobody could compare."""
    recorded = read_run_config(store.path).get("parameters", [])
    differences = _differences(recorded, parameters)
    if not recorded or not differences:
        return
    shown = "; ".join(differences[:_SHOWN])
    if len(differences) > _SHOWN:
        shown += f"; and {len(differences) - _SHOWN} more"
    raise UsageError(
        f"{store.path} holds a run of another model: {shown}. "
        "Give this model another run_dir, or start_step=0 to replace that run."
    )


def _differences(recorded: Sequence[dict[str, Any]], parameters: Sequence[Named]) -> list[str]:
    """What is not as config.json has it: names and shapes. What is trained may change."""
    before = {str(each["name"]): tuple(each["shape"]) for each in recorded}
    now = {named.name: tuple(named.tensor.shape) for named in parameters}
    found = []
    for name, shape in now.items():
        if name not in before:
            found.append(f"{name} is not in it")
        elif shape != before[name]:
            found.append(f"{name} has the shape {shape}, and {before[name]} there")
    return found + [f"{name} is in it, but not here" for name in before if name not in now]


def say_continued(run_dir: object, following: int, first_step: int) -> None:
    """One line, where steps are added to a run or take the place of some.

    `following` is the step after the last one of the run.
    """
    if following == 0:
        return
    last = following - 1
    if first_step > last:
        notice(f"continuing {run_dir} after step {last}")
    elif first_step == 0:
        notice(f"recording {run_dir} anew: its steps 0 to {last} are replaced")
    else:
        replaced = f"its steps {first_step} to {last} are replaced"
        notice(f"continuing {run_dir} after step {first_step - 1}: {replaced}")
