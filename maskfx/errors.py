"""Exceptions that maskfx raises.

    MaskfxError
    ├── CaptureError        the module could not be captured as a graph
    ├── NumberError         a denoiser returned non-finite numbers
    ├── AdapterError        a LoRA file could not be loaded in time, or not at all
    ├── CompileError        a pass broke an invariant, or passes run in a wrong order
    ├── EngineError         the engine did not finish a request
    │   ├── Busy            the engine's queue is full
    │   ├── Cancelled       the request was cancelled
    │   ├── DeadlineMissed  the request's deadline passed before its image was finished
    │   └── Closed          the engine accepts no more requests
    └── InputError          a call got an argument that it can't use
        ├── SignatureError  a call got an unknown argument, or one twice, or lacks one
        ├── BudgetError     a template doesn't fit into its byte budget
        ├── MaskError       the mask has a wrong shape, dtype or kind
        ├── CacheError      the cache belongs to another model, size, dtype or structure
        └── MissingRequest  there is nothing to compute, or an argument is missing

Each message states the place, the value found, the value expected and what to do.
"""


class MaskfxError(Exception):
    """Base class of every error that maskfx raises on purpose."""


class CaptureError(MaskfxError):
    """The module could not be captured as a graph."""


class NumberError(MaskfxError):
    """A denoiser returned non-finite numbers."""


class AdapterError(MaskfxError):
    """A LoRA file could not be loaded: its store or the process that loads it failed."""


class CompileError(MaskfxError):
    """The compiler broke one of its invariants."""


class InputError(MaskfxError, ValueError):
    """A call got an argument that it can't use; `argument` is its name, where it is known."""

    argument: str | None = None


class SignatureError(InputError, TypeError):
    """A call got an argument that it doesn't accept, or one twice, or lacks one."""


class SizesDisagree(InputError):
    """Two arguments show different sizes for one role."""

    def __init__(self, path: str, role: str, size: int, other: str) -> None:
        super().__init__(f"{path}: its {role} is {size}, but {other}; pass arguments that agree")
        self.path, self.role = path, role


class BudgetError(InputError):
    """A template doesn't fit into its byte budget."""


class MaskError(InputError):
    """The mask doesn't fit the inputs."""


class CacheError(InputError):
    """The cache doesn't fit the model or the inputs."""


class MissingRequest(InputError):
    """There is nothing to compute, or an argument is missing."""


class EngineError(MaskfxError):
    """The engine did not finish a request."""


class Busy(EngineError):
    """The engine's queue is full."""


class Cancelled(EngineError):
    """The request was cancelled."""


class DeadlineMissed(EngineError):
    """The request's deadline passed before its image was finished."""


class Closed(EngineError):
    """The engine accepts no more requests."""
