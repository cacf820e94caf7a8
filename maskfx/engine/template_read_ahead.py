"""TemplateReadAhead: reads the templates of requests that wait for a place from disk."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from maskfx.engine.ticket import Ticket, TicketState
from maskfx.pipelines.compile import read_ahead
from maskfx.pipelines.parts.pipeline import Pipeline


class TemplateReadAhead:
    """Reads in a thread of its own."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="maskfx-read-ahead")

    def start(
        self, ticket: Ticket, pipe: Pipeline, args: tuple[object, ...], given: Mapping[str, object]
    ) -> None:
        self._reader.submit(self._read, ticket, pipe, args, dict(given))

    def _read(
        self, ticket: Ticket, pipe: Pipeline, args: tuple[object, ...], given: dict[str, object]
    ) -> None:
        if ticket.state is TicketState.QUEUED:
            read_ahead(pipe, args, given)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
