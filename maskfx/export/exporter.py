"""export(): writes a compiled denoiser, or the denoisers of a pipeline, for other runtimes.

A directory is written beside its final place and renamed when all of it is there and verified.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from maskfx.config import Settings
from maskfx.errors import InputError, MissingRequest
from maskfx.export.options import TRITON, Options
from maskfx.export.part_times import PartTimes
from maskfx.export.triton import write_repository
from maskfx.export.weight_files import WeightFiles
from maskfx.export.write_denoiser import DENOISER, Exported, write_denoiser
from maskfx.export.write_only import UncomparedDenoiser
from maskfx.ir.values import has_meta
from maskfx.pipelines.compile import is_compiled, pipeline_state_of
from maskfx.pipelines.parts.pipeline import Pipeline, is_pipeline
from maskfx.runtime.denoiser import CompiledDenoiser


def export(
    model: nn.Module | CompiledDenoiser | Pipeline,
    path: str | Path,
    *,
    format: str = "onnx",
    part: str = "all",
    operators: bool = False,
    opset: int | None = None,
    example_inputs: Mapping[str, object] | None = None,
    verify: bool | None = None,
    profile: Sequence[str] = (),
    layout: str = "plain",
    compare: bool = True,
    weights: str | Path | None = None,
) -> Exported:
    """Write the graphs of a denoiser, or of a pipeline's denoisers, for other runtimes.

    Numbers of rows, requests, text tokens and the size of the picture stay free where the capture
    left them free. Weights have the dtype that they have in the module.

    Args:
        model: a compiled pipeline that has run once, a `CompiledDenoiser` or a denoiser.
        path: the directory to write; it must not exist. For a pipeline it is a diffusers folder,
            with the graphs in place of the denoisers' weights.
        format: "onnx", "aoti" (a package of AOTInductor), "pt2" (a saved torch.export program),
            "tensorrt" (engines of TensorRT-RTX, built from ONNX) or "torch_tensorrt" (programs that
            Torch-TensorRT compiles, which needs a GPU).
        part: the graphs to write: "masked" (edits), "record", "dense" or "all". Without "record"
            no templates can be made, without "dense" no other calls run.
        operators: keep the operators of maskfx, which loop over requests. They need maskfx in the
            process that runs the graphs; without them standard operators mask other requests out.
        opset: of ONNX.
        example_inputs: arguments for a denoiser that has not been called, and to verify with.
        verify: compare each graph with the denoiser, at two sizes where sizes are free; of engines,
            the graphs that they are built from. By default where that is feasible: not without
            `compare`, nor in ONNX with bfloat16 where onnxruntime has only the CPU.
        profile: for engines, the ranges of sizes, such as "rows=64:1024:4096" (see `Profile`).
        layout: "triton" also writes a model repository of the Triton Inference Server, "triton/".
        compare: compare the capture of a denoiser that has not been called, and its program, with
            the denoiser. Without, the denoiser isn't run, which saves most of the time where a
            call takes minutes; the manifest states it (`not_compared`).
        weights: of a denoiser on the meta device, the safetensors file, index or folder that holds
            its weights. They are mapped, and copied from file to file.

    Raises:
        InputError: an argument is unknown, or `path` exists or has no room.
        CompileError: an operator can't be exported, or the graphs compute something else.
    """
    if not isinstance(path, str | Path):
        raise InputError(
            f"export: path is {path!r:.60}, expected a str or a Path; pass the directory to write"
        )
    options = Options(format, part, operators, opset, verify, tuple(profile), layout, compare)
    return export_whole(model, Path(path), options, example_inputs, weights)


def export_whole(
    model: object,
    path: Path,
    options: Options,
    inputs: Mapping[str, object] | None = None,
    weights: str | Path | None = None,
) -> Exported:
    """Write all or nothing of what `export` describes."""
    check_place(path)
    found = Exported(path)
    if is_pipeline(model):
        given = {"example_inputs=": inputs is not None, "weights=": weights is not None}
        given["compare=False"] = not options.compare
        if names := [name for name, there in given.items() if there]:
            raise InputError(
                f"export: {' and '.join(names)} applies to a denoiser, not to a pipeline; leave it "
                "out"
            )
        with written_whole(path) as folder:
            export_pipeline(model, folder, options, found)
            lay_out({name: folder / name for name in found.seconds}, folder, options)
        return found
    files = None if weights is None else WeightFiles(weights)
    with written_whole(path) as folder, weights_in(model, files):
        export_module(model, folder, options, found, inputs, files)
        lay_out({DENOISER: folder}, folder, options)
    return found


@contextmanager
def weights_in(model: object, files: WeightFiles | None) -> Iterator[None]:
    """Let a module have its weights from files; raise InputError if some are nowhere."""
    if files is None:
        if isinstance(model, nn.Module) and has_meta(model, ()):
            raise InputError(
                f"export({type(model).__name__}): its weights are on the meta device; give "
                "weights=, the safetensors files that hold them"
            )
        yield
        return
    if not isinstance(model, nn.Module):
        raise InputError(
            f"export({type(model).__name__}): weights= applies to a denoiser that isn't compiled; "
            "leave it out"
        )
    with files.in_place_of(model):
        yield


def export_module(
    model: object,
    folder: Path,
    options: Options,
    found: Exported,
    inputs: Mapping[str, object] | None,
    files: WeightFiles | None = None,
    name: str = DENOISER,
) -> None:
    """Compile a denoiser, if it isn't yet, and write it."""
    times = found.times[name] = PartTimes()
    with times.of("capture and passes"):
        denoiser = as_denoiser(model, inputs, options)
    write_denoiser(denoiser, folder, options, found, inputs, files, name)


