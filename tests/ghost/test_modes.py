"""Two passes and one, through observe() and through the protocol: the same scores and the plain
gradient.
"""

from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from torch import nn

from ghost.models import build
from ghost.small import Pair, direction_of, loss_fn, pair, relative_error, small, truth
from gradsight import GhostEngine, GradsightError, read_scores


def protocol_step(
    engine: GhostEngine, batch: Pair, iteration: int = 0, batch_idx: object = 0
) -> torch.Tensor:
    engine.attach_train_batch(*batch, iteration, batch_idx)
    x, y = engine.prepare_forward_input(*batch)
    loss = loss_fn(engine.model, (x, y))
    loss.backward()
    engine.prepare_gradients()
    return loss.detach()


@pytest.mark.parametrize(
    ("mode", "exact_grad"), [("two_pass", False), ("two_pass", True), ("concat", False)]
)
def test_protocol(mode: str, exact_grad: bool) -> None:
    model, batch, val = small(), pair(4, 1, ignored=4), pair(3, 2, ignored=2)
    loss_fn(model, batch).backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    engine = GhostEngine(
        model,
        loss_fn,
        val,
        mode=mode,
        exact_grad=exact_grad,
    )
    loss = protocol_step(engine, batch)
    assert (
        relative_error(engine.scores.total, truth(model, batch, direction_of(model, val))) < 1e-12
    )
    assert torch.allclose(loss, loss_fn(model, batch))  # the training rows' own mean
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - plain[name]).norm() / plain[name].norm()) < 1e-12, name
    assert engine.scores.sample_ids == ["0:0", "0:1", "0:2", "0:3"]


def test_concat_with_several_targets_and_given_ids() -> None:
    model, batch, targets = small(), pair(4, 1), {"a": pair(3, 2), "b": pair(2, 3, ignored=3)}
    engine = GhostEngine(model, loss_fn, targets=targets, mode="concat", per_parameter=True)
    protocol_step(engine, batch, batch_idx=[7, 8, 9, 10])
    for name, val in targets.items():
        assert (
            relative_error(
                engine.scores.by_target[name], truth(model, batch, direction_of(model, val))
            )
            < 1e-12
        )
    assert engine.scores.sample_ids == [7, 8, 9, 10]


@pytest.mark.parametrize("name", ["gpt2", "llama", "loss_only"])
def test_concat_where_the_model_computes_its_loss(name: str) -> None:
    case = build(name)
    case.model.eval()  # no dropout
    batch, val = (
        list(b.values()) if isinstance(b, dict) else b for b in (case.batch, case.validation)
    )

    def hand(model: nn.Module, rows: Pair) -> torch.Tensor:
        return case.loss_fn(
            model,
            dict(zip(case.batch, rows, strict=True)) if isinstance(case.batch, dict) else rows,
        )

    two_pass = GhostEngine(case.model, hand, tuple(val))
    with two_pass.observe():
        hand(case.model, batch).backward()
    plain = {n: p.grad.clone() for n, p in case.model.named_parameters()}
    case.model.zero_grad()
    engine = GhostEngine(case.model, hand, tuple(val), mode="concat")
    engine.attach_train_batch(*batch, 0, 0)
    hand(case.model, engine.prepare_forward_input(*batch)).backward()
    engine.prepare_gradients()
    assert (
        relative_error(engine.scores.total, two_pass.scores.total) < 1e-6
    )  # Hugging Face computes the loss in fp32
    for n, p in case.model.named_parameters():
        assert float((p.grad - plain[n]).norm() / (plain[n].norm() + 1e-30)) < 1e-6, n


@pytest.mark.parametrize("mode", ["two_pass", "concat"])
def test_micro_batches_of_one_iteration(mode: str, tmp_path: Path) -> None:
    model, val = small(), pair(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer, mode=mode, run_dir=tmp_path)
    for micro in range(2):
        batch = pair(2, micro)
        engine.attach_train_batch(*batch, 0, micro, domains=["a", "b"])
        loss_fn(model, engine.prepare_forward_input(*batch)).backward()
        engine.prepare_gradients()
    with pytest.raises(GradsightError, match=r"attach_train_batch\(\) was called out of order"):
        engine.attach_train_batch(*batch, 1, 0)
    optimizer.step()
    engine.close()
    table = read_scores(tmp_path)
    assert table["step"].to_pylist() == [0] * 4
    assert table["sample_id"].to_pylist() == ["0:0", "0:1", "1:0", "1:1"]
    assert table["domain"].to_pylist() == ["a", "b", "a", "b"]


