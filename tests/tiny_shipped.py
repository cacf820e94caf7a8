"""A folder like `maskfx/shipped/` with tiny pipelines that never learned anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.reference import dit, unet, vae
from bench.reference.build import write_example
from bench.reference.text import learn_tokenizer, make_encoder, make_projecting_encoder


def ship_unet(folder: Path) -> None:
    """The class, the call and the sizes of pictures of the trained "unet"."""
    import diffusers

    torch.manual_seed(0)
    tokenizer = learn_tokenizer(folder / "tokenizer", scenes=30)
    library: Any = diffusers
    library.StableDiffusionInpaintPipeline(
        vae=vae.make_vae(4, (8, 8, 8, 8)),
        text_encoder=make_encoder(tokenizer, layers=1),
        tokenizer=tokenizer,
        unet=unet.make_unet((8, 8, 8), groups=4),
        scheduler=unet.make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "unet")
    write_example(folder / "unet" / "example", whole=False)


def ship_dit(folder: Path) -> None:
    """The same of the trained "dit"."""
    import diffusers

    torch.manual_seed(0)
    tokenizer = learn_tokenizer(folder / "tokenizer", scenes=30)
    library: Any = diffusers
    latents: Any = vae.make_vae(16, (8, 8, 8, 8))
    latents.register_to_config(shift_factor=0.0)
    library.StableDiffusion3InpaintPipeline(
        vae=latents,
        text_encoder=make_projecting_encoder(tokenizer, layers=1).eval(),
        tokenizer=tokenizer,
        text_encoder_2=make_projecting_encoder(tokenizer, layers=1).eval(),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
        transformer=dit.make_transformer(3, 1, 16),
        scheduler=dit.make_scheduler(),
    ).save_pretrained(folder / "dit")
    write_example(folder / "dit" / "example", whole=True)
