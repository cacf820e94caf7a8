"""torch.export of a module, without its warnings, in the form that the passes expect.

Sizes that `int`, `len` or `torch.tensor` would fix stay symbolic while the module runs, and
reading a tensor's values is limited to small tensors.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim
from torch.types import IntLikeType
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import ValueRanges

from maskfx.compiler.capture.branches import PlainRun, Unexportable, full_run, going_by, plain_run
from maskfx.compiler.capture.data_attributes import DataAttributes
from maskfx.compiler.capture.keyword_names import allow_keyword_names
from maskfx.compiler.capture.known_numbers import KnownNumbers
from maskfx.compiler.capture.lengths import is_count
from maskfx.compiler.capture.packings import Packings
from maskfx.compiler.capture.roles import EACH_FRAME, Argument
from maskfx.compiler.capture.routings import SELECTED, Routings
from maskfx.compiler.capture.selections import Selections
from maskfx.compiler.capture.size_arithmetic import size_arithmetic
from maskfx.errors import CaptureError
from maskfx.ir.lanes import shape_hint
from maskfx.ir.nodes import is_write
from maskfx.ir.objects import OPENED, copy_tree
from maskfx.ir.values import has_meta

allow_keyword_names()

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
READ = 64  # the largest tensor that a forward may list during a capture, in numbers


class _IntType(type):
    """Makes every int an instance of the stand-in, too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.int)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.int)


class SymbolicInt(int, metaclass=_IntType):
    """`int`, except that a symbolic integer stays symbolic, and one that is read from a tensor."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named:
            number = args[0].item() if is_single_count(args[0]) else args[0]
            if isinstance(number, torch.SymInt):
                return number
        return builtins.int(*args, **named)


def is_single_count(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and is_count(value)


class _SetType(type):
    """Makes every set an instance of the stand-in, too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.set)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.set)


class SymbolicSet(set[object], metaclass=_SetType):
    """`set`, except that one of symbolic numbers, which have no hash, is a list without equals."""

    def __new__(cls, *args: Any) -> Any:
        values = list(args[0]) if len(args) == 1 else []
        if not any(isinstance(value, torch.SymInt) for value in values):
            return builtins.set(values) if args else builtins.set()
        found: list[object] = []
        for value in values:
            if not any(value == one for one in found):
                found.append(value)
        return found


def symbolic_len(value: Sized) -> IntLikeType:
    """`len`, except that a tensor's is the size of its first dimension, which may be symbolic."""
    sized = isinstance(value, torch.Tensor) and value.dim() or isinstance(value, SELECTED)
    return value.shape[0] if sized else len(value)  # type: ignore[attr-defined]


