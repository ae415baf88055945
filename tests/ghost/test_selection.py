"""Samplers by influence: weights, orders of several ranks, states, and use in any DataLoader."""

import io
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from ghost.small import SmallGPT, loss_fn, pair
from gradsight import DomainMixer, GhostEngine, GradsightError, InfluenceSampler
from gradsight.ghost.selection.draws import AppealTable
from launch import run_ranks

Either = InfluenceSampler | DomainMixer
ROWS = 40
DOMAINS = ["news"] * 20 + ["code"] * 15 + ["mail"] * 5
HELPING = list(range(20))
SCORES = [1e-4] * 20 + [-1e-4] * 20


def both(**options: Any) -> Iterator[Either]:
    yield InfluenceSampler(ROWS, **options)
    yield DomainMixer(DOMAINS, **options)


def seen_thrice(sampler: Either) -> Either:
    for _ in range(3):
        sampler.update(list(range(ROWS)), SCORES)
    return sampler


# Weights.


def test_before_any_score_all_weigh_the_same() -> None:
    for sampler in both():
        assert sampler.weights.tolist() == pytest.approx([1.0] * ROWS)
    natural = {"code": 15 / 40, "mail": 5 / 40, "news": 0.5}
    assert DomainMixer(DOMAINS).domain_weights == pytest.approx(natural)


def test_three_looks_that_agree_are_believed() -> None:
    for sampler in both():
        seen_thrice(sampler)
        assert float(sampler.weights[HELPING].min()) > 1.2
        assert float(sampler.weights[20:].max()) < 0.8


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, ROWS - 1), st.floats(allow_nan=True, allow_infinity=True, width=64)
            ),
            max_size=12,
        ),
        max_size=6,
    ),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_weights_have_mean_one_and_keep_the_floor(
    looks: list[list[tuple[int, float]]], floor: float, decay: float
) -> None:
    for sampler in both(floor=floor, decay=decay):
        for look in looks:
            sampler.update([row for row, _ in look], [score for _, score in look])
        weights = sampler.weights
        assert bool(weights.isfinite().all())
        assert float(weights.mean()) == pytest.approx(1.0, rel=1e-9)
        assert float(weights.min()) >= floor * (1 - 1e-12)
        if isinstance(sampler, DomainMixer):
            assert sum(sampler.domain_weights.values()) == pytest.approx(1.0)
        assert len(list(sampler)) == ROWS


def test_scores_that_are_not_finite_are_no_look() -> None:
    rows = list(range(ROWS))
    for spoilt, clean in zip(both(), both(), strict=True):
        spoilt.update(rows, [*SCORES[:-3], math.nan, math.inf, -math.inf])
        clean.update(rows[:-3], SCORES[:-3])
        assert spoilt.weights.tolist() == clean.weights.tolist()


def test_the_size_of_scores_does_not_matter_but_their_sign_does() -> None:
    small, large = InfluenceSampler(4), InfluenceSampler(4)
    small.update([0, 1, 2, 3], [1e-30, 2e-30, -1e-30, 0.0])
    large.update([0, 1, 2, 3], [1e300, 2e300, -1e300, 0.0])
    assert small.weights.tolist() == pytest.approx(large.weights.tolist())
    assert small.weights[1] > small.weights[0] > small.weights[3] > small.weights[2]


def test_decay_says_what_stays_of_the_old_value() -> None:
    forgetful, fresh = InfluenceSampler(4, decay=0.0), InfluenceSampler(4)
    steady = InfluenceSampler(4, decay=0.9)
    for sampler in (forgetful, steady):
        for sign in (1.0, 1.0, 1.0, -1.0):
            sampler.update([0, 1], [sign, -sign])
    fresh.update([0, 1], [-1.0, 1.0])
    assert forgetful.weights.tolist() == fresh.weights.tolist()
    assert forgetful.weights[0] < 1 < steady.weights[0]


