"""StoredTemplates: the pictures of templates in the front end, with their recordings on workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

from maskfx.serve.frontend.dispatch import Dispatch, Send
from maskfx.serve.frontend.template_images import TemplateImage, TemplateImages
from maskfx.serve.messages import Forget
from maskfx.serve.request import Pixels, TemplateInfo


class StoredTemplates:
    """The templates that clients have named.

    Args:
        cache_dir: Where the pictures are kept; None for in memory only.
        dispatch: The requests and the workers.
        send: Sends a message to a worker.
    """

    def __init__(self, cache_dir: Path | str | None, dispatch: Dispatch, send: Send) -> None:
        self._images = TemplateImages(cache_dir)
        self._dispatch, self._send = dispatch, send

    def begin(self, id: str, picture: Pixels) -> None:
        """Check that a picture can be stored, before it is recorded."""
        self._images.check(id, picture)
        if id in self._images:
            self.forget_recordings(id)  # they may be of another image

    def keep(self, id: str, picture: Pixels) -> TemplateImage:
        """Keep a picture that was recorded in memory; ApiError without room."""
        return self._images.keep(id, picture, int(time.time()))

    async def write(self, leaf: TemplateImage) -> TemplateInfo:
        """Write a picture to disk, if there is one, and describe its template."""
        await asyncio.to_thread(self._images.write, leaf)
        return self._info(leaf)

    def all(self) -> list[TemplateInfo]:
        return [self._info(leaf) for leaf in self._images]

    def picture(self, id: str) -> Pixels:
        """Return a picture; ApiError template_not_found if there is none."""
        return self._images.get(id).pixels

    async def forget(self, id: str) -> None:
        await asyncio.to_thread(self._images.forget, id)
        self.forget_recordings(id)

    def forget_recordings(self, id: str) -> None:
        """Have all workers forget what they recorded of a template."""
        self._dispatch.pool.forget(id)
        for name in self._dispatch.pool.mates:
            self._send(name, Forget(id))

    def forget_unknown(self, ids: Iterable[str]) -> None:
        """Forget the recordings of templates that were deleted while a worker wasn't running."""
        self._images.report_unknown(ids, self._forget_unused)

    def _forget_unused(self, id: str) -> None:
        if not self._dispatch.serves(id):
            self.forget_recordings(id)

    def _info(self, leaf: TemplateImage) -> TemplateInfo:
        pool = self._dispatch.pool
        return leaf.info(pool.sizes(leaf.id), pool.with_template(leaf.id))
