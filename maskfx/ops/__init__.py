"""The operators of compiled graphs: the only contract between a graph and the runtime.

Each operator is written in plain PyTorch, accepts and returns contiguous tensors, and has a fake
implementation for tracing; those that multiply matrices have a FLOP formula (two per multiply-add,
as FlopCounterMode counts). `spans` (requests, 2 x segments) hold the start and stop of a request's
rows in each segment. On a CUDA device operators choose the Triton kernels of `kernels/` where these
serve, on a CPU the C functions of `native/`. Registered by `torch.library.Library`, whose calls
cost half of custom_op's.

May import: nothing of maskfx. Begin with `attention.py`.
"""

from maskfx.ops.attention import attend, attend_flops
from maskfx.ops.base import numbers, wide
from maskfx.ops.exchange import (
    after,
    attend_part,
    exchange,
    exchange_normed,
    merge_parts,
    peer_moments,
    peer_sums,
    sum_ranks,
)
from maskfx.ops.few_rows import few_rows_linear, linear
from maskfx.ops.fused import (
    add_gated,
    attend_packed,
    gated,
    modulate,
    norm_activation,
    window_product,
)
from maskfx.ops.gather import enter, gather
from maskfx.ops.heads import from_heads, to_heads
from maskfx.ops.kernels import cuda
from maskfx.ops.kernels.serves import runs_on as has_kernels
from maskfx.ops.low_rank import add_low_rank
from maskfx.ops.native import cpu
from maskfx.ops.native.chosen_rows import ChosenRows
from maskfx.ops.native.chosen_rows import serves as serves_chosen
from maskfx.ops.norms import group_scale, line_scale, scale_shift, site_moments
from maskfx.ops.own_linear import own_linear
from maskfx.ops.packed import packed_linear, packed_window
from maskfx.ops.pairs import STEPS, pair_sum, site_pair_sum
from maskfx.ops.pick_rows import by_expert, choose, chosen, expert_product, pick_tokens
from maskfx.ops.sums import (
    owner_product,
    site_extreme,
    site_logsumexp,
    site_mean,
    site_product,
)
from maskfx.ops.whole_modules import run_whole, whole
from maskfx.ops.write_rows import add_changes, put_all, put_rows, replace_all

ALL = (
    *(gather, enter, group_scale, scale_shift, attend, site_mean, site_product, owner_product),
    *(site_extreme, site_logsumexp, pair_sum, site_pair_sum, site_moments, line_scale),
    *(pick_tokens, choose, chosen, by_expert, expert_product, add_low_rank, own_linear),
)

# of graphs that are about to run
FUSED = (
    *(window_product, norm_activation, gated, modulate, add_gated, attend_packed),
    few_rows_linear,
)

# of graphs that are split over ranks
EXCHANGES = (
    *(exchange, peer_moments, peer_sums, sum_ranks, attend_part, merge_parts),
    *(exchange_normed, to_heads, from_heads, after),
)
cuda.register()
cpu.register()

__all__ = [
    "ALL",
    "ChosenRows",
    "EXCHANGES",
    "FUSED",
    "STEPS",
    "add_changes",
    "add_gated",
    "add_low_rank",
    "after",
    "own_linear",
    "attend",
    "attend_flops",
    "attend_packed",
    "attend_part",
    "by_expert",
    "choose",
    "chosen",
    "enter",
    "exchange",
    "exchange_normed",
    "expert_product",
    "few_rows_linear",
    "from_heads",
    "gated",
    "gather",
    "group_scale",
    "has_kernels",
    "line_scale",
    "linear",
    "merge_parts",
    "modulate",
    "norm_activation",
    "numbers",
    "owner_product",
    "packed_linear",
    "packed_window",
    "pair_sum",
    "peer_moments",
    "peer_sums",
    "pick_tokens",
    "put_all",
    "put_rows",
    "replace_all",
    "run_whole",
    "scale_shift",
    "serves_chosen",
    "site_extreme",
    "site_logsumexp",
    "site_mean",
    "site_moments",
    "site_pair_sum",
    "site_product",
    "sum_ranks",
    "to_heads",
    "whole",
    "wide",
    "window_product",
]
