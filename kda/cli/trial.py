# SPDX-License-Identifier: Apache-2.0
"""Compiles candidates and checks their results against the oracle, side by side in processes of their own.

`python -m kda.cli.trial DEVICE` reads a JSON line for each candidate, {"part", "regime", "works", "config"}, and answers with
{"ok", "why", "spills", "code"}, or {"fatal"} where it is not the candidate's fault. `works` are pairs: a size to check at, and
the configuration in use at the size that is timed, whose entries hold where the candidate has none. A process that dies is
started again; a candidate at which it dies twice is dropped. Processes are started afresh, never forked: the sweep's has the
GPU open.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kda.cli import CommandError

TIMEOUT = 300.0  # seconds for one candidate


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`ok`: compiled, and right on all sizes; else `why` not. `spills`: registers, of all kernels, if that is known; `code`:
    a digest of what was launched, constants and options included."""

    ok: bool
    why: str = ""
    spills: int | None = None
    code: str = ""


def chain(error: BaseException | None) -> list[BaseException]:
    """An error and what caused it, down to the bottom of it: compilers quote their source at each level above."""
    return [] if error is None else [error, *chain(error.__cause__)]


def words(error: BaseException) -> str:
    bottom = chain(error)[-1]
    return f"{type(bottom).__name__}: {bottom}"[:500]


