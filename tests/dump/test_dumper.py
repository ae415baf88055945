"""The dumper as a user meets it: schedule, arguments, queue, limits, and the composer's way in."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from dump.dumps import find_dumps
from gradsight import GradientDumper, get_checkpoint_metadata, load_keys
from gradsight.dump import full
from gradsight.dump.folders import Layout, size
from gradsight.dump.job import Facts
from gradsight.dump.manifest import read
from gradsight.dump.staging import Pool
from gradsight.errors import GradsightWarning, UsageError


def steps(run: Path) -> list[int]:
    return [int(path.parent.name.removeprefix("step")) for path in find_dumps(run)]


def test_the_reading_examples(tmp_path: Path) -> None:
    """Both kinds, read as their users read them."""
    model = nn.ModuleDict({"embedding": nn.Embedding(300, 8)})
    model["embedding"](torch.arange(9)).square().sum().backward()
    with (
        GradientDumper(tmp_path, step_interval=2) as full,
        GradientDumper(tmp_path, save_first_n=100) as sampled,
    ):
        for step in range(4):
            full.dump(model, step)
            sampled.dump(model, step)
    full_dir = f"{tmp_path}/gradient_dumper/step2/full_gradients"
    grad = next(load_keys(full_dir, ["embedding.weight"]))
    assert torch.equal(grad, model["embedding"].weight.grad)
    sampled_dir = f"{tmp_path}/gradient_dumper/step2/sampled_gradients"
    with safe_open(f"{sampled_dir}/embedding.weight_first100.safetensors", framework="pt") as f:
        assert torch.equal(f.get_tensor("gradient"), grad[:100])
    assert sorted(path.name for path in Path(full_dir).iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "manifest.json",
    ]


def test_schedule(tmp_path: Path, model: nn.Module) -> None:
    with GradientDumper(tmp_path, start_step=1, end_step=7, step_interval=3) as dumper:
        returned = [dumper.dump(model, step) for step in range(10)]
    due = [step for step, path in enumerate(returned) if path is not None]
    assert due == steps(tmp_path) == [1, 4, 7]
    assert returned[4] == tmp_path / "gradient_dumper" / "step4" / "full_gradients"


def test_not_enabled(tmp_path: Path, model: nn.Module) -> None:
    with GradientDumper(tmp_path, enabled=False, dump_on="warning") as dumper:
        assert dumper.dump(model, 0) is None
        assert not dumper.wants(0)
        assert not dumper.wants_finding("critical")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"save_first_n": 0}, "save_first_n must be a whole number of 1 or more, got 0"),
        ({"save_first_n": 2.5}, "save_first_n must be a whole number of 1 or more, got 2.5"),
        ({"step_interval": 0}, "step_interval must be a whole number of 1 or more, got 0"),
        ({"start_step": 5, "end_step": 4}, "end_step 4 lies before start_step 5"),
        ({"keep_last": 0}, "keep_last must be a whole number of 1 or more, got 0"),
        ({"max_bytes": -1}, "max_bytes must be a whole number of 1 or more, got -1"),
        ({"dump_on": "fatal"}, "dump_on must be 'warning', 'critical' or None, got 'fatal'"),
        ({"save_first_n": True}, "save_first_n must be a whole number of 1 or more, got True"),
        ({"keep_last": "3"}, "keep_last must be a whole number of 1 or more, got '3'"),
        ({"max_bytes": "1GB"}, "max_bytes must be a whole number of 1 or more, got '1GB'"),
        ({"start_step": 2.5}, "start_step must be a whole number of 0 or more, got 2.5"),
        ({"end_step": "9"}, "end_step must be a whole number of 0 or more, got '9'"),
        ({"enabled": "no"}, "enabled must be True or False, got 'no'"),
        ({"asynchronous": None}, "asynchronous must be True or False, got None"),
        ({"dump_on": True}, "dump_on must be 'warning', 'critical' or None, got True"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        GradientDumper(tmp_path, **arguments)


@pytest.mark.parametrize("run_dir", [None, 3, ""])
def test_a_run_dir_that_is_no_path(run_dir: Any) -> None:
    with pytest.raises(UsageError, match="run_dir must be a path, such as 'runs/first', got"):
        GradientDumper(run_dir)


def test_a_run_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a directory")
    for run_dir in (tmp_path / "taken", tmp_path / "taken" / "run"):
        with pytest.raises(UsageError, match=r"run_dir must be a directory, but .*taken is a file"):
            GradientDumper(run_dir)


def test_bad_calls(tmp_path: Path, model: nn.Module) -> None:
    dumper = GradientDumper(tmp_path)
    with pytest.raises(UsageError, match=r"dump needs a torch.nn.Module, got dict"):
        dumper.dump({}, 0)
    with pytest.raises(UsageError, match="step must be a whole number of 0 or more, got -1"):
        dumper.dump(model, -1)
    with pytest.raises(UsageError, match="divisor must be a number above 0, got 0"):
        dumper.dump(model, 0, divisor=0)
    for divisor in ("2", None, torch.ones(2)):
        with pytest.raises(UsageError, match="divisor must be a single number, got"):
            dumper.dump(model, 0, divisor=divisor)  # type: ignore[arg-type]
    for step in (None, "1", 1.5, True, torch.tensor([1, 2]), 2**64):
        with pytest.raises(UsageError, match="step must be"):
            dumper.dump(model, step)  # type: ignore[arg-type]
    dumper.close()
    with pytest.raises(UsageError, match="this GradientDumper is closed"):
        dumper.dump(model, 0)


def test_no_gradient_at_all_is_a_loud_error(tmp_path: Path, model: nn.Module) -> None:
    model.zero_grad()
    with GradientDumper(tmp_path) as dumper:
        with pytest.raises(
            UsageError, match=r"no parameter has a gradient at step 3: call dump after backward\(\)"
        ):
            dumper.dump(model, 3)
        assert not (tmp_path / "gradient_dumper").exists()


def test_names_that_meet_without_their_wrappers_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2))
    model._orig_mod = nn.Linear(2, 2)
    with (
        GradientDumper(tmp_path) as dumper,
        pytest.raises(UsageError, match="two parameters of the model have the name 'weight'"),
    ):
        dumper.dump(model, 0)


def test_the_older_fsdp_is_refused(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Linear):
        """Stands for torch's class of this name, which needs a process group."""

    with (
        GradientDumper(tmp_path) as dumper,
        pytest.raises(UsageError, match="Use torch's fully_shard"),
    ):
        dumper.dump(FullyShardedDataParallel(2, 2), 0)


