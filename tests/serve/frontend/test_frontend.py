"""What the HTTP side relies on: seats, templates, health, the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from maskfx.scheduling.load import TemplateTier
from maskfx.serve.config import Limits
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend.frontend import Front
from maskfx.serve.frontend.template_images import ENDING, FOLDER
from maskfx.serve.frontend.ticket import picture_name
from maskfx.serve.messages import Done, Forget, Ready
from maskfx.serve.request import ModelState, RequestKind, ServedModel
from tests.serve.fronts import (
    eventually,
    fronted,
    made,
    previews,
    processes,
    request,
    run,
)

LONG = "fake:seconds_per_step=0.05,steps=10"
PICTURE = request()[1].images[0]


def code(error: pytest.ExceptionInfo[ApiError]) -> str:
    return error.value.code


def test_an_edit_comes_back_with_what_it_took() -> None:
    async def test() -> None:
        async with fronted(served_model_name="house") as front:
            (model,) = front.models()
            assert (model.name, model.state) == ("house", ModelState.READY)
            assert model.card is not None
            assert model.card.name == "house"
            assert await front.card("house", None) is await front.card(None, 0.0) is model.card
            one = await made(front, request())
            mask = request()[1].mask
            assert mask is not None
            assert np.array_equal(one.pixels[~mask], PICTURE[~mask])
            assert one.mask_ratio == pytest.approx(6 / 48)
            assert one.seconds >= one.queued >= 0
            assert one.worker == "worker-0.1"
            assert len(await previews(front, request(previews=2))) == 2

    run(test())


def test_pictures_of_any_size_and_layout_come_back() -> None:
    async def test() -> None:
        async with fronted() as front:
            large = np.random.default_rng(0).integers(0, 256, (512, 384, 3), np.uint8)
            for image in (large, large[::-1, ::2], np.asfortranarray(large), PICTURE[:1, :1]):
                mask = np.zeros(image.shape[:2], bool)
                mask[0, 0] = True
                one = await made(
                    front, request(images=(image,), mask=mask, controls=(large, large[::2]))
                )
                assert np.array_equal(one.pixels[-8:, 8:], image[-8:, 8:])
                assert one.pixels.shape == image.shape

    run(test())


def test_an_edit_goes_to_the_worker_that_generated_its_picture() -> None:
    async def test() -> None:
        async with fronted(LONG) as front:
            pool, name = front._dispatch.pool, picture_name(PICTURE)
            assert front._enter(*request("a")).demand.work.template is None
            pool.warmed_in_memory("worker-0.1", name, {"host": 900, "disk": 700})
            ticket = front._enter(*request("b"))
            assert ticket.demand.work.template == name
            assert pool.with_template(name) == ("worker-0.1",)
            assert pool.sizes(name) == {"host": 900}
            other = front._enter(*request("c", images=(PICTURE + np.uint8(1),)))
            assert other.demand.work.template is None
            named = front._enter(*request("d", kind=RequestKind.GENERATE, images=(), mask=None))
            assert named.demand.work.template is None

    run(test())


def test_seats_are_bounded() -> None:
    async def test() -> None:
        async with fronted(queue=2, max_num_seqs=1) as front:
            seats = [front.seat() for _ in range(3)]
            for seat in seats:
                seat.__enter__()
            with pytest.raises(ApiError) as caught:
                front.seat()
            assert code(caught) == "queue_full"
            assert caught.value.retry_after
            seats[0].__exit__(None, None, None)
            with front.seat():
                pass

    run(test())


def test_requests_without_a_seat_of_their_own_count_as_well() -> None:
    async def test() -> None:
        async with fronted(LONG, queue=2, max_num_seqs=1) as front:
            tasks = [asyncio.create_task(made(front, request(str(k)))) for k in range(3)]
            await eventually(lambda: front.health().waiting == 2)
            with pytest.raises(ApiError) as caught:
                front.seat()
            assert code(caught) == "queue_full"
            await asyncio.gather(*tasks)

    run(test())


def test_many_pictures_of_one_call_dont_go_past_the_queue() -> None:
    async def test() -> None:
        one = Limits(pictures=1)
        async with fronted(LONG, queue=2, max_num_seqs=1, limits=one) as front:
            answers = [asyncio.create_task(made(front, request(str(k)))) for k in range(6)]
            done = await asyncio.gather(*answers, return_exceptions=True)
            refused = [each for each in done if isinstance(each, ApiError)]
            assert [each.code for each in refused] == ["queue_full"] * 3
            assert all(each.retry_after for each in refused)
        async with fronted(queue=1, max_num_seqs=1) as front:  # room for two, and a call of four
            await asyncio.gather(*(made(front, request(str(k))) for k in range(4)))

    run(test())


def test_while_the_model_loads_calls_wait_for_it() -> None:
    async def test() -> None:
        async with fronted("fake:seconds_to_load=1", wait=False, served_model_name="m") as front:
            health = front.health()
            assert (health.live, health.ready, health.reason) == (True, False, "model_loading")
            assert front.models() == [ServedModel("m", ModelState.LOADING, None)]
            with pytest.raises(ApiError) as caught:
                await front.card("other", None)  # known at once
            assert code(caught) == "model_not_found"
            assert "this server has 'm'" in str(caught.value)
            with pytest.raises(ApiError) as caught:
                await front.card("m", 0.05)  # its deadline is earlier
            assert code(caught) == "model_loading"
            assert caught.value.retry_after
            with pytest.raises(ApiError, match="is being loaded"):
                await made(front, request())
            with front.seat():
                assert (await front.card("m", 20)).name == "m"
            assert front.health().ready

    run(test())


@pytest.mark.parametrize("full", [False, True])
def test_calls_that_may_not_wait_for_the_model_come_again(full: bool) -> None:
    async def test() -> None:
        room: dict[str, Any] = {"queue": 1, "max_num_seqs": 1} if full else {"loading_seconds": 0}
        async with fronted("fake:seconds_to_load=30", wait=False, **room) as front:
            with contextlib.ExitStack() as seats:
                for _ in range(2 if full else 0):
                    seats.enter_context(front.seat())
                with pytest.raises(ApiError) as caught:
                    front.seat()
            assert code(caught) == "model_loading"
            assert caught.value.retry_after

    run(test())


def test_calls_that_wait_for_the_model_end_with_the_server() -> None:
    async def test() -> None:
        async with fronted("fake:seconds_to_load=30", wait=False) as front:
            waiting = asyncio.create_task(front.card(None, None))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            front.stop_taking()
            with pytest.raises(ApiError) as caught:
                await asyncio.wait_for(waiting, 1)
            assert code(caught) == "draining"

    run(test())


def test_a_model_that_cant_be_loaded_is_listed_as_such() -> None:
    async def test() -> None:
        async with fronted("fake:speed=3", wait=False) as front:
            with pytest.raises(ApiError) as caught:
                await front.card(None, None)
            assert code(caught) == "no_workers"
            assert front.models()[0].state is ModelState.FAILED
            assert front.refused()
            health = front.health()
            assert (health.live, health.ready, health.reason) == (False, False, "no_workers")

    run(test())


def test_the_same_id_twice_is_two_requests() -> None:
    async def test() -> None:
        async with fronted() as front:
            one, two = await asyncio.gather(
                made(front, request("same")), made(front, request("same", seed=8))
            )
            assert not np.array_equal(one.pixels, two.pixels)

    run(test())


def test_a_template_is_recorded_kept_used_and_forgotten(tmp_path: Path) -> None:
    async def test() -> None:
        recording = request("r", kind=RequestKind.RECORD, template="t", mask=None)
        async with fronted(workers=2, cache_dir=tmp_path) as front:
            info = await front.record(*recording)
            assert (info.id, info.width, info.height) == ("t", 64, 48)
            assert info.bytes["host"] > 0
            assert len(info.workers) == 1
            mate = front._dispatch.pool.mates[info.workers[0]]
            assert mate.load.tier("t") is TemplateTier.HOST
            edit = await made(front, request(images=(), template="t"))
            assert np.array_equal(edit.pixels, (await made(front, request(template="t"))).pixels)
            assert np.array_equal(front.template_picture("t"), PICTURE)
            assert [one.id for one in front.templates()] == ["t"]
        async with fronted(cache_dir=tmp_path) as front:
            (info,) = front.templates()
            assert info.id == "t"
            assert not info.workers
            await made(front, request(images=(), template="t"))  # recorded anew there
            await front.forget("t")
            for call in (front.template_picture, lambda t: front._enter(*request(template=t))):
                with pytest.raises(ApiError) as caught:
                    call("t")
                assert code(caught) == "template_not_found"
            with pytest.raises(ApiError):
                await front.forget("t")
        async with fronted(cache_dir=tmp_path) as front:
            assert not front.templates()

    run(test())


def test_a_template_registered_again_is_recorded_again() -> None:
    async def test() -> None:
        async with fronted(heartbeat_seconds=0.1) as front:
            misses = 'maskfx_cache_misses_total{tier="host"} '
            recording, pictures = request("r", kind=RequestKind.RECORD, template="t", mask=None)
            for round_ in (1, 2):
                picture = PICTURE + np.uint8(round_)
                await front.record(recording, replace(pictures, images=(picture,)))
                assert np.array_equal(front.template_picture("t"), picture)
            await eventually(lambda: value(front, misses) == 2)

    run(test())


def test_a_template_that_cant_be_kept_isnt_recorded() -> None:
    async def test() -> None:
        async with fronted() as front:
            for wrong in ({"template": "../x"}, {"template": "t", "images": ()}):
                with pytest.raises(ApiError) as caught:
                    await front.record(*request("r", kind=RequestKind.RECORD, mask=None, **wrong))
                assert caught.value.status == 400
            assert not front.templates()

    run(test())


def test_a_recording_that_fails_leaves_no_template() -> None:
    async def test() -> None:
        async with fronted() as front:
            with pytest.raises(ApiError):
                await front.record(
                    *request("t", kind=RequestKind.RECORD, mask=None, prompt="fake:fail")
                )
            assert not front.templates()

    run(test())


def test_a_recording_that_isnt_kept_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        def full(*_: object) -> None:
            raise ApiError("out_of_resources", "others were quicker")

        async with fronted(heartbeat_seconds=0.1) as front:
            recording = request("r", kind=RequestKind.RECORD, template="t", mask=None)
            misses = 'maskfx_cache_misses_total{tier="host"} '
            held = 'maskfx_cache_usage_bytes{tier="host"} '
            with monkeypatch.context() as patch:
                patch.setattr(front._templates._images, "keep", full)
                with pytest.raises(ApiError):
                    await front.record(*recording)
            await eventually(lambda: value(front, misses) == 1)
            await eventually(lambda: value(front, held) == 0)
            assert not front._dispatch.pool.sizes("t")

    run(test())


def test_what_was_deleted_while_no_worker_ran_is_forgotten_when_one_joins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def test() -> None:
        async with fronted(cache_dir=tmp_path) as front:
            await front.record(*request("r", kind=RequestKind.RECORD, template="kept", mask=None))
            (name,) = front.workers.names()
            told: list[tuple[str, object]] = []
            ready = Ready(
                family="Fake",
                size=(64, 48),
                multiple=8,
                steps=4,
                guidance=None,
                takes=[],
                generates=True,
                site=8,
                slots=2,
                on_disk={"kept": 5, "deleted": 7, "wanted": 9, "others": 3},
            )
            ticket = front._enter(*request(template="kept"))
            ticket.request = msgspec.structs.replace(
                ticket.request, template="wanted"
            )  # being recorded, say
            (tmp_path / FOLDER / f"others{ENDING}").touch()  # another server has it
            with monkeypatch.context() as patch:
                patch.setattr(front.workers, "ready", lambda _: True)
                patch.setattr(front._templates, "_send", lambda to, what: told.append((to, what)))
                front._joined(name, ready)
                await asyncio.gather(*front._templates._images._looking)
            assert [one for one in told if isinstance(one[1], Forget)] == [
                (name, Forget("deleted"))
            ]
            assert front._dispatch.pool.on_disk.keys() == {"kept", "wanted", "others"}
            front._dispatch.leave(ticket)

    run(test())


def test_the_caches_counters_outlive_workers() -> None:
    async def test() -> None:
        async with fronted(heartbeat_seconds=0.1) as front:
            await front.record(*request("t", kind=RequestKind.RECORD, mask=None))
            await made(front, request(template="t"))
            hits = 'maskfx_cache_hits_total{tier="host"} '
            held = 'maskfx_cache_usage_bytes{tier="host"} '
            await eventually(lambda: value(front, hits) == 1)
            assert value(front, held) > 0
            os.kill(processes(front)[0], signal.SIGKILL)
            await eventually(lambda: front.health().workers == 0)
            assert value(front, held) == 0
            await eventually(lambda: front.health().workers == 1)
            await made(front, request(template="t"))
            await made(front, request(template="t"))
            await eventually(lambda: value(front, hits) == 2)

    run(test())


def value(front: Front, start: str) -> float:
    line = next(x for x in front.metrics().decode().splitlines() if x.startswith(start))
    return float(line.removeprefix(start))


def test_a_damaged_answer_fails_its_request_and_no_other() -> None:
    async def test() -> None:
        async with fronted(LONG) as front:
            task = asyncio.create_task(made(front, request()))
            other = asyncio.create_task(made(front, request("b")))
            await eventually(lambda: front.health().running == 2)
            id = next(iter(front._dispatch.running))
            damaged = Done(id=id, attempt=1, pixels=(48, 64, 3), steps=4)
            front._heard("worker-0.1", damaged, [b"short"])
            with pytest.raises(ApiError) as caught:
                await task
            assert code(caught) == "generation_failed"
            await other

    run(test())


def test_draining_refuses_new_calls_and_finishes_the_others() -> None:
    async def test() -> None:
        async with fronted(LONG) as front:
            seat = front.seat()
            with seat:
                draining = asyncio.create_task(front.drain(10))
                await asyncio.sleep(0)
                assert not front.health().ready
                assert front.health().reason == "draining"
                with pytest.raises(ApiError) as caught:
                    front.seat()
                assert code(caught) == "draining"
                await made(front, request())  # it has a seat already
                assert not draining.done()
            assert await draining

    run(test())


def test_a_drain_has_its_time() -> None:
    async def test() -> None:
        async with fronted("fake:seconds_per_step=0.1,steps=100") as front:
            task = asyncio.create_task(made(front, request()))
            await eventually(lambda: front.health().running == 1)
            began = time.monotonic()
            assert not await front.drain(0.2)
            await front.close()
            assert time.monotonic() - began < 3
            for one in (
                task,
                made(front, request()),
            ):  # also a client that had a seat and comes now
                with pytest.raises(ApiError) as caught:
                    await one
                assert code(caught) == "draining"

    run(test())


JUMP = """
import asyncio, time
from tests.serve.fronts import fronted, made, request, run
real, jumps = time.time, [0.0]
time.time = lambda: real() + jumps[0]
async def test():
    async with fronted(%r, heartbeat_seconds=0.1, lost_seconds=1) as front:
        for days in (1, -2, 0):
            task = asyncio.create_task(made(front, request(seconds=5.0)))
            await asyncio.sleep(0.2)
            jumps[0] = days * 86400.0
            one = await task
            assert one.tries == 1 and 0.4 < one.seconds < 3, one.seconds
            await asyncio.sleep(0.3)
        assert front.health().ready
        assert all(child.starts == 1 for child in front.workers.children)
run(test())
"""


def test_the_wall_clock_may_jump() -> None:
    """Every reader of `time.time` sees a day more, then less: deadlines and heartbeats don't."""
    subprocess.run([sys.executable, "-c", JUMP % LONG], check=True, timeout=30)
