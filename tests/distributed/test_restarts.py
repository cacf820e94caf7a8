"""How often failed ranks are replaced."""

from __future__ import annotations

from maskfx.distributed.restarts import HOUR, PER_HOUR, Restarts


def test_restarts_are_limited_by_the_hour() -> None:
    now = [100.0]
    restarts = Restarts(clock=lambda: now[0])
    for _ in range(PER_HOUR):
        assert restarts.can_add()
        restarts.add()
        now[0] += 60
    assert not restarts.can_add()
    now[0] = 100.0 + HOUR - 1
    assert not restarts.can_add()
    now[0] += 1  # the first one was an hour ago
    assert restarts.can_add()
    restarts.add()
    assert not restarts.can_add()


def test_a_server_replaces_ranks_for_months() -> None:
    now = [0.0]
    restarts = Restarts(most=1, clock=lambda: now[0])
    for _ in range(100):
        assert restarts.can_add()
        restarts.add()
        assert not restarts.can_add()
        now[0] += HOUR
