"""The transformer of Flux's kind that fills masks, and its training: the UNet teaches it.

Like the UNet it gets the mask and the latents of what the mask leaves over as channels. Its target
is the velocity that the trained UNet gives under guidance, so its own sampling needs none, and
nothing in it is by chance but the example: it learns in hours what examples alone teach in days.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from diffusers.models.normalization import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
)
from torch import Tensor, nn
from transformers import CLIPTokenizer

from training import unet
from training.crops import is_cropped
from training.examples import Example, Examples, unheard
from training.latents import Latents, frozen_vae
from training.loop import Numbers, Task, averaged_weights, put_weights, weights_of
from training.precision import quick_numbers
from training.residuals import quicken_text
from training.text import HIDDEN, LENGTH, learn_pieces, learn_tokenizer, make_encoder, tokens_of
from training.unet import DROPPED, OUTSIDE, SHARDS_AT_START
from training.words import read_encoder, read_t5

GUIDANCE = 3.0  # of the teacher
STEPS_PER_SHARD = 2000  # less than the UNet wants: the teacher answers anew to each noise
PIXELS = 8 * 8  # mask channels of a site: the pipeline doesn't shrink the mask
# The pipeline fills texts up to `max_sequence_length`, 512 tokens unless set otherwise. In some
# steps the model sees that number, with less pictures.
MANY, MANY_CHANCE, MANY_SHARE = 512, 0.04, 8


def make_transformer(
    pairs: int = 2, singles: int = 6, heads: int = 4, head_size: int = 64, latents: int = 4
) -> FluxTransformer2DModel:
    """`pairs` of layers for text and sites apart, `singles` for both; latents in patches of 2x2."""
    sites = head_size * 3 // 8  # of a head, for each of row and column
    made = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * (2 * latents + PIXELS),
        out_channels=4 * latents,
        num_layers=pairs,
        num_single_layers=singles,
        attention_head_dim=head_size,
        num_attention_heads=heads,
        joint_attention_dim=HIDDEN,
        pooled_projection_dim=HIDDEN,
        axes_dims_rope=(head_size - 2 * sites, sites, sites),
    )
    begin_as_nothing(made, 4 * 2 * latents)
    return made


@torch.no_grad()
def begin_as_nothing(made: FluxTransformer2DModel, mask_from: int) -> None:
    """Weights under which each layer passes on what it gets, and the answer is none.

    The mask's pixels weigh alike and get the same gradients: what counts is how much is masked.
    """
    norms = AdaLayerNormZero | AdaLayerNormZeroSingle | AdaLayerNormContinuous
    silent = [norm.linear for norm in made.modules() if isinstance(norm, norms)]
    for layer in [*silent, made.proj_out]:
        layer.weight.zero_()
        layer.bias.zero_()
    pixels = made.x_embedder.weight[:, mask_from:].view(-1, PIXELS, 4)
    pixels.copy_(pixels.mean(1, keepdim=True).expand_as(pixels))


def inner_matrices(made: FluxTransformer2DModel) -> list[nn.Parameter]:
    """Of attention and feed-forward; the norms' layers begin as nothing, which can't be turned."""
    return [
        weight
        for name, weight in made.named_parameters()
        if "blocks" in name and weight.ndim == 2 and "norm" not in name
    ]


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=2.0)


def packed(latents: Tensor) -> Tensor:
    """Patches of 2x2 as the pipeline makes them: (batch, patches, 4 x channels)."""
    batch, channels, rows, columns = latents.shape
    patches = latents.view(batch, channels, rows // 2, 2, columns // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, rows // 2 * (columns // 2), 4 * channels)


def places(rows: int, columns: int, device: torch.device) -> Tensor:
    """Of each patch, as the pipeline numbers them."""
    where = torch.zeros(rows, columns, 3, device=device)
    where[..., 1] = torch.arange(rows, device=device)[:, None]
    where[..., 2] = torch.arange(columns, device=device)
    return where.view(-1, 3)


class Teacher:
    """The trained UNet's answers, with guidance."""

    def __init__(self, runs: Path, tokenizer: CLIPTokenizer, device: torch.device) -> None:
        weights = averaged_weights(runs / "unet" / "checkpoint.pt")
        self.unet = unet.make_unet().to(memory_format=torch.channels_last)
        self.text = make_encoder(tokenizer)
        for part, name in ((self.unet, "unet"), (self.text, "text_encoder")):
            put_weights(part, {key: weights[f"{name}.{key}"] for key in weights_of(part)})
            part.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def velocity(self, noisy: Tensor, drawn: Example, times: Tensor, ids: Tensor) -> Tensor:
        """`ids` are of the captions, and of no caption in the last row."""
        channels = torch.cat([noisy, drawn.mask, drawn.kept], 1)
        words = self.text(ids)[0]
        both = torch.cat([words[:-1], words[-1:].expand_as(words[:-1])])
        told, untold = (
            self.unet(
                torch.cat([channels, channels]).contiguous(memory_format=torch.channels_last),
                torch.cat([times, times]),
                both,
                return_dict=False,
            )[0]
            .float()
            .chunk(2)
        )
        return untold + GUIDANCE * (told - untold)


