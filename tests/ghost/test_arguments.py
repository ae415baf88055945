"""Arguments that cannot be meant: each an error that says what was expected and what came."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghost.small import loss_fn, pair, small
from gradsight import GhostEngine, GradsightError, read_scores

WANTED = r"loss_fn must be a function loss_fn\(model, batch\) that returns the scalar mean loss"
FAILED = r"loss_fn\(model, batch\) failed on target 'validation': "
VAL = pair(3, 2)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ([1, 2], r"model must be a torch\.nn\.Module, got a list of 2: \(1, 2\)"),
        (nn.Linear, r"model must be a torch\.nn\.Module, got the class Linear"),
        (nn.ReLU(), "the model has no trainable parameter"),
    ],
)
def test_models(model: object, text: str) -> None:
    with pytest.raises(GradsightError, match=text):
        GhostEngine(model, loss_fn, VAL)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (None, f"{WANTED} of the batch; got None"),
        (F.cross_entropy, f"{WANTED}.*got the function cross_entropy, which takes predictions"),
        (nn.CrossEntropyLoss(), f"{WANTED}.*got a CrossEntropyLoss, which takes predictions and"),
        (nn.CrossEntropyLoss, f"{WANTED}.*got the class CrossEntropyLoss"),
        (lambda model: 0, rf"{WANTED}.*<lambda> with the arguments \(model\)"),
        (lambda model, x, y: 0, rf"{WANTED}.*<lambda> with the arguments \(model, x, y\)"),
    ],
)
def test_loss_functions(function: object, text: str) -> None:
    with pytest.raises(GradsightError, match=text):
        GhostEngine(small(), function, VAL)


def begin(**options: object) -> None:
    """The first block, in which the target's loss is computed."""
    with GhostEngine(small(), **options).observe():
        pass


@pytest.mark.parametrize(
    ("function", "batch", "text"),
    [
        (
            lambda out, y: F.cross_entropy(out, y),
            VAL,
            rf"{FAILED}TypeError: .*argument 'input' .* must be Tensor, not SmallGPT\. It was "
            r"called with the model and a tuple of 2: .*expected a function loss_fn\(model, batch",
        ),
        (
            loss_fn,
            (torch.randn(2, 3), torch.randn(2)),
            f"{FAILED}RuntimeError: Expected tensor for argument #1 'indices' .*"
            r"a tensor of shape \(2, 3\) \(torch\.float32\)",
        ),
        (loss_fn, [VAL, VAL], f"{FAILED}TypeError: .*called with the model and a list of 2"),
        (loss_fn, {"x": VAL[0]}, f"{FAILED}KeyError: 0.*a dict with the keys 'x'"),
        (loss_fn, (VAL[0], VAL[1] + 99), rf"{FAILED}IndexError: Target .* out of bounds\. It was"),
        (lambda m, b: 1.0, VAL, "must return a scalar mean loss, on target 'validation' it ret"),
        (torch.no_grad()(loss_fn), VAL, "does not depend on the model's parameters, or gradients"),
    ],
)
def test_targets_that_the_loss_function_cannot_take(
    function: object, batch: object, text: str
) -> None:
    with pytest.raises(GradsightError, match=text):
        begin(loss_fn=function, val_data=batch)


