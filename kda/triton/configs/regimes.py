# SPDX-License-Identifier: Apache-2.0
"""Regimes of shapes, by kernel: what a device's table has rows for.

A regime is a predicate on what launchers tell `pick`, which the host knows: sizes and dtypes, never a value on the
device. No shape is in two regimes of a kernel; one that is in none takes the defaults as they are. Prefill and decode are
kernels of their own, or regimes of their own where they share one.

No regime of `kda_decode`, `kda_verify`, `kda_commit`, `fused_recurrent` and `rms_norm_gated` looks at how many requests or
rows there are: a request gives the same bits alone and among others.

Not here: `states` (gather and scatter copy rows, at the bandwidth of memory with any tile of some KiB) and `checkpoints`
(a launch of a few microseconds in a prefill with checkpoints), which keep their defaults.
"""
from __future__ import annotations

from collections.abc import Callable

import torch

MANY_HEADS = 64  # of all sequences together: below, slices of V are what fills a GPU


def _square(D: int) -> Callable[..., bool]:
    return lambda K, V, **_: K == V == D


def _half(K, V, dtype, **_) -> bool:
    """Head dims of 128 with products of bf16 operands."""
    return K == V == 128 and dtype == torch.bfloat16


def _states(itemsize: int) -> Callable[..., bool]:
    return lambda K, V, **shape: K == V == 128 and shape["itemsize"] == itemsize


_BY_STATES = {"fp32 states, 128 x 128": _states(4), "bf16 states, 128 x 128": _states(2)}

REGIMES: dict[str, dict[str, Callable[..., bool]]] = {
    "chunk_intra": {
        "bf16, 128 x 128, bounded gate": lambda bounded=True, **shape: bounded and _half(**shape),
        "bf16, 128 x 128, any gate": lambda bounded=True, **shape: not bounded and _half(**shape),
        "64 x 64": _square(64),
    },
    "chunk_walk": {
        "bf16, 128 x 128, many heads": lambda N, HV, **shape: N * HV >= MANY_HEADS and _half(**shape),
        "bf16, 128 x 128, few heads": lambda N, HV, **shape: N * HV < MANY_HEADS and _half(**shape),
        "64 x 64": _square(64),
    },
    # One launch a prefill of few heads and long sequences; of K and V it takes 128 and 256, with one configuration.
    "chunk_combine": {"128 x 128": _square(128)},
    "kda_decode": _BY_STATES,
    "kda_verify": _BY_STATES,
    "kda_commit": _BY_STATES,
    "fused_recurrent": {"128 x 128": _square(128), "64 x 64": _square(64)},
    "causal_conv1d_fwd": {
        "prefill, to 1,024 tokens": lambda dim, T, **_: dim >= 256 and T <= 1024,
        "prefill, more tokens": lambda dim, T, **_: dim >= 256 and T > 1024,
    },
    "causal_conv1d_update": {
        "decode": lambda dim, window, **_: dim >= 256 and window == 1,
        "windows of 2 to 8": lambda dim, window, **_: dim >= 256 and 1 < window <= 8,
    },
    "rms_norm_gated": {"128": lambda D, **_: D == 128},
    "fused_kda_gate": {
        "K of 128, to 1,024 tokens": lambda K, T, **_: K == 128 and T <= 1024,
        "K of 128, more tokens": lambda K, T, **_: K == 128 and T > 1024,
    },
}

# The chunk rule has one configuration for two kernels, which are tuned and looked up apart.
PARTS = {"chunk": ("chunk_intra", "chunk_walk")}


def parts(kernel: str) -> tuple[str, ...]:
    """The names under which tables have rows for what `pick` is asked."""
    return PARTS.get(kernel, (kernel,))


def find(part: str, shape: dict) -> str | None:
    """The regime of `shape`, if it is in one."""
    return next((name for name, holds in REGIMES.get(part, {}).items() if holds(**shape)), None)
