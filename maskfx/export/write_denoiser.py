"""write_denoiser(): the graphs, the program and the manifest of one compiled denoiser."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from maskfx.compiler.artifact.artifact import save
from maskfx.compiler.artifact.graphs import weights_of
from maskfx.compiler.compile import Compilation
from maskfx.errors import InputError, MissingRequest
from maskfx.export.denoiser import PROGRAM
from maskfx.export.describe import describe
from maskfx.export.formats.onnx import OnnxWriter
from maskfx.export.formats.package import write_package, write_program
from maskfx.export.graph_set import ENDINGS
from maskfx.export.graphs import ExportedGraph, check_exportable, first_results, graphs_of, lowered
from maskfx.export.manifest import write_manifest
from maskfx.export.options import BUILT, Options
from maskfx.export.part_times import PartTimes
from maskfx.export.profiles import read_ranges
from maskfx.export.tensorrt import ENGINES
from maskfx.export.torch_tensorrt import COMPILED, import_torch_tensorrt
from maskfx.export.verify import Verdict, example_arguments, example_shapes, verify
from maskfx.export.weight_files import WeightFiles
from maskfx.ir import progress
from maskfx.runtime.denoiser import CompiledDenoiser

DENOISER = "denoiser"  # the name of one that is no component of a pipeline
SPARE = 1.1  # of the bytes of the weights, for graphs and tables


@dataclass
class Exported:
    """What was written: the directory, and facts by the name of the denoiser.

    Args:
        path: the directory.
        times: how long each part of its export took.
        verdicts: the errors of its graphs.
        not_compared: what wasn't compared with it ("capture", "graphs"), and why.
    """

    path: Path
    times: dict[str, PartTimes] = field(default_factory=dict)
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)
    not_compared: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        return {name: times.seconds for name, times in self.times.items()}


def write_denoiser(
    denoiser: CompiledDenoiser,
    folder: Path,
    options: Options,
    found: Exported,
    inputs: Mapping[str, object] | None,
    files: WeightFiles | None = None,
    name: str = DENOISER,
) -> None:
    """Write the graphs, the program and the manifest of one denoiser."""
    times = found.times.setdefault(name, PartTimes())
    with times.of("lowering"):
        original = compilation_of(denoiser, options)
        check_exportable(original, options.part)
        chosen = original if options.operators else lowered(original)
        graphs = graphs_of(chosen, options.part)
        if options.in_onnx:  # one layout, so that one copy of a weight serves all graphs
            graphs = {each: graph.in_module_layout() for each, graph in graphs.items()}
    check_room(denoiser.module, graphs, folder, options)
    ending = ENDINGS[options.written]
    names = {each: f"{each}{ending}" for each in graphs}
    without = found.not_compared[name] = not_compared(denoiser, original, options)
    with progress.work("export", f"export of {type(denoiser.module).__name__}", len(graphs) + 1):
        places = {each: folder / file for each, file in names.items()}
        write_graphs(graphs, places, options, times, files)
        progress.stage(len(graphs), "verification")
        with times.of("program and manifest"):
            save(original, weights_of(denoiser.module), folder / PROGRAM, denoiser.module)
            (folder / PROGRAM).chmod(0o644)  # as the other files
            facts = {each: replace(g.facts, file=names[each]) for each, g in graphs.items()}
            kind, print_ = type(denoiser.module).__name__, denoiser.fingerprint()
            document = describe(chosen, facts, kind, print_, versions(options), without)
            write_manifest(document, folder)
        if "graphs" not in without:
            with times.of("verification"):
                found.verdicts[name] = verified(denoiser, folder, original, inputs)
    if options.format in BUILT:
        with times.of("engines"):
            BUILT[options.format](folder, read_ranges(options.profile))


def not_compared(
    denoiser: CompiledDenoiser, compilation: Compilation, options: Options
) -> dict[str, str]:
    """Return what isn't compared with the denoiser before it is written, and why."""
    compared = compilation.capture.compared
    why = {
        "capture": "" if compared else "compare=False",
        "graphs": options.why_not_verified(denoiser.module, compared),
    }
    return {what: reason for what, reason in why.items() if reason}


def write_graphs(
    graphs: Mapping[str, ExportedGraph],
    paths: Mapping[str, Path],
    options: Options,
    times: PartTimes,
    files: WeightFiles | None,
) -> None:
    """Export the graphs and write them in the format.

    An edit's graph is the recording's without what a recording keeps, so one export serves both.
    """
    pair = ["record", "edit"] if {"record", "edit"} <= graphs.keys() else []
    groups = [pair] * bool(pair) + [[each] for each in graphs if each not in pair]
    folder = next(iter(paths.values())).parent
    writer = OnnxWriter(folder, options.opset, files, times) if options.in_onnx else None
    done = 0
    for group in groups:
        progress.stage(done, " and ".join(group))
        done += len(group)
        with times.of("torch.export"):
            program = graphs[group[0]].exported()
        results = {paths[each]: [o.name for o in graphs[each].facts.outputs] for each in group}
        if writer is not None:
            writer.write(program, results)
            continue
        with times.of("graphs"):
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
    module: nn.Module, graphs: Mapping[str, ExportedGraph], folder: Path, options: Options
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
    inputs: Mapping[str, object] | None,
) -> list[Verdict]:
    """Compare the written graphs with the module, at the example's size and another."""
    capture = compilation.capture
    sets = [example_arguments(capture, shapes) for shapes in example_shapes(capture)]
    if inputs is not None:
        sets[0] = dict(inputs)
    return verify(denoiser.module, folder, sets)
