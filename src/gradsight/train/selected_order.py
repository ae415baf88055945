"""The order of samples under --select: drawn by their own scores so far, or by their domains'."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from gradsight.errors import UsageError
from gradsight.ghost.selection.domain_mixer import DomainMixer
from gradsight.ghost.selection.influence_sampler import InfluenceSampler
from gradsight.train.samples import Samples

_KEPT = ("sums", "counts")
"""What a sampler has learnt, of all that is in its state; the rest follows from the settings and
from the place in the order."""
PREFIX = "select/"


class SelectedOrder:
    """Which samples each step trains on: drawn with replacement, those that helped more often.

    What stands at a place of the order follows from the place and from the scores so far, so that a
    resumed run goes on with the same samples, and any number of processes train on them.
    """

    def __init__(self, select: str, samples: Samples, seed: int) -> None:
        """`select`: "samples" or "domains"."""
        self._sampler: InfluenceSampler | DomainMixer
        if select == "samples":
            self._sampler = InfluenceSampler(samples, seed=seed)
        else:
            self._sampler = DomainMixer(samples.domain_names(), seed=seed)

    @property
    def epoch_length(self) -> int:
        """As many samples as there are make an epoch, though not each comes in it."""
        return self._sampler.rows

    def take(self, start: int, count: int) -> list[int]:
        """`count` sample ids from a place in the order on, by the scores so far."""
        return self._sampler.rows_at(start, count)

    def learn(self, sample_ids: Sequence[int], scores: Sequence[float]) -> None:
        """Take in what a step has shown of this process's samples; all processes call it."""
        self._sampler.update(sample_ids, scores)

    # For checkpoints.

    def tensors(self) -> dict[str, Tensor]:
        """What was learnt, the same on all processes."""
        state = self._sampler.state_dict()
        return {f"{PREFIX}{name}": state[name] for name in _KEPT}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Know what was known when a checkpoint was written; UsageError where that cannot be.

        A run that did not select until then has learnt nothing.
        """
        learnt = {name: tensors.get(f"{PREFIX}{name}") for name in _KEPT}
        if all(value is None for value in learnt.values()):
            return
        if any(value is None for value in learnt.values()):
            raise UsageError(f"of {PREFIX}* a part is missing")
        self._sampler.load_state_dict({**self._sampler.state_dict(), **learnt})
