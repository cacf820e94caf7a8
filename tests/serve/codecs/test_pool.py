"""Real codec processes: what pictures mean, and what those cost that kill or hang one."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.errors import ApiError
from maskfx.serve.request import Pixels
from tests.serve.codecs.test_sniff import bomb, text_bomb
from tests.serve.served import file, mask, picture, until

LIMIT = 4 << 20


@pytest.fixture(scope="module")
def codecs():
    with Codecs(1) as pool:
        yield pool


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def refused(work: Coroutine[Any, Any, Any]) -> ApiError:
    with pytest.raises(ApiError) as found:
        run(work)
    return found.value


def opened(b64: bytes):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64))))


def test_pixels_survive_a_round_trip(codecs: Codecs) -> None:
    seen = run(codecs.decode(file(picture()), "image", LIMIT))
    assert np.array_equal(seen.pixels, picture())
    assert seen.clear is None
    made = run(codecs.encode(picture(), "png", None, (64, 48)))
    assert np.array_equal(opened(made), picture())


def test_an_image_is_turned_upright(codecs: Codecs) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = file(picture(), "png", exif=exif)
    seen = run(codecs.decode(turned, "image", LIMIT))
    assert np.array_equal(seen.pixels, np.rot90(picture(), -1))
    found = run(codecs.decode_mask(file(mask(), exif=exif), "mask", LIMIT, luminance=False))
    assert np.array_equal(found.edit, np.rot90(mask()[..., 3] == 0, -1))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "I;16", "CMYK"])
def test_every_mode_becomes_rgb(codecs: Codecs, mode: str) -> None:
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    else:
        image = grey.convert(mode)
    out = io.BytesIO()
    image.save(out, "jpeg" if mode == "CMYK" else "png", quality=100)
    seen = run(codecs.decode(out.getvalue(), "image", LIMIT)).pixels
    assert seen.shape == (16, 16, 3)
    close = 255 if mode in ("1",) else 6
    assert np.abs(seen[..., 0].astype(int) - np.asarray(grey)).max() <= close


def test_transparent_pixels_of_a_palette_are_seen(codecs: Codecs) -> None:
    image = Image.fromarray(mask()[..., 3] // 255).convert("P")
    out = io.BytesIO()
    image.save(out, "png", transparency=0)
    found = run(codecs.decode_mask(out.getvalue(), "mask", LIMIT, luminance=False))
    assert found.alpha
    assert np.array_equal(found.edit, mask()[..., 3] == 0)


def test_a_transparent_grey_of_16_bits_is_seen(codecs: Codecs) -> None:
    """The other greys stay what they are, as without it."""
    grey = (np.arange(256).reshape(16, 16) * 257).astype(np.uint16)
    out = io.BytesIO()
    Image.fromarray(grey).save(out, "png", transparency=77 * 257)
    seen = run(codecs.decode(out.getvalue(), "image", LIMIT))
    assert np.array_equal(seen.pixels, (grey >> 8).astype(np.uint8)[..., None].repeat(3, 2))
    assert seen.clear is not None
    assert np.flatnonzero(seen.clear).tolist() == [77]
    found = run(codecs.decode_mask(out.getvalue(), "mask", LIMIT, luminance=False))
    assert np.flatnonzero(found.edit).tolist() == [77]


def test_a_masks_thinnest_stroke_survives_resizing(codecs: Codecs) -> None:
    thin = np.zeros((480, 640), np.bool_)
    thin[123, :] = True
    small, back = (
        run(codecs.fit([thin], size))[0].view(np.bool_) for size in ((33, 17), (1000, 999))
    )
    assert small.any(axis=0).all()
    assert small.sum() == 33
    assert back.any(axis=0).all()


def test_a_result_of_another_size_is_pasted(codecs: Codecs) -> None:
    original, where = picture(63, 47), mask(63, 47)[..., 3] == 0
    small = np.full((40, 56, 3), 7, np.uint8)
    made = opened(run(codecs.encode(small, "png", None, (63, 47), (original, where))))
    assert np.array_equal(made[~where], original[~where])
    assert (made[where] == 7).all()


@pytest.mark.parametrize(("form", "name"), [("jpeg", "JPEG"), ("webp", "WEBP"), ("png", "PNG")])
def test_formats_and_their_quality(codecs: Codecs, form: str, name: str) -> None:
    smooth = np.asarray(Image.fromarray(picture(8, 8)).resize((256, 256)))
    sizes = []
    for quality in (10, 95):
        data = base64.b64decode(run(codecs.encode(smooth, form, quality, (256, 256))))
        assert Image.open(io.BytesIO(data)).format == name
        sizes.append(len(data))
    assert sizes[0] == sizes[1] if form == "png" else sizes[0] < sizes[1] / 2


def printed() -> Pixels:
    """Black on white, and again and again."""
    letters = np.random.default_rng(0).random((16, 256)) < 0.05
    return np.where(np.tile(letters, (16, 1))[..., None], 0, 255).astype(np.uint8).repeat(3, 2)


def grainy() -> Pixels:
    """Slow changes and the noise of a camera."""
    slope = np.linspace(0, 200, 256)[:, None, None]
    return (slope + np.random.default_rng(0).integers(0, 24, (256, 256, 3))).astype(np.uint8)


@pytest.mark.parametrize("draw", [printed, grainy])
def test_png_takes_no_more_room_than_the_usual_way(
    codecs: Codecs, draw: Callable[[], Pixels]
) -> None:
    made = run(codecs.encode(draw(), "png", None, (256, 256)))
    assert np.array_equal(opened(made), draw())
    usual = io.BytesIO()
    Image.fromarray(draw()).save(usual, "png", compress_level=3)
    assert len(base64.b64decode(made)) <= len(usual.getvalue())


def test_a_photo_with_a_preview_behind_it(codecs: Codecs) -> None:
    photo, preview = (Image.fromarray(picture(*side)) for side in ((64, 48), (16, 12)))
    whole = io.BytesIO()
    photo.save(whole, "MPO", save_all=True, append_images=[preview])
    seen = run(codecs.decode(whole.getvalue(), "image", LIMIT))
    assert seen.pixels.shape == (48, 64, 3)


def test_bad_files_name_their_field(codecs: Codecs) -> None:
    whole = file(picture())
    frames = [Image.fromarray(picture(seed=k)) for k in range(3)]
    animated = io.BytesIO()
    frames[0].save(animated, "png", save_all=True, append_images=frames[1:])
    for data, code in (
        (whole[: len(whole) // 2], "invalid_image_file"),
        (whole[:50] + bytes(300) + whole[350:], "invalid_image_file"),
        (file(picture(), "jpeg")[:900], "invalid_image_file"),
        (animated.getvalue(), "unsupported_image"),
        (text_bomb(20 << 20), "unsupported_image"),
        (text_bomb(20 << 20, b"iTXt"), "unsupported_image"),
        (bomb(13_000, 13_000), "image_too_large"),
    ):
        error = refused(codecs.decode(data, "control_image", LIMIT))
        assert (error.code, error.param) == (code, "control_image"), data[:60]


def test_bombs_take_no_memory(codecs: Codecs) -> None:
    run(codecs.decode(file(picture()), "image", LIMIT))
    pid = codecs.pids[0]
    before = peak(pid)
    for data in (bomb(13_000, 13_000), text_bomb(80 << 20), text_bomb(80 << 20, b"iTXt")):
        assert len(data) < 1 << 20
        refused(codecs.decode(data, "image", LIMIT))
    assert codecs.pids == [pid]
    assert peak(pid) - before < 32 << 20


def peak(pid: int) -> int:
    """The most memory that a process ever had."""
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def dead(pid: int) -> bool:
    """Killed with all of its threads, and not yet collected by its parent."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z" and len(list(Path(f"/proc/{pid}/task").iterdir())) == 1


