"""Why predictions of Adam-aware scores can correlate less with what happens than plain ones do.

A small GPT is trained with AdamW on the bytes of Python's standard library, as in
influence_quality.py. Before every step the change of a target's loss is predicted in several ways,
from the target's gradient G and the step's clipped gradient g, and compared with the change that is
measured after it. Each way puts one part of the truth in:

    plain                  -lr m of <G, g>, what plain scores add up to, with Adam's momentum
    adam                   -lr m of <G / (sqrt(v) + eps), g>: what Adam-aware scores add up to. v is
                           known *before* the step, as a direction must be that is scored along
    adam, own m            the same with Adam's own first moment instead of that of the sums
    adam, seen entries     the same, without the entries of which v is 0: never moved so far
    adam, v of this step   the same with the v that the step itself makes, which contains its g
    first order            <G, the change of the weights>, weight decay too: all that a first order
                           can know

Printed is Pearson's correlation over all steps, and over those after the first tenth, the error of
predictions (the median of |predicted - measured| over the median of |measured|), and how large the
largest prediction is.

    python benchmarks/adam_honesty.py [--steps 150] [--weight-decay 0.0] [--clip 1.0]
        [--beta1 0.9] [--refresh 1] [--seed 0]
"""

import argparse
import copy
from collections import defaultdict

import numpy as np
import torch
from influence_quality import BATCH, LENGTH, RATE, WARM_UP, Data, data, loss_of
from small_gpt import GPT, GPTConfig
from torch import Tensor, nn

Vector = list[Tensor]
Table = dict[str, list[tuple[float, float]]]


def gradient(model: nn.Module, rows: Tensor) -> tuple[float, Vector]:
    """The mean loss of rows, and its gradient."""
    loss = loss_of(model, rows)
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def dot(a: Vector, b: Vector) -> float:
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


class Momentum:
    """Adam's mixing of earlier numbers into a step, as `engine.honesty()` applies it to sums."""

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._mixed = 0.0
        self._steps = 0

    def mixed(self, number: float) -> float:
        self._steps += 1
        self._mixed = self._beta * self._mixed + (1 - self._beta) * number
        return self._mixed / (1 - self._beta**self._steps)


class Step:
    """One step of AdamW, by torch's own optimizer, with what it knew before and after."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        self.model = model
        self.optimizer = optimizer

    def second_moments(self) -> Vector | None:
        """v of every weight, corrected for its start."""
        beta = self.optimizer.param_groups[0]["betas"][1]
        states = [self.optimizer.state.get(weight) for weight in self.model.parameters()]
        if not all(states):
            return None
        return [s["exp_avg_sq"] / (1 - beta ** float(s["step"])) for s in states if s]

    def first_moments(self) -> Vector:
        beta = self.optimizer.param_groups[0]["betas"][0]
        states = [self.optimizer.state[weight] for weight in self.model.parameters()]
        return [s["exp_avg"] / (1 - beta ** float(s["step"])) for s in states]

    def make(self, gradients: Vector) -> Vector:
        """Step; returns the change of every weight."""
        before = [weight.detach().clone() for weight in self.model.parameters()]
        for weight, grad in zip(self.model.parameters(), gradients, strict=True):
            weight.grad = grad.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        pairs = zip(self.model.parameters(), before, strict=True)
        return [weight.detach() - old for weight, old in pairs]


def clipped(gradients: Vector, most: float) -> Vector:
    norm = sum(float(g.double().square().sum()) for g in gradients) ** 0.5
    return [g * min(1.0, most / norm) for g in gradients]


def scaled(direction: Vector, second: Vector, eps: float, *, seen_only: bool = False) -> Vector:
    """The direction as Adam's v scales it."""
    parts = []
    for part, v in zip(direction, second, strict=True):
        scale = 1 / (v.sqrt() + eps)
        if seen_only:
            scale = torch.where(v == 0, 0.0, scale)
        parts.append(part * scale)
    return parts


def train(given: Data, options: argparse.Namespace) -> Table:
    """Predicted and measured changes of the target's loss, by way of predicting."""
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(block_size=LENGTH, width=64, heads=4, layers=2))
    betas = (options.beta1, 0.999)
    decay = options.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=betas, weight_decay=decay)
    step, target = Step(model, optimizer), given.targets["all"]
    order = np.random.default_rng(options.seed)
    momenta: dict[str, Momentum] = defaultdict(lambda: Momentum(options.beta1))
    pairs: Table = defaultdict(list)
    sums: dict[str, float] = defaultdict(float)
    for number in range(options.steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (number + 1) / WARM_UP)
        rows = torch.from_numpy(order.choice(len(given.samples), BATCH, replace=False))
        if number % options.refresh == 0:
            loss, towards = gradient(model, target)
        _, own = gradient(model, given.samples[rows])
        own = clipped(own, options.clip)
        known = copy.deepcopy(step.second_moments())
        change = step.make(own)
        predicted = predictions(step, towards, own, known, momenta)
        predicted["first order"] = dot(towards, change)
        for way, value in predicted.items():
            sums[way] += value
        if (number + 1) % options.refresh == 0:
            with torch.no_grad():
                measured = loss_of(model, target).item() - loss
            for way, value in sums.items():
                pairs[way].append((value, measured))
            sums.clear()
    return pairs


def predictions(
    step: Step, towards: Vector, own: Vector, known: Vector | None, momenta: dict[str, Momentum]
) -> dict[str, float]:
    """The predicted change of the target's loss by way; `known` is v from before the step."""
    group = step.optimizer.param_groups[0]
    lr, eps = group["lr"], group["eps"]
    found = {"plain": -lr * momenta["plain"].mixed(dot(towards, own))}
    if known is None:  # the engine's scores of a first step are plain, and marked so
        momenta["adam"].mixed(dot(towards, own))
        return found
    along = scaled(towards, known, eps)
    found["adam"] = -lr * momenta["adam"].mixed(dot(along, own))
    moment, made = step.first_moments(), step.second_moments()
    assert made is not None
    found["adam, own m"] = -lr * dot(along, moment)
    found["adam, seen entries"] = -lr * dot(scaled(towards, known, eps, seen_only=True), moment)
    found["adam, v of this step"] = -lr * dot(scaled(towards, made, eps), moment)
    return found


def correlation(pairs: list[tuple[float, float]]) -> float:
    table = np.array(pairs)
    return float(np.corrcoef(table[:, 0], table[:, 1])[0, 1])


def error(pairs: list[tuple[float, float]]) -> float:
    table = np.array(pairs)
    return float(np.median(np.abs(table[:, 0] - table[:, 1])) / np.median(np.abs(table[:, 1])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--refresh", type=int, default=1, help="steps that a direction is used for")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = train(data(options.seed, 100), options)
    settled = options.steps // 10 // options.refresh
    print(vars(options))
    print(f"{'':22} {'all':>7} {'settled':>8} {'error':>7} {'largest / largest measured':>27}")
    for way, each in pairs.items():
        late = each[settled:]
        largest = max(abs(p) for p, _ in each) / max(abs(m) for _, m in each)
        numbers = f"{correlation(each):+7.2f} {correlation(late):+8.2f} {error(late):7.2f}"
        print(f"{way:22} {numbers} {largest:27.1f}")


if __name__ == "__main__":
    main()
