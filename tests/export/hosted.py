"""The runtime's inputs of a batch, and what the host needs to make the same: for tests of the host.

A case of the zoo is compiled once for each process. The graphs are computed by the compiled
modules themselves, so that a test sees the host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from maskfx.compiler.compile import Compilation
from maskfx.compiler.lower import lower
from maskfx.export.describe import describe
from maskfx.export.exporter import export
from maskfx.export.graph_facts import compiled_graphs
from maskfx.export.graphs import picks_of
from maskfx.export.host import Edit, Host, Record, Recording
from maskfx.export.host.arguments import flattened
from maskfx.export.host.arrays import BITS, Array
from maskfx.export.host.stored import decode_step
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.quantize import LOSSLESS, Encoding
from maskfx.runtime.cache.serialize import encode
from maskfx.runtime.execution.side_graphs import run_side
from maskfx.runtime.programs.shared_programs import shared_programs
from tests.factories.zoo import ZOO, Case, Size

Inputs = Mapping[str, Any]


@cache
def denoiser_of(name: str, settings: tuple[str, ...] = ()) -> maskfx.CompiledDenoiser:
    """A case compiled with these settings switched on, after one recording of its first size."""
    chosen: dict[str, Any] = dict.fromkeys(settings, True)
    shared_programs().clear()  # one of another case may serve, with arguments of another type
    denoiser: maskfx.CompiledDenoiser = maskfx.compile(ZOO[name].build(), **chosen)
    denoiser.record(**ZOO[name].inputs(ZOO[name].sizes[0], 0))
    return denoiser


def skip_refused(name: str) -> None:
    """Skip the test of a model that export refuses."""
    found = compilation_of(denoiser_of(name), ZOO[name].inputs(ZOO[name].sizes[0], 0))
    if found.program is None:
        pytest.skip("export refuses it: no program computes a call as a whole")
    if picks_of(found):
        pytest.skip("export refuses it: rows are picked by data")


def compilation_of(denoiser: maskfx.CompiledDenoiser, inputs: Inputs) -> Compilation:
    """The compilation that serves a call, with its program in standard operators or as it is."""
    return denoiser._validator.inputs(inputs).compilation


def check_export(case: Case, path: Path) -> None:
    """Export a case as ONNX; its graphs agree with the module at two sizes."""
    found = export(case.build(), path, example_inputs=case.inputs(case.sizes[0], 0))
    verdicts = found.verdicts["denoiser"]
    assert {v.graph for v in verdicts} == {"edit", "record", "dense"}
    assert len({str(v.sizes) for v in verdicts}) == 2
    assert max(v.error for v in verdicts) < 1e-4


def lowered(compilation: Compilation) -> Compilation:
    program = compilation.program
    assert program is not None
    fields = {**vars(compilation), "program": lower(program)}
    return Compilation(**fields)


@cache
def manifest_of(name: str, settings: tuple[str, ...], size: Size, low: bool) -> dict[str, Any]:
    """The manifest of the compilation that serves a size."""
    denoiser = denoiser_of(name, settings)
    found = compilation_of(denoiser, ZOO[name].inputs(size, 0))
    found = lowered(found) if low else found
    return describe(found, compiled_graphs(found), name, denoiser.fingerprint())


# Values of torch as the host has them, and back.


def array(value: Any) -> Any:
    """A tensor as an array; bfloat16 as its bits."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(BITS)
    return value.detach().numpy()


def tensor(value: Array) -> Tensor:
    value = np.array(value)  # contiguous and writable, as torch wants it
    if value.dtype == BITS:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def arrays(inputs: Inputs) -> dict[str, Any]:
    """Arguments as the host gets them."""
    return {path: array(value) for path, value in flattened(inputs)}


def recording_of(cache_: maskfx.StepCache, encoding: Encoding = LOSSLESS) -> Recording:
    return decode_step(encode(cache_, encoding))


# The runtime's side.


def members_of(
    denoiser: maskfx.CompiledDenoiser, steps: Sequence[Any]
) -> tuple[Program, list[Member]]:
    """The members of a batch in the order of the steps, with the values of their inputs."""
    calls = denoiser._validator.calls(steps)
    program = calls[0].inputs.compilation.program
    assert program is not None
    members = denoiser._executor.members(program, calls)
    for call, member in zip(calls, members, strict=True):
        values, found = call.inputs.values, call.inputs.compilation
        assert found.request is not None
        assert found.dense is not None
        member.given["step"] = values
        for origin, side in (("request", found.request), ("dense", found.dense)):
            member.given[origin] = run_side(side, found.capture, values) if side.lanes else ()
    return program, members


def frame_inputs(program: Program, members: Sequence[Member]) -> dict[str, Tensor]:
    sites, batches = tuple(m.sites for m in members), tuple(m.batch for m in members)
    found = Frame(program.interface, Layout(sites, batches)).inputs(members)
    return dict(zip(program.interface.inputs, found, strict=True))


# The host's side.


def runner(compilation: Compilation) -> Callable[[str, Mapping[str, Array]], list[Array]]:
    """Computes graphs with the compiled modules."""
    program, capture = compilation.program, compilation.capture
    assert program is not None
    assert capture.module is not None
    sides = {"side_request": compilation.request, "side_dense": compilation.dense}
    names = [str(n.target) for n in capture.module.graph.nodes if n.op == "placeholder"]

    @torch.no_grad()
    def run(graph: str, inputs: Mapping[str, Array]) -> list[Array]:
        values = {name: tensor(value) for name, value in inputs.items()}
        if graph in ("edit", "record"):
            module = program.module if graph == "edit" else program.recording
            found = module(*(values[name] for name in program.interface.inputs))
            flat = found if graph == "edit" else (*found[0], *found[1])
            return [array(value) for value in flat]
        every: list[Any] = [
            values.get(name, capture.constants.get(i)) for i, name in enumerate(names)
        ]
        for i, leaf in enumerate(capture.leaves):
            if not leaf.tensor and isinstance(every[i], Tensor):
                every[i] = len(every[i])  # a number is given as the length of an input
        side = sides.get(graph)
        if side is not None:
            return [array(value) for value in side.module(*every)]
        assert capture.module is not None
        named = pytree.tree_unflatten(every, capture.in_spec)
        return [array(value) for value in pytree.tree_leaves(capture.module(**named))]

    return run


def host_of(name: str, settings: tuple[str, ...], size: Size, low: bool) -> tuple[Host, Any]:
    """The host of the compilation that serves a size, and what computes its graphs."""
    host = Host(manifest_of(name, settings, size, low))
    found = compilation_of(denoiser_of(name, settings), ZOO[name].inputs(size, 0))
    return host, runner(lowered(found) if low else found)


def host_inputs(host: Host, calls: Sequence[Edit | Record], run: Any, graph: str) -> Inputs:
    """The inputs that the host makes of a batch."""
    seen: dict[str, Inputs] = {}

    def watch(name: str, inputs: Mapping[str, Array]) -> list[Array]:
        seen[name] = dict(inputs)
        found: list[Array] = run(name, inputs)
        return found

    host.step(calls, watch)
    return seen[graph]
