"""Writes graphs as files of PyTorch: programs of torch.export, and packages of AOTInductor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.export import ExportedProgram


def write_program(program: ExportedProgram, path: Path) -> None:
    """Write a graph as torch.export saves it."""
    program.example_inputs = None  # of many rows: they would be saved, too
    torch.export.save(program, path)


def write_package(program: ExportedProgram, path: Path) -> None:
    """Compile a graph by AOTInductor and write the package."""
    from torch._inductor import aoti_compile_and_package

    with torch.no_grad():
        aoti_compile_and_package(program, package_path=str(path))
