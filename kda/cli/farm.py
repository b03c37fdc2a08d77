# SPDX-License-Identifier: Apache-2.0
"""Compiles launches for many targets side by side, in processes of their own: one that dies loses one launch.

Each process goes through the launches of one target, or a part of them, and says what it does (launches.py).
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kda.cli import targets

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600.0  # seconds for one compilation

# What `make compile`, and so CI, goes through: every call of the usual regime where compilers have differed, and one
# configuration a kernel for the rest.
ALL_CALLS = ("cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx950", "hip:gfx1100", "hip:gfx1201")
# Compiled for one target of each vendor only: it takes its kernel another half minute on some.
ONE_OF_A_VENDOR = {"chunk_kda/batch": ("cuda:90", "hip:gfx942")}


@dataclasses.dataclass(frozen=True)
class Task:
    """What to compile for a target; `measured`: not the defaults, where devices of it have a table."""

    target: str
    regimes: tuple[str, ...] = ("usual",)
    one: bool = False
    kernel: str | None = None
    without: tuple[str, ...] = ()
    measured: bool = False
    part: tuple[int, int] = (0, 1)

    def arguments(self, done: Iterable[int] = ()) -> list[str]:
        """For launches.py; `done` are numbers of launches that are not to be compiled again."""
        flags = [self.target, "--part", json.dumps(self.part), "--skip", json.dumps(sorted(done))]
        for name, values in (("--regime", self.regimes), ("--without", self.without)):
            flags += [word for value in values for word in (name, value)]
        flags += ["--one"] * self.one + ["--measured"] * self.measured
        return flags + (["--kernel", self.kernel] if self.kernel else [])


@dataclasses.dataclass
class Results:
    """What came of it: `launches` and `calls` are the facts of launches.py with their target, in no order.

    `problems` says for a target why a process ended without going through its launches.
    """

    launches: list[dict] = dataclasses.field(default_factory=list)
    calls: list[dict] = dataclasses.field(default_factory=list)
    problems: dict[str, str] = dataclasses.field(default_factory=dict)

    def of(self, target: str) -> Results:
        own = [[f for f in facts if f["target"] == target] for facts in (self.launches, self.calls)]
        return Results(*own, {name: text for name, text in self.problems.items() if name == target})

    def save(self, path: Path, tasks: Iterable[Task]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made_of = dict(versions=versions(), sources=sources(), tasks=[dataclasses.asdict(task) for task in tasks])
        text = json.dumps(made_of | dataclasses.asdict(self), indent=0)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)

    @classmethod
    def load(cls, path: Path, tasks: Iterable[Task]) -> Results | None:
        """What `save` wrote, if it was for the same tasks, sources and compilers."""
        try:
            found = json.loads(path.read_text())
            wanted = json.loads(json.dumps([dataclasses.asdict(task) for task in tasks]))
            if (found["versions"], found["sources"], found["tasks"]) != (versions(), sources(), wanted):
                return None
            return cls(found["launches"], found["calls"], found["problems"])
        except (OSError, ValueError, KeyError):
            return None


@functools.cache
def sources() -> str:
    """A digest of the package's source files."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kda").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "triton", "llvmlite")}


def checked(names: Iterable[str]) -> list[Task]:
    """The tasks of `make compile` for these targets."""
    return [
        Task(name, measured=True, without=tuple(op for op, of in ONE_OF_A_VENDOR.items() if name not in of))
        if name in ALL_CALLS else Task(name, one=True, measured=True)
        for name in names
    ]  # fmt: skip


def split(tasks: list[Task], jobs: int) -> list[Task]:
    """The tasks in as many parts as keep the processes busy, the longest first."""
    parts = 1 if any(task.one for task in tasks) else -(-jobs // max(len(tasks), 1))
    cut = [dataclasses.replace(task, part=(i, parts)) for i in range(parts) for task in tasks]
    return sorted(cut, key=lambda task: (task.one, targets.find(task.target).backend == "cpu"))


def compile_all(tasks: list[Task], jobs: int, progress: Callable[..., None] = lambda **_: None) -> Results:
    """Compiles what the tasks name in `jobs` processes.

    `progress(launches=n)` says that n more launches are known of, `progress(ended=facts)` that one has ended.
    """
    results, lock, running, stop = Results(), threading.Lock(), set(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="kda-compile-") as folder, ThreadPoolExecutor(jobs) as pool:

        def go(task: Task) -> None:
            _Process(task, folder, results, lock, running, stop, progress).run()

        try:
            list(pool.map(go, split(tasks, jobs)))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.kill()
            raise
    return results


class _Process:
    """Goes through a task, in a new process whenever one dies."""

    def __init__(self, task, folder, results, lock, running, stop, progress):
        self.task, self.folder, self.results, self.lock = task, folder, results, lock
        self.running, self.stop, self.progress = running, stop, progress
        self.done: set[int] = set()
        self.listed = False  # whether a process has said the calls and how many launches there are

    def run(self) -> None:
        while not self.stop.is_set():
            begun, ended = self.once()
            if begun is None or self.stop.is_set():
                return
            # It died, or was ended, with a launch begun: that launch is lost, the rest go on without it.
            self.add(dict(begun, ok=False, error=ended, seconds=None))

    def once(self) -> tuple[dict | None, str | None]:
        """(the launch that was begun and not ended, what ended the process); None where there is none."""
        cache = tempfile.mkdtemp(dir=self.folder)
        with tempfile.TemporaryFile("w+", dir=self.folder) as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "kda.cli.launches", *self.task.arguments(self.done)], text=True,
                env=environment(cache), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
            self.running.add(process)
            if self.stop.is_set():
                process.kill()
            try:
                begun, late = self.listen(process)
                status = process.wait()
            finally:
                process.kill()
                self.running.discard(process)
            if status == 0:
                return None, None
            errors.seek(0)
            last = errors.read().strip()[-2000:]
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        what = f"no end after {TIMEOUT:.0f} s" if late else f"the compiler's process died ({how})"
        text = f"{what}: {last}" if last else what
        if begun is None and not self.stop.is_set():
            with self.lock:
                self.results.problems[self.task.target] = text
        return begun, text

    def listen(self, process: subprocess.Popen) -> tuple[dict | None, bool]:
        """(the launch begun last, if it has not ended; whether it took too long)."""
        begun, late = None, threading.Event()

        def end():
            late.set()
            process.kill()

        while True:
            timer = threading.Timer(TIMEOUT, end)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                return begun, late.is_set()
            facts = json.loads(line)
            if "launches" in facts:
                with self.lock:
                    self.progress(launches=0 if self.listed else facts["launches"])
                self.listed = True
            elif "called" in facts:
                if not self.listed and self.task.part[0] == 0:
                    with self.lock:
                        self.results.calls.append(dict(target=self.task.target, **facts))
            elif "ok" in facts:
                begun = None
                self.add(facts)
            else:
                begun = facts

    def add(self, facts: dict) -> None:
        self.done.add(facts["number"])
        facts = dict(target=self.task.target, **facts)
        with self.lock:
            self.results.launches.append(facts)
            self.progress(ended=facts)


def environment(cache: str) -> dict[str, str]:
    """For a process that compiles: no switch of kda's or Triton's, and a cache of its own, as facts are told once."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("KDA_", "TRITON_")) or name.startswith("TRITON_PTXAS")}  # fmt: skip
    paths = filter(None, [str(ROOT), env.get("PYTHONPATH")])
    return env | dict(TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1", OMP_NUM_THREADS="1",
                      PYTHONPATH=os.pathsep.join(paths))  # fmt: skip
