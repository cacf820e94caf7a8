"""AheadRecordings: the templates that workers were asked to record in idle time, ahead of edits.

They are no requests: no client waits for them, no limit or figure of requests counts them, and one
whose worker ends is forgotten. Knows nothing of how a worker finds idle time.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from maskfx.serve.errors import ApiError
from maskfx.serve.frontend.dispatch import RETRY_SECONDS, Send
from maskfx.serve.frontend.ticket import new_ticket, picture_name
from maskfx.serve.frontend.worker_pool import WorkerPool
from maskfx.serve.messages import Cancel
from maskfx.serve.request import Card, Pictures, Request


@dataclass(frozen=True)
class AheadRecording:
    """A recording that hasn't ended."""

    user: str
    worker: str


class AheadRecordings:
    """Sends recordings to workers, a limited number of each user's.

    Args:
        pool: The ready workers.
        send: Sends a message to a worker.
        most: Maximum number of a user's recordings; the oldest is cancelled beyond it.
    """

    def __init__(self, pool: WorkerPool, send: Send, most: int) -> None:
        self._pool, self._send, self._most = pool, send, most
        self._open: dict[str, AheadRecording] = {}  # by id, the oldest first
        self._serial = 0

    def __len__(self) -> int:
        return len(self._open)

    def start(self, request: Request, pictures: Pictures, card: Card) -> None:
        """Have the worker record that edited or made the picture before, else the least busy one.

        The picture's edits then go to that worker, too.
        """
        name = picture_name(pictures.images[0])
        worker = self._worker(name)
        self._serial += 1
        ticket = new_ticket(
            f"{request.id}#ahead{self._serial}", request, pictures, card, 0, time.monotonic()
        )
        if worker is None or not self._send(worker, ticket.job(0.0), ticket.parts()):
            message = "no worker is ready to record a template"
            raise ApiError("no_workers", message, retry_after=RETRY_SECONDS)
        self._open[ticket.id] = AheadRecording(request.user, worker)
        self._pool.warmed_in_memory(worker, name, {})
        own = [id for id, one in self._open.items() if one.user == request.user]
        for id in own[: max(0, len(own) - self._most)]:
            self._send(self._open.pop(id).worker, Cancel(id))

    def ended(self, id: str) -> bool:
        """Note that a job ended; return whether it is one of these."""
        if "#ahead" not in id:
            return False
        self._open.pop(id, None)
        return True

    def lost(self, worker: str) -> None:
        """Forget the recordings of a worker that ended."""
        self._open = {id: one for id, one in self._open.items() if one.worker != worker}

    def cancel(self) -> None:
        """Cancel all: the server is shutting down."""
        for id, one in self._open.items():
            self._send(one.worker, Cancel(id))
        self._open.clear()

    def _worker(self, name: str) -> str | None:
        mates = self._pool.mates
        holders = [mates[one] for one in self._pool.with_template(name)]
        waiting = Counter(one.worker for one in self._open.values())
        least = min(
            holders or mates.values(),
            key=lambda mate: (len(mate.load.running), waiting[mate.name]),
            default=None,
        )
        return None if least is None else least.name
