"""The samples of a Hugging Face Trainer's batches: their ids, and their scores."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core import rundir
from gradsight.core.group import world_size
from gradsight.core.passes import gradient_state, is_same
from gradsight.core.random_state import set_torch_states, torch_states
from gradsight.errors import GradsightError, UsageError
from gradsight.ghost.engine import GhostEngine
from gradsight.store.reader import open_run
from gradsight.store.sample_texts import write_sample_texts
from gradsight.store.scores import read_scores
from gradsight.values.findings import StopTraining

ID_COLUMNS = ("id", "sample_id", "idx", "uid")
"""Columns of a dataset that are taken for ids; the first that it has."""
_SHOWN = 50
"""Samples at either end of the scores whose texts are kept."""
_IDS = "gradsight_ids"
"""Under which a batch carries them, from its collator to the training step."""
_PACKS = (
    "no samples are scored: a row of the batch is a pack of several samples (packing, or "
    "padding_free), and has one gradient. Set packing=False and padding_free=False to score samples"
)


class IdCollator:
    """A collator that takes the ids off the rows, and lets the batch carry them."""

    def __init__(self, collator: Any, columns: Sequence[str]) -> None:
        self._collator = collator
        self._columns = columns

    def __call__(self, rows: Sequence[Any]) -> Any:
        if not all(isinstance(row, Mapping) for row in rows):
            return self._collator(rows)
        column = next((name for name in self._columns if name in rows[0]), None)
        hidden = set(self._columns)
        plain = [{key: row[key] for key in row if key not in hidden} for row in rows]
        batch = self._collator(plain)
        if column is not None and isinstance(batch, MutableMapping):
            batch[_IDS] = [_as_id(row[column]) for row in rows]
        return batch


def keep_ids(trainer: Any) -> None:
    """Have batches of training carry the ids that the Trainer would drop as an unused column."""
    original = trainer.get_train_dataloader

    @functools.wraps(original)
    def get_train_dataloader() -> Any:
        columns = _dropped_columns(trainer)
        # Whoever asks for batches outside of training hands them to the model as they are.
        if not columns or not trainer.is_in_train:
            return original()
        kept = trainer._signature_columns
        collator = trainer.data_collator
        trainer._signature_columns = [*kept, *columns]
        trainer.data_collator = IdCollator(collator, columns)
        try:
            return original()
        finally:
            trainer._signature_columns = kept
            trainer.data_collator = collator

    trainer.get_train_dataloader = get_train_dataloader


def taken_ids(inputs: Any) -> list[int | str] | None:
    """Take the ids out of a batch, so that the model gets what it gets without us.

    None where rows are not samples: pairs of a preference, or all samples in one row.
    """
    if not isinstance(inputs, MutableMapping):
        return None
    ids: list[int | str] | None = inputs.pop(_IDS, None)
    rows = {len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()}
    return ids if ids is not None and len(ids) in rows else None


def _dropped_columns(trainer: Any) -> list[str]:
    """Columns of ids that the Trainer drops; what it hands to the model is the user's business."""
    dataset = trainer.train_dataset
    is_shared = isinstance(dataset, torch.utils.data.IterableDataset) and world_size() > 1
    if is_shared or not trainer.args.remove_unused_columns:
        return []
    if not hasattr(trainer, "_set_signature_columns_if_needed"):
        return []
    trainer._set_signature_columns_if_needed()
    known = getattr(dataset, "column_names", None) or ID_COLUMNS
    used = set(trainer._signature_columns or ())
    return [name for name in ID_COLUMNS if name in known and name not in used]


def _as_id(value: Any) -> int | str:
    if isinstance(value, Tensor):
        return int(value)
    return value if isinstance(value, str) else int(value)


# Texts.


def keep_texts(trainer: Any, run_dir: Path) -> None:
    """Keep the texts of the samples that a report names, as the Trainer's tokenizer reads them."""
    tokenizer = trainer.processing_class
    column = _id_column(trainer.train_dataset)
    if column is None or not hasattr(tokenizer, "decode"):
        return
    wanted = _named_samples(run_dir)
    texts = {}
    for place, sample_id in enumerate(_values(trainer.train_dataset, column)):
        if str(sample_id) in wanted:
            tokens = trainer.train_dataset[place].get("input_ids")
            if tokens is not None:
                texts[str(sample_id)] = tokenizer.decode(tokens, skip_special_tokens=True)
    if texts:
        write_sample_texts(run_dir, texts)


