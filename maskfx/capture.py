"""Capture: a denoiser as an exported graph with symbolic sizes.

Example inputs of any size do: capture makes batch, height, width and text length distinct itself,
so that no two of them are taken for one another. Where a module can't be exported with symbolic
sizes, it is captured at the example's own sizes; such a capture serves only calls of these sizes,
and other sizes get captures of their own.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import Dim
from torch.utils import _pytree as pytree

from maskfx import roles as roles_
from maskfx.decisions import Decisions, answers_of, going_by, split_off
from maskfx.lanes import (
    Batch,
    Feature,
    Lane,
    Level,
    Pyramid,
    Tokens,
    X,
    Y,
    int_hint,
    set_lane,
)
from maskfx.numbers import symbolic_numbers
from maskfx.roles import Leaf

log = logging.getLogger(__name__)

Sizes = dict[str, int]


@dataclass
class Capture:
    """A denoiser as a graph, and for which calls it is valid."""

    module: fx.GraphModule | None
    leaves: list[Leaf]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    pyramid: Pyramid
    constants: dict[int, Any]
    symbols: dict[str, Any] = field(default_factory=dict)
    guards: list[Any] = field(default_factory=list)
    frozen: Sizes | None = None
    fixed_batch: int | None = None
    features: list[tuple[int, ...]] = field(default_factory=list)
    decisions: Decisions | None = None
    notes: list[str] = field(default_factory=list)
    _verdicts: dict[tuple[tuple[str, int], ...], bool] = field(default_factory=dict)

    def serves(
        self, module: torch.nn.Module, spec: pytree.TreeSpec, values: Sequence[Any], sizes: Sizes
    ) -> bool:
        """Does the graph accept the call, and does it give what the module gives?

        Sizes can be frozen into a graph without a trace (a table that Python computed), and the
        guards of an export also exclude sizes that it serves well. So each new size is compared
        with the module once; guards decide only where there are no numbers to compare.
        """
        if spec != self.in_spec or self._other_constants(values) or not self._same_frozen(sizes):
            return False
        if self._other_features(values) or self._decides_otherwise(values):
            return False
        numbers = [v for i, v in enumerate(values) if type(v) is int and i not in self.constants]
        key = ("checked", *sorted(sizes.items()), *numbers)
        if key not in self._verdicts:
            if self.module is None or has_meta(module, values):
                return self.accepts(spec, values, sizes)
            self._verdicts[key] = self._agrees(module, values, sizes)  # type: ignore[index]
        return self._verdicts[key]  # type: ignore[index]

    def _agrees(self, module: torch.nn.Module, values: Sequence[Any], sizes: Sizes) -> bool:
        assert self.module is not None
        for batch in dict.fromkeys((sizes["batch"], self.pyramid.batch)):
            if self.fixed_batch is not None and batch != self.fixed_batch:
                continue
            mine = with_batch(self.leaves, values, batch)
            try:
                with torch.no_grad():
                    wanted = module(**pytree.tree_unflatten(copies(mine), self.in_spec))
                    found = self.module(**pytree.tree_unflatten(copies(mine), self.in_spec))
            except Exception as error:
                log.debug("a captured graph fails at %s: %s", sizes, error)
                continue
            if same_values(found, wanted):
                if batch != sizes["batch"]:
                    self.fixed_batch = batch
                return True
        return False

    def accepts(self, spec: pytree.TreeSpec, values: Sequence[Any], sizes: Sizes) -> bool:
        """Is the graph valid for a call with these arguments?"""
        if spec != self.in_spec or self._other_constants(values) or self._other_features(values):
            return False
        key = tuple(sorted(sizes.items()))
        if key not in self._verdicts:
            self._verdicts[key] = self._accepts_sizes(sizes)
        return self._verdicts[key]

    def _other_constants(self, values: Sequence[Any]) -> bool:
        return any(not same_constant(values[i], c) for i, c in self.constants.items())

    def _other_features(self, values: Sequence[Any]) -> bool:
        """Sizes without a role, such as channels or frames, are those of the capture."""
        for leaf, value, sizes in zip(self.leaves, values, self.features, strict=True):
            if not leaf.tensor:
                continue
            if not isinstance(value, torch.Tensor) or value.dim() != len(sizes):
                return True
            if any(
                not r and a != b for r, a, b in zip(leaf.roles, sizes, value.shape, strict=True)
            ):
                return True
        return False

    def _decides_otherwise(self, values: Sequence[Any]) -> bool:
        """Would Python go another way on what these arguments hold?"""
        if self.decisions is None:
            return False
        if self.fixed_batch is None:
            return not self.decisions.hold(values)
        batch = roles_.observed_sizes(self.leaves, values)["batch"]
        parts = [
            with_batch(self.leaves, values, self.fixed_batch, start)
            for start in range(0, batch, self.fixed_batch)
        ]
        return not all(map(self.decisions.hold, parts))

    def _same_frozen(self, sizes: Sizes) -> bool:
        fixed = {r: e for r, e in self.symbols.items() if isinstance(e, int)}
        fixed.update(self.frozen or {})
        return all(sizes.get(r) == s for r, s in fixed.items() if r != "batch")

    def _accepts_sizes(self, sizes: Sizes) -> bool:
        if not self._same_frozen(sizes):
            return False
        values = {}
        for role, expr in self.symbols.items():
            if not isinstance(expr, int) and role in sizes:
                values[expr] = sizes[role]
        for guard in self.guards:
            verdict = guard.subs(values)
            if verdict.free_symbols:
                continue
            if not bool(verdict):
                return False
        return True


def has_meta(module: torch.nn.Module, values: Sequence[Any]) -> bool:
    """Weights or inputs without numbers: nothing can be run."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [v for v in values if isinstance(v, torch.Tensor)]
    return any(t.is_meta for t in tensors)


