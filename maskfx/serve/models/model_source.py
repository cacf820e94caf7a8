"""Loads models that `serve/model_folder.py` finds, never from a pickle.

Knows nothing of requests.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maskfx import shipped
from maskfx.errors import InputError
from maskfx.ir import progress
from maskfx.pipelines.call_defaults import call_of
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.serve.model_folder import CONVERT, HUB_ID, found, index_of

LIBRARIES = ("diffusers", "transformers")

log = logging.getLogger(__name__)


def load_pipeline(
    model: str | None, dtype: str, device: str, controlnets: Sequence[str] = ()
) -> Any:
    """Load a pipeline onto its device; InputError if the model is refused or can't be loaded.

    Args:
        model: A folder, a hub id or the name of a shipped model; None: the first of these.
        dtype: Of the weights; that of exported graphs takes precedence, because it is fixed.
        device: Where the pipeline computes.
        controlnets: ControlNets that it gets, named likewise.
    """
    where = found(model)
    check_device(device)
    with import_notices_hidden():
        import diffusers

        load: Callable[..., Any] = diffusers.DiffusionPipeline.from_pretrained
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "use_safetensors": True}
    if isinstance(where, Path):
        options.update(dict.fromkeys(absent_parts(where)), local_files_only=True)
        exported = exported_denoisers(where)
        options.update(exported, dtype=dtype_of(exported, options["dtype"], where))
    try:
        with library_bars(progress.shows()), import_notices_hidden():
            pipe = load(where, **options)
    except (OSError, ValueError) as error:
        if isinstance(where, str) and (why := unreachable(error)) is not None:
            raise InputError(
                f"model {model!r} can't be loaded: it isn't in the local cache, and the hub can't "
                f"be reached ({why}); give a folder, or download it first (hf download {model})"
            ) from error
        raise InputError(
            f"model {model!r} can't be loaded: {error}; expected a diffusers pipeline whose "
            f"weights are safetensors. If only pickled weights exist, {CONVERT}"
        ) from error
    if controlnets:
        nets = [load_controlnet(name, where, options["dtype"]) for name in controlnets]
        pipe = with_controlnets(pipe, nets)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def unreachable(error: BaseException | None) -> BaseException | None:
    """Return the failure of a connection that an error comes from, if there is one."""
    while error is not None and not isinstance(
        error, socket.gaierror | ConnectionError | TimeoutError
    ):
        error = error.__cause__ or error.__context__
    return error


def check_device(device: str) -> None:
    """Raise InputError unless this PyTorch computes on a device."""
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"device {device!r}: PyTorch can't compute on it: {str(error).splitlines()[0]}; give "
            "cpu, or a GPU that it finds, such as cuda:0"
        ) from error


def load_controlnet(name: str, model: Path | str, dtype: torch.dtype) -> nn.Module:
    """Load a ControlNet of whatever class its config names.

    Args:
        name: A folder, a hub id, or the name of one that ships with the model.
        model: The model's folder or hub id.
        dtype: Of the weights.
    """
    import diffusers

    folder = Path(name).expanduser()
    where: Path | str = folder if folder.is_dir() else name
    if where is name:
        if isinstance(model, Path) and model.parent == shipped.FOLDER and "/" not in name:
            where = shipped.trained_for(model.name, shipped.CONTROLNETS, name)
        elif not HUB_ID.fullmatch(name):
            raise InputError(
                f"controlnets: {name!r} is neither a folder nor a hub id such as owner/name"
            )
    load: Callable[..., nn.Module] = diffusers.AutoModel.from_pretrained
    try:
        with library_bars(progress.shows()):
            return load(
                str(where),
                torch_dtype=dtype,
                use_safetensors=True,
                local_files_only=isinstance(where, Path),
            )
    except (OSError, ValueError) as error:
        raise InputError(
            f"controlnets: {name!r} can't be loaded: {error}; expected the folder of a ControlNet "
            "that diffusers saved, with safetensors"
        ) from error


def with_controlnets(pipe: Pipeline, nets: Sequence[nn.Module]) -> object:
    """Return the pipeline of diffusers' class for its task with ControlNets, over its parts."""
    import diffusers

    tasks: tuple[Any, ...] = (
        diffusers.AutoPipelineForInpainting,
        diffusers.AutoPipelineForImage2Image,
        diffusers.AutoPipelineForText2Image,
    )
    net = nets[0] if len(nets) == 1 else list(nets)
    for task in tasks:
        try:
            same = type(task.from_pipe(pipe)) is type(pipe)
        except ValueError:  # diffusers knows no class of this task for the model
            continue
        if same:
            try:
                return of_family(task.from_pipe(pipe, controlnet=net), nets[0])
            except (ValueError, TypeError) as error:
                raise InputError(
                    f"controlnets: diffusers has no {type(pipe).__name__} with "
                    f"{type(nets[0]).__name__}: {error}"
                ) from error
    raise InputError(
        f"controlnets: diffusers has no class for {type(pipe).__name__} with ControlNets; serve "
        "the folder of a pipeline that has them"
    )


def of_family(pipe: Any, net: nn.Module) -> object:
    """Return a pipeline as diffusers' class for this kind of ControlNet, if it has another one.

    `ControlNetUnionModel` has pipelines of its own, named after it.
    """
    import diffusers

    family = type(net).__name__.removesuffix("Model")
    name = type(pipe).__name__.replace("ControlNet", family)
    own: Any = getattr(diffusers, name, type(pipe))
    return pipe if own is type(pipe) else own.from_pipe(pipe)


@contextmanager
def library_bars(shown: bool) -> Iterator[None]:
    """Hide the bars by which diffusers and transformers report loading, unless `shown`."""
    with ExitStack() as stack:
        for library in () if shown else LIBRARIES:
            bars = import_module(f"{library}.utils.logging")
            if bars.is_progress_bar_enabled():
                bars.disable_progress_bar()
                stack.callback(bars.enable_progress_bar)
        yield


@contextmanager
def import_notices_hidden() -> Iterator[None]:
    """Hide what transformers reports about absent optional packages, such as torchvision."""
    log = logging.getLogger("transformers.utils.import_utils")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def dtype_of(exported: Mapping[str, Any], dtype: torch.dtype, folder: Path) -> torch.dtype:
    """Return the dtype in which exported graphs compute, with a warning if it isn't `dtype`."""
    found: set[torch.dtype] = {part.dtype for part in exported.values()}
    if len(found) != 1 or found == {dtype}:
        return dtype
    [own] = found
    log.warning(
        "%s: the exported graphs compute in %s, and so does the rest of the pipeline, instead of "
        "in %s; export the model anew with dtype=%s to change that",
        folder,
        *(str(each).removeprefix("torch.") for each in (own, dtype, dtype)),
    )
    return own


def exported_denoisers(folder: Path) -> dict[str, nn.Module]:
    """Return the denoisers that are exported graphs, by component name."""
    from maskfx.export.shell import exported_parts, load_shell

    return {name: load_shell(part) for name, part in exported_parts(folder).items()}


def told_by(model: str | None) -> dict[str, object]:
    """Return the call arguments in the model's folder (`call.json`); empty for a hub id."""
    where = found(model)
    return call_of(where) if isinstance(where, Path) else {}


def absent_parts(folder: Path) -> list[str]:
    """Return the names of parts saved as absent (e.g. a T5); diffusers requires them."""
    return [part for part, kind in index_of(folder).items() if kind == [None, None]]
