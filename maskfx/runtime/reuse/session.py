"""EditSession: one request's edit over all its calls, also without a recorded template.

It holds what one request has computed and may reuse. Which call is what, `policy.py` says;
who runs the steps, and with whose, is up to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.errors import CacheError, InputError, MaskError
from maskfx.ir.values import copy_of
from maskfx.ops import numbers, wide
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.reuse.policy import CallKind, Past, ReusePolicy
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, RecordStep

CallKey = tuple[int, str]  # the call's number and its branch
Times = tuple[float, ...]  # one for all of a call's batch, or one for each of its elements

# How far to extrapolate, in distances between the two recordings. Only the calls before the third
# recording would go further, from two that stand side by side: what isn't smooth grows most there.
FURTHEST = 1.0


@dataclass(frozen=True)
class KnownCall:
    """A call whose full output is known; `cache` if it was recorded."""

    ordinal: int
    times: Times
    shape: tuple[int, ...]
    outputs: list[Any]
    cache: StepCache | None = None


@dataclass(frozen=True)
class PendingCall:
    """A call that was given out and not yet taken back."""

    kind: CallKind
    times: Times
    shape: tuple[int, ...]
    template: StepCache | None


@dataclass
class Branch:
    """One branch of the guidance: the last call that is known in full, and one before it."""

    last: KnownCall | None = None
    before: KnownCall | None = None
    taken: int = -1

    def learn(self, known: KnownCall) -> None:
        """Schedulers repeat timesteps: two calls of one time say nothing about its course."""
        if self.last is not None and self.last.times != known.times:
            self.before = replace(self.last, cache=None)
        self.last = known

    def base(self, shape: tuple[int, ...]) -> int | None:
        """Whose recording a call of this shape may read."""
        fits = self.last is not None and self.last.cache is not None and self.last.shape == shape
        return self.last.ordinal if fits and self.last is not None else None

    def recording(self, times: Times, outside: str) -> StepCache:
        """The last recording, with the outputs that inactive sites shall have now."""
        assert self.last is not None, "an edit of an earlier call before any call"
        assert self.last.cache is not None, "an edit of a call that wasn't recorded"
        before = self.before
        if outside == "hold" or before is None or before.shape != self.last.shape:
            return self.last.cache
        reach = reaches(before.times, self.last.times, times)
        outputs = extrapolated(before.outputs, self.last.outputs, reach)
        return replace(self.last.cache, output=outputs)


class EditSession:
    """One request: which step each of its calls shall be, and what came back.

        session = maskfx.EditSession(mask, maskfx.ReusePolicy(refresh=4))
        for ordinal, t in enumerate(scheduler.timesteps):
            step = session.ask(ordinal, "cond", inputs)      # may share a step with other sessions'
            [result] = denoiser.step([step])
            output = session.take(ordinal, "cond", result)   # of the module's full shape

    `ordinal` is the pipeline's number of the call, 0 first, and `branch` tells calls of one ordinal
    apart (conditional, unconditional); one call for both, as a batch of two, is one branch. All is
    kept by these two, since schedulers repeat timesteps (Heun, PNDM). Between two recordings the
    masked sites are computed at each call; keys, values, halos and statistics of the rest are those
    of the recording. A session's results don't depend on what shares its steps.

    **Outside the mask** an edit of an earlier call has no prediction of its own. Where the pipeline
    puts the template's latents back after every step (`blending`), nobody sees it. Elsewhere the
    scheduler integrates it: held (`outside="hold"`), a prediction is used for `refresh` calls as if
    it were constant, and the background comes out as if it had been sampled with that many times
    fewer steps; the error against the dense run is of first order in the interval.
    `outside="extrapolate"` continues each value on the line through the last two recordings, in the
    scheduler's time, the argument named timestep or sigma (or `time=`, if another measure of it
    should be the straight one); the error is of second order then, as long as predictions change
    smoothly from recording to recording. It goes no further than the recordings are apart. What
    masked sites read of the rest is held in any case. With a template the values are the
    template's own.

    **`recordings`** may be the next request's `template=`. A call in full after masked ones starts
    from latents that a dense run doesn't have: outside the mask they were integrated as said above,
    inside they saw held neighbours. So by default (`keep="dense"`) only calls up to the first
    masked one count; they are those of a dense run. `keep="all"` is right in two cases.
    With blending every call's latents outside the mask are the template's own, and only what
    inactive sites read of the masked ones differs, as it would with another prompt. Without it,
    recordings after masked calls belong to this policy: a next request with the same mask, noise,
    steps, refresh, first and outside goes through the same background at the same calls, but
    not one with other settings. In either case they are recordings of this request, with its
    prompt: whoever keeps them says in their key what else a request must share.

    **`wide`** is each edit's `EditStep.wide`: by stretch of blocks the sites that see the edit.
    """

    def __init__(
        self,
        mask: Tensor,
        policy: ReusePolicy | None = None,
        template: Mapping[CallKey, StepCache] | None = None,
        wide: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.mask, self.policy = check_mask(mask), policy or ReusePolicy()
        self.wide = dict(wide or {})
        if bool(mask.all()):  # there is no rest that could be read
            self.policy = replace(self.policy, reuse="steps", refresh=1)
        self.template = check_template(template or {})
        self.recordings: dict[CallKey, StepCache] = {}
        self.kinds: dict[CallKey, CallKind] = {}
        self._branches: dict[str, Branch] = {}
        self._asked: dict[CallKey, PendingCall] = {}
        self._edited: int | None = None

    def ask(
        self,
        ordinal: int,
        branch: str,
        inputs: Mapping[str, Any],
        time: float | Times | None = None,
    ) -> AnyStep:
        """The step that this call shall be."""
        known = self._branches.setdefault(branch, Branch())
        self._check_turn(ordinal, branch, known)
        if isinstance(time, (int, float)):
            time = (float(time),)
        times = times_of(inputs, ordinal) if time is None else time
        shape, kept = picture_shape(inputs), self._of_template(ordinal, branch, inputs)
        past = Past(known.base(shape), self._edited)
        kind = self.policy.kind(ordinal, past, kept is not None)
        read = kept if kind is CallKind.TEMPLATE else None
        self._asked[ordinal, branch] = PendingCall(kind, times, shape, read)
        if kind is CallKind.TEMPLATE:
            assert kept is not None, "the policy chose a template that isn't there"
            return EditStep(inputs, self.mask, kept, wide=self.wide)
        if kind is CallKind.EARLIER:
            cache = known.recording(times, self.policy.outside)
            return EditStep(inputs, self.mask, cache, any_step=True, wide=self.wide)
        return RecordStep(inputs) if kind is CallKind.RECORD else DenseStep(inputs)

    def take(self, ordinal: int, branch: str, result: Any) -> Any:
        """The full output of what was asked; a recording among the result is remembered."""
        asked = self._asked.pop((ordinal, branch), None)
        if asked is None:
            raise InputError(
                f"EditSession.take({ordinal}, {branch!r}): no such call is out; ask() for it, run "
                "its step, and take each result once"
            )
        output, cache = result, asked.template
        if asked.kind is CallKind.RECORD:
            output, cache = recorded(result, ordinal, branch)
            if self.policy.keeps(ordinal, self._edited):
                self.recordings[ordinal, branch] = cache
        if asked.kind is not CallKind.EARLIER:
            outputs = cache.output if cache is not None else self._outputs(ordinal, output)
            known = KnownCall(ordinal, asked.times, asked.shape, outputs, cache)
            self._branches[branch].learn(known)
        if asked.kind in (CallKind.TEMPLATE, CallKind.EARLIER):
            self._edited = ordinal if self._edited is None else min(ordinal, self._edited)
        self.kinds[ordinal, branch] = asked.kind
        self._branches[branch].taken = ordinal
        return output

    def _check_turn(self, ordinal: int, branch: str, known: Branch) -> None:
        calls = self.policy.calls
        if calls is not None and ordinal >= calls:
            raise InputError(
                f"EditSession: call {ordinal} of branch {branch!r}, but ReusePolicy.calls={calls}; "
                "it counts calls, not steps: pass len(scheduler.timesteps)"
            )
        if ordinal <= known.taken:
            raise InputError(
                f"EditSession: call {ordinal} of branch {branch!r} after call {known.taken}; a "
                "session serves one request: number its calls upwards, and make a new session for "
                "the next one, with template=session.recordings if it may have them"
            )

    def _of_template(
        self, ordinal: int, branch: str, inputs: Mapping[str, Any]
    ) -> StepCache | None:
        """The template's recording; "auto" passes over one of another timestep."""
        kept = self.template.get((ordinal, branch))
        if kept is None or self.policy.reuse == "auto" and not same_step(kept, inputs):
            return None
        return kept

    def _outputs(self, ordinal: int, output: Any) -> list[Any]:
        """A dense call's outputs, if the next ones may be extrapolated from them."""
        wanted = self.policy.outside == "extrapolate" and ordinal < self.policy.first
        return [copy_of(leaf) for leaf in pytree.tree_leaves(output)] if wanted else []


