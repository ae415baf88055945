"""Advice for the operation that made a gradient or a loss non-finite, if a diagnosis names it."""

from dataclasses import replace

from gradsight.health.fixes import (
    BFLOAT16,
    DROP_SAMPLES,
    LOWER_RATE,
    SAFE_EXP,
    SAFE_LOG,
    STABLE_CLASSES,
)
from gradsight.health.registry import Advice
from gradsight.values.diagnoses import BROKEN_OPERAND, GuiltyOperation, TensorSummary
from gradsight.values.findings import Finding

_CODES = ("GS103", "GS104", "GS109")
"""Findings of what is not finite."""
_HALF = "float16"
_IN_FLOAT32 = (
    "Compute this in float32, because half precision loses such small constants, and float16 "
    "overflows above 65504."
)

DATA = Advice(
    "A value of this batch is NaN or infinite. Find out where it comes from, for example a file or "
    "a normalisation that divides by 0. Until you have fixed it, leave out such samples.",
    DROP_SAMPLES,
)
OPERAND = Advice(
    "A label, a weight or a constant in the loss is NaN or infinite. Find out where it comes from. "
    "A common cause is a mean of an empty tensor or a division by a standard deviation of 0.",
    DROP_SAMPLES
    + """
# in a loss of your own: normalise without dividing by 0
# (dim: the dimension that your code takes the mean and deviation of)
def normalised(x, dim, eps=1e-6):
    variance = x.var(dim, keepdim=True, unbiased=False)
    return (x - x.mean(dim, keepdim=True)) / (variance + eps).sqrt()
""",
)
HALF = Advice(
    "A number is probably too large for float16, whose largest value is 65504. Use bfloat16, "
    "which has the "
    "range of float32, or compute this line in float32.",
    BFLOAT16,
)
OVERFLOW = Advice(
    "The inputs of this operation are so large that it overflows. Find out whether the data of "
    "this batch has such values. If not, the weights have grown: lower the learning rate.",
    LOWER_RATE,
)
LOGARITHM = Advice(
    "The logarithm of 0 is infinite, and that of a negative number is NaN. Compute the loss from "
    "logits, with a function that includes the logarithm, such as F.cross_entropy. Otherwise, keep "
    "the argument above 0.",
    STABLE_CLASSES + SAFE_LOG,
)
DIVISION = Advice(
    "The divisor is 0 or almost 0. A common cause is a mean over a mask that selects nothing. Keep "
    "the divisor away from 0.",
    """
# in the model or the loss: a mean over a mask that may select nothing
def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)

# in the model or the loss: a division whose divisor may be 0
def safe_divide(x, divisor, eps=1e-8):
    return x / torch.where(divisor.abs() < eps, eps, divisor)
""",
)
ROOT = Advice(
    "The derivative of a square root is infinite at 0, and the root of a negative number is NaN. "
    "Clamp the argument at 0, and add a small number inside the root.",
    """
# in the model or the loss: a root with a finite derivative at 0
def safe_sqrt(x, eps=1e-12):
    return (x.clamp_min(0) + eps).sqrt()
""",
)
NORM = Advice(
    "The norm is not differentiable at a vector of zeros. torch returns a gradient of 0 there, but "
    "a second derivative can be NaN, as in a gradient penalty. Add a small number inside the root.",
    """
# in the model or the loss: a norm with a finite derivative at 0
def safe_norm(x, dim=-1, eps=1e-12):
    return (x.square().sum(dim) + eps).sqrt()
""",
)
POWER = Advice(
    "A power with an exponent below 1 has an infinite derivative at 0, and a fractional power of a "
    "negative number is NaN. Keep the base of such a power above 0.",
    """
# in the model or the loss: a power with a finite derivative at 0
# (only for fractional exponents: it would change x ** 2)
def safe_pow(x, exponent, eps=1e-8):
    return x.clamp_min(eps) ** exponent
""",
)
DEVIATION = Advice(
    "The standard deviation of a single value is NaN, and that of equal values is not "
    "differentiable. Use the biased variance, and add a small number inside the root.",
    """
# in the model or the loss: a deviation that is finite for equal values
def safe_std(x, dim=-1, eps=1e-6):
    return (x.var(dim, unbiased=False) + eps).sqrt()
""",
)
VARIANCE = Advice(
    "The variance of a single value is NaN, because torch divides by n - 1 = 0. Use the biased "
    "variance (unbiased=False).",
    """
# in the model or the loss: a variance that is finite for one value
def safe_var(x, dim=-1):
    return x.var(dim, unbiased=False)
""",
)
EXPONENTIAL = Advice(
    "An exponential overflowed: its argument was too large. For a logarithm of a sum of "
    "exponentials, use torch.logsumexp(). For probabilities, use softmax(). Both subtract the "
    "maximum first. Otherwise, limit the argument.",
    SAFE_EXP,
)
ANGLE = Advice(
    "The derivatives of acos and asin are infinite at -1 and 1. Outside this range, both functions "
    "are NaN. Keep the argument strictly between -1 and 1.",
    """
# in the model or the loss: angles with a finite derivative
def safe_acos(x, eps=1e-6):
    return torch.acos(x.clamp(-1 + eps, 1 - eps))

def safe_asin(x, eps=1e-6):
    return torch.asin(x.clamp(-1 + eps, 1 - eps))
""",
)
DIRECTION = Advice(
    "atan2 has no derivative where both arguments are 0: replace the arguments there.",
    """
# in the model or the loss: an angle with a finite derivative at (0, 0)
def safe_atan2(y, x):
    is_origin = (x == 0) & (y == 0)
    return torch.atan2(y, x.masked_fill(is_origin, 1.0))
""",
)

