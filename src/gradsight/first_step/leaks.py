# mypy: allow-untyped-calls
"""What an output sees: gradients at places of the input, read from a few backward passes.

A pass takes the gradient of a random sum over some outputs at all inputs. Where the sum is over
outputs before a cut, causal models have none at inputs behind it. Every row has a cut of its own,
so that a few passes try many: always the first and the last, and others at random.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsight.values.first_step import CopiedTargets, Leak

_NOTHING = 1e-12
SEES = 1e-3
"""A gradient counts if its ratio to the largest of the others is above this: sums over time in
Fourier space leave a millionth where there is none."""


@dataclass(frozen=True, eq=False, slots=True)
class Traced:
    """An output by positions, and the places where its gradients are read."""

    output: Tensor
    """[rows, time, ...]"""
    counts: Tensor
    """[rows, time]: which positions have a label that counts."""
    probes: tuple[Tensor, ...]
    """Zeros that were added to the inputs."""
    time_first: bool = False

    def sizes(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """[rows, time]: the size of the gradient of a random sum over the outputs at each input."""
        output = self.output.reshape(*self.output.shape[:2], -1)
        signs = torch.randn(output.shape[-1], generator=generator).to(output)
        summed = ((output @ signs) * weights.to(output)).sum()
        total = torch.zeros(())
        for gradient in gradients(summed, self.probes):
            size = gradient.detach().float().reshape(*gradient.shape[:2], -1).norm(dim=-1).cpu()
            total = total + (size.transpose(0, 1) if self.time_first else size)
        return total


def gradients(summed: Tensor, probes: Sequence[Tensor]) -> Iterator[Tensor]:
    """Of a sum at the probes; zeros where it does not depend on one."""
    found: Sequence[Tensor | None] = [None] * len(probes)
    if summed.requires_grad:
        found = torch.autograd.grad(summed, list(probes), retain_graph=True, allow_unused=True)
    for probe, gradient in zip(probes, found, strict=True):
        yield torch.zeros_like(probe) if gradient is None else gradient


def look_ahead(traced: Traced, ahead: int, passes: int, generator: torch.Generator) -> Leak | None:
    """Whether outputs see inputs that are at least so far ahead of them."""
    rows, length = traced.output.shape[:2]
    last = length - 1
    if last < 1 or not bool(traced.counts.any()):
        return None
    cuts = _cuts(rows * passes, last, generator)
    worst = (0.0, "")
    usual = 0.0
    looks = 0
    for number in range(passes):
        cut = cuts[number * rows : (number + 1) * rows]
        weights = _before(cut, traced.counts[:, :length], generator)
        sizes = traced.sizes(weights, generator)
        for row in torch.nonzero(weights.any(1)).flatten().tolist():
            first = int(torch.nonzero(weights[row])[0])
            border = int(torch.nonzero(weights[row])[-1]) + ahead
            later = sizes[row, border:]
            looks += int(later.numel() > 0)
            usual = max(usual, _largest(sizes[row, :first]))
            if _largest(later) > worst[0]:
                seen = border + int(later.argmax())
                worst = (
                    _largest(later),
                    f"the output at position {border - ahead} of row {row} "
                    f"has a gradient at the input of position {seen}",
                )
    if not looks:
        return None
    return Leak(worst[0] / max(usual, _NOTHING if worst[0] else 1.0), looks, worst[1])


def _cuts(count: int, last: int, generator: torch.Generator) -> list[int]:
    """How many outputs come before each cut: all that there are, or the first, the last, others."""
    if count >= last:
        return [1 + number % last for number in range(count)]
    others = torch.randint(1, last + 1, (count,), generator=generator).tolist()
    chosen = [1, last, *others][:count]
    return [chosen[place] for place in torch.randperm(count, generator=generator).tolist()]


def _before(cuts: Sequence[int], counts: Tensor, generator: torch.Generator) -> Tensor:
    """Random weights on the outputs just before each row's cut, where they count."""
    weights = torch.randn(counts.shape, generator=generator)
    counts = counts.cpu()
    for row, cut in enumerate(cuts):
        # Not all of them: what lies further back shows what the output sees otherwise.
        begin = cut - max(1, cut // 2)
        if not bool(counts[row, begin:cut].any()):
            begin = 0
        weights[row, :begin] = 0
        weights[row, cut:] = 0
    return weights * counts


def _largest(sizes: Tensor) -> float:
    return float(sizes.max()) if sizes.numel() else 0.0


def copied_targets(traced: Traced, share: float, generator: torch.Generator) -> CopiedTargets:
    """Whether an output that is to give its own input sees it, and nothing later."""
    rows, length = traced.output.shape[:2]
    weights = torch.zeros(rows, length)
    place = length // 2
    weights[:, place] = 1.0
    sizes = traced.sizes(weights, generator)
    own = _largest(sizes[:, place])
    earlier = _largest(sizes[:, :place])
    ahead = look_ahead(traced, 1, 2, generator)
    sees_later = ahead is not None and ahead.ratio > SEES
    is_causal = earlier > 0 and not sees_later
    return CopiedTargets(share, own > SEES * earlier, is_causal)


def across_rows(
    outputs: Sequence[Tensor],
    probes: Sequence[Tensor],
    generator: torch.Generator,
    time_first: bool = False,
) -> Leak | None:
    """Whether the outputs of some rows see the inputs of others.

    Outputs are [rows, ...], and so are probes unless they have time first.
    """
    rows = outputs[0].shape[0]
    worst = (0.0, "")
    usual = 0.0
    for _ in range(2):
        order = torch.randperm(rows, generator=generator)
        chosen = torch.zeros(rows, dtype=torch.bool)
        chosen[order[: max(1, rows // 2)]] = True
        weights = chosen.float().to(outputs[0].device)
        summed = _row_sum(outputs, weights, generator)
        sizes = torch.zeros(rows)
        for gradient in gradients(summed, probes):
            of_rows = gradient.detach().float()
            if time_first:
                of_rows = of_rows.transpose(0, 1)
            sizes += of_rows.reshape(rows, -1).norm(dim=-1).cpu()
        usual = max(usual, _largest(sizes[chosen]))
        others = torch.where(chosen, 0.0, sizes)
        if _largest(others) > worst[0]:
            text = f"the outputs of {int(chosen.sum())} rows have a gradient at the input of row "
            worst = (_largest(others), f"{text}{int(others.argmax())}")
    if usual == 0:
        return None
    return Leak(worst[0] / usual, 2, worst[1])


def _row_sum(outputs: Sequence[Tensor], weights: Tensor, generator: torch.Generator) -> Tensor:
    total = torch.zeros((), device=weights.device)
    for output in outputs:
        flat = output.reshape(output.shape[0], -1)
        signs = torch.randn(flat.shape[1], generator=generator).to(flat)
        total = total + ((flat @ signs) * weights.to(flat)).sum()
    return total


def across_documents(traced: Traced, documents: Tensor, generator: torch.Generator) -> Leak | None:
    """Whether outputs see inputs of other documents in their row; `documents` is [rows, time].

    Places of document -1 belong to none.
    """
    rows, length = traced.output.shape[:2]
    documents = documents[:, :length].cpu()
    weights = torch.zeros(rows, length)
    chosen = torch.full((rows,), -2)
    for row in range(rows):
        names = [name for name in documents[row].unique().tolist() if name >= 0]
        counted = [
            n
            for n in names
            if bool((traced.counts[row, :length].cpu() & (documents[row] == n)).any())
        ]
        if len(names) > 1 and counted:
            # The last one has all others before it.
            chosen[row] = counted[-1]
    inside = documents == chosen[:, None]
    weights = torch.randn(rows, length, generator=generator) * inside
    weights = weights * traced.counts[:, :length].cpu()
    if not bool(weights.any()):
        return None
    sizes = traced.sizes(weights, generator)[:, :length]
    usual = _largest(sizes[inside])
    foreign = torch.where(inside | (documents < 0) | (chosen[:, None] < 0), 0.0, sizes)
    if usual == 0:
        return None
    row, place = divmod(int(foreign.argmax()), length)
    text = f"outputs of document {int(chosen[row])} of row {row} have a gradient at position "
    text += f"{place}, which is of document {int(documents[row, place])}"
    return Leak(_largest(foreign) / usual, int((chosen >= 0).sum()), text)
