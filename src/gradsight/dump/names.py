"""Names: the model's own names of its parameters, and file names that any of them can be given. No torch at import."""

import hashlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
LONGEST = 180
"""Bytes of a file name that come from the parameter's name; file systems allow 255 in all."""


def clean_parameters(model: "torch.nn.Module") -> list[tuple[str, "torch.nn.Parameter"]]:
    """Every parameter under the model's own dotted name, tied ones once for each of their names."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    found: list[tuple[str, torch.nn.Parameter]] = []
    inside: set[int] = set()

    def walk(module: "torch.nn.Module", prefix: str) -> None:
        if id(module) in inside:  # a module that holds itself
            return
        inside.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.append((prefix + name, parameter))
        wraps = isinstance(module, (DataParallel, DistributedDataParallel))
        for name, child in module._modules.items():
            if child is not None:
                hidden = name in WRAPPERS or (wraps and name == "module")
                walk(child, prefix if hidden else f"{prefix}{name}.")
        inside.remove(id(module))

    walk(model, "")
    return found


def file_stems(names: Iterable[str]) -> dict[str, str]:
    """A file name for each parameter name: the name itself where safe and short, else a readable part and a hash.

    >>> file_stems(["wte.weight", "a/b"])
    {'wte.weight': 'wte.weight', 'a/b': 'a_b-c14cddc033f6'}
    """
    stems: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        stem = re.sub(r"[\x00-\x1f\x7f/\\:*?\"<>|]", "_", name)
        if stem != name or len(stem.encode()) > LONGEST or stem.casefold() in taken or not stem.strip(". "):
            stem = f"{_shorten(stem)}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        stems[name] = stem
        taken.add(stem.casefold())
    return stems


def _shorten(stem: str) -> str:
    """The beginning of a name that fits, cut between characters."""
    return stem.encode()[: LONGEST - 13].decode(errors="ignore")