BY_OPERATION = {
    **dict.fromkeys(("log", "log2", "log10", "xlogy"), LOGARITHM),
    **dict.fromkeys(("div", "reciprocal"), DIVISION),
    **dict.fromkeys(("sqrt", "rsqrt"), ROOT),
    **dict.fromkeys(("norm", "linalg_vector_norm", "cdist"), NORM),
    "pow": POWER,
    **dict.fromkeys(("std", "std_mean"), DEVIATION),
    **dict.fromkeys(("var", "var_mean"), VARIANCE),
    **dict.fromkeys(("exp", "expm1"), EXPONENTIAL),
    **dict.fromkeys(("acos", "asin"), ANGLE),
    "atan2": DIRECTION,
}
"""The advice by the name of the operation."""
_SQUARING = (NORM, POWER, DEVIATION, VARIANCE)
"""Advice for operations that also overflow, because they raise large numbers to a power."""
_LARGE = {_HALF: 100.0}
_LARGE_ELSEWHERE = 1e9
"""The size of inputs above which such an operation has probably overflowed."""


def advice_of(finding: Finding) -> Advice | None:
    """Return advice for the operation behind a finding; None if the general advice applies."""
    operation = None if finding.diagnosis is None else finding.diagnosis.operation
    if operation is None or finding.code not in _CODES:
        return None
    return _advice_for(operation)


def _advice_for(operation: GuiltyOperation) -> Advice | None:
    if operation.phase == "before":
        return DATA if operation.operation == "input" else None
    # The text before the first ";" is certain, unless it says "likely".
    if BROKEN_OPERAND in operation.detail.partition(";")[0]:
        return OPERAND
    if operation.operation == f"to({_HALF})":
        return HALF
    known = BY_OPERATION.get(operation.operation)
    types = {given.dtype for given in operation.inputs}
    if known is None:
        return HALF if _HALF in types else None
    if known in _SQUARING and any(map(_is_large, operation.inputs)):
        return HALF if _HALF in types else OVERFLOW
    if types & {_HALF, "bfloat16"}:
        known = replace(known, recommendation=f"{known.recommendation} {_IN_FLOAT32}")
    return known


def _is_large(given: TensorSummary) -> bool:
    ends = [abs(end) for end in (given.smallest, given.largest) if end is not None]
    return max(ends, default=0.0) > _LARGE.get(given.dtype, _LARGE_ELSEWHERE)
