"""Calls of a model as tensors and JSON, and back: nothing that could run code.

A value is a tensor, a number, text, None, a list, a tuple, a mapping with text as keys, a torch
dtype or device. Mappings of other classes (a tokenizer's BatchEncoding) come back as plain ones.
Whatever else a model is called with cannot be stored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsight.core import limits
from gradsight.core.calls import CallNumber, RecordedCall
from gradsight.core.records import read_record, read_value
from gradsight.errors import GradsightError, RunError
from gradsight.values.plain import plain


class CannotStore(GradsightError):
    """An argument that is neither data nor made of data."""


def pack_passes(passes: Sequence[RecordedCall]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The structure of some calls, and their tensors by name.

    Raises CannotStore where an argument is no data.
    """
    tensors: dict[str, Tensor] = {}
    return [
        _pack_pass(each, f"pass{number}", tensors) for number, each in enumerate(passes)
    ], tensors


def _pack_pass(each: RecordedCall, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    gradients = each.output_gradients
    return {
        "args": _pack(each.args, f"{name}.args", tensors),
        "kwargs": _pack(dict(each.kwargs), f"{name}.kwargs", tensors),
        "rng": _pack(dict(each.rng), f"{name}.rng", tensors),
        "buffers": _pack(dict(each.buffers), f"{name}.buffers", tensors),
        "output_gradients": None
        if gradients is None
        else _pack(gradients, f"{name}.output_gradients", tensors),
        "autocast": None if each.autocast is None else list(each.autocast),
        "training": each.training,
        "caller": each.caller,
        "backward_caller": each.backward_caller,
        "sample_ids": None if each.sample_ids is None else list(each.sample_ids),
        "part": each.part,
        "number": plain(each.number),
    }


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """One value as [kind, what]."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise CannotStore(f"{name} is a tensor of layout {value.layout}")
        tensors[name] = value
        return ["tensor", name]
    if isinstance(value, float):
        # JSON knows neither NaN nor infinities.
        return ["float", value.hex()]
    if value is None or isinstance(value, (bool, int, str)):
        return ["value", value]
    if isinstance(value, (torch.dtype, torch.device)):
        return [type(value).__name__, str(value).removeprefix("torch.")]
    if type(value) in (list, tuple) or isinstance(value, torch.Size):
        kind = "list" if type(value) is list else "tuple"
        return [kind, [_pack(each, f"{name}.{place}", tensors) for place, each in enumerate(value)]]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return ["dict", {key: _pack(each, f"{name}.{key}", tensors) for key, each in value.items()}]
    raise CannotStore(f"{name} is a {type(value).__module__}.{type(value).__qualname__}")


def unpack_passes(structure: Any, tensors: Mapping[str, Tensor]) -> list[RecordedCall]:
    """The calls again, each part of the type that it had."""
    if len(structure) > limits.PASSES:
        raise RunError(f"this incident has {len(structure)} calls; at most {limits.PASSES} are run")
    try:
        calls = [_unpack_pass(each, tensors) for each in structure]
        for call in calls:
            _refuse_other_types(call)
        return calls
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunError(
            f"the batch of this incident is damaged: {type(error).__name__}: {error}"
        ) from error


def _unpack_pass(each: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RecordedCall:
    gradients, autocast, ids = each["output_gradients"], each["autocast"], each["sample_ids"]
    number = each.get("number")
    return RecordedCall(
        args=_unpack(each["args"], tensors),
        kwargs=_unpack(each["kwargs"], tensors),
        rng=_unpack(each["rng"], tensors),
        buffers=_unpack(each["buffers"], tensors),
        autocast=None if autocast is None else (autocast[0], autocast[1]),
        training=each["training"],
        caller=each["caller"],
        output_gradients=None if gradients is None else _unpack(gradients, tensors),
        backward_caller=each["backward_caller"],
        sample_ids=None if ids is None else tuple(ids),
        part=read_value(str, each.get("part", ""), "part"),
        number=None if number is None else read_record(CallNumber, number, "number"),
    )


def _refuse_other_types(call: RecordedCall) -> None:
    """A stranger's call may have anything in the place of anything."""
    if not isinstance(call.args, tuple) or not isinstance(call.kwargs, dict):
        raise TypeError("the arguments of a call are a tuple and a mapping")
    for name in ("rng", "buffers"):
        values = getattr(call, name)
        if not isinstance(values, dict) or not all(isinstance(v, Tensor) for v in values.values()):
            raise TypeError(f"{name} should be tensors by name")
    gradients = call.output_gradients
    if gradients is not None and not isinstance(gradients, tuple | list):
        raise TypeError("output_gradients should be a list of tensors")
    for gradient in gradients or ():
        if gradient is not None and not isinstance(gradient, Tensor):
            raise TypeError("output_gradients should be a list of tensors")
    if call.autocast is not None:
        read_value(tuple[str, str], list(call.autocast), "autocast")
        if not isinstance(getattr(torch, call.autocast[1], None), torch.dtype):
            raise TypeError(f"autocast to {call.autocast[1]!r} cannot be")
    read_value(bool, call.training, "training")
    read_value(str | None, call.caller, "caller")
    read_value(str | None, call.backward_caller, "backward_caller")
    ids = None if call.sample_ids is None else list(call.sample_ids)
    read_value(tuple[int | str | None, ...] | None, ids, "sample_ids")


def _unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    kind, what = packed
    if kind == "tensor":
        return tensors[what]
    if kind == "float":
        return float.fromhex(what)
    if kind == "value":
        return what
    if kind == "dtype":
        return {
            str(known).removeprefix("torch."): known
            for known in vars(torch).values()
            if isinstance(known, torch.dtype)
        }[what]
    if kind == "device":
        return _device(what)
    if kind == "dict":
        return {key: _unpack(each, tensors) for key, each in what.items()}
    if kind in ("list", "tuple"):
        items = [_unpack(each, tensors) for each in what]
        return items if kind == "list" else tuple(items)
    raise ValueError(f"unknown kind {kind!r}")


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"there is no device {name!r}") from error
