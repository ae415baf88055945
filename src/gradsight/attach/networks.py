"""Finds networks of a script that get gradients and that no optimizer moves.

The weights of a few moments of the run are compared with those at its end, so that any way to
change them counts as one: an optimizer, an average over another network, an update by hand.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.attach.names import name_of, variable_of
from gradsight.core.calls import is_suspended
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_module_hook
from gradsight.core.parameters import unwrapped
from gradsight.core.samples import tensors_in
from gradsight.core.shards import local_part
from gradsight.values.networks import UnmovedNetwork

LOOKS = (5, 20, 60, 150, 400, 1000, 3000)
"""Optimizer steps of the script after which its networks are looked at."""
_PASSES = 8
"""Backward passes after each of these at whose end gradients are looked for."""
_ENTRIES = 64
_STEPS_WITHOUT_OPTIMIZER = 15
_STEPS_WITH_IDLE_OPTIMIZER = 30
_STEPS_OF_A_CUT_RUN = 40
"""Steps from a network's first gradient to the end. An optimizer may begin to step late, and what
a run that was cut short would have done is not known.
"""
_TARGETS = ("target", "ema", "teacher", "frozen", "old", "ref", "momentum", "avg", "average")
"""Parts of names of networks that are copied from another one."""


@dataclass(slots=True)
class IdleOptimizer:
    """An optimizer that has not stepped yet, as the session knows it."""

    kind: str
    made: str | None
    optimizer: Optimizer
    model: nn.Module | None
    """The model that its parameters belong to."""
    name: str | None


@dataclass(slots=True)
class _Network:
    """A network that the script may have forgotten to train, as first seen with a gradient."""

    reference: weakref.ref[Any]
    name: str
    variable: str | None
    samples: list[tuple[weakref.ref[Tensor], Tensor]]
    shapes: list[torch.Size]
    first_look: int
    """How many steps the script's optimizers had made."""
    first_step: int
    """The same as a step of the record."""
    in_training_mode: bool
    was_loaded: bool
    idle: tuple[str, str | None, str | None] | None = None
    """Class, variable and place of its optimizer."""
    looks: set[int] = field(default_factory=set)
    """The looks at which it had a gradient other than zero."""
    moved: bool = False
    alone: bool = False
    """Whether a backward pass has reached it and nothing that is trained."""
    from_trained: bool = False
    """Whether it was called with the output of another network."""
    from_data: bool = False

    def tensors(self) -> list[Tensor]:
        """Return its parameters that still exist."""
        return [tensor for tensor in (ref() for ref, _ in self.samples) if tensor is not None]

    def notice_changes(self) -> None:
        """Note whether any weight has changed."""
        self.moved = self.moved or any(
            tensor is not None and not _same(sample, tensor)
            for tensor, sample in ((ref(), sample) for ref, sample in self.samples)
        )


@dataclass(slots=True)
class Trained:
    """A model that is watched, and its weights at the beginning."""

    model: nn.Module
    name: str
    home: str
    """The name of its record."""
    samples: dict[str, Tensor]
    prefix: str = ""
    """What its parameters' names in the record begin with."""
    has_gradient: bool = False


