"""Incidents in a run that a stranger has sent: no link in it is followed."""

from pathlib import Path

import pytest

from gradsight.errors import RunError
from gradsight.incidents.bundle import Bundle, remove_unfinished
from gradsight.store.incident_format import encode_document
from gradsight.store.incidents import rank_parts, read_incidents


def test_nothing_is_written_or_removed_behind_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "1-2-rank0.partial").mkdir(parents=True)
    (outside / "1-2-rank0.partial" / "file").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / "incidents").symlink_to(outside)
    remove_unfinished(run, 0)
    with pytest.raises(RunError, match="behind a link"):
        Bundle(run)
    assert read_incidents(run) == []
    (run / "incidents").unlink()
    (run / "incidents").mkdir()
    (run / "incidents" / "1-2-rank0.partial").symlink_to(outside)
    remove_unfinished(run, 0)
    assert list((run / "incidents").iterdir()) == []
    bundle = Bundle(run)
    (run / "incidents" / "step1-GS103").symlink_to(outside)
    bundle.finish("step1-GS103", {"step": 1})
    assert not (run / "incidents" / "step1-GS103").is_symlink()
    assert (outside / "1-2-rank0.partial" / "file").read_text() == "precious"


def test_what_a_link_leads_to_is_not_read(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "incident.json").write_text(encode_document({"reason": "not yours"}))
    incidents = tmp_path / "run" / "incidents"
    incidents.mkdir(parents=True)
    (incidents / "step1-GS103").symlink_to(other)
    (incidents / "step1-rank1").symlink_to(other)
    (incidents / "step2-GS103").mkdir()
    (incidents / "step2-GS103" / "incident.json").symlink_to(other / "incident.json")
    found = read_incidents(tmp_path / "run")
    assert [(each.step, each.reason) for each in found] == [(1, ""), (2, "")]
    assert all("behind a link" in str(each.damage) for each in found)
    assert rank_parts(incidents / "step1-GS103") == []
