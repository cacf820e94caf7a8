"""Messages between front end and workers: msgspec structs over ZeroMQ, never pickle.

A message has several parts: the struct, then the pixels whose shapes it has (`workers/pixels.py`).
"""

from __future__ import annotations

import msgspec

from maskfx.ir.geometry.level_shares import LevelShare
from maskfx.runtime.reuse.step_selection import LEAST
from maskfx.scheduling.step_reports import LoadFacts, Stepped
from maskfx.serve.request import Request

CHANNELS = 3
Shape = tuple[int, ...]  # of an array of pixels, one byte each


# To a worker.


class Job(msgspec.Struct, frozen=True, tag="job", kw_only=True):
    """A request to run; the pixels of its pictures follow, as `Pictures.arrays` orders them."""

    id: str  # unique in this server, unlike the request's
    attempt: int  # of this request; replies contain it, so that late ones are recognised
    request: Request
    images: list[Shape] = []
    mask: Shape | None = None
    controls: list[Shape] = []
    shown: list[Shape] = []  # to IP-Adapters
    left: float | None = None  # seconds until the deadline
    traced: bool = False  # whether to send its spans


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: str


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    template: str


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Read a template from the disk: a request for it waits."""

    template: str


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Look at a LoRA file of `lora_dir` again."""

    adapter: str


class Unregister(msgspec.Struct, frozen=True, tag="unregister"):
    """Forget a LoRA file and its weights."""

    adapter: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Heartbeat of the front end; a worker that receives none for too long ends."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish the jobs in flight, then end."""


# From a worker.


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The model is loaded; the fields are its properties as in `request.Card`."""

    family: str
    size: tuple[int, int]
    multiple: int
    steps: int
    guidance: float | None
    takes: list[str]
    generates: bool
    site: int
    slots: int  # concurrent requests
    controls: int = 1
    nets: list[str] = []  # names of the ControlNets
    ip_adapters: list[str] = []  # names of the IP-Adapters
    margin: int = 0
    every: int = 1
    least: int = LEAST
    strength: float | None = None
    on_disk: dict[str, int] = {}  # bytes of the readable templates on disk, by name
    whole: str = "all-steps"  # which steps of whole pictures are computed, a name in `WHOLE`
    patches: bool = False  # whether requests reuse patches by default
    levels: tuple[LevelShare, ...] = ()  # what a mask's sites take; empty: the same at each site
    loads: LoadFacts | None = None  # None: rows lie in the memory that it computes in
    node: str = ""  # of the cluster, if there is one
    disk: str = ""  # identifies the directory of templates; equal for workers that share it


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Heartbeat of a worker, sent also while its model loads."""

    running: int = 0
    cache: dict[str, int] = {}  # counters and bytes per tier: "hits.host", "bytes.disk"
    aside: list[str] = []  # jobs that wait for an adapter or another one's recording


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """A line of the log of a worker on another machine."""

    line: str  # JSON


class JobProgress(msgspec.Struct, frozen=True, tag="progress"):
    id: str
    attempt: int
    step: int  # number of finished steps
    steps: int


class JobSpan(msgspec.Struct, frozen=True, tag="span"):
    """A span of a traced job, in seconds of this machine's monotonic clock.

    From another machine they are relative to the time when it was sent.
    """

    id: str
    attempt: int
    name: str  # encode, record, step or decode
    began: float
    ended: float
    number: int | None = None  # of the step
    relative: bool = False

    def shifted(self, seconds: float, *, relative: bool) -> JobSpan:
        """Return the span with its times moved."""
        began, ended = self.began + seconds, self.ended + seconds
        return msgspec.structs.replace(self, began=began, ended=ended, relative=relative)


class PreviewSent(msgspec.Struct, frozen=True, tag="preview"):
    """A preview."""

    id: str
    attempt: int
    index: int
    pixels: Shape


class Done(msgspec.Struct, frozen=True, tag="done", kw_only=True):
    id: str
    attempt: int
    pixels: Shape | None  # none for a recorded template
    steps: int
    mask_ratio: float = 1.0
    patch_share: float | None = None  # share of patches that were computed; None: none were reused
    template: str | None = None  # the recording that was used; warm on this worker from now on
    template_bytes: dict[str, int] = {}


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    id: str
    attempt: int
    code: str  # a key of `errors.CODES`
    message: str
    param: str | None = None


ToWorker = Job | Cancel | Forget | Prefetch | Register | Unregister | Ping | Stop
FromWorker = Ready | Alive | Logged | Stepped | JobProgress | JobSpan | PreviewSent | Done | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
