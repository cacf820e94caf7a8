"""Requests with LoRA files: each acts from its step on, whenever its file arrives."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionInpaintPipeline
from torch import Tensor

import maskfx
from maskfx.engine.ticket import Ticket, TicketState
from maskfx.errors import AdapterError, Cancelled, DeadlineMissed, InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.fitting.profile import profile_adapter
from maskfx.runtime.lora.in_place_costs import InPlaceCosts
from maskfx.runtime.lora.profile import store_profile
from maskfx.runtime.lora.registry import Adapters
from maskfx.scheduling.rounds.elastic import ElasticRounds
from tests.engine.test_engine import call, compiled, parts
from tests.factories.lora_files import lora_tensors, save_lora
from tests.factories.pipelines import distance

SCALE = 4.0
KIND: Any = StableDiffusionInpaintPipeline
pytestmark = pytest.mark.slow

GATED = "tests.factories.lora_files:gated"


@pytest.fixture(scope="module")
def adapters() -> Iterator[Adapters]:
    made = Adapters(read=GATED, deadline=120)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pipe(adapters: Adapters) -> Any:
    made = compiled(KIND, parts())
    pipeline_state_of(made).adapters = lambda: adapters
    return made


def style(folder: Path, pipe: Any, name: str, *, seed: int = 1, there: bool = True) -> Path:
    path = save_lora(folder / f"{name}.safetensors", pipe, seed=seed, scale=SCALE)
    if there:
        arrive(path)
    return path


def arrive(path: Path) -> None:
    Path(f"{path}.open").touch()


def merged(unet: Any, seed: int, weight: float = 1.0) -> None:
    """Add the updates of `style` to a module's weights."""
    tensors = lora_tensors("unet", unet, seed=seed, scale=SCALE)
    for key, down in tensors.items():
        if key.endswith("lora_A.weight"):
            up = tensors[key.replace("lora_A", "lora_B")]
            layer = key.removeprefix("unet.").removesuffix(".lora_A.weight")
            unet.get_submodule(layer).weight.data.add_(weight * (up @ down))


def reference(seed: int, start: int, weight: float = 1.0, **more: Any) -> Tensor:
    """diffusers, with the weights merged when the step `start` begins."""
    plain: Any = KIND(**parts())
    plain.set_progress_bar_config(disable=True)
    if not start:
        merged(plain.unet, seed, weight)

    def step_ended(own: Any, step: int, *_: Any) -> dict[str, Any]:
        if step + 1 == start:
            merged(own.unet, seed, weight)
        return {}

    found: Tensor = plain(**{**call(1, **more), "callback_on_step_end": step_ended}).images
    return found


def whole(**more: Any) -> dict[str, Any]:
    """An edit of the whole picture, which is exact."""
    given = call(1, **more)
    given["mask_image"] = given["mask_image"].point(lambda _: 255)
    return given


@pytest.mark.parametrize("start", [0, 2])
def test_it_acts_from_its_step_on(
    start: int, pipe: Any, adapters: Adapters, tmp_path: Path
) -> None:
    path = style(tmp_path, pipe, f"at{start}")
    adapters.register("style", path, start=start)
    mask = {"mask_image": whole()["mask_image"]}
    found = pipe(**whole(output_type="latent"), lora=[("style", 0.7)]).images
    wanted = reference(1, start, 0.7, output_type="latent", **mask)
    assert distance(found, wanted) < 1e-4
    without = reference(1, 9, output_type="latent", **mask)
    assert distance(found, without) > 1e-3
    assert distance(pipe(**whole(output_type="latent")).images, without) < 1e-4


def test_the_picture_does_not_depend_on_the_store(
    pipe: Any, adapters: Adapters, tmp_path: Path
) -> None:
    found = []
    with maskfx.Engine() as engine:
        for arrival in ("before", "early", "late"):
            path = style(tmp_path, pipe, arrival, there=arrival == "before")
            adapters.register("slow", path, start=2)
            ticket = engine.submit(pipe, **call(1), adapters=["slow"])
            if arrival == "early":
                until(partial(has_stepped, ticket))
            if arrival == "late":  # other requests' steps go on meanwhile
                until(partial(is_waiting, ticket))
                other = engine.submit(pipe, **call(2))
                other.result(60)
                assert other.steps >= 4
                assert (ticket.steps, ticket.state) == (2, TicketState.WAITING)
            arrive(path)
            found.append(ticket.result(60).images)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert adapters.counts().waits


