"""Records come back from JSON as they were, and nothing else passes for one."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from gradsight.core.records import read_record
from gradsight.errors import GradsightError
from gradsight.values.diagnoses import Diagnosis, GuiltyOperation, GuiltySample, TensorSummary
from gradsight.values.findings import Finding
from gradsight.values.plain import plain

DIAGNOSIS = Diagnosis(
    GuiltyOperation(
        "log", "forward", None, "a.py:3", "x", (TensorSummary((2, 3), "f", None, 1.5, 0, 1),), 0
    ),
    (GuiltySample(1, "s", 0, 0, math.inf, None), GuiltySample(2, 7, 0, 0, 2.0, 0.5)),
    0.25,
    ("a note",),
)
FINDING = Finding("GS103", "nan", "critical", ("w",), 3, "e", "m", "r", "f", DIAGNOSIS)


def test_what_was_written_comes_back() -> None:
    assert read_record(Finding, json.loads(json.dumps(plain(FINDING))), "it") == FINDING


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": None}, "seconds should be a number, but is NoneType"),
        ({"seconds": True}, "seconds should be a number, but is bool"),
        ({"notes": "all"}, "notes should be a list, but is str 'all'"),
        ({"notes": ["a", 1]}, r"notes\[1\] should be text, but is int '1'"),
        ({"micro_batches": 10**30}, "micro_batches should be a whole number"),
        ({"more": 1}, "the fields of a Diagnosis \\('more'\\)"),
        ({"operation": 3}, "operation should be GuiltyOperation or nothing, but is int"),
        ({"samples": [{"row": "x"}]}, r"samples\[0\] should be an object with the fields of a"),
    ],
)
def test_what_does_not_fit_is_named(change: Mapping[str, Any], words: str) -> None:
    value = plain(DIAGNOSIS) | change
    with pytest.raises(GradsightError, match=f"f.json is malformed: .*{words}"):
        read_record(Diagnosis, value, "f.json")


ANYTHING = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(some.dictionaries(some.sampled_from([*plain(FINDING), "other"]), ANYTHING))
def test_garbage_is_refused_in_words(changes: dict[str, Any]) -> None:
    try:
        found = read_record(Finding, plain(FINDING) | changes, "it")
    except GradsightError:
        return
    for field in dataclasses.fields(found):
        assert field.name != "name" or isinstance(found.name, str)
    assert isinstance(found.first_step, int)
