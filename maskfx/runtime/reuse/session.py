"""EditSession: one request's edit over all its denoiser calls, with or without a template.

Holds the outputs and recordings that one request may reuse. `policy.py` decides the kind of each
call; the caller runs the steps and batches them.
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

# Limit of extrapolation, in distances between the two recordings. Only calls before the third
# recording would exceed it, from two adjacent recordings, where non-smooth parts grow most.
FURTHEST = 1.0


@dataclass(frozen=True)
class KnownCall:
    """A call whose full output is known; `cache` is its recording, if any."""

    ordinal: int
    times: Times
    shape: tuple[int, ...]
    outputs: list[object]
    cache: StepCache | None = None


@dataclass(frozen=True)
class PendingCall:
    """A call returned by `ask` whose result hasn't been passed to `take` yet."""

    kind: CallKind
    times: Times
    shape: tuple[int, ...]
    template: StepCache | None


@dataclass
class Branch:
    """State of one guidance branch: the last fully known call and the one before it."""

    last: KnownCall | None = None
    before: KnownCall | None = None
    taken: int = -1

    def learn(self, known: KnownCall) -> None:
        """Store a known call; schedulers repeat timesteps, so only a different time moves `before`.

        Two calls at one time don't define a line.
        """
        if self.last is not None and self.last.times != known.times:
            self.before = replace(self.last, cache=None)
        self.last = known

    def base(self, shape: tuple[int, ...]) -> int | None:
        """Return the call whose recording a call of this shape may read, or None."""
        fits = self.last is not None and self.last.cache is not None and self.last.shape == shape
        return self.last.ordinal if fits and self.last is not None else None

    def recording(self, times: Times, outside: str) -> StepCache:
        """Return the last recording, with the outputs of inactive sites held or extrapolated."""
        assert self.last is not None, "an edit of an earlier call before any call"
        assert self.last.cache is not None, "an edit of a call that wasn't recorded"
        before = self.before
        if outside == "hold" or before is None or before.shape != self.last.shape:
            return self.last.cache
        reach = reaches(before.times, self.last.times, times)
        outputs = extrapolated(before.outputs, self.last.outputs, reach)
        return replace(self.last.cache, output=outputs)


class EditSession:
    """Plans one request's denoiser calls as steps and keeps the results that it reuses.

        session = maskfx.EditSession(mask, maskfx.ReusePolicy(refresh=4))
        for ordinal, t in enumerate(scheduler.timesteps):
            step = session.ask(ordinal, "cond", inputs)      # may share a step with other sessions'
            [result] = denoiser.step([step])
            output = session.take(ordinal, "cond", result)   # of the module's full shape

    `ordinal` is the pipeline's index of the call, from 0, and `branch` distinguishes calls of one
    ordinal (conditional, unconditional); one call for both, as a batch of two, is one branch.
    Results are keyed by these two, since schedulers repeat timesteps (Heun, PNDM). Between two
    recordings the masked sites are computed at each call; keys, values, halos and statistics of
    the other sites are read from the recording. A session's results don't depend on the other
    members of a batch.

    **Outside the mask** an edit of an earlier call computes no prediction. Where the pipeline
    restores the template's latents after every step (`blending`), this has no effect. Elsewhere
    the scheduler integrates the reused prediction. With `outside="hold"` a prediction is used for
    `refresh` calls as if it were constant, and the background is as if sampled with that many
    times fewer steps; the error against the dense run is of first order in the interval.
    `outside="extrapolate"` continues each value on the line through the last two recordings, in
    the scheduler's time: the argument named timestep or sigma, or `time=` if predictions are
    closer to linear in another measure. The error is then of second order, as long as predictions
    change smoothly from recording to recording. Extrapolation reaches no further than the distance
    between the recordings. What masked sites read of other sites is always held. With a template
    the values are the template's.

    **`recordings`** may be the next request's `template=`. A full call after masked ones starts
    from latents that a dense run doesn't have: outside the mask they were integrated from held or
    extrapolated predictions, inside they saw held neighbours. So by default (`keep="dense"`) only
    calls up to the first masked one are kept; they equal those of a dense run. `keep="all"` is
    right in two cases. With blending, every call's latents outside the mask are the template's,
    and only what inactive sites read of masked ones differs, as it would with another prompt.
    Without blending, recordings after masked calls are valid for this policy only: a next request
    with the same mask, noise, steps, refresh, first and outside has the same background at the
    same calls, but not one with other settings. In either case they are recordings of this
    request, with its prompt: a cache of them needs all other conditions in its key.

    **`wide`** is each edit's `EditStep.wide`: the sites that see the edit, by stretch of blocks
    (a run of consecutive blocks, numbered by `CompiledDenoiser.stretches`).
    """

    def __init__(
        self,
        mask: Tensor,
        policy: ReusePolicy | None = None,
        template: Mapping[CallKey, StepCache] | None = None,
        wide: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.mask = check_mask(mask)
        self.policy: ReusePolicy = policy or ReusePolicy()
        self.wide = dict(wide or {})
        if bool(mask.all()):  # no inactive sites to read from a recording
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
        inputs: Mapping[str, object],
        time: float | Times | None = None,
    ) -> AnyStep:
        """Return the step to run for this call; pass its result to `take`.

        Args:
            ordinal: index of the call; must increase within a branch.
            branch: guidance branch of the call.
            inputs: the denoiser's arguments.
            time: the scheduler's time, for extrapolation; defaults to the timestep or sigma among
                `inputs`.
        """
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

    def take(self, ordinal: int, branch: str, result: object) -> Any:
        """Return the full output of a call from its step's result; store a recording in it."""
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
        self, ordinal: int, branch: str, inputs: Mapping[str, object]
    ) -> StepCache | None:
        """Return the template's recording; "auto" ignores one of another timestep."""
        kept = self.template.get((ordinal, branch))
        if kept is None or self.policy.reuse == "auto" and not same_step(kept, inputs):
            return None
        return kept

    def _outputs(self, ordinal: int, output: object) -> list[object]:
        """Return copies of a dense call's outputs if later calls may be extrapolated from them."""
        wanted = self.policy.outside == "extrapolate" and ordinal < self.policy.first
        return [copy_of(leaf) for leaf in pytree.tree_leaves(output)] if wanted else []


