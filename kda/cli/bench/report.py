# SPDX-License-Identifier: Apache-2.0
"""DIR/report.md and its plots, from DIR/bench.json."""
from __future__ import annotations

from pathlib import Path

from kda.cli.bench import plots, ratios, sections
from kda.cli.bench.regimes import PARTS
from kda.cli.bench.rows import Results, Row, save

HOW = {
    True: "Times are medians out of CUDA graphs, so without launching; `eager` ones are of calls launched one by one, between "
          "events. Calls of a row take turns. `launched in us` is how long a call keeps the host, which is shared and not always as "
          "fast: torch's `add_`, the smallest of launches, takes turns with it.",
    False: "Times are medians of whole calls, which take turns in short bursts.",
}  # fmt: skip


def write(results: Results, left_out: list[str] = ()) -> tuple[list[Path], str | None]:
    """The files that were written; and why no plots were, where that can be helped."""
    folder, rows = results.path.parent, ordered(results)
    drawn, why_not = plots.draw(rows, results.about)
    for name, (png, _) in drawn.items():
        save(folder / name, png)
    captions = {name: caption for name, (_, caption) in drawn.items()}
    save(folder / "report.md", text(results.about, rows, captions, why_not, left_out))
    return [folder / "report.md", *(folder / name for name in drawn)], why_not


def ordered(results: Results) -> list[Row]:
    """By part; what a plot is drawn of by size."""
    def place(row: Row) -> tuple:
        sizes = () if row.dims.get("full", True) else (row.dims.get("H", 0), row.dims.get("T", 0), row.dims.get("N", 0))
        return PARTS.index(row.part) if row.part in PARTS else len(PARTS), sizes

    return sorted(results.rows.values(), key=place)


def text(about: dict, rows: list[Row], drawn: dict[str, str], why_not: str | None, left_out: list[str]) -> str:
    gpu = about.get("kind") == "cuda"
    lines = [*head(about), "## In short", "", *short(rows, gpu), ""]
    wrong = [f"- {row.part}: {row.name}: {what}" for row in rows for what in row.wrong()]
    if wrong:
        lines += ["**Not as it must be:**", "", *wrong, ""]
    if left_out:
        lines += [f"Left out for want of time, {len(left_out)} rows: {few(left_out)}. The same command measures them.", ""]
    for part in PARTS:
        some = [row for row in rows if row.part == part]
        if some:
            lines.append(sections.section(part, some, gpu))
    failed = [f"- {row.part}: {row.name}: {ratios.title(name)}: {why}" for row in rows for name, why in row.failed.items()
              if not name.startswith("kda")]  # fmt: skip
    if failed:
        lines += ["## What did not run", "", *failed, ""]
    if why_not or drawn:
        lines += ["## Plots", ""]
    if why_not:
        lines += [why_not, ""]
    for name, words in drawn.items():
        lines += [f"{words}", "", f"![{words}]({name})", ""]
    return "\n".join(lines).rstrip() + "\n"


def few(left_out: list[str]) -> str:
    """Rows "part: name" by name, or how many of each part."""
    if len(left_out) <= 10:
        return "; ".join(left_out)
    parts = [name.split(":")[0] for name in left_out]
    return ", ".join(f"{parts.count(part)} of {part}" for part in dict.fromkeys(parts))


def head(about: dict) -> list[str]:
    versions = ", ".join(f"{name} {about[name]}" for name in ("python", "torch", "triton", "cuda", "hip", "transformers")
                         if about.get(name))  # fmt: skip
    lines = [f"# kda bench: {about.get('device')}", ""]
    if about.get("quick"):
        lines += ["**Of tiny shapes (--quick), to try the command: the times mean nothing.**", ""]
    lines += [f"- {about.get('date')}, {versions}, kda sources {about.get('sources')}", f"- {about.get('why')}"]
    if about.get("kind") == "cpu":
        lines.append(f"- {about.get('threads')} threads, processor path {about.get('isa') or 'none'}")
    else:
        lines.append(f"- host: {about.get('cpu')}")
    lines.append(f"- copy: {about.get('copy_bytes_per_s', 0) / 1e9:,.0f} GB/s, bytes read and written; a row's floor is what its "
                 "bytes take at that bandwidth")  # fmt: skip
    peers = [ratios.title(name) for name in about.get("peers", ())]
    lines.append(f"- beside: {', '.join(peers) or 'no peers'}")
    for name, why in about.get("missing", {}).items():
        lines.append(f"- not here: {ratios.title(name)} ({why})")
    return [*lines, f"- `{about.get('command')}`", "", "Heads of 128, bf16, states fp32. " + HOW[about.get("kind") == "cuda"]
            + " ± is half the distance between the quartiles; `ratio` is our time over the other's, below 1 we are faster.",
            ""]  # fmt: skip


def short(rows: list[Row], gpu: bool) -> list[str]:
    """How fast, beside whom: a line a pair."""
    lines = ["| | beside | takes of its time | on average | rows |", "| --- | --- | --- | --- | --- |"]
    for s in ratios.summaries(rows):
        span = f"{s.least:.2f}x" if s.count == 1 else f"{s.least:.2f}x to {s.most:.2f}x"
        fast = f"**{1 / s.mean:.2f} times as fast**"
        lines.append(f"| {s.part}: {s.ours} | {ratios.title(s.theirs)} | {span} | {fast} | {s.count} |")
    judged = [row for row in rows if row.part == "decode" and ratios.most_of_floor(row, gpu)]
    values = [r for row in judged if (r := row.of_floor("kda_decode"))]
    if values:
        what = "1,024 heads and more" if gpu else "16 requests and more"
        span = f"{min(values):.2f}x to {max(values):.2f}x"
        average = f"{ratios.mean(values):.2f}x"
        lines.append(f"| decode: kda_decode, {what} | its bytes in a copy | {span} | {average} | {len(values)} |")
    if len(lines) == 2:
        lines = ["Nothing was measured beside anything."]
    errors = [row for row in rows if any(e["bound"] for e in row.errors.values())]
    bad = sum(bool(row.wrong()) for row in rows)
    if bad:
        lines += ["", f"**{bad} rows are over their error bounds or failed.**"]
    elif errors:
        lines += ["", f"Errors against the recurrence in fp64: every row of {len(errors)} within its bounds."]
    return lines
