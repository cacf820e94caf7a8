"""The UNet of Stable Diffusion's kind, with mask channels, and its training.

Its nine channels are the noisy latents, the mask, and the latents of what the mask leaves over.
With a mask over everything it is a text-to-image model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn

from training.crops import is_cropped
from training.examples import Examples, unheard
from training.latents import GRID, Latents, frozen_vae
from training.loop import Numbers, Task
from training.norms import quicken_norms
from training.precision import quick_numbers
from training.residuals import quicken_residuals, quicken_text
from training.text import HIDDEN, learn_tokenizer, tokens_of
from training.words import read_encoder

DROPPED = 0.1  # how often the caption is left out, for guidance
OUTSIDE = 0.15  # what a site counts that isn't masked: there the answer is given
FLOOR = 0.3  # what the steps of most noise count at least: shapes and colours are settled there
SHARDS_AT_START = 4
STEPS_PER_SHARD = 400


def make_unet(channels: tuple[int, ...] = (48, 96, 192), groups: int = 16) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=GRID,
        in_channels=9,
        out_channels=4,
        block_out_channels=channels,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=4,  # diffusers means the number of heads
        cross_attention_dim=HIDDEN,
        norm_num_groups=groups,
    )


def make_scheduler() -> DDIMScheduler:
    """Velocities, and a last step that is pure noise: sampling begins as training did."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )


def velocity_loss(
    scheduler: DDIMScheduler,
    guess: Tensor,
    x: Tensor,
    noise: Tensor,
    times: Tensor,
    mask: Tensor,
    floor: float = FLOOR,
) -> Tensor:
    """Return the error of guessed velocities, more inside the mask.

    Args:
        floor: what is added to the Min-SNR weight, which is nearly 0 where all is noise.
    """
    velocity = scheduler.get_velocity(x, noise, times)
    wrong = F.mse_loss(guess.float(), velocity, reduction="none").mean(1, keepdim=True)
    weight = OUTSIDE + (1 - OUTSIDE) * mask
    wrong = (wrong * weight).sum((1, 2, 3)) / weight.sum((1, 2, 3))
    signal = scheduler.alphas_cumprod.to(x.device)[times]
    ratio = signal / (1 - signal)
    return (wrong * (ratio.clamp(max=5) / (ratio + 1) + floor)).mean()


class UnetTask(Task):
    """Velocities under Min-SNR weights; the inside of the mask counts more."""

    name = "unet"
    rate = 5e-4
    average = 0.9995

    def __init__(self, runs: Path, device: torch.device, batch: int) -> None:
        self.device = device
        vae = frozen_vae(runs, 4).to(device)
        self.latents = Latents(vae, runs / "latents4")
        self.examples = Examples(self.latents, batch, device)
        self.tokenizer = learn_tokenizer(runs / "tokenizer")
        self.scheduler = make_scheduler()
        self.unet = make_unet().to(memory_format=torch.channels_last)
        self.text = read_encoder(runs, self.tokenizer)
        self.module: nn.Module = nn.ModuleDict({"unet": self.unet, "text_encoder": self.text})
        self.module.to(device)
        if device.type == "cpu":
            quicken_norms(self.unet)
            quicken_residuals(self.unet)
            quicken_text(self.text)
            # products of matrices are quicker there than the fused kernel, backwards above all
            self.unet.set_attn_processor(AttnProcessor())

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        self.latents.grow(step, SHARDS_AT_START, STEPS_PER_SHARD)
        return self.loss_on(np.random.default_rng((6, step)), self.module, is_cropped(step)), {}

    def loss_on(
        self,
        rng: np.random.Generator,
        module: nn.Module,
        cropped: bool,
        shards: int | None = None,
    ) -> Tensor:
        drawn = self.examples.crops(rng) if cropped else self.examples.pictures(rng, shards)
        x, mask = drawn.full, drawn.mask
        texts = unheard(drawn.texts, DROPPED, rng)
        noise_of = torch.Generator().manual_seed(int(rng.integers(2**60)))
        noise = torch.randn(x.shape, generator=noise_of).to(self.device)
        times = torch.from_numpy(rng.integers(1000, size=len(x))).to(self.device)
        noisy = self.scheduler.add_noise(x, noise, times)
        ids = tokens_of(self.tokenizer, texts).to(self.device)
        channels = torch.cat([noisy, mask, drawn.kept], 1).contiguous(
            memory_format=torch.channels_last
        )
        with quick_numbers(self.device):
            words = module["text_encoder"](ids)[0]  # type: ignore[index]
            guess = module["unet"](channels, times, words, return_dict=False)[0]  # type: ignore[index]
        return velocity_loss(self.scheduler, guess, x, noise, times, mask)

    def judge(self, averaged: nn.Module) -> Numbers:
        """The loss on the same draws each time."""
        self.latents.need(1)
        losses = [
            self.loss_on(np.random.default_rng((7, part)), averaged, cropped=False, shards=1).item()
            for part in range(8)
        ]
        return {"judged": float(np.mean(losses))}
