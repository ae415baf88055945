"""Findings of the planted faults and healthy runs of tests/zoo.

All cases run with seed 0. Two runs of a fault are enough to guard it, and the small GPT takes
several times as long as the others: it is left out for names that other models have, too.

Runs are in float64 unless the fault needs a smaller type, so that rounding does not decide when a
finding begins.
"""

from functools import partial
from typing import Any

import torch

from golden.results import Group
from zoo import faults, findings_of, rank_zoo

SEED = 0
FLOAT32 = {
    "bf16 autocast",
    "float16 weights, eps 1e-4",
    "float16 weights, eps 1e-8",
    "loss scale collapses",
    "underflow in float16",
}
"""Cases about the limits of smaller types."""
ROUNDING_DECIDES = {
    "initialisation too large, rnn",
    "learning rate x100, SGD, rnn",
    "loss grows with the step, rnn",
    "names, rate x100, loop",
    "sum instead of mean, rnn",
    "sum with a rate for a mean, rnn",
}
"""Cases left out: they amplify rounding errors, so their findings depend on the processor."""


def train(case: faults.Case) -> dict[str, Any]:
    """Return the findings of a run in one process."""
    torch.set_default_dtype(torch.float32 if case.name in FLOAT32 else torch.float64)
    return summary(findings_of(case.run(SEED)[0]))


def train_on_ranks(name: str, kind: str) -> dict[str, Any]:
    """Return the findings of a run on two ranks."""
    (run,) = rank_zoo.launch([(name, kind, SEED)], "float64")
    return summary(run["findings"])


def summary(findings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what must stay the same about findings, sorted."""
    fields = ("code", "severity", "first_step")
    kept = [
        {field: finding[field] for field in fields} | {"parameters": sorted(finding["parameters"])}
        for finding in findings
    ]
    return {"findings": sorted(kept, key=lambda each: (each["code"], each["first_step"]))}


def _chosen() -> list[faults.Case]:
    cases = list(faults.all_cases())
    others = {case.name for case in cases if case.kind != "gpt"}
    return [case for case in cases if case.kind != "gpt" or case.name not in others]


CASES = {f"{case.name}, {case.kind}": partial(train, case) for case in _chosen()}
for name in ROUNDING_DECIDES:
    del CASES[name]
CASES |= {
    f"{name}, {kind}": partial(train_on_ranks, name, kind)
    for name in rank_zoo.RIGHT
    for kind in ("mlp", "cnn")
}


def _slow() -> frozenset[str]:
    """Return the cases of the slow tier: a fault with one kind of model is enough for the first."""
    seen: set[str] = set()
    slow = {
        "rank-local corruption, mlp",
        "two ranks, mlp",
        "characters, decay 1, loop",
        "names, loop",
        "one block to Adam, loop",
        "one layer apart, loop",
        "layer-wise rates, loop",
        "two optimizers, loop",
    }
    for case in CASES:
        name, _, kind = case.rpartition(", ")
        if name in seen and kind != "loop":
            slow.add(case)
        seen.add(name)
    return frozenset(slow)


GROUP = Group("zoo", CASES, tolerance=0.0, slow=_slow())
