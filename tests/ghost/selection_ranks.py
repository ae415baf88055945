"""Run on three gloo ranks by test_selection.py: all share all looks, and follow one order."""

import torch
import torch.distributed as dist

from gradsight import DomainMixer, GradsightError, InfluenceSampler

ROWS = 31
DOMAINS = ["abc"[row % 3] for row in range(ROWS)]


def gathered(value: object) -> list[object]:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check(sampler: InfluenceSampler | DomainMixer, alone: InfluenceSampler | DomainMixer) -> None:
    """`alone` is given what all ranks have seen, and must come to the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        # Ranks see different numbers of rows; the last none at all.
        looks = [[(5 * each + step + k) % ROWS for k in range(2 - each)] for each in range(world)]
        rows = looks[rank]
        sampler.update(rows, torch.tensor([float(row - 9) for row in rows]))
        dist_free_update(alone, [row for look in looks for row in look])
    assert sampler.weights.tolist() == alone.weights.tolist()
    assert len({str(weights) for weights in gathered(sampler.weights.tolist())}) == 1
    orders = gathered(list(sampler))
    together = [row for turn in zip(*orders, strict=True) for row in turn]
    assert together[:ROWS] == list(alone)
    assert len(sampler) == len(orders[0]) == 11


def dist_free_update(alone: InfluenceSampler | DomainMixer, rows: list[int]) -> None:
    """What one process would have been told, without a word to the others."""
    import numpy as np

    seen = alone._looks.add(
        alone._entries_of(np.array(rows)), np.array([float(row - 9) for row in rows])
    )
    alone._weigh(seen)


def check_refusal(sampler: InfluenceSampler) -> None:
    """A fault of one rank is an error on all, and the next look goes well."""
    try:
        sampler.update([ROWS if dist.get_rank() == 1 else 0], [1.0])
    except GradsightError as error:
        said = str(error)
    assert ("there is no row" if dist.get_rank() == 1 else "rank 1") in said
    sampler.update([0], [1.0])


if __name__ == "__main__":
    # Made before the processes have found each other, as a dataset's module may do.
    early = InfluenceSampler(ROWS)
    dist.init_process_group("gloo")
    check(early, InfluenceSampler(ROWS, rank=0, world_size=1))
    check(DomainMixer(DOMAINS), DomainMixer(DOMAINS, rank=0, world_size=1))
    check_refusal(early)
    state = early.state_dict()
    assert len({str(other) for other in gathered(state)}) == 1
    print("ok", flush=True)
    dist.destroy_process_group()
