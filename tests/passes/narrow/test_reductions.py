"""narrow_reductions: over features on rows, over sites with the sums of the rest."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from maskfx.ir.programs.sources import Rest, RestSum
from maskfx.passes.narrow.reductions import narrow_reductions
from tests.passes.tools import check_values, joint, picture, run_pass, shared, timed, tokens


class Reduces(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, sample: Tensor) -> Tensor:
        return torch.tanh(sample) * self.function(torch.sigmoid(sample))


@pytest.mark.parametrize("divide", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("keep", [True, False])
def test_reduces_sites(divide: bool, keep: bool) -> None:
    def function(x: Tensor) -> Tensor:
        out = x.mean((2, 3), keepdim=keep) if divide else x.sum((2, 3), keepdim=keep)
        return out if keep else out[:, :, None, None]

    module = Reduces(function)
    run = run_pass(narrow_reductions, module, picture)
    name = "mean" if divide else "sum"
    assert run.rewrites == run.before[name] == run.gained("site_mean") == 1
    assert run.after[name] == 0
    assert sum(isinstance(s, RestSum) for s in run.ctx.interface.inputs.values()) == 1
    check_values(module, picture)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_over_sites_sums_squares(dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        out: Tensor = torch.linalg.vector_norm(x.to(dtype), dim=(2, 3), keepdim=True)
        return out.float() / 8

    module = Reduces(function)
    run = run_pass(narrow_reductions, module, picture)
    assert run.rewrites == run.before["linalg_vector_norm"] == run.gained("site_mean") == 1
    assert run.after["linalg_vector_norm"] == 0
    check_values(module, picture, oracle=dtype == torch.float32)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmax_over_sites_reads_the_rest(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        out: Tensor = getattr(5 * x.flatten(2), name)(-1)
        return out[..., None, None] if name == "logsumexp" else out.view_as(x)

    module = Reduces(function)
    run = run_pass(narrow_reductions, module, picture)
    assert run.rewrites == run.before[name] == run.gained("site_logsumexp") == 1
    assert run.after[name] == 0
    assert sum(isinstance(s, Rest) for s in run.ctx.interface.inputs.values()) == 1
    check_values(module, picture, oracle=False)  # the twin knows none of them


@pytest.mark.parametrize("name", ["mean", "sum", "amax", "amin", "logsumexp"])
def test_reduces_some_features_first(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        out: Tensor = getattr(x.unflatten(1, (2, 2)), name)((1, 3, 4))
        return out.repeat_interleave(2, 1)[..., None, None]

    module = Reduces(function)
    run = run_pass(narrow_reductions, module, picture)
    assert run.rewrites == 1
    check_values(module, picture, oracle=False)


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("inner", [False, True], ids=["last features", "first features"])
def test_spreads_over_sites_and_some_features(inner: bool, correction: int) -> None:
    def function(x: Tensor) -> Tensor:
        dims = (1, 3, 4) if inner else (2, 3, 4)
        spread = x.unflatten(1, (2, 2)).var(dims, correction=correction)
        out = spread.repeat(1, 2) if inner else spread.repeat_interleave(2, 1)
        return out[..., None, None]

    module = Reduces(function)
    run = run_pass(narrow_reductions, module, picture)
    assert run.rewrites == run.gained("group_scale") == 1
    check_values(module, picture)


def test_keeps_other_norms_over_sites() -> None:
    module = Reduces(lambda x: torch.linalg.vector_norm(x, 1, dim=(2, 3), keepdim=True))
    run = run_pass(narrow_reductions, module, picture)
    assert run.unchanged
    assert "it reduces a site axis" in " ".join(run.ctx.dense.values())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.amax(1, keepdim=True),
        lambda x: x.var(1, keepdim=True, correction=0),
        lambda x: x.var(1, False, True),
        lambda x: torch.ops.aten.std.dim(x, [1], False)[:, None],
        lambda x: x.norm(dim=1, keepdim=True),
        lambda x: x.sum(1)[:, None],
        lambda x: x.prod(1, keepdim=True),
        lambda x: (x > 0.6).any(1, keepdim=True).float(),
        lambda x: x.logsumexp(1, keepdim=True),
        lambda x: x.argmax(1, keepdim=True).float(),
        lambda x: x.argmin(1)[:, None].float(),
        lambda x: (x > 0.6).float().count_nonzero(1)[:, None],
    ],
    ids=[
        "mean",
        "amax",
        "var",
        "biased",
        "std",
        "norm",
        "sum",
        "prod",
        "any",
        "logsumexp",
        "argmax",
        "argmin",
        "count_nonzero",
    ],
)
def test_reduces_features(function: Callable[[Tensor], Tensor]) -> None:
    module = Reduces(function)
    run = run_pass(narrow_reductions, module, picture)
    assert run.rewrites == 1
    assert run.after["site_mean"] == 0
    assert run.after["from_rows"] == 1
    check_values(module, picture)


def test_the_norm_of_one_feature_is_no_identity() -> None:
    module = Reduces(lambda x: (x[:, :1] - 0.5).norm(dim=1, keepdim=True))
    run = run_pass(narrow_reductions, module, picture)
    assert not run.rewrites
    check_values(module, picture, dense=1)


class LinearAttention(nn.Module):
    """Keys times values over all sites, and queries times that."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.fixed = nn.Linear(8, 24), nn.Parameter(torch.eye(8) * 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        parts = self.qkv(hidden_states @ self.fixed).chunk(3, -1)
        q, k, v = (torch.sigmoid(x).unflatten(-1, (2, 4)).transpose(1, 2) for x in parts)
        mixed = q @ (k.transpose(2, 3) @ v)
        return mixed.transpose(1, 2).flatten(2)


