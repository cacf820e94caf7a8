"""Policies: which call is computed in full, recorded, or an edit of which recording."""

from __future__ import annotations

from typing import Any

import pytest

import maskfx
from maskfx.runtime.reuse.policy import CallKind, Past, ReusePolicy

LETTERS = {CallKind.DENSE: "D", CallKind.RECORD: "R", CallKind.TEMPLATE: "T", CallKind.EARLIER: "e"}


def kinds(policy: ReusePolicy, calls: int, template: str = "") -> str:
    planned = policy.schedule(calls, [int(c) for c in template])
    assert [p.ordinal for p in planned] == list(range(calls))
    return "".join(LETTERS[p.kind] for p in planned)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, "RReeeReeeRe"),
        ({"refresh": 1}, "RRRRRRRRRRR"),
        ({"refresh": 1, "keep": "none"}, "DDDDDDDDDDD"),
        ({"refresh": 2, "first": 1}, "ReReReReReR"),
        ({"refresh": 3, "first": 4, "keep": "none"}, "DDDReeReeRe"),
        ({"refresh": 8, "first": 1, "keep": "none"}, "ReeeeeeeRee"),
        # what ends in full isn't recorded, for no step reads it; nor what stands before it
        ({"calls": 11, "last": 1}, "RReeeReeeRD"[:9] + "DD"),
        ({"calls": 11, "last": 3}, "RReeeReeDDD"),
        ({"calls": 11, "last": 11}, "RRRRRRRRRRR"),
        ({"calls": 11, "last": 3, "keep": "all"}, "RReeeReeRRR"),
        ({"calls": 10}, "RReeeReeeD"),
    ],
)
def test_own_calls_alone(settings: dict[str, Any], wanted: str) -> None:
    calls = settings.get("calls", 11)
    assert kinds(ReusePolicy("steps", **settings), calls) == wanted
    assert kinds(ReusePolicy("auto", **settings), calls) == wanted
    assert kinds(ReusePolicy("steps", **settings), calls, "0123") == wanted


@pytest.mark.parametrize(
    ("settings", "held", "wanted"),
    [
        ({"reuse": "template"}, "", "RRRRRR"),
        ({"reuse": "template"}, "012345", "TTTTTT"),
        ({"reuse": "template", "keep": "none"}, "013", "TTDTDD"),
        ({"reuse": "template", "keep": "all"}, "013", "TTRTRR"),
        # a call that was computed in full after masked ones starts from other latents
        ({"reuse": "template"}, "13", "RTDTDD"),
        ({"reuse": "template", "calls": 6, "last": 1}, "012345", "TTTTTD"),
        ({"reuse": "auto"}, "012345", "TTTTTT"),
        ({"reuse": "auto"}, "01", "TTeeeR"),
        ({"reuse": "auto"}, "015", "TTeeeT"),
        ({"reuse": "auto", "refresh": 2}, "03", "TReTeR"),
        ({"reuse": "auto", "refresh": 1, "keep": "none"}, "3", "DDDTDD"),
    ],
)
def test_with_a_template(settings: dict[str, Any], held: str, wanted: str) -> None:
    assert kinds(ReusePolicy(**settings), 6, held) == wanted


def test_an_edit_reads_the_recording_that_was_used_last() -> None:
    planned = ReusePolicy(refresh=3).schedule(8, [5])
    assert [p.source for p in planned] == [None, None, 1, 1, None, 5, 5, 5]


def test_a_recording_serves_until_it_is_refreshed() -> None:
    policy = ReusePolicy("steps", refresh=4, first=1)
    assert policy.kind(6, Past(base=3, edited=1), False) is CallKind.EARLIER
    assert policy.kind(7, Past(base=3, edited=1), False) is CallKind.RECORD


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reuse": "cache"}, "reuse='cache'.*template, steps, auto"),
        ({"outside": "zero"}, "outside='zero'.*hold, extrapolate"),
        ({"keep": "some"}, "keep='some'.*dense, all, none"),
        ({"refresh": 0}, "refresh=0.*1 or greater"),
        ({"refresh": 2.5}, "refresh=2.5.*whole number"),
        ({"first": 0}, "first=0.*1 or greater"),
        ({"last": -1}, "last=-1.*0 or greater"),
        ({"last": True, "calls": 3}, "last=True.*whole number"),
        ({"calls": 0}, "calls=0.*1 or greater"),
        ({"last": 1}, r"last=1 needs calls=.*len\(scheduler.timesteps\)"),
    ],
)
def test_refuses_settings_that_mean_nothing(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(maskfx.InputError, match=says):
        ReusePolicy(**settings)
