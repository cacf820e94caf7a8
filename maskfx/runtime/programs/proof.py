"""What a program is verified for and with: a size, the module, a mask, and sites per region."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.arguments.roles import Argument
from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.compile import Compilation
from maskfx.errors import InputError
from maskfx.ir.objects import copied_tree
from maskfx.ir.programs.program import Region
from maskfx.ir.values import PLAIN_TENSORS
from maskfx.runtime.sites.mask import Mask

# a program's code; y, x and tokens; whether a graph of one sample serves several
Size = tuple[str, int | None, int | None, int | None, bool]


def size_of(compilation: Compilation, values: Sequence[object]) -> Size | None:
    """Return what a program is verified for; None if there is nothing to verify."""
    capture, program = compilation.capture, compilation.program
    if program is None:
        return None
    if capture.pyramid.base is None and "image" not in capture.pyramid.segments:
        return None
    sizes = roles_.observed_sizes(capture.leaves, values)
    several = capture.fixed_batch == 1 and sizes["batch"] > 1
    return program.code, sizes.get("y"), sizes.get("x"), sizes.get("tokens"), several


def disorder_of(compilation: Compilation, values: Sequence[object]) -> str:
    """Return why a program has no rows for a call: where it cuts sequences; "" if it has."""
    if compilation.program is None:
        return ""
    sizes = roles_.observed_sizes(compilation.capture.leaves, values)
    return compilation.program.interface.pyramid.cuts.disorder(sizes)


def same_ranks(capture_: Capture, values: Sequence[object]) -> bool:
    """Return True if each argument is a tensor of the captured rank, or none as in the capture.

    Of a tensor with sides of the picture the numbers are known, too.
    """
    return all(
        leaf.tensor and v.dim() == len(leaf.roles) and not (leaf.sides and is_unread(leaf, v))
        if isinstance(v, Tensor)
        else not leaf.tensor
        for v, leaf in zip(values, capture_.leaves, strict=True)
    )


def is_unread(leaf: Argument, value: Tensor) -> bool:
    """Return True if a tensor hasn't the numbers that sides of the picture are read of."""
    each = value[:1] if leaf.roles[0] == "batch" else value
    return value.is_meta or each.numel() != len(leaf.sides) or value.is_floating_point()


def run_module(module: nn.Module, inputs: dict[str, object]) -> object:
    """Run a denoiser's module; raise InputError if it fails on these inputs."""
    try:
        return module(**inputs)
    except torch.OutOfMemoryError:
        raise  # the caller may retry with smaller inputs
    except Exception as error:
        raise InputError(
            f"{type(module).__name__} itself fails on these inputs: {error}"
        ) from error


@torch.no_grad()
def fails(module: nn.Module, values: Sequence[object], spec: pytree.TreeSpec) -> bool:
    """Return True if a denoiser's module fails on these arguments."""
    try:
        run_module(module, copied_tree(values, spec))
    except InputError:
        return True
    return False


def uneven_mask(shape: Sequence[int]) -> Tensor:
    """Return an off-centre mask of a quarter of each side, and one isolated site.

    Coarse levels have inactive sites under it too.
    """
    mask = torch.zeros(*shape, dtype=torch.bool)
    starts = (size // 8 if axis == 0 else size // 2 for axis, size in enumerate(shape))
    mask[tuple(slice(a, a + max(1, n // 4)) for a, n in zip(starts, shape, strict=True))] = True
    mask[(-1, *(0,) * (len(shape) - 1))] = True
    return mask


def hides(module: nn.Module) -> bool:
    """Return True if a weight matrix is all zero: layers before it don't affect the output."""
    plain = (p for p in module.parameters() if type(p) in PLAIN_TENSORS)  # not quantized
    several = (p for p in plain if p.ndim > 1 and p.numel())
    return any(not bool(p[(0,) * p.ndim]) and not bool(p.any()) for p in several)


def every_other(regions: Sequence[Region], mask: Mask) -> dict[int, Mask]:
    """Return sites for every other region: odd ones, and those inside them, compute all sites."""
    chosen = {}
    for number, region in enumerate(regions, 1):
        if number % 2 or region.inside in chosen:
            chosen[number] = mask.everywhere
    return chosen