def test_what_is_dumped_is_what_was_there_at_the_call(tmp_path: Path, model: nn.Module) -> None:
    """Training changes the gradients while the writer is still at work."""
    before = model[0].weight.grad.clone()
    with GradientDumper(tmp_path) as dumper:
        for step in range(3):
            dumper.dump(model, step)
            model[0].weight.grad.mul_(2)
        model.zero_grad()
    for step in range(3):
        folder = tmp_path / f"gradient_dumper/step{step}/full_gradients"
        assert torch.equal(next(load_keys(folder, ["0.weight"])), before * 2**step)


def test_nothing_of_the_model_is_kept_alive(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    gone = weakref.ref(model.weight.grad)
    with GradientDumper(tmp_path) as dumper:
        dumper.dump(model, 0)
        dumper.wait()
        model.zero_grad()
        gc.collect()
        assert gone() is None


class Gate:
    """Holds the writer back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        write = full.write_shard

        def wait(*arguments: Any) -> Any:
            self.reached.set()
            assert self.open.wait(20)
            return write(*arguments)

        monkeypatch.setattr(full, "write_shard", wait)


def test_training_does_not_wait_for_the_disk(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with GradientDumper(tmp_path) as dumper:
        folder = dumper.dump(model, 0)
        assert gate.reached.wait(20)
        assert not folder.exists()
        assert folder.parent.with_name("step0.partial").exists()
        gate.open.set()
        dumper.wait()
        assert folder.exists()


def test_a_full_queue_waits(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with GradientDumper(tmp_path) as dumper:
        dumper.dump(model, 0)
        second = threading.Thread(target=dumper.dump, args=(model, 1))
        second.start()
        second.join(0.2)
        assert second.is_alive(), "the only buffer is taken"
        gate.open.set()
        second.join(20)
    assert (dumper.written, dumper.skipped) == (2, 0)


def test_a_buffer_that_becomes_free_just_before_the_wait_is_used(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GradientDumper(tmp_path) as dumper:
        dumper.dump(model, 0)
        dumper.wait()
        take, asked = Pool.take, []

        def too_early(pool: Pool) -> Any:
            asked.append(pool)
            return None if len(asked) == 1 else take(pool)

        monkeypatch.setattr(Pool, "take", too_early)
        dumper.dump(model, 1)
    assert (dumper.written, dumper.skipped) == (2, 0)


def test_synchronous(tmp_path: Path, model: nn.Module) -> None:
    with GradientDumper(tmp_path, asynchronous=False) as dumper:
        assert dumper.dump(model, 0).exists()


def test_a_dumper_that_nobody_closes_finishes_at_exit(tmp_path: Path) -> None:
    """Of both kinds, also where the interpreter no longer lets new threads work."""
    code = f"""
import torch
from gradsight import GradientDumper
model = torch.nn.Linear(400, 400)
model(torch.ones(1, 400)).sum().backward()
dumpers = [GradientDumper({str(tmp_path)!r}, save_first_n=n) for n in (None, 2)]
for step in range(3):
    for dumper in dumpers:
        dumper.dump(model, step)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps(tmp_path) == [0, 0, 1, 1, 2, 2]


def test_keep_last(tmp_path: Path, model: nn.Module) -> None:
    with (
        GradientDumper(tmp_path, keep_last=2) as dumper,
        GradientDumper(tmp_path, save_first_n=2) as other,
    ):
        for step in range(5):
            dumper.dump(model, step)
            other.dump(model, step)
    assert [path.parent.name for path in find_dumps(tmp_path) if path.name == "full_gradients"] == [
        "step3",
        "step4",
    ]
    assert len([path for path in find_dumps(tmp_path) if path.name == "sampled_gradients"]) == 5, (
        "another's are left alone"
    )


def test_keep_last_after_going_back(tmp_path: Path, model: nn.Module) -> None:
    """A run resumed from an earlier step: the oldest by time goes, not the lowest step."""
    for first in (100, 7):
        with GradientDumper(tmp_path, keep_last=2) as dumper:
            for step in range(first, first + 2):
                dumper.dump(model, step)
    assert steps(tmp_path) == [7, 8]


def test_max_bytes(tmp_path: Path, model: nn.Module) -> None:
    with GradientDumper(tmp_path) as dumper:
        dumper.dump(model, 0)
        dumper.wait()
        one = size(Layout(tmp_path, "full").complete()[0])
    with GradientDumper(tmp_path, max_bytes=int(one * 2.5)) as dumper:
        for step in range(1, 5):
            dumper.dump(model, step)
    assert steps(tmp_path) == [3, 4]


def test_a_dump_larger_than_max_bytes(tmp_path: Path, model: nn.Module) -> None:
    dumper = GradientDumper(tmp_path, max_bytes=1000)
    dumper.dump(model, 0)
    with pytest.warns(
        GradsightWarning, match="one dump takes 9,768 bytes, more than max_bytes=1,000 allows"
    ):
        dumper.close()
    assert not (tmp_path / "gradient_dumper").exists()


def found(dumper: GradientDumper, model: nn.Module, step: int, reason: str) -> None:
    dumper.capture(model, step, Facts(reason=reason))
    dumper.wait()


def test_the_first_dump_of_each_finding_stays(tmp_path: Path, model: nn.Module) -> None:
    with GradientDumper(tmp_path, keep_last=2) as dumper:
        found(dumper, model, 0, "schedule")
        found(dumper, model, 1, "GS103 NaN gradient; GS107 zeros")
        found(dumper, model, 2, "GS103 NaN gradient")
        found(dumper, model, 3, "GS201 gradient spike, found at step 2")
        found(dumper, model, 4, "GS103 NaN gradient")
        found(dumper, model, 5, "schedule")
    assert steps(tmp_path) == [1, 3, 4, 5]
    with GradientDumper(tmp_path, keep_last=1) as dumper:
        found(dumper, model, 6, "GS107 zeros")
    assert steps(tmp_path) == [1, 3, 6], "a resumed run knows them too"


def test_max_bytes_wins_and_the_first_dumps_of_findings_go_last(
    tmp_path: Path, model: nn.Module
) -> None:
    with GradientDumper(tmp_path) as dumper:
        found(dumper, model, 0, "schedule")
        one = size(Layout(tmp_path, "full").complete()[0])
    with GradientDumper(tmp_path, max_bytes=int(one * 2.5)) as dumper:
        found(dumper, model, 1, "GS201 gradient spike")
        found(dumper, model, 2, "schedule")
        found(dumper, model, 3, "schedule")
        assert steps(tmp_path) == [1, 3]
        found(dumper, model, 4, "GS103 NaN gradient")
        assert steps(tmp_path) == [1, 4]
        with pytest.warns(GradsightWarning, match="first dumps of findings take all of max_bytes"):
            found(dumper, model, 5, "schedule")
        assert steps(tmp_path) == [1, 4]
        found(dumper, model, 6, "GS104 infinite gradient")
        assert steps(tmp_path) == [1, 4]


def test_a_file_carries_the_rows_asked_for_and_the_manifest_those_there_are(
    tmp_path: Path, model: nn.Module
) -> None:
    with GradientDumper(tmp_path, save_first_n=100) as dumper:
        folder = dumper.dump(model, 0)
    names = {path.name for path in folder.glob("*.safetensors")}
    assert names == {
        f"{name}_first100.safetensors" for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    }
    rows = {name: shape[0] for name, (shape, _) in get_checkpoint_metadata(folder).tensors.items()}
    assert rows == {"0.weight": 7, "0.bias": 7, "1.weight": 100, "1.bias": 100}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_loss_scale_is_divided_out(dtype: torch.dtype, tmp_path: Path) -> None:
    """Half-precision values become fp32: divided, they could vanish in their own."""
    model = nn.Linear(3, 2, dtype=dtype)
    model.weight.grad = torch.full((2, 3), 1e-3, dtype=dtype)
    with GradientDumper(tmp_path) as dumper:
        folder = dumper.dump(model, 0, divisor=65536.0)
    loaded = next(load_keys(folder, ["weight"]))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, model.weight.grad.float() / 65536.0)
    assert torch.equal(model.weight.grad, torch.full((2, 3), 1e-3, dtype=dtype)), (
        "the model's own are left alone"
    )
    metadata = get_checkpoint_metadata(folder)
    assert (metadata.gradient, metadata.scale) == ("as found in .grad, divided by 65536", 65536.0)


