"""The pipeline: passes and their files, declared order, facts that are checked, records."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from maskfx.compiler import compile as compiling
from maskfx.compiler.annotate import fresh_copy
from maskfx.compiler.capture.capture import capture
from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.compile import compile_capture
from maskfx.errors import CompileError
from maskfx.ir.geometry.lanes import NotLaned
from maskfx.ir.programs.program import Interface
from maskfx.passes.context import PassContext, Unsupported, from_rows, op_name
from maskfx.passes.drop_guards import drop_guards
from maskfx.passes.pipeline import PIPELINE, Pass, run_passes
from maskfx.passes.verify import CHECKERS, Fact
from maskfx.runtime.explain import describe
from tests.passes.tools import code_of, numbers

TESTS = Path(__file__).parent
NAMES = [step.name for step in PIPELINE]
BY_NAME = {step.name: step for step in PIPELINE}
ANALYSES = ("mark_stages", "mark_lanes")
ROOMS = ("canonicalize", "narrow")  # a pass `narrow_linear` is in `narrow/linear.py`


class Tiny(nn.Module):
    """One operator of most kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.outer = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)

    def forward(self, sample: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(sample)).tanh()) + sample


@pytest.fixture(scope="session")
def found() -> Capture:
    with torch.no_grad():
        return capture(Tiny(), {"sample": numbers(2, 4, 8, 12, seed=0)})


def prepared(found: Capture) -> tuple[fx.GraphModule, PassContext]:
    assert found.module is not None
    interface = Interface(pyramid=copy.deepcopy(found.pyramid))
    return fresh_copy(found.module), PassContext(interface=interface, symbols=found.symbols)


# Files and docstrings.


def place(name: str) -> tuple[str, ...]:
    """Return the parts of a pass's path: its room, if it has one, and its file."""
    room, _, rest = name.partition("_")
    return (room, rest) if room in ROOMS else (name,)


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_has_a_file_of_its_name(name: str) -> None:
    run = BY_NAME[name].run
    assert run.__module__ == ".".join(("maskfx.passes", *place(name)))
    assert list(inspect.signature(run).parameters) == ["graph", "ctx"]


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_has_a_test_file(name: str) -> None:
    *rooms, file = place(name)
    path = TESTS.joinpath(*rooms, f"test_{file}.py")
    text = path.read_text()
    module = r"\.".join(("maskfx", "passes", *rooms, file))
    assert re.search(rf"from {module} import .*\b{name}\b", text)
    for wanted in ("def test_keeps_", "def test_second_run_rewrites_nothing"):
        assert wanted in text, f"{path} has no {wanted}"
    assert text.count("def test_") >= 3


def test_every_test_file_has_a_pass() -> None:
    paths = (p.relative_to(TESTS).with_suffix("") for p in TESTS.rglob("test_*.py"))
    found = {(*path.parts[:-1], path.name.removeprefix("test_")) for path in paths}
    # of passes on copies of finished graphs, and this file
    others = {("add_exchanges",), ("join_exchanges",), ("fuse_kernels",), ("read_packed_keys",)}
    others |= {("pipeline",)}
    assert found == {place(name) for name in NAMES} | others


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ANALYSES])
def test_every_docstring_shows_the_effect(name: str) -> None:
    doc = inspect.getdoc(BY_NAME[name].run) or ""
    lines = [line.split(" ")[0] for line in doc.splitlines()]
    assert doc.splitlines()[0].endswith(".")
    places = [lines.index(word) for word in ("Before", "After", "Keeps")]
    assert places == sorted(places)


def test_names_are_distinct() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_every_fact_is_given_once_and_has_a_checker() -> None:
    given = [fact for step in PIPELINE for fact in step.gives]
    assert sorted(given, key=lambda f: f.name) == sorted(Fact, key=lambda f: f.name)
    assert CHECKERS.keys() == set(Fact)


# Order.


def move(name: str, place: int) -> tuple[Pass, ...]:
    rest = [step for step in PIPELINE if step.name != name]
    return (*rest[:place], BY_NAME[name], *rest[place:])


