"""The transformer of Stable Diffusion 3's kind, and its training by rectified flow.

It has no mask channels: inpainting blends the known part into every step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from torch import Tensor, nn

from bench.reference.captions import caption, caption_of
from bench.reference.crops import around_a_thing, is_cropped, window_around
from bench.reference.latents import GRID, Latents, frozen_vae
from bench.reference.loop import Numbers
from bench.reference.precision import quick_numbers
from bench.reference.residuals import quicken_text
from bench.reference.scenes import draw_scene
from bench.reference.text import HIDDEN, learn_tokenizer, tokens_of
from bench.reference.unet import DROPPED, SHARDS_AT_START, STEPS_PER_SHARD
from bench.reference.words import read_projecting_encoder

# Where there is no T5, the pipeline appends empty tokens: as many as `max_sequence_length` says,
# 256 unless told otherwise. The model sees few, and in some steps all of them, with less pictures.
FEW, MANY = 1, 256
MANY_CHANCE, MANY_SHARE = 0.1, 4


def make_transformer(
    layers: int = 8, heads: int = 3, head_size: int = 64, latents: int = 16
) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=GRID,
        patch_size=2,
        in_channels=latents,
        out_channels=latents,
        num_layers=layers,
        num_attention_heads=heads,
        attention_head_dim=head_size,
        joint_attention_dim=2 * HIDDEN,
        caption_projection_dim=heads * head_size,
        pooled_projection_dim=2 * HIDDEN,
        pos_embed_max_size=2 * GRID,
        qk_norm="rms_norm",
    )


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=1.0)


def read_texts(
    first: nn.Module, second: nn.Module, ids: Tensor, empty: int
) -> tuple[Tensor, Tensor]:
    """States and summary of a text, put together as the pipeline does it."""
    states, summaries = [], []
    for encoder in (first, second):
        out = encoder(ids, output_hidden_states=True)
        states.append(out.hidden_states[-2])
        summaries.append(out[0])
    words = torch.cat(states, 2)
    words = torch.cat([words, words.new_zeros(len(words), empty, words.shape[2])], 1)
    return words, torch.cat(summaries, 1)


Examples = tuple[Tensor, Tensor, list[str]]


class DitTask:
    """Velocities from data to noise; the things count more than the backdrop."""

    name = "dit"
    rate = 5e-4
    average = 0.9995

    def __init__(self, runs: Path, device: torch.device, batch: int) -> None:
        self.device = device
        self.batch = batch
        vae = frozen_vae(runs, 16).to(device)
        self.latents = Latents(vae, runs / "latents16", cut=False)
        self.tokenizer = learn_tokenizer(runs / "tokenizer")
        self.module: nn.Module = nn.ModuleDict(
            {
                "transformer": make_transformer(),
                "text_encoder": read_projecting_encoder(runs, self.tokenizer, layers=3),
                "text_encoder_2": read_projecting_encoder(runs, self.tokenizer, layers=2),
            }
        ).to(device)
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
        empty = MANY if rng.random() < MANY_CHANCE else FEW
        count = max(1, self.batch // MANY_SHARE) if empty == MANY else self.batch
        x, things, texts = (
            self.crops(rng, 4 * count) if cropped else self.pictures(rng, count, shards)
        )
        weight = 1 + 2 * things
        # the middle of the way more often than its ends
        away = torch.from_numpy(1 / (1 + np.exp(-rng.normal(size=len(x))))).float().to(self.device)
        noise_of = torch.Generator().manual_seed(int(rng.integers(2**60)))
        noise = torch.randn(x.shape, generator=noise_of).to(self.device)
        part = away.view(-1, 1, 1, 1)
        noisy = (1 - part) * x + part * noise
        ids = tokens_of(self.tokenizer, texts).to(self.device)
        with quick_numbers(self.device):
            words, summary = read_texts(
                module["text_encoder"],  # type: ignore[index]
                module["text_encoder_2"],  # type: ignore[index]
                ids,
                empty,
            )
            guess = module["transformer"](  # type: ignore[index]
                hidden_states=noisy,
                encoder_hidden_states=words,
                pooled_projections=summary,
                timestep=away * 1000,
                return_dict=False,
            )[0]
        wrong = (guess.float() - (noise - x)) ** 2
        return (wrong * weight).sum() / (weight.sum() * x.shape[1])

    def pictures(self, rng: np.random.Generator, count: int, shards: int | None) -> Examples:
        """Latents, where things are in them, captions."""
        full, things, texts = [], [], []
        for seed, rows in self.latents.pick(rng, count, shards):
            full.append(rows["full"])
            things.append(rows["things"])
            texts.append(caption(draw_scene("train", seed), rng))
        return self.examples(rng, full, things, texts)

    def crops(self, rng: np.random.Generator, count: int) -> Examples:
        """The same of windows around a thing, with its own caption."""
        full, things, texts = [], [], []
        for seed, rows in self.latents.pick(rng, count):
            scene = draw_scene("train", seed)
            which, thing = around_a_thing(rows, rng)
            window = window_around(rows["masks"][which], rng)
            full.append(rows["full"][window])
            things.append(rows["things"][window])
            texts.append(caption_of(scene.things[thing], scene, rng))
        return self.examples(rng, full, things, texts)

    def examples(
        self,
        rng: np.random.Generator,
        full: list[Tensor],
        things: list[Tensor],
        texts: list[str],
    ) -> Examples:
        heard = ["" if rng.random() < DROPPED else text for text in texts]
        x, where = (torch.stack(parts).float().to(self.device) for parts in (full, things))
        return x, where[:, None], heard

    def judge(self, averaged: nn.Module) -> Numbers:
        """The loss on the same draws each time."""
        self.latents.need(1)
        losses = [
            self.loss_on(np.random.default_rng((9, part)), averaged, False, shards=1).item()
            for part in range(8)
        ]
        return {"judged": float(np.mean(losses))}
