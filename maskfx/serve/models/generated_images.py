"""Pictures that this worker generated: the recording of such a run is the picture's template.

Knows which later edit the recording serves: one that the generating pipeline makes too, with the
arguments of the generation apart from prompt, noise and IP-Adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from PIL import Image

from maskfx.ir.lru import LruCache
from maskfx.pipelines.adapters.late_lora import resolved
from maskfx.pipelines.adapters.lora import CallAdapters
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.digests import digest
from maskfx.pipelines.templates.recording_attempts import KNOWN
from maskfx.pipelines.templates.template_key import recording_arguments
from maskfx.serve.models.pipeline_set import PipelineMember, PipelineSet

FULL = 0.999  # strength from which an edit starts from noise alone


class GeneratedPictures:
    """Templates of generated pictures, and the arguments with which each was recorded."""

    def __init__(self) -> None:
        self._arguments: LruCache[str, str] = LruCache(KNOWN)  # digests by template
        self._lock = threading.Lock()

    def recording(self, family: PipelineSet) -> dict[str, object]:
        """Return the options with which a generation is recorded; none if no edit would read it."""
        if not edits_by_generator(family):
            return {}
        assert family.generator is not None, "it generates"
        return {"record": True, "quality": pipeline_state_of(family.generator.pipe).quality}

    def add(
        self, template: str, generator: PipelineMember, arguments: Mapping[str, object]
    ) -> None:
        """Note the arguments of a recorded generation."""
        with self._lock:
            self._arguments.put(template, key_of(generator, arguments))

    def template(self, picture: Image.Image, family: PipelineSet) -> str | None:
        """Return the template of the run that made a picture; None if there is none."""
        if not edits_by_generator(family):
            return None
        source = family.library.pictures.get(digest(picture))
        return source.name if source is not None and family.library.has(source.name) else None

    def serves(
        self, template: str, generator: PipelineMember, arguments: Mapping[str, object]
    ) -> bool:
        """Return True if an edit by the generating pipeline with these arguments can read it."""
        with self._lock:
            recorded = self._arguments.get(template)
        return recorded == key_of(generator, arguments)


def edits_by_generator(family: PipelineSet) -> bool:
    """Return True if the generating pipeline edits what it made, by the recording of its run.

    It starts from noise, so an editor must do so too, unless a request sets its strength.
    """
    generator, editor = family.generator, family.editor
    if generator is None or generator is editor or generator.signature.takes_picture:
        return False
    if not pipeline_state_of(generator.pipe).records:
        return False
    if editor is None or not editor.signature.has("strength"):
        return True
    return (editor.signature.number("strength") or 0) >= FULL


def key_of(generator: PipelineMember, arguments: Mapping[str, Any]) -> str:
    """Return what a recording with these arguments depends on, apart from the pipeline."""
    state, own = pipeline_state_of(generator.pipe), dict(arguments)
    adapters = CallAdapters.of(resolved(own.pop("lora", None), state.adapters, state.base))
    key = recording_arguments(state.call, own, False, state.usual)[1]
    return digest([key, adapters.recorded.key])
