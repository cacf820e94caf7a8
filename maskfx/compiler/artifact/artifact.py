"""A compilation as one file: graphs, interface, what its calls must be like, and constants.

The file is a safetensors file whose metadata holds the documents, so that a reader without PyTorch
can open it. Weights are not in it: they are found in the module, by path. What it computes is
checked: the hash of the loaded program must be that of the saved one. The captured graph, which
serves comparisons at new sizes and reports, is a document of its own that is read when it is used.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import xxhash
from torch import Tensor, fx, nn

from maskfx.compiler.artifact.documents import (
    CaptureDocument,
    CompilationDocument,
    ProgramDocument,
    SideDocument,
)
from maskfx.compiler.artifact.graphs import (
    Tensors,
    attach,
    graph_document,
    read_graph,
)
from maskfx.compiler.artifact.plain import Unsavable, decoded, encoded
from maskfx.compiler.artifact.specs import read_spec, spec_document
from maskfx.compiler.build_program import digest, recording_twin, taps_of
from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.capture.tracing.branches import Decisions
from maskfx.compiler.compile import Compilation
from maskfx.errors import CompileError
from maskfx.ir.many_objects import many_objects
from maskfx.ir.programs.program import Interface, Program, SideGraph, derive
from maskfx.ir.values import octets
from maskfx.passes.pipeline import PassRecord

log = logging.getLogger(__name__)

SCHEMA = 8  # raise it with every change of a document
READING = threading.Lock()  # several threads may ask for the graph of one capture
NAME, CAPTURED, HASH = "maskfx.program", "maskfx.capture", "xxh3_128"
PAIRS = ":complex128"  # ends the name of a constant that is stored as pairs of numbers


class UnreadableArtifact(CompileError):
    """A file isn't an artifact, is damaged, or is of another schema or module."""


# Writing.


def save(
    compilation: Compilation, weights: Mapping[str, Tensor], path: Path, module: nn.Module
) -> None:
    """Write a compilation to a file, atomically; one without a program keeps its reasons.

    Args:
        compilation: what `compile_capture` returned.
        weights: the denoiser's weights by path (`weights_of`); they are referred to, not written.
        path: the file; another file of this name is replaced.
        module: the denoiser, whose modules that stay whole are referred to.

    Raises:
        Unsavable: the compilation holds a value that can't be written.
    """
    packed = pack(compilation, weights, module)
    metadata = {
        NAME: packed.document,
        CAPTURED: packed.captured,
        HASH: packed.hash(),
        "schema": str(SCHEMA),
    }
    try:
        data = safetensors.torch.save(as_real(packed.constants), metadata)
    except KeyError as error:  # of a dtype
        raise Unsavable(f"safetensors holds no constants of {error}") from error
    write_whole(path, data)


@dataclass(frozen=True)
class PackedCompilation:
    """A compilation without its weights: JSON documents, and constants on the CPU by name.

    Args:
        document: everything but the captured graph.
        captured: the captured graph.
        constants: the tensors that both refer to.
    """

    document: str
    captured: str
    constants: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        held = sum(t.nbytes for t in self.constants.values())
        return len(self.document) + len(self.captured) + held

    def hash(self) -> str:
        found = xxhash.xxh3_128(self.document.encode())
        found.update(self.captured.encode())
        for name, value in sorted(self.constants.items()):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(octets(value).numpy().data)
        return found.hexdigest()


def pack(
    compilation: Compilation, weights: Mapping[str, Tensor], module: nn.Module
) -> PackedCompilation:
    """Return a compilation in the form that files hold; raise Unsavable if it has no such form."""
    tensors, captured = Tensors(weights, module), compilation.capture.module
    graph = None if captured is None else graph_document(captured, tensors, frozenset())
    document = compilation_document(compilation, tensors)
    held = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.constants.items()}
    return PackedCompilation(as_text(document), as_text(graph), held)


