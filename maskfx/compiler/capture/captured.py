"""Captured: a denoiser as a graph, and the calls that the graph is valid for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.arguments.roles import Argument, Sizes
from maskfx.compiler.capture.arguments.value_reads import is_held
from maskfx.compiler.capture.number_inputs import NumberFact
from maskfx.compiler.capture.tracing.branches import Decisions, version_of
from maskfx.ir.geometry.cuts import NUMBER
from maskfx.ir.geometry.other_sizes import SizeExpr
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.modules.number_settings import Place
from maskfx.ir.objects import copied_tree
from maskfx.ir.values import (
    ROUNDED,
    autocast_dtypes,
    copies,
    has_meta,
    same_constant,
    same_values,
)

log = logging.getLogger(__name__)


@dataclass
class Capture:
    """A denoiser as a graph, and the calls that the graph is valid for.

    Args:
        module: the graph, or None if the denoiser could not be captured.
        leaves: the flattened arguments with their roles.
        constants: by index, the arguments whose values are fixed in the graph; of a tensor that is
            held, or that has sides of the picture among its numbers, the value of one sample.
        symbols: by role, the symbolic or fixed size.
        guards: conditions of the export on the symbolic sizes; None if they are unknown, as for a
            capture read from a file, which accepts the sizes at capture only, or those at which it
            was compared with the module.
        frozen: the sizes of a graph without symbolic sizes.
        fixed_batch: the only batch size that the graph computes correctly, if there is one.
        features: the shape of each argument at capture.
        results: the results that aren't tensors, such as None, by their place among all.
        decisions: the branch conditions of the denoiser's Python code, if it has any.
        notes: what was tried, and why it failed.
        single: whether the graph is for calls of one sample only.
        compared: whether new sizes are compared with the module; else guards decide.
        interrupted: whether the operating system ended an attempt without a graph, as where too
            many files are open; another process may succeed.
        reads: whether sizes depend on what a tensor holds, or attempts failed because they do.
        lists: whether it stands for calls that list several samples, of which there is no graph.
        numbers: where the numbers of the module's settings stand that the graph reads as tensors.
        facts: what else it was made for of these numbers.
        holds: whether the facts are as they were.
        autocast: the types that `torch.autocast` computed in around the capture; calls for which
            these differ get captures of their own.
    """

    module: fx.GraphModule | None
    leaves: list[Argument]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    pyramid: Pyramid
    constants: dict[int, Any]
    symbols: dict[str, SizeExpr] = field(default_factory=dict)
    guards: list[Any] | None = field(default_factory=list)
    frozen: Sizes | None = None
    fixed_batch: int | None = None
    features: list[tuple[int, ...]] = field(default_factory=list)
    decisions: Decisions | None = None
    notes: list[str] = field(default_factory=list)
    single: bool = False
    compared: bool = True
    interrupted: bool = False
    reads: bool = False
    lists: bool = False
    numbers: list[Place] = field(default_factory=list)
    facts: list[NumberFact] = field(default_factory=list)
    holds: bool = True
    autocast: list[str] = field(default_factory=autocast_dtypes)
    verdicts: dict[tuple[object, ...], bool] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    _compared_held: dict[int, MutableMapping[Any, tuple[int, bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.module is not None:
            flat = pytree.tree_leaves(self.module.graph.output_node().args[0])
            self.results = {i: v for i, v in enumerate(flat) if not isinstance(v, fx.Node)}

    @property
    def nodes(self) -> Iterable[fx.Node]:
        """Return the nodes of the graph; none without a graph."""
        return () if self.module is None else self.module.graph.nodes

    def structured(self, flat: Sequence[object]) -> object:
        """Return results in the module's structure, given all of them or the tensors alone."""
        if len(flat) < self.out_spec.num_leaves:
            tensors, places = iter(flat), range(self.out_spec.num_leaves)
            flat = [self.results[i] if i in self.results else next(tensors) for i in places]
        return pytree.tree_unflatten(flat, self.out_spec)

    def serves(
        self, module: torch.nn.Module, spec: pytree.TreeSpec, values: Sequence[object], sizes: Sizes
    ) -> bool:
        """Return True if the graph accepts the call and returns what the module returns.

        Sizes can be frozen into a graph without a trace (a table that Python computed), and the
        guards of an export also exclude sizes that the graph serves well. So each new size is
        compared with the module once; guards decide only where there is no data to compare.
        """
        if not self.holds or spec != self.in_spec:
            return False
        if self._other_constants(values) or not self._same_frozen(sizes):
            return False
        if self.autocast != autocast_dtypes():
            return False
        if self._other_features(values) or self._other_tokens(values, sizes):
            return False
        if self._decides_otherwise(values):
            return False
        if self.single and sizes["batch"] != 1:
            return False
        numbers = [v for i, v in enumerate(values) if type(v) is int and i not in self.constants]
        key = ("checked", *sorted(sizes.items()), *numbers)
        if key not in self.verdicts:
            if self.module is None or not self.compared or has_meta(module, values):
                return self.accepts(spec, values, sizes)
            self.verdicts[key] = self._agrees(module, values, sizes)
        return self.verdicts[key]

    def _agrees(self, module: torch.nn.Module, values: Sequence[object], sizes: Sizes) -> bool:
        """Compare graph and module at the call's batch, or in groups of the captured batch."""
        assert self.module is not None
        with torch.no_grad():
            try:
                wanted = module(**copied_tree(values, self.in_spec))
            except torch.OutOfMemoryError:
                raise  # not a verdict on the graph
            except Exception as error:
                log.debug("the module itself fails at %s: %s", sizes, error)
                return False
            for batch in dict.fromkeys((sizes["batch"], self.pyramid.batch)):
                if self.fixed_batch is not None and batch != self.fixed_batch:
                    continue
                try:
                    found = self._in_groups(values, batch, wanted)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    log.debug("a captured graph fails at %s: %s", sizes, error)
                    continue
                if same_values(found, wanted, self.rounding):
                    if batch != sizes["batch"] and self.fixed_batch is None:
                        self.fixed_batch = batch
                        self.verdicts.clear()  # other batches were compared as a whole
                    return True
        return False

    def _in_groups(self, values: Sequence[object], batch: int, wanted: object) -> list[object]:
        """Return the leaves of the graph's result, computed in groups of `batch` requests.

        The last group may be padded; then the results have more requests than the call, or none of
        them belongs to a request, and the graph computes something else.
        """
        groups, leaves = groups_of(self.leaves, values, batch), pytree.tree_leaves(wanted)
        runs = [pytree.tree_leaves(self._run(copies(group))) for group in groups]
        pairs = list(zip(zip(*runs, strict=True), leaves, strict=True))
        padded = roles_.observed_sizes(self.leaves, values)["batch"] % batch
        if padded and not any(has_other_shape(parts[0], leaf) for parts, leaf in pairs):
            raise ValueError(f"results of {batch} requests have the shapes of those of {padded}")
        return [joined(parts, leaf) for parts, leaf in pairs]

    def _run(self, values: Sequence[object]) -> object:
        """Run the graph; one that was read from a file has the flattened arguments as inputs."""
        assert self.module is not None
        if isinstance(self.module.graph._codegen, _PyTreeCodeGen):
            return self.module(**pytree.tree_unflatten(values, self.in_spec))
        return self.module(*values)

    @cached_property
    def rounding(self) -> float:
        """Return the relative difference of its results that values of 16 bits within it explain.

        A denoiser may compute in 16 bits and return float32.
        """
        values = [node.meta.get("val") for node in self.nodes if node.op == "call_function"]
        kinds = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        return 0.0 if kinds.isdisjoint((torch.bfloat16, torch.float16)) else ROUNDED

    def read_numbers(self, pyramid: Pyramid) -> None:
        """Count the integers among the arguments that cuts follow from among a call's sizes."""
        for i, leaf in enumerate(self.leaves):
            role = f"{NUMBER}{leaf.path}"
            if role in pyramid.cuts.numbers() and not leaf.roles:
                self.leaves[i] = replace(leaf, roles=(role,))
                self.pyramid.segments[role] = pyramid.segments[role]
                self.features[i] = (pyramid.segments[role],)

    @property
    def was_read(self) -> bool:
        """Whether the graph was read from a file, which holds no symbols and guards."""
        return self.guards is None

    @property
    def fixed(self) -> dict[int, Any]:
        """The arguments whose values stand in the graph; of sides in tensors it has sizes."""
        return {i: v for i, v in self.constants.items() if not self.is_sides(i)}

    def is_sides(self, index: int) -> bool:
        """Return True for a tensor that the graph takes, with sides of the picture in it."""
        return bool(self.leaves[index].sides) and not self.leaves[index].held

    @property
    def of_one_sample(self) -> bool:
        """Whether the graph is for calls of one sample, or of a list, of which one is captured."""
        return self.single or not any("batch" in leaf.roles for leaf in self.leaves)

    @property
    def treats_samples_alike(self) -> bool:
        """Whether there is a graph, and it is of one sample or of any number of them."""
        any_number = not isinstance(self.symbols.get("batch"), int)
        return self.module is not None and (self.of_one_sample or any_number)

    def accepts(self, spec: pytree.TreeSpec, values: Sequence[object], sizes: Sizes) -> bool:
        """Return True if structure, constants, sizes and guards admit these arguments."""
        if spec != self.in_spec or self._other_constants(values) or self._other_features(values):
            return False
        if self._other_tokens(values, sizes):
            return False
        key = tuple(sorted(sizes.items()))
        if key not in self.verdicts:
            self.verdicts[key] = self._accepts_sizes(sizes)
        return self.verdicts[key]

    def _other_constants(self, values: Sequence[object]) -> bool:
        """Return True if an argument has another value than the one that the graph was made for."""
        return any(
            not self._held_alike(i, values[i])
            if self.leaves[i].held or self.leaves[i].sides
            else not same_constant(values[i], c)
            for i, c in self.constants.items()
        )

    def _held_alike(self, index: int, value: Any) -> bool:
        """Return True if an argument has the value that is held; comparisons of it are kept."""
        if not isinstance(value, torch.Tensor):
            return False
        key, leaf = version_of(value), self.leaves[index]
        compared = self._compared_held.setdefault(index, WeakIdKeyDictionary())
        known = compared.get(value)
        if known is None or not known[0] == key >= 0:
            known = compared[value] = key, is_held(leaf, self.constants[index], value)
        return known[1]

    def _other_features(self, values: Sequence[object]) -> bool:
        """Return True if a size without a role, such as channels or frames, has changed.

        Listed samples, of which there is no graph, may have any sizes.
        """
        for leaf, value, sizes in zip(self.leaves, values, self.features, strict=True):
            if not leaf.tensor:
                continue
            if not isinstance(value, torch.Tensor) or value.dim() != len(leaf.roles):
                return True
            shape = sizes[: len(leaf.roles)]
            if not self.lists and any(
                roles_.is_fixed(r) and a != b
                for r, a, b in zip(leaf.roles, shape, value.shape, strict=True)
            ):
                return True
        return False

    def _other_tokens(self, values: Sequence[Any], sizes: Sizes) -> bool:
        """Return True if the sites of a grid are tokens of another number."""
        for leaf, value in zip(self.leaves, values, strict=True):
            for axis, role in enumerate(leaf.roles):
                of_grid = role.startswith("tokens/")
                if of_grid and value.shape[axis] != roles_.role_size(role, sizes):
                    return True
        return False

    def _decides_otherwise(self, values: Sequence[object]) -> bool:
        """Return True if Python would take another branch on the contents of these arguments."""
        if self.decisions is None:
            return False
        if self.fixed_batch is None:
            return not self.decisions.hold(values)
        groups = groups_of(self.leaves, values, self.fixed_batch)
        return not all(map(self.decisions.hold, groups))

    def _same_frozen(self, sizes: Sizes) -> bool:
        fixed = {r: e for r, e in self.symbols.items() if isinstance(e, int)}
        fixed.update(self.frozen or {})
        return all(sizes.get(r) == s for r, s in fixed.items() if r != "batch")

    def _accepts_sizes(self, sizes: Sizes) -> bool:
        if not self._same_frozen(sizes):
            return False
        if self.guards is None:
            return sizes == roles_.sizes_of(self.leaves, self.features)
        values = {}
        for role, expr in self.symbols.items():
            if not isinstance(expr, int) and role in sizes:
                values[expr] = sizes[role]
        for guard in self.guards:
            try:
                verdict = guard.subs(values)
            except ZeroDivisionError:  # it divides by a size that isn't there
                return False
            if verdict.free_symbols:
                continue
            if not bool(verdict):
                return False
        return True


