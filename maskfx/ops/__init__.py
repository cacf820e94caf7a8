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
    attend_part,
    exchange,
    merge_parts,
    peer_moments,
    peer_sums,
    sum_ranks,
)
from maskfx.ops.fused import (
    add_gated,
    attend_packed,
    gated,
    modulate,
    norm_activation,
    window_product,
)
from maskfx.ops.gather import enter, gather
from maskfx.ops.kernels import cuda
from maskfx.ops.kernels.serves import runs_on as has_kernels
from maskfx.ops.low_rank import add_low_rank
from maskfx.ops.native import cpu
from maskfx.ops.norms import group_scale, scale_shift
from maskfx.ops.pairs import STEPS, pair_sum, site_pair_sum
from maskfx.ops.picks import by_expert, choose, chosen, expert_product, pick_tokens
from maskfx.ops.put import add_changes, put_all, put_rows, replace_all
from maskfx.ops.sums import (
    owner_product,
    site_extreme,
    site_logsumexp,
    site_mean,
    site_product,
)
from maskfx.ops.whole import run_whole, whole

ALL = (
    *(gather, enter, group_scale, scale_shift, attend, site_mean, site_product, owner_product),
    *(site_extreme, site_logsumexp, pair_sum, site_pair_sum),
    *(pick_tokens, choose, chosen, by_expert, expert_product, add_low_rank),
)

# of graphs that are about to run
FUSED = (window_product, norm_activation, gated, modulate, add_gated, attend_packed)

# of graphs that are split over ranks
EXCHANGES = (exchange, peer_moments, peer_sums, sum_ranks, attend_part, merge_parts)
cuda.register()
cpu.register()

__all__ = [
    "ALL",
    "FUSED",
    "STEPS",
    "add_gated",
    "attend_packed",
    "gated",
    "modulate",
    "norm_activation",
    "add_changes",
    "put_all",
    "put_rows",
    "replace_all",
    "window_product",
    "add_low_rank",
    "EXCHANGES",
    "attend",
    "attend_flops",
    "attend_part",
    "by_expert",
    "choose",
    "chosen",
    "enter",
    "exchange",
    "expert_product",
    "gather",
    "group_scale",
    "has_kernels",
    "merge_parts",
    "numbers",
    "owner_product",
    "peer_moments",
    "peer_sums",
    "pick_tokens",
    "run_whole",
    "scale_shift",
    "pair_sum",
    "site_extreme",
    "site_logsumexp",
    "site_pair_sum",
    "site_mean",
    "site_product",
    "sum_ranks",
    "whole",
    "wide",
]
