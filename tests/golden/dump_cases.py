"""Gradient dumps, read back: names, shapes, types, step, label and norm of every tensor."""

import tempfile
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

import gradsight
from golden.results import Group

STEPS = 5


class Small(nn.Module):
    """A lookup, a linear layer, a vector in bfloat16, a scalar, a layer without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.linear = nn.Linear(6, 5)
        self.low = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(self.table(rows)).tanh() * self.scale * self.low.double()


def train(run_dir: Path, **options: Any) -> None:
    """Five steps, clipped, with a dump every second one."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dumper = gradsight.GradientDumper(run_dir, step_interval=2, **options)
    with gradsight.watch(model, optimizer, run_dir=run_dir, dump=dumper, quiet=True):
        for step in range(STEPS):
            rows = (torch.arange(8) * 5 + step) % 12
            model(rows).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


def described(folder: Path) -> dict[str, Any]:
    """Return the metadata of a dump."""
    metadata = gradsight.get_checkpoint_metadata(folder)
    return {
        "step": metadata.step,
        "kind": metadata.kind,
        "world_size": metadata.world_size,
        "gradient": metadata.gradient,
        "reason": metadata.reason,
        "clip_coef": metadata.clip_coef,
        "parameters": list(metadata.parameters),
        "left_out": sorted(metadata.left_out),
    }


def summary(tensor: Tensor) -> list[Any]:
    """Return shape, type and norm of a tensor."""
    return [list(tensor.shape), str(tensor.dtype), float(tensor.double().norm())]


def read(folder: Path) -> dict[str, Any]:
    """Return the metadata and tensors of a full dump."""
    names = sorted(gradsight.get_checkpoint_metadata(folder).tensors)
    tensors = dict(zip(names, gradsight.load_keys(folder, names), strict=True))
    norms = {name: summary(tensor) for name, tensor in tensors.items()}
    return described(folder) | {"tensors": norms}


def full() -> dict[str, Any]:
    """Dump whole gradients."""
    dumps = {}
    with tempfile.TemporaryDirectory() as run_dir:
        train(Path(run_dir))
        for folder in sorted(Path(run_dir).glob("gradient_dumper/step*/full_gradients")):
            dumps[folder.parent.name] = read(folder)
    return dumps


def first_rows() -> dict[str, Any]:
    """Dump the first four rows of each gradient."""
    dumps = {}
    with tempfile.TemporaryDirectory() as run_dir:
        train(Path(run_dir), save_first_n=4)
        for folder in sorted(Path(run_dir).glob("gradient_dumper/step*/sampled_gradients")):
            files = {}
            for file in sorted(folder.glob("*.safetensors")):
                with safetensors.safe_open(file, framework="pt") as opened:
                    files[file.name] = {
                        key: summary(opened.get_tensor(key)) for key in sorted(opened.keys())
                    }
            dumps[folder.parent.name] = described(folder) | {"files": files}
    return dumps


def by_hand() -> dict[str, Any]:
    """Dump without a watch, after backward."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Small()
    model(torch.arange(8)).square().mean().backward()
    with tempfile.TemporaryDirectory() as run_dir:
        with gradsight.GradientDumper(run_dir) as dumper:
            dumper.dump(model, step=3)
        folder = Path(run_dir) / "gradient_dumper" / "step3" / "full_gradients"
        return read(folder)


GROUP = Group(
    "dumps",
    {"full": full, "first_rows": first_rows, "by_hand": by_hand},
    tolerance=1e-6,  # norms
)
