"""The page at `/`, driven in a headless browser over real HTTP: mouse, touch, keys, a phone.

What the page sends is kept as bytes on its way in; a `Painter` stands where the workers would.
"""

from __future__ import annotations

import base64
import io
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import SecretStr

from maskfx.serve.codecs.paste import paste
from maskfx.serve.config import Limits, ServeSettings
from maskfx.serve.errors import ApiError
from maskfx.serve.http import create_app, make_server
from maskfx.serve.request import ModelState, RequestKind
from tests.serve.painter import CARD, Painter, drawn, pooled, tinted
from tests.serve.served import until

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=15_000)  # the machine may be busy

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}")

SIDE = 256  # of the examples: the model's size


class Wire:
    """Stands around the app: keeps the bodies of calls, and cuts the answer if it is ordered to."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.edits: list[dict[str, bytes]] = []
        self.generations: list[dict[str, bytes]] = []
        self.cut_after: int | None = None  # pieces of an answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path not in ("/v1/images/edits", "/v1/images/generations"):
            await self.app(scope, receive, send)
            return
        kept = self.edits if path.endswith("edits") else self.generations
        body = bytearray()
        sent = 0

        async def keep() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                kept.append(fields(dict(scope["headers"])[b"content-type"], bytes(body)))
            return message

        async def cut(message: Any) -> None:
            nonlocal sent
            if message["type"] == "http.response.body" and message.get("body"):
                if sent == self.cut_after:
                    raise ConnectionAbortedError("cut on purpose")
                sent += 1
            await send(message)

        await self.app(scope, keep, cut)


def fields(content_type: bytes, body: bytes) -> dict[str, bytes]:
    """The parts of a multipart body, by name."""
    boundary = b"--" + content_type.split(b"boundary=")[1]
    found = {}
    for part in body.split(boundary)[1:-1]:
        head, value = part[2:-2].split(b"\r\n\r\n", 1)
        name = re.search(rb'name="([^"]*)"', head)
        assert name
        found[name[1].decode()] = value
    return found


class Serving:
    """The real app before a painter, on a port, in a thread."""

    def __init__(self, painter: Painter, port: int = 0, **settings: Any) -> None:
        chosen = ServeSettings(codecs=1, shutdown_timeout=1, **settings)
        app = create_app(painter, chosen, painter._metrics)
        self.painter, self.wire = painter, Wire(app)
        self.server = make_server(self.wire, chosen)
        self.socket = socket.create_server(("127.0.0.1", port), backlog=64)
        self.port: int = self.socket.getsockname()[1]
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self.thread.start()
        until(lambda: self.server.started)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.socket.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"]
        )
        yield running
        running.close()


@pytest.fixture(scope="module")
def standing() -> Iterator[Serving]:
    """One server for most of the tests: its codec processes take a while to start."""
    with Serving(Painter()) as running:
        yield running


@pytest.fixture
def serving(standing: Serving) -> Serving:
    standing.painter.__init__()  # type: ignore[misc]  # as if new
    standing.wire.edits.clear()
    standing.wire.generations.clear()
    standing.wire.cut_after = None
    return standing


@pytest.fixture
def painter(serving: Serving) -> Painter:
    return serving.painter


@pytest.fixture
def wire(serving: Serving) -> Wire:
    return serving.wire


Visit = Callable[..., Any]


@pytest.fixture
def visit(browser: Any, serving: Serving) -> Iterator[Visit]:
    """Opens the page; in the end nothing may have broken the security policy or thrown."""
    contexts, complaints = [], []

    def opened(path: str = "/", **options: Any) -> Any:
        options.setdefault("viewport", {"width": 1200, "height": 900})
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.error('CSP', e.blockedURI))"
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if wrong(line) else None)
        page.goto(serving.url + path)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def wrong(line: Any) -> bool:
    """What the browser itself prints of a failed request is expected where one fails."""
    return line.type in ("error", "warning") and not line.text.startswith("Failed to load resource")


@pytest.fixture
def page(visit: Visit) -> Any:
    """The page with an example and a prompt."""
    return begun(visit())


def begun(page: Any) -> Any:
    expect(page.locator("#model-name")).to_have_text("painter")
    page.get_by_role("button", name="Room").click()
    page.get_by_label("Prompt").fill("a sofa of copper")
    return page


def set_size(page: Any, pixels: int) -> None:
    """The brush's size, by the slider that people use."""
    at = 100 * np.log(pixels) / np.log(400)
    page.locator("#size").evaluate(
        "(e, v) => { e.step = 'any'; e.value = v; e.dispatchEvent(new Event('input')); }", at
    )
    expect(page.locator("#size-value")).to_have_text(f"{pixels} px")


def frame(page: Any) -> tuple[float, float, float]:
    """Where the picture stands in the window, and its scale."""
    canvas = page.locator("#canvas")
    box, data = canvas.bounding_box(), canvas.evaluate("c => ({...c.dataset})")
    return box["x"] + float(data["left"]), box["y"] + float(data["top"]), float(data["scale"])


def spot(page: Any, x: float, y: float) -> tuple[float, float]:
    """The window's point over a point of the picture; whole, as a mouse's are."""
    left, top, scale = frame(page)
    return round(left + x * scale), round(top + y * scale)


def drag(page: Any, *points: tuple[float, float]) -> list[tuple[float, float]]:
    """Press, move and let go; returns the points in the picture's pixels."""
    left, top, scale = frame(page)
    spots = [spot(page, *point) for point in points]
    page.mouse.move(*spots[0])
    page.mouse.down()
    for to in spots[1:]:
        page.mouse.move(*to)
    page.mouse.up()
    return [((x - left) / scale, (y - top) / scale) for x, y in spots]


def painted(points: list[tuple[float, float]], size: float, shape: tuple[int, int]) -> Any:
    """Pixels whose centre is within half the size of the line through the points."""
    rows, columns = np.mgrid[: shape[0], : shape[1]] + 0.5
    found = np.zeros(shape, bool)
    for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
        length = (x1 - x0) ** 2 + (y1 - y0) ** 2
        along = ((columns - x0) * (x1 - x0) + (rows - y0) * (y1 - y0)) / (length or 1)
        along = np.clip(along, 0, 1)
        far = np.hypot(columns - x0 - along * (x1 - x0), rows - y0 - along * (y1 - y0))
        found |= far <= size / 2
    return found


