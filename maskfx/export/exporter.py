"""export(): writes a compiled denoiser, or the denoisers of a pipeline, for other runtimes.

A directory is written beside its final place and renamed when all of it is there and verified.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from maskfx.compiler.artifact.artifact import save
from maskfx.compiler.artifact.graphs import weights_of
from maskfx.compiler.compile import Compilation
from maskfx.config import Settings
from maskfx.errors import InputError, MissingRequest
from maskfx.export.denoiser import PROGRAM
from maskfx.export.describe import describe
from maskfx.export.formats.onnx import OnnxWriter
from maskfx.export.formats.package import write_package, write_program
from maskfx.export.graph_set import ENDINGS
from maskfx.export.graphs import (
    PARTS,
    Graph,
    check_exportable,
    first_results,
    graphs_of,
    lowered,
)
from maskfx.export.manifest import write_manifest
from maskfx.export.profiles import read_ranges
from maskfx.export.tensorrt import ENGINES, import_tensorrt, replace_by_engines
from maskfx.export.torch_tensorrt import COMPILED, import_torch_tensorrt, replace_by_compiled
from maskfx.export.triton import write_repository
from maskfx.export.verify import Verdict, example_arguments, example_shapes, verify
from maskfx.ir import progress
from maskfx.pipelines.compile import is_compiled, pipeline_state_of
from maskfx.pipelines.pipeline import Pipeline, is_pipeline
from maskfx.runtime.denoiser import CompiledDenoiser

TRITON, LAYOUTS = "triton", ("plain", "triton")
FORMATS = ("onnx", "aoti", "pt2")
# formats of engines, which replace the graphs that they are built from
BUILT = {ENGINES: replace_by_engines, COMPILED: replace_by_compiled}
SPARE = 1.1  # of the bytes of the weights, for graphs and tables


@dataclass(frozen=True)
class Options:
    """How graphs are exported: see `export`."""

    format: str = "onnx"
    part: str = "all"
    operators: bool = False
    opset: int | None = None
    verify: bool = True
    profile: tuple[str, ...] = ()
    layout: str = "plain"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("format", self.format, (*FORMATS, *BUILT)),
            ("part", self.part, tuple(PARTS)),
            ("layout", self.layout, LAYOUTS),
        ):
            if value not in known:
                raise InputError(f"export: {name}={value!r}; choose one of {', '.join(known)}")
        if self.opset is not None and not self.in_onnx:
            raise InputError(f"export: opset= applies to onnx, not to {self.format}; leave it out")
        if self.profile and self.format not in BUILT:
            raise InputError(
                f"export: profile= applies to {' and '.join(BUILT)}, not to {self.format}; leave "
                "it out"
            )
        if self.layout == TRITON and not self.in_onnx:
            raise InputError(
                f"export: no backend of Triton runs {self.format}; export as onnx or {ENGINES}"
            )
        if self.format in BUILT:
            import_tensorrt() if self.format == ENGINES else import_torch_tensorrt()
            read_ranges(self.profile)
        if self.operators and self.in_onnx:
            raise InputError(
                "export: ONNX knows no operators of maskfx; leave operators= out, or export as "
                "aoti or pt2"
            )

    @property
    def written(self) -> str:
        """The format in which graphs are written and verified; engines are built from these."""
        return {ENGINES: "onnx", COMPILED: "pt2"}.get(self.format, self.format)

    @property
    def in_onnx(self) -> bool:
        return self.written == "onnx"


@dataclass
class Exported:
    """What was written: the directory, and by denoiser the seconds and errors of its graphs."""

    path: Path
    seconds: dict[str, float] = field(default_factory=dict)
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)


def export(
    model: nn.Module | CompiledDenoiser | Pipeline,
    path: str | Path,
    *,
    format: str = "onnx",
    part: str = "all",
    operators: bool = False,
    opset: int | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    verify: bool = True,
    profile: Sequence[str] = (),
    layout: str = "plain",
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
            the graphs that they are built from.
        profile: for engines, the ranges of sizes, such as "rows=64:1024:4096" (see `Profile`).
        layout: "triton" also writes a model repository of the Triton Inference Server, "triton/".

    Raises:
        InputError: an argument is unknown, or `path` exists or has no room.
        CompileError: an operator can't be exported, or the graphs compute something else.
    """
    options = Options(format, part, operators, opset, verify, tuple(profile), layout)
    return export_whole(model, Path(path), options, example_inputs)


def export_whole(
    model: object, path: Path, options: Options, inputs: Mapping[str, Any] | None = None
) -> Exported:
    """Write all or nothing of what `export` describes."""
    if path.exists():
        raise InputError(f"export: {path} exists; remove it or give another path")
    found = Exported(path)
    if is_pipeline(model):
        if inputs is not None:
            raise InputError(
                "export: example_inputs= applies to a denoiser, not to a pipeline; leave it out"
            )
        with written_whole(path) as folder:
            export_pipeline(model, folder, options, found)
            lay_out({name: folder / name for name in found.seconds}, folder, options)
        return found
    denoiser = as_denoiser(model, inputs)
    with written_whole(path) as folder:
        export_denoiser(denoiser, folder, options, found, inputs)
        lay_out({"denoiser": folder}, folder, options)
    return found


def lay_out(parts: Mapping[str, Path], folder: Path, options: Options) -> None:
    """Write what the layout adds to the exported denoisers, which are in these directories."""
    if options.layout == TRITON:
        for name, directory in parts.items():
            write_repository(directory, folder / TRITON, name)


