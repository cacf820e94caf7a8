"""Videos: the arguments that are one or its mask, masks of latent frames, and finished frames."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from maskfx.pipelines.masks.masks import Pictures, is_picture, overlay_one

Grid = tuple[int, tuple[int, int]]  # frames, and the rows and columns of each

Frame = TypeVar("Frame")

VIDEO = "video"
LENGTHS = ("num_frames", "video_length", "frames", VIDEO, "control_video")
SPANS = (1, 2, 4, 6, 8, 16, 32)  # frames that a latent frame of an autoencoder may stand for
MASKS = ("mask_video", "mask")  # what a pipeline that makes videos calls the mask of one


def makes_video(parameters: Collection[str]) -> bool:
    """Return True for a pipeline with these parameters if its result is a video."""
    return any(name in parameters for name in LENGTHS)


def mask_parameter(parameters: Collection[str]) -> str | None:
    """Return the parameter by which a pipeline itself accepts a mask; None without one."""
    names = ("mask_image", *(MASKS if makes_video(parameters) else ()))
    return next((name for name in names if name in parameters), None)


def frame_masks(given: Pictures) -> Pictures:
    """Return a mask of a video as a list of masks, if it is an array with frames."""
    if not isinstance(given, (Tensor, np.ndarray)):
        return given
    if given.ndim == 5:
        given = frames_first(given)[0]
    return list(given) if given.ndim == 3 and len(given) > 1 else given


def for_frames(masks: Tensor, count: int) -> Tensor:
    """Return a mask for each of at least `count` frames: the last one also for all after it."""
    return torch.cat([masks, masks[-1:].expand(max(0, count - len(masks)), -1, -1)])


def spans_of(pipe: object) -> Sequence[int]:
    """Return how many frames a latent frame of a pipeline may stand for."""
    found = {
        value
        for name, value in vars(pipe).items()
        if "temporal" in name and "patch" not in name and type(value) is int and value > 0
    }
    return tuple(found) or SPANS


def latent_masks(masks: Tensor, count: int, spans: Sequence[int] = SPANS) -> Tensor:
    """Return the mask of each latent frame: where any frame that it may stand for is masked.

    Autoencoders compress time by a few factors; most keep the first frame apart. Where both fit,
    both count. Where neither fits, as for latents that are a part of a longer video or have frames
    of padding, each latent frame may stand for any frame.

    Args:
        masks: (frames, height, width).
        count: The number of latent frames.
        spans: How many frames one may stand for.
    """
    frames, found = len(masks), []
    for alone in range(min(2, count)):
        each, left = divmod(frames - alone, count - alone)
        if each in spans and not left:
            bounds = [*range(alone), *range(alone, frames + 1, each)]
            found.append(torch.stack([masks[a:b].any(0) for a, b in pairwise(bounds)]))
    return torch.stack(found or [masks.any(0).expand(count, -1, -1)]).any(0)


def latent_channels(module: nn.Module) -> list[int]:
    """Return the numbers of channels that latents of this denoiser may have, the likely first."""
    config = getattr(module, "config", None)
    if not isinstance(config, Mapping):
        return []
    given = dict(config).items()
    return [
        number
        for part in ("out_", "in_")
        for name, number in given
        if name.startswith(part) and isinstance(number, int)
    ]


@dataclass(frozen=True)
class VideoMask:
    """Where the frames of a run's latents lie, and their masks.

    Args:
        frames: (frames, height, width), the mask of each finished frame; None for one of all.
        channels: The numbers of channels that latents may have.
        length: The number of finished frames; 1 for a picture, or if it isn't known.
        spans: How many of them a latent frame may stand for.
    """

    frames: Tensor | None = None
    channels: Sequence[int] = ()
    length: int = 1
    spans: Sequence[int] = SPANS

    def axis(self, shape: Sequence[int]) -> int:
        """Return the axis of the frames of latents of 5 dimensions."""
        axes = {1: 2, 2: 1, 4: 1}  # by the axis of the channels
        found = (axes[i] for n in self.channels for i in axes if shape[i] == n)
        return next(found, 2)


def length_of(arguments: Mapping[str, object], defaults: Mapping[str, object], masks: int) -> int:
    """Return the number of frames that a call makes; 1 if it isn't known."""
    named = {**defaults, **{name: value for name, value in arguments.items() if value is not None}}
    for name in LENGTHS:
        value = named.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if frames := frame_count(value):
            return frames
    return masks


