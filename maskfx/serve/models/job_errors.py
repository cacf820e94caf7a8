"""Maps exceptions of a job to the error that its client receives: a code and a sentence.

Messages contain no path, host name or stack trace; those go to the log.
"""

from __future__ import annotations

import logging
import re
import traceback

import torch

from maskfx.errors import (
    AdapterError,
    BudgetError,
    Busy,
    Closed,
    DeadlineMissed,
    InputError,
    NumberError,
)
from maskfx.serve.errors import ApiError
from maskfx.serve.messages import Failed, Job

log = logging.getLogger(__name__)

PATHS = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.@+~-]+){2,}[\\/]?|~[\\/][\w./\\-]+")
CHECKING = ("diffusers.pipelines.", "diffusers.schedulers.", "diffusers.image_processor")
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def failed(job: Job, error: BaseException) -> Failed:
    """Return the Failed message of a job that raised `error`; log unexpected errors."""
    code, message, param = told(error)
    if code in ("generation_failed", "out_of_memory"):
        log.error("job %s failed", job.id, exc_info=error)
    return Failed(job.id, job.attempt, code, message, param)


def told(error: BaseException) -> tuple[str, str, str | None]:
    """Return the error code, the message and the name of the offending parameter or None."""
    if isinstance(error, ApiError):
        return error.code, error.message, error.param
    if is_memory(error):
        return "out_of_memory", "The device has no memory left for this; try a smaller size.", None
    if isinstance(error, DeadlineMissed):
        return "deadline_exceeded", "The picture couldn't be ready by its deadline.", None
    if isinstance(error, Busy):
        return "queue_full", "This worker has too much to do; try again later.", None
    if isinstance(error, Closed):
        return "draining", "The server is shutting down.", None
    if isinstance(error, NumberError):
        text = "The model gave numbers that aren't finite for this request."
        return "generation_failed", text, None
    if isinstance(error, BudgetError):
        text = "There is no room for this template; delete another one that is pinned."
        return "out_of_resources", text, None
    if isinstance(error, AdapterError):
        return "lora_unavailable", clean(str(error)), "lora"
    if isinstance(error, InputError):
        return "invalid_value", clean(str(error)), error.argument
    if isinstance(error, ValueError) and raised_by_pipeline(error):
        return "invalid_value", f"The model's pipeline refuses this: {clean(str(error))}", None
    return "generation_failed", f"The picture couldn't be made ({type(error).__name__}).", None


def raised_by_pipeline(error: BaseException) -> bool:
    """Return True if diffusers' code of pipelines or schedulers raised it: it checks arguments."""
    last = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = str(frame.f_globals.get("__name__"))
    return last.startswith(CHECKING)


def is_lost(error: BaseException) -> bool:
    """Return True if the device failed and this process can't use it any more.

    After such an error every later CUDA call fails too.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError)


def is_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error.

    On a CPU torch raises a plain RuntimeError, recognizable by its text only.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in NO_MEMORY)


def clean(text: str) -> str:
    """Return the text with file paths replaced by an ellipsis."""
    return PATHS.sub("…", text)
