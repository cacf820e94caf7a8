"""ProgramCache: finds the capture and program that serve a call, or compiles and verifies new ones.

At each new picture size a program records and edits once, and its results are compared with the
module's. If they differ, the module runs dense at that size, and edits run the captured graph in
full.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.capture import capture
from maskfx.compiler.compile import Compilation, compile_capture
from maskfx.config import Settings
from maskfx.errors import InputError, SizesDisagree
from maskfx.ir.geometry.grids import mask_shape
from maskfx.ir.lru import LruCache
from maskfx.ir.objects import copied_tree, copy_tree
from maskfx.ir.programs.program import Program
from maskfx.ir.values import copies, has_meta, same_values
from maskfx.runtime.execution.dense_fallback import graph_in_full
from maskfx.runtime.execution.executor import BatchExecutor
from maskfx.runtime.programs.attempts import Attempt, narrowest, tried_in_vain
from maskfx.runtime.programs.buffer_states import BufferStates
from maskfx.runtime.programs.held_programs import HeldPrograms
from maskfx.runtime.programs.kept_tensors import kept_in_calls
from maskfx.runtime.programs.number_settings import NumberSettings
from maskfx.runtime.programs.program_files import ProgramFiles, compiled_as
from maskfx.runtime.programs.proof import (
    Size,
    disorder_of,
    every_other,
    fails,
    hides,
    run_module,
    same_ranks,
    size_of,
    uneven_mask,
)
from maskfx.runtime.programs.shared_programs import Sharing, shared_programs
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.steps import EditStep, RecordStep, ValidatedCall, ValidatedInputs

log = logging.getLogger(__name__)

DISORDERED = 32  # kept: sizes that a program has no rows for, by why


class ProgramCache:
    """Holds the compilations of one denoiser."""

    compares = True  # captures with the module
    layouts = True  # computes weights that a program reads in another layout

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        roles: Mapping[str, roles_.Roles] | None,
        executor: BatchExecutor,
        fingerprint: Callable[[], str],
    ) -> None:
        self.module, self.settings, self.roles = module, settings, roles
        self.every: list[Compilation] = []
        self.programs: dict[str, Program] = {}
        self._executor = executor
        self._verdicts: dict[Size, str] = {}  # what is wrong with a program; empty: nothing
        self._doubtful: set[Size] = set()  # verified with weights of zero, which hide errors
        self._without: dict[tuple[int, Size], Compilation] = {}
        self._disordered: LruCache[tuple[int, str], Compilation] = LruCache(DISORDERED)
        self._split: set[int] = set()  # compilations of calls that run sample by sample
        self._fingerprint = fingerprint
        self._sharing = Sharing(module, self._how, shared_programs())
        self._unsure: list[Compilation] = []  # taken from equal modules, as doubtful as sizes
        self._kept = ""  # where the module keeps tensors of its last call
        self._files: ProgramFiles | None = None
        self._noted: tuple[int, ...] = ()
        self._held = HeldPrograms()
        self.numbers = NumberSettings(module)
        self._copies: tuple[Path, ProgramFiles, tuple[int, ...]] | None = None

    def serving(
        self,
        inputs: dict[str, object],
        values: list[object],
        spec: pytree.TreeSpec,
        single: bool = False,
    ) -> Compilation:
        """Return the compilation that accepts these arguments; compile a new one if none does.

        With `single` they are of one sample, and so is the compilation.
        """
        if self.settings.programs is not None and not (self._files or self.numbers.inputs):
            self._files = self._read(Path(self.settings.programs))
        found = self._serving(inputs, values, spec, single)
        if (old := self._held.use(found)) is not None:
            self._drop(old)
        if self._files is not None and self.facts() != self._noted:
            self._noted = self.facts()
            sure = {k: v for k, v in self._verdicts.items() if k not in self._doubtful}
            self._files.note(self.every, sure)
        return found

    def save_to(self, directory: Path) -> bool:
        """Write what was compiled and verified; return False if nothing is new."""
        if self._copies is None or self._copies[0] != directory:
            self._copies = directory, self._files_in(directory), ()
        _, files, facts = self._copies
        if facts == self.facts():
            return False
        for compilation in self.every:
            files.save(compilation)
        sure = {k: v for k, v in self._verdicts.items() if k not in self._doubtful}
        files.note(self.every, sure)
        self._copies = directory, files, self.facts()
        return True

    def facts(self) -> tuple[int, ...]:
        """Return a value that changes when something is verified, quick enough for every call."""
        compared = sum(len(one.capture.verdicts) for one in self.every)
        return len(self.every), compared, len(self._verdicts), len(self._doubtful)

    def _read(self, directory: Path) -> ProgramFiles:
        """Take the compilations that were saved for this module."""
        files = self._files_in(directory)
        for compilation in files.load():
            self._add(compilation)
        self._verdicts.update(files.programs())
        return files

    def _files_in(self, directory: Path) -> ProgramFiles:
        return ProgramFiles(directory, self.module, self._how(), self._fingerprint)

    def _how(self) -> str:
        """Return the settings and roles that the module is compiled with."""
        return compiled_as(self.settings, self.roles)

    def _add(self, compilation: Compilation) -> None:
        self.every.append(compilation)
        self.numbers.noted()
        if (program := compilation.program) is not None:
            compilation.program = self.programs.setdefault(program.code, program)

    def _drop(self, old: Compilation) -> None:
        """Drop a compilation; a call that it served compiles it again."""
        gone = {id(one) for one in self.every if one.capture is old.capture}
        self.every = [one for one in self.every if id(one) not in gone]
        codes = {one.program.code for one in self.every if one.program is not None}
        self.programs = {code: one for code, one in self.programs.items() if code in codes}
        self._without = {key: one for key, one in self._without.items() if key[0] not in gone}
        self._disordered.keep_only({key for key in self._disordered if key[0] not in gone})
        self._split -= gone

    def _serving(
        self, inputs: dict[str, object], values: list[object], spec: pytree.TreeSpec, single: bool
    ) -> Compilation:
        found = self._first_serving(self.every, values, spec, single)
        if found is not None:
            return self._proven(found, values, spec)
        states = BufferStates(self.module)
        found = self._taken(inputs, values, spec, single)
        if found is None:
            found = self._compile(inputs, values, single)
            self._add(found)
            if self._files is not None:
                self._files.save(found)
            elif self._shares(values):
                self._sharing.give(found)
        found = self._proven(found, values, spec)
        states.restore(lambda: run_module(self.module, copy_tree(inputs)))
        return found

    def _first_serving(
        self,
        among: Iterable[Compilation],
        values: list[object],
        spec: pytree.TreeSpec,
        single: bool,
    ) -> Compilation | None:
        disagreement: InputError | None = None  # or sizes that are alike in other calls by chance
        for compilation in among:
            if spec != compilation.capture.in_spec or not same_ranks(compilation.capture, values):
                continue
            if not compilation.capture.of_one_sample if single else tried_in_vain(compilation):
                continue
            try:
                sizes = roles_.observed_sizes(compilation.capture.leaves, values)
            except SizesDisagree as error:
                if not error.role.startswith("text:"):  # other lengths get a separate capture
                    disagreement = error
                continue
            if compilation.capture.serves(self.module, spec, values, sizes):
                return compilation
        if disagreement is not None and fails(self.module, values, spec):
            raise disagreement
        return None

    def _shares(self, values: list[object]) -> bool:
        """Return True if captures may serve equal modules, and theirs this one."""
        dense = self.settings.mode == "dense" or bool(self._kept or self.numbers.inputs)
        return not dense and self._files is None and not has_meta(self.module, values)

    @torch.no_grad()
    def _taken(
        self, inputs: dict[str, object], values: list[object], spec: pytree.TreeSpec, single: bool
    ) -> Compilation | None:
        """Return what was compiled for an equal module, if it is right for this one."""
        if self.settings.mode != "dense":
            self._warm_tables(inputs, values)
        if not self._shares(values):
            return None
        for offer in self._sharing.offers(spec):
            try:
                found = self._first_serving([offer], values, spec, single)
            except SizesDisagree:  # its roles aren't this call's
                continue
            if found is None or not self._is_right(found, values, spec):
                continue
            self._sharing.take(found)
            self._add(found)
            if hides(self.module):
                self._unsure.append(found)
            return found
        return None

    def _is_right(
        self, compilation: Compilation, values: list[object], spec: pytree.TreeSpec
    ) -> bool:
        """Return True if nothing is wrong with a program at this size; else leave no verdict."""
        size = size_of(compilation, values)
        if size is None or not self._verdict(size, compilation, values, spec):
            return True
        del self._verdicts[size]
        self._doubtful.discard(size)
        return False

    @torch.no_grad()
    def _compile(
        self, inputs: dict[str, object], values: list[object], single: bool
    ) -> Compilation:
        """Capture and compile the module for these arguments, in the way that narrows most."""
        dense = self.settings.mode == "dense" or bool(self._kept)
        return narrowest(self._compiled, self.every, inputs, dense, single)

    def _compiled(self, inputs: dict[str, object], how: Attempt) -> Compilation:
        options = {**asdict(how), "compare": self.compares, "kept": self._kept}
        found = capture(self.module, inputs, self.roles, numbers=self.numbers.noted(), **options)
        plans, stretches = bool(self.settings.plans), self.settings.stretches
        return compile_capture(found, plans=plans, stretches=stretches, layouts=self.layouts)

    def forget(self) -> None:
        """Drop all captures; the next call captures the module again."""
        self.every.clear()
        self.programs.clear()
        self._verdicts.clear()
        self._doubtful.clear()
        self._without.clear()
        self._disordered.clear()
        self._split.clear()
        self._sharing.forget()
        self._unsure.clear()
        self._held.clear()
        self._files = self._copies = None

    def doubt(self) -> None:
        """Drop the verdicts reached while some weights were zero, because the weights changed."""
        for size in self._doubtful:
            self._verdicts.pop(size, None)
        for number in [n for n in self._without if n[1] in self._doubtful]:
            del self._without[number]
        self._doubtful.clear()
        for taken in self._unsure:
            taken.capture.verdicts.clear()
        self._unsure.clear()

    def stays_whole(self, compilation: Compilation, why: str) -> None:
        """Note why calls that a compilation serves don't run sample by sample; "" if they do."""
        if why:
            compilation.reasons["samples"] = f"one call per sample: {why}"
            self._split.discard(id(compilation))
        else:
            self._split.add(id(compilation))

    @property
    def serves(self) -> list[Compilation]:
        """Return the compilations that calls use: without their program where it was wrong."""
        wrong = {number for number, _ in self._without}
        right = {code for (code, *_), verdict in self._verdicts.items() if not verdict}
        kept = [
            one
            for one in self.every
            if one.program is None or id(one) not in wrong or one.program.code in right
        ]
        disordered = (one for _, one in self._disordered.items())
        every = [*kept, *self._without.values(), *disordered]
        return [one for one in every if id(one) not in self._split and not tried_in_vain(one)]

    def _proven(
        self, compilation: Compilation, values: list[object], spec: pytree.TreeSpec
    ) -> Compilation:
        """Verify the compilation's program at this size, once; return it without one if wrong."""
        size = size_of(compilation, values)
        if size is None:
            return compilation
        disorder = disorder_of(compilation, values)
        if disorder:
            return self._without_rows(compilation, disorder)
        known = size in self._verdicts
        verdict, number = self._verdict(size, compilation, values, spec), (id(compilation), size)
        if not verdict:
            return compilation
        if not known:
            log.warning("%s runs dense: %s", type(self.module).__name__, verdict)
        if number not in self._without:
            reasons = {**compilation.reasons, "program": verdict}
            marked = graph_in_full(self.module, self.roles, compilation, values, spec)
            self._without[number] = replace(
                compilation, program=None, reasons=reasons, marked=marked
            )
        return self._without[number]

    def _without_rows(self, compilation: Compilation, why: str) -> Compilation:
        """Return a compilation for calls of sizes that its program has no rows for."""
        key = id(compilation), why
        known = self._disordered.get(key)
        if known is not None:
            return known
        log.warning("%s runs dense: %s", type(self.module).__name__, why)
        reasons = {**compilation.reasons, "program": why}
        return self._disordered.put(key, replace(compilation, program=None, reasons=reasons))

    def _verdict(
        self, size: Size, compilation: Compilation, values: list[object], spec: pytree.TreeSpec
    ) -> str | None:
        """Return what is wrong with a program at a size, which is verified once; '' for nothing."""
        program = compilation.program
        if size not in self._verdicts and not has_meta(self.module, values):
            assert program is not None, "a size of a compilation without a program"
            sizes = roles_.observed_sizes(compilation.capture.leaves, values)
            with torch.no_grad(), self._executor.nothing_kept():
                self._verdicts[size] = self._prove(compilation, program, values, spec, sizes)
            if hides(self.module):
                self._doubtful.add(size)
        return self._verdicts.get(size)

    def _warm_tables(self, inputs: dict[str, object], values: list[object]) -> None:
        """Run the module before the first capture, in which its tables would hold fake tensors."""
        if not self.every and not has_meta(self.module, values):
            calls = 2 if self.compares else 1
            self._kept = kept_in_calls(
                self.module, lambda: run_module(self.module, copy_tree(inputs)), calls
            )

    def _prove(
        self,
        compilation: Compilation,
        program: Program,
        values: list[object],
        spec: pytree.TreeSpec,
        sizes: dict[str, int],
    ) -> str:
        """Compare one recording and one edit with the module; return what is wrong, or ''."""
        shape = mask_shape(sizes)
        mask = uneven_mask(shape)
        wanted = run_module(self.module, copied_tree(values, spec))
        inputs = copied_tree(values, spec)

        def run(step: RecordStep | EditStep, mask: Mask | None = None) -> Any:
            own = ValidatedInputs(copies(values), spec, sizes, compilation)
            regions = {} if mask is None else every_other(program.interface.regions, mask)
            return self._executor.run(program, [ValidatedCall(step, own, mask, regions)])[0]

        try:
            recorded, cache = run(RecordStep(inputs))
            edited = run(EditStep(inputs, mask, cache), Mask(mask))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.debug("a program fails", exc_info=True)
            return f"its rows fail: {type(error).__name__}: {error} at {sizes}"
        within = compilation.capture.rounding
        if same_values(recorded, wanted, within) and same_values(edited, wanted, within):
            return ""
        return f"its rows give another result than the module at {sizes}"