WITHOUT = {
    "inline_regions": "drop_guards needs FLAT, which no earlier pass gives",
    "drop_identity_ops": "canonicalize_batches needs NO_IDENTITIES, which no earlier pass gives",
    "mark_stages": "mark_lanes needs STAGES_MARKED, which no earlier pass gives",
    "mark_lanes": "lift_side_graphs needs LANES_MARKED, which no earlier pass gives",
    "lift_side_graphs": "cut_stretches needs SIDES_LIFTED, which no earlier pass gives",
    "narrow_attention": "cancel_round_trips needs ATTENTION_NARROWED, which no earlier pass gives",
    "narrow_linear": "narrow_convolutions needs LINEAR_NARROWED, which no earlier pass gives",
    "narrow_convolutions":
        "cancel_round_trips needs CONVOLUTIONS_NARROWED, which no earlier pass gives",
    "narrow_pointwise": "cancel_round_trips needs POINTWISE_NARROWED, which no earlier pass gives",
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_a_missing_pass_is_named_by_its_fact(name: str, found: Capture) -> None:
    module, ctx = prepared(found)
    with pytest.raises(CompileError) as error:
        run_passes(module.graph, ctx, tuple(s for s in PIPELINE if s.name != name))
    assert str(error.value) == WITHOUT[name]


MOVED = [
    ("cancel_round_trips", "inline_regions", "ATTENTION_NARROWED"),
    ("lift_side_graphs", "mark_lanes", "LANES_MARKED"),
    ("narrow_convolutions", "narrow_linear", "LINEAR_NARROWED"),
    ("mark_lanes", "inline_regions", "NO_IDENTITIES"),
    ("narrow_norms", "inline_regions", "LANES_MARKED"),
    ("narrow_joins", "lift_side_graphs", "SIDES_LIFTED"),
    ("cancel_round_trips", "narrow_pointwise", "POINTWISE_NARROWED"),
]


@pytest.mark.parametrize(("name", "before", "fact"), MOVED)
def test_a_pass_too_early_is_refused(name: str, before: str, fact: str, found: Capture) -> None:
    module, ctx = prepared(found)
    place = [one.name for one in PIPELINE].index(before)
    with pytest.raises(CompileError) as error:
        run_passes(module.graph, ctx, move(name, place))
    assert str(error.value) == f"{name} needs {fact}, which no earlier pass gives"


def test_the_reverse_order_is_refused(found: Capture) -> None:
    module, ctx = prepared(found)
    before = code_of(module.graph)
    with pytest.raises(CompileError, match="^cancel_round_trips needs ATTENTION_NARROWED, which"):
        run_passes(module.graph, ctx, PIPELINE[::-1])
    assert code_of(module.graph) == before  # refused before it ran


# Facts.


def bad_alias(graph: fx.Graph, ctx: PassContext) -> int:
    node = next(n for n in graph.nodes if op_name(n) == "tanh")
    with graph.inserting_before(node):
        new = graph.call_function(torch.ops.aten.alias.default, (node.args[0],))
    node.args = (new,)
    return 1


def bad_guard(graph: fx.Graph, ctx: PassContext) -> int:
    node = next(n for n in graph.nodes if op_name(n) == "tanh")
    with graph.inserting_after(node):
        target = torch.ops.aten._assert_tensor_metadata.default
        graph.call_function(target, (node,))
    return 1


def bad_write(graph: fx.Graph, ctx: PassContext) -> int:
    node = next(n for n in graph.nodes if op_name(n) == "tanh")
    node.target = torch.ops.aten.tanh_.default
    return 1


def bad_lane(graph: fx.Graph, ctx: PassContext) -> int:
    from maskfx.ir.geometry.lanes import Feature, Lane, set_lane

    set_lane(next(n for n in graph.nodes if op_name(n) == "tanh"), Lane(((Feature(4),),)))
    return 1


def bad_mark(graph: fx.Graph, ctx: PassContext) -> int:
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        output.args = ((graph.call_function(from_rows, (output.args[0][0],)),),)
    return 1


def inserted(bad: Callable[[fx.Graph, PassContext], int], after: str) -> tuple[Pass, ...]:
    place = NAMES.index(after) + 1
    return (*PIPELINE[:place], Pass(bad), *PIPELINE[place:])


@pytest.mark.parametrize(
    ("bad", "after", "fact"),
    [
        (bad_alias, "mark_lanes", "NO_IDENTITIES"),
        (bad_guard, "canonicalize_einsum", "NO_GUARDS"),
        (bad_write, "mark_stages", "FLAT"),
        (bad_lane, "lift_side_graphs", "LANES_MARKED"),
        (bad_mark, "cancel_round_trips", "ROWS_FLOW"),
    ],
)
def test_a_broken_fact_is_pinned_to_its_pass(
    bad: Any, after: str, fact: str, found: Capture
) -> None:
    module, ctx = prepared(found)
    with pytest.raises(CompileError, match=f"^{fact} no longer holds after {bad.__name__}: "):
        run_passes(module.graph, ctx, inserted(bad, after))


def drop_everything(graph: fx.Graph, ctx: PassContext) -> int:
    """Claims that attention is narrowed, and isn't."""
    return 0


def test_a_promise_is_checked_even_without_rewrites() -> None:
    class Attends(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            heads = hidden_states[:, None]
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]

    found = capture(Attends(), {"hidden_states": numbers(2, 20, 8, seed=0)})
    module, ctx = prepared(found)
    gives = BY_NAME["narrow_attention"].gives
    passes = tuple(
        Pass(drop_everything, gives=gives) if s.name == "narrow_attention" else s for s in PIPELINE
    )
    with pytest.raises(CompileError, match="ATTENTION_NARROWED no longer holds after drop_every"):
        run_passes(module.graph, ctx, passes)


def test_a_pass_that_breaks_the_compiler_leaves_the_denoiser_dense(found: Capture) -> None:
    compilation = compile_capture(found, inserted(bad_alias, "mark_lanes"))
    assert compilation.program is None
    assert "NO_IDENTITIES no longer holds after bad_alias" in compilation.reasons["compiler"]


# Records.


def test_a_size_that_data_decides_leaves_the_denoiser_dense_without_a_traceback(
    found: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    def meets_data(graph: fx.Graph, ctx: PassContext) -> int:
        raise NotLaned("the size u0 depends on what a tensor holds")

    compilation = compile_capture(found, inserted(meets_data, "mark_lanes"))
    assert compilation.program is None
    assert compilation.reasons == {"compiler": "the size u0 depends on what a tensor holds"}
    assert not caplog.records


def test_records_count_rewrites(found: Capture) -> None:
    module, ctx = prepared(found)
    kept: dict[str, str] = {}
    records = run_passes(module.graph, ctx, PIPELINE, lambda n, g: kept.update({n: code_of(g)}))
    assert [r.name for r in records] == NAMES
    rewrites = {r.name: r.rewrites for r in records}
    assert rewrites["narrow_linear"] == rewrites["narrow_convolutions"] == 1
    assert rewrites["narrow_norms"] == 1
    assert rewrites["narrow_pointwise"] == 2
    assert rewrites["narrow_attention"] == rewrites["narrow_joins"] == 0
    assert records[-1].nodes == len(module.graph.nodes)
    assert all(r.ms >= 0 for r in records)
    assert set(kept) == {r.name for r in records if r.rewrites}
    assert kept["cancel_round_trips"] == code_of(module.graph)


def test_a_pass_that_finds_nothing_leaves_the_graph(found: Capture) -> None:
    module, ctx = prepared(found)
    codes = [code_of(module.graph)]

    def watched(step: Pass) -> Pass:
        def run(graph: fx.Graph, ctx: PassContext) -> int:
            before = code_of(graph)
            rewrites = step.run(graph, ctx)
            if not rewrites:
                assert code_of(graph) == before, step.name
                codes.append(before)
            return rewrites

        run.__name__ = step.name
        return Pass(run, step.needs, step.gives)

    run_passes(module.graph, ctx, [watched(step) for step in PIPELINE])
    assert len(codes) > 8


def test_the_runner_drops_dead_code(found: Capture) -> None:
    def orphan(graph: fx.Graph, ctx: PassContext) -> int:
        node = next(n for n in graph.nodes if op_name(n) == "tanh")
        with graph.inserting_after(node):
            graph.call_function(torch.ops.aten.sin.default, (node,))
        return 1

    module, ctx = prepared(found)
    run_passes(module.graph, ctx, [Pass(orphan)])
    assert not any(op_name(n) == "sin" for n in module.graph.nodes)


def test_the_runner_lints(found: Capture) -> None:
    def backwards(graph: fx.Graph, ctx: PassContext) -> int:
        node = next(n for n in graph.nodes if op_name(n) == "tanh")
        last = next(n for n in graph.nodes if n.op == "output")
        last.append(node)
        return 1

    module, ctx = prepared(found)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        run_passes(module.graph, ctx, [Pass(backwards)])


def test_a_refusal_is_run_again_dense(found: Capture) -> None:
    """compile_capture marks what a pass refuses and starts over; the captured graph stays."""

    def refuse_once(graph: fx.Graph, ctx: PassContext) -> int:
        for node in graph.nodes:
            if op_name(node) == "conv2d" and "val" in node.meta:
                raise Unsupported(node, "not today")
        return 0

    assert found.module is not None
    before = code_of(found.module.graph)
    place = NAMES.index("narrow_samples")
    compilation = compile_capture(found, (*PIPELINE[:place], Pass(refuse_once), *PIPELINE[place:]))
    assert code_of(found.module.graph) == before
    assert "not today" in compilation.reasons.values()


def test_refusals_without_end_are_reported(found: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "ROUNDS", 2)

    def refuse_the_next(graph: fx.Graph, ctx: PassContext) -> int:
        nodes = [n for n in graph.nodes if n.op == "call_function" and n.name not in ctx.dense]
        raise Unsupported(nodes[0], "not today")

    compilation = compile_capture(found, (Pass(refuse_the_next),))
    assert compilation.program is None
    assert list(compilation.reasons.values())[:2] == ["not today"] * 2
    assert "stopped after 2 runs of the passes" in compilation.reasons["compiler"]
    assert "stopped after 2 runs of the passes" in "\n".join(describe(compilation, 0.1))


def test_the_passes_are_their_own_modules() -> None:
    assert BY_NAME["drop_guards"].run is drop_guards
    assert isinstance(PIPELINE, tuple)
