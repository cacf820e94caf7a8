"""Profiles: every batch within the given ranges lies within those of all dimensions."""

from __future__ import annotations

import numpy as np
import pytest

from maskfx.errors import InputError
from maskfx.export.host.dimensions import dimension_size
from maskfx.export.host.layout import HostLayout
from maskfx.export.host.sites import Sites
from maskfx.export.host.tables import BatchTables
from maskfx.export.profiles import Range, ShapeProfile, read_ranges
from tests.export.hosted import manifest_of
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO

FLUX, UNET = "FluxTransformer2DModel", "UNet2DConditionModel-sd15"
IN_BATCHES = ("requests", "rows", "rest", "keys", "halo", "loaded")


def test_ranges_are_read():
    found = read_ranges(["rows=64:1024:4096", "text:0=77"])
    assert found == {"rows": Range(64, 1024, 4096), "text:0": Range(77, 77, 77)}


@pytest.mark.parametrize("text", ["rows", "rows=", "rows=1:2", "rows=a:b:c", "=1", "rows=-1:2:3"])
def test_texts_that_are_no_ranges_are_refused(text: str):
    with pytest.raises(InputError, match="expected NAME=LEAST:USUAL:MOST"):
        read_ranges([text])


def test_ranges_out_of_order_are_refused():
    for text in ("rows=0:1:2", "rows=2:1:3"):
        with pytest.raises(InputError, match="expected 1 <= least <= usual <= most"):
            read_ranges([text])


def drawn(draw: np.random.Generator, ends: str) -> int:
    least, _, most = map(int, ends.split(":"))
    return int(draw.integers(least, most + 1))


@pytest.mark.parametrize("name", [FLUX, pytest.param(UNET, marks=pytest.mark.slow)])
def test_sizes_of_any_batch_lie_within_the_profile(name: str):
    case = ZOO[name]
    manifest = manifest_of(name, (), case.sizes[0], True)
    layout = HostLayout.read(manifest)
    spatial = "y" in manifest["example"]
    sizes = {"y": "8:8:16", "x": "8:16:16"} if spatial else {"tokens": "16:24:64"}
    texts = ["requests=1:2:4", "rows=4:20:200", "text:0=3:7:9"]
    texts += [f"{role}={ends}" for role, ends in sizes.items()]
    profile = ShapeProfile(manifest, read_ranges(texts))
    names = [n for n, d in manifest["dimensions"].items() if d["kind"] in IN_BATCHES]
    ranges = {name: profile.of(name) for name in names}
    draw = np.random.default_rng(0)
    for seed in range(40):
        calls = []
        for _ in range(draw.integers(1, 5)):
            own = {role: drawn(draw, ends) for role, ends in sizes.items()}
            own |= {"batch": 1, "text:0": int(draw.integers(3, 10))}
            shape = (own["y"], own["x"]) if spatial else (own["tokens"],)
            kind = str(draw.choice(["random", "stroke", "border", "full"]))
            mask = MASKS[kind](shape, seed).numpy()
            calls.append(Sites(layout, own, mask))
        rows = sum(int(sites.mask.sum()) for sites in calls if sites.mask is not None)
        if not 4 <= rows <= 200:
            continue
        tables = BatchTables(calls, [1] * len(calls))
        for key, allowed in ranges.items():
            size = dimension_size(manifest["dimensions"][key], tables)
            assert allowed.least <= size <= allowed.most, (key, allowed, size)


def test_usual_sizes_are_those_of_the_usual_mask():
    manifest = manifest_of(FLUX, (), ZOO[FLUX].sizes[0], True)
    profile = ShapeProfile(manifest, read_ranges(["rows=2:10:16", "requests=1:2:2", "tokens=16"]))
    assert profile.of("rows_image") == Range(2, 10, 16)
    assert profile.of("rest_image") == Range(0, 22, 32)
    assert profile.of("requests") == Range(1, 2, 2)
    text = manifest["example"]["text:0"]
    assert profile.of("rows_text_0_image").usual == 2 * text + 10
    assert profile.of("size_tokens") == Range(16, 16, 16)


def test_unknown_and_impossible_ranges_are_refused():
    manifest = manifest_of(FLUX, (), ZOO[FLUX].sizes[0], True)
    with pytest.raises(InputError, match="profile colour=1:1:1: choose one of rows, requests"):
        ShapeProfile(manifest, read_ranges(["colour=1"]))
    with pytest.raises(InputError, match=r"rows=1:2:999: 1 requests have 16 sites at most"):
        ShapeProfile(manifest, read_ranges(["rows=1:2:999", "requests=1"]))
    fixed = {**manifest, "sizes": {**manifest["sizes"], "text:0": 7}}
    with pytest.raises(InputError, match="the graphs compute text:0=7 only"):
        ShapeProfile(fixed, read_ranges(["text:0=3:7:9"]))
