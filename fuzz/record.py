"""run.sqlite: sealed again, so that what the checksum would stop comes to light."""

from fuzz.mutate import scratch

from gradsight import open_run
from gradsight.core import rundir
from gradsight.errors import GradsightError
from gradsight.store.record_file import seal

FOLDER = scratch()
METHODS = (
    *("steps", "parameter_stats", "stat_chunks", "histograms", "scalars", "findings"),
    *("problems", "abstentions", "memory", "expert_stats"),
)


def target(data: bytes) -> None:
    """Read all that a run gives."""
    file = FOLDER / rundir.RECORD
    file.write_bytes(data)
    if len(data) > 100:
        with file.open("r+b") as opened:
            seal(opened.fileno())
    run = open_run(FOLDER)
    try:
        for name in METHODS:
            try:
                for _ in getattr(run, name)():
                    pass
            except GradsightError:
                pass
        run.next_step()
    finally:
        run.close()


def corpus() -> list[bytes]:
    """A small run, and the same with three hundred steps."""
    return [_made(5), _made(300)]


def _made(steps: int) -> bytes:
    import numpy as np

    from gradsight.store import tail_format as frames
    from gradsight.store.store import open_store
    from gradsight.values.findings import Finding
    from gradsight.values.histograms import Histogram
    from gradsight.values.steps import Step

    place = scratch()
    store = open_store(place)
    for number in range(steps):
        values = np.array([number + 1.0, 2.0])
        packed = frames.pack_statistics(None, {"l2": values, "max_abs": values / 2})
        store.add_step(Step(number, 1.0, loss=2.0, scalars={"x": 0.5}), ["a", "b"], packed)
    store.add_histograms(1, [Histogram(1, None, -3, (1.0,), (2.0,), 4.0, 0.0, 0.0, 0.0, 7, 7)])
    store.add_tracked(2, {"epoch": 0.5})
    store.add_experts(1, {"a.weight": np.array([1.0, 0.0])})
    store.add_finding(Finding("GS103", "n", "critical", ("a",), 1, "e", "m", "r", "f"))
    store.close()
    return (place / rundir.RECORD).read_bytes()
