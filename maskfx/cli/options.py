"""Options that several commands share, and the settings that they make with all other sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskfx.errors import InputError

if TYPE_CHECKING:
    from maskfx.serve.sources import Effective

Directory = Annotated[str, typer.Argument(metavar="DIR", show_default=False)]
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A diffusers folder or a hub id; without one, what ships inside.",
        show_default=False,
    ),
]
Config = Annotated[Path | None, typer.Option(help="A TOML file of settings.", show_default=False)]
More = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting, such as limits.images=2; --print-config lists them.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="As for serve.", show_default=False)
]


def given(help: str, *names: str) -> object:
    """Declare an option whose default comes from the settings."""
    return typer.Option(*names, help=help, show_default=False)


Prompts = Annotated[list[str] | None, given("May be repeated; default: a few.")]
Device = Annotated[str | None, given("cpu, cuda, cuda:1.")]
DataType = Annotated[str | None, given("float32, bfloat16 or float16.")]


def settled(named: Mapping[str, object], more: list[str] | None, config: Path | None) -> Effective:
    """Return the effective settings: the command line's, and all other sources."""
    from maskfx.serve.sources import configure

    options = dict(named)
    for each in more or ():
        key, equals, value = each.partition("=")
        if not equals:
            raise InputError(f"--set {each}: expected KEY=VALUE, such as limits.images=2")
        options[key.strip()] = value
    return configure(options, file=config)