def generate(page: Any) -> None:
    results = page.locator("#entries li").count()
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#entries li")).to_have_count(results + 1)


def picture(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


def sent_mask(wire: Wire) -> Any:
    """Of the last edit: True where it is see-through; everything else is opaque."""
    opened = Image.open(io.BytesIO(wire.edits[-1]["mask"]))
    assert (opened.format, opened.mode) == ("PNG", "RGBA")
    alpha = np.asarray(opened)[..., 3]
    assert set(np.unique(alpha)) <= {0, 255}
    return alpha == 0


def png(pixels: Any) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "png")
    return data.getvalue()


def noise(width: int, height: int) -> Any:
    return np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)


def choose(page: Any, name: str, data: bytes, kind: str = "image/png") -> None:
    page.locator("#file").set_input_files({"name": name, "mimeType": kind, "buffer": data})


def shown(page: Any, width: int, height: int) -> Any:
    """The colours on the canvas at the centres of the picture's pixels."""
    url = page.locator("#canvas").evaluate(
        "c => new Promise(done => requestAnimationFrame(() => requestAnimationFrame("
        "() => done(c.toDataURL()))))"
    )
    seen = picture(base64.b64decode(url.split(",")[1]))[..., :3]
    data = page.locator("#canvas").evaluate("c => ({...c.dataset})")
    left, top, scale = (float(data[name]) for name in ("left", "top", "scale"))
    rows = np.floor(top + scale * (np.arange(height) + 0.5)).astype(int)
    columns = np.floor(left + scale * (np.arange(width) + 0.5)).astype(int)
    return seen[rows][:, columns]


# what is sent


def test_the_mask_that_arrives_is_what_was_painted(page: Any, wire: Wire) -> None:
    set_size(page, 24)
    points = drag(page, (60, 70), (180, 90), (150, 200))
    generate(page)
    expected = painted(points, 24, (SIDE, SIDE))
    assert np.array_equal(sent_mask(wire), expected)
    assert 3000 < expected.sum() < 9000


def test_the_picture_that_arrives_is_the_one_that_was_chosen(visit: Visit, wire: Wire) -> None:
    page = visit()
    pixels = noise(120, 88)
    choose(page, "noise.png", png(pixels))
    page.get_by_label("Prompt").fill("less noise")
    drag(page, (20, 20), (60, 60))
    generate(page)
    sent = Image.open(io.BytesIO(wire.edits[0]["image"]))
    assert sent.format == "PNG"
    assert np.array_equal(np.asarray(sent.convert("RGB")), pixels)


def test_the_fields_that_arrive(page: Any, wire: Wire, painter: Painter) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Seed").fill("41")
    page.get_by_label("Steps").fill("7")
    page.get_by_label("Guidance").fill("2.5")
    page.get_by_label("Without").fill("fog")
    drag(page, (60, 70), (180, 90))
    generate(page)
    got = {k: v.decode() for k, v in wire.edits[0].items() if k not in ("image", "mask")}
    assert got == {
        "model": "painter",
        "prompt": "a sofa of copper",
        "seed": "41",
        "num_inference_steps": "7",
        "guidance_scale": "2.5",
        "negative_prompt": "fog",
        "n": "1",
        "output_format": "png",
        "stream": "true",
        "partial_images": "3",
    }
    assert (painter.asked[0].request.seed, painter.asked[0].request.steps) == (41, 7)


def test_fields_that_the_model_does_not_take_are_not_there(visit: Visit, painter: Painter) -> None:
    painter.serve_models(replace(CARD, takes=frozenset({"image", "mask", "steps"}), guidance=None))
    page = begun(visit())
    page.get_by_text("Settings").click()
    expect(page.get_by_label("Steps")).to_be_visible()
    for label in ("Seed", "Guidance", "Strength", "Without", "LoRA"):
        expect(page.get_by_label(label)).to_be_hidden()


def test_of_several_models_one_is_chosen(visit: Visit, wire: Wire, painter: Painter) -> None:
    other = replace(CARD, name="other", takes=frozenset({"image", "mask"}))
    painter.serve_models(CARD, other)
    page = visit()
    page.get_by_role("button", name="Room").click()
    page.get_by_label("Prompt").fill("a sofa")
    page.get_by_label("Model").select_option("other")
    drag(page, (60, 70), (180, 90))
    generate(page)
    assert wire.edits[0]["model"] == b"other"


def test_without_paint_or_prompt_nothing_is_sent(page: Any, wire: Wire) -> None:
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("Paint over what should change")
    page.get_by_label("Prompt").fill("  ")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label("Prompt")).to_be_focused()
    expect(page.get_by_label("Prompt")).to_have_attribute("aria-invalid", "true")
    assert wire.edits == []


def test_numbers_that_make_no_sense_are_not_sent(page: Any, wire: Wire) -> None:
    drag(page, (60, 70), (180, 90))
    page.get_by_text("Settings").click()
    page.get_by_label("Strength").fill("1.5")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label("Strength")).to_have_attribute("aria-invalid", "true")
    assert wire.edits == []


# the mask


@pytest.mark.slow
def test_erase_undo_redo_invert_clear(page: Any, wire: Wire) -> None:
    set_size(page, 20)
    shape = (SIDE, SIDE)
    first = painted(drag(page, (40, 60), (200, 60)), 20, shape)
    second = painted(drag(page, (40, 160), (200, 160)), 20, shape)
    page.get_by_role("button", name="Erase").click()
    hole = painted(drag(page, (120, 20), (120, 220)), 20, shape)
    generate(page)
    assert np.array_equal(sent_mask(wire), (first | second) & ~hole)
    for action, expected in (
        ("Undo", first | second),
        ("Undo", first),
        ("Redo", first | second),
        ("Invert the mask", ~(first | second)),
        ("Clear the mask", None),
        ("Undo", ~(first | second)),
    ):
        page.get_by_role("button", name=action).click()
        if expected is not None:
            generate(page)
            assert np.array_equal(sent_mask(wire), expected), action
    expect(page.get_by_role("button", name="Redo")).to_be_enabled()
    page.get_by_role("button", name="Erase").click()
    drag(page, (40, 230), (60, 230))
    expect(page.get_by_role("button", name="Redo")).to_be_disabled()  # that future is gone


