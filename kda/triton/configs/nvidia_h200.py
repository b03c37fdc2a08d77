# SPDX-License-Identifier: Apache-2.0
"""NVIDIA H200: measured configurations, by kernel and regime (regimes.py), each with its evidence.

Rows override entries of the defaults. Figures are medians of CUDA graph replays, bf16 activations, head dims of 128, with
torch 2.11 and Triton 3.6, on 2026-11-29 and 30; more of them in docs/design.md, and in bench/results/ where a file is named.
H100 and GH200 have the same multiprocessors and take the same rows, not measured there.
"""
from kda.triton.configs.table import Row

NAMES = ("H200", "H100", "GH200")

TABLE = {
    "chunk_intra": {
        "bf16, 128 x 128, bounded gate": Row(
            {"PARTS": 2, "intra": {"num_warps": 1, "num_stages": 1}},
            "8,192 tokens of 64 heads: 0.41 to 0.43 ms",
        ),
        "bf16, 128 x 128, any gate": Row(
            {"PARTS": 2, "intra": {"num_warps": 2, "num_stages": 1, "maxnreg": 128}},
            "by registers and spills of the compiled code: levels take more than one warp has; not timed apart",
        ),
    },
    "chunk_walk": {
        "bf16, 128 x 128, many heads": Row(
            {"BV": 64, "PIECES": 3, "walk": {"num_warps": 4, "num_stages": 4}},
            "8,192 tokens of 64 heads: 0.27 ms, 0.53 us a step; with 3 stages 0.34 ms",
        ),
        "bf16, 128 x 128, few heads": Row(
            {"BV": 64, "PIECES": 3, "walk": {"num_warps": 4, "num_stages": 4}},
            "65,536 tokens of 16 heads, in 8 segments: 1.98 ms in all; with {BV: 128, num_warps: 8} 2.09 ms",
        ),
    },
    "kda_decode": {
        "fp32 states, 128 x 128": Row(
            {"BV": 128, "KI": 32, "num_warps": 4},
            "1, 8 requests of 64 heads: 4.9, 16.0 us; {BV: 64, num_warps: 2} takes 14.4 us for 8, but sums in another order",
        ),
        "bf16 states, 128 x 128": Row(
            {"BV": 64, "KI": 64, "num_warps": 2},
            "8, 256 requests of 64 heads: 9.3, 334 us; {BV: 128, num_warps: 4}: 10.8, 374 us; 2026-11-30",
        ),
    },
    "fused_recurrent": {
        "128 x 128": Row(
            {"BV": 8, "num_warps": 1, "num_stages": 3},
            "decode of 1, 8, 64, 256 requests of 64 heads: 4.3, 15.3, 134.8, 527.9 us; 2026-11-29, gpu-decode.json",
        ),
    },
    "causal_conv1d_fwd": {
        "prefill, more tokens": Row(
            {"BT": 32, "BD": 128, "num_warps": 1},
            "8,192 tokens, 24,576 channels: 235 us, 1.22x of the byte floor; {BT: 16, BD: 256}: 314; 2026-11-30",
        ),
    },
    "causal_conv1d_update": {
        "decode": Row(
            {"BT": 1, "BD": 256, "num_warps": 2},
            "1, 8, 64, 256 requests, 24,576 channels: 3.2, 4.3, 14.0, 53.8 us; 2026-11-29, gpu-ops.json",
        ),
    },
    "rms_norm_gated": {
        "128": Row(
            {"BR": 16, "BD": 128, "num_warps": 4},
            "1, 8, 64, 256 requests of 64 heads: 2.6, 2.7, 3.1, 5.1 us; 2026-11-29, gpu-ops.json",
        ),
    },
}
