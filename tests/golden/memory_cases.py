"""Predicted peaks and checkpointing plans for the models of tests/memory/families.py.

Nothing is computed for them, so all numbers are the same on every processor.
"""

from functools import partial
from typing import Any

import gradsight
from golden.results import Group, public_types
from memory import families

BUDGET = 0.7
"""Share of the peak without checkpointing."""
BUILDS = {
    **families.EXACT,
    "swin": families.swin,
    "mixtral, expert by expert": families.experts("Mixtral", loop=True, num_local_experts=4),
    "bart with layer drop": families.sequence_to_sequence(
        "Bart", encoder_layerdrop=0.5, decoder_layerdrop=0.5
    ),
}


def predict_and_plan(name: str) -> dict[str, Any]:
    """Return the predicted peak and the plan, or the types of the exception that refuses it."""
    build = BUILDS[name]
    use = gradsight.predict_peak_memory(build)
    peak = {
        "peak_bytes": use.peak_bytes,
        "by_kind": dict(use.by_kind),
        "flops": use.flops,
        "bounds": use.bounds,
        "assumptions": len(use.assumptions),
    }
    return {"peak": peak, "plan": _plan(build, int(BUDGET * use.peak_bytes))}


def _plan(build: Any, budget: int) -> Any:
    try:
        plan = gradsight.plan_checkpointing(build, budget)
    except gradsight.GradsightError as refusal:
        return {"refused": public_types(refusal)}
    return {
        "policy": plan.policy,
        "blocks": list(plan.blocks),
        "predicted_bytes": plan.predicted_bytes,
        "baseline_bytes": plan.baseline_bytes,
        "extra_flops": plan.extra_flops,
    }


GROUP = Group(
    "memory",
    {name: partial(predict_and_plan, name) for name in BUILDS},
    tolerance=1e-9,  # extra_flops is a quotient of two counts
    slow=frozenset(BUILDS) - {"whisper", "albert with a mask", "mixtral", "bart with layer drop"},
)
