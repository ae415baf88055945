"""Scores of the ghost engine for the models of tests/ghost/models.py, in both modes."""

from functools import partial
from typing import Any

import torch

import gradsight
from ghost.models import MODELS, build
from golden.results import Group, public_types


def score(name: str) -> dict[str, Any]:
    """Return the scores of one batch per mode, or the types of the exception that refuses it."""
    return {mode: _scores(name, mode) for mode in ("two_pass", "concat")}


def _scores(name: str, mode: str) -> Any:
    torch.set_default_dtype(torch.float64)  # the weights are drawn in it
    case = build(name)
    case.model.eval()  # processors draw different dropout masks from the same seed
    try:
        engine = gradsight.GhostEngine(case.model, case.loss_fn, case.validation, mode=mode)
        if mode == "concat":
            engine.loss(case.batch).backward()
        else:
            with engine.observe():
                case.loss_fn(case.model, case.batch).backward()
    except gradsight.GradsightError as refusal:
        return {"refused": public_types(refusal)}
    scores = engine.scores
    engine.close()
    return {
        "mode": scores.mode,
        "direction": scores.direction,
        "sample_ids": list(scores.sample_ids),
        "by_target": {target: each.tolist() for target, each in scores.by_target.items()},
    }


FLOAT32_INSIDE = ("gpt2", "llama", "qwen2", "mixtral", "t5", "bert", "albert", "vit", "lora")
"""Models of transformers compute some parts (the loss, positions, norms) in float32 always."""
GROUP = Group(
    "ghost",
    {name: partial(score, name) for name in MODELS},
    tolerance=1e-9,  # float64
    tolerance_of=dict.fromkeys(FLOAT32_INSIDE, 1e-6),
    of_largest=True,
)