def test_multiplies_over_sites() -> None:
    module = shared(LinearAttention)
    run = run_pass(narrow_reductions, module, tokens)
    assert run.before["matmul"] == run.rewrites == 3
    assert run.gained("site_product") == run.gained("owner_product") == 1
    assert run.after["matmul"] == 1  # by the parameter, on rows
    assert sum(isinstance(s, Rest) for s in run.ctx.interface.inputs.values()) == 2
    check_values(module, tokens)


class LinearAttentionOfPictures(nn.Module):
    """The same without joining the axes of the picture."""

    def forward(self, sample: Tensor) -> Tensor:
        q, k = sample.sigmoid(), sample.cos()
        mixed = torch.einsum("bchw,bdhw->bcd", k, sample.tanh())
        scale = torch.einsum("bchw,bc->bhw", q, k.sum((2, 3)))
        return torch.einsum("bchw,bcd->bdhw", q, mixed) / (scale[:, None] + 9)


def test_multiplies_rows_of_pictures() -> None:
    run = run_pass(narrow_reductions, shared(LinearAttentionOfPictures), picture)
    assert (run.gained("site_product"), run.gained("owner_product")) == (1, 2)
    check_values(shared(LinearAttentionOfPictures), picture, oracle=False)  # the twin has no einsum


class Times(nn.Module):
    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        table = timestep[:, None, None] * torch.ones(3, 4)
        return sample * torch.sin(table).mean(1)[:, :, None, None]


class WindowProducts(nn.Module):
    """Products of the sites of each window with each other, around a softmax."""

    def forward(self, sample: Tensor) -> Tensor:
        b, c, h, w = sample.shape
        apart = sample.view(b, c, h // 2, 2, w // 2, 2)
        x = apart.permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, c)
        scores = (x @ x.transpose(-2, -1)).tanh()
        x = (scores.softmax(-1) * scores) @ x
        x = x.view(b, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(b, c, h, w)


def test_multiplies_matrices_of_each_row() -> None:
    run = run_pass(narrow_reductions, WindowProducts(), picture)
    assert run.before["matmul"] == run.after["matmul"] == run.rewrites == 2
    assert run.gained("owner_product") == run.gained("site_product") == 0
    check_values(WindowProducts(), picture, oracle=False)  # the twin knows no windows


class Experts(nn.Module):
    """All experts, each with a matrix of its own, of which each token weighs the results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (nn.Parameter(torch.randn(3, 8, 8)) for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        share = hidden_states[..., :3].softmax(-1)
        each = torch.einsum("bnc,ecd->bned", hidden_states, self.up).tanh()
        return (torch.einsum("bned,edc->bnec", each, self.down) * share[..., None]).sum(2)


def test_rows_are_multiplied_by_several_matrices() -> None:
    run = run_pass(narrow_reductions, shared(Experts), tokens)
    assert run.ctx.dense == {}
    check_values(shared(Experts), tokens, oracle=False)


def test_keeps_reductions_without_sites() -> None:
    module = shared(Times)
    run = run_pass(narrow_reductions, module, timed)
    assert run.before["mean"] == 1
    assert run.unchanged
    check_values(module, timed, oracle=False)


def test_a_sum_over_image_and_text_runs_in_full() -> None:
    class Both(nn.Module):
        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            both = torch.cat([encoder_hidden_states, hidden_states], 1)
            return hidden_states + torch.tanh(both).mean(1, keepdim=True)

    run = run_pass(narrow_reductions, Both(), joint)
    assert run.unchanged
    assert "it sums over" in " ".join(run.ctx.dense.values())
    check_values(Both(), joint, dense=1, oracle=False)


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_reductions, shared(LinearAttention), tokens).second_run_is_idle()
    module = Reduces(lambda x: x.mean((2, 3), keepdim=True))
    assert run_pass(narrow_reductions, module, picture).second_run_is_idle()
