"""Infers the roles of a denoiser's arguments, and guesses those of arguments without a rule."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from maskfx.compiler.capture.arguments.channels import position_lists, roles_by_channels
from maskfx.compiler.capture.arguments.grid_numbers import grid_numbers, side_of
from maskfx.compiler.capture.arguments.roles import (
    EACH_FRAME,
    STEP_WORDS,
    Argument,
    Roles,
    flatten,
)
from maskfx.compiler.capture.arguments.tensor_sides import (
    grid_of_tensors,
    roles_in,
    roles_of_samples,
    small_wholes,
)
from maskfx.errors import CaptureError, InputError
from maskfx.ir.listed import count_listed, noisy_path

TEXT_WORDS = ("encoder", "text", "txt", "prompt", "caption", "context", "clip", "llm", "cap_")
SCORE_WORDS = ("mask", "region", "bias")  # of arguments with a number for each pair of tokens
CACHE_WORDS = ("cache", "kv_", "past_key")  # keys and values that a pipeline hands on


def argument_order(module: torch.nn.Module, names: Sequence[str]) -> list[str]:
    """Sort the argument names in the order of the module's signature."""
    try:
        order = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        order = []
    return sorted(names, key=lambda n: order.index(n) if n in order else len(order))


def infer(
    module: torch.nn.Module,
    inputs: Mapping[str, object],
    override: Mapping[str, Roles] | None,
    grid: bool = False,
    read: Collection[str] = (),
    turned: bool = False,
) -> list[Argument]:
    """Return the leaves of `inputs` with their roles.

    Args:
        module: the denoiser.
        inputs: its arguments.
        override: roles that aren't inferred.
        grid: whether numbers among the arguments, or else in tensors, may be the picture's sides,
            and tokens its sites.
        read: the tensors whose numbers Python reads.
        turned: whether width stands before height in tensors.
    """
    paths, values, _ = flatten(inputs)
    tensors = {p: v for p, v in zip(paths, values, strict=True) if isinstance(v, torch.Tensor)}
    if not tensors:
        raise InputError(
            f"the inputs {paths} contain no tensor; pass the arguments of the denoiser's forward"
        )
    primary = primary_path(module, tensors)
    override = dict(override or {})
    for name in override:
        if name not in tensors:
            raise InputError(
                f"roles={{{name!r}: ...}}: no tensor of the inputs has this name; choose one of "
                f"{list(tensors)}"
            )
    alone = count_listed(inputs) > 0
    primary = noisy_path(primary, tensors) if alone else primary
    own = override.get(primary)
    own = own or roles_by_channels(module, primary, tensors)
    picture = picture_sizes(primary, tensors[primary], own, alone)
    packed = picture.tokens if grid and own is None else None
    numbers = {} if packed is None else grid_numbers(paths, values, packed)
    readable = {p: v for p, v in tensors.items() if p in read and p not in override}
    small = small_numbers(readable, picture) if grid and not numbers else {}
    if packed is not None:
        pairs = zip(paths, values, strict=True)
        sides = dict(side_of(numbers[p][0], v) for p, v in pairs if p in numbers)
        picture = on_grid(picture, sides or grid_of_tensors(tensors, small, packed, turned))
    every = {p: roles_in(tensors[p], own, picture.sizes, turned) for p, own in small.items()}
    in_tensors = {path: roles for path, roles in every.items() if roles}
    texts: dict[int, str] = {}
    found: dict[str, Roles] = {}
    placed = axis_positions(tensors, picture)
    masks = {v.shape[-1] for p, v in tensors.items() if "mask" in p.lower() and v.dim() == 2}
    # sequences of vectors first: masks and ids are matched with their lengths
    for path in sorted(tensors, key=lambda p: (tensors[p].dim() < 3, paths.index(p))):
        value = tensors[path]
        roles = override.get(path, placed.get(path))
        if path in in_tensors:
            roles = roles_of_samples(value, picture.batch)
        if roles is None:
            roles = picture.roles if path == primary else guess(path, value, picture, texts, masks)
        if len(roles) != value.dim():
            raise InputError(
                f"roles={{{path!r}: {roles}}}: {len(roles)} roles for a tensor of shape "
                f"{tuple(value.shape)}; give one role per dimension"
            )
        sizes = zip(roles, value.shape, strict=True)
        found[path] = tuple("" if r == "frames" and size == 1 else r for r, size in sizes)
    leaves = []
    for path, value in zip(paths, values, strict=True):
        step = path == primary or is_step(path)
        tensor = isinstance(value, torch.Tensor)
        own_roles = found.get(path, numbers.get(path, ()))
        inside = in_tensors.get(path, ())
        leaves.append(Argument(path, tensor, own_roles, step and tensor, sides=inside))
    return leaves


