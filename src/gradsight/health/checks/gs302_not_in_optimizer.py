"""GS302: missing from the optimizer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gradsight.health.fixes import ADD_MISSING, folded
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import SeveralOptimizers, Window
from gradsight.values.adapters import is_of_an_adapter


@check(
    "GS302",
    "missing from the optimizer",
    "warning",
    asked=Asked(
        when="look",
        needs=("norms", "optimizer"),
        gate=lambda window: (
            window.subject.memberships is not None and 0 in window.subject.memberships
        ),
    ),
    advice=Advice(
        recommendation=(
            "These parameters get gradients, but no optimizer uses them. Add the parameters to the "
            "optimizer, or freeze them. Freezing also makes backward() faster."
        ),
        fix=ADD_MISSING,
    ),
)
def missing(window: Window, *, patience: int = 3) -> Iterator[Fact]:
    """Parameters get a gradient, but no optimizer holds them.

    Why: they are never updated. Often the optimizer was made before a layer was added or replaced.
    """
    counts = window.subject.memberships
    if counts is None or all(counts):
        return
    trainable = np.array(window.subject.trainable)
    absent = trainable & (np.array(counts) == 0)
    rows = np.flatnonzero(absent & (window.l2 > 0))
    if len(rows):
        window.rows_outside = rows
        window.looks_outside += 1
    elif np.isnan(window.l2[absent]).all() and window.looks_outside >= patience:
        # With several optimizers, the pass before this step may have missed these parameters.
        rows = window.rows_outside
    if not len(rows):
        return
    is_of_adapters = any(counts) and all(map(_is_added_by_peft, window.named(rows)))
    if is_of_adapters:
        # One of an adapter's two factors is zero at first, and so is the other one's gradient.
        rows = np.flatnonzero(absent & (window.l2 >= 0))
    names = window.named(rows)
    text = f"{len(rows)} of {trainable.sum()} trainable parameters are in no optimizer"
    severity = None
    if absent.sum() == trainable.sum():
        text += ", so nothing is trained"
        severity = "critical"
    if is_of_adapters:
        text = f"the adapters were added after the optimizer was made: {text}"
        yield Fact(text, names, severity=severity, advice=_ADAPTERS)
    elif window.subject.several is not None:
        fact = _among_several(window, rows.tolist(), text, window.subject.several)
        yield replace(fact, severity=severity)
    else:
        yield Fact(text, names, severity=severity)


_BEFORE = "before the loop"
_SHOWN = 3
"""Modules that are named one by one."""


def _among_several(window: Window, rows: list[int], text: str, several: SeveralOptimizers) -> Fact:
    """Return the finding if it is unclear which of several optimizers should hold these."""
    names = window.named(rows)
    missing = _modules(window, rows)
    twice = _modules(window, several.held_twice)
    has_names = 0 < len(missing) <= _SHOWN
    if several.held_twice and has_names and 0 < len(twice) <= _SHOWN:
        text += f", while two optimizers hold {' and '.join(twice)}"
        these = " and ".join(missing)
        words = (
            f"Two optimizers hold {' and '.join(twice)}. One of them was probably meant for "
            f"{these}. Create that one with the parameters of {these}."
        )
        what, variable = "change one of the two optimizers (keep its name)", "optimizer"
    else:
        words = (
            "These parameters get gradients, but no optimizer uses them: give them to an optimizer "
            "that steps after the backward pass of their loss, or freeze them."
        )
        what, variable = "an optimizer of their own", "another_optimizer"
    trainer = window.subject.trainer
    is_lightning = trainer is not None and trainer.library == "lightning"
    place, model = ("in configure_optimizers", "self") if is_lightning else (_BEFORE, "model")
    given = [f'*{model}.get_submodule("{each}").parameters()' for each in missing]
    if all(part.isidentifier() for each in missing for part in each.split(".")):
        given = [f"*{model}.{each}.parameters()" for each in missing]
    code = f"missing = [{', '.join(given)}]\n"
    if not has_names:
        code = (
            f"names = {list(names)!r}\n"
            f"missing = [each for name, each in {model}.named_parameters() if name in names]\n"
        )
    call = (several.call or "torch.optim.Adam({given}, lr=1e-3)").replace("{given}", "missing")
    fix = (
        f"# {place}: {what}\n"
        f"# (it must step after the backward pass of the loss that trains these)\n"
        f"{code}{folded(f'{variable} = {call}')}\n"
    )
    if variable == "another_optimizer" and trainer is None:
        fix += (
            f"\n# in the loop, before the backward pass of their loss: clear their gradients\n"
            f"# (with gradient accumulation: once per step, as for your other optimizers)\n"
            f"{variable}.zero_grad()\n"
            f"\n# in the loop, after that backward pass: update them\n{variable}.step()\n"
        )
    return Fact(text, names, advice=Advice(words, fix))


def _modules(window: Window, rows: Sequence[int]) -> list[str]:
    """Return the outermost modules that hold these parameters and no others; none: impossible."""
    names = window.subject.names
    wanted = {names[row] for row in rows}
    found: list[str] = []
    for row in rows:
        parts = names[row].split(".")[:-1]
        paths = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        whole = (
            path
            for path in paths
            if all(name in wanted for name in names if name.startswith(f"{path}."))
        )
        path = next(whole, None)
        if path is None:
            return []
        if path not in found:
            found.append(path)
    return found


def _is_added_by_peft(name: str) -> bool:
    return is_of_an_adapter(name) or ".modules_to_save." in name


_ADAPTERS = Advice(
    recommendation=(
        "The optimizer was made before the adapters, so it does not have them: make it after "
        "get_peft_model() or add_adapter(), or add their parameters to it."
    ),
    fix=ADD_MISSING,
)
