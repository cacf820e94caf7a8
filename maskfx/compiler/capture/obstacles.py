"""Why a module isn't exported, from what it has: hooks, dropout, names that graphs take."""

from __future__ import annotations

from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from maskfx.ir.modules.part_hooks import acts_within


def obstacle(module: nn.Module, kept: str) -> str:
    """Return why the module isn't exported; "" if nothing is known that prevents it.

    `kept` is the attribute in which it keeps tensors of each call; "" if in none.
    """
    if kept:
        return f"{kept} keeps tensors of the module's last call, which graphs don't set"
    if acts_within(module):
        return "hooks act on its parts in the middle of a call: offloading or caching"
    if drops_values(module):
        return "dropout acts in each call, as its parts are in training mode: call eval()"
    if taken := names_of_graphs(module):
        names = ", ".join(taken)
        return (
            f"a graph can't have a weight or part named {names}: rename it, or compile "
            "a module that has this one as a part"
        )
    return ""


def drops_values(module: nn.Module) -> bool:
    """Return True if a layer of the module sets random values to zero, unlike in every other call.

    Such layers do so in training mode only.
    """
    layers = (part for part in module.modules() if isinstance(part, _DropoutNd))
    return any(layer.training and layer.p > 0 for layer in layers)


def names_of_graphs(module: nn.Module) -> list[str]:
    """Return the names of a module's own weights and parts that are attributes of every graph."""
    own = (module._parameters, module._buffers, module._modules)
    return [repr(name) for held in own for name in held if hasattr(fx.GraphModule, name)]
