# mypy: allow-untyped-calls
"""How many floating-point operations an operator costs, by torch's own formulas."""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Operations of one call; 0 for whatever is no matrix product, convolution or attention.

    >>> x = torch.ones(2, 3)
    >>> flops_of(torch.ops.aten.mm.default, (x, x.T), {}, x @ x.T)
    24
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(t.shape for t in args[:4])))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
