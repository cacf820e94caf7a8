"""The samples of a call: its arguments for each of them alone, and the join of their results.

Knows nothing of programs and recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments.roles import EACH_FRAME, Argument
from maskfx.ir.listed import Join, count_listed
from maskfx.ir.weak_memo import WeakMemo

VIEWS = 512  # kept: arguments cut for a sample, so that the same argument gives the same tensor

LISTS = Join(list)

Inputs = Mapping[str, Any]
Cut = tuple[int, int, int]  # axis, start, length


def first_cut(value: Tensor, index: int) -> Tensor:
    return value[index : index + 1]


def select_sample(
    value: object, index: int, count: int, cut: Callable[[Tensor, int], Tensor] = first_cut
) -> object:
    """Return an argument of a call that lists samples, for one of them alone.

    Args:
        value: The argument.
        index: The number of the sample.
        count: The number of samples.
        cut: Returns a sample's part of a tensor.
    """
    if isinstance(value, (list, tuple)):
        if len(value) == count:
            return type(value)([value[index]])
        return type(value)([select_sample(one, index, count, cut) for one in value])
    if isinstance(value, Mapping):
        return {key: select_sample(one, index, count, cut) for key, one in value.items()}
    if isinstance(value, Tensor) and value.dim() and value.shape[0] == count:
        return cut(value, index)
    return value


def join_results(results: Sequence[Any], how: Join = LISTS) -> Any:
    """Join the results of several calls into one, sample after sample."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(list(results), how.axis)
    if how.items is not None and isinstance(first, how.items):
        return how.items(item for result in results for item in result)
    if isinstance(first, Mapping):
        columns = {k: join_results([result[k] for result in results], how) for k in first}
        named = all(isinstance(key, str) for key in columns)  # outputs of diffusers take keywords
        kind: Callable[..., Mapping[str, object]] = type(first)
        return kind(**columns) if named else kind(columns)
    if isinstance(first, (list, tuple)):
        columns_ = zip(*results, strict=True)
        return type(first)([join_results(parts, how) for parts in columns_])
    return first


class SampleArguments:
    """Cuts the arguments of calls into those of each sample.

    Texts are cut to what their mask keeps, if it keeps a first part of each. An argument that
    doesn't change from call to call gives the same tensors in each, so that what is computed from
    it once per request is known.
    """

    def __init__(self) -> None:
        self._views: WeakMemo[Tensor] = WeakMemo(VIEWS)
        self._lengths: WeakMemo[list[int]] = WeakMemo(VIEWS)

    def split(self, inputs: Inputs, leaves: Sequence[Argument], batch: int) -> list[Inputs]:
        """Return the arguments of each sample; those of one sample may be the call's own."""
        listed = count_listed(inputs)
        if listed:
            return [
                {
                    name: select_sample(value, i, listed, self._item)
                    for name, value in inputs.items()
                }
                for i in range(listed)
            ]
        by_path = {leaf.path: leaf for leaf in leaves}
        texts = self._texts(inputs, by_path)
        return [
            {
                name: self._cut(value, name, i, batch, by_path, texts)
                for name, value in inputs.items()
            }
            for i in range(batch)
        ]

    def _item(self, value: Tensor, index: int) -> Tensor:
        return self.view(value, ((0, index, 1),))

    def _cut(
        self,
        value: object,
        path: str,
        index: int,
        batch: int,
        leaves: Mapping[str, Argument],
        texts: Mapping[str, list[int]],
    ) -> object:
        """Return an argument of a call with a batch, for one of its samples."""
        if isinstance(value, Tensor):
            leaf = leaves[path]
            cuts: list[Cut] = []
            for axis, role in enumerate(leaf.roles):
                if role in ("batch", EACH_FRAME):
                    each = value.shape[axis] // batch
                    cuts.append((axis, index * each, each))
                elif role in texts:
                    cuts.append((axis, 0, texts[role][index]))
            return self.view(value, tuple(cuts), keep=not leaf.step)
        if isinstance(value, Mapping):
            return {
                k: self._cut(v, f"{path}.{k}", index, batch, leaves, texts)
                for k, v in value.items()
            }
        if not isinstance(value, (list, tuple)):
            return value
        if len(value) == batch and not any(map(torch.is_tensor, pytree.tree_leaves(value))):
            return type(value)([value[index]])
        return type(value)(
            [self._cut(v, f"{path}.{i}", index, batch, leaves, texts) for i, v in enumerate(value)]
        )

    def view(
        self, value: Tensor, cuts: tuple[Cut, ...], keep: bool = True, less: int = 0
    ) -> Tensor:
        """Return a part of an argument, `less` than its numbers by a number.

        With `keep`, the same argument gives the same tensor.
        """
        cuts = tuple(c for c in cuts if (c[1], c[2]) != (0, value.shape[c[0]]))
        if not cuts:
            return value

        def view() -> Tensor:
            found = value
            for axis, start, length in cuts:
                found = found.narrow(axis, start, length)
            return found - less if less else found.detach()

        return self._views.made_of([value], view, (cuts, less)) if keep else view()

    def _texts(self, inputs: Inputs, leaves: Mapping[str, Argument]) -> dict[str, list[int]]:
        """Return by role the length of each sample's text, where masks leave out the rest."""
        found: dict[str, list[int]] = {}
        unclear: set[str] = set()
        for path, leaf in leaves.items():
            if "mask" not in path.lower() or len(leaf.roles) != 2 or "." in path:
                continue
            batch, role = leaf.roles
            if batch != "batch" or not role.startswith("text:"):
                continue
            lengths = self._kept(inputs[path])
            if not lengths or found.setdefault(role, lengths) != lengths:
                unclear.add(role)
        return {role: lengths for role, lengths in found.items() if role not in unclear}

    def _kept(self, mask: Tensor) -> list[int]:
        """Return how many first tokens of each sample a mask keeps; [] if it keeps others, too."""

        def read() -> list[int]:
            kept = mask != 0
            lengths = kept.sum(1)
            first = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
            clear = (kept == first).all() & (lengths > 0).all() & (mask == kept).all()
            counts = torch.cat([lengths, clear[None].to(lengths.dtype)]).tolist()
            return counts[:-1] if counts[-1] else []

        return self._lengths.made_of([mask], read)