def has_stepped(ticket: Ticket) -> bool:
    return ticket.steps >= 1


def is_waiting(ticket: Ticket) -> bool:
    return ticket.state is TicketState.WAITING


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_requests_with_different_adapters_share_steps(
    pipe: Any, adapters: Adapters, tmp_path: Path
) -> None:
    for seed in (1, 2):
        adapters.register(f"own{seed}", style(tmp_path, pipe, f"own{seed}", seed=seed))
    loras: list[Any] = [None, "own1", [("own2", 0.5)], ["own1", ("own2", -1)]]
    alone = [pipe(**call(3), lora=lora).images for lora in loras]
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0)) as engine:
        tickets = [engine.submit(pipe, **call(3), lora=lora) for lora in loras]
        together = [ticket.result(60).images for ticket in tickets]
        assert max(step.requests for step in engine.steps) == 4
    for one, other in zip(alone, together, strict=True):
        assert distance(one, other) < 1e-4
    assert all(distance(alone[0], other) > 1e-3 for other in alone[1:])


def test_adapters_that_all_members_share_are_in_the_weights_meanwhile(
    pipe: Any, adapters: Adapters, tmp_path: Path
) -> None:
    """From the third step of a request alone on, until another request joins."""
    for seed, name in enumerate(("alone", "joins")):
        adapters.register(name, style(tmp_path, pipe, name, seed=seed))
    before = copy.deepcopy(pipe.unet.state_dict())
    denoiser = pipeline_state_of(pipe).denoisers["unet"]

    def given() -> dict[str, Any]:
        return {**whole(num_inference_steps=20, strength=1.0), "quality": "all-steps"}

    wanted = [pipe(**given(), lora=name).images for name in ("alone", "joins")]
    denoiser.in_place.costs = InPlaceCosts()
    with maskfx.Engine() as engine:
        first = engine.submit(pipe, **given(), lora="alone")
        until(lambda: any(step.in_place for step in engine.steps))
        second = engine.submit(pipe, **given(), lora="joins")
        found = [ticket.result(60).images for ticket in (first, second)]
        several = [step for step in engine.steps if step.requests == 2]
        assert several
        assert not any(step.in_place for step in several)
    for one, other in zip(wanted, found, strict=True):
        assert distance(one, other) < 1e-4
    assert distance(*wanted) > 1e-3
    after = pipe.unet.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (
        denoiser.in_place.costs.fell_back
    )  # twice if the second misses a step when cores are busy
    assert not adapters.counts().failures


def test_ranks_have_adapters_that_all_members_share_in_their_weights(
    pipe: Any, adapters: Adapters, tmp_path: Path
) -> None:
    adapters.register("alone", style(tmp_path, pipe, "alone", seed=1))
    before = copy.deepcopy(pipe.unet.state_dict())

    def given() -> dict[str, Any]:
        return {**whole(num_inference_steps=12, strength=1.0), "quality": "all-steps"}

    wanted = pipe(**given(), lora="alone").images
    with maskfx.Engine(ranks=2, rank_timeout=60.0) as engine:
        found = engine.submit(pipe, **given(), lora="alone").result(240).images
        assert any(step.in_place for step in engine.steps)
        (group,) = engine.runner.rank_groups()
        assert group.computed_here == group.failures == 0
    assert distance(wanted, found) < 1e-4
    after = pipe.unet.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_store_that_hangs_fails_its_own_request_only(
    pipe: Any, adapters: Adapters, tmp_path: Path
) -> None:
    path = style(tmp_path, pipe, "hangs", there=False)
    adapters.register("hangs", path, start=1)
    try:
        with maskfx.Engine() as engine:
            late = engine.submit(pipe, **call(4), lora="hangs", deadline=2.0)
            cancelled = engine.submit(pipe, **call(5), lora="hangs")
            other = engine.submit(pipe, **call(6))
            other.result(60)
            with pytest.raises(DeadlineMissed):
                late.result(60)
            cancelled.cancel()
            with pytest.raises(Cancelled):
                cancelled.result(60)
            assert not engine._requests.active
            assert not engine._requests.aside
    finally:
        arrive(path)


