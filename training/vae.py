"""The autoencoder between pixels and latents, and its training."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from training.loop import Numbers, Task
from training.norms import quicken_norms
from training.paint import paint
from training.precision import quick_numbers
from training.residuals import quicken_residuals
from training.scenes import SIDE, draw_scene

# Up to which step, side and number of a step's crops (more where there is a GPU). First many
# small ones; at last whole pictures too, for norms see all of what they are given.
CROPS = ((1500, ((32, 16),)), (2300, ((64, 6),)), (10**9, ((128, 3), (128, 3), (SIDE, 1))))
PULL = 1e-4  # of the latents towards a normal distribution
POOL = 256  # pictures that crops are taken from; with every other step a new one comes


def make_vae(latents: int, channels: tuple[int, ...] = (16, 32, 64, 128)) -> AutoencoderKL:
    """Factor 8; no attention, so that it is quick at every size."""
    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=latents,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=SIDE,
        force_upcast=False,
    )


@torch.no_grad()
def begin_as_blur(vae: AutoencoderKL) -> None:
    """Weights under which channels pass nearly as they are, and latents with little noise.

    From weights all by chance it takes thousands of steps until colours are found.
    """
    for module in vae.modules():
        if isinstance(module, ResnetBlock2D):
            module.conv2.weight.zero_()
            module.conv2.bias.zero_()
            if module.conv_shortcut is not None:
                pass_on(module.conv_shortcut, [(0, 0)])
        elif isinstance(module, Downsample2D):
            pass_on(module.conv, [(0, 0), (0, 1), (1, 0), (1, 1)])
        elif isinstance(module, Upsample2D):
            pass_on(module.conv, [(1, 1)])
    pass_on(vae.encoder.conv_in, [(1, 1)])
    latents = vae.config.latent_channels
    vae.quant_conv.weight[latents:] *= 0.1
    vae.quant_conv.bias[latents:] = -6.0


def pass_on(conv: nn.Module, taps: list[tuple[int, int]]) -> None:
    """Each channel is first of all the mean of itself at some taps."""
    weight = conv.get_parameter("weight")
    weight *= 0.5
    for channel in range(min(weight.shape[:2])):
        for row, column in taps:
            weight[channel, channel, row, column] += 1 / len(taps)


def as_pictures(pixels: np.ndarray) -> Tensor:
    """(n, side, side, 3) in 0..255 to (n, 3, side, side) in -1..1."""
    values = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2)
    return values.float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last)


class VaeTask(Task):
    """Reconstructions: differences of pixels and of their slopes, and a little KL."""

    rate = 4e-4
    average = 0.998

    def __init__(self, latents: int, device: torch.device, scale: int = 1) -> None:
        self.name = f"vae{latents}"
        self.device = device
        self.scale = scale
        self.vae = make_vae(latents).to(device=device, memory_format=torch.channels_last)
        self.module: nn.Module = self.vae
        self.pool: dict[int, np.ndarray] = {}
        begin_as_blur(self.vae)
        if device.type == "cpu":
            quicken_norms(self.vae)
            quicken_residuals(self.vae)

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        crops = next(crops for end, crops in CROPS if step < end)
        side, count = crops[step % len(crops)]
        x = self.crops(step, side, count * self.scale).to(self.device)
        noise = torch.Generator().manual_seed(step)
        with quick_numbers(self.device):
            spread = self.vae.encode(x).latent_dist
            chance = torch.randn(spread.mean.shape, generator=noise).to(x)
            y = self.vae.decode(spread.mean + spread.std * chance, return_dict=False)[0]
        y = y.float()
        off, square = (y - x).abs().mean(), (y - x).square().mean()
        edges = sum((slopes(y, axis) - slopes(x, axis)).abs().mean() for axis in (2, 3))
        kl = (spread.mean.float() ** 2 + spread.var.float() - 1 - spread.logvar.float()).mean() / 2
        return off + 2 * square + 0.5 * edges + PULL * kl, {"off": off.item(), "kl": kl.item()}

    def crops(self, step: int, side: int, count: int) -> Tensor:
        rng = np.random.default_rng((1, step))
        crops = []
        first = step * self.scale // 2
        for seed in rng.integers(first, first + POOL, size=count):
            pixels = self.picture(int(seed))
            top, left = rng.integers(SIDE - side + 1, size=2)
            crops.append(pixels[top : top + side, left : left + side])
        return as_pictures(np.stack(crops))

    def picture(self, seed: int) -> np.ndarray:
        """A painted scene; the latest are kept."""
        if seed not in self.pool:
            self.pool[seed] = paint(draw_scene("train", seed)).pixels
            if len(self.pool) > 2 * POOL:
                del self.pool[min(self.pool)]
        return self.pool[seed]

    def judge(self, averaged: nn.Module) -> Numbers:
        quality = []
        for seed in range(24):
            x = as_pictures(paint(draw_scene("held-out", seed)).pixels[None]).to(self.device)
            with quick_numbers(self.device):
                mean = averaged.encode(x).latent_dist.mean
                y = averaged.decode(mean, return_dict=False)[0]
            wrong = F.mse_loss(y.float().clamp(-1, 1), x).item() / 4
            quality.append(-10 * float(np.log10(wrong)))
        return {"psnr": float(np.mean(quality)), "worst": min(quality)}


def slopes(x: Tensor, axis: int) -> Tensor:
    return x.diff(dim=axis)
