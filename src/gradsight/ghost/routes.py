"""Which way to take the per-sample dots of a matrix product: a cost rule.

One sample's inputs A [T, d] and output gradients B [T, p], a direction D [p, d]:

    materialise  form dW = B^T A, dot it with D, add it to the weight gradient: no product more than plain training has,
                 but each sample's dW of p*d entries goes through memory
    project      A D^T, then the dot with B: one product more, T*d*p multiply-adds, and the weight gradient untouched

Materialise moves about (3 + 2K) p d entries for K directions, project computes K T p d multiply-adds. A core does about
BALANCE multiply-adds in the time in which it moves one entry, so project is cheaper for sequences shorter than
BALANCE (3 + 2K) / K. (A third way, Gram, needs the target's own activations: see gram.py.)
"""

BALANCE = 20.0
"""Multiply-adds per entry moved, as measured by benchmarks/ghost.py."""


def choose(length: int, directions: int) -> str:
    """The cheaper of "materialise" and "project" for sequences of this length.

    >>> choose(256, 1), choose(16, 1), choose(64, 8)
    ('materialise', 'project', 'materialise')
    """
    if directions == 0 or length >= BALANCE * (3 + 2 * directions) / directions:
        return "materialise"
    return "project"