def test_the_share_of_active_sites_is_told(page: Any, wire: Wire) -> None:
    expect(page.locator("#site-facts")).to_have_text("Nothing is painted yet")
    set_size(page, 30)
    drag(page, (60, 70), (180, 90))
    generate(page)
    mask = sent_mask(wire)
    cells = round(pooled(mask, 8) * (SIDE // 8) ** 2)
    expect(page.locator("#site-facts")).to_contain_text(f"active: {cells} of 1,024")


def test_sites_are_shown_over_the_picture(page: Any) -> None:
    set_size(page, 6)
    drag(page, (100, 100), (101, 100))
    before = shown(page, SIDE, SIDE)
    page.get_by_role("button", name="Show active sites").click()
    page.mouse.move(5, 5)
    changed = (shown(page, SIDE, SIDE) != before).any(-1)
    rows, columns = np.nonzero(changed)
    # the grid's lines may touch the neighbours' pixels
    assert 94 <= rows.min() <= 97
    assert 103 <= rows.max() <= 105
    assert 94 <= columns.min() <= 97
    assert 103 <= columns.max() <= 105
    assert changed[98:102, 98:102].all()


def test_zoomed_and_panned_strokes_land_where_they_are_seen(page: Any, wire: Wire) -> None:
    fitted = frame(page)[2]
    page.mouse.move(*spot(page, 128, 128))
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(50)
    left, _, scale = frame(page)
    page.get_by_role("button", name="Move the view").click()
    drag(page, (128, 128), (148, 138))
    page.wait_for_timeout(50)
    assert frame(page)[0] > left + 15 * scale
    page.keyboard.press("b")
    set_size(page, 10)
    points = drag(page, (110, 120), (130, 125))
    generate(page)
    assert scale > 1.5 * fitted
    assert np.array_equal(sent_mask(wire), painted(points, 10, (SIDE, SIDE)))


def test_keys_alone(visit: Visit, wire: Wire) -> None:
    page = visit()
    expect(page.locator("#model-name")).to_have_text("painter")
    focus(page, "Still life")
    page.keyboard.press("Enter")
    expect(page.locator("#canvas")).to_be_focused()
    for _ in range(5):
        page.keyboard.press("[")
    size = int(page.locator("#size-value").inner_text().split()[0])
    assert size < 48
    page.keyboard.press("ArrowLeft")
    for _ in range(3):
        page.keyboard.press("Shift+ArrowDown")
    page.keyboard.down(" ")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.up(" ")
    for _ in range(3):
        page.keyboard.press("ArrowDown")  # moves, and paints no more
    step = max(1, round(size / 4))
    x, y = SIDE / 2 - step, SIDE / 2 + 3
    expect(page.locator("#said")).to_contain_text("not painted")
    focus(page, "Prompt")
    page.keyboard.type(" with leaves")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#entries li")).to_have_count(1)
    points = [(x, y), (x + step, y), (x + step, y + step)]
    assert np.array_equal(sent_mask(wire), painted(points, size, (SIDE, SIDE)))
    assert wire.edits[0]["prompt"] == b"a blue ceramic vase with leaves"
    focus(page, "Compare: share")
    page.keyboard.press("Home")
    expect(page.locator("#split")).to_have_value("0")
    page.keyboard.press("Control+z")
    expect(page.locator("#site-facts")).to_have_text("Nothing is painted yet")


def focus(page: Any, name: str) -> None:
    """Tab until something of this name is focused; its focus must be seen."""
    for _ in range(60):
        page.keyboard.press("Tab")
        found = page.evaluate(
            "() => { const e = document.activeElement; return [e.ariaLabel || "
            "e.labels?.[0]?.innerText || e.innerText || '', e.matches(':focus-visible')]; }"
        )
        if found[0].startswith(name):
            assert found[1]
            return
    raise AssertionError(f"{name} can't be reached by Tab")


class Fingers:
    """On a screen that can be touched."""

    def __init__(self, page: Any) -> None:
        self.session = page.context.new_cdp_session(page)

    def __call__(self, kind: str, *points: tuple[float, float]) -> None:
        places = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
        self.session.send(
            "Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": places}
        )


PHONE = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
    "device_scale_factor": 2,
}


def test_fingers_on_a_phone(visit: Visit, wire: Wire) -> None:
    page = begun(visit(**PHONE))
    touch = Fingers(page)
    set_size(page, 16)
    spots = [spot(page, 80, 100), spot(page, 160, 120)]
    left, top, scale = frame(page)
    touch("Start", spots[0])
    touch("Move", spots[1])
    touch("End")
    # two fingers move apart: the view grows and nothing is painted
    a, b = spot(page, 100, 100), spot(page, 150, 150)
    touch("Start", a)
    touch("Start", a, b)
    touch("Move", (a[0] - 40, a[1] - 40), (b[0] + 40, b[1] + 40))
    touch("End")
    page.wait_for_timeout(50)
    assert frame(page)[2] > 1.5 * scale
    page.get_by_role("button", name="Generate").tap()
    expect(page.locator("#entries li")).to_have_count(1)
    points = [((x - left) / scale, (y - top) / scale) for x, y in spots]
    assert np.array_equal(sent_mask(wire), painted(points, 16, (SIDE, SIDE)))


def test_everything_fits_on_a_phone(visit: Visit) -> None:
    page = visit(**PHONE)
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    begun(page)
    drag(page, (60, 70), (180, 90))
    generate(page)
    page.get_by_text("Settings").click()
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    for button in page.get_by_role("button").all():
        box = button.bounding_box()
        assert box["x"] >= 0, button
        assert box["x"] + box["width"] <= 360, button
    for tool in page.locator("#tools button").all():
        box = tool.bounding_box()
        assert min(box["width"], box["height"]) >= 38


# the run and its result


