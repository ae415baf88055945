"""Reading: from the manifest and raw bytes alone, and nothing that is not as it was written."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dump.dumps import is_intact
from dump.test_manifest import rewrite
from gradsight import GradientDumper, get_checkpoint_metadata, load_keys
from gradsight.errors import RunError, UsageError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # of torch's own reader


def test_metadata(dumped: Path, model: nn.Module) -> None:
    metadata = get_checkpoint_metadata(dumped)
    assert metadata.tensors == {
        name: (tuple(one.shape), "float32") for name, one in model.named_parameters()
    }
    assert (metadata.step, metadata.world_size, metadata.kind) == (3, 1, "full")
    assert metadata.gradient == "as found in .grad"
    assert metadata.bytes == sum(one.grad.nbytes for one in model.parameters())
    assert metadata.parameters == tuple(name for name, _ in model.named_parameters())


def test_keys_in_their_order(dumped: Path, model: nn.Module) -> None:
    first, second = load_keys(dumped, ["1.bias", "0.weight"])
    assert torch.equal(first, model[1].bias.grad)
    assert torch.equal(second, model[0].weight.grad)
    assert torch.equal(next(load_keys(str(dumped), "0.bias")), model[0].bias.grad)


def test_what_was_read_can_be_written_to(dumped: Path) -> None:
    """It is the caller's own memory: the file does not change."""
    next(load_keys(dumped, ["0.bias"])).zero_()
    assert next(load_keys(dumped, ["0.bias"])).any()


def test_no_pickle_is_opened(
    dumped: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poisoned index for torch's reader harms nobody who reads with ours."""

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return exit, (13,)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a pickle was opened")

    (dumped / ".metadata").write_bytes(pickle.dumps(Bomb()))
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert get_checkpoint_metadata(dumped).step == 3
    assert torch.equal(next(load_keys(dumped, ["0.weight"])), model[0].weight.grad)


def test_torch_reads_it_with_shards_of_its_own(
    dumped: Path, model: nn.Module, tmp_path: Path
) -> None:
    """The index is complete: torch's converter, which takes everything from it, finds every
    gradient.
    """
    dcp_to_torch_save(dumped, tmp_path / "all.pt")
    converted = torch.load(tmp_path / "all.pt")
    assert list(converted) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(converted[name], one.grad) for name, one in model.named_parameters())
    only = {"1.weight": torch.empty(300, 7)}
    dcp.load(only, checkpoint_id=dumped)
    assert torch.equal(only["1.weight"], model[1].weight.grad)


def test_a_part_of_a_damaged_gradient_is_refused_too(dumped: Path, model: nn.Module) -> None:
    """Whoever changes a byte, or puts a link in the file's place, changes no part unseen."""
    part = next(load_keys(dumped, ["1.weight"], index=slice(0, 299)))
    assert torch.equal(part, model[1].weight.grad[:299])
    path = dumped / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    last = content.index(model[1].weight.grad[-1].numpy().tobytes())
    content[last] ^= 1
    path.write_bytes(content)
    for index in (None, slice(0, 299), (slice(0, 2), slice(1, 3))):
        with pytest.raises(
            RunError,
            match=r"__0_0.distcp is damaged: the checksum of the gradient of '1.weight' does not",
        ):
            next(load_keys(dumped, ["1.weight"], index=index))
    whole = dumped.parents[3] / "elsewhere"
    path.rename(whole)
    path.symlink_to(whole)
    for index in (None, slice(0, 299)):
        with pytest.raises(RunError, match=r"__0_0.distcp is behind a link"):
            next(load_keys(dumped, ["0.bias"], index=index))
    assert not is_intact(dumped)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match="not a plain file"):
        next(load_keys(dumped, ["0.bias"]))


