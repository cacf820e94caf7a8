"""Finds a model's folder: the one named, a shipped one, or a hub id. Never imports torch.

Models are refused before any large import, and before any weights are read into memory.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from maskfx import shipped
from maskfx.errors import InputError

PICKLED = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SAVED = "give a folder that save_pretrained of a diffusers pipeline wrote"
CONVERT = (
    "load it once where you trust it and save it again: "
    "DiffusionPipeline.from_pretrained(...).save_pretrained(folder, safe_serialization=True)"
)


def found(model: str | None) -> Path | str:
    """Return the model's folder, after checking it, or its hub id."""
    if model is None:
        return shipped_folder()
    path = Path(model).expanduser()
    if path.is_dir():
        check_folder(path)
        return path
    if path.is_file():
        refuse_file(path)
    if model in shipped.names():
        return shipped.FOLDER / model
    if HUB_ID.fullmatch(model):
        return model
    raise InputError(
        f"model {model!r}: neither a folder nor a hub id such as owner/name; give one of them, or "
        f"leave it out for what ships inside ({', '.join(shipped.names()) or 'nothing, so far'})"
    )


def shipped_folder() -> Path:
    """Return the folder of the default model: the first shipped one."""
    names = shipped.names()
    if not names:
        raise InputError(
            "no model was named, and this installation ships none: give a folder or a hub id, or "
            "build them in a checkout with: python -m training.build"
        )
    return shipped.FOLDER / names[0]


def refuse_file(path: Path) -> None:
    kind = "pickled weights can run code" if path.suffix in PICKLED else "a single file"
    raise InputError(
        f"model {path}: {kind}; serve a diffusers folder with safetensors. To make one, {CONVERT}"
    )


def check_folder(folder: Path) -> None:
    """Refuse a folder that isn't a pipeline, contains code or has a part with only pickled weights.

    Nothing but names and the index is read.
    """
    index = index_of(folder)
    code = sorted(path.name for path in folder.rglob("*.py"))
    if code or not isinstance(index.get("_class_name"), str):
        raise InputError(
            f"model {folder}: it brings code of its own ({', '.join(code) or '_class_name'}), "
            "which isn't run; serve a pipeline of diffusers' own classes"
        )
    for part in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        files = [path for path in part.iterdir() if path.is_file()]
        pickled = sorted(path.name for path in files if path.suffix in PICKLED)
        if pickled and not any(path.suffix == ".safetensors" for path in files):
            raise InputError(
                f"model {folder}: {part.name} has its weights as pickles only "
                f"({', '.join(pickled[:3])}), and a pickle can run code; {CONVERT}"
            )


def index_of(folder: Path) -> dict[str, object]:
    path = folder / "model_index.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"model {folder}: there is no model_index.json; {SAVED}") from None
    except ValueError as error:
        raise InputError(
            f"model {folder}: model_index.json isn't valid JSON: {error}; {SAVED}"
        ) from error
    if not isinstance(index, dict):
        raise InputError(f"model {folder}: model_index.json is no JSON object; {SAVED}")
    return index
