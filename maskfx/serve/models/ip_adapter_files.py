"""Loads IP-Adapters and their image encoder into a pipeline, from local safetensors only."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.pipelines.adapters.ip_adapters import takes_several
from maskfx.pipelines.parts.stand_in import find_denoisers
from maskfx.serve.ip_adapters import PICTURES
from maskfx.serve.model_folder import PICKLED

SUFFIX = ".safetensors"
ENCODER = "image_encoder"  # component of pipelines, and the folder beside an IP-Adapter's file
PARTS = ("image_proj", "ip_adapter")  # prefixes of the names of tensors
PREPROCESSOR = "preprocessor_config.json"
LONGEST = 100  # letters of a name
Content = dict[str, dict[str, Tensor]]


def load_ip_adapters(pipe: Any, places: Sequence[str], encoder: Path | None) -> None:
    """Load IP-Adapters into a pipeline, all at once, as diffusers does.

    Args:
        pipe: The pipeline.
        places: Files, or folders with one file each.
        encoder: Folder of the image encoder, if the pipeline has none; by default the folder
            image_encoder beside the first file.
    """
    kind = type(pipe)
    if not hasattr(pipe, "load_ip_adapter") or PICTURES not in arguments_of(kind.__call__):
        raise InputError(
            f"ip_adapters: diffusers' {kind.__name__} takes no IP-Adapter; leave them out, or "
            "serve a model of Stable Diffusion, SDXL, SD3 or Flux"
        )
    files = [file_of(place) for place in places]
    contents = [content_of(file) for file in files]
    if getattr(pipe, ENCODER, None) is None:
        load_encoder(pipe, encoder or files[0].parent / ENCODER)
    given: dict[str, Any] = {"weight_name": [file.name for file in files]}
    if "subfolder" in arguments_of(pipe.load_ip_adapter):
        given["subfolder"] = [""] * len(files)
    several = len(contents) > 1
    try:
        pipe.load_ip_adapter(contents if several else contents[0], **given)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        one = several and "; if it takes one only, leave the others out"
        raise InputError(
            f"ip_adapters: {', '.join(map(str, files))} can't be loaded into {kind.__name__}: "
            f"{type(error).__name__}: {error}; expected IP-Adapters of this model{one or ''}"
        ) from error
    if needs_faces(pipe):
        raise InputError(
            "ip_adapters: an IP-Adapter FaceID reads what a face recogniser finds, which the "
            "server doesn't have; give one that reads pictures"
        )
    for denoiser in find_denoisers(pipe.components).values():
        denoiser.eval()
    if several and not takes_several(pipe):
        raise InputError(f"ip_adapters: {kind.__name__} takes one; leave the others out")


def file_of(place: str) -> Path:
    """Return the safetensors file of a setting, which names it or a folder with this file only."""
    path = Path(place).expanduser()
    if path.is_dir():
        inside = sorted(one for one in path.iterdir() if one.suffix == SUFFIX)
        if len(inside) != 1:
            seen = ", ".join(one.name for one in inside) or "none"
            raise InputError(
                f"ip_adapters: the folder {path} must have one {SUFFIX} file, and has {seen}; name "
                "the file"
            )
        return inside[0]
    if path.suffix in PICKLED:
        raise InputError(f"ip_adapters: {path}: pickled weights can run code; give a {SUFFIX} file")
    if not path.is_file():
        raise InputError(
            f"ip_adapters: {place!r} is neither a {SUFFIX} file nor a folder with one; download "
            "it and name the file"
        )
    return path


def content_of(file: Path) -> Content:
    """Read a file's tensors as diffusers takes them: by part, then by name."""
    from safetensors import SafetensorError, safe_open

    found: Content = {part: {} for part in PARTS}
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for key in opened.keys():  # noqa: SIM118 - it isn't a mapping
                part, _, name = key.partition(".")
                if part in found:
                    found[part][name] = opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"ip_adapters: {file} can't be read: {error}; give a {SUFFIX} file"
        ) from error
    absent = [part for part in PARTS if not found[part]]
    if absent:
        raise InputError(
            f"ip_adapters: {file} has no tensors {' and none '.join(f'{p}.*' for p in absent)}; "
            "expected an IP-Adapter as it is published, not a LoRA or a model"
        )
    return found


def load_encoder(pipe: Any, folder: Path) -> None:
    """Load an image encoder, and what prepares its pictures, into a pipeline without one."""
    import transformers

    library: Any = transformers
    wanted = (
        "the image encoder of the IP-Adapter, as transformers saves it; name its folder by "
        "image_encoder"
    )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        [name] = config["architectures"]
        kind: Any = getattr(library, name)
        if not (isinstance(kind, type) and issubclass(kind, library.PreTrainedModel)):
            raise TypeError(f"{name} is no model")
        options = {"local_files_only": True, "use_safetensors": True, "dtype": pipe.dtype}
        read: Callable[..., Any] = kind.from_pretrained  # type: ignore[attr-defined]
        encoder = read(folder, **options).eval()
        prepared = preparation_of(folder, encoder, library)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"image_encoder: {folder} can't be loaded: {error}; expected {wanted}"
        ) from error
    found: dict[str, object] = {ENCODER: encoder.to(pipe.device)}
    if getattr(pipe, "feature_extractor", None) is None:
        found["feature_extractor"] = prepared
    pipe.register_modules(**found)


def preparation_of(folder: Path, encoder: nn.Module, library: Any) -> object:
    """Return what prepares pictures for an encoder: from its folder, else CLIP's at its size."""
    if (folder / PREPROCESSOR).is_file():
        return library.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    config: Any = encoder.config
    size = getattr(config, "vision_config", config).image_size
    return library.CLIPImageProcessor(size=size, crop_size=size)


def needs_faces(pipe: Any) -> bool:
    """Return True if an IP-Adapter reads a face recogniser's results instead of a picture."""
    parts = (getattr(d, "encoder_hid_proj", None) for d in find_denoisers(pipe.components).values())
    modules = (one for part in parts if isinstance(part, nn.Module) for one in part.modules())
    return any(type(one).__name__.startswith("IPAdapterFaceID") for one in modules)


def names_of(places: Sequence[str]) -> list[str]:
    """Return the names by which requests choose IP-Adapters: those of their files."""
    found: list[str] = []
    for place in places:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", file_of(place).stem).lstrip("._-")[:LONGEST]
        name = name or "ip-adapter"
        again = sum(one == name or one.startswith(f"{name}-") for one in found)
        found.append(f"{name}-{again + 1}" if name in found else name)
    return found


def arguments_of(call: Callable[..., object]) -> set[str]:
    return set(inspect.signature(call).parameters)
