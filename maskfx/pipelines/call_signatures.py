"""Signatures of pipelines: with what a class passes on to the one that it extends, with options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def call_of_class(pipeline: type) -> Callable[..., object]:
    """Return a class's `__call__`, whose signature names what it takes in `**kwargs` and passes on.

    These are the arguments of the class that it extends.
    """
    calls = [vars(kind)["__call__"] for kind in pipeline.__mro__ if "__call__" in vars(kind)]
    own, signature = calls[0], inspect.signature(calls[0])
    for call in calls[1:]:
        if not variable(signature, inspect.Parameter.VAR_KEYWORD):
            break
        signature = joined(signature, inspect.signature(call))
    if signature == inspect.signature(own):
        return own  # type: ignore[no-any-return]

    @functools.wraps(own)
    def __call__(*args: object, **given: object) -> object:
        return own(*args, **given)

    __call__.__dict__["__signature__"] = signature
    return __call__


def joined(own: inspect.Signature, extended: inspect.Signature) -> inspect.Signature:
    """Return the parameters of both calls; by name only where `own` takes no more by position."""
    named = [p for p in own.parameters.values() if p.kind not in VARIABLE]
    known = {p.name for p in named}
    rest = [p for p in list(extended.parameters.values())[1:] if p.name not in known]
    if not variable(own, inspect.Parameter.VAR_POSITIONAL):
        rest = [
            p if p.kind in VARIABLE else p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in rest
            if p.kind is not inspect.Parameter.VAR_POSITIONAL
        ]
    both = sorted([*named, *rest], key=lambda p: p.kind)
    return own.replace(parameters=both)


def variable(signature: inspect.Signature, kind: object) -> bool:
    return any(p.kind is kind for p in signature.parameters.values())


def with_options(
    own: inspect.Signature, options: inspect.Signature, added: Sequence[str]
) -> inspect.Signature:
    """Return a signature with the keyword-only parameters of another, and with `added` ones."""
    parameters = list(own.parameters.values())
    last = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    more = {p.name: p for p in options.parameters.values() if p.kind is p.KEYWORD_ONLY}
    more |= {n: inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in added}
    new = [p for name, p in more.items() if name not in own.parameters]
    return own.replace(parameters=[*(p for p in parameters if p not in last), *new, *last])
