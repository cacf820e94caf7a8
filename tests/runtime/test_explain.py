"""explain(): its figures are true, and what stays dense is named with place and reason."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from bench.harness import count_flops
from maskfx.compiler.compile import Compilation, flat_graph
from maskfx.ir.geometry.lanes import shape_hint
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch import flops
from maskfx.runtime.cache.quantize import Encoding, Format
from maskfx.runtime.explain import amount, table
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from tests.factories.zoo import ZOO
from tests.runtime.test_oracle import denoiser_of, module_of

pytestmark = pytest.mark.slow

NAMES = ["UNet2DConditionModel-sd15", "FluxTransformer2DModel"]
SORTING = "Sorting"


class SortBlock(nn.Module):
    """Sorting over sites: nothing narrows it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = value + torch.sort(self.inner(value), dim=1).values
        return output


class Sorting(nn.Module):
    """Two blocks by site, one between them that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), SortBlock(), nn.Linear(8, 8)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


@cache
def sorting() -> maskfx.CompiledDenoiser:
    example = {"hidden_states": torch.randn(2, 12, 8)}
    return maskfx.compile(Sorting(), example_inputs=example)


@cache
def compilation_of(name: str) -> Compilation:
    """The compilation of a case's first size."""
    if name == SORTING:
        return sorting().compilations[0]
    case = ZOO[name]
    denoiser = denoiser_of(name)
    denoiser.record(**case.inputs(case.sizes[0], 0))
    return denoiser.compilations[0]


def program_of(name: str) -> Program:
    program = compilation_of(name).program
    assert program is not None
    return program


def dense_flops(name: str) -> int:
    module = compilation_of(name).capture.module
    assert module is not None
    return sum(flops.graph_flops(flat_graph(module)).values())


def side_flops(name: str, side: str) -> int:
    compilation = compilation_of(name)
    assert compilation.capture.module is not None
    graph = getattr(compilation, side).module.graph
    return sum(flops.graph_flops(graph, compilation.capture.module.graph).values())


def edit_flops(name: str, ratio: float) -> int:
    sizes = flops.capture_sizes(compilation_of(name).capture.pyramid)
    program = program_of(name)
    sites = flops.square_sites(program.interface.pyramid, sizes, ratio)
    return sum(flops.row_flops(program, sites, sizes["batch"]).values())


def inputs_at_capture(name: str) -> dict[str, Any]:
    """Arguments of the sizes that the graph was captured at."""
    capture, case = compilation_of(name).capture, ZOO[name]
    sizes = flops.capture_sizes(capture.pyramid)
    shapes = {
        str(n.target): shape_hint(n.meta["val"])
        for n in (capture.module.graph.nodes if capture.module else ())
        if n.op == "placeholder" and isinstance(n.meta.get("val"), Tensor)
    }
    assert sizes["batch"] > 1
    out = dict(case.inputs(case.sizes[0], 0))
    for key, shape in shapes.items():
        if key in out and isinstance(out[key], Tensor):
            out[key] = torch.zeros(shape, dtype=out[key].dtype)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_dense_flops_are_those_of_the_module(name: str) -> None:
    inputs = inputs_at_capture(name)
    counted = count_flops(lambda: module_of(name)(**inputs))["total"]
    assert dense_flops(name) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_a_full_mask_costs_the_dense_step_less_the_request(name: str) -> None:
    rest = dense_flops(name) - side_flops(name, "request")
    assert edit_flops(name, 1.0) == pytest.approx(rest, rel=0.02)


def test_row_flops_are_those_of_a_real_edit() -> None:
    """Counted on the meta device, and while an edit of the same mask and size runs."""
    name = "UNet2DConditionModel-sd15"
    case, denoiser, program = ZOO[name], denoiser_of(name), program_of(name)
    size = case.sizes[2]
    inputs = case.inputs(size, 0)
    kept = denoiser.record(**inputs)[1]
    mask = flops.square_mask(kept.sizes, 0.2)
    assert mask is not None
    step = maskfx.EditStep(inputs, mask, kept)
    denoiser.edit([step])  # text is computed now, and kept
    counted = count_flops(lambda: denoiser.edit([step]))["total"]
    sites = ActiveSites(program.interface.pyramid, kept.sizes, Mask(mask))
    assert sum(flops.row_flops(program, sites, size.batch).values()) == counted


