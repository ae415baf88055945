"""The cheapest checkpointing that fits a budget of memory, found by fake runs."""

from collections.abc import Sequence
from dataclasses import replace

from gradsight.core.parameters import unwrapped
from gradsight.core.torch_names import refuse_unknown_torch
from gradsight.errors import GradsightError
from gradsight.memory.apply import refuse_second_checkpointing
from gradsight.memory.called_blocks import blocks_of
from gradsight.memory.choose import BlockProblem, Choice, cheapest, cost_of, lowest, peak_of
from gradsight.memory.equal_blocks import problem_by_samples
from gradsight.memory.fake_steps import FakeStep, FakeSteps, problem_of
from gradsight.memory.leftovers import without_leftovers
from gradsight.memory.policy import FULL, NONE, SELECTIVE, Mode, policy_text
from gradsight.memory.predict import fake_device
from gradsight.memory.ranks import group_of
from gradsight.memory.real_branches import real_branches
from gradsight.memory.setting import StepSetting
from gradsight.memory.workload import Build, call_build
from gradsight.values.memory import CheckpointingPlan
from gradsight.values.sizes import format_size, parse_size

# Blocks are chosen one by one. Groups of blocks as in Chen et al. (sqrt(n) of them) were tried, and
# single blocks need less memory.
ATTEMPTS = 6
"""How often the limit is tightened when the true peak of a choice lies above its estimate."""

NOTHING = "none"
"""The policy of the setting that a plan starts from."""

Modes = tuple[Mode, ...]


class OverBudget(GradsightError):
    """No choice fits; `smallest` is the plan with the smallest reachable peak."""

    def __init__(self, smallest: CheckpointingPlan) -> None:
        self.smallest = smallest
        self.fact = (
            f"no checkpointing fits {format_size(smallest.budget_bytes)}: the smallest reachable "
            f"peak is {format_size(smallest.predicted_bytes)}, with policy {smallest.policy!r} "
            f"(without checkpointing {format_size(smallest.baseline_bytes)})"
        )
        super().__init__(
            f"{self.fact}. Take a smaller batch, a shorter sequence or an optimizer with less state"
        )


@without_leftovers
def plan_checkpointing(
    build: Build,
    budget: str | int | float,
    *,
    optimizer: str | None = "adamw",
    device: str = "cpu",
    blocks: Sequence[str] | None = None,
) -> CheckpointingPlan:
    """The checkpointing that recomputes least among those whose predicted peak fits the budget.

    Every mode is weighed once on fake tensors; the best combination is then chosen on those numbers
    and its true peak predicted before it is returned. It never costs more than checkpointing all
    blocks, the first few, or recomputing every second product.

    build: makes (model, batch) or (model, batch, loss_fn), as in the README.
    budget: "6GB", "512MiB" or a number of bytes.
    optimizer: its name, for the state that it keeps; None is forward and backward only.
    device: "cpu" or "cuda"; no GPU is needed.
    blocks: the modules that count as blocks, by name or shell pattern; None finds them.
    """
    setting = StepSetting(NOTHING, optimizer, device, blocks)
    return plan_step(build, parse_size(budget), setting)


def plan_step(build: Build, limit: int, setting: StepSetting) -> CheckpointingPlan:
    """The checkpointing that recomputes least among those that fit, on the fullest device."""
    refuse_unknown_torch("memory")
    with group_of(setting) as mesh, fake_device(setting.device) as values:
        workload = call_build(build)
        refuse_second_checkpointing(unwrapped(workload.model))
        meant = blocks_of(workload, setting.blocks)
        with real_branches(values):
            steps = FakeSteps(workload, replace(setting, blocks=meant), mesh)
            return PlanSearch(steps, limit, setting.device).plan()


