"""Random numbers that a kernel draws inside of itself cannot be dealt out to samples."""

import pytest
import torch

from gradsight.incidents.diagnosis.random_tape import RandomTape, draws_inside
from gradsight.incidents.diagnosis.watcher import Budget

FUSED = torch.ops.aten._scaled_dot_product_flash_attention.default


@pytest.mark.parametrize(("dropout", "unknown"), [(0.0, False), (0.1, True)])
def test_fused_attention_with_dropout_is_said_to_be_unknown(dropout: float, unknown: bool) -> None:
    query = torch.zeros(2, 2, 4, 8, device="meta", dtype=torch.float16)
    tape = RandomTape(Budget(10.0))
    with tape:
        FUSED(query, query, query, dropout)
    assert not tape.unknown
    tape.row = (0, 2)
    with tape:
        FUSED(query, query, query, dropout)
    assert tape.unknown is unknown


def test_plain_attention_draws_where_it_can_be_seen() -> None:
    plain = torch.ops.aten._scaled_dot_product_attention_math.default
    assert not draws_inside(plain, (None, None, None), {"dropout_p": 0.1})