def video_grid_of(tokens: int, height: int, width: int, length: int) -> Grid | None:
    """Return the latent frames that `tokens` square patches form, and each one's rows and columns.

    Return None if none fit a video of `length` frames, compressed in time as autoencoders do.
    """
    counts = {(length - 1) // n + 1 for n in SPANS if (length - 1) % n == 0}
    counts |= {length // n for n in SPANS if length % n == 0}
    for patch in range(1, min(height, width) + 1):
        sites = (height // patch) * (width // patch)
        if tokens % sites == 0 and tokens // sites in counts - {1}:
            return tokens // sites, (height // patch, width // patch)
    return None


def is_video(value: object) -> bool:
    """Return True for frames of pixels, False for latents."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(is_picture(v) or is_video(v) for v in value)
    if isinstance(value, np.ndarray):
        return value.ndim in (4, 5) and value.shape[-1] in (1, 3, 4)
    if not isinstance(value, Tensor) or value.dim() not in (4, 5):
        return False
    return value.shape[-3] in (1, 3) or value.dim() == 5 and value.shape[1] in (1, 3)


def frames_first(given: Pictures) -> Pictures:
    """Return videos with their frames before the channels of each, which may stand before them."""
    turned = isinstance(given, Tensor) and given.dim() == 5 and given.shape[2] not in (1, 3)
    return given.transpose(1, 2) if turned and given.shape[1] in (1, 3) else given


def overlay_video(
    frames: Pictures, original: Pictures, masks: Sequence[Tensor], feather: int
) -> Pictures:
    """Replace the pixels of videos outside the mask by the original's, unchanged.

    Args:
        frames: Videos: lists of pictures, or an array with the videos first and then their frames;
            or one video.
        original: The frames of the original, or of several.
        masks: One for each frame, or one for all.
        feather: See `Quality.feather`.
    """
    if isinstance(frames, (Tensor, np.ndarray)) and frames.ndim == 4:
        return overlay_video(frames[None], original, masks, feather)[0]
    if isinstance(frames, (Tensor, np.ndarray)) and frames.ndim == 5:
        done = overlay_video([list(video) for video in frames], original, masks, feather)
        if isinstance(frames, Tensor):
            return torch.stack([torch.stack(video) for video in done])
        return np.stack([np.stack(video) for video in done])
    if not isinstance(frames, (list, tuple)):
        return frames
    if frames and isinstance(frames[0], (list, tuple)):
        several, count = videos_of(original), len(frames)
        pairs = ((video, several[i * len(several) // count]) for i, video in enumerate(frames))
        return type(frames)(overlay_video(video, own, masks, feather) for video, own in pairs)
    originals = frames_of(original)
    return type(frames)(
        overlay_one(frame, at(originals, i), at(masks, i), feather)
        for i, frame in enumerate(frames)
    )


def videos_of(given: Pictures) -> Sequence[Pictures]:
    """Return each video of what may be one or several."""
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], (list, tuple)):
        return given
    several = isinstance(given, (Tensor, np.ndarray)) and given.ndim == 5
    return list(frames_first(given)) if several else [given]


def frames_of(given: Pictures) -> Sequence[Pictures]:
    """Return the frames of a video, or of the first of several; a picture counts as one."""
    video = videos_of(given)[0]
    if isinstance(video, (list, tuple)):
        return video
    several = isinstance(video, (Tensor, np.ndarray)) and video.ndim == 4
    return list(video) if several else [video]


def frame_count(value: object) -> int:
    """Return the number of frames of pixels; 0 for anything else."""
    return len(frames_of(value)) if is_video(value) else 0


def at(values: Sequence[Frame], index: int) -> Frame:
    """Return the value for a frame; the last one for those after it."""
    return values[min(index, len(values) - 1)]
