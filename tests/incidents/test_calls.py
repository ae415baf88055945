"""What the recorder keeps of a step while training is healthy: references, bounded, and nothing
that disturbs.
"""

import copy
import gc
import math
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsight
from gradsight.core.guard import Guard
from gradsight.errors import UsageError
from gradsight.incidents.kept_calls import KeptCalls, KeptLimits
from incidents.faults import Probability, mlp

HERE = Path(__file__).name


def watched(model: nn.Module, **options: Any) -> Any:
    return gradsight.watch(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)


def calls_of(watch: Any) -> KeptCalls:
    return watch._instruments.incidents.calls  # type: ignore[no-any-return]


def hold_gradients(watch: Any, most: int) -> None:
    """Let the watch hold so many bytes of output gradients, and no more."""
    calls = calls_of(watch)
    calls._limits = replace(calls._limits, gradient_bytes=most)


def test_a_pass_holds_what_the_model_was_called_with() -> None:
    model = mlp()
    x = torch.randn(3, 4)
    with watched(model) as watch:
        state = torch.get_rng_state()
        watch.ids(["a", "b", "c"])
        loss = model(x).square().sum()
        output = model(x).detach()
        loss.backward()
        calls = calls_of(watch)
        (first,), notes = (
            calls.passes()
        )  # the second call is not part of the step: no gradient came back to it
        assert len(calls.calls) == 2
        assert first.args[0] is x
        assert torch.equal(first.rng["cpu"], state)
        assert (first.training, first.autocast, first.sample_ids) == (True, None, ("a", "b", "c"))
        assert (first.caller or "").rpartition("/")[2].startswith(f"{HERE}:")
        assert (first.backward_caller or "").rpartition("/")[2].startswith(f"{HERE}:")
        assert first.output_gradients is not None
        torch.testing.assert_close(first.output_gradients[0], 2 * output)
        assert calls.calls[1].made.sample_ids is None
        assert notes == []
        assert calls.root is loss


def test_evaluation_is_not_kept_and_a_step_lets_go() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradsight.watch(model, optimizer) as watch:
        with torch.no_grad():
            model(torch.randn(2, 4))
        assert calls_of(watch).calls == []
        x = torch.randn(2, 4)
        held = weakref.ref(x)
        model(x).sum().backward()
        assert len(calls_of(watch).calls) == 1
        optimizer.step()
        del x
        gc.collect()
        assert held() is None
        assert calls_of(watch).calls == []
        assert calls_of(watch).root is None


def test_a_pass_that_nobody_uses_keeps_no_activations() -> None:
    """An evaluation that forgot no_grad: its graph must die with its output."""
    alive: list[Any] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            result = x * 2
            alive.append(weakref.ref(ctx))
            return result

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 2

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(super().forward(x))  # type: ignore[no-any-return]

    model = Net(4, 4)
    with watched(model):
        for _ in range(3):
            model(torch.randn(2, 4))
        gc.collect()
        assert [context() for context in alive] == [None, None, None]


def test_held_bytes_are_bounded_and_the_newest_call_stays() -> None:
    model = nn.Linear(256, 1)
    limits = KeptLimits(argument_bytes=5 * 4 * 256 * 10, gradient_bytes=100, lasting=False)
    calls = KeptCalls(model, limits, Guard(None, "test", "a call was not kept"))
    calls.start()
    batches = [torch.randn(10, 256) for _ in range(12)]
    for batch in batches:
        model(batch).sum().backward()
    passes, notes = calls.passes()
    assert [each.args[0] is batch for each, batch in zip(passes, batches[-5:], strict=True)] == [
        True
    ] * 5
    assert "7 earlier calls of the model were not kept: they hold too much memory" in notes
    calls.stop()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_large_output_gradients_are_not_kept_and_say_so() -> None:
    model = nn.Linear(4, 1000)
    with watched(model) as watch:
        hold_gradients(watch, 2**20)
        model(torch.randn(300, 4)).square().sum().backward()
        (one,), notes = calls_of(watch).passes()
        assert one.output_gradients is None
        assert notes == [
            "gradients at the model's outputs beyond 1 MiB were not kept: where they are missing, backward was not run again"
        ]