def test_a_row_that_occurs_twice_in_a_look_was_looked_at_once() -> None:
    twice, once = InfluenceSampler(4), InfluenceSampler(4)
    twice.update([0, 0, 1], [3.0, -1.0, -1.0])
    once.update([0, 1], [1.0, -1.0])
    assert twice.weights.tolist() == once.weights.tolist()


def test_a_table_of_many_chunks_is_as_if_made_at_once() -> None:
    rows, generator = 5000, np.random.default_rng(0)
    step_by_step, at_once = AppealTable(rows), AppealTable(rows)
    for _ in range(20):
        chosen = generator.integers(0, rows, 7)
        step_by_step.set(chosen, generator.random(7) + 0.1)
    at_once.set(np.arange(rows), step_by_step.all.copy())
    assert step_by_step.mean == at_once.mean == pytest.approx(step_by_step.all.mean())
    ends = np.cumsum(at_once.all) / at_once.all.sum()
    for chance in generator.random(200):
        assert step_by_step.row_at(chance) == np.searchsorted(ends, chance, side="right")
    assert step_by_step.row_at(math.nextafter(1.0, 0.0)) == rows - 1


# Orders.


def test_rows_are_drawn_as_often_as_they_weigh() -> None:
    for sampler in both(num_samples=40_000):
        seen_thrice(sampler)
        counts = Counter(sampler)
        drawn = np.array([counts[row] for row in range(ROWS)]) / 1000
        assert drawn == pytest.approx(sampler.weights.numpy(), abs=0.15)


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    for sampler, again, other in zip(both(), both(), both(seed=1), strict=True):
        first, second = list(sampler), list(sampler)
        assert first != second
        assert [list(again), list(again)] == [first, second]
        assert list(other) != first
        assert set(first) <= set(range(ROWS))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_take_turns_in_one_order(world: int) -> None:
    for ranks in zip(*(both(rank=r, world_size=world) for r in range(world)), strict=True):
        orders = [list(seen_thrice(sampler)) for sampler in ranks]
        assert {len(order) for order in orders} == {len(ranks[0])} == {-(-ROWS // world)}
        together = [row for turn in zip(*orders, strict=True) for row in turn]
        alone = InfluenceSampler(ROWS) if isinstance(ranks[0], InfluenceSampler) else None
        assert together[:ROWS] == list(seen_thrice(alone or DomainMixer(DOMAINS)))


def test_a_new_look_counts_from_the_next_row_on() -> None:
    sampler = InfluenceSampler(2, num_samples=2000, floor=0.01, decay=0.0)
    order = iter(sampler)
    before = [next(order) for _ in range(1000)]
    sampler.update([0, 1], [1.0, -1.0])
    assert before.count(0) < 600 < 700 < list(order).count(0)


def test_generators_of_torch_and_numpy_are_left_alone() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1]
    for sampler in both():
        seen_thrice(sampler)
        list(sampler)
        sampler.load_state_dict(sampler.state_dict())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


# States.


def saved(sampler: Either, used: int | None = None) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(sampler.state_dict(used), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("taken", [0, 1, 17, 39, 40])
def test_a_state_goes_on_in_mid_epoch(taken: int) -> None:
    for sampler, resumed in zip(both(seed=5), both(), strict=True):
        seen_thrice(sampler)
        list(sampler)
        order = iter(sampler)
        for _ in range(taken):
            next(order)
        sampler.update([1, 25], [-1.0, 2.0])
        state = saved(sampler)
        rest = list(order)
        resumed.load_state_dict(state)
        assert resumed.weights.tolist() == sampler.weights.tolist()
        assert list(resumed) == (rest or list(sampler))
        assert list(resumed) == list(sampler)


def test_a_state_goes_on_with_another_number_of_ranks() -> None:
    alone = seen_thrice(InfluenceSampler(ROWS))
    order = iter(alone)
    for _ in range(10):
        next(order)
    state = saved(alone)
    ranks = [InfluenceSampler(ROWS, rank=rank, world_size=2) for rank in range(2)]
    for sampler in ranks:
        sampler.load_state_dict(state)
    together = [row for turn in zip(*ranks, strict=True) for row in turn]
    assert together == list(order)


def test_a_loop_that_is_left_makes_way_for_the_next_epoch() -> None:
    sampler, whole = InfluenceSampler(ROWS), InfluenceSampler(ROWS)
    next(iter(sampler))
    list(whole)
    assert list(sampler) == list(whole)


class Rows:
    """A dataset whose items are their numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> int:
        return row


def batches(sampler: Either, workers: int = 0) -> Iterator[list[int]]:
    for batch in DataLoader(Rows(), batch_size=4, sampler=sampler, num_workers=workers):
        yield batch.tolist()


def trained(sampler: Either, steps: Iterator[list[int]], count: int) -> list[list[int]]:
    """Batches of some steps, after each of which the sampler sees scores that follow from it."""
    done = []
    for _ in range(count):
        rows = next(steps)
        sampler.update(rows, [math.sin(7.0 * row) for row in rows])
        done.append(rows)
    return done


def test_workers_change_nothing_where_no_scores_come_in() -> None:
    for sampler, plain in zip(both(), both(), strict=True):
        drawn = [row for batch in batches(sampler, workers=1) for row in batch]
        assert drawn == list(plain)


def test_a_loader_with_workers_resumes_bit_for_bit() -> None:
    straight, broken, resumed = (InfluenceSampler(ROWS) for _ in range(3))
    expected = trained(straight, batches(straight, workers=1), 10)
    first = trained(broken, batches(broken, workers=1), 3)
    resumed.load_state_dict(saved(broken, used=12))
    assert first + trained(resumed, batches(resumed, workers=1), 7) == expected
    assert resumed.weights.tolist() == straight.weights.tolist()
    assert list(resumed) == list(straight)


def test_a_state_saved_among_pending_rows_keeps_them() -> None:
    sampler = InfluenceSampler(ROWS)
    order = iter(sampler)
    expected = [next(order) for _ in range(12)]
    for used in (2, 3):  # saved with rows in flight, loaded, used a few of them, saved again
        state = saved(sampler, used)
        sampler = InfluenceSampler(ROWS)
        sampler.load_state_dict(state)
        order = iter(sampler)
        taken = [next(order) for _ in range(3)]
    assert taken == expected[5:8]
    last = InfluenceSampler(ROWS)
    last.load_state_dict(saved(sampler))
    assert list(last) == list(order)


def test_a_batch_sampler_may_stand_between() -> None:
    sampler, plain = InfluenceSampler(ROWS), InfluenceSampler(ROWS)
    loader = DataLoader(Rows(), batch_sampler=BatchSampler(sampler, 8, drop_last=True))
    assert [row for batch in loader for row in batch.tolist()] == list(plain)


# The engine.


def test_scores_of_an_engine_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    model = SmallGPT()
    engine = GhostEngine(model, loss_fn, pair(2, 1))
    with engine.observe(sample_ids=[3, 1]):
        loss_fn(model, pair(2, 2)).backward()
    one, other = InfluenceSampler(4), InfluenceSampler(4)
    one.update(engine.scores)
    other.update(engine.scores.sample_ids, engine.scores.total.tolist())
    assert one.weights.tolist() == other.weights.tolist() != [1.0] * 4
    with pytest.raises(GradsightError, match="not both"):
        one.update(engine.scores, [1.0, 2.0])
    engine.close()
    engine = GhostEngine(model, loss_fn, targets={"a": pair(2, 1), "b": pair(2, 3)})
    with engine.observe(sample_ids=[3, 1]):
        loss_fn(model, pair(2, 2)).backward()
    with pytest.raises(GradsightError, match=r"by_target\[name\]"):
        one.update(engine.scores)
    engine.close()


# Refusals.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"floor": 0.0}, "above 0"),
        ({"floor": -0.1}, "floor"),
        ({"floor": 1.1}, "floor"),
        ({"floor": math.nan}, "floor"),
        ({"floor": "0.1"}, "floor"),
        ({"floor": True}, "floor"),
        ({"decay": -0.1}, "decay"),
        ({"decay": 1.5}, "decay"),
        ({"num_samples": 0}, "num_samples"),
        ({"seed": -1}, "seed"),
        ({"rank": 0}, "belong together"),
        ({"world_size": 2}, "belong together"),
        ({"rank": 2, "world_size": 2}, "below world_size"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(GradsightError, match=text):
        InfluenceSampler(ROWS, **options)
    with pytest.raises(GradsightError, match=text):
        DomainMixer(DOMAINS, **options)


@pytest.mark.parametrize("data", [0, [], -1, 2.5, None, True])
def test_data_without_rows_is_refused(data: Any) -> None:
    with pytest.raises(GradsightError):
        InfluenceSampler(data)


@pytest.mark.parametrize("domains", [[], "news", None, ["a", None], [1, 2]])
def test_domains_without_names_are_refused(domains: Any) -> None:
    with pytest.raises(GradsightError):
        DomainMixer(domains)


def test_data_is_anything_with_a_length() -> None:
    for data in (Rows(), np.zeros((ROWS, 2)), torch.zeros(ROWS), np.int64(ROWS), ROWS):
        assert len(InfluenceSampler(data)) == ROWS


@pytest.mark.parametrize(
    ("ids", "scores", "text"),
    [
        ([40], [1.0], "there is no row 40"),
        ([-1], [1.0], "there is no row -1"),
        (["0"], [1.0], "there is no row '0'"),
        ([0, 1], [1.0], "one score per row"),
        ([0], [[1.0]], "shape"),
        ([0], ["a"], "numbers"),
        ([0], None, "needs the scores"),
        ([0.5], [1.0], "sample_ids"),
        (None, [1.0], "sample_ids"),
    ],
)
def test_wrong_looks_are_refused_and_change_nothing(ids: Any, scores: Any, text: str) -> None:
    for sampler in both():
        with pytest.raises(GradsightError, match=text):
            sampler.update(ids, scores)
        assert sampler.weights.tolist() == pytest.approx([1.0] * ROWS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": 41}, "over 41 rows"),
        ({"kind": "DomainMixer"}, "DomainMixer"),
        ({"sums": torch.zeros(3, dtype=torch.float64)}, "do not go together"),
        ({"sums": torch.full((ROWS,), math.nan, dtype=torch.float64)}, "finite"),
        ({"counts": torch.full((ROWS,), -1.0, dtype=torch.float64)}, "do not go together"),
        ({"pending": torch.tensor([ROWS])}, "beyond"),
        ({"place": -1}, "place"),
        ({"floor": 2.0}, "floor"),
        ({"more": 1}, "no state of a sampler"),
    ],
)
def test_a_state_of_another_sampler_is_refused(change: dict[str, Any], text: str) -> None:
    sampler = InfluenceSampler(ROWS)
    state = {**sampler.state_dict(), **change}
    with pytest.raises(GradsightError, match=text):
        sampler.load_state_dict(state)
    with pytest.raises(GradsightError, match="this one has 3"):
        InfluenceSampler(3).load_state_dict(sampler.state_dict())


def test_a_state_of_other_domains_or_of_another_rank_is_refused() -> None:
    with pytest.raises(GradsightError, match="the domains a, b"):
        DomainMixer(["a", "c"]).load_state_dict(DomainMixer(["a", "b"]).state_dict())
    sampler = InfluenceSampler(ROWS)
    list(sampler)
    with pytest.raises(GradsightError, match="load each rank's own state"):
        InfluenceSampler(ROWS, rank=1, world_size=2).load_state_dict(sampler.state_dict(used=3))
    with pytest.raises(GradsightError, match="used must be from 0 to 40"):
        sampler.state_dict(used=41)


# Several processes.


def test_three_ranks_share_all_looks() -> None:
    printed = run_ranks(Path(__file__).with_name("selection_ranks.py"), ranks=3)
    assert printed.count("ok") == 3, printed
