"""The first oracle: an edit with the inputs of its recording reproduces the dense run.

Inside the mask to a small error, outside it bit for bit as recorded; whatever the mask, the
sizes and other members. The helpers at the top serve the other tests of edits too: a case is
compiled once for each process, because that is the slow part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import maskfx
from tests.factories import masks
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO, Case, Size, marked

TOLERANCE = 1e-4
KINDS = ("random", "stroke", "one_site", "border", "full")

NAMED = [name for name, case in ZOO.items() if case.named]
OTHERS = [name for name, case in ZOO.items() if not case.named]
# A UNet with and without residuals, several outputs, packed and patched joint attention with the
# text at either end, padded text, linear attention.
MIXED = [
    "UNet2DConditionModel-sdxl",
    "UNet2DConditionModel-residuals",
    "ControlNetModel",
    "FluxTransformer2DModel-control",
    "ChromaTransformer2DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel-sd35",
    "PixArtTransformer2DModel",
    "SanaTransformer2DModel",
]


@cache
def module_of(name: str) -> nn.Module:
    """The eager module of a case."""
    return ZOO[name].build()


@cache
def denoiser_of(name: str) -> maskfx.CompiledDenoiser:
    """The compiled denoiser of a case, shared by the tests of this process."""
    return maskfx.compile(module_of(name))


@lru_cache(maxsize=512)
def dense_run(name: str, size: Size, seed: int) -> Any:
    """What the eager module returns."""
    return module_of(name)(**ZOO[name].inputs(size, seed))


def record(name: str, size: Size, seed: int) -> tuple[Any, maskfx.StepCache]:
    """A recording, alone."""
    result: tuple[Any, maskfx.StepCache] = denoiser_of(name).record(**ZOO[name].inputs(size, seed))
    return result


def edit(name: str, size: Size, seed: int, mask: Tensor, kept: maskfx.StepCache) -> Any:
    """An edit, alone."""
    step = maskfx.EditStep(ZOO[name].inputs(size, seed), mask, kept)
    return denoiser_of(name).edit([step])[0]


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of an output, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite for a nan."""
    wanted = expected.double()
    error = float((got.double() - wanted).norm() / wanted.norm())
    return error if math.isfinite(error) else math.inf


def assert_near(got: Any, expected: Any, what: object = "") -> None:
    """Same structure, shapes and dtypes, and every tensor within the tolerance."""
    assert pytree.tree_structure(got) == pytree.tree_structure(expected), what
    for i, (one, two) in enumerate(zip(tensors(got), tensors(expected), strict=True)):
        assert (one.shape, one.dtype) == (two.shape, two.dtype), f"{what}, output {i}"
        error = relative_error(one, two)
        assert error < TOLERANCE, f"{what}, output {i} of {tuple(one.shape)}: error {error:.1e}"


def assert_kept_outside(mask: Tensor, got: Any, kept: Any, what: object = "") -> None:
    """Bit for bit the record at every site that the mask leaves out."""
    for i, (one, two) in enumerate(zip(tensors(got), tensors(kept), strict=True)):
        rest = ~sites_of(mask, one)
        assert torch.equal(one[rest], two[rest]), f"{what}, output {i} moved outside the mask"


def sites_of(mask: Tensor, value: Tensor) -> Tensor:
    """The mask over all of an output: at its level of the pyramid, or over tokens of patches."""
    if mask.ndim == 1 and value.shape[1] != len(mask):  # a video's sound, which is computed in full
        return torch.ones_like(value, dtype=torch.bool)
    if mask.ndim == 1:
        return mask.view(1, -1, *[1] * (value.ndim - 2)).expand_as(value)
    if value.ndim == 3 and value.shape[1] >= mask.numel():  # tokens, perhaps with padding behind
        sites = value.new_zeros(value.shape[1], dtype=torch.bool)
        sites[: mask.numel()] = mask.flatten()
        return sites.view(1, -1, 1).expand_as(value)
    if mask.ndim == 3:
        if value.shape[1:4] == mask.shape:  # the channels are last
            return mask[..., None].expand_as(value)
        if value.ndim == 6:  # items of one frame each
            return mask[:, None, None].expand_as(value)
        return (mask if value.shape[2] == len(mask) else mask[:, None]).expand_as(value)
    if value.ndim == 3:
        patch = math.ceil(math.sqrt(mask.numel() / value.shape[1]))
        inside = pooled(mask, patch).flatten()
        texts = inside.new_ones(
            value.shape[1] - len(inside)
        )  # behind the picture, computed in full
        return torch.cat([inside, texts]).view(1, -1, 1).expand_as(value)
    channels_last = value.ndim == 5 and value.shape[2:4] == mask.shape
    height, width = value.shape[2:4] if channels_last else value.shape[-2:]
    while mask.shape != (height, width):  # every level halves the one before
        assert mask.shape[0] > height, f"no level of the mask is {height} x {width}"
        mask = pooled(mask, 2)
    return (mask[..., None] if channels_last else mask).expand_as(value)


