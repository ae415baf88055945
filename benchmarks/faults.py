"""How good the verdicts are: recall per planted fault with the right code, false alarms on healthy
runs, step of first alarm.

The cases are split by a hash of their names. Thresholds are chosen by looking at the first half;
the other half is blind: it is run to know, not to mend.

    python benchmarks/faults.py [--blind] [--seeds 3] [--only NAME] [--healthy-seeds 1] [--no-ranks]
"""

import argparse
import hashlib
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import loops
import mixtures
import rank_zoo
import torch
import zoo

from gradsight.values.health_report import HealthReport

Told = list[tuple[str, int, str]]
"""Code, first step and evidence of every finding."""


@dataclass(frozen=True)
class Case:
    """A training run, its fault and the codes that are right for it; healthy without codes."""

    name: str
    kind: str
    codes: frozenset[str]
    run: Callable[[int], tuple[Told, list[float]]]

    @property
    def is_blind(self) -> bool:
        """Whether it is of the half that nobody looks at while thresholds are chosen."""
        return in_blind_half(f"{self.name}, {self.kind}")


def in_blind_half(name: str) -> bool:
    """By a hash of the name: half of all names are."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


def all_cases() -> Iterator[Case]:
    """Every case of one process."""
    for name, kind, codes, plan_of in zoo.faults():
        yield Case(name, kind, frozenset(codes), run_of_plan(plan_of))
    for name, kind, plan_of in zoo.healthy():
        yield Case(name, kind, frozenset(), run_of_plan(plan_of))
    yield Case("GAN", "mlp", frozenset(), lambda seed: (told(zoo.adversaries("mlp", seed)), []))
    for name, codes, loop in (*loops.loops(), *mixtures.mixtures()):
        yield Case(name, "loop", frozenset(codes), lambda seed, loop=loop: (told(loop(seed)), []))


def run_of_plan(plan_of: Callable[[int], zoo.Plan]) -> Callable[[int], tuple[Told, list[float]]]:
    def run(seed: int) -> tuple[Told, list[float]]:
        plan = plan_of(seed)
        return told([plan.run()]), plan.losses

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blind", action="store_true", help="the half that is not looked at")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy-seeds", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-ranks", action="store_true", help="without runs on two processes")
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
        launched = rank_zoo.launch(options.seeds, options.only)
        on_ranks = [
            run
            for run in launched
            if in_blind_half(f"{run['name']}, {run['kind']}") == options.blind
        ]
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
            findings, losses = case.run(seed)
            rows[case.name].append(judged(case.kind, case.codes, findings, losses))
            print(end=".", flush=True)
    for run in on_ranks:
        codes = frozenset(rank_zoo.RIGHT[run["name"]])
        if codes:
            rows[run["name"]].append(judged(run["kind"], codes, run["findings"], run["losses"]))
    print()
    for name, results in rows.items():
        say_fault(name, results)
    all_results = [first for results in rows.values() for _, first, _, _ in results]
    return sum(first is not None for first in all_results), len(all_results)


def judged(
    kind: str, codes: frozenset[str], findings: Told, losses: list[float]
) -> tuple[str, int | None, int | None, list[str]]:
    """Kind, first step of a right finding, where the loss broke, all codes."""
    right = [first for code, first, _ in findings if code in codes]
    seen = [code for code, *_ in findings]
    return kind, min(right, default=None), broke_at(losses), seen


def say_fault(name: str, results: list[tuple[str, int | None, int | None, list[str]]]) -> None:
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
            alarms += say_alarms(case.name, case.kind, case.run(seed)[0])
    for run in on_ranks:
        if not rank_zoo.RIGHT[run["name"]]:
            runs += 1
            alarms += say_alarms(run["name"], run["kind"], run["findings"])
    print(f"  {alarms} of {runs}")
    return alarms, runs


def say_alarms(name: str, kind: str, findings: Told) -> bool:
    for code, first, evidence in findings:
        print(f"  {name}, {kind}: {code} at step {first}: {evidence}", flush=True)
    return bool(findings)


def told(reports: list[HealthReport]) -> Told:
    return [
        (finding.code, finding.first_step, finding.evidence)
        for report in reports
        for finding in report.findings
    ]


if __name__ == "__main__":
    main()
