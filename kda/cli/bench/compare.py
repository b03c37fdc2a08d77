# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: what became faster or slower beyond the noise of both."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kda.cli.bench import ratios
from kda.cli.bench.rows import Row, load, ours

LEAST_NOISE = 0.02  # clocks and temperatures move between runs, whatever the spread within one
ONE_SAMPLE = 0.2  # of a time that was taken once or twice, such as a first call
SAME = ("device", "cpu", "backend", "threads", "isa", "quick", "python", "torch", "triton", "cuda", "hip", "peers")


class Change(NamedTuple):
    """One time in both runs. `noise`: the distance between the quartiles, of both medians together."""

    row: Row
    name: str
    before: float
    after: float
    noise: float

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def slower(self) -> bool:
        return self.ratio > 1 + self.noise

    @property
    def faster(self) -> bool:
        return self.ratio < 1 / (1 + self.noise)

    def regression(self, limit: float) -> bool:
        """Ours alone: a peer that became slower is no fault of ours."""
        return self.slower and self.ratio > limit and ours(self.name)


def noise(before: dict, after: dict) -> float:
    each = [(t["q3"] - t["q1"]) / t["ms"] if t["samples"] >= 3 else ONE_SAMPLE for t in (before, after)]
    return max(sum(each), LEAST_NOISE)


def changes(a: dict[tuple, Row], b: dict[tuple, Row]) -> Iterator[Change]:
    for key in a.keys() & b.keys():
        for name in a[key].ms.keys() & b[key].ms.keys():
            before, after = a[key].ms[name], b[key].ms[name]
            yield Change(b[key], name, before["ms"], after["ms"], noise(before, after))


def run(first: Path, second: Path, limit: float) -> int:
    """Prints the comparison. Exit status 1 where a time of ours is over `limit` times the former, beyond the noise."""
    about_a, a = load(first)
    about_b, b = load(second)
    other = [f"{name} {about_a.get(name)} and {about_b.get(name)}" for name in SAME if about_a.get(name) != about_b.get(name)]
    if other:
        print(f"the two runs differ in {'; '.join(other)}: what changed may be due to that")
    found = sorted(changes(a, b), key=lambda c: -c.ratio)
    told = [c for c in found if c.slower or c.faster]
    if told:
        print(f"{'part':12}{'row':44}{'time':28}{'before':>12}{'after':>12}{'ratio':>8}{'noise':>8}")
    for c in told:
        mark = "  SLOWER" if c.regression(limit) else "  slower" if c.slower else "  faster"
        times = f"{ratios.show_ms(c.before):>12}{ratios.show_ms(c.after):>12}"
        print(f"{c.row.part:12}{c.row.name:44}{c.name:28}{times}{c.ratio:7.2f}x{c.noise:8.1%}{mark}")
    regressions = [c for c in found if c.regression(limit)]
    print(f"{len(found)} times in both: {sum(c.slower for c in found)} slower, {sum(c.faster for c in found)} faster, "
          f"{len(found) - len(told)} unchanged within the noise")  # fmt: skip
    for path, keys in ((first, a.keys() - b.keys()), (second, b.keys() - a.keys())):
        if keys:
            print(f"only in {path}: {len(keys)} rows: {'; '.join(': '.join(key) for key in sorted(keys))}")
    if not found:
        print("no time is in both")
    for key in sorted(a.keys() & b.keys()):
        for what in b[key].wrong():
            if what not in a[key].wrong():
                print(f"new in {second}: {': '.join(key)}: {what}")
    if regressions:
        print(f"{len(regressions)} times of ours are over {limit:g}x the former")
    return 1 if regressions else 0
