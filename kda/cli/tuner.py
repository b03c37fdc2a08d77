# SPDX-License-Identifier: Apache-2.0
"""A sweep of several regimes in limited time: part by part, each compiled, then timed, then put into the table.

Nothing is compiled or checked while something is timed. Parts that come first have their row first, and an interrupted sweep
leaves the table of the parts that were done.
"""
from __future__ import annotations

import itertools
import statistics
import time

import torch

from kda.cli import CommandError, tables
from kda.cli.progress import progress
from kda.cli.record import Record, now, replace, text
from kda.cli.stopwatch import Stopwatch
from kda.cli.sweep import Regime, Sweep
from kda.cli.trial import Outcome, Workers, facts_of
from kda.cli.using import in_use
from kda.triton.configs.table import Row

COMPILING = 0.6  # of a part's time at most: what is compiled has to be timed too
GRACE = 10.0  # seconds for what is being compiled then, before it is given up
FIRST, SHARE = ("kda_decode", "chunk_intra", "chunk_walk"), 2  # whose regimes may take so many times the time of others


def weight(regime: Regime) -> int:
    return SHARE if regime.part in FIRST and "128 x 128" in regime.name else 1


class Tuner:
    """`rows`: the winners, by part and regime; `unfinished`: regimes with candidates or rounds there was no time for."""

    def __init__(
        self, regimes: list[Regime], record: Record, device: torch.device, workers: Workers, rounds: int, deadline: float,
        small: bool,
    ) -> None:  # fmt: skip
        self.regimes, self.record, self.device, self.workers = regimes, record, device, workers
        self.rounds, self.deadline, self.small = rounds, deadline, small
        self.rows: dict[str, dict[str, Row]] = {}
        self.unfinished: list[Regime] = []
        self.wrong: dict[str, str] = {}  # regimes whose configuration in use does not pass, and why
        self.path, self.said = None, set()

    def settled(self, regimes: list[Regime]) -> None:
        """Takes over the winners among regimes that this sweep leaves alone, from the record."""
        for regime in regimes:
            if regime.key in self.record.ratios:
                sweep = Sweep(regime, self.record, None, self.rounds, 0.0)
                self.take(regime, sweep.winner())

    def go(self) -> None:
        """Time is shared among regimes; what is left in the end goes to those that had too little."""
        pending = self.regimes
        for _ in range(2):
            self.unfinished = []
            groups = [list(group) for _, group in itertools.groupby(pending, lambda regime: regime.part)]
            for n, group in enumerate(groups):
                weights = [sum(map(weight, group)) for group in groups[n:]]
                began = time.monotonic()
                share = max(self.deadline - began, 0.0) * weights[0] / sum(weights)
                self.try_candidates(group, began + COMPILING * share)
                for m, regime in enumerate(group):
                    left = max(began + share - time.monotonic(), 0.0) / (len(group) - m)
                    self.time_one(regime, time.monotonic() + left)
                self.write()
            pending = self.unfinished

    # ---- compiling

    def try_candidates(self, regimes: list[Regime], deadline: float) -> None:
        """Compiles and checks what the record has not; says what was dropped."""
        items = []
        for regime in regimes:
            checked = [(facts_of(work.short()), in_use(regime.part, work, self.device)) for work in regime.works]
            checked = [pair for n, pair in enumerate(checked) if pair not in checked[:n]]
            for config in self.untried(regime):
                items.append(dict(part=regime.part, regime=regime.name, works=checked, config=config))
        items.sort(key=lambda item: item["config"] != {})  # without the configuration in use no other is timed
        if items and time.monotonic() < deadline:
            with progress(f"{regimes[0].part}: compiled and checked", len(items), "candidates") as bar:

                def ended(item, outcome):
                    self.record.tried((item["part"], item["regime"]), item["config"], outcome)
                    bar.set_postfix_str(item["regime"], refresh=False)
                    bar.update()

                self.workers.try_all(items, ended, deadline, deadline + GRACE)
        for regime in regimes:
            self.drop(regime)

    def untried(self, regime: Regime) -> list[dict]:
        known = self.record.trials.get(regime.key, {})
        return [config for config in ({}, *regime.candidates) if text(config) not in known]

    def drop(self, regime: Regime) -> None:
        """Candidates that spill more registers than the configuration in use, or are no other than it at all sizes."""
        trials = self.record.trials.get(regime.key, {})
        former = trials.get(text({}))
        if former is None:
            return
        if not former.ok:
            self.wrong.setdefault(regime.title, former.why)
            return
        for config in regime.candidates:
            outcome, why = trials.get(text(config)), None
            if outcome is None:
                continue
            if outcome.ok and outcome.code and outcome.code == former.code:
                why = "the configuration in use"
            elif outcome.ok and former.spills is not None and (outcome.spills or 0) > former.spills:
                why = f"spills {outcome.spills} registers, the former configuration {former.spills}"
            if why:
                self.record.tried(regime.key, config, Outcome(False, why, outcome.spills, outcome.code))
            line = f"dropped: {regime.title}: {text(config)}: {why or outcome.why}"
            if (why or not outcome.ok) and line not in self.said:
                print(line, flush=True)
                self.said.add(line)

    # ---- timing

    def time_one(self, regime: Regime, deadline: float) -> None:
        """Goes on with a regime's sweep; a winner becomes a row, though others may not have been tried in time."""
        missing = self.untried(regime)
        if regime.title in self.wrong:
            return
        if {} in missing or len(missing) == len(regime.candidates):
            self.unfinished.append(regime)
            return
        with progress(regime.title, self.rounds, "rounds") as bar:

            def tick(round, candidates):
                bar.set_postfix_str(f"{candidates} candidates left", refresh=False)
                bar.update()

            sweep = Sweep(regime, self.record, Stopwatch(regime.part, self.device), self.rounds, deadline, tick)
            done = sweep.go()
        if missing or not done:
            self.unfinished.append(regime)
        found = sweep.winner()
        del sweep
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.take(regime, found)
        if found is not None:
            print(f"{regime.title}: {found[0]}: {found[1].words}", flush=True)
        elif done:
            print(f"{regime.title}: none gains more than the spread; the former configuration stays", flush=True)

    def take(self, regime: Regime, found) -> None:
        self.rows.setdefault(regime.part, {}).pop(regime.name, None)
        if found is not None:
            self.rows[regime.part][regime.name] = Row(found[0], self.evidence(regime, *found))

    def evidence(self, regime: Regime, config: dict, verdict) -> str:
        import triton

        times = []
        for work in regime.works:
            ms = statistics.median(self.record.ms[regime.key][text(config), work.name])
            value = f"{1e3 * ms:.1f} us" if ms < 1 else f"{ms:.3f} ms"
            times.append(f"{work.name}: {value}, {verdict.medians[work.name]:.3f}x")
        count = torch.get_num_threads()
        threads = f", {count} thread{'s' * (count > 1)}" if self.device.type == "cpu" else ""
        return (f"{1 - verdict.gain:.3f}x the former row, spread {verdict.spread:.3f}; {'; '.join(times)}; "
                f"{now()[:10]}, torch {torch.__version__}, Triton {triton.__version__}{threads}")  # fmt: skip

    # ---- what comes of it

    def write(self) -> None:
        """The table so far, in place of the one that this sweep wrote before."""
        rows = {part: rows for part, rows in self.rows.items() if rows}
        if not rows:
            if self.path is not None:  # a later round has taken its only winner back
                self.path.unlink(missing_ok=True)
                self.path = None
            return
        about = "Rows with a ratio to the former row: `python -m kda tune`, each on its date."
        if self.small:
            about += " Of tiny sizes (--small), not for use."
        name, source = tables.source(self.device, about, rows)
        path = self.record.folder / name
        try:
            replace(path, source)
        except OSError as e:
            raise CommandError(
                f"{path} cannot be written ({e.strerror or e}): the measurements are kept, and the same command writes it"
            ) from e  # fmt: skip
        self.path = path

    def summary(self) -> None:
        for title, why in self.wrong.items():
            print(f"WRONG {title}: the configuration in use does not pass itself, so there is nothing to compare with: {why}")
        if self.unfinished:
            print(f"out of time; the same command goes on with: {'; '.join(r.title for r in self.unfinished)}")
        if self.path is None:
            print("no row changes: no table was written")
        else:
            print(f"table: {self.path}; in use once it is in kda/triton/configs/")
