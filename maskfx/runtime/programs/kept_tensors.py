"""KeptTensors: what a module keeps of its calls, such as maps that attention processors store.

A graph computes a call's result and sets nothing, so what is kept would be that of an earlier call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from maskfx.ir.modules.callables import content_of

DEPTH = 4  # of containers, objects and functions inside one another
# attributes of PyTorch's modules whose contents are the module's own tensors and parts
OWN = {"_parameters", "_buffers", "_modules"}
# hooks that compute a weight from parameters in each call, and set it as an attribute
NORMS = (WeightNorm, SpectralNorm)
LIBRARIES = ("torch", "builtins", "functools", "weakref", "threading", "logging")


class KeptTensors:
    """The tensors that are within reach of a module's parts, weights and buffers aside."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = held(module)

    def changed(self) -> str:
        """Return where another tensor is kept than before; "" if nowhere."""
        now, before = held(self._module), self._before
        return next((place for number, (place, _) in now.items() if number not in before), "")


def kept_in_calls(module: nn.Module, call: Callable[[], object], calls: int) -> str:
    """Call the module, and return where it keeps tensors of each call; "" if nowhere.

    A table that the first call fills stays at a second one, so that of one call nothing is known.
    """
    kept = ""
    for _ in range(calls):
        before = KeptTensors(module)
        call()
        kept = before.changed()
        if not kept:
            break
    return kept if calls > 1 else ""


def held(module: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Return the place of each tensor, by its identity; they are held, so that it stays theirs."""
    found: dict[int, tuple[str, Tensor]] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        computed = {
            hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, NORMS)
        }
        for name, value in list(vars(part).items()):
            if name not in OWN and name not in computed:
                place = f"{path}.{name}" if path else name
                for tensor in tensors_within(value, seen, DEPTH):
                    found.setdefault(id(tensor), (place, tensor))
    return found


def tensors_within(value: object, seen: set[int], depth: int) -> Iterator[Tensor]:
    """Yield the tensors in containers, in attributes of objects and in variables of functions."""
    if isinstance(value, Tensor):
        yield value
    elif depth and id(value) not in seen:
        inside = parts_of(value)
        if inside:
            seen.add(id(value))
        for one in inside:
            yield from tensors_within(one, seen, depth - 1)


def parts_of(value: object) -> list[object]:
    """Return what a value holds: nothing for modules, classes and objects of libraries."""
    if isinstance(value, (nn.Module, type, ModuleType)):
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return [*map(content_of, value.__closure__ or ()), *vars(value).values()]
    if type(value).__module__.partition(".")[0] in LIBRARIES:
        return []
    return list(getattr(value, "__dict__", {}).values())
