"""Compile a diffusers pipeline in place, so that its denoisers compute only masked sites.

`compile_pipeline` installs a stand-in on each denoiser and changes the object's class to a subclass
of the same name, whose `__call__` accepts masks; `decompile` reverts both.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from maskfx.config import Settings
from maskfx.errors import EngineError, InputError
from maskfx.ir import progress
from maskfx.pipelines.adapters.late_lora import Loras
from maskfx.pipelines.call import PipelineCall
from maskfx.pipelines.call_checks import template_name
from maskfx.pipelines.call_signatures import call_of_class, with_options
from maskfx.pipelines.check_settings import check_budget, check_plans
from maskfx.pipelines.encoder_cache import REMEMBER, EncoderCache, Encoders
from maskfx.pipelines.handlers.autoencoder import find_methods, method_of, same_method
from maskfx.pipelines.parts.modular import blocks_of, call_of_blocks, hide_errors
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.parts.stand_in import absent_denoisers, find_denoisers, install, remove
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.recording import prefetch_template, prepare_template, with_prompt
from maskfx.pipelines.replaced_parts import let_go, with_part
from maskfx.pipelines.runs.execute import execute
from maskfx.pipelines.runs.interception import bars_disabled, is_within_run
from maskfx.pipelines.serve_call import serve_call
from maskfx.pipelines.state import (
    PATCH_BYTES,
    PATCH_REQUESTS,
    CallOptions,
    PipelineState,
    Template,
)
from maskfx.pipelines.templates.template_library import (
    ScheduleMismatch,
    StoredTemplate,
    TemplateIncomplete,
    TemplateLibrary,
)
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.devices import CPU, free_memory
from maskfx.runtime.lora.registry import Adapters, default_adapters
from maskfx.runtime.make_denoiser import compiled
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.planner.step_planner import StepPlanner
from maskfx.runtime.templates.budget import Budget

log = logging.getLogger(__name__)

HOST_BYTES = 8 << 30  # at most half of the free memory
KEPT = "_maskfx"


class CompiledPipeline:
    """Mixin for the class of a compiled pipeline."""

    components: Mapping[str, object]

    def __call__(
        self,
        *args: object,
        quality: Quality | str | None = None,
        template: Template | str | None = None,
        record: bool = False,
        lora: Loras = None,
        **given: object,
    ) -> Any:
        state: PipelineState | None = self.__dict__.get(KEPT)
        # an object made by the class (from_pretrained) isn't compiled; or there is no denoiser; or
        # it is a part of a pipeline whose run handles the calls of its denoisers
        if state is None or not state.denoisers or is_within_run(self):
            if lora:
                raise InputError(
                    f"{type(self).__name__}: lora= needs a compiled pipeline with a denoiser; call "
                    "pipe = maskfx.compile(pipe) first"
                )
            return super().__call__(*args, **given)  # type: ignore[misc]
        with state.turn, progress.hidden(bars_disabled(self)):
            return serve_call(call_of(self, args, given, quality, template, record, lora))

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; a component that is replaced is compiled in place of the old one."""
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        state: PipelineState | None = self.__dict__.get(KEPT)
        if state is not None and isinstance(before, nn.Module):
            let_go(state, name, before)
        if state is not None and isinstance(value, nn.Module):
            self.__dict__[KEPT] = with_part(state, name, value)

    def __copy__(self) -> object:
        """Return a shallow copy, which shares what the calls of this pipeline share."""
        own = object.__new__(type(self))
        own.__dict__.update(vars(self))
        return own

    def __reduce_ex__(self, protocol: object) -> Any:
        """Return what deep copies and pickles are made from: the pipeline as it was before."""
        original = getattr(type(self), "maskfx_original", type(self))
        own = object.__new__(original)
        own.__dict__.update({name: part for name, part in vars(self).items() if name != KEPT})
        return as_it_is, (own,)

    def templates(self) -> list[StoredTemplate]:
        """Return the templates recorded here, or found on disk by a call, that still exist.

        Each has a name and bytes by tier, and is pinned if `maskfx.template` made it.
        """
        return pipeline_state_of(self).prepared_library().stored_templates()

    def forget(self, template: Template | str) -> None:
        """Remove a template from memory and disk, pinned or not."""
        name = template_name(template, "forget: ")
        library = pipeline_state_of(self).prepared_library()
        if not library.has(name):
            raise InputError(
                f"forget({name!r}): no template has this name; pipe.templates() lists them"
            )
        library.forget(name)


def as_it_is(pipe: object) -> object:
    """Return a pipeline that was read from a pickle, or deeply copied."""
    return pipe


def call_like(original: Callable[..., object], added: Sequence[str]) -> Callable[..., object]:
    """Return a `__call__` with the pipeline's signature and documentation.

    Callers that inspect the signature find the pipeline's arguments, and those that maskfx adds:
    its options and `added`.
    """

    @functools.wraps(original)
    def __call__(self: CompiledPipeline, *args: object, **given: Any) -> Any:
        return CompiledPipeline.__call__(self, *args, **given)

    del __call__.__wrapped__
    options = inspect.signature(CompiledPipeline.__call__)
    signature = with_options(inspect.signature(original), options, added)
    __call__.__dict__["__signature__"] = signature
    return __call__