def test_pixels_of_the_result_are_shown_as_they_are(visit: Visit, wire: Wire) -> None:
    page = visit()
    pixels = noise(64, 48)
    choose(page, "noise.png", png(pixels))
    page.get_by_label("Prompt").fill("less noise")
    set_size(page, 9)
    drag(page, (20, 20), (40, 30))
    generate(page)
    page.get_by_label("Compare: share").press("Home")
    mask = sent_mask(wire)
    result = tinted(pixels, mask, 1.0)
    seen = shown(page, 64, 48)
    assert np.array_equal(seen[~mask], pixels[~mask])
    assert np.array_equal(seen, result)
    page.get_by_label("Compare: share").press("End")
    assert np.array_equal(shown(page, 64, 48), pixels)
    with page.expect_download() as caught:
        page.get_by_role("link", name="Download").click()
    assert np.array_equal(picture(Path(caught.value.path()).read_bytes()), result)
    assert re.fullmatch(r"maskfx-\d+\.png", caught.value.suggested_filename)


def test_the_slider_compares(visit: Visit, wire: Wire) -> None:
    page = visit()
    pixels = noise(64, 48)
    choose(page, "noise.png", png(pixels))
    page.get_by_label("Prompt").fill("less noise")
    page.get_by_role("button", name="Invert the mask").click()
    generate(page)
    drag(page, (32, 24), (16, 24))
    page.wait_for_timeout(50)
    seen = shown(page, 64, 48)
    assert np.array_equal(seen[:, :16], pixels[:, :16])
    assert np.array_equal(seen[:, 17:], pixels[:, 17:, ::-1])
    expect(page.locator("#split")).to_have_value("25")
    assert sent_mask(wire).all()


def test_previews_are_seen_inside_the_mask(page: Any, painter: Painter, wire: Wire) -> None:
    set_size(page, 40)
    before = shown(page, SIDE, SIDE)
    drag(page, (60, 100), (200, 100))
    painter.gate.clear()
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_have_text("Preview 1 of 3")
    expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "1")
    page.mouse.move(5, 5)
    seen, mask = shown(page, SIDE, SIDE), sent_mask(wire)
    sent = picture(wire.edits[0]["image"])[..., :3]
    far = np.abs(seen.astype(int) - tinted(sent, mask, 0.25))
    changed = (seen != before).any(-1)
    assert not changed[:70].any()
    assert not changed[130:].any()
    assert changed[95:105, 80:180].mean() > 0.5
    assert far[95:105, 80:180].mean() < 12  # smoothed: the picture isn't shown at its own size
    painter.gate.set()
    expect(page.locator("#entries li")).to_have_count(1)