def pooled(mask: Tensor, side: int) -> Tensor:
    """A block is active if any site of it is; blocks at the far edges may be smaller."""
    return F.max_pool2d(mask[None].float(), side, ceil_mode=True)[0] > 0


def check_edits(
    denoiser: maskfx.CompiledDenoiser,
    module: nn.Module,
    case: Case,
    sizes: Sequence[Size],
    kinds: Sequence[str],
) -> None:
    """Record at every size; edit with every kind of mask."""
    for seed, size in enumerate(sizes):
        expected = module(**case.inputs(size, seed))
        output, kept = denoiser.record(**case.inputs(size, seed))
        assert_near(output, expected, f"recording at {size}")
        for kind in kinds:
            mask = MASKS[kind](case.mask_shape(size), seed)
            got = denoiser.edit([maskfx.EditStep(case.inputs(size, seed), mask, kept)])[0]
            assert_near(got, expected, f"{kind} at {size}")
            assert_kept_outside(mask, got, output, f"{kind} at {size}")


@pytest.mark.parametrize("name", marked(NAMED))
def test_named_models_edit_right_and_narrow_fully(name: str) -> None:
    case, denoiser = ZOO[name], denoiser_of(name)
    check_edits(denoiser, module_of(name), case, case.sizes, KINDS)
    for compilation in denoiser.compilations:
        assert compilation.reasons == {}
        assert compilation.program is not None
        assert compilation.dense is not None
        assert compilation.dense.nodes == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_edit_right_whether_narrowed_or_dense(name: str) -> None:
    case = ZOO[name]
    module = case.build()
    sizes = (case.sizes[0], case.sizes[2])
    check_edits(maskfx.compile(module), module, case, sizes, ("stroke", "random", "full"))


@pytest.mark.parametrize("name", marked(MIXED))
def test_one_graph_serves_every_size(name: str) -> None:
    """Otherwise a ragged batch falls apart into one call for each size."""
    for seed, size in enumerate(ZOO[name].sizes):
        record(name, size, seed)
    programs = {c.program.code for c in denoiser_of(name).compilations if c.program is not None}
    assert len(programs) == 1


@pytest.mark.parametrize("name", marked(MIXED))
def test_a_ragged_batch_gives_each_member_its_own_dense_run(name: str) -> None:
    """Sizes, masks, text lengths and timesteps all differ; members of batch 2 are CFG pairs."""
    case, kinds = ZOO[name], ("stroke", "random", "one_site", "border", "dense_random", "full")
    steps, expected, outputs = [], [], []
    for i in range(8):
        size, seed = case.sizes[i % len(case.sizes)], 10 + i
        output, kept = record(name, size, seed)
        mask = MASKS[kinds[i % len(kinds)]](case.mask_shape(size), i)
        steps.append(maskfx.EditStep(case.inputs(size, seed), mask, kept))
        expected.append(dense_run(name, size, seed))
        outputs.append(output)
    got = denoiser_of(name).edit(steps)
    assert len(got) == len(steps)
    for i, (one, step) in enumerate(zip(got, steps, strict=True)):
        assert_near(one, expected[i], f"member {i}")
        assert_kept_outside(step.mask, one, outputs[i], f"member {i}")


