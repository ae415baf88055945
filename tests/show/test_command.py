"""gradsight influence, and the samples in the report: what is shown, what is exported, what is
refused.
"""

import json
import math
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsight
from gradsight.cli import main
from gradsight.errors import WRONG_USAGE
from show.scored import ordinary, row, write


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["influence", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_shows_best_and_worst_samples_and_domains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said(capsys, ordinary(tmp_path), "--top", 2)
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) < 80
    assert "\033" not in out
    assert "Influence on 'val': 180 scores of 10 samples, steps 2 to 19" in lines
    best = lines.index("Best samples")
    assert [line.split()[2:] for line in lines[best + 2 : best + 4]] == [
        ["9", "prose"],
        ["8", "prose"],
    ]
    worst = lines.index("Worst samples")
    assert [line.split()[:4] for line in lines[worst + 2 : worst + 4]] == [
        ["-0.36", "18x", "0", "noise"],
        ["-0.12", "18x", "1", "noise"],
    ]
    domains = lines.index("Domains, the best first")
    assert [line.split()[3] for line in lines[domains + 2 : domains + 5]] == [
        "prose",
        "code",
        "noise",
    ]
    assert "mean +0.72; 20.0% of the samples are below 0" in out
    assert "No text of samples here: only runs of `gradsight train` say what they read." in out


def test_by_domain_shows_every_domain_and_no_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path,
        10,
        [
            row(step, f"{step}-{k}", k - 5.0, f"domain {k:02}")
            for step in range(9)
            for k in range(40)
        ],
    )
    _, short, _ = said(capsys, tmp_path)
    assert "… 32 more: --by domain" in short
    _, full, _ = said(capsys, tmp_path, "--by", "domain")
    assert sum("domain " in line for line in full.splitlines()) >= 40
    assert "Best samples" not in full


def test_raw_scores_are_as_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 10, [row(0, 1, 1e-5), row(0, 2, -2e-5)])
    code, out, _ = said(capsys, tmp_path, "--raw")
    assert code == 0
    assert "Raw scores, as recorded: they shrink as training goes on." in out
    assert "-2.00e-05" in out
    assert "+1.00e-05" in out


def test_several_targets_are_named_and_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path,
        10,
        [
            row(0, k, sign * (k + 1), target=name)
            for k in range(3)
            for name, sign in (("all", 1), ("mail", -1))
        ],
    )
    _, out, _ = said(capsys, tmp_path, "--target", "mail")
    assert "Influence on 'mail'" in out
    assert "Further targets: all (see --target)." in out
    code, _, error = said(capsys, tmp_path, "--target", "male")
    assert code == WRONG_USAGE
    assert "there is no target 'male' in this run; it has all, mail" in error


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 10, [row(0, 1, math.nan)])
    ordinary(tmp_path / "more")
    code, out, _ = said(capsys, tmp_path / "more", "--json", "--top", 1)
    told = json.loads(out)
    assert code == 0
    assert (told["target"], told["samples"], told["scores"], told["below_zero"]) == (
        "val",
        10,
        180,
        0.2,
    )
    assert [each["sample_id"] for each in told["best"] + told["worst"]] == ["9", "0"]
    assert told["worst"][0]["text"] is None
    assert told["worst"][0]["seen"] == 18
    assert [each["name"] for each in told["domains"]] == ["prose", "code", "noise"]
    assert sum(told["histogram"]["counts"]) == 10


def test_what_could_move_the_cursor_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path,
        10,
        [row(0, "a\x1b[2J", 1.0, "b\x1b]0;title\x07\n"), row(0, "b", 0.5, "漢字" * 20)],
    )
    _, out, _ = said(capsys, tmp_path)
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "a·[2J" in out


def test_scores_that_are_not_finite_are_counted_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(ordinary(tmp_path), 30, [row(20, 0, math.nan), row(20, 1, math.inf)])
    _, out, _ = said(capsys, tmp_path)
    assert "2 scores are NaN or infinite; they count nowhere." in out
    assert "-0.36" in out, "the mean of sample 0 is as without the NaN"


def test_a_damaged_file_is_named_and_the_rest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ordinary(tmp_path)
    damaged = tmp_path / "grad_dotprods" / "iter_000010.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    code, out, _ = said(capsys, tmp_path)
    assert code == 0
    assert f"left out: {damaged} cannot be read:" in out
    assert "steps 11 to 19" in out
    (tmp_path / "grad_dotprods" / "iter_000020.parquet").write_bytes(b"PAR1")
    code, _, error = said(capsys, tmp_path)
    assert code == 2
    assert f"holds no scores that can be read: {damaged} cannot be read:" in error


def test_a_file_with_other_columns_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = write(ordinary(tmp_path), 30, [])
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"step": [1], "loss": [2.0]}), strange)
    _, out, _ = said(capsys, tmp_path)
    assert f"left out: {strange} cannot be read: " in out


def test_a_run_without_scores_says_how_to_get_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = said(capsys, tmp_path)
    assert code == WRONG_USAGE
    assert "has no scores: there is no grad_dotprods/iter_*.parquet in it" in error
    assert "GhostEngine(..., run_dir=" in error
    code, _, error = said(capsys, tmp_path / "nowhere")
    assert code == WRONG_USAGE
    assert "there is no run directory at" in error
    folder = tmp_path / "grad_dotprods"
    folder.mkdir()
    code, _, error = said(capsys, folder)
    assert code == WRONG_USAGE
    assert "is the folder of a run's scores: give the run, its parent" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top", "0"], "--top must be 1 or more, got 0"),
        (
            ["--export", "keep.json"],
            "--export takes NAME.txt (ids to keep) or NAME.csv (weights), got keep.json",
        ),
        (
            ["--drop", "0.1"],
            "--drop says what --export leaves out: give --export NAME.txt or NAME.csv too",
        ),
        (
            ["--export", "k.txt", "--drop", "10"],
            "--drop is a share of the samples, at least 0 and below 1",
        ),
    ],
)
def test_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    code, _, error = said(capsys, ordinary(tmp_path), *options)
    assert code == WRONG_USAGE
    assert message in error


