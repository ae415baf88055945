"""GS306: network that no optimizer moves."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.networks import UnmovedNetwork


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
# before the loop: one optimizer for all networks that are meant to learn
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
    text = f"{network.name} ({network.parameters} parameters) gets gradients and never changes: "
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
    return text


def _advice(network: UnmovedNetwork) -> str:
    name = network.variable or network.name
    if network.held_instead is not None:
        return f"Give the optimizer {name} in place of {network.held_instead}."
    if network.trained_instead is not None:
        return (
            f"Train {name} and copy its weights to {network.trained_instead}, if that is its "
            "target network."
        )
    way = f"Give the parameters of {name} to an optimizer"
    if network.optimizer is not None:
        way = f"Step the optimizer of {name} after backward()"
    return f"{way}, or freeze {name} if it is not meant to learn."


def _fix(network: UnmovedNetwork) -> str:
    name = network.variable or network.name
    if network.optimizer is not None:
        optimizer = network.optimizer_variable or "optimizer"
        step = f"# in the loop, after backward(): step the optimizer of {name}\n{optimizer}.step()"
        return f"{step}\n"
    optimizer = network.stepping_optimizer or "optimizer"
    instead = network.held_instead or network.trained_instead
    if instead is not None:
        made = f"{optimizer} = torch.optim.Adam({name}.parameters(), lr=1e-3)"
        return (
            f"# before the loop: give the optimizer {name} in place of {instead}\n"
            f"# (with your optimizer and its settings)\n{made}\n"
        )
    group = f'{optimizer}.add_param_group({{"params": {name}.parameters()}})'
    return (
        f"# before the loop, and before a scheduler is made: add what is missing\n{group}\n\n"
        f"# or, if it is not meant to learn, instead:\n# {name}.requires_grad_(False)\n"
    )