@pytest.mark.parametrize("name", NAMES)
def test_flops_fall_with_the_mask(name: str) -> None:
    found = [edit_flops(name, r) for r in (1.0, 0.5, 0.2, 0.1)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", NAMES)
def test_cache_bytes_are_those_that_a_recording_keeps(name: str) -> None:
    case, program = ZOO[name], program_of(name)
    size = case.sizes[2]
    kept = denoiser_of(name).record(**case.inputs(size, 0))[1]
    sites = ActiveSites(program.interface.pyramid, kept.sizes, None)
    held = flops.cache_bytes(program, sites, torch.float32)
    assert sum(held.values()) * size.batch == kept.nbytes()
    for format in (Format.FP16, Format.INT8):
        encoding = Encoding(rows=format, stats=format)
        packed = flops.cache_bytes(program, sites, torch.float32, encoding)
        assert sum(packed.values()) * size.batch == kept.packed(encoding).nbytes()


def test_names_what_runs_in_full_with_place_reason_and_cost() -> None:
    compilation = compilation_of(SORTING)
    text = sorting().explain()
    assert compilation.reasons
    for name, reason in compilation.reasons.items():
        line = next(x for x in text.splitlines() if x.split()[:1] == [name])
        assert reason in line
        assert "blocks." in line
    total = edit_flops(SORTING, 1.0) + sum(side_flops(SORTING, s) for s in ("request", "dense"))
    assert total == pytest.approx(dense_flops(SORTING), rel=0.01)
    assert "in full, every step" in text


def test_names_the_argument_whose_positions_are_the_sites() -> None:
    """A reader sees where a text was taken for the picture."""

    class Prior(nn.Module):
        def forward(self, hidden_states: Tensor, words: Tensor) -> Tensor:
            return hidden_states + words.tanh().mean(1)

    class Silu(nn.Module):
        def forward(self, sample: Tensor) -> Tensor:
            return nn.functional.silu(sample)

    example = {"hidden_states": torch.randn(2, 8), "words": torch.randn(2, 6, 8)}
    assert "of words\n" in maskfx.compile(Prior(), example_inputs=example).explain()
    picture = {"sample": torch.randn(2, 8, 6, 5)}
    silu = maskfx.compile(Silu(), example_inputs=picture)
    assert "sites of sample\n" in silu.explain()


class Observed(nn.Module):
    """Attention in steps whose weights are used twice, the scores written into an empty."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.inner(hidden_states).unflatten(-1, (2, 4)).transpose(1, 2).flatten(0, 1)
        empty = torch.empty(x.shape[0], x.shape[1], x.shape[1])
        weights = torch.baddbmm(empty, x, x.transpose(1, 2), beta=0).softmax(-1)
        mixed = torch.bmm(weights, x) + weights.amax(-1, keepdim=True)
        return hidden_states + mixed.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


def test_names_the_first_cause_where_the_axes_of_an_input_are_unknown() -> None:
    example = {"hidden_states": torch.randn(2, 12, 8)}
    denoiser = maskfx.compile(Observed(), example_inputs=example)
    reasons = denoiser.compilations[0].reasons
    assert "no rule covers aten.baddbmm" in reasons["baddbmm"]
    assert len(reasons) > 1
    shown = [x.split()[0] for x in denoiser.explain().splitlines() if x.split()[:1]]
    assert [n for n in reasons if n in shown] == ["baddbmm"]
    assert f"and {len(reasons) - 1} nodes whose inputs come from these" in denoiser.explain()


class Unruled(nn.Module):
    """What has no rule reads a value of the request whose axes nothing shows."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        count = hidden_states.shape[1]
        table = torch.ones(count * count + 1).cumsum(0)
        return hidden_states + torch.searchsorted(table, hidden_states)


def test_shows_a_node_whose_input_is_unknown_but_not_refused() -> None:
    example = {"hidden_states": torch.randn(2, 12, 8)}
    denoiser = maskfx.compile(Unruled(), example_inputs=example)
    assert "searchsorted  " in denoiser.explain()
    assert "no rule covers aten.searchsorted.Tensor" in denoiser.explain()


def test_a_program_given_up_costs_all_that_the_module_does() -> None:
    example = {"hidden_states": torch.randn(2, 12, 8)}
    denoiser = maskfx.compile(Sorting(), example_inputs=example)
    assert "together" in denoiser.explain()
    compilation = denoiser.compilations[0]
    compilation.program = None
    compilation.reasons = {"program": "its rows fail"}
    text = denoiser.explain()
    assert "its rows fail" in text
    assert "together" not in text


def test_shows_passes_that_matched_nothing_and_the_ratio_asked_for() -> None:
    compilation_of("FluxTransformer2DModel")
    text = denoiser_of("FluxTransformer2DModel").explain(0.37)
    lines = [x.split() for x in text.splitlines()]
    assert ["narrow_convolutions", "-"] in [x[:2] for x in lines]
    assert {"m=0.1", "m=0.2", "m=0.37"} <= set(text.split())


class Flipped(nn.Module):
    """Nothing here is local: every site mixes with its mirror image at the output."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        out: Tensor = self.mix(sample).flip(2)
        return out


class Unread(nn.Module):
    """Python reads a number of the picture: no graph."""

    def forward(self, sample: Tensor) -> Tensor:
        return sample * len(str(sample.flatten().tolist()))


def test_says_that_and_why_there_is_no_program() -> None:
    denoiser = maskfx.compile(Flipped(), example_inputs={"sample": torch.randn(2, 4, 8, 8)})
    assert denoiser.compilations[0].program is None
    text = denoiser.explain()
    assert "No program: the whole denoiser runs dense in every step." in text
    (name, reason) = next(iter(denoiser.compilations[0].reasons.items()))
    assert name in text
    assert reason in text
    assert f"{amount(dense_of(denoiser))}FLOP per batch element" in text


def dense_of(denoiser: maskfx.CompiledDenoiser) -> float:
    sizes = flops.capture_sizes(denoiser.compilations[0].capture.pyramid)
    return 2.0 * 9 * 4 * 4 * sizes["y"] * sizes["x"]


def test_says_that_there_is_no_graph() -> None:
    denoiser = maskfx.compile(Unread(), example_inputs={"sample": torch.randn(2, 4, 8, 8)})
    text = denoiser.explain()
    assert "No program: the whole denoiser runs dense in every step." in text
    assert "tried: export with" in text
    assert "Python reads all values of a tensor of [" in text  # at once, not after minutes


def test_before_the_first_call() -> None:
    assert "Nothing is captured yet" in maskfx.compile(Flipped()).explain()


def test_amounts_and_columns() -> None:
    found = [amount(n) for n in (0, 7, 999.4, 999.6, 1.234e6, 999.9e6, 5e12)]
    assert found == ["0 ", "7 ", "999 ", "1 k", "1.23 M", "1 G", "5 T"]
    assert list(table([("a", "b"), ("long", "1")])) == ["a     b", "----  -", "long  1"]
