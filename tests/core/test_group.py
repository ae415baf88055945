"""One process group of ours: alone, among ranks, and at the end."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from gradsight.core.group import ProcessGroup, open_groups, rank, shared_group, world_size
from gradsight.core.sharing import ModelGroup
from launch import run_ranks

HERE = Path(__file__).parent


def test_alone_every_exchange_is_with_itself() -> None:
    group = ProcessGroup()
    assert (rank(), world_size(), group.rank, group.size) == (0, 1, 0, 1)
    assert group.is_first
    assert group.is_usable
    array = np.arange(6.0).reshape(2, 3)
    assert group.start_gather(array).done()
    assert [part.tolist() for part in group.start_gather(array).wait()] == [array.tolist()]
    assert group.start_sum(array).wait()[0].tolist() == array.tolist()
    tensor = torch.arange(3.0)
    assert group.sum(tensor) is tensor
    group.mean([tensor])
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert group.gather_rows(tensor, 3) is tensor
    assert group.collect(tensor, [3]) == [tensor]
    assert group.largest(3) == 3
    assert group.any(True)
    assert not group.any(False)
    assert group.gather_objects("x") == ["x"]
    assert group.from_first("x") == "x"
    group.barrier()
    group.close()
    assert open_groups() == 0
    assert shared_group().size == 1
    assert ModelGroup(nn.Linear(2, 2)).size == 1


def test_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(HERE / "group_ranks.py", tmp_path, timeout=300).count("done") == 2
