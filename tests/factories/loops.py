"""Sampling loops of diffusers' schedulers as generators: many may share the steps of one denoiser.

A loop yields the steps of one call, one for each branch, and is sent their results.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import maskfx
from bench.reuse import smooth_in_time
from maskfx.runtime.steps import AnyStep
from tests.factories.zoo import ZOO, Size

Loop = Generator[list[AnyStep], list[Any], Tensor]
Session = maskfx.EditSession

FLUX, UNET = "FluxTransformer2DModel", "UNet2DConditionModel-sd15"
GUIDANCE = 3.0


@cache
def smooth(name: str) -> maskfx.CompiledDenoiser:
    """A compiled denoiser whose output changes smoothly with time, as a trained one's does."""
    return maskfx.compile(smooth_in_time(ZOO[name].build()))


def together(denoiser: maskfx.CompiledDenoiser, *loops: Loop) -> list[Tensor]:
    """Run loops side by side, one ragged step for a call of each, and give what they end with."""
    wanted = {i: next(loop) for i, loop in enumerate(loops)}
    ends: dict[int, Tensor] = {}
    while wanted:
        results = iter(denoiser.step([s for steps in wanted.values() for s in steps]))
        for i, steps in list(wanted.items()):
            own = [next(results) for _ in steps]
            try:
                wanted[i] = loops[i].send(own)
            except StopIteration as ended:
                ends[i] = ended.value
                del wanted[i]
    return [ends[i] for i in range(len(loops))]


def called(
    session: Session | None, ordinal: int, inputs: Mapping[str, dict[str, Any]]
) -> Generator[list[AnyStep], list[Any], list[Tensor]]:
    """The outputs of one call's branches; dense without a session."""
    if session is None:
        results = yield [maskfx.DenseStep(i) for i in inputs.values()]
        return [r[0] for r in results]
    results = yield [session.ask(ordinal, b, i) for b, i in inputs.items()]
    pairs = zip(inputs, results, strict=True)
    return [session.take(ordinal, branch, result)[0] for branch, result in pairs]


def flux_loop(
    size: Size,
    steps: int,
    session: Session | None = None,
    seed: int = 0,
    blend: Tensor | None = None,
) -> Loop:
    """FlowMatchEulerDiscrete; `blend` is a mask outside of which the template's latents stay."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=list(np.linspace(1.0, 1 / steps, steps)))
    fixed = ZOO[FLUX].inputs(size, seed)
    noise = latents = fixed["hidden_states"]
    template = ZOO[FLUX].inputs(size, seed + 100)["hidden_states"]
    for ordinal, t in enumerate(scheduler.timesteps):
        now = (t / 1000).expand(size.batch)
        inputs = {**fixed, "hidden_states": latents, "timestep": now}
        [output] = yield from called(session, ordinal, {"": inputs})
        latents = scheduler.step(output, t, latents).prev_sample
        if blend is not None:
            sigma = scheduler.sigmas[ordinal + 1]
            kept = sigma * noise + (1 - sigma) * template
            latents = torch.where(blend[:, None], latents, kept)
    return latents


def a_scheduler(name: str, steps: int) -> Any:
    """One for v-prediction, which stays bounded with weights that were never trained."""
    import diffusers

    rest = {"skip_prk_steps": True} if name == "PNDM" else {}
    if name == "DDIM":
        rest = {"clip_sample": False}
    scheduler = getattr(diffusers, f"{name}Scheduler")(
        prediction_type="v_prediction", beta_schedule="scaled_linear", **rest
    )
    scheduler.set_timesteps(steps)
    return scheduler


def unet_loop(
    size: Size,
    scheduler: Any,
    session: Session | None = None,
    seed: int = 0,
    guidance: str = "none",
    ends: int | None = None,
) -> Loop:
    """Any scheduler, with guidance: "none", "branches" or "batch"; none from call `ends` on."""
    fixed = ZOO[UNET].inputs(size, seed)
    text = fixed["encoder_hidden_states"]
    empty = torch.zeros_like(text)
    latents = fixed["sample"] * scheduler.init_noise_sigma
    for ordinal, t in enumerate(scheduler.timesteps):
        scaled = scheduler.scale_model_input(latents, t)
        one = {**fixed, "sample": scaled, "timestep": t}
        how = guidance if ends is None or ordinal < ends else "none"
        if how == "none":
            [output] = yield from called(session, ordinal, {"cond": one})
        else:
            if how == "branches":
                pair = {"uncond": {**one, "encoder_hidden_states": empty}, "cond": one}
                free, bound = yield from called(session, ordinal, pair)
            else:
                both = {"sample": torch.cat([scaled] * 2)}
                both["encoder_hidden_states"] = torch.cat([empty, text])
                [output] = yield from called(session, ordinal, {"cond": {**one, **both}})
                free, bound = output.chunk(2)
            output = free + GUIDANCE * (bound - free)
        latents = scheduler.step(output, t, latents).prev_sample
    return latents
