"""Baselines that skip blocks or steps by what they computed before: diffusers' and cache-dit's.

Each is put on the denoiser for one edit and taken off again. What can't be put on a model says so
with its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bench.quality_bed import WARM_UP, Bed

BOTH, TRANSFORMERS = ("unet", "dit"), ("dit",)
# blocks whose outputs TaylorSeer may continue; its own patterns name no part of a UNet
UNET_BLOCKS = [r".*\.(resnets|attentions)\.\d+"]
DIT_BLOCKS = [r"transformer_blocks\.\d+\.(attn|ff|ff_context)"]
BRANCHED = ["hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"]


@dataclass(frozen=True)
class Cache:
    """`put_on(bed)` is a context in which the denoiser has the cache."""

    family: str
    models: tuple[str, ...]
    put_on: Callable[[Bed], AbstractContextManager[None]]


def applied(cache: Cache, bed: Bed) -> AbstractContextManager[None]:
    return cache.put_on(bed)


@contextmanager
def hooked(bed: Bed, put_on: Callable[[Any, Any], None], config: Any) -> Iterator[None]:
    """One of diffusers' caches."""
    from diffusers.hooks.hooks import CacheContext, HookRegistry, _set_cache_context

    module = bed.denoiser
    try:
        put_on(module, config)
        HookRegistry.check_if_exists_or_initialize(module).invalidate_child_registries_cache()
        # both branches of guidance are one batch, so there is one context
        _set_cache_context(module, CacheContext("both"))
        yield
    finally:
        unhook(module)


def unhook(module: nn.Module) -> None:
    """Take every hook of diffusers off again."""
    for part in module.modules():
        registry: Any = part.__dict__.get("_diffusers_hook")
        if registry is not None:
            for name in reversed(list(registry._hook_order)):
                registry.remove_hook(name, recurse=False)
            part.__dict__.pop("forward", None)
            del part._diffusers_hook


def first_block(threshold: float) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

        return hooked(bed, apply_first_block_cache, FirstBlockCacheConfig(threshold))

    return put_on


@dataclass
class Magnitudes:
    """MagCache's ratios of a model: it can be told them only after a run that measures them."""

    ratios: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def of(self, bed: Bed) -> list[float]:
        key = (id(bed), bed.steps)
        if key not in self.ratios:
            self.ratios[key] = self._measured(bed)
        return self.ratios[key]

    def _measured(self, bed: Bed) -> list[float]:
        from diffusers.hooks import MagCacheConfig, apply_mag_cache, mag_cache

        found: list[float] = []
        original = mag_cache.MagCacheBlockHook._perform_calibration_step

        def remember(hook: Any, state: Any, residual: torch.Tensor) -> None:
            original(hook, state, residual)
            found.append(state.calibration_ratios[-1])

        # more steps than come, so that it doesn't print them
        config = MagCacheConfig(num_inference_steps=bed.steps + 1, calibrate=True)
        mag_cache.MagCacheBlockHook._perform_calibration_step = remember
        try:
            with hooked(bed, apply_mag_cache, config):
                bed.run(bed.case(WARM_UP))
        finally:
            mag_cache.MagCacheBlockHook._perform_calibration_step = original
        return found


MAGNITUDES = Magnitudes()


def magnitude(threshold: float, most: int) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        from diffusers.hooks import MagCacheConfig, apply_mag_cache

        config = MagCacheConfig(
            threshold,
            max_skip_steps=most,
            num_inference_steps=bed.steps,
            mag_ratios=MAGNITUDES.of(bed),
        )
        return hooked(bed, apply_mag_cache, config)

    return put_on


def taylor(interval: int) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        from diffusers.hooks import TaylorSeerCacheConfig, apply_taylorseer_cache

        config = TaylorSeerCacheConfig(
            cache_interval=interval,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=UNET_BLOCKS if bed.name == "unet" else DIT_BLOCKS,
        )
        return hooked(bed, apply_taylorseer_cache, config)

    return put_on


def broadcast(interval: int) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        from diffusers.hooks import (
            PyramidAttentionBroadcastConfig,
            apply_pyramid_attention_broadcast,
        )

        config = PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=interval,
            cross_attention_block_skip_range=interval,
            current_timestep_callback=lambda: bed.timestep,  # type: ignore[arg-type, return-value]
        )
        return hooked(bed, apply_pyramid_attention_broadcast, config)

    return put_on


def faster(interval: int) -> Callable[[Bed], AbstractContextManager[None]]:
    """On a UNet without its half for the guidance, which needs samples in named arguments."""

    def put_on(bed: Bed) -> AbstractContextManager[None]:
        from diffusers.hooks import FasterCacheConfig, apply_faster_cache

        config = FasterCacheConfig(
            spatial_attention_block_identifiers=(r"transformer_blocks.*attn",),
            unconditional_batch_skip_range=interval,
            tensor_format="BCHW",
            is_guidance_distilled=bed.name == "unet",
            current_timestep_callback=lambda: bed.timestep,  # type: ignore[arg-type, return-value]
            _unconditional_conditional_input_kwargs_identifiers=BRANCHED,
        )
        return hooked(bed, apply_faster_cache, config)

    return put_on


def dual_block(**settings: Any) -> Callable[[Bed], AbstractContextManager[None]]:
    """cache-dit, where it is installed."""

    @contextmanager
    def put_on(bed: Bed) -> Iterator[None]:
        import cache_dit

        module: Any = bed.denoiser
        adapter = cache_dit.BlockAdapter(
            transformer=module,
            blocks=module.transformer_blocks,
            forward_pattern=cache_dit.ForwardPattern.Pattern_1,
        )
        config = cache_dit.DBCacheConfig(
            Bn_compute_blocks=0,
            enable_separate_cfg=False,
            num_inference_steps=bed.steps,
            **{"Fn_compute_blocks": 1, "max_warmup_steps": 3, **settings},
        )
        cache_dit.enable_cache(adapter, cache_config=config)
        try:
            yield
        finally:
            cache_dit.disable_cache(module)

    return put_on


CACHES: dict[str, Cache] = {
    **{
        f"FirstBlockCache {t}": Cache("FirstBlockCache", BOTH, first_block(t))
        for t in (0.1, 0.2, 0.4)
    },
    **{
        f"MagCache {t} {n}": Cache("MagCache", BOTH, magnitude(t, n))
        for t, n in ((0.06, 3), (0.24, 5), (1.0, 10))
    },
    **{f"TaylorSeer {n}": Cache("TaylorSeer", BOTH, taylor(n)) for n in (2, 4, 8)},
    **{
        f"PyramidAttentionBroadcast {n}": Cache("PyramidAttentionBroadcast", BOTH, broadcast(n))
        for n in (2, 4)
    },
    **{f"FasterCache {n}": Cache("FasterCache", BOTH, faster(n)) for n in (2, 5)},
    **{
        f"DBCache {t}": Cache("DBCache", TRANSFORMERS, dual_block(residual_diff_threshold=t))
        for t in (0.08, 0.2, 0.5)
    },
    # differences of the first block summed up until they reach a bound
    **{
        f"TeaCache rule {t}": Cache(
            "TeaCache rule",
            TRANSFORMERS,
            dual_block(residual_diff_threshold=t, max_accumulated_residual_diff_threshold=t),
        )
        for t in (0.1, 0.3, 0.6)
    },
}
