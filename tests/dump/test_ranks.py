"""Dumps of several ranks, on gloo: what was written by parts is read as a whole."""

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from dump.dumps import is_intact
from gradsight import get_checkpoint_metadata, load_keys
from gradsight.core.group import ProcessGroup
from gradsight.dump.manifest import Manifest, read
from gradsight.errors import UsageError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # of torch's own reader


def check_against_truth(run: Path, step: int, rows: int) -> tuple[Manifest, Manifest]:
    """Full and sampled dump of a step equal what torch itself gathered, bit for bit; torch's reader
    agrees.
    """
    assert not dist.is_initialized()
    truth = torch.load(run / "truth.pt")
    full, sampled = (
        run / "gradient_dumper" / f"step{step}" / f"{kind}_gradients"
        for kind in ("full", "sampled")
    )
    assert (
        set(get_checkpoint_metadata(full).tensors)
        == set(get_checkpoint_metadata(sampled).tensors)
        == set(truth)
    )
    theirs = {name: torch.empty_like(gradient) for name, gradient in truth.items()}
    dcp.load(theirs, checkpoint_id=full)
    for name, gradient in truth.items():
        assert torch.equal(next(load_keys(full, [name])), gradient), name
        assert torch.equal(theirs[name], gradient), name
        with safe_open(sampled / f"{name}_first{rows}.safetensors", framework="pt") as file:
            assert torch.equal(file.get_tensor("gradient"), gradient[:rows]), name
    assert is_intact(full)
    assert is_intact(sampled)
    return read(full), read(sampled)


def words(run: Path) -> list[str]:
    return [(run / f"rank{rank}.txt").read_text() for rank in range(2)]


def test_two_ranks(tmp_path: Path, launch) -> None:
    assert launch("two_ranks.py", 2, tmp_path) == [0, 0]
    check_ddp(tmp_path / "ddp")
    check_fsdp(tmp_path / "fsdp")
    check_some_none(tmp_path / "some_none")
    alone = (tmp_path / "one_rank_only/rank0.txt").read_text()
    assert (
        alone
        == "0 0 1\nranks: the ranks did not meet (rank 1 of 2 did not come within 1 s); dump() must "
        "be called on every rank"
    )
    for text in words(tmp_path / "nothing"):
        assert text == (
            "0 0 1\nno gradient: no parameter has a gradient on any rank: dump after backward() "
            "and before zero_grad()"
        )
    assert not (tmp_path / "nothing/gradient_dumper").exists()
    said = [(tmp_path / f"nothing/said{rank}.txt").read_text() for rank in range(2)]
    assert said[0].startswith("gradient dump of step 0: no parameter has a gradient on any rank")
    assert said[1] == "", "one rank speaks for all"
    for text in words(tmp_path / "troubles"):
        assert text.startswith(
            "1 0 2\nusage: the ranks dump different steps: 4, 5; call dump() on every rank at the "
            "same steps\n"
        )
        assert text.endswith("disk: rank 1: No space left on device")
    assert [folder.name for folder in (tmp_path / "troubles/gradient_dumper").iterdir()] == [
        "step7"
    ]
    for text in words(tmp_path / "skipping"):
        assert text.startswith("1 1 0\nskipped: rank 1: dumps were skipped")
    assert [folder.name for folder in (tmp_path / "skipping/gradient_dumper").iterdir()] == [
        "step1"
    ]


def check_ddp(run: Path) -> None:
    """Names without `module.`; each gradient is written once, by ranks that share the work."""
    manifest, _ = check_against_truth(run, 1, rows=3)
    assert list(manifest.tensors) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert manifest.world_size == 2
    assert {chunk.file for entry in manifest.tensors.values() for chunk in entry.chunks} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }
    assert all(len(entry.chunks) == 1 for entry in manifest.tensors.values())


