# mypy: allow-untyped-calls
"""Which tokens of a sample help the validation batch, at the weights of a run's newest checkpoint.

A sample's loss is the mean over its tokens, so its score <G, gradient> is a sum over them too. The
scores that a run keeps are of whole samples: those of tokens are computed here anew.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradsight.core import rundir
from gradsight.errors import UsageError
from gradsight.store.run_files import read_run_config
from gradsight.train.checkpoint import checkpoint_names
from gradsight.train.config import Settings, from_dict
from gradsight.train.processes import Processes
from gradsight.train.run import load_from, prepare


@dataclass(frozen=True)
class TokenScores:
    """The score of every token that a sample teaches; they add up to that of the sample alone."""

    sample_id: int
    step: int
    """Of the checkpoint."""
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    scores: tuple[float, ...]


def token_scores(run_dir: Path, data: Path | None, sample_id: str) -> TokenScores:
    """The scores of a sample's tokens; data is what `gradsight train --data` was given."""
    settings = _settings(run_dir, data)
    if not sample_id.isdecimal():
        raise UsageError(f"--tokens takes the number of a sample, got {sample_id!r}")
    run = prepare(settings, run_dir, Processes("cpu"))
    facts = load_from(run, None)
    samples = run.batches.samples
    if facts.data != samples.fingerprint:
        raise UsageError(f"--tokens: {run_dir} was trained on other data than this")
    block = torch.from_numpy(samples.tokens(int(sample_id)))
    target = run.batches.validation(settings.val_batch_size, shared_out=False)
    run.model.eval()
    # Fused attention cannot be differentiated twice.
    with sdpa_kernel(SDPBackend.MATH):
        direction = torch.autograd.grad(run.loss(run.model, target), list(run.model.parameters()))
        scores = _along(run.model, block, direction)
    taught = block[1:].tolist()
    is_text = samples.corpus.parts["train"][samples.domain(int(sample_id))].dtype.itemsize == 1
    texts = [bytes([token]).decode("latin-1") if is_text else str(token) for token in taught]
    return TokenScores(
        int(sample_id), facts.step, tuple(taught), tuple(texts), tuple(scores.tolist())
    )


def _settings(run_dir: Path, data: Path | None) -> Settings:
    """The settings of the run, but for the paths in it: no path that a run names is opened."""
    known = read_run_config(run_dir).get("settings", {})
    if "train" not in known or not checkpoint_names(run_dir):
        raise UsageError(
            f"--tokens needs the model: only runs of `gradsight train` keep it, in "
            f"{rundir.CHECKPOINTS}, and {run_dir} has none. The scores that a run keeps are of "
            f"whole samples"
        )
    settings = from_dict(known["train"], str(run_dir / rundir.CONFIG))
    if settings.data is not None and data is None:
        raise UsageError("--tokens reads the sample: say with --data what the run was trained on")
    return replace(
        settings,
        data=None if data is None else str(data),
        data_weights=None,
        tokenizer=None,
        select=None,
        device="cpu",
        gradient_checkpointing=False,
        train_dtype="float32",
    )


def _along(model: nn.Module, block: Tensor, direction: tuple[Tensor, ...]) -> Tensor:
    """<direction, gradient of each token's part of the loss>, by differentiating twice.

    With weights u on the tokens' losses, <direction, gradient> is u^T J direction: its derivative
    by u is every token's part at once.
    """
    logits = model(input_ids=block[None, :-1]).logits[0].float()
    losses = F.cross_entropy(logits, block[1:], reduction="none") / (len(block) - 1)
    weights = torch.ones_like(losses, requires_grad=True)
    slopes = torch.autograd.grad(losses @ weights, list(model.parameters()), create_graph=True)
    score = sum((slope * each).sum() for slope, each in zip(slopes, direction, strict=True))
    assert isinstance(score, Tensor)
    return torch.autograd.grad(score, weights)[0]
