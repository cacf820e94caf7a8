"""Stand-ins: a denoiser's `forward` that dispatches its calls to the current run, if any.

The module is otherwise unchanged, including class, weights, config and hooks; outside of a run it
computes as before. Several pipelines may share a module: it has one stand-in until the last of them
removes it. The module's own hooks act when the pipeline calls it, not again when the call is
computed. Copies and pickles of the module have no stand-ins. Each run puts back those that were
lost: when accelerate removes a hook, the module gets the `forward` that it had before the hook.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Protocol, get_args, get_type_hints
from weakref import WeakKeyDictionary

import torch
from torch import nn

from maskfx.ir.modules.part_hooks import ACCELERATE, DIFFUSERS, acts
from maskfx.pipelines.parts.modular import absent_parts
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.runtime.hardware.offload import whole_hook

STEP_ARGUMENT = re.compile(r"timestep\w*|t")  # arguments of denoisers only
HOOKED_CALL = "_call_impl"  # what PyTorch calls: the hooks, and `forward` between them
WRAPPED = "_orig_mod"  # the module that `torch.compile` has wrapped
COMPUTES = object()  # the answer of a run that leaves a call to the module
STATE = "__getstate__"  # what copies and pickles are made from


class CallReceiver(Protocol):
    """The interface of a pipeline's run to stand-ins."""

    def handles(self, module: nn.Module) -> bool:
        """Return True if the run handles this module's calls, False if the module computes."""
        ...

    def call(self, module: nn.Module, inputs: dict[str, object]) -> object: ...

    def codes(self, autoencoder: nn.Module, method: str) -> bool:
        """Return True if `code` may return a result."""
        ...

    def code(self, part: nn.Module, method: str, call: MethodCall) -> object:
        """Return the result of an autoencoder's or encoder's call; None if it shall run itself."""
        ...


@dataclass(frozen=True)
class MethodCall:
    """A call of a part's own method."""

    original: Callable[..., object]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments by name."""
        return named_arguments(inspect.signature(self.original), self.args, self.kwargs)


CURRENT: ContextVar[CallReceiver | None] = ContextVar("maskfx run", default=None)
COMPUTED: ContextVar[frozenset[nn.Module]] = ContextVar("maskfx computed", default=frozenset())


@contextmanager
def running(caller: CallReceiver | None) -> Iterator[None]:
    """Dispatch calls of stand-ins to this run within the context; with None they compute."""
    token = CURRENT.set(caller)
    try:
        yield
    finally:
        CURRENT.reset(token)


@contextmanager
def computing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Compute calls of these modules within the context; their own hooks have acted before."""
    token = COMPUTED.set(frozenset(modules))
    try:
        with running(None):
            yield
    finally:
        COMPUTED.reset(token)


def find_denoisers(components: Mapping[str, object]) -> dict[str, nn.Module]:
    """Return the modules with a timestep argument by name, including those in lists of nets."""
    found: dict[str, nn.Module] = {}
    for name, part in components.items():
        module = getattr(part, WRAPPED, part)
        if not isinstance(module, nn.Module):
            continue
        nets = getattr(module, "nets", None)
        if isinstance(nets, nn.ModuleList):
            found.update({f"{name}.{i}": net for i, net in enumerate(nets) if is_denoiser(net)})
        elif is_denoiser(module):
            found[name] = module
    return found


def absent_denoisers(pipe: Pipeline) -> list[str]:
    """Return names of components that are None but declared as denoisers by class or blocks."""
    unloaded = [name for name, kind in absent_parts(pipe) if is_denoiser(kind)]
    if unloaded:
        return unloaded
    factory: Callable[..., None] = type(pipe).__init__
    try:
        declared = get_type_hints(factory)
    except Exception:  # a type that is missing without an optional package
        declared = getattr(factory, "__annotations__", {})
    return [
        name
        for name, part in pipe.components.items()
        if part is None and any(map(is_denoiser, classes_in(declared.get(name))))
    ]


def classes_in(declared: object) -> list[type[nn.Module]]:
    """Return the module classes that a type annotation allows."""
    several = [one for part in get_args(declared) for one in classes_in(part)]
    if isinstance(declared, type) and issubclass(declared, nn.Module):
        return [declared, *several]
    return several


def is_denoiser(module: nn.Module | type[nn.Module]) -> bool:
    try:
        names = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False
    return any(map(STEP_ARGUMENT.fullmatch, names))


def is_hooked(module: nn.Module) -> bool:
    """Return True if hooks run before or after its parts: offloading, block caching.

    Such a module must run as a whole, at the time it is called. A hook that only moves the whole
    module to its device doesn't count, nor do those that widen weights. PyTorch's hooks on parts
    are part of what is captured, those on the module itself act when the pipeline calls it.
    """
    return Hooks(module).act()


