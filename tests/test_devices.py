"""Every path on a device that isn't the CPU: the emulated one of `tests/factories/emulated.py`.

What is right on the CPU is right there, every operator's tensors lie on one device, and the host
waits for it at most twice in a step, at places that are listed here. The graphs are also run under
fake tensors of a CUDA device, which show of types and devices what no emulation can.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import maskfx
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import RestSpans, Spans
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.cache.movers import DeviceMover
from maskfx.runtime.cache.quantize import Encoding, Format
from maskfx.runtime.cache.rows import tensors_of
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.execution.replays import has_known_sizes
from maskfx.runtime.planner.step_planner import StepPlanner
from maskfx.runtime.steps import AnyStep
from tests.factories import emulated, masks, served
from tests.factories.pipelines import PIPES, anew, call_of, flux, picture, pipe_of, square
from tests.factories.zoo import ZOO, Case, Size, called
from tests.pipelines.test_fallbacks import verdict
from tests.runtime.planner.test_step_planner import costs_of
from tests.runtime.test_oracle import assert_kept_outside, assert_near, tensors
from tests.serve.models.test_pipeline_model import by_hand

DEVICE = torch.device(emulated.NAME, 0)
OTHER = torch.device(emulated.NAME, 1)
CPU = torch.device("cpu")
if not emulated.IS_EMULATED:
    torch.backends.cudnn.allow_tf32 = False  # the oracle is for fp32
FLUX = "FluxTransformer2DModel"
# one of each family; the rest of the zoo takes minutes
QUICK = {
    FLUX: "joint attention over packed tokens",
    "ChromaTransformer2DModel-boolmask": "the same with masked texts",
    "SD3Transformer2DModel": "joint attention over patches",
    "PixArtTransformer2DModel": "attention to texts",
    "SanaTransformer2DModel": "linear attention",
    "ZImageTransformer2DModel": "lists of pictures",
    "WanTransformer3DModel": "videos",
    "Transformer2DModel": "blocks by themselves",
    "UNet2DConditionModel-nomid": "convolutions and attention",
    "SD3ControlNetModel": "residuals of blocks",
}
# one of each kind in every run: a UNet, tokens, samples in lists
USUAL = (FLUX, "UNet2DConditionModel-nomid", "ZImageTransformer2DModel")
ZOO_CASES = [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in ZOO]
# one of each kind: the mask over the latents, passed to the denoiser, a ControlNet, a reference
KINDS = ["FluxInpaintPipeline"]
SLOW_KINDS = [
    "StableDiffusionInpaintPipeline-9",
    "StableDiffusionControlNetInpaintPipeline",
    "FluxKontextPipeline",
]
BUILDS = {  # with a block of each kind
    KINDS[0]: lambda: pipe_of(KINDS[0], lambda: flux(num_layers=1, num_single_layers=1)),
    **{name: PIPES[name].build for name in SLOW_KINDS},
}
PIPE_CASES = [*KINDS, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_KINDS)]

# where a step may wait for its device, and why
STEP_WAITS = {
    # the timesteps of all edits, at once
    "copy to the host in runtime/validation/validate.py:numbers_of",
    "copy to the host in pipelines/runs/execute.py:check_finite",  # one sum of each result, at once
}


@cache
def module_on(name: str, device: torch.device = DEVICE) -> nn.Module:
    return ZOO[name].build().to(device)


@cache
def denoiser_on(name: str, device: torch.device = DEVICE) -> maskfx.CompiledDenoiser:
    return maskfx.compile(module_on(name, device))


def inputs_of(name: str, size: Size, seed: int, device: torch.device = DEVICE) -> dict[str, Any]:
    given: dict[str, Any] = emulated.to(ZOO[name].inputs(size, seed), device)
    return given


def sizes_of(name: str) -> tuple[Size, Size]:
    """Two sizes of a case; in the slow run the second one is its oddest."""
    sizes = ZOO[name].sizes
    return sizes[0], sizes[2 if name in QUICK else -1]


def mask_of(case: Case, size: Size, seed: int = 0) -> Tensor:
    return masks.random(case.mask_shape(size), seed)


def all_on(device: torch.device, *trees: Any) -> bool:
    return all(t.device == device for tree in trees for t in tensors(tree))


def held_by(cache: StepCache) -> list[Tensor]:
    rows = [t for rows in cache.rows.values() for t in tensors_of(rows)]
    stats = [t for kept in cache.stats.values() for t in (*tensors_of(kept.values), kept.total)]
    return [*rows, *stats, *tensors(cache.output), *cache.step.values()]


def moved(cache: StepCache, device: torch.device | str) -> StepCache:
    from maskfx.runtime.cache.step_cache import with_tensors

    return with_tensors(cache, lambda t: t.to(device))


# Denoisers.


@pytest.mark.parametrize("name", ZOO_CASES)
def test_edits_recordings_and_mixed_steps_are_right_on_a_device(name: str) -> None:
    case, denoiser, on_cpu = ZOO[name], denoiser_on(name), module_on(name, CPU)
    steps: list[AnyStep] = []
    wanted: list[Any] = []
    for seed, size in enumerate(sizes_of(name)):
        inputs = inputs_of(name, size, seed)
        output, kept = denoiser.record(**inputs)
        assert all_on(DEVICE, output, held_by(kept))
        expected = emulated.to(called(on_cpu, inputs_of(name, size, seed, CPU)), DEVICE)
        assert_near(output, expected, f"recording at {size}")
        mask = mask_of(case, size, seed)
        found = denoiser.edit([maskfx.EditStep(inputs, mask, kept)])[0]
        assert all_on(DEVICE, found)
        assert_near(found, expected, f"edit at {size}")
        assert_kept_outside(mask.to(DEVICE), found, output)
        steps += [maskfx.EditStep(inputs, mask.to(DEVICE), kept), maskfx.DenseStep(inputs)]
        steps += [maskfx.EditStep(inputs, mask, moved(kept, "cpu"))]  # a tier in host memory
        wanted += [expected] * 3
    steps.append(maskfx.RecordStep(steps[0].inputs))
    *results, (recorded, _) = denoiser.step(steps)
    for found, one in zip([*results, recorded], [*wanted, wanted[0]], strict=True):
        assert all_on(DEVICE, found)
        assert_near(found, one, "in a mixed step")
    empty, full = (torch.full_like(mask, value) for value in (False, True))
    for whole in (empty, full):
        found = denoiser.edit([maskfx.EditStep(inputs, whole, moved(kept, "cpu"))])[0]
        assert all_on(DEVICE, found)
        assert_near(found, expected)
    if case.named or name in QUICK:
        assert all(c.program is not None for c in denoiser.compilations)
    for program in denoiser.programs.values():
        assert_right_under_fake_cuda(program, denoiser, steps)


def assert_right_under_fake_cuda(
    program: Program, denoiser: maskfx.CompiledDenoiser, steps: list[AnyStep]
) -> None:
    """Under fake tensors every operator refuses tensors of two devices, or of types that differ."""
    calls = [denoiser._validator.call(step) for step in steps]
    calls = [call for call in calls if call.inputs.compilation.program is program]
    if not calls or not has_known_sizes(program.module.graph):  # those of experts depend on data
        return
    executor, seen = denoiser._executor, []
    runner = executor.graphs._runner

    def spying(*given: Any) -> Callable[[Any], Any]:
        run = runner(*given)

        def runs(fetch: Any) -> Any:
            names = list(program.interface.inputs)
            inputs = {name: fetch(name) for name in names}
            result = run(inputs.__getitem__)
            seen.append((inputs, result, given[0].recording))
            return result

        return runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.graphs, "_runner", spying)
        executor.run(program, calls)
    for inputs, result, recording in seen:
        module = program.recording if recording else program.module
        with FakeTensorMode() as mode:
            # spans are read by Python and stay on the host
            sources = program.interface.inputs
            host = {n for n, s in sources.items() if isinstance(s, Spans | RestSpans)}
            given = [
                mode.from_tensor(value) if name in host else fake_cuda(value, mode)
                for name, value in inputs.items()
            ]
            with torch.no_grad():
                found = Faked(module, mode).run(*given)
        for got, real in zip(pytree.tree_leaves(found), pytree.tree_leaves(result), strict=True):
            assert got.device == torch.device("cuda", 0)
            assert (got.shape, got.dtype) == (real.shape, real.dtype)


def fake_cuda(value: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty(value.shape, dtype=value.dtype, device="cuda:0")


class Faked(fx.Interpreter):
    """A graph of the emulated device, run over fake tensors of a CUDA device."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self.mode, self.weights = mode, dict[str, Tensor]()

    def fetch_attr(self, target: str) -> Any:
        if target not in self.weights:
            value = super().fetch_attr(target)
            on_device = value.device.type == emulated.NAME
            faked = fake_cuda(value, self.mode) if on_device else self.mode.from_tensor(value)
            self.weights[target] = faked
        return self.weights[target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "device" in kwargs and torch.device(kwargs["device"]).type == emulated.NAME:
            kwargs = {**kwargs, "device": torch.device("cuda", 0)}
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_half_precision_edits_on_a_device(dtype: torch.dtype) -> None:
    case, size = ZOO[FLUX], ZOO[FLUX].sizes[0]
    module = case.build().to(DEVICE, dtype)
    denoiser = maskfx.compile(module)

    def cast(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    inputs = pytree.tree_map(cast, inputs_of(FLUX, size, 0))
    output, kept = denoiser.record(**inputs)
    mask = mask_of(case, size)
    [found] = denoiser.edit([maskfx.EditStep(inputs, mask, kept)])
    for got, wanted in zip(tensors(found), tensors(output), strict=True):
        assert (got.device, got.dtype) == (DEVICE, dtype)
        assert float((got - wanted).float().norm() / wanted.float().norm()) < 2e-2
    assert all(c.program is not None for c in denoiser.compilations)


@pytest.mark.slow
def test_two_devices_in_one_process_share_nothing() -> None:
    case, size = ZOO[FLUX], ZOO[FLUX].sizes[0]
    if not emulated.IS_EMULATED and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    for device in (DEVICE, OTHER):
        inputs = inputs_of(FLUX, size, 0, device)
        output, kept = denoiser_on(FLUX, device).record(**inputs)
        step = maskfx.EditStep(inputs, mask_of(case, size), kept)
        [found] = denoiser_on(FLUX, device).edit([step])
        assert all_on(device, found, held_by(kept))
        assert_near(found, output)
    with pytest.raises((RuntimeError, maskfx.InputError)):  # weights here, inputs there
        denoiser_on(FLUX).record(**inputs)


def test_a_program_saved_on_one_device_serves_another(tmp_path: Any) -> None:
    """Its code is the same, and its constants and operators are on the device that reads it."""
    if not emulated.IS_EMULATED and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    case, found = ZOO[FLUX], []
    for device in (DEVICE, OTHER):
        denoiser = maskfx.compile(case.build().to(device), programs=str(tmp_path))
        inputs = inputs_of(FLUX, case.sizes[0], 1, device)
        output, kept = denoiser.record(**inputs)
        step = maskfx.EditStep(inputs, mask_of(case, case.sizes[0]), kept)
        assert_near(denoiser.edit([step])[0], output)
        seconds = [one.seconds for one in denoiser.compilations]
        found.append((list(denoiser.programs), seconds))
    assert found[0] == found[1]  # of the seconds too: the second one compiled nothing


@pytest.mark.slow
def test_a_module_that_moves_is_captured_where_it_is_now() -> None:
    case, size = ZOO[FLUX], ZOO[FLUX].sizes[0]
    module = case.build()
    denoiser = maskfx.compile(module)
    for device in (torch.device("cpu"), DEVICE):
        module.to(device)
        inputs = inputs_of(FLUX, size, 0, device)
        output, kept = denoiser.record(**inputs)
        [found] = denoiser.edit([maskfx.EditStep(inputs, mask_of(case, size), kept)])
        assert all_on(device, found)
        assert_near(found, module(**inputs))


@pytest.mark.parametrize("packed", [False, True])
def test_recordings_in_any_tier_and_form_serve_a_device(packed: bool, tmp_path: Any) -> None:
    case, size = ZOO[FLUX], ZOO[FLUX].sizes[0]
    denoiser, inputs = denoiser_on(FLUX), inputs_of(FLUX, size, 0)
    output, kept = denoiser.record(**inputs)
    mask = mask_of(case, size)
    encoding = Encoding(Format.INT8, stats=Format.INT8) if packed else Encoding()
    tiers = Tiers(
        Store(tmp_path),
        host_bytes=1 << 30,
        device_bytes=2 * kept.nbytes(),
        mover=DeviceMover(DEVICE),
        encoding=encoding,
    )
    templates = maskfx.Templates(denoiser, tiers, masks=maskfx.Masks.inside(mask), share=2)
    other, later = denoiser.record(**inputs)
    for step, recording in enumerate((kept, later, kept)):
        templates.put("cat", step, recording)
    tolerance = 2e-2 if packed else 1e-4
    for step in range(3):
        edit = templates.edit("cat", step, inputs, mask)
        assert edit is not None
        [found] = denoiser.edit([edit])
        for got, wanted in zip(tensors(found), tensors(output), strict=True):
            assert got.device == DEVICE
            assert float((got - wanted).norm() / wanted.norm()) < tolerance
    assert {t.device for t in held_by(kept)} == {DEVICE}
    tiers.close()


def test_a_host_tier_really_holds_steps_in_host_memory() -> None:
    size = ZOO[FLUX].sizes[0]
    tiers = Tiers(host_bytes=1 << 30)
    templates = maskfx.Templates(denoiser_on(FLUX), tiers)
    templates.put("cat", 0, denoiser_on(FLUX).record(**inputs_of(FLUX, size, 0))[1])
    found = tiers.get(templates.key("cat", 0))
    assert found is not None
    assert all_on(torch.device("cpu"), held_by(found.cache))
    tiers.close()


def test_a_loader_brings_rows_from_the_host_and_leaves_those_on_the_device() -> None:
    case, size = ZOO[FLUX], ZOO[FLUX].sizes[0]
    loader = Loader()
    denoiser = maskfx.compile(module_on(FLUX), loader=loader)
    inputs = inputs_of(FLUX, size, 0)
    output, kept = denoiser.record(**inputs)
    edit = maskfx.EditStep(inputs, mask_of(case, size), kept)
    assert_near(denoiser.edit([edit])[0], output)
    assert loader.loaded_bytes == 0
    away = maskfx.EditStep(inputs, mask_of(case, size), moved(kept, "cpu"))
    denoiser.ahead([away])
    assert_near(denoiser.edit([away])[0], output)
    assert loader.loaded_bytes > 0
    for found in denoiser.edit([edit, away]):
        assert_near(found, output)
    loader.close()


def test_planned_loads_from_host_memory_give_the_result_of_the_cpu() -> None:
    """Over a quick link keys and values cross, over a slow one their fewer inputs, or nothing."""
    case, on_cpu, loader = ZOO[FLUX], denoiser_on(FLUX, CPU), Loader()
    denoiser = maskfx.compile(module_on(FLUX), plans=True, loader=loader)
    tiers = Tiers(host_bytes=1 << 30)
    templates = maskfx.Templates(denoiser, tiers)
    edits: list[maskfx.EditStep] = []
    wanted: list[Any] = []
    for number, size in enumerate(case.sizes[:2]):
        mask = mask_of(case, size, number)
        templates.put("cat", number, denoiser.record(**inputs_of(FLUX, size, number))[1])
        edit = templates.edit("cat", number, with_other_picture(size, number, DEVICE), mask)
        assert edit is not None
        assert all_on(CPU, held_by(edit.cache))
        edits.append(edit)
        _, kept = on_cpu.record(**inputs_of(FLUX, size, number, CPU))
        wanted += on_cpu.edit([maskfx.EditStep(with_other_picture(size, number, CPU), mask, kept)])
    loaded = []
    for slow, whole in ((1e-14, 1.0), (1e-6, 1e20), (1e-6, 1.0)):
        costs = replace(costs_of(denoiser, edits, slow), whole=whole)
        planner = StepPlanner(denoiser, costs)
        planned = planner.plan_ahead(edits)
        assert [bool(step.plan) for step in planned] == [whole > 1] * len(edits)
        before = loader.loaded_bytes
        denoiser.ahead(planned)
        for found, expected in zip(denoiser.edit(planned), wanted, strict=True):
            assert all_on(DEVICE, found)
            assert_near(emulated.to(found, CPU), expected, f"where a byte takes {slow} s")
        loaded.append(loader.loaded_bytes - before)
        assert planner.latest is not None
        assert loaded[-1] == sum(cost.staged for cost in planner.latest.costs)
    assert loaded[0] > loaded[1] > loaded[2] == 0
    tiers.close()
    loader.close()


def with_other_picture(size: Size, seed: int, device: torch.device) -> dict[str, Any]:
    """The inputs of a seed, at their time, for another picture."""
    other = inputs_of(FLUX, size, seed + 10, device)["hidden_states"]
    return {**inputs_of(FLUX, size, seed, device), "hidden_states": other}


@pytest.mark.parametrize(("reuse", "letters"), [("steps", "rreere"), ("auto", "tteete")])
def test_a_sessions_steps_on_a_device_are_those_of_the_cpu(reuse: str, letters: str) -> None:
    """Edits of its own recordings, or of a template in host memory that lacks calls."""
    case, size = ZOO[FLUX], ZOO[FLUX].sizes[0]
    policy = maskfx.ReusePolicy(reuse, refresh=3, outside="extrapolate")
    outputs: dict[torch.device, list[Any]] = {CPU: [], DEVICE: []}
    for device, found in outputs.items():
        denoiser = denoiser_on(FLUX, device)
        calls = [inputs_of(FLUX, size, 0, device) for _ in letters]
        for ordinal, given in enumerate(calls):
            given["timestep"] = given["timestep"] - 0.05 * ordinal
        known = [n for n, kind in enumerate(letters) if kind == "t"]
        template = {(n, ""): moved(denoiser.record(**calls[n])[1], CPU) for n in known}
        session = maskfx.EditSession(mask_of(case, size).to(device), policy, template)
        for ordinal, given in enumerate(calls):
            [result] = denoiser.step([session.ask(ordinal, "", given)])
            found.append(session.take(ordinal, "", result))
        assert all_on(device, found)
        assert "".join(kind.value[0] for kind in session.kinds.values()) == letters
    for ordinal, (here, there) in enumerate(zip(outputs[DEVICE], outputs[CPU], strict=True)):
        assert_near(emulated.to(here, CPU), there, ordinal)


# What a step asks of its device.


def test_a_step_waits_once_for_its_device_and_brings_its_tables_in_one_copy() -> None:
    case, denoiser = ZOO[FLUX], denoiser_on(FLUX)
    steps = []
    for seed, size in enumerate(case.sizes[:3]):
        inputs = inputs_of(FLUX, size, seed)
        _, kept = denoiser.record(**inputs)
        steps.append(maskfx.EditStep(inputs, mask_of(case, size, 10 + seed), kept))
    with emulated.watched() as first:
        denoiser.edit(steps)
    tables = [n for n in first.uploads if n > 8 * len(steps)]
    assert len(tables) == 1, "the tables of a new batch cross in one copy"
    with emulated.watched() as again:
        denoiser.edit(steps)
    assert again.waits == ["copy to the host in runtime/validation/validate.py:numbers_of"]
    assert again.uploads == []


def test_the_emulated_device_refuses_what_a_gpu_refuses() -> None:
    here, host = torch.ones(3, device=DEVICE), torch.ones(3)
    for broken in (lambda: here + host, lambda: here + host.to(OTHER), lambda: here.numpy()):
        with pytest.raises((RuntimeError, TypeError)):
            broken()
    with emulated.watched() as seen:
        float(here.sum())
        here[here > 0]
        here.cpu()
    assert len(seen.waits) == 3


# Pipelines, engine.


@cache
def pipes(name: str) -> tuple[Any, Any]:
    """The compiled pipeline on the device, and on the CPU."""
    build = BUILDS[name]
    return maskfx.compile(build().to(DEVICE), quality="all-steps"), maskfx.compile(
        build(), quality="all-steps"
    )


def edit_of(name: str, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
    kind = PIPES[name]
    given: dict[str, Any] = emulated.to(call_of(kind, seed, square(size=kind.side)), device)
    return given


def pixels(result: Any) -> Any:
    return np.asarray(result.images[0]).astype(int)


@pytest.mark.parametrize("name", PIPE_CASES)
def test_a_pipelines_edit_on_a_device_is_that_of_the_cpu(name: str) -> None:
    here, there = pipes(name)
    for quality in (None, "balanced"):
        wanted = pixels(there(**edit_of(name, "cpu"), quality=quality))
        found = pixels(here(**edit_of(name, DEVICE), quality=quality))
        assert abs(found - wanted).max() <= 1
    inside = np.asarray(square(size=PIPES[name].side)) > 127
    original = np.asarray(picture(size=PIPES[name].side)).astype(int)
    if found.shape == original.shape:
        assert np.array_equal(found[~inside], original[~inside])


@pytest.mark.parametrize("in_host", [True, False])
def test_a_pipelines_template_serves_a_device_from_any_tier(in_host: bool) -> None:
    """Rows of the host cross to the device by a plan, those of the device stay there."""
    name = KINDS[0]
    here, there = pipes(name)
    tiers = Tiers(
        host_bytes=1 << 30, device_bytes=0 if in_host else 1 << 30, mover=DeviceMover(DEVICE)
    )
    pipe = anew(name, compiled_pipe=here, library=TemplateLibrary(tiers))
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    wanted = pixels(there(**edit_of(name, "cpu")))
    assert abs(pixels(pipe(**edit_of(name, DEVICE))) - wanted).max() <= 1  # recorded
    loader = denoiser.loader
    assert loader is not None
    before = loader.loaded_bytes
    assert abs(pixels(pipe(**edit_of(name, DEVICE))) - wanted).max() <= 1
    assert (loader.loaded_bytes > before) == in_host
    assert "by a plan per batch (costs measured" in denoiser.loads
    tiers.close()


def test_a_pipelines_edit_does_not_wait_for_the_times_of_its_steps() -> None:
    """Those of the scheduler were compared with the template's when the run began."""
    name = KINDS[0]
    here = pipes(name)[0]
    here(**edit_of(name, DEVICE, 5))  # recorded
    with emulated.watched() as seen:
        here(**edit_of(name, DEVICE, 5))
    counts = Counter(seen.waits)
    assert counts["copy to the host in runtime/validation/validate.py:numbers_of"] == 0, counts


def test_a_shared_step_of_the_engine_waits_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.needs_emulation()  # the engine's thread can't skip
    name = KINDS[0]
    here, there = pipes(name)
    for seed in (0, 1):
        here(**edit_of(name, DEVICE, seed))  # recorded
    wanted = [pixels(there(**edit_of(name, "cpu", seed))) for seed in (0, 1)]
    counts: list[Counter[str]] = []
    with maskfx.Engine(maskfx.BatchPolicy(patience=5.0, batch=2)) as engine:
        step = engine.runner.run

        def counted(*given: Any) -> Any:
            with emulated.watched() as seen:
                result = step(*given)
            counts.append(Counter(seen.waits))
            return result

        monkeypatch.setattr(engine.runner, "run", counted)
        tickets = [engine.submit(here, **edit_of(name, DEVICE, seed)) for seed in (0, 1)]
        found = [pixels(ticket.result()) for ticket in tickets]
    assert all(abs(f - w).max() <= 1 for f, w in zip(found, wanted, strict=True))
    assert counts
    assert sum(count["equal in ir/values.py:__call__"] for count in counts) <= 2
    for count in counts:
        count.pop("equal in ir/values.py:__call__", None)  # a value that two requests share, once
        assert set(count) <= STEP_WAITS, count
        assert count.total() <= 2


@pytest.mark.slow
def test_a_served_edit_on_a_device_is_that_of_the_cpu() -> None:
    """The first edit records a template into host memory, whose rows the second one loads."""
    name = KINDS[0]
    on_cpu = maskfx.compile(served.build(name), quality="balanced")
    server = served.Served(served.build(name).to(DEVICE), device=str(DEVICE), max_num_seqs=2)
    editor = server.model.family.editor
    assert editor is not None
    [denoiser] = pipeline_state_of(editor.pipe).denoisers.values()
    loader = denoiser.loader
    assert loader is not None
    try:
        for seed in (3, 4):
            before = loader.loaded_bytes
            asked = served.job(seed=seed, strength=1.0, template="cat"), served.edit(1)
            made = server.made(*asked)
            assert made.pixels is not None
            wanted = by_hand(on_cpu, seed, 1, strength=1.0).astype(int)
            assert np.abs(made.pixels - wanted).max() <= 1
            outside = ~served.square()
            assert np.array_equal(made.pixels[outside], served.picture(1)[outside])
            assert made.template == "cat"
            assert list(made.template_bytes or ()) == ["host"]
            assert made.mask_ratio < 1
            assert loader.loaded_bytes > before
    finally:
        server.model.close()


# What goes wrong.


def test_a_fallback_on_a_device_gives_the_picture_of_rows() -> None:
    name = KINDS[0]
    wanted = pixels(pipes(name)[0](**edit_of(name, DEVICE)))
    pipe = anew(name, compiled_pipe=maskfx.compile(BUILDS[name]().to(DEVICE), quality="all-steps"))
    pipe(**edit_of(name, DEVICE))
    with verdict(pipe, "forced"):
        pipe = anew(name, compiled_pipe=pipe)  # recorded again, with its inputs
        assert abs(pixels(pipe(**edit_of(name, DEVICE))) - wanted).max() <= 1


@pytest.fixture
def flux_pipe() -> Any:
    return pipes(KINDS[0])[0]


def test_a_device_out_of_memory_fails_the_request_and_no_other(flux_pipe: Any) -> None:
    wanted = pixels(flux_pipe(**edit_of(KINDS[0], DEVICE)))
    left = Counter(fails=1)

    def members(name: str) -> int:
        """Of the step under way, if this is its attention."""
        frame: Any = sys._getframe()
        while name == "_softmax" and frame is not None:
            if frame.f_code.co_name == "run_parts":
                return len(frame.f_locals["members"])
            frame = frame.f_back
        return 0

    def fails(name: str, nbytes: int) -> None:
        if left["fails"] and members(name) == 2:
            left["fails"] = 0
            raise torch.OutOfMemoryError("emu: out of memory")

    with (
        maskfx.Engine(maskfx.BatchPolicy(patience=5.0, batch=2)) as engine,
        emulated.failing(fails),
    ):
        tickets = [engine.submit(flux_pipe, **edit_of(KINDS[0], DEVICE)) for _ in range(2)]
        # halves of the step run by themselves, so no request fails of one lack of memory
        assert all(abs(pixels(t.result()) - wanted).max() <= 1 for t in tickets)
    assert not left["fails"]

    def always(name: str, nbytes: int) -> None:
        if members(name):
            raise torch.OutOfMemoryError("emu: out of memory")

    with maskfx.Engine() as engine:
        with emulated.failing(always), pytest.raises(torch.OutOfMemoryError):
            engine.submit(flux_pipe, **edit_of(KINDS[0], DEVICE)).result()
        after = pixels(engine.submit(flux_pipe, **edit_of(KINDS[0], DEVICE)).result())
    assert abs(after - wanted).max() <= 1


def test_a_device_without_a_type_says_so() -> None:
    case, size = ZOO[FLUX], ZOO[FLUX].sizes[0]
    module = copy.deepcopy(case.build()).to(DEVICE)
    with emulated.without(torch.float32), pytest.raises(Exception, match="has no torch.float32"):
        maskfx.compile(module).record(**inputs_of(FLUX, size, 0))


def test_a_default_device_places_tensors_as_it_does_without_the_emulated_one() -> None:
    emulated.needs_emulation()
    with torch.device("meta"):
        assert torch.tensor(1.0).is_meta
        assert torch.as_tensor([1]).is_meta
    assert not torch.tensor(1.0).is_meta
