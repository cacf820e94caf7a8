"""What maskfx raises at its users.

    MaskfxError
    ├── CaptureError        the module could not be turned into a graph
    ├── NumberError         a denoiser gave numbers that aren't finite
    ├── CompileError        a pass broke a promise, or passes stand in a wrong order
    ├── EngineError         a request that the engine didn't finish
    │   ├── Busy            its queue is full
    │   ├── Cancelled       somebody gave the request up
    │   ├── DeadlineMissed  it was due before its picture was there
    │   └── Closed          the engine takes no more requests
    └── InputError          a call got something it can't use
        ├── BudgetError     a template doesn't fit into the bytes that it may take
        ├── MaskError       mask of another shape, dtype or kind
        ├── CacheError      cache of another model, size, dtype or structure
        └── MissingRequest  nothing to compute, or an argument is missing

Each message says where, what was seen, what was wanted and what to do.
"""


class MaskfxError(Exception):
    """The root: catch this to catch everything that maskfx raises on purpose."""


class CaptureError(MaskfxError):
    """The module could not be captured as a graph."""


class NumberError(MaskfxError):
    """A denoiser gave numbers that aren't finite."""


class CompileError(MaskfxError):
    """The compiler broke one of its own promises."""


class InputError(MaskfxError, ValueError):
    """A call got something that it can't use."""


class BudgetError(InputError):
    """A template doesn't fit into the bytes that it may take."""


class MaskError(InputError):
    """The mask doesn't fit the inputs."""


class CacheError(InputError):
    """The cache doesn't fit the model or the inputs."""


class MissingRequest(InputError):
    """There is nothing to compute, or an argument is missing."""


class EngineError(MaskfxError):
    """A request that the engine didn't finish."""


class Busy(EngineError):
    """The engine's queue is full."""


class Cancelled(EngineError):
    """Somebody gave the request up."""


class DeadlineMissed(EngineError):
    """The request was due before its picture was there."""


class Closed(EngineError):
    """The engine takes no more requests."""
