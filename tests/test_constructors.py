"""Public constructors: an argument of another type is an InputError that names it."""

import inspect
from typing import Any

import pytest
import torch

import maskfx
from maskfx.errors import InputError, MaskfxError
from maskfx.scheduling.rounds.elastic import ElasticRounds
from maskfx.scheduling.slack_admission import SlackAdmission

LAYER = maskfx.LowRank(torch.zeros(2, 4), torch.zeros(4, 2), scale=1.0)
ADAPTER = maskfx.Adapter("a", "digest", {"unet": {"layer": LAYER}})
# class: what it needs
CLASSES: dict[type, dict[str, Any]] = {
    maskfx.Adapter: {"name": "a", "digest": "digest", "parts": {}},
    maskfx.Adapters: {},
    maskfx.BatchPolicy: {},
    maskfx.Budget: {"nbytes": 1e9, "steps": 5},
    maskfx.DeviceMover: {},
    maskfx.Difference: {},
    maskfx.Engine: {},
    maskfx.HelperProcesses: {},
    maskfx.Loader: {},
    maskfx.Lora: {"adapter": ADAPTER},
    maskfx.LowRank: {"down": LAYER.down, "up": LAYER.up, "scale": 1.0},
    maskfx.OwnProcesses: {},
    maskfx.PatchReuse: {},
    maskfx.Quality: {},
    maskfx.RemoteStore: {"url": "memory:///"},
    maskfx.ReusePolicy: {},
    maskfx.Store: {"root": "templates"},
    maskfx.Tiers: {"host_bytes": 1 << 20},
    ElasticRounds: {},
    SlackAdmission: {},
}
OWN = {"clock", "sleep", "lane", "disk", "counters"}  # what tests replace
CASES = [
    (kind, name)
    for kind in CLASSES
    for name in inspect.signature(kind).parameters
    if name not in OWN
]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize("value", [object(), float("nan"), [[0.0]]])
def test_an_argument_of_another_type_is_refused_by_name(
    kind: Any, name: str, value: object
) -> None:
    with pytest.raises(MaskfxError) as raised:
        kind(**{**CLASSES[kind], name: value})
    assert isinstance(raised.value, InputError)
    shown = {"names": "own_process"}.get(name, name)
    assert f"{shown}=" in str(raised.value) or f"{shown} is a" in str(raised.value)


ours: Any = maskfx  # not typed, as most callers' code


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda: ours.Tiers(host_bytes=1, readers=0), "readers=0: give a whole number, 1"),
        (lambda: ours.Tiers(host_bytes=1, ttl=-1), "ttl=-1: give seconds, 0 or more, or None"),
        (lambda: ours.Budget(1e9, steps=2.5), "steps=2.5: give a whole number"),
        (lambda: ours.Budget(1e9, steps=5, allow="8bit"), r'give a list of names, such as \("8b'),
        (lambda: ours.Quality(patches=float("nan")), "patches=nan: give a relative change"),
        (lambda: ours.Quality.of([]), r"quality=\[\]: choose one of"),
        (lambda: ours.Masks.anywhere(-1, 8), "give the latent's height and width"),
        (lambda: ours.Masks.inside(0), "expected a boolean mask, got 0"),
        (lambda: ours.editing(0, 0).__enter__(), "mask=0: give a boolean tensor"),
        (lambda: ours.compile(torch.nn.Linear(1, 1), prepack="no"), "prepack='no': give True"),
        (lambda: ours.compile(torch.nn.Linear(1, 1), plans=1), "plans=1: give True, False or N"),
    ],
)
def test_a_value_out_of_range_is_refused(make: Any, seen: str) -> None:
    with pytest.raises(MaskfxError, match=seen):
        make()


def test_requests_and_results_check_what_they_are_given() -> None:
    engine = ours.Engine()
    with pytest.raises(InputError, match="timeout='soon': give seconds, 0 or more, or None"):
        engine.close("soon")
    engine.close()
