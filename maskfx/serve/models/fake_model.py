"""A fake model for tests and benchmarks of the server, without torch.

Images are computed from a hash of the request, and steps sleep for a configured time.
`settings.model` is "fake" or "fake:NAME=VALUE,…":

    seconds_per_step=0.01   duration of one batched step
    seconds_per_site=0      added to it per site of the batch's members
    seconds_to_load=0       delay before the worker is ready
    steps=8  width=256  height=256   defaults of a request
    needs=PATH              loading fails if this file doesn't exist

Words in a prompt inject faults; with ":N" only in the first N attempts at a request:

    fake:fail     raise an exception in this member, in its second step
    fake:nan      put non-finite numbers into this member
    fake:oom:N    run out of memory in a batch of more than N members (N isn't attempts here;
                  without N: in any batch)
    fake:hang     never end the second step
    fake:crash    end the process by a segmentation fault, in the second step
    fake:lost     report a failed device in the second step, as with a GPU
    fake:slow     make each step with this member ten times as long
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from maskfx.errors import InputError
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.step_reports import StepMember, Stepped
from maskfx.serve.config import ServeSettings
from maskfx.serve.messages import Failed, Job, JobProgress, JobSpan, Ready
from maskfx.serve.models.model import Lost, Made, PreviewMade, Tell
from maskfx.serve.request import Pictures, Pixels, Request, RequestKind, parameters_of
from maskfx.serve.request_cost import Size, active_share, card_of, size_of, steps_of

SITE = 8
TAKES = frozenset(
    (
        *("ahead", "control", "guidance", "image", "lora", "mask"),
        *("negative_prompt", "seed", "steps", "strength", "template"),
    )
)
FAULT = re.compile(r"\bfake:(fail|nan|oom|hang|crash|lost|slow)(?::(\d+))?\b")
SLOW = 10

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FakeCosts:
    """The values that the text after "fake:" can set."""

    seconds_per_step: float = 0.01
    seconds_per_site: float = 0.0
    seconds_to_load: float = 0.0
    steps: int = 8
    width: int = 256
    height: int = 256
    needs: str = ""


def parse(model: str) -> FakeCosts:
    """Parse a model name; InputError for names not in `FakeCosts` and values of another type."""
    told: dict[str, float | int | str] = {}
    for part in filter(None, model.partition(":")[2].split(",")):
        name, _, value = part.partition("=")
        if name not in FakeCosts.__dataclass_fields__:
            known = ", ".join(FakeCosts.__dataclass_fields__)
            raise InputError(f"model {model!r}: {name!r} isn't one of {known}")
        default = getattr(FakeCosts, name)
        try:
            told[name] = type(default)(value)
        except ValueError:
            wanted = type(default).__name__
            raise InputError(f"model {model!r}: {name}={value!r} isn't a {wanted}") from None
    return FakeCosts(**told)  # type: ignore[arg-type]


@dataclass(eq=False)
class FakeMember:
    """A job in the batch."""

    job: Job
    pictures: Pictures
    steps: int
    sites: int
    ratio: float
    size: tuple[int, int]
    squares: NDArray[np.float32] | None  # result colour of each site; None for a recording
    done: int = 0
    faults: dict[str, int | None] = field(default_factory=dict)

    def facts(self) -> StepMember:
        """Return what it computes in a step."""
        whole = -(-self.size[0] // SITE) * -(-self.size[1] // SITE)
        kind = StepKind.EDIT if self.sites < whole else StepKind.DENSE
        return StepMember(StepKind.RECORD if self.squares is None else kind, self.sites, whole)

    def fault(self, name: str) -> bool:
        """Return True if the fault is to be injected in this attempt."""
        if name not in self.faults:
            return False
        first = self.faults[name]
        return first is None or self.job.attempt <= first


class FakeModel:
    """Implements `Model` for tests of the server."""

    def __init__(
        self, settings: ServeSettings, tell: Tell, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._costs = parse(settings.model or "fake")
        sleep(self._costs.seconds_to_load)
        if self._costs.needs and not Path(self._costs.needs).exists():
            raise OSError("the file that the fake model needs isn't there")
        self._slots, self._tell, self._sleep = settings.max_num_seqs, tell, sleep
        self._batch: dict[str, FakeMember] = {}
        self._queue: dict[str, FakeMember] = {}
        self._idle: dict[str, FakeMember] = {}  # recordings, which step while there is no batch
        self._ahead = {"finished": 0, "dropped": 0}
        self._templates: dict[str, int] = {}  # bytes by name
        self._hits = self._misses = 0
        self._changed = threading.Condition()
        self._closing = False
        self._due = 0.0  # scheduled end of the current step
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def ready(self) -> Ready:
        costs = self._costs
        return Ready(
            family="Fake",
            size=(costs.width, costs.height),
            multiple=SITE,
            steps=costs.steps,
            guidance=None,
            takes=sorted(TAKES),
            generates=True,
            site=SITE,
            slots=self._slots,
        )

    def start(self, job: Job, pictures: Pictures) -> None:
        began = time.monotonic()
        member = self._member(job, pictures)
        self._spell(job, "encode", began)
        with self._changed:
            idle = job.request.kind is RequestKind.AHEAD
            (self._idle if idle else self._queue)[job.id] = member
            self._changed.notify()

    def cancel(self, id: str) -> None:
        with self._changed:
            self._queue.pop(id, None)
            self._batch.pop(id, None)
            self._ahead["dropped"] += self._idle.pop(id, None) is not None

    def aside(self) -> list[str]:
        return []

    def forget(self, template: str) -> None:
        with self._changed:
            self._templates.pop(template, None)

    def prefetch(self, template: str) -> None:
        pass  # its templates are numbers in memory

    def register_adapter(self, name: str) -> None:
        pass  # any name changes the picture in the same way

    def remove_adapter(self, name: str) -> None:
        pass

    def cache(self) -> dict[str, int]:
        with self._changed:
            held = sum(self._templates.values())
            found = {"hits.host": self._hits, "misses.host": self._misses, "bytes.host": held}
            counts = {"waiting": len(self._idle), **self._ahead}
            ahead = counts if any(counts.values()) else {}
            return found | {f"recordings.{name}": count for name, count in ahead.items()}

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._idle.clear()
            self._changed.notify()
        self._thread.join()

    def _member(self, job: Job, pictures: Pictures) -> FakeMember:
        card, request = card_of(self.ready(), "fake"), job.request
        steps = steps_of(request.steps, request.strength, card)
        recording = request.kind in (RequestKind.RECORD, RequestKind.AHEAD)
        ratio = 1.0 if recording else active_share(pictures.mask, SITE)
        size = size_of(request.size, pictures.images, card)
        whole = -(-size[0] // SITE) * -(-size[1] // SITE)
        found = FAULT.finditer(request.prompt)
        faults = {one[1]: int(one[2]) if one[2] else None for one in found}
        squares = None if recording else squares_of(request, pictures, size)
        sites = max(1, round(ratio * whole))
        return FakeMember(job, pictures, steps, sites, ratio, size, squares, faults=faults)

    def _run(self) -> None:
        kinds = (self._batch, self._queue, self._idle)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(kinds) or self._closing)
                if not any(kinds):
                    return
                for id in list(self._queue)[: self._slots - len(self._batch)]:
                    self._batch[id] = self._queue.pop(id)
                members = list(self._batch.values()) or list(self._idle.values())[-1:]
            self._step(members)

    def _step(self, members: list[FakeMember]) -> None:
        """Run one step of all members; finished and failed members leave the batch."""
        began = time.monotonic()
        sites = sum(member.sites for member in members)
        costs = self._costs
        slow = SLOW if any(member.fault("slow") for member in members) else 1
        cost = slow * (costs.seconds_per_step + costs.seconds_per_site * sites)
        # directly after another step: schedule from that step's due time, to absorb its delay
        self._due = cost + (self._due if began - self._due < cost else began)
        self._sleep(max(0.0, self._due - began))
        for member in members:
            self._advance(member, len(members), began)
        facts = [member.facts() for member in members]
        if members[0].job.request.kind is not RequestKind.AHEAD:
            self._tell(Stepped(time.monotonic() - began, facts))

    def _advance(self, member: FakeMember, batch: int, began: float) -> None:
        job = member.job
        try:
            self._provoke(member, batch)
        except MemoryError:
            self._fail(member, "out_of_memory", f"no memory in a batch of {batch}")
            return
        except Exception:
            log.exception("member_failed", job=job.id)
            self._fail(member, "generation_failed", "the picture couldn't be made")
            return
        with self._changed:
            if member not in (self._batch.get(job.id), self._idle.get(job.id)):
                return  # cancelled
        recording = member.squares is None
        self._spell(job, "record" if recording else "step", began, member.done)
        member.done += 1
        self._tell(JobProgress(job.id, job.attempt, member.done, member.steps))
        if member.done == member.steps:
            self._finish(member)
        else:
            self._preview(member)

    def _provoke(self, member: FakeMember, batch: int) -> None:
        """Inject the faults that the prompt names."""
        most = member.faults.get("oom") or 0
        if "oom" in member.faults and batch > most:
            raise MemoryError
        if member.done + 1 != min(2, member.steps):
            return
        if member.fault("crash"):
            ctypes.string_at(0)
        if member.fault("lost"):
            self._tell(Lost("the prompt asked for this"))
        if member.fault("fail"):
            raise RuntimeError("the prompt asked for this")
        if member.fault("nan") and member.squares is not None:
            member.squares[0, 0, 0] = np.nan
        while member.fault("hang"):
            time.sleep(3600)

    def _finish(self, member: FakeMember) -> None:
        job, squares = member.job, member.squares
        if squares is not None and not np.isfinite(squares).all():
            self._fail(member, "generation_failed", "the picture's numbers aren't finite")
            return
        with self._changed:
            self._batch.pop(job.id, None)
            self._ahead["finished"] += self._idle.pop(job.id, None) is not None
            kept = self._recorded(member)
        began = time.monotonic()
        pixels = None if squares is None else drawn(squares, member.pictures, member.size)
        if pixels is not None:
            self._spell(job, "decode", began)
        made = Made(
            job.id, job.attempt, pixels, member.steps, member.ratio, job.request.template, kept
        )
        self._tell(made)

    def _recorded(self, member: FakeMember) -> dict[str, int] | None:
        """Store the job's template if it has one; return its bytes by tier."""
        template = member.job.request.template
        if template is None:
            return None
        if template in self._templates:
            self._hits += 1
        else:
            self._misses += 1
            self._templates[template] = member.steps * member.sites * 64
        return {"host": self._templates[template]}

    def _preview(self, member: FakeMember) -> None:
        """Send evenly spaced previews: the image, darker by the share of steps that are left."""
        job, squares, count = member.job, member.squares, member.job.request.previews
        if not count or squares is None:
            return
        due = [(k + 1) * member.steps // (count + 1) for k in range(count)]
        for index, step in enumerate(due):
            if step == member.done:
                share = np.float32(member.done / member.steps)
                pixels = drawn(np.nan_to_num(squares * share), member.pictures, member.size)
                self._tell(PreviewMade(job.id, job.attempt, index, pixels))

    def _spell(self, job: Job, name: str, began: float, number: int | None = None) -> None:
        if job.traced:
            self._tell(JobSpan(job.id, job.attempt, name, began, time.monotonic(), number))

    def _fail(self, member: FakeMember, code: str, message: str, param: str | None = None) -> None:
        with self._changed:
            self._batch.pop(member.job.id, None)
            self._ahead["dropped"] += self._idle.pop(member.job.id, None) is not None
        self._tell(Failed(member.job.id, member.job.attempt, code, message, param))


def squares_of(request: Request, pictures: Pictures, size: Size) -> NDArray[np.float32]:
    """Return a colour for each site, hashed from all parameters that determine the image."""
    width, height = size
    told = [getattr(request, name) for name in parameters_of() if name != "user"]
    digest = xxhash.xxh3_64(repr((told, size)).encode())
    for array in pictures.arrays():
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array).data)
    random = np.random.default_rng(digest.intdigest())
    rows, columns = -(-height // SITE), -(-width // SITE)
    return random.integers(0, 256, (rows, columns, 3)).astype(np.float32)


def drawn(squares: NDArray[np.float32], pictures: Pictures, size: Size) -> Pixels:
    """Draw each site's colour as a square; outside the mask, keep the image."""
    width, height = size
    made = squares.astype(np.uint8).repeat(SITE, 0).repeat(SITE, 1)[:height, :width]
    if pictures.mask is not None and pictures.images:
        image = pictures.images[0]
        if image.shape == made.shape:
            made = np.where(pictures.mask[:, :, None], made, image)
    return made
