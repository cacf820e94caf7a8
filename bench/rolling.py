"""Cache operations of a step in which requests read and replace the rows of their own last step.

    OMP_NUM_THREADS=1 python -m bench.rolling --threads 1

No model runs: rows are random, in the shapes of a transformer whose stretches each keep keys,
values and the value between blocks. In every step each request computes a random half of its
patches: of each stretch another half, or of all stretches the same one (`sets`). Every step has new
masks, as a step that chooses patches has. Measured are all operations on cached rows in a step:
finding the sites of the masks (`sites`), finding and reading the rows that aren't computed
(`read`), and replacing those that are (`write`). The baseline is the same with buffers of each
request's own, so that every request costs a gather and a scatter per tap. `copies` is the time of
copying as many rows from one tensor to another, without any place. CPU time, because machines are
shared. Writes bench/results/rolling.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from bench import harness
from bench.report import columns, milliseconds, times
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.programs.program import STRETCH, Interface, Program, Region, Tap
from maskfx.ir.programs.sources import Loaded, Rest, Source
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, write_rows
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.cache.rows import Rows
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask, MaskCache

WANTED_SECONDS = 0.002
WIDTHS = (1, 64, 1536)  # index tables alone, a tiny model, SD3's rows
SETS = ("each", "alike")  # whether stretches compute other patches than each other
STEPS = 8  # different sets, one after another
BYTES = 1 << 34


def program_of(stretches: int, width: int) -> Program:
    """An interface of as many stretches; the graphs aren't used."""
    taps: dict[str, Tap] = {}
    inputs: dict[str, Source] = {}
    for n in range(1, stretches + 1):
        here, before = (f"image@{n}",), ("image" if n == 1 else f"image@{n - 1}",)
        sources: dict[str, Source] = {
            f"keys{n}": Rest(f"keys{n}", here),
            f"values{n}": Rest(f"values{n}", here),
            f"between{n}": Loaded(f"between{n}", before, here),
        }
        for name in sources:
            segments = before if name.startswith("between") else here
            taps[name] = Tap(name, segments, (width,), torch.float32)
        inputs |= sources
    regions = [Region(STRETCH, f"blocks.{n}") for n in range(stretches)]
    interface = Interface(Pyramid(1, segments={"image": 64}), inputs, taps=taps, regions=regions)
    empty = fx.GraphModule(torch.nn.Module(), fx.Graph())
    return Program(empty, empty, interface, f"{stretches} stretches of width {width}")


def recording(program: Program, sites: int) -> StepCache:
    rows: dict[str, Rows] = {
        name: torch.randn(1, sites, *t.shape) for name, t in program.interface.taps.items()
    }
    sizes = {"batch": 1, "tokens": sites}
    return StepCache(program.code, sizes, torch.float32, [torch.randn(1, sites, 4)], {}, rows=rows)


@dataclass
class Step:
    """One step's masks, of each request one per stretch and one of the output.

    `emitted` are the rows that a graph would have computed.
    """

    sites: list[list[Tensor]]
    emitted: list[Tensor]


class Side:
    """All requests in one pool, or each in its own."""

    def __init__(self, program: Program, requests: int, patches: int, together: bool) -> None:
        self.program, self.patches = program, patches
        pools = [RollingPool(BYTES, requests)] * requests if together else []
        pools = pools or [RollingPool(BYTES, 1) for _ in range(requests)]
        torch.manual_seed(0)
        self.caches = [pool.start(program, recording(program, patches)) for pool in pools]

    def run(self, step: Step, spent: dict[str, list[float]]) -> None:
        """Operations of one step; appends the seconds of each part."""
        known = MaskCache()  # stretches with equal sites have one mask
        masks = [[known.of(sites) for sites in own] for own in step.sites]
        found: list[Any] = []

        def sites() -> None:
            found.append(sites_of(self.program, masks, self.patches))

        def read() -> None:
            frame = Frame(self.program.interface, Layout(found[0], (1,) * len(found[0])))
            fetch = frame.fetch(self.members(found[0]))
            for name in self.program.interface.inputs:
                fetch(name)
            found.append(frame)

        def write() -> None:
            write_rows(found[1].layout, dict(enumerate(self.caches)), step.emitted)

        for part in (sites, read, write):
            start = time.process_time()
            part()
            spent[part.__name__].append(time.process_time() - start)

    def members(self, sites: Sequence[ActiveSites]) -> list[Member]:
        return [
            Member(own, 1, {}, cache, written=cache)
            for own, cache in zip(sites, self.caches, strict=True)
        ]


def sites_of(
    program: Program, masks: Sequence[Sequence[Mask]], patches: int
) -> tuple[ActiveSites, ...]:
    """Return the sites of each request."""
    size, pyramid = {"batch": 1, "tokens": patches}, program.interface.pyramid
    return tuple(ActiveSites(pyramid, size, own[0], dict(enumerate(own[1:], 1))) for own in masks)


