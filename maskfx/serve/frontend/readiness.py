"""Readiness: whether calls can be served, and how they wait while the model loads.

Owns the model's card and the states of shutdown. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from maskfx.serve.config import ServeSettings
from maskfx.serve.errors import ApiError
from maskfx.serve.request import Card, Health, ModelState, ServedModel

SOON = 2.0  # seconds, Retry-After of transient errors
LATER = 30.0  # Retry-After of errors that need an operator
LOADING = 5.0  # Retry-After while the model loads


class Readiness:
    """The state of the served model, from the start of the server on.

    Args:
        settings: Settings of the server.
        hopeless: Returns True once all workers are given up.
    """

    def __init__(self, settings: ServeSettings, hopeless: Callable[[], bool]) -> None:
        self._name, self._seconds = settings.served_name, settings.loading_seconds
        self._hopeless = hopeless
        self.known: Card | None = None  # since the first worker has loaded the model
        self._draining = self._closed = False
        self._settled = asyncio.Event()  # no call has to wait for the model any more

    # Changes.

    def loaded(self, card: Card) -> None:
        self.known = card
        self._settled.set()

    def give_up(self) -> None:
        """End the calls that wait for the model, as no worker will load it."""
        self._settled.set()

    def drain(self) -> None:
        """Refuse new calls and those that wait for the model."""
        self._draining = True
        self._settled.set()

    def close(self) -> None:
        """Refuse every call."""
        self.drain()
        self._closed = True

    async def settled(self) -> bool:
        """Wait until the model is loaded or given up; return whether it is loaded."""
        await self._settled.wait()
        return self.known is not None

    # Admission.

    def check(self) -> None:
        """Raise ApiError unless a new call is admitted, to run or to wait for the model."""
        if self._draining:
            raise ApiError("draining", "the server is being stopped", retry_after=SOON)
        self._check_workers()
        if self.known is None and not self._seconds:
            raise model_loading()

    async def wait(self, name: str | None, seconds: float | None) -> Card:
        """Return the card of the model of this name; see `Frontend.card`."""
        if name not in (None, self._name):
            text = f"There is no model {name!r}; this server has {self._name!r}."
            raise ApiError("model_not_found", text, param="model")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                self._seconds if seconds is None else min(seconds, self._seconds)
            ):
                await self._settled.wait()
        return self.card()

    def card(self) -> Card:
        """Return the model's card; raise ApiError if an admitted call can't be served."""
        self._check_workers()
        if self.known is not None:
            return self.known
        if self._draining:
            raise ApiError("draining", "the server is being stopped", retry_after=SOON)
        raise model_loading()

    def _check_workers(self) -> None:
        if self._closed:
            raise ApiError("draining", "the server was stopped", retry_after=SOON)
        if self._hopeless():
            message = "no worker runs and none could be started; the server's log has the reason"
            raise ApiError("no_workers", message, retry_after=LATER)

    # Reports.

    def model(self, ready: int) -> ServedModel:
        """Return the model's state, with `ready` workers."""
        state = ModelState.READY if ready else ModelState.LOADING
        return ServedModel(self._name, ModelState.FAILED if self._hopeless() else state, self.known)

    def health(self, nodes: dict[str, int], ready: int, waiting: int, running: int) -> Health:
        hopeless = self._hopeless()
        unready = "model_loading" if self.known is None and not hopeless else "no_workers"
        reason = "draining" if self._draining else "" if ready else unready
        return Health(not hopeless, not reason, reason, waiting, running, ready, nodes)


def model_loading() -> ApiError:
    return ApiError("model_loading", "the model is being loaded; try again", retry_after=LOADING)


def queue_full() -> ApiError:
    return ApiError("queue_full", "too many requests wait already", retry_after=SOON)
