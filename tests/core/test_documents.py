"""JSON files that know their checksum."""

import json
import random
from pathlib import Path

import pytest

from gradsight.core.documents import document_text, load_document, load_json, read_document
from gradsight.errors import GradsightError

BODY = {
    "settings": {"lr": 1e-3, "names": ["a", "ä"], "none": None},
    "step": 12,
    "nan": float("inf"),
}


def test_it_is_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(document_text(BODY))
    assert read_document(tmp_path, "config.json") == BODY


def test_an_old_one_is_taken_as_it_is() -> None:
    assert load_document(json.dumps(BODY).encode(), "config.json") == BODY


def test_every_damage_is_noticed_or_changes_nothing() -> None:
    """One to eight bytes changed, a cut, an insertion: another value is never read."""
    source = random.Random(0)
    data = document_text(BODY).encode()
    refused = 0
    for attempt in range(600):
        place = source.randrange(len(data))
        width = source.randint(1, 8)
        new = bytes(source.randrange(256) for _ in range(width))
        changed = (data[:place] + new + data[place + width :])[: len(data)]
        if attempt % 5 == 0:
            changed = data[:place]
        elif attempt % 5 == 1:
            changed = data[:place] + new + data[place:]
        try:
            assert load_document(changed, "config.json") == BODY
        except GradsightError:
            refused += 1
    assert refused > 500


def test_a_newer_one_names_the_version_that_reads_it() -> None:
    whole = json.loads(document_text(BODY))
    body = {key: value for key, value in whole.items() if key not in ("checksum", "format")}
    text = document_text({**body, "format": 3, "reader": "9.1"})
    with pytest.raises(GradsightError, match=r"newer Gradsight: it takes '9\.1'"):
        load_document(text.encode(), "config.json")


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, '{"a": ' * 100_000, "\xff", ""])
def test_what_is_no_document_is_refused_in_words(text: str) -> None:
    with pytest.raises(GradsightError, match=r"x\.json"):
        load_document(text.encode("latin-1"), "x.json")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper than 64"),
        (b'{"a":[' + b"[]," * 1_100_000 + b"[]]}", "lists and objects; at most"),
        (b"9" * 5000, "cannot be read as JSON"),
        (b"\xff{}", "cannot be read as JSON"),
    ],
)
def test_json_beyond_the_limits_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(GradsightError, match=words):
        load_json(data, "config.json")