def steps_of(program: Program, requests: int, patches: int, sets: str = "each") -> list[Step]:
    interface, draw = program.interface, torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        masks = []
        for _ in range(requests):
            halves = [
                torch.rand(patches, generator=draw).argsort() < patches // 2
                for _ in range(1 if sets == "alike" else len(interface.regions) + 1)
            ]
            masks.append((halves * (len(interface.regions) + 1))[: len(interface.regions) + 1])
        sites = sites_of(program, [list(map(Mask, own)) for own in masks], patches)
        emitted = []
        for tap in interface.taps.values():
            count = sum(own.active_count(tap.segments[0]) for own in sites)
            emitted.append(torch.randn(count, *tap.shape, generator=draw))
        found.append(Step(masks, emitted))
    return found


def measure(
    stretches: int, requests: int, patches: int, width: int, sets: str, rounds: int
) -> dict[str, Any]:
    """One width: both sides in turn, every round with other sets."""
    program = program_of(stretches, width)
    steps = steps_of(program, requests, patches, sets)
    sides = {
        "together": Side(program, requests, patches, True),
        "one by one": Side(program, requests, patches, False),
    }
    spent: dict[str, dict[str, list[float]]] = {
        name: {"sites": [], "read": [], "write": []} for name in sides
    }
    runs: dict[str, Callable[[int], Any]] = {
        name: lambda i, n=name: sides[n].run(steps[i % STEPS], spent[n])  # type: ignore[misc]
        for name in sides
    }
    targets = [torch.empty_like(rows) for rows in steps[0].emitted]
    runs["copies"] = lambda i: copy_twice(targets, steps[i % STEPS].emitted)
    harness.alternate(runs, 2)
    for parts in spent.values():
        for seconds in parts.values():
            seconds.clear()
    copies = harness.alternate(runs, rounds, time.process_time)["copies"]
    totals = {
        name: [sum(each) for each in zip(*parts.values(), strict=True)]
        for name, parts in spent.items()
    }
    assert_equal(list(sides.values()))
    return {
        "width": width,
        "sets": sets,
        "written_bytes": sum(rows.nbytes for rows in steps[0].emitted),
        "parts": {
            name: {part: harness.figure(seconds) for part, seconds in parts.items()}
            for name, parts in spent.items()
        },
        "seconds": {name: harness.figure(total) for name, total in totals.items()},
        "copies": harness.figure(copies),
        "times_faster": harness.ratio(totals["one by one"], totals["together"]),
        "wanted_seconds": WANTED_SECONDS,
        "in_time": harness.figure(totals["together"])["median"] < WANTED_SECONDS,
    }


def copy_twice(targets: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Copy as many rows as a step reads and replaces, which are half of all sites each."""
    for _ in range(2):
        for target, own in zip(targets, rows, strict=True):
            target.copy_(own)


def assert_equal(sides: Sequence[Side]) -> None:
    """Both sides hold the same rows after the same steps."""
    first, second = (side.caches for side in sides)
    for one, other in zip(first, second, strict=True):
        assert isinstance(one, RollingCache)
        for tap, rows in one.rows.items():
            assert torch.equal(rows, other.rows[tap])  # type: ignore[arg-type]


def rolling_updates(
    stretches: int = 24, requests: int = 16, patches: int = 64, rounds: int = 20
) -> dict[str, Any]:
    """Return what the cache operations of a step take, by the width of rows."""
    with torch.no_grad():
        rows = [
            measure(stretches, requests, patches, width, sets, rounds)
            for width in WIDTHS
            for sets in SETS
        ]
    sizes = {"stretches": stretches, "requests": requests, "patches": patches}
    return {**sizes, "taps": 3 * stretches, "rounds": rounds, "rows": rows}


def table(result: dict[str, Any]) -> str:
    parts = ["sites", "read", "write"]
    rows = [["width", "MB written", "sets", "side", *parts, "ms", "copies", "times faster"]]
    for row in result["rows"]:
        for name, found in row["parts"].items():
            together = name == "together"
            figures = [milliseconds(found[part]) for part in parts]
            beside = [milliseconds(row["copies"]), times(row["times_faster"])] * together
            size = [str(row["width"]), f"{row['written_bytes'] / 1e6:.1f}", row["sets"], name]
            total = milliseconds(row["seconds"][name])
            rows.append([*size, *figures, total, *(beside or ["", ""])])
    return columns(rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2 stretches, 3 requests, 2 rounds")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    sizes = {"stretches": 2, "requests": 3, "rounds": 2} if options.quick else {}
    found = rolling_updates(**{"rounds": options.rounds, **sizes})
    result = {**harness.header("bench.rolling", arguments), **found}
    harness.write_json(options.out / f"rolling{'-quick' if options.quick else ''}.json", result)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
