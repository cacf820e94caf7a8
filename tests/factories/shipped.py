"""A folder like `maskfx/shipped/` with tiny pipelines that never learned anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from training import dit, unet, vae
from training.build import write_call, write_example
from training.text import learn_pieces, learn_tokenizer, make_encoder, make_t5


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
    write_call(folder, "unet")
    write_example(folder / "unet" / "example")


def ship_dit(folder: Path) -> None:
    """The same of the trained "dit"."""
    import diffusers

    torch.manual_seed(0)
    tokenizer = learn_tokenizer(folder / "tokenizer", scenes=30)
    pieces = learn_pieces(folder / "pieces", scenes=30)
    library: Any = diffusers
    latents: Any = vae.make_vae(4, (8, 8, 8, 8))
    latents.register_to_config(shift_factor=0.0)
    library.FluxFillPipeline(
        vae=latents,
        text_encoder=make_encoder(tokenizer, layers=1).eval(),
        tokenizer=tokenizer,
        text_encoder_2=make_t5(pieces, layers=1).eval(),
        tokenizer_2=pieces,
        transformer=awake(dit.make_transformer(1, 2, 1, 16)),
        scheduler=dit.make_scheduler(),
    ).save_pretrained(folder / "dit")
    write_call(folder, "dit")
    write_example(folder / "dit" / "example")


@torch.no_grad()
def awake(transformer: Any) -> Any:
    """Layers that do something, as if they had learned."""
    for weights in transformer.parameters():
        if not weights.any():
            weights.normal_(std=0.05)
    return transformer
