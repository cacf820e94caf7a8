"""Numbers among a module's settings as tensors of its graph, so that they may change.

While the module is exported, its attributes hold a `Number` in place of such a number. A product or
sum with a tensor reads a buffer. What Python itself reads of it is a fact, which the capture
keeps: it serves as long as all facts hold.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from maskfx.ir.modules.number_settings import Place, held_at

BUFFER = "maskfx_number_"  # and a number: the buffers of the exported module
OPERATORS = {
    f"__{start}{name}__": (getattr(torch, function), bool(start))
    for name, function in (("mul", "mul"), ("add", "add"), ("sub", "sub"), ("truediv", "div"))
    for start in ("", "r")
}
FUNCTIONS = {"mul", "multiply", "add", "sub", "subtract", "div", "divide", "true_divide"}
FUNCTIONS |= {f"{name}_" for name in FUNCTIONS}  # that write their result into the first argument
FUNCTIONS |= {*OPERATORS, "__imul__", "__iadd__", "__isub__", "__itruediv__"}
COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
READ = """
    abs bool ceil float floor floordiv format hash index int mod neg pos pow repr rfloordiv rmod
    rpow round str trunc
"""


@dataclass(frozen=True)
class NumberFact:
    """What Python has read of a number: the result of a comparison, or all of it.

    Args:
        place: The number's place.
        compares: The name of the comparison.
        other: What it is compared with.
        answer: The result.
    """

    place: Place
    compares: str
    other: object
    answer: bool

    def holds(self, numbers: Mapping[Place, float]) -> bool:
        value = numbers.get(self.place)
        return value is not None and COMPARED[self.compares](value, self.other) is self.answer


class Number:
    """Stands for a number of a module's settings while the module is exported."""

    def __init__(self, place: Place, value: float, buffer: str, root: nn.Module) -> None:
        self.place, self.value, self.buffer, self.root = place, value, buffer, root
        self.facts: list[NumberFact] = []

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type that `isinstance` finds."""
        return type(self.value)

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.root, self.buffer)
        return found

    def read(self) -> float:
        """Return the number, which the capture is fixed to thereby."""
        self._note(NumberFact(self.place, "__eq__", self.value, True))
        return self.value

    def compared(self, name: str, other: object) -> bool:
        other = other.read() if type(other) is Number else other
        answer = bool(COMPARED[name](self.value, other))
        self._note(NumberFact(self.place, name, other, answer))
        return answer

    def _note(self, fact: NumberFact) -> None:
        if fact not in self.facts:
            self.facts.append(fact)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in FUNCTIONS and not kwargs:
            return func(*(own.tensor if type(own) is Number else own for own in args))
        args, kwargs = pytree.tree_map(number_of, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def number_of(value: Any) -> Any:
    """Return the number that a `Number` stands for; other values as they are."""
    return value.read() if type(value) is Number else value


def with_tensors(function: Callable[..., Any], reversed: bool, name: str) -> Callable[..., Any]:
    def computed(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor):
            return function(other, self.tensor) if reversed else function(self.tensor, other)
        return getattr(float(self.read()), name)(number_of(other))

    return computed


def compared_by(name: str) -> Callable[[Number, object], bool]:
    return lambda self, other: self.compared(name, other)


def whole_by(name: str) -> Callable[..., Any]:
    return lambda self, *given: getattr(self.read(), name)(*map(number_of, given))


for _name, (_function, _reversed) in OPERATORS.items():
    setattr(Number, _name, with_tensors(_function, _reversed, _name))
for _name in COMPARED:
    setattr(Number, _name, compared_by(_name))
for _name in READ.split():
    setattr(Number, f"__{_name}__", whole_by(f"__{_name}__"))


@contextmanager
def as_inputs(
    module: nn.Module, own: nn.Module, numbers: Mapping[Place, Tensor]
) -> Iterator[list[NumberFact]]:
    """Put numbers of a module's settings into buffers within the context.

    Args:
        module: The module that is exported.
        own: The module of which it is a twin. If they are one, other code may run it meanwhile, so
            that its numbers stay.
        numbers: A tensor of one number for each place.

    Yields:
        The facts that its code has read, complete at the end.
    """
    found: list[NumberFact] = []
    stands: list[tuple[Any, Any, float]] = []
    if module is own:
        values = ((place, *held_at(own, place)) for place in numbers)
        yield [NumberFact(place, "__eq__", held[key], True) for place, held, key in values]
        return
    names = [f"{BUFFER}{i}" for i in range(len(numbers))]
    try:
        for name, (place, tensor) in zip(names, numbers.items(), strict=True):
            held, key = held_at(module, place)
            made = Number(place, held[key], name, module)
            made.facts = found
            module.register_buffer(name, tensor)
            stands.append((held, key, held[key]))
            held[key] = made
        yield found
    finally:
        for held, key, value in stands:
            held[key] = value
        for name in names:
            module._buffers.pop(name, None)


def read_by(graph: nn.Module | None, numbers: Mapping[Place, Tensor]) -> list[Place]:
    """Return the places of the numbers that a graph reads as tensors."""
    if not isinstance(graph, fx.GraphModule):
        return []
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr" and node.users}
    return [place for i, place in enumerate(numbers) if f"{BUFFER}{i}" in read]
