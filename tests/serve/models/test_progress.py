"""What is shown while a model is loaded and warmed up."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest
from diffusers.utils import logging as of_diffusers
from transformers.utils import logging as of_transformers

from maskfx.serve.models import warmup
from maskfx.serve.models.model_source import import_notices_hidden, library_bars
from tests.factories.terminal import on_terminal

LIBRARIES: tuple[Any, ...] = (of_diffusers, of_transformers)


@pytest.mark.parametrize("shown", [True, False])
def test_bars_of_libraries_are_for_terminals(shown: bool) -> None:
    before = [one.is_progress_bar_enabled() for one in LIBRARIES]
    with library_bars(shown):
        within = [one.is_progress_bar_enabled() for one in LIBRARIES]
    assert within == (before if shown else [False, False])
    assert [one.is_progress_bar_enabled() for one in LIBRARIES] == before == [True, True]


def test_notices_about_absent_packages_are_hidden_for_a_while() -> None:
    notices = of_transformers.get_logger("transformers.utils.import_utils")
    assert notices.isEnabledFor(logging.WARNING)
    with import_notices_hidden():
        assert not notices.isEnabledFor(logging.WARNING)
        assert notices.isEnabledFor(logging.ERROR)
    assert notices.isEnabledFor(logging.WARNING)


def test_a_warm_up_shows_its_stages_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("try_edit", "try_generation", "mixes", "sketcher_of"):
        monkeypatch.setattr(warmup, name, lambda *_: None)
    family: Any = types.SimpleNamespace(editor=object(), size=lambda: (8, 8), multiple=8)
    warmup.warm_up(family, None)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")
    with on_terminal() as terminal:
        warmup.warm_up(family, None)  # type: ignore[arg-type]
    for stage in ("0/4 [00:00, first edit", "1/4 [00:00, generation", "3/4 [00:00, previews"):
        assert stage in terminal.getvalue(), stage