def test_concat_refuses_what_it_cannot_do() -> None:
    batch, val = pair(4, 1), pair(3, 2)
    with pytest.raises(GradsightError, match=r"exact_grad=True .* Use mode='two_pass'"):
        GhostEngine(small(), loss_fn, val, mode="concat", exact_grad=True)
    with pytest.raises(GradsightError, match="or attach_train_batch, prepare_forward_input"):  # noqa: SIM117
        with GhostEngine(small(), loss_fn, val, mode="concat").observe():
            pass
    engine = GhostEngine(small(), loss_fn, (val[0][:, :3], val[1][:, :3]), mode="concat")
    engine.attach_train_batch(*batch, 0, 0)
    with pytest.raises(
        GradsightError,
        match=r"of shape \(3, 3\).* of shape \(4, 6\).* another length .* Use mode='two_pass'",
    ):
        engine.prepare_forward_input(*batch)
    with pytest.raises(GradsightError, match=r"refresh_every above 1 .* Use mode='two_pass'"):
        GhostEngine(small(), loss_fn, val, mode="concat", refresh_every=2)


def test_concat_refuses_a_loss_that_it_cannot_split() -> None:
    model, batch, val = small(), pair(4, 1), pair(3, 2)
    engine = GhostEngine(model, loss_fn, val, mode="concat")
    engine.attach_train_batch(*batch, 0, 0)
    x, y = engine.prepare_forward_input(*batch)
    by_hand = -model(x).log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean()
    with pytest.raises(
        GradsightError, match=r"found no loss function of torch in the pass .* Use mode='two_pass'"
    ):
        by_hand.backward()
    engine.abandon()
    engine = GhostEngine(model, loss_fn, val, mode="concat")
    engine.attach_train_batch(*batch, 0, 0)
    x, y = engine.prepare_forward_input(*batch)
    logits = model(x)
    extra = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) + logits.square().mean()
    with pytest.raises(GradsightError, match="validation rows took part in the training gradient"):
        extra.backward()


def test_protocol_out_of_order() -> None:
    model, batch = small(), pair(4, 1)
    engine = GhostEngine(model, loss_fn, pair(3, 2))
    with pytest.raises(
        GradsightError,
        match=r"prepare_gradients\(\) was called out of order: attach_train_batch\(\) is due",
    ):
        engine.prepare_gradients()
    engine.attach_train_batch(*batch, 0, 0)
    with pytest.raises(GradsightError, match=r"expected one sample id per row: 4 rows, got 2"):
        GhostEngine(model, loss_fn, pair(3, 2)).attach_train_batch(*batch, 0, [1, 2])
    engine.prepare_forward_input(*batch)
    with pytest.raises(
        GradsightError,
        match=r"aggregate_and_log\(\) was called out of order: prepare_gradients\(\) is due",
    ):
        engine.aggregate_and_log()
    protocol_step(engine, batch)  # and training goes on
    engine.aggregate_and_log()


@pytest.mark.parametrize("mode", ["two_pass", "concat"])
def test_protocol_saves_every_save_interval(mode: str, tmp_path: Path) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(
        model,
        loss_fn,
        pair(3, 2),
        mode=mode,
        optimizer=optimizer,
        run_dir=tmp_path,
        save_interval=10,
    )
    assert [i for i in range(31) if engine.should_save(i)] == [10, 20, 30]
    expected = {}
    for iteration in range(13):
        protocol_step(engine, pair(2, iteration), iteration, iteration)
        for sample, score in zip(
            engine.scores.sample_ids, engine.scores.total.tolist(), strict=True
        ):
            expected[iteration, sample] = score
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        engine.aggregate_and_log()
    files = sorted(p.name for p in (tmp_path / "grad_dotprods").iterdir())
    assert files == ["iter_000010.parquet"]
    engine.close()
    table = pyarrow.parquet.read_table(tmp_path / "grad_dotprods" / "iter_000010.parquet")
    assert table.column_names == [
        "step",
        "sample_id",
        "domain",
        "target",
        "score",
        "lr",
        "clip_coef",
    ]
    assert sorted(set(table["step"].to_pylist())) == list(range(10))
    rest = pyarrow.parquet.read_table(tmp_path / "grad_dotprods" / "iter_000013.parquet")
    found = {(r["step"], r["sample_id"]): r["score"] for t in (table, rest) for r in t.to_pylist()}
    assert found == expected
    first = table.to_pylist()[0]
    assert (first["target"], first["domain"], first["lr"]) == ("validation", None, 0.1)
    assert 0 < first["clip_coef"] < 0.1