def check_fsdp(run: Path) -> None:
    """Uneven shards are two chunks, a row that only one rank has is one; placements and mesh are
    told.
    """
    manifest, sampled = check_against_truth(run, 1, rows=3)
    uneven = manifest.tensors["0.weight"]
    assert [(chunk.offsets, chunk.sizes) for chunk in uneven.chunks] == [
        ((0, 0), (4, 5)),
        ((4, 0), (3, 5)),
    ]
    assert [chunk.file for chunk in uneven.chunks] == ["__0_0.distcp", "__1_0.distcp"]
    assert (uneven.mesh, uneven.placements) == ("2 on cpu", ("Shard(dim=0)",))
    assert len(manifest.tensors["1.weight"].chunks) == 1
    assert manifest.tensors["2.weight"].mesh is None
    assert sampled.tensors["0.weight"].shape == (3, 5)
    assert sampled.tensors["0.weight"].parameter_shape == (7, 5)


def check_some_none(run: Path) -> None:
    """Of what only some ranks have, a replica is kept and a torn gradient is left out."""
    first, second = (
        run / "gradient_dumper" / f"step{step}" / "full_gradients" for step in range(2)
    )
    one = read(first)
    assert torch.equal(next(load_keys(first, ["0.weight"])), torch.full((3, 2), 5.0))
    assert torch.equal(next(load_keys(second, ["0.bias"])), torch.ones(3))
    assert one.left_out == {
        "1.bias": "some ranks have their part of this gradient, others have None"
    }
    with pytest.raises(
        UsageError, match=r"the gradient of '1.bias' is not in .*: some ranks have their part"
    ):
        load_keys(first, ["1.bias"])
    for text in words(run):
        assert text.startswith("2 0 0\n")
        assert "left out: 1 gradients are not in the dump; 1.bias: some ranks" in text


@pytest.mark.slow
def test_four_ranks_as_a_mesh_of_two_by_two(tmp_path: Path, launch) -> None:
    assert launch("four_ranks.py", 4, tmp_path) == [0] * 4
    manifest, _ = check_against_truth(tmp_path, 0, rows=5)
    entry = manifest.tensors["0.weight"]
    assert (entry.mesh, entry.placements) == (
        "2x2 (replica, shard) on cpu",
        ("Replicate()", "Shard(dim=0)"),
    )
    assert len(entry.chunks) == 2
    boxes = {(chunk.offsets, chunk.sizes) for chunk in manifest.tensors["both"].chunks}
    assert boxes == {((0, 0), (3, 4)), ((0, 4), (3, 3)), ((3, 0), (2, 4)), ((3, 4), (2, 3))}
    assert len(manifest.files) == 5, "all four ranks have a part of the work"


def test_a_killed_rank_leaves_no_dump_and_the_other_goes_on(tmp_path: Path, launch) -> None:
    assert launch("killed_rank.py", 2, tmp_path, "kill") == [0, -signal.SIGKILL]
    root = tmp_path / "gradient_dumper"
    text = (tmp_path / "rank0.txt").read_text()
    assert text.startswith(
        "1 written, 2 failed\ngradient dump of step 1: the ranks lost each other"
    )
    assert is_intact(root / "step0/full_gradients")
    assert not (root / "step1").exists()
    assert (root / "step1.partial").exists()
    assert launch("killed_rank.py", 2, tmp_path, "live") == [0, 0]
    assert (tmp_path / "rank0.txt").read_text() == "3 written, 0 failed"
    assert sorted(folder.name for folder in root.iterdir()) == ["step0", "step1", "step2"]
    assert all(is_intact(folder / "full_gradients") for folder in root.iterdir())


def test_alone_every_exchange_is_with_itself() -> None:
    ranks = ProcessGroup()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.gather_objects("x") == ["x"]
    assert ranks.from_first("x") == "x"
    mine = torch.zeros(3, dtype=torch.uint8)
    assert ranks.collect(mine, [3])[0] is mine