class DitTask(Task):
    """The teacher's velocities, from data to noise; the inside of the mask counts more."""

    name = "dit"
    rate = 6e-4
    matrix_rate = 2e-3
    average = 0.9995

    def __init__(self, runs: Path, device: torch.device, batch: int) -> None:
        self.device = device
        self.latents = Latents(frozen_vae(runs, 4).to(device), runs / "latents4")
        self.examples = Examples(self.latents, batch, device)
        self.tokenizer = learn_tokenizer(runs / "tokenizer")
        self.pieces = learn_pieces(runs / "pieces")
        self.teacher = Teacher(runs, self.tokenizer, device)
        self.signals = unet.make_scheduler().alphas_cumprod.to(device)
        self.module: nn.Module = nn.ModuleDict(
            {
                "transformer": make_transformer(),
                "text_encoder": read_encoder(runs, self.tokenizer),
                "text_encoder_2": read_t5(runs, self.pieces),
            }
        ).to(device)
        self.matrices = inner_matrices(self.module.get_submodule("transformer"))
        if device.type == "cpu":
            for name in ("text_encoder", "text_encoder_2"):
                quicken_text(self.module.get_submodule(name))

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        self.latents.grow(step, SHARDS_AT_START, STEPS_PER_SHARD)
        return self.loss_on(np.random.default_rng((8, step)), self.module, is_cropped(step)), {}

    def loss_on(
        self,
        rng: np.random.Generator,
        module: nn.Module,
        cropped: bool,
        shards: int | None = None,
    ) -> Tensor:
        drawn = self.examples.crops(rng) if cropped else self.examples.pictures(rng, shards)
        many = rng.random() < MANY_CHANCE
        if many:
            drawn = drawn.first(max(1, len(drawn.texts) // MANY_SHARE))
        texts = unheard(drawn.texts, DROPPED, rng)
        count = len(texts)
        noise_of = torch.Generator().manual_seed(int(rng.integers(2**60)))
        noise = torch.randn(drawn.full.shape, generator=noise_of).to(self.device)
        # spread over all times, so that two steps differ less
        even = (rng.permutation(count) + rng.random(count)) / count
        times = torch.from_numpy((even * len(self.signals)).astype(np.int64)).to(self.device)
        signal = self.signals[times].view(-1, 1, 1, 1)
        root, spread = signal.sqrt(), (1 - signal).sqrt()
        noisy = root * drawn.full + spread * noise
        ids = tokens_of(self.tokenizer, [*texts, ""]).to(self.device)
        with quick_numbers(self.device):
            taught = self.teacher.velocity(noisy, drawn, times, ids)
            # the same point, as flow matching measures: data and noise sum up to one
            line = root + spread
            sites = noisy / line, drawn.kept, drawn.mask.expand(-1, PIXELS, -1, -1)
            rows, columns = (side // 2 for side in noisy.shape[2:])
            length = MANY if many else self.longest(texts) if cropped else LENGTH
            pieces = tokens_of(self.pieces, texts, length).to(self.device)
            summary = module.get_submodule("text_encoder")(ids[:-1]).pooler_output
            guess = module.get_submodule("transformer")(
                hidden_states=torch.cat([packed(part) for part in sites], 2),
                timestep=(spread / line).flatten(),
                pooled_projections=summary,
                encoder_hidden_states=module.get_submodule("text_encoder_2")(pieces)[0],
                txt_ids=torch.zeros(length, 3, device=self.device),
                img_ids=places(rows, columns, self.device),
                return_dict=False,
            )[0]
        wanted = (spread - root) * noisy + line * taught
        weight = packed(OUTSIDE + (1 - OUTSIDE) * drawn.mask).repeat(1, 1, noisy.shape[1])
        wrong = (guess.float() - packed(wanted)) ** 2 * weight
        return (wrong.sum((1, 2)) / weight.sum((1, 2))).mean()

    def longest(self, texts: list[str]) -> int:
        """Of these texts, in tokens: crops have short ones, and the rest is empty."""
        return max(len(ids) for ids in self.pieces(texts).input_ids)

    def judge(self, averaged: nn.Module) -> Numbers:
        """The loss on the same draws each time."""
        self.latents.need(1)
        losses = [
            self.loss_on(np.random.default_rng((9, part)), averaged, False, shards=1).item()
            for part in range(8)
        ]
        return {"judged": float(np.mean(losses))}
