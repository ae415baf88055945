"""One pass over training and validation rows: exact scores, plain training's gradient, loss, random
numbers, memory and number of passes.
"""

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from ghost.models import MODELS, build
from ghost.small import Pair, direction_of, loss_fn, pair, relative_error, small, truth
from ghost.test_table import by_tier, gradient
from gradsight import GhostEngine, GradsightError, measure_peak_memory

ROUTED = {"mixtral", "experts", "experts_in_place"}
"""Models that send rows of several samples through their parameters together."""
TIME_FIRST = {"lstm_time_first", "transformer_time_first"}
ONE_PASS = [name for name in MODELS if name not in ROUTED | TIME_FIRST]


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, over its norm or the rounding of the largest."""
    assert found.keys() == right.keys()
    noise = 1e-2 * max(float(value.norm()) for value in right.values())
    return max(float((found[n] - g).norm() / (g.norm() + noise)) for n, g in right.items())


@pytest.mark.parametrize("name", by_tier(ONE_PASS))
def test_scores_and_gradient_of_every_model(name: str) -> None:
    """In training mode: scores add up along the plain direction; equal to two passes without
    dropout.
    """
    case = build(name)
    case.model.train()
    torch.manual_seed(5)
    plain_loss = case.loss_fn(case.model, case.batch)
    plain_loss.backward()
    right, state = gradient(case.model), torch.get_rng_state()
    engine = GhostEngine(case.model, case.loss_fn, case.validation, mode="concat")
    with quietly():
        for _ in range(2):
            case.model.zero_grad()
            torch.manual_seed(5)
            loss = engine.loss(case.batch)
            loss.backward()
    assert engine.scores.mode == "concat"
    assert torch.allclose(loss, plain_loss, rtol=1e-12)
    assert distance(gradient(case.model), right) < 1e-12
    assert torch.equal(torch.get_rng_state(), state)
    case.model.eval()
    case.model.zero_grad()
    two_pass = GhostEngine(case.model, case.loss_fn, case.validation, mode="two_pass")
    with quietly():
        with two_pass.observe():
            case.loss_fn(case.model, case.batch).backward()
        engine.loss(case.batch).backward()
    assert relative_error(engine.scores.total, two_pass.scores.total) < 1e-9


def test_stock_gpt2_with_dropout_in_fp32() -> None:
    case = build("gpt2", torch.float32)
    case.model.train()
    engine = GhostEngine(case.model, case.loss_fn, case.validation)
    for seed in range(3):
        case.model.zero_grad()
        torch.manual_seed(seed)
        case.loss_fn(case.model, case.batch).backward()
        right, state = gradient(case.model), torch.get_rng_state()
        case.model.zero_grad()
        torch.manual_seed(seed)
        engine.loss(case.batch).backward()
        for parameter, value in gradient(case.model).items():
            assert float((value - right[parameter]).norm() / right[parameter].norm()) < 1e-6
        assert torch.equal(torch.get_rng_state(), state)
        assert engine.scores.mode == "concat"


@pytest.mark.parametrize("name", by_tier(sorted(ROUTED)))
def test_routed_samples_are_refused_or_scored_in_two_passes(name: str) -> None:
    case = build(name)
    engine = GhostEngine(case.model, case.loss_fn, case.validation, mode="concat")
    with pytest.raises(GradsightError, match=r"selects rows by the data .*mode='two_pass'"):
        engine.loss(case.batch)
    engine = GhostEngine(case.model, case.loss_fn, case.validation)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.loss(case.batch).backward()
    told = [str(each.message) for each in said if "two_pass" in str(each.message)]
    assert len(told) == 1
    assert "selects rows by the data" in told[0]
    assert engine.scores.mode == "two_pass"


def test_several_targets_by_parameter() -> None:
    model, batch = small(), pair(4, 1)
    targets = {"a": pair(3, 2), "b": pair(2, 3, ignored=3)}
    engine = GhostEngine(model, loss_fn, targets=targets, mode="concat", per_parameter=True)
    engine.loss(batch, sample_ids=[7, 8, 9, 10], domains=["x", "y", "x", "y"], step=3).backward()
    assert (engine.scores.sample_ids, engine.scores.step) == ([7, 8, 9, 10], 3)
    for name, val in targets.items():
        right = truth(model, batch, direction_of(model, val))
        assert relative_error(engine.scores.by_target[name], right) < 1e-12
        parts = sum(engine.scores.by_target_and_parameter[name].values())
        assert relative_error(parts, right) < 1e-12


@pytest.mark.parametrize("scale", [None, 2.0**14])
def test_accumulation_with_and_without_a_loss_scale(scale: float | None) -> None:
    model, val = small(), pair(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(model, loss_fn, val, mode="concat", optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for micro in range(3):
        batch = pair(4, 5 + micro)
        scaler.scale(engine.loss(batch) / 3).backward()
        right = truth(model, batch, direction_of(model, val)) / 3
        assert relative_error(engine.scores.total, right) < 1e-12
        assert engine.scores.step == 0
    scaler.unscale_(optimizer)
    found = gradient(model)
    model.zero_grad()
    for micro in range(3):
        (loss_fn(model, pair(4, 5 + micro)) / 3).backward()
    assert distance(found, gradient(model)) < 1e-12


def test_adam_scales_the_direction_as_in_two_passes() -> None:
    model, val = small(), pair(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options: dict[str, Any] = {"optimizer": optimizer, "precondition": "adam"}
    one = GhostEngine(model, loss_fn, val, mode="concat", **options)
    two = GhostEngine(model, loss_fn, val, mode="two_pass", **options)
    for step in range(3):
        batch = pair(4, 5 + step)
        with two.observe():
            loss_fn(model, batch).backward()
        optimizer.zero_grad()
        one.loss(batch).backward()
        assert one.scores.direction == two.scores.direction == ("adam" if step else "plain")
        assert relative_error(one.scores.total, two.scores.total) < 1e-12
        optimizer.step()
        optimizer.zero_grad()
    # Predictions differ: two passes keep a direction, along which Adam's own moment is looked at.
    measured = [
        [change for _, change in engine.honesty()["validation"].pairs] for engine in (one, two)
    ]
    assert measured[0] == pytest.approx(measured[1])


def under_autocast(model: nn.Module, batch: Pair) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[0])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool) -> None:
    """Around the loss, and inside of the loss function around the model alone."""
    model, batch, val = small(dtype=torch.float32), pair(4, 1), pair(3, 2)
    function = under_autocast if inside else loss_fn
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        plain_loss = function(model, batch)
    plain_loss.backward()
    right = gradient(model)
    model.zero_grad()
    engine = GhostEngine(model, function, val, mode="concat")
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        loss = engine.loss(batch)
    loss.backward()
    assert torch.equal(loss, plain_loss)
    exact = small()
    expected = truth(exact, batch, direction_of(exact, val))
    assert relative_error(engine.scores.total, expected) < 5e-2
    for name, value in gradient(model).items():
        assert float((value - right[name]).norm() / right[name].norm()) < 1e-2, name


def test_activation_checkpointing() -> None:
    batch, val = pair(4, 1), pair(3, 2)
    found = []
    for checkpointed in (False, True):
        model = small(0.2)
        if checkpointed:
            for block in model.blocks:
                inner = block.forward
                block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        engine = GhostEngine(model, loss_fn, val, mode="concat")
        torch.manual_seed(3)
        engine.loss(batch).backward()
        found.append((engine.scores.total, gradient(model)))
    assert relative_error(found[1][0], found[0][0]) < 1e-12
    assert distance(found[1][1], found[0][1]) < 1e-12


def own_loss(model: nn.Module, batch: Pair) -> Tensor:
    """No loss function of torch's, with a factor that the target's loss has too."""
    return 0.5 * -model(batch[0]).log_softmax(-1).gather(-1, batch[1].unsqueeze(-1)).mean()


def test_a_loss_of_ones_own() -> None:
    model, batch, val = small(), pair(4, 1), pair(3, 2)
    engine = GhostEngine(model, own_loss, val, mode="concat")
    loss = engine.loss(batch)
    loss.backward()
    assert relative_error(loss.detach(), own_loss(model, batch).detach()) < 1e-12
    right = truth(model, batch, direction_of(model, val)) / 4
    assert relative_error(engine.scores.total, right) < 1e-12


class Summed(nn.Module):
    """Computes its loss itself, as a sum: the factor that makes it a mean comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.inner(ids).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / labels.numel()