def check_place(path: Path) -> None:
    """Raise InputError unless a directory can be made at `path`; leaves nothing there."""
    made: list[Path] = []
    try:
        if path.exists():
            raise InputError(f"export: {path} exists; remove it or give another path")
        for each in reversed([one for one in (path, *path.parents) if not one.exists()]):
            each.mkdir()
            made.append(each)
    except OSError as error:
        raise InputError(
            f"export: {path} can't be written: {error.strerror}; give a path in a directory that "
            "you may write to"
        ) from error
    finally:
        for each in reversed(made):
            each.rmdir()


def lay_out(parts: Mapping[str, Path], folder: Path, options: Options) -> None:
    """Write what the layout adds to the exported denoisers, which are in these directories."""
    if options.layout == TRITON:
        for name, directory in parts.items():
            write_repository(directory, folder / TRITON, name)


def as_denoiser(
    model: object, example_inputs: Mapping[str, object] | None, options: Options
) -> CompiledDenoiser:
    """Return the model as a denoiser that has been compiled for some call."""
    if isinstance(model, CompiledDenoiser):
        if not options.compare:
            raise InputError(
                f"export({type(model.module).__name__}): compare=False applies to a denoiser that "
                "isn't compiled yet; leave it out, or pass the module"
            )
        if example_inputs is not None:
            model.mask_shape(example_inputs)
        return model
    if not isinstance(model, nn.Module):
        raise InputError(
            f"export: expected a pipeline or a denoiser, got {type(model).__name__}; pass what "
            "maskfx.compile() returned"
        )
    if example_inputs is None:
        raise MissingRequest(
            f"export({type(model).__name__}): give example_inputs=, the arguments of a call, from "
            "which the graph is made"
        )
    if not options.compare:
        return UncomparedDenoiser(model, example_inputs, layouts=not options.in_onnx)
    return CompiledDenoiser(model, Settings(), None, example_inputs)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a directory beside `path` that becomes `path` at the end; after an error it is gone."""
    absent = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise InputError(
                f"export: {path.parent} has no room left; free some, or give a path on another disk"
            ) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in absent:
            with suppress(OSError):  # it holds something
                parent.rmdir()


def export_pipeline(pipe: Any, folder: Path, options: Options, found: Exported) -> None:
    """Write a diffusers folder whose denoisers are exported graphs."""
    if not is_compiled(pipe):
        raise InputError(
            f"export({type(pipe).__name__}): it isn't compiled; call maskfx.compile(pipe) and make "
            "one edit first"
        )
    denoisers = pipeline_state_of(pipe).denoisers
    parts = {name: one for name, one in denoisers.items() if hasattr(one.module, "config")}
    parts = {name: one for name, one in parts.items() if "." not in name}
    if not parts:
        raise InputError(
            f"export({type(pipe).__name__}): none of its denoisers {sorted(denoisers)} is a "
            "component of diffusers' classes; export a denoiser alone"
        )
    for name, denoiser in parts.items():
        own = folder / name
        own.mkdir()
        write_denoiser(denoiser, own, options, found, None, None, name)
        denoiser.module.save_config(own)  # type: ignore[operator]
    for name, component in pipe.components.items():
        if name not in parts and hasattr(component, "save_pretrained"):
            component.save_pretrained(folder / name)
    pipe.save_config(folder)