def copies(values: Sequence[Any]) -> list[Any]:
    """Some modules write into their arguments."""
    return [copy_of(v) for v in values]


def copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def with_batch(
    leaves: Sequence[Leaf], values: Sequence[Any], batch: int, start: int = 0
) -> list[Any]:
    """The arguments with another batch: from `start` on, the last request repeated as needed."""
    out = []
    for leaf, value in zip(leaves, values, strict=True):
        for axis, role in enumerate(leaf.roles):
            if role == "batch" and value.shape[axis] != batch:
                index = torch.arange(start, start + batch).clamp_(max=value.shape[axis] - 1)
                value = value.index_select(axis, index.to(value.device))
        out.append(value)
    return out


def same_values(found: Any, wanted: Any) -> bool:
    """Equal up to rounding, as two runs of the same model are."""
    a, b = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if type(x) is not type(y):
                return False
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if x.is_floating_point():
            x, y = torch.nan_to_num(x.float()), torch.nan_to_num(y.float())
            bound = 1e-3 if a[0].dtype in (torch.float32, torch.float64) else 5e-2
            if (x - y).norm() > bound * y.norm() + 1e-6:
                return False
        elif not torch.equal(x, y):
            return False
    return True


def same_constant(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def capture(
    module: torch.nn.Module,
    inputs: Mapping[str, Any],
    roles: Mapping[str, roles_.Roles] | None = None,
    attempt: bool = True,
) -> Capture:
    """Export `module` as it would run on `inputs`, with symbolic sizes where it allows them.

    A module that can't be exported at all gives a capture without a graph, which says why; so
    does one that isn't to be exported (not `attempt`).
    """
    paths, values, in_spec = roles_.flatten(inputs)
    leaves = roles_.infer(module, inputs, roles)
    sizes = roles_.observed_sizes(leaves, values)
    notes: list[str] = []
    answers: list[bool] = []
    listed = listed_samples(leaves)
    if listed > 1:
        notes.append(f"{listed} samples in a list: a capture is of one, pass them in calls of one")
    if not attempt:
        notes.append('mode="dense" leaves the module as it is')
    for wanted, symbolic in candidates(sizes, leaves) if listed < 2 and attempt else ():
        example = pytree.tree_unflatten(resize(leaves, values, sizes, wanted), in_spec)
        try:
            with quiet():
                exported, answers = export_as_answered(module, example, leaves, symbolic)
                result = finish(exported, leaves, in_spec, values, wanted, symbolic, notes, answers)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0][:200]
            kind = "symbolic" if symbolic else "fixed"
            notes.append(f"export with {kind} sizes {wanted}: {type(error).__name__}: {first}")
            log.debug("capture attempt failed", exc_info=True)
            continue
        if result.serves(module, in_spec, values, sizes):
            return result
        kind = "symbolic" if symbolic else "fixed"
        notes.append(f"export with {kind} sizes {wanted}: not valid for the call's own {sizes}")
    return Capture(
        module=None,
        leaves=leaves,
        in_spec=in_spec,
        out_spec=in_spec,
        pyramid=Pyramid(batch=sizes["batch"]),
        constants={},
        features=shapes_of(values),
        notes=notes,
    )


