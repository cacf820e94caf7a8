"""Profiles of adapters: when one acts, and the file that keeps it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from maskfx.runtime.lora.profile import (
    Profile,
    first_below,
    profile_of,
    profile_path,
    store_profile,
)

PROFILE = Profile(start=2, steps=4, first=1000.0, time=500.0, cosine=0.99, size=10)


def test_an_adapter_acts_from_a_time_on() -> None:
    assert [PROFILE.acts(time) for time in (1000.0, 501.0, 500.0, 1.0)] == [
        False,
        False,
        True,
        True,
    ]
    rising = replace(PROFILE, first=0.0, time=0.5)
    assert [rising.acts(time) for time in (0.0, 0.4, 0.5, 1.0)] == [False, False, True, True]
    assert replace(PROFILE, start=0, time=1000.0).acts(1e9)


def test_the_start_is_the_first_step_that_differs_at_any_seed() -> None:
    assert first_below([[1.0, 0.995, 0.98, 0.9], [1.0, 0.985, 0.99, 1.0]], 0.99) == 1
    assert first_below([[1.0, 1.0]], 0.99) == 2
    assert first_below([[0.5, 1.0]], 0.99) == 0


def test_profiles_are_kept_per_base_and_file(tmp_path: Path) -> None:
    adapter = tmp_path / "style.v2.safetensors"
    assert profile_of(adapter, 10, "a") is None
    store_profile(adapter, "a", PROFILE)
    store_profile(adapter, "b", replace(PROFILE, start=3))
    assert profile_of(adapter, 10, "a") == PROFILE
    assert profile_of(adapter, 10, "b") == replace(PROFILE, start=3)
    assert profile_of(adapter, 10, "c") is None
    assert profile_of(adapter, 11, "a") is None, "of another file"
    assert [path.name for path in tmp_path.iterdir()] == ["style.v2.profile.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"version": 2, "bases": {}}', '{"version": 1}', '{"version": 1, "bases": []}'],
)
def test_damaged_profiles_are_not_used(text: str, tmp_path: Path) -> None:
    adapter = tmp_path / "style.safetensors"
    profile_path(adapter).write_text(text)
    assert profile_of(adapter, 10, "a") is None
    bad = {"version": 1, "bases": {"a": {"start": "x"}, "b": 3}}
    profile_path(adapter).write_text(json.dumps(bad))
    assert profile_of(adapter, 10, "a") is None
    assert profile_of(adapter, 10, "b") is None
