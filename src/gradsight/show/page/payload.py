"""Everything that the page of a run knows, as one JSON object. No torch.

Words are made harmless and shareable here, once and for all of them; pictures are packed text.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gradsight.show.markdown import no_text
from gradsight.show.page.encode import encoded_level
from gradsight.show.page.heat import MeasuredRun, encoded_levels, heat_map
from gradsight.show.page.heights import HeatRows
from gradsight.show.page.histograms import (
    CountedRun,
    histograms_over_time,
    looks_at,
    zero_shares,
)
from gradsight.show.page.privacy import run_label, shareable_config
from gradsight.show.page.sections import (
    blind_spots,
    cost_rows,
    dump_rows,
    expert_section,
    finding_section,
    incident_section,
    measured_on,
    memory_table,
    sample_section,
    verdict,
)
from gradsight.show.page.series import run_lines
from gradsight.show.samples import TextOf
from gradsight.show.summary import ReadableRun, Summary
from gradsight.values.plain import plain
from gradsight.values.steps import block_of
from gradsight.values.texts import cleaned, for_terminal

SCHEMA = 1


class ShownRun(MeasuredRun, CountedRun, Protocol):
    """What the page needs of a run beside its summary."""

    @property
    def path(self) -> Path: ...


class WholeRun(ReadableRun, ShownRun, Protocol):
    """All that is shown of a run."""


def run_payload(
    run: ShownRun, summary: Summary, text_of: TextOf = no_text, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The page's data; `text_of` gives a sample's text where that may be shown.

    notes: what is known of the script that was run.
    """
    around = [finding.first_step for finding in summary.health.findings]
    around += [incident.step for incident in summary.incidents]
    heat = heat_map(run, shown_rows(run, summary), summary.steps, around)
    looks = looks_at(run)
    maps: dict[str, Any] = {"norm": encoded_levels(heat)}
    for name, columns in heat.details.items():
        maps[name] = [encoded_level(columns, fine=True)]
    zeros = zero_shares(looks, heat.rows)
    if zeros is not None:
        maps["zeros"] = [encoded_level(zeros, fine=False)]
    return {
        "schema": SCHEMA,
        **run_words(run, summary, text_of, notes),
        "heat": {"rows": row_list(heat.rows), "maps": maps},
        "lines": run_lines(summary.steps),
        "histograms": histograms_over_time(looks, heat.rows),
        "experts": expert_section(summary.experts),
    }


def shown_rows(run: ShownRun, summary: Summary) -> HeatRows:
    """The rows of the picture; a frozen parameter that never had a gradient gets none."""
    parameters = summary.config.get("parameters", ())
    frozen = {each["name"] for each in parameters if not each.get("trainable", True)}
    left_out = frozen - summary.received
    return HeatRows([name for name in run.measured_parameters() if name not in left_out])


def nothing_payload(folder: Path, what: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The same of a folder without a run; `what` says why there is none."""
    words = {
        "run": run_label(folder),
        "status": "warning",
        "sentence": f"{what[:1].upper()}{what[1:]}",
        "counts": "warning",
        "steps": {"count": 0, "first": None, "last": None},
        "findings": [],
        "incidents": [],
        "samples": None,
        "memory": None,
        "dumps": dump_rows([]),
        "blind": blind_spots([], []),
        "cost": None,
        "notes": list(notes),
        "measured": "",
        "judged": True,
        "config": {},
    }
    shown: dict[str, Any] = cleaned(shareable_config(words), for_terminal)
    pictures: dict[str, Any] = {
        "heat": {"rows": [], "maps": {}},
        "lines": run_lines([]),
        "histograms": None,
        "experts": [],
    }
    return {"schema": SCHEMA, **shown, **pictures}


def run_words(
    run: ShownRun, summary: Summary, text_of: TextOf = no_text, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """All but the pictures."""
    findings = summary.health.findings
    steps = summary.steps
    words = {
        "run": run_label(run.path),
        **verdict(summary),
        "steps": {
            "count": len(steps),
            "first": steps[0].step if steps else None,
            "last": steps[-1].step if steps else None,
        },
        "findings": [finding_section(finding, text_of) for finding in findings],
        "incidents": [incident_section(each, text_of) for each in summary.incidents],
        "samples": sample_section(summary.samples, text_of),
        "memory": memory_table(summary.memory),
        "dumps": dump_rows(summary.dumps),
        "blind": blind_spots(summary.problems, summary.health.abstained),
        "cost": cost_rows(_cost_of(run)),
        "notes": list(notes),
        "measured": measured_on(summary),
        "judged": summary.is_judged,
        "config": plain(summary.config),
    }
    shown: dict[str, Any] = cleaned(shareable_config(words), for_terminal)
    return shown


def _cost_of(run: ShownRun) -> Any:
    """What the watch recorded of its own cost; records of earlier versions have none."""
    measure = getattr(run, "cost", None)
    return measure() if callable(measure) else None


def row_list(rows: HeatRows) -> list[dict[str, Any]]:
    """Parameters, then blocks, in the order of the levels' rows."""
    shown: list[dict[str, Any]] = [
        {"name": for_terminal(name), "block": for_terminal(block_of(name))} for name in rows.names
    ]
    for block, members in rows.blocks.items():
        shown.append(
            {"name": for_terminal(block), "block": for_terminal(block), "of": len(members)}
        )
    return shown


def embedded(payload: dict[str, Any]) -> str:
    """The payload as JSON that can stand inside a script element of HTML."""
    # Strict JSON, and no sign in it that could end the element.
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
