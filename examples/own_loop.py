"""Edit without a pipeline and without a template: a sampling loop with an `EditSession`.

    .venv/bin/python examples/own_loop.py

The loop records some of its own calls; the others compute the masked sites only. Writes the result
to `demo-out/own_loop.png`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import maskfx
from maskfx.shipped import FOLDER

PROMPT, GUIDANCE, STEPS = "a shiny blue ball", 3.0, 12
EXAMPLE = FOLDER / "unet" / "example"
OUT = Path("demo-out")


@torch.no_grad()
def main() -> None:
    picture = Image.open(EXAMPLE / "picture.png").convert("RGB")
    drawn = Image.open(EXAMPLE / "mask.png").convert("L")
    pipe = maskfx.reference("unet")  # for its encoders, scheduler and VAE
    unet = maskfx.compile(pipe.unet)

    # what the UNet reads at every step: text, mask, and the latents of the unmasked part
    prompted, empty = pipe.encode_prompt(PROMPT, "cpu", 1, True)
    text = torch.cat([empty, prompted])
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 127.5 - 1
    edited = torch.from_numpy(np.array(drawn) >= 128)
    sites = torch.nn.functional.max_pool2d(edited[None, None].float(), 8)
    scale = pipe.vae.config.scaling_factor
    unmasked = pipe.vae.encode(pixels * ~edited).latent_dist.mode() * scale

    session = maskfx.EditSession(sites[0, 0] > 0, maskfx.ReusePolicy("steps", refresh=4))
    pipe.scheduler.set_timesteps(STEPS)
    latents = torch.randn(unmasked.shape, generator=torch.Generator().manual_seed(7))
    latents *= pipe.scheduler.init_noise_sigma
    for ordinal, time in enumerate(pipe.scheduler.timesteps):
        noisy = pipe.scheduler.scale_model_input(latents, time)
        inputs = {
            "sample": torch.cat([noisy, sites, unmasked], 1).repeat(2, 1, 1, 1),
            "timestep": time,
            "encoder_hidden_states": text,
            "return_dict": False,
        }
        [result] = unet.step([session.ask(ordinal, "both", inputs)])
        without, guided = session.take(ordinal, "both", result)[0].chunk(2)
        noise = without + GUIDANCE * (guided - without)
        latents = pipe.scheduler.step(noise, time, latents).prev_sample

    decoded = pipe.vae.decode(latents / scale).sample.clamp(-1, 1)
    joined = torch.where(edited, decoded, pixels)[0].permute(1, 2, 0)
    OUT.mkdir(exist_ok=True)
    Image.fromarray(((joined + 1) * 127.5).byte().numpy()).save(OUT / "own_loop.png")
    kinds = Counter(kind.value for kind in session.kinds.values())
    print(
        f"{STEPS} steps, {kinds['earlier']} of them computed {sites.mean():.0%} of the sites, "
        f"{STEPS - kinds['earlier']} all of them: {OUT / 'own_loop.png'}"
    )


if __name__ == "__main__":
    main()
