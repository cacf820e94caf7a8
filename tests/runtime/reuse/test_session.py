"""Edit sessions in real sampling loops: against the dense run, alone and among others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx import EditSession, ReusePolicy, StepCache
from maskfx.runtime.cache.rows import whole
from maskfx.runtime.reuse.policy import CallKind
from tests.factories import masks
from tests.factories.loops import FLUX, UNET, a_scheduler, flux_loop, smooth, together, unet_loop
from tests.factories.zoo import ZOO, Size
from tests.runtime.test_oracle import relative_error

TOKENS, GRID = Size(1, 6, 4, 7), Size(1, 8, 8, 7)
STEPS = 12
ROUNDING = 1e-4


def flux_mask(size: Size = TOKENS, seed: int = 0) -> Tensor:
    return masks.square((size.height * size.width,), seed)


def flux_run(policy: ReusePolicy | None, blend: bool = False) -> Tensor:
    """The final latents of one request; dense without a policy."""
    mask = flux_mask()
    session = EditSession(mask, policy) if policy else None
    loop = flux_loop(TOKENS, STEPS, session, blend=mask if blend else None)
    return together(smooth(FLUX), loop)[0]


def unet_run(
    scheduler: str = "DDIM", session: EditSession | None = None, steps: int = 8, **how: Any
) -> Tensor:
    loop = unet_loop(GRID, a_scheduler(scheduler, steps), session, **how)
    return together(smooth(UNET), loop)[0]


def unet_session(policy: ReusePolicy, template: Any = None) -> EditSession:
    return EditSession(masks.square((8, 8), 0), policy, template)


def letters(session: EditSession, branch: str = "cond") -> str:
    return "".join(k.value[0] for (_, b), k in session.kinds.items() if b == branch)


# Against the dense run.


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("keep", ["none", "dense"])
def test_flux_without_reuse_is_the_dense_run(keep: str, blend: bool) -> None:
    got = flux_run(ReusePolicy("steps", refresh=1, keep=keep), blend)
    assert torch.equal(got, flux_run(None, blend))


@pytest.mark.parametrize(
    "scheduler",
    ["HeunDiscrete", *(pytest.param(n, marks=pytest.mark.slow) for n in ("DDIM", "PNDM"))],
)
def test_a_unet_without_reuse_is_the_dense_run(scheduler: str) -> None:
    session = unet_session(ReusePolicy("steps", refresh=1))
    assert torch.equal(unet_run(scheduler, session), unet_run(scheduler))
    assert len(session.recordings) == len(a_scheduler(scheduler, 8).timesteps)


@pytest.mark.parametrize("outside", ["hold", "extrapolate"])
def test_a_shorter_interval_is_nearer_to_the_dense_run(outside: str) -> None:
    mask, dense = flux_mask(), flux_run(None)
    runs = [flux_run(ReusePolicy("steps", r, outside=outside)) for r in (1, 2, 4, 8)]
    for place in (mask, ~mask):
        errors = [relative_error(got[:, place], dense[:, place]) for got in runs]
        assert errors[0] == 0
        assert errors == sorted(errors)
        assert 1e-4 < errors[1] < errors[2] / 1.3 < errors[3] / 1.3**2
        assert errors[3] < 0.5


def test_a_blended_background_is_exact_and_the_inside_near() -> None:
    mask, dense = flux_mask(), flux_run(None, blend=True)
    runs = [flux_run(ReusePolicy("steps", r), blend=True) for r in (2, 4, 8)]
    assert all(torch.equal(got[:, ~mask], dense[:, ~mask]) for got in runs)
    errors = [relative_error(got[:, mask], dense[:, mask]) for got in runs]
    assert 1e-4 < errors[0] < errors[1] < errors[2] < 0.5


@pytest.mark.parametrize(("refresh", "times"), [(2, 2.5), (4, 1.5)])
def test_extrapolating_is_nearer_to_the_dense_run_than_holding(refresh: int, times: float) -> None:
    mask, dense = flux_mask(), flux_run(None)
    errors = {}
    for outside in ("hold", "extrapolate"):
        got = flux_run(ReusePolicy("steps", refresh, outside=outside))
        errors[outside] = relative_error(got[:, ~mask], dense[:, ~mask])
    assert errors["extrapolate"] < errors["hold"] / times


def test_a_held_background_is_sampled_with_longer_steps() -> None:
    """Euler with a held velocity is one long step."""
    mask, noise = flux_mask(), ZOO[FLUX].inputs(TOKENS, 0)["hidden_states"]
    session = EditSession(mask, ReusePolicy("steps", 4, first=1, outside="hold", keep="all"))
    got = together(smooth(FLUX), flux_loop(TOKENS, STEPS, session))[0]
    assert [o for o, _ in session.recordings] == [0, 4, 8]
    velocities = [c.output[0] for c in session.recordings.values()]
    wanted = noise - sum(velocities) * 4 / STEPS
    assert relative_error(got[:, ~mask], wanted[:, ~mask]) < 1e-6


def test_the_last_call_in_full() -> None:
    policy = ReusePolicy("steps", 4, last=1, calls=STEPS)
    session = EditSession(flux_mask(), policy)
    together(smooth(FLUX), flux_loop(TOKENS, STEPS, session))
    assert letters(session, "") == "rreeereeered"


# What shares a step, and in which form.


def test_a_session_is_the_same_alone_and_among_others() -> None:
    wide = Size(2, 5, 7, 3)
    requests = [
        (TOKENS, 12, ReusePolicy("steps", 4), 0),
        (wide, 7, ReusePolicy("steps", 2, outside="hold"), 1),
        (TOKENS, 9, ReusePolicy("auto", 3, last=1, calls=9), 2),
        (Size(1, 8, 8, 11), 10, ReusePolicy("steps", 8, first=1), 3),
    ]

    def loops() -> list[Any]:
        return [
            flux_loop(size, steps, EditSession(flux_mask(size, seed), policy), seed)
            for size, steps, policy, seed in requests
        ]

    alone = [together(smooth(FLUX), loop)[0] for loop in loops()]
    for got, wanted in zip(together(smooth(FLUX), *loops()), alone, strict=True):
        assert relative_error(got, wanted) < ROUNDING


@pytest.mark.parametrize("scheduler", ["DDIM", "HeunDiscrete", "PNDM"])
def test_guidance_as_branches_or_as_one_batch_is_the_same(scheduler: str) -> None:
    policy = ReusePolicy("steps", 3)
    results = {}
    for how in ("branches", "batch"):
        session = unet_session(policy)
        results[how] = unet_run(scheduler, session, guidance=how)
        calls = len(a_scheduler(scheduler, 8).timesteps)
        wanted = "".join(p.kind.value[0] for p in policy.schedule(calls))
        assert letters(session) == wanted
        if how == "branches":
            assert letters(session, "uncond") == wanted
    assert relative_error(results["branches"], results["batch"]) < ROUNDING
    assert relative_error(results["batch"], unet_run(scheduler, guidance="batch")) > 1e-3


def test_guidance_that_ends_is_recorded_anew() -> None:
    session = unet_session(ReusePolicy("steps", 4))
    got = unet_run("DDIM", session, guidance="batch", ends=4)
    assert letters(session) == "rreereee"
    wanted = unet_run("DDIM", guidance="batch", ends=4)
    assert relative_error(got, wanted) < 0.5


# Templates.


@pytest.mark.parametrize("scheduler", ["DDIM", "HeunDiscrete", "PNDM"])
@pytest.mark.parametrize("guidance", ["branches", "batch"])
def test_a_recorded_run_is_a_template_by_call_and_branch(scheduler: str, guidance: str) -> None:
    """Repeated timesteps or mixed-up branches would give another picture."""
    cold = unet_session(ReusePolicy("template"))
    dense = unet_run(scheduler, cold, guidance=guidance)
    assert set(letters(cold)) == {"r"}
    for reuse in ("template", "auto"):
        warm = unet_session(ReusePolicy(reuse), cold.recordings)
        got = unet_run(scheduler, warm, guidance=guidance)
        assert set(letters(warm)) == {"t"}
        assert relative_error(got, dense) < ROUNDING


def test_what_is_recorded_before_the_first_edit_is_that_of_a_dense_run() -> None:
    full = unet_session(ReusePolicy("template"))
    unet_run("DDIM", full)
    cold = unet_session(ReusePolicy("auto", 3))
    unet_run("DDIM", cold)
    assert letters(cold) == "rreereer"
    assert list(cold.recordings) == [(0, "cond"), (1, "cond")]
    for key, kept in cold.recordings.items():
        for name, rows in full.recordings[key].rows.items():
            assert torch.equal(whole(kept.rows[name]), whole(rows))


def test_all_recordings_of_a_run_are_a_template_under_its_policy() -> None:
    """Another prompt, the same background at the same calls: nothing is computed in full."""
    policy = ReusePolicy("auto", 4, keep="all")
    mask = flux_mask()
    cold = EditSession(mask, policy)
    first = together(smooth(FLUX), flux_loop(TOKENS, STEPS, cold))[0]
    warm = EditSession(mask, policy, cold.recordings)
    second = together(smooth(FLUX), flux_loop(TOKENS, STEPS, warm))[0]
    assert letters(warm, "") == "tteeeteeetee"
    assert torch.equal(second[:, ~mask], first[:, ~mask])
    assert relative_error(second, first) < ROUNDING
    assert not warm.recordings


def test_a_template_with_gaps_is_filled_by_own_calls() -> None:
    full = unet_session(ReusePolicy("template"))
    unet_run("DDIM", full)
    some = {key: kept for key, kept in full.recordings.items() if key[0] in (0, 5)}
    warm = unet_session(ReusePolicy("auto", 3), some)
    unet_run("DDIM", warm)
    assert letters(warm) == "treertee"


def test_a_template_of_other_timesteps() -> None:
    other = unet_session(ReusePolicy("template"))
    unet_run("DDIM", other, steps=5)
    auto = unet_session(ReusePolicy("auto", 3), other.recordings)
    unet_run("DDIM", auto)
    assert letters(auto) == "rreereer"
    strict = unet_session(ReusePolicy("template"), other.recordings)
    with pytest.raises(maskfx.CacheError, match="timestep=.*use this step's cache"):
        unet_run("DDIM", strict)


# Masks that leave nothing to reuse, or to compute.


def test_a_full_mask_is_the_dense_run() -> None:
    everything = torch.ones(8, 8, dtype=torch.bool)
    session = EditSession(everything, ReusePolicy("steps", 4, keep="none"))
    got = unet_run("DDIM", session)
    assert torch.equal(got, unet_run("DDIM"))
    assert set(session.kinds.values()) == {CallKind.DENSE}


def test_an_empty_mask_costs_only_the_refreshes() -> None:
    session = EditSession(torch.zeros(8, 8, dtype=torch.bool), ReusePolicy("steps", 4))
    got = unet_run("DDIM", session)
    assert letters(session) == "rreeeree"
    assert relative_error(got, unet_run("DDIM")) < 0.1


# Extrapolation, by hand.


def step_at(*times: float) -> dict[str, Any]:
    return {"sample": torch.zeros(len(times), 1, 2, 2), "timestep": torch.tensor(times)}


def by_hand(records: list[tuple[float, ...]], now: tuple[float, ...], **how: Any) -> Tensor:
    """The outputs that inactive sites get at a time, if all outputs are 10 times their time."""
    mask = torch.zeros(2, 2, dtype=torch.bool)
    session = EditSession(mask, ReusePolicy("steps", 9, first=len(records), **how))
    for ordinal, times in enumerate(records):
        session.ask(ordinal, "", step_at(*times))
        output = 10.0 * torch.tensor(times).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
        cache = StepCache("p", {}, torch.float32, [output], {})
        session.take(ordinal, "", (output, cache))
    step = session.ask(len(records), "", step_at(*now))
    assert isinstance(step, maskfx.EditStep)
    assert step.any_step
    assert step.mask is mask
    output = step.cache.output[0]
    assert output.shape == (len(now), 1, 2, 2)
    return output[:, 0, 0, 0] / 10.0


@pytest.mark.parametrize(
    ("records", "now", "wanted"),
    [
        ([(9.0,), (7.0,)], (6.0,), (6.0,)),
        ([(0.9,), (0.8,)], (0.75,), (0.75,)),
        ([(9.0,)], (6.0,), (9.0,)),  # one point is no line
        ([(9.0,), (7.0,)], (2.0,), (5.0,)),  # no further than the two are apart
        ([(9.0,), (7.0,), (7.0,)], (6.0,), (6.0,)),  # Heun: the time before the repeated one
        ([(9.0,), (9.0,)], (8.0,), (9.0,)),
        ([(7.0,), (9.0,)], (8.0,), (8.0,)),  # time goes back between them
        ([(9.0, 5.0), (7.0, 4.0)], (6.0, 3.0), (6.0, 3.0)),  # each element at a time of its own
        ([(9.0, 5.0), (7.0, 5.0)], (6.0, 3.0), (6.0, 5.0)),
    ],
)
def test_extrapolates_in_time(
    records: list[tuple[float, ...]], now: tuple[float, ...], wanted: tuple[float, ...]
) -> None:
    assert torch.allclose(by_hand(records, now, outside="extrapolate"), torch.tensor(wanted))
    held = by_hand(records, now, outside="hold")
    assert torch.allclose(held, torch.tensor(records[-1]))


def test_a_time_of_ones_own() -> None:
    mask = torch.zeros(2, 2, dtype=torch.bool)
    session = EditSession(mask, ReusePolicy("steps", outside="extrapolate"))
    for ordinal, (time, value) in enumerate([(1.0, 5.0), (3.0, 9.0)]):
        session.ask(ordinal, "", step_at(float(ordinal)), time)
        output = torch.full((1, 1, 2, 2), value, dtype=torch.bfloat16)
        cache = StepCache("p", {}, torch.bfloat16, [output, None], {})
        session.take(ordinal, "", (output, cache))
    step = session.ask(2, "", step_at(2.0), 4.0)
    assert isinstance(step, maskfx.EditStep)
    assert torch.equal(step.cache.output[0], torch.full_like(output, 11.0))
    assert step.cache.output[1] is None


# Errors.


@pytest.mark.parametrize(
    ("mask", "seen"), [(torch.ones(8, 8), "float32"), ([True], "list"), (None, "NoneType")]
)
def test_refuses_a_mask_that_is_none(mask: Any, seen: str) -> None:
    with pytest.raises(maskfx.MaskError, match=f"boolean.*{seen}.*mask > 0.5"):
        EditSession(mask)


@pytest.mark.parametrize(
    ("template", "seen"),
    [([1], "list"), ({0: None}, "0 -> NoneType"), ({(0, ""): 1}, r"\(0, ''\) -> int")],
)
def test_refuses_a_template_that_is_none(template: Any, seen: str) -> None:
    mask = torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(maskfx.CacheError, match=f"{seen}.*recordings"):
        EditSession(mask, template=template)


def test_refuses_calls_out_of_turn() -> None:
    session = unet_session(ReusePolicy("steps", refresh=1, calls=2, keep="none"))
    inputs = ZOO[UNET].inputs(GRID, 0)
    with pytest.raises(maskfx.InputError, match=r"take\(0, 'cond'\).*ask\(\)"):
        session.take(0, "cond", None)
    session.ask(0, "cond", inputs)
    session.take(0, "cond", (torch.zeros(1),))
    with pytest.raises(maskfx.InputError, match="call 0 .*after call 0.*a new session"):
        session.ask(0, "cond", inputs)
    with pytest.raises(maskfx.InputError, match=r"call 2 .*calls=2.*len\(scheduler.timesteps\)"):
        session.ask(2, "cond", inputs)
    session.ask(1, "cond", inputs)  # asked again, say after a failure: the same step
    assert isinstance(session.ask(1, "cond", inputs), maskfx.DenseStep)


def test_refuses_another_step_s_result() -> None:
    session = unet_session(ReusePolicy("steps"))
    session.ask(0, "", ZOO[UNET].inputs(GRID, 0))
    with pytest.raises(maskfx.InputError, match="pair of output and StepCache, got Tensor"):
        session.take(0, "", torch.zeros(1))
