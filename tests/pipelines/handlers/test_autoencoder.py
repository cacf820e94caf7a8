"""Encoding and decoding only where a picture differs from its template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import (  # type: ignore[import-untyped,unused-ignore]
    cpu_offload_with_hook,
)
from torch import Tensor, nn

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.call_policy import CallPosition
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.handlers import autoencoder
from maskfx.pipelines.handlers.autoencoder import (
    INPUT,
    AutoencoderCalls,
    AutoencoderMethod,
    edit_of,
    find_methods,
)
from maskfx.pipelines.handlers.call_handler import CallPart, RecordHandler
from maskfx.pipelines.parts.stand_in import MethodCall
from maskfx.pipelines.templates.template_library import CODED_SHARE, TemplateLibrary
from maskfx.runtime.cache.quantize import LOSSLESS
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.templates.footprint import least_bytes
from tests.factories.lora import adapter_of
from tests.factories.pipelines import PIPES, SIDE, call_of, noise, square, vae, white
from tests.factories.zoo import tiny

NAME = "StableDiffusionInpaintPipeline"
NARROW = maskfx.Quality(vae="mask")


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("method", "shape"), [("decode", (2, 4, 16, 16)), ("encode", (2, 3, 32, 32))]
)
@pytest.mark.parametrize("ratio", [0.05, 0.4])
def test_a_recorded_call_is_edited_exactly(method: str, shape: tuple[int, ...], ratio: float):
    module = AutoencoderMethod(vae(), method)
    compiled = maskfx.compile(module)
    sample = torch.randn(shape, generator=noise(0))
    with torch.no_grad():
        wanted, cache = module(sample), compiled.record(sample=sample)[1]
    mask = torch.rand(shape[2:], generator=noise(1)) < ratio
    [found] = compiled.edit([maskfx.EditStep({INPUT: sample}, mask, cache)])
    assert compiled.programs, maskfx.explain(compiled)
    assert relative(found, wanted) < 1e-4


def test_an_edit_computes_the_sites_that_differ_and_some_around_them():
    module = AutoencoderMethod(vae(), "encode")
    compiled = maskfx.compile(module)
    before = torch.randn(1, 3, 32, 32, generator=noise(0))
    _, cache = compiled.record(sample=before)
    cache.given = [before]
    after = before.clone()
    after[:, :, 10, 12] += 1
    step = edit_of(cache, {INPUT: after})
    assert step is not None
    assert step.mask.nonzero().amin(0).tolist() == [8, 10]  # a latent site is 2 pixels
    assert step.mask.nonzero().amax(0).tolist() == [12, 14]
    same = edit_of(cache, {INPUT: before})
    assert same is not None
    assert not same.mask.any()
    assert edit_of(cache, {INPUT: after[..., :16]}) is None
    assert edit_of(cache, {INPUT: torch.randn_like(before)}) is None  # most of it differs


def test_forms_of_results_are_kept():
    for made in (
        vae(),
        tiny(
            "AutoencoderTiny",
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
            latent_channels=4,
        ),
    ):
        for method, shape in (("encode", (1, 3, 32, 32)), ("decode", (1, 4, 16, 16))):
            module, sample = AutoencoderMethod(made, method), torch.randn(shape, generator=noise(0))
            with torch.no_grad():
                tensor, wanted = module(sample), getattr(made, method)(sample)
                assert module.form is not None
                found = module.form.built(tensor, True)
                [inside] = module.form.built(tensor, False)
            assert type(found) is type(wanted)
            assert module.form.tensor(found).equal(module.form.tensor(wanted))
            assert type(inside) is type(getattr(made, method)(sample, return_dict=False)[0])


@pytest.fixture(scope="module")
def narrow() -> Iterator[Any]:
    pipe = maskfx.compile(PIPES[NAME].build(), quality=NARROW)
    yield pipe
    maskfx.decompile(pipe)


def kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of autoencoders that became steps, in their order."""
    seen: list[str] = []
    step = maskfx.CompiledDenoiser.step

    def spied(denoiser: maskfx.CompiledDenoiser, steps: Any) -> Any:
        if isinstance(denoiser.module, AutoencoderMethod):
            seen.extend(f"{type(s).__name__} {denoiser.module.method}" for s in steps)
        return step(denoiser, steps)

    monkeypatch.setattr(maskfx.CompiledDenoiser, "step", spied)
    return seen


def edit(seed: int = 0, mask: Any = None, **more: Any) -> dict[str, Any]:
    return call_of(PIPES[NAME], seed, square() if mask is None else mask, **more)