# Extrapolation.


def reaches(before: Times, last: Times, now: Times) -> list[float]:
    """How far beyond the later of two times, in distances between them; 0 where they are one."""
    return [
        max(-1.0, min(FURTHEST, (n - b) / (b - a))) if a != b else 0.0
        for a, b, n in zip(*spread([before, last, now]), strict=True)
    ]


def spread(times: Sequence[Times]) -> list[Times]:
    """Each with as many as the longest has: one time for all stands for each of a batch."""
    count = max(map(len, times))
    return [t * count if len(t) == 1 else t for t in times]


def extrapolated(before: Sequence[Any], last: Sequence[Any], reach: Sequence[float]) -> list[Any]:
    """Outputs on the line through two; held where those don't match."""
    if len(before) != len(last):
        return list(last)
    weights = [[-r, 1 + r] for r in reach]
    return [weighted(pair, weights) for pair in zip(before, last, strict=True)]


def weighted(values: Sequence[Any], weights: Sequence[Sequence[float]]) -> Any:
    """A sum over alike tensors, each element of the batch with weights of its own.

    The last value alone, where they aren't alike, or no numbers.
    """
    last = values[-1]
    if not all(isinstance(v, Tensor) and v.shape == last.shape for v in values):
        return last
    same = len(set(map(tuple, weights))) == 1
    if not last.is_floating_point() or not same and last.shape[0] != len(weights):
        return last
    kind = wide(last.dtype)
    columns: Iterable[Any] = weights[0]
    if not same:
        table = numbers(weights, kind, last.device)
        columns = table.view(*table.shape, *[1] * (last.dim() - 1)).unbind(1)
    total, *terms = (c * v.to(kind) for c, v in zip(columns, values, strict=True))
    for term in terms:
        total += term
    return total.to(last.dtype)


