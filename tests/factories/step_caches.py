"""Recorded steps without a model, and a store's files taken apart: for tests of the storage."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from maskfx.ir.programs.program import Tap
from maskfx.runtime.cache.step_cache import SiteStats, StepCache, keep_rows
from maskfx.runtime.cache.stores.store_entry import EntryKey
from maskfx.runtime.sites.masks import Masks


def key(template: str = "t", step: int = 0, **other: Any) -> EntryKey:
    fixed = {"model": "m", "revision": "r", "dtype": "float32", "numerics": "n", "schema": 1}
    return EntryKey(template=template, step=step, **{**fixed, **other})


def a_step(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sites: int = 24,
    width: int = 160,
    batch: int = 2,
) -> StepCache:
    """One recorded step with rows, statistics of two row sets, and outputs of several kinds."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    cache = StepCache(
        f"program-{seed}",
        {"batch": batch, "height": 4, "width": 6},
        dtype,
        [normal(batch, 4, 4, 6), None, 3, 0.1, "sample", (True, [1, 2]), {"a": normal(1)}],
        {"timestep": torch.tensor([0.7, 999.0]), "step": torch.tensor(7)},
        "fingerprint",
        [None, 1, 2.5, float("inf"), "text", (16, 16), [1, (2,)], torch.float16, True],
        masks=Masks.inside(torch.rand(4, 6, generator=draw) < 0.7),
        given=[normal(batch, 2), torch.tensor([7, 8]), None, False],
        adapters=(("digest", 0.5),),
    )
    taps = [
        Tap("keys", ("image",), (2, width // 2), dtype),
        Tap("values", ("image",), (2, width // 2), dtype),
        Tap("halo", ("grid0",), (width,), dtype),
        Tap("norm_a", ("image",), (32,), dtype, stats=4),
        Tap("norm_b", ("image",), (32,), dtype, stats=4),
        Tap("norm_c", ("grid0", "grid1"), (32,), dtype, stats=8),
    ]
    parts = [[normal(batch, sites, *tap.shape)] for tap in taps]
    keep_rows(cache, taps, parts)
    return cache


def same(got: Any, wanted: Any) -> bool:
    """Equal to the last bit, with the same types all the way down."""
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, Tensor):
        alike = got.dtype == wanted.dtype and got.shape == wanted.shape
        return alike and bits(got) == bits(wanted)
    if is_dataclass(wanted):
        return all(same(getattr(got, f.name), getattr(wanted, f.name)) for f in fields(wanted))
    if isinstance(wanted, dict):
        return list(got) == list(wanted) and all(same(got[k], wanted[k]) for k in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    return repr(got) == repr(wanted)


def bits(value: Tensor) -> bytes:
    plain = value.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def stats_like(values: Tensor) -> SiteStats:
    return SiteStats(values, values.sum(1, dtype=torch.float64), values[:, :1], torch.ones(1, 1))
