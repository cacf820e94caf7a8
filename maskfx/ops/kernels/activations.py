"""Activations inside kernels, by the number of their name."""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATION_NUMBERS = {"none": 0, "silu": 1, "relu": 2, "gelu": 3, "gelu_tanh": 4}


@triton.jit
def activated(value, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        value = value / (1.0 + tl.exp(-value))
    elif ACTIVATION == 2:
        value = tl.maximum(value, 0.0)
    elif ACTIVATION == 3:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == 4:
        # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z
        double = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = value / (1.0 + tl.exp(-double))
    return value
