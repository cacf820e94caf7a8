"""Submodules named by a keyword of Python, such as "in": torch.fx writes them as attributes."""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword


def format_target(base: str, target: str) -> str:
    """Return the code that reads an attribute; `getattr` where its name can't be written."""
    for name in target.split("."):
        plain = name.isidentifier() and not iskeyword(name)
        base = f"{base}.{name}" if plain else f'getattr({base}, "{name}")'
    return base


def allow_keyword_names() -> None:
    """Let torch.fx write graphs of such modules; its code for all other names stays the same."""
    vars(import_module("torch.fx.graph"))["_format_target"] = format_target
