"""Compiles the C sources, keeps the result in `kept_folder()`, and loads it."""

from __future__ import annotations

import atexit
import ctypes
import getpass
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from maskfx.ops.cache_folder import kept_folder
from maskfx.ops.kernels.serves import switched_on

log = logging.getLogger(__name__)

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("rows.c", "rings.c", "attention.c", "linear.c")
)
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared")
# threads are those of the OpenMP library that PyTorch has loaded, so no library is linked
THREADS = ("-fopenmp", "-nodefaultlibs", "-lc")
SECONDS = 60.0  # that a compiler may take
P, N, D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
ARGUMENTS = {
    "group_scale": (P, N, N, P, P, N, N, N, P, P, D, P),
    "scale_shift": (P, N, N, P, N, P, P),
    "put_all": (P, N),
    "replace_all": (P, N),
    "copy_chosen": (P, N, P, N, ctypes.c_int),
    "ring_run": (P, N, N, N, P, N, D, P),
    "ring_leave": (P, N),
    "attend": (P, D),
    "few_rows_linear": (P,),
    "wide": (),
}
BEYOND = -2  # the result of a function that was given rows that aren't there


@cache
def c_functions() -> ctypes.CDLL | None:
    """Return the compiled functions; None if they can't be compiled or loaded here."""
    name = os.environ.get("CC", "cc")
    compiler = shutil.which(name)
    if compiler is None:
        log.info("no C compiler (%s): plain operators run", name)
        return None
    with suppress(OSError, subprocess.SubprocessError):  # without OpenMP, or with another library
        return loaded(compiled(compiler, THREADS))
    try:
        return loaded(compiled(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        names = ", ".join(source.name for source in SOURCES)
        log.info("%s can't compile %s: %s; plain operators run", compiler, names, error)
        return None


def wide_functions() -> ctypes.CDLL | None:
    """Return the functions if those in vectors of 512 bits run here, on PyTorch's threads.

    None also where kernels are switched off.
    """
    lib = c_functions() if switched_on() else None
    return lib if lib is not None and lib.wide() >= min(2, torch.get_num_threads()) else None


def compiled(compiler: str, more: tuple[str, ...] = ()) -> Path:
    """Return the path of the compiled sources, which processes and later runs share.

    Args:
        compiler: The compiler.
        more: Options besides `FLAGS`.
    """
    path = folder() / f"rows-{digest(compiler, more)}.so"
    if path.exists():
        return path
    new = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.new")
    command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(new), "-lm", *more]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return path


def digest(compiler: str, more: tuple[str, ...] = ()) -> str:
    """Identify the sources, how they are compiled, and the processor they are compiled for."""
    about = (compiler, FLAGS, more, platform.machine(), processor())
    content = b"".join(source.read_bytes() for source in SOURCES)
    return hashlib.sha256(content + repr(about).encode()).hexdigest()[:24]


def processor() -> str:
    """Return the description of the processor and its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def folder() -> Path:
    """Return the folder of what is kept, if it is this user's; else a temporary one."""
    try:
        found = kept_folder()
        found.mkdir(parents=True, exist_ok=True)
        if os.access(found, os.W_OK) and found.owner() == getpass.getuser():
            return found
    except (OSError, KeyError, NotImplementedError, RuntimeError):
        # not writable, users have no names here, or none has a home
        pass
    made = tempfile.mkdtemp(prefix="maskfx-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def loaded(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, arguments in ARGUMENTS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return found
