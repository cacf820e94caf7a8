"""Map a pixel mask to sites of a pipeline's latents and of its denoisers' inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maskfx.pipelines.masks.masks import grid_of, grown, margin_sites, pooled
from maskfx.pipelines.masks.videos import Grid, VideoMask, latent_masks, video_grid_of
from maskfx.runtime.hardware.devices import moved


@dataclass
class MaskGrids:
    """One run's mask at every size that it occurs in.

    Latents are (…, height, width), (…, height, width, channels), or tokens in rows: (batch, tokens,
    channels) or (batch, tokens, channels, …) of patches. A denoiser may receive references besides
    the latents, as more tokens or as a wider or higher picture; the latents' sites are found by
    their values. Tokens of references may also be among the latents.
    """

    pixels: Tensor  # mask of the image or crop that the pipeline works on
    margin: int = 0
    latents: Tensor | None = None  # initial latents of the run
    video: VideoMask = field(default_factory=VideoMask)
    part: slice | None = None  # the picture's among the latents' tokens; None for all
    _grids: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _over: dict[tuple[tuple[int, ...], torch.device], Tensor | None] = field(default_factory=dict)

    @property
    def flat(self) -> bool:
        """Whether the latents have no sites."""
        return self.latents is not None and is_flat(self.latents)

    def of_latents(self, latents: Tensor) -> Tensor | None:
        """Return the mask over these latents, on their device, ready to broadcast."""
        key = latents.shape, latents.device
        if key not in self._over:
            mask = self._of_shape(latents.shape)
            self._over[key] = None if mask is None else moved(mask, latents.device)
        return self._over[key]

    def _of_shape(self, shape: Sequence[int]) -> Tensor | None:
        if in_tokens(shape):
            own = self._part(shape[1])
            grid = self._packed_grid(own.stop - own.start)
            if grid is None:
                return None
            mask = torch.zeros(shape[1], dtype=torch.bool)
            mask[own] = self.frames(*grid).flatten()
            return mask.view(-1, *[1] * (len(shape) - 2))
        if len(shape) not in (4, 5, 6):
            return None
        last, before = tuple(shape[-2:]), tuple(shape[-3:-1])
        if count := self._frames_beside(shape):
            return self.frames(count, last).repeat(shape[0] // count, 1, 1)[:, None]
        if len(shape) != 5 or self.video.frames is None:
            last_axis = self._has_channels_last(shape)
            return self.grid(before)[..., None] if last_axis else self.grid(last)
        axis = self._frames_axis(shape)
        if self._has_channels_last(shape):
            return self.frames(shape[axis], before)[..., None]
        masks = self.frames(shape[axis], last)
        return masks if axis == 2 else masks[:, None]

    def _frames_beside(self, shape: Sequence[int]) -> int:
        """Return the number of frames if a step gets each as a picture; else 0."""
        own = self.latents
        if own is None or self.video.frames is None or own.dim() != 5 or len(shape) != 4:
            return 0
        count = own.shape[self._frames_axis(own.shape)]
        return count if shape[0] == len(own) * count else 0

    def _has_channels_last(self, shape: Sequence[int]) -> bool:
        """Return True if the channels of latents are behind their rows and columns."""
        return not self._scales_to(tuple(shape[-2:])) and self._scales_to(tuple(shape[-3:-1]))

    def _frames_axis(self, shape: Sequence[int]) -> int:
        """Return the axis of the frames of latents of 5 dimensions."""
        return 1 if self._has_channels_last(shape) else self.video.axis(shape)

    def _scales_to(self, size: tuple[int, ...]) -> bool:
        """Return True if sites of this many rows and columns are squares of pixels."""
        (height, width), (rows, columns) = self.pixels.shape, size
        return height * columns == width * rows and height % rows == 0

    def of_input(self, shape: Sequence[int], tokens: Tensor | None) -> Tensor | None:
        """Return the mask of a denoiser call with sites of shape (height, width) or (tokens,).

        A video's shape has frames first. Return None if the sites can't be located on the image.
        """
        if self.flat:
            return None
        if len(shape) == 3:
            return self._of_video((shape[0], shape[1], shape[2]), tokens)
        if len(shape) == 2:
            return self._of_picture(tuple(shape), tokens)
        layout = self._layout(shape, tokens)
        if layout is None:
            return None
        (count, size), first = layout
        inside = self.frames(count, size).flatten()
        mask = torch.full((shape[0],), bool(inside.all()))  # all masked: no recorded row is needed
        mask[first : first + len(inside)] = inside
        return mask

    def _of_picture(self, size: tuple[int, ...], picture: Tensor | None) -> Tensor | None:
        """Return the mask of a denoiser's picture, of which the latents may be a part."""
        own = self.latents
        if own is None or picture is None or own.dim() != 4 or picture.dim() != 4:
            return self.grid(size)
        height, width = own.shape[-2:]
        if tuple(picture.shape[-2:]) != size or (height, width) == size:
            return self.grid(size)
        for top in {0, size[0] - height}:
            for left in {0, size[1] - width}:
                part = picture[:1, : own.shape[1], top : top + height, left : left + width]
                if part.shape == own[:1].shape and torch.equal(part, own[:1].to(part)):
                    inside = self.grid((height, width))
                    mask = torch.full(size, bool(inside.all()))
                    mask[top : top + height, left : left + width] = inside
                    return mask
        # the latents in another resolution; else their place in the picture isn't known
        return self.grid(size) if size[0] * width == size[1] * height else None

    def _of_video(self, shape: tuple[int, int, int], video: Tensor | None) -> Tensor | None:
        """Return the mask of a denoiser's video, of which the latents may be some frames."""
        count, size, own = shape[0], shape[1:], self.latents
        if own is None or video is None or own.dim() != video.dim() or own.dim() not in (5, 6):
            return self.frames(count, size)
        if own.dim() == 6:  # pictures beside each other, each of one frame
            own, video = (v[:, :, :, 0].transpose(1, 2) for v in (own, video))
        axis = self._frames_axis(own.shape)
        few = own.shape[axis]
        if few == count:
            return self.frames(count, size)
        if self._has_channels_last(own.shape):
            return None
        channels = own.shape[3 - axis]
        wanted = own[:1].transpose(1, 2) if axis == 1 else own[:1]
        given = video.transpose(1, 2) if video.shape[1] == count else video
        for first in range(count - few + 1):
            part = given[:1, :channels, first : first + few]
            if part.shape == wanted.shape and torch.equal(part, wanted.to(part)):
                inside = self.frames(few, size)
                mask = torch.full(shape, bool(inside.all()))
                mask[first : first + few] = inside
                return mask
        return None

    def frames(self, count: int, size: tuple[int, ...]) -> Tensor:
        """Return the masks of latent frames of a size: (frames, height, width)."""
        if self.video.frames is None:
            return self.grid(size).expand(count, -1, -1)
        key = (count, *size)
        if key not in self._grids:
            sites = margin_sites(self.margin, self.pixels.shape[0] / size[0])
            masks = latent_masks(self.video.frames, count, self.video.spans)
            self._grids[key] = torch.stack([grown(pooled(mask, size), sites) for mask in masks])
        return self._grids[key]

    def layout(
        self, shape: Sequence[int], tokens: Tensor | None
    ) -> tuple[tuple[int, int], int] | None:
        """Return the rows and columns that a call's packed tokens form, and the first of them.

        The rows of a video's frames follow each other. Return None if they can't be located on the
        image.
        """
        found = self._layout(shape, tokens)
        if found is None:
            return None
        (count, (rows, columns)), first = found
        return (count * rows, columns), first

    def _layout(self, shape: Sequence[int], tokens: Tensor | None) -> tuple[Grid, int] | None:
        packed = self.latents is not None and in_tokens(self.latents.shape)
        own = self.latents.shape[1] if self.latents is not None and packed else shape[0]
        part = self._part(own) if packed else slice(0, own)
        grid = self._packed_grid(part.stop - part.start)
        if grid is None or own > shape[0]:
            return None
        first = 0 if own == shape[0] else self._where(tokens)
        return None if first is None else (grid, first + part.start)

    def _part(self, tokens: int) -> slice:
        """Return which of the latents' tokens are the picture's."""
        return self.part or slice(0, tokens)

    def grid(self, size: tuple[int, ...]) -> Tensor:
        """Return the mask at a latent's size: sites with any masked pixel, grown by the margin."""
        if size not in self._grids:
            sites = margin_sites(self.margin, self.pixels.shape[0] / size[0])
            self._grids[size] = grown(pooled(self.pixels, size), sites)
        return self._grids[size]

    def _packed_grid(self, tokens: int) -> Grid | None:
        """Return frames, rows and columns that the latents' tokens form; None if unknown."""
        if self.latents is None:
            return None
        if in_tokens(self.latents.shape):
            height, width = self.pixels.shape
            if self.video.length > 1:
                return video_grid_of(tokens, height, width, self.video.length)
            grid = grid_of(tokens, height, width)
            return None if grid is None else (1, grid)
        height, width = self.latents.shape[-2:]
        shape = self.latents.shape
        count = shape[self._frames_axis(shape)] if len(shape) == 5 else 1
        for patch in (1, 2):
            if count * (height // patch) * (width // patch) == tokens:
                return count, (height // patch, width // patch)
        return None

    def _where(self, tokens: Tensor | None) -> int | None:
        """Return the index of the latents' first token among more tokens; None if not found."""
        own = self.latents
        if own is None or tokens is None or tokens.dim() != own.dim():
            return None
        count, width = own.shape[1:3]
        for first in (0, tokens.shape[1] - count):
            part = tokens[:1, first : first + count, :width]
            if torch.equal(part, own[:1].to(part)):
                return first
        return None


def in_tokens(shape: Sequence[int]) -> bool:
    """Return True for latents whose tokens follow each other, as vectors or as patches."""
    return len(shape) == 3 or (len(shape) == 6 and shape[1] > shape[4] * shape[5])


def picture_part(outputs: Sequence[object]) -> slice | None:
    """Return which tokens of latents are the picture's, by a mask beside them; None for all.

    The mask has a truth value for each token of each sample, and all samples have the same ones.
    """
    latents = next((value for value in outputs if isinstance(value, Tensor)), None)
    if latents is None or not in_tokens(latents.shape):
        return None
    for value in outputs:
        if not isinstance(value, Tensor) or value.dtype != torch.bool:
            continue
        if value.shape != latents.shape[:2] or not torch.equal(value, value[:1].expand_as(value)):
            continue
        own = value[0].nonzero().flatten().tolist()
        if own and own[-1] - own[0] + 1 == len(own):
            return slice(own[0], own[-1] + 1)
    return None


def is_flat(latents: Tensor) -> bool:
    """Return True for latents without sites, such as the embedding that a prior makes."""
    return latents.dim() < 3
