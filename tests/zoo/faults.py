"""The table of all cases. As a script: recall per planted fault, false alarms on healthy runs.

The cases are split by a hash of their names. Thresholds are chosen on the first half. The second
half is blind: its results measure the checks and are not used to change them.

    python tests/zoo/faults.py [--blind] [--seeds 3] [--only NAME] [--healthy-seeds 1] [--no-ranks]
"""

import argparse
import hashlib
import math
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from zoo import Report, findings_of, loops, mixtures, plans, rank_zoo

Found = list[dict[str, Any]]
"""The findings of a run."""


@dataclass(frozen=True)
class Case:
    """A training run, its fault and the codes that are right for it; healthy without codes."""

    name: str
    kind: str
    codes: frozenset[str]
    run: Callable[[int], tuple[list[Report], list[float]]]

    @property
    def is_blind(self) -> bool:
        """Whether the case is in the half that is not used to choose thresholds."""
        return in_blind_half(f"{self.name}, {self.kind}")


def in_blind_half(name: str) -> bool:
    """Return whether the hash of a name puts it into the blind half."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


def all_cases() -> Iterator[Case]:
    """Every case of one process."""
    for name, kind, codes, plan_of in plans.faults():
        yield Case(name, kind, frozenset(codes), run_of_plan(plan_of))
    for name, kind, plan_of in plans.healthy():
        yield Case(name, kind, frozenset(), run_of_plan(plan_of))
    yield Case("GAN", "mlp", frozenset(), lambda seed: (plans.adversaries("mlp", seed), []))
    for name, codes, loop in (*loops.loops(), *mixtures.mixtures()):
        yield Case(name, "loop", frozenset(codes), lambda seed, loop=loop: (loop(seed), []))


def run_of_plan(
    plan_of: Callable[[int], plans.Plan],
) -> Callable[[int], tuple[list[Report], list[float]]]:
    def run(seed: int) -> tuple[list[Report], list[float]]:
        plan = plan_of(seed)
        return [plan.run()], plan.losses

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blind", action="store_true", help="run the blind half")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy-seeds", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-ranks", action="store_true", help="leave out the runs on two ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [
        case
        for case in all_cases()
        if case.is_blind == options.blind and options.only in f"{case.name}, {case.kind}"
    ]
    on_ranks = []
    if not options.no_ranks:
        on_ranks = rank_zoo.launch(
            (name, kind, seed)
            for name, kind, seed in rank_zoo.all_runs(options.seeds)
            if options.only in f"{name}, {kind}"
            and in_blind_half(f"{name}, {kind}") == options.blind
        )
    caught, faulty = run_faults([case for case in cases if case.codes], options.seeds, on_ranks)
    healthy = [case for case in cases if not case.codes]
    alarms, quiet = run_healthy(healthy, options.healthy_seeds, on_ranks)
    half = "the blind half" if options.blind else "the half to work with"
    print(
        f"\n{half}: recall {caught / max(1, faulty):.3f} ({caught} of {faulty} faulty runs under "
        f"the right code), alarms in {alarms} of {quiet} healthy runs"
    )


def run_faults(cases: list[Case], seeds: int, on_ranks: list[dict]) -> tuple[int, int]:
    """Every planted fault, a printed line for each; how many were found, of how many."""
    rows: dict[str, list[tuple[str, int | None, int | None, list[str]]]] = defaultdict(list)
    print(f"{'fault':28} {'recall':>9}  first alarm (loss broke at)  missed")
    for case in cases:
        for seed in range(seeds):
            reports, losses = case.run(seed)
            rows[case.name].append(judged(case.kind, case.codes, findings_of(reports), losses))
            print(end=".", flush=True)
    for run in on_ranks:
        codes = frozenset(rank_zoo.RIGHT[run["name"]])
        if codes:
            rows[run["name"]].append(judged(run["kind"], codes, run["findings"], run["losses"]))
    print()
    for name, results in rows.items():
        print_fault(name, results)
    all_results = [first for results in rows.values() for _, first, _, _ in results]
    return sum(first is not None for first in all_results), len(all_results)


def judged(
    kind: str, codes: frozenset[str], findings: Found, losses: list[float]
) -> tuple[str, int | None, int | None, list[str]]:
    """Kind, first step of a right finding, where the loss broke, all codes."""
    right = [each["first_step"] for each in findings if each["code"] in codes]
    seen = [each["code"] for each in findings]
    return kind, min(right, default=None), broke_at(losses), seen


def print_fault(name: str, results: list[tuple[str, int | None, int | None, list[str]]]) -> None:
    alarm = [first for _, first, _, _ in results if first is not None]
    broke = [step for _, _, step, _ in results if step is not None]
    when = f"step {statistics.median(alarm):g}" if alarm else "–"
    missed = [
        f"{kind}: {' '.join(codes) or 'nothing'}"
        for kind, first, _, codes in results
        if first is None
    ]
    loss = f"({statistics.median(broke):g})" if broke else "(never)"
    recall = f"{len(alarm):4}/{len(results):<4}"
    print(f"{name:28} {recall}  {when:10} {loss:16} {'; '.join(sorted(set(missed)))}", flush=True)


def broke_at(losses: list[float]) -> int | None:
    """The step where the loss is not finite any more, or three times what it began with."""
    limit = math.inf
    if all(map(math.isfinite, losses[:5])) and losses:
        limit = 3 * statistics.median(losses[:5])
    for step, loss in enumerate(losses):
        if not math.isfinite(loss) or loss > limit:
            return step
    return None


def run_healthy(cases: list[Case], seeds: int, on_ranks: list[dict]) -> tuple[int, int]:
    """Every healthy recipe, and the false alarms printed; how many there are, of how many runs."""
    print("\nhealthy runs with an alarm")
    alarms = 0
    runs = 0
    for case in cases:
        for seed in range(100, 100 + seeds):
            runs += 1
            alarms += print_alarms(case.name, case.kind, findings_of(case.run(seed)[0]))
    for run in on_ranks:
        if not rank_zoo.RIGHT[run["name"]]:
            runs += 1
            alarms += print_alarms(run["name"], run["kind"], run["findings"])
    print(f"  {alarms} of {runs}")
    return alarms, runs


def print_alarms(name: str, kind: str, findings: Found) -> bool:
    for each in findings:
        found = f"{each['code']} at step {each['first_step']}: {each['evidence']}"
        print(f"  {name}, {kind}: {found}", flush=True)
    return bool(findings)


if __name__ == "__main__":
    main()
