"""Copies of a pipeline for the requests of an engine."""

from __future__ import annotations

import copy
import threading
from typing import Any

from maskfx.engine.tokenizers import OneAtATime, is_tokenizer
from maskfx.pipelines.pipeline import is_inner
from maskfx.pipelines.schedule import is_scheduler


def copy_over(
    pipe: object, tokenizing: threading.RLock, copied: dict[int, Any] | None = None
) -> Any:
    """Return a copy over the same modules, with schedulers and processors of its own.

    Pipelines that it runs are copied too.

    Args:
        pipe: The pipeline.
        tokenizing: Held while a tokenizer runs, which no two threads may use at once.
        copied: Memo of `deepcopy`: a scheduler under two names, or in two pipelines, stays one.
    """
    copied = {} if copied is None else copied
    own = copied[id(pipe)] = object.__new__(type(pipe))
    own.__dict__.update(pipe.__dict__)
    for name, part in pipe.__dict__.items():
        if is_scheduler(part):
            own.__dict__[name] = copy.deepcopy(part, copied)
        elif is_inner(part):
            known = copied.get(id(part))
            own.__dict__[name] = copy_over(part, tokenizing, copied) if known is None else known
        elif is_tokenizer(part):
            own.__dict__[name] = OneAtATime(part, tokenizing)
        elif name.endswith("_processor"):
            own.__dict__[name] = copy.copy(part)
    return own
