"""Compiles a capture to a program by running the passes; parts of it may stay dense."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from maskfx.compiler.annotate import MarkedGraph, fresh_copy
from maskfx.compiler.build_program import build
from maskfx.compiler.capture.captured import Capture
from maskfx.ir import progress
from maskfx.ir.geometry.lanes import NotLaned
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.many_objects import many_objects
from maskfx.ir.nodes import is_write
from maskfx.ir.programs.program import Interface, Program, SideGraph
from maskfx.passes.context import NoRows, PassContext, Unsupported
from maskfx.passes.inline_regions import inline_regions
from maskfx.passes.pipeline import PIPELINE, Pass, PassRecord, run_passes

log = logging.getLogger(__name__)

ROUNDS = 64  # runs of the passes, each with one more node that runs dense


@dataclass
class Compilation:
    """The result of compiling one capture: a program on rows, or the reasons why there is none.

    Args:
        request, dense: side graphs that run in full, once per request and in every step.
        reasons: by node name, why a node runs dense.
        records: what each pass did.
        seconds: duration of the compilation.
    """

    capture: Capture
    program: Program | None
    request: SideGraph | None
    dense: SideGraph | None
    reasons: dict[str, str] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)
    seconds: float = 0.0
    marked: MarkedGraph | None = None  # run by edits if the program was wrong


@many_objects()
def compile_capture(
    capture: Capture,
    passes: tuple[Pass, ...] = PIPELINE,
    keep: Callable[[str, fx.Graph], None] | None = None,
    plans: bool = False,
    stretches: bool = False,
    layouts: bool = True,
) -> Compilation:
    """Run the passes; mark each node that no rule narrows to run dense, and run them again.

    Args:
        capture: the captured graph; it is copied.
        passes: the passes in order.
        keep: called with name and graph after each pass that rewrote something.
        plans, stretches: see `maskfx.config.Settings`.
        layouts: see `PassContext`.
    """
    start = time.perf_counter()
    if capture.module is None:
        return Compilation(capture, None, None, None, {"capture": "; ".join(capture.notes[-3:])})
    written = written_buffers(capture.module.graph)
    if written:
        why = (
            f"each run writes into {', '.join(written)}, so that steps would depend on one another"
        )
        return Compilation(capture, None, None, None, {"compiler": why})
    reasons: dict[str, str] = {}
    progress.stage(1, "passes")
    for _ in range(ROUNDS):
        module = fresh_copy(capture.module)
        ctx = PassContext(
            interface=Interface(pyramid=copy.deepcopy(capture.pyramid)),
            symbols=capture.symbols,
            dense=dict(reasons),
            plans=plans,
            stretches=stretches,
            layouts=layouts,
        )
        try:
            records = run_passes(module.graph, ctx, passes, keep)
        except Unsupported as refused:
            reasons.update(ctx.dense)
            if not note_refusal(reasons, refused):
                break
            continue
        except NotLaned as refused:  # a size that no pass can work with
            reasons["compiler"] = str(refused)
            log.debug("runs dense: %s", refused)
            break
        except Exception as error:
            log.exception("the compiler failed; the denoiser runs dense")
            reasons["compiler"] = f"{type(error).__name__}: {error}"
            break
        if not ctx.interface.outputs:  # nothing has rows
            reasons.update(ctx.dense)
            reasons["compiler"] = "no operator on rows leads from the picture to a result"
            break
        program = build(module, ctx, capture.module)
        capture.read_numbers(ctx.pyramid)
        progress.stage(2, "comparison with the module")
        return Compilation(
            capture,
            program,
            ctx.sides["request"],
            ctx.sides["dense"],
            dict(ctx.dense),
            records,
            time.perf_counter() - start,
        )
    else:
        reasons["compiler"] = (
            f"stopped after {ROUNDS} runs of the passes: each refused one more node; a rule for "
            "one of these nodes may let the others follow"
        )
    return Compilation(capture, None, None, None, reasons, [], time.perf_counter() - start)


def written_buffers(graph: fx.Graph) -> list[str]:
    """Return the names of the module's tensors that a captured graph writes into."""
    writes = (node.args[0] for node in graph.nodes if is_write(node) and node.args)
    held = (value for value in writes if isinstance(value, fx.Node) and value.op == "get_attr")
    return list(dict.fromkeys(str(value.target) for value in held))


def note_refusal(reasons: dict[str, str], refused: Unsupported) -> bool:
    """Add a node that no rule narrows; return False if the passes needn't run again without it."""
    name, reason = origin(refused.node), refused.reason
    if isinstance(refused, NoRows):
        reasons.setdefault(name, reason)
        return False
    if reasons.get(name) == reason:
        return False
    reasons[name] = reason
    log.debug("runs dense: %s: %s", name, reason)
    return True


def origin(node: fx.Node) -> str:
    """Return the name of the captured node that a node was made for."""
    return str(node.meta.get("origin", node.name))


def flat_graph(module: fx.GraphModule) -> fx.Graph:
    """Return the captured graph with the regions that torch.export wraps inlined."""
    flat = fresh_copy(module)
    inline_regions(flat.graph, PassContext(Interface(pyramid=Pyramid(1)), {}))
    return flat.graph


__all__ = ["Compilation", "compile_capture"]
