"""Which settings of the server exclude each other, or have no effect together."""

from __future__ import annotations

from collections.abc import Iterator

from maskfx.serve.config import ServeSettings


def conflict(settings: ServeSettings) -> str | None:
    """Return which settings can't be used together, why, and what to do; None if all can."""
    return next(conflicts(settings), None)


def conflicts(settings: ServeSettings) -> Iterator[str]:
    """Yield one line per conflict."""
    device, dtype = f"device={settings.device}", f"dtype={settings.dtype}"
    if settings.ranks > 1:
        loads = "ranks read rows without a loader"
        yield from refusals(
            f"ranks={settings.ranks}",
            {
                "model=fake": settings.fake and "the test model has no steps to share",
                "overlap=on": settings.overlap == "on" and loads,
                "plans=on": settings.plans == "on" and loads,
                "link_bandwidth": settings.link_bandwidth is not None and loads,
            },
        )
        if settings.inductor and not on_cpu(settings):
            yield from refusals(
                f"ranks={settings.ranks}, {device}",
                {"inductor=true": "ranks run Inductor's code on CPUs only"},
            )
    yield from rank_conflicts(settings)
    if settings.prepack:
        yield from refusals(
            "prepack=true",
            {
                "model=fake": settings.fake and "the test model has no weights",
                device: not on_cpu(settings) and "weights are packed for CPUs only",
                dtype: settings.dtype == "float16" and "only float32 and bfloat16 can be packed",
            },
        )
    if settings.inductor and settings.fake:
        yield from refusals("inductor=true", {"model=fake": "the test model has no graphs"})
    if settings.keep != "both" and not plans_loads(settings):
        yield (
            f"keep={settings.keep}: rows are not loaded by plans, so templates keep keys and "
            "values; set plans=on or a cache_dir, or leave keep out"
        )


def rank_conflicts(settings: ServeSettings) -> Iterator[str]:
    """Yield the conflicts of the settings that ranks have."""
    ranks, named = settings.ranks, settings.rank_devices
    if ranks == 1:
        for name in ("rank_devices", "rank_backend"):
            if getattr(settings, name):
                yield f"{name} without ranks: it is of ranks=2 or more; set ranks or leave it out"
    elif named and len(named) != ranks:
        yield (
            f"ranks={ranks} with {len(named)} rank_devices: name one for each rank, where several "
            "may be the same, or leave rank_devices out"
        )


def refusals(one: str, others: dict[str, str | bool]) -> Iterator[str]:
    """Yield the conflicts of one setting: with which others, each with the reason or False."""
    for other, why in others.items():
        if why:
            yield f"{one} with {other}: {why}; leave one of the two out"


def on_cpu(settings: ServeSettings) -> bool:
    return settings.device == "cpu"


def plans_loads(settings: ServeSettings) -> bool:
    """Return True if loads are planned, which `plans=auto` does where there is a link or a store.

    Ranks read rows without plans.
    """
    if settings.plans != "auto":
        return settings.plans == "on"
    there = not on_cpu(settings) or settings.cache_dir is not None
    return there and settings.overlap != "off" and settings.ranks == 1
