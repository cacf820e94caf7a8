"""WeightFiles: a module's weights in safetensors files, mapped and not read.

Owns where the numbers of each weight lie in which file. A module whose parameters are on the meta
device has the mapped ones while it is exported; its memory stays what the system caches of files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors
from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.ir.json_values import Document

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
NUMBER = 8  # bytes before a file's header: its length
SHOWN = 5  # names in one message


@dataclass(frozen=True)
class FilePlace:
    """Where the numbers of a tensor lie: a file, the first byte there, and how many follow."""

    path: Path
    offset: int
    nbytes: int


class WeightFiles:
    """The weights of one module in one safetensors file or in several with an index.

    Args:
        where: the file, the index, or a folder that holds one of them.
    """

    def __init__(self, where: str | Path) -> None:
        self.where = Path(where).expanduser()
        self.tensors: dict[str, Tensor] = {}  # mapped, by path in the module
        self._places: dict[int, FilePlace] = {}
        for path in files_of(self.where):
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            begin, header = header_of(path)
            with safetensors.safe_open(str(path), "pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise InputError(
                f"weights: {path} can't be read as safetensors: {error}; give files that "
                "save_pretrained wrote"
            ) from error
        for name, value in found.items():
            first, last = header[name]["data_offsets"]
            if value.nbytes:
                self._places[value.data_ptr()] = FilePlace(path, begin + first, last - first)
        self.tensors.update(found)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.tensors.values())

    def place_of(self, value: Tensor) -> FilePlace | None:
        """Return where a tensor's numbers lie in a file; None if it isn't one of the files'."""
        found = self._places.get(value.data_ptr())
        whole = found is not None and found.nbytes == value.nbytes and value.is_contiguous()
        return found if whole else None

    @contextmanager
    def in_place_of(self, module: nn.Module) -> Iterator[None]:
        """Let the module have the mapped weights; at the end it has its own again."""
        slots = list(slots_of(module))
        found = self._matched(module, slots)
        before = [(slot.table, slot.name, slot.table[slot.name]) for slot in slots]
        try:
            for slot in slots:
                slot.set(found[slot.identity])
            yield
        finally:
            for table, name, value in before:
                table[name] = value

    def _matched(self, module: nn.Module, slots: Sequence[Slot]) -> dict[int, Tensor]:
        """Return the files' tensors by the identity of those they replace; InputError if none."""
        kind, found = type(module).__name__, {}
        for slot in slots:
            value = self.tensors.get(slot.path)
            if value is None:
                continue
            if value.shape != slot.value.shape:
                raise InputError(
                    f"weights: {slot.path} of {kind} has shape {list(slot.value.shape)}, in "
                    f"{self.where} it has {list(value.shape)}; give the weights of this config"
                )
            found[slot.identity] = value
        missing = [slot.path for slot in slots if slot.identity not in found]
        idle = sorted(self.tensors.keys() - {slot.path for slot in slots})
        for names, what in ((missing, "lacks"), (idle, "has, beside those of the module,")):
            if names:
                rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                raise InputError(
                    f"weights: {self.where} {what} {', '.join(names[:SHOWN])}{rest}; give the "
                    f"weights of this {kind} as its save_pretrained writes them"
                )
        return found


@dataclass(frozen=True)
class Slot:
    """A weight's place in a module: the table that holds it, and its path."""

    table: dict[str, object]
    name: str
    path: str
    value: Tensor

    @property
    def identity(self) -> int:
        """A number that is equal for the places of one shared weight."""
        return id(self.value)

    def set(self, value: Tensor) -> None:
        parameter = isinstance(self.value, nn.Parameter)
        self.table[self.name] = nn.Parameter(value, requires_grad=False) if parameter else value


def slots_of(module: nn.Module) -> Iterator[Slot]:
    """Yield the places of all weights; InputError for a table without data that no file holds."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, value in part._parameters.items():
            if value is not None:
                yield Slot(part._parameters, name, dot + name, value)
        for name, buffer in part._buffers.items():
            if buffer is None:
                continue
            if name not in part._non_persistent_buffers_set:
                yield Slot(part._buffers, name, dot + name, buffer)
            elif buffer.is_meta:
                raise InputError(
                    f"weights: {dot}{name} of {type(module).__name__} is a table that files of "
                    "weights don't hold, and it has no data; build the module with its buffers, "
                    "such as under accelerate.init_empty_weights()"
                )


def files_of(where: Path) -> list[Path]:
    """Return the safetensors files of a file, an index or a folder with one of them."""
    if where.is_dir():
        indices, files = (sorted(where.glob(f"*{end}")) for end in (INDEX, SUFFIX))
        found = indices or files
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise InputError(
                f"weights: {where} should hold one safetensors file or one index of several, it "
                f"holds {names}; name the file or the index"
            )
        where = found[0]
    if not where.is_file():
        raise InputError(f"weights: {where} doesn't exist; name safetensors files or their folder")
    if where.suffix == SUFFIX:
        return [where]
    try:
        shards = set(json.loads(where.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"weights: {where} is neither a safetensors file nor an index of some; name one of them"
        ) from error
    return [where.with_name(str(name)) for name in sorted(shards)]


def header_of(path: Path) -> tuple[int, Document]:
    """Return where a file's data begin, and its header: offsets from there by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(NUMBER), "little")
        header: Document = json.loads(file.read(length))
    return NUMBER + length, header
