"""gradsight influence --tokens: every token's part of a sample's score, from the newest checkpoint."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradsight.cli import main
from gradsight.store.run_files import read_run_config
from gradsight.train.config import from_dict
from gradsight.train.processes import Processes
from gradsight.train.run import load_from, prepare
from train.small import run


def test_tokens_against_one_backward_pass_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run(tmp_path, max_steps=2, select="samples")
    data = f"--data={tmp_path / 'text'}"
    capsys.readouterr()
    assert main(["influence", str(place), "--tokens=5", data, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    settings = from_dict(read_run_config(place)["settings"]["train"], "here")
    again = prepare(settings, place, Processes("cpu"))
    load_from(again, None)
    model = again.model.eval()
    weights = list(model.parameters())
    block = torch.from_numpy(again.batches.samples.tokens(5))
    with sdpa_kernel(SDPBackend.MATH):
        towards = torch.autograd.grad(
            again.loss(model, again.batches.validation(2, shared_out=False)), weights
        )
        expected = []
        for place_in_text in range(16):
            logits = model(input_ids=block[None, :-1]).logits[0]
            loss = F.cross_entropy(logits[place_in_text], block[place_in_text + 1]) / 16
            slopes = torch.autograd.grad(loss, weights)
            parts = zip(slopes, towards, strict=True)
            expected.append(float(sum((a * b).sum() for a, b in parts)))
    largest = max(map(abs, expected))
    assert found["scores"] == pytest.approx(expected, abs=1e-4 * largest)
    assert found["tokens"] == block[1:].tolist()
    assert "".join(found["texts"]) == bytes(block[1:].tolist()).decode()
    assert found["step"] == 2
    assert main(["influence", str(place), "--tokens=5", data]) == 0
    assert "after 2 steps" in capsys.readouterr().out
    assert main(["influence", str(place), "--tokens=5"]) == 64
    assert "--data" in capsys.readouterr().err
    assert main(["influence", str(place), "--tokens=many", data]) == 64
    assert main(["influence", str(tmp_path), "--tokens=5", data]) == 64
    assert "whole samples" in capsys.readouterr().err
