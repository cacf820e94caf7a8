"""FLOPs of an edit of a case of the zoo, as a share of the dense call's, at a realistic size."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

import maskfx
from bench.harness import count_flops
from maskfx.runtime.batch.flops import square_mask
from tests.factories.zoo import ZOO, Case, Size, called, tensors

RATIO = 0.1  # of the sites, in a square
SIDE = 64  # of a latent; packed tokens stand for two by two of its sites
TEXT = 77
TRANSFORMERS = [name for name in ZOO if not re.search("ControlNet|UNet|UVit", name)]


def large_size(case: Case) -> Size:
    """The size of a picture of 512 pixels, with a text of 77 tokens unless the config fixes it."""
    small = case.sizes[0]
    picture = next(value for value in tensors(case.inputs(small, 0)) if value.dim() >= 3)
    grid_of_tokens = picture.dim() == 3 and picture.shape[1] == small.height * small.width
    is_packed = len(case.mask_shape(small)) == 1 or grid_of_tokens
    texts = {size.text for size in case.sizes}
    side = SIDE // 2 if is_packed else SIDE
    return Size(1, side, side, TEXT if len(texts) > 1 else texts.pop())


def square_tenth(case: Case, size: Size) -> Tensor:
    """A square of about a tenth of the sites, the same one in each frame; no reference picture."""
    square = square_mask({"y": size.height, "x": size.width}, RATIO)
    assert square is not None
    mask = torch.zeros(case.mask_shape(size), dtype=torch.bool)
    frames = mask.numel() // square.numel()
    mask.view(-1)[: frames * square.numel()] = square.flatten().repeat(frames)
    return mask


def edit_share(case: Case, module: nn.Module, denoiser: maskfx.CompiledDenoiser) -> float:
    """Count the FLOPs of a step of an edit and of a call of the module; return their quotient.

    What belongs to the request alone is computed by an edit before the counted one.
    """
    size = large_size(case)
    with torch.no_grad():
        whole = count_flops(lambda: called(module, case.inputs(size, 0)))["total"]
    _, cache = denoiser.record(**case.inputs(size, 0))
    step = maskfx.EditStep(case.inputs(size, 0), square_tenth(case, size), cache)
    denoiser.edit([step])
    return count_flops(lambda: denoiser.edit([step]))["total"] / whole
