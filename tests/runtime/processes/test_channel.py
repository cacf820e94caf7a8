"""Messages over a socket: whole, bounded, and errors for an end that is gone or silent."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from maskfx.runtime.processes.channel import Channel

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, two = (Channel(line, most=1 << 24) for line in socket.socketpair())
    yield one, two
    one.close()
    two.close()


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 5), (1 << 23, 3, 1 << 22)])
def test_parts_arrive_as_they_were_sent(ends: Ends, sizes: tuple[int, ...]) -> None:
    parts = [os.urandom(size) for size in sizes]
    sender = threading.Thread(target=ends[0].send, args=parts)
    sender.start()
    assert ends[1].receive() == parts
    sender.join()


def test_parts_may_be_views_of_wider_items(ends: Ends) -> None:
    numbers = memoryview(struct.pack("3i", 1, 2, 3)).cast("i")
    ends[0].send(numbers)
    assert ends[1].receive() == [numbers.tobytes()]


def test_a_channel_that_closed_is_at_its_end(ends: Ends) -> None:
    ends[0].close()
    with pytest.raises(EOFError, match="gone"):
        ends[1].receive()
    with pytest.raises(ConnectionError):
        ends[1].send(b"x")


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (struct.pack("<I", 1 << 20), "parts"),
        (struct.pack("<IQQ", 2, 1 << 24, 1), "bytes"),
        (struct.pack("<I", 1), "gone"),
    ],
)
def test_a_head_that_cant_be_meant_ends_the_channel(head: bytes, why: str) -> None:
    line, other = socket.socketpair()
    channel = Channel(line, most=1 << 24)
    other.sendall(head)
    other.close()
    with pytest.raises(EOFError, match=why):
        channel.receive()
    channel.close()


def test_silence_has_a_limit() -> None:
    line, other = socket.socketpair()
    channel = Channel(line, seconds=0.2)
    with other:
        with pytest.raises(TimeoutError, match="silent"):
            channel.receive()
        with pytest.raises(TimeoutError, match="reads nothing"):
            channel.send(bytes(1 << 24))
    channel.close()
