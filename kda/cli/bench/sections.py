# SPDX-License-Identifier: Apache-2.0
"""The tables of a report: one a part, Markdown. A target that is missed, and an error over its bound, is bold."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kda.cli.bench import ratios
from kda.cli.bench.ratios import MAIN, PAIRS
from kda.cli.bench.rows import Row, ours

NONE = "-"
IN_US = ("decode", "ops", "speculation")  # on a GPU
HEADS = {
    "prefill": "Prefill: the chunked delta rule, gate and l2 norm in the kernel",
    "decode": "Decode: one new token of each request",
    "layer": "The layer's prefill: convolution, gate, delta rule, output norm, states in slots",
    "speculation": "Speculative decoding: a step's verify rows, full states beside records",
    "ops": "Single operations",
    "isa": "Processor paths (KDA_CPU_ISA)",
    "first": "The first call in a fresh process",
    "accuracy": "Accuracy: relative error against the recurrence in fp64",
}


class Column(NamedTuple):
    head: str
    cell: Callable[[Row], str]


def table(rows: list[Row], columns: list[Column]) -> str:
    """Markdown; columns that say nothing are left out."""
    cells = [[column.cell(row) for row in rows] for column in columns]
    kept = [(column.head, cell) for column, cell in zip(columns, cells) if any(text != NONE for text in cell)]
    lines = [[head for head, _ in kept], ["---"] * len(kept), *zip(*(cell for _, cell in kept))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def factor(value: float | None, most: float | None = None) -> str:
    """A ratio; bold if it is over `most`."""
    if value is None:
        return NONE
    text = f"{value:.2f}x"
    return f"**{text}**" if most is not None and round(value, 2) > most else text


def time_of(name: str, us: bool) -> Column:
    def cell(row: Row) -> str:
        if name in row.failed:
            return "failed"
        t = row.time(name)
        return NONE if t is None else f"{1e3 * t:.1f}" if us else f"{t:.3f}" if t < 100 else f"{t:.0f}"

    return Column(f"{ratios.title(name)}, {'us' if us else 'ms'}", cell)


def ratio_of(mine: str, other: str, head: str) -> Column:
    return Column(head, lambda row: factor(row.ratio(mine, other), ratios.most(row.part, mine, other, row)))


def quartiles(name: str) -> Column:
    """Half the distance between the quartiles, in percent of the median."""

    def cell(row: Row) -> str:
        t = row.ms.get(name)
        return NONE if t is None or t["samples"] < 3 else f"{(t['q3'] - t['q1']) / t['ms'] / 2:.1%}"

    return Column("±", cell)


def error(what: str) -> Column:
    """The largest of ours in the row."""

    def cell(row: Row) -> str:
        found = [(e[what], e["bound"]) for name, e in row.errors.items() if ours(name) and e["bound"] and what in e]
        if not found:
            return NONE
        if any(value is None for value, _ in found):
            return "**not finite**"
        value, bound = max(found)
        most = bound[what == "state"]
        return f"{value:.1e}" if most is None or value <= most else f"**{value:.1e}**"

    return Column(f"{what} error", cell)


def fact(head: str, cell: Callable[[Row], object]) -> Column:
    def text(row: Row) -> str:
        value = cell(row)
        return NONE if value is None else str(value)

    return Column(head, text)


def tokens_per_s(row: Row) -> str | None:
    t = row.time("kda")
    return f"{row.dims['T'] / t * 1e3:,.0f}" if t else None


def columns(part: str, rows: list[Row], gpu: bool) -> list[Column]:
    us, main = gpu and part in IN_US, MAIN[part]
    names = list(dict.fromkeys(name for row in rows for name in [*row.ms, *row.failed] if ours(name)))
    names.sort(key=lambda name: name != main)
    found = [Column("", lambda row: row.name)]
    told = set()
    for name in names:
        if name in told:
            continue
        found.append(time_of(name, us))
        if name == main:
            found.append(quartiles(name))
        for mine, other in PAIRS.get(part, ()):
            if mine == name and any(row.ratio(mine, other) or other in row.failed for row in rows):
                found += [time_of(other, us), ratio_of(mine, other, "ratio")]
                told.add(other)
        if name in ("kda, strided inputs", "kda, unbounded gate"):
            found.append(ratio_of(name, "kda", "of the first"))
        if name == "kda_prefill, checkpoints":
            found += [fact("checkpoints", lambda row: row.facts.get("checkpoints")), ratio_of(name, main, "their cost")]
        if name == "kda_decode, bf16 states":
            found.append(Column("of their floor", lambda row: factor(row.of_floor("kda_decode, bf16 states"))))
    if part == "prefill":
        found.append(fact("kda, tokens/s", tokens_per_s))
    if part == "speculation":
        found.append(fact("MiB a request: full, records", mib))
    found += [
        Column("of the floor", lambda row: factor(row.of_floor(main), ratios.most_of_floor(row, gpu))),
        fact("launched in us", lambda row: None if row.host_us is None else f"{row.host_us:.0f}"),
        fact("torch's add_", lambda row: None if row.add_us is None else f"{row.add_us:.0f}"),
        fact("waits for the GPU", lambda row: f"**{row.waits}**" if row.waits else None), error("output"), error("state"),
    ]  # fmt: skip
    return found


def mib(row: Row) -> str | None:
    kept = row.facts.get("bytes_a_request")
    return ", ".join(f"{n / 2**20:.2f}" for n in kept.values()) if kept else None


def accuracy(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.errors))

    def of(name: str, what: str) -> Column:
        def cell(row: Row) -> str:
            e = row.errors.get(name)
            if e is None or what not in e:
                return NONE
            bound = e["bound"][what == "state"] if e["bound"] else None
            text = "not finite" if e[what] is None else f"{e[what]:.1e}"
            return text if bound is None or e[what] is not None and e[what] <= bound else f"**{text}**"

        return Column(f"{ratios.title(name)}: {what}", cell)

    def bounds(row: Row) -> str | None:
        found = [e["bound"] for e in row.errors.values() if e["bound"]]
        return ", ".join(f"{b:g}" for b in found[0]) if found else None

    def window(row: Row) -> str | None:
        found = [w for name, e in row.errors.items() if ours(name) for w in e.get("windows", ()) if w is not None]
        return f"{max(found):.1e}" if found else None

    columns = [Column("", lambda row: row.name), *(of(name, what) for name in names for what in ("output", "state"))]
    return table(rows, [*columns, fact("bounds", bounds), fact("ours, worst 256 tokens", window)])


def section(part: str, rows: list[Row], gpu: bool) -> str:
    """Heading, targets and table of a part; points of the plots in a table of their own."""
    lines = [f"## {HEADS[part]}", ""]
    if part == "accuracy":
        return "\n".join([*lines, accuracy(rows), ""])
    if (part, gpu) in ratios.TARGETS:
        lines += [f"Targets: {ratios.TARGETS[part, gpu]}.", ""]
    full = [row for row in rows if row.dims.get("full", True) or part == "isa"]
    points = [row for row in rows if row not in full]
    for title, some in (("", full), ("Points of the plots:", points)):
        if some:
            lines += [title, ""] * bool(title) + [table(some, columns(part, some, gpu)), ""]
    return "\n".join(lines)
