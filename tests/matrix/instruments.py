"""What each instrument does in a setting: it is exact, or it refuses in words."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradsight
from gradsight import GradientDumper, get_checkpoint_metadata, load_keys
from gradsight.errors import GradsightError
from matrix.nets import ROWS, STEPS, Gradients
from matrix.settings import Setting, Work

EXACT = "exact"
REFUSED = "refused"
NOT_APPLICABLE = "not applicable"
INSTRUMENTS = ("distribution", "health", "dump", "ghost", "memory")
ROUNDED = (
    (r"the fast scores of \d+ of \d+ parameters", "the fast scores of some parameters"),
    (r", most of all those of .*?: the shapes", ": the shapes"),
)
"""What differs between processors in a refusal: which parameters lie beyond rounding."""


class NotApplicable(Exception):
    """There is nothing that the instrument could be asked, and why."""


def outcomes(setting: Setting, folder: Path) -> dict[str, str]:
    """Of all five, by name: EXACT, or why not."""
    trial = Trial(setting, folder)
    return {name: outcome(trial, name) for name in INSTRUMENTS}


def outcome(trial: "Trial", instrument: str) -> str:
    """Of one; an assertion fails where it is wrong."""
    try:
        getattr(trial, instrument)()
    except GradsightError as refusal:
        said = str(refusal)
        for pattern, plain in ROUNDED:
            said = re.sub(pattern, plain, said)
        return f"{REFUSED}: {said}"
    except NotApplicable as reason:
        return f"{NOT_APPLICABLE}: {reason}"
    return EXACT


class Trial:
    """All instruments in one setting; runs that several of them look at are made once."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting = setting
        self._folder = folder

    def distribution(self) -> None:
        """Norms, largest magnitudes, histograms and the clip coefficient; weights as without us."""
        trained = self._watched
        alone, _ = self._unwatched
        assert are_equal(trained, alone), "training was changed"
        if is_first_rank():
            self._compare_record(gradsight.open_run(self._folder / "watched"))

    def health(self) -> None:
        """The one bad step is found, with its parameters, and no step before it."""
        run_dir = self._folder / "bad"
        bad = STEPS - 1
        self._setting.train(Work(watch={"run_dir": run_dir, "quiet": True}, bad_step=bad))
        if not is_first_rank():
            return
        findings = gradsight.open_run(run_dir).findings()
        found = [each for each in findings if each.severity == "critical"]
        assert [(each.code, each.first_step) for each in found] == [("GS103", bad)], found
        assert set(found[0].parameters) <= set(self._truth)
        assert found[0].parameters

    def dump(self) -> None:
        """The whole gradient of every parameter, as it was before clipping."""
        assert self._watched
        if not is_first_rank():
            return
        written = self._folder / "watched" / "gradient_dumper" / "step0" / "full_gradients"
        names = list(get_checkpoint_metadata(written).tensors)
        assert sorted(names) == sorted(self._truth)
        for name, tensor in zip(names, load_keys(written, names), strict=True):
            assert (tensor.double() - self._truth[name]).norm() < self._rounding, name

    def ghost(self) -> None:
        """Every sample's score of the first step."""
        run_dir = self._folder / "scores"
        self._setting.train(Work(scores=run_dir))
        meet()
        if not is_first_rank():
            return
        table = gradsight.read_scores(run_dir).to_pylist()
        first = [row["score"] for row in table if row["step"] == 0]
        found = torch.tensor(first, dtype=torch.float64).sort().values
        expected = self._setting.scores().sort().values
        assert len(found) == ROWS
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < self._setting.tolerance, (error, found, expected)

    def memory(self) -> None:
        """A peak is measured, the same each time; checkpointing lowers it and changes no bit."""
        before, peak = self._unwatched
        after, lower = measured(self._setting, Work(checkpointed=True))
        assert are_equal(before, after), "checkpointing changed training"
        assert lower < peak, (lower, peak)
        # An exchange between ranks holds its tensors until it has come: a matter of time.
        if not dist.is_initialized():
            _, again = measured(self._setting.uncheckpointed(), Work())
            assert again == peak

    # What they look at.

    @cached_property
    def _watched(self) -> list[Tensor]:
        """The weights after a run that is recorded, and dumped."""
        run_dir = self._folder / "watched"
        watch = {"run_dir": run_dir, "dump": GradientDumper(run_dir), "quiet": True}
        trained = self._setting.train(Work(watch=watch))
        meet()
        return trained

    @cached_property
    def _unwatched(self) -> tuple[list[Tensor], int]:
        """The weights after a run without us, and its peak."""
        return measured(self._setting.uncheckpointed(), Work())

    @cached_property
    def _truth(self) -> Gradients:
        return self._setting.gradients()

    @cached_property
    def _norm(self) -> float:
        return float(torch.stack([each.norm() for each in self._truth.values()]).norm())

    @property
    def _rounding(self) -> float:
        return self._setting.tolerance * self._norm

    def _compare_record(self, run: Any) -> None:
        steps = list(run.steps())
        assert [(step.step, step.gradient) for step in steps] == [(n, "true") for n in range(STEPS)]
        clipped = self._setting.clip_coef(self._norm)
        assert abs(steps[0].total_norm - self._norm) < self._rounding, (steps[0], self._norm)
        assert abs(steps[0].clip_coef - clipped) < self._setting.tolerance * clipped, steps[0]
        stats = {stat.parameter: stat for stat in run.parameter_stats() if stat.step == 0}
        histograms = {each.parameter: each for each in run.histograms() if each.step == 0}
        assert set(stats) == set(self._truth)
        for name, gradient in self._truth.items():
            assert abs(stats[name].l2 - gradient.norm()) < self._rounding, name
            assert abs(stats[name].max_abs - gradient.abs().max()) < self._rounding, name
            assert sum(histograms[name].bins()[0]) == gradient.numel(), name
        assert not list(run.problems()), list(run.problems())


def measured(setting: Setting, work: Work) -> tuple[list[Tensor], int]:
    """The weights after training, and its peak."""
    trained: list[list[Tensor]] = []
    use = gradsight.measure_peak_memory(lambda: trained.append(setting.train(work)))
    return trained[0], use.peak_bytes


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def meet() -> None:
    """Wait until every rank has written."""
    if dist.is_initialized():
        dist.barrier()
