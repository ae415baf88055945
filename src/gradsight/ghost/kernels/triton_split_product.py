# mypy: disable-error-code="no-untyped-def", allow-untyped-calls, allow-untyped-decorators
"""Weight gradient and per-sample scores of a linear layer out of one pass, in Triton.

Of one sample left_i [T, p] and right_i [T, d], and directions D_k [p, d]:

    total       = sum_i left_i^T right_i             what plain training computes anyway
    scores[k,i] = <left_i^T right_i, D_k>            what the ghost engine wants

A program owns one tile of [p, d] for a group of samples. It makes left_i^T right_i of that tile in
registers, sample by sample, dots it with the same tile of every direction while it is there, and
adds it to the total: no sample's gradient goes through memory. Partial scores go to memory of their
own and are added up afterwards, so that nothing depends on the order in which programs run.

Its speed was never measured: it was checked in Triton's interpreter alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gradsight.core.devices import multiplies_in_tf32
from gradsight.errors import GradsightError

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_ENOUGH_PROGRAMS = 256
"""So many keep a large device busy; where [p, d] has fewer tiles, samples are split into groups."""


class Blocks(NamedTuple):
    """The sides of a tile, and how many positions are multiplied at once."""

    p: int
    d: int
    t: int


ON_DEVICE = Blocks(64, 64, 32)
IN_INTERPRETER = Blocks(32, 32, 16)


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, as it was told when it was imported."""
    return not isinstance(_split_product, triton.runtime.JITFunction)


def split_product(
    left: Tensor, right: Tensor, directions: Tensor, groups: int | None = None
) -> tuple[Tensor, Tensor]:
    """(total [p, d], scores [K, B]) in float32 of left [B, T, p], right [B, T, d] and directions.

    directions [K, p, d] lie in one piece; the last dimension of the others has no gaps. groups:
    into how many parts the samples are split; each costs one [p, d] of memory. None: by the device.
    """
    if triton is None:
        raise GradsightError("the package 'triton' is missing. Install it with: pip install triton")
    samples, length, outs = left.shape
    ins, number = right.shape[2], directions.shape[0]
    blocks = IN_INTERPRETER if is_interpreted() else ON_DEVICE
    tiles = triton.cdiv(outs, blocks.p), triton.cdiv(ins, blocks.d)
    if groups is None:
        groups = max(1, _ENOUGH_PROGRAMS // (tiles[0] * tiles[1]))
    group = triton.cdiv(samples, min(groups, samples))
    groups = triton.cdiv(samples, group)
    total = torch.empty(groups, outs, ins, device=left.device, dtype=torch.float32)
    shape = (tiles[0] * tiles[1], number, samples)
    scores = torch.empty(shape, device=left.device, dtype=torch.float32)
    _split_product[(*tiles, groups)](
        left,
        right,
        directions,
        total,
        scores,
        samples,
        length,
        outs,
        ins,
        left.stride(0),
        left.stride(1),
        right.stride(0),
        right.stride(1),
        DIRECTIONS=number,
        GROUP=group,
        BLOCK_P=blocks.p,
        BLOCK_D=blocks.d,
        BLOCK_T=blocks.t,
        PRECISION="tf32" if multiplies_in_tf32() else "ieee",
        # The interpreter multiplies the bits of bfloat16 as if they were whole numbers. Widened,
        # the products are those of matrix units: exact, and added up in float32.
        WIDEN=is_interpreted() and left.dtype is torch.bfloat16,
    )
    return total[0] if groups == 1 else total.sum(0), scores.sum(0)


if triton is not None:

    @triton.jit
    def _split_product(
        left_ptr,
        right_ptr,
        directions_ptr,
        total_ptr,
        scores_ptr,
        samples,
        length,
        outs,
        ins,
        left_sample,
        left_row,
        right_sample,
        right_row,
        DIRECTIONS: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK_P: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_T: tl.constexpr,
        PRECISION: tl.constexpr,
        WIDEN: tl.constexpr,
    ):
        """One tile of [p, d], for one group of samples."""
        tile_p = tl.program_id(0)
        tile_d = tl.program_id(1)
        group = tl.program_id(2)
        p = tile_p * BLOCK_P + tl.arange(0, BLOCK_P)
        d = tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = (p < outs)[:, None] & (d < ins)[None, :]
        # 64 bits: of a large layer, samples x positions x width is more than 31 bits hold. Sizes
        # may be constants to the compiler, which have no type to change: a wide zero is added.
        wide = tile_p.to(tl.int64) * 0
        place = p[:, None].to(tl.int64) * ins + d[None, :]
        volume = (wide + outs) * ins
        tile = tile_p * tl.num_programs(1) + tile_d
        total = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
        for i in range(group * GROUP, min((group + 1) * GROUP, samples)):
            own_left = left_ptr + (wide + i) * left_sample
            own_right = right_ptr + (wide + i) * right_sample
            one = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
            for start in range(0, length, BLOCK_T):
                t = start + tl.arange(0, BLOCK_T)
                left_at = own_left + t[:, None] * left_row + p[None, :]
                right_at = own_right + t[:, None] * right_row + d[None, :]
                a = tl.load(left_at, mask=(t < length)[:, None] & (p < outs)[None, :], other=0.0)
                b = tl.load(right_at, mask=(t < length)[:, None] & (d < ins)[None, :], other=0.0)
                if WIDEN:
                    a = a.to(tl.float32)
                    b = b.to(tl.float32)
                one = tl.dot(tl.trans(a), b, one, input_precision=PRECISION)
            for k in tl.static_range(
                DIRECTIONS
            ):  # the tile of a direction stays near over the samples
                along = tl.load(directions_ptr + k * volume + place, mask=inside, other=0.0)
                score = tl.sum(one * along.to(tl.float32))
                tl.store(scores_ptr + (tile * DIRECTIONS + k) * samples + i, score)
            total += one
        tl.store(total_ptr + group * volume + place, total, mask=inside)
