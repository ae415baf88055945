"""How good the verdicts are: recall per planted fault with the right code, false alarms on healthy runs, step of first alarm.

The thresholds were chosen by looking at the MLP and the GPT only; the CNN and the RNN are shown for what they are.

    python benchmarks/faults.py [--seeds 3] [--only NAME] [--healthy-seeds 1]
"""

import sys

sys.path.append(sys.path.pop(0))  # this folder last: its statistics.py must not hide the standard library's

import argparse
import math
import statistics
import warnings
from collections import defaultdict

import torch
import zoo

from gradsight.verdict import HealthReport

CHOSEN = ("mlp", "gpt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy-seeds", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = run_faults(options.seeds, options.only)
    alarms, runs = run_healthy(options.healthy_seeds, options.only)
    for title, kinds in (("chosen on", CHOSEN), ("shown on", ("cnn", "rnn"))):
        caught = [right for kind, right in found if kind in kinds]
        false = sum(count for kind, count in alarms if kind in kinds)
        healthy = sum(1 for kind in runs if kind in kinds)
        if caught and healthy:
            precision = sum(caught) / max(1, sum(caught) + false)
            print(
                f"\n{title} {', '.join(kinds)}: recall {sum(caught) / len(caught):.3f} of {len(caught)} faulty runs,", end=" "
            )
            print(f"precision {precision:.3f}, false alarms in {false} of {healthy} healthy runs")


def run_faults(seeds: int, only: str) -> list[tuple[str, bool]]:
    """Every planted fault; prints one line per fault."""
    found: list[tuple[str, bool]] = []
    rows: dict[str, list[tuple[str, bool, int | None, int | None, list[str]]]] = defaultdict(list)
    for name, kind, codes, plan_of in zoo.faults():
        for seed in range(seeds if only in name else 0):
            plan = plan_of(seed)
            report = plan.run()
            right = [finding.first_step for finding in report.findings if finding.code in codes]
            seen = [finding.code for finding in report.findings]
            rows[name].append((kind, bool(right), min(right, default=None), broke_at(plan.losses), seen))
            found.append((kind, bool(right)))
    print(f"{'fault':28} {'recall':>9}  first alarm (loss broke at)  missed")
    for name, results in rows.items():
        caught = sum(right for _, right, *_ in results)
        alarm = [first for _, _, first, _, _ in results if first is not None]
        broke = [step for *_, step, _ in results if step is not None]
        when = f"step {statistics.median(alarm):g}" if alarm else "–"
        missed = [f"{kind}: {' '.join(codes) or 'nothing'}" for kind, right, _, _, codes in results if not right]
        loss = f"({statistics.median(broke):g})" if broke else "(never)"
        print(f"{name:28} {caught:4}/{len(results):<4}  {when:10} {loss:16} {'; '.join(sorted(set(missed)))}", flush=True)
    return found


def broke_at(losses: list[float]) -> int | None:
    """The step where the loss is not finite any more, or three times what it began with."""
    limit = 3 * statistics.median(losses[:5]) if all(map(math.isfinite, losses[:5])) else math.inf
    return next((step for step, loss in enumerate(losses) if not math.isfinite(loss) or loss > limit), None)


def run_healthy(seeds: int, only: str) -> tuple[list[tuple[str, int]], list[str]]:
    """Every healthy recipe; prints the false alarms."""
    alarms: list[tuple[str, int]] = []
    runs: list[str] = []
    print("\nhealthy runs with an alarm")
    for name, kind, plan_of in zoo.healthy():
        for seed in range(100, 100 + seeds if only in name else 0):
            say(name, kind, [plan_of(seed).run()], alarms, runs)
    for seed in range(100, 100 + seeds if only in "GAN" else 0):
        say("GAN", "mlp", zoo.adversaries("mlp", seed), alarms, runs)
    print(f"  {len(alarms)} of {len(runs)}")
    return alarms, runs


def say(name: str, kind: str, reports: list[HealthReport], alarms: list[tuple[str, int]], runs: list[str]) -> None:
    runs.append(kind)
    findings = [finding for report in reports for finding in report.findings]
    if findings:
        alarms.append((kind, 1))
        for finding in findings:
            print(
                f"  {name}, {kind}: {finding.code} {finding.name} at step {finding.first_step}: {finding.evidence}", flush=True
            )


if __name__ == "__main__":
    main()
