"""Export a model's denoisers, and print what was written and how far its results are off."""

from __future__ import annotations

import shutil
from pathlib import Path

from maskfx.cli.try_model import loaded
from maskfx.export.exporter import Options, export_whole
from maskfx.pipelines.call_defaults import NAME as CALL
from maskfx.serve.config import ServeSettings
from maskfx.serve.models.model_source import found


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
