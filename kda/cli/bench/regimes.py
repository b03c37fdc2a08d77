# SPDX-License-Identifier: Apache-2.0
"""What is measured: the shapes of every part, by device. `rank` is the order in which they are measured, 0 first.

Heads are of 128, tensors bf16, states fp32. `full` rows time every variant and peer; the others are points of a plot.
"""
from __future__ import annotations

from typing import NamedTuple

PARTS = ("prefill", "decode", "accuracy", "layer", "speculation", "ops", "isa", "first")
USUAL = {  # others run on a device when they are named
    "cuda": ("prefill", "decode", "accuracy", "layer", "speculation", "ops"),
    "cpu": ("prefill", "decode", "isa", "first"),
}
ISAS = ("amx", "avx512bf16", "avx512", "avx2")
OPERATIONS = (
    "causal_conv1d_fn", "causal_conv1d_update", "fused_kda_gate", "chunk_kda", "chunk_kda_with_fused_gate",
    "fused_recurrent_kda", "rms_norm_gated", "gather_initial_states", "scatter_states",
)  # fmt: skip
SIX = [1300, 547, 2048, 963, 271, 3063]
DTYPES = ("bfloat16", "float16", "float32")


class Case(NamedTuple):
    part: str
    name: str
    dims: dict
    rank: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.name


def cases(device: str, quick: bool, all_peers: bool = False) -> list[Case]:
    """All cases of a device ("cuda" or "cpu"), in the order of `rank`, by name once."""
    found = QUICK() if quick else GPU(all_peers) if device == "cuda" else CPU()
    once: dict[tuple[str, str], Case] = {}
    for case in found:
        once.setdefault(case.key, case)
    return sorted(once.values(), key=lambda case: case.rank)


def prompts(lens: list[int]) -> str:
    T, N = sum(lens), len(lens)
    what = "one sequence" if N == 1 else f"{N} x {lens[0]}" if len(set(lens)) == 1 else f"{N} sequences"
    return f"T={T}, {what}"


def prefill(H: int, lens: list[int], rank: int = 0, full: bool = True, triton_peers: bool = False) -> Case:
    beside = ", beside vLLM's and fla's Triton" if triton_peers else ""
    dims = dict(H=H, lens=lens, full=full, triton_peers=triton_peers)
    return Case("prefill", f"H={H} {prompts(lens)}{beside}", dims, rank)


def decode(H: int, N: int, rank: int = 0, full: bool = True, states: str | None = None) -> Case:
    """`states`: "hot", the same ones every call, or "cold", others than those that the caches hold."""
    dims = dict(H=H, N=N, full=full, states=states)
    return Case("decode", f"H={H} N={N}" + (f", {states} states" if states else ""), dims, rank)


def accuracy(H: int, lens: list[int], dtype: str, bounded: bool, rank: int = 1) -> Case:
    gate = "bounded" if bounded else "unbounded"
    return Case("accuracy", f"{dtype}, {gate}, H={H} {prompts(lens)}", dict(H=H, lens=lens, dtype=dtype, bounded=bounded), rank)


def alike(gate: float, lens: list[int], rank: int = 1) -> Case:
    dims = dict(H=8, lens=lens, dtype="bfloat16", bounded=True, alike=gate)
    return Case("accuracy", f"keys alike, gate {gate:g}, {prompts(lens)}", dims, rank)


def layer(H: int, lens: list[int], every: int, rank: int = 1) -> Case:
    return Case("layer", f"H={H} {prompts(lens)}", dict(H=H, lens=lens, every=every), rank)


def speculation(H: int, N: int, window: int, rank: int = 1) -> Case:
    return Case("speculation", f"H={H} N={N} window={window}", dict(H=H, N=N, window=window), rank)


def operation(op: str, H: int, rank: int = 2, lens: list[int] | None = None, N: int | None = None) -> Case:
    return Case("ops", f"{op} H={H} " + (f"N={N}" if lens is None else prompts(lens)), dict(op=op, H=H, lens=lens, N=N), rank)


def operations(heads: tuple[int, ...], lens: list[int], batches: tuple[int, ...], rank: int = 2) -> list[Case]:
    found = []
    for H in heads:
        for op in ("causal_conv1d_fn", "fused_kda_gate", "FusedRMSNormGated"):
            found.append(operation(op, H, rank, lens=lens))
        for N in batches:
            for op in ("causal_conv1d_update", "FusedRMSNormGated", "gather_initial_states", "scatter_states"):
                found.append(operation(op, H, rank, N=N))
    return found


