"""Training loops of many kinds that no threshold was chosen on; each healthy, or with one fault
planted.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[int], Any]
Loop = tuple[nn.Module, torch.optim.Optimizer, Iterator[Any]]


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [
        layer
        for one, two in itertools.pairwise(sizes)
        for layer in (nn.Linear(one, two), activation())
    ]
    return nn.Sequential(*layers[:-1])


def looped(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    steps: int = 120,
) -> Loop:
    """The plain loop: every `next` is one step."""

    def run() -> Iterator[None]:
        for step in range(steps):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
            yield

    return model, optimizer, run()


def autoencoder(bad: bool) -> Loop:
    """Bad: the code is detached, so the encoder never learns."""
    model = nn.ModuleDict({"encoder": mlp(16, 32, 4), "decoder": mlp(4, 32, 16)})

    def loss(step: int) -> Tensor:
        x = torch.rand(32, 1) * torch.linspace(0, 1, 16)
        code = model["encoder"](x)
        return F.mse_loss(model["decoder"](code.detach() if bad else code), x)

    return looped(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


def pooled_gru(bad: bool) -> Loop:
    """Bad: one sequence of length 0, so its mean is 0 / 0."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(50, 16, padding_idx=0), "gru": nn.GRU(16, 24, batch_first=True)}
    )
    model["out"] = nn.Linear(24, 2)

    def loss(step: int) -> Tensor:
        lengths, x = torch.randint(3, 12, (16,)), torch.randint(1, 50, (16, 12))
        if bad and step == 60:
            lengths[4] = 0
        mask = (torch.arange(12) < lengths[:, None]).float()[..., None]
        mean = (model["gru"](model["embed"](x))[0] * mask).sum(1) / mask.sum(1)
        return F.cross_entropy(model["out"](mean), (x[:, 0] > 25).long())

    return looped(model, torch.optim.RMSprop(model.parameters(), 1e-3), loss, 80)


def policy_gradient(bad: bool) -> Loop:
    """Bad: returns that nobody normalised."""
    policy = mlp(4, 32, 2, activation=nn.Tanh)

    def loss(step: int) -> Tensor:
        state = torch.randn(20, 4)
        choice = torch.distributions.Categorical(logits=policy(state))
        action = choice.sample()
        reward = ((action == 1) == (state[:, 0] > 0)).float()
        returns = reward.flip(0).cumsum(0).flip(0)
        returns = returns * 1e4 if bad else (returns - returns.mean()) / (returns.std() + 1e-8)
        return -(choice.log_prob(action) * returns).sum()

    return looped(policy, torch.optim.Adam(policy.parameters(), 3e-3), loss)


def experts(bad: bool) -> Loop:
    """One expert per row, some of them seldom chosen. Bad: always the first one."""
    model = nn.ModuleDict(
        {"gate": nn.Linear(10, 8), "experts": nn.ModuleList(mlp(10, 16, 3) for _ in range(8))}
    )

    def loss(step: int) -> Tensor:
        x, out = torch.randn(8, 10), torch.zeros(8, 3)
        weight, chosen = model["gate"](x).softmax(-1).max(-1)
        for number, expert in enumerate(model["experts"]):
            mine = torch.full((8,), bad and number == 0) if bad else chosen == number
            if mine.any():
                out[mine] = expert(x[mine]) * weight[mine, None]
        return F.cross_entropy(out, x[:, :3].argmax(1))

    return looped(model, torch.optim.Adam(model.parameters(), 2e-3), loss)


def dropped_layers(bad: bool) -> Loop:
    """Every layer is left out half of the time. Bad: one of them is always cut off."""
    model = nn.ModuleDict({"first": nn.Linear(10, 32), "last": nn.Linear(32, 3)})
    model["layers"] = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(5)
    )

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 10)
        hidden = model["first"](x)
        for number, layer in enumerate(model["layers"]):
            if torch.rand(()) < 0.5:
                hidden = hidden + (layer(hidden).detach() if bad and number == 2 else layer(hidden))
        return F.cross_entropy(model["last"](hidden), x[:, :3].argmax(1))

    return looped(model, torch.optim.AdamW(model.parameters(), 1e-3), loss)


def critic(bad: bool) -> Loop:
    """A Wasserstein critic with clamped weights, whose last bias cancels out of its loss. Bad: its
    weights are put back.
    """
    model = mlp(2, 32, 32, 1, activation=lambda: nn.LeakyReLU(0.2))
    old = [parameter.detach().clone() for parameter in model.parameters()]

    def loss(step: int) -> Tensor:
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), old, strict=True):
                parameter.copy_(before) if bad else parameter.clamp_(-0.05, 0.05)
        return model(torch.randn(64, 2)).mean() - model(torch.randn(64, 2) * 0.3 + 1).mean()

    return looped(model, torch.optim.RMSprop(model.parameters(), 5e-4), loss)


def margin(bad: bool) -> Loop:
    """Triplets that are soon all apart: a loss and a gradient of exactly 0. Bad: both of a pair are
    the same point.
    """
    model, centers = mlp(10, 64, 16), torch.randn(5, 10)

    def loss(step: int) -> Tensor:
        one = torch.randint(0, 5, (16,))
        other = (one + torch.randint(1, 5, (16,))) % 5
        x, y, z = (model(centers[which] + 0.2 * torch.randn(16, 10)) for which in (one, one, other))
        if bad:
            return (
                (1 + (x - x).square().sum(1).sqrt() - (x - z).square().sum(1).sqrt())
                .clamp_min(0)
                .mean()
            )
        return F.triplet_margin_loss(x, y, z)

    return looped(model, torch.optim.Adam(model.parameters(), 1e-2), loss)


def alignment(bad: bool) -> Loop:
    """Speech-like CTC. Bad: one input is shorter than its target, whose loss is infinite."""
    model = mlp(12, 32, 6)

    def loss(step: int) -> Tensor:
        lengths = torch.full((8,), 20)
        if bad and step == 50:
            lengths[2] = 3
        scores = model(torch.randn(20, 8, 12)).log_softmax(-1)
        return F.ctc_loss(scores, torch.randint(1, 6, (8, 5)), lengths, torch.full((8,), 5))

    return looped(model, torch.optim.Adam(model.parameters(), 3e-3), loss, 80)


def newton(bad: bool) -> Loop:
    """Full-batch LBFGS, at its minimum after a few steps. Bad: steps that are far too long."""
    model = nn.Linear(10, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e4 if bad else 1.0, max_iter=5)
    x = torch.randn(100, 10)
    y = (x @ torch.randn(10, 1) > 0).float()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y) + 1e-3 * model.weight.square().sum()
        loss.backward()
        return loss

    return model, optimizer, (optimizer.step(closure) for _ in range(30))
