"""Checks of the arguments of `Engine(...)`; `own_process` and `admission` check their own."""

from __future__ import annotations

from maskfx.distributed.ranks import Ranks
from maskfx.engine.admission.batch_policy import BatchPolicy
from maskfx.errors import InputError
from maskfx.ir.argument_checks import (
    check_callable,
    check_number,
    check_type,
    check_whole,
    is_number,
    refuse,
)


def check_engine(
    waiting: object,
    running: object,
    queue: object,
    outside: object,
    remember: object,
    ranks: object,
    rank_timeout: object,
    rounds: object,
    told: object,
) -> None:
    """Raise InputError for an argument of another type, out of range, or without its partner."""
    for name, value in (("running", running), ("queue", queue)):
        check_whole("Engine", name, value, 1)
    if not isinstance(ranks, Ranks):
        check_whole("Engine", "ranks", ranks, 1)
    elif ranks.count == 1:
        raise InputError(f"Engine: ranks={ranks}: give 2 or more ranks, or leave ranks out")
    check_whole("Engine", "remember", remember, 0)
    check_number("Engine", "rank_timeout", rank_timeout, "seconds", above=True)
    check_type("Engine", "waiting", waiting, BatchPolicy, "a BatchPolicy, or None", or_none=True)
    check_callable("Engine", "told", told, or_none=True)
    if outside is not None and not hasattr(outside, "adopt"):
        refuse("Engine", "outside", outside, "maskfx.HelperProcesses(count), or None")
    if rounds is not None and not hasattr(rounds, "decide"):
        refuse("Engine", "rounds", rounds, "a policy of rounds, such as ElasticRounds(), or None")
    if rounds is not None and ranks == 1:
        raise InputError("Engine: rounds= shares ranks between requests: give ranks=2 or more")


def check_request(deadline: object, user: object, told: object) -> None:
    """Raise InputError for an argument of a request of another type.

    A deadline may have passed: then the request ends before its first step.
    """
    if deadline is not None and (not is_number(deadline) or deadline != deadline):
        refuse("submit", "deadline", deadline, "seconds from now, or None")
    check_type("submit", "user", user, str, "a name")
    check_callable("submit", "told", told, or_none=True)