def small_numbers(
    tensors: Mapping[str, torch.Tensor], picture: PictureSizes
) -> dict[str, list[int]]:
    """Return the whole numbers of each sample that small tensors of the request have."""
    own = {p: v for p, v in tensors.items() if not is_step(p)}
    found = {path: small_wholes(value, picture.batch) for path, value in own.items()}
    return {path: numbers for path, numbers in found.items() if numbers}


def is_step(path: str) -> bool:
    """Return True for the name of an argument that changes with the step."""
    return any(word in f"_{path}_" for word in STEP_WORDS)


def primary_path(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the argument that holds the noisy image: the first one of rank three or more."""
    by_argument: dict[str, str] = {}
    for path in tensors:
        by_argument.setdefault(path.split(".")[0], path)
    for name in argument_order(module, list(by_argument)):
        path = by_argument[name]
        if tensors[path].dim() >= 3:
            return path
    raise CaptureError(
        f"no argument looks like a picture (3 dimensions or more): "
        f"{ {p: tuple(t.shape) for p, t in tensors.items()} }; pass compile(roles=)"
    )


@dataclass(frozen=True)
class PictureSizes:
    """The sizes of the primary argument, with which other arguments are compared."""

    roles: Roles
    batch: int
    grid: tuple[int, int] | None
    tokens: int | None
    frames: int = 1
    padded: int | None = None  # tokens with the padding behind them

    @property
    def sizes(self) -> dict[str, int]:
        """The height, width and frames of a picture on a grid, or the number of its tokens."""
        if self.grid is not None:
            return {"y": self.grid[0], "x": self.grid[1], "frames": self.frames}
        return {} if self.tokens is None else {"tokens": self.tokens}


def on_grid(picture: PictureSizes, sizes: Mapping[str, int]) -> PictureSizes:
    """Return the sizes of a picture whose tokens are the sites of a grid; the same without one."""
    if not sizes or picture.tokens is None:
        return picture
    grid, frames = (sizes["y"], sizes["x"]), sizes.get("frames", 1)
    padded = picture.tokens if picture.tokens > frames * grid[0] * grid[1] else None
    found = replace(picture, grid=grid, tokens=None, frames=frames, padded=padded)
    role = token_role(picture.tokens, found) or ""
    return replace(found, roles=tuple(role if r == "tokens" else r for r in picture.roles))


def picture_sizes(
    path: str, value: torch.Tensor, roles: Roles | None, alone: bool = False
) -> PictureSizes:
    if roles is None and alone and value.dim() in (3, 4):  # a sample of a list has no batch
        roles = (*[""] * (value.dim() - 2), "y", "x")
    if roles is None:
        match value.dim():
            case 3 if not value.is_floating_point():  # an image of token ids
                roles = ("batch", "y", "x")
            case 3:
                roles = ("batch", "tokens", "")
            case 4:
                roles = ("batch", "", "y", "x")
            case 6 if value.shape[1] > value.shape[4] * value.shape[5]:  # patches
                roles = ("batch", "tokens", "", "", "", "")
            case 6:  # several videos or pictures
                roles = ("batch", "frames", "", "", "y", "x")
            case n:
                raise CaptureError(
                    f"{path}: the roles of {n} dimensions can't be inferred; pass "
                    f"compile(roles={{{path!r}: ...}})"
                )
    size = {r: value.shape[i] for i, r in enumerate(roles) if r}
    grid = (size["y"], size["x"]) if "y" in size else None
    frames = size.get("frames", 1)
    return PictureSizes(roles, size.get("batch", 0), grid, size.get("tokens"), frames)


def axis_positions(tensors: Mapping[str, torch.Tensor], picture: PictureSizes) -> dict[str, Roles]:
    """Return the roles of position lists, one list per axis: the last two are the image's axes."""
    found: dict[str, Roles] = {}
    if picture.grid is None:
        return found
    for paths in position_lists(tensors):
        sizes = tuple(tensors[p].shape[0] for p in paths[-2:])
        for patch in (1, 2, 4, 8, 16):
            if len(paths) > 1 and sizes == tuple(n / patch for n in picture.grid):
                scale = f"/{patch}" if patch > 1 else ""
                found.update(zip(paths[-2:], ((f"y{scale}",), (f"x{scale}",)), strict=True))
                found.update({p: ("",) for p in paths[:-2]})
                break
    return found


def guess(
    path: str, value: torch.Tensor, picture: PictureSizes, texts: dict[int, str], masks: set[int]
) -> Roles:
    """Guess the roles of an argument that isn't the image itself."""
    shape, name = list(value.shape), path.lower()
    roles = [""] * len(shape)
    if not shape:
        return ()
    textual = any(w in name for w in TEXT_WORDS) and "latent" not in name
    if textual and picture.frames > 1 and shape[0] == picture.batch * picture.frames:
        roles[0] = EACH_FRAME
        if len(shape) == 3 and shape[1] > 1:
            roles[1] = texts.setdefault(shape[1], f"text:{len(texts)}")
        return tuple(roles)
    if textual and len(shape) == 4 and shape[0] != picture.batch and shape[1] == picture.batch:
        text = texts.setdefault(shape[2], f"text:{len(texts)}") if shape[2] > 1 else ""
        return ("", "batch", text, "")  # text states of several layers, layer by layer
    ids = len(shape) == 2 and ("ids" in name or "rotary" in name) and shape[0] != picture.batch
    rest = 0
    steps = len(shape) == 2 and any(w in name for w in STEP_WORDS)
    if steps and picture.frames > 1 and tuple(shape) == (picture.batch, picture.frames):
        return "batch", "frames"  # a step for each frame
    certain = token_role(shape[0], picture) is None or len(shape) in (1, 3, 4)
    if shape[0] == picture.batch and not ids and certain:
        roles[0], rest = "batch", 1
    spatial = None if textual and len(shape) == 3 else spatial_roles(shape, picture)
    if picture.frames > 1 and len(shape) == 4 and shape[0] == picture.batch * picture.frames:
        return (EACH_FRAME, "", *(spatial or ("", "")))
    if rest == 1 and spatial is not None:
        return ("batch", *between(shape, picture), *spatial)
    if rest >= len(shape):
        return tuple(roles)
    handed_on = any(w in name for w in CACHE_WORDS)
    if len(shape) == 4 and not textual and not handed_on:  # an image of another size
        return tuple(roles)
    if rest == 1 and len(shape) == 4:  # several vectors per token, or several texts
        first, second = shape[1:3]
        masked = (first in masks) - (second in masks)
        rest = 1 if masked > 0 or (masked == 0 and first >= second) else 2
    length = shape[rest]
    token = token_role(length, picture)
    numbers = token is not None and (steps or not value.is_floating_point())  # one per patch
    sequence = len(shape) - rest >= 2 or "mask" in name or "ids" in name or numbers
    if shape == [length] and textual and length in texts and not value.is_floating_point():
        return (texts[length],)  # positions of the text
    if not sequence or (rest == 0 and len(shape) == 1):
        return tuple(roles)
    if token is not None and not textual:
        roles[rest] = token
    elif "pooled" not in name and length > 1:
        known = length in texts or "mask" in name or "input_ids" in name
        if known or len(shape) - rest >= 2 or (rest == 0 and textual):
            roles[rest] = texts.setdefault(length, f"text:{len(texts)}")
    if any(w in name for w in SCORE_WORDS) and len(shape) - rest == 2:  # from token to token
        roles[-1] = roles[rest] if shape[-1] == length else texts.get(shape[-1], "")
    return tuple(roles)


def between(shape: Sequence[int], picture: PictureSizes) -> list[str]:
    """Return the roles between the batch and the last two axes: features, perhaps frames."""
    roles = [""] * (len(shape) - 3)
    own = picture.roles.index("frames") if "frames" in picture.roles else 0
    if len(shape) == 5 and picture.frames > 1:
        axes = [axis for axis in (own, 2, 1) if axis < 3 and shape[axis] == picture.frames]
        for axis in axes[:1]:
            roles[axis - 1] = "frames"
    return roles


def token_role(length: int, picture: PictureSizes) -> str | None:
    """Return the role of a dimension as long as the image's token axis (in patches), or None."""
    if length <= 1:
        return None
    if picture.tokens is not None:
        return "tokens" if length == picture.tokens else None
    if length == picture.padded:
        return f"tokens/1:{length}"
    if picture.grid is not None:
        h, w = picture.grid
        for patch in (1, 2, 4, 8, 16):
            each = (h // patch) * (w // patch)
            if h % patch == 0 and w % patch == 0 and each > 1 and picture.frames * each == length:
                return f"tokens/{patch * patch}"
    return None


def spatial_roles(shape: Sequence[int], picture: PictureSizes) -> tuple[str, str] | None:
    """Return the roles of the last two dimensions if they are the image's at some scale."""
    if picture.grid is None or len(shape) < 3:
        return None
    (h, w), (y, x) = picture.grid, (shape[-2], shape[-1])
    if (y, x) == (h, w):
        return "y", "x"
    if len(shape) == 3 or y == x == 1:  # vectors of tokens; a number for each channel
        return None
    for scale in (2, 4, 8, 16, 32):
        if (y, x) == (h * scale, w * scale):
            return f"y*{scale}", f"x*{scale}"
        if (y, x) == (-(-h // scale), -(-w // scale)):
            return f"y/{scale}", f"x/{scale}"
    return None