def test_an_edit_encodes_and_decodes_around_its_mask(
    narrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = kinds(monkeypatch)
    found = np.asarray(narrow(**edit(1)).images[0], dtype=float)
    recorded = [kind for kind in seen if kind.startswith("Record")]
    edits = [kind for kind in seen if kind.startswith("Edit")]
    assert sorted(set(recorded)) == ["RecordStep decode", "RecordStep encode"]
    assert sorted(set(edits)) == ["EditStep decode", "EditStep encode"]
    seen.clear()
    full = np.asarray(narrow(**edit(1), quality=replace(NARROW, vae="full")).images[0], dtype=float)
    assert not seen
    inside = np.asarray(square()) > 127
    assert np.abs(found - full)[inside].mean() < 24  # random weights: far from equal, yet like it
    assert (found == full)[~inside].all()


@pytest.mark.slow
def test_a_wholly_masked_picture_is_decoded_in_full(
    narrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow(**edit())
    seen = kinds(monkeypatch)
    found = np.asarray(narrow(**edit(1, white())).images[0])
    assert "EditStep decode" not in seen
    full = narrow(**edit(1, white()), quality=replace(NARROW, vae="full")).images[0]
    assert (found == np.asarray(full)).all()


@pytest.mark.slow
def test_an_engine_gives_the_picture_of_a_call_alone(narrow: Any) -> None:
    alone = np.asarray(narrow(**edit(1)).images[0])
    with maskfx.Engine() as engine:
        tickets = [engine.submit(narrow, **edit(1)) for _ in range(2)]
        for ticket in tickets:
            assert np.abs(np.asarray(ticket.result().images[0]).astype(int) - alone).max() <= 1


def test_helper_processes_leave_narrow_calls_to_the_engine(narrow: Any) -> None:
    alone = np.asarray(narrow(**edit(1)).images[0])
    with maskfx.Engine(outside=maskfx.HelperProcesses()) as engine:
        found = engine.submit(narrow, **edit(1)).result().images[0]
    assert np.abs(np.asarray(found).astype(int) - alone).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("quality", [NARROW, "balanced"])
def test_no_recording_without_room(quality: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = kinds(monkeypatch)
    pipe = maskfx.compile(PIPES[NAME].build(), quality=quality, tiers=Tiers(host_bytes=1 << 19))
    pipe(**edit())
    assert not seen
    assert not any(method.compilations for method in pipeline_state_of(pipe).autoencoders.values())


def test_the_default_narrows_the_autoencoder_where_its_calls_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = kinds(monkeypatch)
    pipe = maskfx.compile(PIPES[NAME].build())
    pipe(**edit())
    assert "EditStep decode" in seen
    assert "autoencoder only where the picture differs" in maskfx.explain(pipe)
    seen.clear()
    pipe(**edit(), quality="all-steps")
    assert not [kind for kind in seen if kind.startswith("Edit")]
    seen.clear()
    whole = maskfx.compile(PIPES[NAME].build(), quality="all-steps")
    whole(**edit())
    whole(**edit(), quality="balanced")  # templates hold no calls of the autoencoder
    assert not seen


def test_an_adapter_of_the_autoencoder_runs_it_dense(
    narrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = kinds(monkeypatch)
    lora = [(adapter_of(narrow, 2, 0, "vae"), 1.0)]
    with_lora = np.asarray(narrow(**edit(1), lora=lora).images[0], dtype=float)
    assert not seen
    without = np.asarray(narrow(**edit(1)).images[0], dtype=float)
    inside = np.asarray(square()) > 127
    assert np.abs(with_lora - without)[inside].mean() > 1


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_a_recording_keeps_about_what_convolutions_read(method: str) -> None:
    module = AutoencoderMethod(vae(), method)
    compiled = maskfx.compile(module)
    sample = torch.randn((1, 4, 16, 16) if method == "decode" else (1, 3, 32, 32))
    least = least_bytes(compiled, {INPUT: sample}, LOSSLESS)
    assert not compiled.compilations
    with torch.no_grad():
        kept = compiled.record(sample=sample)[1].nbytes()
    assert 0.4 * kept < least <= kept


def test_an_autoencoder_that_moves_within_calls_runs_dense_in_all_of_them(
    narrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow(**edit())
    held = []

    def move(_pipe: Any, step: int, _time: Any, given: dict[str, Any]) -> dict[str, Any]:
        for parameter in narrow.vae.parameters() if step == 0 else ():
            held.append(parameter.data)
            parameter.data = parameter.data.clone()
        return given

    seen = kinds(monkeypatch)
    for _ in range(2):
        narrow(**edit(1), callback_on_step_end=move)
    assert "EditStep encode" in seen
    assert "EditStep decode" not in seen
    assert any("moved or converted" in note for note in pipeline_state_of(narrow).notes)


def refused(made: nn.Module, change: Any) -> list[str]:
    """The notes of a call before which the autoencoder was changed; the handler isn't asked."""
    compiled, notes = maskfx.compile(AutoencoderMethod(made, "decode")), Counter[str]()
    handler = mock.Mock(codes=True)
    calls = AutoencoderCalls({"vae.decode": compiled}, handler, notes)
    change()
    own: Any = made.decode
    call = MethodCall(own, (torch.zeros(1, 4, 16, 16),), {})
    assert calls.code(made, "decode", call) is None
    handler.code.assert_not_called()
    assert not compiled.compilations
    return list(notes)


@pytest.mark.parametrize("switch", ["use_tiling", "use_slicing"])
def test_an_autoencoder_that_computes_a_picture_in_parts_runs_dense(switch: str) -> None:
    made = vae()
    assert refused(made, lambda: setattr(made, switch, True)) == [
        f"vae.decode: {switch} is on; it runs dense"
    ]


def test_an_autoencoder_in_half_precision_that_is_converted_runs_dense() -> None:
    made = vae().half()
    assert "moved or converted" in refused(made, made.float)[0]


def test_an_offloaded_autoencoder_runs_dense() -> None:
    made = vae()
    [note] = refused(made, lambda: cpu_offload_with_hook(made, "cpu"))
    assert "offloading" in note


def test_recorded_calls_of_a_template_share_their_room() -> None:
    """Previews that decode each step leave the memory to the steps."""
    compiled = maskfx.compile(AutoencoderMethod(vae(), "decode"))
    sample = torch.randn(1, 4, 16, 16, generator=noise(0))
    each = compiled.record(sample=sample)[1].nbytes()
    library = TemplateLibrary(Tiers(host_bytes=int(2.5 * each * CODED_SHARE)))

    def recorded(name: str) -> int:
        handler = RecordHandler(library, name)
        parts = (
            CallPart(CallPosition("vae.decode", 0, f"decode {i}"), compiled, {INPUT: sample})
            for i in range(5)
        )
        return sum(handler.code(part) is not None for part in parts)

    assert [recorded(name) for name in ("one", "other", "one")] == [2, 2, 2]


def test_decompiling_restores_the_methods() -> None:
    pipe = PIPES[NAME].build()
    maskfx.decompile(maskfx.compile(pipe, quality=NARROW))
    assert not {"encode", "decode"} & vars(pipe.vae).keys()


def test_a_replaced_method_stays_as_it_is() -> None:
    pipe = PIPES[NAME].build()
    own = pipe.vae.decode

    def replaced(*given: Any, **named: Any) -> Any:
        return own(*given, **named)

    pipe.vae.decode = replaced
    maskfx.compile(pipe)
    assert list(pipeline_state_of(pipe).autoencoders) == ["vae.encode"]
    assert pipe.vae.decode is replaced
    maskfx.decompile(pipe)
    assert pipe.vae.decode is replaced


def test_pipelines_share_the_methods_of_one_autoencoder() -> None:
    pipe, other = PIPES[NAME].build(), PIPES[NAME].build()
    other.vae = pipe.vae
    for one in (pipe, other):
        maskfx.compile(one)
        assert list(pipeline_state_of(one).autoencoders) == ["vae.encode", "vae.decode"]


def test_other_arguments_run_the_autoencoder_itself() -> None:
    assert list(find_methods({"vae": vae(), "text": nn.Linear(1, 1)})) == [
        "vae.encode",
        "vae.decode",
    ]
    sample = torch.zeros(1, 4, SIDE, SIDE)
    assert autoencoder.input_of({"z": sample, "return_dict": False}) is sample
    assert autoencoder.input_of({"z": sample, "generator": torch.Generator()}) is sample
    assert autoencoder.input_of({"z": sample, "mask": sample}) is None
    assert autoencoder.input_of({"z": sample[0]}) is None


def test_a_narrow_call_of_a_pipeline_compiled_without_is_an_error() -> None:
    pipe = maskfx.compile(PIPES[NAME].build(), quality="all-steps")
    assert "decode" not in vars(pipe.vae)
    with pytest.raises(InputError, match=r'compiled with vae="full".*pass that quality to compile'):
        pipe(**edit(), quality=NARROW)
