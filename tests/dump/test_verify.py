"""verify finds every damage, wherever it is."""

from pathlib import Path

import pytest
import torch
from torch import nn

from gradsight import GradientDumper
from gradsight.dump.verify import verify


@pytest.mark.parametrize("first_n", [None, 2])
def test_a_flipped_bit_anywhere(first_n: int | None, tmp_path: Path) -> None:
    """Every file, every region, every third byte: gradients, what is around them, the index, the
    manifest.
    """
    model = nn.Linear(2, 3)
    model(torch.randn(1, 2)).sum().backward()
    with GradientDumper(tmp_path, save_first_n=first_n) as dumper:
        folder = dumper.dump(model, 0)
    assert verify(folder).intact
    flipped = 0
    for path in folder.iterdir():
        content = path.read_bytes()
        for position in range(0, len(content), 3):
            damaged = bytearray(content)
            damaged[position] ^= 1 << (position % 8)
            path.write_bytes(damaged)
            verdict = verify(folder)
            whitespace = path.name == "manifest.json" and content[position : position + 1].isspace()
            assert whitespace or not verdict.intact, (path.name, position)
            flipped += 1
        path.write_bytes(content)
    assert verify(folder).intact
    assert flipped > 400


def test_the_damage_is_named(dumped: Path, model: nn.Module) -> None:
    path = dumped / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(model[0].bias.grad.numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert verify(dumped).damage == ("__0_0.distcp: the gradient of 0.bias is damaged",)
    content[0] ^= 1
    path.write_bytes(content)
    assert verify(dumped).damage[1] == "__0_0.distcp: damaged outside of the gradients"
    path.write_bytes(content[:-1])
    assert verify(dumped).damage == (
        f"__0_0.distcp: {len(content) - 1:,} bytes, expected {len(content):,}",
    )
    path.unlink()
    assert verify(dumped).damage == ("__0_0.distcp: missing",)


def test_a_file_too_many_and_no_manifest(dumped: Path) -> None:
    (dumped / "__1_0.distcp").write_bytes(b"")
    assert verify(dumped).damage == ("__1_0.distcp: does not belong to the dump",)
    (dumped / "manifest.json").unlink()
    assert "is a checkpoint without our manifest.json" in verify(dumped).damage[0]
