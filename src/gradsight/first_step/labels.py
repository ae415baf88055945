# mypy: allow-untyped-calls
"""Read the labels of a pass: labels shifted twice, padding that counts, unlabelled samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.samples import tensors_in
from gradsight.core.shards import are_spread
from gradsight.first_step.documents import is_positions, named_arguments
from gradsight.first_step.operations import SeenTargets
from gradsight.first_step.recorder import SeenCall, SeenPass
from gradsight.first_step.targets import placed_targets
from gradsight.values.first_step import DoubleShift, PaddingLabels, SampleLabels

LABEL_CODES = ("GS612", "GS613", "GS614")
"""What is read from the labels of the training pass itself."""
_FEWEST = 8
"""Fewest compared labels from which Gradsight draws a conclusion."""
_FEWEST_CLASSES = 4
_FEWEST_PADDING = 4
_SHORTEST = 4
"""Places of a sequence."""
_MOST_MISSING = 6
"""Targets are shorter than the input by fewer places than this."""
_SHARE = 0.9
_USUAL_SHARE = 0.5
"""If a larger share of targets matches at another shift, no double shift is reported."""
_AT_THE_END = 3
"""Padding at the end of a sequence of labels; one or two such tokens may mark the end."""


@dataclass(frozen=True, slots=True)
class LabelLook:
    """Facts about the labels of one or more passes; None if the labels do not show them."""

    shifted_twice: DoubleShift | None = None
    is_usual: bool = False
    """Whether a loss has another target: the next input, the input itself, or one further ahead."""
    padding: PaddingLabels | None = None
    samples: SampleLabels | None = None
    left_out: tuple[tuple[str, str], ...] = ()

    def joined(self, other: "LabelLook") -> "LabelLook":
        """Return what both tell together."""
        is_usual = self.is_usual or other.is_usual
        shifted = None if is_usual else self.shifted_twice or other.shifted_twice
        return LabelLook(
            shifted,
            is_usual,
            _joined_padding(self.padding, other.padding),
            _joined_samples(self.samples, other.samples),
            tuple(dict.fromkeys((*self.left_out, *other.left_out))),
        )

    def findings(self) -> dict[str, Any]:
        """Return the fields of `FirstStep` that these are."""
        return {
            "shifted_twice": self.shifted_twice,
            "padding": self.padding,
            "samples": self.samples,
        }


def look_at_labels(seen: SeenPass) -> LabelLook | None:
    """Compare the labels of a pass with the inputs and masks of its calls.

    Return None for a pass whose losses take no classes.
    """
    classes = [each for each in seen.targets if each.is_classes]
    if not classes:
        return None
    held = [tensor for each in classes for tensor in (each.values, each.counts)]
    if are_spread([*seen.looked_up, *held]):
        spread = "the labels are spread over ranks, as in tensor parallel training"
        return LabelLook(left_out=tuple((code, spread) for code in LABEL_CODES))
    sources = _distinct(seen.looked_up)
    look = _shift(seen, sources, classes)
    padding, reason = _padding(seen, sources, classes)
    left_out = look.left_out if reason is None else (*look.left_out, ("GS613", reason))
    samples = _samples(seen, sources, classes)
    return replace(look, padding=padding, samples=samples, left_out=left_out)


def _distinct(looked_up: Sequence[Tensor]) -> list[Tensor]:
    """The sequences that were looked up, each once."""
    found: list[Tensor] = []
    for each in looked_up:
        is_sequence = each.dim() == 2 and each.shape[1] >= _SHORTEST
        if is_sequence and not any(_is_same(each, other) for other in found):
            found.append(each)
    return found


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.device == other.device and torch.equal(one, other)


# Labels that are shifted twice.


@dataclass(frozen=True, eq=False, slots=True)
class _Laid:
    """Targets beside the input that they may come from."""

    given: Tensor
    """[rows, time]"""
    values: Tensor
    counts: Tensor
    missing: int = 0
    """How many places the targets are shorter."""
    time_first: bool = False
    """Whether the input was [time, rows]."""

    def share(self, ahead: int) -> float | None:
        """Return the share of targets that equal the input `ahead` positions later.

        Only positions whose input differs from its neighbours are compared, because every shift
        fits a sequence that repeats itself. Return None if there are too few such positions.
        """
        length = min(self.values.shape[1], self.given.shape[1] - ahead)
        if length < 1:
            return None
        wanted = self.given[:, ahead : ahead + length]
        counts = self.counts[:, :length].clone()
        for other in range(-1, 5):
            if other != ahead:
                begin, end = max(0, -other), min(length, self.given.shape[1] - other)
                if begin < end:
                    around = self.given[:, begin + other : end + other]
                    counts[:, begin:end] &= wanted[:, begin:end] != around
        compared = int(counts.sum())
        if compared < _FEWEST or len(wanted[counts].unique()) < _FEWEST_CLASSES:
            return None
        return float(((self.values[:, :length] == wanted) & counts).sum()) / compared


def _laid(sources: Sequence[Tensor], targets: SeenTargets) -> Iterator[_Laid]:
    for source in sources:
        for time_first in (False, True):
            given = source.to(targets.values.device)
            given = given.transpose(0, 1) if time_first else given
            for missing in range(min(_MOST_MISSING, given.shape[1])):
                length = given.shape[1] - missing
                placed = placed_targets(given, targets, length, time_first)
                if placed is not None and length >= _SHORTEST:
                    yield _Laid(given, *placed, missing, time_first)
                    break


def _shift(seen: SeenPass, sources: Sequence[Tensor], classes: Sequence[SeenTargets]) -> LabelLook:
    found: DoubleShift | None = None
    for targets in classes:
        for laid in _laid(sources, targets):
            # Heads for later tokens are trained together, or beside a usual one.
            if any((laid.share(ahead) or 0) > _USUAL_SHARE for ahead in (0, 1, 3)):
                return LabelLook(is_usual=True)
            share = laid.share(2)
            if share is None or share <= _SHARE or not _is_aligned(laid, targets):
                continue
            found = DoubleShift(share, _is_given_ahead(seen, laid.given), targets.place)
    return LabelLook(shifted_twice=found)


def _is_aligned(laid: _Laid, targets: SeenTargets) -> bool:
    """Return whether the first target certainly belongs to the first position.

    If there are fewer scores than inputs, the script may have dropped the first scores. In that
    case, the targets are shifted correctly.
    """
    cuts = [cut for cut in targets.cuts if cut.size - (cut.end - cut.start)]
    if not laid.missing:
        return not any(cut.start for cut in cuts)
    return [(cut.size, cut.start, cut.end) for cut in cuts] == [
        (laid.given.shape[1], 0, laid.given.shape[1] - laid.missing)
    ]


def _is_given_ahead(seen: SeenPass, given: Tensor) -> bool:
    """Whether a call got labels that were the next inputs already."""
    for call in seen.calls:
        for name, value in named_arguments(call.module, call.made).items():
            if "label" not in name and "target" not in name:
                continue
            if isinstance(value, Tensor) and value.shape == given.shape:
                value = value.to(given.device)
                laid = _Laid(given, value, value >= 0)
                if (laid.share(1) or 0) > _SHARE:
                    return True
    return False


# Padding that counts.


@dataclass(frozen=True, eq=False, slots=True)
class _Hidden:
    """Places of padding in an input."""

    places: Tensor
    """[rows, time]"""
    token: int
    """What is there."""
    given: Tensor
    """The input itself; [rows, time] as well."""
    time_first: bool = False
    """Whether the input is [time, rows]."""


def _padding(
    seen: SeenPass, sources: Sequence[Tensor], classes: Sequence[SeenTargets]
) -> tuple[PaddingLabels | None, str | None]:
    """Labels at places of padding, and why they could not be judged."""
    named = [named_arguments(call.module, call.made) for call in seen.calls]
    masked = [each for each in named if _masks(each, sources)]
    if len(masked) > 1:
        return None, (
            "the model was called several times with a mask before one backward pass, so Gradsight "
            "cannot tell which mask belongs to which labels"
        )
    hidden = [place for each in masked for place in _hidden_by_masks(each, sources)]
    if len(named) == 1 and _has_decoder(seen.calls[0].module, named[0]):
        token = hidden[0].token if hidden else None
        return _padding_of_decoder(seen.calls[0], named[0], classes, token), None
    if not masked:
        # Without a mask a layer may say which token pads.
        hidden = [_Hidden(_ends(each, token), token, each) for each, token in seen.padded]
    found = [each for each in (_counted_padding(place, classes) for place in hidden) if each]
    # Prefer the input that belongs to the labels: an encoder's input may have the same length.
    own = (each for each in found if each[0] is not None and each[0].in_targets)
    return next(own, found[0] if found else (None, None))


def _masks(named: Mapping[str, Any], sources: Sequence[Tensor]) -> dict[str, Tensor]:
    """The masks of tokens that a call was given, by name."""
    shapes = {tuple(source.shape) for source in sources}
    found = {}
    for name, mask in named.items():
        if not isinstance(mask, Tensor) or "mask" not in name or mask.dim() != 2:
            continue
        if mask.layout is not torch.strided or not shapes & {tuple(mask.shape), mask.shape[::-1]}:
            continue
        # A mask that is added hides by large negative numbers.
        if not bool((mask < 0).any()):
            found[name] = mask.detach()
    return found


def _hidden_by_masks(named: Mapping[str, Any], sources: Sequence[Tensor]) -> Iterator[_Hidden]:
    """The padding that masks hide: the same token is at all of their places."""
    for name, mask in _masks(named, sources).items():
        # Masks of torch's own layers are true where they hide.
        for places in [mask == 0] if name == "attention_mask" else [mask == 0, mask != 0]:
            if not bool(places.any()) or bool(places.all()):
                continue
            for source in sources:
                for time_first in (False, True):
                    given = source.T if time_first else source
                    if given.shape != places.shape or is_positions(source, named):
                        continue
                    tokens = given[places.to(given.device)]
                    others = given[~places.to(given.device)]
                    if bool((tokens == tokens[0]).all()) and bool((others != others[0]).any()):
                        yield _Hidden(places, int(tokens[0]), given, time_first)


def _ends(source: Tensor, token: int) -> Tensor:
    """[rows, time]: the tokens of this kind with which rows begin or end."""
    if source.dim() != 2:
        return torch.zeros(0, 0, dtype=torch.bool)
    is_token = (source == token).long()
    return (is_token.cumprod(1) + is_token.flip(1).cumprod(1).flip(1)) > 0


def _is_at_ends(hidden: Tensor) -> bool:
    """Whether only the beginning or the end of rows is hidden."""
    changes = (hidden[:, 1:] != hidden[:, :-1]).sum(1)
    is_whole = ~hidden.any(1)
    return bool((is_whole | (changes <= 1)).all())


def _inner(hidden: Tensor) -> Tensor:
    """Return the hidden positions whose two neighbours are hidden too.

    A label may belong to the input at its position or to the next one. At these positions, both
    are padding. The first padding token after a text may be the end token, so it is left out.
    """
    edge = torch.ones_like(hidden[:, :1])
    before = torch.cat([edge, hidden[:, :-1]], 1)
    after = torch.cat([hidden[:, 1:], edge], 1)
    return hidden & before & after


def _counted_padding(
    hidden: _Hidden, classes: Sequence[SeenTargets]
) -> tuple[PaddingLabels | None, str | None] | None:
    """How many labels at places of padding count; None where that is not known."""
    if not hidden.places.numel() or not _is_at_ends(hidden.places):
        return None
    inner = _inner(hidden.places)
    rows, length = inner.shape
    for targets in classes:
        size = targets.values.numel()
        if size % rows or not max(_SHORTEST, length - 2) <= size // rows <= length:
            continue
        values, counts = targets.values, targets.counts
        if hidden.time_first:
            values, counts = values.reshape(-1, rows).T, counts.reshape(-1, rows).T
        else:
            values, counts = values.reshape(rows, -1), counts.reshape(rows, -1)
        padding = inner[:, : size // rows].to(values.device)
        chosen = values[padding & counts]
        places = int(padding.sum())
        # Labels that differ there are meant to be predicted: the mask hides words, not padding.
        if places < _FEWEST_PADDING or (len(chosen) and bool((chosen != chosen[0]).any())):
            continue
        if len(chosen) and not targets.is_reduced:
            return None, 'the loss has reduction="none", so a mask may be applied to it later'
        found = PaddingLabels(places, len(chosen), int(counts.sum()), hidden.token)
        in_targets = _marks_targets(hidden, values, counts)
        return replace(found, place=targets.place, in_targets=in_targets), None
    return None


def _marks_targets(hidden: _Hidden, values: Tensor, counts: Tensor) -> bool:
    """Return whether the padding token of the inputs marks only padding in the labels too."""
    given = hidden.given.to(values.device)
    if bool(((given == hidden.token) & ~hidden.places.to(values.device)).any()):
        return False
    return (_Laid(given, values, counts).share(1) or 0) > _SHARE


def _has_decoder(module: nn.Module, named: Mapping[str, Any]) -> bool:
    """Whether labels belong to a decoder, and the attention mask to the encoder."""
    if any(name.startswith("decoder_") and value is not None for name, value in named.items()):
        return True
    return bool(getattr(_config(module), "is_encoder_decoder", False))


def _config(module: nn.Module) -> Any:
    """The configuration of a model of transformers, also inside others."""
    found = (getattr(each, "config", None) for each in module.modules())
    return next((each for each in found if hasattr(each, "is_encoder_decoder")), None)


def _padding_of_decoder(
    call: SeenCall, named: Mapping[str, Any], classes: Sequence[SeenTargets], token: int | None
) -> PaddingLabels | None:
    """Count padding at the end of decoder labels, for which the model gets no mask."""
    if token is None:
        token = getattr(_config(call.module), "pad_token_id", None)
    given = [each for each in tensors_in(*named.values()) if each.dim() >= 2]
    if not isinstance(token, int) or not given:
        return None
    count = given[0].shape[0]
    for targets in classes:
        values, size = targets.values, targets.values.numel()
        if not targets.is_reduced or count < 2 or size % count or size // count < _SHORTEST:
            continue
        is_padding = ((values == token) & targets.counts).reshape(count, -1)
        at_end = is_padding.flip(1).long().cumprod(1).sum(1)
        if int((at_end >= _AT_THE_END).sum()) < 2 or bool((at_end == size // count).any()):
            continue
        places = int((at_end - 1).clamp(min=0).sum())
        counted = int(targets.counts.sum())
        return PaddingLabels(places, places, counted, token, in_decoder=True, place=targets.place)
    return None


def _joined_padding(one: PaddingLabels | None, other: PaddingLabels | None) -> PaddingLabels | None:
    if one is None or other is None:
        return one or other
    return replace(
        one,
        places=one.places + other.places,
        counted=one.counted + other.counted,
        labels=one.labels + other.labels,
    )


# Samples without a label.


def _samples(
    seen: SeenPass, sources: Sequence[Tensor], classes: Sequence[SeenTargets]
) -> SampleLabels | None:
    """Return how labels are spread over samples, or None if their samples are unknown."""
    if len(classes) != len(seen.targets):
        return None  # another loss may be what a sample is there for
    has_label: Tensor | None = None
    labels = counted = 0
    for targets in classes:
        counts = _by_sample(seen, sources, targets)
        if counts is None or (has_label is not None and len(has_label) != len(counts)):
            return None
        labels += counts.numel()
        counted += int(counts.sum())
        now = counts.any(1)
        has_label = now if has_label is None else has_label | now.to(has_label.device)
    if has_label is None:
        return None
    return SampleLabels(len(has_label), int((~has_label).sum()), labels, counted)


def _by_sample(seen: SeenPass, sources: Sequence[Tensor], targets: SeenTargets) -> Tensor | None:
    """[rows, time]: which labels count."""
    is_of_transformers = any(_config(call.module) is not None for call in seen.calls)
    for source in sources:
        for laid in _laid([source], targets):
            is_known = is_of_transformers and not laid.time_first
            if is_known or any((laid.share(ahead) or 0) > _SHARE for ahead in range(3)):
                return laid.counts
    return None


def _joined_samples(one: SampleLabels | None, other: SampleLabels | None) -> SampleLabels | None:
    if one is None or other is None:
        return None
    return SampleLabels(
        one.samples + other.samples,
        one.empty + other.empty,
        one.labels + other.labels,
        one.counted + other.counted,
    )
