"""GS306: network that no optimizer moves."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradsight.health.fixes import folded
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.networks import MovingOptimizer, UnmovedNetwork


@check(
    "GS306",
    "network that no optimizer moves",
    "warning",
    asked=Asked(when="networks", needs=("networks",)),
    advice=Advice(
        recommendation=(
            "Give these parameters to an optimizer that steps after backward(). If a network is "
            "not meant to learn, freeze it with requires_grad_(False); backward() is then faster."
        ),
        fix="""
# before the loop: one optimizer for all networks trained on the same loss
import itertools
networks = [model]
parameters = itertools.chain(*(each.parameters() for each in networks))
optimizer = torch.optim.AdamW(parameters, lr=3e-4)

# in the loop, after loss.backward(): step every optimizer
optimizer.step()
""",
    ),
)
def unmoved(window: Window) -> Iterator[Fact]:
    """A network gets gradients, but no optimizer moves it.

    Why: it keeps its initial weights, and the rest of the script trains against random weights.
    Either no optimizer holds its parameters, or the optimizer that holds them never steps. Networks
    in eval mode, with loaded weights, or whose weights change in some other way are not reported.
    """
    networks = window.unmoved
    if networks:
        yield Fact(
            "; ".join(map(_seen, networks)),
            tuple(name for network in networks for name in network.held_parameters),
            first_step=min(network.first_step for network in networks),
            advice=Advice(" ".join(map(_advice, networks)), "\n".join(map(_fix, networks))),
        )


def _seen(network: UnmovedNetwork) -> str:
    count = f"{network.parameters} parameters"
    if network.with_gradient is not None:
        count = f"{network.with_gradient} of its {count}"
    text = f"{network.name} ({count}) gets gradients and never changes: "
    if network.optimizer is None:
        text += "it is in no optimizer"
    else:
        place = "" if network.made is None else f", made at {network.made},"
        text += f"its {network.optimizer}{place} never stepped"
    if network.held_instead is not None:
        text += (
            f", while {network.held_instead}, which has the same shapes and never gets a "
            "gradient, is in one"
        )
    elif network.trained_instead is not None:
        text += f", while {network.trained_instead}, which began as its copy, is trained"
    elif network.held_twice is not None:
        text += f", while two optimizers hold {network.held_twice}: {_listed(network)}"
    if network.parts:
        text += f" (gradients reach only {_all(network.parts)})"
    return text


def _listed(network: UnmovedNetwork) -> str:
    """Return what the script calls the two optimizers, in the order of its lines."""
    pair = sorted(network.rivals, key=lambda each: _line(each.made))
    return " and ".join(map(_place_of, pair))


def _line(made: str | None) -> tuple[str, int]:
    file, _, line = (made or "").rpartition(":")
    return file, int(line or 0)


def _place_of(optimizer: MovingOptimizer) -> str:
    if optimizer.variable is None:
        return (
            "an unnamed optimizer"
            if optimizer.made is None
            else f"the one made at {optimizer.made}"
        )
    made = "" if optimizer.made is None else f" ({optimizer.made})"
    return f"{optimizer.variable}{made}"


def _advice(network: UnmovedNetwork) -> str:
    name = network.variable or network.name
    if network.held_instead is not None:
        return f"Give the optimizer {name} in place of {network.held_instead}."
    if network.trained_instead is not None:
        return (
            f"Train {name} and copy its weights to {network.trained_instead}, if that is its "
            "target network."
        )
    if network.held_twice is not None and network.is_known_which:
        return (
            f"Create {_place_of(network.rivals[0])} with the parameters of {name}, not of "
            f"{network.held_twice}."
        )
    if network.held_twice is not None:
        return (
            f"Create one of {_listed(network)} with the parameters of {name}. Gradsight cannot "
            "tell which one was meant. Choose the one that steps after the backward pass of the "
            f"loss of {name}."
        )
    if network.optimizer is not None:
        way = f"Step the optimizer of {name} after backward()"
    elif network.joins or network.moving is None:
        way = f"Give the parameters of {_all(network.parts or (name,))} to an optimizer"
    else:
        way = (
            f"Create an optimizer for {name}, or add its parameters to the optimizer that steps "
            "after the backward pass of its loss"
        )
    return f"{way}. If {name} is not meant to learn, freeze it."


def _fix(network: UnmovedNetwork) -> str:
    name = network.variable or network.name
    if network.optimizer is not None:
        optimizer = network.optimizer_variable or "optimizer"
        step = f"# in the loop, after backward(): step the optimizer of {name}\n{optimizer}.step()"
        return f"{step}\n"
    instead = network.held_instead or network.trained_instead
    if instead is not None:
        made = _made(network.moving, name, f"{name}.parameters()")
        return f"# before the loop: give the optimizer {name} in place of {instead}\n{made}"
    if network.held_twice is not None:
        made = _made(network.rivals[0], name, _parameters(network))
        if network.is_known_which:
            return f"# before the loop: create this optimizer with the parameters of {name}\n{made}"
        return (
            f"# before the loop: change one of the two optimizers to hold {name}\n"
            f"# (the one that steps after the backward pass of {name}'s loss;\n"
            f"# replace the name on the left if that is the other one)\n{made}"
        )
    freeze = "\n".join(f"# {each}.requires_grad_(False)" for each in network.parts or (name,))
    frozen = f"# instead, if it is not meant to learn: freeze it\n{freeze}\n"
    moving = network.moving
    if network.joins and moving is not None:
        optimizer = moving.variable or "optimizer"
        group = f'{optimizer}.add_param_group({{"params": {_parameters(network)}}})'
        return (
            f"# before the loop, and before a scheduler is made: add what is missing\n"
            f"{folded(group)}\n\n{frozen}"
        )
    own = re.sub(r"\W+", "_", name.removeprefix("self.")).strip("_") + "_optimizer"
    made = _made(replace(moving or MovingOptimizer(), variable=own), name, _parameters(network))
    return (
        f"# before the loop: an optimizer for {name}\n{made}\n"
        f"# in the loop, before the backward pass of its loss: clear its gradients\n"
        f"# (with gradient accumulation: once per step, as for your other optimizers)\n"
        f"{own}.zero_grad()\n\n"
        f"# in the loop, after that backward pass: update it\n{own}.step()\n\n{frozen}"
    )


def _made(optimizer: MovingOptimizer | None, name: str, parameters: str) -> str:
    """Return the line that makes an optimizer, with the settings of the script's."""
    variable = (None if optimizer is None else optimizer.variable) or "optimizer"
    if optimizer is None or optimizer.call is None:
        made = f"torch.optim.Adam({parameters}, lr=1e-3)"
        return f"# (with your optimizer and its settings)\n{folded(f'{variable} = {made}')}\n"
    made = optimizer.call.replace("{given}", parameters)
    return f"{folded(f'{variable} = {made}')}\n"


def _parameters(network: UnmovedNetwork) -> str:
    """Return the expression for the parameters that get a gradient."""
    if not network.parts:
        return f"{network.variable or network.name}.parameters()"
    given = (each if each in network.single else f"*{each}.parameters()" for each in network.parts)
    return f"[{', '.join(given)}]"


def _all(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
