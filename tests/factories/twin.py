"""The slow twin: what a masked edit means, run densely on the unmodified eager module.

One rule defines the result: at every operator that mixes sites, an inactive image site contributes
the value recorded at that operator's own input; everything else just runs, text tokens included.
The twin follows it literally. A torch-function mode saves the inputs of the mixing operators in
call order during `record`, and during `edit` puts them back at the inactive sites before the
operator runs. It uses nothing of maskfx, so it can disagree with it.

What depends only on request-constant inputs (text, ids, a conditioning image) is computed in full
from the current ones. That is decided by tainting: whatever is computed from a step input is
tainted, by storage, so that views and in-place writes carry the taint both ways.

What the twin cannot place (an unknown map size or key length, attention spelled out in matmuls)
raises; an oracle must not guess.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

Inputs = Mapping[str, Any] | Sequence[Any]

STEP_NAMES = ("timestep", "guidance", "residual", "block_samples", "block_controlnet")
TEXT_NAMES = ("encoder_hidden_states", "cap_feats")

# Operators that mix the sites of the map in their first argument (F.pad only moves a border in).
MAPS = {
    torch.conv2d, torch.conv3d, torch.conv_transpose2d, F.group_norm, F.instance_norm,
    F.interpolate, F.pad,
    F.avg_pool2d, torch.max_pool2d, F.adaptive_avg_pool2d, torch.pixel_shuffle,
    torch.pixel_unshuffle,
}  # fmt: skip
# By name: these are functions of torch and methods of Tensor alike.
MATMULS = {"matmul", "bmm", "__matmul__"}
NORMS = {"norm", "linalg_vector_norm"}  # reductions whose axes come third
REDUCTIONS = {"mean", "sum", "amax", "std", "var"} | NORMS
UNSUPPORTED = {
    "conv1d", "einsum", "baddbmm", "roll", "cumsum", "topk", "sort", "unfold", "fold",
    "multi_head_attention_forward", "fft_fftn", "fft_fft2",
}  # fmt: skip


@dataclass
class Recording:
    """A dense run: its output, its primary input and the mixing operators' inputs in call order."""

    step_inputs: tuple[str, ...]
    primary: Any
    saved: list[tuple[str, Tensor]] = field(default_factory=list)
    output: Any = None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)


def _pointwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """A 1x1 convolution with stride 1 is site-wise; with a stride it picks sites of a finer map."""
    if not func.__name__.startswith("conv"):
        return False
    kernel = _argument(args, kwargs, 1, "weight").shape[2:]
    return all(n == 1 for n in (*kernel, *tree_leaves(_argument(args, kwargs, 3, "stride") or 1)))


