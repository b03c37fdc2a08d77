# SPDX-License-Identifier: Apache-2.0
"""Compiles candidates and checks their results against the oracle, side by side in processes of their own.

`python -m kda.cli.trial DEVICE` reads a JSON line for each candidate, {"part", "regime", "works", "config"}, and answers with
{"ok", "why", "spills"}. A process that dies costs the candidate it was at.
"""
from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

TIMEOUT = 300.0  # seconds for one candidate


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`ok`: compiled, and right on all sizes; else `why` not. `spills`: registers, of all kernels, if that is known."""

    ok: bool
    why: str = ""
    spills: int | None = None


def words(error: BaseException) -> str:
    """What went wrong at the bottom of it: compilers quote their source at each level above."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:500]


class Worker:
    """A process that tries one candidate after another; started when it is needed, and again when it has died."""

    def __init__(self, device: str) -> None:
        self.device, self.process = device, None

    def __call__(self, item: dict) -> Outcome:
        if self.process is None:
            command = [sys.executable, "-m", "kda.cli.trial", self.device]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            # In a session of its own: an interrupt from the keyboard is for the sweep, which ends its processes itself.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
            )  # fmt: skip
        process, late = self.process, []
        timer = threading.Timer(TIMEOUT, lambda: (late.append(True), process.kill()))
        timer.start()
        try:
            process.stdin.write(json.dumps(item) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if line:
            return Outcome(**json.loads(line))
        self.process = None
        status = process.wait()
        return Outcome(False, f"took longer than {TIMEOUT:.0f} s" if late else f"its process ended with status {status}")

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def try_all(
    items: list[dict], device: str, jobs: int, ended: Callable[[dict, Outcome], None], stop: Callable[[], bool]
) -> None:  # fmt: skip
    """Calls `ended` for each item, from this thread, in no order; for none that is not begun when `stop` says so."""
    done, workers = queue.SimpleQueue(), queue.SimpleQueue()
    every = [Worker(device) for _ in range(min(jobs, len(items)))]
    for worker in every:
        workers.put(worker)

    def one(item: dict) -> None:
        worker = workers.get()
        try:
            done.put((item, None if stop() else worker(item)))
        except BaseException as error:
            done.put((item, error))
        finally:
            workers.put(worker)

    pool = ThreadPoolExecutor(max(len(every), 1))
    try:
        for item in items:
            pool.submit(one, item)
        for _ in items:
            item, outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome is not None:
                ended(item, outcome)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in every:
            worker.close()


# ---- the process


def work_of(facts: dict):
    import torch

    from kda.cli.workloads import Work

    dtypes = {name: getattr(torch, facts[name]) for name in ("dtype", "state_dtype")}
    return Work(**facts | dtypes | dict(lens=tuple(facts["lens"])))


def facts_of(work) -> dict:
    """A Work as JSON has it."""
    names = {name: str(getattr(work, name)).removeprefix("torch.") for name in ("dtype", "state_dtype")}
    return dataclasses.asdict(work) | names | dict(lens=list(work.lens))


class Trial:
    """Tries candidates on a device; the oracle's results are kept while part and sizes stay the same."""

    def __init__(self, device) -> None:
        from triton.runtime.jit import JITFunction

        self.device, self.sizes, self.cases, self.compiled, self.former = device, None, [], [], []
        run = JITFunction.run

        def noted(kernel, *args, **kwargs):
            compiled = run(kernel, *args, **kwargs)
            self.compiled.append(compiled)
            return compiled

        JITFunction.run = noted

    def __call__(self, part: str, regime: str, works: list[dict], config: dict) -> Outcome:
        from kda.cli import workloads
        from kda.cli.using import using

        if self.sizes != (part, works):
            cases = [workloads.make(part, work_of(facts), self.device) for facts in works]
            self.compiled.clear()
            with using(part, {}):
                self.cases = [(case, [o.ref for o in case.outputs(True)]) for case in cases]
            self.former, self.sizes = self.hashes(), (part, works)
        self.compiled.clear()
        with using(part, config):
            for case, refs in self.cases:
                outputs = [o._replace(ref=ref) for o, ref in zip(case.outputs(False), refs)]
                why = workloads.wrong(outputs)
                if why:
                    return Outcome(False, f"wrong: {why}")
        if config and self.hashes() == self.former:
            return Outcome(False, "the configuration in use")
        # All kernels of the operation together: those that the candidate leaves alone spill what they did before.
        spills = {compiled.hash: compiled.n_spills for compiled in self.compiled}
        return Outcome(True, spills=None if self.device.type == "cpu" else sum(spills.values()))

    def hashes(self) -> list[str]:
        """Of the code that was launched, constants and options included."""
        return [compiled.hash for compiled in self.compiled]


def main() -> None:
    import torch

    import kda

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print what they like
    trial = Trial(torch.device(sys.argv[1]))
    with kda.use_backend("triton"):
        for line in sys.stdin:
            try:
                outcome = trial(**json.loads(line))
            except Exception as error:
                outcome = Outcome(False, words(error))
            print(json.dumps(dataclasses.asdict(outcome)), file=out, flush=True)


if __name__ == "__main__":
    main()