def call_of(
    pipe: Pipeline,
    args: Sequence[object],
    given: Mapping[str, object],
    quality: Quality | str | None = None,
    template: Template | str | None = None,
    record: bool = False,
    lora: Loras = None,
) -> PipelineCall:
    """Bind the arguments of a call, those that maskfx adds included."""
    state, own = pipeline_state_of(pipe), dict(given)
    added: dict[str, object] = {n: own.pop(n) for n in missing_arguments(state) if n in own}
    options = CallOptions(quality, template, record, lora=lora, **added)
    return PipelineCall.bind(pipe, state, args, own, options)


def read_ahead(pipe: Pipeline, args: Sequence[object], given: Mapping[str, object]) -> bool:
    """Begin to read the template of a call that waits from disk; return False if there is none.

    LoRA files that the call names are loaded too. Nothing is recorded, and arguments that are wrong
    are left to the call itself.
    """
    own = dict(given)
    options = {name: own.pop(name, None) for name in ("quality", "template", "lora")}
    try:
        call = call_of(pipe, args, own, **options)  # type: ignore[arg-type]
        call.prefetch_files()
        return prefetch_template(call)
    except Exception as error:
        log.debug("the template of a waiting call isn't known: %s", error)
        return False


def missing_arguments(state: PipelineState) -> list[str]:
    """Return the names of arguments that maskfx adds because the pipeline lacks them."""
    return [name for name in ("mask_image", "image") if name not in state.parameters]


def is_compiled(pipe: object) -> bool:
    return isinstance(pipe, CompiledPipeline) and KEPT in vars(pipe)


def compile_pipeline(
    pipe: Any,
    settings: Settings,
    *,
    quality: Quality | str | None = None,
    tiers: Tiers | None = None,
    share: int = 1,
    keep: str = "both",
    budget: Budget | None = None,
    loader: Loader | None = None,
    costs: Mapping[str, Costs] | None = None,
    adapters: Adapters | None = None,
    patch_bytes: int = PATCH_BYTES,
    remember: int = REMEMBER,
) -> Any:
    """Compile a pipeline and return the same object; if its denoiser is None, it runs unchanged.

    Args:
        quality: Default quality, `"balanced"` unless given; `"all-steps"` extrapolates no
            step. A call may override it.
        tiers: Storage of templates. Defaults to 8 GiB of host memory, or half of what is free.
        share: Store every `share`-th step whole, and only the outputs of the steps in between.
        keep: What templates store per attention with a plan ("both", "keys" or "inputs").
        budget: Bytes for one template, recorded steps and latents. The budget (`maskfx.Budget`)
            decides what is stored so that it fits, and which changes of the image are allowed for
            that. It applies to one image size, the first that is recorded.
        loader: Prefetches recorded rows while the graph computes. By default rows are prefetched
            where they cross a link to the denoiser's device, or are read from a store.
        costs: Costs of blocks and loads by denoiser name (`unet`, `transformer`), on which plans
            are based; no other denoiser is planned then. By default each denoiser's costs are
            measured at its first edit, and kept in the directory of programs, if there is one.
        adapters: The LoRA files that calls may name (`lora=`). By default calls name files by path.
        patch_bytes: Bytes of rows kept between steps (`Quality.patches`); those beyond run in full.
        remember: Bytes of the outputs of encoders (of texts and pictures) to keep, so that calls
            with the same text or picture encode it once; 0 keeps none.

    Where loads are planned (`Settings.plans`), each step follows the plan with the shortest
    predicted time. A plan never changes an image.
    """
    if is_compiled(pipe):
        raise InputError(
            f"compile({type(pipe).__name__}): it is compiled already; use it as it is, or call "
            "maskfx.decompile(pipe) first"
        )
    modules = find_denoisers(pipe.components)
    absent = [] if modules else absent_denoisers(pipe)
    if absent and blocks_of(pipe) is not None:
        raise InputError(
            f"compile({type(pipe).__name__}): {' and '.join(absent)} isn't loaded; call "
            "pipe.load_components() or pipe.update_components(...) first"
        )
    if absent:
        log.info("%s: %s; it runs as it is", type(pipe).__name__, nothing_without(absent))
    elif not modules:
        raise InputError(
            f"compile({type(pipe).__name__}): no denoiser found: none of its components "
            f"{sorted(pipe.components)} has a forward with a timestep argument; pass the denoiser "
            "module itself to maskfx.compile()"
        )
    check_plans(costs or {}, keep if budget is None else "both", modules, settings)
    usual, kept = Quality.of(quality), EncoderCache(remember)
    if usual.patches is not None and settings.mode != "dense":
        settings = replace(settings, stretches=True)
    tiers = tiers or Tiers(host_bytes=int(min(HOST_BYTES, free_memory(CPU) / 2)))
    if budget is not None:
        check_budget(modules, settings, tiers, share, keep)
    denoisers = {}
    link = None if settings.plans is False else default_loader(tiers.store is not None)
    for name, module in modules.items():
        denoisers[name] = compiled(module, settings, loader=loader, link=link)
        if settings.plans is not False and (costs is None or name in costs):
            denoisers[name].planner = StepPlanner(denoisers[name], (costs or {}).get(name))
        install(module)
    coders = {}
    narrows = usual.codes and settings.mode == "mask_cache" and budget is None
    for name, method in find_methods(pipe.components).items() if narrows else ():
        coders[name] = CompiledDenoiser(method, replace(settings, plans=False, stretches=False))
        install(method.autoencoder, method.method)
    if adapters is not None:
        adapters.start()
    library = TemplateLibrary(tiers, share, keep, budget, usual.selection)
    original = getattr(type(pipe), "maskfx_original", type(pipe))
    call = call_of_class(original)
    if blocks_of(pipe) is not None:
        call = call_of_blocks(pipe, call)
        hide_errors((TemplateIncomplete, ScheduleMismatch, EngineError))
    encoders = Encoders(kept) if settings.mode != "dense" and kept.most else None
    if encoders is not None:
        encoders.adopt(pipe.components, list(modules.values()))
    state = PipelineState(
        call,
        denoisers,
        library,
        usual,
        execute,
        coders,
        encoders,
        alone=True,
        adapters=default_adapters if adapters is None else lambda: adapters,
        pool=RollingPool(patch_bytes, PATCH_REQUESTS),
    )
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__call__": call_like(call, missing_arguments(state)),
        "maskfx_original": original,
    }
    pipe.__class__ = type(original.__name__, (CompiledPipeline, original), namespace)
    pipe.__dict__[KEPT] = state
    return pipe