def groups_of(
    leaves: Sequence[Argument], values: Sequence[object], batch: int
) -> list[list[object]]:
    """Split the arguments into groups of `batch` requests; the last group is padded."""
    own = roles_.observed_sizes(leaves, values)["batch"]
    return [with_batch(leaves, values, batch, start) for start in range(0, own, batch)]


def has_other_shape(one: object, other: object) -> bool:
    """Return True for tensors of different shapes."""
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape != other.shape  # type: ignore[attr-defined]


def joined(parts: Sequence[Any], wanted: object) -> object:
    """Join the groups' results into one result of the size of `wanted`."""
    first = parts[0]
    if not isinstance(first, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return first
    axes = [a for a, (n, m) in enumerate(zip(first.shape, wanted.shape, strict=True)) if n != m]
    if not axes:
        return first
    return torch.cat(list(parts), axes[0]).narrow(axes[0], 0, wanted.shape[axes[0]])


def each_of(leaves: Sequence[Argument], values: Sequence[object]) -> int:
    """Return the number of frames of a call's video."""
    return roles_.observed_sizes(leaves, values)["frames"]


def with_batch(
    leaves: Sequence[Argument], values: Sequence[Any], batch: int, start: int = 0
) -> list[object]:
    """Return the arguments of `batch` requests from `start`, the last one repeated as needed."""
    out = []
    for leaf, value in zip(leaves, values, strict=True):
        for axis, role in enumerate(leaf.roles):
            each = each_of(leaves, values) if role == roles_.EACH_FRAME else 1
            if role in ("batch", roles_.EACH_FRAME) and value.shape[axis] != batch * each:
                index = torch.arange(start, start + batch)
                index = index.clamp_(max=value.shape[axis] // each - 1)
                index = (index[:, None] * each + torch.arange(each)).flatten()
                value = value.index_select(axis, index.to(value.device))
        out.append(value)
    return out
