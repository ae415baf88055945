"""Which way to take the per-sample dots of a linear layer: a cost rule.

One sample's inputs A [T, d] and output gradients B [T, p], K directions D [p, d], the target's N positions:

    materialise  form dW = B^T A, dot it with D, add it to the weight gradient: no product more than plain training has, but
                 each sample's dW goes through memory, (3 + 2K) d p entries
    project      A D^T, then the dot with B: K T d p multiply-adds more, and the weight gradient untouched
    gram         (A A_v^T) * (B B_v^T) with the target's activations: K T N (d + p) multiply-adds more (see gram.py)

A core does about BALANCE multiply-adds in the time in which it moves one entry.
"""

BALANCE = 6.0
"""Multiply-adds per entry moved; benchmarks/ghost.py shows on which sequence lengths the routes cross."""


def choose(length: int, inputs: int, outputs: int, directions: int = 1, target_positions: int | None = None) -> str:
    """The cheapest route for T positions per sample; gram only where the target's activations are at hand.

    >>> choose(256, 384, 384), choose(16, 384, 384), choose(16, 384, 384, target_positions=4)
    ('materialise', 'project', 'gram')
    """
    weights = inputs * outputs
    costs = {
        "materialise": BALANCE * (3 + 2 * directions) * weights,
        "project": float(directions * length * weights),
    }
    if target_positions is not None:
        costs["gram"] = float(directions * length * target_positions * (inputs + outputs))
    return min(costs, key=lambda route: costs[route])