# Extrapolation.


def reaches(before: Times, last: Times, now: Times) -> list[float]:
    """Return how far `now` lies beyond `last`, in distances from `before`; 0 if these are equal.

    Clamped to [-1, `FURTHEST`].
    """
    return [
        max(-1.0, min(FURTHEST, (n - b) / (b - a))) if a != b else 0.0
        for a, b, n in zip(*spread([before, last, now]), strict=True)
    ]


def spread(times: Sequence[Times]) -> list[Times]:
    """Broadcast to the longest: a single time stands for each element of a batch."""
    count = max(map(len, times))
    return [t * count if len(t) == 1 else t for t in times]


def extrapolated(
    before: Sequence[object], last: Sequence[object], reach: Sequence[float]
) -> list[object]:
    """Extrapolate outputs on the line through two; repeat the last where they don't match."""
    if len(before) != len(last):
        return list(last)
    weights = [[-r, 1 + r] for r in reach]
    return [weighted(pair, weights) for pair in zip(before, last, strict=True)]


def weighted(values: Sequence[Any], weights: Sequence[Sequence[float]]) -> Any:
    """Return the weighted sum of tensors of one shape, with weights per element of the batch.

    Return the last value if shapes differ or values aren't floating-point tensors.
    """
    last = values[-1]
    if not all(isinstance(v, Tensor) and v.shape == last.shape for v in values):
        return last
    same = len(set(map(tuple, weights))) == 1
    if not last.is_floating_point() or not same and last.shape[0] != len(weights):
        return last
    kind = wide(last.dtype)
    columns: Iterable[Tensor | float] = weights[0]
    if not same:
        table = numbers(weights, kind, last.device)
        columns = table.view(*table.shape, *[1] * (last.dim() - 1)).unbind(1)
    total, *terms = (c * v.to(kind) for c, v in zip(columns, values, strict=True))
    for term in terms:
        total += term
    return total.to(last.dtype)


# Inputs.


def is_time(name: str, value: object) -> bool:
    if "timestep" not in name and name not in ("t", "sigma"):
        return False
    if isinstance(value, Tensor):
        return value.dim() <= 1 and value.numel() > 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def times_of(inputs: Mapping[str, object], ordinal: int) -> Times:
    """Return the scheduler's time; the call's index if the inputs have no timestep or sigma."""
    for name, value in inputs.items():
        if is_time(name, value):
            return tuple(torch.as_tensor(value).double().reshape(-1).tolist())
    return (float(ordinal),)


def picture_shape(inputs: Mapping[str, object]) -> tuple[int, ...]:
    """Return the shape of the first tensor of three or more dimensions.

    A call of another shape (guidance that ends mid-run) can't read this one's recording.
    """
    found = (v for v in inputs.values() if isinstance(v, Tensor) and v.dim() >= 3)
    return tuple(next(found, torch.empty(0)).shape)


def same_step(cache: StepCache, inputs: Mapping[str, object]) -> bool:
    """Whether the recording was made at the timestep of the inputs."""
    for name, recorded_at in cache.step.items():
        value = inputs.get(name)
        if value is None or not is_time(name, value):
            continue
        now = torch.as_tensor(value).to(recorded_at).reshape(-1)
        if len(now) not in (1, recorded_at.numel()) or bool((now != recorded_at).any()):
            return False
    return True


# Checks.


def check_mask(mask: object) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        seen = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(
            f"EditSession: mask: expected a boolean tensor, (height, width) of the latent or "
            f"(tokens,), got {seen}; use mask > 0.5"
        )
    return mask


def check_template(template: object) -> dict[CallKey, StepCache]:
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


def recorded(result: object, ordinal: int, branch: str) -> tuple[object, StepCache]:
    """Split the result of a `RecordStep` into output and recording."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], StepCache):
        return result[0], result[1]
    raise InputError(
        f"EditSession.take({ordinal}, {branch!r}): this call records, so its result is a pair of "
        f"output and StepCache, got {type(result).__name__}; pass what step() gave for ask()'s step"
    )
