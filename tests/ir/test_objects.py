"""Objects among a call's arguments as nodes of pytrees."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.ir.objects import (
    OPENED,
    Watched,
    closed_object,
    copy_tree,
    holds_objects,
    made_object,
    new_objects,
    open_objects,
)


class Layer:
    def __init__(self, keys: Tensor | None = None) -> None:
        self.keys = keys


class Cache:
    def __init__(self, *keys: Tensor | None) -> None:
        self.layers = [Layer(k) for k in keys]
        self.mode = "read"


@dataclass
class Pair:
    left: Tensor
    right: int


class Bare:
    pass


class Called:
    def __init__(self) -> None:
        self.keys = torch.ones(2)

    def __call__(self) -> None:
        raise AssertionError("it isn't called")


class Slotted:
    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys = torch.ones(2)


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


def opened(**inputs: Any) -> dict[str, Any]:
    assert open_objects(inputs) == ""
    return inputs


def test_what_consists_of_tensors_and_plain_values_is_opened() -> None:
    given = opened(x=torch.ones(1), cache=Cache(torch.ones(2), None), pair=Pair(torch.ones(3), 4))
    leaves, spec = pytree.tree_flatten(given)
    found = [leaf if isinstance(leaf, (str, int, type(None))) else len(leaf) for leaf in leaves]
    assert found == [1, 2, None, "read", 3, 4]
    assert holds_objects(spec)
    assert not holds_objects(pytree.tree_structure({"x": [torch.ones(1)]}))


def test_paths_name_the_attributes() -> None:
    pairs, _ = pytree.tree_flatten_with_path(opened(cache=Cache(torch.ones(2))))
    assert [pytree.keystr(path) for path, _ in pairs] == [
        "['cache'].layers[0].keys",
        "['cache'].mode",
    ]


@pytest.mark.parametrize(
    "value", [Bare(), Slotted(), Holder(torch.nn.Linear(1, 1)), Holder(iter([1]))]
)
def test_what_else_is_known_by_its_identity_is_named(value: object) -> None:
    assert open_objects({"x": torch.ones(1), "more": {"kept": [value]}}) == type(value).__name__
    assert type(value) not in OPENED


def test_functions_and_their_like_are_no_objects_of_a_call() -> None:
    assert open_objects({"f": print, "g": Called(), "h": lambda: None}) == ""
    assert Called not in OPENED


def test_an_object_that_holds_itself_stays_closed() -> None:
    value = Holder(None)
    value.held = value
    assert open_objects({"kept": value}) == "Holder"


def test_a_round_trip_without_changes_keeps_the_object() -> None:
    given = opened(cache=Cache(torch.ones(2), None), empty=Cache())
    again = pytree.tree_map(lambda leaf: leaf, given)
    assert again["cache"] is given["cache"]
    assert again["empty"] is given["empty"]


def test_other_leaves_make_another_object() -> None:
    given = opened(cache=Cache(torch.ones(2), None))
    other = pytree.tree_map(lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf, given)
    assert other["cache"] is not given["cache"]
    assert isinstance(other["cache"], Cache)
    found = other["cache"].layers[0].keys
    assert found is not None
    assert found.tolist() == [2, 2]
    kept = given["cache"].layers[0].keys
    assert kept is not None
    assert kept.tolist() == [1, 1]


def test_what_was_written_since_is_kept_out_of_a_tree_taken_apart_before() -> None:
    given = opened(cache=Cache(None))
    leaves, spec = pytree.tree_flatten(given)
    given["cache"].layers[0].keys = torch.ones(2)
    assert pytree.tree_unflatten(leaves, spec)["cache"].layers[0].keys is None


def test_copies_share_nothing_that_can_be_written() -> None:
    given = opened(cache=Cache(torch.ones(2)), empty=Cache())
    copied = copy_tree(given)
    copied["cache"].layers[0].keys.zero_()
    copied["cache"].layers.append(Layer())
    copied["empty"].mode = "write"
    assert given["cache"].layers[0].keys.tolist() == [1, 1]
    assert len(given["cache"].layers) == 1
    assert given["empty"].mode == "read"


def test_new_objects_have_the_same_tensors() -> None:
    given = opened(cache=Cache(torch.ones(2)))
    with new_objects():
        own = pytree.tree_map(lambda leaf: leaf, given)
    assert own["cache"] is not given["cache"]
    assert own["cache"].layers[0].keys is given["cache"].layers[0].keys


def test_structures_of_objects_alike_are_equal() -> None:
    one, other, longer = (
        pytree.tree_structure(opened(cache=Cache(*[torch.ones(2)] * n))) for n in (1, 1, 2)
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one != longer
    assert pickle.loads(pickle.dumps(one)) == one
    assert pytree.treespec_loads(pytree.treespec_dumps(one)) == one


@pytest.mark.parametrize("kind", ["assigned", "in place", "appended", "a number"])
def test_writes_are_noticed(kind: str) -> None:
    given = opened(x=torch.ones(1), cache=Cache(torch.ones(2)))
    watched = Watched(given)
    given["x"].zero_()  # not within an object
    assert watched.written() == ""
    match kind:
        case "assigned":
            given["cache"].layers[0].keys = torch.ones(2)
        case "in place":
            given["cache"].layers[0].keys.zero_()
        case "appended":
            given["cache"].layers.append(Layer())
        case "a number":
            given["cache"].mode = "write"
    assert watched.written() == "cache"


def test_a_result_with_an_object_belongs_to_its_call() -> None:
    result = {"sample": torch.ones(1), "pair": Pair(torch.ones(1), 2)}
    open_objects(result)
    assert made_object({"sample": torch.ones(1)}) == ""
    result["cache"] = Cache(torch.ones(1))
    open_objects(result)
    assert made_object(result) == "Cache"
    assert closed_object(result) == "", "it can be made again of its parts"
    assert made_object({"held": Bare()}) == closed_object({"held": Bare()}) == "Bare"
