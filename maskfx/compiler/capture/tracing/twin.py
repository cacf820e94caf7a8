"""A twin of a module: the same tensors, but attributes and containers of its own.

What a run sets on the twin leaves the module as it was.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

from maskfx.ir.modules.part_hooks import DIFFUSERS, run_widened, widened_type

CONTAINERS = (dict, OrderedDict, list, set)  # of these types; configurations are of others
SHARED = (Tensor, type, ModuleType, dict, list, set)
CASTS = (DIFFUSERS, "forward")  # attributes of a part whose weights are widened while it runs
T = TypeVar("T")
STANDIN = "maskfx_standin"  # of a function in place of a method, with the method as `original`


class NoTwin(Exception):
    """A part of a module can't be copied, or would run the module itself."""


class Twin:
    """A module's twin, the tensors that both have, and whether a run has changed it.

    Args:
        module: The module. Raises NoTwin if its twin might run parts of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = {id(part) for part in module.modules()}
        self._of: dict[int, Any] = {}
        self._originals: list[object] = []  # so that no identity is used again meanwhile
        self.tensors: list[Tensor] = []
        self.module: nn.Module = self._copy(module)
        self._before = self._contents()

    def keeps_tensors(self) -> bool:
        """Return True if an attribute or a container holds a tensor that it didn't at first."""
        return any(
            before.get(key) is not item and holds_tensors(item)
            for before, now in zip(self._before, self._contents(), strict=True)
            for key, item in now.items()
        )

    def _contents(self) -> list[dict[object, Any]]:
        """Return the contents of each copy by name, key or place."""
        values = (made if type(made) in CONTAINERS else vars(made) for made in self._of.values())
        return [dict(v) if isinstance(v, dict) else dict(enumerate(v)) for v in values]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
        if id(value) in self._of:
            return self._of[id(value)]
        if isinstance(value, nn.Module):
            owned = id(value) in self._parts
            return self._object(value, object.__new__(type(value))) if owned else value
        if type(value) in CONTAINERS:
            return self._container(value)
        if type(value) is tuple:
            return tuple(map(self._copy, value))
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._copy(value.__self__))
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, partial):
            return self._partial(value)
        library = type(value).__module__.partition(".")[0] in ("torch", "builtins", "functools")
        if library or isinstance(value, SHARED) or not hasattr(value, "__dict__"):
            return value
        try:
            made = copy.copy(value)
            # a member of an enumeration, for one, is its own copy
            return value if made is value else self._object(value, made)
        except Exception as error:
            raise NoTwin(f"a {type(value).__name__} can't be copied: {error}") from error

    def _container(self, value: Any) -> object:
        made = self._note(value, type(value)())
        if isinstance(value, dict):
            made.update((key, self._copy(item)) for key, item in value.items())
        elif isinstance(value, list):
            made.extend(map(self._copy, value))
        else:
            made.update(map(self._copy, value))
        return made

    def _object(self, value: object, made: T) -> T:
        self._note(value, made)
        vars(made).clear()
        held = vars(value)
        kind = widened_type(value) if isinstance(value, nn.Module) else None
        if kind is not None:
            held = {name: item for name, item in held.items() if name not in CASTS}
            vars(made)["forward"] = partial(run_widened, made, kind)
        vars(made).update((name, self._copy(item)) for name, item in held.items())
        return made

    def _note(self, value: object, made: T) -> T:
        self._originals.append(value)
        self._of[id(value)] = made
        return made

    def _partial(self, value: partial[object]) -> partial[object]:
        """Return the function itself; refuse one that is given parts."""
        for item in (value.func, *value.args, *value.keywords.values()):
            if id(item) in self._parts or id(getattr(item, "__self__", None)) in self._parts:
                raise NoTwin(f"a partial function runs the {type(item).__name__} itself")
        return value

    def _function(self, value: FunctionType) -> object:
        """Return the twin's method for a stand-in; refuse functions that hold parts."""
        standin = getattr(value, STANDIN, None)
        if standin is not None:
            return self._copy(standin.original)
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        for item in (*held, *(getattr(one, "__self__", None) for one in held)):
            if id(item) in self._parts:
                raise NoTwin(f"{value.__qualname__} calls the {type(item).__name__} itself")
        return value


def holds_tensors(value: object, depth: int = 3) -> bool:
    """Return True for a tensor, or a container or object with one inside."""
    if isinstance(value, Tensor) or not depth or isinstance(value, (type, ModuleType)):
        return isinstance(value, Tensor)
    inside = (
        value if isinstance(value, (dict, list, set, tuple)) else getattr(value, "__dict__", {})
    )
    items = inside.values() if isinstance(inside, dict) else inside
    return any(holds_tensors(item, depth - 1) for item in list(items))