class PlanSearch:
    """Tries candidates in turn and keeps the cheapest that truly fits."""

    def __init__(self, steps: FakeSteps, limit: int, device: str) -> None:
        self._steps = steps
        self._limit = limit
        self._device = device
        self._count = len(steps.blocks)
        self._tried: dict[Modes, FakeStep] = {}

    def plan(self) -> CheckpointingPlan:
        """The cheapest fitting choice, or OverBudget with the smallest."""
        keeping_all = (NONE,) * self._count
        if self._fits(self._try(keeping_all)):
            return self._as_plan(keeping_all)
        modes = self._known_modes()
        problem = problem_by_samples(self._steps, modes)
        if problem is None:
            modes = self._modes()
            problem = problem_of(self._steps, modes)
        if problem is None:
            self._try_first_blocks()
        else:
            self._try_combinations(problem, modes)
        fitting = [tried for tried, step in self._tried.items() if self._fits(step)]
        if not fitting:
            raise OverBudget(self._as_plan(min(self._tried, key=self._peak)))
        return self._as_plan(min(fitting, key=self._flops_and_peak))

    def _fits(self, step: FakeStep) -> bool:
        return step.peak <= self._limit

    def _peak(self, modes: Modes) -> int:
        return self._tried[modes].peak

    def _flops_and_peak(self, modes: Modes) -> tuple[int, int]:
        return self._tried[modes].flops, self._tried[modes].peak

    def _known_modes(self) -> list[Mode]:
        """The modes that a block may be in, the one that keeps everything first."""
        levels = [Mode("selective", level) for level in self._steps.keep_levels()[:-1]]
        return [NONE, FULL, SELECTIVE, *levels]

    def _modes(self) -> list[Mode]:
        """The modes that are weighed, each of them tried on all blocks."""
        modes = [NONE]
        for mode in self._known_modes()[1:]:
            self._try((mode,) * self._count)
            modes.append(mode)
        return modes

    def _try_combinations(self, problem: BlockProblem, modes: Sequence[Mode]) -> None:
        """Choose on estimates, look at the true peak, and tighten until the choice fits."""
        target = self._limit
        for _ in range(ATTEMPTS):
            choice = cheapest(problem, target)
            if choice is None:
                break
            step = self._try(_modes_of(choice, modes))
            if self._fits(step):
                self._try_cheaper_prefix(problem, modes, cost_of(problem, choice))
                return
            target -= max(step.peak - self._limit, self._limit // 1000)
        self._try(_modes_of(lowest(problem), modes))
        self._try((FULL,) * self._count)

    def _try_cheaper_prefix(self, problem: BlockProblem, modes: Sequence[Mode], cost: int) -> None:
        """The longest run of first blocks that would cost less, if by its estimate it may fit.

        An estimate may lie above the true peak, so what the choice refused can fit after all.
        """
        full = modes.index(FULL)
        prefixes = [self._first(length, full) for length in range(self._count)]
        cheaper = [prefix for prefix in prefixes if cost_of(problem, prefix) < cost]
        if cheaper and peak_of(problem, cheaper[-1]) <= 1.05 * self._limit:
            self._try(_modes_of(cheaper[-1], modes))

    def _first(self, length: int, mode: int) -> Choice:
        """The choice of one mode for the first blocks and of the first mode for the others."""
        return (mode,) * length + (0,) * (self._count - length)

    def _try_first_blocks(self) -> None:
        """The shortest run of first blocks that fits, by halving.

        This is left where blocks run more than once or out of order: their weights do not add up.
        """
        too_short = 0
        long_enough = self._count
        while long_enough - too_short > 1:
            middle = (too_short + long_enough) // 2
            step = self._try((FULL,) * middle + (NONE,) * (self._count - middle))
            if self._fits(step):
                long_enough = middle
            else:
                too_short = middle

    def _try(self, modes: Modes) -> FakeStep:
        self._tried[modes] = self._steps.run(modes)
        return self._tried[modes]

    def _as_plan(self, modes: Modes) -> CheckpointingPlan:
        plain = self._steps.uniform(NONE)
        step = self._tried[modes]
        extra_flops = 0.0
        if plain.flops:
            extra_flops = step.flops / plain.flops - 1
        return CheckpointingPlan(
            policy=policy_text(modes),
            blocks=tuple(name for name, _ in self._steps.blocks),
            predicted_bytes=step.peak,
            extra_flops=extra_flops,
            budget_bytes=self._limit,
            baseline_bytes=plain.peak,
            device=self._device,
        )


def _modes_of(choice: Choice, modes: Sequence[Mode]) -> Modes:
    return tuple(modes[number] for number in choice)