def test_of_many_gradients_the_newest_are_kept() -> None:
    """A NaN is met at once, and so in the newest micro-batch."""
    model = nn.Linear(4, 1000)
    with watched(model) as watch:
        hold_gradients(watch, 2**20)
        for _ in range(5):
            model(torch.randn(100, 4)).square().sum().backward()
        passes, notes = calls_of(watch).passes()
        assert [each.output_gradients is not None for each in passes] == [
            False,
            False,
            False,
            True,
            True,
        ]
        assert len(notes) == 1


def test_a_batch_changed_in_place_says_so() -> None:
    model = mlp()
    with watched(model) as watch:
        x = torch.randn(2, 4)
        model(x).sum().backward()
        x.zero_()
        assert calls_of(watch).passes()[1] == [
            "the batch was changed in place after the model had seen it: what is run again is the changed one"
        ]


def test_gradients_taken_aside_are_not_the_steps() -> None:
    model = mlp()
    with watched(model) as watch:
        output = model(torch.randn(2, 4))
        torch.autograd.grad(output.sum(), list(model.parameters()), retain_graph=True)
        (output.sum() * 3).backward()
        (one,), _ = calls_of(watch).passes()
        assert one.output_gradients is not None
        assert one.output_gradients[0] is not None
        assert one.output_gradients[0].eq(3).all()


def test_an_output_that_no_loss_uses_has_no_gradient() -> None:
    """Its siblings of the same operation have: a compiled model's outputs are of one operation."""

    class Halves(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return super().forward(x).unbind(1)

    model = Halves(4, 2)
    with watched(model) as watch:
        model(torch.randn(3, 4))[0].sum().backward()
        (kept,), _ = calls_of(watch).passes()
        assert kept.output_gradients is not None
        assert [each is None for each in kept.output_gradients] == [False, True]
        assert watch._instruments.incidents.guard.faults == 0


def test_copies_and_pickles_of_a_watched_model_are_not_watched() -> None:
    model = mlp()
    with watched(model) as watch:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.randn(2, 4)).sum().backward()
        assert calls_of(watch).calls == []


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_kept_and_diagnosed(in_place: bool, tmp_path: Path) -> None:
    """The calls are seen from outside of what is compiled; the model is run again uncompiled."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    inner = Probability()
    model: Any = inner
    if in_place:
        inner.compile(backend=backend)
    else:
        model = torch.compile(inner, backend=backend)
    compiled = inner._compiled_call_impl
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradsight.watch(model, optimizer, run_dir=tmp_path) as watch:
        for step in range(3):
            x = torch.randn(6, 4)
            x[4, 0] = math.nan if step == 1 else 1.0
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (finding,) = [each for each in watch.report().findings if each.code == "GS103"]
    assert finding.diagnosis is not None
    assert finding.diagnosis.operation is not None
    assert finding.diagnosis.operation.operation == "input"
    assert [sample.row for sample in finding.diagnosis.samples] == [4]
    assert len(graphs) == 1
    assert inner._compiled_call_impl is compiled


def test_ids_are_numbers_or_text() -> None:
    model = mlp()
    with watched(model) as watch:
        watch.ids(torch.tensor([7, 8]))
        model(torch.randn(2, 4)).sum().backward()
        assert calls_of(watch).passes()[0][0].sample_ids == (7, 8)
        with pytest.raises(UsageError, match=r"sample ids must be integers or text, got 1\.5"):
            watch.ids([1, 1.5])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recorder": "everything"}, "recorder must be True, False or \"batch\", got 'everything'"),
        ({"diagnose_seconds": -1}, "diagnose_seconds must be 0 or more, got -1"),
        ({"diagnose_seconds": "long"}, "diagnose_seconds must be 0 or more, got 'long'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        watched(mlp(), **options)
    assert str(caught.value) == message


def bad_run(steps: int, bad: set[int], **options: Any) -> Any:
    """Trains with NaN at some steps, on weights that never change."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradsight.watch(model, optimizer, **options) as watch:
        for step in range(steps):
            x = torch.full((2, 4), math.nan) if step in bad else torch.randn(2, 4)
            loss = model(x).sum()
            loss.backward()
            with torch.no_grad():
                kept = [parameter.clone() for parameter in model.parameters()]
            optimizer.step()
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), kept, strict=True):
                    parameter.copy_(value)
            optimizer.zero_grad()
        return watch.report()


