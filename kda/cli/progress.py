# SPDX-License-Identifier: Apache-2.0
"""How far a command is, on stderr: a tqdm bar on a terminal; in a log, or without tqdm, a plain line now and then."""
from __future__ import annotations

import contextlib
import datetime
import sys
import time

EVERY = 30.0  # seconds between two lines of a log


def progress(what: str, total: int | None = None, unit: str = ""):
    """A tqdm, or Lines in its place. A stage without steps has no `unit`; of a `total` of 0 nothing is shown."""
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            return Lines(what, total, unit)
        # miniters: steps take milliseconds or minutes, so that only time says when to draw.
        return tqdm(total=total, desc=what, unit=f" {unit}", miniters=0, dynamic_ncols=True, disable=total == 0,
                    bar_format=None if unit else "{desc} [{elapsed}]")  # fmt: skip
    return Lines(what, total, unit)


class Lines:
    """As much of tqdm's interface as the commands use, for logs: a line every EVERY seconds, and one at the end."""

    external_write_mode = staticmethod(contextlib.nullcontext)

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit, self.n, self.note = what, total, unit, 0, ""
        self.begun = self.said = time.monotonic()
        if total is None:  # it may say nothing for long
            print(f"{what} ...", file=sys.stderr, flush=True)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error) -> None:
        if self.total != 0:
            self.say()

    def set_postfix_str(self, note: str, refresh: bool = True) -> None:
        self.note = note
        if refresh:
            self.update(0)

    def update(self, n: int = 1) -> None:
        self.n += n
        if time.monotonic() - self.said >= EVERY:
            self.say()

    def say(self) -> None:
        self.said = time.monotonic()
        seconds, total = self.said - self.begun, self.total or 0
        facts = [f"{self.n:,}/{total:,} {self.unit}"] if total else []
        facts.append(clock(seconds))
        if 0 < self.n < total:
            facts.append(f"{clock(seconds * (total - self.n) / self.n)} left")
        print(f"{self.what}: {', '.join([*facts, *filter(None, [self.note])])}", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
