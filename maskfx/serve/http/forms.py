"""The forms of the routes, as pydantic models: parsing and validation.

The fields that set a request's parameters are derived from `Request`; the others are declared here.
An invalid value raises an ApiError that names its field, what it must be and what was sent.
"""

from __future__ import annotations

import hashlib
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from annotated_types import Le, MaxLen
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from maskfx.serve.config import Limits
from maskfx.serve.errors import ApiError
from maskfx.serve.http.schemas import MODEL, SIZE, WANTED, schema_of, wanted_of
from maskfx.serve.request import CONTROLS, NAME, AtMost, Request, hints_of, parameters_of

INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
SHORT = 4096  # maximum bytes of a field that is neither text nor an image
LONGEST_SLO = 86_400_000.0  # milliseconds
FILES = "PNG, JPEG or WebP"
# Parameters of other APIs: reported as unsupported instead of unknown.
ELSEWHERE = frozenset(
    (
        *("input_fidelity", "style", "safety_identifier"),
        *("width", "height", "url", "image_url", "mask_url", "cfg_scale", "true_cfg_scale"),
        *("scheduler", "sampler", "eta", "clip_skip", "guidance_rescale", "flow_shift"),
        *("generator_device", "num_outputs_per_prompt", "padding_mask_crop"),
    )
)


def wrong(name: str, wanted: str, sent: str = "") -> ApiError:
    """Return the error of a value.

    Args:
        name: The field.
        wanted: What its value must be.
        sent: What was sent instead, if it is of use.
    """
    instead = f", not {sent}" if sent else ""
    return ApiError("invalid_value", f"{name} must be {wanted}{instead}.", param=name)


# The forms.


@dataclass(frozen=True)
class Requires:
    """Marks a field for models whose `Card.takes` has this entry."""

    what: str


@dataclass(frozen=True)
class Upload:
    """Marks a field of image files or `data:` URLs of at most this many bytes.

    Args:
        limit: A field of `Limits`.
    """

    limit: str


def size_in(text: object) -> tuple[int, int] | None:
    """Parse `WIDTHxHEIGHT`; None for `auto`."""
    if not isinstance(text, str) or not re.fullmatch(SIZE[1:-1], text, re.ASCII):
        raise ValueError(WANTED[SIZE])
    if text == "auto":
        return None
    width, _, height = text.partition("x")
    return int(width), int(height)


Size = Annotated[
    tuple[int, int] | None,
    BeforeValidator(size_in),
    WithJsonSchema({"type": "string", "pattern": SIZE}),
    Field(description="WIDTHxHEIGHT or auto."),
]
Name = Annotated[str | None, Field(pattern=NAME)]
MaskFile = Annotated[bytes | None, Upload("mask_bytes"), Requires("mask")]


class Form(BaseModel):
    """The fields of every route. None, or null in JSON, is a field that isn't set."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    required: ClassVar[frozenset[str]] = frozenset({"prompt"})
    edits: ClassVar[bool] = True  # whether it has parameters that are for edits only
    answers: ClassVar[bool] = True  # whether it has parameters that are for results only

    model: Annotated[str | None, Field(pattern=MODEL, description="The first one by default.")] = (
        None
    )
    size: Size = None
    control_image: Annotated[
        list[bytes],
        Upload("body_bytes"),
        Requires("control"),
        Field(
            max_length=CONTROLS,
            description=f"{FILES}; one per ControlNet or T2I-Adapter, in their order.",
        ),
    ] = []

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        return read(value, kind_of(cls.model_fields[info.field_name]))

    def given(self) -> list[str]:
        """Return the names of the fields that are set."""
        sent = self.model_fields_set
        empty: tuple[None, list[object]] = (None, [])
        return [n for n in type(self).model_fields if n in sent and getattr(self, n) not in empty]

    def parameters(self) -> dict[str, Any]:
        """Return the request's parameters that are set, by the names of `Request`."""
        sent = {field: getattr(self, one.name, None) for field, one in parameters_of().items()}
        return {field: value for field, value in sent.items() if value is not None}

    def digest(self) -> bytes:
        """Return a digest that is the same for equal forms."""
        found = hashlib.sha256(type(self).__name__.encode())
        for name in self.given():
            value = getattr(self, name)
            for one in value if isinstance(value, list) else [value]:
                part = one if isinstance(one, bytes) else repr(one).encode()
                found.update(f"\0{name}\0{len(part)}\0".encode())
                found.update(part)
        return found.digest()


