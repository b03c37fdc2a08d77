# SPDX-License-Identifier: Apache-2.0
"""Sweeps launch configurations on the device at hand and writes its table for kda/triton/configs/.

Candidates come from kda/cli/space.py. They are compiled side by side; those that fail, spill more registers than the former
configuration, or give results outside the contract's bounds are dropped. The rest are timed in random order, the former
configuration between any two of them. A winner gains more than the spread over all sizes of its regime and loses on none.
The same command goes on where an interrupted one stopped.
"""
from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from pathlib import Path

from kda.cli import CommandError

HELP = "sweep launch configurations on this machine's GPU or CPU and write the device's table"
PARTS = (
    "chunk_intra", "chunk_walk", "kda_decode", "kda_verify", "fused_recurrent", "causal_conv1d_fwd", "causal_conv1d_update",
    "rms_norm_gated",
)  # fmt: skip

COMPILING = 0.6  # of the time at most: what is compiled has to be timed too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder of the measurements (CSV) and of the table")
    add("--kernel", action="append", choices=PARTS, metavar="NAME",
        help=f"of {', '.join(PARTS)}; again for more; default: all")  # fmt: skip
    add("--regime", action="append", default=[], metavar="PART",
        help="only regimes with PART in their names; again for more")  # fmt: skip
    add("--list", action="store_true", help="what there is to sweep, and end")
    add("--minutes", type=float, default=30.0, metavar="M", help="stop after so long (default %(default)s)")
    add("--rounds", type=int, default=12, metavar="N", help="times that each candidate is timed (default %(default)s)")
    add("--sample", type=int, metavar="N", help="try N candidates of each space, at random")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that compile (default %(default)s)")
    add("--device", help="cuda or cpu; default: the GPU if there is one")
    add("--small", action="store_true", help="tiny sizes, to try the command: their times mean nothing")


def run(args: argparse.Namespace) -> int:
    for name, least in (("rounds", 2), ("jobs", 1), ("minutes", 0.0)):
        if getattr(args, name) < least:
            raise CommandError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.out is None and not args.list:
        raise CommandError("name a folder for the measurements with --out")
    import torch

    import kda

    device = chosen(args.device)
    backend = kda.backend_for(device)
    if not backend.startswith("triton-") or backend == "triton-interpret":
        raise CommandError(f"there is nothing to tune: {kda.why(device)}")
    regimes = selected(args, device)
    if args.list:
        for regime in regimes:
            print(f"{regime.part:22}{regime.name:32}{len(regime.candidates):4} candidates; "
                  + ", ".join(work.name for work in regime.works))  # fmt: skip
        return 0

    from kda.cli.record import Record, made_of
    from kda.triton.configs import table

    name = table.device_name(device)
    record = Record(args.out, made_of(name, args.small, torch.get_num_threads() if device.type == "cpu" else None))
    begin, seconds = time.monotonic(), 60 * args.minutes
    print(f"{name}, {backend}, torch {torch.__version__}: {sum(len(r.candidates) for r in regimes)} candidates in "
          f"{len(regimes)} regimes, at most {args.minutes:g} minutes")  # fmt: skip
    with kda.use_backend("triton"):
        try_candidates(regimes, record, device, args.jobs, begin + seconds * COMPILING)
        rows, unfinished = time_all(regimes, record, device, args.rounds, begin + seconds)
    write(args.out, name, rows, args.small)
    if unfinished:
        print(f"out of time; the same command goes on with: {'; '.join(unfinished)}")
    return 0


def chosen(name: str | None):
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu") or name == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"--device {name} cannot be used here; accepted are cuda, where there is a GPU, and cpu")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def selected(args: argparse.Namespace, device) -> list:
    """The regimes to sweep, on the sizes that the device's memory holds."""
    import torch

    from kda.cli import space
    from kda.cli.sweep import Regime

    memory = 0.8 * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf
    found = []
    for part in args.kernel or PARTS:
        for name, sizes in space.SIZES[part].items():
            if args.regime and not any(word in name for word in args.regime):
                continue
            candidates = list(space.candidates(part, device))
            if args.sample is not None and args.sample < len(candidates):
                candidates = random.Random(f"{part} {name}").sample(candidates, args.sample)
            works = tuple(work for work in sizes.on(device, args.small) if work.bytes < memory)
            if works:
                found.append(Regime(part, name, works, candidates))
    if not found:
        raise CommandError(f"no regime has {' or '.join(args.regime)} in its name; --list shows them")
    return found


