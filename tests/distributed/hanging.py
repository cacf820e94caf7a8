"""A denoiser whose ranks hang where a test asks for it: they import this file with its class."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from maskfx.distributed.exchanges.process_group import NotedTransfer, ProcessGroup
from tests.distributed import tiny

VARIABLE = "MASKFX_TEST_HANG"  # a file with the place and the number of the rank that hangs, once


class HangingTiny(tiny.Tiny):
    """The same as `Tiny`."""


def hang(place: str, rank: int) -> None:
    path = Path(os.environ.get(VARIABLE, ""))
    if path.is_file() and path.read_text() == f"{place} {rank}":
        path.unlink()
        time.sleep(3600)


def start(self: ProcessGroup, *args: Any) -> NotedTransfer:
    hang("before", self.ranks[self.rank])
    transfer = right_start(self, *args)
    transfer.rank = self.ranks[self.rank]  # type: ignore[attr-defined]
    return transfer


def wait(self: NotedTransfer) -> None:
    with self._waiting(self._number):
        hang("within", self.rank)  # type: ignore[attr-defined]
    right_wait(self)


right_start, right_wait = ProcessGroup.start, NotedTransfer.wait
ProcessGroup.start, NotedTransfer.wait = start, wait  # type: ignore[method-assign, assignment]
