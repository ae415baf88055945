"""Which way to take the per-sample dots of a linear layer: a cost rule.

One sample's inputs A [T, d] and output gradients B [T, p], K directions D [p, d]:

    materialise  form dW = B^T A, dot it with D, add it to the weight gradient: no product more than
                 plain training has, but each sample's dW goes through memory, (3 + 2K) d p entries
    project      A D^T, then the dot with B: K T d p multiply-adds more, and the weight gradient
                 untouched

A device does about `balance` multiply-adds in the time in which it moves one entry. A core's was
measured (benchmarks/ghost.py shows on which sequence lengths the routes cross), those of
accelerators come from data sheets.
"""

from functools import lru_cache

import torch

CORE = 6.0
ACCELERATOR = 30.0
ACCELERATOR_HALF = 200.0
"""With products in 16 bits, which matrix units take."""


def balance_of(device: str, dtype: torch.dtype) -> float:
    """Multiply-adds per entry moved."""
    if device == "cpu":
        return CORE
    return ACCELERATOR_HALF if dtype.itemsize <= 2 else ACCELERATOR


@lru_cache
def choose(
    length: int,
    inputs: int,
    outputs: int,
    directions: int = 1,
    balance: float = CORE,
) -> str:
    """The cheapest route for T positions per sample.

    >>> choose(256, 384, 384), choose(16, 384, 384)
    ('materialise', 'project')
    >>> choose(256, 384, 384, balance=ACCELERATOR_HALF)
    'project'
    """
    weights = inputs * outputs
    # On an 11.5M GPT with T = 256 a training step cost 1.02x to 1.04x of plain training
    # materialised, 1.17x to 1.27x projected.
    costs = {
        "materialise": balance * (3 + 2 * directions) * weights,
        "project": float(directions * length * weights),
    }
    return min(costs, key=lambda route: costs[route])