def test_a_loss_inside_that_is_not_the_mean_of_its_own_rows() -> None:
    val, batch = pair(3, 2), pair(4, 1)
    engine = GhostEngine(Summed(), lambda m, b: m(*b), val, mode="concat")
    with pytest.raises(
        GradsightError, match=r"changes if validation rows are in the same pass .*mode='two_pass'"
    ):
        engine.loss(batch)


def test_rows_of_another_length() -> None:
    case = build("bert")
    case.model.eval()
    short = {k: t[:, :5] if t.dim() > 1 else t for k, t in case.validation.items()}
    engine = GhostEngine(case.model, case.loss_fn, short, mode="concat")
    two_pass = GhostEngine(case.model, case.loss_fn, short, mode="two_pass")
    shorter = {k: t[:, :4] if t.dim() > 1 else t for k, t in case.batch.items()}
    with quietly():
        for batch in (case.batch, shorter):
            engine.loss(batch).backward()
            with two_pass.observe():
                case.loss_fn(case.model, batch).backward()
            assert relative_error(engine.scores.total, two_pass.scores.total) < 1e-9
    val = pair(3, 2)
    engine = GhostEngine(small(), loss_fn, (val[0][:, :3], val[1][:, :3]), mode="concat")
    with pytest.raises(GradsightError, match=r"another length .* mode='two_pass'"):
        engine.loss(pair(4, 1))


