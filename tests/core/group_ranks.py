"""What two ranks exchange through a group of ours; each prints what it got."""

import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from core.threads import gloo_threads
from gradsight.core import group as groups
from gradsight.core import meeting
from gradsight.core.group import ProcessGroup, shared_group
from gradsight.core.meeting import MeetingPlace, RanksMissing
from gradsight.core.sharing import ModelGroup, replicated_parameters, share_model


def exchanges() -> None:
    group = ProcessGroup()
    mine = group.rank + 1.0
    assert (group.rank, group.size) == (dist.get_rank(), 2)
    gathered = group.start_gather(np.full((2, 3), mine))
    summed = group.start_sum(np.full(4, mine))
    assert [part[0, 0] for part in gathered.wait()] == [1.0, 2.0]
    assert gathered.done()
    assert summed.wait()[0].tolist() == [3.0] * 4
    assert group.sum(torch.tensor(mine)).item() == 3.0
    means = [torch.tensor([mine]), torch.tensor([mine, 10 * mine], dtype=torch.float64)]
    group.mean(means)
    assert [tensor.tolist() for tensor in means] == [[1.5], [1.5, 15.0]]
    assert group.largest(7 * group.rank) == 7
    assert group.any(group.rank == 1)
    assert not group.any(False)
    everything = group.gather_objects({"rank": group.rank})
    assert everything == ([{"rank": 0}, {"rank": 1}] if group.is_first else None)
    assert group.from_first("first" if group.is_first else "second") == "first"
    sent = torch.full((group.rank + 2,), group.rank, dtype=torch.uint8)
    parts = [part.tolist() for part in group.collect(sent, [2, 3])]
    assert parts == ([[0, 0], [1, 1, 1]] if group.is_first else [])
    rows = torch.arange(3.0)[2 * group.rank :][:2]
    assert group.gather_rows(rows, 3).tolist() == [0.0, 1.0, 2.0]
    group.barrier()
    group.close()
    assert group.sum(torch.tensor(mine)).item() == mine, "a closed group is alone"


def models() -> None:
    plain = ModelGroup(nn.Linear(3, 3))
    assert (plain.size, plain.sharded) == (1, False)
    replicated = share_model(nn.Linear(3, 3), "ddp", (), torch.device("cpu"))
    group = ModelGroup(replicated)
    assert (group.size, group.sharded) == (2, False)
    assert replicated_parameters(replicated) == {id(p) for p in replicated.parameters()}
    group.close()
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    before = layer.weight.detach().clone()
    fully_shard(layer)
    group = ModelGroup(layer)
    assert (group.size, group.sharded) == (2, True)
    assert torch.equal(group.gather_shards(layer.weight.detach()), before)
    group.close()


def endings() -> None:
    """A closed group has no thread left, finished or not; a stranger's end of it is survived."""
    before = gloo_threads()
    group = ProcessGroup()
    group.start_gather(np.ones(3)).wait()
    assert gloo_threads() > before
    group.close()
    group.close()
    assert gloo_threads() == before
    late = ProcessGroup()
    if late.is_first:
        # The other rank never comes: closing must not wait for it.
        late.start_gather(np.ones(3))
    late.close()
    assert groups.open_groups() == 0
    dist.barrier()


def meetings() -> None:
    """All ranks are told the same, in whatever order they come; the late one at once."""
    mine = dist.get_rank()
    place = MeetingPlace("test")
    if mine == 1:
        time.sleep(0.2)
    assert place.meet("both", 60.0).missing == ()
    dist.barrier()
    if mine == 0:
        place.forget("both")
        met = place.meet("one", 0.2)
        assert (met.present, met.missing) == ((0,), (1,))
        assert met.sentence() == "rank 1 of 2 did not come within 0.2 s"
    dist.barrier()
    if mine == 1:
        assert place.meet("one", 3600.0).missing == (1,)
        place.leave()
    dist.barrier()
    if mine == 0:
        met = place.meet("nobody else", 3600.0)
        assert met.missing == (1,)
        assert met.sentence().endswith("did not come: the end had come on a rank")
    dist.barrier()


def groups_without_all() -> None:
    """A group that a rank does not come to is not made, and the next one of the user's works."""
    meeting.PATIENCE = 0.5
    if dist.get_rank() == 1:
        with pytest.raises(RanksMissing, match="rank 0 of 2 did not come within"):
            ProcessGroup("lonely")
        alone = ProcessGroup.or_alone("lonelier")
        assert (alone.size, alone.is_first) == (1, True)
        assert alone.incomplete is not None
    dist.barrier()
    if dist.get_rank() == 0:
        late = ProcessGroup.or_alone("lonelier")
        assert (late.size, late.is_first) == (1, False)
    mine = torch.ones(1)
    dist.all_reduce(mine, group=dist.new_group())
    assert mine.item() == 2


def a_second_world() -> None:
    shared = shared_group()
    assert shared_group() is shared
    assert shared.start_gather(np.ones(2)).wait()[1].tolist() == [1.0, 1.0]
    place = dist.get_rank()
    dist.destroy_process_group()
    assert not shared.is_usable
    # A store of its own: torchrun's still has the addresses of the first world.
    second = f"file://{sys.argv[1]}/second"
    dist.init_process_group("gloo", init_method=second, rank=place, world_size=2)
    again = shared_group()
    assert again is not shared
    assert again.start_gather(np.ones(2)).wait()[1].tolist() == [1.0, 1.0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in (exchanges, models, endings, meetings, groups_without_all, a_second_world):
        scenario()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {groups.rank()} done\n")
