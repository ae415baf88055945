"""Keeps torch's compiler out of our side of the border.

A step that is compiled as a whole calls our hooks where its graph breaks. The compiler would then
compile us too: for minutes, and with assumptions about us that change from step to step.
"""

import functools
from typing import Any

from torch._C._dynamo import eval_frame

from gradsight.core.guard import Guard

_SKIP = eval_frame._FrameAction.SKIP


@functools.cache
def keep_compiler_out() -> None:
    """Nothing that a guard calls is traced or compiled; once per process."""
    for function in (Guard.run, Guard.attempt):
        _leave_out(function, _SKIP)


def not_compiled(function: Any) -> Any:
    """The same function, which is not compiled itself; what it calls may be."""
    _leave_out(function, eval_frame._FrameAction.DEFAULT)
    return function


def _leave_out(function: Any, what_it_calls: Any) -> None:
    # As torch.compiler.disable() does, which would import the compiler: that takes seconds.
    function._torchdynamo_disable = True
    strategy = eval_frame._FrameExecStrategy(_SKIP, what_it_calls)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