def shapes_of(values: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in values]


def listed_samples(leaves: Sequence[Leaf]) -> int:
    """How many samples the picture's argument lists, if it has no batch."""
    if any("batch" in leaf.roles for leaf in leaves):
        return 0
    primary = next(leaf for leaf in leaves if leaf.step and "y" in leaf.roles)
    return sum(leaf.tensor and leaf.argument == primary.argument for leaf in leaves)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's own reports of an attempt that fails: the notes keep the reason."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def candidates(sizes: Sizes, leaves: Sequence[Leaf]) -> Iterator[tuple[Sizes, bool]]:
    """Sizes to capture at, the most general first, and whether they are symbolic."""
    texts = [r for r in sizes if r.startswith("text:")]
    several, two = max(3, sizes["batch"]), max(2, sizes["batch"])
    if not any("batch" in leaf.roles for leaf in leaves):
        several = two = 1
    seen = []
    for text in (True, False):
        for grid in grids(sizes):
            wanted = {**sizes, **grid, "batch": several}
            used = {wanted["batch"], *grid.values()}
            for role in texts if text else ():
                length = max(5, sizes[role])
                while length in used or any(length == s for s in sizes.values()):
                    length += 2
                wanted[role] = length
                used.add(length)
            if wanted not in seen:
                seen.append(wanted)
                yield wanted, True
    yield {**sizes, "batch": two}, True
    yield {**sizes, "batch": two}, False


