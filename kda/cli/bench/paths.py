# SPDX-License-Identifier: Apache-2.0
"""The processor paths of triton-cpu (KDA_CPU_ISA): a prompt and a decode step on each that this machine has."""
from __future__ import annotations

from dataclasses import replace

from kda.cli.bench import child
from kda.cli.bench.rows import Row
from kda.cli.bench.session import Session


def missing(path: str) -> str:
    """What this machine lacks for a path, in words; "" if nothing."""
    from kda.triton_cpu import runtime

    return runtime.missing(path)


def fill(session: Session, row: Row, path: str, part: str, H: int, **dims) -> None:
    usual = tuple(peer for peer in session.peers if peer == "transformers")
    dims = dict(H=H, full=False, **dims) | (dict(states="cold") if part == "decode" else {})
    got = child.measure(replace(session, peers=usual), part, row.name, dims, {"KDA_CPU_ISA": path})
    row.dims |= got.dims | dict(path=path, part=part)
    row.ms, row.failed, row.floor_ms, row.errors, row.facts = got.ms, got.failed, got.floor_ms, got.errors, got.facts
