"""One look at the distribution of a model's gradients, through whatever tracker there is."""

from collections.abc import Sequence

from torch import Tensor, nn

from gradsight.core.gradient_parts import gradient_parts
from gradsight.core.group import shared_group
from gradsight.core.held_parts import parts_left_out
from gradsight.core.parameters import check_module, named_parameters
from gradsight.core.problems import say
from gradsight.core.shards import are_spread
from gradsight.measure.groups import by_module
from gradsight.measure.histogram import HistogramReading, histograms, share_within_a_tenth
from gradsight.measure.rank_table import norms_now
from gradsight.values.measured import Floats
from gradsight.values.steps import ScalarTracker, check_tracker
from gradsight.values.whole_numbers import whole_number


def log_gradient_distribution(
    model: nn.Module, tracker: ScalarTracker, step: int, log_histogram: bool = False
) -> dict[str, float]:
    """Log `gradients/<parameter>/norm` for every parameter with a gradient; return {name: norm}.

    Also `gradients/<module>/norm` for every module with gradients below it, a shared parameter
    counted once, and `gradients/total_norm` for the model itself. With log_histogram also
    `gradients/histogram`: all gradients together, signed, centred on 0; beside it the share of
    entries outside its range and of those within +-0.1. What is in `.grad` is what is logged: call
    it after backward, before clipping, and unscaled. Parameters without a gradient are skipped.
    Under FSDP2 every rank must call it; norms are those of whole parameters.

    model: a module whose gradients are in place.
    tracker: anything with log_scalar(name, value, step); the histogram goes to its
      log_histogram(name, histogram, step), where it has one.
    step: the number under which the tracker gets them.
    log_histogram: whether the histogram is wanted.
    """
    check_module(model)
    check_tracker(tracker)
    step = whole_number(step, "step")
    with_gradient = [named for named in named_parameters(model) if named.tensor.grad is not None]
    if not with_gradient:
        say(
            f"step {step}: no parameter has a gradient, so nothing is logged. "
            "Call it after backward() and before zero_grad()."
        )
        return {}
    tensors = [named.tensor for named in with_gradient]
    norms = norms_now(tensors)
    names = [named.name for named in with_gradient]
    result = dict(zip(names, norms.l2.tolist(), strict=True))
    counters = _histogram_counters(tensors, step) if log_histogram else None
    modules = by_module([named.names for named in with_gradient]).of(norms.l2)
    for name, norm in (result | modules).items():
        tracker.log_scalar(f"gradients/{name}/norm", norm, step)
    tracker.log_scalar("gradients/total_norm", norms.total, step)
    if counters is not None and hasattr(tracker, "log_histogram"):
        everything = histograms(counters, names, step)[-1]
        tracker.log_histogram("gradients/histogram", everything, step)
        tracker.log_scalar("gradients/histogram_outside", everything.outside_share, step)
        tracker.log_scalar("gradients/share_within_0.1", share_within_a_tenth(counters), step)
    return result


def _histogram_counters(tensors: Sequence[Tensor], step: int) -> Floats:
    """Counters of these parameters' gradients, summed over ranks where they are spread."""
    counters = HistogramReading(gradient_parts(tensors), offset=step).read()
    group = shared_group() if are_spread(tensors) else None
    if group is None:
        return counters
    counters[parts_left_out(group, tensors)] = 0
    return group.start_sum(counters).wait()[0]
