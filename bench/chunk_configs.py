#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The chunk rule's two kernels timed apart, over launch configurations, beside FlashKDA in the same run.

    PYTHONPATH=.:.peers python bench/chunk_configs.py --out DIR [--seconds 100] [--workers 14]

D=128, bf16, one sequence of 8,192 tokens at 64 and at 16 heads. Times are medians of 20 replays of a CUDA graph of 10
calls. Configurations are compiled side by side first. DIR/chunk_configs.json is written row by row; the best are printed.
"""
from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import peers
from common import Results, graph_ms
from gpu import LB, inputs, offsets, our_chunk
from kda import validation
from kda.triton import chunk, configs, walk

INTRA = [
    {"PARTS": parts, "intra": {"num_warps": warps, "num_stages": 1} | ({"maxnreg": registers} if registers else {})}
    for parts, (warps, most) in itertools.product((1, 2), [(1, (None, 200)), (2, (None, 168, 128))])
    for registers in most
]
WALK = [
    {"BV": BV, "PIECES": pieces, "walk": {"num_warps": warps, "num_stages": stages}}
    for (BV, warps), stages, pieces in itertools.product([(64, 4), (32, 4), (128, 8)], (2, 3, 4, 5), (3, 1))
    if pieces == 3 or stages == 3
]
KERNELS = {"intra": (chunk._intra, INTRA), "walk": (walk._walk, WALK)}
pick = configs.pick


class Skipped:
    """A kernel that is not launched."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def use(config: dict, only: str) -> None:
    """From here on the rule takes `config` where it differs from the default, and launches one of its kernels only."""
    configs.pick = lambda kernel, **shape: pick(kernel, **shape) | (config if kernel == "chunk" else {})
    for name, (launch, _) in KERNELS.items():
        launch.kernel = ORIGINAL[name] if name == only else Skipped()
    validation._seen.clear()


ORIGINAL = {name: launch.kernel for name, (launch, _) in KERNELS.items()}


def candidates() -> Iterator[tuple[str, dict]]:
    for name, (_, found) in KERNELS.items():
        yield from ((name, config) for config in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="stop timing after so long")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    opts = parser.parse_args()
    if opts.compile is not None:
        for name, config in list(candidates())[opts.compile :: opts.workers]:
            try:
                use(config, name)
                our_chunk(inputs(256, 64, 1), offsets([256]))
            except Exception as error:
                print(name, config, type(error).__name__, str(error)[:120], file=sys.stderr)
        return 0

    begin = time.perf_counter()
    command = [sys.executable, __file__, "--out", opts.out, "--workers", str(opts.workers), "--compile"]
    for worker in [subprocess.Popen([*command, str(n)]) for n in range(opts.workers)]:
        worker.wait()
    results = Results(Path(opts.out) / "chunk_configs.json")
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    begin = time.perf_counter()
    for H in (64, 16):
        x, cu = inputs(8192, H, 1), offsets([8192])
        try:
            flash = graph_ms(peers.flashkda_chunk(x, cu, LB))
            results.add("flashkda", f"H={H} FlashKDA {flash:.4f} ms", H=H, ms=flash)
        except (ImportError, RuntimeError) as error:
            print(f"FlashKDA: {error}")
        for name, (_, found) in KERNELS.items():
            rows = []
            for config in found:
                if time.perf_counter() - begin > opts.seconds:
                    print("out of time")
                    break
                use(config, name)
                try:
                    ms = graph_ms(lambda: our_chunk(x, cu))
                except Exception as error:
                    results.add("failed", f"{name} {config} {type(error).__name__}", H=H, kernel=name, config=config)
                    continue
                rows.append((ms, config))
                results.add(name, f"H={H:<3} {name:6} {ms:.4f} ms  {config}", H=H, config=config, ms=ms)
            print(f"H={H} {name}, the best:")
            for ms, config in sorted(rows, key=lambda row: row[0])[:5]:
                print(f"    {ms:.4f} ms  {config}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