class AnsweredForm(Form):
    """The fields of the routes that return images."""

    ip_adapter_image: Annotated[
        list[bytes],
        Upload("body_bytes"),
        Requires("ip_adapters"),
        Field(
            max_length=CONTROLS,
            description=f"{FILES}; shown to an IP-Adapter, or one to each in their order.",
        ),
    ] = []
    n: Annotated[
        int, AtMost("pictures"), Field(ge=1, description="With seeds seed, seed + 1, …")
    ] = 1
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[
        int | None, Field(ge=0, le=100, description="Quality of jpeg and webp.")
    ] = None
    background: Annotated[
        Literal["auto", "opaque"] | None, Field(description="Pictures are opaque.")
    ] = None
    moderation: Annotated[
        Literal["auto", "low"] | None, Field(description="The server moderates nothing.")
    ] = None
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=3, description="Previews in a stream.")] = 0
    slo_ms: Annotated[
        float | None, Field(gt=0, le=LONGEST_SLO, description="Worth nothing later.")
    ] = None


class EditForm(AnsweredForm):
    """The form of an edit."""

    image: Annotated[
        list[bytes],
        Upload("body_bytes"),
        AtMost("images"),
        Requires("image"),
        Field(
            min_length=1,
            description=f"{FILES}; `image[]` for several. Without it, `template_id`'s picture.",
        ),
    ] = []
    mask: Annotated[
        MaskFile,
        Field(description="Transparent = edit; see mask_mode. Without it, the image's own alpha."),
    ] = None
    mask_image: Annotated[MaskFile, Field(description="White = edit.")] = None
    mask_mode: Annotated[
        Literal["alpha", "luminance"] | None,
        Requires("mask"),
        Field(description="alpha by default."),
    ] = None
    template_id: Name = None


class GenerationForm(AnsweredForm):
    """The form of a generation."""

    edits = False


class TemplateForm(Form):
    """The form of a template."""

    required = frozenset()
    answers = False

    image: Annotated[bytes, Upload("body_bytes"), Requires("image"), Field(description=FILES)]
    id: Name = None
    record_at: Annotated[
        Literal["now", "idle"] | None,
        Requires("ahead"),
        Field(description="idle: while no request runs; then it has no id, and isn't pinned."),
    ] = None


class AdapterForm(BaseModel):
    """The form of an adapter."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=NAME, description="Of a file, without its extension.")]


@dataclass(frozen=True)
class Forms:
    """The form of each route, created once at start."""

    edits: type[EditForm]
    generations: type[GenerationForm]
    templates: type[TemplateForm]
    adapters: type[AdapterForm] = AdapterForm


def forms(limits: Limits) -> Forms:
    return Forms(
        complete(EditForm, limits), complete(GenerationForm, limits), complete(TemplateForm, limits)
    )


F = TypeVar("F", bound=Form)
B = TypeVar("B", bound=BaseModel)


def complete(form: type[F], limits: Limits) -> type[F]:
    """Return the form with the server's limits and the fields of the request's parameters."""
    fields: dict[str, Any] = {}
    for name, field in form.model_fields.items():
        if any(isinstance(mark, AtMost) for mark in field.metadata):
            hint = limited(field.annotation, field.metadata, limits)
            fields[name] = (hint, Field(default=field.default, description=field.description))
    if "response_format" in form.model_fields and not limits.urls:
        fields["response_format"] = (Literal["b64_json"], "b64_json")
    for name, one in parameters_of().items():
        if (one.edits and not form.edits) or (one.pictures and not form.answers):
            continue
        kind, *marks = get_args(hints_of(Request)[name])
        if not one.everywhere:
            marks.append(Requires(name))
        if one.name in form.required:
            fields[one.name] = limited(kind, marks, limits)
        else:
            fields[one.name] = (limited(kind | None, marks, limits), None)
    made: type[F] = create_model(form.__name__, __base__=form, **fields)
    return made


def limited(kind: object, marks: list[object], limits: Limits) -> Any:
    """Return a field's annotation with the numbers of `limits` in place of their names."""
    bound = Le if int in (kind, *get_args(kind)) else MaxLen
    found = (
        bound(getattr(limits, mark.limit)) if isinstance(mark, AtMost) else mark for mark in marks
    )
    return Annotated[kind, *found]