def test_rows_per_pass_from_the_second_step_on() -> None:
    model, batch = small(), pair(4, 1)
    rows: dict[str, int] = {}

    def forward(module: nn.Module, args: Any) -> None:
        rows["forward"] = rows.get("forward", 0) + args[0].shape[0]

    def backward(module: nn.Module, inputs: Any, outputs: Any) -> None:
        rows["backward"] = rows.get("backward", 0) + outputs[0].shape[0]

    model.blocks[0].up.register_forward_pre_hook(forward)
    model.blocks[0].up.register_full_backward_hook(backward)
    engine = GhostEngine(model, loss_fn, pair(3, 2))
    for step in range(3):
        rows.clear()
        engine.loss(batch).backward()
        assert step == 0 or rows == {"forward": 7, "backward": 7}


@pytest.mark.parametrize("vocabulary", [64, 2000])  # the second: the logits are most of it
def test_memory_is_that_of_plain_training_on_the_same_rows(vocabulary: int) -> None:
    torch.manual_seed(0)
    layers = [each for _ in range(12) for each in (nn.Linear(48, 192), nn.Linear(192, 48))]
    ends = nn.Embedding(vocabulary, 48), nn.Linear(48, vocabulary)
    model = nn.Sequential(ends[0], *layers, nn.LayerNorm(48), ends[1])
    model[-1].weight = model[0].weight
    ids = torch.randint(0, 64, (5, 96))
    batch, val = (ids[:4], ids[:4]), (ids[4:], ids[4:])
    engine = GhostEngine(model, loss_fn, val, mode="concat")

    def plain() -> None:
        model.zero_grad()
        loss_fn(model, (ids, ids)).backward()

    def observed() -> None:
        model.zero_grad()
        engine.loss(batch).backward()

    for _ in range(2):
        observed()
    volume = sum(p.numel() * p.element_size() for p in model.parameters())
    model.zero_grad()
    most = measure_peak_memory(plain).peak_bytes
    model.zero_grad()
    assert measure_peak_memory(observed).peak_bytes < most + 0.5 * volume


