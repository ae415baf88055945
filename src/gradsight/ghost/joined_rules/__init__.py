"""Rules of one pass over training and validation rows.

A rule is a function of a Use, as those of two passes are. Its backward hands the training rows' own
gradient to the parameter, makes the direction of the validation rows', and scores the training rows
along it: on the spot where this is the parameter's only use. DECLINED leaves the operation to the
universal way (joined_operations.py).
"""

from gradsight.ghost.joined_rules import elementwise, embedding, norm, product
from gradsight.ghost.use import JOINED_RULES, joined_rule

__all__ = [
    "JOINED_RULES",
    "elementwise",
    "embedding",
    "joined_rule",
    "norm",
    "product",
]