@pytest.mark.parametrize("name", marked(MIXED))
def test_recordings_edits_and_dense_members_share_a_batch(name: str) -> None:
    case = ZOO[name]
    one, two, three = case.sizes[0], case.sizes[2], case.sizes[-1]
    kept = record(name, two, 21)[1]
    mask = masks.stroke(case.mask_shape(two), 21)
    results = denoiser_of(name).step(
        [
            maskfx.DenseStep(case.inputs(three, 20)),
            maskfx.EditStep(case.inputs(two, 21), mask, kept),
            maskfx.RecordStep(case.inputs(one, 22)),
            maskfx.DenseStep(case.inputs(one, 23)),
            maskfx.RecordStep(case.inputs(two, 24)),
        ]
    )
    dense, edited, (first, fresh), other, (second, fresh_pair) = results
    assert_near(dense, dense_run(name, three, 20), "dense")
    assert_near(edited, dense_run(name, two, 21), "edit")
    assert_near(first, dense_run(name, one, 22), "recording")
    assert_near(other, dense_run(name, one, 23), "dense")
    assert_near(second, dense_run(name, two, 24), "recording of a pair")

    # What was recorded among others serves as well as what was recorded alone.
    for seed, size, output, recording in (
        (22, one, first, fresh),
        (24, two, second, fresh_pair),
    ):
        mask = masks.random(case.mask_shape(size), seed)
        got = edit(name, size, seed, mask, recording)
        assert_near(got, dense_run(name, size, seed), "edit of a recording made in a batch")
        assert_kept_outside(mask, got, output)


@pytest.mark.parametrize("name", marked(MIXED))
def test_a_batch_of_mixed_sizes_is_exact(name: str) -> None:
    case = ZOO[name]
    got = denoiser_of(name).batch([case.inputs(s, 30 + i) for i, s in enumerate(case.sizes)])
    for i, size in enumerate(case.sizes):
        assert_near(got[i], dense_run(name, size, 30 + i), f"member {i} of {size}")


@pytest.mark.parametrize("name", marked(["UNet2DConditionModel-sdxl", "FluxTransformer2DModel"]))
def test_nothing_masked_gives_the_record_and_all_masked_the_dense_run(name: str) -> None:
    """Shown with inputs other than the recorded ones, or both would look the same."""
    case, size = ZOO[name], ZOO[name].sizes[0]
    output, kept = record(name, size, 40)
    inputs = {**case.inputs(size, 41), "timestep": case.inputs(size, 40)["timestep"]}
    expected = module_of(name)(**inputs)
    assert relative_error(tensors(expected)[0], tensors(output)[0]) > 0.1
    shape = case.mask_shape(size)
    steps = [maskfx.EditStep(inputs, make(shape, 0), kept) for make in (masks.empty, masks.full)]
    nothing, everything = denoiser_of(name).edit(steps)
    for one, two in zip(tensors(nothing), tensors(output), strict=True):
        assert torch.equal(one, two)
    assert_near(everything, expected)
    tensors(nothing)[0].add_(1.0)  # an output is the caller's own
    again = denoiser_of(name).edit(steps[:1])[0]
    assert torch.equal(tensors(again)[0], tensors(output)[0])


@pytest.mark.slow
def test_outputs_at_several_levels_keep_their_own_outside() -> None:
    """One masked site moves one site of every residual of a ControlNet, at any level."""
    name = "ControlNetModel"
    case, size = ZOO[name], Size(1, 9, 13, 7)
    output, kept = record(name, size, 50)
    mask = torch.zeros(case.mask_shape(size), dtype=torch.bool)
    mask[8, 6] = True
    inputs = {**case.inputs(size, 51), "timestep": case.inputs(size, 50)["timestep"]}
    got = denoiser_of(name).edit([maskfx.EditStep(inputs, mask, kept)])[0]
    shapes = set()
    for one, two in zip(tensors(got), tensors(output), strict=True):
        moved = (one != two).any(1)[0].nonzero().tolist()
        scale = {9: 1, 5: 2, 3: 4}[one.shape[-2]]
        assert moved == [[8 // scale, 6 // scale]]
        shapes.add(tuple(one.shape[-2:]))
    assert shapes == {(9, 13), (5, 7), (3, 4)}


@pytest.mark.slow
def test_an_edit_computes_only_what_it_must() -> None:
    """Values at inactive sites of the inputs never reach an output; nor do others' nans."""
    name = "FluxTransformer2DModel"
    case, size = ZOO[name], ZOO[name].sizes[0]
    output, kept = record(name, size, 60)
    mask = masks.random(case.mask_shape(size), 60)
    spoilt = case.inputs(size, 60)
    spoilt["hidden_states"] = spoilt["hidden_states"].masked_fill(~mask[None, :, None], math.nan)
    mate = case.inputs(size, 61)
    mate["hidden_states"] = torch.full_like(mate["hidden_states"], math.nan)
    got, sick = denoiser_of(name).step(
        [maskfx.EditStep(spoilt, mask, kept), maskfx.DenseStep(mate)]
    )
    assert_near(got, dense_run(name, size, 60))
    assert_kept_outside(mask, got, output)
    assert bool(tensors(sick)[0].isnan().all())
