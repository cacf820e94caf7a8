"""Progress: bars on a terminal only, and seconds by kind of work."""

from __future__ import annotations

import threading
import time

import pytest

from maskfx.ir import progress
from tests.factories.terminal import on_terminal


def test_a_bar_shows_its_stages_and_goes() -> None:
    with on_terminal() as terminal, progress.work("capture", "capture of X", 3):
        assert terminal.getvalue() == ""  # nothing has begun
        progress.stage(0, "export")
        progress.stage(1, "passes")
    shown = terminal.getvalue()
    assert "capture of X:   0%" in shown
    assert "0/3 [00:00, export]" in shown
    assert "1/3 [00:00, passes]" in shown
    assert shown.rpartition("passes]")[2].replace("\r", "").strip() == ""


def test_nothing_is_drawn_without_a_terminal_or_where_it_is_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.work("capture", "capture of X", 3) as bar:
        bar.move(1, 3)
    progress.report("a line")
    assert capsys.readouterr() == ("", "")
    with on_terminal() as terminal:
        with progress.hidden(), progress.hidden(False), progress.work("capture", "X", 3) as bar:
            bar.move(1, 3)
            progress.report("a line")
        assert terminal.getvalue() == ""
        progress.report("a line")
    assert terminal.getvalue() == "a line\n"


def test_seconds_of_work_inside_other_work_count_once() -> None:
    with progress.tally() as spent:
        began = time.perf_counter()
        with progress.work("recording", "r"):
            time.sleep(0.02)
            for _ in range(2):
                with progress.work("capture", "c"):
                    time.sleep(0.03)
        whole = time.perf_counter() - began
    assert spent["capture"] >= 0.06
    assert spent["recording"] >= 0.02
    assert spent["capture"] + spent["recording"] == pytest.approx(whole, abs=0.01)


def test_another_thread_is_not_counted() -> None:
    def work() -> None:
        with progress.work("capture", "c"):
            pass

    with progress.tally() as spent:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not spent