# What the inputs say.


def is_time(name: str, value: Any) -> bool:
    if "timestep" not in name and name not in ("t", "sigma"):
        return False
    if isinstance(value, Tensor):
        return value.dim() <= 1 and value.numel() > 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def times_of(inputs: Mapping[str, Any], ordinal: int) -> Times:
    """The scheduler's time; the number of the call if the denoiser isn't told any."""
    for name, value in inputs.items():
        if is_time(name, value):
            return tuple(torch.as_tensor(value).double().reshape(-1).tolist())
    return (float(ordinal),)


def picture_shape(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """A call of another shape (guidance that ends halfway) can't read this one's recording."""
    found = (v for v in inputs.values() if isinstance(v, Tensor) and v.dim() >= 3)
    return tuple(next(found, torch.empty(0)).shape)


def same_step(cache: StepCache, inputs: Mapping[str, Any]) -> bool:
    """Was it recorded at the timestep that the inputs have?"""
    for name, recorded_at in cache.step.items():
        value = inputs.get(name)
        if value is None or not is_time(name, value):
            continue
        now = torch.as_tensor(value).to(recorded_at).reshape(-1)
        if len(now) not in (1, recorded_at.numel()) or bool((now != recorded_at).any()):
            return False
    return True


# Checks.


def check_mask(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        seen = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(
            f"EditSession: mask: expected a boolean tensor, (height, width) of the latent or "
            f"(tokens,), got {seen}; use mask > 0.5"
        )
    return mask


def check_template(template: Any) -> dict[CallKey, StepCache]:
    advice = "pass another session's .recordings, or {(ordinal, branch): cache of record()}"
    if not isinstance(template, Mapping):
        raise CacheError(
            f"EditSession: template: expected a mapping, got {type(template).__name__}; {advice}"
        )
    for key, cache in template.items():
        number = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int)
        if not number or not isinstance(cache, StepCache):
            raise CacheError(
                f"EditSession: template: {key!r} -> {type(cache).__name__}; expected "
                f"(ordinal, branch) -> StepCache; {advice}"
            )
    return dict(template)


def recorded(result: Any, ordinal: int, branch: str) -> tuple[Any, StepCache]:
    """The output and the recording that a RecordStep gives."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], StepCache):
        return result[0], result[1]
    raise InputError(
        f"EditSession.take({ordinal}, {branch!r}): this call records, so its result is a pair of "
        f"output and StepCache, got {type(result).__name__}; pass what step() gave for ask()'s step"
    )
