"""One look at the distribution of a model's gradients, through whatever tracker there is."""

from typing import Any

import numpy as np
from torch import nn

from gradsight.core.group import shared_group
from gradsight.core.parameters import named_parameters
from gradsight.core.shards import are_spread, counts_here, local_part
from gradsight.errors import UsageError
from gradsight.measure.histogram import HistogramLook, histograms, share_within_a_tenth
from gradsight.measure.norms import NormsLook, look_closer, merge_ranks


def log_gradient_distribution(
    model: nn.Module, tracker: Any, step: int, log_histogram: bool = False
) -> dict[str, float]:
    """Log `gradients/<parameter>/norm` for every parameter with a gradient, and return {parameter:
    norm}.

    With log_histogram also `gradients/histogram`: all gradients together, signed, centred on 0, and
    beside it the share of entries within +-0.1. What is in `.grad` is what is logged: call it after
    backward, before clipping, and unscaled. Parameters without a gradient are skipped. Under FSDP2
    every rank must call it; norms are those of whole parameters.

    tracker: anything with log_scalar(name, value, step); the histogram goes to its
    log_histogram(name, histogram, step).
    """
    if not hasattr(tracker, "log_scalar"):
        raise UsageError(
            f"a tracker needs a method log_scalar(name, value, step); {type(tracker).__name__} has none"
        )
    found = [named for named in named_parameters(model) if named.tensor.grad is not None]
    parts = [local_part(named.tensor.grad) for named in found if named.tensor.grad is not None]
    norms = look_closer(parts, NormsLook(parts).read())
    table = np.stack(
        [
            norms.l2,
            norms.max_abs,
            *(norms.counts or np.zeros((2, len(found)))),
            np.ones(len(found)),
        ],
        axis=1,
    )
    counters = HistogramLook(parts, offset=step).read() if log_histogram and parts else None
    group = shared_group() if are_spread([named.tensor for named in found]) else None
    if group is not None:
        left_out = [not counts_here(named.tensor) for named in found]
        table[left_out, :4] = 0
        table = merge_ranks(np.stack(group.start_gather(table).wait()))
        if counters is not None:
            counters[left_out] = 0
            counters = group.start_sum(counters).wait()[0]
    result = {named.name: float(norm) for named, norm in zip(found, table[:, 0], strict=True)}
    for name, norm in result.items():
        tracker.log_scalar(f"gradients/{name}/norm", norm, step)
    if counters is not None and hasattr(tracker, "log_histogram"):
        everything = histograms(counters, list(result), step)[-1]
        tracker.log_histogram("gradients/histogram", everything, step)
        tracker.log_scalar("gradients/share_within_0.1", share_within_a_tenth(counters), step)
    return result
