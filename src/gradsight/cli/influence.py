"""gradsight influence RUN_DIR"""

import sys
from pathlib import Path
from typing import Any, Literal

from gradsight.core import rundir
from gradsight.errors import RunError, UsageError, WrongPlace
from gradsight.show.export import keep_lines, weight_lines
from gradsight.show.influence import Influence, influence_of
from gradsight.show.samples import TextOf, influence_lines
from gradsight.show.text import json_text, wants_colour
from gradsight.store.run_files import write_report
from gradsight.store.scores import readable_scores
from gradsight.train.sample_texts import SampleTexts
from gradsight.values.texts import for_terminal


def influence(
    run_dir: Path,
    /,
    *,
    target: str | None = None,
    top: int = 5,
    by: Literal["sample", "domain"] = "sample",
    raw: bool = False,
    share: bool = False,
    json: bool = False,
    export: Path | None = None,
    drop: float | None = None,
    data: Path | None = None,
    tokenizer: Path | None = None,
) -> int:
    """Show which training samples and domains helped a target's loss, and which hurt it.

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
    share
        Each score as a share of the decrease of the target's loss that its step predicted: divided
        by the sum of the step's scores. Steps that predict no clear decrease do not count.
    json
        Print it as JSON.
    export
        Write a file for `gradsight train --data_weights` or a sampler: NAME.txt gets the ids of
        the samples to keep, one per line; NAME.csv gets sample_id,weight.
    drop
        With --export: leave out this share of the samples, the worst. By default those with a
        score below 0.
    data
        Where the samples' text is: what `gradsight train --data` was given. No path that the run
        itself names is opened.
    tokenizer
        A tokenizer.json, by which the tokens of a .bin are shown as text.
    """
    _refuse_wrong_options(top, export, drop)
    if raw and share:
        raise UsageError("--raw and --share both say what a score is: give one of them")
    _refuse_without_scores(run_dir)
    table, unreadable = readable_scores(run_dir)
    if not len(table):
        reasons = f": {unreadable[0]}" if unreadable else ""
        raise RunError(f"{run_dir / rundir.SCORES} holds no scores that can be read{reasons}")
    sums = influence_of(table, target, raw=raw, share=share)
    texts = SampleTexts(run_dir, _existing(data), tokenizer)
    written = None
    if export is not None:
        written = _export(export, sums, by, drop, texts)
    if json:
        values = {**_as_dict(sums, top, texts), "unreadable": unreadable, "export": written}
        print(json_text(values))
        return 0
    lines = influence_lines(sums, top, texts, by, wants_colour(sys.stdout))
    notes = [f"left out: {text}" for text in unreadable]
    notes += [note for note in (texts.why_not, written) if note]
    if notes:
        lines = [*lines, "", *(for_terminal(note) for note in notes)]
    print("\n".join(lines))
    return 0


def _existing(data: Path | None) -> Path | None:
    if data is not None and not data.exists():
        raise UsageError(f"--data {data}: there is no such file or folder")
    return data


def _refuse_wrong_options(top: int, export: Path | None, drop: float | None) -> None:
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


def _refuse_without_scores(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise WrongPlace(f"there is no run directory at {run_dir}")
    if run_dir.resolve().name == rundir.SCORES:
        raise WrongPlace(f"{run_dir} is the folder of a run's scores: give the run, its parent")
    folder = run_dir / rundir.SCORES
    if not folder.is_dir() or not any(folder.glob(rundir.SCORE_FILES)):
        raise WrongPlace(
            f"{run_dir} has no scores: there is no {rundir.SCORES}/{rundir.SCORE_FILES} in it. "
            f"They are written by `gradsight train` (--method GradDotProd) and by "
            f"GhostEngine(..., run_dir={str(run_dir)!r})"
        )


def _export(file: Path, sums: Influence, by: str, drop: float | None, texts: SampleTexts) -> str:
    """Write the file; returns the note about it."""
    scored = set(sums.sample_ids.tolist())
    head = []
    unscored = []
    numbering = texts.numbering
    if numbering is not None:
        # Ids are numbers of blocks, and mean others in other data: by its stamp the trainer refuses
        # the file there.
        head.append(numbering.stamp)
        everything = map(str, range(numbering.count))
        unscored = [sample_id for sample_id in everything if sample_id not in scored]
    if file.suffix == ".csv":
        lines = weight_lines(sums, by, drop)
        weighed = f"{len(lines) - 1:,} samples"
        note = f"{file}: the weights of {weighed}; samples that are not in it weigh 1"
    else:
        lines = keep_lines(sums, by, drop, unscored)
        left_out = len(scored) + len(unscored) - len(lines)
        note = f"{file}: {len(lines):,} samples to keep, {left_out:,} left out"
        if unscored:
            note += f"; {len(unscored):,} of those kept were never scored"
    rule = "score below 0" if drop is None else f"worst {drop:g}"
    head.append(
        f"# influence on {sums.target!r}, steps {sums.first_step} to {sums.last_step}, "
        f"left out: {rule}, by {by}"
    )
    write_report(file, "\n".join([*head, *lines]) + "\n")
    return note


def _as_dict(sums: Influence, top: int, text: TextOf) -> dict[str, Any]:
    """For --json. Samples stand in the order of their scores, the worst first."""
    counts, edges = sums.histogram()
    few = max(1, min(top, len(sums.scores) // 2))
    last = len(sums.scores) - 1

    def sample(index: int) -> dict[str, Any]:
        sample_id = str(sums.sample_ids[index])
        return {
            "sample_id": sample_id,
            "domain": sums.sample_domains[index],
            "score": float(sums.scores[index]),
            "seen": int(sums.seen[index]),
            "text": text(sample_id),
        }

    return {
        "target": sums.target,
        "targets": list(sums.targets),
        "normalised": sums.normalised,
        "share": sums.is_share,
        "steps_left_out": sums.steps_left_out,
        "first_step": sums.first_step,
        "last_step": sums.last_step,
        "scores": sums.rows,
        "not_finite": sums.not_finite,
        "samples": len(sums.scores),
        "below_zero": float((sums.scores < 0).mean()),
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
        "best": [sample(last - rank) for rank in range(few)],
        "worst": [sample(rank) for rank in range(few)],
        "domains": [
            {**vars(domain), "over_time": list(domain.over_time)} for domain in sums.domains
        ],
    }
