# SPDX-License-Identifier: Apache-2.0
"""How long a call keeps the host: this checkout's kda, or those of several checkouts whose processes take turns.

    python bench/launches.py [--rounds N] [CHECKOUT ...]

Medians in microseconds of calls after a synchronisation, beside torch's `add_`, which launches one small kernel. For a GPU.
"""
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

CALLS = 400


def layer(device, H: int, N: int, T: int | None = None, D: int = 128, W: int = 4) -> dict:
    """Arguments of kda_decode for N requests, or with T of kda_prefill for N prompts of T tokens together."""
    def tokens(*shape):
        return torch.randn(T or N, *shape, device=device, dtype=torch.bfloat16)

    given = dict(
        qkv=tokens(3 * H * D), raw_g=tokens(H, D), beta=tokens(H), out_gate=tokens(H, D), out=tokens(H, D),
        conv_state=torch.zeros(N + 1, 3 * H * D, W - 1, device=device, dtype=torch.bfloat16),
        ssm_state=torch.zeros(N + 1, H, D, D, device=device), norm_weight=torch.ones(D, device=device),
        ssm_state_indices=torch.arange(1, N + 1, device=device, dtype=torch.int32), A_log=torch.zeros(H, device=device),
        conv_weight=torch.randn(3 * H * D, W, device=device).bfloat16(), g_bias=torch.zeros(H * D, device=device),
    )  # fmt: skip
    if T:
        given |= dict(
            cu_seqlens=torch.tensor([n * T // N for n in range(N + 1)], device=device, dtype=torch.int32),
            has_initial_state=torch.ones(N, device=device, dtype=torch.bool),
        )
    return given


def measure() -> dict[str, float]:
    import kda  # of the checkout at hand

    device = torch.device("cuda")
    one, few = torch.ones(1, device=device), layer(device, 64, 8)
    long, short = layer(device, 16, 6, 8192), layer(device, 16, 2, 256)
    q, k, v, g = (torch.randn(1, 1024, 16, 128, device=device, dtype=torch.bfloat16) for _ in range(4))
    rule = (q, k, v, g, g[..., 0].contiguous(), torch.zeros(16, device=device), None)
    flags = dict(use_qk_l2norm_in_kernel=True, sigmoid_beta=True, output_final_state=True,
                 initial_state=torch.zeros(1, 16, 128, 128, device=device))  # fmt: skip
    calls = {
        "torch's add_": lambda: one.add_(1),
        "kda_decode, 8 requests of 64 heads": lambda: kda.kda_decode(**few),
        "kda_prefill, 8,192 tokens of 16 heads": lambda: kda.kda_prefill(**long),
        "kda_prefill, 256 tokens of 16 heads": lambda: kda.kda_prefill(**short),
        "chunk_kda_with_fused_gate, 1,024 tokens of 16 heads": lambda: kda.chunk_kda_with_fused_gate(*rule, **flags),
    }
    found = {}
    for name, call in calls.items():
        for _ in range(5):
            call()
        times = []
        for _ in range(CALLS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begin))
        found[name] = statistics.median(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sys.path.insert(0, str(args.checkouts[0]))
        print(json.dumps(measure()))
        return
    rounds: list[list[dict[str, float]]] = [[] for _ in args.checkouts]
    for n in range(args.rounds):
        for checkout, found in zip(args.checkouts, rounds):
            print(f"round {n + 1} of {args.rounds}: {checkout}", file=sys.stderr)
            command = [sys.executable, __file__, "--one", str(checkout.resolve())]
            found.append(json.loads(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout))
    print("| us |", *(f"{checkout} |" for checkout in args.checkouts))
    print("|---" * (1 + len(args.checkouts)) + "|")
    for name in rounds[0][0]:
        print(f"| {name} |", *(f"{statistics.median(x[name] for x in found):.1f} |" for found in rounds))


if __name__ == "__main__":
    main()
