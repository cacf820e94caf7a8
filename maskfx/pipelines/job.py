"""Job: what one call of a compiled pipeline asks for, and the runs that answer it."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maskfx.compiled import CompiledDenoiser
from maskfx.errors import BudgetError, EngineError, InputError
from maskfx.pipelines.course import Course, DenseCourse, EditCourse, Lacking, RecordCourse
from maskfx.pipelines.identity import (
    Surroundings,
    arguments_of,
    digest,
    noise_of,
    recorded_arguments,
    settings_of,
)
from maskfx.pipelines.masks import (
    is_picture,
    laid_over,
    like_mask,
    nothing_masked,
    pixel_masks,
)
from maskfx.pipelines.probe import encodes, first_inputs, same_inputs
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.results import (
    forced_result,
    images_of,
    listed,
    single_pictures,
    with_images,
)
from maskfx.pipelines.run import Execute, Run, Shapes, watched
from maskfx.pipelines.shelf import Shelf, Source
from maskfx.pipelines.standin import running

Arguments = dict[str, Any]
CHANCES = 3  # runs of an edit whose template loses something under way


@dataclass(frozen=True)
class Template:
    """A recorded run: hand it to later calls, or its picture."""

    name: str
    images: Any = None

    def __repr__(self) -> str:
        return f"Template({self.name})"


@dataclass
class Works:
    """What all runs of one pipeline share."""

    call: Callable[..., Any]  # the pipeline class's own __call__
    denoisers: dict[str, CompiledDenoiser]
    shelf: Shelf
    quality: Quality
    execute: Execute
    surroundings: Surroundings = field(default_factory=Surroundings)
    shapes: Shapes = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    learned: dict[tuple[str, frozenset[str]], bool] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.call).parameters

    @property
    def masks(self) -> bool:
        """Does the pipeline itself take a mask?"""
        return "mask_image" in self.parameters

    def follow_settings(self) -> None:
        """Capture a denoiser again whose plain settings changed: adapters, switches."""
        for name, denoiser in self.denoisers.items():
            now = settings_of(denoiser.module)
            if self.settings.setdefault(name, now) != now:
                self.settings[name] = now
                denoiser.forget()

    def around(self, pipe: Any) -> str:
        """All of a pipeline that a recording is a function of: other weights, other latents too."""
        modules = {name: denoiser.module for name, denoiser in self.denoisers.items()}
        weights = {name: denoiser.fingerprint() for name, denoiser in self.denoisers.items()}
        return digest([self.surroundings.digest(pipe.components, modules, self.settings), weights])


@dataclass(frozen=True)
class Options:
    """What maskfx adds to a pipeline's own arguments."""

    quality: Quality | str | None = None
    template: Template | str | None = None
    record: bool = False
    mask_image: Any = None  # where the pipeline has no such argument
    image: Any = None


def serve(pipe: Any, works: Works, args: tuple[Any, ...], options: Options, given: Any) -> Any:
    """One call of a pipeline: record, edit, or as it is."""
    arguments = arguments_of(works.call, (pipe, *args), given)
    arguments.pop("self", None)
    works.follow_settings()
    mask = arguments.get("mask_image") if works.masks else options.mask_image
    check_options(options, mask is not None)
    if mask is None:
        if options.record:
            return record_picture(pipe, works, arguments)[0]
        return run(pipe, works, DenseCourse(), arguments)
    quality = works.quality if options.quality is None else Quality.of(options.quality)
    masks = pixel_masks(mask)
    if all(denoiser.settings.mode == "mask_cache" for denoiser in works.denoisers.values()):
        covered = torch.stack(masks).any(0)
        result, source = edited(pipe, works, arguments, options, quality, covered)
        if source is not None and not isinstance(result, tuple):
            result.template = Template(source.name)
    else:
        works.notes["the mode keeps nothing, so edits run dense"] += 1
        result = run(pipe, works, DenseCourse(), arguments)
    original = original_of(pipe, works, arguments, options)
    if original is None or not gives_pictures(works, arguments):
        return result
    return with_images(result, lambda i: laid_over(i, original, masks, quality.feather))


