#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The reference backend beside transformers' PyTorch path, on this CPU.

    python bench/cpu_reference.py --out DIR

H=16, D=128, bf16: prefill of 512 tokens, chunked and token by token; one decode step of batches of 1 and 16.
All get the log decay and beta ready made and normalise q and k themselves. Calls take turns; medians.
Writes DIR/cpu_reference.json, in the format of `python -m kda bench`.
"""
from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kda  # noqa: E402
from kda.cli.bench import measure  # noqa: E402
from kda.cli.bench.peers import transformers_forms  # noqa: E402
from kda.cli.bench.rows import Results, Row, machine  # noqa: E402
from kda.cli.check import err  # noqa: E402

H, D, T = 16, 128, 512


def inputs(B: int, T: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v [B, T, H, D], log decay g [B, T, H, D] fp32, beta [B, T, H]; state [B, H, V, K] fp32."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(B, T, H, D, generator=gen) for _ in range(4))
    beta = torch.randn(B, T, H, generator=gen).sigmoid()
    x = [t.to(torch.bfloat16) for t in (q, k, v)] + [-5 * torch.sigmoid(g - 4), beta.to(torch.bfloat16)]
    return x, torch.randn(B, H, D, D, generator=gen) * 0.1


def chunk(x: list[Tensor], state: Tensor):
    return kda.chunk_kda(*x, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)


def recurrent(x: list[Tensor], state: Tensor):
    return kda.fused_recurrent_kda(*x, initial_state=state, inplace_final_state=True, use_qk_l2norm_in_kernel=True)


def timed(results: Results, row: Row, calls: dict, tokens: int, seconds: float) -> None:
    row.ms = measure.in_turn({name: measure.on_cpu(call) for name, call in calls.items()}, seconds)
    results.add(row)
    for name, t in row.ms.items():
        rate, ratio = tokens / t["ms"] * 1e3, row.ms["transformers"]["ms"] / t["ms"]
        print(f"{row.part} {row.name}: {name:24} {t['ms']:9.3f} ms {rate:10,.0f} tokens/s {ratio:6.2f}x transformers",
              flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=6, help="of calls for a row")
    opts = parser.parse_args()

    forms = transformers_forms()
    about = machine() | dict(kind="cpu", threads=torch.get_num_threads(), backend="reference", command=" ".join(sys.argv))
    results = Results(opts.out, about, (), fresh=True, file="cpu_reference.json")
    x, state = inputs(1, T)
    flipped = state.transpose(-1, -2).contiguous()  # they keep states [B, H, K, V]
    ref_o, ref_s = forms["transformers"]([t.float() for t in x], flipped)
    o, s = chunk(x, state)
    print(f"{about['cpu']}, {about['threads']} threads; chunk against transformers' recurrence in fp32: output "
          f"{err(o, ref_o):.1e}, state {err(s.transpose(-1, -2), ref_s):.1e}", flush=True)  # fmt: skip
    calls = {"kda, chunk": partial(chunk, x, state), "kda, recurrent": partial(recurrent, x, state)}
    calls |= {name: partial(form, x, flipped) for name, form in forms.items()}
    timed(results, Row("prefill", f"T={T}", dict(H=H, T=T)), calls, T, 4 * opts.seconds)
    for B in (1, 16):
        x, state = inputs(B, 1)
        flipped = state.transpose(-1, -2).contiguous()
        calls = {
            "kda, recurrent": partial(recurrent, x, state), "transformers": partial(forms["transformers"], x, flipped),
        }  # fmt: skip
        timed(results, Row("decode", f"N={B}", dict(H=H, N=B)), calls, B, opts.seconds)
    return 0


if __name__ == "__main__":
    with torch.no_grad(), kda.use_backend("reference"):
        sys.exit(main())
