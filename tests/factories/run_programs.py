"""RunPrograms: the processes of one test run share what each compiled, through files."""

import os
import pickle
import tempfile
from pathlib import Path

import xxhash
from torch.utils import _pytree as pytree

from maskfx.compiler.artifact.artifact import PackedCompilation
from maskfx.runtime.programs.shared_programs import SharedProgram, SharedPrograms

# names the folder of what processes of this run compiled; no setting of the server begins like this
PROGRAMS = "TESTS_OF_MASKFX_PROGRAMS"


def programs() -> str:
    """Return a directory of programs that all tests of the run may read and write."""
    return os.path.join(os.environ[PROGRAMS], "saved")


class RunPrograms(SharedPrograms):
    """SharedPrograms that writes to a folder, and reads what other processes wrote there.

    Args:
        folder: the folder; it may be absent.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.is_open = False  # to other processes: a test changes what it clears
        self._seen: set[str] = set()

    def put(self, key: str, spec: pytree.TreeSpec, packed: PackedCompilation) -> SharedProgram:
        if self.is_open:
            self._write(key, (spec, packed))
        return super().put(key, spec, packed)

    def of(self, key: str, spec: pytree.TreeSpec) -> list[SharedProgram]:
        if self.is_open:
            for path in sorted(self.folder.glob(f"{named(key)}.*.programs")):
                if path.name not in self._seen:
                    self._seen.add(path.name)
                    super().put(key, *pickle.loads(path.read_bytes()))
        return super().of(key, spec)

    def clear(self) -> None:
        self.is_open = False
        self._seen.clear()
        super().clear()

    def _write(self, key: str, kept: tuple[pytree.TreeSpec, PackedCompilation]) -> None:
        """Write the file under another name first, so that no process reads a part of it."""
        try:
            data = pickle.dumps(kept)
        except (pickle.PicklingError, AttributeError, TypeError):
            return  # a class within a test
        self.folder.mkdir(parents=True, exist_ok=True)
        number, written = tempfile.mkstemp(dir=self.folder)
        with os.fdopen(number, "wb") as file:
            file.write(data)
        path = Path(f"{self.folder / named(key)}.{Path(written).name}.programs")
        os.replace(written, path)
        self._seen.add(path.name)


def named(key: str) -> str:
    return xxhash.xxh3_128_hexdigest(key.encode())
