"""How graphs are exported: the options of `export`, checked, and what can't be compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from maskfx.errors import InputError
from maskfx.export.formats.onnx import check_opset
from maskfx.export.graphs import PARTS
from maskfx.export.profiles import read_ranges
from maskfx.export.tensorrt import ENGINES, import_tensorrt, replace_by_engines
from maskfx.export.torch_tensorrt import COMPILED, import_torch_tensorrt, replace_by_compiled

TRITON, LAYOUTS = "triton", ("plain", "triton")
FORMATS = ("onnx", "aoti", "pt2")
# formats of engines, which replace the graphs that they are built from
BUILT = {ENGINES: replace_by_engines, COMPILED: replace_by_compiled}


@dataclass(frozen=True)
class Options:
    """How graphs are exported: see `export`."""

    format: str = "onnx"
    part: str = "all"
    operators: bool = False
    opset: int | None = None
    verify: bool | None = None
    profile: tuple[str, ...] = ()
    layout: str = "plain"
    compare: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (
            ("format", self.format, (*FORMATS, *BUILT)),
            ("part", self.part, tuple(PARTS)),
            ("layout", self.layout, LAYOUTS),
        ):
            if value not in known:
                raise InputError(f"export: {name}={value!r}; choose one of {', '.join(known)}")
        if self.opset is not None and not self.in_onnx:
            raise InputError(f"export: opset= applies to onnx, not to {self.format}; leave it out")
        if self.opset is not None:
            check_opset(self.opset)
        if self.profile and self.format not in BUILT:
            raise InputError(
                f"export: profile= applies to {' and '.join(BUILT)}, not to {self.format}; leave "
                "it out"
            )
        if self.layout == TRITON and not self.in_onnx:
            raise InputError(
                f"export: no backend of Triton runs {self.format}; export as onnx or {ENGINES}"
            )
        if self.format in BUILT:
            import_tensorrt() if self.format == ENGINES else import_torch_tensorrt()
            read_ranges(self.profile)
        if self.operators and self.in_onnx:
            raise InputError(
                "export: ONNX knows no operators of maskfx; leave operators= out, or export as "
                "aoti or pt2"
            )

    @property
    def written(self) -> str:
        """The format in which graphs are written and verified; engines are built from these."""
        return {ENGINES: "onnx", COMPILED: "pt2"}.get(self.format, self.format)

    @property
    def in_onnx(self) -> bool:
        return self.written == "onnx"

    def why_not_verified(self, module: nn.Module, compared: bool) -> str:
        """Return why graphs aren't compared with the module; "" if they are.

        Args:
            module: the module.
            compared: whether the capture was compared with it.
        """
        if self.verify is not None:
            return "" if self.verify else "verify=False"
        if not compared:
            return "compare=False: the denoiser isn't run"
        if self.in_onnx and lacks_bfloat16() and holds(module, torch.bfloat16):
            return "onnxruntime's CPU has no operators for much of bfloat16"
        return ""


def lacks_bfloat16() -> bool:
    """Return True if onnxruntime computes on this machine's CPU only."""
    try:
        import onnxruntime
    except ImportError:
        return False  # the comparison reports what is missing
    return "CUDAExecutionProvider" not in onnxruntime.get_available_providers()


def holds(module: nn.Module, dtype: torch.dtype) -> bool:
    return any(weight.dtype == dtype for weight in module.parameters())
