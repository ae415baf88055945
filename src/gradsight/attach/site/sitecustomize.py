"""Python runs this at the start of every process below `gradsight check`.

Scripts, ranks of a launcher, workers alike.

It waits until torch's optimizers are imported, and notices when one is made. Only then Gradsight
itself is loaded. Whatever sitecustomize the user has is run as well.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_users_own() -> None:
    paths = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class _Waiting(importlib.abc.MetaPathFinder):
    """Lets torch.optim.optimizer be imported as ever, then puts a notice on the making of
    optimizers.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _notice(module.Optimizer)

        spec.loader.exec_module = exec_module
        return spec


def _notice(optimizer_class: Any) -> None:
    made = optimizer_class.__init__

    @functools.wraps(made)
    def noticed(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _tell(self)

    optimizer_class.__init__ = noticed


def _tell(optimizer: Any) -> None:
    """Nothing of ours may reach the script."""
    try:
        if os.environ.get("GRADSIGHT_HOME") not in sys.path:
            sys.path.append(os.environ["GRADSIGHT_HOME"])
        from gradsight.attach.session import optimizer_made

        optimizer_made(optimizer)
    except Exception as error:
        print(
            f"gradsight: cannot watch this optimizer: {type(error).__name__}: {error}",
            file=sys.stderr,
        )


if "GRADSIGHT_CHECK" in os.environ:
    sys.meta_path.insert(0, _Waiting())
_run_the_users_own()
