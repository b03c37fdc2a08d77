# SPDX-License-Identifier: Apache-2.0
"""NVIDIA H200: measured configurations, by kernel and regime (regimes.py), each with its evidence.

Rows override entries of the defaults. Figures are medians of CUDA graph replays, bf16 activations, head dims of 128, with
torch 2.11 and Triton 3.6, on 2026-11-29 and 30; more of them in docs/design.md and bench/results/h200.
H100 and GH200 have the same multiprocessors and take the same rows, not measured there.

Rows with a ratio to the former row: `python -m kda tune`, each on its date.
"""
from kda.triton.configs.table import Row

NAMES = ("H200", "H100", "GH200")

TABLE = {
    "chunk_intra": {
        "bf16, 128 x 128, bounded gate": Row(
            {"PARTS": 2, "intra": {"num_warps": 1, "num_stages": 1}},
            "8,192 tokens of 64 heads: 0.42 ms; {PARTS: 4} 0.45, of two warps 0.51; 2026-11-30",
        ),
        "bf16, 128 x 128, any gate": Row(
            {"PARTS": 2, "intra": {"num_warps": 2, "num_stages": 1}},
            "0.919x the former row, spread 0.004; H=64 T=1 x 8192: 762.8 us, 0.916x; H=64 T=8192 in 6: 778.3 us, "
            "0.923x; 2026-11-30, torch 2.11.0+cu130, Triton 3.6.0",
        ),
        "64 x 64": Row(
            {"PARTS": 1, "intra": {"num_warps": 2, "num_stages": 1}},
            "0.814x the former row, spread 0.004; H=64 T=1 x 8192: 543.8 us, 0.820x; H=64 T=8192 in 6: 562.5 us, "
            "0.808x; 2026-11-30, torch 2.11.0+cu130, Triton 3.6.0",
        ),
    },
    "chunk_walk": {
        "bf16, 128 x 128, many heads": Row(
            {"BV": 64, "walk": {"num_warps": 4, "num_stages": 5}},
            "8,192 tokens of 64 heads: 0.29 ms, 0.57 us a step; with 3 stages 0.35 ms; 2026-11-30",
        ),
        "bf16, 128 x 128, few heads": Row(
            {"BV": 64, "walk": {"num_warps": 4, "num_stages": 5}},
            "65,536 tokens of 16 heads, in 8 segments: 1.87 ms in all; 2026-11-30",
        ),
        "64 x 64": Row(
            {"BV": 64, "walk": {"num_warps": 4, "num_stages": 3}},
            "0.724x the former row, spread 0.001; H=64 T=1 x 8192: 1.107 ms, 0.630x; H=64 T=8192 in 6: 626.5 us, "
            "0.833x; 2026-11-30, torch 2.11.0+cu130, Triton 3.6.0",
        ),
    },
    "chunk_combine": {
        "128 x 128": Row(
            {"BV": 16, "num_warps": 8, "num_stages": 3},
            "0.738x the former row, spread 0.018; H=16 T=1 x 8192: 18.7 us; 2026-11-30, torch 2.11.0+cu130, Triton 3.6.0",
        ),
    },
    "kda_decode": {
        "fp32 states, 128 x 128": Row(
            {"BV": 128, "KI": 64, "num_warps": 4},
            "0.961x the former row, spread 0.002; H=64 T=1 x 1: 6.6 us, 0.991x; H=64 T=8 x 1: 22.0 us, 0.942x; "
            "H=64 T=64 x 1: 143.6 us, 0.953x; H=64 T=256 x 1: 559.0 us, 0.957x; H=16 T=1 x 1: 5.5 us, 0.981x; H=16 "
            "T=64 x 1: 40.3 us, 0.943x; 2026-11-30, torch 2.11.0+cu130, Triton 3.6.0",
        ),
        "bf16 states, 128 x 128": Row(
            {"BV": 64, "KI": 64, "num_warps": 2},
            "8, 256 requests of 64 heads: 9.3, 334 us; {BV: 128, num_warps: 4}: 10.8, 374 us; 2026-11-30",
        ),
    },
    "kda_commit": {
        "fp32 states, 128 x 128": Row(
            {"BV": 128, "KI": 64, "num_warps": 4},
            "0.971x the former row, spread 0.002; H=64 T=1 x 4: 7.2 us, 0.988x; H=64 T=8 x 4: 24.2 us, 0.971x; "
            "H=64 T=64 x 4: 153.2 us, 0.962x; H=64 T=256 x 4: 595.3 us, 0.964x; 2026-11-30, torch 2.11.0+cu130, "
            "Triton 3.6.0",
        ),
    },
    "fused_recurrent": {
        "128 x 128": Row(
            {"BV": 8, "num_warps": 1, "num_stages": 3},
            "decode of 1, 8, 64, 256 requests of 64 heads: 4.3, 15.3, 134.8, 527.9 us; 2026-11-29",
        ),
        "64 x 64": Row(
            {"BV": 16, "num_warps": 1, "num_stages": 3},
            "0.916x the former row, spread 0.003; H=64 T=1 x 1: 3.4 us, 0.968x; H=64 T=8 x 1: 6.9 us, 0.892x; H=64 "
            "T=64 x 1: 39.4 us, 0.913x; H=64 T=256 x 1: 144.5 us, 0.894x; H=16 T=1 x 1: 3.1 us, 0.996x; H=16 T=64 "
            "x 1: 11.8 us, 0.961x; H=64 T=64 x 4: 69.3 us, 0.802x; 2026-11-30, torch 2.11.0+cu130, Triton 3.6.0",
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
            {"BT": 1, "BD": 256, "num_warps": 4},
            "1, 8, 64, 256 requests of 64 heads: 2.7, 4.2, 11.4, 36.9 us; {BD: 128, num_warps: 4}: 5.3, 3.8, 10.3, 39.9; {BD: 512, "
            "num_warps: 8}: 3.3, 4.1, 11.3, 36.5; 2026-11-30",
        ),
        "windows of 2 to 8": Row(
            {"BT": 4, "BD": 128, "num_warps": 2},
            "0.847x the former row, spread 0.009; H=64 T=1 x 4: 2.3 us, 0.876x; H=64 T=8 x 4: 3.9 us, 0.795x; H=64 "
            "T=64 x 4: 16.6 us, 0.862x; H=64 T=256 x 4: 60.4 us, 0.926x; H=16 T=1 x 4: 1.9 us, 0.806x; H=16 T=64 x "
            "4: 5.8 us, 0.825x; 2026-11-30, torch 2.11.0+cu130, Triton 3.6.0",
        ),
    },
    "rms_norm_gated": {
        "128": Row(
            {"BR": 16, "BD": 128},
            "1, 64, 256 requests of 64 heads, four warps: 2.8, 3.5, 6.1 us (two: 3.7, 3.6, 6.0); 8,192 tokens of 64, 16 heads, "
            "two warps: 106.6, 30.6 us (four: 119.3, 33.0); {BR: 32 or 64} is no better; 2026-11-30",
        ),
    },
    "fused_kda_gate": {
        "K of 128, to 1,024 tokens": Row(
            {"BT": 1, "BH": 8, "num_warps": 4},
            "0.945x the former row, spread 0.002; H=64 T=1 x 1024: 13.7 us, 0.921x; H=16 T=500 in 2: 3.0 us, "
            "0.969x; 2026-11-30, torch 2.11.0+cu130, Triton 3.6.0",
        ),
        "K of 128, more tokens": Row(
            {"BT": 1, "BH": 8, "num_warps": 4},
            "0.926x the former row, spread 0.002; H=64 T=1 x 8192: 100.0 us, 0.942x; H=16 T=8192 in 6: 26.5 us, "
            "0.910x; 2026-11-30, torch 2.11.0+cu130, Triton 3.6.0",
        ),
    },
}
