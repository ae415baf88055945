"""Blocks that recompute their activations in backward, and the handle that takes it off again."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from gradsight.errors import UsageError
from gradsight.memory.blocks import NamedModule
from gradsight.memory.caches import with_own_caches, without_empty_caches
from gradsight.memory.given import GivenTensors
from gradsight.memory.policy import NONE, Mode
from gradsight.memory.selective import contexts


class CheckpointedForward:
    """Stands in a block's own `forward`, so that its hooks, names, copies and pickles stay.

    torch's own ways do not: `checkpoint_wrapper` changes the names of parameters, and the
    composable `checkpoint` cannot be pickled.
    """

    def __init__(self, named: NamedModule, mode: Mode, owners: Sequence[nn.Module] = ()) -> None:
        self.name = named[0]
        self.module = named[1]
        self.mode = mode
        self.owners = owners
        """The block and what it lies in, as far as Hugging Face's own checkpointing has a flag."""
        self.replaced = self.module.__dict__.get("forward")
        self._looked_for_writes = False

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that the block had."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        if any(checkpoints_itself(owner) for owner in self.owners):
            raise UsageError(
                "the model's own gradient checkpointing was switched on after "
                "apply_checkpointing: every block would be recomputed twice. Leave out "
                "gradient_checkpointing_enable() (of Hugging Face's Trainer: "
                "gradient_checkpointing=True), or call remove() on the handle"
            )
        # Every tensor becomes an argument by position, also those in keywords and tuples: torch
        # then notices, and refuses, when one is changed in place before it is needed again. By
        # keyword the gradients would be wrong without a word.
        leaves, shape = tree_flatten(without_empty_caches(args, kwargs))

        def run(*leaves: Any) -> Any:
            args, kwargs = with_own_caches(*tree_unflatten(leaves, shape))
            return self.plain(*args, **kwargs)

        if torch.compiler.is_compiling():
            return self._checkpointed(run, leaves)
        return self._checkpointed_and_watched(run, leaves)

    def _checkpointed(self, run: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        # Not reentrant: that form gives a block no gradient unless one of its inputs requires one,
        # as after a frozen embedding.
        context_fn = contexts(self.mode)
        if context_fn is None:
            return checkpoint(run, *leaves, use_reentrant=False)
        return checkpoint(run, *leaves, use_reentrant=False, context_fn=context_fn)

    def _checkpointed_and_watched(self, run: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """The same, refused where what the block was given does not stay as it is."""
        given = GivenTensors(self.name, self.module, leaves)

        def watched(*leaves: Any) -> Any:
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward:
                given.refuse_writes_since()
                return run(*leaves)
            if self._looked_for_writes:
                return run(*leaves)
            # Once is enough for what is in the code, and a look at every operator takes time.
            with given.looking_for_writes():
                out = run(*leaves)
            self._looked_for_writes = True
            return out

        out = self._checkpointed(watched, leaves)
        given.refuse_writes_inside(run, leaves)
        given.watch(out)
        return out


class CheckpointingHandle:
    """Checkpointing as it stands on a model.

    Takes every block with its mode, and checkpoints those whose mode is not "none".
    """

    def __init__(
        self,
        blocks: Sequence[tuple[NamedModule, Mode]],
        owners: Mapping[str, Sequence[nn.Module]] = MappingProxyType({}),
    ) -> None:
        self.modes: dict[str, str] = {}
        """The checkpointed blocks by name, with what each does."""
        self._modules: list[nn.Module] = []
        for (name, module), mode in blocks:
            if mode == NONE:
                continue
            self.modes[name] = str(mode)
            self._modules.append(module)
            module.forward = CheckpointedForward((name, module), mode, owners.get(name, ()))

    def remove(self) -> None:
        """Give every block its own forward back; a second call does nothing."""
        for module in self._modules:
            stand_in = module.__dict__.get("forward")
            if isinstance(stand_in, CheckpointedForward):
                del module.forward
                if stand_in.replaced is not None:
                    module.forward = stand_in.replaced
        self._modules = []

    def __enter__(self) -> "CheckpointingHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"CheckpointingHandle({len(self.modes)} blocks)"


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether Hugging Face's own checkpointing is switched on for a module."""
    return getattr(module, "gradient_checkpointing", False) is True
