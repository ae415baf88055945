"""Config files written as Python, as nanoGPT's are: assignments that are read and never run."""

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gradsight.errors import UsageError
from gradsight.train.config import DeviceName, Settings, options_of

_EQUALS = {
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "dropout": "model.dropout",
    "max_iters": "max_steps",
    "n_embd": "model.n_embd",
    "n_head": "model.n_head",
    "n_layer": "model.n_layer",
    "out_dir": "results_dir",
    "vocab_size": "model.vocab_size",
    "warmup_iters": "warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}
"""Settings that only have another name here."""
_AS_HERE = {
    "bias": True,
    "compile": False,
    "decay_lr": True,
    "eval_only": False,
    "init_from": "scratch",
    "wandb_log": False,
}
"""Values of theirs that are what the trainer does anyway."""
_DTYPES = ("float32", "bfloat16")
_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
"""No powers: one line of them can fill the memory."""


@dataclass(frozen=True, slots=True)
class PythonConfig:
    """What a config file in Python asks for."""

    settings: Mapping[str, Any]
    """Nested, as `train.config.from_dict` takes them."""
    left_out: tuple[str, ...]
    """Names that have no equal here."""


def read_python_config(file: Path) -> PythonConfig:
    """The settings that a Python file assigns, under our names or nanoGPT's."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--config {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--config {file} is not Python: {error}") from error
    values = assignments(text, f"--config {file}")
    settings: dict[str, Any] = {}
    left_out = []
    # Without a decay theirs has no warm-up and no lowest rate, whatever else the file says of them.
    for name in sorted(values, key=lambda name: name == "decay_lr"):
        if name in _AS_HERE and values[name] == _AS_HERE[name]:
            continue
        found = _translated(name, values, f"--config {file}")
        if not found:
            left_out.append(name)
        for dotted, setting in found.items():
            *parents, last = dotted.split(".")
            inner = settings
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = setting
    return PythonConfig(settings, tuple(left_out))


def assignments(text: str, where: str) -> dict[str, Any]:
    """The values that a Python text assigns to names; what does more than that is refused.

    >>> assignments("batch_size = 5 * 8  # samples\\nout_dir: str = 'out'", "it")
    {'batch_size': 40, 'out_dir': 'out'}
    """
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where} is not Python: {error}") from error
    values: dict[str, Any] = {}
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        try:
            names, assigned = _names_and_value(statement)
            value = _literal(assigned)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            line = text.split("\n")[statement.lineno - 1].strip()
            raise UsageError(
                f"{where}, line {statement.lineno}: expected `name = value` with the value "
                f"written out, got `{line}`. A Python file is read and never run: write the value "
                f"itself (arithmetic of numbers such as 5 * 8 is fine), or leave the line out"
            ) from error
        values.update(dict.fromkeys(names, value))
    return values


def _names_and_value(statement: ast.stmt) -> tuple[list[str], ast.expr]:
    """The names that a statement assigns to, and the expression of their value."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        raise ValueError("not an assignment")
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    if len(names) < len(targets) or statement.value is None:
        raise ValueError("not an assignment of a value to a name")
    return names, statement.value


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of arithmetic of numbers."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_number(node.operand))
    return ast.literal_eval(node)


def _number(node: ast.expr) -> Any:
    value = _literal(node)
    if type(value) not in (int, float):  # "ab" * 10**9 is no setting
        raise ValueError("arithmetic is for numbers")
    return value


def _translated(name: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What one of the file's values means here, by dotted name; nothing where it has no equal."""
    value = values[name]
    if name in _EQUALS:
        return {_EQUALS[name]: value}
    if name == "device":
        kind = str(value).partition(":")[0]  # theirs may have a number, as "cuda:0"
        return {"device": kind} if kind in get_args(DeviceName) else {}
    if name == "dtype" and value in _DTYPES:
        return {"train_dtype": value}
    if name == "eval_iters":  # theirs counts batches
        samples = _given(name, values, where) * _given("batch_size", values, where)
        return {"eval_samples": samples}
    if name == "min_lr":
        highest = _given("learning_rate", values, where)
        lowest = _given(name, values, where)
        return {"optimizer.min_lr_ratio": lowest / highest} if highest else {}
    if name == "decay_lr":
        return {"optimizer.min_lr_ratio": 1.0, "warmup_steps": 0}
    if name == "wandb_log":
        return {"trainer.callbacks.watch.sinks": ("wandb",)}
    if name in dict(options_of(Settings())):
        return {name: value}
    return {}


def _given(name: str, values: Mapping[str, Any], where: str) -> Any:
    """A number that another setting follows from, from the file or by default."""
    value = values.get(name, getattr(Settings(), name, None))
    if type(value) not in (int, float):
        raise UsageError(f"{where}: {name} should be a number, got {value!r}")
    return value
