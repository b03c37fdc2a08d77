# SPDX-License-Identifier: Apache-2.0
"""Errors alone: packed sequences from random states in every dtype, one long sequence for drift, keys that are all alike."""
from __future__ import annotations

import torch

from kda.cli.bench import peers
from kda.cli.bench.rows import Row
from kda.cli.bench.session import Session, attempt, bound, errors, judged
from kda.cli.bench.tensors import D, Prompt
from kda.cli.check import err
from kda.cli.workloads import Work

WINDOW = 256  # tokens: drift along a sequence shows


def fill(
    session: Session, row: Row, H: int, lens: list[int], dtype: str, bounded: bool, alike: float | None = None
) -> None:
    kind = getattr(torch, dtype)
    x = Prompt(Work(H, tuple(lens), D, bounded, dtype=kind), session.device)
    row.dims |= dict(T=sum(lens), N=len(lens))
    if alike is not None:
        x = x.alike(alike)
    o, states = x.oracle(list(range(H)))
    calls = {"kda, chunk": x.chunk, "kda, recurrent": x.recurrent}
    if session.gpu and bounded and kind == torch.bfloat16:
        for peer in (p for p in session.peers if p == "flashkda" or session.all_peers):
            session.add_peer(row, calls, peer, lambda: peers.CHUNK[peer](x))
    for name, call in calls.items():
        got = attempt(row, name, call)
        if got is not None:
            limits = bound(kind) if name.startswith("kda") else None
            windows = [err(a, b) for a, b in zip(got[0].split(WINDOW, 1), o.split(WINDOW, 1))]
            judged(row, name, errors(got, (o, states)) | {"windows": windows}, limits)
