"""Scores added up by columns, against plain loops."""

import math
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from gradsight.errors import RunError, UsageError
from gradsight.show.influence import UNSETTLED, Influence, influence_of
from gradsight.store.scores import readable_scores
from show.scored import Row, ordinary, row, write


def random_rows(seed: int, steps: int = 40) -> list[Row]:
    """Uneven batches of samples with and without domains, two targets, raw scores that shrink, some
    of them not finite.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for step in range(5, 5 + steps):
        for sample in generator.choice(30, generator.integers(1, 9), replace=False).tolist():
            for target in ("a", "b"):
                score = float(generator.normal(0.2)) / (1 + step) ** 2
                score = math.nan if generator.random() < 0.02 else score
                rows.append(row(step, f"s{sample}", score, [None, "x", "y"][sample % 3], target))
    return rows


def plain(rows: list[Row], target: str, raw: bool) -> dict[str, tuple[float, int]]:
    """The twin: mean score and number of visits by sample."""
    kept = [each for each in rows if each["target"] == target and math.isfinite(each["score"])]
    first, last = min(each["step"] for each in kept), max(each["step"] for each in kept)
    if not raw:
        kept = [
            each for each in kept if each["step"] >= first + int(UNSETTLED * (last - first + 1))
        ]
    found: dict[str, list[float]] = {}
    for each in kept:
        scores = [other["score"] for other in kept if other["step"] == each["step"]]
        size = 1.0 if raw else math.sqrt(sum(score**2 for score in scores) / len(scores))
        found.setdefault(each["sample_id"], []).append(each["score"] / size)
    return {sample: (sum(scores) / len(scores), len(scores)) for sample, scores in found.items()}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("target", ["a", "b"])
def test_the_columns_agree_with_plain_loops(target: str, raw: bool) -> None:
    rows = random_rows(seed=3)
    found = influence_of(pyarrow.Table.from_pylist(rows), target, raw=raw)
    twin = plain(rows, target, raw)
    ours = {
        sample: (score, seen)
        for sample, score, seen in zip(
            found.sample_ids.tolist(), found.scores.tolist(), found.seen.tolist(), strict=True
        )
    }
    assert ours.keys() == twin.keys()
    assert all(ours[sample] == pytest.approx(twin[sample], rel=1e-12) for sample in twin)
    assert found.scores.tolist() == sorted(found.scores.tolist())
    assert (
        found.not_finite
        == sum(math.isnan(each["score"]) for each in rows if each["target"] == target)
        > 0
    )


def test_domains_agree_with_plain_loops() -> None:
    rows = [each for each in random_rows(seed=4) if math.isfinite(each["score"])]
    found = influence_of(pyarrow.Table.from_pylist(rows), "a", raw=True)
    assert {each.name for each in found.domains} == {"x", "y"}, (
        "samples without a domain belong to none"
    )
    for domain in found.domains:
        theirs = [each for each in rows if each["domain"] == domain.name and each["target"] == "a"]
        by_sample = plain(theirs, "a", raw=True)
        assert domain.score == pytest.approx(np.mean([each["score"] for each in theirs]))
        assert domain.samples == len(by_sample)
        assert domain.below_zero == pytest.approx(
            np.mean([score < 0 for score, _ in by_sample.values()])
        )
        first = [
            each["score"]
            for each in theirs
            if (each["step"] - 5) * len(domain.over_time) // 40 == 0
        ]
        assert domain.over_time[0] == (pytest.approx(np.mean(first)) if first else None)
    assert found.domains[0].score >= found.domains[1].score


def test_every_step_counts_alike_when_normalised(tmp_path: Path) -> None:
    """Raw sums are those of the first steps; normalised, the last ones weigh as much."""
    table = open_run_table(ordinary(tmp_path))
    raw, normal = influence_of(table, raw=True), influence_of(table)
    assert raw.domains[0].over_time[0] > 10 * raw.domains[0].over_time[-1] > 0
    assert normal.domains[0].over_time[0] == pytest.approx(normal.domains[0].over_time[-1])
    assert (raw.first_step, normal.first_step) == (0, 2)


def test_shares_of_the_decrease_against_a_plain_loop(tmp_path: Path) -> None:
    rows = random_rows(3)
    write(tmp_path, 50, rows)
    found = influence_of(open_run_table(tmp_path), "a", share=True)
    counted = [each for each in rows if each["target"] == "a" and math.isfinite(each["score"])]
    counted = [each for each in counted if each["step"] >= 5 + int(UNSETTLED * 40)]
    expected: dict[str, list[float]] = {}
    left_out = 0
    for step in sorted({each["step"] for each in counted}):
        here = [each for each in counted if each["step"] == step]
        decrease = sum(each["score"] for each in here)
        if decrease <= 0.1 * sum(abs(each["score"]) for each in here):
            left_out += 1
            continue
        for each in here:
            expected.setdefault(str(each["sample_id"]), []).append(each["score"] / decrease)
    means = {name: np.mean(values) for name, values in expected.items()}
    assert dict(zip(found.sample_ids, found.scores, strict=True)) == pytest.approx(means)
    assert found.steps_left_out == left_out > 0
    assert (found.is_share, found.normalised) == (True, False)


def test_no_shares_where_no_step_helps(tmp_path: Path) -> None:
    write(tmp_path, 4, [row(step, "s", -1.0) for step in range(4)])
    with pytest.raises(RunError, match="no step predicts a clear decrease"):
        influence_of(open_run_table(tmp_path), share=True)


def open_run_table(run_dir: Path) -> pyarrow.Table:
    table, unreadable = readable_scores(run_dir)
    assert not unreadable
    return table


def test_the_histogram_holds_every_sample_and_parts_at_zero() -> None:
    generator = np.random.default_rng(0)
    for scale in (1e-9, 1.0, 1e6):
        rows = [
            row(0, number, float(score))
            for number, score in enumerate(generator.standard_t(2, 500) * scale)
        ]
        counts, edges = influence_of(
            pyarrow.Table.from_pylist(with_text_ids(rows)), raw=True
        ).histogram()
        assert counts.sum() == 500
        assert 0.0 in edges.tolist()
        assert 5 <= len(counts) <= 16
        below = sum(each["score"] < 0 for each in rows)
        assert counts[edges[:-1] < 0].sum() == below


def with_text_ids(rows: list[Row]) -> list[Row]:
    return [{**each, "sample_id": str(each["sample_id"])} for each in rows]


@pytest.mark.parametrize("score", [0.0, 1.0, -1.0])
def test_one_score_is_enough(score: float) -> None:
    found = influence_of(pyarrow.Table.from_pylist(with_text_ids([row(7, 1, score)])))
    assert isinstance(found, Influence)
    assert found.scores.tolist() == [score]
    assert found.histogram()[0].sum() == 1


def test_a_step_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path, 10, [row(0, 1, 1.0), row(1, 1, 1.0)])
    write(tmp_path, 12, [row(1, 1, 5.0), row(2, 1, 5.0)])
    table = open_run_table(tmp_path)
    assert sorted(zip(table["step"].to_pylist(), table["score"].to_pylist(), strict=True)) == [
        (0, 1.0),
        (1, 5.0),
        (2, 5.0),
    ]


def test_numbers_and_names_as_ids_go_together(tmp_path: Path) -> None:
    write(tmp_path, 10, [row(0, 1, 1.0)])
    write(tmp_path, 20, [row(10, "1", 3.0), row(10, "b", 1.0)])
    found = influence_of(open_run_table(tmp_path), raw=True)
    assert dict(zip(found.sample_ids.tolist(), found.scores.tolist(), strict=True)) == {
        "b": 1.0,
        "1": 2.0,
    }


def test_an_unknown_target_lists_the_known_ones(tmp_path: Path) -> None:
    table = open_run_table(ordinary(tmp_path, targets=("all", "mail")))
    with pytest.raises(
        UsageError, match=r"there is no target 'male' in this run; it has all, mail"
    ):
        influence_of(table, "male")
    assert influence_of(table, "mail").targets == ("all", "mail")


def test_scores_that_are_all_nan_are_refused() -> None:
    rows = with_text_ids([row(0, 1, math.nan), row(0, 2, math.inf)])
    with pytest.raises(RunError, match="none of the 2 scores for this target is finite"):
        influence_of(pyarrow.Table.from_pylist(rows))
