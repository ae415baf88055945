"""Whether weights are still numbers: asked where a gradient is not, and never elsewhere."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradsight.measure.norms import NormReading


def what_weights_are(weights: Sequence[Tensor]) -> str | None:
    """ "NaN" or "infinite" where a weight of this process is; None where all are finite.

    Waits for the device, once per call.
    """
    floating = [weight for weight in weights if weight.is_floating_point()]
    peaks = NormReading(floating).read().max_abs
    if np.isnan(peaks).any():
        return "NaN"
    return "infinite" if np.isinf(peaks).any() else None