def symbolic_tensor(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap torch.tensor or torch.as_tensor so that a symbolic number stays symbolic."""

    def wrapped(data: Any, *args: Any, **named: Any) -> torch.Tensor:
        if isinstance(data, torch.SymInt) and not args:
            given = {name: value for name, value in named.items() if value is not None}
            number: Any = data
            return torch.scalar_tensor(number, **{"dtype": torch.long, **given})
        listed = isinstance(data, (list, tuple)) and all(
            isinstance(n, int | torch.SymInt) for n in data
        )
        if listed and any(isinstance(n, torch.SymInt) for n in data) and not args:
            return torch.stack([wrapped(n, **named) for n in data])
        return make(data, *args, **named)

    return wrapped


def symbolic_linspace(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap torch.linspace so that a symbolic number of steps stays symbolic."""

    @functools.wraps(make)
    def wrapped(start: Any, end: Any, steps: object, **named: Any) -> torch.Tensor:
        numbers = isinstance(start, NUMBERS) and isinstance(end, NUMBERS)
        if not isinstance(steps, torch.SymInt) or not numbers or named.get("out") is not None:
            return make(start, end, steps, **named)
        named = {"dtype": torch.get_default_dtype(), **{k: v for k, v in named.items() if v}}
        count: Any = steps
        places: torch.Tensor = torch.arange(count, **named)
        found: torch.Tensor = places * ((end - start) / torch.sym_max(count - 1, 1)) + start
        return found

    return wrapped


@contextlib.contextmanager
def symbolic_numbers(module: torch.nn.Module) -> Iterator[None]:
    """Keep numbers symbolic: `int`, `len` and `set` in the files that define `module`'s submodules,
    and tensors made of one number.
    """
    files = {sys.modules[type(m).__module__] for m in module.modules()}
    own = [f for f in files if f is not None and not f.__name__.startswith("torch.")]
    shadowed = []
    for file in own:
        stand_ins = ("int", SymbolicInt), ("len", symbolic_len), ("set", SymbolicSet)
        for name, value in stand_ins:
            if name not in vars(file):
                setattr(file, name, value)
                shadowed.append((file, name))
    makers = {name: getattr(torch, name) for name in ("tensor", "as_tensor", "linspace")}
    for name, make in makers.items():
        setattr(torch, name, (symbolic_linspace if name == "linspace" else symbolic_tensor)(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)
        for file, name in shadowed:
            delattr(file, name)


@contextlib.contextmanager
def few_numbers() -> Iterator[None]:
    """Refuse to list large tensors: export makes a symbol of each number, which takes minutes."""
    before = FakeTensor.tolist

    def listed(self: FakeTensor) -> object:
        shape = shape_hint(self)
        if math.prod(shape) > READ:
            raise CaptureError(f"Python reads all values of a tensor of {shape}, more than {READ}")
        return before(self)

    FakeTensor.tolist = listed  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = before  # type: ignore[method-assign]


def export_as_answered(
    module: torch.nn.Module,
    inputs: Mapping[str, object],
    leaves: Sequence[Argument],
    symbolic: bool,
) -> tuple[torch.export.ExportedProgram, list[bool]]:
    """Export the module; where Python branches on a tensor, follow the answers of an eager run.

    A module that reads a number per sample isn't tried at other sizes if the export fails.
    """
    if has_meta(module, pytree.tree_leaves(inputs)):
        return export(module, inputs, leaves, symbolic), []
    plain = plain_run(module, copy_tree(inputs), leaves)
    try:
        return export_following(plain, module, inputs, leaves, symbolic)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if plain.light:
            plain = full_run(module, copy_tree(inputs), leaves)
            if plain.answers or plain.counts:
                return export_following(plain, module, inputs, leaves, symbolic)
        if not plain.reads_samples:
            raise
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise Unexportable(f"Python reads a number for each sample of a batch: {first}") from error


def export_following(
    plain: PlainRun,
    module: torch.nn.Module,
    inputs: Mapping[str, object],
    leaves: Sequence[Argument],
    symbolic: bool,
) -> tuple[torch.export.ExportedProgram, list[bool]]:
    """Export the module as it ran; return the answers of the conditions that were followed."""
    if plain.answers or plain.reads_lengths:
        with going_by(module, plain, leaves) as followed:
            found = export(module, inputs, leaves, symbolic)
        asked = found.call_spec.out_spec.children()[1].num_leaves
        if asked and asked == len(plain.answers) + followed.lengths:
            return found, followed.answers
    return export(module, inputs, leaves, symbolic), []  # under export Python branches on nothing


def export(
    module: torch.nn.Module,
    inputs: Mapping[str, object],
    leaves: Sequence[Argument],
    symbolic: bool,
) -> torch.export.ExportedProgram:
    """Run torch.export with every dimension that has a role set to `Dim.AUTO`.

    So are integers among the arguments, such as image sizes from which a model makes positions.
    The export fixes those that Python branches on.
    """

    def dims(leaf: Argument, value: object) -> object:
        if not leaf.tensor:
            return Dim.AUTO if symbolic and type(value) is int and value > 1 else None
        fixed = ("", "frames")
        return {i: Dim.AUTO for i, r in enumerate(leaf.roles) if r not in fixed and symbolic}

    values, spec = pytree.tree_flatten(inputs)
    shapes = nested([dims(*pair) for pair in zip(leaves, values, strict=True)], spec)
    with (
        torch.no_grad(),
        symbolic_numbers(module),
        few_numbers(),
        Selections(),
        KnownNumbers(),
        DataAttributes(),
        Packings(),
        Routings() as routings,
        written_out_attention(),
        equal_sizes(module, leaves),
        size_arithmetic(),
    ):
        program = torch.export.export(module, (), dict(inputs), dynamic_shapes=shapes, strict=False)
        routings.check()
        free_multiples(program)
        if any(is_write(n) for g in graphs(program.graph_module) for n in g.nodes):
            program = program.run_decompositions({})
    return program


def free_multiples(program: torch.export.ExportedProgram) -> None:
    """Let a size that is a multiple of another be as small as one of it makes it.

    A size counts as two or more while it is traced, which is checked for multiples of it alone.
    """
    ranges = program.range_constraints
    for size, own in ranges.items():
        if not size.is_Symbol:
            ranges[size] = ValueRanges(0, own.upper)


def nested(leaves: Sequence[object], spec: pytree.TreeSpec) -> Any:
    """Return leaves in the structure of a tree, with lists in place of its objects."""
    if spec.is_leaf():
        return leaves[0]
    parts, start = [], 0
    for child in spec.children():
        parts.append(nested(leaves[start : start + child.num_leaves], child))
        start += child.num_leaves
    if spec.type in OPENED:
        return parts
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)


@contextlib.contextmanager
def equal_sizes(module: torch.nn.Module, leaves: Sequence[Argument]) -> Iterator[None]:
    """Give dimensions of one role one symbol, also where the module never compares them."""

    def compare(_: torch.nn.Module, args: object, kwargs: Mapping[str, object]) -> None:
        values = pytree.tree_leaves(dict(kwargs))
        if len(values) != len(leaves):
            return
        seen: dict[str, IntLikeType] = {}
        for leaf, value in zip(leaves, values, strict=True):
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            for role, size in zip(leaf.roles, shape, strict=True) if shape else ():
                if role and isinstance(seen.setdefault(role, size), torch.SymInt):
                    torch._check(size == seen[role])
        if EACH_FRAME in seen and "batch" in seen and "frames" in seen:
            torch._check(seen[EACH_FRAME] == seen["batch"] * seen["frames"])

    hook = module.register_forward_pre_hook(compare, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def written_out_attention() -> Iterator[None]:
    """Keep torch's attention layers from running as one operator, which no rule covers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class QuietThread(logging.Filter):
    """Refuses the records of torch's loggers in the thread that makes this filter."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return self.thread != threading.get_ident() or not super().filter(record)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's reports, in this thread, of an attempt that fails: the notes keep the reason.

    Filters are on handlers, because a logger's filters don't see the records of its children.
    """
    filter = QuietThread()

    def print_elsewhere(*values: Any, **how: Any) -> None:
        if threading.get_ident() != filter.thread:
            print(*values, **how)

    # a failed export prints its whole graph, by the built-in `print`
    trace = vars(import_module("torch.export._trace"))
    handlers, before = log_handlers(), trace.get("print")
    for handler in handlers:
        handler.addFilter(filter)
    trace["print"] = print_elsewhere
    try:
        yield
    finally:
        if before is None:
            trace.pop("print", None)
        else:
            trace["print"] = before
        for handler in handlers:
            handler.removeFilter(filter)


def log_handlers() -> list[logging.Handler]:
    """Return the handlers that records of torch's loggers reach."""
    names = [name for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    found = [h for log in (logging.root, *map(logging.getLogger, names)) for h in log.handlers]
    return [*found, logging.lastResort] if logging.lastResort is not None else found


def graphs(module: torch.nn.Module) -> Iterator[fx.Graph]:
    """Yield the graphs of a module and of the regions it wraps."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield part.graph


def spell_views(module: torch.nn.Module) -> None:
    """Replace view by reshape: removing writes changes the strides that a view relies on."""
    aten = torch.ops.aten
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target in (aten.view.default, aten._unsafe_view.default):
                    node.target = aten.reshape.default
            part.recompile()


def drop_refills(graph: fx.Graph) -> None:
    """Remove writes to buffers that each forward refills and never reads before that."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            buffer = node.args[0]
            if buffer.op == "get_attr" and len(buffer.users) == 1:
                graph.erase_node(node)
                graph.erase_node(buffer)
