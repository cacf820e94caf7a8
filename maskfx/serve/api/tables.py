"""The fields of each route, one table per route: what is read, checked and documented."""

from __future__ import annotations

from dataclasses import dataclass

from maskfx.serve.api.fields import (
    MODEL,
    NAME,
    Choice,
    Field,
    Flag,
    Pattern,
    Picture,
    Real,
    Size,
    Text,
    Whole,
)
from maskfx.serve.settings import Limits

SEEDS = 2**63 - 1
LONGEST_SLO = 86_400_000.0  # milliseconds
FORMATS = ("png", "jpeg", "webp")
FILES = "PNG, JPEG or WebP"

# What others take and we don't: named as such, rather than as a misspelling.
ELSEWHERE = frozenset(
    (
        *("background", "quality", "input_fidelity", "moderation", "style", "safety_identifier"),
        *("width", "height", "url", "image_url", "mask_url", "cfg_scale", "true_cfg_scale"),
        *("scheduler", "sampler", "eta", "clip_skip", "guidance_rescale", "flow_shift"),
        *("generator_device", "num_outputs_per_prompt", "padding_mask_crop"),
    )
)


@dataclass(frozen=True)
class Tables:
    """Made once, as the limits are."""

    edits: tuple[Field, ...]
    generations: tuple[Field, ...]
    templates: tuple[Field, ...]


def tables(limits: Limits) -> Tables:
    urls = ("b64_json", "url") if limits.urls else ("b64_json",)
    whole = Picture(limits.body_bytes)
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
        Field("response_format", Choice(urls)),
        Field("output_format", Choice(FORMATS), says="png by default."),
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
            Picture(limits.mask_bytes),
            takes="mask",
            says="Transparent = edit, or as mask_mode says. Else the image's own alpha.",
        ),
        Field("mask_image", Picture(limits.mask_bytes), takes="mask", says="White = edit."),
        Field("mask_mode", Choice(("alpha", "luminance")), takes="mask", says="alpha."),
    )
    return Tables(
        edits=(
            Field(
                "image",
                Picture(limits.body_bytes, several=limits.images),
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