def test_a_process_that_dies_in_between_costs_nothing(codecs: Codecs) -> None:
    for _ in range(3):
        old = codecs.pids[0]
        os.kill(old, signal.SIGKILL)
        until(partial(dead, old))
        assert run(codecs.decode(file(picture()), "image", LIMIT)).pixels.shape == (48, 64, 3)
        assert codecs.pids[0] != old


def test_a_process_that_dies_or_hangs_costs_one_picture() -> None:
    async def stopped(pool: Codecs, how: signal.Signals) -> None:
        pid = pool.pids[0]
        os.kill(pid, signal.SIGSTOP)
        asking = asyncio.create_task(pool.decode(file(picture()), "image", LIMIT))
        await asyncio.sleep(0.1)
        os.kill(pid, how)
        with pytest.raises(ApiError, match="image") as found:
            await asking
        assert (found.value.code, found.value.param) == ("invalid_image_file", "image")
        seen = await pool.decode(file(picture()), "image", LIMIT)
        assert np.array_equal(seen.pixels, picture())
        assert not alive(pid)

    with Codecs(1, seconds=2.5) as pool:
        run(stopped(pool, signal.SIGKILL))
        started = time.monotonic()
        run(stopped(pool, signal.SIGSTOP))  # silent until its time is over
        assert 2 < time.monotonic() - started < 9


def test_a_finished_picture_outlives_the_process_that_writes_it() -> None:
    async def struck(pool: Codecs) -> bytes:
        pid = pool.pids[0]
        os.kill(pid, signal.SIGSTOP)
        writing = asyncio.create_task(pool.encode(picture(), "png", None, (64, 48)))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        return await writing

    with Codecs(1) as pool:
        assert np.array_equal(opened(run(struck(pool))), picture())


def test_no_process_outlives_its_pool() -> None:
    with Codecs(2) as pool:
        pids = pool.pids
        assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_results_go_before_uploads() -> None:
    async def race(pool: Codecs) -> list[str]:
        order: list[str] = []

        async def noted(name: str, work: Coroutine[Any, Any, Any]) -> None:
            await work
            order.append(name)

        large = file(picture(800, 600))
        uploads = [noted("upload", pool.decode(large, "image", LIMIT)) for _ in range(4)]
        result = noted("result", pool.encode(picture(), "png", None, (64, 48)))
        await asyncio.gather(*uploads, result)
        return order

    with Codecs(1) as pool:
        assert run(race(pool)).index("result") <= 1
