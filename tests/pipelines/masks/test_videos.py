"""Edits of videos: masks of frames, latents of frames, and the pixels outside of the mask."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import maskfx
from maskfx import Quality
from maskfx.compiler.capture.arguments.channels import roles_by_channels
from maskfx.pipelines.masks.mask_grids import MaskGrids
from maskfx.pipelines.masks.videos import VideoMask, latent_masks, overlay_video, spans_of
from maskfx.runtime.reuse.patches import PatchReuse
from tests.factories.video_kinds import (
    FRAMES,
    SIDE,
    VIDEO_KINDS,
    VideoKind,
    film,
    moving,
    videos_of,
)
from tests.pipelines.test_patches import Turns

ALL = Quality.of("all-steps")
EXACT = 1e-4  # rounding, over the steps of a run

QUICK = ("WanVideoToVideoPipeline", "CogVideoXPipeline", "Kandinsky5T2VPipeline")
kinds = pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VIDEO_KINDS],
)


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def given_to(kind: VideoKind, seed: int = 0, **more: Any) -> dict[str, Any]:
    """Arguments of a call; a pipeline that takes a mask itself gets a white one."""
    given = {**kind.inputs(seed), "generator": noise(seed), "output_type": "np", **more}
    if kind.video:
        given[kind.video] = kind.given_as(film())
    return given


def whole(kind: VideoKind) -> dict[str, Any]:
    """The mask argument of a plain pipeline that makes everything anew."""
    own = kind.mask != "mask_image"
    white = [Image.new("L", (kind.side, kind.side), 255)] * kind.frames
    return {kind.mask: kind.given_as(white)} if own else {}


def masked_pixels(masks: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(mask) > 0 for mask in masks])


@kinds
def test_call_without_a_mask_gives_what_the_pipeline_gives(name: str) -> None:
    kind = VIDEO_KINDS[name]
    given = given_to(kind)
    wanted = videos_of(kind.build()(**given))
    found = videos_of(maskfx.compile(kind.build())(**{**given, "generator": noise()}))
    assert np.array_equal(found, wanted)


@kinds
def test_mask_of_everything_gives_what_the_pipeline_gives(name: str) -> None:
    kind = VIDEO_KINDS[name]
    white = [Image.new("L", (kind.side, kind.side), 255)] * kind.frames
    wanted = videos_of(kind.build()(**given_to(kind), **whole(kind)))
    pipe = maskfx.compile(kind.build(), quality=ALL)
    found = videos_of(pipe(**given_to(kind), **{kind.mask: kind.given_as(white)}))
    assert np.abs(found - wanted).max() < EXACT


@kinds
def test_edit_with_the_arguments_of_its_template_gives_the_recorded_video(name: str) -> None:
    kind = VIDEO_KINDS[name]
    pipe = maskfx.compile(kind.build(), quality=ALL)
    recorded = pipe(**given_to(kind, **whole(kind)), record=True) if not whole(kind) else None
    if recorded is None:
        pytest.skip("its mask is among the denoiser's inputs, so a run records one mask")
    found = pipe(
        **given_to(kind), mask_image=moving(kind.side, kind.frames), template=recorded.template
    )
    original, inside = videos_of(recorded), masked_pixels(moving(kind.side, kind.frames))
    assert np.abs(videos_of(found) - original)[0][inside].max() < EXACT


@kinds
def test_frames_keep_the_pixels_outside_of_their_own_masks(name: str) -> None:
    kind = VIDEO_KINDS[name]
    pipe = maskfx.compile(kind.build(), quality=ALL)
    masks, more = moving(kind.side, kind.frames), {}
    if not kind.video:
        recorded = pipe(**given_to(kind), record=True)
        original, more = videos_of(recorded)[0], {"template": recorded.template}
    else:
        original = np.stack([np.asarray(frame) for frame in film()]).astype(np.float32) / 255
    found = videos_of(pipe(**given_to(kind, 1), **{kind.mask: kind.given_as(masks)}, **more))[0]
    inside = masked_pixels(masks)
    assert np.array_equal(found[~inside], original[~inside].astype(found.dtype))
    each = [np.abs(f - o)[m].mean() for f, o, m in zip(found, original, inside, strict=True)]
    assert min(each[kind.given :]) > 1e-3, "every frame is edited inside of its mask"


@kinds
def test_edit_computes_the_sites_of_each_frame_alone(name: str) -> None:
    kind = VIDEO_KINDS[name]
    narrow = Quality(margin=0)
    pipe = maskfx.compile(kind.build(), quality=narrow)
    one = [Image.new("L", (kind.side, kind.side), 255 * (n == 0)) for n in range(kind.frames)]
    more: dict[str, Any] = {}
    if not kind.video:
        more["template"] = pipe(**given_to(kind), record=True).template
    places: list[float] = []

    def watched(before: Any, steps: Any, *args: Any, **named: Any) -> Any:
        for step in steps:
            if isinstance(step, maskfx.EditStep) and not step.mask.all():
                inside = step.mask.flatten().nonzero()
                places.append(inside.max().item() / step.mask.numel())
        return before(steps, *args, **named)

    for denoiser in maskfx_denoisers(pipe):
        denoiser.step = partial(watched, denoiser.step)
    pipe(**given_to(kind, 1), **{kind.mask: kind.given_as(one)}, **more)
    if kind.chunks:
        pytest.skip("its denoiser calls make parts of the video")
    if kind.given:
        assert not places, "its denoiser calls make parts of the video, masked anywhere"
    else:
        assert max(places) < 1 / 2, "the first latent frame alone"


def maskfx_denoisers(pipe: Any) -> list[Any]:
    return list(pipe._maskfx.denoisers.values())


def test_list_of_one_mask_serves_all_frames() -> None:
    kind = VIDEO_KINDS["WanVideoToVideoPipeline"]
    pipe = maskfx.compile(kind.build(), quality=ALL)
    mask = moving()[0]
    one = videos_of(pipe(**given_to(kind), mask_image=mask))
    listed = videos_of(pipe(**given_to(kind), mask_image=[mask] * FRAMES))
    array = np.stack([np.asarray(mask) > 0] * FRAMES)
    assert np.abs(one - listed).max() < EXACT
    assert np.array_equal(listed, videos_of(pipe(**given_to(kind), mask_image=array)))


@pytest.mark.parametrize("output", ["pil", "np", "pt"])
def test_pictures_of_every_output_type_keep_the_original(output: str) -> None:
    kind = VIDEO_KINDS["WanVideoToVideoPipeline"]
    pipe = maskfx.compile(kind.build())
    found = pipe(**{**given_to(kind), "output_type": output}, mask_image=moving()).frames
    if output == "pt":
        found = found.movedim(2, -1).numpy()
    if output == "pil":
        found = np.stack([np.asarray(frame) for frame in found[0]])[None]
    wanted = np.stack([np.asarray(frame) for frame in film()])
    outside = ~masked_pixels(moving())
    scale = 1 if output == "pil" else 255
    assert np.abs(found[0][outside] * scale - wanted[outside]).max() < 1e-3


def test_each_of_several_videos_keeps_its_own_pixels() -> None:
    kind = VIDEO_KINDS["WanPipeline"]
    pipe = maskfx.compile(kind.build(), quality=ALL)
    recorded = pipe(**given_to(kind), record=True, num_videos_per_prompt=2)
    found = pipe(
        **given_to(kind, 1),
        mask_image=moving(),
        template=recorded.template,
        num_videos_per_prompt=2,
    )
    outside = ~masked_pixels(moving())
    for one, original in zip(videos_of(found), videos_of(recorded), strict=True):
        assert np.array_equal(one[outside], original[outside])
        assert np.abs(one - original)[~outside].mean() > 1e-3


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_one_video_without_an_axis_of_videos_keeps_its_own_pixels(kind: Any) -> None:
    draw = np.random.default_rng(0)
    made, original = (draw.random((3, 4, 6, 3), dtype=np.float32) for _ in range(2))
    masks = torch.zeros(3, 4, 6, dtype=torch.bool)
    masks[0, :2] = masks[2, 3] = True
    order = (0, 1, 2, 3) if kind is np.asarray else (0, 3, 1, 2)  # colours first in a tensor
    given = kind(made.transpose(order))
    found: Any = overlay_video(given, kind(original.transpose(order)), list(masks), 0)
    assert type(found) is type(given)
    found = np.asarray(found).transpose(np.argsort(order))
    assert np.array_equal(found, np.where(masks.numpy()[..., None], made, original))


def test_requests_of_an_engine_get_the_videos_that_they_get_alone() -> None:
    """The autoencoder keeps frames among its attributes while it runs."""
    kind = VIDEO_KINDS["WanVideoToVideoPipeline"]
    alone, pipe = (maskfx.compile(kind.build(), quality=ALL) for _ in range(2))

    def given(seed: int) -> dict[str, Any]:
        return {**given_to(kind, seed), "video": film(seed), "mask_image": moving()}

    with maskfx.Engine() as engine:
        tickets = [engine.submit(pipe, **given(seed)) for seed in range(3)]
        found = [videos_of(ticket.result()) for ticket in tickets]
    for seed, one in enumerate(found):
        assert np.abs(one - videos_of(alone(**given(seed)))).max() < EXACT


def test_patches_of_a_video_are_kept_from_step_to_step() -> None:
    kind = VIDEO_KINDS["WanVideoToVideoPipeline"]
    reuse = PatchReuse(side=2, first=2, last=1, judge=Turns())
    pipe = maskfx.compile(
        kind.build(), stretches=True, quality=Quality(reuse="steps", patches=reuse)
    )
    white = [Image.new("L", (SIDE, SIDE), 255)] * FRAMES
    given = {**given_to(kind), "num_inference_steps": 6}
    wanted = videos_of(kind.build()(**given))
    dense = videos_of(pipe(**{**given, "generator": noise()}))
    found = videos_of(pipe(**{**given, "generator": noise()}, mask_image=white))
    for one in (dense, found):
        assert 1e-4 < np.abs(one - wanted).max() < 0.5
    assert 0.2 < pipe._maskfx.patches.share < 0.9


# Masks of latent frames.


def test_each_latent_frame_is_masked_where_one_of_its_frames_is() -> None:
    masks = torch.zeros(9, 1, 1, dtype=torch.bool)
    masks[5] = True
    assert latent_masks(masks, 3).flatten().tolist() == [False, False, True]
    causal = torch.zeros(13, 1, 1, dtype=torch.bool)
    causal[9] = True
    assert latent_masks(causal, 4).flatten().tolist() == [False, False, False, True]


def test_latent_frames_of_equal_spans() -> None:
    masks = torch.zeros(12, 1, 1, dtype=torch.bool)
    masks[5] = True
    assert latent_masks(masks, 3).flatten().tolist() == [False, True, False]
    assert latent_masks(masks, 12).flatten().tolist() == masks.flatten().tolist()
    assert latent_masks(masks, 1).flatten().tolist() == [True]


def test_latents_whose_frames_are_not_known_are_masked_where_any_frame_is() -> None:
    masks = torch.zeros(25, 1, 2, dtype=torch.bool)
    masks[3, 0, 1] = True
    for count in (3, 6, 8):  # a part of the video, or with frames of padding
        assert latent_masks(masks, count).tolist() == [[[False, True]]] * count
    assert latent_masks(masks, 7).flatten(1).any(1).tolist() == [False, True, *[False] * 5]
    assert latent_masks(masks, 4, (4,)).tolist() == [[[False, True]]] * 4  # it would fit spans of 8


def test_a_pipeline_names_how_many_frames_a_latent_frame_stands_for() -> None:
    assert list(spans_of(VIDEO_KINDS["WanVideoToVideoPipeline"].build())) == [4]
    assert len(spans_of(VIDEO_KINDS["AnimateDiffPipeline"].build())) > 1


def test_frames_after_the_last_mask_have_the_last_one() -> None:
    new, old = np.ones((3, 2, 2, 3), np.float32), np.zeros((2, 2, 2, 3), np.float32)
    masks = [torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool)]
    found = np.stack(overlay_video(list(new), old, masks, 0))
    assert found[0].min() == 1
    assert found[1:].max() == 0


def test_a_step_that_gets_each_frame_as_a_picture_has_the_frame_s_mask() -> None:
    masks = torch.zeros(3, 8, 8, dtype=torch.bool)
    masks[0, :2, :2] = masks[1, 4:, 4:] = True
    latents = torch.randn(2, 4, 3, 4, 4)
    grids = MaskGrids(masks.any(0), latents=latents, video=VideoMask(masks, (4,), 3, (1,)))
    beside = latents.transpose(1, 2).flatten(0, 1)
    found = grids.of_latents(beside)
    assert found is not None
    assert found.shape == (6, 1, 4, 4)
    assert found.flatten(1).sum(1).tolist() == [1, 4, 0, 1, 4, 0]
    other = grids.of_latents(beside[:4])  # of another number of pictures: where any is masked
    assert other is not None
    assert other.sum() == 5


def test_the_first_linear_layer_shows_channels_in_patches() -> None:
    net = nn.Sequential(nn.Linear(36, 8), nn.Linear(8, 12))
    net.config = {"in_visual_dim": 4, "patch_size": (1, 2, 2)}  # type: ignore[assignment]
    video = {"sample": torch.zeros(1, 3, 8, 8, 9)}
    assert roles_by_channels(net, "sample", video) == ("batch", "frames", "y", "x", "")
    net.config = {"in_visual_dim": 4}  # type: ignore[assignment]
    assert roles_by_channels(net, "sample", video) == ("batch", "", "frames", "y", "x")
