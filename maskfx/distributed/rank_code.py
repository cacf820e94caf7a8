"""The code of a rank's graphs: which there is, and how a process without a step compiles more."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from maskfx.compiler.fuse import fused
from maskfx.distributed.messages import CodeUse, CompileRequest, CompileResult, WantedCode
from maskfx.distributed.rank_step import RankPrograms
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Cached
from maskfx.runtime.backends.code_run import CodeKey
from maskfx.runtime.backends.saved_code import save_code
from maskfx.runtime.denoiser import CompiledDenoiser

SELF, CHILDREN = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
LAST = 19  # the priority of a process that compiles: it leaves the cores to ranks


class RankCode:
    """What a rank knows of compiled code, and what its steps ran and lacked."""

    def __init__(self) -> None:
        self.places: dict[CodeKey, str] = {}
        self._failed: dict[CodeKey, str] = {}
        self._wanted: set[CodeKey] = set()
        self._ran = False

    def place(self, key: CodeKey) -> Path | None:
        if key in self._failed:
            return None
        if key in self.places:
            return Path(self.places[key])
        self._wanted.add(key)
        return None

    def ran(self, key: CodeKey) -> None:
        self._ran = True

    def fail(self, key: CodeKey, why: str) -> None:
        self._failed[key] = why

    def lines(self) -> list[str]:
        return []  # the process that asks has them

    def begin(self, places: Mapping[CodeKey, str]) -> None:
        """Note the code that there is at the begin of a step."""
        self.places = dict(places)
        self._wanted.clear()
        self._ran = False

    def use(self, denoiser: CompiledDenoiser) -> CodeUse:
        """Return what the step that ends ran and lacked."""
        wanted = []
        for key in self._wanted:
            terms = denoiser.adapters.terms(key.program)
            wanted.append(WantedCode(key, None if terms is None else terms.changed))
        return CodeUse(self._ran, tuple(wanted), dict(self._failed))


def compile_code(
    denoiser: CompiledDenoiser, programs: RankPrograms, request: CompileRequest
) -> CompileResult:
    """Compile the graph that is wanted, and write its code to the folder of the request."""
    os.setpriority(os.PRIO_PROCESS, 0, LAST)
    start = time.perf_counter()
    program, inputs = example_of(denoiser, programs, request)
    waited = [n for n, source in program.interface.inputs.items() if isinstance(source, Cached)]
    module, prepack = fused(program.module, pointwise=False), programs.settings.prepack
    save_code(Path(request.folder), program, module, inputs, waited, prepack)
    used = (resource.getrusage(who).ru_maxrss for who in (SELF, CHILDREN))
    return CompileResult(time.perf_counter() - start, 1024 * max(used))


def example_of(
    denoiser: CompiledDenoiser, programs: RankPrograms, request: CompileRequest
) -> tuple[Program, list[Tensor]]:
    """Return the program whose graph is compiled, and an example of its inputs."""
    key, changed = request.wanted
    denoiser.forget()  # programs are read again, with those that were saved since
    for step in request.steps:
        for program, frame, members in denoiser.prepared([step], changed, request.single):
            if program.code != key.program:
                continue
            if key.attention is None:
                return program, frame.inputs(members)
            return programs.example(program, frame, members, key.attention, key.joined)
    raise RuntimeError("none of the steps is computed by this program")
