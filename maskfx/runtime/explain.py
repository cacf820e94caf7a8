"""explain(): formats what the compiler did to a denoiser as readable tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, fx, nn

from maskfx.compiler.capture.arguments.roles import Argument
from maskfx.compiler.compile import Compilation, flat_graph
from maskfx.compiler.rank_twins import SplitProgram, split_program
from maskfx.config import Settings
from maskfx.ir.argument_checks import is_number, refuse
from maskfx.ir.geometry.lanes import grid_level
from maskfx.ir.modules.number_settings import spelled
from maskfx.ir.nodes import ancestors, module_path
from maskfx.ir.programs.head_sources import AttentionWay, ByHead
from maskfx.ir.programs.program import Program, SideGraph
from maskfx.runtime.backends.code_run import CodeElsewhere
from maskfx.runtime.batch import flops
from maskfx.runtime.batch.flops import RowSet
from maskfx.runtime.dense_ways import DenseWays
from maskfx.runtime.in_place import InPlace

RATIOS = (0.1, 0.2)
MEASURED = "Dense requests share steps in rows, or by one call of the module per size, as measured"
PATCH_BATCH = (
    f"{MEASURED}; no template is recorded. Requests with Quality(patches=) keep rows of their own."
)


class Explained(Protocol):
    """The properties of a compiled denoiser that explain() reads."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def settings(self) -> Settings: ...

    dense_ways: DenseWays
    in_place: InPlace
    code: CodeElsewhere

    @property
    def compilations(self) -> Sequence[Compilation]: ...

    @property
    def stays_alone(self) -> Sequence[str]: ...

    @property
    def loads(self) -> str: ...

    @property
    def replays(self) -> str: ...


def check_share(mask_ratio: object) -> None:
    if not is_number(mask_ratio) or not 0 <= mask_ratio <= 1:  # type: ignore[operator]
        refuse("explain()", "mask_ratio", mask_ratio, "a share of the picture, 0 to 1")


def explain(denoiser: Explained, mask_ratio: float = 0.1) -> str:
    """Describe each capture: passes, FLOPs by row set and mask, cache bytes, what runs in full."""
    check_share(mask_ratio)
    count = len(denoiser.compilations)
    name = type(denoiser.module).__name__
    lines = [f"{name}, mode {denoiser.settings.mode}, {count} capture{'' if count == 1 else 's'}"]
    if not count:
        lines += ["", "Nothing is captured yet: call it once, or compile with example_inputs=."]
    for index, compilation in enumerate(denoiser.compilations):
        lines += ["", f"Capture {index + 1} of {count}: {sizes_line(compilation)}"]
        lines += [f"  {line}".rstrip() for line in describe(compilation, mask_ratio)]
    ways = [f"  {line}" for line in denoiser.dense_ways.lines()]
    if denoiser.settings.mode == "patch_batch":
        lines += ["", PATCH_BATCH, *ways]
    elif ways:
        lines += ["", f"{MEASURED}, if their sizes differ:", *ways]
    lines += ["", f"Cached rows are loaded {denoiser.loads}."]
    lines += ["", f"Steps whose masks come again {denoiser.replays}."]
    for line in denoiser.code.lines():
        lines += ["", line]
    if in_place := denoiser.in_place.describe():
        lines += ["", in_place]
    for why in denoiser.stays_alone:
        lines += ["", f"Requests that compute everything don't share calls of the module: {why}."]
    return "\n".join(lines)


def describe(compilation: Compilation, mask_ratio: float) -> Iterator[str]:
    """Yield the lines that describe one capture."""
    for note in compilation.capture.notes:
        yield f"tried: {note}"
    if "samples" in compilation.reasons:
        yield f"tried: {compilation.reasons['samples']}"
    if compilation.capture.module is None:
        yield "No program: the whole denoiser runs dense in every step."
        yield "It couldn't be captured as a graph, so its FLOPs aren't known."
        return
    captured = flat_graph(compilation.capture.module)
    costs = flops.graph_flops(captured)
    batch = compilation.capture.pyramid.batch
    if compilation.program is None:
        yield "No program: the whole denoiser runs dense in every step."
        yield f"It costs {amount(sum(costs.values()) / batch)}FLOP per batch element and step."
        yield ""
        yield from refused_lines(compilation, captured, costs)
        return
    yield from pass_lines(compilation)
    yield ""
    yield from cost_lines(compilation, compilation.program, sum(costs.values()), mask_ratio)
    yield ""
    yield from cache_lines(compilation, compilation.program)
    yield ""
    yield from exchange_lines(compilation.program)
    yield ""
    yield from refused_lines(compilation, captured, costs)


# The capture and its passes.


