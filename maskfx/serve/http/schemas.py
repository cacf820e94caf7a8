"""The fields of each route, one table per route: parsing, validation and OpenAPI schemas.

First the kinds of fields: the text or JSON that each accepts, and its schema in the OpenAPI
document. An invalid value raises an ApiError that names its field.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Protocol

from maskfx.serve.config import Limits
from maskfx.serve.errors import ApiError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
MODEL = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127})?$"
SIZE = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"
INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
SHORT = 4096  # maximum bytes of a field that is neither text nor an image
Schema = dict[str, Any]


class FieldKind(Protocol):
    """Parses and validates a field's value from a form or a JSON body."""

    def read(self, value: Any, name: str) -> Any: ...

    def schema(self) -> Schema: ...

    def most(self) -> int:
        """Return the maximum bytes of the value in a form."""
        ...


@dataclass(frozen=True)
class Field:
    """A field of a route."""

    name: str
    kind: FieldKind
    takes: str | None = None  # entry of `Card.takes` that the model must have
    required: bool = False
    says: str = ""


def wrong(name: str, wanted: str) -> ApiError:
    return ApiError("invalid_value", f"{name} must be {wanted}.", param=name)


def text_of(value: Any, name: str) -> str:
    """Decode a value from a form (bytes) or from JSON (str)."""
    try:
        if isinstance(value, bytes | bytearray):
            return value.decode("utf-8")
        if isinstance(value, str):
            value.encode("utf-8")  # raises on lone surrogates, which JSON can escape
            return value
    except UnicodeError:
        raise wrong(name, "text in UTF-8") from None
    raise wrong(name, "a string")


@dataclass(frozen=True)
class Text:
    """Text of at most `longest` characters."""

    longest: int

    def read(self, value: Any, name: str) -> str:
        text = text_of(value, name)
        if len(text) > self.longest:
            raise wrong(name, f"at most {self.longest} characters long")
        return text

    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.longest}

    def most(self) -> int:
        return 4 * self.longest


@dataclass(frozen=True)
class Pattern:
    """Text that matches a whole pattern; only names that do can reach the file system."""

    pattern: str
    wanted: str

    def read(self, value: Any, name: str) -> str:
        text = text_of(value, name)
        if "\n" in text or re.match(self.pattern, text, re.ASCII) is None:
            raise wrong(name, self.wanted)
        return text

    def schema(self) -> Schema:
        return {"type": "string", "pattern": self.pattern}

    def most(self) -> int:
        return SHORT


@dataclass(frozen=True)
class ChoiceField:
    """One of a fixed set of words."""

    words: tuple[str, ...]

    def read(self, value: Any, name: str) -> str:
        text = text_of(value, name)
        if text not in self.words:
            raise wrong(name, "one of " + ", ".join(self.words))
        return text

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.words)}

    def most(self) -> int:
        return SHORT


@dataclass(frozen=True)
class Flag:
    """A boolean: `true` or `false`."""

    def read(self, value: Any, name: str) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, bytes | bytearray):
            text = text_of(value, name).lower()
            if text in ("true", "false"):
                return text == "true"
        raise wrong(name, "true or false")

    def schema(self) -> Schema:
        return {"type": "boolean"}

    def most(self) -> int:
        return SHORT


@dataclass(frozen=True)
class Whole:
    """An integer from `low` to `high`."""

    low: int
    high: int

    def read(self, value: Any, name: str) -> int:
        number = self._number(value, name)
        if number is None or not self.low <= number <= self.high:
            raise wrong(name, f"a whole number from {self.low} to {self.high}")
        return number

    def _number(self, value: Any, name: str) -> int | None:
        if isinstance(value, bytes | bytearray):
            text = text_of(value, name)
            return int(text) if INTEGER.fullmatch(text) else None
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def most(self) -> int:
        return SHORT


@dataclass(frozen=True)
class Real:
    """A finite number from `low` to `high`; with `above`, the lower bound is excluded."""

    low: float
    high: float
    above: bool = False

    def read(self, value: Any, name: str) -> float:
        number = self._number(value, name)
        taken = number is not None and math.isfinite(number) and self.low <= number <= self.high
        if number is None or not taken or (self.above and number == self.low):
            bound = f"above {self.low:g}" if self.above else f"from {self.low:g}"
            raise wrong(name, f"a number {bound}, at most {self.high:g}")
        return number

    def _number(self, value: Any, name: str) -> float | None:
        if isinstance(value, bytes | bytearray):
            text = text_of(value, name)
            return float(text) if REAL.fullmatch(text) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            return float(value)
        except OverflowError:
            return None

    def schema(self) -> Schema:
        low = "exclusiveMinimum" if self.above else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}

    def most(self) -> int:
        return SHORT


