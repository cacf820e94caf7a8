"""The process that reads, converts and checks LoRA files, so that parsing them delays no step.

`maskfx.runtime.lora.loader` starts it. It ends when its channel closes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from maskfx.errors import InputError
from maskfx.ir.many_objects import many_objects
from maskfx.pipelines.adapters.lora_files import LoraTarget, converted
from maskfx.runtime.lora.adapter import Adapter
from maskfx.runtime.lora.files import AdapterFile, FileLimits, read_adapter_file
from maskfx.runtime.lora.transfer import head_of, send_block
from maskfx.runtime.processes.channel import BYTES, Channel, connect_to_parent

CONVERTERS = "diffusers.loaders.lora_pipeline"  # has the classes of `LoraTarget`


def serve(channel: Channel) -> None:
    """Load files until the channel closes."""
    while True:
        (request,) = channel.receive()
        try:
            adapter = load(json.loads(bytes(request)))
            head = head_of(adapter)
        except InputError as error:
            channel.send(json.dumps({"unfit": str(error)}).encode())
        except (Exception, MemoryError) as error:
            channel.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        else:
            channel.send(json.dumps(head).encode())
            send_block(channel, adapter, head)
            del adapter


def load(request: dict[str, Any]) -> Adapter:
    """Read and convert the file that a request describes."""
    file, limits = AdapterFile(**request["file"]), FileLimits(**request["limits"])
    module, _, name = request["read"].partition(":")
    tensors, settings = read_adapter_file(file, limits, getattr(import_module(module), name))
    return converted(file.name, tensors, settings, LoraTarget(**request["target"]), limits)


def main() -> None:
    torch.set_num_threads(1)  # the cores belong to the steps
    channel = connect_to_parent(BYTES)
    # takes seconds, which the first load needn't wait for
    with suppress(Exception), many_objects():
        import_module(CONVERTERS)
    with suppress(EOFError, ConnectionError):
        serve(channel)


if __name__ == "__main__":
    main()