class Hooks:
    """The hooks of a module's parts, for questions at each call: guidance may add some for one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._parts = [(part, vars(part)) for part in module.modules()]

    def act(self) -> bool:
        """Return True if `is_hooked` now."""
        return any(
            acts(part) and (part is not self.module or whole_hook(part) is None)
            for part, own in self._parts
            if ACCELERATE in own or DIFFUSERS in own
        )


@dataclass
class StandIn:
    """A stand-in: the `forward` it replaces."""

    original: Callable[..., object]
    before: Callable[..., object] | None  # the previous method in the module's __dict__, if any
    function: Callable[..., object] | None = None  # the stand-in itself


@dataclass
class Users:
    """The stand-ins that a module should have.

    Args:
        counts: By method, the number of pipelines that use one.
        denoises: Whether the module is a denoiser.
    """

    counts: Counter[str] = field(default_factory=Counter)
    denoises: bool = False


USERS: WeakKeyDictionary[nn.Module, Users] = WeakKeyDictionary()
CHANGING = Lock()  # requests in several threads may have one module


def install(module: nn.Module, method: str = "forward", denoises: bool = True) -> None:
    """Dispatch calls of a denoiser, or of a method of a part that is none, to the current run."""
    with CHANGING:
        users = USERS.setdefault(module, Users())
        users.denoises |= denoises and method == "forward"
        users.counts[method] += 1
        put(module, method, users)


def put_back(module: nn.Module) -> None:
    """Give a module the stand-ins that it should have and has lost."""
    with CHANGING:
        users = USERS.get(module, Users())
        for method in users.counts:
            put(module, method, users)


def put(module: nn.Module, method: str, users: Users) -> None:
    """Give a module a stand-in if it has none for this method."""
    if installed(module, method) is None:
        if method == "forward" and users.denoises:
            replace_method(module, method, dispatching_forward)
        else:
            replace_method(module, method, partial(dispatching_method, method=method))
    if users.denoises and installed(module, HOOKED_CALL) is None:
        replace_method(module, HOOKED_CALL, call_with_hooks_once)
    if installed(module, STATE) is None:
        replace_method(module, STATE, state_without_stand_ins)


def users_of(module: nn.Module) -> int:
    """Return the number of pipelines that handle a module's calls."""
    return USERS[module].counts["forward"] if module in USERS else 0


def replace_method(
    module: nn.Module,
    method: str,
    made: Callable[[nn.Module, StandIn], Callable[..., object]],
) -> None:
    """Give a module a method in place of its own, for as long as it has stand-ins."""
    standin = StandIn(getattr(module, method), module.__dict__.get(method))
    standin.function = module.__dict__[method] = made(module, standin)
    standin.function.__dict__["maskfx_standin"] = standin


def remove(module: nn.Module, method: str = "forward") -> None:
    """Undo one `install`."""
    with CHANGING:
        users = USERS.get(module, Users())
        users.counts[method] -= 1
        if users.counts[method] > 0:
            return
        del users.counts[method]
        restore(module, method)
        if method == "forward":
            users.denoises = False
            restore(module, HOOKED_CALL)
        if not users.counts:
            USERS.pop(module, None)
            if not any(installed(module, name) for name in vars(module) if name != STATE):
                restore(module, STATE)


def restore(module: nn.Module, method: str) -> None:
    """Give a module the method that it had before the stand-in, if it has one.

    A stand-in that a hook runs, which was registered later, stays: it computes as the method did.
    """
    standin = installed(module, method)
    if standin is not None and module.__dict__[method] is standin.function:
        del module.__dict__[method]
        if standin.before is not None:
            module.__dict__[method] = standin.before


def installed(module: nn.Module, method: str = "forward") -> StandIn | None:
    """Return a method's stand-in, or that which a hook in its place runs, or None."""
    found: StandIn | None = getattr(module.__dict__.get(method), "maskfx_standin", None)
    return found


def untraced(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that `torch.compile` calls and doesn't trace.

    The user may have compiled the module by it, and a run isn't part of what the module computes.
    """
    found: Callable[..., object] = torch.compiler.disable(function)
    return found


def call_with_hooks_once(module: nn.Module, standin: StandIn) -> Callable[..., object]:
    """Return a `_call_impl`, which runs a module's hooks around `forward`.

    A call that is computed for a pipeline runs `forward` alone: the pipeline's own call has run the
    hooks, or runs them when it has the result.
    """
    original = standin.original
    computed = untraced(lambda: module in COMPUTED.get())

    def call(*args: object, **kwargs: object) -> object:
        if computed():
            return module.forward(*args, **kwargs)
        return original(*args, **kwargs)

    return call


def state_without_stand_ins(module: nn.Module, standin: StandIn) -> Callable[[], object]:
    """Return a `__getstate__`, from which copies and pickles of a module are made."""
    original = standin.original

    def state() -> object:
        found = original()
        if not isinstance(found, dict):
            return found  # the module decides what its copies have
        stand_ins = {name: own for name in found if (own := installed(module, name)) is not None}
        before = {n: own.before for n, own in stand_ins.items() if own.before is not None}
        return {n: value for n, value in found.items() if n not in stand_ins} | before

    return state


def dispatching_forward(module: nn.Module, standin: StandIn) -> Callable[..., object]:
    """Return a `forward` that dispatches calls; a function, because captures read its code."""
    original = standin.original
    signature = inspect.signature(original)

    @untraced
    def dispatch(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        run = CURRENT.get()
        if run is None or not run.handles(module):
            return COMPUTES
        return run.call(module, named_arguments(signature, args, kwargs))

    @functools.wraps(original)
    def forward(*args: object, **kwargs: object) -> object:
        found = dispatch(args, kwargs)
        return original(*args, **kwargs) if found is COMPUTES else found

    return forward


def dispatching_method(part: nn.Module, standin: StandIn, method: str) -> Callable[..., object]:
    """Return a method that dispatches to the current run, which may decline the call."""
    original = standin.original

    @untraced
    def dispatch(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        run = CURRENT.get()
        return None if run is None else run.code(part, method, MethodCall(original, args, kwargs))

    @functools.wraps(original)
    def called(*args: object, **kwargs: object) -> object:
        found = dispatch(args, kwargs)
        return original(*args, **kwargs) if found is None else found

    return called


def is_coded(part: object, method: str) -> bool:
    """Return True if the current run may compute this method of a pipeline's part."""
    run = CURRENT.get()
    if run is None or not isinstance(part, nn.Module) or installed(part, method) is None:
        return False
    return run.codes(part, method)


def named_arguments(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return a call's arguments by name, without defaults; entries of `**kwargs` by their names."""
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(parameter.name, {}))
    return bound