def test_an_empty_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 10, [row(0, 1, -1.0), row(0, 2, -2.0)])
    for name, message in (
        ("keep.txt", "nothing would be left to keep"),
        ("weights.csv", "every weight would be 0"),
    ):
        code, _, error = said(capsys, tmp_path, "--export", tmp_path / name)
        assert code == WRONG_USAGE
        assert message in error
        assert not (tmp_path / name).exists()
    code, _, error = said(
        capsys, tmp_path, "--export", tmp_path / "nowhere" / "keep.txt", "--drop", 0.5
    )
    assert code == WRONG_USAGE
    assert "cannot be written" in error


DATASET = TensorDataset(torch.arange(10))
SAMPLERS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "influence" / "samplers.py"))


def test_keep_list_for_a_plain_sampler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = tmp_path / "keep.txt"
    code, out, _ = said(capsys, ordinary(tmp_path), "--export", keep)
    assert code == 0
    assert f"{keep}: 8 samples to keep, 2 left out" in out
    loader = DataLoader(DATASET, batch_size=4, sampler=SAMPLERS["kept"](str(keep)))
    assert sorted(torch.cat([batch for (batch,) in loader]).tolist()) == list(range(2, 10))
    said(capsys, tmp_path, "--export", keep, "--drop", 0.5)
    assert {int(line) for line in keep.read_text().splitlines()[1:]} == {5, 6, 7, 8, 9}


def test_weights_for_a_plain_sampler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.csv"
    code, out, _ = said(capsys, ordinary(tmp_path), "--export", file)
    assert code == 0
    assert "the weights of 10 samples; samples that are not in it weigh 1" in out
    sampler = SAMPLERS["weighted"](str(file), 12)
    weights = sampler.weights.tolist()
    assert weights[0] == weights[1] == 0
    assert sum(weights[:10]) == pytest.approx(10, rel=1e-3)
    assert weights[10:] == [1.0, 1.0], "never scored"
    assert weights[9] / weights[2] == pytest.approx(7.5 / 0.5, rel=1e-3)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=4, sampler=sampler)
    drawn = torch.cat([batch for _ in range(20) for (batch,) in loader]).tolist()
    assert drawn.count(9) > drawn.count(3) > drawn.count(0) == 0


def test_weights_by_domain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.csv"
    said(capsys, ordinary(tmp_path), "--export", file, "--by", "domain")
    weights = dict(line.split(",") for line in file.read_text().splitlines()[2:])
    assert weights["0"] == weights["1"] == "0"
    assert (
        len({weights[str(number)] for number in range(2, 6)})
        == len({weights[str(number)] for number in range(6, 10)})
        == 1
    )
    write(tmp_path / "bare", 10, [row(0, 1, 1.0, None)])
    code, _, error = said(capsys, tmp_path / "bare", "--export", file, "--by", "domain")
    assert code == WRONG_USAGE
    assert "--by domain: the samples of this run have no domains" in error
    assert (
        "The samples of this run have no domains."
        in said(capsys, tmp_path / "bare", "--by", "domain")[1]
    )


def train_a_little(run_dir: Path) -> None:
    """A real run of a watched model with an engine."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    target = (torch.randn(8, 4), torch.randint(0, 2, (8,)))
    engine = gradsight.GhostEngine(model, loss_of, target, optimizer=optimizer, run_dir=run_dir)
    with gradsight.watch(model, optimizer, run_dir=run_dir):
        for _ in range(4):
            with engine.observe(sample_ids=[3, 1, 2], domains=["a|b", "c", "c"]):
                loss_of(model, (torch.randn(3, 4), torch.randint(0, 2, (3,)))).backward()
            optimizer.step()
            optimizer.zero_grad()
    engine.close()


def test_the_report_shows_samples_of_a_real_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_a_little(tmp_path)
    assert main(["report", str(tmp_path)]) in (0, 1)
    report = (tmp_path / "report.md").read_text()
    assert "## Samples: their influence on 'validation'" in report
    assert r"| a\|b | " in report
    assert "12 scores of 3 samples, steps 0 to 3" in report
    table, _ = gradsight.open_run(tmp_path).score_table()
    scores = gradsight.open_run(tmp_path).scores()
    assert table.to_pylist() == [asdict(score) for score in scores]
    (tmp_path / "grad_dotprods" / "iter_000004.parquet").write_bytes(b"nonsense")
    assert main(["report", str(tmp_path)]) in (0, 1)
    report = (tmp_path / "report.md").read_text()
    assert "## What Gradsight could not do" in report
    assert "iter_000004.parquet cannot be read" in report


def test_no_torch_is_imported(tmp_path: Path) -> None:
    ordinary(tmp_path)
    code = f"from gradsight.cli import main; main(['influence', {str(tmp_path)!r}])\n"
    code += "import sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Best samples" in done.stdout


def test_shares_are_said_to_be_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = ordinary(tmp_path)
    code, out, _ = said(capsys, run_dir, "--share")
    assert code == 0
    assert "Shares of the decrease that each step predicted" in out
    code, out, _ = said(capsys, run_dir, "--share", "--json")
    found = json.loads(out)
    assert (found["share"], found["normalised"]) == (True, False)
    assert found["steps_left_out"] == 0
    code, _, err = said(capsys, run_dir, "--share", "--raw")
    assert code == 64
    assert "give one of them" in err
