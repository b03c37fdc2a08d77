#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The reference backend beside transformers' PyTorch path, on this CPU.

    python bench/cpu_reference.py

H=16, D=128, bf16: prefill of 512 tokens, chunked and token by token; one decode step of batches of 1 and 16.
All get the log decay and beta ready made and normalise q and k themselves. Calls alternate between the two;
medians. Writes bench/results/cpu_reference.json.
"""
from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

import torch
from torch import Tensor

import kda
from common import Results, copy_bytes_per_s, side_by_side_ms
from kda.cli.check import err

H, D = 16, 128


def inputs(B: int, T: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v [B, T, H, D], log decay g [B, T, H, D] fp32, beta [B, T, H]; state [B, H, V, K] fp32."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(B, T, H, D, generator=gen) for _ in range(4))
    beta = torch.randn(B, T, H, generator=gen).sigmoid()
    x = [t.to(torch.bfloat16) for t in (q, k, v)] + [-5 * torch.sigmoid(g - 4), beta.to(torch.bfloat16)]
    return x, torch.randn(B, H, D, D, generator=gen) * 0.1


def theirs(fn, x: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """transformers keeps the state [B, H, K, V]; `state` comes so. Unwrapped it does not go to fla's kernels."""
    return inspect.unwrap(fn)(*x, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--runs", type=int, default=9, help="calls a prefill; a decode step 20 times that")
    opts = parser.parse_args()

    from transformers.models.glm5_next.modeling_glm5_next import (
        chunk_kimi_delta_attention,
        recurrent_kimi_delta_attention,
    )
    from transformers.utils import logging

    logging.set_verbosity_error()
    bandwidth = copy_bytes_per_s("cpu", 512)
    results = Results(opts.out / "cpu_reference.json", command=sys.argv, copy_bytes_per_s=bandwidth, H=H, D=D)
    print(f"{results.data['machine']['cpu']}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
          f"copy {bandwidth / 1e9:.1f} GB/s", flush=True)

    T = 512
    x, state = inputs(1, T)
    flipped = state.transpose(-1, -2).contiguous()

    def our_chunk():
        return kda.chunk_kda(*x, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def our_recurrent():
        return kda.fused_recurrent_kda(
            *x, initial_state=state, inplace_final_state=True, use_qk_l2norm_in_kernel=True)

    ref_o, ref_s = theirs(recurrent_kimi_delta_attention, [t.float() for t in x], flipped)
    o, s = our_chunk()
    print(f"chunk against transformers' recurrence in fp32: output {err(o, ref_o):.1e}, "
          f"state {err(s.transpose(-1, -2), ref_s):.1e}", flush=True)
    fns = {
        "kda chunk": our_chunk,
        "kda recurrent": our_recurrent,
        "transformers recurrent": lambda: theirs(recurrent_kimi_delta_attention, x, flipped),
        "transformers chunk": lambda: theirs(chunk_kimi_delta_attention, x, flipped),
    }
    ms = side_by_side_ms(fns, opts.runs)
    base = ms["transformers recurrent"]
    for name, t in ms.items():
        results.add(
            "prefill",
            f"prefill T={T}: {name:24} {t:8.1f} ms {T / t * 1e3:10,.0f} tokens/s "
            f"{base / t:6.2f}x transformers recurrent",
            name=name, T=T, ms=t, tokens_per_s=T / t * 1e3, over_transformers_recurrent=base / t,
        )

    for B in (1, 16):
        x, state = inputs(B, 1)
        flipped = state.transpose(-1, -2).contiguous()

        fns = {
            "kda recurrent": our_recurrent,
            "transformers recurrent": lambda: theirs(recurrent_kimi_delta_attention, x, flipped),
        }
        ms = side_by_side_ms(fns, opts.runs * 20)
        base = ms["transformers recurrent"]
        for name, t in ms.items():
            rate = 2 * state.numel() * 4 / (t * 1e-3)
            results.add(
                "decode",
                f"decode batch {B:2}: {name:24} {t:8.3f} ms {rate / 1e9:8.1f} GB/s of state "
                f"({rate / bandwidth:.0%} of copy) {base / t:6.2f}x transformers",
                name=name, batch=B, ms=t, state_bytes_per_s=rate, share_of_copy=rate / bandwidth,
                over_transformers_recurrent=base / t,
            )
    return 0


if __name__ == "__main__":
    with torch.no_grad(), kda.use_backend("reference"):
        sys.exit(main())
