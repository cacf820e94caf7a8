"""Checks of what callers pass beside a pipeline's own arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maskfx.errors import InputError
from maskfx.ir.argument_checks import check_flag, check_type
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.state import CallOptions, Template


def template_name(template: object, where: str) -> str:
    """Return the name of a template passed by the caller; `where` begins the error message."""
    if not isinstance(template, (Template, str)):
        raise InputError(
            f"{where}{template!r:.60}: expected the result of maskfx.template(...), the .template "
            "of a call's result, or its name"
        )
    return template.name if isinstance(template, Template) else template


def check_quality(quality: Quality, usual: Quality, denoisers: Sequence[str]) -> None:
    if quality.control == "late" and len(denoisers) == 1:
        raise InputError(
            f'Quality(control="late"): the pipeline has one denoiser ({denoisers[0]}), and no '
            "network such as a ControlNet beside it whose result could be late; leave control out"
        )
    if quality.vae == "mask" and not usual.codes:
        raise InputError(
            'Quality(vae="mask"): the pipeline was compiled with vae="full", so its templates hold '
            "no recordings of the VAE; pass that quality to compile() too, or leave vae out"
        )


def check_generators(given: object) -> None:
    """Raise InputError for what is no generator, nor a list of them."""
    for one in given if isinstance(given, (list, tuple)) else [given]:
        wanted = "a torch.Generator, such as torch.Generator().manual_seed(7), or a list of them"
        check_type("call", "generator", one, torch.Generator, wanted, or_none=True)


def check_options(options: CallOptions, masked: bool, records: bool) -> None:
    check_flag("call", "record", options.record)
    if options.template is not None:
        template_name(options.template, "template=")
    if options.image is not None and not masked:
        raise InputError(
            "image= without a mask: this pipeline generates pictures, and image= is only the "
            "picture to edit; pass mask_image= too, or leave image= out"
        )
    if (options.template is not None or options.record) and not records:
        raise InputError(
            "template= or record=True: the pipeline is compiled with a mode that records nothing; "
            'use compile(pipe, mode="mask_cache"), or leave them out'
        )
    if options.template is not None and not masked:
        raise InputError(
            "template= without a mask: pass mask_image=, the part of the picture to edit"
        )
    if options.record and masked:
        raise InputError(
            "record=True with a mask: a template is recorded without one; call maskfx.template() "
            "for a picture, or leave mask_image= out"
        )