def sizes_line(compilation: Compilation) -> str:
    capture = compilation.capture
    if capture.module is None:
        return "no graph"
    kind = "symbolic sizes" if capture.frozen is None else "frozen sizes"
    baked = [r for r, e in capture.symbols.items() if isinstance(e, int)]
    if capture.frozen is None and baked:
        kind += f" but for {', '.join(sorted(baked))}"
    if capture.fixed_batch is not None:
        kind += f", side graphs run at batch {capture.fixed_batch}"
    held = [leaf.path for leaf in capture.leaves if leaf.held]
    if held:
        kind += f", for these values of {', '.join(held)}, which sizes depend on"
    if capture.numbers:
        named = ", ".join(map(spelled, capture.numbers[:3]))
        more = f" and {len(capture.numbers) - 3} more" if len(capture.numbers) > 3 else ""
        kind += f", for any numbers in {named}{more}, which changed"
    sides = [leaf.path for leaf in capture.leaves if leaf.sides and not leaf.held]
    if sides:
        kind += f", for pictures whose sides are the numbers in {', '.join(sides)}"
    sizes = flops.capture_sizes(capture.pyramid)
    seen = [f"{role} {n}" for role, n in sizes.items() if role not in ("y", "x")]
    if "y" in sizes:
        seen.append(f"{sizes['y']} x {sizes['x']} sites")
    return f"{kind}; captured at {', '.join(seen)} of {sited(capture.leaves)}"


def sited(leaves: Sequence[Argument]) -> str:
    """Return the argument whose positions are the sites, which `roles=` overrides."""
    steps_first = sorted(leaves, key=lambda leaf: not leaf.step)
    found = (leaf.path for leaf in steps_first if not {"y", "tokens"}.isdisjoint(leaf.roles))
    return next(found, "no argument")


def pass_lines(compilation: Compilation) -> Iterator[str]:
    rows = [("pass", "rewrites", "ms", "nodes after")]
    for record in compilation.records:
        done = str(record.rewrites) if record.rewrites else "-"
        rows.append((record.name, done, f"{record.ms:.1f}", str(record.nodes)))
    yield from table(rows)
    refused = f", {len(compilation.reasons)} nodes refused" if compilation.reasons else ""
    yield f"compiled in {compilation.seconds:.1f} s{refused}; '-': the pass matched nothing"


# Costs of a step.


def cost_lines(
    compilation: Compilation, program: Program, whole: int, mask_ratio: float
) -> Iterator[str]:
    """Yield a table of FLOPs by row set, for all sites and for a few masks."""
    capture = compilation.capture
    assert capture.module is not None
    sizes = flops.capture_sizes(capture.pyramid)
    batch = sizes["batch"]
    ratios = sorted({*RATIOS, mask_ratio})
    every = [flops.square_sites(program.interface.pyramid, sizes, r) for r in (1.0, *ratios)]
    counts = [flops.row_flops(program, sites, batch) for sites in every]
    request = side_flops(compilation.request, capture.module)
    stepwise = side_flops(compilation.dense, capture.module)
    yield "FLOPs per batch element and step, m: share of masked sites"
    rows: list[Sequence[str]] = [("rows", "sites", "all", *[f"m={r:g}" for r in ratios])]
    for rowset in sorted(counts[0], key=row_order):
        sites = str(sum(every[0].count(s) for s in rowset)) if rowset else ""
        full = counts[0][rowset] / batch
        shares = [share(c[rowset] / batch, full) for c in counts[1:]]
        rows.append((row_name(rowset), sites, amount(full), *shares))
    if stepwise:
        each = stepwise / batch
        rows.append(("in full, every step", "", amount(each), *[share(each, each)] * len(ratios)))
    totals = [(sum(c.values()) + stepwise) / batch for c in counts]
    rows.append(("a step", "", amount(totals[0]), *[share(t, totals[0]) for t in totals[1:]]))
    yield from table(rows)
    nodes = compilation.request.nodes if compilation.request else 0
    yield f"once per request: {nodes} nodes, {amount(request / batch)}FLOP"
    yield f"the module itself, dense: {amount(whole / batch)}FLOP in every step"


def side_flops(side: SideGraph | None, captured: fx.GraphModule) -> int:
    if side is None:
        return 0
    return sum(flops.graph_flops(side.module.graph, captured.graph).values())


def cache_lines(compilation: Compilation, program: Program) -> Iterator[str]:
    sizes = flops.capture_sizes(compilation.capture.pyramid)
    sites = flops.square_sites(program.interface.pyramid, sizes, 1.0)
    held = flops.cache_bytes(program, sites, output_dtype(compilation))
    rowsets = sorted({rows for _, rows in held}, key=row_order)
    yield "Cache bytes per batch element and recorded step"
    rows: list[Sequence[str]] = [("kept", *[row_name(r) for r in rowsets], "together")]
    for kind in flops.KINDS:
        each = [held.get((kind, r), 0) for r in rowsets]
        if any(each):
            rows.append((kind, *[amount(n) if n else "" for n in each], amount(sum(each))))
    columns = [sum(n for (_, rows_), n in held.items() if rows_ == r) for r in rowsets]
    rows.append(("together", *[amount(n) for n in columns], amount(sum(columns))))
    yield from table(rows)


