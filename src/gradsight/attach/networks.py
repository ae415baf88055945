"""Finds networks of a script that get gradients and that no optimizer moves.

The weights of a few moments of the run are compared with those at its end, so that any way to
change them counts as one: an optimizer, an average over another network, an update by hand.
"""

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.attach.names import name_of, variable_of
from gradsight.core.beside import is_compiled
from gradsight.core.calls import is_suspended
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_module_hook
from gradsight.core.loss_graph import nodes_below
from gradsight.core.parameters import unwrapped
from gradsight.core.samples import tensors_in
from gradsight.core.shards import local_part
from gradsight.health.subject import construction_at_rate
from gradsight.values.networks import MovingOptimizer, UnmovedNetwork

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
_NODES = 5000
"""The largest number of autograd nodes to visit in one graph."""
_WALKS = 16
"""The largest number of autograd graphs to search after each look."""
_SHOWN_PARTS = 8
"""Parts of a network that are named one by one."""
_GENERIC_WORDS = re.compile(r"optimi[sz]ers?|optim|opt|network|model|module|net|_|\W")
"""Parts of a variable's name that name only its kind, such as "optimizer" or "net"."""


@dataclass(slots=True)
class KnownOptimizer:
    """An optimizer of the script, as the session knows it."""

    kind: str
    made: str | None
    optimizer: Optimizer
    model: nn.Module | None
    """The model that its parameters belong to."""
    name: str | None