@cache
def default_loader(stored: bool) -> Loader:
    """Return the loader of pipelines that are given none: they share one link to the devices.

    Those whose templates are kept in a store share another one.
    """
    return Loader(copies=False, stored=stored)


def nothing_without(absent: Sequence[str]) -> str:
    return f"without {' and '.join(absent)} there is nothing to compile"


def share_denoisers(one: object, other: object) -> None:
    """Let another compiled pipeline over the same modules use this one's captures and templates.

    A module of both pipelines is captured once, and requests of both are batched in its steps.
    """
    mine, theirs = pipeline_state_of(one), pipeline_state_of(other)
    for name, denoiser in theirs.denoisers.items():
        known = mine.denoisers.get(name)
        if known is not None and known.module is denoiser.module:
            theirs.denoisers[name] = known
    theirs.autoencoders = {
        name: mine.autoencoders[name]
        if name in mine.autoencoders and same_method(mine.autoencoders[name], coder)
        else coder
        for name, coder in theirs.autoencoders.items()
    }
    theirs.library, theirs.pool = mine.library, mine.pool


def decompile(pipe: Any) -> Any:
    """Restore a pipeline to its state before compilation and return the same object."""
    if not is_compiled(pipe):
        raise InputError(
            f"decompile({type(pipe).__name__}): it isn't compiled; pass what maskfx.compile() "
            "returned"
        )
    state: PipelineState = pipe.__dict__.pop(KEPT)
    for denoiser in state.denoisers.values():
        remove(denoiser.module)
    for method in map(method_of, state.autoencoders.values()):
        remove(method.autoencoder, method.method)
    if state.encoders is not None:
        state.encoders.remove()
    pipe.__class__ = type(pipe).maskfx_original
    return pipe


def pipeline_state_of(pipe: object) -> PipelineState:
    if not is_compiled(pipe):
        raise InputError(
            f"{type(pipe).__name__} isn't compiled; call pipe = maskfx.compile(pipe) first"
        )
    state: PipelineState = pipe.__dict__[KEPT]
    return state


def template(pipe: Pipeline, *args: object, lora: Loras = None, **given: object) -> Template:
    """Record the template of a call and pin it in memory, before the first edit needs it."""
    state = pipeline_state_of(pipe)
    given = with_prompt(state, given)
    with state.turn, progress.hidden(bars_disabled(pipe)):
        options = CallOptions(lora=lora)
        with PipelineCall.bind(pipe, state, args, given, options).with_files() as call:
            return prepare_template(call)


def explain_pipeline(pipe: Pipeline, mask_ratio: float) -> str:
    """Return each denoiser's table, what edits compute, and which calls ran in full so far."""
    state = pipeline_state_of(pipe)
    if not state.denoisers:
        return f"{type(pipe).__name__}: {nothing_without(absent_denoisers(pipe))}; it runs as it is"
    lines = [
        f"{type(pipe).__name__}: {', '.join(state.denoisers)}",
        f"  edits, unless a call sets quality=: {state.quality.description()}"
        + ('; quality="all-steps" computes every step' if state.quality.selection.skips else ""),
    ]
    if state.patches.total:
        lines.append(f"  patches computed so far: {state.patches.share:.0%}")
    for text, count in sorted(state.notes.items()):
        lines.append(f"  {count} calls of {text}")
    for name, denoiser in {**state.denoisers, **state.autoencoders}.items():
        lines += ["", f"{name}:", denoiser.explain(mask_ratio)]
    return "\n".join(lines)
