"""Convolutions in one pass: training and validation rows by calls of their own.

Each row is convolved once, as in plain training; the scores take one convolution of the training
rows with the direction.
"""

from typing import Any

import torch.nn.functional as F

from gradsight.ghost.joined_operations import run_sliced
from gradsight.ghost.sample_axis import LEADING
from gradsight.ghost.use import DECLINED, Use, joined_rule


@joined_rule(F.conv1d, F.conv2d, F.conv3d)
def joined_convolution(use: Use) -> Any:
    """y = x * W + b, the samples being the images of dimension 0."""
    if not use.args:
        return DECLINED
    x, weight = use.args[0], use.argument(1, "weight")
    if use.source(x) is not None or x.dim() != weight.dim():
        return DECLINED
    layout = use.layout(x.shape[:1])
    if layout is None or layout.kind not in LEADING:
        return DECLINED
    return run_sliced(use.one_pass, use.joined_call(), {0: layout})
