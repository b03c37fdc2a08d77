# SPDX-License-Identifier: Apache-2.0
"""What repeated measurements say: which candidates cannot win, and which one does.

A sample is the ratio of a candidate's time to the mean of the former configuration's times right before and after it, so
that what slows the machine down for a while slows both. The former configuration is a candidate too: its ratios, about one,
show the noise.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST = 3  # samples before a candidate is judged
LOSING = 1.05  # never as fast as this: a clear loser
HOPELESS = 2.0  # not even twice as slow as the former one: two samples show it
MARGIN = 0.01  # a table is not changed for less
FINAL = 4  # candidates that go on after half of the rounds

Ratios = Mapping[str, Sequence[float]]  # by size


class Verdict(NamedTuple):
    """`gain`: 1 less the geometric mean of the median ratios over all sizes; `spread` of those."""

    wins: bool
    gain: float
    spread: float
    medians: dict[str, float]

    @property
    def words(self) -> str:
        each = ", ".join(f"{size}: {ratio:.3f}" for size, ratio in self.medians.items())
        return f"{1 - self.gain:.3f}x the former's time, spread {self.spread:.3f} ({each})"


def spread(ratios: Sequence[float]) -> float:
    """Half the distance of the quartiles."""
    if len(ratios) < 2:
        return math.inf
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return (high - low) / 2


def hopeless(ratios: Ratios) -> bool:
    """Clearly slower than the former configuration on some size: no row may make one size pay for another."""
    return any(len(r) >= LEAST and min(r) > LOSING or len(r) >= 2 and min(r) > HOPELESS for r in ratios.values())


def mean(ratios: Ratios) -> float:
    """Geometric mean over the sizes of the median ratios."""
    return statistics.geometric_mean(statistics.median(samples) for samples in ratios.values())


def best(by_candidate: Mapping[str, Ratios], count: int = FINAL) -> list[str]:
    return sorted(by_candidate, key=lambda name: mean(by_candidate[name]))[:count]


def judge(candidate: Ratios, former: Ratios) -> Verdict:
    """A candidate wins if it gains more than the spread of its samples and of the former's, and loses on no size: by no more
    than MARGIN there, and by no more than the spread."""
    noise = {size: max(spread(samples), spread(former[size])) for size, samples in candidate.items()}
    medians = {size: statistics.median(samples) for size, samples in candidate.items()}
    gain, widest = 1 - mean(candidate), max(noise.values())
    loses = any(medians[size] > 1 + min(noise[size], MARGIN) for size in medians)
    return Verdict(gain > max(widest, MARGIN) and not loses, gain, widest, medians)
