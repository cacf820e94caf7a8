from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from training.loop import Numbers, Run, Task, averaged_weights, weights_of
from training.muon import Muon, orthogonal
from training.norms import quicken_norms
from training.residuals import quicken_residuals, quicken_text
from training.text import learn_tokenizer, make_encoder, tokens_of
from training.unet import make_unet


class Line(Task):
    """Fits y = 3 x."""

    name = "line"
    rate = 0.01
    average = 0.9

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Linear(4, 4)

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        return (self.module(x) - 3 * x).square().mean(), {"more": 1.0}

    def judge(self, averaged: nn.Module) -> Numbers:
        x = torch.eye(4)
        return {"judged": (averaged(x) - 3 * x).square().mean().item()}


class Matrices(Line):
    """The same, with orthogonal steps of the matrix."""

    matrix_rate = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.matrices = [weight for weight in self.module.parameters() if weight.ndim == 2]


@pytest.mark.parametrize(("task", "off"), [(Line, 2e-3), (Matrices, 2e-2)])
def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path, task: type[Line], off: float):
    whole = Run(task(), tmp_path / "whole")
    whole.train(60, steps=60)
    Run(task(), tmp_path / "halves").train(60, steps=30)
    resumed = Run(task(), tmp_path / "halves")
    assert resumed.step == 30
    resumed.train(60, steps=60)
    for key, value in weights_of(whole.task.module).items():
        # the optimizer's averages were kept in 16 bits, and Muon's steps are of one size
        torch.testing.assert_close(weights_of(resumed.task.module)[key], value, rtol=0, atol=off)
    for one, other in zip(
        resumed.optimizers, Run(task(), tmp_path / "halves").optimizers, strict=True
    ):
        assert len(one.state) == len(other.state) > 0
    assert not torch.equal(
        weights_of(task().module)["weight"], weights_of(resumed.task.module)["weight"]
    )


def test_each_weight_has_one_optimizer_and_the_rate_meant_for_it(tmp_path: Path):
    run = Run(Matrices(), tmp_path)
    task = run.task
    adam, muon = (
        {id(one): group["initial_lr"] for group in each.param_groups for one in group["params"]}
        for each in run.optimizers
    )
    assert list(muon) == [id(task.matrices[0])]
    assert {*adam, *muon} == {id(one) for one in task.module.parameters()}
    assert not {*adam} & {*muon}
    assert ({*adam.values()}, {*muon.values()}) == ({task.rate}, {task.matrix_rate})
    run.one_step(0.5)
    shares = {group["lr"] / group["initial_lr"] for o in run.optimizers for group in o.param_groups}
    assert shares == {0.5 / 300}  # the first of its steps is small


def test_the_rate_falls_to_nothing_at_the_end(tmp_path: Path):
    run = Run(Line(), tmp_path)
    rates: list[float] = []
    one_step = run.one_step

    def told(heat: float = 1.0) -> Numbers:
        rates.append(heat)
        return one_step(heat)

    run.one_step = told  # type: ignore[method-assign]
    run.train(0.4, cool=0.2)
    assert rates[0] == 1
    assert rates[-1] < 0.1
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("task", [Line, Matrices])
def test_training_learns_and_logs(tmp_path: Path, task: type[Line]):
    run = Run(task(), tmp_path)
    before = run.task.judge(run.task.module)["judged"]
    run.train(60, steps=400)
    assert run.task.judge(run.task.module)["judged"] < before / 4
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(lines) == 5  # every hundred steps, and the judgement at the end
    assert '"judged"' in lines[-1]


def test_judging_leaves_the_weights_alone(tmp_path: Path):
    run = Run(Line(), tmp_path)
    for _ in range(200):
        run.one_step()
    kept = {key: value.clone() for key, value in weights_of(run.task.module).items()}
    run.save()
    for key, value in weights_of(run.task.module).items():
        assert torch.equal(value, kept[key])
    shipped = averaged_weights(run.checkpoint)
    assert not torch.allclose(shipped["weight"], kept["weight"], rtol=0, atol=0.01)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 64, 16), (1, 16, 64)])
def test_an_orthogonal_step_has_like_sizes_and_keeps_its_directions(shape: tuple[int, ...]):
    sizes = torch.logspace(-2, 0, 16)  # what many examples show, and what few do
    left = torch.linalg.qr(torch.randn(shape[0], shape[1], 16)).Q
    right = torch.linalg.qr(torch.randn(shape[0], shape[2], 16)).Q
    found = left.mT @ orthogonal(left * sizes @ right.mT) @ right
    along = found.diagonal(dim1=-2, dim2=-1)
    assert along.min() > 0.3
    assert along.max() < 1.8
    assert (found - torch.diag_embed(along)).abs().max() < 0.1


def test_a_weight_without_gradient_stays():
    moved, still = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    moved.grad = torch.eye(4)
    Muon([moved, still], 0.1).step()
    assert not torch.equal(moved, torch.ones(4, 4))
    assert torch.equal(still, torch.ones(4, 4))


def test_no_checkpoint_says_what_to_do(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="train first"):
        averaged_weights(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_quick_norms_have_the_gradients_of_plain_ones(layout: torch.memory_format):
    plain, quick = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    quick.load_state_dict(plain.state_dict())
    quicken_norms(quick)
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=layout) + 1
    weight = torch.randn(2, 8, 5, 6)
    found = []
    for norm in (plain, quick):
        at = x.clone().requires_grad_()
        (norm(at) * weight).sum().backward()
        found.append([at.grad, norm.weight.grad, norm.bias.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_quick_residuals_have_the_gradients_of_plain_ones():
    made: list[Any] = [make_unet((8, 16, 16), groups=4) for _ in range(2)]
    plain, quick = made
    quick.load_state_dict(plain.state_dict())
    for unet in (plain, quick):
        unet.to(memory_format=torch.channels_last).train()
    quicken_residuals(quick)
    quick.eval().train()  # as each judgement does it
    blocks = [part for part in quick.modules() if isinstance(part, ResnetBlock2D)]
    assert blocks
    assert not any(block.training for block in blocks)
    x = torch.randn(2, 9, 8, 8).contiguous(memory_format=torch.channels_last)
    for unet in (plain, quick):
        unet(x, 5, torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0)))[
            0
        ].square().mean().backward()
    for one, other in zip(plain.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_quick_text_gives_the_same_states(tmp_path: Path):
    tokenizer = learn_tokenizer(tmp_path, scenes=30)
    plain = make_encoder(tokenizer, layers=2)
    ids = tokens_of(tokenizer, ["a red ball", ""])
    before = plain(ids)[0]
    quicken_text(plain)
    assert plain.config._attn_implementation == "eager"
    torch.testing.assert_close(plain(ids)[0], before, rtol=1e-4, atol=1e-5)
