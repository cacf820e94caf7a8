"""The search for unreachable cycles pauses, and goes on as it was."""

import gc

import pytest

from maskfx.ir.many_objects import many_objects


def fails() -> None:
    with many_objects():
        assert not gc.isenabled()
        with many_objects():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError


def test_the_search_goes_on_after_a_failure() -> None:
    pytest.raises(KeyError, fails)
    assert gc.isenabled()


def test_a_search_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        pytest.raises(KeyError, fails)
        assert not gc.isenabled()
    finally:
        gc.enable()
