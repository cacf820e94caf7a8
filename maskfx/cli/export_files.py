"""Export a model's denoisers from its files: no weights are loaded, nothing is run or compared."""

from __future__ import annotations

import shutil
from pathlib import Path

from maskfx.cli.first_calls import first_calls, without_weights
from maskfx.errors import InputError
from maskfx.export.exporter import check_place, export_module, lay_out, weights_in, written_whole
from maskfx.export.options import Options
from maskfx.export.weight_files import WeightFiles
from maskfx.export.write_denoiser import Exported
from maskfx.serve.model_folder import found


def export_files(model: str | None, dtype: str | None, out: Path, options: Options) -> Exported:
    """Write the graphs of a pipeline's denoisers, and copy its other parts.

    Args:
        model: the pipeline's folder, or the name of a shipped one.
        dtype: must be None: weights are copied as they are.
        out: the directory to write.
        options: how graphs are exported.
    """
    folder = found(model)
    if not isinstance(folder, Path):
        raise InputError(
            f"--no-compare exports a folder, {model} is a hub id; download it first (hf download)"
        )
    if dtype is not None:
        raise InputError(
            f"--no-compare copies the weights as they are, --dtype {dtype} can't apply; leave it "
            "out"
        )
    check_place(out)
    done = Exported(out)
    calls = first_calls(folder)
    if not calls:
        raise InputError(f"--no-compare: {folder} calls no denoiser that can be exported")
    with written_whole(out) as target:
        for name, given in calls.items():
            own = target / name
            own.mkdir()
            module, files = without_weights(folder, name), WeightFiles(folder / name)
            with weights_in(module, files):
                export_module(module, own, options, done, given, files, name)
            module.save_config(own)  # type: ignore[operator]
        lay_out({name: target / name for name in calls}, target, options)
        for part in sorted(folder.iterdir()):
            if part.name not in calls and not part.name.startswith("."):
                shutil.copytree(part, target / part.name) if part.is_dir() else shutil.copy(
                    part, target / part.name
                )
    return done