def test_no_time_means_no_diagnosis(tmp_path: Path) -> None:
    (finding,) = [
        each
        for each in bad_run(4, {2}, run_dir=tmp_path, diagnose_seconds=0).findings
        if each.code == "GS103"
    ]
    assert finding.diagnosis is None
    (incident,) = gradsight.open_run(tmp_path).incidents()
    assert (incident.step, incident.code, incident.diagnosis) == (2, "GS103", None)


def test_without_a_recorder_there_is_nothing(tmp_path: Path) -> None:
    (finding,) = [
        each
        for each in bad_run(4, {2}, run_dir=tmp_path, recorder=False).findings
        if each.code == "GS103"
    ]
    assert (finding.diagnosis, finding.incident) == (None, None)
    assert not (tmp_path / "incidents").exists()


def test_later_incidents_are_rarer(tmp_path: Path) -> None:
    """The first three of the same kind, then the 4th, 8th, 16th; a bad stretch is one."""
    bad = set(range(2, 80, 3)) | {3}
    bad_run(80, bad, run_dir=tmp_path)
    starts = [step for step in sorted(bad) if step - 1 not in bad]
    found = [incident.step for incident in gradsight.open_run(tmp_path).incidents()]
    assert found == [starts[number - 1] for number in (1, 2, 3, 4, 8, 16)]


def test_without_a_run_directory_the_report_still_knows() -> None:
    (finding,) = [each for each in bad_run(4, {2}).findings if each.code == "GS103"]
    assert finding.diagnosis is not None
    assert finding.incident is None


def test_parts_that_are_called_in_place_of_the_model_are_run_again() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer) as watch:
        model["one"](torch.full((1, 2), math.nan)).sum().backward()
        optimizer.step()
        (finding,) = [each for each in watch.report().findings if each.code == "GS103"]
    assert finding.diagnosis is not None
    assert finding.diagnosis.operation is not None
    assert finding.diagnosis.operation.detail == "argument input of one, all rows"


def test_a_step_without_a_call_names_what_broke_in_its_graph() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    model = nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer) as watch:
        for x in (1.0, math.nan):
            (torch.full((1, 2), x) @ weight).sum().backward()
            optimizer.step()
        (finding,) = [each for each in watch.report().findings if each.code == "GS103"]
    assert finding.diagnosis is not None
    assert finding.diagnosis.operation is not None
    assert finding.diagnosis.operation.operation == "mm"
    assert finding.diagnosis.operation.detail == (
        "an operand of mm that needs no gradient is not finite (labels, a constant)"
    )
    assert finding.diagnosis.notes[0].startswith(
        "the step cannot be run again, because it called no module"
    )


def test_overflows_that_a_scaler_settles_are_not_diagnosed(tmp_path: Path) -> None:
    """A finite loss whose scaled gradient overflows is everyday life; a loss that is NaN is not."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    with gradsight.watch(model, optimizer, run_dir=tmp_path) as watch:
        for _ in range(6):
            output = model(torch.randn(4, 4)) * 1e20
            scaler.scale((output - output.detach()).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert watch._instruments.incidents is not None
        assert watch._instruments.incidents._incidents_seen == 0
        scaler.scale(model(torch.full((4, 4), math.nan)).square().mean()).backward()
        assert watch._instruments.incidents._incidents_seen == 1
