"""Baselines that skip blocks or steps by what they computed before: diffusers' and cache-dit's.

Each is put on the denoiser for one edit and taken off again. What a model can't take is an error
that gives the reason.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bench.quality import block_caching
from bench.quality.bed import Bed
from bench.quality.teacache import accumulated

# blocks whose outputs TaylorSeer may continue; its own patterns name no part of a UNet
UNET_BLOCKS = [r".*\.(resnets|transformer_blocks)\.\d+"]
DIT_BLOCKS = [r"(single_)?transformer_blocks\.\d+\.(attn|ff|ff_context|proj_mlp)"]


@dataclass(frozen=True)
class Cache:
    """`put_on(bed)` is a context in which the denoiser has the cache."""

    family: str
    put_on: Callable[[Bed], AbstractContextManager[None]]


def hooks() -> Any:
    """Diffusers' caches; imported late, and without types."""
    return importlib.import_module("diffusers.hooks")


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


def blocks_of(bed: Bed) -> list[nn.ModuleList]:
    """What caches of blocks ask for: lists of blocks, one after another, each a transformer's."""
    names = ("transformer_blocks", "single_transformer_blocks")
    found = [getattr(bed.denoiser, name) for name in names if hasattr(bed.denoiser, name)]
    if not found:
        raise ValueError(
            f"{type(bed.denoiser).__name__} is no row of transformer blocks; it has levels"
        )
    return found


def first_block(threshold: float) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        blocks_of(bed)
        config = hooks().FirstBlockCacheConfig(threshold)
        return hooked(bed, hooks().apply_first_block_cache, config)

    return put_on


@dataclass
class Magnitudes:
    """MagCache's ratios of a model: it can get them only after a run that measures them."""

    ratios: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def of(self, bed: Bed) -> list[float]:
        key = (id(bed), bed.steps)
        if key not in self.ratios:
            self.ratios[key] = self._measured(bed)
        return self.ratios[key]

    def _measured(self, bed: Bed) -> list[float]:
        found: list[float] = []
        tail = hooks().mag_cache.MagCacheBlockHook
        original = tail._perform_calibration_step

        def remember(hook: Any, state: Any, residual: torch.Tensor) -> None:
            original(hook, state, residual)
            found.append(state.calibration_ratios[-1])

        # more steps than come, so that it doesn't print them
        config = hooks().MagCacheConfig(num_inference_steps=bed.steps + 1, calibrate=True)
        tail._perform_calibration_step = remember
        try:
            with hooked(bed, hooks().apply_mag_cache, config):
                bed.calibrate()
        finally:
            tail._perform_calibration_step = original
        return found


MAGNITUDES = Magnitudes()


def magnitude(threshold: float, most: int) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        blocks_of(bed)
        config = hooks().MagCacheConfig(
            threshold,
            max_skip_steps=most,
            num_inference_steps=bed.steps,
            mag_ratios=MAGNITUDES.of(bed),
        )
        return hooked(bed, hooks().apply_mag_cache, config)

    return put_on


def taylor(interval: int) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        config = hooks().TaylorSeerCacheConfig(
            cache_interval=interval,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=UNET_BLOCKS if bed.name == "unet" else DIT_BLOCKS,
        )
        return hooked(bed, hooks().apply_taylorseer_cache, config)

    return put_on


def broadcast(interval: int) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        config = hooks().PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=interval,
            cross_attention_block_skip_range=interval,
            current_timestep_callback=lambda: bed.timestep,
        )
        return hooked(bed, hooks().apply_pyramid_attention_broadcast, config)

    return put_on


def faster(interval: int) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        blocks_of(bed)  # elsewhere it finds no attention, and reports nothing
        config = hooks().FasterCacheConfig(
            spatial_attention_block_skip_range=interval,
            spatial_attention_block_identifiers=(".*transformer_blocks.*attn",),
            attention_weight_callback=lambda _: 0.5,
            current_timestep_callback=lambda: bed.timestep,
            is_guidance_distilled=True,  # there is no other branch, which it might skip
        )
        return hooked(bed, hooks().apply_faster_cache, config)

    return put_on


def teacache(bound: float) -> Callable[[Bed], AbstractContextManager[None]]:
    def put_on(bed: Bed) -> AbstractContextManager[None]:
        return accumulated([one for row in blocks_of(bed) for one in row], bound, bed.steps)

    return put_on


PROFILES: dict[tuple[int, int], block_caching.Profile] = {}


def block_cache(bound: float) -> Callable[[Bed], AbstractContextManager[None]]:
    """A schedule that is the same for all pictures, by a profile of one run."""

    def put_on(bed: Bed) -> AbstractContextManager[None]:
        key = id(bed), bed.steps
        if key not in PROFILES:
            PROFILES[key] = block_caching.measure(bed.denoiser, bed.calibrate)
        return block_caching.scheduled(bed.denoiser, block_caching.schedule(PROFILES[key], bound))

    return put_on


def dual_block(**settings: Any) -> Callable[[Bed], AbstractContextManager[None]]:
    """cache-dit, where it is installed."""

    @contextmanager
    def put_on(bed: Bed) -> Iterator[None]:
        blocks = blocks_of(bed)
        cache_dit: Any = importlib.import_module("cache_dit")
        for name in logging.root.manager.loggerDict:
            if name.lower().startswith("cache"):
                logging.getLogger(name).setLevel(logging.ERROR)
        module: Any = bed.denoiser
        adapter = cache_dit.BlockAdapter(
            transformer=module,
            blocks=blocks,
            forward_pattern=[cache_dit.ForwardPattern.Pattern_1] * len(blocks),
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
    **{f"FirstBlockCache {t}": Cache("FirstBlockCache", first_block(t)) for t in (0.1, 0.2, 0.4)},
    **{
        f"MagCache {t} {n}": Cache("MagCache", magnitude(t, n))
        for t, n in ((0.06, 3), (0.24, 5), (1.0, 10))
    },
    **{f"TaylorSeer {n}": Cache("TaylorSeer", taylor(n)) for n in (2, 4, 8)},
    **{
        f"PyramidAttentionBroadcast {n}": Cache("PyramidAttentionBroadcast", broadcast(n))
        for n in (2, 4)
    },
    **{f"FasterCache {n}": Cache("FasterCache", faster(n)) for n in (2, 5)},
    **{
        f"DBCache {t}": Cache("DBCache", dual_block(residual_diff_threshold=t))
        for t in (0.08, 0.2, 0.5)
    },
    **{f"BlockCaching {t}": Cache("BlockCaching", block_cache(t)) for t in (0.1, 0.2, 0.4)},
    **{f"TeaCache rule {t}": Cache("TeaCache rule", teacache(t)) for t in (0.1, 0.3, 0.6)},
}
