"""Parameters that lie on several ranks as DTensor lets them: every number is of the whole."""

from pathlib import Path

import pytest
import torch

import gradsight
from launch import run_ranks
from matrix.meshes import Net, X, Y, loss_of
from matrix.nets import STEPS
from matrix.page import MESHES
from matrix.test_matrix import compare_all

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The runs of four ranks, one of which a single process has begun, and what they printed."""
    folder = tmp_path_factory.mktemp("meshes")
    train_alone(folder / "begun alone")
    return folder, run_ranks(Path(__file__).with_name("meshes.py"), folder, ranks=4)


def train_alone(run_dir: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsight.watch(net, optimizer, run_dir=run_dir, quiet=True):
        for _ in range(STEPS):
            loss_of(net, (X, Y)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_every_mesh_is_exact_or_refused(four_ranks: tuple[Path, str]) -> None:
    folder, said = four_ranks
    assert compare_all(said) == set(MESHES)
    assert not (folder / "pipeline").exists()


@pytest.mark.parametrize(("name", "ranks"), [("begun alone", 4), ("tensor and sharded/watched", 1)])
def test_another_number_of_ranks_continues_a_run(
    name: str, ranks: int, four_ranks: tuple[Path, str]
) -> None:
    folder, _ = four_ranks
    if ranks == 1:
        train_alone(folder / name)
    run = gradsight.open_run(folder / name)
    assert run.config["world_size"] == ranks
    assert [(step.step, step.gradient) for step in run.steps()] == [
        (number, "true") for number in range(2 * STEPS)
    ]
    stats = list(run.parameter_stats())
    assert len(stats) == 2 * STEPS * len(dict(Net().named_parameters()))
    # Both begin with the same weights.
    norms = {step.step: step.total_norm for step in run.steps()}
    assert norms[STEPS] == pytest.approx(norms[0], rel=1e-5)
    assert not list(run.problems())