def try_candidates(regimes, record, device, jobs: int, deadline: float) -> None:
    """Compiles and checks what the record has not; says what was dropped."""
    from kda.cli.record import text
    from kda.cli.trial import facts_of, try_all

    items = []
    for regime in regimes:
        short = [facts_of(work) for work in dict.fromkeys(work.short() for work in regime.works)]
        for config in untried(regime, record):
            items.append(dict(part=regime.part, regime=regime.name, works=short, config=config))
    with Bar("compiled and checked", len(items), "candidates") as bar:

        def ended(item, outcome):
            record.tried((item["part"], item["regime"]), item["config"], outcome)
            bar.update(item["part"])

        try_all(items, str(device), jobs, ended, lambda: time.monotonic() > deadline)
    for regime in regimes:
        drop_spilling(regime, record)
        trials = record.trials.get(regime.key, {})
        former = trials.get(text({}))
        if former is not None and not former.ok:
            raise CommandError(f"{regime.title}: the configuration in use does not pass itself: {former.why}")
        for config in regime.candidates:
            outcome = trials.get(text(config))
            if outcome is not None and not outcome.ok:
                print(f"dropped: {regime.title}: {text(config)}: {outcome.why}")


def untried(regime, record) -> list[dict]:
    from kda.cli.record import text

    known = record.trials.get(regime.key, {})
    return [config for config in ({}, *regime.candidates) if text(config) not in known]


def drop_spilling(regime, record) -> None:
    from kda.cli.record import text
    from kda.cli.trial import Outcome

    trials = record.trials.get(regime.key, {})
    former = trials.get(text({}))
    if former is None or former.spills is None:
        return
    for config in regime.candidates:
        outcome = trials.get(text(config))
        if outcome is not None and outcome.ok and (outcome.spills or 0) > former.spills:
            why = f"spills {outcome.spills} registers, the former configuration {former.spills}"
            record.tried(regime.key, config, Outcome(False, why, outcome.spills))


def time_all(regimes, record, device, rounds: int, deadline: float) -> tuple[dict, list[str]]:
    """(rows of winners, names of the regimes that were not finished). Time is shared among regimes; what is left over in
    the end goes to those that had too little."""
    from kda.triton.configs.table import Row

    rows, pending = {}, list(regimes)
    for _ in range(2):
        unfinished = []
        for n, regime in enumerate(pending):
            now = time.monotonic()
            sweep = time_one(regime, record, device, rounds, now + max(deadline - now, 0.0) / (len(pending) - n))
            if sweep is None:
                unfinished.append(regime)
                continue
            found = sweep.winner()
            if found is None:
                print(f"{regime.title}: none gains more than the spread; the former configuration stays")
                continue
            config, verdict = found
            print(f"{regime.title}: {config}: {verdict.words}")
            rows.setdefault(regime.part, {})[regime.name] = Row(config, evidence(regime, record, config, verdict))
        pending = unfinished
    return rows, [regime.title for regime in pending]


def time_one(regime, record, device, rounds: int, deadline: float):
    """The finished sweep of a regime, or None."""
    import torch

    from kda.cli.stopwatch import Stopwatch
    from kda.cli.sweep import Sweep

    if untried(regime, record):
        return None
    with Bar(regime.title, rounds, "rounds") as bar:

        def tick(round, candidates):
            bar.update(f"{candidates} candidates left")

        sweep = Sweep(regime, record, Stopwatch(regime.part, device), rounds, deadline, tick)
        done = sweep.go()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return sweep if done else None


def evidence(regime, record, config: dict, verdict) -> str:
    import statistics

    import torch
    import triton

    from kda.cli.record import now, text

    times = []
    for work in regime.works:
        ms = statistics.median(record.ms[regime.key][text(config), work.name])
        value = f"{1e3 * ms:.1f} us" if ms < 1 else f"{ms:.3f} ms"
        times.append(f"{work.name}: {value}, {verdict.medians[work.name]:.3f}x")
    return (f"{1 - verdict.gain:.3f}x the former row, spread {verdict.spread:.3f}; {'; '.join(times)}; "
            f"{now()[:10]}, torch {torch.__version__}, Triton {triton.__version__}")  # fmt: skip


def write(folder: Path, device: str, rows: dict, small: bool) -> None:
    if not rows:
        print("no row changes: no table was written")
        return
    from kda.cli import tables
    from kda.cli.record import now

    about = f"Rows with a ratio to the former row: `python -m kda tune`, {now()[:10]}."
    if small:
        about += " Of tiny sizes (--small), not for use."
    name, source = tables.source(device, about, rows)
    try:
        (folder / name).write_text(source)
    except OSError as e:
        raise CommandError(f"{folder / name} cannot be written: {e.strerror or e}") from e
    print(f"table: {folder / name}; in use once it is in kda/triton/configs/")


class Bar:
    """A progress bar, if tqdm is installed; on stderr."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.total, self.unit, self.bar = what, total, unit, None

    def __enter__(self) -> Bar:
        try:
            from tqdm import tqdm
        except ImportError:
            return self
        if self.total:
            wait = 0.1 if sys.stderr.isatty() else 30.0
            self.bar = tqdm(total=self.total, desc=self.what, unit=f" {self.unit}", mininterval=wait, dynamic_ncols=True)
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, note: str) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update()