class Networks:
    """Collects what is needed to tell which networks of a script no optimizer moves (GS306)."""

    def __init__(self, guard: Guard, was_loaded: Callable[[nn.Module], bool]) -> None:
        self._guard = guard
        self._was_loaded = was_loaded
        self._steps = 0
        self._step = 0
        """The newest look's step, by the count of the optimizer that made it."""
        self._look = 0
        self._passes = 0
        self._candidates: list[weakref.ref[nn.Module]] = []
        self._moved: dict[int, weakref.ref[Tensor]] = {}
        """The parameters of every optimizer that has stepped."""
        self._networks: dict[tuple[str, int], _Network] = {}
        self._before: dict[int, tuple[int, int]] = {}
        self._trained: list[Trained] = []
        self._hooks: list[Any] = []
        self._stepping_optimizer: str | None = None

    @property
    def is_looking(self) -> bool:
        """Whether the next backward pass is looked at."""
        return self._passes > 0

    def opened(self, models: Sequence[nn.Module], name: str) -> None:
        """These models are watched from now on, under one name."""
        for model in models:
            # Together with others, their names are those of a module around them.
            own = name if len(models) == 1 else name_of([model], [])
            prefix = "" if len(models) == 1 else f"{own}."
            self._trained.append(Trained(model, own, name, _samples_by_name(model), prefix))

    def stepped(self, optimizer: Optimizer, is_first: bool) -> bool:
        """Count a step; return whether it is time for a look."""
        self._steps += 1
        is_time = self._steps in LOOKS
        if is_first or is_time:
            self._note_moved(optimizer)
        return is_time

    def _note_moved(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                self._moved[id(tensor)] = weakref.ref(tensor)

    def _is_moved(self, tensor: Tensor) -> bool:
        known = self._moved.get(id(tensor))
        return known is not None and known() is tensor

    def begin_look(
        self,
        optimizer: Optimizer,
        step: int,
        modules: Iterable[nn.Module],
        watched: set[int],
        idle: Sequence[IdleOptimizer],
    ) -> None:
        """Look now, and at the end of the next backward passes.

        `modules`: those that are part of no other; `watched`: the ids of all watched parameters.
        """
        self._look = self._steps
        self._step = step
        self._passes = _PASSES
        self._stepping_optimizer = self._stepping_optimizer or variable_of(optimizer)
        self._candidates = [
            weakref.ref(module)
            for module in modules
            if not any(id(tensor) in watched for tensor in module.parameters())
            and any(_may_learn(tensor) for tensor in module.parameters())
        ]
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self.look(idle)

    def before_backward(self) -> None:
        """Remember the gradients before a pass that is looked at."""
        self._before = {id(tensor): _version(tensor) for tensor in self._compared()}

    def _compared(self) -> list[Tensor]:
        networks = [ref() for each in self._networks.values() for ref, _ in each.samples]
        moved = [ref() for ref in self._moved.values()]
        return [tensor for tensor in (*networks, *moved) if tensor is not None]

    def look(self, idle: Sequence[IdleOptimizer], after_pass: bool = False) -> None:
        """Note which networks have gradients now."""
        if after_pass:
            self._passes -= 1
        for each in self._trained:
            each.has_gradient = each.has_gradient or any(
                tensor.grad is not None for tensor in each.model.parameters()
            )
        for reference in self._candidates:
            module = reference()
            if module is not None:
                self._look_at("module", module, list(module.parameters()), module, None)
        for each_idle in idle:
            optimizer = each_idle.optimizer
            tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            self._look_at("optimizer", optimizer, tensors, each_idle.model, each_idle)
        for network in self._networks.values():
            network.notice_changes()
            if after_pass and not network.alone:
                network.alone = self._wrote([ref for ref, _ in network.samples]) and not (
                    self._wrote(list(self._moved.values()))
                )

    def _wrote(self, references: list[weakref.ref[Tensor]]) -> bool:
        tensors = [tensor for tensor in (ref() for ref in references) if tensor is not None]
        return any(_version(tensor) != self._before.get(id(tensor), (0, 0)) for tensor in tensors)

    def _look_at(
        self,
        kind: str,
        owner: Any,
        tensors: list[Tensor],
        module: nn.Module | None,
        idle: IdleOptimizer | None,
    ) -> None:
        tensors = [each for each in tensors if _may_learn(each) and not self._is_moved(each)]
        if not any(each.grad is not None for each in tensors):
            return
        known = self._networks.get((kind, id(owner)))
        if known is None or known.reference() is not owner:
            known = self._new(owner, tensors, module, idle)
            self._networks[kind, id(owner)] = known
            if kind == "module":
                self._hook(owner, known)
        if self._look not in known.looks and any(map(_has_gradient, tensors)):
            known.looks.add(self._look)

    def _new(
        self,
        owner: Any,
        tensors: list[Tensor],
        module: nn.Module | None,
        idle: IdleOptimizer | None,
    ) -> _Network:
        name, variable = _called(module, tensors, idle)
        described = None
        if idle is not None:
            described = (idle.kind, variable_of(idle.optimizer), idle.made)
        return _Network(
            weakref.ref(owner),
            name,
            variable,
            [(weakref.ref(tensor), _sample(tensor)) for tensor in tensors],
            [tensor.shape for tensor in tensors],
            self._steps,
            self._step,
            module is None or any(each.training for each in _owners(module, tensors)),
            module is not None and any(map(self._was_loaded, module.modules())),
            described,
        )

    def _hook(self, module: nn.Module, network: _Network) -> None:
        """See what it is called with until the next look."""

        def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled() and not is_suspended():
                has_graph = any(each.requires_grad for each in tensors_in(*args, *kwargs.values()))
                network.from_trained |= has_graph
                network.from_data |= not has_graph

        inner = unwrapped(module)
        handle = put_module_hook(
            self._guard, inner.register_forward_pre_hook, called, with_kwargs=True
        )
        self._hooks.append(handle)

    # At the end.

    def unmoved(self, was_cut: bool) -> list[UnmovedNetwork]:
        """Return the networks that were forgotten.

        `was_cut`: the script did not come to its own end.
        """
        if not any(map(self._is_moved_model, self._trained)):
            # What a script optimizes is an image, or another input of fixed networks.
            return []
        found: list[UnmovedNetwork] = []
        known = list(self._networks.values())
        # An idle optimizer says more than the module that it holds.
        for network in sorted(known, key=lambda each: each.idle is None):
            network.notice_changes()
            if self._is_forgotten(network, was_cut):
                reported = self._reported(network)
                if reported is not None and all(each.name != reported.name for each in found):
                    found.append(reported)
        return found

    def are_known(self, was_cut: bool) -> bool:
        """Return whether the run was long enough."""
        least = _STEPS_OF_A_CUT_RUN if was_cut else _STEPS_WITHOUT_OPTIMIZER
        return self._steps >= LOOKS[0] + least

    def _is_moved_model(self, trained: Trained) -> bool:
        return any(map(self._is_moved, trained.model.parameters()))

    def _is_forgotten(self, network: _Network, was_cut: bool) -> bool:
        least = _STEPS_WITHOUT_OPTIMIZER if network.idle is None else _STEPS_WITH_IDLE_OPTIMIZER
        tensors = network.tensors()
        exists = len(tensors) == len(network.samples)
        if was_cut or not exists:
            least = max(least, _STEPS_OF_A_CUT_RUN)
        # The function that trains has returned, and what it made is gone.
        end = self._steps if exists else max(network.looks, default=0)
        return (
            end - network.first_look >= least
            and len(network.looks) > 1
            and not network.moved
            and not any(map(self._is_moved, tensors))
            and network.in_training_mode
            and not network.was_loaded
            # A network that compares an output with data, as in a perceptual loss.
            and (network.alone or not (network.from_trained and network.from_data))
        )

    def _reported(self, network: _Network) -> UnmovedNetwork | None:
        """Describe it, with the network that has its place; None if that may be on purpose."""
        mine = network.tensors()
        held = trained = None
        for each in self._trained:
            tensors = [tensor for tensor in each.model.parameters() if tensor.requires_grad]
            is_other = not {id(tensor) for tensor in tensors} & {id(tensor) for tensor in mine}
            has_shapes = [each.shape for each in tensors] == network.shapes
            if not (self._is_moved_model(each) and is_other and has_shapes):
                continue
            if not each.has_gradient:
                held = held or each
            elif self._began_alike(each, network):
                trained = trained or each
        if trained is not None and not self._is_copied_to(trained, network):
            return None
        kind, variable, made = network.idle or (None, None, None)
        return UnmovedNetwork(
            name=network.name,
            parameters=len(network.samples),
            first_step=network.first_step,
            home=self._home_of(network, held or trained),
            variable=network.variable,
            optimizer=kind,
            optimizer_variable=variable,
            made=made,
            stepping_optimizer=self._stepping_optimizer,
            held_instead=None if held is None else held.name,
            held_parameters=() if held is None else _recorded_names(held),
            trained_instead=None if trained is None or held is not None else trained.name,
        )

    def _home_of(self, network: _Network, instead: Trained | None) -> str | None:
        mine = {id(ref()) for ref, _ in network.samples}
        for each in self._trained:
            if any(id(tensor) in mine for tensor in each.model.parameters()):
                return each.home
        return None if instead is None else instead.home

    def _began_alike(self, trained: Trained, network: _Network) -> bool:
        samples = list(trained.samples.values())
        pairs = zip(samples, (sample for _, sample in network.samples), strict=False)
        different = [
            not torch.equal(one, other)
            for one, other in pairs
            if one.dtype == other.dtype and one.device == other.device
        ]
        return bool(different) and not any(different)

    def _is_copied_to(self, trained: Trained, network: _Network) -> bool:
        """Return whether the trained network was the copy, and this one the original."""
        if any(part in network.name.lower() for part in _TARGETS):
            return False
        named = any(part in trained.name.lower() for part in _TARGETS)
        return named or any(map(self._was_loaded, trained.model.modules()))


def _called(
    module: nn.Module | None, tensors: Sequence[Tensor], idle: IdleOptimizer | None
) -> tuple[str, str | None]:
    """Return the name of a network and the expression by which the script reaches it."""
    if module is None:
        name = idle.name if idle is not None and idle.name is not None else "parameters"
        return name, variable_of(tensors[0]) if len(tensors) == 1 else None
    wanted = {id(tensor) for tensor in tensors}
    path, part = "", module
    for inner_path, inner in unwrapped(module).named_modules():
        held = {id(tensor) for tensor in inner.parameters()}
        if wanted <= held:
            path, part = inner_path, inner
    variable = variable_of(module)
    if not path:
        known = None if idle is None else idle.name
        return known or name_of([module], []), variable or variable_of(part)
    return path, path if variable is None else f"{variable}.{path}"


def _owners(module: nn.Module, tensors: Sequence[Tensor]) -> list[nn.Module]:
    wanted = {id(tensor) for tensor in tensors}
    return [
        each
        for each in module.modules()
        if any(id(tensor) in wanted for tensor in each._parameters.values())
    ]


def _recorded_names(trained: Trained) -> tuple[str, ...]:
    return tuple(trained.prefix + name for name, _ in unwrapped(trained.model).named_parameters())


def _may_learn(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf and tensor.layout is torch.strided


def _has_gradient(tensor: Tensor) -> bool:
    gradient = tensor.grad
    if gradient is None:
        return False
    if gradient.layout is not torch.strided:
        return True
    return bool(local_part(gradient).count_nonzero())


def _version(tensor: Tensor) -> tuple[int, int]:
    gradient = tensor.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _samples_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: _sample(tensor) for name, tensor in model.named_parameters() if _may_learn(tensor)
    }


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor:
    """Return a few entries, spread over the tensor."""
    entries = local_part(tensor).detach().reshape(-1)
    return entries[:: max(1, entries.numel() // _ENTRIES)].clone()


def _same(sample: Tensor, tensor: Tensor) -> bool:
    now = _sample(tensor)
    if now.device != sample.device or now.dtype != sample.dtype or now.shape != sample.shape:
        return False
    return torch.equal(now, sample)
