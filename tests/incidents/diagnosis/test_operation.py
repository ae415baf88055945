"""The guilty operation: every planted fault is named with module, line and samples; healthy models
are left alone.
"""

import pytest
import torch

from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose
from incidents.diagnosis import faults
from incidents.diagnosis.capture import line_of, step
from incidents.diagnosis.faults import FAULTS, HEALTHY, Fault


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    torch.manual_seed(0)
    model, batches = fault.build(), fault.batches()
    passes, loss = step(model, batches, fault.loss)
    assert not all(
        bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None
    ), "the fault is planted"
    if fault.compiled is not None:
        fault.compiled(model)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite", loss_root=loss))
    operation = found.operation
    assert operation is not None, found.notes
    assert (operation.operation, operation.phase, operation.module) == (
        fault.operation,
        fault.phase,
        fault.module,
    ), found
    assert_place(operation.place, fault)
    assert operation.detail.startswith(fault.detail)
    assert {(sample.micro_batch, sample.row) for sample in found.samples} == fault.samples, found
    assert operation.micro_batch == min(fault.samples)[0]
    assert operation.inputs or operation.operation == "full"


def assert_place(place: str | None, fault: Fault) -> None:
    if fault.library:
        assert fault.library in (place or "")
    else:
        assert place == (line_of(fault.marker, faults.__file__) if fault.marker else None)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_model_is_left_alone(name: str) -> None:
    build, batch, loss_of = HEALTHY[name]
    torch.manual_seed(0)
    model = build()
    passes, loss = step(model, [batch()], loss_of)
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite", loss_root=loss))
    assert found.operation is None, found.operation
    assert "run again, everything was finite" in found.notes[0]
