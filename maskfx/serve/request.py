"""A request, its pictures and results, and what the server reports of itself.

One request produces one image; an HTTP call for n images is n requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from maskfx.ir.geometry.level_shares import LevelShare
from maskfx.runtime.reuse.step_selection import LEAST

Pixels = NDArray[np.uint8]  # (height, width, 3)
Mask = NDArray[np.bool_]  # (height, width), True = edit
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"  # only such names can reach the file system
LORA = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:-?[0-9]{1,2}(\.[0-9]{1,4})?)?"
LORAS = rf"^{LORA}(,{LORA}){{0,7}}$"  # NAME or NAME:WEIGHT, eight at most
REUSE = r"^(off|judge|[0-9](\.[0-9]{1,6})?)$"  # of patches; a number is a relative change
SEEDS = 2**63 - 1
CONTROLS = 16  # control images of a request, at most
MODE = 63  # number of a kind of control images, at most
SCALE = 10.0  # of the results of a ControlNet or an IP-Adapter, at most
NET = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:(10(\.0{1,4})?|[0-9](\.[0-9]{1,4})?))?"
NETS = rf"^{NET}(,{NET}){{0,15}}$"  # NAME or NAME:SCALE, or none


class RequestKind(Enum):
    """The kind of a request."""

    EDIT = "edit"
    GENERATE = "generate"
    RECORD = "record"  # a template, warmed and pinned
    AHEAD = "ahead"  # a template, recorded while the worker runs no request; not pinned


@dataclass(frozen=True, eq=False)
class Pictures:
    """The decoded input images of a request."""

    images: tuple[Pixels, ...] = ()  # upright; the first one is edited
    mask: Mask | None = None  # of the first image's size
    controls: tuple[Pixels, ...] = ()  # one per ControlNet, or per kind that one takes
    shown: tuple[Pixels, ...] = ()  # to IP-Adapters, of any size

    def arrays(self) -> list[Pixels | Mask]:
        """Return images, mask if there is one, control images, what IP-Adapters are shown."""
        mask = () if self.mask is None else (self.mask,)
        return [*self.images, *mask, *self.controls, *self.shown]


@dataclass(frozen=True)
class Parameter:
    """Marks a field of `Request` that clients set.

    Args:
        name: Name in forms, and in a pipeline's call if it is an argument of it.
        argument: Whether the value is an argument of the pipeline's call.
        everywhere: Whether every model takes it; else `Card.takes` must contain the field's name.
        edits: Whether it is for requests with an image only.
        pictures: Whether it is for requests that return a picture only.
    """

    name: str
    argument: bool = False
    everywhere: bool = False
    edits: bool = False
    pictures: bool = False


@dataclass(frozen=True)
class AtMost:
    """Marks a field whose largest value, or length, is this field of `config.Limits`."""

    limit: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one image, in the front end and in workers.

    A parameter of clients is declared here only: the fields of the forms, their limits and the
    arguments of a pipeline's call are derived from its `Parameter`.
    """

    id: str
    kind: RequestKind
    seed: Annotated[
        int,
        Parameter("seed"),
        Field(ge=0, le=SEEDS, description="Chosen and returned if it isn't given."),
    ]
    prompt: Annotated[
        str, Parameter("prompt", argument=True, everywhere=True), AtMost("prompt")
    ] = ""
    negative_prompt: Annotated[
        str | None, Parameter("negative_prompt", argument=True), AtMost("prompt")
    ] = None
    steps: Annotated[
        int | None, Parameter("num_inference_steps", argument=True), Field(ge=1), AtMost("steps")
    ] = None
    guidance: Annotated[
        float | None, Parameter("guidance_scale", argument=True), Field(ge=0, le=100)
    ] = None
    strength: Annotated[
        float | None, Parameter("strength", argument=True, edits=True), Field(gt=0, le=1)
    ] = None
    lora: Annotated[
        str | None,
        Parameter("lora"),
        Field(pattern=LORAS, description="NAME, or NAME:WEIGHT, and more of them after commas."),
    ] = None
    control_scale: Annotated[
        list[Annotated[float, Field(ge=0, le=SCALE)]] | None,
        Parameter("controlnet_conditioning_scale", argument=True),
        Field(
            min_length=1,
            max_length=CONTROLS,
            description="One number for all control images, or one for each in their order.",
        ),
    ] = None
    control_mode: Annotated[
        list[Annotated[int, Field(ge=0, le=MODE)]] | None,
        Parameter("control_mode", argument=True),
        Field(
            min_length=1,
            max_length=CONTROLS,
            description="What each control image is, for a ControlNet that takes several kinds.",
        ),
    ] = None
    control_start: Annotated[
        float | None, Parameter("control_guidance_start", argument=True), Field(ge=0, le=1)
    ] = None
    control_end: Annotated[
        float | None, Parameter("control_guidance_end", argument=True), Field(gt=0, le=1)
    ] = None
    guess_mode: Annotated[
        bool | None,
        Parameter("guess_mode", argument=True),
        Field(description="Whether ControlNets act without the prompt, with weights by depth."),
    ] = None
    nets: Annotated[
        str | None,
        Parameter("controlnet"),
        Field(
            pattern=NETS,
            description="Which ControlNets or T2I-Adapters it uses: NAME, or NAME:SCALE, and more "
            "of them after commas, or none. All by default.",
        ),
    ] = None
    ip_adapters: Annotated[
        str | None,
        Parameter("ip_adapter", pictures=True),
        Field(
            pattern=NETS,
            description="Which IP-Adapters it uses: NAME, or NAME:SCALE, and more of them after "
            "commas, or none. All by default, if there are pictures for them.",
        ),
    ] = None
    ip_scale: Annotated[
        list[Annotated[float, Field(ge=0, le=SCALE)]] | None,
        Parameter("ip_adapter_scale", pictures=True),
        Field(
            min_length=1,
            max_length=CONTROLS,
            description="One number for all IP-Adapters, or one per IP-Adapter that is used.",
        ),
    ] = None
    late_control: Annotated[
        Literal["sync", "late"] | None,
        Parameter("control"),
        Field(description="late: steps read the ControlNet's results of the step before."),
    ] = None
    late_parallel: Annotated[
        Literal["sync", "late"] | None,
        Parameter("parallel"),
        Field(
            description="late: the processes that share a step read one another's rows of the step "
            "before."
        ),
    ] = None
    reuse: Annotated[
        str | None,
        Parameter("reuse", pictures=True),
        Field(
            pattern=REUSE,
            description="Of patches across steps: off, judge, or the relative change from which a "
            "patch is computed. The server's setting by default.",
        ),
    ] = None
    quality: Annotated[
        Literal["auto", "all-steps", "half-steps", "third-steps", "fifth-steps"] | None,
        Parameter("quality", everywhere=True, pictures=True),
        Field(
            description="Of whole pictures: how many steps are computed; the others are "
            "extrapolated. auto: as the server is set."
        ),
    ] = None
    size: tuple[int, int] | None = None  # width, height; None: the first image's or the model's
    template: str | None = None
    # the following don't change the image
    user: Annotated[str, Parameter("user", everywhere=True), Field(max_length=256)] = ""
    previews: int = 0
    seconds: float | None = None  # deadline, in seconds after the arrival
    trace: dict[str, str] | None = None  # the caller's W3C trace context headers