def test_the_composer_says_what_it_knows(tmp_path: Path, model: nn.Module) -> None:
    facts = Facts(gradient="true", reason="GS103", clip_coef=0.25, scale=1024.0, divisor=1024.0)
    with GradientDumper(tmp_path, start_step=1000, dump_on="critical") as dumper:
        assert not dumper.wants(3)
        severities = ("healthy", "warning", "critical")
        assert [dumper.wants_finding(each) for each in severities] == [False, False, True]
        folder = dumper.capture(model, 3, facts)
    metadata = get_checkpoint_metadata(folder)
    known = (metadata.gradient, metadata.reason, metadata.clip_coef, metadata.scale)
    assert known == ("true", "GS103", 0.25, 1024.0)
    assert torch.equal(next(load_keys(folder, ["0.bias"])), model[0].bias.grad / 1024)


def test_dump_on_warning_includes_critical(tmp_path: Path) -> None:
    dumper = GradientDumper(tmp_path, start_step=10, dump_on="warning")
    assert dumper.wants_finding("warning")
    assert dumper.wants_finding("critical")
    assert not dumper.wants(0)
    assert dumper.wants(10)


def test_what_is_not_finite_can_be_told(tmp_path: Path, model: nn.Module) -> None:
    with GradientDumper(tmp_path) as dumper:
        folder = dumper.capture(model, 0, Facts(clip_coef=float("nan"), scale=float("inf")))
    metadata = get_checkpoint_metadata(folder)
    assert metadata.clip_coef != metadata.clip_coef
    assert metadata.scale == float("inf")


