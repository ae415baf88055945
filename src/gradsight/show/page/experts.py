"""Experts of a mixture as the page takes them: one byte for every expert and look. No torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.show.experts import ExpertNorms
from gradsight.show.page.encode import packed
from gradsight.values.texts import for_terminal

_PER_OCTAVE = 16
_EVEN = 128
_NOT_FINITE = 255


def expert_section(experts: Mapping[str, ExpertNorms]) -> list[dict[str, Any]]:
    """By group: its looks, and a code for every expert at each of them.

    0 has no gradient; 128 has an even share, and 16 more are twice that; 255 is not finite.
    """
    return [
        {
            "name": for_terminal(name),
            "size": group.size,
            "steps": group.steps,
            "codes": packed(_codes(group)),
        }
        for name, group in experts.items()
    ]


def _codes(group: ExpertNorms) -> npt.NDArray[np.uint8]:
    shares = group.shares()
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.round(_EVEN + _PER_OCTAVE * np.log2(shares)), 1, 254)
    codes = np.where(np.isfinite(shares), codes, _NOT_FINITE)
    return np.where(np.array(group.norms) == 0, 0, codes).astype(np.uint8)