@dataclass(frozen=True)
class Size:
    """`WIDTHxHEIGHT`, parsed to a pair, or `auto`, parsed to None."""

    def read(self, value: Any, name: str) -> tuple[int, int] | None:
        text = text_of(value, name)
        if "\n" in text or re.match(SIZE, text, re.ASCII) is None:
            raise wrong(name, "WIDTHxHEIGHT, such as 512x512, or auto")
        if text == "auto":
            return None
        width, _, height = text.partition("x")
        return int(width), int(height)

    def schema(self) -> Schema:
        return {"type": "string", "pattern": SIZE}

    def most(self) -> int:
        return SHORT


@dataclass(frozen=True)
class PictureField:
    """An image file or its `data:` URL.

    Args:
        largest: Maximum bytes of the file.
        several: Maximum number of files; with more than one, the values are a list.
    """

    largest: int
    several: int = 1

    def read(self, value: Any, name: str) -> bytes:
        """Return the bytes of the file or its URL, which `uploads.py` distinguishes."""
        return bytes(value) if isinstance(value, bytearray) else text_of(value, name).encode()

    def schema(self) -> Schema:
        return {"type": "string", "format": "binary"}

    def most(self) -> int:
        return self.largest * 4 // 3 + 256  # base64 in a data: URL is longer


def nullable(schema: Schema) -> Schema:
    """Return the schema with null allowed, which means that the field isn't set."""
    more = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, **more, "type": [schema["type"], "null"]}


SEEDS = 2**63 - 1
LONGEST_SLO = 86_400_000.0  # milliseconds
FORMATS = ("png", "jpeg", "webp")
FILES = "PNG, JPEG or WebP"

# Parameters of other APIs: reported as unsupported instead of unknown.
ELSEWHERE = frozenset(
    (
        *("background", "quality", "input_fidelity", "moderation", "style", "safety_identifier"),
        *("width", "height", "url", "image_url", "mask_url", "cfg_scale", "true_cfg_scale"),
        *("scheduler", "sampler", "eta", "clip_skip", "guidance_rescale", "flow_shift"),
        *("generator_device", "num_outputs_per_prompt", "padding_mask_crop"),
    )
)


@dataclass(frozen=True)
class FieldTables:
    """The fields of each route, created once at start."""

    edits: tuple[Field, ...]
    generations: tuple[Field, ...]
    templates: tuple[Field, ...]


def tables(limits: Limits) -> FieldTables:
    urls = ("b64_json", "url") if limits.urls else ("b64_json",)
    whole = PictureField(limits.body_bytes)
    control = Field("control_image", whole, takes="control", says=FILES)

    sampling = (
        Field("model", Pattern(MODEL, "the name of a model"), says="The first one by default."),
        Field("seed", Whole(0, SEEDS), takes="seed", says="Chosen and returned if it isn't given."),
        Field("num_inference_steps", Whole(1, limits.steps), takes="steps"),
        Field("guidance_scale", Real(0.0, 100.0), takes="guidance"),
        Field("negative_prompt", Text(limits.prompt), takes="negative_prompt"),
        Field("lora", Pattern(NAME, "the name of a LoRA"), takes="lora"),
        Field("size", Size(), says="WIDTHxHEIGHT or auto."),
        Field("user", Text(256)),
    )
    answer = (
        Field("n", Whole(1, limits.pictures), says="With seeds seed, seed + 1, …"),
        Field("response_format", ChoiceField(urls)),
        Field("output_format", ChoiceField(FORMATS), says="png by default."),
        Field("output_compression", Whole(0, 100), says="Quality of jpeg and webp."),
        Field("stream", Flag()),
        Field("partial_images", Whole(0, 3), says="Previews in a stream."),
        Field("slo_ms", Real(0.0, LONGEST_SLO, above=True), says="Worth nothing later."),
    )
    prompt = Field("prompt", Text(limits.prompt), required=True)
    strength = Field("strength", Real(0.0, 1.0, above=True), takes="strength")
    masks = (
        Field(
            "mask",
            PictureField(limits.mask_bytes),
            takes="mask",
            says="Transparent = edit, or as mask_mode says. Else the image's own alpha.",
        ),
        Field("mask_image", PictureField(limits.mask_bytes), takes="mask", says="White = edit."),
        Field("mask_mode", ChoiceField(("alpha", "luminance")), takes="mask", says="alpha."),
    )
    return FieldTables(
        edits=(
            Field(
                "image",
                PictureField(limits.body_bytes, several=limits.images),
                takes="image",
                says=f"{FILES}; `image[]` for several. Without it, `template_id`'s picture.",
            ),
            prompt,
            *masks,
            strength,
            Field("template_id", Pattern(NAME, "the name of a template")),
            control,
            *sampling,
            *answer,
        ),
        generations=(prompt, control, *sampling, *answer),
        templates=(
            Field("image", whole, takes="image", required=True, says=FILES),
            Field("id", Pattern(NAME, "a name of letters, digits, '.', '_' and '-'")),
            Field("prompt", Text(limits.prompt)),
            strength,
            control,
            *sampling,
        ),
    )
