"""Numbered samples: each split cut into blocks; a training sample's id is its number. No torch."""

import bisect
import csv
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.errors import MissingPackage, UsageError
from gradsight.train.data import SPLITS, Corpus, open_corpus
from gradsight.train.models import architecture

_LOOKED_AT = 64
"""Pages of a domain that its fingerprint looks at; all of it where there are no more."""
_PAGE = 1 << 16


def open_samples(settings: Mapping[str, Any]) -> "Samples":
    """The training samples of a run, from the settings in its config.json."""
    train = settings.get("train", settings)
    block_size = (
        train.get("block_size") or architecture(train.get("architecture", "char")).block_size
    )
    return Samples(open_corpus(train.get("data")), block_size, tokenizer=train.get("tokenizer"))


def numbering_stamp(fingerprint: str, block_size: int, count: int) -> str:
    """What numbers of samples are numbers of, in one line."""
    return f"# gradsight data={fingerprint} block_size={block_size} samples={count}"


class Samples:
    """One split of a corpus as numbered blocks that do not overlap.

    A block has block_size + 1 tokens: the inputs, and one more as the last target.
    """

    def __init__(
        self, corpus: Corpus, block_size: int, split: str = "train", tokenizer: str | None = None
    ) -> None:
        self.corpus = corpus
        self.block_size = block_size
        self.split = split
        self._tokenizer = tokenizer
        self._domains = list(corpus.parts[split])
        self._tokens = [corpus.parts[split][name] for name in self._domains]
        counts = [len(tokens) // (block_size + 1) for tokens in self._tokens]
        self._starts: list[int] = [0, *np.cumsum(counts).tolist()]
        if split == "train" and not len(self):
            longest = max((len(tokens) for tokens in self._tokens), default=0)
            raise UsageError(
                f"the data is too short: no domain has {block_size + 1} tokens to train on "
                f"(the longest has {longest}). Give more data, or a smaller --block_size than "
                f"{block_size}"
            )

    def __len__(self) -> int:
        return self._starts[-1]

    def of(self, split: str) -> "Samples":
        """The samples of another split of the same data."""
        return Samples(self.corpus, self.block_size, split)

    def tokens(self, sample_id: int) -> npt.NDArray[np.int64]:
        """The block_size + 1 tokens of a sample."""
        part = self._part(sample_id)
        length = self.block_size + 1
        start = (sample_id - self._starts[part]) * length
        return self._tokens[part][start : start + length].astype(np.int64)

    def domain(self, sample_id: int) -> str:
        """The domain that a sample comes from."""
        return self._domains[self._part(sample_id)]

    def text(self, sample_id: int) -> str:
        """A sample to read: text where tokens are bytes or a tokenizer is known, else numbers."""
        tokens = self.tokens(sample_id)
        if self._tokens[self._part(sample_id)].dtype == np.uint8:
            return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return self._decode(tokens.tolist())

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        try:
            import tokenizers
        except ImportError as error:
            raise MissingPackage("tokenizers", "hf", "--tokenizer") from error
        try:
            decoder: Any = tokenizers.Tokenizer.from_file(str(self._tokenizer))
        except Exception as error:  # the package raises Exception itself
            raise UsageError(f"--tokenizer {self._tokenizer} cannot be read: {error}") from error
        return lambda tokens: str(decoder.decode(tokens, skip_special_tokens=False))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all splits: names, lengths, and up to 64 pages of each domain."""
        digest = hashlib.blake2b(digest_size=8)
        for split in SPLITS:
            for domain, tokens in self.corpus.parts[split].items():
                digest.update(f"{split}/{domain}/{tokens.dtype}/{len(tokens)}\n".encode())
                pages = -(-len(tokens) // _PAGE)
                if not pages:
                    continue
                # Not all: the tokens of a large corpus stay on the disk, and would be read.
                for page in sorted({number * pages // _LOOKED_AT for number in range(_LOOKED_AT)}):
                    part = tokens[page * _PAGE : (page + 1) * _PAGE]
                    digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    @property
    def stamp(self) -> str:
        """The first line of a file of ids or weights: says what they number."""
        return numbering_stamp(self.fingerprint, self.block_size, len(self))

    def _part(self, sample_id: int) -> int:
        if not 0 <= sample_id < len(self):
            raise UsageError(
                f"there is no sample {sample_id}: the {self.split} split has samples 0 to "
                f"{len(self) - 1}"
            )
        return bisect.bisect_right(self._starts, sample_id) - 1


def read_weights(file: str | Path, samples: Samples) -> npt.NDArray[np.float64]:
    """The weight of every sample, from a list of ids to keep or from a CSV of sample_id,weight.

    A list leaves out the ids that are not in it; to a CSV they weigh 1.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--data_weights {file} cannot be read: {error}") from error
    _refuse_other_data(file, lines, samples)
    rows = [
        (number, line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    weights = np.zeros(len(samples))
    is_csv = bool(rows) and rows[0][1].replace(" ", "") == "sample_id,weight"
    if is_csv:
        weights = np.ones(len(samples))
        rows = rows[1:]
    for number, line in rows:
        where = f"--data_weights {file}, line {number}"
        sample_id, weight = _row(line, is_csv, where, len(samples))
        weights[sample_id] = weight
    if not weights.any():
        raise UsageError(f"--data_weights {file} leaves no sample to train on")
    return weights


def _refuse_other_data(file: str | Path, lines: Sequence[str], samples: Samples) -> None:
    stamp = next((line.strip() for line in lines if line.startswith("# gradsight ")), None)
    if stamp is not None and stamp.split() != samples.stamp.split():
        theirs = stamp.removeprefix("# gradsight ")
        ours = samples.stamp.removeprefix("# gradsight ")
        raise UsageError(
            f"--data_weights {file} numbers the samples of other data or another block size: "
            f"it says {theirs!r}, this run has {ours!r}"
        )


def _row(line: str, is_csv: bool, where: str, count: int) -> tuple[int, float]:
    fields = next(csv.reader([line]))
    wanted = "a sample id (a CSV starts with the line sample_id,weight)"
    if is_csv:
        wanted = "a sample id and a weight"
    weight = 1.0
    try:
        sample_id = int(fields[0])
        if is_csv:
            weight = float(fields[1])
    except (ValueError, IndexError):
        raise UsageError(f"{where}: expected {wanted}, got {line!r}") from None
    if not 0 <= sample_id < count:
        raise UsageError(
            f"{where}: there is no sample {sample_id}; this data has samples 0 to {count - 1}"
        )
    if not (np.isfinite(weight) and weight >= 0):
        raise UsageError(f"{where}: a weight is 0 or more, got {weight}")
    return sample_id, weight


class Order:
    """Which samples each step trains on: a stream of epochs, each a shuffle of those kept.

    With weights other than 0 and 1 an epoch draws as many samples, with replacement. What stands at
    a place of the stream follows from the place alone, so a resumed run continues with the same
    samples.
    """

    def __init__(self, weights: npt.NDArray[np.float64], seed: int) -> None:
        self._kept = np.flatnonzero(weights)
        chosen = weights[self._kept]
        self._shares: npt.NDArray[np.float64] | None = None
        """How likely each sample is drawn; None: each comes once in an epoch."""
        if not (chosen == 1.0).all():
            self._shares = chosen / chosen.sum()
        self._seed = seed
        self._known: dict[int, npt.NDArray[np.int64]] = {}

    @property
    def epoch_length(self) -> int:
        """Samples in an epoch."""
        return len(self._kept)

    def take(self, start: int, count: int) -> list[int]:
        """`count` sample ids from a place in the stream on."""
        places = (divmod(place, self.epoch_length) for place in range(start, start + count))
        return [int(self._epoch(epoch)[index]) for epoch, index in places]

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._known:
            # A step may lie across two epochs, so the one before is kept too.
            before = self._known.get(epoch - 1)
            self._known = {} if before is None else {epoch - 1: before}
            self._known[epoch] = self._drawn(epoch)
        return self._known[epoch]

    def _drawn(self, epoch: int) -> npt.NDArray[np.int64]:
        generator = np.random.default_rng([self._seed, epoch])
        if self._shares is None:
            return generator.permutation(self._kept)
        return generator.choice(self._kept, len(self._kept), p=self._shares)
