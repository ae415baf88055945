"""How good the verdicts are: recall per planted fault with the right code, false alarms on healthy
runs, step of first alarm.

The thresholds were chosen by looking at the MLP and the GPT only; the CNN and the RNN are shown for
what they are.

    python benchmarks/faults.py [--seeds 3] [--only NAME] [--healthy-seeds 1]
"""

import argparse
import math
import statistics
import warnings
from collections import defaultdict
from typing import Any

import rank_zoo
import torch
import zoo

from gradsight.values.health_report import HealthReport

CHOSEN = ("mlp", "gpt")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy-seeds", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ranks: list[dict[str, Any]] = []
    found = run_faults(options.seeds, options.only, ranks)
    alarms, runs = run_healthy(options.healthy_seeds, options.only, ranks)
    for title, kinds in (("chosen on", CHOSEN), ("shown on", ("cnn", "rnn"))):
        caught = [right for kind, right in found if kind in kinds]
        false = sum(count for kind, count in alarms if kind in kinds)
        healthy = sum(1 for kind in runs if kind in kinds)
        if caught and healthy:
            recall = sum(caught) / len(caught)
            precision = sum(caught) / max(1, sum(caught) + false)
            print(
                f"\n{title} {', '.join(kinds)}: recall {recall:.3f} of {len(caught)} faulty runs, "
                f"precision {precision:.3f}, false alarms in {false} of {healthy} healthy runs"
            )


def run_faults(seeds: int, only: str, ranks: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Every planted fault, a printed line for each; healthy runs on two ranks go into `ranks`."""
    found: list[tuple[str, bool]] = []
    rows: dict[str, list[tuple[str, bool, int | None, int | None, list[str]]]] = defaultdict(list)
    for name, kind, codes, plan_of in zoo.faults():
        for seed in range(seeds if only in name else 0):
            plan = plan_of(seed)
            report = plan.run()
            right = [finding.first_step for finding in report.findings if finding.code in codes]
            seen = [finding.code for finding in report.findings]
            rows[name].append(
                (kind, bool(right), min(right, default=None), broke_at(plan.losses), seen)
            )
            found.append((kind, bool(right)))
    for run in rank_zoo.launch(seeds, only):
        codes = set(rank_zoo.RIGHT[run["name"]])
        if codes:
            right = [first for code, first, _ in run["findings"] if code in codes]
            seen = [code for code, *_ in run["findings"]]
            rows[run["name"]].append(
                (run["kind"], bool(right), min(right, default=None), broke_at(run["losses"]), seen)
            )
            found.append((run["kind"], bool(right)))
        else:
            ranks.append(run)
    print(f"{'fault':28} {'recall':>9}  first alarm (loss broke at)  missed")
    for name, results in rows.items():
        caught = sum(right for _, right, *_ in results)
        alarm = [first for _, _, first, _, _ in results if first is not None]
        broke = [step for *_, step, _ in results if step is not None]
        when = f"step {statistics.median(alarm):g}" if alarm else "–"
        missed = [
            f"{kind}: {' '.join(codes) or 'nothing'}"
            for kind, right, _, _, codes in results
            if not right
        ]
        loss = f"({statistics.median(broke):g})" if broke else "(never)"
        recall = f"{caught:4}/{len(results):<4}"
        print(
            f"{name:28} {recall}  {when:10} {loss:16} {'; '.join(sorted(set(missed)))}", flush=True
        )
    return found


def broke_at(losses: list[float]) -> int | None:
    """The step where the loss is not finite any more, or three times what it began with."""
    limit = math.inf
    if all(map(math.isfinite, losses[:5])):
        limit = 3 * statistics.median(losses[:5])
    for step, loss in enumerate(losses):
        if not math.isfinite(loss) or loss > limit:
            return step
    return None


def run_healthy(
    seeds: int, only: str, ranks: list[dict[str, Any]]
) -> tuple[list[tuple[str, int]], list[str]]:
    """Every healthy recipe; prints the false alarms."""
    alarms: list[tuple[str, int]] = []
    runs: list[str] = []
    print("\nhealthy runs with an alarm")
    for name, kind, plan_of in zoo.healthy():
        for seed in range(100, 100 + seeds if only in name else 0):
            say(name, kind, told([plan_of(seed).run()]), alarms, runs)
    for seed in range(100, 100 + seeds if only in "GAN" else 0):
        say("GAN", "mlp", told(zoo.adversaries("mlp", seed)), alarms, runs)
    for run in ranks:
        say(run["name"], run["kind"], run["findings"], alarms, runs)
    print(f"  {len(alarms)} of {len(runs)}")
    return alarms, runs


def told(reports: list[HealthReport]) -> list[tuple[str, int, str]]:
    return [
        (finding.code, finding.first_step, finding.evidence)
        for report in reports
        for finding in report.findings
    ]


def say(
    name: str,
    kind: str,
    findings: list[tuple[str, int, str]],
    alarms: list[tuple[str, int]],
    runs: list[str],
) -> None:
    runs.append(kind)
    if findings:
        alarms.append((kind, 1))
    for code, first, evidence in findings:
        print(f"  {name}, {kind}: {code} at step {first}: {evidence}", flush=True)


if __name__ == "__main__":
    main()
