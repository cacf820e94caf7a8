"""Settings that ranks don't support are refused, by name, wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maskfx.errors import InputError
from maskfx.serve.config import ServeSettings, configure
from maskfx.serve.launch import LaunchRefusal, check_ranks

WRONG: list[dict[str, Any]] = [
    {"device": "cuda"},
    {"model": "fake"},
    {"overlap": "on"},
    {"plans": "on"},
    {"link_bandwidth": 1e9},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_what_ranks_dont_support_is_refused_with_them_only(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    check_ranks(ServeSettings(**wrong))
    with pytest.raises(LaunchRefusal, match=f"ranks=2 with {name}=?"):
        check_ranks(ServeSettings(**wrong, ranks=2))
    check_ranks(ServeSettings(ranks=2))


@pytest.mark.parametrize("ranks", ["0", "9", "two"])
def test_other_numbers_of_ranks_are_refused(ranks: str) -> None:
    with pytest.raises(InputError, match="ranks"):
        configure({}, {"MASKFX_RANKS": ranks})


def test_ranks_may_be_set_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("ranks = 2\n", encoding="utf-8")
    assert configure({"workers": 3}, {}, file).settings.ranks == 2
