#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding's two ways: bytes a request, and times of a step's verify rows.

    PYTHONPATH=. python bench/speculation.py --out DIR

full       a recurrent state a token (`ssm_state_indices` [N, window], as vLLM has them): convolution update, recurrence
           and gated norm, three launches
recovery   one checkpoint and compact records: `kda_verify`, which commits the last window first
apart      the same as `kda_verify` and `kda_commit`, for requests that go on otherwise

All go through `kda_forward`, on windows of which a random number of tokens was accepted. The floor is the bytes of states
and records, read and written, over the bandwidth of a copy. Times are medians out of a CUDA graph, without a GPU those of
whole calls taken in turn. DIR/speculation.json is written row by row. Exit status 1 when the two ways' outputs differ by
more than twice the contract's bound. With --small, small shapes, to try the script.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import kda
from common import Results, copy_bytes_per_s, graph_ms, side_by_side_ms, synchronises
from gpu import attempt, ratio, show, times
from kda.cli.check import BOUNDS, err
from kda.serving import Batch, Geometry, StatePool, kda_forward

D, W = 128, 4
BF16 = torch.bfloat16
DEV = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [(64, 1), (64, 8), (64, 64), (16, 8), (16, 64), (16, 256)]  # heads, requests
WINDOWS = [2, 4, 8]


def ints(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEV)


class Step:
    """N requests of H heads with a window of tokens each, in random states; both ways from the same ones."""

    def __init__(self, H: int, N: int, window: int) -> None:
        gen = torch.Generator(DEV).manual_seed(0)
        self.N, self.window, dim, T = N, window, 3 * H * D, N * window

        def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(*shape, device=DEV, generator=gen).to(dtype)

        self.tokens = (randn(T, dim), randn(T, H, D), randn(T, H), randn(T, H, D))
        self.weights = (randn(dim, W, dtype=torch.float32), torch.zeros(H, device=DEV), None, torch.ones(D, device=DEV))
        geo = dict(HV=H, V=D, K=D, dim=dim, W=W)
        self.recovery = StatePool(N + 1, Geometry(**geo, record_tokens=window), device=DEV)
        self.full_ssm = torch.empty(N * window + 1, H, D, D, device=DEV)
        self.full_conv = torch.empty(N * window + 1, window + W - 2, dim, dtype=BF16, device=DEV).mT
        conv, ssm = self.recovery.layers[0]
        for slot in range(1, N + 1):
            ssm[slot] = 0.1 * randn(H, D, D)
            conv[slot] = randn(*conv.shape[1:])
            self.full_ssm[slot] = ssm[slot]
            self.full_conv[slot] = conv[slot, :, : window + W - 2]
        for slot in range(N + 1, N * window + 1):
            self.full_ssm[slot] = self.full_ssm[(slot - 1) % N + 1]
        starts = ints(range(0, T + 1, window))
        first, more = torch.arange(1, N + 1)[:, None], torch.arange(N + 1, N * window + 1).view(N, window - 1)
        accepted = torch.randint(1, window + 1, (N,), device=DEV, generator=gen, dtype=torch.int32)
        common = dict(verify_query_start_loc=starts, num_verify_tokens=T, window=window)
        self.accepted, self.slots = accepted, ints(first[:, 0])
        self.batches = {
            "full": Batch(verify_slots=ints(torch.cat([first, more], 1)), num_accepted_tokens=accepted, **common),
            "recovery": Batch(verify_slots=self.slots, num_accepted_tokens=accepted, **common),
            "apart": Batch(verify_slots=self.slots, num_accepted_tokens=torch.zeros_like(accepted), **common),
        }

    def run(self, way: str, batch: Batch | None = None) -> Tensor:
        states, records = self.recovery.layers[0], self.recovery.records[0]
        if way == "full":
            states, records = (self.full_conv, self.full_ssm), None
        o = kda_forward(*self.tokens, *states, batch or self.batches[way], *self.weights, records=records)
        if way == "apart":
            kda.kda_commit(*states, records, self.slots, self.accepted)
        return o

    def difference(self) -> float:
        """Of the outputs of both ways, on requests that enter speculation with this step."""
        outputs = []
        for way, entering in (("full", 1), ("recovery", 0)):
            fields = {**self.batches[way].fields, "num_accepted_tokens": torch.full_like(self.accepted, entering)}
            outputs.append(self.run(way, Batch(**fields)))
        return err(outputs[1], outputs[0])


def row(results: Results, opts: argparse.Namespace, H: int, N: int, window: int) -> bool:
    step = Step(H, N, window)
    off = step.difference()
    ways: dict[str, Callable[[], Tensor]] = {way: lambda way=way: step.run(way) for way in step.batches}
    if DEV == "cuda":
        us = {way: attempt(lambda run=run: 1e3 * graph_ms(run)) for way, run in ways.items()}
    else:
        us = {way: 1e3 * ms for way, ms in side_by_side_ms(ways, opts.runs).items()}
    state, record = H * D * D * 4, window * H * 3 * D * 4
    accepted = float(step.accepted.float().mean()) / window
    moved = {"full": (1 + window) * state, "recovery": 2 * state + (1 + accepted) * record}
    floor = {way: N * nbytes / opts.bandwidth * 1e6 for way, nbytes in moved.items()}
    nbytes = kda.speculation_bytes(window, H, H, D, D, W)
    waits = attempt(lambda: synchronises(lambda: [run() for run in ways.values()]))
    ok = off <= 2 * BOUNDS[BF16][0]
    mib = {way: n / 2**20 for way, n in nbytes.items()}
    results.add(
        "speculation",
        f"{H:5} {N:4} {window:6}   {mib['full']:8.2f} {mib['recovery']:9.2f} {times(mib['full'], mib['recovery']):>7}   "
        + "  ".join(f"{show(us[way], '', 1):>9}" for way in ways)
        + f"  {times(us['recovery'], us['full']):>9} {times(us['apart'], us['full']):>6}   "
        + f"{times(us['full'], floor['full']):>6} {times(us['recovery'], floor['recovery']):>9}"
        + ("" if ok else f"  OFF BY {off:.1e}") + (f"  WAITS: {waits}" if waits else ""),
        H=H, N=N, window=window, bytes=nbytes, us=us, floor_us=floor, difference=off, synchronises=waits,
        ratios={way: ratio(us[way], us["full"]) for way in ("recovery", "apart")},
    )  # fmt: skip
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--runs", type=int, default=10, help="calls of which a time is the median, on a CPU")
    parser.add_argument("--small", action="store_true", help="two heads of 16 and few requests, to try the script itself")
    opts = parser.parse_args()
    opts.bandwidth = copy_bytes_per_s(DEV, 64 if opts.small else 1024)
    results = Results(
        opts.out / "speculation.json", backend=kda.backend_for(DEV), why=kda.why(DEV), arguments=sys.argv[1:],
        copy_bytes_per_s=opts.bandwidth,
    )
    print(f"{kda.why(DEV)}; copy {opts.bandwidth / 1e9:.0f} GB/s; torch {torch.__version__}")
    print(f"{'':17}   {'MiB a request and layer':^26}   {'microseconds a step':^31}  {'of full':>16}   {'of the floor':>16}")
    print("heads    N window       full  recovery   ratio        full   recovery      apart   recovery  apart     full  "
          "recovery", flush=True)
    good = True
    for H, N in [(2, 3)] if opts.small else ROWS:
        for window in WINDOWS:
            good = row(results, opts, H, N, window) and good
            if DEV == "cuda":
                torch.cuda.empty_cache()
    return 0 if good else 1


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
