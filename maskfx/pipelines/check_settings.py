"""Checks of the arguments of `compile(pipe, ...)`: names, types, and that they don't contradict one
another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from os import PathLike
from typing import TypedDict

from maskfx.config import Settings
from maskfx.errors import InputError, SignatureError
from maskfx.pipelines.quality import Quality
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.cache.quantize import LOSSLESS
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.lora.registry import Adapters
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.templates.budget import Budget
from maskfx.runtime.templates.templates import KEEPS


class PipelineSettings(TypedDict, total=False):
    """The arguments of `maskfx.compile` that apply to pipelines only (see `compile_pipeline`)."""

    quality: Quality | str | None
    tiers: Tiers | None
    share: int
    keep: str
    budget: Budget | None
    costs: Mapping[str, Costs] | None
    adapters: Adapters | None
    patch_bytes: int
    remember: int


# argument: its types, what to pass
OBJECTS: dict[str, tuple[tuple[type, ...], str]] = {
    "loader": ((Loader,), "a maskfx.Loader, such as loader=maskfx.Loader()"),
    "programs": ((str, PathLike), 'the path of a directory, such as programs="programs/"'),
    "tiers": ((Tiers,), "a maskfx.Tiers, such as tiers=maskfx.Tiers(host_bytes=8 << 30)"),
    "budget": ((Budget,), "a maskfx.Budget, such as budget=maskfx.Budget(2 << 30, steps=50)"),
    "adapters": ((Adapters,), 'a maskfx.Adapters, such as adapters=maskfx.Adapters("loras/")'),
    "costs": ((Mapping,), "a dict of Costs by denoiser name, such as calibrate() returns"),
}
NUMBERS = {"share": 1, "patch_bytes": 0, "remember": 0}  # argument: the least number


def check_names(where: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise SignatureError for arguments that don't exist; suggest the nearest that do."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    near = [near for name in unknown for near in get_close_matches(name, known, 1)]
    hint = f"did you mean {', '.join(f'{name}=' for name in near)}? " if near else ""
    raise SignatureError(
        f"{where}: there is no argument {', '.join(f'{name}=' for name in unknown)}; {hint}It "
        f"accepts {', '.join(known)}; correct the name, or leave it out"
    )


def check_types(where: str, given: Mapping[str, object]) -> None:
    """Raise InputError for an argument that has another type than it needs; None is a default."""
    for name, value in given.items():
        types, wanted = OBJECTS.get(name, ((object,), ""))
        if value is not None and not isinstance(value, types):
            raise InputError(
                f"{where}: {name}={value!r:.60}: expected {wanted}, got {type(value).__name__}; "
                "pass one, or leave it out"
            )
        least = NUMBERS.get(name)
        if least is not None and (type(value) is not int or value < least):
            raise InputError(
                f"{where}: {name}={value!r:.60}: expected a whole number, {least} or more, got "
                f"{type(value).__name__}; pass one, or leave it out"
            )
        if name == "keep" and value not in KEEPS:
            raise InputError(f"{where}: keep={value!r:.60}: choose one of {', '.join(KEEPS)}")
    costs = given.get("costs")
    for name, value in costs.items() if isinstance(costs, Mapping) else ():
        if not isinstance(value, Costs):
            raise InputError(
                f"{where}: costs[{name!r}]={value!r:.60}: expected Costs, got "
                f"{type(value).__name__}; pass what calibrate() returns"
            )


def check_plans(
    costs: Mapping[str, Costs], keep: str, modules: Mapping[str, object], settings: Settings
) -> None:
    """Raise InputError for costs of other denoisers, and for what plans alone use without plans."""
    given = [name for name, one in (("costs", costs), ("keep", keep != "both")) if one]
    if given and settings.plans is False:
        raise InputError(
            f"{given[0]}= has no effect with plans=False; leave plans out, or use plans=True"
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