class Worker:
    """A process that tries one candidate after another; started when it is needed, and again when it has ended."""

    def __init__(self, device: str) -> None:
        self.device, self.process, self.stopped = device, None, False

    def start(self) -> None:
        command = [sys.executable, "-m", "kda.cli.trial", self.device]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        # In a session of its own: an interrupt from the keyboard is for the sweep, which ends its processes itself.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )  # fmt: skip

    def __call__(self, item: dict) -> Outcome | None:
        """The outcome; None if the sweep has ended the process."""
        for _ in range(2):
            answer, how = self.ask(item)
            if self.stopped:
                return None
            if answer is not None:
                if "fatal" in answer:
                    raise CommandError(
                        f"candidates cannot be tried here ({answer['fatal']}): what was measured is kept, and the same "
                        "command goes on from there"
                    )  # fmt: skip
                return Outcome(**answer)
            if how.startswith("took"):
                return Outcome(False, how)
        return Outcome(False, f"its process {how}, and again")

    def ask(self, item: dict) -> tuple[dict | None, str]:
        """(the process's answer, or None and how it ended)."""
        if self.process is None:
            self.start()
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
        if line.endswith("\n"):
            answer = json.loads(line)
            if answer.pop("last", False):
                self.end()
            return answer, ""
        self.process = None
        status = process.wait()
        ended = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return None, f"took longer than {TIMEOUT:.0f} s" if late else ended

    def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Ends the process under the thread that waits for it."""
        self.stopped, process = True, self.process
        if process is not None:
            process.kill()


class Workers:
    """Processes that stay from one call of `try_all` to the next."""

    def __init__(self, device: str, jobs: int) -> None:
        self.device, self.jobs, self.all = device, jobs, []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error) -> None:
        for worker in self.all:
            worker.stop()
            worker.end()

    def try_all(
        self, items: list[dict], ended: Callable[[dict, Outcome], None], begin_until: float, end_at: float
    ) -> None:  # fmt: skip
        """Calls `ended` for each item that is done, from this thread, in no order. None is begun after `begin_until`, and
        those that are not done at `end_at` (both of time.monotonic) are given up."""
        while len(self.all) < min(self.jobs, len(items)):
            self.all.append(Worker(self.device))
        done, free = queue.SimpleQueue(), queue.SimpleQueue()
        for worker in self.all:
            worker.stopped = False
            free.put(worker)

        def one(item: dict) -> None:
            worker = free.get()
            try:
                done.put((item, None if worker.stopped or time.monotonic() > begin_until else worker(item)))
            except BaseException as error:
                done.put((item, error))
            finally:
                free.put(worker)

        pool = ThreadPoolExecutor(max(len(self.all), 1))
        try:
            for item in items:
                pool.submit(one, item)
            for _ in items:
                while True:
                    try:
                        item, outcome = done.get(timeout=1.0)
                        break
                    except queue.Empty:
                        if time.monotonic() > end_at:
                            self._stop()
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is not None:
                    ended(item, outcome)
        except BaseException:
            self._stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _stop(self) -> None:
        for worker in self.all:
            worker.stop()


# ---- the process


def work_of(facts: dict):
    import torch

    from kda.cli.workloads import Work

    dtypes = {name: getattr(torch, facts[name]) for name in ("dtype", "state_dtype")}
    checked = facts.get("checked")
    return Work(**facts | dtypes | dict(lens=tuple(facts["lens"]), checked=checked and tuple(checked)))


def facts_of(work) -> dict:
    """A Work as JSON has it."""
    names = {name: str(getattr(work, name)).removeprefix("torch.") for name in ("dtype", "state_dtype")}
    return dataclasses.asdict(work) | names | dict(lens=list(work.lens))


class Trial:
    """Tries candidates on a device; the oracle's results are kept while part and sizes stay the same.

    The configuration in use is not run beside them: each of many processes would have to compile it first.
    """

    def __init__(self, device) -> None:
        from triton.runtime.jit import JITFunction

        self.device, self.sizes, self.cases, self.refs, self.compiled = device, None, [], {}, []
        run = JITFunction.run

        def noted(kernel, *args, **kwargs):
            compiled = run(kernel, *args, **kwargs)
            self.compiled.append(compiled)
            return compiled

        JITFunction.run = noted

    def __call__(self, part: str, regime: str, works: list[tuple[dict, dict]], config: dict) -> Outcome:
        from kda.cli import workloads
        from kda.cli.using import using

        if self.sizes != (part, works):
            self.cases = [workloads.make(part, work_of(facts), self.device) for facts, _ in works]
            self.refs.clear()
            self.sizes = (part, works)
        self.compiled.clear()
        for n, (case, (_, former)) in enumerate(zip(self.cases, works)):
            with using(part, former | config):
                outputs = case.outputs(n not in self.refs)
            refs = self.refs.setdefault(n, [o.ref for o in outputs])
            why = workloads.wrong([o._replace(ref=ref) for o, ref in zip(outputs, refs)])
            if why:
                return Outcome(False, f"wrong: {why}")
        # All kernels of the operation together: those that the candidate leaves alone spill what they did before.
        spills = {compiled.hash: compiled.n_spills for compiled in self.compiled}
        code = hashlib.sha256(" ".join(compiled.hash for compiled in self.compiled).encode()).hexdigest()[:16]
        return Outcome(True, spills=None if self.device.type == "cpu" else sum(spills.values()), code=code)

    def broken(self) -> bool:
        """Whether the GPU no longer answers this process."""
        from kda.cli.using import broken

        return broken(self.device)


def not_its_fault(error: BaseException) -> bool:
    """A full disk or memory, a missing tool: no candidate would do better."""
    import torch

    return any(isinstance(e, (OSError, MemoryError, torch.OutOfMemoryError)) for e in chain(error))


def main() -> None:
    import torch

    import kda

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print what they like
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one
    trial = Trial(device)
    with kda.use_backend("triton"):
        for line in sys.stdin:
            try:
                answer = dataclasses.asdict(trial(**json.loads(line)))
            except Exception as error:
                if not_its_fault(error):
                    answer = dict(fatal=words(error))
                else:
                    answer = dataclasses.asdict(Outcome(False, words(error)))
                    if trial.broken():
                        answer["last"] = True
            print(json.dumps(answer), file=out, flush=True)
            if "last" in answer:
                break


if __name__ == "__main__":
    main()
