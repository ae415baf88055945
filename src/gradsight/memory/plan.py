"""The cheapest checkpointing that fits a budget of memory, found by fake runs."""

from collections.abc import Sequence
from contextlib import ExitStack

from gradsight.errors import GradsightError, UsageError
from gradsight.memory.choose import Choice, Problem, cheapest, cost_of, lowest, peak_of
from gradsight.memory.cuda import GRANULE, cuda_operators
from gradsight.memory.fake import data_dependence_refused, fake_tensors, sequences_not_packed
from gradsight.memory.fake_steps import Bench, Trial, problem_of
from gradsight.memory.policy import ALTERNATE, FULL, NONE, SELECTIVE, Mode, policy_text
from gradsight.memory.predict import DEVICES
from gradsight.memory.workload import Build, call_build
from gradsight.values.memory import CheckpointingPlan
from gradsight.values.sizes import format_size, parse_size

ATTEMPTS = 6
"""How often the limit is tightened when the true peak of a choice lies above its estimate."""

Modes = tuple[Mode, ...]


class OverBudget(GradsightError):
    """No choice fits; `smallest` is the plan with the smallest reachable peak."""

    def __init__(self, smallest: CheckpointingPlan) -> None:
        self.smallest = smallest
        super().__init__(
            f"no checkpointing fits {format_size(smallest.budget_bytes)}: the smallest reachable peak is "
            f"{format_size(smallest.predicted_bytes)}, with policy {smallest.policy!r} (without checkpointing "
            f"{format_size(smallest.baseline_bytes)}). Take a smaller batch, a shorter sequence or an optimizer "
            "with less state"
        )


def plan_checkpointing(
    build: Build,
    budget: str | int | float,
    *,
    optimizer: str | None = "adamw",
    device: str = "cpu",
    blocks: Sequence[str] | None = None,
) -> CheckpointingPlan:
    """The choice of blocks and kept operations that recomputes least and whose predicted peak fits
    the budget.

    Every mode is weighed once on fake tensors; the best combination is then chosen on those numbers
    and its true peak predicted before it is returned. It never costs more than checkpointing all
    blocks, the first few, or recomputing every second product.
    """
    limit = parse_size(budget)
    if device not in DEVICES:
        raise UsageError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        if device == "cuda":
            stack.enter_context(cuda_operators())
        stack.enter_context(data_dependence_refused())
        granule = GRANULE if device == "cuda" else 1
        bench = Bench(call_build(build), optimizer, device, granule, blocks)
        stack.enter_context(sequences_not_packed())
        return Search(bench, limit, device).plan()


class Search:
    """Candidates are tried in turn; the cheapest that truly fits is kept."""

    def __init__(self, bench: Bench, limit: int, device: str) -> None:
        self._bench = bench
        self._limit = limit
        self._device = device
        self._count = len(bench.blocks)
        self._tried: dict[Modes, Trial] = {}

    def plan(self) -> CheckpointingPlan:
        """The cheapest fitting choice, or OverBudget with the smallest."""
        if self._try((NONE,) * self._count).peak <= self._limit:
            return self._as_plan((NONE,) * self._count)
        modes = self._modes()
        problem = problem_of(self._bench, modes)
        if problem is None:
            self._try_first_blocks()
        else:
            self._try_combinations(problem, modes)
        fitting = [tried for tried in self._tried if self._tried[tried].peak <= self._limit]
        if not fitting:
            raise OverBudget(
                self._as_plan(min(self._tried, key=lambda tried: self._tried[tried].peak))
            )
        return self._as_plan(
            min(fitting, key=lambda tried: (self._tried[tried].flops, self._tried[tried].peak))
        )

    def _modes(self) -> list[Mode]:
        """The modes that work on this model, each of them tried on all blocks."""
        levels = [Mode("selective", level) for level in self._bench.keep_levels()[:-1]]
        modes = [NONE]
        for mode in (FULL, SELECTIVE, ALTERNATE, *levels):
            try:
                self._try((mode,) * self._count)
            except RuntimeError as error:
                if "cached during selective" not in str(error):
                    raise
                continue  # results that this mode would keep are changed in place
            modes.append(mode)
        return modes

    def _try_combinations(self, problem: Problem, modes: Sequence[Mode]) -> None:
        """Choose on estimates, look at the truth, tighten until the choice fits; then let a simpler
        one compete.
        """
        target = self._limit
        for _ in range(ATTEMPTS):
            choice = cheapest(problem, target)
            if choice is None:
                break
            peak = self._try(_modes_of(choice, modes)).peak
            if peak <= self._limit:
                self._try_cheaper_prefix(problem, modes, cost_of(problem, choice))
                return
            target -= max(peak - self._limit, self._limit // 1000)
        self._try(_modes_of(lowest(problem), modes))

    def _try_cheaper_prefix(self, problem: Problem, modes: Sequence[Mode], cost: int) -> None:
        """The longest run of first blocks that would cost less, if its estimate says that it may
        fit.
        """
        full = modes.index(FULL)
        lengths = [k for k in range(self._count) if cost_of(problem, self._first(k, full)) < cost]
        if lengths and peak_of(problem, self._first(lengths[-1], full)) <= 1.05 * self._limit:
            self._try(_modes_of(self._first(lengths[-1], full), modes))

    def _first(self, length: int, mode: int) -> Choice:
        return (mode,) * length + (0,) * (self._count - length)

    def _try_first_blocks(self) -> None:
        """Where blocks run more than once or out of order: the shortest run of first blocks that
        fits, by halving.
        """
        low, high = 0, self._count
        while high - low > 1:
            middle = (low + high) // 2
            fits = (
                self._try((FULL,) * middle + (NONE,) * (self._count - middle)).peak <= self._limit
            )
            low, high = (low, middle) if fits else (middle, high)

    def _try(self, modes: Modes) -> Trial:
        self._tried[modes] = self._bench.run(modes)
        return self._tried[modes]

    def _as_plan(self, modes: Modes) -> CheckpointingPlan:
        plain, trial = self._bench.uniform(NONE), self._tried[modes]
        return CheckpointingPlan(
            policy=policy_text(modes),
            blocks=tuple(name for name, _ in self._bench.blocks),
            predicted_bytes=trial.peak,
            extra_flops=trial.flops / plain.flops - 1 if plain.flops else 0.0,
            budget_bytes=self._limit,
            baseline_bytes=plain.peak,
            device=self._device,
        )


def _modes_of(choice: Choice, modes: Sequence[Mode]) -> Modes:
    return tuple(modes[number] for number in choice)
