from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench.reference.loop import Numbers, Run, averaged_weights, weights_of
from bench.reference.norms import quicken_norms


class Line:
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


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path):
    whole = Run(Line(), tmp_path / "whole")
    whole.train(60, steps=60)
    Run(Line(), tmp_path / "halves").train(60, steps=30)
    resumed = Run(Line(), tmp_path / "halves")
    assert resumed.step == 30
    resumed.train(60, steps=60)
    for key, value in weights_of(whole.task.module).items():
        # the optimizer's averages were kept in 16 bits
        torch.testing.assert_close(weights_of(resumed.task.module)[key], value, rtol=0, atol=2e-3)
    assert not torch.equal(
        weights_of(Line().module)["weight"], weights_of(resumed.task.module)["weight"]
    )


def test_training_learns_and_logs(tmp_path: Path):
    run = Run(Line(), tmp_path)
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
