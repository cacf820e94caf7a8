"""Footprint: bytes of a recorded step, counted from shapes: by kind, by region, by tap.

A tap is a value of the program whose rows a recording keeps. Counts what is held in memory:
values, scales, the sites that rows belong to, masks and outputs. Knows nothing of budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from maskfx.compiler.capture.tracing.light_run import convolved_elements
from maskfx.errors import MissingRequest
from maskfx.ir.geometry.lanes import is_image
from maskfx.ir.programs.program import Interface, Program
from maskfx.runtime.batch import flops
from maskfx.runtime.cache.quantize import LOSSLESS, Encoding, Format
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.explain import output_dtype
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.masks import Masks, Reach, find_reach

# In order of loss; "4bit" rounds rows that attentions read further than halos (see encoding_of).
ENCODINGS = {
    "lossless": LOSSLESS,
    "16bit": Encoding(rows=Format.FP16, stats=Format.FP16),
    "8bit": Encoding(rows=Format.INT8, stats=Format.FP16),
    "4bit": Encoding(rows=Format.INT8, stats=Format.FP16),
}


def encoding_of(name: str, interface: Interface) -> Encoding:
    """Return one of ENCODINGS for a program; "4bit" stores rows only attentions read in 4 bits."""
    found = ENCODINGS[name]
    if name != "4bit":
        return found
    kinds = flops.tap_kinds(interface)
    attended = [t for t, kind in kinds.items() if kind in (flops.KINDS[0], flops.KINDS[4])]
    return Encoding(found.rows, found.output, dict.fromkeys(attended, Format.INT4), found.stats)


def least_bytes(
    denoiser: CompiledDenoiser, inputs: Mapping[str, object], encoding: Encoding
) -> int:
    """Estimate the bytes of a recorded call from what its convolutions read, without a capture."""
    dtypes = [v.dtype for v in inputs.values() if isinstance(v, torch.Tensor)]
    each = dtypes[0].itemsize if encoding == LOSSLESS else 1
    return convolved_elements(denoiser.module, dict(inputs)) * each


@dataclass(frozen=True)
class Footprint:
    """Bytes of one batch element of one recorded step, for edits under these masks."""

    program: Program
    sites: ActiveSites  # all sites of a request of this size
    masks: Masks
    output: torch.dtype

    @staticmethod
    def of(denoiser: CompiledDenoiser, masks: Masks, program: Program | None = None) -> Footprint:
        """Return the footprint of a denoiser's program, by default of its first one."""
        found = [c for c in denoiser.compilations if c.program is not None]
        chosen = next((c for c in found if program is None or c.program is program), None)
        if chosen is None or chosen.program is None:
            raise MissingRequest(
                "no program, so what a recording keeps isn't known: call the denoiser once, or "
                "pass example_inputs to compile(); explain() prints whether all of it runs dense"
            )
        size, sizes = masks.ever.shape, {**flops.capture_sizes(chosen.capture.pyramid), "batch": 1}
        sizes.update({"tokens": size[0]} if len(size) == 1 else {"y": size[-2], "x": size[-1]})
        sites = ActiveSites(chosen.program.interface.pyramid, sizes, None)
        return Footprint(chosen.program, sites, masks, output_dtype(chosen))

    def taps(self, encoding: Encoding) -> dict[str, int]:
        """Return the bytes of each tap's rows."""
        interface = self.program.interface
        return {
            tap.name: self._counts[tap.name]
            * flops.site_bytes(tap.shape, tap.dtype, encoding.of(tap.name))
            for tap in interface.taps.values()
            if not tap.stats
        }

    def stats(self, encoding: Encoding) -> int:
        """Return the bytes of the statistics of all norms."""
        interface, found = self.program.interface, 0
        for tap in interface.taps.values():
            if tap.stats and interface.stats_index(tap.name) == 0:
                key = tap.segments, tap.stats
                kept = self._reach.active.get(key)
                count = self._all(tap.segments) if kept is None else len(kept)
                norms = len(interface.stats_taps(*key))
                found += flops.stats_bytes(tap, norms, count, encoding.stats)
        return found

    @property
    def alone(self) -> int:
        """Bytes of a step's outputs, all that is kept of a step that neighbouring steps serve."""
        lanes = self.program.interface.outputs
        outputs = (flops.lane_numel(lane, self.sites) for lane in lanes if lane is not None)
        return sum(outputs) * self.output.itemsize

    @cached_property
    def tables(self) -> int:
        """Bytes of the sites that rows belong to and of the masks, independent of the batch."""
        each = {id(s): s.nbytes for s in self._reach.rows.values()}
        own = sum(s.nbytes for s in self._reach.active.values())
        return sum(each.values()) + own + self.masks.nbytes

    def together(self, encoding: Encoding, keep: Collection[str] | None = None) -> int:
        """Return the total bytes; with `keep`, counting only these taps' rows."""
        rows = sum(n for tap, n in self.taps(encoding).items() if keep is None or tap in keep)
        return rows + self.stats(encoding) + self.alone + self.tables

    def kinds(self, encoding: Encoding) -> dict[str, int]:
        """Return the bytes by use."""
        uses, out = flops.tap_kinds(self.program.interface), Counter[str]()
        for tap, nbytes in self.taps(encoding).items():
            out[uses[tap]] += nbytes
        out["group statistics"] = self.stats(encoding)
        out["output"] = self.alone
        out["sites and masks"] = self.tables
        return {k: out[k] for k in (*flops.KINDS, "sites and masks") if out[k]}

    def levels(self, encoding: Encoding) -> dict[tuple[str, str], int]:
        """Return the bytes of rows by use and by the segments of their sites."""
        uses, out = flops.tap_kinds(self.program.interface), Counter[tuple[str, str]]()
        for tap, nbytes in self.taps(encoding).items():
            segments = filter(is_image, self.program.interface.taps[tap].segments)
            place = self.program.interface.pyramid.base_segments(tuple(segments))
            out[uses[tap], " + ".join(place)] += nbytes
        return dict(out)

    @cached_property
    def _reach(self) -> Reach:
        return find_reach(self.program.interface, self.sites.sizes, self.masks)

    @cached_property
    def _counts(self) -> dict[str, int]:
        reach, taps = self._reach.rows, self.program.interface.taps
        return {
            name: len(reach[name]) if name in reach else self._all(tap.segments)
            for name, tap in taps.items()
        }

    def _all(self, segments: tuple[str, ...]) -> int:
        return sum(self.sites.count(s) for s in segments if is_image(s))
