"""A process that loads the programs another one saved, and may not capture.

``python -m tests.factories.saved_programs <directory> <case> ...`` prints one JSON line for each
case, whose programs lie in a directory of its name, because modules of several cases are equal:
relative errors of a recording and of an edit against the eager module, seconds until the
first edit's result, and whether there is a program.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from maskfx.runtime.programs import program_cache
from maskfx.runtime.programs.shared_programs import shared_programs
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO, Size


def first_edit(name: str, size: Size, directory: str, seed: int = 3) -> dict[str, Any]:
    """Record and edit once with the programs in a directory; compare with the eager module."""
    shared_programs().clear()  # those of equal modules, whose programs lie elsewhere
    case = ZOO[name]
    module = case.build()
    inputs = case.inputs
    mask = MASKS["stroke"](case.mask_shape(size), seed)
    with torch.no_grad():
        start = time.perf_counter()
        denoiser = maskfx.compile(module, programs=directory)
        recorded, cache = denoiser.record(**inputs(size, seed))
        edited = denoiser.edit([maskfx.EditStep(inputs(size, seed), mask, cache)])[0]
        seconds = time.perf_counter() - start
        wanted = module(**inputs(size, seed))
    programs = [one.program for one in denoiser.compilations]
    return {
        "name": name,
        "recording": error(recorded, wanted),
        "edit": error(edited, wanted),
        "seconds": seconds,
        "codes": sorted(p.code for p in programs if p is not None),
        "compilations": len(programs),
    }


def error(got: Any, wanted: Any) -> float:
    """The largest relative error among the tensors of two results; infinite where they differ."""
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(wanted)
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(b, Tensor)]
    if pytree.tree_structure(got) != pytree.tree_structure(wanted):
        return math.inf
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def main(directory: str, *names: str) -> None:
    """Run the cases without a capture and without a pass."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    forbidden = mock.Mock(side_effect=AssertionError("a saved program was captured again"))
    with mock.patch.multiple(program_cache, capture=forbidden, compile_capture=forbidden):
        for name in names:
            print(
                json.dumps(first_edit(name, ZOO[name].sizes[0], f"{directory}/{name}")), flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
