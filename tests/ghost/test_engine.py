"""What the engine promises around a training loop: targets, steps, schedules, honesty, and leaving
no trace.
"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from ghost.small import direction_of, loss_fn, pair, relative_error, small, truth
from gradsight import GhostEngine
from gradsight.errors import GradsightWarning


def step(engine: GhostEngine, batch: object, **options: object) -> torch.Tensor:
    with engine.observe(**options):
        loss = loss_fn(engine.model, batch)
        loss.backward()
    return loss.detach()


def test_scores_with_ignored_labels() -> None:
    model, batch, val = small(), pair(4, 1, ignored=4), pair(3, 2, ignored=2)
    engine = GhostEngine(model, loss_fn, val)
    step(engine, batch)
    assert (
        relative_error(engine.scores.total, truth(model, batch, direction_of(model, val))) < 1e-12
    )
    assert engine.scores.sample_ids == [0, 1, 2, 3]


def test_several_targets_at_once() -> None:
    model, batch, targets = (
        small(),
        pair(4, 1),
        {"code": pair(3, 2), "prose": pair(2, 3), "more": pair(1, 4)},
    )
    engine = GhostEngine(model, loss_fn, targets=targets)
    step(engine, batch, sample_ids=["a", "b", "c", "d"])
    assert engine.scores.sample_ids == ["a", "b", "c", "d"]
    for name, val in targets.items():
        assert (
            relative_error(
                engine.scores.by_target[name], truth(model, batch, direction_of(model, val))
            )
            < 1e-12
        )
    with pytest.raises(
        ValueError, match=r"there are 3 targets \(code, prose, more\): use by_target"
    ):
        _ = engine.scores.total


@pytest.mark.parametrize("exact_grad", [False, True])
def test_by_parameter(exact_grad: bool) -> None:
    model, batch, val = small(), pair(4, 1), pair(3, 2)
    engine = GhostEngine(
        model,
        loss_fn,
        val,
        per_parameter=True,
        exact_grad=exact_grad,
    )
    step(engine, batch)
    direction = direction_of(model, val)
    for name in direction:
        alone = {n: d if n == name else torch.zeros_like(d) for n, d in direction.items()}
        expected = truth(model, batch, alone)
        assert float((engine.scores.by_parameter[name] - expected).abs().max()) < 1e-14, name
    assert torch.allclose(sum(engine.scores.by_parameter.values()), engine.scores.total)


def test_accumulation_takes_the_target_once_and_adds_up() -> None:
    model, val = small(), pair(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = []

    def counting(m: nn.Module, b: object) -> torch.Tensor:
        calls.append(m.training)
        return loss_fn(m, b)

    engine = GhostEngine(model, counting, val, optimizer=optimizer)
    for number in range(2):
        direction, total = direction_of(model, val), 0.0
        for micro in range(3):
            batch = pair(2, 10 * number + micro)
            with engine.observe():
                (loss_fn(model, batch) / 3).backward()
            assert engine.scores.step == number
            assert relative_error(engine.scores.total, truth(model, batch, direction) / 3) < 1e-12
            total += float(engine.scores.total.sum())
        whole = sum(float((direction[n] * p.grad).sum()) for n, p in model.named_parameters())
        assert abs(total - whole) < 1e-12
        optimizer.step()
        optimizer.zero_grad()
    assert calls == [False, False]  # once per step, in evaluation mode
    assert model.training


def test_refresh_every_reuses_the_direction_and_reports_how_stale_it_was() -> None:
    model, batch, val = small(), pair(4, 1), pair(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer, refresh_every=3)
    first = direction_of(model, val)
    for number in range(5):
        if number == 3:
            second = direction_of(model, val)
        expected = truth(model, batch, first if number < 3 else second)
        step(engine, batch)
        assert relative_error(engine.scores.total, expected) < 1e-12, number
        optimizer.step()
        optimizer.zero_grad()
    flat = [torch.cat([d.flatten() for d in direction.values()]) for direction in (first, second)]
    (stale,) = engine.staleness
    assert (stale.step, stale.target) == (3, "validation")
    assert abs(stale.cosine - float(torch.cosine_similarity(*flat, dim=0))) < 1e-12


def test_adam_scales_the_direction_once_there_is_a_second_moment() -> None:
    model, batch, val = small(), pair(4, 1), pair(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer, precondition="adam")
    step(engine, batch)
    assert engine.scores.direction == "plain"
    assert (
        relative_error(engine.scores.total, truth(model, batch, direction_of(model, val))) < 1e-12
    )
    optimizer.step()
    optimizer.zero_grad()
    scaled = direction_of(model, val)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        corrected = state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
        scaled[name] = scaled[name] / (corrected.sqrt() + 1e-8)
    expected = truth(model, batch, scaled)
    step(engine, batch)
    assert engine.scores.direction == "adam"
    assert relative_error(engine.scores.total, expected) < 1e-12


def test_honesty_predicts_small_steps_of_sgd_with_clipping() -> None:
    model, val = small(), pair(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer)
    for number in range(12):
        step(engine, pair(4, 20 + number))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (1 + number % 4))
        optimizer.step()
        optimizer.zero_grad()
    honesty = engine.honesty()["validation"]
    assert len(honesty.pairs) == 11
    for predicted, measured in honesty.pairs:
        assert abs(predicted - measured) < 0.02 * abs(measured) + 1e-9
    assert honesty.correlation > 0.999


def test_honesty_knows_the_momentum_of_sgd() -> None:
    model, val = small(), pair(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 3e-4, momentum=0.9, dampening=0.2)
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer)
    for number in range(12):
        step(engine, pair(4, 20 + number))
        optimizer.step()
        optimizer.zero_grad()
    for predicted, measured in engine.honesty()["validation"].pairs:
        assert abs(predicted - measured) < 0.05 * abs(measured) + 1e-9


def test_honesty_of_adam_aware_scores() -> None:
    """With a second moment that has settled, the prediction has Adam's momentum and scale: right in
    size, not only in sign.
    """
    model, val = small(), pair(8, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-5, betas=(0.9, 0.9999))
    for number in range(60):
        loss_fn(model, pair(4, 100 + number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer, precondition="adam")
    for number in range(60):
        optimizer.param_groups[0]["lr"] = 1e-5 * (1 + number % 7)
        step(engine, pair(4, 20 + number))
        optimizer.step()
        optimizer.zero_grad()
    honesty = engine.honesty()["validation"]
    later = honesty.pairs[30:]
    assert all(abs(predicted - measured) < 0.15 * abs(measured) for predicted, measured in later), (
        later
    )
    assert honesty.correlation > 0.95


def test_the_momentum_of_adam_counts_along_the_present_direction() -> None:
    """Predicted is -lr <G / (sqrt(v) + eps), m>, v from before the step and m the step's own.

    Sums of earlier scores, along the directions of their steps, would be far off: steps are large.
    """
    model, val = small(), pair(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-2)
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer, precondition="adam")
    expected = []
    for number in range(6):
        step(engine, pair(4, 20 + number))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        slopes = torch.autograd.grad(loss_fn(model, val), list(model.parameters()))
        states = [dict(optimizer.state[weight]) for weight in model.parameters()]
        scales = [
            1 / ((state["exp_avg_sq"] / (1 - 0.999**number)).sqrt() + 1e-8)
            for state in states
            if state
        ]
        optimizer.step()
        optimizer.zero_grad()
        if not number:
            continue
        moments = [
            optimizer.state[weight]["exp_avg"] / (1 - 0.9 ** (number + 1))
            for weight in model.parameters()
        ]
        parts = zip(slopes, scales, moments, strict=True)
        expected.append(-3e-2 * float(sum((g * s * m).sum() for g, s, m in parts)))
    predicted = [each for each, _ in engine.honesty()["validation"].pairs]
    assert predicted[1:] == pytest.approx(expected[:-1], rel=1e-9)


@pytest.mark.parametrize("exact_grad", [False, True])
def test_fifty_steps_of_adamw(exact_grad: bool) -> None:
    """With dropout on: exact_grad trains to the same weights, bit for bit."""
    plain, observed = small(0.2, torch.float32), small(0.2, torch.float32)
    engine = None
    for model in (plain, observed):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if model is observed:
            engine = GhostEngine(
                model,
                loss_fn,
                pair(3, 2),
                optimizer=optimizer,
                exact_grad=exact_grad,
            )
        torch.manual_seed(7)
        for number in range(50):
            batch = pair(4, number)
            if engine is None:
                loss_fn(model, batch).backward()
            else:
                step(engine, batch)
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(plain.named_parameters(), observed.parameters(), strict=True):
        if exact_grad:
            assert torch.equal(a, b), name
        else:
            assert float((a - b).detach().norm() / a.detach().norm()) < 1e-3, name


def test_nothing_is_left_behind() -> None:
    model = small(0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def fingerprint() -> str:
        hooks = [
            (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m.training, sorted(vars(m)))
            for m in model.modules()
        ]
        tensors = [
            (p._backward_hooks, p._post_accumulate_grad_hooks, sorted(vars(p)))
            for p in model.parameters()
        ]
        globally = (
            nn.modules.module._global_forward_pre_hooks,
            nn.modules.module._global_forward_hooks,
        )
        return repr(
            (
                hooks,
                tensors,
                globally,
                torch.amp.GradScaler.scale,
                optimizer._optimizer_step_pre_hooks,
            )
        )

    before, weights = fingerprint(), copy.deepcopy(model.state_dict())
    engine = GhostEngine(model, loss_fn, pair(3, 2), optimizer=optimizer)
    random_state = torch.get_rng_state()
    with engine.observe():
        loss = loss_fn(model, pair(4, 1))
        loss.backward()
    with pytest.raises(KeyError), engine.observe():
        raise KeyError("the user's own")
    engine.verify(pair(4, 1))
    engine.close()
    assert fingerprint() == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    torch.set_rng_state(random_state)
    model.zero_grad()
    assert torch.equal(
        loss_fn(model, pair(4, 1)), loss
    )  # the pass drew the same random numbers as a plain one


def test_the_outputs_of_the_model_are_let_go_before_the_backward_pass() -> None:
    """A language model's logits may be larger than its gradient."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    x, y = torch.randn(6, 3), torch.randint(0, 5, (6,))

    def cross_entropy(m: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(m(batch[0]), batch[1])

    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    engine = GhostEngine(model, cross_entropy, (x, y))
    handle = model.register_forward_hook(
        lambda module, args, output: outputs.append(weakref.ref(output))
    )
    model[0].weight.register_hook(lambda grad: alive.append(outputs[-1]() is not None))
    for _ in range(2):
        with engine.observe():
            loss = cross_entropy(model, (x, y))
            alive.clear()
            loss.backward()
        assert alive == [False]
    handle.remove()


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_steps() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    engine = GhostEngine(
        model,
        lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]),
        (torch.ones(2, 3), torch.ones(2, 2)),
        optimizer=optimizer,
    )
    x, y = torch.ones(3, 3), torch.zeros(3, 2)

    def run(steps: range) -> int:
        for number in steps:
            engine.attach_train_batch(x, y, number, number)
            inputs, labels = engine.prepare_forward_input(x, y)
            nn.functional.mse_loss(model(inputs), labels).backward()
            engine.prepare_gradients()
            optimizer.step()
            optimizer.zero_grad()
            engine.aggregate_and_log()
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    early = run(range(150))
    assert run(range(150, 1150)) <= early + 2 * 128 * 3  # what waits to be read, not what has been
    assert len(engine._log.pending.blocks) <= 1


@pytest.fixture
def broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradsight.ghost.rules import linear

    correct = linear.vector_dots
    monkeypatch.setattr(
        linear,
        "vector_dots",
        lambda sums, tangents: [(s, 1.5 * v) for s, v in correct(sums, tangents)],
    )


@pytest.mark.usefixtures("broken_rule")
def test_verify_can_fail() -> None:
    report = GhostEngine(small(), loss_fn, pair(3, 2), self_check=False).verify(pair(4, 1))
    assert not report.passed
    assert report.max_relative_error > 1e-4
    assert str(report).startswith("FAILED")


@pytest.mark.usefixtures("broken_rule")
def test_the_self_check_falls_back_where_a_rule_is_wrong() -> None:
    model, batch, val = small(), pair(4, 1), pair(3, 2)
    engine = GhostEngine(model, loss_fn, val)
    with pytest.warns(
        GradsightWarning,
        match=r"no fast rule for linear: the scores of blocks\.0\.down\.bias, .* are exact, "
        r"but take",
    ):
        step(engine, batch)
    assert (
        relative_error(engine.scores.total, truth(model, batch, direction_of(model, val))) < 1e-12
    )
