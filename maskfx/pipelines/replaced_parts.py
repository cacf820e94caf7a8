"""Parts of a compiled pipeline that are replaced, such as `pipe.unet = other`, are compiled too."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from maskfx.pipelines.handlers.autoencoder import find_methods, method_of
from maskfx.pipelines.parts.stand_in import find_denoisers, install
from maskfx.pipelines.state import PipelineState
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.make_denoiser import compiled
from maskfx.runtime.planner.step_planner import StepPlanner


def with_part(state: PipelineState, name: str, part: object) -> PipelineState:
    """Return the state of a pipeline whose component `name` is now `part`.

    It is the same state if no denoiser or autoencoder is replaced. New ones are compiled with the
    settings of those that were there; templates of other parts keep their captures.
    """
    if state.encoders is not None:
        state.encoders.adopt({name: part}, list(find_denoisers({name: part}).values()))
    denoisers, autoencoders = dict(state.denoisers), dict(state.autoencoders)
    nets = {key: denoisers.pop(key) for key in state.denoisers if is_of(key, name)}
    coders = {key: autoencoders.pop(key) for key in state.autoencoders if is_of(key, name)}
    if not nets and not coders:
        return state
    found = find_denoisers({name: part})
    if not nets or {key: own.module for key, own in nets.items()} == found:
        denoisers = dict(state.denoisers)
    else:
        like = next(iter(nets.values()))
        denoisers |= {key: compiled_like(like, module) for key, module in found.items()}
    if any(method_of(own).autoencoder is not part for own in coders.values()):
        settings = next(iter(coders.values())).settings
        for key, method in find_methods({name: part}).items():
            autoencoders[key] = CompiledDenoiser(method, settings)
            install(method.autoencoder, method.method)
    else:
        autoencoders = dict(state.autoencoders)
    if denoisers == state.denoisers and autoencoders == state.autoencoders:
        return state
    return replace(
        state,
        denoisers=denoisers,
        autoencoders=autoencoders,
        library=state.library.without(name),
        shapes={},
        probed={},
        settings={},
        known={},
        acting={},
        lora_target=None,
    )


def let_go(state: PipelineState, name: str, part: nn.Module) -> None:
    """Hold a part no longer that isn't the component `name` any more, such as an encoder of texts.

    Pipelines are given None in place of it to free its memory.
    """
    state.fingerprint.let_go(part)
    if state.encoders is not None:
        state.encoders.drop(name)


def is_of(key: str, component: str) -> bool:
    """Return True for a component's own key, and for those of its nets or methods."""
    return key == component or key.startswith(f"{component}.")


def compiled_like(like: CompiledDenoiser, module: nn.Module) -> CompiledDenoiser:
    """Compile a module with the settings, the loader and the kind of planner of another."""
    settings, loader, link = like.compiled_with
    made = compiled(module, settings, loader=loader, link=link)
    if like.planner is not None:
        made.planner = StepPlanner(made)
    install(module)
    return made
