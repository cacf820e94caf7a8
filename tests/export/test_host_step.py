"""Steps of the host: edits, recordings and batches give the pictures of the runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import maskfx
from maskfx.errors import CacheError, InputError, MaskError, MissingRequest
from maskfx.export.host import Edit, Host, Record
from maskfx.runtime.cache.quantize import Encoding, Format
from tests.export.hosted import (
    array,
    arrays,
    compilation_of,
    denoiser_of,
    host_of,
    recording_of,
    runner,
    skip_refused,
    tensor,
)
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO, Size, called
from tests.runtime.test_oracle import tensors

FLUX = "FluxTransformer2DModel"
SHORT = (FLUX, pytest.param("AuraFlowTransformer2DModel", marks=pytest.mark.slow))


def error(found: np.ndarray, wanted: torch.Tensor) -> float:
    exact = array(wanted).astype(np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def near(found: list[Any], wanted: Any, bound: float = 1e-4) -> None:
    every = tensors(wanted)
    assert len(found) == len(every)
    for one, two in zip(found, every, strict=True):
        assert one.shape == tuple(two.shape)
        assert error(one, two) < bound


def check_steps(name: str, sizes: tuple[Size, ...], low: bool) -> None:
    """Record by the host, edit by the host, in one batch of all sizes; compare with the module."""
    case, denoiser = ZOO[name], denoiser_of(name)
    host, run = host_of(name, (), sizes[0], low)
    inputs = [case.inputs(size, n) for n, size in enumerate(sizes)]
    recorded = host.step([Record(arrays(own)) for own in inputs], run)
    for own, result in zip(inputs, recorded, strict=True):
        near(result.outputs, called(denoiser.module, own))
    masks = [MASKS["stroke"](case.mask_shape(size), n).numpy() for n, size in enumerate(sizes)]
    edits = [
        Edit(arrays(own), mask, result.recording)
        for own, mask, result in zip(inputs, masks, recorded, strict=True)
        if result.recording is not None
    ]
    for own, result in zip(inputs, host.step(edits, run), strict=True):
        near(result.outputs, called(denoiser.module, own))


@pytest.mark.parametrize("low", [False, True], ids=["compiled", "lowered"])
@pytest.mark.parametrize("name", SHORT)
def test_an_edit_with_the_inputs_of_its_recording_is_the_dense_run(name: str, low: bool):
    check_steps(name, ZOO[name].sizes[:3], low)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_an_edit_of_every_model_is_the_dense_run(name: str):
    skip_refused(name)
    check_steps(name, ZOO[name].sizes[:1] * 2, True)


# One denoiser, with a mask and a recording by the runtime.


def flux() -> tuple[Host, Any, dict[str, Any], Any, maskfx.StepCache]:
    """Host, runner, arguments, mask and recording of one request."""
    case = ZOO[FLUX]
    size = case.sizes[0]
    host, run = host_of(FLUX, (), size, True)
    inputs = case.inputs(size, 0)
    mask = MASKS["stroke"](case.mask_shape(size), 0)
    return host, run, inputs, mask, denoiser_of(FLUX).record(**inputs)[1]


def test_an_edit_of_a_stored_recording_is_the_runtimes():
    host, run, inputs, mask, kept = flux()
    other = ZOO[FLUX].inputs(ZOO[FLUX].sizes[0], 5)
    changed = {**inputs, "hidden_states": other["hidden_states"]}
    wanted = denoiser_of(FLUX).edit([maskfx.EditStep(changed, mask, kept)])[0]
    [found] = host.step([Edit(arrays(changed), mask.numpy(), recording_of(kept))], run)
    near(found.outputs, wanted, 1e-5)
    outside = ~mask.numpy()
    recorded = array(kept.output[0])
    np.testing.assert_array_equal(found.outputs[0][:, outside], recorded[:, outside])
    assert error(found.outputs[0], kept.output[0]) > 1e-3


@pytest.mark.parametrize("format", [Format.BF16, Format.INT8, Format.INT4])
def test_an_edit_of_packed_rows_is_the_runtimes(format: Format):
    host, run, inputs, mask, kept = flux()
    encoding = Encoding(format, stats=format)
    wanted = denoiser_of(FLUX).edit([maskfx.EditStep(inputs, mask, kept.packed(encoding))])[0]
    [found] = host.step([Edit(arrays(inputs), mask.numpy(), recording_of(kept, encoding))], run)
    near(found.outputs, wanted, 1e-5)


def test_values_of_the_request_are_computed_once():
    host, run, inputs, mask, kept = flux()
    seen: list[str] = []

    def counted(graph: str, values: Any) -> Any:
        seen.append(graph)
        return run(graph, values)

    request = host.request(arrays(inputs), counted)
    edit = Edit(arrays(inputs), mask.numpy(), recording_of(kept), request=request)
    host.step([edit], counted)
    assert seen == ["side_request", "edit"]


def test_an_empty_and_a_full_mask_read_nothing():
    host, run, inputs, mask, kept = flux()
    none = np.zeros_like(mask.numpy())
    recording = recording_of(kept)
    [same] = host.step([Edit(arrays(inputs), none, recording)], run)
    np.testing.assert_array_equal(same.outputs[0], recording.output[0])
    recording.rows.clear()
    recording.stats.clear()
    [full] = host.step([Edit(arrays(inputs), ~none, recording)], run)
    near(full.outputs, denoiser_of(FLUX).module(**inputs))


def test_the_dense_graph_is_the_module():
    host, run, inputs, _, _ = flux()
    near(host.dense(arrays(inputs), run), denoiser_of(FLUX).module(**inputs))


def test_a_side_graph_of_one_batch_size_runs_once_for_each_group():
    host, run, inputs, _, _ = flux()
    size = Size(3, 4, 6, 5)
    inputs = ZOO[FLUX].inputs(size, 3)
    single = Host({**host.manifest, "sizes": {**host.manifest["sizes"], "batch": 2}})
    batches: list[int] = []

    def grouped(graph: str, values: Any) -> Any:
        if graph == "dense":
            batches.append(len(values["hidden_states"]))
        return run(graph, values)

    near(single.dense(arrays(inputs), grouped), denoiser_of(FLUX).module(**inputs))
    assert batches == [2, 2]


# Errors.


def refused(kind: type[Exception], match: str, **changes: Any) -> None:
    """Check that an edit with changed fields is refused."""
    host, run, inputs, mask, kept = flux()
    fields = {"arguments": arrays(inputs), "mask": mask.numpy(), "recording": recording_of(kept)}
    for name, change in changes.items():
        fields[name] = change(fields[name])
    with pytest.raises(kind, match=match):
        host.step([Edit(**fields)], run)


def test_arguments_are_refused_by_name():
    def less(arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: v for name, v in arguments.items() if name != "timestep"}

    refused(MissingRequest, r"\['timestep'\] are missing", arguments=less)
    refused(InputError, r"\['colour'\] are none", arguments=lambda a: {**a, "colour": a["img_ids"]})
    refused(
        InputError,
        "hidden_states: expected float32, got float64; convert it",
        arguments=lambda a: {**a, "hidden_states": a["hidden_states"].astype(np.float64)},
    )
    refused(
        InputError,
        r"hidden_states: dimension 2 is 3, expected \d+",
        arguments=lambda a: {**a, "hidden_states": a["hidden_states"][..., :3]},
    )
    refused(
        InputError,
        r"its tokens is 15, but 16 in hidden_states",
        arguments=lambda a: {**a, "img_ids": a["img_ids"][:15]},
    )
    refused(
        InputError,
        r"hidden_states: expected 3 dimensions",
        arguments=lambda a: {**a, "hidden_states": a["hidden_states"][0]},
    )
    refused(
        InputError,
        "return_dict: this export computes False only, got True",
        arguments=lambda a: {**a, "return_dict": True},
    )


def test_masks_and_recordings_are_refused():
    refused(MaskError, r"Edit\.mask: expected booleans of shape \(16,\)", mask=lambda m: m[:5])
    refused(MaskError, "got float64", mask=lambda m: m.astype(np.float64))

    def other(**changes: Any) -> Any:
        def change(recording: Any) -> Any:
            for name, value in changes.items():
                setattr(recording, name, value)
            return recording

        return change

    refused(CacheError, "by another program", recording=other(code="x"))
    refused(CacheError, "with other weights", recording=other(weights="x"))
    refused(CacheError, "recorded at tokens=9", recording=other(sizes={"tokens": 9}))
    refused(CacheError, "holds no rows of", recording=other(rows={}))
    refused(
        CacheError,
        "recorded at timestep=",
        arguments=lambda a: {**a, "timestep": a["timestep"] + 1},
    )
    none = np.zeros(16, dtype=bool)
    refused(MaskError, "don't lie within", recording=other(masks=(none, none)))


def test_an_export_without_a_graph_says_how_to_make_it():
    host, run, inputs, _, _ = flux()
    graphs = {k: v for k, v in host.manifest["graphs"].items() if k != "record"}
    with pytest.raises(MissingRequest, match=r"no graph 'record', only \['dense', 'edit'"):
        Host({**host.manifest, "graphs": graphs}).step([Record(arrays(inputs))], run)


def test_a_number_for_a_batch_is_expanded():
    host, run, inputs, mask, kept = flux()
    once = {**arrays(inputs), "timestep": float(inputs["timestep"][0])}
    [found] = host.step([Edit(once, mask.numpy(), recording_of(kept))], run)
    near(found.outputs, denoiser_of(FLUX).module(**inputs))
    assert tensor(found.outputs[0]).dtype == torch.float32
    assert compilation_of(denoiser_of(FLUX), inputs) is not None
    assert runner is not None
