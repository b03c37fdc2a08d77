# SPDX-License-Identifier: Apache-2.0
"""Which times of a row belong side by side, and what the project wants of them."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kda.cli.bench.rows import Row, ours

GIVEN = "kda, decays given"
PAIRS = {
    "prefill": [
        ("kda", "flashkda"), ("kda, eager", "flashkda, eager"), ("kda, eager", "vllm, eager"), ("kda, eager", "fla, eager"),
        (GIVEN, "transformers"), (GIVEN, "transformers, chunked"), (GIVEN, "reference"), (GIVEN, "compiled"),
    ],
    "decode": [
        ("kda_decode", "vllm, chain"), ("kda, chain", "vllm, chain"), ("kda, recurrence", "vllm, recurrence"),
        (GIVEN, "transformers"), (GIVEN, "reference"), (GIVEN, "compiled"),
    ],
    "layer": [("kda_prefill", "kda, operations apart")],
    "speculation": [("kda_verify", "kda, full states")],
    "ops": [("kda", "vllm"), ("kda, eager", "vllm, eager"), ("kda", "torch")],
    "isa": [(GIVEN, "transformers")],
}  # fmt: skip
MAIN = {
    "prefill": "kda", "decode": "kda_decode", "layer": "kda_prefill", "speculation": "kda_verify", "ops": "kda", "isa": GIVEN,
    "first": "kda, empty cache",
}  # fmt: skip
TITLES = {
    "flashkda": "FlashKDA (CUTLASS)", "vllm": "vLLM", "fla": "flash-linear-attention", "torch": "torch",
    "transformers": "transformers, token by token", "transformers, chunked": "transformers, chunked",
    "reference": "our PyTorch reference", "compiled": "our reference in torch.compile",
}  # fmt: skip


def title(name: str) -> str:
    """A name for people: "vllm, chain" is "vLLM, chain"."""
    base, _, rest = name.partition(", ")
    return TITLES.get(name) or TITLES.get(base, base) + (f", {rest}" if rest else "")


def _prefill(row: Row) -> float:
    return 0.6 if row.dims["T"] >= 65536 and row.dims["H"] <= 16 else 1.5


def _few(row: Row) -> float | None:
    return 0.7 if row.dims["N"] <= 8 else None


# The most that ours may take of the other's time, by part and pair.
MOST: dict[tuple[str, str, str], Callable[[Row], float | None]] = {
    ("prefill", "kda", "flashkda"): _prefill,
    ("prefill", "kda, eager", "flashkda, eager"): _prefill,
    ("prefill", "kda, eager", "vllm, eager"): lambda row: 0.4,
    ("prefill", "kda, unbounded gate", "kda"): lambda row: 2.0,
    ("prefill", GIVEN, "transformers"): lambda row: 1 / 4 if row.dims["T"] >= 64 else None,
    ("decode", "kda_decode", "vllm, chain"): _few,
    ("decode", GIVEN, "transformers"): lambda row: 1 / 3,
    ("layer", "kda_prefill, checkpoints", "kda_prefill"): lambda row: 1.05,
}


def most(part: str, ours: str, theirs: str, row: Row) -> float | None:
    wanted = MOST.get((part, ours, theirs))
    return wanted(row) if wanted else None


def most_of_floor(row: Row, gpu: bool) -> float | None:
    """Of decode's floor: 1.15 times from 1,024 heads on; on a CPU half the bandwidth of a copy from 16 requests on."""
    if row.part != "decode":
        return None
    if gpu:
        return 1.15 if row.dims["N"] * row.dims["H"] >= 1024 else None
    return 2.0 if row.dims["N"] >= 16 else None


TARGETS = {
    ("prefill", True): "1.5x FlashKDA's time (0.6x for 65,536 tokens of 16 heads), 0.4x vLLM's, an unbounded gate 2x a bounded one",
    ("prefill", False): "four times as fast as transformers token by token (0.25x its time)",
    ("decode", True): "0.7x vLLM's chain for 1 and 8 requests, 1.15x the floor from 1,024 heads on",
    ("decode", False): "a third of transformers' time; from 16 requests on twice the floor, half the bandwidth of a copy",
    ("layer", True): "checkpoints cost 1.05x at most",
}


class Summary(NamedTuple):
    """Our time over another's in `count` rows."""

    part: str
    ours: str
    theirs: str
    least: float
    most: float
    mean: float
    count: int


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def summaries(rows: list[Row]) -> list[Summary]:
    found = []
    for part, pairs in PAIRS.items():
        for pair in pairs:
            values = [r for row in rows if row.part == part if (r := row.ratio(*pair)) is not None]
            if values:
                found.append(Summary(part, *pair, min(values), max(values), mean(values), len(values)))
    return found


def line(row: Row) -> str:
    """A row in a line."""
    parts = [f"{name} {show_ms(row.time(name))}" for name in row.ms if not name.endswith("eager")][:5]
    for mine, theirs in PAIRS.get(row.part, ())[:5]:
        if (r := row.ratio(mine, theirs)) is not None:
            parts.append(f"{mine}/{theirs} {r:.2f}x")
            break
    if (r := row.of_floor(MAIN.get(row.part, ""))) is not None:
        parts.append(f"{r:.2f}x its floor")
    worst = [e["output"] for name, e in row.errors.items() if ours(name) and e.get("output") is not None]
    if worst:
        parts.append(f"error {max(worst):.1e}")
    parts += [f"{name} failed: {why}" for name, why in row.failed.items()]
    if row.waits:
        parts.append(f"WAITS: {row.waits}")
    return f"{row.part}: {row.name}: " + "; ".join(parts)


def show_ms(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{1e3 * ms:.1f} us" if ms < 0.1 else f"{ms:.3f} ms" if ms < 100 else f"{ms:.0f} ms"
