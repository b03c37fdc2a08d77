# SPDX-License-Identifier: Apache-2.0
"""One regime's sweep: rounds of timing in random order, the former configuration between any two candidates."""
from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kda.cli import CommandError, verdict
from kda.cli.record import Record, text
from kda.cli.stopwatch import Stopwatch
from kda.cli.trial import Outcome, not_its_fault, words
from kda.cli.verdict import LEAST
from kda.cli.workloads import Work

FORMER = text({})


@dataclass
class Regime:
    """What is swept at once: a part of `configs.regimes`, one of its regimes, sizes and candidates."""

    part: str
    name: str
    works: tuple[Work, ...]
    candidates: list[dict]

    @property
    def title(self) -> str:
        return f"{self.part}, {self.name}"

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.name


class Sweep:
    """Times a regime's candidates that are fit (compiled, right) until `deadline` (of time.monotonic).

    Where the first rounds show that there is no time for all of them, the best candidates are chosen early.
    """

    def __init__(
        self, regime: Regime, record: Record, watch: Stopwatch, rounds: int, deadline: float,
        tick: Callable[[int, int], None] = lambda round, candidates: None,
    ) -> None:  # fmt: skip
        self.regime, self.record, self.watch, self.rounds = regime, record, watch, rounds
        self.deadline, self.tick = deadline, tick
        trials = record.trials.get(regime.key, {})
        self.alive = [c for c in ({}, *regime.candidates) if text(c) in trials and trials[text(c)].ok]
        self.half = max(rounds // 2, 1)  # rounds that choose who goes on; those after them say who wins

    def ratios(self, config: dict) -> dict[str, list[float]]:
        return self.record.ratios.get(self.regime.key, {}).get(text(config), {})

    def go(self) -> bool:
        """Whether all rounds are done; a sweep that is not goes on from its record."""
        for round in range(self.rounds):
            if self.alive in ([], [{}]):
                return True
            begun = time.monotonic()
            for work in self.regime.works:
                if not self._round(round, work):
                    return False
            one = time.monotonic() - begun
            last = one * verdict.FINAL / len(self.alive) * (self.rounds - self.half)
            if round + 1 >= LEAST and self.deadline - time.monotonic() < one * (self.half - round - 1) + last:
                self.half = min(self.half, round + 1)
            self._thin_out(round)
            self.tick(round + 1, len(self.alive) - 1)
        return True

    def _round(self, round: int, work: Work) -> bool:
        """One sample of each candidate on one size; False when time is up."""
        order = [c for c in self.alive if len(self.ratios(c).get(work.name, ())) <= round]
        if not order:
            return True
        # Not the same order in each round, and the same again in a sweep that goes on.
        random.Random(f"{self.regime.key} {work.name} {round}").shuffle(order)
        before = None
        for config in order:
            if time.monotonic() > self.deadline:
                return False
            if work.name not in self.ratios(config) and config and not self._fit(config, work):
                continue
            if before is None:
                before = self.watch({}, work)
            try:
                ms = self.watch(config, work)
            except Exception as error:
                self._lost(config, error)
                continue
            after = self.watch({}, work)
            self.record.timed(self.regime.key, work.name, round, config, ms, (before + after) / 2)
            before = after
        return True

    def _fit(self, config: dict, work: Work) -> bool:
        """At full size too; a candidate that is not is out."""
        try:
            outcome = self.watch.agrees(config, work)
        except Exception as error:  # such as shared memory that only this size asks for
            self._lost(config, error)
            return False
        if not outcome.ok:
            self.record.tried(self.regime.key, config, outcome)
            self._drop([config])
        return outcome.ok

    def _lost(self, config: dict, error: Exception) -> None:
        """A candidate that failed is out; what is not its fault, or leaves the GPU useless, ends the sweep."""
        where = f"{self.regime.title}: {text(config)}: {words(error)}"
        if isinstance(error, CommandError):
            raise error
        if not_its_fault(error):
            raise CommandError(f"{where}: measurements are kept, and the same command goes on from there") from error
        self.record.tried(self.regime.key, config, Outcome(False, words(error)))
        if self.watch.broken():
            raise CommandError(f"{where}: the GPU no longer answers; the same command goes on without it") from error
        self._drop([config])

    def _thin_out(self, round: int) -> None:
        """Clear losers go; after half of the rounds, all but the best."""
        rest = {text(c): self.ratios(c) for c in self.alive if c}
        lost = {name for name, ratios in rest.items() if verdict.hopeless(ratios)}
        if round + 1 == self.half:
            going = {name: ratios for name, ratios in rest.items() if name not in lost}
            first = {name: {size: r[: round + 1] for size, r in ratios.items()} for name, ratios in going.items()}
            lost |= set(going) - set(verdict.best(first))
        self._drop([json.loads(name) for name in lost])

    def _drop(self, configs: list[dict]) -> None:
        self.alive = [c for c in self.alive if c not in configs]
        for config in configs:
            self.watch.drop(config)

    def winner(self) -> tuple[dict, verdict.Verdict] | None:
        """The best candidate that wins, judged by the rounds after it was chosen to go on; also of a sweep that is not done."""
        half = self.half if self.rounds >= 2 * LEAST else 0

        def later(config: dict) -> dict[str, list[float]]:
            return {work.name: self.ratios(config).get(work.name, [])[half:] for work in self.regime.works}

        former = later({})
        judged = [
            (config, verdict.judge(later(config), former)) for config in self.alive
            if config and min(map(len, (*later(config).values(), *former.values()))) >= min(LEAST, self.rounds - half)
        ]  # fmt: skip
        winners = [(config, found) for config, found in judged if found.wins]
        return max(winners, key=lambda item: item[1].gain, default=None)