def test_what_a_manifest_claims_takes_no_memory(dumped: Path) -> None:
    """A tensor of 10^15 bytes, whose file is small: refused before anything is made of it."""

    def claim(body: dict[str, Any]) -> None:
        entry = body["tensors"]["1.bias"]
        entry["shape"] = [10**15 // 4]
        entry["chunks"][0] |= {"sizes": [10**15 // 4], "bytes": 10**15}
        body["files"]["__0_0.distcp"]["bytes"] = 10**16

    rewrite(dumped, claim)
    with pytest.raises(RunError, match="is cut short"):
        next(load_keys(dumped, ["1.bias"]))
    with pytest.raises(RunError, match="is cut short"):
        next(load_keys(dumped, ["1.bias"], index=slice(0, 2)))


@pytest.mark.parametrize("index", [(slice(0, 1),) * 3, slice(0, 4, 2), 3, (slice(0, 1), 2)])
def test_an_index_that_is_no_part(index: object, dumped: Path) -> None:
    with pytest.raises(
        UsageError, match="index must be at most 2 slices of whole numbers without a step"
    ):
        next(load_keys(dumped, ["1.weight"], index=index))


def test_a_step_folder_with_one_dump_is_enough(dumped: Path, model: nn.Module) -> None:
    assert get_checkpoint_metadata(dumped.parent).step == 3
    with GradientDumper(dumped.parents[2], save_first_n=2) as dumper:
        dumper.dump(model, 3)
    with pytest.raises(
        UsageError,
        match=r"holds two dumps; name one of them: .*full_gradients or .*sampled_gradients",
    ):
        load_keys(dumped.parent, ["0.weight"])


def test_a_key_that_does_not_exist(dumped: Path) -> None:
    with pytest.raises(UsageError, match=r"has no gradient named '0.wieght'; nearest: 0.weight"):
        load_keys(dumped, ["0.wieght"])
    with pytest.raises(
        UsageError,
        match=r"has no gradient named '\?'; it has 0.weight, 0.bias, 1.weight, 1.bias",
    ):
        load_keys(dumped, ["?"])


def test_a_parameter_without_a_gradient(tmp_path: Path, model: nn.Module) -> None:
    model[0].bias.grad = None
    with GradientDumper(tmp_path) as dumper:
        folder = dumper.dump(model, 3)
    with pytest.raises(UsageError, match=r"'0.bias' had no gradient at step 3, so .* has none"):
        load_keys(folder, ["0.bias"])


def test_a_folder_that_is_no_dump(tmp_path: Path, dumped: Path) -> None:
    with pytest.raises(
        RunError,
        match=r"nowhere does not exist; expected a folder such as RUN/gradient_dumper/step0/full",
    ):
        load_keys(tmp_path / "nowhere", ["x"])
    with pytest.raises(
        RunError, match=r"is not a gradient dump \(no manifest.json\); expected a folder such as"
    ):
        get_checkpoint_metadata(tmp_path)
    (dumped / "manifest.json").unlink()
    with pytest.raises(
        RunError,
        match=r"is a checkpoint without our manifest.json; torch.distributed.checkpoint may "
        "read it",
    ):
        load_keys(dumped, ["0.weight"])


def test_missing_and_cut_files(dumped: Path, tmp_path: Path) -> None:
    whole = tmp_path / "copy"
    shutil.copytree(dumped, whole)
    path = dumped / "__0_0.distcp"
    with path.open("r+b") as file:
        file.truncate(500)
    with pytest.raises(
        RunError,
        match=r"__0_0.distcp is cut short; without its end the gradient of '1.weight' cannot "
        "be read",
    ):
        next(load_keys(dumped, ["1.weight"]))
    path.unlink()
    with pytest.raises(
        RunError,
        match=r"__0_0.distcp is missing; without it the gradient of '0.bias' cannot be read",
    ):
        next(load_keys(dumped, ["0.bias"]))
    assert next(load_keys(whole, ["0.bias"])).any()


@pytest.mark.parametrize("keys", [None, 3, [3], [None], b"0.weight", ["0.weight", 1]])
def test_keys_that_are_no_names(dumped: Path, keys: Any) -> None:
    with pytest.raises(UsageError, match="keys must be names of parameters, such as"):
        load_keys(dumped, keys)


@pytest.mark.parametrize("directory", [None, 3, ""])
def test_a_directory_that_is_no_path(directory: Any) -> None:
    with pytest.raises(UsageError, match="directory must be a path"):
        get_checkpoint_metadata(directory)
    with pytest.raises(UsageError, match="directory must be a path"):
        load_keys(directory, ["0.weight"])


def test_a_file_is_no_dump(dumped: Path) -> None:
    with pytest.raises(RunError, match=r"manifest.json is a file; expected the folder of a dump"):
        get_checkpoint_metadata(dumped / "manifest.json")


@pytest.mark.parametrize("index", [slice(0, "a"), slice(0, 2.5), (slice(0, 2), 3)])
def test_an_index_of_something_else(dumped: Path, index: Any) -> None:
    with pytest.raises(UsageError, match="index must be at most 2 slices of whole numbers without"):
        list(load_keys(dumped, ["0.weight"], index=index))
