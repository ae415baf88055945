"""Python runs this at the start of every process below `gradsight check` and `gradsight run`.

Scripts, ranks of a launcher, workers alike.

It waits until torch's optimizers are imported, and notices when one is made; for `run` it also
waits for the trainers that take a callback. Only then Gradsight itself is loaded. Whatever
sitecustomize the user has is run as well.
"""

import atexit
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
# Read at once: the script may empty its environment.
_CHECK = os.environ.get("GRADSIGHT_CHECK")
_HOME = os.environ.get("GRADSIGHT_HOME", "")
_ERROR = os.environ.get("GRADSIGHT_ERROR")


def _run_the_users_own() -> None:
    paths = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class _Waiting(importlib.abc.MetaPathFinder):
    """Lets some modules be imported as ever, then does something with each."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        action = self._actions.pop(name, None)
        if action is None:
            return None
        if not self._actions:
            sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _guarded(action, module)

        spec.loader.exec_module = exec_module
        return spec


def _notice_optimizers(module: Any) -> None:
    """torch.optim.optimizer: be told of every optimizer that is made."""
    made = module.Optimizer.__init__

    @functools.wraps(made)
    def noticed(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _seen["optimizers"] += 1
        _guarded(_optimizer_made, self)

    module.Optimizer.__init__ = noticed


def _notice_loading(module: Any) -> None:
    """torch.nn.modules.module: note the modules that are given weights by load_state_dict."""
    load = module.Module.load_state_dict

    @functools.wraps(load)
    def noticed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        _guarded(_note_loaded, self)
        return result

    module.Module.load_state_dict = noticed


_loaded: dict[int, Any] = {}
"""Weak references to these modules, by id."""


def _note_loaded(module: Any) -> None:
    _loaded[id(module)] = weakref.ref(module)


def _was_loaded(module: Any) -> bool:
    known = _loaded.get(id(module))
    return known is not None and known() is module


_seen = {"passes": 0, "optimizers": 0}
"""Backward passes and optimizers of this process."""


def _count_passes(module: Any) -> None:
    """torch.autograd: count backward passes, to be able to say that there were some."""
    backward = module.backward

    @functools.wraps(backward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _seen["passes"] += 1
        return backward(*args, **kwargs)

    module.backward = counted
    atexit.register(_guarded, _say_what_was_seen, os.getpid())


def _say_what_was_seen(process: int) -> None:
    """Leave a note where nothing could be judged, with the reason if it is known; rank 0 does."""
    if os.getpid() != process or os.environ.get("RANK", "0") != "0":
        return
    # Gradsight is not loaded for this in processes that have nothing to do with training.
    if _seen["optimizers"] or hasattr(sys, "last_value"):
        from gradsight.attach.session import note_frozen_models

        note_frozen_models(_CHECK)
    if _seen["passes"] == 0 or _seen["optimizers"]:
        return
    from gradsight.core.rundir import SCRIPT

    folder = json.loads(_CHECK or "{}")["run_dir"]
    file = os.path.join(folder, SCRIPT)
    if os.path.isdir(folder) and not os.path.exists(file):
        with open(file, "w", encoding="utf-8") as script:
            json.dump([{"optimizer": "none", "passes": _seen["passes"]}], script)


_OF_ANOTHER_PROCESS = ("CalledProcessError", "ChildFailedError", "ProcessRaisedException")
"""Exceptions that only repeat that a process failed, which has noted its own by then."""


def _note_exception(file: str) -> None:
    """Leave a note of the exception that ends this process, for the report."""
    error = getattr(sys, "last_value", None)
    if error is None or type(error).__name__ in _OF_ANOTHER_PROCESS:
        return
    lines = [line.strip() for line in str(error).splitlines()]
    text = next((line for line in lines if line), "")[:300]
    # Of several ranks, the first to fail: the others fail because of it.
    mode = "x" if "RANK" in os.environ else "w"
    with contextlib.suppress(OSError), open(file, mode, encoding="utf-8") as note:
        note.write(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _optimizer_made(optimizer: Any) -> None:
    from gradsight.attach.session import optimizer_made

    optimizer_made(optimizer, _CHECK, _was_loaded)


def _put_into_hf(module: Any) -> None:
    """transformers.trainer: every Trainer that is made from now on has the callback."""
    from gradsight.attach.trainers import hf_callback

    module.DEFAULT_CALLBACKS.append(hf_callback())


def _put_into_lightning(module: Any) -> None:
    """The Trainer of either package: those that are made from now on have the callback."""
    made = module.Trainer.__init__

    @functools.wraps(made)
    def with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _guarded(_give_callback, self)

    module.Trainer.__init__ = with_callback


def _give_callback(trainer: Any) -> None:
    from gradsight.attach.trainers import give_lightning_callback

    give_lightning_callback(trainer)


def _find_gradsight() -> None:
    """Import this installation of Gradsight, even if the script's folder has a gradsight.py.

    Importing that file would run a script called gradsight.py a second time.
    """
    if _HOME not in sys.path:
        sys.path.append(_HOME)
    if "gradsight" in sys.modules:
        return
    spec = importlib.machinery.PathFinder.find_spec("gradsight", [_HOME])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["gradsight"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules["gradsight"]
            raise


def _guarded(action: Callable[[Any], None], given: Any) -> None:
    """Nothing of ours may reach the script."""
    try:
        _find_gradsight()
        action(given)
    except Exception as error:
        print(
            f"gradsight: cannot watch this script: {type(error).__name__}: {error}",
            file=sys.stderr,
        )


if _CHECK is not None:
    _actions: dict[str, Callable[[Any], None]] = {
        "torch.optim.optimizer": _notice_optimizers,
        "torch.nn.modules.module": _notice_loading,
        "torch.autograd": _count_passes,
    }
    if json.loads(_CHECK).get("keep"):
        _actions["transformers.trainer"] = _put_into_hf
        _actions["lightning.pytorch.trainer.trainer"] = _put_into_lightning
        _actions["pytorch_lightning.trainer.trainer"] = _put_into_lightning
    sys.meta_path.insert(0, _Waiting(_actions))
if _ERROR is not None:
    atexit.register(_guarded, _note_exception, _ERROR)
_run_the_users_own()
# The script finds the path that it has without Gradsight; its child processes read PYTHONPATH.
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
