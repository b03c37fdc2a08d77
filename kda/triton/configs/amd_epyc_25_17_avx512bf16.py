# SPDX-License-Identifier: Apache-2.0
"""AMD EPYC (AMD family 25 model 17), avx512bf16: measured configurations.

Rows by kernel and regime (regimes.py), each with its evidence.

Rows with a ratio to the former row: `python -m kda tune`, each on its date.
"""
from kda.triton.configs.table import Row

NAMES = ("AMD family 25 model 17, avx512bf16",)

TABLE = {
    "chunk_walk": {
        "bf16, 128 x 128, many heads": Row(
            {"BV": 128, "walk": {"num_warps": 4, "num_stages": 1}},
            "0.677x the former row, spread 0.003; H=16 T=4 x 256: 9.482 ms, 0.678x; H=64 T=1 x 256: 9.561 ms, "
            "0.676x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
        "bf16, 128 x 128, few heads": Row(
            {"BV": 128, "walk": {"num_warps": 4, "num_stages": 1}},
            "0.715x the former row, spread 0.025; H=16 T=1 x 512: 4.870 ms, 0.715x; H=8 T=500 in 2: 2.572 ms, "
            "0.716x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
        "64 x 64": Row(
            {"BV": 32, "walk": {"num_warps": 4, "num_stages": 1}},
            "0.785x the former row, spread 0.029; H=16 T=1 x 512: 2.398 ms, 0.787x; H=16 T=1024 in 3: 6.310 ms, "
            "0.783x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
    },
    "kda_verify": {
        "fp32 states, 128 x 128": Row(
            {"BV": 128},
            "0.946x the former row, spread 0.011; H=16 T=1 x 4: 263.9 us, 0.958x; H=16 T=4 x 4: 927.4 us, 0.938x; "
            "H=16 T=16 x 4: 3.742 ms, 0.943x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
        "bf16 states, 128 x 128": Row(
            {"BV": 128},
            "0.968x the former row, spread 0.009; H=16 T=1 x 4: 234.2 us, 0.971x; H=16 T=4 x 4: 839.3 us, 0.964x; "
            "H=16 T=16 x 4: 3.384 ms, 0.968x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
    },
    "kda_commit": {
        "fp32 states, 128 x 128": Row(
            {"BV": 128},
            "0.975x the former row, spread 0.010; H=16 T=1 x 4: 114.3 us, 0.988x; H=16 T=4 x 4: 399.7 us, 0.967x; "
            "H=16 T=16 x 4: 1.552 ms, 0.971x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
        "bf16 states, 128 x 128": Row(
            {"BV": 128},
            "0.945x the former row, spread 0.027; H=16 T=1 x 4: 108.1 us, 0.945x; H=16 T=4 x 4: 379.6 us, 0.948x; "
            "H=16 T=16 x 4: 1.443 ms, 0.942x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
    },
    "causal_conv1d_update": {
        "decode": Row(
            {"BT": 1, "BD": 32},
            "0.885x the former row, spread 0.013; H=16 T=1 x 1: 27.1 us, 0.933x; H=16 T=4 x 1: 52.4 us, 0.882x; "
            "H=16 T=16 x 1: 155.9 us, 0.841x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
        "windows of 2 to 8": Row(
            {"BT": 4, "BD": 128},
            "0.977x the former row, spread 0.008; H=16 T=1 x 4: 44.8 us, 0.987x; H=16 T=4 x 4: 126.7 us, 0.977x; "
            "H=16 T=16 x 4: 415.3 us, 0.969x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
    },
    "fused_kda_gate": {
        "K of 128, to 1,024 tokens": Row(
            {"BT": 4, "BH": 8},
            "0.923x the former row, spread 0.006; H=16 T=1 x 512: 336.3 us, 0.910x; H=16 T=1 x 100: 84.1 us, "
            "0.937x; 2026-11-30, torch 2.13.0+cpu, Triton 3.9.0, 2 threads",
        ),
        "K of 128, more tokens": Row(
            {"BT": 1, "BH": 8},
            "0.938x the former row, spread 0.019; H=16 T=1 x 2048: 1.526 ms, 0.938x; 2026-11-30, torch 2.13.0+cpu, "
            "Triton 3.9.0, 2 threads",
        ),
    },
}