def test_a_full_device_is_no_error_of_ours() -> None:
    def full(model: nn.Module, batch: object) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        begin(loss_fn=full, val_data=VAL)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.utils.data.DataLoader([1]), r"must be one batch, .*got a DataLoader\. From a data "),
        (iter([VAL]), r"must be one batch, .*got a list_iterator"),
    ],
)
def test_loaders_are_no_batches(batch: object, text: str) -> None:
    with pytest.raises(GradsightError, match=f"the validation data of target 'validation' {text}"):
        GhostEngine(small(), loss_fn, batch)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        ([VAL], r"targets must be a mapping from names to batches, .*got a list of 1"),
        (VAL, r"targets must be a mapping from names to batches, .*got a tuple of 2"),
        ({1: VAL}, "names of targets must be text, got 1"),
        ({"": VAL}, "names of targets must be text, got ''"),
        ({"a": None}, "the validation data of target 'a' is empty"),
    ],
)
def test_targets(targets: object, text: str) -> None:
    with pytest.raises(GradsightError, match=text):
        GhostEngine(small(), loss_fn, targets=targets)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": None}, "mode must be 'auto' or 'concat' or 'two_pass', got None"),
        ({"mode": ["concat"]}, r"mode must be 'auto' or 'concat' or 'two_pass', got \['concat'\]"),
        ({"refresh_every": 2.5}, r"refresh_every must be a whole number of 1 or more, got 2\.5"),
        ({"refresh_every": "3"}, "refresh_every must be a whole number of 1 or more, got '3'"),
        ({"refresh_every": True}, "refresh_every must be a whole number of 1 or more, got True"),
        ({"save_interval": 1.0}, r"save_interval must be a whole number of 1 or more, got 1\.0"),
        ({"start_step": -1}, "start_step must be a whole number of 0 or more, got -1"),
        ({"start_step": 10**30}, r"start_step must be below 2\*\*63, got 1000"),
        ({"batch_dim": "0"}, "batch_dim must be a whole number of 0 or more, got '0'"),
        ({"per_parameter": "yes"}, "per_parameter must be True or False, got 'yes'"),
        ({"exact_grad": 1}, "exact_grad must be True or False, got 1"),
        ({"self_check": None}, "self_check must be True or False, got None"),
        ({"precondition": ["adam"]}, r"precondition must be None or 'adam', got \['adam'\]"),
        ({"run_dir": 3}, "run_dir must be a path, such as 'runs/first', got 3"),
        ({"run_dir": ""}, "run_dir must be a path, such as .*, got an empty text"),
        ({"run_dir": __file__}, r"run_dir .*test_arguments\.py is a file; give a directory"),
        ({"run_dir": f"{__file__}/run"}, "run_dir .* cannot be made: Not a directory"),
    ],
)
def test_options(options: dict[str, object], text: str) -> None:
    with pytest.raises(GradsightError, match=text):
        GhostEngine(small(), loss_fn, VAL, **options)


def test_optimizers() -> None:
    model = small()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    single = "optimizer must be one torch optimizer, the one that trains the model, got"
    foreign = "this SGD holds none of the model's parameters: expected the optimizer that trains"
    for optimizer, text in {
        "adam": f"{single} 'adam'",
        torch.optim.SGD: f"{single} the class SGD",
        (sgd,): rf"{single} a tuple of 1: \(a SGD\)",
        torch.optim.lr_scheduler.StepLR(sgd, 1): f"{single} a StepLR",
        torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1): foreign,
    }.items():
        with pytest.raises(GradsightError, match=text):
            GhostEngine(model, loss_fn, VAL, optimizer=optimizer)
    part = torch.optim.SGD(model.head.parameters(), 0.1)  # some of the model is enough
    GhostEngine(model, loss_fn, VAL, optimizer=part).close()


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.Adagrad]
)
def test_optimizers_without_second_moments(kind: type[torch.optim.Optimizer]) -> None:
    model = small()
    with pytest.raises(
        GradsightError,
        match=f"precondition='adam' needs an optimizer that keeps exp_avg_sq, such as AdamW; "
        rf"{kind.__name__} does not\. Pass that optimizer, or precondition=None\.",
    ):
        GhostEngine(
            model,
            loss_fn,
            VAL,
            optimizer=kind(model.parameters(), 0.1),
            precondition="adam",
        )


IDS = "sample_ids must be one int or string per sample"
DOMAINS = r"domains must be one string \(or None\) per sample"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": 10**30}, r"step must be below 2\*\*63"),
        ({"step": 2.5}, r"step must be a whole number of 0 or more, got 2\.5"),
        ({"step": -1}, "step must be a whole number of 0 or more, got -1"),
        ({"step": True}, "step must be a whole number of 0 or more, got True"),
        ({"sample_ids": [0.0, 1.0, 2.0, 3.0]}, rf"{IDS}; number 0 is 0\.0"),
        ({"sample_ids": torch.ones(4)}, rf"{IDS}; number 0 is 1\.0"),
        ({"sample_ids": "abcd"}, f"{IDS}, got 'abcd'"),
        ({"sample_ids": {1: 1, 2: 2, 3: 3, 4: 4}}, f"{IDS}, got a dict"),
        ({"sample_ids": torch.zeros(4, 1).long()}, f"{IDS}; number 0 is a list of 1"),
        ({"sample_ids": [1, None, 3, 4]}, f"{IDS}; number 1 is None"),
        ({"sample_ids": [True] * 4}, f"{IDS}; number 0 is True"),
        ({"sample_ids": [b"a"] * 4}, f"{IDS}; number 0 is a bytes"),
        ({"sample_ids": [1, 2, 3, 10**30]}, rf"{IDS}, below 2\*\*63; number 3 is 1000"),
        ({"sample_ids": 4}, f"{IDS}, got 4"),
        ({"domains": "code"}, f"{DOMAINS}, got 'code'"),
        ({"domains": [1, 2, 3, 4]}, f"{DOMAINS}; number 0 is 1"),
        ({"domains": {"a": 1}}, f"{DOMAINS}, got a dict"),
        (
            {"sample_ids": [1, 2, 3, 4], "domains": ["a"] * 3},
            f"{DOMAINS}, got 3 domains for 4 sample_ids",
        ),
    ],
)
def test_blocks(options: dict[str, object], text: str) -> None:
    with (
        pytest.raises(GradsightError, match=text),
        GhostEngine(small(), loss_fn, VAL).observe(**options),
    ):
        raise AssertionError("the pass must not begin")


