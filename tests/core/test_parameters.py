"""Parameters go by the model's own names, whatever is wrapped around it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from gradsight.core.parameters import called_module, clean_name, named_parameters, unwrapped
from gradsight.ghost.parameters import ScoredParameters


class Net(nn.Module):
    """Has a child that is called `module` by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.module(x)))


PLAIN = [name for name, _ in Net().named_parameters()]


def names(model: nn.Module) -> list[str]:
    return [named.name for named in named_parameters(model)]


def test_wrappers_leave_no_trace() -> None:
    assert names(Net()) == PLAIN
    assert names(torch.compile(Net())) == PLAIN
    assert names(nn.DataParallel(Net())) == PLAIN
    model = Net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1])
    assert [clean_name(model, name) for name, _ in model.named_parameters()] == PLAIN
    wrapped = torch.compile(nn.DataParallel(model))
    assert names(wrapped) == PLAIN
    assert [clean_name(wrapped, name) for name, _ in wrapped.named_parameters()] == PLAIN


def test_tied_weights_keep_all_their_names() -> None:
    model = Net()
    model.blocks[1].weight = model.blocks[0].weight
    (tied,) = [named for named in named_parameters(model) if len(named.names) > 1]
    assert tied.names == ("blocks.0.weight", "blocks.1.weight")
    assert tied.describe().aliases == ("blocks.1.weight",)


def test_a_module_used_twice_shows_both_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    assert [named.names for named in named_parameters(model)] == [
        ("0.weight", "2.weight"),
        ("0.bias", "2.bias"),
    ]


def in_fabric(model: nn.Module) -> nn.Module:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_module(model)


def parts_wrapped(model: Net) -> nn.Module:
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1])
    return model


WRAPPINGS: dict[str, Callable[[Net], nn.Module]] = {
    "nothing": lambda model: model,
    "compiled": torch.compile,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "compiled in DistributedDataParallel": lambda m: DistributedDataParallel(torch.compile(m)),
    "DistributedDataParallel compiled": lambda m: torch.compile(DistributedDataParallel(m)),
    "Fabric": in_fabric,
    "Fabric around DistributedDataParallel": lambda m: in_fabric(DistributedDataParallel(m)),
    "parts checkpointed and compiled": parts_wrapped,
    "parts and all": lambda m: DistributedDataParallel(parts_wrapped(m)),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, without which DistributedDataParallel refuses to be made."""
    store: Path = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", WRAPPINGS)
def test_scores_and_record_name_parameters_alike(name: str) -> None:
    """Inside and around: a score file calls a parameter what the record calls it."""
    wrap = WRAPPINGS[name]
    for model, prefix in ((wrap(Net()), ""), (nn.Sequential(wrap(Net())), "0.")):
        plain = [f"{prefix}{each}" for each in PLAIN]
        assert [each.name for each in named_parameters(model)] == plain
        assert [clean_name(model, raw) for raw, _ in model.named_parameters()] == plain
        assert list(ScoredParameters(unwrapped(model)).all) == plain


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", WRAPPINGS)
def test_the_model_inside_its_wrappers(name: str) -> None:
    model = Net()
    wrapped = WRAPPINGS[name](model)
    assert unwrapped(wrapped) is model


@pytest.mark.usefixtures("one_process")
def test_the_module_that_sees_each_call_once() -> None:
    model = Net()
    compiled = torch.compile(model)
    parallel = nn.DataParallel(model)
    assert called_module(DistributedDataParallel(model)) is model
    assert called_module(in_fabric(DistributedDataParallel(model))) is model
    assert called_module(DistributedDataParallel(compiled)) is compiled
    assert called_module(parallel) is parallel


def test_what_runs_its_module_in_its_own_way_is_kept() -> None:
    checkpointed = checkpoint_wrapper(Net())
    assert unwrapped(checkpointed) is checkpointed
    assert names(checkpointed) == PLAIN


def test_a_users_model_with_a_wrappers_attribute_is_no_wrapper() -> None:
    own = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert unwrapped(own) is own
    mixed = nn.Module()
    mixed._orig_mod = nn.Linear(2, 2)
    mixed.head = nn.Linear(2, 2)
    assert unwrapped(mixed) is mixed
