# SPDX-License-Identifier: Apache-2.0
"""What the parts of a run share: the device, the peers that are here, and how a row is filled."""
from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kda.cli.bench import measure
from kda.cli.bench.regimes import Case
from kda.cli.bench.rows import Row, finite
from kda.cli.check import BOUNDS, err


@dataclass(frozen=True)
class Session:
    """`seconds`: of calls for a row that is measured in full. `copy`: bytes/s of a large copy, read and written."""

    on: str
    peers: tuple[str, ...]
    all_peers: bool
    quick: bool
    threads: int
    seconds: float
    copy: float

    @property
    def gpu(self) -> bool:
        return measure.on_gpu(self.device)

    @property
    def device(self) -> torch.device:
        return torch.device(self.on)

    def settings(self) -> dict:
        return asdict(self)

    def measure(self, case: Case) -> Row:
        """The row of a case. What fails is told in it: one operation that fails must not cost the rest of the run."""
        from kda.cli.bench import parts

        row, begin = Row(case.part, case.name, case.dims), time.perf_counter()
        try:
            with torch.no_grad():
                parts.FILL[case.part](self, row, **case.dims)
        except Exception as e:
            traceback.print_exc()
            row.failed.setdefault("kda", words(e))
        if self.gpu:
            torch.cuda.empty_cache()
        row.seconds = round(time.perf_counter() - begin, 2)
        return row

    def time(self, row: Row, calls: dict[str, measure.Call], modes: dict | None = None, share: float = 1.0) -> None:
        """Times all calls in turn, on a GPU out of graphs, or as `modes` names it by call. One that fails is told."""
        bursts = {}
        for name, call in calls.items():
            how = (modes or {}).get(name, ("graph",))
            for what, make in measure.bursts_of(name, call, self.device, how).items():
                attempt(row, what, lambda: bursts.update({what: make()}))
        row.ms |= measure.in_turn(bursts, self.seconds * share)

    def launching(self, row: Row, call: measure.Call) -> None:
        """Of a call that has run: how long it keeps the host, whether it waits for the GPU, its kernels."""
        row.host_us, row.add_us = attempt(row, "launching", lambda: measure.host_us(call, self.device)) or (None, None)
        row.waits = attempt(row, "waits", lambda: measure.waits(call, self.device))
        row.kernel_us = attempt(row, "kernels", lambda: measure.kernel_us(call, self.device)) or {}

    def floor(self, row: Row, nbytes: dict[str, float], copy: float | None = None) -> None:
        """Bytes that each call must read and write, at the bandwidth of a copy."""
        row.floor_ms |= {name: n / (copy or self.copy) * 1e3 for name, n in nbytes.items()}

    def add_peer(self, row: Row, calls: dict, name: str, make: Callable[[], measure.Call]) -> None:
        """A peer's call among the others, if it can be made."""
        call = attempt(row, name, make)
        if call is not None:
            calls[name] = call


def attempt(row: Row, name: str, fn: Callable[[], object]):
    """`fn()`, or None and in the row why it failed."""
    try:
        return fn()
    except Exception as e:
        row.failed[name] = words(e)
        return None


def words(e: Exception) -> str:
    return (f"{type(e).__name__}: {e}".splitlines() or [""])[0][:200]


def bound(dtype: torch.dtype = torch.bfloat16) -> list[float]:
    return list(BOUNDS[dtype])


def judged(row: Row, name: str, errors: dict, limits: list[float] | None) -> None:
    row.errors[name] = finite(errors) | {"bound": limits}


def errors(got: tuple[Tensor, Tensor], ref: tuple[Tensor, Tensor]) -> dict[str, float]:
    return {"output": err(got[0], ref[0]), "state": err(got[1], ref[1])}