@pytest.mark.parametrize(
    "ids",
    [range(4), np.arange(4), list(np.arange(4)), torch.arange(4), list(torch.arange(4)), (0, 1, 2, 3)],
)  # fmt: skip
def test_ids_of_any_kind_are_saved_as_numbers(ids: object, tmp_path: Path) -> None:
    model = small()
    engine = GhostEngine(model, loss_fn, VAL, run_dir=tmp_path)
    with engine.observe(sample_ids=ids, domains=np.array(["a", "b", "a", "b"]), step=np.int64(3)):
        loss_fn(model, pair(4, 1)).backward()
    engine.close()
    rows = read_scores(tmp_path).to_pylist()
    assert [(row["sample_id"], row["domain"]) for row in rows] == [
        (0, "a"),
        (1, "b"),
        (2, "a"),
        (3, "b"),
    ]


@pytest.mark.parametrize("ids", [None, [1, 2, 3, 4]])
@pytest.mark.parametrize("first", [True, False])
def test_another_model_is_trained(ids: list[int | str] | None, first: bool) -> None:
    model = small()
    engine = GhostEngine(model, loss_fn, VAL)
    if not first:
        with engine.observe():
            loss_fn(model, pair(4, 1)).backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    with (
        pytest.raises(
            GradsightError,
            match=r"there was a backward pass in this block, but the model that GhostEngine was "
            r"given \(SmallGPT\) was not called",
        ),
        engine.observe(ids),
    ):
        loss_fn(other, pair(4, 1)).backward()
    assert other.head.weight.grad is not None  # training has gone on


def test_a_pass_of_another_model_before_the_own() -> None:
    model = small()
    engine = GhostEngine(model, loss_fn, VAL)
    for _ in range(2):
        with engine.observe():
            loss_fn(small(seed=1), pair(4, 5)).backward()
            loss_fn(model, pair(4, 1)).backward()
        assert engine.scores.total.shape == (4,)


@pytest.mark.parametrize(
    ("iteration", "batch_idx", "text"),
    [
        (2.5, 0, r"iteration must be a whole number of 0 or more, got 2\.5"),
        (-1, 0, "iteration must be a whole number of 0 or more, got -1"),
        (0, 2.5, r"batch_idx must be one int or string per sample, got 2\.5"),
        (0, True, "batch_idx must be a whole number of 0 or more, got True"),
        (0, None, "batch_idx must be one int or string per sample, got None"),
        (0, [1.0, 2.0, 3.0, 4.0], r"batch_idx must be one int or string per sample; number 0 is"),
    ],
)
def test_announced_batches(iteration: object, batch_idx: object, text: str) -> None:
    engine = GhostEngine(small(), loss_fn, VAL)
    with pytest.raises(GradsightError, match=text):
        engine.attach_train_batch(*pair(4, 1), iteration, batch_idx)


def test_calls_of_a_finished_engine(tmp_path: Path) -> None:
    engine = GhostEngine(small(), loss_fn, VAL, run_dir=tmp_path)
    for iteration in (2.5, None, -1):
        with pytest.raises(GradsightError, match="iteration must be a whole number of 0 or more"):
            engine.save(iteration)
        with pytest.raises(GradsightError, match="iteration must be a whole number of 0 or more"):
            engine.should_save(iteration)
    with pytest.raises(GradsightError, match=r"failed in verify\(\): RuntimeError: Expected tens"):
        engine.verify((torch.randn(2, 3), torch.randn(2)))
    assert engine.save(10) is None  # nothing was scored
    engine.close()
    assert engine.save(10) is None
