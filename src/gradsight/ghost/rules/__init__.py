"""Fast rules: how to split an operation's parameter gradient by sample.

A rule is a function of a Use. It returns the operation's output, or DECLINED when the call is not
of the kind it knows; then the fallback takes it. A rule may only make things faster: every one is
compared with the fallback and with the twin.
"""

from gradsight.ghost.rules import convolution, elementwise, embedding, linear, matmul, norm
from gradsight.ghost.rules.linear import descend
from gradsight.ghost.use import DECLINED, RULES, rule

__all__ = [
    "DECLINED",
    "RULES",
    "convolution",
    "descend",
    "elementwise",
    "embedding",
    "linear",
    "matmul",
    "norm",
    "rule",
]