def test_bad_files_fail_their_request_by_name(
    pipe: Any, adapters: Adapters, tmp_path: Path
) -> None:
    path = style(tmp_path, pipe, "changed")
    adapters.register("changed", path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="changed.*register it again"):
        pipe(**call(1), lora="changed")
    adapters.register("changed", style(tmp_path, pipe, "changed", seed=2))
    pipe(**call(1), lora="changed")
    for lora, match in (
        ("absent", "no adapter of this name"),
        (3, "give the name of a registered adapter"),
        (str(tmp_path / "x.safetensors"), "it can't be read"),
    ):
        with pytest.raises(InputError, match=match):
            pipe(**call(1), lora=lora)
    path.unlink()
    adapters.register("gone", style(tmp_path, pipe, "gone"))
    (tmp_path / "gone.safetensors").unlink()
    with pytest.raises((InputError, AdapterError), match="gone"):
        pipe(**call(1), lora="gone")


def test_templates_belong_to_adapter_weight_and_start(
    pipe: Any, adapters: Adapters, tmp_path: Path
) -> None:
    path = style(tmp_path, pipe, "own")
    given = {name: value for name, value in call(7).items() if name != "mask_image"}
    names = set()
    for start, weight in ((0, 1.0), (0, 1.0), (2, 1.0), (0, 0.5)):
        adapters.register("own", path, start=start)
        made = maskfx.template(pipe, **copy.copy(given), lora=[("own", weight)])
        names.add(made.name)
    assert len(names) == 3


def test_a_profile_decides_when_it_acts(pipe: Any, adapters: Adapters, tmp_path: Path) -> None:
    path = style(tmp_path, pipe, "profiled")
    known = adapters.register("profiled", path)
    found = profile_adapter(pipe, known, [whole, whole], cosine=0.9999)
    assert found.cosines[0] == found.cosines[1], "the noise is the same"
    assert (found.profile.start, found.profile.steps, found.early) == (0, 4, [])
    times = pipe.scheduler.timesteps.tolist()
    assert (found.profile.first, found.profile.time) == (times[0], times[0])
    unlike = profile_adapter(pipe, known, [whole], cosine=-1.0).profile
    assert (unlike.start, unlike.time) == (3, times[3]), "the last step, at the latest"
    store_profile(path, found.base, replace(found.profile, start=2, time=times[2]))
    adapters.register("profiled", path)  # the profile is read once
    made = pipe(**whole(output_type="latent"), lora="profiled").images
    mask = {"mask_image": whole()["mask_image"]}
    assert distance(made, reference(1, 2, output_type="latent", **mask)) < 1e-4
    strict = adapters.register("profiled", path, start=0)
    assert strict.start == 0
    made = pipe(**whole(output_type="latent"), lora="profiled").images
    assert distance(made, reference(1, 0, output_type="latent", **mask)) < 1e-4


@pytest.mark.parametrize("rounds", [False, True])
def test_adapters_over_ranks(rounds: bool, pipe: Any, adapters: Adapters, tmp_path: Path) -> None:
    """Files of other requests, several and none of them, and one that arrives late."""
    for seed in (1, 2):
        adapters.register(f"own{seed}", style(tmp_path, pipe, f"own{seed}", seed=seed))
    late = style(tmp_path, pipe, "late", seed=3, there=False)
    adapters.register("late", late, start=2)
    loras: list[Any] = [None, [("own2", 0.5)], ["own1", ("own2", -1)], "late"]
    alone = [pipe(**whole(), lora=lora).images for lora in loras[:-1]]
    policy = maskfx.BatchPolicy(patience=1.0)
    with maskfx.Engine(policy, ranks=2, rounds=ElasticRounds() if rounds else None) as engine:
        waiting = engine.submit(pipe, **whole(), adapters=["late"])
        tickets = [engine.submit(pipe, **whole(), adapters=lora) for lora in loras[:-1]]
        until(partial(is_waiting, waiting), 240)
        assert waiting.steps == 2
        arrive(late)
        found = [ticket.result(240).images for ticket in (*tickets, waiting)]
        (group,) = engine.runner.rank_groups()
        assert group.computed_here == group.failures == 0
    for one, other in zip(alone, found, strict=False):
        assert distance(one, other) < 1e-4
    mask = {"mask_image": whole()["mask_image"]}
    assert distance(found[1], reference(2, 0, 0.5, **mask)) < 1e-4
    assert distance(found[3], reference(3, 2, **mask)) < 1e-4
