"""The same key with the same body is computed once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from maskfx.serve.errors import ApiError
from maskfx.serve.http.idempotency import Idempotency
from tests.serve.served import MASK, PICTURE, Served, served, until


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


@pytest.fixture(autouse=True)
def fresh(server: Served) -> None:
    server.frontend.asked.clear()
    server.frontend.cancelled.clear()


def ask(server: Served, key: str, prompt: str = "x", timeout: float = 30) -> httpx.Response:
    with httpx.Client(base_url=server.url, timeout=timeout) as client:
        return client.post(
            "/v1/images/edits",
            files={"image": PICTURE, "mask": MASK},  # each with another boundary
            data={"prompt": prompt},
            headers={"Idempotency-Key": key},
        )


def test_the_same_call_twice_is_computed_once(server: Served) -> None:
    first, second = ask(server, "a"), ask(server, "a")
    assert first.status_code == second.status_code == 200
    assert first.content == second.content
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert len(server.frontend.asked) == 1
    assert ask(server, "b").content != first.content  # its seed is another one


def test_calls_at_the_same_time_wait_for_one(server: Served) -> None:
    server.frontend.step = 0.1
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(ask(server, "c").content)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.frontend.step = 0.0
    assert len(set(found)) == 1
    assert len(server.frontend.asked) == 1


def test_another_body_is_refused(server: Served) -> None:
    assert ask(server, "d").status_code == 200
    refused = ask(server, "d", "y")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "idempotency_key_reused")
    with server.client(**{"Idempotency-Key": "d"}) as client:
        other = client.post("/v1/images/generations", json={"prompt": "x"})
    assert other.json()["error"]["code"] == "idempotency_key_reused"


def test_a_failure_is_not_kept(server: Served) -> None:
    server.frontend.fail = ApiError("no_workers", "None is left.")
    assert ask(server, "e").status_code == 503
    server.frontend.fail = None
    assert ask(server, "e").status_code == 200


def test_one_who_leaves_does_not_take_it_from_the_others(server: Served) -> None:
    server.frontend.step = 0.3
    kept: list[httpx.Response] = []
    staying = threading.Thread(target=lambda: kept.append(ask(server, "f")))
    staying.start()
    until(lambda: len(server.frontend.asked) == 1)
    with pytest.raises(httpx.ReadTimeout):
        ask(server, "f", timeout=0.3)
    staying.join()
    assert kept[0].status_code == 200
    assert server.frontend.cancelled == []

    with pytest.raises(httpx.ReadTimeout):
        ask(server, "g", timeout=0.5)
    until(lambda: len(server.frontend.cancelled) == 1)
    server.frontend.step = 0.0
    assert ask(server, "g").status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_keys_that_are_none(server: Served, key: str) -> None:
    response = ask(server, key)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Idempotency-Key"


def test_streams_take_no_key(server: Served) -> None:
    with server.client(**{"Idempotency-Key": "h"}) as client:
        asks = {"prompt": "x", "stream": True}
        response = client.post("/v1/images/generations", json=asks)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Idempotency-Key")


async def answers(keep: Idempotency, keys: str) -> int:
    computed = 0

    async def compute() -> bytes:
        nonlocal computed
        computed += 1
        return bytes(10)

    for key in keys:
        assert await keep.answer(key, b"", compute) == bytes(10)
    return computed


def test_what_is_kept_is_bounded() -> None:
    assert asyncio.run(answers(Idempotency(entries=2), "abab")) == 2
    assert asyncio.run(answers(Idempotency(entries=2), "abca")) == 4
    assert asyncio.run(answers(Idempotency(size=25), "abab")) == 2
    assert asyncio.run(answers(Idempotency(size=25), "abca")) == 4


def test_an_answer_that_nobody_waits_for_any_more_leaves_no_bytes() -> None:
    """A computation may finish although it was cancelled."""

    async def test() -> None:
        keep, begun = Idempotency(size=25), asyncio.Event()

        async def stubborn() -> bytes:
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return bytes(20)
            raise AssertionError("it wasn't cancelled")

        waiter = asyncio.create_task(keep.answer("a", b"", stubborn))
        await begun.wait()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert keep._bytes == 0
        assert await answers(keep, "bcbc") == 2, "there is room for both"

    asyncio.run(test())


@pytest.mark.parametrize("older", [20, 0])
def test_an_answer_is_evicted_only_after_its_bytes_are_counted(older: int) -> None:
    """The older call finishes right after the younger one, which needs its room; 0 fails."""

    async def test() -> None:
        keep = Idempotency(size=25)
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, found: problems.append(found))
        release = {"older": asyncio.Event(), "younger": asyncio.Event()}

        async def compute(name: str, size: int) -> bytes:
            await release[name].wait()
            if not size:
                raise ApiError("no_workers", "None is left.")
            return bytes(size)

        sizes = {"older": older, "younger": 30}
        calls = [keep.answer(name, b"", partial(compute, name, n)) for name, n in sizes.items()]
        waiters = [asyncio.create_task(call) for call in calls]
        while len(keep._entries) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        release["younger"].set()
        release["older"].set()
        await asyncio.gather(*waiters, return_exceptions=True)
        assert not problems
        held = [len(entry.task.result()) for entry in keep._entries.values()]
        assert keep._bytes == sum(held) <= 25

    asyncio.run(test())