class _Sites:
    """The mask at every map size and sequence length of one run."""

    def __init__(self, mask: Tensor, patch: int, texts: set[int], text_first: bool | None) -> None:
        self.mask, self.texts, self.text_first = mask, texts, text_first
        self.summed: list[Tensor] = []  # results of sums over sites: matrices of channels only
        # The map sizes whose sites may become tokens: the patches, and what operators put out.
        self.levels = {tuple(-(-n // patch) for n in mask.shape)} if mask.ndim == 2 else set()

    def at(self, shape: Sequence[int]) -> Tensor | None:
        """The mask of a map; None for a size that is no level.

        The scale is the one whose ceil division gives the size (9 rows, 5, 3: scales 1, 2, 4),
        powers of two first, so that pooling twice by 2 is pooling by 4 at odd sizes too.
        """
        shape, full = tuple(shape), tuple(self.mask.shape)
        if len(full) != 2 or (shape != full and shape not in self.levels):
            return None
        if all(n % m == 0 for n, m in zip(shape, full, strict=True)):
            wide = self.mask.repeat_interleave(shape[0] // full[0], 0)
            return wide.repeat_interleave(shape[1] // full[1], 1)
        for scale in sorted(range(1, max(full) + 1), key=lambda s: (s & (s - 1) != 0, s)):
            if shape == tuple(-(-m // scale) for m in full):
                pooled = self.mask.new_zeros(shape)
                for y, x in self.mask.nonzero().tolist():
                    pooled[y // scale, x // scale] = True
                return pooled
        return None

    def images(self) -> dict[int, Tensor]:
        """Image sequence lengths and their masks."""
        if self.mask.ndim == 1:
            return {len(self.mask): self.mask}
        masks = [self.at(shape) for shape in self.levels]
        return {m.numel(): m.flatten() for m in masks if m is not None}

    def tokens(self, size: int) -> Tensor | None:
        """The mask of a sequence of image tokens, alone or joined with an input's text tokens."""
        images = self.images()
        if size in images and size in self.texts:
            raise ValueError(f"image and text are both {size} tokens: use distinct sizes")
        if size in images or size in self.texts or self.text_first is None:
            return images.get(size)
        joint = [text for text in self.texts if size - text in images]
        return self._join(joint[0], images[size - joint[0]]) if joint else None

    def keys(self, size: int, queries: int) -> Tensor | None:
        """The mask of an attention's keys; None for text, which is always active.

        The text is what the image leaves of a joint length: models append registers to it, or
        project it from something else, so no input need have that length.
        """
        images, joint = self.images(), self.text_first is not None and size not in self.texts
        if joint and queries in images and queries < size:  # keys of text and of the queries' level
            return self._join(size - queries, images[queries])
        active = self.tokens(size)
        if active is None and size not in self.texts:
            if not joint or len(images) != 1 or size < min(images):
                raise ValueError(f"attention over {size} keys: neither image, text nor both")
            ((count, image),) = images.items()
            active = self._join(size - count, image)
        return active

    def _join(self, text: int, image: Tensor) -> Tensor:
        ones = image.new_ones(text)
        return torch.cat([ones, image] if self.text_first else [image, ones])

    def contracted(self, left: Tensor, right: Tensor) -> Tensor | None:
        """The mask of a matmul's inner axis: linear attention sums over sites."""
        if any(operand is total for operand in (left, right) for total in self.summed):
            return None
        if all(self.tokens(n) is not None for n in (left.shape[-2], right.shape[-1])):
            raise NotImplementedError("a matmul from sites to sites: attention spelled out")
        return self.tokens(left.shape[-1])

    def reduced(self, value: Tensor, axes: set[int]) -> Tensor | None:
        """Over the two axes of a map, or the last but one of tokens; the last is channels."""
        for first in (1, 2) if value.ndim == 4 else ():
            if {first, first + 1} <= axes:
                active = self.at(value.shape[first : first + 2])
                if active is not None:
                    return active if first == 2 else _rows(active, -1)
        return _rows(self.tokens(value.shape[-2])) if value.ndim - 2 in axes else None

    def restore(self, new: Any, old: Any) -> Any:
        """Inputs or outputs of the module with their inactive sites as in `old`."""
        if not isinstance(new, Tensor):
            return new
        active = self.at(new.shape[-2:]) if new.ndim > 3 or new.dtype == torch.long else None
        if active is None and new.ndim == 5 and self.at(new.shape[2:4]) is not None:
            active = _rows(self.at(new.shape[2:4]), -1)  # channels last
        elif active is None and new.ndim == 3:
            active = _rows(self.images().get(new.shape[1]))
        if active is None or new.shape != old.shape:
            raise ValueError(f"no image sites in {tuple(new.shape)}, or other in the recording")
        return torch.where(active, new, old)


class _Twin(TorchFunctionMode):
    """Tracks what depends on the roots; saves the mixing inputs or, with sites, replaces them."""

    def __init__(self, roots: Any, saved: list[tuple[str, Tensor]], sites: _Sites | None) -> None:
        super().__init__()
        self.saved, self.sites, self.calls = saved, sites, 0
        self.padded: list[Tensor] = []  # maps with a border: their sites are replaced already
        self.alive: list[Tensor] = []  # a storage freed during the run could be reused untainted
        self.storages: set[int] = set()
        self.taint(_tensors(roots))

    def taint(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                self.alive.append(tensor)
                self.storages.add(tensor.untyped_storage().data_ptr())

    def tainted(self, tree: Any) -> int:
        return sum(t.untyped_storage().data_ptr() in self.storages for t in _tensors(tree))

    def mixed(self, name: str, value: Tensor, active: Callable[[_Sites], Tensor | None]) -> Tensor:
        """What the mixing operator `name` gets for its input `value`."""
        if not self.tainted(value):
            return value
        if self.sites is None:
            self.saved.append((name, value.clone()))  # a later in-place operator may change it
            return value
        recorded, old = self.saved[self.calls] if self.calls < len(self.saved) else ("", value)
        self.calls += 1
        if (recorded, old.shape) != (name, value.shape):
            raise RuntimeError(f"{name} of {tuple(value.shape)} does not follow the recording")
        where = active(self.sites)
        return value if where is None else torch.where(where, value, old)

    def map_sites(self, func: Any, value: Tensor, sites: _Sites) -> Tensor | None:
        if value.ndim < 3 or any(value is done for done in self.padded):
            return None  # two axes: a vector for each request
        # Norms also take (batch, channels, tokens).
        active = sites.at(value.shape[-2:]) if value.ndim > 3 else sites.tokens(value.shape[-1])
        if active is None and func is not F.pad:
            raise ValueError(f"{func.__name__}: {tuple(value.shape)} is at no level of the mask")
        return active

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, args = dict(kwargs or {}), list(args)
        if not self.tainted((args, kwargs)):
            return func(*args, **kwargs)
        name, sites = getattr(func, "__name__", ""), self.sites
        padded = summed = False

        def swap(index: int, key: str, active: Callable[[_Sites, Tensor], Tensor | None]) -> None:
            holder: Any = args if index < len(args) else kwargs
            slot = index if index < len(args) else key
            value = holder[slot]
            holder[slot] = self.mixed(name, value, lambda sites: active(sites, value))

        if name in UNSUPPORTED and not _pointwise(func, args, kwargs):
            if name != "einsum" or self.tainted((args, kwargs)) > 1:  # of one: a permutation
                raise NotImplementedError(f"the twin has no rule for {name} of a step input")
        elif func in MAPS and not _pointwise(func, args, kwargs):
            if func is F.pad and sites is not None:
                padded = self.map_sites(func, args[0], sites) is not None
            swap(0, "input", lambda sites, value: self.map_sites(func, value, sites))
        elif func is F.scaled_dot_product_attention:
            queries = _argument(args, kwargs, 0, "query").shape[-2]
            for index, key in ((1, "key"), (2, "value")):
                swap(index, key, lambda sites, value: _rows(sites.keys(value.shape[-2], queries)))
        elif name in MATMULS and len(args) == 2 and all(map(self.tainted, args)):
            left, right = args
            if left.ndim > 1 and right.ndim > 1:
                swap(0, "", lambda sites, value: sites.contracted(left, right))
                swap(1, "", lambda sites, value: _rows(sites.contracted(left, right)))
                summed = sites is not None and sites.contracted(left, right) is not None
        elif name in REDUCTIONS:
            ndim = _argument(args, kwargs, 0, "input").ndim
            dim = _argument(args, kwargs, 2 if name in NORMS else 1, "dim")
            axes = {d % ndim for d in (range(ndim) if dim is None else tree_leaves(dim))}
            swap(0, "input", lambda sites, value: sites.reduced(value, axes))
        out = func(*args, **kwargs)
        self.taint(_tensors((out, kwargs.get("out"))))
        if func is Tensor.__setitem__:
            self.taint(args[:1])
        if sites is not None:
            if padded:
                self.padded.append(out)
            if summed:
                sites.summed.append(out)
            if func in MAPS and func is not F.pad and out.ndim > 3:
                sites.levels.add(tuple(out.shape[-2:]))
        return out


def _rows(active: Tensor | None, axis: int = 1) -> Tensor | None:
    return None if active is None else active.unsqueeze(axis)


def _own(leaf: Any) -> Any:
    number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    return leaf.clone() if isinstance(leaf, Tensor) else torch.tensor(leaf) if number else leaf


def _prepare(
    module: nn.Module, inputs: Inputs, step_inputs: Sequence[str] | None
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """Keyword arguments, the primary input's name and the step inputs' names."""
    signature = inspect.signature(module.forward)
    if isinstance(inputs, Mapping):
        known = [name for name in signature.parameters if name in inputs]
        kwargs = {name: inputs[name] for name in (*known, *inputs)}
    else:
        kwargs = dict(signature.bind(*inputs).arguments)
    primary = next(name for name, value in kwargs.items() if _tensors(value))
    if step_inputs is None:
        step_inputs = [n for n in kwargs if n == primary or any(p in n for p in STEP_NAMES)]
    for name in step_inputs:  # clones: a storage shared with a constant input would taint that one
        kwargs[name] = tree_map(_own, kwargs[name])
    return kwargs, primary, tuple(step_inputs)


@torch.no_grad()
def record(
    module: nn.Module, inputs: Inputs, *, step_inputs: Sequence[str] | None = None
) -> tuple[Any, Recording]:
    """Run `module` densely; return its output and what an edit needs of the run.

    `step_inputs` names the inputs that change from step to step; by default the first tensor
    argument, which is the one the mask is about, and those named like one of STEP_NAMES.
    """
    kwargs, primary, names = _prepare(module, inputs, step_inputs)
    recording = Recording(names, tree_map(_own, kwargs[primary]))
    with _Twin([kwargs[name] for name in names], recording.saved, None):
        output = module(**kwargs)
    recording.output = tree_map(_own, output)
    return output, recording


@torch.no_grad()
def edit(
    module: nn.Module,
    inputs: Inputs,
    mask: Tensor,
    recording: Recording,
    *,
    text_first: bool | None = None,
    first: Sequence[tuple[str, Tensor]] = (),
) -> Any:
    """Run `module` on `inputs`, active where `mask` is true and as recorded elsewhere.

    `first` are parts of the module in the order in which they run, and wider masks, each covering
    the next: until the part has run, its mask stands for `mask`.

    `mask` is (H, W) of the latent, or (tokens,) for packed models. `text_first` states how text and
    image are ordered in joint attention; None where no attention joins them.
    """
    kwargs, primary, names = _prepare(module, inputs, recording.step_inputs)
    named = [value for name, value in kwargs.items() if name.startswith(TEXT_NAMES)]
    texts = {text.shape[-2] for text in _tensors(named) if text.is_floating_point()}
    patch = tree_leaves(getattr(getattr(module, "config", None), "patch_size", None) or 1)[-1]
    masks = [*(wide for _, wide in first), mask]
    sites = _Sites(masks[0], patch, texts, text_first)
    hooks = [
        module.get_submodule(place).register_forward_hook(
            lambda *_, later=later: setattr(sites, "mask", later)
        )
        for (place, _), later in zip(first, masks[1:], strict=True)
    ]
    # Patchifying by view and linear mixes the latents of a patch in no operator the mode knows.
    kwargs[primary] = tree_map(sites.restore, kwargs[primary], recording.primary)
    mode = _Twin([kwargs[name] for name in names], recording.saved, sites)
    try:
        with mode:
            output = module(**kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if mode.calls != len(recording.saved):
        raise RuntimeError("the edit ran fewer mixing operators than the recording")
    return tree_map(sites.restore, output, recording.output)