@dataclass(slots=True)
class _Moving:
    """An optimizer that steps."""

    reference: weakref.ref[Optimizer]
    note: MovingOptimizer
    name: str | None
    """The name of the model that it moves."""
    held: frozenset[int]
    """The ids of its parameters."""
    first_step: int | None = None
    """The first observed step of this optimizer, counted over the steps of all optimizers."""
    last_step: int = 0

    def takes_turns_with(self, other: "_Moving") -> bool:
        """Return whether both optimizers are in use, so that neither replaced the other."""
        if self.first_step is None or other.first_step is None:
            return False
        return self.first_step < other.last_step and other.first_step < self.last_step


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
    from_models: set[int] = field(default_factory=set)
    """The trained models, by position, whose output it was called with."""
    to_models: set[int] = field(default_factory=set)
    """The trained models that were called with its output."""
    reached: frozenset[int] = frozenset()
    """The positions of its parameters that have had a gradient."""
    parts: tuple[str, ...] = ()
    """The modules that hold the reached parameters, if the network has other parameters too."""
    single: frozenset[str] = frozenset()
    """Those of `parts` that are parameters, not modules."""
    followers: set[int] = field(default_factory=set)
    """The ids of optimizers that stepped right after a pass that had reached it."""
    waits: bool = False
    """Whether the last pass reached it, and no optimizer has stepped since."""
    was_last: bool = False
    """Whether the last pass reached it."""
    was_left: bool = False
    """Whether a pass that missed it ever followed a pass that reached it, with no step between."""

    @property
    def may_compare(self) -> bool:
        """Return whether the network may be a fixed one that compares outputs with data."""
        return self.from_trained and self.from_data and not self.is_in_cycle

    @property
    def is_in_cycle(self) -> bool:
        """Return whether the network and a trained model each take the other's output as input."""
        return bool(self.from_models & self.to_models)

    def passed(self, reached: bool) -> None:
        """Note a backward pass."""
        self.was_left |= self.waits and not reached
        self.waits = self.was_last = reached

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
        self._moving: dict[int, _Moving] = {}
        """By id, the optimizers that step."""
        self._walks = 0

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
        if self._passes:
            self._note_turn(optimizer)
        return is_time

    def _note_turn(self, optimizer: Optimizer) -> None:
        moving = self._moving.get(id(optimizer))
        if moving is not None and moving.reference() is optimizer:
            moving.first_step = moving.first_step or self._steps
            moving.last_step = self._steps
        for network in self._networks.values():
            if network.was_last:
                network.waits = False
                network.followers.add(id(optimizer))

    def _note_moved(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                self._moved[id(tensor)] = weakref.ref(tensor)

    def _is_moved(self, tensor: Tensor) -> bool:
        known = self._moved.get(id(tensor))
        return known is not None and known() is tensor

    def begin_look(
        self,
        step: int,
        modules: Iterable[nn.Module],
        watched: set[int],
        idle: Sequence[KnownOptimizer],
        moving: Sequence[KnownOptimizer],
    ) -> None:
        """Look now, and at the end of the next backward passes.

        `modules`: those that are part of no other; `watched`: the ids of all watched parameters.
        `moving`: optimizers that have stepped.
        """
        self._look = self._steps
        self._step = step
        self._passes = _PASSES
        self._walks = _WALKS
        for known in moving:
            self._describe(known)
        for network in self._networks.values():
            network.waits = network.was_last = False
        self._candidates = [
            weakref.ref(module)
            for module in modules
            if not any(id(tensor) in watched for tensor in module.parameters())
            and any(_may_learn(tensor) for tensor in module.parameters())
        ]
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        for network in self._networks.values():
            if network.may_compare:
                self._hook_cycle(network)
        self.look(idle)

    def _describe(self, known: KnownOptimizer) -> None:
        optimizer = known.optimizer
        before = self._moving.get(id(optimizer))
        if before is not None and before.reference() is optimizer:
            return
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._moving[id(optimizer)] = _Moving(
            weakref.ref(optimizer),
            MovingOptimizer(variable_of(optimizer), known.made, construction_at_rate(optimizer)),
            known.name,
            frozenset(map(id, held)),
        )

    def before_backward(self) -> None:
        """Remember the gradients before a pass that is looked at."""
        self._before = {id(tensor): _version(tensor) for tensor in self._compared()}

    def _compared(self) -> list[Tensor]:
        networks = [ref() for each in self._networks.values() for ref, _ in each.samples]
        moved = [ref() for ref in self._moved.values()]
        return [tensor for tensor in (*networks, *moved) if tensor is not None]

    def look(self, idle: Sequence[KnownOptimizer], after_pass: bool = False) -> None:
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
            if after_pass:
                network.passed(self._wrote([ref for ref, _ in network.samples]))
            if after_pass and network.was_last and not network.alone:
                network.alone = not self._wrote(list(self._moved.values()))

    def _wrote(self, references: list[weakref.ref[Tensor]]) -> bool:
        tensors = [tensor for tensor in (ref() for ref in references) if tensor is not None]
        return any(_version(tensor) != self._before.get(id(tensor), (0, 0)) for tensor in tensors)

    def _look_at(
        self,
        kind: str,
        owner: Any,
        tensors: list[Tensor],
        module: nn.Module | None,
        idle: KnownOptimizer | None,
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
        self._note_reached(known, tensors, module, idle)
        if self._look not in known.looks and any(map(_has_gradient, tensors)):
            known.looks.add(self._look)

    def _new(
        self,
        owner: Any,
        tensors: list[Tensor],
        module: nn.Module | None,
        idle: KnownOptimizer | None,
    ) -> _Network:
        described = None
        if idle is not None:
            described = (idle.kind, variable_of(idle.optimizer), idle.made)
        return _Network(
            weakref.ref(owner),
            "",
            None,
            [(weakref.ref(tensor), _sample(tensor)) for tensor in tensors],
            [tensor.shape for tensor in tensors],
            self._steps,
            self._step,
            module is None or any(each.training for each in _owners(module, tensors)),
            module is not None and any(map(self._was_loaded, module.modules())),
            described,
        )

    def _note_reached(
        self,
        network: _Network,
        tensors: list[Tensor],
        module: nn.Module | None,
        idle: KnownOptimizer | None,
    ) -> None:
        """Note which parameters of a network get gradients, and name the network after them."""
        known = [ref() for ref, _ in network.samples]
        reached = {id(tensor) for tensor in tensors if tensor.grad is not None}
        now = frozenset(place for place, each in enumerate(known) if id(each) in reached)
        if network.name and now <= network.reached:
            return
        network.reached |= now
        mine = [known[place] for place in sorted(network.reached)]
        named = [tensor for tensor in mine if tensor is not None]
        if idle is not None:
            named = tensors
        network.name, network.variable, part = _called(module, named, idle)
        if part is not None:
            name = network.variable or network.name
            parts = dict(_parts(part, name, {id(tensor) for tensor in named}))
            network.parts = tuple(parts)
            network.single = frozenset(each for each, is_single in parts.items() if is_single)

    def _hook(self, module: nn.Module, network: _Network) -> None:
        """See what it is called with until the next look."""

        def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled() and not is_suspended():
                has_graph = any(each.requires_grad for each in tensors_in(*args, *kwargs.values()))
                network.from_trained |= has_graph
                network.from_data |= not has_graph

        self._put_hook(module, called)

    def _hook_cycle(self, network: _Network) -> None:
        """Watch, until the next look, whether a network and a trained model form a cycle."""
        module = network.reference()
        if not isinstance(module, nn.Module):
            return
        mine = {id(tensor) for tensor in network.tensors()}
        parts = [
            (place, trained.model, {id(each) for each in trained.model.parameters()})
            for place, trained in enumerate(self._trained)
            if self._is_moved_model(trained) and not is_compiled(trained.model)
        ]

        def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for place, _, others in parts:
                if place not in network.from_models and self._comes_from(others, args, kwargs):
                    network.from_models.add(place)

        def trained_called(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if place not in network.to_models and self._comes_from(mine, args, kwargs):
                network.to_models.add(place)

        if parts and not is_compiled(module):
            self._put_hook(module, called)
            for place, trained, _ in parts:
                self._put_hook(trained, partial(trained_called, place))

    def _put_hook(self, module: nn.Module, called: Callable[..., None]) -> None:
        inner = unwrapped(module)
        handle = put_module_hook(
            self._guard, inner.register_forward_pre_hook, called, with_kwargs=True
        )
        self._hooks.append(handle)

    def _comes_from(
        self, parameters: set[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether arguments were computed with one of these parameters."""
        if not self._walks or not torch.is_grad_enabled() or is_suspended():
            return False
        given = [each for each in tensors_in(*args, *kwargs.values()) if each.grad_fn is not None]
        if not given:
            return False
        self._walks -= 1
        nodes = nodes_below((tensor.grad_fn for tensor in given), _NODES)
        return any(id(getattr(node, "variable", None)) in parameters for node in nodes)

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
            and (network.alone or not network.may_compare)
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
        instead = held or trained
        pair: list[_Moving] = []
        if kind is None and instead is None:
            pair = self._held_twice(network)
        named = self._meant_for(network, pair) if pair else None
        if named is not None:
            pair.sort(key=lambda each: each is not named)
        all_reached = kind is not None or len(network.reached) == len(network.samples)
        moving, joins = self._moving_for(network, instead)
        twice = None if not pair else pair[0].name
        return UnmovedNetwork(
            name=network.name,
            parameters=len(network.samples),
            first_step=network.first_step,
            home=twice or self._home_of(network, instead),
            variable=network.variable,
            optimizer=kind,
            optimizer_variable=variable,
            made=made,
            parts=() if all_reached else network.parts,
            single=network.single,
            with_gradient=None if all_reached else len(network.reached),
            moving=moving,
            joins=joins,
            held_twice=twice,
            rivals=tuple(each.note for each in pair),
            is_known_which=named is not None,
            held_instead=None if held is None else held.name,
            held_parameters=self._names_of_held(held, pair),
            trained_instead=None if trained is None or held is not None else trained.name,
        )

    def _held_twice(self, network: _Network) -> list[_Moving]:
        """Return two optimizers that hold the same parameters and take turns; or none."""
        known = [each for each in self._moving.values() if each.name is not None]
        pairs = [
            [one, other]
            for number, one in enumerate(known)
            for other in known[number + 1 :]
            if one.held == other.held and one.takes_turns_with(other)
        ]
        # Of several pairs, one that is known to be meant for this network.
        meant = [pair for pair in pairs if self._meant_for(network, pair) is not None]
        return next(iter(meant or pairs), [])

    def _meant_for(self, network: _Network, pair: Sequence[_Moving]) -> _Moving | None:
        """Return the optimizer that was meant for this network; None if that is not known."""
        followers = [each for each in pair if self._follows(each, network)]
        named = [each for each in pair if _is_named_after(each.note.variable, network)]
        if len(named) == 1:
            return named[0] if named[0] in followers or not followers else None
        return followers[0] if len(followers) == 1 else None

    def _names_of_held(self, held: Trained | None, pair: Sequence[_Moving]) -> tuple[str, ...]:
        """Return the recorded names of the parameters that the optimizer holds by mistake."""
        if held is not None:
            return _recorded_names(held)
        wanted = pair[0].held if pair else frozenset()
        return tuple(
            name
            for each in self._trained
            for name, tensor in zip(_recorded_names(each), each.model.parameters(), strict=True)
            if id(tensor) in wanted
        )

    def _follows(self, moving: _Moving, network: _Network) -> bool:
        return any(self._moving.get(key) is moving for key in network.followers)

    def _moving_for(
        self, network: _Network, instead: Trained | None
    ) -> tuple[MovingOptimizer | None, bool]:
        """Return the optimizer for advice, and whether the network can be given to it."""
        if instead is not None:
            given = {id(tensor) for tensor in instead.model.parameters()}
            holding = next((each for each in self._moving.values() if each.held & given), None)
            return None if holding is None else holding.note, False
        followers = [self._moving[key] for key in network.followers if key in self._moving]
        joins = len(network.followers) == len(followers) == 1 and not (
            network.alone or network.was_left
        )
        known = followers or list(self._moving.values())
        return (known[0].note if known else None), joins

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
    module: nn.Module | None, tensors: Sequence[Tensor], idle: KnownOptimizer | None
) -> tuple[str, str | None, nn.Module | None]:
    """Return the name of a network, the expression by which the script reaches it, and itself."""
    if module is None:
        name = idle.name if idle is not None and idle.name is not None else "parameters"
        return name, variable_of(tensors[0]) if len(tensors) == 1 else None, None
    wanted = {id(tensor) for tensor in tensors}
    inner_modules = [
        (path, inner, {id(tensor) for tensor in inner.parameters()})
        for path, inner in unwrapped(module).named_modules()
    ]
    holding = [each for each in inner_modules if wanted <= each[2]]
    # Of those that hold no more than they must, the outermost.
    least = min((len(held) for _, _, held in holding), default=0)
    smallest = [(path, inner) for path, inner, held in holding if len(held) == least]
    path, part = next(iter(smallest), ("", module))
    variable = variable_of(module)
    if not path:
        known = None if idle is None else idle.name
        reachable = ((inner, variable_of(inner)) for _, inner in smallest[1:])
        if variable is None:
            part, variable = next((pair for pair in reachable if pair[1]), (part, None))
        whole = module if part is unwrapped(module) else part
        return known or name_of([whole], []), variable, part
    return path, path if variable is None else f"{variable}.{path}", part


def _parts(module: nn.Module, name: str, wanted: set[int]) -> Iterator[tuple[str, bool]]:
    """Yield the outermost modules whose trainable parameters are all wanted, then single ones.

    Each is the expression by which the script reaches it, and whether it is a single parameter.
    """
    mine = {id(tensor) for tensor in module.parameters() if _may_learn(tensor)}
    if mine and mine <= wanted:
        yield name, False
        return
    for path, tensor in module._parameters.items():
        if tensor is not None and id(tensor) in wanted:
            yield _inside(name, path), True
    for path, child in module.named_children():
        if any(id(tensor) in wanted for tensor in child.parameters()):
            yield from _parts(child, _inside(name, path), wanted)


def _inside(name: str, path: str) -> str:
    """Return the expression for a child of a module, a list or a dictionary."""
    if path.isdigit():
        return f"{name}[{path}]"
    return f"{name}.{path}" if path.isidentifier() else f"{name}[{path!r}]"


def _is_named_after(variable: str | None, network: _Network) -> bool:
    """Return whether an optimizer's variable has the name of a network in it."""
    names = (network.name, network.variable or "")
    mine = _GENERIC_WORDS.sub("", (variable or "").rpartition(".")[2].lower())
    others = {_GENERIC_WORDS.sub("", name.rpartition(".")[2].lower()) for name in names} - {""}
    return bool(mine) and any(other.startswith(mine) for other in others)


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
