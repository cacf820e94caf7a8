"""Which settings of the server exclude each other where a worker's steps are shared by ranks."""

from __future__ import annotations

from maskfx.serve.config import ServeSettings


def unsupported(settings: ServeSettings) -> str | None:
    """Return why ranks can't be used with the other settings; None if they can."""
    if settings.ranks == 1:
        return None
    loads = "ranks read rows without a loader"
    reasons = {
        "model=fake": settings.fake and "the test model has no steps to share",
        f"device={settings.device}": settings.device != "cpu" and "ranks compute on the CPU",
        "overlap=on": settings.overlap == "on" and loads,
        "plans=on": settings.plans == "on" and loads,
        "link_bandwidth": settings.link_bandwidth is not None and loads,
    }
    for setting, why in reasons.items():
        if why:
            return f"ranks={settings.ranks} with {setting}: {why}; leave one of the two out"
    return None