def loras_in(text: str | None) -> list[tuple[str, float]]:
    """Return the names and weights in the field `lora`."""
    if text is None:
        return []
    pairs = (one.partition(":") for one in text.split(","))
    return [(name, float(weight) if weight else 1.0) for name, _, weight in pairs]


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Return the annotations of a class's fields, with their marks."""
    return get_type_hints(kind, include_extras=True)


@cache
def parameters_of(request: type[Request] = Request) -> Mapping[str, Parameter]:
    """Return the parameters that clients set, by the name of the field."""
    return {
        name: mark
        for name, hint in hints_of(request).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Parameter)
    }


@dataclass(frozen=True, eq=False)
class Preview:
    """A low-quality image of a request in flight."""

    index: int  # 0, 1, …
    pixels: Pixels


@dataclass(frozen=True, eq=False)
class Finished:
    """The result image, and the request's statistics."""

    pixels: Pixels
    seconds: float  # from arrival to result
    queued: float
    steps: int
    mask_ratio: float  # share of the sites that were computed; 1 without a mask
    patch_share: float | None = None  # share of patches that were computed; None: none were reused
    dense_seconds: float | None = None  # predicted seconds of a dense run
    tries: int = 1
    worker: str = ""


@dataclass(frozen=True)
class Card:
    """A model's properties and supported parameters, as reported by its worker."""

    name: str
    family: str  # class name of the pipeline
    size: tuple[int, int]  # default width and height
    multiple: int  # widths and heights are multiples of this
    steps: int
    guidance: float | None
    takes: frozenset[str]  # of: image, mask, control, negative_prompt, guidance, strength, lora…
    generates: bool  # whether it generates without an image
    site: int = 8  # pixels along a site of the latents, for the web page's overlay
    loras: tuple[str, ...] = ()
    controls: int = 1  # control images of a request, if the model takes any: one per ControlNet
    nets: tuple[str, ...] = ()  # names of the ControlNets, if requests may choose some of them
    ip_adapters: tuple[str, ...] = ()  # names of the IP-Adapters
    margin: int = 0  # sites around a mask that an edit computes, too
    every: int = 1  # an edit computes about every n-th step
    least: int = LEAST  # of steps that it computes, however few there are
    whole: str = "all-steps"  # which steps of whole pictures are computed, a name in `WHOLE`
    strength: float | None = None  # default of an edit
    patches: bool = False  # whether patches are reused across steps unless a request turns that off
    levels: tuple[LevelShare, ...] = ()  # what a mask's sites take; empty: the same at each site


class ModelState(Enum):
    """Whether a model can be used."""

    LOADING = "loading"  # no worker is ready, but one will be
    READY = "ready"
    FAILED = "failed"  # all workers were given up


@dataclass(frozen=True)
class ServedModel:
    """A model of the server, from its start on."""

    name: str
    state: ModelState
    card: Card | None  # None until a worker has loaded it


@dataclass(frozen=True)
class TemplateInfo:
    """A template image that is stored for edits."""

    id: str
    width: int
    height: int
    created: int  # Unix time in seconds
    pinned: bool = True
    bytes: dict[str, int] = field(default_factory=dict)  # by tier
    workers: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdapterInfo:
    """A LoRA file that requests may name."""

    name: str
    bytes: int
    created: int  # Unix time in seconds of the file's last change


@dataclass(frozen=True)
class Health:
    """State of the server: `live` unless only a restart helps, `ready` if a worker is."""

    live: bool
    ready: bool
    reason: str = ""  # an error code if it isn't ready
    waiting: int = 0
    running: int = 0
    workers: int = 0
    nodes: dict[str, int] = field(default_factory=dict)  # ready workers by node of a cluster
    ranks: int = 0  # processes that share the workers' steps; 0 if none do
    recordings: int = 0  # that wait for idle time, or are under way
