"""Messages about wrong input end with what to do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskfx.errors import InputError
from maskfx.export.host.arguments import check_arguments, check_shapes, value_of
from maskfx.export.host.checks import check_regions
from maskfx.runtime.lora.registry import Adapters
from maskfx.runtime.planner.timeline import BlockChoice, BlockTimes, batch_costs
from maskfx.runtime.validation.validate import check_boolean
from maskfx.serve.frontend.adapter_names import AdapterNames

NOWHERE = Path("/nowhere/loras")
TENSOR = {"name": "x", "kind": "tensor", "dtype": "float32", "dims": ["n", 3], "step": False}
FREE, TALL, HALF = ({**TENSOR, "dims": [dim]} for dim in ("n", "y", "half"))
MANIFEST: dict[str, Any] = {
    "arguments": [TENSOR],
    "dimensions": {"n": {"role": "tokens"}, "y": {"role": "y"}, "half": {"role": "y/2"}},
    "sizes": {"tokens": None, "y": None, "batch": None},
    "regions": [],
}
UNUSED: Any = None
BLOCK = BlockTimes(((BlockChoice("all"),),))


def shapes(arguments: list[dict[str, Any]], *found: tuple[int, ...]) -> Callable[[], object]:
    manifest = {**MANIFEST, "arguments": arguments}
    return partial(check_shapes, manifest, [np.zeros(shape, np.float32) for shape in found])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(check_boolean, "mask", 3), r"expected a boolean mask, got 3; convert it, such as"),
        (partial(batch_costs, [BLOCK], [[0, 0]]), "2 choices for 1 members; give one for each"),
        (partial(Adapters, NOWHERE), "no such directory; create it, or correct the path"),
        (partial(AdapterNames, NOWHERE), "no such directory; create it, or correct the setting"),
        (partial(check_arguments, MANIFEST, {"y": 1}), r"\['y'\] are none .*; correct their names"),
        (partial(value_of, TENSOR, {"x": "text"}, 1), "got a str; pass a numpy array"),
        (
            partial(value_of, TENSOR, {"x": np.zeros((2, 3))}, 1),
            "expected float32, got float64; convert it",
        ),
        (shapes([TENSOR], (4,)), r"expected 2 dimensions .*, got \(4,\); reshape it"),
        (shapes([TENSOR], (4, 2)), "dimension 1 is 2, expected 3; pass an array of this size"),
        (shapes([TALL, HALF], (4,), (3,)), r"\(y/2\) is 3, expected 2; pass arguments that agree"),
        (shapes([FREE, FREE], (4,), (5,)), "its tokens is 5, but 4 in x; pass arguments that"),
        (
            partial(
                check_regions, MANIFEST, UNUSED, np.ones(4, bool), {1: np.ones(4, bool)}, UNUSED
            ),
            r"there is no region 1, only \[\]; use one of these, or leave it out",
        ),
    ],
)
def test_it_ends_with_what_to_do(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