def GPU(all_peers: bool) -> list[Case]:
    found = [prefill(H, lens) for H in (64, 16) for lens in ([8192], SIX, [1024] * 8)]
    found += [prefill(16, [1024]), prefill(16, [65536])]
    found += [decode(H, N) for H in (64, 16) for N in (1, 8, 64, 256)]
    lens, long = [459, 64, 1, 17, 200, 283], [8192]
    found += [accuracy(8, lens, dtype, bounded) for dtype in DTYPES for bounded in (True, False)]
    found += [accuracy(2, long, "bfloat16", bounded) for bounded in (True, False)]
    found += [alike(gate, [1024]) for gate in (-40.0, -8.0, -5.5)]  # decays of 1, 0.998 and 0.98 a token
    found += [layer(64, [8192], 512), layer(64, SIX, 512), layer(16, SIX, 512)]
    for window, rank in ((4, 1), (2, 2), (8, 2)):
        found += [speculation(H, N, window, rank) for H, N in ((64, 1), (64, 8), (64, 64), (16, 8), (16, 64), (16, 256))]
    found += operations((64, 16), SIX, (1, 8, 64, 256))
    # points of the plots: over tokens, over batch, over heads
    found += [prefill(H, [T], 2, full=False) for H in (16, 64) for T in (256, 1024, 4096, 16384, 65536)]
    found += [decode(H, N, 2, full=False) for H in (16, 64) for N in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
    found += [prefill(H, [8192], 3, full=False) for H in (4, 8, 32)]
    found += [decode(H, 64, 3, full=False) for H in (4, 8, 32)]
    if all_peers:
        found += [prefill(H, lens, 4, triton_peers=True) for H, lens in ((64, SIX), (16, SIX), (16, [1024]))]
    return found


def CPU() -> list[Case]:
    found = [prefill(16, [T]) for T in (512, 64, 2048, 1)]
    found += [decode(16, N, states=states) for N in (1, 16, 64) for states in ("cold", "hot")]
    for path in ISAS:
        found.append(Case("isa", f"{path}: prefill T=512", dict(path=path, part="prefill", H=16, lens=[512]), 1))
        found.append(Case("isa", f"{path}: decode N=16", dict(path=path, part="decode", H=16, N=16), 1))
    found += [Case("first", op, dict(operation=op), 1) for op in OPERATIONS]
    found += [prefill(16, [T], 2, full=False) for T in (16, 256, 1024, 8192)]
    found += [decode(16, N, 2, full=False, states="cold") for N in (4, 32, 128, 256)]
    found += [prefill(H, [512], 3, full=False) for H in (4, 8, 32, 64)]
    found += [decode(H, 16, 3, full=False, states="cold") for H in (4, 8, 32, 64)]
    # when they are named
    lens, long = [459, 64, 1, 17, 200, 283], [8192]
    found += [accuracy(8, lens, dtype, bounded) for dtype in DTYPES for bounded in (True, False)]
    found += [accuracy(2, long, "bfloat16", bounded) for bounded in (True, False)]
    found += [alike(gate, [1024]) for gate in (-40.0, -8.0, -5.5)]
    found += [layer(16, [512], 128), layer(16, [300, 20, 192], 128)]
    found += [speculation(16, N, window) for N in (1, 16) for window in (2, 4, 8)]
    return found + operations((16,), [512], (1, 16))


def QUICK() -> list[Case]:
    found = [prefill(2, [70]), prefill(2, [33, 5, 12]), prefill(2, [20], 2, full=False), prefill(1, [70], 2, full=False)]
    found += [decode(2, 1), decode(2, 3), decode(2, 2, 2, full=False), decode(1, 3, 2, full=False)]
    found += [decode(2, 2, 2, states=states) for states in ("hot", "cold")]
    found += [prefill(2, [40], 3, triton_peers=True)]
    lens = [70, 1, 17]
    found += [accuracy(2, lens, dtype, bounded) for dtype in DTYPES for bounded in (True, False)]
    found += [alike(-8.0, lens), layer(2, [70, 5], 16), speculation(2, 3, 2)]
    found += operations((2,), [70, 5], (2,))
    for path in ISAS:
        found.append(Case("isa", f"{path}: prefill T=70", dict(path=path, part="prefill", H=2, lens=[70]), 1))
        found.append(Case("isa", f"{path}: decode N=2", dict(path=path, part="decode", H=2, N=2), 1))
    return found + [Case("first", op, dict(operation=op), 2) for op in ("chunk_kda", "rms_norm_gated")]