def _id_column(dataset: Any) -> str | None:
    """The column of ids of a dataset whose rows can be looked up."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return None
    names = getattr(dataset, "column_names", None)
    if names is None:
        # A list of rows. What else is indexed may compute its rows, and draw at random for it.
        names = dataset[0] if isinstance(dataset, list) else ()
    return next((name for name in ID_COLUMNS if name in names), None)


def _values(dataset: Any, column: str) -> list[Any]:
    if isinstance(dataset, list):
        return [row.get(column) for row in dataset]
    return list(dataset[column])


def _named_samples(run_dir: Path) -> set[str]:
    """Those that help and hurt most, and the guilty ones of every incident."""
    named = set()
    for finding in open_run(run_dir).findings():
        if finding.diagnosis is not None:
            named |= {str(sample.sample_id) for sample in finding.diagnosis.samples}
    if (run_dir / rundir.SCORES).exists():
        table = read_scores(run_dir).group_by("sample_id").aggregate([("score", "mean")])
        ranked = table.sort_by("score_mean")["sample_id"].to_pylist()
        named |= {str(each) for each in (*ranked[:_SHOWN], *ranked[-_SHOWN:])}
    return named


# Scores.


def open_engine(trainer: Any, asked: object, **defaults: Any) -> GhostEngine | None:
    """A ghost engine for what the Trainer trains; None where no sample has a row of its own.

    `asked` is True or arguments of GhostEngine. The model's own loss is taken, and the first batch
    of the evaluation data, where none is given.
    """
    if holds_packs(trainer):
        return None
    arguments = {} if asked is True else dict(asked)  # type: ignore[call-overload]
    loss_fn = arguments.pop("loss_fn", loss_of_the_model)
    with _untouched_random_state():
        if "targets" in arguments:
            batches = arguments["targets"].items()
            arguments["targets"] = {name: _batch(trainer, batch) for name, batch in batches}
        else:
            arguments["val_data"] = _batch(trainer, arguments.get("val_data"))
    model = arguments.pop("model", trainer.model_wrapped)
    return GhostEngine(model, loss_fn, **{**defaults, **arguments})


def refuse_wrong_scores(asked: object) -> None:
    """An error for what `ghost=` cannot be."""
    if asked in (None, False, True):
        return
    if not isinstance(asked, Mapping):
        raise UsageError(
            "ghost must be True, or a mapping of GhostEngine's arguments such as "
            f'{{"val_data": batch}}, got {type(asked).__name__}'
        )


def loss_of_the_model(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """What a model of transformers says of a batch with labels."""
    outputs = model(**batch)
    loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    return loss


def holds_packs(trainer: Any) -> bool:
    """Whether rows of its batches hold several samples, by what the trainer says of itself."""
    flattens = type(trainer.data_collator).__name__ == "DataCollatorWithFlattening"
    packs = getattr(trainer.args, "packing", False) or getattr(trainer, "padding_free", False)
    return bool(flattens or packs)


def is_packed(inputs: Any) -> bool:
    """Whether a row of this batch begins anew in the middle, as `position_ids` tell."""
    positions = inputs.get("position_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return False
    # Padding counts on, or repeats one position: neither goes back.
    return bool((positions[:, 1:] < positions[:, :-1]).any())


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """A Trainer's step on one micro-batch that was to be scored."""

    result: Any
    """What the Trainer's own step returned."""
    refusal: GradsightError | None = None
    """Why its samples were not scored."""


def scored_step(
    engine: GhostEngine,
    ids: Sequence[int | str] | None,
    step: Callable[[], Any],
    inputs: Any,
    model: nn.Module,
    *,
    is_first: bool,
) -> ScoredStep:
    """Run a Trainer's step and score its samples.

    An engine that refuses the step stops it. The step is then run again without scores, unless it
    has changed gradients already, or other ranks would have to run it again too.
    """
    given = dict(inputs) if isinstance(inputs, MutableMapping) else None
    # Almost all refusals come at the first micro-batch. Reading the states waits for a GPU.
    states = torch_states() if is_first else None
    parameters = list(model.parameters())
    gradients = [gradient_state(each.grad) for each in parameters]
    returned = []
    try:
        with engine.observe(sample_ids=ids):
            returned.append(step())
    except StopTraining:
        raise
    except GradsightError as error:
        refusal = error
    else:
        return ScoredStep(returned[0])
    if returned:
        return ScoredStep(returned[0], refusal)
    is_untouched = all(
        is_same(parameter.grad, before)
        for parameter, before in zip(parameters, gradients, strict=True)
    )
    if world_size() > 1 or not is_untouched:
        raise refusal
    if given is not None:
        # Some trainers, such as TRL's, add entries to the batch.
        inputs.clear()
        inputs.update(given)
    if states is not None:
        set_torch_states(states)
    return ScoredStep(step(), refusal)


def say_packs(problems: Any) -> None:
    """Refuse scores in words: training and watching go on."""
    problems.report("scores", _PACKS)


def _batch(trainer: Any, given: Any) -> Any:
    """A batch of validation where the model is: as given, of rows, or of the evaluation data."""
    if given is None:
        if trainer.eval_dataset is None:
            raise UsageError(
                'ghost needs validation data: give the Trainer an eval_dataset, or {"val_data": '
                "batch}"
            )
        given = next(iter(trainer.get_eval_dataloader()))
    elif not isinstance(given, Mapping):
        given = trainer.data_collator(list(given))
    return dict(trainer._prepare_inputs(dict(given)))


@contextlib.contextmanager
def _untouched_random_state() -> Iterator[None]:
    """A loader that is asked for one batch draws a seed; training is to draw what it would."""
    states = torch_states()
    try:
        yield
    finally:
        set_torch_states(states)
