"""Export a model's denoisers, and print what was written and how far its results are off."""

from __future__ import annotations

import shutil
from pathlib import Path

from maskfx.cli.export_files import export_files
from maskfx.cli.try_model import loaded
from maskfx.errors import InputError
from maskfx.export.exporter import check_place, export_whole
from maskfx.export.options import Options
from maskfx.export.write_denoiser import Exported
from maskfx.pipelines.call_defaults import NAME as CALL
from maskfx.serve.config import ServeSettings
from maskfx.serve.model_folder import found

MODES = ("mask_cache", "dense")
WHAT = {"capture": "the captured graph and its program were", "graphs": "the exported graphs were"}


def part_of(mode: str, part: str) -> str:
    """Return the part to export: the one given, or in the mode "dense" the dense graph."""
    if mode not in MODES:
        raise InputError(f"--mode {mode}: choose one of {', '.join(MODES)}")
    if mode != "dense":
        return part
    if part not in ("all", "dense"):
        raise InputError(f"--mode dense has no part {part!r}; leave --part out")
    return "dense"


def export_model(
    settings: ServeSettings, out: Path, options: Options, dtype: str | None = None
) -> int:
    """Write the graphs of a model that has made one edit, or of its files without a comparison."""
    if options.compare:
        done = export_run(settings, out, options)
    else:
        done = export_files(settings.model, dtype, out, options)
    print_report(done, options)
    return 0


def export_run(settings: ServeSettings, out: Path, options: Options) -> Exported:
    check_place(out)
    model = loaded(settings)
    try:
        done = export_whole(model.family.main.pipe, out, options)
    finally:
        model.close()
    source = found(settings.model)
    if isinstance(source, Path) and (source / CALL).is_file():
        shutil.copy(source / CALL, out / CALL)
    return done


def print_report(done: Exported, options: Options) -> None:
    """Print what was written, how long each part took, and what was compared or not, and why."""
    for name, times in done.times.items():
        print(f"{name}: {options.part} as {options.format} in {times.seconds:.0f} s")
        print("  " + ", ".join(f"{part} {wall:.1f} s" for part, wall in times.wall.items()))
        for verdict in done.verdicts.get(name, []):
            print(f"  {verdict}")
        for what, why in done.not_compared.get(name, {}).items():
            print(f"  {WHAT[what]} not compared with the denoiser: {why}")
    held = sum(path.stat().st_size for path in done.path.rglob("*") if path.is_file())
    print(f"{done.path}: {held / 1e6:.1f} MB")
