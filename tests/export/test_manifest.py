"""The manifest: it fits its schema, names what it refers to, and errors name the place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maskfx.errors import InputError
from maskfx.export.json_schema import find_errors
from maskfx.export.manifest import check, read_manifest, schema, write_manifest
from tests.export.hosted import denoiser_of, manifest_of
from tests.factories.zoo import ZOO, slow_unet

FLUX = "FluxTransformer2DModel"


def flux(low: bool = True) -> dict[str, Any]:
    return copy.deepcopy(manifest_of(FLUX, (), ZOO[FLUX].sizes[0], low))


@pytest.mark.parametrize("name", slow_unet([FLUX, "UNet2DConditionModel-sdxl"]))
def test_a_manifest_fits_its_schema_for_another_reader_of_schemas(name: str):
    validator = pytest.importorskip("jsonschema_rs").validator_for(schema())
    for low in (False, True):
        document = json.loads(json.dumps(manifest_of(name, (), ZOO[name].sizes[0], low)))
        assert list(validator.iter_errors(document)) == []


def test_a_manifest_states_code_weights_and_cache():
    document, denoiser = flux(), denoiser_of(FLUX)
    program = next(iter(denoiser.programs.values()))
    assert document["code"] == program.code
    assert document["weights"] == denoiser.fingerprint()
    taps = program.interface.taps
    assert list(document["taps"]) == list(taps)
    cache = denoiser.record(**ZOO[FLUX].inputs(ZOO[FLUX].sizes[0], 0))[1]
    for name, rows in cache.rows.items():  # one batch element
        sites = document["taps"][name]
        assert isinstance(rows, torch.Tensor)
        assert sites["bytes"] * rows.shape[1] == rows.nbytes


def test_every_input_of_the_graphs_is_described_in_their_order():
    document, denoiser = flux(low=False), denoiser_of(FLUX)
    program = next(iter(denoiser.programs.values()))
    for name in ("edit", "record"):
        found = [value["name"] for value in document["graphs"][name]["inputs"]]
        assert found == list(program.interface.inputs)
    outputs = document["graphs"]["record"]["outputs"]
    assert [value["tap"] for value in outputs if value["tap"]] == list(program.interface.taps)
    makers = {value["made_by"] for value in document["graphs"]["edit"]["inputs"]}
    assert makers == {"request", "host", "cache", "side_request"}


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path):
    document = flux()
    write_manifest(document, tmp_path)
    assert read_manifest(tmp_path) == json.loads(json.dumps(document))
    assert json.loads((tmp_path / "manifest.schema.json").read_text()) == schema()


def drop_code(document: dict[str, Any]) -> None:
    del document["code"]


def rename_dimension(document: dict[str, Any]) -> None:
    document["graphs"]["edit"]["inputs"][0]["dims"][0] = "rows_nowhere"


def change_kind(document: dict[str, Any]) -> None:
    document["graphs"]["edit"]["inputs"][1]["source"] = {"kind": "wish"}


def lose_a_tap(document: dict[str, Any]) -> None:
    source = next(
        value["source"]
        for value in document["graphs"]["edit"]["inputs"]
        if value["source"]["kind"] == "rest"
    )
    source["tap"] = "gone"


def add_a_member(document: dict[str, Any]) -> None:
    document["graphs"]["edit"]["inputs"][0]["colour"] = "red"


def count_wrong(document: dict[str, Any]) -> None:
    given = next(v for v in document["graphs"]["edit"]["inputs"] if v["source"]["kind"] == "given")
    given["source"]["index"] = 99


def repeat_a_name(document: dict[str, Any]) -> None:
    inputs = document["graphs"]["edit"]["inputs"]
    inputs[1]["name"] = inputs[0]["name"]


def swap_types(document: dict[str, Any]) -> None:
    document["levels"].append({**dict.fromkeys(["grow", "divide", "extra", "times"], [1, 1])})


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (drop_code, r"manifest\.code: is missing"),
        (rename_dimension, r"manifest\.graphs\.edit\.inputs\[0\]\.dims\[0\]: there is no dim"),
        (change_kind, r"manifest\.graphs\.edit\.inputs\[1\]\.source: fits no alternative"),
        (lose_a_tap, r"inputs\[\d+\]\.source\.tap: there is no tap 'gone'"),
        (add_a_member, r"inputs\[0\]\.colour: is no member here"),
        (count_wrong, r"inputs\[\d+\]\.source\.index: is 99, but there are \d+"),
        (repeat_a_name, r"inputs\[1\]\.name: another of the inputs is called"),
        (swap_types, r"manifest\.levels\[\d+\]\.parent: is missing"),
    ],
)
def test_a_broken_manifest_is_refused_with_the_place(
    change: Callable[[dict[str, Any]], None], wanted: str
):
    document = flux()
    check(document)
    change(document)
    with pytest.raises(InputError, match=wanted):
        check(document)


def test_another_format_asks_for_another_export():
    with pytest.raises(InputError, match="format 9, this maskfx reads 1; export the denoiser"):
        check({"format": 9})


def test_a_directory_without_a_manifest_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"manifest\.json can't be read"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"manifest\.json is no JSON"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("value", "part", "wanted"),
    [
        (True, {"type": "integer"}, "expected integer, got True"),
        (1.5, {"type": ["integer", "null"]}, "expected integer or null, got 1.5"),
        ([1], {"type": "array", "minItems": 2}, "expected 2 or more items, got 1"),
        ("a", {"enum": ["b", "c"]}, "expected one of 'b', 'c', got 'a'"),
        (-1, {"minimum": 0}, "expected 0 or more, got -1"),
        ("ab", {"pattern": "^a$"}, "expected text that matches ^a$, got 'ab'"),
    ],
)
def test_an_error_of_a_schema_says_what_was_expected(value: object, part: Any, wanted: str):
    assert list(find_errors(value, part, "here")) == [("here", wanted)]


def test_a_schema_with_unknown_keywords_is_refused():
    with pytest.raises(ValueError, match="unknown keywords"):
        list(find_errors(1, {"multipleOf": 2}, "here"))
