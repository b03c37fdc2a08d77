#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `bench/gpu.py` wrote, as Markdown tables with the project's targets beside.

    python bench/gpu_report.py bench/results > bench/results/gpu.md

Reads gpu-prefill.json, gpu-decode.json and gpu-layer.json in the folder named, as far as they are there. A target that is
missed is marked with its factor in bold.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path


def load(folder: Path, part: str) -> dict | None:
    path = folder / f"gpu-{part}.json"
    return json.loads(path.read_text()) if path.exists() else None


def number(value, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-"


def factor(value: float | None, most: float | None = None) -> str:
    """A ratio; in bold if it is over the target `most`."""
    if not isinstance(value, (int, float)):
        return "-"
    text = f"{value:.2f}x"
    return f"**{text}**" if most is not None and round(value, 2) > most else text


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def shape(row: dict) -> str:
    lens = row["lens"]
    what = "one sequence" if len(lens) == 1 else f"{len(lens)} x {lens[0]}" if len(set(lens)) == 1 else f"{len(lens)} sequences"
    return f"T={row['T']} H={row['H']}, {what}"


def divided(a, b) -> float | None:
    return a / b if isinstance(a, (int, float)) and isinstance(b, (int, float)) else None


def prefill(data: dict) -> str:
    rows = []
    for row in data["prefill"]:
        ms, most = row["ms"], 0.6 if row["T"] >= 65536 else 1.5
        rows.append([
            shape(row), number(ms["ours"]), number(ms.get("flashkda")),
            factor(divided(ms["ours"], ms.get("flashkda")), most), number(ms["graph"]), number(ms.get("flashkda graph")),
            factor(divided(ms["graph"], ms.get("flashkda graph")), most), factor(divided(ms["unbounded"], ms["graph"]), 2.0),
            factor(divided(ms["graph"], row["floor_ms"])), number(row["launch_us"], 0),
        ])  # fmt: skip
    head = ["prefill, ms", "ours", "FlashKDA", "ratio", "ours, graph", "FlashKDA, graph", "ratio", "unbounded gate",
            "of the byte floor", "launched in us"]  # fmt: skip
    return table(head, rows) + "\n\nTargets: 1.5x FlashKDA (0.6x for 65,536 tokens), an unbounded gate 2x a bounded one."


def decode(data: dict) -> str:
    rows = []
    for row in data["decode"]:
        us, floor = row["us"], row["chain_floor_us"]
        many = row["N"] * row["H"] >= 1024
        rows.append([
            f"N={row['N']} H={row['H']}", number(us["fused"], 1), number(us.get("vllm chain"), 1),
            factor(divided(us["fused"], us.get("vllm chain")), 0.7 if row["N"] <= 8 else None), number(floor, 1),
            factor(divided(us["fused"], floor), 1.15 if many else None), number(us["fused, bf16 states"], 1),
            factor(divided(us["fused, bf16 states"], row["bf16_state_floor_us"])), number(row["launch_us"], 0),
        ])  # fmt: skip
    head = ["decode, us in a graph", "kda_decode", "vLLM's three kernels", "ratio", "byte floor", "of the floor",
            "bf16 states", "of their floor", "launched in us"]  # fmt: skip
    return table(head, rows) + "\n\nTargets: 0.7x vLLM's for N of 1 and 8, 1.15x the floor from 1,024 heads on."


def layer(data: dict) -> str:
    rows = [
        [shape(row), number(row["ms"]["apart"]), number(row["ms"]["kda_prefill"]), str(row["checkpoints"]),
         factor(divided(row["ms"]["with checkpoints"], row["ms"]["kda_prefill"]), 1.05), number(row["launch_us"], 0)]
        for row in data["layer"]
    ]  # fmt: skip
    head = ["the layer's prefill, ms in a graph", "operations apart", "kda_prefill", "checkpoints", "their cost",
            "launched in us"]  # fmt: skip
    return table(head, rows) + "\n\nTarget: checkpoints cost 1.05x at most."


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    folder, machine = Path(sys.argv[1]), None
    parts = []
    for part, section in (("prefill", prefill), ("layer", layer), ("decode", decode)):
        data = load(folder, part)
        if data is not None:
            machine = data["machine"]
            parts.append(section(data))
    if machine is None:
        print(f"no gpu-*.json in {folder}", file=sys.stderr)
        return 1
    print(f"# {machine.get('gpu', 'no GPU')}, torch {machine['torch']}, triton {machine['triton']}, {machine['date'][:10]}\n")
    print("D=128, bf16, fp32 states, gate and l2 norm in the kernel; medians of 20. Written by bench/gpu_report.py.\n")
    print("\n\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
