"""Export a model's denoisers, and print what was written and how far its results are off."""

from __future__ import annotations

import shutil
from pathlib import Path

from maskfx.cli.try_model import loaded
from maskfx.errors import InputError
from maskfx.export.exporter import Options, export_whole
from maskfx.pipelines.call_defaults import NAME as CALL
from maskfx.serve.config import ServeSettings
from maskfx.serve.models.model_source import found

MODES = ("mask_cache", "dense")


def part_of(mode: str, part: str) -> str:
    """Return the part to export: the one given, or in the mode "dense" the dense graph."""
    if mode not in MODES:
        raise InputError(f"--mode {mode}: choose one of {', '.join(MODES)}")
    if mode != "dense":
        return part
    if part not in ("all", "dense"):
        raise InputError(f"--mode dense has no part {part!r}; leave --part out")
    return "dense"


def export_model(settings: ServeSettings, out: Path, options: Options) -> int:
    """Write the graphs of a model that has made one edit."""
    model = loaded(settings)
    try:
        done = export_whole(model.family.main.pipe, out, options)
    finally:
        model.close()
    source = found(settings.model)
    if isinstance(source, Path) and (source / CALL).is_file():
        shutil.copy(source / CALL, out / CALL)
    for name, seconds in done.seconds.items():
        print(f"{name}: {options.part} as {options.format} in {seconds:.0f} s")
        for verdict in done.verdicts.get(name, []):
            print(f"  {verdict}")
    held = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {held / 1e6:.1f} MB")
    return 0
