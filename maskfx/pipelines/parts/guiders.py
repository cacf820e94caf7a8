"""Guiders: components of modular pipelines that split a step into guidance branches."""

from __future__ import annotations

from maskfx.pipelines.parts.pipeline import config_of


def is_guider(part: object) -> bool:
    """Return True for a component that splits a step into guidance branches and joins them.

    It counts the steps of a run and may keep values from one to the next.
    """
    return all(callable(getattr(part, n, None)) for n in ("prepare_models", "cleanup_models"))


def hooks_models(part: object) -> bool:
    """Return True for a guider that changes the denoiser for one of its branches."""
    kinds = [kind for kind in type(part).__mro__ if "cleanup_models" in vars(kind)]
    return is_guider(part) and len(kinds) > 1


def settings_of(part: object) -> dict[str, object]:
    """Return a guider's settings: numbers, switches and names, without what a run counts."""
    plain = (bool, int, float, str, type(None))
    own = {n: v for n, v in vars(part).items() if not n.startswith("_") and isinstance(v, plain)}
    return {**config_of(part), **own}
