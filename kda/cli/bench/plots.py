# SPDX-License-Identifier: Apache-2.0
"""Plots of a run as PNG: time over tokens, over batch, over heads, ratio to the floor and to the peers."""
from __future__ import annotations

import io
from collections.abc import Callable, Iterable

from kda.cli.bench import ratios
from kda.cli.bench.rows import Row, ours

WITHOUT = "There are no plots: they need `pip install 'triton-kda[bench]'`; `python -m kda bench --report DIR` then draws them."
LINES = {
    "prefill": ("kda", "flashkda", "kda, decays given", "transformers"),
    "decode": ("kda_decode", "vllm, chain", "kda, decays given", "transformers"),
}
COLOURS = {
    "kda": "#1b6ac9", "kda_decode": "#1b6ac9", "kda, decays given": "#1aa394", "flashkda": "#d1495b", "vllm, chain": "#e08e0b",
    "transformers": "#7a5195",
}  # fmt: skip
STYLES, MARKS = ("-", "--", ":", "-."), ("o", "s", "^", "D")

Drawn = dict[str, tuple[bytes, str]]


def draw(rows: list[Row], about: dict) -> tuple[Drawn, str | None]:
    """By file name the PNG and its caption; or, in words, why there are none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return {}, WITHOUT
    drawn: Drawn = {}
    for name, caption, plot in PLOTS:
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        axes = figure.add_subplot()
        if plot(axes, rows):
            axes.set_title(f"{caption}\n{about.get('device')}", fontsize=10)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=84)
            drawn[name] = buffer.getvalue(), caption
    return drawn, None


def one_sequence(row: Row) -> bool:
    return row.part == "prefill" and row.dims.get("N") == 1 and not row.dims.get("triton_peers")


def in_memory(row: Row) -> bool:
    """Decode; on a CPU from cold states."""
    return row.part == "decode" and row.dims.get("states") != "hot"


def groups(rows: Iterable[Row], by: str, over: str) -> dict[int, list[Row]]:
    """Rows by a dim, in the order of another; only where there are points for a line."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row.dims[by], []).append(row)
    lines = {key: sorted(some, key=lambda row: row.dims[over]) for key, some in sorted(found.items())}
    return {key: some for key, some in lines.items() if len({row.dims[over] for row in some}) > 1}


def times(axes, part: str, lines: dict[int, list[Row]], over: str, by: str) -> bool:
    """Times with their floors, log over log."""
    for n, (key, rows) in enumerate(lines.items()):
        label = f"{by}={key}"
        for name in LINES[part]:
            points = [(row.dims[over], row.ms[name]) for row in rows if name in row.ms]
            if len(points) > 1:
                xs, style = [x for x, _ in points], dict(ls=STYLES[n % 4], marker=MARKS[n % 4], ms=4, color=COLOURS[name])
                axes.plot(xs, [t["ms"] for _, t in points], label=f"{ratios.title(name)}, {label}", **style)
                low, high = ([t[q] for _, t in points] for q in ("q1", "q3"))
                axes.fill_between(xs, low, high, color=COLOURS[name], alpha=0.2)
        main = ratios.MAIN[part]
        floor = [(row.dims[over], row.floor_ms[main]) for row in rows if main in row.floor_ms]
        if len(floor) > 1:
            axes.plot(*zip(*floor), color="#888888", lw=1, ls=STYLES[n % 4], label=f"bytes at a copy's speed, {label}")
    if not axes.lines:
        return False
    axes.set(xscale="log", yscale="log", ylabel="milliseconds")
    ticks(axes, sorted({row.dims[over] for rows in lines.values() for row in rows}))
    return finish(axes)


def finish(axes) -> bool:
    axes.grid(True, which="major", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, framealpha=0.8)
    return True


def over_tokens(axes, rows: list[Row]) -> bool:
    axes.set_xlabel("tokens of one sequence")
    return times(axes, "prefill", groups(filter(one_sequence, rows), "H", "T"), "T", "H")


def over_batch(axes, rows: list[Row]) -> bool:
    axes.set_xlabel("requests")
    return times(axes, "decode", groups(filter(in_memory, rows), "H", "N"), "N", "H")


def most_points(lines: dict[int, list[Row]]) -> dict[int, list[Row]]:
    return dict(sorted(lines.items(), key=lambda item: -len(item[1]))[:1])


def prefill_over_heads(axes, rows: list[Row]) -> bool:
    axes.set_xlabel("heads")
    return times(axes, "prefill", most_points(groups(filter(one_sequence, rows), "T", "H")), "H", "T")


def decode_over_heads(axes, rows: list[Row]) -> bool:
    axes.set_xlabel("heads")
    return times(axes, "decode", most_points(groups(filter(in_memory, rows), "N", "H")), "H", "N")


def to_floor(axes, rows: list[Row]) -> bool:
    """Decode over the bytes that it must move."""
    for n, (H, some) in enumerate(groups(filter(in_memory, rows), "H", "N").items()):
        for name in ("kda_decode", "vllm, chain", "transformers"):
            points = [(row.dims["N"], r) for row in some if (r := row.of_floor(name)) is not None]
            if len(points) > 1:
                axes.plot(*zip(*points), label=f"{ratios.title(name)}, H={H}", color=COLOURS[name], ls=STYLES[n % 4],
                          marker=MARKS[n % 4], ms=4)  # fmt: skip
    if not axes.lines:
        return False
    axes.axhline(1.0, color="#888888", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="requests", ylabel="time over its floor")
    ticks(axes, sorted({row.dims["N"] for row in rows if in_memory(row)}))
    return finish(axes)


def to_peers(axes, rows: list[Row]) -> bool:
    """A point a peer and part, the mean, and the span of its rows."""
    found = [s for s in ratios.summaries(rows) if not ours(s.theirs)][:12]
    if not found:
        return False
    for n, s in enumerate(reversed(found)):
        colour = COLOURS["kda"] if s.mean <= 1 else COLOURS["flashkda"]
        axes.plot([s.least, s.most], [n, n], color=colour, lw=1.5, marker="|")
        axes.plot([s.mean], [n], color=colour, marker="o")
        axes.annotate(f"  {s.mean:.2f}x", (s.most, n), va="center", fontsize=7)
    names = [f"{s.part}: {s.ours}\nbeside {ratios.title(s.theirs)} ({s.count})" for s in reversed(found)]
    axes.set_yticks(range(len(found)), names, fontsize=7)
    axes.axvline(1.0, color="#888888", lw=1)
    axes.set(xscale="log", xlabel="our time over the peer's; left of 1 we are faster")
    least, most = min(s.least for s in found) / 1.4, max(1.0, *(s.most for s in found)) * 1.4
    ticks(axes, [x for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5) if least <= x <= most])
    axes.margins(x=0.15, y=0.1)
    return finish(axes)


def ticks(axes, values: list) -> None:
    """These on the logarithmic x axis, and no others."""
    axes.set_xticks(values, [f"{x:,}" for x in values], fontsize=8)
    axes.set_xticks([], minor=True)


PLOTS: list[tuple[str, str, Callable]] = [
    ("peers.png", "Ratio to the peers", to_peers),
    ("tokens.png", "Prefill: time over tokens", over_tokens),
    ("batch.png", "Decode: time over batch", over_batch),
    ("prefill-heads.png", "Prefill: time over heads", prefill_over_heads),
    ("decode-heads.png", "Decode: time over heads", decode_over_heads),
    ("floor.png", "Decode: ratio to the floor", to_floor),
]
