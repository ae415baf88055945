"""The report of a run: report.md, report.html and norms.svg, written together. No torch."""

from collections.abc import Sequence
from pathlib import Path

from gradsight.show.markdown import no_text, report_text
from gradsight.show.norm_chart import norm_chart
from gradsight.show.page.assemble import page
from gradsight.show.page.payload import ShownRun, nothing_payload, run_payload
from gradsight.show.samples import TextOf
from gradsight.show.summary import Summary
from gradsight.store.run_files import write_run_report
from gradsight.values.health_report import SIGNS
from gradsight.values.texts import for_markdown

_NOTHING = "no optimizer step was seen"


def write_reports(
    run: ShownRun, summary: Summary, text_of: TextOf = no_text, notes: Sequence[str] = ()
) -> None:
    """Write all three into the run's folder.

    text_of: a sample's text, where that may be shown; notes: what is known of the script.
    """
    text = report_text(summary, text_of) + script_section(notes)
    html = page(run_payload(run, summary, text_of, notes))
    write_run_report(run.path, text, html, norm_chart(summary))


def write_empty_reports(folder: Path, notes: Sequence[str], failure: str | None = None) -> None:
    """The same of a script whose optimizer never stepped, so that there is no run.

    failure: how the script failed, if it did.
    """
    sign = SIGNS["warning" if failure is None else "critical"]
    what = for_markdown(failure or _NOTHING)
    text = f"# Gradsight report\n\n**{sign} {what}**\n{script_section(notes)}"
    write_run_report(folder, text, page(nothing_payload(folder, failure or _NOTHING, notes)), None)


def script_section(notes: Sequence[str]) -> str:
    """What is known of the script, as a section of report.md."""
    if not notes:
        return ""
    listed = "\n".join(f"- {for_markdown(note)}" for note in notes)
    return f"\n## The script\n\n{listed}\n"
