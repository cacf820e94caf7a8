"""The interface `Frontend`, which serves requests; `frontend/frontend.py` implements it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Protocol

from maskfx.serve.request import (
    AdapterInfo,
    Card,
    Finished,
    Health,
    Pictures,
    Pixels,
    Preview,
    Request,
    ServedModel,
    TemplateInfo,
)


class Frontend(Protocol):
    """Owns requests from their arrival to their result; used by one event loop."""

    def seat(self) -> AbstractContextManager[None]:
        """Reserve capacity for one call before its body is read.

        Raises ApiError queue_full, draining, model_loading or no_workers if there is none.
        """
        ...

    def serve(self, request: Request, pictures: Pictures) -> AsyncIterator[Preview | Finished]:
        """Yield previews, then Finished, or raise ApiError; closing it cancels the request."""
        ...

    def models(self) -> list[ServedModel]:
        """Return the served models, under the names that clients use."""
        ...

    async def card(self, name: str | None, seconds: float | None) -> Card:
        """Return the card of a model; waits while it loads, for at most `seconds` if given.

        None names the only model. Raises ApiError model_not_found, model_loading, draining or
        no_workers.
        """
        ...

    async def record(self, request: Request, pictures: Pictures) -> TemplateInfo:
        """Register, warm and pin a template."""
        ...

    def record_ahead(self, request: Request, pictures: Pictures) -> None:
        """Have a template recorded in idle time, if there is any; ApiError if none is accepted."""
        ...

    def templates(self) -> list[TemplateInfo]: ...

    async def forget(self, template: str) -> None:
        """Delete a template; ApiError template_not_found if there is none."""
        ...

    def template_picture(self, template: str) -> Pixels:
        """Return a template's image; ApiError template_not_found if there is none."""
        ...

    def adapters(self) -> list[AdapterInfo]: ...

    async def register_adapter(self, name: str) -> AdapterInfo:
        """Make a file of `lora_dir` known, or its new content; ApiError lora_not_found."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter and its weights; the file stays. ApiError lora_not_found."""
        ...

    def health(self) -> Health: ...

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        ...

    def count(self, metric: str, **labels: str) -> None:
        """Increment a counter of `metrics.py`."""
        ...
