"""A score file: as it is, and sealed again as a stranger would."""

from gradsight.errors import GradsightError
from gradsight.store.score_seal import prove, sealed
from gradsight.store.scores import load_scores

COLUMNS = ["step", "sample_id", "domain", "target", "score", "lr", "clip_coef"]


def target(data: bytes) -> None:
    """Read all columns, and those that every file has."""
    try:
        prove(data, "iter_000010.parquet")
    except GradsightError:
        try:
            data = sealed(data)
        except ValueError:
            raise GradsightError("no parquet file") from None
    load_scores(data, "iter_000010.parquet").to_pylist()
    load_scores(data, "iter_000010.parquet", COLUMNS).to_pylist()


def corpus() -> list[bytes]:
    """Numbers as ids, and texts; with and without the parts of parameters."""
    import pyarrow
    import pyarrow.parquet

    from gradsight.store.scores import ScoreFile, score_schema

    made = []
    for kind, ids in ((pyarrow.int64(), [1, 2]), (pyarrow.string(), ["a", "b"])):
        for form in (ScoreFile(), ScoreFile(("x", "y"), has_direction=True)):
            rows = [
                {"step": 0, "sample_id": each, "domain": "web", "target": "t", "score": 0.5,
                 "lr": 0.1, "clip_coef": None, "by_parameter": [1.0, None], "direction": "plain"}
                for each in ids
            ]  # fmt: skip
            table = pyarrow.Table.from_pylist(rows, schema=score_schema(kind, form))
            sink = pyarrow.BufferOutputStream()
            pyarrow.parquet.write_table(table, sink)
            made.append(sink.getvalue().to_pybytes())
    return [*made, *[sealed(each) for each in made]]
