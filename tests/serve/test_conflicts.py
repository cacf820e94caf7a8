"""Settings that exclude each other are refused, by name, wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maskfx.errors import InputError
from maskfx.serve.config import ServeSettings
from maskfx.serve.launch import LaunchRefusal, check_conflicts
from maskfx.serve.sources import configure

WRONG: list[dict[str, Any]] = [
    {"model": "fake"},
    {"overlap": "on"},
    {"plans": "on"},
    {"link_bandwidth": 1e9},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_what_ranks_dont_support_is_refused_with_them_only(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    check_conflicts(ServeSettings(**wrong))
    with pytest.raises(LaunchRefusal, match=f"ranks=2 with {name}=?"):
        check_conflicts(ServeSettings(**wrong, ranks=2))
    check_conflicts(ServeSettings(ranks=2))


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"prepack": True, "model": "fake"}, "prepack=true with model=fake"),
        ({"prepack": True, "device": "cuda:1"}, "prepack=true with device=cuda:1"),
        ({"prepack": True, "dtype": "float16"}, "prepack=true with dtype=float16"),
        ({"inductor": True, "model": "fake"}, "inductor=true with model=fake"),
        ({"keep": "inputs"}, "keep=inputs: .* set plans=on or a cache_dir"),
        ({"keep": "keys", "plans": "off", "cache_dir": "x"}, "keep=keys"),
        ({"keep": "keys", "ranks": 2, "cache_dir": "x"}, "keep=keys"),
        ({"rank_devices": ("cuda:0", "cuda:1")}, "rank_devices without ranks"),
        ({"rank_backend": "gloo"}, "rank_backend without ranks"),
        ({"ranks": 2, "rank_devices": ("cuda:0",)}, "ranks=2 with 1 rank_devices"),
        ({"ranks": 2, "device": "cuda", "inductor": True}, "device=cuda with inductor=true"),
    ],
)
def test_settings_without_effect_are_refused(given: dict[str, Any], seen: str) -> None:
    with pytest.raises(LaunchRefusal, match=seen):
        check_conflicts(ServeSettings(**given))


@pytest.mark.parametrize(
    "given",
    [
        {"prepack": True, "dtype": "bfloat16", "ranks": 2},
        {"inductor": True, "prepack": True},
        {"inductor": True, "ranks": 2},
        {"keep": "inputs", "plans": "on"},
        {"keep": "keys", "cache_dir": "x"},
        {"keep": "keys", "device": "cuda"},
        {"ranks": 2, "device": "cuda", "rank_devices": ("cuda:0",) * 2, "rank_backend": "rings"},
    ],
)
def test_settings_with_an_effect_together(given: dict[str, Any]) -> None:
    check_conflicts(ServeSettings(**given))


@pytest.mark.parametrize("ranks", ["0", "9", "two"])
def test_other_numbers_of_ranks_are_refused(ranks: str) -> None:
    with pytest.raises(InputError, match="ranks"):
        configure({}, {"MASKFX_RANKS": ranks})


def test_ranks_may_be_set_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("ranks = 2\n", encoding="utf-8")
    assert configure({"workers": 3}, {}, file).settings.ranks == 2
