# SPDX-License-Identifier: Apache-2.0
"""What `kda tune` tries: candidates by kernel, and by regime the sizes on which they are timed.

A candidate names every entry that its kernel's rows have, so that a row does not change when a default does.
"""
from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from kda.cli.workloads import Work

SIX = (1300, 547, 2048, 963, 271, 3063)  # 8,192 tokens in six requests
BF16 = torch.bfloat16


def every(**values: tuple) -> list[dict]:
    """All combinations."""
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


def warps(*numbers: int, stages: tuple[int, ...] = (1,)) -> list[dict]:
    return every(num_warps=numbers, num_stages=stages)


def _intra_on_gpu() -> list[dict]:
    return [
        {"PARTS": parts, "intra": {"num_warps": number, "num_stages": 1} | ({"maxnreg": registers} if registers else {})}
        for parts in (1, 2, 4)
        for number, most in ((1, (None, 200)), (2, (None, 168, 128)), (4, (None,)))
        for registers in most
    ]


def _walk_on_gpu() -> list[dict]:
    tiles = [(64, 4), (32, 4), (32, 2), (128, 8), (16, 1)]
    return [
        {"BV": BV, "PIECES": pieces, "walk": {"num_warps": number, "num_stages": stages}}
        for (BV, number), pieces, stages in itertools.product(tiles, (3, 1), (1, 2, 3, 4, 5))
    ]


GPU: dict[str, list[dict]] = {
    "chunk_intra": _intra_on_gpu(),
    "chunk_walk": _walk_on_gpu(),
    "kda_decode": every(BV=(32, 64, 128), KI=(32, 64), num_warps=(1, 2, 4, 8)),
    "kda_verify": every(BV=(32, 64, 128), KI=(32, 64), num_warps=(1, 2, 4, 8)),
    "fused_recurrent": every(BV=(4, 8, 16, 32), num_warps=(1, 2), num_stages=(1, 3)),
    # From 8 tokens a program on, as only a sequence's first program may read its history.
    "causal_conv1d_fwd": every(BT=(8, 16, 32, 64), BD=(64, 128, 256), num_warps=(2, 4, 8)),
    "causal_conv1d_update": every(BT=(1, 2, 4, 8), BD=(128, 256, 512), num_warps=(1, 2, 4, 8)),
    "rms_norm_gated": every(BR=(16, 32, 64), BD=(64, 128), num_warps=(2, 4, 8)),
}

# There a program is one thread, whatever its number of warps.
CPU: dict[str, list[dict]] = {
    "chunk_intra": [{"PARTS": parts, "intra": {"num_warps": 1, "num_stages": 1}} for parts in (1, 2, 4)],
    "chunk_walk": [
        {"BV": BV, "PIECES": pieces, "walk": {"num_warps": 4, "num_stages": 1}}
        for BV, pieces in itertools.product((16, 32, 64, 128), (1, 3))
    ],
    "kda_decode": every(BV=(16, 32, 64, 128), STREAM=(True, False)),
    "kda_verify": every(BV=(16, 32, 64, 128)),
    "fused_recurrent": every(BV=(16, 32, 64, 128), STREAM=(True, False)),
    "causal_conv1d_fwd": every(BT=(8, 16, 32, 64), BD=(16, 32, 64, 128, 256)),
    "causal_conv1d_update": every(BT=(1, 2, 4, 8), BD=(16, 32, 64, 128, 256, 512, 1024)),
    "rms_norm_gated": every(BR=(16, 32, 64), BD=(64, 128)),
}


def candidates(part: str, device: torch.device) -> list[dict]:
    if device.type == "cpu":
        return CPU[part]
    hip = torch.version.hip is not None
    return [c for c in GPU[part] if not (hip and "maxnreg" in str(c))]  # an option of NVIDIA's compiler


class Sizes(NamedTuple):
    """Of one regime: what is timed on a GPU, on a CPU, and to try the command (`--small`)."""

    gpu: tuple[Work, ...]
    cpu: tuple[Work, ...]
    small: tuple[Work, ...]

    def on(self, device: torch.device, small: bool) -> tuple[Work, ...]:
        return self.small if small else self.cpu if device.type == "cpu" else self.gpu


def _prompts(**kind) -> Sizes:
    return Sizes(
        (Work(64, (8192,), **kind), Work(64, SIX, **kind), Work(16, SIX, **kind)),
        (Work(16, (512,), **kind), Work(16, (300, 700, 24), **kind)),
        (Work(2, (70, 20), **kind),),
    )  # fmt: skip


_MANY = Sizes(
    (Work(64, (8192,)), Work(64, SIX), Work(16, (1024,) * 8)),
    (Work(16, (256,) * 4), Work(64, (256,))),
    (Work(32, (40, 20)),),
)  # fmt: skip
_FEW = Sizes(
    (Work(16, (8192,)), Work(16, (1024,)), Work(8, SIX[:2])),
    (Work(16, (512,)), Work(8, (200, 300))),
    (Work(2, (70,)),),
)  # fmt: skip


def _requests(tokens: int = 1, **kind) -> Sizes:
    return Sizes(
        tuple(Work(H, (tokens,) * N, **kind) for H in (64, 16) for N in (1, 8, 64, 256)),
        tuple(Work(16, (tokens,) * N, **kind) for N in (1, 4, 16)),
        (Work(2, (tokens,) * 2, **kind),),
    )  # fmt: skip


def _joined(*sizes: Sizes) -> Sizes:
    return Sizes(*(tuple(itertools.chain(*works)) for works in zip(*sizes)))


_STATES = {"fp32 states, 128 x 128": dict(), "bf16 states, 128 x 128": dict(state_dtype=BF16)}
_SHORT = Sizes((Work(64, (1024,)), Work(16, (300, 200))), (Work(16, (512,)), Work(16, (100,))), (Work(2, (70, 20)),))
_LONG = Sizes((Work(64, (8192,)), Work(16, SIX)), (Work(16, (2048,)),), (Work(1, (1100,)),))

SIZES: dict[str, dict[str, Sizes]] = {
    "chunk_intra": {
        "bf16, 128 x 128, bounded gate": _prompts(),
        "bf16, 128 x 128, any gate": _prompts(bounded=False),
        "64 x 64": _prompts(D=64),
    },
    "chunk_walk": {
        "bf16, 128 x 128, many heads": _MANY,
        "bf16, 128 x 128, few heads": _FEW,
        "64 x 64": _prompts(D=64),
    },
    "kda_decode": {regime: _requests(**kind) for regime, kind in _STATES.items()},
    "kda_verify": {regime: _requests(4, **kind) for regime, kind in _STATES.items()},
    # Decode, windows and prompts share its regimes, as do batches of any size: a row has to serve them all.
    "fused_recurrent": {
        f"{D} x {D}": _joined(_requests(D=D), Sizes((Work(64, (4,) * 64, D=D),), (Work(16, (4,) * 4, D=D),), ()))
        for D in (128, 64)
    },
    "causal_conv1d_fwd": {"prefill, to 1,024 tokens": _SHORT, "prefill, more tokens": _LONG},
    "causal_conv1d_update": {"decode": _requests(), "windows of 2 to 8": _requests(4)},
    "rms_norm_gated": {"128": _joined(_requests(), Sizes((Work(64, (8192,)),), (Work(16, (512,)),), ()))},
}  # fmt: skip
