"""A server whose front notes what it sends and receives: launched as any, for bench.agree.

    python -m bench.agree.server '{"model": "fake", "port": 0}' notes.jsonl

A line is written when a request starts on a worker, makes a step or ends, when a worker sends what
a step took; moments are of the monotonic clock, which is the same in all processes of a machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from maskfx.scheduling.load import Work
from maskfx.scheduling.step_reports import Stepped
from maskfx.serve.config import ServeSettings
from maskfx.serve.frontend.dispatch import Dispatch
from maskfx.serve.frontend.frontend import Front
from maskfx.serve.frontend.ticket import RequestTicket
from maskfx.serve.frontend.worker_pool import WorkerState
from maskfx.serve.launch import serve
from maskfx.serve.messages import Done, FromWorker, JobProgress
from maskfx.serve.workers.pixels import Part


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A request was given to a worker."""

    at: float
    worker: str
    id: str
    seed: int
    entered: float  # the queue
    work: Work


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """A request has made its so-manieth step."""

    at: float
    worker: str
    id: str
    step: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A request's picture came back."""

    at: float
    worker: str
    id: str


class Batched(msgspec.Struct, frozen=True, tag="batched"):
    """A worker made a step."""

    at: float
    worker: str
    stepped: Stepped


Note = Started | Moved | Ended | Batched
decode = msgspec.json.Decoder(Note).decode


def read_notes(path: Path) -> list[Note]:
    """What is whole; the last line may be on its way."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [decode(line) for line in lines]


def noting(file: BinaryIO) -> None:
    """Let every front of this process write."""
    start, take = Dispatch._start, Front._take

    def started(self: Dispatch, ticket: RequestTicket, mate: WorkerState, now: float) -> bool:
        went = start(self, ticket, mate, now)
        if went:
            demand = ticket.demand
            seed = ticket.request.seed
            write(file, Started(now, mate.name, demand.id, seed, demand.arrived, demand.work))
        return went

    def taken(self: Front, worker: str, message: FromWorker, frames: Sequence[Part]) -> None:
        now = time.monotonic()
        take(self, worker, message, frames)
        match message:
            case Stepped():
                write(file, Batched(now, worker, message))
            case JobProgress():
                write(file, Moved(now, worker, message.id, message.step))
            case Done():
                write(file, Ended(now, worker, message.id))

    setattr(Dispatch, "_start", started)  # noqa: B010
    setattr(Front, "_take", taken)  # noqa: B010


def write(file: BinaryIO, note: Note) -> None:
    file.write(msgspec.json.encode(note) + b"\n")


def main(settings: str, path: str) -> int:
    with Path(path).open("ab", buffering=0) as file:
        noting(file)
        return serve(ServeSettings(**json.loads(settings)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