def output_dtype(compilation: Compilation) -> torch.dtype:
    """Return the dtype of the first output."""
    assert compilation.capture.module is not None
    output = next(n for n in compilation.capture.module.graph.nodes if n.op == "output")
    values = [n.meta.get("val") for n in output.all_input_nodes]
    return next((v.dtype for v in values if isinstance(v, Tensor)), torch.float32)


# Ranks.


def exchange_lines(program: Program) -> Iterator[str]:
    """Yield how often ranks exchange rows in a step, or why a step can't be split over them."""
    found = split_program(program)
    if isinstance(found, str):
        yield f"A step can't be split over ranks: {found}."
        return
    counts = [f"A step that is split over ranks has {times(found.exchanges)}"]
    names: dict[AttentionWay, str] = {"keys by rank": "keys by rank", "heads": "divided heads"}
    splits = {way: split_program(program, way) for way in names}
    for way, name in names.items():
        split = splits[way]
        if isinstance(split, SplitProgram) and split.attends(way):
            counts.append(f"{times(split.exchanges)} with {name}")
    yield ", ".join([*counts, f"one that records {times(found.recorded)}."])
    if isinstance(split := splits["heads"], SplitProgram) and split.attends("heads"):
        yield from head_lines(split)


def head_lines(split: SplitProgram) -> Iterator[str]:
    """Yield what heads ranks divide, and why some attentions gather keys beside them."""
    numbers = sorted({sent.heads for sent in split.exchanges.values() if isinstance(sent, ByHead)})
    yield (
        f"Heads that ranks may divide: {', '.join(map(str, numbers))} in an attention; ranks get "
        "unequal shares where their number doesn't divide these."
    )
    for why, count in sorted(Counter(split.gathered.values()).items()):
        yield f"Beside divided heads, keys are gathered in {count} of the attentions: {why}."


def times(exchanges: Mapping[int, object]) -> str:
    return f"{len(exchanges)} exchange{'' if len(exchanges) == 1 else 's'}"


# Nodes that run in full.


def refused_lines(
    compilation: Compilation, captured: fx.Graph, costs: Mapping[fx.Node, int]
) -> Iterator[str]:
    """Yield a table of the nodes that no rule narrows: module, FLOPs with ancestors, and reason."""
    reasons = compilation.reasons
    if not reasons:
        yield "Nothing runs in full in every step."
        return
    batch = compilation.capture.pyramid.batch
    nodes = {n.name: n for n in captured.nodes}
    dense = compilation.dense if compilation.program is not None else None
    made = {} if dense is None else {n.name: n for n in dense.module.graph.nodes}
    stepwise = set(nodes if dense is None else made)
    first = {n: why for n, why in reasons.items() if not follows(nodes.get(n), reasons)}
    yield "Runs in full in every step, with all that it is made from"
    rows: list[Sequence[str]] = [("node", "module", "FLOP", "why")]
    for name, why in first.items():
        node = nodes.get(name)
        cost = place = ""
        if node is not None:
            place = module_path(node)
            every = [n for n in ancestors([node]) if n.name in stepwise]
            cost = amount(sum(costs.get(n, 0) for n in every) / batch)
        elif name in made:  # a pass has written it
            place = module_path(made[name])
        rows.append((name, place, cost, why))
    yield from table(rows, left=(0, 1, 3))
    if len(first) < len(reasons):
        yield f"and {len(reasons) - len(first)} nodes whose inputs come from these"
    if dense is not None:
        total = sum(u for n, u in costs.items() if n.name in stepwise) / batch
        yield f"together {dense.nodes} nodes, {amount(total)}FLOP per batch element and step"


def follows(node: fx.Node | None, reasons: Mapping[str, str]) -> bool:
    """Return True if the node was refused only because one of its inputs was."""
    sources = node.all_input_nodes if node is not None else ()
    refused = [n.name for n in sources if n.name in reasons]
    return any(reasons[node.name].endswith(f" {n} are unknown") for n in refused if node)


# Formatting.


def row_name(rowset: RowSet) -> str:
    return " + ".join(rowset) or "no sites"


def row_order(rowset: RowSet) -> tuple[int, int, RowSet]:
    """Return a sort key: levels by number, then tokens, then row sets without sites."""
    level = grid_level(rowset[0]) if len(rowset) == 1 else None
    if level is not None:
        return 0, level, rowset
    return (1, len(rowset), rowset) if rowset else (2, 0, rowset)


def amount(number: float) -> str:
    """Format a number with three digits and a prefix: 1.23 G."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:
            scaled = number / limit
            return f"{scaled:.3g} {prefix}" if scaled < 999.5 else f"{scaled:.0f} {prefix}"
    return f"{number:.3g} "


def share(part: float, whole: float) -> str:
    return f"{amount(part)} {100 * part / whole:4.0f}%" if whole else amount(part)


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Iterator[str]:
    """Yield the rows as aligned columns, with a line under the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for index, row in enumerate(rows):
        cells = [
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
        if index == 0:
            yield "  ".join("-" * w for w in widths)