def test_the_composer_is_never_stopped(tmp_path: Path, model: nn.Module) -> None:
    model.zero_grad()
    with (
        GradientDumper(tmp_path) as dumper,
        pytest.warns(GradsightWarning, match="no parameter has a gradient at step 0"),
    ):
        assert dumper.capture(model, 0, Facts()) is None
    assert dumper.failed == 1


def test_gradients_that_cannot_be_read_do_not_stop_training(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of host memory")

    monkeypatch.setattr("gradsight.dump.staging.Buffer.fill", fail)
    dumper = GradientDumper(tmp_path)
    assert dumper.dump(model, 0) is None
    with pytest.warns(
        GradsightWarning, match="the gradients could not be copied: out of host memory"
    ):
        dumper.close()
    monkeypatch.setattr("gradsight.dump.gradients.place_of", fail)
    dumper = GradientDumper(tmp_path)
    assert dumper.dump(model, 0) is None
    with pytest.warns(
        GradsightWarning, match="the gradients could not be read: RuntimeError: out of host memory"
    ):
        dumper.close()


def test_ranks_that_do_not_meet(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("timed out")

    monkeypatch.setattr("gradsight.dump.dumper.ProcessGroup", fail)
    dumper = GradientDumper(tmp_path)
    with pytest.warns(
        GradsightWarning,
        match=r"the ranks did not meet \(timed out\); dump\(\) must be called on every rank",
    ):
        assert dumper.dump(model, 0) is None
    assert dumper.dump(model, 1) is None
    assert (dumper.failed, dumper.problems[0].count) == (2, 2)
    dumper.close()


def test_a_model_that_changes_between_dumps(tmp_path: Path) -> None:
    """What is remembered from one dump must not leak into the next: other shapes, dtypes, None,
    another model.
    """
    models = [
        nn.Linear(3, 2),
        nn.Linear(4, 2),
        nn.Linear(4, 2).double(),
        nn.Linear(4, 2, bias=False),
        nn.Linear(3, 2),
    ]
    with GradientDumper(tmp_path) as dumper:
        for step, model in enumerate(models):
            weight = model.weight
            model(torch.randn(1, weight.shape[1], dtype=weight.dtype)).square().sum().backward()
            folder = dumper.dump(model, step)
            dumper.wait()
            assert torch.equal(next(load_keys(folder, ["weight"])), weight.grad)
            assert set(read(folder).tensors) == {name for name, _ in model.named_parameters()}


def test_two_dumpers_share_a_run(tmp_path: Path, model: nn.Module) -> None:
    """Both write, complete and remove at the same steps, in two threads, and never get in each
    other's way.
    """
    with (
        GradientDumper(tmp_path, keep_last=1) as one,
        GradientDumper(tmp_path, keep_last=2, save_first_n=2) as other,
    ):
        for step in range(30):
            one.dump(model, step)
            other.dump(model, step)
    assert (one.written, one.problems) == (30, [])
    assert (other.written, other.problems) == (30, [])
    assert steps(tmp_path) == [28, 29, 29]
    assert sorted(path.name for path in (tmp_path / "gradient_dumper").iterdir()) == [
        "step28",
        "step29",
    ]


def test_nobody_waits_long_for_memory_that_other_ranks_have_to_free() -> None:
    """They may be waiting for this one, in a collective of training's own."""
    pool = Pool(1)
    buffer = pool.take()
    assert buffer is not None
    assert pool.take() is None
    # Memory that only the disk has to free is waited for.
    assert pool.is_worth_waiting_for
    with pool.freed_by_ranks(patience=60):
        assert pool.is_worth_waiting_for
    with pool.freed_by_ranks(patience=0):
        assert not pool.is_worth_waiting_for
    assert pool.is_worth_waiting_for
    pool.give(buffer)
    assert pool.take() is buffer