def edited(
    pipe: Any,
    works: Works,
    arguments: Arguments,
    options: Options,
    quality: Quality,
    covered: Tensor,
) -> tuple[Any, Source | None]:
    """An edit, and the template that served it.

    One whose template has lost something by the time that it is read (a damaged file, a directory
    removed) begins again with the same noise, after the template was recorded again.
    """
    steps = functools.partial(getattr, pipe, "_num_timesteps", None)
    generators = [g for g in listed(arguments.get("generator")) if g is not None]
    states = [generator.get_state() for generator in generators]
    shelf = works.shelf
    for chances in reversed(range(CHANCES)):
        source = chosen_template(pipe, works, arguments, options, quality)
        renewable = source is not None and options.template is None and not shelf.given(source.name)
        course = EditCourse(covered, quality, shelf, source, steps, works.notes)
        course.insists = renewable and chances > 0
        try:
            return run(pipe, works, course, arguments), source
        except Lacking as lacking:
            assert source is not None, "nothing lacks without a template"
            works.notes[f"{lacking}; recorded again"] += 1
            shelf.lose(source.name)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
    raise AssertionError("the last run insists on nothing")


def check_options(options: Options, masked: bool) -> None:
    if not isinstance(options.template, (Template, str, type(None))):
        raise InputError(
            f"template={options.template!r:.60}: give what maskfx.template(...) returned, or a "
            "result's .template, or its name"
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


def run(pipe: Any, works: Works, course: Course, arguments: Mapping[str, Any]) -> Any:
    """The pipeline's own code, once."""
    if "_num_timesteps" in vars(pipe):
        pipe._num_timesteps = None  # of the run before
    own = Run(works.denoisers, course, works.execute, works.shapes, notes=works.notes)
    with watched(pipe, own), running(own):
        return forced_result(works.call(pipe, **arguments))


# What the pipeline does with its arguments.


def tells_mask(pipe: Any, works: Works, arguments: Arguments) -> bool:
    """Does what the denoisers are told depend on the mask?"""

    def ask() -> bool:
        heard = [
            first_inputs(
                pipe,
                works.call,
                works.denoisers,
                works.execute,
                {
                    **quiet(works, arguments, "probe"),
                    "mask_image": like_mask(arguments["mask_image"], value),
                },
            )
            for value in (0, 1)
        ]
        return not same_inputs(*heard)

    return learned(works, "mask", arguments, ask, True)


def takes_picture(pipe: Any, works: Works, arguments: Arguments) -> bool:
    """Is `image` the picture that is edited? Then it is encoded; a control image may be not."""
    if works.masks:
        return True
    if arguments.get("image") is None:
        return False
    given = quiet(works, arguments, "probe")

    def ask() -> bool:
        return encodes(
            pipe,
            lambda: first_inputs(pipe, works.call, works.denoisers, works.execute, given),
        )

    return learned(works, "image", arguments, ask, False)


def learned(
    works: Works, what: str, arguments: Arguments, ask: Callable[[], bool], unknown: bool
) -> bool:
    """The answer for arguments of these names; asked once."""
    names = frozenset(n for n, v in arguments.items() if v is not None and "callback" not in n)
    if (what, names) not in works.learned:
        try:
            works.learned[what, names] = ask()
        except EngineError:  # cancelled, or too late: that says nothing of the pipeline
            raise
        except Exception as error:  # the call itself will say what is wrong, if something is
            works.notes[f"what becomes of {what}= isn't known: {error!s:.100}"] += 1
            return unknown
    return works.learned[what, names]


def quiet(works: Works, arguments: Arguments, noise: str) -> Arguments:
    """The same call, seen by nobody and with noise of its own."""
    kept = {n: v for n, v in arguments.items() if "callback" not in n}
    if "generator" in works.parameters:
        kept["generator"] = noise_of(digest(noise))
    return kept


def original_of(pipe: Any, works: Works, arguments: Arguments, options: Options) -> Any:
    """The picture whose pixels stay outside the mask."""
    found = options.image
    if found is None and takes_picture(pipe, works, arguments):
        found = arguments.get("image")
    if found is None and isinstance(options.template, Template):
        found = options.template.images
    return found if is_picture(found) else None


def gives_pictures(works: Works, arguments: Arguments) -> bool:
    kind = works.parameters.get("output_type")
    usual = kind.default if kind is not None else "pil"
    return bool(arguments.get("output_type", usual) != "latent")


# Templates.


def chosen_template(
    pipe: Any, works: Works, arguments: Arguments, options: Options, quality: Quality
) -> Source | None:
    """The template that serves an edit, recorded if it has to be; None to go without."""
    known = None
    if options.template is not None or not works.masks:  # else nobody asks whose picture it is
        picture = options.image if options.image is not None else arguments.get("image")
        known = works.shelf.pictures.get(digest(picture)) if picture is not None else None
    if options.template is not None:
        given = options.template
        name = given.name if isinstance(given, Template) else given
        if not works.shelf.whole(name):
            raise InputError(
                f"template={name!r} isn't there (any more); record it again with "
                "maskfx.template(...) or record=True"
            )
        return known if known is not None and known.name == name else Source(name)
    if quality.reuse == "steps":
        return None
    if known is not None and works.shelf.whole(known.name):
        return known
    if not takes_picture(pipe, works, arguments):
        return None  # nothing to record it from: the run's own steps serve
    made = recorded_template(pipe, works, arguments, quality)
    return None if made is None else Source(made)


def recorded_template(
    pipe: Any, works: Works, arguments: Arguments, quality: Quality
) -> str | None:
    """The template of this very call; with "auto" it is recorded when it is asked for again."""
    waits = quality.reuse == "auto"
    recorded, name = template_of(pipe, works, arguments, quality)
    asked = works.shelf.ask(name)
    if not works.shelf.whole(name) and name not in works.shelf.refused:
        if waits and asked == 1:
            return None
        try:
            record(pipe, works, recorded, name)
        except (EngineError, BudgetError):  # cancelled or too late: the next request records it
            raise
        except Exception as error:  # the call itself will say what is wrong, if something is
            works.shelf.refused[name] = f"recording fails: {type(error).__name__}: {error!s:.200}"
        else:
            if not works.shelf.kept(name, works.denoisers):
                works.shelf.refused[name] = "a template is larger than the tiers that hold it"
    if name in works.shelf.refused:
        works.notes[f"{works.shelf.refused[name]}; edits go by their own steps"] += 1
        return None
    works.shelf.prefetch(name)
    return name


def template_of(
    pipe: Any, works: Works, arguments: Arguments, quality: Quality
) -> tuple[Arguments, str]:
    """How the template of a call is recorded, and its name."""
    masked = works.masks and (
        arguments.get("padding_mask_crop") is not None
        or (not quality.any_mask and tells_mask(pipe, works, arguments))
    )
    recorded, name = recorded_arguments(works.call, arguments, masked)
    return recorded, digest([name, works.around(pipe)])[:32]


def record(pipe: Any, works: Works, arguments: Arguments, name: str) -> None:
    """Record a template, unless another run did so meanwhile."""
    with works.shelf.recording(name):
        if works.shelf.whole(name):
            return
        course = RecordCourse(works.shelf, name)
        latent = {"output_type": "latent"} if "output_type" in works.parameters else {}
        if arguments.get("padding_mask_crop") is not None:
            latent = {}  # pipelines lay the crop over the picture
        noise = {"generator": noise_of(name)} if "generator" in works.parameters else {}
        run(pipe, works, course, {**arguments, **latent, **noise})
        course.finish()


def record_picture(pipe: Any, works: Works, arguments: Arguments) -> tuple[Any, Template]:
    """A run whose picture is a template from now on, and that template."""
    kept = {n: v for n, v in arguments.items() if "callback" not in n and n != "generator"}
    noise = [g.get_state() for g in listed(arguments.get("generator"))] or [torch.get_rng_state()]
    name = digest([kept, noise, works.around(pipe)])[:32]
    course = RecordCourse(works.shelf, name)
    result = run(pipe, works, course, arguments)
    course.finish()
    images = images_of(result) if gives_pictures(works, arguments) else None
    made = Template(name, images if is_picture(images) else None)
    pictures = single_pictures(made.images)
    for i, one in enumerate(pictures):
        works.shelf.pictures[digest(one)] = Source(name, i, len(pictures))
    if not isinstance(result, tuple):
        result.template = made
    return result, made


def prepare_template(
    pipe: Any, works: Works, args: tuple[Any, ...], given: Mapping[str, Any]
) -> Template:
    """The template of such a call, recorded and pinned in memory.

    Where pictures are made from nothing the run itself is the template, prompt and noise included.
    """
    own = dict(given)
    if "image" in works.parameters and not any("prompt" in n for n in own):
        own["prompt"] = ""
    arguments = arguments_of(works.call, (pipe, *args), own)
    arguments.pop("self", None)
    works.follow_settings()
    if not (works.masks or takes_picture(pipe, works, arguments)):
        made = record_picture(pipe, works, arguments)[1]
    else:
        if works.masks and arguments.get("mask_image") is None:
            arguments["mask_image"] = nothing_masked(arguments.get("image"))
            if not works.quality.any_mask and tells_mask(pipe, works, arguments):
                raise InputError(
                    f"{type(pipe).__name__} tells its denoiser of the mask, so a template is of "
                    "one mask; pass mask_image= too, or compile with a quality of any_mask=True"
                )
        recorded, name = template_of(pipe, works, arguments, works.quality)
        record(pipe, works, recorded, name)
        made = Template(name, arguments.get("image"))
    works.shelf.pin(made.name)
    return made
