"""Every fault of the table, end to end: found in process, named with its line, kept, and reproduced
elsewhere.
"""

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest

import gradsight
from gradsight.incidents.replay import replay
from incidents.faults import FAULTS, Fault, train

GIVEN = {name: pytest.param(fault, id=name) for name, fault in FAULTS.items()}.values()


@pytest.mark.parametrize("fault", GIVEN)
def test_it_is_named_and_reproduced(fault: Fault, tmp_path: Path) -> None:
    reports: list[Any] = []

    @contextlib.contextmanager
    def watched(model: Any, optimizer: Any) -> Any:
        with gradsight.watch(
            model, optimizer, run_dir=tmp_path, recorder="batch", diagnose_seconds=60
        ) as watch:
            yield watch
            reports.append(watch.report())

    history = train(fault, watched)
    plain = train(fault, lambda model, optimizer: contextlib.nullcontext())
    assert history == plain, [
        place for place, pair in enumerate(zip(history, plain, strict=True)) if pair[0] != pair[1]
    ][:3]

    (finding,) = [finding for finding in reports[0].findings if finding.code == fault.code]
    run = gradsight.open_run(tmp_path)
    incidents = list(run.incidents())
    assert [(incident.step, incident.code) for incident in incidents] == [
        (fault.bad_step, fault.code)
    ], list(run.problems())
    (incident,) = incidents
    recorded = next(each for each in run.findings() if each.code == fault.code)
    assert (
        str(incident.diagnosis) == str(finding.diagnosis) == str(recorded.diagnosis)
    )  # as text: a NaN is not itself
    assert finding.incident == f"incidents/step{fault.bad_step}-{fault.code}"
    assert incident.replayable
    assert run.to_arrow("incidents").column("code").to_pylist() == [fault.code]
    assert f'"row": {fault.samples[0][1]}' in run.to_arrow("findings").to_pylist()[0]["diagnosis"]
    check(fault, incident.diagnosis)

    again = replay(Path(incident.path), fault.build(), 60, incident.diagnosis)
    assert again.reproduced
    assert again.agrees, (incident.diagnosis, again.diagnosis)
    assert not list(run.problems())


def check(fault: Fault, found: Any) -> None:
    """The operation, its module and its line; the samples by name, and their part in it."""
    if fault.operation is None:
        assert found.operation is None
    else:
        operation = found.operation
        assert (operation.operation, operation.phase, operation.module) == (
            fault.operation,
            fault.phase,
            fault.module,
        )
        file, _, line = operation.place.rpartition(":")
        text = Path(file).read_text().splitlines()[int(line) - 1].strip()
        assert operation.source == text
        assert fault.source is None or fault.source in text
    assert [(sample.micro_batch, sample.row) for sample in found.samples][
        : len(fault.samples)
    ] == fault.samples
    worst = found.samples[0]
    assert worst.sample_id == f"{fault.bad_step}-{worst.micro_batch}-{worst.row}"
    assert (worst.share is None) == (not math.isfinite(worst.norm))
    assert worst.share is None or worst.share > 0.9