def grids(sizes: Sizes) -> Iterator[Sizes]:
    """Picture sizes near the example's with height and width distinct at every level."""
    if "tokens" in sizes:
        yield {"tokens": sizes["tokens"] + 6 + sizes["tokens"] % 2}
        yield {"tokens": sizes["tokens"]}
    if "y" in sizes and "x" in sizes:
        h, w = sizes["y"], sizes["x"]
        unit = 1
        while unit < 16 and h % (2 * unit) == 0 and w % (2 * unit) == 0:
            unit *= 2
        if unit >= 4:
            yield {"y": 3 * unit, "x": 5 * unit}
            if h > unit:
                yield {"y": h, "x": w - unit if h != w - unit and w > unit else w + unit}
                yield {"y": max(h // 2, unit), "x": w}
        yield {"y": h, "x": w}
        if h == w:
            yield {"y": h, "x": w + unit}


def resize(leaves: Sequence[Leaf], values: Sequence[Any], sizes: Sizes, wanted: Sizes) -> list[Any]:
    """The arguments at other sizes; what the tensors hold doesn't matter for capture."""
    out = []
    for leaf, value in zip(leaves, values, strict=True):
        if not leaf.tensor:
            out.append(value)
            continue
        for axis, role in enumerate(leaf.roles):
            if role:
                size = roles_.role_size(role, wanted)
                if value.shape[axis] < size:
                    times = [1] * value.dim()
                    times[axis] = -(-size // max(1, value.shape[axis]))
                    value = value.repeat(times)
                value = value.narrow(axis, 0, size)
        out.append(value.detach().clone(memory_format=torch.contiguous_format))
    return out


def export(
    module: torch.nn.Module, inputs: Any, leaves: Sequence[Leaf], symbolic: bool
) -> torch.export.ExportedProgram:
    """torch.export with every dimension that has a role left to `Dim.AUTO`.

    So are whole numbers among the arguments: the picture's sizes, for models that make positions
    of them. Those that Python branches on are fixed by the export.
    """

    def dims(leaf: Leaf, value: Any) -> Any:
        if not leaf.tensor:
            return Dim.AUTO if symbolic and type(value) is int and value > 1 else None
        return {i: Dim.AUTO for i, r in enumerate(leaf.roles) if r and symbolic}

    values, spec = pytree.tree_flatten(inputs)
    shapes = pytree.tree_unflatten([dims(*pair) for pair in zip(leaves, values, strict=True)], spec)
    with torch.no_grad(), symbolic_numbers(module):
        program = torch.export.export(module, (), dict(inputs), dynamic_shapes=shapes, strict=False)
        if any(is_write(n) for g in graphs(program.graph_module) for n in g.nodes):
            program = program.run_decompositions({})
    return program


def export_as_answered(
    module: torch.nn.Module, inputs: Any, leaves: Sequence[Leaf], symbolic: bool
) -> tuple[torch.export.ExportedProgram, list[bool]]:
    """An export; where Python asks a tensor, it goes by the answers of a plain run."""
    if not has_meta(module, pytree.tree_leaves(inputs)):
        answers = answers_of(module, pytree.tree_map(copy_of, inputs))
        if answers:
            with going_by(module, answers):
                found = export(module, inputs, leaves, symbolic)
            if found.call_spec.out_spec.children()[1].num_leaves == len(answers):
                return found, answers
    return export(module, inputs, leaves, symbolic), []  # nothing is asked under export


def graphs(module: torch.nn.Module) -> Iterator[fx.Graph]:
    """The graph of a module and of the regions it wraps."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield part.graph


def is_write(node: fx.Node) -> bool:
    """Does the operator write into one of its inputs?"""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def finish(
    exported: torch.export.ExportedProgram,
    leaves: list[Leaf],
    in_spec: pytree.TreeSpec,
    values: Sequence[Any],
    sizes: Sizes,
    symbolic: bool,
    notes: list[str],
    answers: list[bool],
) -> Capture:
    """The exported program as a plain graph with lanes on its placeholders."""
    module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    drop_refills(module.graph)
    spell_views(module)
    out_spec, decisions = exported.call_spec.out_spec, None
    if answers:
        decisions = split_off(module, answers, [leaf.step for leaf in leaves])
        out_spec = out_spec.children()[0]
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    assert len(placeholders) == len(leaves), (len(placeholders), len(leaves))
    symbols: dict[str, Any] = {}
    for node, leaf in zip(placeholders, leaves, strict=True):
        node.meta["leaf"] = leaf
        shape: Any = node.meta["val"].shape if leaf.tensor else ()
        for role, size in zip(leaf.roles, shape, strict=True):
            expr = size.node.expr if isinstance(size, torch.SymInt) else int(size)
            if role in ("batch", "y", "x", "tokens") or role.startswith("text:"):
                symbols.setdefault(role, expr)
    pyramid = Pyramid(
        batch=sizes["batch"],
        base=(sizes["y"], sizes["x"]) if "y" in sizes else None,
        segments={
            **({"image": sizes["tokens"]} if "tokens" in sizes else {}),
            **{r: s for r, s in sizes.items() if r.startswith("text:")},
        },
    )
    for node, leaf in zip(placeholders, leaves, strict=True):
        if leaf.tensor:
            set_lane(node, placeholder_lane(leaf, node.meta["val"], symbols, pyramid, symbolic))
    constants = {
        i: v
        for i, (leaf, v, node) in enumerate(zip(leaves, values, placeholders, strict=True))
        if not leaf.tensor and not isinstance(node.meta["val"], torch.SymInt)
    }
    sizes_seen: list[Any] = [
        size
        for node in placeholders
        if isinstance(node.meta["val"], torch.Tensor)
        for size in node.meta["val"].shape
    ]
    shape_env = next((s.node.shape_env for s in sizes_seen if isinstance(s, torch.SymInt)), None)
    result = Capture(
        module=module,
        leaves=list(leaves),
        in_spec=in_spec,
        out_spec=out_spec,
        pyramid=pyramid,
        constants=constants,
        symbols=symbols,
        guards=[g.expr for g in shape_env.guards] if shape_env is not None else [],
        frozen=None if symbolic else dict(sizes),
        features=shapes_of(values),
        decisions=decisions,
        notes=list(notes),
    )
    if isinstance(symbols.get("batch"), int):
        result.fixed_batch = sizes["batch"]
    return result


def spell_views(module: torch.nn.Module) -> None:
    """view as reshape: the strides that a view counts on change when writes are taken out."""
    aten = torch.ops.aten
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target in (aten.view.default, aten._unsafe_view.default):
                    node.target = aten.reshape.default
            part.recompile()


def drop_refills(graph: fx.Graph) -> None:
    """Leave alone the buffers that a forward fills anew each time and never reads before."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            buffer = node.args[0]
            if buffer.op == "get_attr" and len(buffer.users) == 1:
                graph.erase_node(node)
                graph.erase_node(buffer)


def placeholder_lane(
    leaf: Leaf,
    value: torch.Tensor,
    symbols: Mapping[str, Any],
    pyramid: Pyramid,
    symbolic: bool,
) -> Lane:
    """The lane that an argument's roles spell."""
    dims: list[tuple[Any, ...]] = []
    for role, size in zip(leaf.roles, value.shape, strict=True):
        if role == "batch":
            dims.append((Batch(),))
        elif role == "tokens":
            dims.append((Tokens(("image",)),))
        elif role.startswith("tokens/"):
            patch = int(int(role[7:]) ** 0.5)
            level = pyramid.derive(Level(parent=0, divide=(patch, patch))) if patch > 1 else 0
            dims.append((Y(level), X(level)))
        elif role.startswith("text:"):
            fixed = symbolic and isinstance(symbols.get(role), int)
            dims.append((Feature(int_hint(size)),) if fixed else (Tokens((role,)),))
        elif role and role[0] in "yx":
            axis = Y if role[0] == "y" else X
            dims.append((axis(scaled_level(role[1:], pyramid)),))
        else:
            dims.append((Feature(int_hint(size)),) if int_hint(size) != 1 else ())
    return Lane(tuple(dims))


def scaled_level(scale: str, pyramid: Pyramid) -> int:
    """The level that lies `/n` or `*n` from the base."""
    if not scale:
        return 0
    n = int(scale[1:])
    if scale[0] == "*":
        return pyramid.derive(Level(parent=0, times=(n, n)))
    level = 0
    while n > 1:  # halve step by step: that is what a pyramid of stride-2 convolutions does
        level = pyramid.derive(Level(parent=level, grow=(1, 1), divide=(2, 2)))
        n //= 2
    return level


def is_symbol_arithmetic(node: fx.Node) -> bool:
    """Sizes and arithmetic on them, which carry no data of a request."""
    return node.op == "call_function" and (
        node.target is torch.ops.aten.sym_size.int
        or (getattr(node.target, "__module__", "") in ("_operator", "math", "torch"))
        and node.target is not operator.getitem
        and not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
    )