# Reading a form.


def kind_of(field: FieldInfo) -> Any:
    """Return the type of a field's value, without None."""
    kinds = [one for one in get_args(field.annotation) if one is not type(None)]
    optional = type(None) in get_args(field.annotation)
    return kinds[0] if optional else field.annotation


def is_list(field: FieldInfo) -> bool:
    """Return True if the field may be given several times."""
    return get_origin(kind_of(field)) is list


def is_upload(field: FieldInfo) -> bool:
    return any(isinstance(mark, Upload) for mark in field.metadata)


def read(value: Any, kind: object) -> object:
    """Read a value from a form's bytes, or from JSON, where a whole float is an integer."""
    if get_origin(kind) is list:
        (inner,) = get_args(kind)
        plain = get_args(inner)[0] if get_origin(inner) is Annotated else inner
        return [read(one, plain) for one in value]
    if kind is bytes:
        return value.encode() if isinstance(value, str) else to_bytes(value)
    if isinstance(value, bytes | bytearray):
        text = value.decode("utf-8")
        if kind is int:
            return int(text) if INTEGER.fullmatch(text) else text
        if kind is float:
            return float(text) if REAL.fullmatch(text) else text
        if kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        return text
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def to_bytes(value: object) -> object:
    return bytes(value) if isinstance(value, bytearray) else value


def takes_of(form: type[Form]) -> Mapping[str, str | None]:
    """Return what a model must take for each field to be of use; None for fields of all models."""
    return {
        name: next((mark.what for mark in field.metadata if isinstance(mark, Requires)), None)
        for name, field in form.model_fields.items()
    }


def most_bytes(field: FieldInfo, limits: Limits) -> int:
    """Return the maximum bytes of a field in a multipart body."""
    for mark in field.metadata:
        if isinstance(mark, Upload):  # base64 in a data: URL is longer than the file
            return int(getattr(limits, mark.limit)) * 4 // 3 + 256
        if isinstance(mark, MaxLen):
            return 4 * mark.max_length
    return SHORT


def validated(form: type[B], values: Mapping[str, object]) -> B:
    """Return the form with these values; raises ApiError for the first that is invalid."""
    try:
        return form.model_validate(values)
    except ValidationError as error:
        raise refusal(form, error.errors(include_url=False)[0]) from None


def refusal(form: type[BaseModel], found: ErrorDetails) -> ApiError:
    name = str(found["loc"][0])
    if found["type"] == "missing":
        return ApiError("missing_parameter", f"{name} is missing.", param=name)
    value, schema = found["input"], schema_of(form)["properties"][name]
    if len(found["loc"]) > 1:  # of an entry of a list
        schema = schema["items"]
    if found["type"] in ("string_too_long", "too_long"):
        sent = str(len(value))
    elif isinstance(value, bytes | bytearray):
        sent = reprlib.repr(bytes(value[:SHORT]).decode("utf-8", "replace"))
    else:
        sent = reprlib.repr(value)
    return wrong(name, wanted_of(schema), sent)