def test_escape_cancels_and_the_server_is_told(page: Any, painter: Painter) -> None:
    drag(page, (60, 100), (200, 100))
    painter.gate.clear()
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_have_text("Preview 1 of 3")
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Cancelled.")
    expect(page.get_by_role("button", name="Generate")).to_be_focused()
    until(lambda: bool(painter.cancelled))
    assert len(painter.cancelled) == 1
    painter.gate.set()
    generate(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_the_numbers_of_a_result(page: Any, wire: Wire) -> None:
    drag(page, (60, 100), (200, 100))
    generate(page)
    expect(page.locator("#speed")).to_contain_text("3.4×")  # 2.72 s of 0.84 s less 0.04 s queued
    numbers = page.locator("#numbers").inner_text().split("\n")
    facts = dict(zip(numbers[::2], numbers[1::2], strict=True))
    assert facts["Time"] == "0.84 s"
    assert facts["Whole picture"] == "2.72 s predicted"
    assert facts["Sites computed"] == f"{100 * pooled(sent_mask(wire), 8):.0f} %"
    page.get_by_role("button", name="Use seed").click()
    expect(page.locator("#seed")).to_have_value(facts["Seed"])


def test_history_brings_results_back(page: Any, wire: Wire) -> None:
    set_size(page, 20)
    first = painted(drag(page, (60, 60), (200, 60)), 20, (SIDE, SIDE))
    generate(page)
    page.get_by_role("button", name="Mask", exact=True).click()
    drag(page, (60, 160), (200, 160))
    page.get_by_label("Prompt").fill("a sofa of glass")
    generate(page)
    page.get_by_role("button", name="Result 1: a sofa of copper").click()
    expect(page.get_by_label("Prompt")).to_have_value("a sofa of copper")
    expect(page.locator("#entries [aria-current]")).to_have_count(1)
    generate(page)
    assert np.array_equal(sent_mask(wire), first)
    assert len(wire.edits) == 3


def test_a_result_is_edited_further(page: Any, wire: Wire) -> None:
    drag(page, (60, 100), (200, 100))
    generate(page)
    sent, mask = picture(wire.edits[0]["image"])[..., :3], sent_mask(wire)
    result = paste(tinted(sent, mask, 1.0), sent, mask)
    page.get_by_role("button", name="Edit this result").click()
    expect(page.locator("#site-facts")).to_have_text("Nothing is painted yet")
    drag(page, (60, 200), (200, 200))
    generate(page)
    assert np.array_equal(picture(wire.edits[1]["image"])[..., :3], result)


# pictures


@pytest.mark.slow
def test_large_pictures_are_scaled_down_and_it_is_said(visit: Visit, wire: Wire) -> None:
    page = visit()
    wide = np.zeros((1500, 4001, 3), np.uint8)
    wide[:, 2000:] = 255
    choose(page, "wide.png", png(wide))
    expect(page.locator("#note")).to_contain_text("Scaled down from 4001 × 1500 to 3344 × 1248.")
    page.get_by_label("Prompt").fill("a line")
    drag(page, (1000, 600), (2000, 600))
    generate(page)
    sent = picture(wire.edits[0]["image"])
    assert sent.shape[:2] == sent_mask(wire).shape == (1248, 3344)
    assert sent[0, 0, 0] == 0
    assert sent[0, -1, 0] == 255
    page.get_by_role("button", name="Scale to the model’s size").click()
    expect(page.locator("#picture-facts")).to_have_text("wide.png · 416 × 152")


def test_the_limit_is_the_server_s(browser: Any) -> None:
    with Serving(Painter(), limits=Limits(image_pixels=100_000)) as serving:
        page = browser.new_page()
        page.goto(serving.url)
        expect(page.locator("#model-name")).to_have_text("painter")
        choose(page, "some.png", png(noise(800, 200)))
        page.get_by_label("Prompt").fill("smaller")
        drag(page, (100, 60), (200, 60))
        expect(page.locator("#note")).to_contain_text("from 800 × 200 to 632 × 152")
        generate(page)
        assert sent_mask(serving.wire).shape == (152, 632)
        page.close()


def test_pictures_of_odd_sizes_are_sent_as_they_are(visit: Visit, wire: Wire) -> None:
    page = visit()
    pixels = noise(125, 83)
    choose(page, "odd.png", png(pixels))
    page.get_by_label("Prompt").fill("even")
    set_size(page, 12)
    drag(page, (20, 20), (60, 60))
    generate(page)
    assert np.array_equal(picture(wire.edits[0]["image"])[..., :3], pixels)
    mask = sent_mask(wire)
    page.get_by_label("Compare: share").press("Home")
    seen = shown(page, 125, 83)
    assert np.array_equal(seen[~mask], pixels[~mask])
    assert (seen[mask] != pixels[mask]).any()
    expect(page.locator("#site-facts")).to_contain_text("of 150")  # 120 x 80 pixels


def test_a_photograph_is_turned_as_its_exif_says(visit: Visit) -> None:
    page = visit()
    data = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.fromarray(noise(160, 80)).save(data, "jpeg", exif=exif)
    choose(page, "photo.jpg", data.getvalue(), "image/jpeg")
    expect(page.locator("#picture-facts")).to_have_text("photo.jpg · 80 × 160")


def test_a_file_that_is_no_picture(visit: Visit) -> None:
    page = visit()
    choose(page, "file.png", b"no picture")
    expect(page.get_by_role("alert")).to_contain_text("couldn’t be read as a picture")
    expect(page.get_by_role("button", name="Room")).to_be_visible()


GIVEN = """(element, [text, way]) => {
    const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], "given.png", { type: "image/png" }));
    const event = way === "drop"
        ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
        : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
    element.dispatchEvent(event);
}"""


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_pictures_are_dropped_and_pasted(visit: Visit, way: str) -> None:
    page = visit()
    page.locator("body").evaluate(
        GIVEN,
        [base64.b64encode(png(noise(64, 48))).decode(), way],
    )
    name = {"drop": "given.png", "paste": "Pasted picture"}[way]
    expect(page.locator("#picture-facts")).to_have_text(f"{name} · 64 × 48")


# pictures that guide


GUIDED = replace(
    CARD,
    takes=CARD.takes
    | frozenset("control nets control_scale control_start ip_adapters ip_scale".split()),  # noqa: SIM905
    controls=2,
    nets=("edges", "depth"),
    ip_adapters=("face",),
)
LINES = np.zeros((SIDE, SIDE, 3), np.uint8)
LINES[100:150, 60:200] = 255


@pytest.fixture
def guided(visit: Visit, painter: Painter) -> Any:
    painter.serve_models(GUIDED)
    page = begun(visit())
    page.get_by_text("Guiding pictures").click()
    drag(page, (60, 70), (180, 90))
    return page


def row(page: Any, name: str) -> Any:
    return page.locator(".guide", has=page.get_by_text(name, exact=True))


def give(row: Any, pixels: Any) -> None:
    file = {"name": "given.png", "mimeType": "image/png", "buffer": png(pixels)}
    row.locator("input[type=file]").set_input_files(file)
    expect(row.get_by_role("button", name="Remove")).to_be_visible()


def test_a_model_without_adapters_has_no_guiding_pictures(page: Any) -> None:
    expect(page.get_by_text("Guiding pictures")).to_be_hidden()


def test_guiding_pictures_arrive_with_their_scales(guided: Any, painter: Painter) -> None:
    generate(guided)
    request, pictures = painter.asked[-1]
    assert (request.nets, request.ip_adapters) == ("none", None)
    assert (pictures.controls, pictures.shown) == ((), ())
    give(row(guided, "depth"), noise(SIDE, SIDE))
    row(guided, "depth").get_by_label("Scale").fill("0.35")
    guided.get_by_label("Control from").fill("0.25")
    give(row(guided, "face"), noise(40, 30))
    generate(guided)
    request, pictures = painter.asked[-1]
    assert (request.nets, request.ip_adapters) == ("depth:0.3500", "face")
    assert request.control_start == 0.25
    assert [one.tolist() for one in pictures.controls] == [noise(SIDE, SIDE).tolist()]
    assert [one.tolist() for one in pictures.shown] == [noise(40, 30).tolist()]
    row(guided, "depth").get_by_role("button", name="Remove").click()
    expect(row(guided, "depth").get_by_role("button", name="Choose a picture")).to_be_focused()
    row(guided, "edges").get_by_role("button", name="Draw edges").click()
    generate(guided)
    assert painter.asked[-1].request.nets == "edges"
    guided.get_by_role("button", name="Result 2: a sofa of copper").click()
    generate(guided)
    assert painter.asked[-1].request == replace_id(request, painter.asked[-1].request)
    assert np.array_equal(painter.asked[-1].pictures.shown[0], noise(40, 30))


def replace_id(request: Any, other: Any) -> Any:
    """A request with the id and the random seed of another."""
    import msgspec

    return msgspec.structs.replace(request, id=other.id, seed=other.seed)


def test_edges_are_those_of_the_picture_that_is_edited(guided: Any, painter: Painter) -> None:
    row(guided, "edges").get_by_role("button", name="Draw edges").click()
    choose(guided, "lines.png", png(LINES))
    drag(guided, (60, 70), (180, 90))
    generate(guided)
    (edges,) = painter.asked[-1].pictures.controls
    assert edges.shape == LINES.shape
    assert set(np.unique(edges)) == {0, 255}
    near = np.zeros((SIDE, SIDE), bool)
    near[98:152, 58:202] = True
    near[102:148, 62:198] = False
    drawn = edges[..., 0] == 255
    assert not drawn[~near].any()
    assert 2 * (50 + 140) * 0.9 < drawn.sum() < 2 * (50 + 140) * 1.5, "one pixel wide"


def test_models_without_names_need_all_control_pictures(visit: Visit, painter: Painter) -> None:
    takes = (GUIDED.takes | {"control_mode"}) - {"nets", "ip_adapters", "ip_scale"}
    painter.serve_models(replace(GUIDED, nets=(), ip_adapters=(), takes=takes))
    page = begun(visit())
    drag(page, (60, 70), (180, 90))
    page.get_by_role("button", name="Generate").click()
    pick = page.get_by_role("button", name="Choose a picture for Control picture 1")
    expect(pick).to_be_focused()
    expect(pick).to_have_accessible_description("The model needs a picture here.")
    for name in ("Control picture 1", "Control picture 2"):
        give(row(page, name), LINES)
    row(page, "Control picture 2").get_by_label("Scale").fill("0.5")
    row(page, "Control picture 2").get_by_label("Kind").fill("3")
    generate(page)
    request, pictures = painter.asked[-1]
    assert (request.nets, request.control_scale, request.control_mode) == (None, [1, 0.5], [0, 3])
    assert len(pictures.controls) == 2


def test_what_is_wrong_with_a_guiding_picture_is_told_there(guided: Any, painter: Painter) -> None:
    face = row(guided, "face")
    give(face, LINES)
    face.get_by_label("Scale").fill("11")
    guided.get_by_role("button", name="Generate").click()
    expect(face.get_by_label("Scale")).to_be_focused()
    expect(face.get_by_label("Scale")).to_have_attribute("aria-invalid", "true")
    face.get_by_label("Scale").fill("1")
    give(row(guided, "depth"), noise(SIDE, 40))
    guided.get_by_role("button", name="Generate").click()
    pick = row(guided, "depth").get_by_role("button", name="Choose a picture")
    expect(pick).to_be_focused()
    expect(pick).to_have_accessible_description(re.compile("proportions of the picture, 256x256"))
    expect(guided.get_by_role("alert")).to_contain_text("control_image")
    text = {"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"}
    row(guided, "edges").locator("input[type=file]").set_input_files(text)
    expect(row(guided, "edges")).to_contain_text("couldn’t be read as a picture")
    assert painter.asked == []


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_guiding_pictures_are_dropped_and_pasted(guided: Any, painter: Painter, way: str) -> None:
    row(guided, "face").evaluate(GIVEN, [base64.b64encode(png(noise(64, 48))).decode(), way])
    expect(row(guided, "face").get_by_role("button", name="Remove")).to_be_visible()
    expect(guided.locator("#picture-facts")).to_have_text("Room · 256 × 256")
    generate(guided)
    assert np.array_equal(painter.asked[-1].pictures.shown[0], noise(64, 48))


def test_guiding_pictures_fit_on_a_phone(visit: Visit, painter: Painter) -> None:
    painter.serve_models(replace(GUIDED, takes=GUIDED.takes | {"control_mode"}))
    page = begun(visit(**PHONE))
    page.get_by_text("Guiding pictures").click()
    row(page, "depth").get_by_role("button", name="Draw edges").click()
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    for input in page.locator(".guide button:visible, .guide input:visible").all():
        box = input.bounding_box()
        assert box["x"] + box["width"] <= 360 - 16, input


# pictures from text


FULL = ApiError("queue_full", "256 requests wait.", retry_after=3)
# Recorded while one paints.

AHEAD = replace(CARD, takes=CARD.takes | {"ahead", "template"})


def recorded(painter: Painter) -> list[Any]:
    """The requests for recordings in idle time, and their pictures."""
    return [asked for asked in painter.asked if asked.request.kind is RequestKind.AHEAD]


def test_a_picture_is_recorded_once_and_again_if_its_settings_change(
    visit: Visit, painter: Painter
) -> None:
    painter.serve_models(AHEAD)
    page = visit()
    pixels = noise(120, 88)
    choose(page, "noise.png", png(pixels))
    until(lambda: len(recorded(painter)) == 1)
    (first,) = recorded(painter)
    assert np.array_equal(first.pictures.images[0], pixels)
    assert (first.request.steps, first.request.user) == (None, "127.0.0.1")
    page.get_by_label("Prompt").fill("less noise")
    page.get_by_text("Settings").click()
    page.get_by_label("Seed").fill("5")
    page.get_by_label("Steps").fill("7")
    page.get_by_label("Steps").blur()
    until(lambda: len(recorded(painter)) == 2)
    assert recorded(painter)[1].request.steps == 7
    drag(page, (20, 20), (60, 60))
    generate(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert len(recorded(painter)) == 2, "neither the prompt nor the seed matters"


def test_a_server_that_records_nothing_ahead_is_not_asked(page: Any, painter: Painter) -> None:
    drag(page, (60, 70), (180, 90))
    generate(page)
    assert not recorded(painter)


def test_a_recording_that_is_refused_is_not_shown(visit: Visit, painter: Painter) -> None:
    painter.serve_models(AHEAD)
    painter.refuse.append(ApiError("queue_full", "The queue is full."))
    page = begun(visit())
    until(lambda: not painter.refuse)
    page.wait_for_timeout(200)
    expect(page.get_by_role("alert")).to_be_hidden()


MAKING = replace(CARD, generates=True, size=(256, 192))


@pytest.fixture
def making(visit: Visit, painter: Painter) -> Any:
    """The page of a model that makes pictures, at its start, with a prompt."""
    painter.serve_models(MAKING)
    page = visit()
    page.get_by_role("button", name="Make one from text").click()
    expect(page.get_by_label("Prompt")).to_be_focused()
    page.get_by_label("Prompt").fill("a hill")
    return page


def test_a_picture_is_made_from_text_and_edited(making: Any, wire: Wire, painter: Painter) -> None:
    making.get_by_text("Settings").click()
    expect(making.get_by_label("Strength")).to_be_hidden()
    making.get_by_label("Seed").fill("5")
    making.get_by_label("Size", exact=True).select_option("Portrait: 184 × 272")
    generate(making)
    got = {name: value.decode() for name, value in wire.generations[0].items()}
    assert got == {
        "model": "painter",
        "prompt": "a hill",
        "size": "184x272",
        "seed": "5",
        "n": "1",
        "output_format": "png",
        "stream": "true",
        "partial_images": "3",
    }
    expect(making.locator("#picture-facts")).to_have_text("Made from text · 184 × 272")
    expect(making.get_by_role("status")).to_contain_text("Paint what should change next.")
    expect(making.locator("#speed")).to_be_hidden()
    expect(making.get_by_role("button", name="Edit this result")).to_be_hidden()
    expect(making.get_by_label("Size", exact=True)).to_be_hidden()
    made = tinted(drawn(painter.asked[0].request), np.ones((272, 184), bool), 1.0)
    drag(making, (60, 70), (150, 90))
    making.get_by_label("Prompt").fill("a tree")
    generate(making)
    sent = picture(wire.edits[0]["image"])
    assert np.array_equal(sent[..., :3], made), "or the server wouldn't know its own picture"
    assert "size" not in wire.edits[0]
    making.get_by_role("button", name="Result 1: a hill").click()
    expect(making.get_by_label("Prompt")).to_have_value("a hill")
    expect(making.locator("#site-facts")).to_have_text("Nothing is painted yet")
    assert np.array_equal(shown(making, 184, 272)[4::8, 4::8], made[4::8, 4::8])


def test_making_is_seen_and_cancelled(making: Any, painter: Painter) -> None:
    painter.gate.clear()
    making.get_by_role("button", name="Generate").click()
    expect(making.get_by_role("status")).to_have_text("Preview 1 of 3")
    expect(making.locator("#tools")).to_be_hidden()
    request = painter.asked[0].request
    rough = tinted(drawn(request), np.ones((192, 256), bool), 0.25)
    assert np.array_equal(shown(making, 256, 192)[4::8, 4::8], rough[4::8, 4::8])
    making.keyboard.press("Escape")
    expect(making.get_by_role("button", name="Choose a picture")).to_be_visible()
    expect(making.get_by_role("status")).to_have_text("Cancelled.")
    until(lambda: painter.cancelled == [request.id])
    painter.gate.set()
    painter.fault = FULL
    making.get_by_role("button", name="Generate").click()
    expect(making.get_by_role("alert")).to_contain_text("256 requests wait.")
    expect(making.get_by_role("button", name="Choose a picture")).to_be_visible()
    painter.fault = None
    making.get_by_role("button", name="Try again").click()
    expect(making.locator("#picture-facts")).to_have_text("Made from text · 256 × 192")


def test_one_goes_to_the_start_and_back(making: Any) -> None:
    making.get_by_role("button", name="Room").click()
    drag(making, (60, 70), (180, 90))
    painted = making.locator("#site-facts").inner_text()
    making.get_by_role("button", name="New picture").click()
    expect(making.get_by_role("button", name="Choose a picture")).to_be_focused()
    expect(making.get_by_label("Size", exact=True)).to_be_visible()
    making.get_by_role("button", name="Back to the picture").click()
    expect(making.locator("#picture-facts")).to_have_text("Room · 256 × 192")
    expect(making.locator("#site-facts")).to_have_text(painted)
    making.get_by_role("button", name="New picture").click()
    with making.expect_file_chooser():
        making.get_by_role("button", name="Choose a picture").click()


def test_a_model_that_only_edits_makes_no_pictures(visit: Visit, wire: Wire) -> None:
    page = visit()
    expect(page.locator("#model-name")).to_have_text("painter")
    expect(page.get_by_role("button", name="Make one from text")).to_be_hidden()
    expect(page.get_by_label("Size", exact=True)).to_be_hidden()
    page.get_by_label("Prompt").fill("a hill")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("Choose a picture first.")
    assert wire.generations == wire.edits == []


def test_pictures_are_made_with_guiding_ones(visit: Visit, painter: Painter) -> None:
    painter.serve_models(replace(GUIDED, generates=True))
    page = visit()
    page.get_by_label("Prompt").fill("a hill")
    page.get_by_text("Guiding pictures").click()
    expect(row(page, "depth").get_by_role("button", name="Draw edges")).to_be_hidden()
    give(row(page, "depth"), LINES)
    generate(page)
    request, pictures = painter.asked[-1]
    assert (request.nets, pictures.images) == ("depth", ())
    assert np.array_equal(pictures.controls[0], LINES)
    row(page, "edges").get_by_role("button", name="Draw edges").click()
    page.get_by_role("button", name="New picture").click()
    expect(row(page, "edges").get_by_role("button", name="Remove")).to_be_hidden()
    generate(page)
    assert painter.asked[-1].request.nets == "depth"


# when things go wrong


FAILED = ApiError("generation_failed", "Not a number at step 3.")
AWAY = ApiError("no_workers", "No worker is there.", retry_after=5)
EMPTY = ApiError("mask_empty", "Nothing is masked.", param="mask")


@pytest.mark.parametrize(
    ("fault", "after", "shown"),
    [
        (FULL, 0, "asks to wait 3 s"),
        (FAILED, 0, "generation_failed"),
        (FAILED, 2, "generation_failed"),  # in the stream
        (AWAY, 0, "asks to wait 5 s"),
        (EMPTY, 0, "field mask"),
    ],
)
def test_failures_are_told_and_tried_again(
    page: Any, painter: Painter, fault: ApiError, after: int, shown: str
) -> None:
    drag(page, (60, 100), (200, 100))
    painter.fault, painter.after = fault, after
    page.get_by_role("button", name="Generate").click()
    alert = page.get_by_role("alert")
    for part in (fault.message, shown, "request "):
        expect(alert).to_contain_text(part)
    painter.fault = None
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#entries li")).to_have_count(1)
    expect(alert).to_be_hidden()


def test_the_field_that_was_refused_is_marked(page: Any, painter: Painter) -> None:
    drag(page, (60, 100), (200, 100))
    painter.fault = ApiError("invalid_value", "At most 200.", param="num_inference_steps")
    page.get_by_role("button", name="Generate").click()
    steps = page.get_by_label("Steps")
    expect(steps).to_be_focused()
    expect(steps).to_have_attribute("aria-invalid", "true")
    expect(steps).to_have_accessible_description("At most 200.")
    steps.fill("20")
    expect(steps).not_to_have_attribute("aria-invalid", "true")


def test_a_connection_that_breaks_mid_stream(page: Any, wire: Wire) -> None:
    drag(page, (60, 100), (200, 100))
    wire.cut_after = 1
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("The connection broke")
    wire.cut_after = None
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#entries li")).to_have_count(1)


def test_a_server_that_is_gone_and_comes_back(browser: Any) -> None:
    page = browser.new_page()
    with Serving(Painter()) as serving:
        page.goto(serving.url)
        begun(page)
        drag(page, (60, 100), (200, 100))
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("The server can’t be reached")
    with Serving(Painter(), serving.port):
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#entries li")).to_have_count(1)
        page.close()


def test_a_page_opened_before_the_model_is_there(browser: Any) -> None:
    page, painter = browser.new_page(), Painter()
    painter.serve_models()
    painter.state = ModelState.FAILED
    with Serving(painter) as serving:
        page.goto(serving.url)
        expect(page.locator("#model-name")).to_contain_text("soon can’t run")
        painter.state = ModelState.LOADING
        expect(page.locator("#model-name")).to_have_text("soon is being loaded")
        painter.serve_models(CARD)
        expect(page.locator("#model-name")).to_have_text(CARD.name)
        begun(page)
        drag(page, (60, 100), (200, 100))
        generate(page)
        page.close()


def test_a_key_is_asked_for(browser: Any) -> None:
    """The browser gives the key that the page was opened with; when it changes, the page asks."""
    context = browser.new_context(http_credentials={"username": "", "password": "old"})
    page = context.new_page()
    with Serving(Painter(), api_key=SecretStr("old")) as serving:
        page.goto(serving.url)
        begun(page)
        drag(page, (60, 100), (200, 100))
        generate(page)
    with Serving(Painter(), serving.port, api_key=SecretStr("open sesame")):
        page.get_by_role("button", name="Generate").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("This server wants a key")
        page.locator("#key").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("doesn’t accept this key")
        page.locator("#key").fill("open sesame")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#entries li")).to_have_count(2)
        assert page.evaluate("() => Object.keys(localStorage).length") == 0
        context.close()


# how it looks


def test_dark_and_without_motion(visit: Visit) -> None:
    colour = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = visit(color_scheme="light"), visit(color_scheme="dark", reduced_motion="reduce")
    assert sum(map(int, re.findall(r"\d+", light.evaluate(colour)))) > 600
    assert sum(map(int, re.findall(r"\d+", dark.evaluate(colour)))) < 120
    bar = "() => getComputedStyle(document.querySelector('.progress i')).transitionProperty"
    assert (light.evaluate(bar), dark.evaluate(bar)) == ("width", "none")


def test_everything_has_a_name(page: Any) -> None:
    drag(page, (60, 100), (200, 100))
    generate(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, a, input:not([hidden]), select, textarea")]
            .filter(e => !(e.ariaLabel || e.labels?.[0]?.textContent.trim() || e.innerText.trim()))
            .filter(e => e.checkVisibility()).map(e => e.outerHTML)"""
    )
    assert nameless == []


# what needs no page


def module(page: Any, name: str, body: str, value: Any) -> Any:
    """Runs a function of (module, value) with one of the page's modules."""
    found = "await import(new URL(name, document.baseURI))"
    return page.evaluate(f"async ([name, value]) => ({body})({found}, value)", [name, value])


def test_pooling_is_max_pooling(visit: Visit) -> None:
    page = visit()
    roll = np.random.default_rng(3)
    body = (
        "(m, [bits, width, height, columns, rows]) => { const p = m.pool("
        "{ bits, width, height }, { columns, rows }); return [[...p.cells], p.active, p.share]; }"
    )
    for width, height, columns, rows in ((64, 40, 8, 5), (16, 16, 16, 16), *[(61, 43, 7, 5)] * 20):
        mask = roll.random((height, width)) < 3 / (width * height)
        expected = np.zeros((rows, columns), bool)
        for row, column in np.ndindex(rows, columns):
            top, bottom = row * height // rows, -(-(row + 1) * height // rows)
            left, right = column * width // columns, -(-(column + 1) * width // columns)
            expected[row, column] = mask[top:bottom, left:right].any()
        value = [mask.ravel().astype(int).tolist(), width, height, columns, rows]
        cells, active, share = module(page, "mask.js", body, value)
        assert cells == expected.ravel().astype(int).tolist()
        assert active == expected.sum()
        assert share == pytest.approx(expected.mean())


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_events_are_found_however_they_are_cut(visit: Visit, newline: str) -> None:
    text = (
        ": awake\n\nevent: a\ndata: {1}\n\ndata:two\ndata: lines\nid: 4\n\nevent: empty\n\ndata\n\n"
    )
    body = """(m, text) => {
        const all = [];
        for (let at = 0; at <= text.length; at += 1) {
            const parser = new m.EventParser();
            all.push([...parser.feed(text.slice(0, at)), ...parser.feed(text.slice(at))]);
        }
        const parser = new m.EventParser();
        all.push([...text].flatMap(letter => parser.feed(letter)));
        return all;
    }"""
    expected = [
        {"name": "a", "data": "{1}"},
        {"name": "message", "data": "two\nlines"},
        {"name": "message", "data": ""},
    ]
    for events in module(visit(), "events.js", body, text.replace("\n", newline) + "x" + newline):
        assert events == expected


def test_sizes_keep_to_the_limit_and_the_multiple(visit: Visit) -> None:
    page = visit()
    body = "(m, cases) => cases.map(c => m.fit(...c))"
    roll = np.random.default_rng(5)
    sides = roll.integers(16, 9000, (200, 2)).tolist()
    fitted = module(page, "picture.js", body, [[*pair, 16, 1 << 20] for pair in sides])
    for (width, height), to in zip(sides, fitted, strict=True):
        if width * height <= 1 << 20:
            assert to == {"width": width, "height": height, "scale": 1}
            continue
        assert to["width"] % 16 == to["height"] % 16 == 0
        assert to["width"] * to["height"] <= 1 << 20
        assert to["width"] <= width * to["scale"] + 1e-6
        assert to["height"] <= height * to["scale"] + 1e-6
