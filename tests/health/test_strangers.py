"""Verdicts on loops that are not in the zoo: the fault is found with the right code, and without it
there is silence.
"""

import pytest
import torch

import gradsight
from health import strangers

LOOPS = [
    (strangers.autoencoder, "GS301"),
    (strangers.pooled_gru, "GS103"),
    (strangers.policy_gradient, "GS102"),
    (strangers.experts, "GS301"),
    (strangers.dropped_layers, "GS301"),
    (strangers.critic, "GS304"),
    (strangers.margin, "GS103"),
    (strangers.alignment, "GS103"),
    (strangers.newton, "GS103"),
]


def findings(loop: strangers.Loop) -> dict[str, str]:
    model, optimizer, steps = loop
    with gradsight.watch(model, optimizer) as watched:
        for _ in steps:
            pass
        return {finding.code: finding.evidence for finding in watched.report().findings}


@pytest.mark.parametrize(("loop", "code"), LOOPS, ids=[loop.__name__ for loop, _ in LOOPS])
def test_strangers(loop: "strangers.Callable[[bool], strangers.Loop]", code: str) -> None:
    torch.manual_seed(3)
    assert findings(loop(False)) == {}
    torch.manual_seed(3)
    assert code in findings(loop(True))
