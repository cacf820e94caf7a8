"""The structure of arguments or results as JSON and back."""

from __future__ import annotations

import importlib

from torch.utils import _pytree as pytree

from maskfx.compiler.artifact.documents import SpecDocument
from maskfx.compiler.artifact.plain import Unsavable
from maskfx.ir.objects import kinds_in, name_kind, open_kind


def spec_document(spec: pytree.TreeSpec) -> SpecDocument:
    """Return an argument structure as JSON, and the modules that know its classes."""
    for kind in kinds_in(spec):
        name_kind(kind)
    try:
        text = pytree.treespec_dumps(spec)
    except Exception as error:
        raise Unsavable(f"the structure of arguments or results can't be saved: {error}") from error
    return {"spec": text, "modules": sorted({m for m in class_modules(spec) if m != "builtins"})}


def class_modules(spec: pytree.TreeSpec) -> set[str]:
    own = {getattr(spec.type, "__module__", "builtins")}
    return own.union(*map(class_modules, spec.children()), set())


def read_spec(document: SpecDocument) -> pytree.TreeSpec:
    for name in document["modules"]:
        module = importlib.import_module(name)  # registers its classes
        for kind in vars(module).values():
            if isinstance(kind, type) and f'"{name}.{kind.__qualname__}"' in document["spec"]:
                open_kind(kind)
    return pytree.treespec_loads(document["spec"])
