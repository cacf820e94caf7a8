"""Patches: what each stretch computes at the next step, and that results stay right."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.errors import InputError
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.reuse.judges import Bools, PatchFeatures, TableJudge, Threshold, cascade
from maskfx.runtime.reuse.kept_outputs import KeptOutputs
from maskfx.runtime.reuse.patch_session import PatchSession
from maskfx.runtime.reuse.patches import PatchDecision, PatchReuse, PatchState, decide_together
from maskfx.runtime.sites.patches import PatchGrid
from maskfx.runtime.steps import AnyStep, EditStep
from tests.factories.pools import poison
from tests.factories.zoo import ZOO
from tests.passes.test_cut_stretches import Layers, layer_inputs
from tests.passes.tools import error
from tests.runtime.test_oracle import assert_near, module_of, tensors
from tests.runtime.test_stretches import NAMES, denoiser_of

BYTES, SIDE = 1 << 30, 2
FLUX, *OTHERS = NAMES
FAMILIES = [FLUX, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
EACH = PatchReuse(age=99, sets="each")


class Chosen:
    """A judge that a test decides for; counts what it is asked."""

    keeps_nothing = False

    def __init__(self, choose: Callable[[PatchFeatures], Bools]) -> None:
        self.choose, self.seen = choose, list[PatchFeatures]()

    def refusal(self, stretches: int) -> str:
        return ""

    def computes(self, features: PatchFeatures) -> Bools:
        self.seen.append(features)
        return self.choose(features)


def always(features: PatchFeatures) -> Bools:
    return np.ones(features.change.shape, bool)


def never(features: PatchFeatures) -> Bools:
    return np.zeros(features.change.shape, bool)


def by_chance(seed: int) -> Callable[[PatchFeatures], Bools]:
    draw = np.random.default_rng(seed)
    return lambda features: np.asarray(draw.random(features.change.shape) < 0.5)


def walk(name: str, index: int, seed: int) -> Iterator[dict[str, Any]]:
    """Inputs of steps whose latents move, faster at one side of the picture."""
    case = ZOO[name]
    inputs = case.inputs(case.sizes[index % len(case.sizes)], seed)
    picture = next(k for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() >= 3)
    draw, latents = torch.Generator().manual_seed(seed), inputs[picture]
    along = torch.linspace(0, 0.3, latents.shape[-1 if latents.dim() > 3 else 1])
    speed = along if latents.dim() > 3 else along[:, None]
    while True:
        latents = latents + speed * torch.randn(latents.shape, generator=draw)
        yield {**inputs, picture: latents}


class Run:
    """One request: its session and its inputs, step after step."""

    def __init__(
        self, name: str, pool: RollingPool, index: int = 0, seed: int = 0, **settings: Any
    ) -> None:
        self.name, self.denoiser = name, denoiser_of(name)
        self.inputs = walk(name, index, seed)
        case = ZOO[name]
        shape = case.mask_shape(case.sizes[index % len(case.sizes)])
        usual = {"first": 2, "last": 0, "side": SIDE, "outputs": "hold", "sets": "each"}
        own = PatchReuse(**{**usual, **settings})
        self.session = PatchSession(self.denoiser, pool, own, PatchGrid(shape, SIDE))
        self.number = 0

    def ask(self) -> AnyStep:
        self.asked = next(self.inputs)
        return self.session.ask(self.number, "", self.asked, (100.0 - self.number,))

    def take(self, result: Any) -> Any:
        self.number += 1
        return self.session.take(self.number - 1, "", result)

    def step(self) -> Any:
        return self.take(self.denoiser.step([self.ask()])[0])

    @property
    def state(self) -> PatchState:
        found = self.session._branches[""].state
        assert found is not None
        return found

    def dense(self) -> Any:
        return module_of(self.name)(**self.asked)


# Patches.


def test_patches_are_squares_with_ragged_edges() -> None:
    grid = PatchGrid((5, 7), 3)
    assert grid.count == 6
    assert grid.ids.reshape(5, 7)[4].tolist() == [3, 3, 3, 4, 4, 4, 5]
    assert grid.sizes.tolist() == [9, 9, 3, 6, 6, 2]
    assert grid.at((3, 4)).reshape(3, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [3, 3, 4, 4]]
    mask = grid.mask(np.arange(6) == 4)
    assert mask.nonzero().tolist() == [[y, x] for y in (3, 4) for x in (3, 4, 5)]
    assert grid.touched(mask).tolist() == [False] * 4 + [True, False]


def test_packed_tokens_form_squares_where_their_grid_is_known() -> None:
    grid = PatchGrid((20,), 2, (3, 4), 5)
    assert grid.ids.tolist() == [4] * 5 + [0, 0, 1, 1] * 2 + [2, 2, 3, 3] + [4] * 3
    assert PatchGrid((10,), 2).ids.tolist() == [0] * 4 + [1] * 4 + [2] * 2
    with pytest.raises(InputError, match="from token 9 on doesn't fit"):
        PatchGrid((20,), 2, (3, 4), 9)


# Decisions.


def test_no_patch_is_kept_for_more_steps_than_the_greatest_age() -> None:
    """Whatever the judge decides, and whatever the steps report."""
    draw, most = np.random.default_rng(0), 0
    for greatest in (1, 2, 5):
        state = PatchState(4, 9, reported={2, 3, 4})
        kept = np.zeros((4, 9), int)
        judge = Chosen(lambda features: draw.random(features.change.shape) < 0.1)
        for call in range(60):
            settings = PatchReuse(age=greatest, sets=("each", "alike")[call % 2])
            computed = state.decide(settings, judge, draw.random(9), 0.5, call)
            kept = np.where(computed, 0, kept + 1)
            assert kept.max() <= greatest
            most = max(most, kept.max())
            state.advance(computed, draw.random((4, 9)))
        assert most == greatest


def test_changes_add_up_until_a_stretch_computes_and_are_predicted_by_their_rate() -> None:
    state, seen = PatchState(2, 1, reported={2}), Chosen(never)
    state.advance(np.ones((2, 1), bool), np.array([[0.0], [0.2]]))
    state.decide(EACH, seen, np.array([0.5]), 1.0, 0)
    moving, resting = (f.change[:, 0].tolist() for f in seen.seen)
    assert moving == [0.5, pytest.approx(0.2)]  # as fast as it was
    assert resting == [0.5, 0.0]  # its input is what it was
    state.advance(np.array([[True], [False]]), np.array([[0.0], [0.3]]))
    seen.seen.clear()
    state.decide(EACH, seen, np.array([0.5]), 1.0, 1)
    moving, resting = (f.change[:, 0].tolist() for f in seen.seen)
    assert (moving[1], resting[1]) == (pytest.approx(0.6), pytest.approx(0.3))
    assert state.age[:, 0].tolist() == [1, 2]


def test_a_stretch_follows_the_one_before_it() -> None:
    moving, resting = np.ones((3, 2), bool), np.zeros((3, 2), bool)
    moving[0] = resting[0] = [True, False]
    forced = np.array([[False, False], [False, False], [False, True]])
    found = cascade(moving, resting, forced, [None, 0, 1])
    assert found.tolist() == [[True, False], [True, False], [True, True]]
    state = PatchState(3, 2, reported={2})  # of the third stretch nothing is reported
    state.advance(np.ones((3, 2), bool), np.zeros((3, 2)))
    computed = state.decide(EACH, Threshold(0.1), np.array([0.0, 0.5]), 1.0, 0)
    assert computed.tolist() == [[False, True], [False, False], [False, False]]
    computed = state.decide(PatchReuse(age=99), Threshold(0.1), np.array([0.0, 0.5]), 1.0, 0)
    assert computed.tolist() == [[False, True]] * 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"threshold": -1.0}, "0 or more"),
        ({"side": 0}, "1 or more"),
        ({"outputs": "guess"}, "choose one of hold, extrapolate"),
        ({"judge": "/no/such/file.npz"}, "maskfx train-judge"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        PatchReuse(**wrong)


# Outputs of kept patches.


def test_kept_patches_continue_their_last_outputs_each_from_its_own_calls() -> None:
    cells = PatchGrid((2, 4), 2)
    kept = KeptOutputs(cells.ids, cells.shape, cells.count)
    line = [torch.full((1, 3, 2, 4), float(call)) for call in range(6)]
    both, left = np.array([True, True]), np.array([True, False])
    kept.learn(0, [line[0]], both)
    assert torch.equal(kept.at(1, [line[0]], both)[0], line[0])  # one answer is repeated
    kept.learn(1, [line[1]], both)
    kept.learn(2, [torch.where(cells.mask(left), line[2], line[1])], left)
    held = line[1].clone()
    [found] = kept.at(3, [held], both)
    assert torch.allclose(found, line[3], atol=1e-5)
    [found] = kept.at(3, [held], left)
    assert torch.equal(found[..., 2:], held[..., 2:])  # the others are as given
    assert torch.allclose(found[..., :2], line[3][..., :2], atol=1e-5)


def test_a_mask_may_cover_the_last_patches_entirely() -> None:
    case = ZOO[FLUX]
    (tokens,) = case.mask_shape(case.sizes[0])
    mask = torch.arange(tokens) >= tokens // 2
    session = PatchSession(
        denoiser_of(FLUX),
        RollingPool(BYTES),
        PatchReuse(first=2, last=0, judge=Chosen(by_chance(0))),
        PatchGrid((tokens,), SIDE),
        mask,
    )
    for number, inputs in zip(range(5), walk(FLUX, 0, 0), strict=False):
        step = session.ask(number, "", inputs, (100.0 - number,))
        [result] = denoiser_of(FLUX).step([step])
        session.take(number, "", result)
    assert 0 < session.counts.share < 1


def test_decisions_made_together_are_those_of_each_request() -> None:
    """With other judges, settings and numbers of patches; equal judges are asked once."""
    draw = np.random.default_rng(3)
    threshold, asked = Threshold(0.4), list[int]()
    table = TableJudge(draw.random((4, 3, 2, 8)) < 0.5, {})
    decisions = []
    for number in range(8):
        stretches, patches = (4, 3)[number == 5], 6 + number
        reported = range(2, stretches + 1) if number % 3 else (2,)
        state = PatchState(stretches, patches, reported)
        for _ in range(3):
            changes = draw.random((stretches, patches)).astype(np.float32)
            state.advance(draw.random((stretches, patches)) < 0.5, changes)
        settings = PatchReuse(age=(2, 9)[number % 2], sets=("alike", "each")[number % 2])
        judge = table if number in (0, 3, 7) else threshold
        inputs = draw.random(patches).astype(np.float32)
        decisions.append(PatchDecision(state, settings, judge, inputs, 0.1 * number, number))
    wanted = [
        one.state.decide(one.settings, one.judge, one.inputs, one.noise, one.call)
        for one in decisions
    ]
    together = decide_together(decisions)
    for found, expected in zip(together, wanted, strict=True):
        assert np.array_equal(found, expected)
    assert any(not found.all() for found in together)
    assert decide_together([]) == []

    class Counted(Threshold):
        def computes(self, features: PatchFeatures) -> Bools:
            asked.append(features.change.shape[1])
            return super().computes(features)

    same = Counted(0.4)
    decide_together([replace(one, judge=same) for one in decisions[:4]])
    assert asked == [2 * sum(one.state.patches for one in decisions[:4])]


def test_frames_have_patches_of_their_own() -> None:
    grid = PatchGrid((3, 4, 6), 2)
    assert grid.count == 18
    assert grid.ids.reshape(3, 4, 6)[:, 3, 5].tolist() == [5, 11, 17]
    assert grid.at((2, 3)).tolist() == list(range(18))
    assert grid.owners((1, 1)).tolist() == [0] * 6 + [6] * 6 + [12] * 6
    mask = torch.zeros(3, 4, 6, dtype=torch.bool)
    mask[1, 0, 0] = True
    assert np.flatnonzero(grid.touched(mask)).tolist() == [6]


# Runs.


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_that_computes_everything_equals_the_dense_one(name: str) -> None:
    pool = RollingPool(BYTES)
    run = Run(name, pool, judge=Chosen(always))
    for _ in range(5):
        assert_near(run.step(), run.dense())
    assert run.session.counts.share == 1
    zero = Run(name, pool, threshold=0.0)
    for _ in range(3):
        assert not isinstance(zero.ask(), EditStep)
        assert torch.equal(tensors(zero.take(zero.dense()))[0], tensors(zero.dense())[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_that_keeps_everything_returns_the_last_answer(name: str) -> None:
    run = Run(name, RollingPool(BYTES), age=99, judge=Chosen(never))
    for _ in range(2):
        last = tensors(run.step())
    for _ in range(3):
        for one, other in zip(tensors(run.step()), last, strict=True):
            assert torch.equal(one, other)
    assert error(tensors(run.dense())[0], last[0]) > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_members_of_a_batch_get_what_they_get_alone(name: str) -> None:
    """Other sizes, other steps, other sets; a recording and a dense step beside them."""
    pool, denoiser = RollingPool(BYTES), denoiser_of(name)

    def run(index: int) -> Run:
        return Run(name, pool, index, index, judge=Chosen(by_chance(index)))

    alone, together = [run(i) for i in range(3)], [run(i) for i in range(3)]
    for one in (*alone[:1], *together[:1]):  # the first one is ahead
        one.step()
    for _ in range(4):
        wanted = [one.step() for one in alone]
        results = denoiser.step([one.ask() for one in together])
        for one, result, expected in zip(together, results, wanted, strict=True):
            assert_near(one.take(result), expected)
    for one, other in zip(alone, together, strict=True):
        assert np.allclose(one.state.since, other.state.since, rtol=1e-3, atol=1e-5)
        assert np.array_equal(one.state.age, other.state.age)


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_changes_are_those_of_the_rows_between_stretches(name: str) -> None:
    """After steps that compute everything: from recordings of the same steps."""
    run = Run(name, RollingPool(BYTES), judge=Chosen(always))
    recordings = []
    for _ in range(3):
        run.step()
        recordings.append(run.denoiser.record(**run.asked)[1])
    cache = run.session._branches[""].cache
    assert cache is not None
    assert cache.changes is not None
    taps = cache.changes.boundaries
    assert set(taps.values()) == {0, *range(2, len(run.denoiser.stretches) + 1)}
    for stretch in range(2, len(run.denoiser.stretches) + 1):
        change = size = torch.zeros(run.session.grid.count, dtype=torch.float64)
        for tap in (tap for tap, reader in taps.items() if reader == stretch):
            before, now = (kept.rows[tap].double().flatten(2) for kept in recordings[1:])  # type: ignore[union-attr]
            sites = now.shape[1]
            ids = torch.from_numpy(run.session.grid.ids)
            if sites != len(ids):
                side = int(sites**0.5)
                ids = torch.from_numpy(run.session.grid.at((side, side)))
            change = change.index_add(0, ids, (now - before).abs().mean(2).sum(0))
            size = size.index_add(0, ids, before.abs().mean(2).sum(0))
        wanted = (change / size).numpy()
        assert np.allclose(run.state.rate[stretch - 1], wanted, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES[:2])
@pytest.mark.parametrize("order", ["step", "stretch"])
def test_requests_that_join_and_leave_at_every_step_get_what_they_get_alone(
    name: str, order: str
) -> None:
    """Freed rows become NaN, so a result that read one would show it; no bytes are left over."""
    pool, denoiser = RollingPool(BYTES, requests=2), denoiser_of(name)
    running: list[tuple[Run, Run]] = []  # each request in the batch, and by itself in its own pool
    most = poisoned = 0
    for step in range(12):
        settings = {"order": order, "outputs": ("hold", "extrapolate")[step % 2]}
        both = [
            Run(name, held, step, step, judge=Chosen(by_chance(step)), **settings)
            for held in (pool, RollingPool(BYTES, requests=1))
        ]
        running.append((both[0], both[1]))
        results = denoiser.step([run.ask() for run, _ in running])
        for (run, alone), result in zip(running, results, strict=True):
            found, wanted = run.take(result), alone.step()
            assert all(one.isfinite().all() for one in tensors(found))
            assert_near(found, wanted)
        most = max(most, pool.nbytes())
        if len(running) > 2:
            leaving, _ = running.pop(step % 3)
            if step % 2:
                leaving.session.close()
            del leaving, run, alone, both
            gc.collect()
        poisoned += poison(pool)
    for run, _ in running:
        run.session.close()
    pool.nbytes()
    assert poisoned > 0
    assert all(block.unused and block.own == 0 for block in pool._all())
    assert most < 6 * max(block.nbytes for block in pool._all())


def test_the_first_and_last_steps_compute_everything_and_another_shape_starts_anew() -> None:
    name = FLUX
    run = Run(name, RollingPool(BYTES), first=3, last=2, age=99, judge=Chosen(never))
    kinds = []
    for number in range(7):
        step = run.session.ask(number, "", next(run.inputs), (1.0,), 7)
        whole = not isinstance(step, EditStep) or bool(step.mask.all())
        kinds.append((type(step).__name__, whole))
        run.session.take(number, "", run.denoiser.step([step])[0])
    full = [("DenseStep", True), ("RecordStep", True), ("EditStep", True)]
    assert kinds == [*full, ("EditStep", False), ("EditStep", False), *full[:1] * 2]
    assert run.session._branches[""].cache is None, "nothing reads it any more"
    other = Run(name, RollingPool(BYTES), first=1, last=0, age=99, judge=Chosen(never))
    other.step()
    assert isinstance(other.ask(), EditStep)
    twice = {
        key: torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() else value
        for key, value in other.asked.items()
    }
    other.session.fail(0 + 1, "")
    assert type(other.session.ask(2, "", twice, (1.0,))).__name__ == "RecordStep"


def test_calls_in_full_are_recorded_only_where_rows_are_read_after_them() -> None:
    choices = {2: never, 3: always, 4: never, 5: by_chance(0), 6: by_chance(1), 7: always}
    run = Run(FLUX, RollingPool(BYTES), age=99, judge=Chosen(lambda f: choices[f.step](f)))
    outputs, kinds = [], []
    for _ in range(8):
        step = run.ask()
        sites = int(step.mask.sum()) if isinstance(step, EditStep) else -1
        kinds.append((type(step).__name__, sites))
        outputs.append(tensors(run.take(run.denoiser.step([step])[0])))
        if kinds[-1][1] in (-1, 16):
            assert_near(outputs[-1], tensors(run.dense()))
    names = [kind for kind, _ in kinds]
    assert names == ["RecordStep", "EditStep", "EditStep", "DenseStep", *["EditStep"] * 4]
    counts = [count for _, count in kinds]
    assert counts[1:6] == [16, 0, -1, 0, 16]  # the fifth reads rows, which are older
    assert 0 < counts[6] < 16 == counts[7]
    assert torch.equal(outputs[2][0], outputs[1][0])
    assert torch.equal(outputs[4][0], outputs[3][0])


def test_what_cant_be_kept_runs_in_full_with_a_note() -> None:
    name, notes = FLUX, list[str]()
    run = Run(name, RollingPool(1000))
    run.session.note = notes.append
    for _ in range(4):
        assert_near(run.step(), run.dense())
    assert len(notes) == 1
    assert "doesn't fit" in notes[0]
    plain, inputs = maskfx.compile(Layers(3)), layer_inputs()
    grid = PatchGrid((20,), SIDE)
    session = PatchSession(plain, RollingPool(BYTES), PatchReuse(first=0), grid, note=notes.append)
    session.take(0, "", plain.step([session.ask(0, "", inputs)])[0])
    assert "stretches" in notes[1]
    assert not isinstance(session.ask(1, "", inputs), EditStep)