def as_text(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


def as_real(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which safetensors has every dtype: complex128 in pairs of numbers."""
    stored = {}
    for name, value in constants.items():
        if value.dtype == torch.complex128:
            name, value = name + PAIRS, torch.view_as_real(value.resolve_conj())
        stored[name] = value
    return stored


def as_complex(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `as_real` was given."""
    return {
        name.removesuffix(PAIRS): torch.view_as_complex(value) if name.endswith(PAIRS) else value
        for name, value in stored.items()
    }


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under another name and rename it: readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def compilation_document(compilation: Compilation, tensors: Tensors) -> CompilationDocument:
    program = compilation.program
    return {
        "capture": capture_document(compilation.capture, tensors),
        "program": None if program is None else program_document(program, tensors),
        "request": side_document(compilation.request, tensors),
        "dense": side_document(compilation.dense, tensors),
        "reasons": compilation.reasons,
        "records": [(r.name, r.rewrites, r.ms, r.nodes) for r in compilation.records],
        "seconds": compilation.seconds,
    }


def capture_document(capture: Capture, tensors: Tensors) -> CaptureDocument:
    fixed = {role: size for role, size in capture.symbols.items() if isinstance(size, int)}
    decisions = capture.decisions
    return {
        "has_graph": capture.module is not None,
        "leaves": encoded(capture.leaves),
        "in_spec": spec_document(capture.in_spec),
        "out_spec": spec_document(capture.out_spec),
        "pyramid": encoded(capture.pyramid),
        "constants": encoded(capture.constants, tensors.place),
        "fixed": fixed,
        "frozen": capture.frozen,
        "fixed_batch": capture.fixed_batch,
        "single": capture.single,
        "autocast": capture.autocast,
        "features": encoded(capture.features),
        "results": encoded(capture.results),
        "notes": capture.notes,
        "decisions": None
        if decisions is None
        else {
            "questions": graph_document(decisions.questions, tensors, frozenset()),
            "used": decisions.used,
            "sized": decisions.sized,
            "answers": decisions.answers,
        },
    }


def program_document(program: Program, tensors: Tensors) -> ProgramDocument:
    derived = frozenset(item.name for item in program.interface.derived)
    originals = dict(zip(program.recording.graph.nodes, program.module.graph.nodes, strict=True))
    return {
        "graph": graph_document(program.module, tensors, derived),
        "taps": [originals[node].name for node in taps_of(program.recording)],
        "interface": encoded(program.interface),
        "code": program.code,
        "origins": {name: tensors.name_of(value) for name, value in program.origins.items()},
    }


def side_document(side: SideGraph | None, tensors: Tensors) -> SideDocument | None:
    if side is None:
        return None
    return {
        "graph": graph_document(side.module, tensors, frozenset()),
        "lanes": encoded(side.lanes),
        "used": side.used,
        "nodes": side.nodes,
    }


# Reading.


def load(path: Path, weights: Mapping[str, Tensor], module: nn.Module) -> Compilation:
    """Read a compilation for a module with weights of these paths, shapes and types.

    With weights on the meta device the graphs are there to be read, not to be run.

    Raises:
        UnreadableArtifact: the file is damaged or of another schema, or doesn't fit the module.
    """
    try:
        with safetensors.safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            constants = as_complex({n: file.get_tensor(n) for n in file.keys()})  # noqa: SIM118
    except Exception as error:
        raise UnreadableArtifact(f"{path.name} can't be read: {error}; remove it") from error
    if metadata.get("schema") != str(SCHEMA):
        seen = metadata.get("schema")
        raise UnreadableArtifact(f"{path.name} has schema {seen}, this version writes {SCHEMA}")
    packed = PackedCompilation(metadata.get(NAME, ""), metadata.get(CAPTURED, ""), constants)
    if packed.hash() != metadata.get(HASH):
        raise UnreadableArtifact(f"{path.name} is damaged: its hash differs; remove it")
    return unpack(packed, weights, module, path.name)


def unpack(
    packed: PackedCompilation, weights: Mapping[str, Tensor], module: nn.Module, name: str
) -> Compilation:
    """Return a packed compilation for a module with these weights; `name` is its name in errors."""
    tensors = Tensors(weights, module)
    device = tensors.devices[0]
    tensors.constants |= {key: t.to(device, copy=True) for key, t in packed.constants.items()}
    try:
        with many_objects():
            return read_compilation(json.loads(packed.document), packed.captured, tensors)
    except UnreadableArtifact:
        raise
    except Exception as error:
        raise UnreadableArtifact(f"{name} doesn't fit this module: {error}") from error


def read_compilation(document: CompilationDocument, captured: str, tensors: Tensors) -> Compilation:
    return Compilation(
        read_capture(document["capture"], captured, tensors),
        None if document["program"] is None else read_program(document["program"], tensors),
        read_side(document["request"], tensors),
        read_side(document["dense"], tensors),
        document["reasons"],
        [PassRecord(*record) for record in document["records"]],
        document["seconds"],
    )


class ReadCapture(Capture):
    """A capture of a file, whose graph is read at its first use; most processes use it never."""

    captured: str
    tensors: Tensors

    def __getattr__(self, name: str) -> object:
        if name != "module":
            raise AttributeError(name)
        with READING:
            if "module" not in vars(self):
                self.module = self._read()
                del self.captured, self.tensors
        return self.module

    def _read(self) -> fx.GraphModule | None:
        try:
            with many_objects():
                return read_graph(json.loads(self.captured), self.tensors, {})
        except Exception as error:  # without it, other sizes get a capture of their own
            log.warning("the captured graph of a saved program is not used: %s", error)
            return None


def read_capture(document: CaptureDocument, captured: str, tensors: Tensors) -> Capture:
    decisions, has_graph = document["decisions"], document["has_graph"]
    found = ReadCapture(
        module=None,
        leaves=decoded(document["leaves"]),
        in_spec=read_spec(document["in_spec"]),
        out_spec=read_spec(document["out_spec"]),
        pyramid=decoded(document["pyramid"]),
        constants=decoded(document["constants"], tensors.at),
        symbols=dict(document["fixed"]),
        guards=None if has_graph else [],
        frozen=document["frozen"],
        fixed_batch=document["fixed_batch"],
        single=document["single"],
        autocast=document["autocast"],
        features=decoded(document["features"]),
        results=decoded(document["results"]),
        decisions=None
        if decisions is None
        else Decisions(
            read_graph(decisions["questions"], tensors, {}),
            decisions["used"],
            decisions["sized"],
            decisions["answers"],
        ),
        notes=document["notes"],
    )
    if has_graph:
        found.captured, found.tensors = captured, tensors
        del found.module  # read when it is asked for
    return found


def read_program(document: ProgramDocument, tensors: Tensors) -> Program:
    interface: Interface = decoded(document["interface"])
    origins = {name: tensors.of(place) for name, place in document["origins"].items()}
    made: dict[str, Tensor] = {
        item.name: derive(origins[item.origin], item.order, item.shape)
        for item in interface.derived
    }
    module = read_graph(document["graph"], tensors, made)
    for name, value in origins.items():  # the hash reads them under their path
        attach(module, name, value)
    nodes = {node.name: node for node in module.graph.nodes}
    taps = [nodes[name] for name in document["taps"]]
    code = document["code"]
    runs = not any(value.is_meta for value in tensors.weights.values())
    if runs and digest(module, interface) != code:
        raise UnreadableArtifact("the loaded program computes something else than the saved one")
    return Program(module, recording_twin(module, taps), interface, code, origins)


def read_side(document: SideDocument | None, tensors: Tensors) -> SideGraph | None:
    if document is None:
        return None
    module = read_graph(document["graph"], tensors, {})
    return SideGraph(module, decoded(document["lanes"]), document["used"], document["nodes"])
