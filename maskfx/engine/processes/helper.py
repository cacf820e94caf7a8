"""The helper process: holds components of pipelines and runs calls of them for the engine.

`helper_processes.py` starts it. It ends when its channel closes.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module

import torch

from maskfx.ir.many_objects import many_objects
from maskfx.runtime.hardware.cpu_threads import give_back
from maskfx.runtime.hardware.devices import compute_on
from maskfx.runtime.hardware.freed_memory import keep_freed_memory
from maskfx.runtime.processes.channel import Channel, connect_to_parent
from maskfx.runtime.transport.device_transport import unpack_on
from maskfx.runtime.transport.shared_tensors import PackedMessage
from maskfx.runtime.transport.tensor_transport import BYTES, Unsendable, pack, unpack

Key = int | str  # of a pipeline component


def serve(channel: Channel) -> None:
    """Receive components and execute calls until the channel closes."""
    parts: dict[Key, object] = {}
    while True:
        answered = answer(parts, channel.receive())
        try:
            message = pack(answered)
        except Unsendable as error:
            message = pack((None, error))
        del answered
        channel.send(*message)


def answer(parts: dict[Key, object], message: list[bytearray]) -> tuple[object, Exception | None]:
    """Add a component or run a call; return the result and the error."""
    try:
        what, key, *rest = unpack(message)
        if what == "part":
            parts[key] = unpickled(*rest)
            return None, None
        return run(parts[key], *rest), None
    except Exception as error:
        return None, plain(error)


def unpickled(packed: PackedMessage, device: str = "cpu", registrar: str = "torch") -> object:
    """Return a component; its weights are in memory that processes share, or on a device.

    Args:
        packed: The component.
        device: The device's name.
        registrar: The module that makes the device known to PyTorch.
    """
    try:
        import_module(registrar)
        where = torch.device(device)
        compute_on(where)
    except (ImportError, RuntimeError) as error:
        raise Unsendable(f"{device} can't be used here: {error}") from error
    with many_objects():  # of the libraries that it is the first to need
        return unpack_on(where, packed.parts)


def run(
    part: object, method: str, threads: int, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            return getattr(part, method)(*args, **kwargs)
    finally:
        if threads > 1:
            give_back()  # release idle OpenMP threads before the next step needs the cores


def plain(error: Exception) -> Exception:
    """Return the error if it can be pickled, else a `RuntimeError` with its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def main() -> None:
    channel = connect_to_parent(BYTES)
    keep_freed_memory()
    # the key with which multiprocessing hands over the descriptors of shared weights
    multiprocessing.current_process().authkey = bytes(*channel.receive())
    with suppress(EOFError, ConnectionError):
        serve(channel)


if __name__ == "__main__":
    main()
