"""The names of torch that it promises to nobody, and that we use: one list, asked for at opening.

torch may rename or drop them in any release. Where one is missing, the instrument that needs it
says so before training begins, instead of failing in the middle of it. A test holds the list
against the code. Importing this module does not import torch.
"""

import functools
import importlib
from typing import Any

from gradsight.errors import GradsightError

TESTED = "2.13.0"
"""The release of torch that all tests run with."""

NAMES: dict[str, tuple[str, ...]] = {
    "watch": (
        "torch._C._autograd._get_sequence_nr",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch._C._dynamo.eval_frame._FrameAction.DEFAULT",
        "torch._C._dynamo.eval_frame._FrameAction.SKIP",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._pop_torch_function_stack",
        "torch._C._push_on_torch_function_stack",
        "torch._C._get_obj_in_tls",
        "torch._C._is_key_in_tls",
        "torch._C._pop_torch_function_stack",
        "torch._C._push_on_torch_function_stack",
        "torch._C._stash_obj_in_tls",
        "torch._foreach_copy_",
        "torch.autograd._get_sequence_nr",
        "torch.nn.Module._call_impl.__code__",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.utils._pytree.keystr",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_flatten_with_path",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._pytree.tree_unflatten",
        "torch.utils._device.DeviceContext",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    ),
    "ranks": (
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._rank_not_in_group",
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "torch.distributed.distributed_c10d._world.pg_map",
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    ),
    "dump": (
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.storage._dtype_to_storage_type_map",
    ),
    "ghost": (
        "torch._C.DisableTorchFunction",
        "torch._C._get_mkldnn_enabled",
        "torch._C._set_mkldnn_enabled",
        "torch._foreach_norm",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.nn.modules.dropout._DropoutNd",
        "torch.nn.modules.loss._Loss",
        "torch.overrides._get_current_function_mode_stack",
        "torch.utils._pytree.TreeSpec",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_unflatten",
    ),
    "several devices": ("torch.testing._internal.distributed.fake_pg.FakeStore",),
    "memory": (
        "torch._C._TorchDispatchModeKey.FAKE",
        "torch._C._current_graph_task_id",
        "torch._C._get_dispatch_mode",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.UnsupportedOperatorException",
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.nn.modules.loss._Loss",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_unflatten",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils.checkpoint._detach_helper",
        "torch.utils.checkpoint._is_compiling",
    ),
}
"""By the instrument that needs them."""


@functools.cache
def refuse_unknown_torch(instrument: str) -> None:
    """Refuse to begin where torch lacks what this instrument needs."""
    import torch

    missing = [name for name in NAMES[instrument] if not _exists(name)]
    if missing:
        raise GradsightError(
            f"this torch ({torch.__version__}) lacks {', '.join(missing)}, which Gradsight needs; "
            f"it is tested with torch {TESTED}. Use that one, or a newer Gradsight"
        )


def _exists(name: str) -> bool:
    """Whether a dotted name can be had, its modules imported where they are not yet."""
    found: Any = importlib.import_module("torch")
    reached = "torch"
    for part in name.split(".")[1:]:
        reached = f"{reached}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(reached)
            except ImportError:
                return False
        found = getattr(found, part, None)
        if found is None:
            return False
    return True