def as_denoiser(model: object, example_inputs: Mapping[str, object] | None) -> CompiledDenoiser:
    """Return the model as a denoiser that has been compiled for some call."""
    if isinstance(model, CompiledDenoiser):
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
    return CompiledDenoiser(model, Settings(), None, example_inputs)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a directory beside `path` that becomes `path` at the end; after an error it is gone."""
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
        export_denoiser(denoiser, own, options, found, None, name)
        denoiser.module.save_config(own)  # type: ignore[operator]
    for name, component in pipe.components.items():
        if name not in parts and hasattr(component, "save_pretrained"):
            component.save_pretrained(folder / name)
    pipe.save_config(folder)


def export_denoiser(
    denoiser: CompiledDenoiser,
    folder: Path,
    options: Options,
    found: Exported,
    inputs: Mapping[str, Any] | None,
    name: str = "denoiser",
) -> None:
    """Write the graphs, the program and the manifest of one denoiser."""
    began = time.perf_counter()
    original = compilation_of(denoiser, options)
    check_exportable(original, options.part)
    chosen = original if options.operators else lowered(original)
    graphs = graphs_of(chosen, options.part)
    if options.in_onnx:  # one layout, so that one copy of a weight serves all graphs
        graphs = {each: graph.in_module_layout() for each, graph in graphs.items()}
    check_room(denoiser.module, graphs, folder, options)
    ending = ENDINGS[options.written]
    files = {each: f"{each}{ending}" for each in graphs}
    with progress.work("export", f"export of {type(denoiser.module).__name__}", len(graphs) + 1):
        write_graphs(graphs, {each: folder / file for each, file in files.items()}, options)
        progress.stage(len(graphs), "verification")
        save(original, weights_of(denoiser.module), folder / PROGRAM)
        (folder / PROGRAM).chmod(0o644)  # as the other files
        facts = {each: replace(g.facts, file=files[each]) for each, g in graphs.items()}
        kind, weights = type(denoiser.module).__name__, denoiser.fingerprint()
        write_manifest(describe(chosen, facts, kind, weights, versions(options)), folder)
        found.seconds[name] = time.perf_counter() - began
        if options.verify:
            found.verdicts[name] = verified(denoiser, folder, original, inputs)
    if options.format in BUILT:
        BUILT[options.format](folder, read_ranges(options.profile))


def write_graphs(graphs: Mapping[str, Graph], paths: Mapping[str, Path], options: Options) -> None:
    """Export the graphs and write them in the format.

    An edit's graph is the recording's without what a recording keeps, so one export serves both.
    """
    pair = ["record", "edit"] if {"record", "edit"} <= graphs.keys() else []
    groups = [pair] * bool(pair) + [[each] for each in graphs if each not in pair]
    writer = (
        OnnxWriter(next(iter(paths.values())).parent, options.opset) if options.in_onnx else None
    )
    done = 0
    for group in groups:
        progress.stage(done, " and ".join(group))
        done += len(group)
        program = graphs[group[0]].exported()
        results = {paths[each]: [o.name for o in graphs[each].facts.outputs] for each in group}
        if writer is not None:
            writer.write(program, results)
            continue
        for path, names in results.items():
            write = write_package if options.written == "aoti" else write_program
            write(first_results(program, len(names)), path)


def compilation_of(denoiser: CompiledDenoiser, options: Options) -> Compilation:
    """Return the compilation to export: the first with a program, if the part needs one."""
    known = [one for one in denoiser.compilations if one.capture.module is not None]
    programs = [one for one in known if one.program is not None]
    chosen = programs or (known if options.part == "dense" else [])
    if chosen:
        return chosen[0]
    name = type(denoiser.module).__name__
    if not denoiser.compilations:
        raise MissingRequest(
            f"export({name}): nothing was called yet; make one edit first, or give example_inputs="
        )
    raise InputError(
        f"export({name}): it runs dense, because {'; '.join(reasons(denoiser)) or 'it must'}; "
        'export part="dense" if there is a graph, or see explain()'
    )


def reasons(denoiser: CompiledDenoiser) -> Sequence[str]:
    return [text for one in denoiser.compilations for text in one.reasons.values()][:3]


def check_room(
    module: nn.Module, graphs: Mapping[str, Graph], folder: Path, options: Options
) -> None:
    """Raise InputError if the disk can't hold the weights."""
    held = sum(weight.nbytes for weight in weights_of(module).values())
    heavy = sum(name in ("edit", "record", "dense") for name in graphs)
    needed = int(
        SPARE * held * (1 if options.format == "onnx" else heavy + (options.format in BUILT))
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"export: {folder.parent} has {free / 1e9:.1f} GB free, and the graphs need about "
            f"{needed / 1e9:.1f} GB; give a path on another disk, or fewer parts"
        )


def versions(options: Options) -> dict[str, str]:
    """Return the versions of the packages that wrote the graphs, beside maskfx and torch."""
    from importlib.metadata import version

    names: tuple[str, ...] = ("onnx", "onnxscript") if options.in_onnx else ()
    names += ("tensorrt-rtx",) if options.format == ENGINES else ()
    found = {name: version(name) for name in names}
    if options.format == COMPILED:
        found["torch-tensorrt"] = str(import_torch_tensorrt().__version__)
    return found


def verified(
    denoiser: CompiledDenoiser,
    folder: Path,
    compilation: Compilation,
    inputs: Mapping[str, Any] | None,
) -> list[Verdict]:
    """Compare the written graphs with the module, at the example's size and another."""
    capture = compilation.capture
    sets = [example_arguments(capture, shapes) for shapes in example_shapes(capture)]
    if inputs is not None:
        sets[0] = dict(inputs)
    return verify(denoiser.module, folder, sets)
