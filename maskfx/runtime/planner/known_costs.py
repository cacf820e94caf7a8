"""Known costs: the costs of a denoiser's programs on this machine, calibrated once and kept.

In memory, and in a directory as one file per program, settings and machine, so that the next
process measures nothing.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from maskfx.errors import CacheError, InputError
from maskfx.ir import progress
from maskfx.ir.programs.program import Program
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.load_choice import is_for_stores
from maskfx.runtime.planner.calibration import calibrate, estimate, trial_batches
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.steps import EditStep

log = logging.getLogger(__name__)

FOLDER = "costs"
SECONDS = 10.0  # of a calibration, about; it runs once per program and machine
REPEATS = (
    5  # measured runs per batch, as far as there is time: fewer predict worse on busy machines
)


@dataclass
class KnownCosts:
    """Finds the costs of a program: those given, those on disk, or those that it measures now."""

    denoiser: CompiledDenoiser
    given: Costs | None = None
    _found: dict[str, Costs | None] = field(default_factory=dict)
    _origins: dict[str, str] = field(default_factory=dict)
    _again: set[str] = field(default_factory=set)  # programs whose recording was damaged

    def of(self, program: Program, step: EditStep, blocks: int) -> Costs | None:
        """Return the costs of a program with this number of blocks; None if measuring fails.

        `step` is an edit whose recording and inputs the calibration uses.
        """
        if self.given is not None:
            return self.given
        if program.code not in self._found:
            costs = self._read(program, step.mask.device, blocks)
            try:
                self._found[program.code] = costs or self._measured(program, step)
            except CacheError:  # of this recording: the next edit tries once more
                return None
        return self._found[program.code]

    def describe(self) -> str:
        """Return where the costs come from."""
        if self.given is not None:
            return "costs given"
        return "; ".join(dict.fromkeys(self._origins.values())) or "costs not measured yet"

    def _read(self, program: Program, device: torch.device, blocks: int) -> Costs | None:
        path = self._path(program)
        if path is None or not path.exists():
            return None
        try:
            costs = Costs.read(path)
        except InputError as error:
            log.warning("saved costs are not used: %s", error)
            return None
        if len(costs.slopes) != blocks:
            return None
        self._origins[program.code] = f"costs read from {path.name}"
        return costs

    def _measured(self, program: Program, step: EditStep) -> Costs | None:
        name = type(self.denoiser.module).__name__
        began = time.perf_counter()
        alone = replace(step, plan={}, wide={})
        try:
            with progress.work("calibration", f"calibration of {name}", 1):
                if is_for_stores(self.denoiser):  # plans by default may not delay an edit
                    costs = estimate(self.denoiser, alone)
                else:
                    costs = calibrate(
                        self.denoiser, trial_batches(self.denoiser, alone), REPEATS, SECONDS
                    )
        except Exception as error:  # an edit is never worse off than without plans
            if isinstance(error, CacheError) and program.code not in self._again:
                self._again.add(program.code)
                raise
            self._origins[program.code] = f"no plans: {type(error).__name__}: {error!s:.200}"
            log.warning("%s: costs can't be measured, so its loads aren't planned: %s", name, error)
            return None
        took = time.perf_counter() - began
        self._origins[program.code] = f"costs measured in {took:.1f} s"
        log.info(
            "%s: costs measured in %.1f s: a step takes %.1f ms and more, loads %.0f MB/s",
            name,
            took,
            1e3 * (sum(costs.fixed) + costs.around),
            1e-6 / costs.load_slope if costs.load_slope else float("inf"),
        )
        path = self._path(program)
        if path is not None and not is_for_stores(self.denoiser):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                costs.save(path)
            except OSError as error:
                log.warning("costs can't be saved to %s: %s", path, error.strerror)
        return costs

    def _path(self, program: Program) -> Path | None:
        settings, loader = self.denoiser.settings, self.denoiser.loader
        if settings.programs is None or loader is None:
            return None
        weights = next(self.denoiser.module.parameters(), torch.empty(0))
        how = replace(settings, programs=None)
        facts = (program.code, how, weights.dtype, loader.bandwidth, *machine(weights.device))
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()
        return Path(settings.programs) / FOLDER / f"{digest[:32]}.json"


def machine(device: torch.device) -> tuple[object, ...]:
    """Return the facts that a machine's speed depends on."""
    if device.type == "cuda":
        return torch.__version__, torch.cuda.get_device_name(device)
    return (
        torch.__version__,
        device.type,
        platform.machine(),
        cpu_name(),
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
    )


def cpu_name() -> str:
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
