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


def _intra_on_gpu() -> list[dict]:
    # Fewer parts: more of a tile in each lane. One warp of a program leaves no product waiting for another's half.
    warps = {1: ((2, None), (4, None)), 2: ((1, None), (1, 200), (1, 168), (2, None), (2, 128), (4, None)),
             4: ((1, None), (1, 168), (1, 128), (2, None), (2, 128))}  # fmt: skip
    return [
        {"PARTS": parts, "intra": {"num_warps": number, "num_stages": 1} | ({"maxnreg": registers} if registers else {})}
        for parts, chosen in warps.items()
        for number, registers in chosen
    ]


def _walk_on_gpu() -> list[dict]:
    # A lane holds 64 or 128 values of the state.
    return [
        {"BV": BV, "walk": {"num_warps": number, "num_stages": stages}}
        for (BV, number), stages in itertools.product(((64, 4), (32, 4), (32, 2), (128, 8)), (2, 3, 4, 5, 6))
    ]


def _states_on_gpu(KI: tuple[int, ...]) -> list[dict]:
    """Slices of a state of 128 x 128 that are 16 to 128 values a lane."""
    return [c for c in every(BV=(32, 64, 128), KI=KI, num_warps=(1, 2, 4, 8)) if 16 <= c["BV"] * 4 // c["num_warps"] <= 128]


def _channels(BT: tuple[int, ...]) -> list[dict]:
    """Rows of channels, 2 to 16 a lane."""
    rows = ((64, 1), (128, 1), (128, 2), (256, 1), (256, 2), (256, 4), (512, 1), (512, 2), (512, 4))
    return [{"BT": bt, "BD": BD, "num_warps": number} for bt in BT for BD, number in rows]


GPU: dict[str, list[dict]] = {
    "kda_decode": _states_on_gpu(KI=(16, 32, 64)),
    "chunk_intra": _intra_on_gpu(),
    "chunk_walk": _walk_on_gpu(),
    # From 8 tokens a program on, as only a sequence's first program may read its history.
    "causal_conv1d_fwd": _channels(BT=(8, 16, 32, 64)),
    "kda_verify": _states_on_gpu(KI=(32, 64)),
    "kda_commit": _states_on_gpu(KI=(32, 64)),
    "fused_recurrent": every(BV=(4, 8, 16, 32), num_warps=(1, 2), num_stages=(1, 3)),
    "causal_conv1d_update": _channels(BT=(1, 2, 4, 8)),
    "rms_norm_gated": every(BR=(16, 32, 64), BD=(128,)),  # warps: by the number of rows, as the defaults have them
    "fused_kda_gate": every(BT=(1, 2, 4, 8), BH=(8, 16), num_warps=(2, 4, 8)),
    "chunk_combine": every(BV=(16, 32), num_warps=(4, 8), num_stages=(1, 2, 3)),
}

# There a program is one thread, whatever its number of warps.
CPU: dict[str, list[dict]] = {
    "kda_decode": every(BV=(16, 32, 64, 128), STREAM=(True, False)),
    "chunk_intra": [{"PARTS": parts, "intra": {"num_warps": 1, "num_stages": 1}} for parts in (1, 2, 4)],
    "chunk_walk": [
        {"BV": BV, "walk": {"num_warps": 4, "num_stages": 1}} for BV in (16, 32, 64, 128)
    ],
    "causal_conv1d_fwd": every(BT=(8, 16, 32), BD=(16, 32, 64, 128, 256), num_warps=(1,)),
    "kda_verify": every(BV=(16, 32, 64, 128)),
    "kda_commit": every(BV=(16, 32, 64, 128)),
    "fused_recurrent": every(BV=(16, 32, 64, 128), STREAM=(True, False)),
    "causal_conv1d_update": every(BT=(1, 2, 4, 8), BD=(16, 32, 64, 128, 256, 512, 1024)),
    "rms_norm_gated": every(BR=(16, 32, 64), BD=(64, 128)),
    "fused_kda_gate": every(BT=(1, 2, 4, 8), BH=(4, 8, 16)),
    "chunk_combine": [],  # walks are not cut into segments there
}


def candidates(part: str, device: torch.device, regime: str = "") -> list[dict]:
    found = CPU[part] if device.type == "cpu" else GPU[part]
    if torch.version.hip is not None:
        found = [c for c in found if "maxnreg" not in str(c)]  # an option of NVIDIA's compiler
    if part == "chunk_walk" and regime == "64 x 64":
        found = [c for c in found if c["BV"] <= 64]
    if part == "causal_conv1d_update" and regime == "decode":
        found = [c for c in found if c["BT"] == 1]  # of one token
    return found


class Sizes(NamedTuple):
    """Of one regime: what is timed on a GPU, on a CPU, and to try the command (`--small`)."""

    gpu: tuple[Work, ...]
    cpu: tuple[Work, ...]
    small: tuple[Work, ...]

    def on(self, device: torch.device, small: bool) -> tuple[Work, ...]:
        if not self.cpu and device.type == "cpu":
            return ()
        return self.small if small else self.cpu if device.type == "cpu" else self.gpu


def _prompts(heads: tuple[int, ...] = (64,), **kind) -> Sizes:
    return Sizes(
        (Work(64, (8192,), **kind), *(Work(H, SIX, **kind) for H in heads)),
        (Work(16, (512,), **kind), Work(16, (300, 700, 24), **kind)),
        (Work(2, (70, 20), **kind),),
    )  # fmt: skip


# On a GPU long prompts of few heads are walked in segments, from 6,144 tokens on: kernels of their own, to be checked too.
CUT = (6200,)
_MANY = Sizes(
    (Work(64, (8192,)), Work(64, SIX), Work(16, (1024,) * 8)),
    (Work(16, (256,) * 4), Work(64, (256,))),
    (Work(32, (40, 20)),),
)  # fmt: skip
_FEW = Sizes(
    (Work(16, (8192,), checked=CUT), Work(16, (1024,)), Work(16, SIX[:2])),
    (Work(16, (512,)), Work(8, (200, 300))),
    (Work(2, (70,)),),
)  # fmt: skip
_CUT = Sizes((Work(16, (8192,), checked=CUT), Work(4, (8192,), checked=CUT)), (), (Work(2, CUT),))


def _requests(tokens: int = 1, few: tuple[int, ...] = (1, 64), **kind) -> Sizes:
    return Sizes(
        tuple(Work(H, (tokens,) * N, **kind) for H, counts in ((64, (1, 8, 64, 256)), (16, few)) for N in counts),
        tuple(Work(16, (tokens,) * N, **kind) for N in (1, 4, 16)),
        (Work(2, (tokens,) * 2, **kind),),
    )  # fmt: skip


def _joined(*sizes: Sizes) -> Sizes:
    return Sizes(*(tuple(itertools.chain(*works)) for works in zip(*sizes)))


_STATES = {"fp32 states, 128 x 128": dict(), "bf16 states, 128 x 128": dict(state_dtype=BF16)}
_WINDOWS = {regime: _requests(4, few=(), **kind) for regime, kind in _STATES.items()}
_SHORT = Sizes((Work(64, (1024,)), Work(16, (300, 200))), (Work(16, (512,)), Work(16, (100,))), (Work(2, (70, 20)),))
_LONG = Sizes((Work(64, (8192,)), Work(16, SIX)), (Work(16, (2048,)),), (Work(1, (1100,)),))

SIZES: dict[str, dict[str, Sizes]] = {
    "kda_decode": {regime: _requests(**kind) for regime, kind in _STATES.items()},
    "chunk_intra": {
        "bf16, 128 x 128, bounded gate": _prompts((64, 16)),
        "bf16, 128 x 128, any gate": _prompts(bounded=False),
        "64 x 64": _prompts(D=64),
    },
    "chunk_walk": {
        "bf16, 128 x 128, many heads": _MANY,
        "bf16, 128 x 128, few heads": _FEW,
        "64 x 64": _prompts(D=64),
    },
    "causal_conv1d_fwd": {"prefill, to 1,024 tokens": _SHORT, "prefill, more tokens": _LONG},
    "kda_verify": _WINDOWS,
    "kda_commit": _WINDOWS,
    # Decode, windows and prompts share its regimes, as do batches of any size: a row has to serve them all.
    "fused_recurrent": {
        f"{D} x {D}": _joined(_requests(D=D), Sizes((Work(64, (4,) * 64, D=D),), (Work(16, (4,) * 4, D=D),), ()))
        for D in (128, 64)
    },
    "causal_conv1d_update": {"decode": _requests(), "windows of 2 to 8": _requests(4)},
    "rms_norm_gated": {"128": _joined(_requests(), Sizes((Work(64, (8192,)),), (Work(16, (512,)),), ()))},
    "fused_kda_gate": {"K of 128, to 1,024 tokens": _SHORT, "K of 128, more tokens": _LONG},
    "chunk_combine": {"128 x 128": _CUT},
}  # fmt: skip
