"""Checks that the arguments of `compile(pipe, ...)` don't contradict one another."""

from __future__ import annotations

from collections.abc import Mapping

from maskfx.config import Settings
from maskfx.errors import InputError
from maskfx.runtime.cache.quantize import LOSSLESS
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.planner.costs import Costs


def check_costs(
    costs: Mapping[str, Costs], modules: Mapping[str, object], settings: Settings
) -> None:
    if costs and settings.plans is False:
        raise InputError(
            "costs= has no effect with plans=False; leave plans out, or use plans=True"
        )
    unknown = sorted(costs.keys() - modules.keys())
    if unknown:
        raise InputError(
            f"costs= names {unknown}, but the pipeline's denoisers are {sorted(modules)}; use "
            "their names"
        )


def check_budget(
    modules: Mapping[str, object], settings: Settings, tiers: Tiers, share: int, keep: str
) -> None:
    """Raise InputError if another argument decides what a budget does, or nothing is left to it."""
    where = "compile(pipe, budget=...)"
    if (share, keep) != (1, "both"):
        raise InputError(
            f"{where}: share={share} and keep={keep!r} are given too, but the budget decides both; "
            'leave them out, or allow=("share2", ...) in the budget'
        )
    if tiers.encoding != LOSSLESS:
        raise InputError(
            f"{where}: the tiers have an encoding, but the budget decides how rows are packed; "
            'give Tiers without encoding=, and allow=("16bit", ...) in the budget'
        )
    if settings.mode != "mask_cache":
        raise InputError(f'{where}: mode="{settings.mode}" records nothing; leave one of them out')
