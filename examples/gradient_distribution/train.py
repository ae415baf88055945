"""Train a transformer of twelve layers for ten epochs and log its gradients every five.

    python examples/gradient_distribution/train.py

The numbers go to W&B, offline, or to TensorBoard where W&B is not installed.
"""

import argparse
import os
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from gradsight import MetricsTracker, log_gradient_distribution, open_run

WIDTH = 32
TOKENS = 64
LENGTH = 16


class Attention(nn.Module):
    """Every token looks at those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.queries_keys_values(self.norm(x)).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed)
        return out


class Layer(nn.Module):
    """Attention and a feed-forward network, each added to what came in."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.attn = Attention()
        hidden = 4 * WIDTH
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)
        )
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.strength * self.attn(x)
        out: Tensor = x + self.strength * self.mlp(x)
        return out


class Transformer(nn.Module):
    """Tokens [batch, length] to logits [batch, length, TOKENS].

    vanishing: a layer that adds next to nothing, so that next to no gradient comes to it.
    """

    def __init__(self, layers: int, vanishing: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layer = nn.ModuleList(
            Layer(strength=1e-4 if number == vanishing else 1.0) for number in range(layers)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layer:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    options = arguments()
    os.environ.setdefault("WANDB_MODE", "offline")
    torch.manual_seed(0)
    model = Transformer(options.layers, options.vanishing_layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [counting() for _ in range(options.steps)]
    has_wandb = find_spec("wandb") is not None
    with MetricsTracker(
        options.run_dir, use_wandb=has_wandb, use_tensorboard=not has_wandb
    ) as tracker:
        for epoch in range(options.epochs):
            loss = train_one_epoch(model, optimizer, batches)
            tracker.log_epoch(epoch, loss=loss)
            if epoch % options.log_grad_dist_every == 0:
                log_gradient_distribution(model, tracker, epoch, log_histogram=True)
        log_gradient_distribution(model, tracker, options.epochs, log_histogram=True)
    show(options.run_dir, options.layers)
    print(f"in {options.run_dir}: {'wandb/' if has_wandb else 'tensorboard/'}, run.sqlite")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--log_grad_dist_every", type=int, default=5, help="epochs")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="steps of an epoch")
    parser.add_argument("--vanishing_layer", type=int, help="a layer to cut off, such as 11")
    parser.add_argument("--run_dir", default="runs/gradient_distribution")
    return parser.parse_args()


def counting() -> Tensor:
    """A batch of sequences that count up, each by a step of its own."""
    starts = torch.randint(TOKENS, (16, 1))
    strides = torch.randint(1, 6, (16, 1))
    return (starts + strides * torch.arange(LENGTH + 1)) % TOKENS


def train_one_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> float:
    """Returns the mean loss; the last step's gradients are left in place."""
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def show(run_dir: str, layers: int) -> None:
    """Print the norms of every layer's attention, by epoch."""
    run = open_run(run_dir)
    norms = {
        (scalar.name, scalar.step): scalar.value
        for scalar in run.scalars()
        if scalar.name.startswith("gradients/")
    }
    epochs = sorted({step for _, step in norms})
    head = "".join(f"{f'epoch {epoch}':>12}" for epoch in epochs)
    print(f"{'':<32}{head}")
    names = [f"gradients/layer.{number}.attn/norm" for number in range(layers)]
    for name in [*names, "gradients/total_norm", "gradients/share_within_0.1"]:
        print(f"{name:<32}" + "".join(f"{norms[name, epoch]:>12.3g}" for epoch in epochs))


if __name__ == "__main__":
    main()
