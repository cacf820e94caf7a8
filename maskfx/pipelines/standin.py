"""Stand-ins: a denoiser's `forward` that hands its call to the run that is under way, if any.

The module stays what it is, class, weights, config and hooks included; outside of a run it computes
as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

STEP_ARGUMENTS = ("timestep", "timesteps", "t")  # what only denoisers are told


class Caller(Protocol):
    """A run of a pipeline, as stand-ins see it."""

    def call(self, name: str, inputs: dict[str, Any]) -> Any: ...


CURRENT: ContextVar[Caller | None] = ContextVar("maskfx run", default=None)


@contextmanager
def running(caller: Caller | None) -> Iterator[None]:
    """Within, stand-ins hand their calls to this run; with None they compute."""
    token = CURRENT.set(caller)
    try:
        yield
    finally:
        CURRENT.reset(token)


def find_denoisers(components: Mapping[str, Any]) -> dict[str, nn.Module]:
    """What is called at each step: modules told of a timestep, those in lists of nets too."""
    found: dict[str, nn.Module] = {}
    for name, module in components.items():
        if not isinstance(module, nn.Module):
            continue
        nets = getattr(module, "nets", None)
        if isinstance(nets, nn.ModuleList):
            found.update({f"{name}.{i}": net for i, net in enumerate(nets) if is_denoiser(net)})
        elif is_denoiser(module):
            found[name] = module
    return found


def is_denoiser(module: nn.Module) -> bool:
    try:
        names = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False
    return any(name in names for name in STEP_ARGUMENTS)


def install(module: nn.Module, name: str) -> None:
    """Let the module's calls go to the run that is under way."""
    original = module.forward
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        run = CURRENT.get()
        if run is None:
            return original(*args, **kwargs)
        return run.call(name, named_arguments(signature, args, kwargs))

    forward.maskfx_replaced = module.__dict__.get("forward")  # type: ignore[attr-defined]
    module.forward = forward


def remove(module: nn.Module) -> None:
    """Undo `install`."""
    forward: Callable[..., Any] | None = module.__dict__.get("forward")
    if forward is None or not hasattr(forward, "maskfx_replaced"):
        return
    del module.__dict__["forward"]
    if forward.maskfx_replaced is not None:
        module.forward = forward.maskfx_replaced


def installed(module: nn.Module) -> bool:
    return hasattr(module.__dict__.get("forward"), "maskfx_replaced")


def named_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name."""
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(parameter.name, {}))
    return bound
