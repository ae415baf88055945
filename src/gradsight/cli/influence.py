"""gradsight influence RUN_DIR"""

import json as json_format
import sys
from pathlib import Path
from typing import Any, Literal

from gradsight.core import rundir
from gradsight.errors import RunError, UsageError
from gradsight.show.export import keep_lines, weight_lines
from gradsight.show.influence import Influence, influence_of
from gradsight.show.samples import TextOf, influence_lines
from gradsight.show.text import wants_colour
from gradsight.store.run_files import write_report
from gradsight.store.scores import all_scores
from gradsight.train.sample_texts import SampleTexts


def influence(
    run_dir: Path,
    /,
    *,
    target: str | None = None,
    top: int = 5,
    by: Literal["sample", "domain"] = "sample",
    raw: bool = False,
    json: bool = False,
    export: Path | None = None,
    drop: float | None = None,
) -> int:
    """Show which training samples and domains helped a target's loss and which hurt it, from the
    scores in a run directory.

    A sample's score is the mean over the times it was seen. Scores are divided by their typical
    size in the step, since raw ones shrink as training goes on, and the first tenth of the run does
    not count.

    Parameters
    ----------
    run_dir
        A directory that `gradsight train` or a GhostEngine with `run_dir=` has written.
    target
        The validation set to look at; by default the one with most scores.
    top
        How many of the best and of the worst samples to show.
    by
        "domain" shows every domain and no samples; with --export, each sample counts as its domain.
    raw
        The scores as recorded, from the first step on.
    json
        Print it as JSON.
    export
        Write a file for `gradsight train --data_weights` or a sampler: NAME.txt gets the ids of the samples to keep, one per
        line; NAME.csv gets sample_id,weight.
    drop
        With --export: leave out this share of the samples, the worst. By default those with a score below 0.
    """
    _check(top, export, drop)
    table, unreadable = all_scores(_folder(run_dir).parent)
    if not len(table):
        reasons = f": {unreadable[0]}" if unreadable else ""
        raise RunError(f"{run_dir / rundir.SCORES} holds no scores that can be read{reasons}")
    found = influence_of(table, target, raw=raw)
    texts = SampleTexts(run_dir)
    written = None if export is None else _export(export, found, by, drop, texts)
    if json:
        print(
            json_format.dumps(
                {**_as_dict(found, top, texts), "unreadable": unreadable, "export": written},
                indent=1,
            )
        )
        return 0
    lines = influence_lines(found, top, texts, by, wants_colour(sys.stdout))
    notes = [*(f"left out: {text}" for text in unreadable), *filter(None, (texts.why_not, written))]
    print("\n".join([*lines, *([""] if notes else []), *notes]))
    return 0


def _check(top: int, export: Path | None, drop: float | None) -> None:
    if top < 1:
        raise UsageError(f"--top must be 1 or more, got {top}")
    if export is not None and export.suffix not in (".txt", ".csv"):
        raise UsageError(
            f"--export takes NAME.txt (ids to keep) or NAME.csv (weights), got {export}"
        )
    if drop is not None and export is None:
        raise UsageError(
            "--drop says what --export leaves out: give --export NAME.txt or NAME.csv too"
        )
    if drop is not None and not 0 <= drop < 1:
        raise UsageError(
            f"--drop is a share of the samples, at least 0 and below 1 (0.1 is a tenth), got {drop}"
        )


def _folder(run_dir: Path) -> Path:
    if not run_dir.is_dir():
        raise RunError(f"there is no run directory at {run_dir}")
    folder = run_dir / rundir.SCORES
    if not folder.is_dir() or not any(folder.glob(rundir.SCORE_FILES)):
        raise RunError(
            f"{run_dir} has no scores: there is no {rundir.SCORES}/{rundir.SCORE_FILES} in it. They are written by `gradsight train` "
            f"(--method GradDotProd) and by GhostEngine(..., run_dir={str(run_dir)!r})"
        )
    return folder


def _export(file: Path, found: Influence, by: str, drop: float | None, texts: SampleTexts) -> str:
    """Write the file; returns what to say of it."""
    known = set(found.sample_ids.tolist())
    everything = [] if texts.samples is None else map(str, range(len(texts.samples)))
    unscored = [sample_id for sample_id in everything if sample_id not in known]
    if file.suffix == ".csv":
        lines = weight_lines(found, by, drop)
        told = (
            f"{file}: the weights of {len(lines) - 1:,} samples; samples that are not in it weigh 1"
        )
    else:
        lines = keep_lines(found, by, drop, unscored)
        told = f"{file}: {len(lines):,} samples to keep, {len(known) + len(unscored) - len(lines):,} left out"
        told += f"; {len(unscored):,} of those kept were never scored" if unscored else ""
    head = [] if texts.samples is None else [texts.samples.stamp]
    rule = "score below 0" if drop is None else f"worst {drop:g}"
    head.append(
        f"# influence on {found.target!r}, steps {found.first_step} to {found.last_step}, left out: {rule}, by {by}"
    )
    write_report(file, "\n".join([*head, *lines]) + "\n")
    return told


def _as_dict(found: Influence, top: int, text: TextOf) -> dict[str, Any]:
    counts, edges = found.histogram()
    few = max(1, min(top, len(found.scores) // 2))

    def sample(place: int) -> dict[str, Any]:
        sample_id = str(found.sample_ids[place])
        told = {
            "sample_id": sample_id,
            "domain": found.sample_domains[place],
            "score": float(found.scores[place]),
        }
        return {**told, "seen": int(found.seen[place]), "text": text(sample_id)}

    return {
        "target": found.target,
        "targets": list(found.targets),
        "normalised": found.normalised,
        "first_step": found.first_step,
        "last_step": found.last_step,
        "scores": found.rows,
        "not_finite": found.not_finite,
        "samples": len(found.scores),
        "below_zero": float((found.scores < 0).mean()),
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
        "best": [
            sample(place) for place in range(len(found.scores) - 1, len(found.scores) - 1 - few, -1)
        ],
        "worst": [sample(place) for place in range(few)],
        "domains": [{**vars(each), "over_time": list(each.over_time)} for each in found.domains],
    }
