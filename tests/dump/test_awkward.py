"""Gradients that broke other people's dumpers: each is dumped and read back, by us and by torch,
bit for bit.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dump.dumps import is_intact
from gradsight import GradientDumper, get_checkpoint_metadata, load_keys
from gradsight.core.parameters import named_parameters
from gradsight.dump.manifest import read
from gradsight.dump.reader import Slices

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # of torch's own reader


def holder(**gradients: torch.Tensor) -> nn.Module:
    """A model whose parameters have these gradients, under any names."""
    module = nn.Module()
    for name, gradient in gradients.items():
        parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        module._parameters[name] = parameter
    return module


def sparse() -> torch.Tensor:
    """Uncoalesced: row 1 twice."""
    return torch.sparse_coo_tensor(
        [[1, 1, 4]], torch.arange(6.0).view(3, 2), (5, 2), check_invariants=True
    )


NAMES = [
    "a/b",
    "a_b",
    "a\\b",
    "../../etc/x",
    "..",
    "with space",
    "x" * 300,
    "x" * 300 + "y",
    "größe.重み",
    "A",
    "a",
    "n\nl",
    ".",
]

GRADIENTS: dict[str, Callable[[], torch.Tensor]] = {
    "zero-dimensional": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "empty inside": lambda: torch.empty(4, 0),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(6, 4).T,
    "expanded": lambda: torch.ones(1, 3).expand(5, 3),
    "bfloat16": lambda: torch.randn(5, 3).bfloat16(),
    "float16": lambda: torch.randn(5, 3).half(),
    "float64": lambda: torch.randn(5, 3).double(),
    "complex64": lambda: torch.randn(5, 3, dtype=torch.complex64),
    "complex128": lambda: torch.randn(5, 3, dtype=torch.complex128),
    "conjugate": lambda: torch.randn(5, 3, dtype=torch.complex64).conj(),
    "not finite": lambda: torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
    "denormal": lambda: torch.tensor([1e-45, 1e-40]),
    "sparse": sparse,
    "part of a buffer": lambda: torch.randn(100)[13:73].view(20, 3),
}


def raw(tensor: torch.Tensor) -> bytes:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return (
        dense.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if dense.numel()
        else b""
    )


@pytest.mark.parametrize("case", GRADIENTS)
def test_every_bit_comes_back(case: str, tmp_path: Path) -> None:
    gradient = GRADIENTS[case]()
    with GradientDumper(tmp_path) as dumper:
        folder = dumper.dump(holder(w=gradient), 0)
    assert not dumper.problems
    loaded = next(load_keys(folder, ["w"]))
    theirs = torch.empty_like(loaded)
    dcp.load({"w": theirs}, checkpoint_id=folder)
    assert loaded.dtype == gradient.dtype
    assert loaded.shape == gradient.shape
    assert raw(loaded) == raw(theirs) == raw(gradient)
    assert read(folder).tensors["w"].layout == ("sparse_coo" if gradient.is_sparse else "strided")
    assert is_intact(folder)


@pytest.mark.parametrize("case", GRADIENTS)
def test_the_first_rows_come_back(case: str, tmp_path: Path) -> None:
    gradient = GRADIENTS[case]()
    with GradientDumper(tmp_path, save_first_n=2) as dumper:
        folder = dumper.dump(holder(w=gradient), 0)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    expected = dense[:2] if dense.dim() else dense
    with safe_open(folder / "w_first2.safetensors", framework="pt") as file:
        stored = file.get_tensor("gradient")
        assert raw(stored) == raw(expected)
        assert file.metadata() == {"dtype": str(gradient.dtype).removeprefix("torch.")}
    assert stored.dtype == gradient.dtype or (case, stored.shape[-1]) == ("complex128", 2)
    assert raw(next(load_keys(folder, ["w"]))) == raw(expected)
    assert is_intact(folder)


@pytest.mark.parametrize("first_n", [None, 1])
def test_any_name(first_n: int | None, tmp_path: Path) -> None:
    gradients = {name: torch.full((2, 2), float(number)) for number, name in enumerate(NAMES)}
    with GradientDumper(tmp_path / "run", save_first_n=first_n) as dumper:
        folder = dumper.dump(holder(**gradients), 0)
    assert dumper.written == 1
    assert list(get_checkpoint_metadata(folder).tensors) == NAMES
    for name, loaded in zip(NAMES, load_keys(folder, NAMES), strict=True):
        assert torch.equal(loaded, gradients[name][:first_n]), name
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing was written outside"
    assert is_intact(folder)
    if first_n:
        files = [path.name for path in folder.iterdir()]
        assert len({name.casefold() for name in files}) == len(NAMES) + 1, (
            "also on a file system that ignores case"
        )
        assert "with space_first1.safetensors" in files
        assert max(len(name.encode()) for name in files) < 256
    else:
        theirs = {name: torch.zeros(2, 2) for name in NAMES}
        dcp.load(theirs, checkpoint_id=folder)
        assert all(torch.equal(theirs[name], gradients[name]) for name in NAMES)


@pytest.mark.parametrize(
    "index", [slice(1, 4), (slice(None), slice(2, 3)), (slice(-2, None), slice(0, 0)), slice(9, 99)]
)
def test_a_part_of_a_tensor(index: slice | Slices, tmp_path: Path) -> None:
    gradient = torch.randn(5, 3).bfloat16()
    with GradientDumper(tmp_path) as dumper:
        folder = dumper.dump(holder(w=gradient), 0)
    assert torch.equal(next(load_keys(folder, ["w"], index=index)), gradient[index])


def test_what_has_no_place_in_a_dump_is_left_out_and_told(tmp_path: Path) -> None:
    module = holder(w=torch.ones(3))
    module.odd = nn.Parameter(torch.ones(2))
    module.odd.main_grad = torch.ones(3)
    with (
        pytest.warns(match=r"1 gradients are not in the dump; odd: its shape \(3,\)"),
        GradientDumper(tmp_path) as dumper,
    ):
        folder = dumper.dump(module, 0)
    assert read(folder).left_out == {"odd": "its shape (3,) is not the parameter's (2,)"}


def test_main_grad_is_the_gradient_where_there_is_one(tmp_path: Path) -> None:
    module = holder(w=torch.ones(3).bfloat16())
    module._parameters["w"].main_grad = torch.full((3,), 0.1)
    with GradientDumper(tmp_path) as dumper:
        folder = dumper.dump(module, 0)
    assert torch.equal(next(load_keys(folder, ["w"])), torch.full((3,), 0.1))
    assert read(folder).tensors["w"].source == "main_grad"


def test_tied_and_frozen_parameters(tmp_path: Path) -> None:
    """A tied parameter is stored once and found under each name; a frozen one is named, without a
    gradient.
    """
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6), "frozen": nn.Linear(2, 2)}
    )
    model["head"].weight = model["embedding"].weight
    model["frozen"].requires_grad_(False)
    model["head"](model["embedding"](torch.tensor([1, 2]))).sum().backward()
    with GradientDumper(tmp_path) as dumper:
        folder = dumper.dump(model, 0)
    manifest = read(folder)
    assert list(manifest.tensors) == ["embedding.weight", "head.bias"]
    assert manifest.aliases == {"head.weight": "embedding.weight"}
    assert manifest.parameters == ("embedding.weight", "head.bias", "frozen.weight", "frozen.bias")
    assert torch.equal(next(load_keys(folder, ["head.weight"])), model["embedding"].weight.grad)


def test_wrappers_leave_no_trace_in_names() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2)))
    wrapped = torch.compile(nn.DataParallel(inner))
    assert [named.name for named in named_parameters(wrapped)] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]
    inner._modules["itself"] = inner
    assert len(named_parameters(wrapped)) == 4, "a module that holds itself"
    own = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert [named.name for named in named_parameters(own)] == ["module.weight", "module.bias"]


def test_a_compiled_and_checkpointed_model(tmp_path: Path) -> None:
    """Names and values are those of the plain model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), checkpoint_wrapper(nn.Linear(4, 2)))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 3)).sum().backward()
    with GradientDumper(tmp_path) as dumper:
        folder = dumper.dump(compiled, 0)
    assert list(read(folder).tensors) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(next(load_keys(folder, ["0.weight"])), model[0].weight.grad)