def test_an_engine_that_is_dropped_in_mid_pass_looks_at_nothing_any_more() -> None:
    model, batch, val = small(), pair(4, 1), pair(3, 2)
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    engine = GhostEngine(model, loss_fn, val)
    loss = engine.loss(batch)
    engine = GhostEngine(model, loss_fn, val)
    engine.attach_train_batch(*batch, 0, 0)
    engine.prepare_forward_input(*batch)
    scorer = weakref.ref(engine._blocks)
    del engine, loss
    gc.collect()
    assert scorer() is None
    assert _get_current_function_mode_stack() == []
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    engine = GhostEngine(model, loss_fn, val)
    engine.loss(batch).backward()
    assert (
        relative_error(engine.scores.total, truth(model, batch, direction_of(model, val))) < 1e-12
    )


def test_what_settings_decide() -> None:
    model, batch, val = small(), pair(4, 1), pair(3, 2)
    for options in ({"exact_grad": True}, {"refresh_every": 2}):
        with pytest.raises(GradsightError, match="mode='two_pass'"):
            GhostEngine(model, loss_fn, val, mode="concat", **options)
        engine = GhostEngine(model, loss_fn, val, **options)
        with pytest.warns(UserWarning, match="two_pass"):
            engine.loss(batch).backward()
        assert engine.scores.mode == "two_pass"
    engine = GhostEngine(model, loss_fn, val)
    with engine.observe():
        loss_fn(model, batch).backward()
    assert engine.scores.mode == "two_pass"


def test_many_validation_rows_in_many_micro_batches_are_no_bargain() -> None:
    model, val = small(), pair(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer)
    modes = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            for micro in range(3):
                batch = pair(2, 10 * step + micro)
                right = truth(model, batch, direction_of(model, val)) / 3
                (engine.loss(batch) / 3).backward()
                modes.append(engine.scores.mode)
                assert relative_error(engine.scores.total, right) < 1e-12
            optimizer.step()
            optimizer.zero_grad()
    assert modes == ["concat"] * 3 + ["two_pass"] * 3
    assert [str(each.message) for each in said if "3 micro-batches" in str(each.message)]


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_a_refusal_inside_the_protocol_leaves_torch_as_it_was(where: str) -> None:
    model, batch = small(), pair(4, 1)
    engine = GhostEngine(model, loss_fn, pair(3, 2), mode="concat")
    engine.attach_train_batch(*batch, 0, 0)
    x, y = engine.prepare_forward_input(*batch)
    with pytest.raises(GradsightError):
        if where == "forward":
            model(x[:5])
        elif where == "loss":
            F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        else:
            model(x).square().mean().backward()
    # Another model, with what the engine would refuse.
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    other(torch.randn(6, 3) + torch.randn(6, 3)).square().mean().backward()
    assert other[0].weight.grad is not None
    assert torch.autograd.backward.__module__ == "torch.autograd"
    engine.attach_train_batch(*batch, 1, 0)
    assert not _get_current_function_mode_stack()
    loss_fn(model, engine.prepare_forward_input(*batch)).backward()
    engine.prepare_gradients()
    engine.aggregate_and_log()
    right = truth(model, batch, direction_of(model, pair(3, 2)))
    assert relative_error(engine.scores.total, right) < 1e-12


def test_a_loss_that_is_not_pulled_back_is_given_up() -> None:
    model, batch = small(), pair(4, 1)
    engine = GhostEngine(model, loss_fn, pair(3, 2), mode="concat")
    forgotten = engine.loss(batch)
    engine.loss(batch).backward()
    assert (
        relative_error(engine.scores.total, truth(model, batch, direction_of(model, pair(3, 2))))
        < 1e-12
    )
    with pytest.raises(GradsightError, match=r"given up"):
        forgotten.backward()
