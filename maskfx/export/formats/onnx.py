"""Writes graphs in ONNX, checked, with the weights of all graphs of a denoiser in one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.export import ExportedProgram

from maskfx.errors import CompileError, InputError
from maskfx.runtime.backends.graph_files import imported

OPSET = 23  # the first with attention as one operator
WEIGHTS = "weights.data"
ALIGNED = 4096  # so that runtimes can map the file
SMALL = 1024  # bytes; smaller tensors stay in the graph


class OnnxWriter:
    """Writes the graphs of one directory; a weight that several graphs read is written once."""

    def __init__(self, directory: Path, opset: int | None = None) -> None:
        self.directory, self.opset = directory, OPSET if opset is None else opset
        if self.opset < OPSET:
            raise InputError(
                f"export: opset {self.opset} has no operator for attention; give {OPSET} or more"
            )
        self._onnx: Any = imported("onnx")
        self._ir: Any = imported("onnx_ir")
        imported("onnxscript")
        self._places: dict[tuple[str, str, tuple[int, ...]], tuple[int, int]] = {}

    def write(self, program: ExportedProgram, outputs: list[str], path: Path) -> None:
        """Write one graph to a file in the directory."""
        inputs = list(program.graph_signature.user_inputs)
        with torch.no_grad():
            try:
                made = torch.onnx.export(
                    program,
                    (),
                    dynamo=True,
                    opset_version=self.opset,
                    input_names=inputs,
                    output_names=outputs,
                    external_data=False,
                    verbose=False,
                )
            except torch.onnx.errors.OnnxExporterError as error:
                raise CompileError(
                    f"export: {path.name}: an operator has no translation to ONNX: "
                    f"{first_line(error)}; export it as aoti or pt2"
                ) from error
        assert made is not None
        self._move_weights(made.model)
        self._ir.save(made.model, path)
        self._onnx.checker.check_model(str(path), full_check=True)

    def _move_weights(self, model: Any) -> None:
        """Replace large tensors by references into the file of weights."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < SMALL:
                continue
            offset, length = self._placed(tensor)
            value.const_value = self._ir.ExternalTensor(
                WEIGHTS,
                offset,
                length,
                tensor.dtype,
                shape=tensor.shape,
                name=value.name,
                base_dir=self.directory,
            )

    def _placed(self, tensor: Any) -> tuple[int, int]:
        """Return where a tensor is in the file of weights; write it if it isn't there."""
        data = tensor.tobytes()
        key = (xxhash.xxh3_128_hexdigest(data), str(tensor.dtype), tuple(tensor.shape))
        if key not in self._places:
            with (self.directory / WEIGHTS).open("ab") as file:
                start = file.seek(0, os.SEEK_END)
                file.write(b"\0" * (-start % ALIGNED))
                self._places[key] = (file.tell(), len(data))
                file.write(data)
        return self._places[key]


def first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
