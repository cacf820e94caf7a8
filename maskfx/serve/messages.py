"""What front and workers say to each other: msgspec structs over ZeroMQ, never pickle.

A message is two or more frames: the struct, then the pixels that didn't go by shared memory.
"""

from __future__ import annotations

import msgspec


class PixelBlock(msgspec.Struct, frozen=True, array_like=True):
    """Pixels beside the message: in a named block of shared memory, or in a frame of its own."""

    shape: tuple[int, ...]
    memory: str | None = None  # name of the block; None: the next frame
    at: int = 0


# To a worker.


class Job(msgspec.Struct, frozen=True, tag="job", kw_only=True):
    """One picture to make."""

    id: str
    attempt: int  # of this request; answers carry it, so that late ones are known
    kind: str
    prompt: str
    seed: int
    images: list[PixelBlock] = []
    mask: PixelBlock | None = None  # one byte a pixel
    control: PixelBlock | None = None
    result: PixelBlock | None = None  # room for the picture; its bytes, its shape may be another
    negative_prompt: str | None = None
    size: tuple[int, int] | None = None
    steps: int | None = None
    guidance: float | None = None
    strength: float | None = None
    template: str | None = None
    lora: str | None = None
    previews: int = 0
    seconds: float | None = None  # left until it is due
    user: str = ""
    traced: bool = False  # its spells are wanted


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: str


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    template: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """The front lives. A worker that hears none for too long ends."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish what is under way, then end."""


# From a worker.


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The model is loaded. Says what it takes; the fields are those of `request.Card`."""

    name: str
    family: str
    size: tuple[int, int]
    multiple: int
    steps: int
    guidance: float | None
    takes: list[str]
    generates: bool
    site: int
    loras: list[str]
    slots: int  # requests that it runs at once
    margin: int = 0
    every: int = 1
    strength: float | None = None
    on_disk: dict[str, int] = {}  # bytes of templates that it can read


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The answer to a ping, and a heartbeat while a model loads."""

    running: int = 0
    cache: dict[str, int] = {}  # counters and bytes per tier: "hits.host", "bytes.disk"


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A step of a batch: what the predicted costs are fitted to."""

    seconds: float
    requests: int
    sites: int  # computed, all members together
    bubble: float = 0.0  # seconds in which computing waited for loading


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    id: str
    attempt: int
    step: int  # so many are done
    steps: int


class JobSpan(msgspec.Struct, frozen=True, tag="spell"):
    """What some of a traced job's time went to, by the monotonic clock of this machine."""

    id: str
    attempt: int
    name: str  # encode, record, step or decode
    began: float
    ended: float
    number: int | None = None  # of the step


class PreviewSent(msgspec.Struct, frozen=True, tag="sketch"):
    """A preview."""

    id: str
    attempt: int
    index: int
    pixels: PixelBlock


class Done(msgspec.Struct, frozen=True, tag="done", kw_only=True):
    id: str
    attempt: int
    pixels: PixelBlock | None  # none for a recorded template
    steps: int
    mask_ratio: float = 1.0
    template: str | None = None  # the recording that served, warm on this worker from now on
    template_bytes: dict[str, int] = {}


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    id: str
    attempt: int
    code: str  # of `errors.CODES`
    message: str
    param: str | None = None


ToWorker = Job | Cancel | Forget | Ping | Stop
FromWorker = Ready | Alive | Stepped | Progress | JobSpan | PreviewSent | Done | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
