"""Sources of data, splits, samples, weights and their order."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from gradsight.errors import UsageError
from gradsight.train.data import SPLITS, open_corpus, standard_library
from gradsight.train.samples import Order, Samples, open_samples, read_weights
from train.small import write_text


def lengths(corpus: object) -> dict[str, dict[str, int]]:
    return {
        split: {domain: len(tokens) for domain, tokens in parts.items()}
        for split, parts in corpus.parts.items()
    }


def write_tokens(file: Path, first: int, count: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    np.arange(first, first + count, dtype="<u2").tofile(file)
    return file


def test_the_standard_library_is_split_the_same_every_time() -> None:
    one, two = standard_library(), standard_library()
    assert lengths(one) == lengths(two)
    assert {"json", "asyncio"} <= set(one.domains) or len(one.domains) >= 5
    sizes = {split: sum(parts.values()) for split, parts in lengths(one).items()}
    assert 0.78 < sizes["train"] / sum(sizes.values()) < 0.83
    assert sizes["val"] > 100_000 < sizes["test"]


def test_a_text_file_is_one_domain_and_every_byte_is_in_one_split(tmp_path: Path) -> None:
    file = tmp_path / "poem.txt"
    text = bytes(range(1, 201)) * 50
    file.write_bytes(text)
    corpus = open_corpus(file)
    assert corpus.domains == ("poem",)
    assert sum(lengths(corpus)[split]["poem"] for split in SPLITS) == len(text)
    assert lengths(corpus)["val"]["poem"] == lengths(corpus)["test"]["poem"] == len(text) // 10
    assert bytes(corpus.parts["val"]["poem"]) == text[8000:9000]


def test_sub_folders_are_domains(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "text" / "loose.txt").write_text("words " * 50)
    (tmp_path / "text" / ".hidden").write_text("not this")
    (tmp_path / "text" / "birds" / "photo.jpg").write_bytes(b"\xff\0\1\2")
    corpus = open_corpus(tmp_path / "text")
    assert corpus.domains == ("birds", "metals", "rivers", "text")
    assert b"\0" not in b"".join(bytes(part) for part in corpus.parts["train"].values())


def test_a_bin_is_split_by_tenths(tmp_path: Path) -> None:
    corpus = open_corpus(write_tokens(tmp_path / "web.bin", 0, 1000))
    assert lengths(corpus) == {"train": {"web": 800}, "val": {"web": 100}, "test": {"web": 100}}
    assert corpus.parts["val"]["web"][0] == 800
    assert corpus.parts["train"]["web"].dtype == np.uint16


def test_nanogpt_folders_and_folders_by_domain(tmp_path: Path) -> None:
    write_tokens(tmp_path / "nano" / "train.bin", 0, 90)
    write_tokens(tmp_path / "nano" / "val.bin", 90, 10)
    assert lengths(open_corpus(tmp_path / "nano")) == {
        "train": {"nano": 90},
        "val": {"nano": 10},
        "test": {},
    }
    for domain, first in (("law", 0), ("web", 1000)):
        write_tokens(tmp_path / "pile" / f"{domain}_train.bin", first, 80)
        write_tokens(tmp_path / "pile" / f"{domain}_validation.bin", first + 80, 10)
        write_tokens(tmp_path / "pile" / f"{domain}_test.bin", first + 90, 10)
    write_tokens(tmp_path / "pile" / "code.bin", 5000, 50)
    write_tokens(tmp_path / "pile" / "books" / "train.bin", 6000, 20)
    write_tokens(tmp_path / "pile" / "books" / "more_train.bin", 7000, 20)
    found = lengths(open_corpus(tmp_path / "pile"))
    assert found["train"] == {"books": 40, "code": 40, "law": 80, "web": 80}
    assert found["val"] == {"code": 5, "law": 10, "web": 10}
    assert found["test"] == {"code": 5, "law": 10, "web": 10}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file or folder"),
        (b"", "there is no text in it, and no .bin file of tokens"),
        (b"\0\0binary", "there is no text in it"),
    ],
)
def test_data_that_is_none(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "data").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_corpus(tmp_path / "data")


def test_odd_bins_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(
        UsageError, match="expected uint16 tokens, two bytes each, but the file has 3 bytes"
    ):
        open_corpus(tmp_path / "odd.bin")


def test_samples_are_numbered_blocks_that_do_not_overlap(tmp_path: Path) -> None:
    samples = open_samples(
        {"train": {"data": str(write_text(tmp_path / "text")), "block_size": 16}, "watch": {}}
    )
    parts = samples.corpus.parts["train"]
    counts = {domain: len(tokens) // 17 for domain, tokens in parts.items()}
    assert len(samples) == sum(counts.values())
    together = [samples.domain(number) for number in range(len(samples))]
    assert together == [domain for domain, count in counts.items() for _ in range(count)]
    of_birds = b"".join(
        samples.tokens(number).astype(np.uint8).tobytes() for number in range(counts["birds"])
    )
    assert of_birds == bytes(parts["birds"])[: 17 * counts["birds"]]
    assert samples.text(0) == of_birds[:17].decode()
    with pytest.raises(
        UsageError,
        match=rf"no sample {len(samples)}: the train split has samples 0 to {len(samples) - 1}",
    ):
        samples.text(len(samples))


def test_text_that_is_cut_inside_a_character_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "umlauts.txt").write_text("äöü" * 100, encoding="utf-8")
    assert "\N{REPLACEMENT CHARACTER}" in open_samples(
        {"data": str(tmp_path / "umlauts.txt"), "block_size": 4}
    ).text(0)


def test_tokens_read_as_numbers(tmp_path: Path) -> None:
    samples = open_samples(
        {"data": str(write_tokens(tmp_path / "web.bin", 300, 100)), "block_size": 3}
    )
    assert samples.text(1) == "304 305 306 307"


def test_tokens_read_as_text_where_a_tokenizer_is_known(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(("crow", "heron", "swift", "rook"))}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="rook")).save(
        str(tmp_path / "tokenizer.json")
    )
    settings = {"data": str(write_tokens(tmp_path / "web.bin", 0, 10)), "block_size": 3}
    assert (
        open_samples(settings | {"tokenizer": str(tmp_path / "tokenizer.json")}).text(0)
        == "crow heron swift rook"
    )
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UsageError, match=r"--tokenizer .*broken.json cannot be read"):
        open_samples(settings | {"tokenizer": str(tmp_path / "broken.json")}).text(0)


def test_data_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(
        UsageError, match=r"no domain has 17 tokens to train on \(the longest has 9\)"
    ):
        open_samples({"data": str(tmp_path / "short.txt"), "block_size": 16})


def test_the_fingerprint_is_of_the_data(tmp_path: Path) -> None:
    folder = write_text(tmp_path / "text")
    one = open_samples({"data": str(folder), "block_size": 16})
    assert one.fingerprint == open_samples({"data": str(folder), "block_size": 8}).fingerprint
    file = folder / "birds" / "0.txt"
    file.write_text("B" + file.read_text()[1:])
    assert one.fingerprint != open_samples({"data": str(folder), "block_size": 16}).fingerprint


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    return open_samples({"data": str(write_text(tmp_path / "text")), "block_size": 16})


def test_ids_to_keep(samples: Samples, tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text(f"{samples.stamp}\n5\n7\n\n9\n")
    found = read_weights(tmp_path / "keep.txt", samples)
    assert np.flatnonzero(found).tolist() == [5, 7, 9]
    order = Order(found, seed=0)
    assert order.epoch_length == 3
    assert sorted(order.take(0, 3)) == sorted(order.take(3, 3)) == [5, 7, 9]


def test_weights_are_drawn_with_replacement_and_zero_is_dropped(
    samples: Samples, tmp_path: Path
) -> None:
    (tmp_path / "weights.csv").write_text(f"{samples.stamp}\nsample_id,weight\n0,50\n1,0\n2,2.5\n")
    found = read_weights(tmp_path / "weights.csv", samples)
    assert found[:4].tolist() == [50, 0, 2.5, 1]
    order = Order(found, seed=0)
    drawn = order.take(0, 20 * order.epoch_length)
    assert 1 not in drawn
    share = drawn.count(0) / len(drawn)
    assert share == pytest.approx(50 / found.sum(), rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "five\n",
            r"keep, line 1: expected a sample id \(a CSV starts with the line sample_id,weight\), got 'five'",
        ),
        ("sample_id,weight\n3\n", "line 2: expected a sample id and a weight, got '3'"),
        ("sample_id,weight\n3,-1\n", "line 2: a weight is 0 or more, got -1"),
        ("sample_id,weight\n3,nan\n", "line 2: a weight is 0 or more, got nan"),
        ("99999\n", "there is no sample 99999; this data has samples 0 to"),
        ("\n", "leaves no sample to train on"),
        (
            "# gradsight data=0123 block_size=16 samples=9\n1\n",
            "numbers the samples of other data or another block size",
        ),
    ],
)
def test_wrong_weights(text: str, message: str, samples: Samples, tmp_path: Path) -> None:
    (tmp_path / "keep").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_weights(tmp_path / "keep", samples)


def test_weights_that_are_not_there(samples: Samples, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data_weights .* cannot be read"):
        read_weights(tmp_path / "none", samples)


def test_an_epoch_has_every_sample_once_and_epochs_differ() -> None:
    order, again = Order(np.ones(50), seed=3), Order(np.ones(50), seed=3)
    first, second = order.take(0, 50), order.take(50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert again.take(45, 10) == first[45:] + second[:5], "a place in the stream decides alone"
    assert Order(np.ones(50), seed=4).take(0, 50) != first
