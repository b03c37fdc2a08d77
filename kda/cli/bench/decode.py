# SPDX-License-Identifier: Apache-2.0
"""A decode step: the recurrence alone, the chain of convolution update, recurrence and gated norm, the chain in one kernel.

On a CPU states are "hot", the same ones every call, or "cold", the next of several sets that together exceed the caches, as
they are where a model's layers take turns; a copy takes turns with the calls there.
"""
from __future__ import annotations

import itertools
from functools import partial

import torch

import kda
from kda.cli.bench import measure, peers
from kda.cli.bench.rows import Row
from kda.cli.bench.session import Session, bound, judged
from kda.cli.bench.tensors import D, Step

COLD_MIB, COPY_MIB = 256, 512


def fill(session: Session, row: Row, H: int, N: int, full: bool = True, states: str | None = None) -> None:
    x = Step(H, N, session.device)
    judged(row, "kda_decode", x.errors(x.fused), bound())
    if session.gpu or states is None:
        in_graphs(session, row, x, full)
    else:
        on_cpu(session, row, x, full, states)


def floors(x: Step) -> tuple[float, float, float]:
    """Bytes of the recurrence, of the chain, and of the chain on states in bf16."""
    heads = x.N * x.work.H
    recurrence = heads * (D * D * 8 + D * 10)
    chain = recurrence + heads * D * (3 * 3 * 2 * 2 + 2)  # convolution state in and out, output gate
    return recurrence, chain, chain - heads * D * D * 4


def in_graphs(session: Session, row: Row, x: Step, full: bool) -> None:
    recurrence, chain, half = floors(x)
    calls, nbytes = {"kda_decode": partial(x.fused, x.conv, x.pool)}, {"kda_decode": chain}
    if full:
        pool = x.pool.bfloat16()
        judged(row, "kda_decode, bf16 states", x.errors(x.fused, torch.bfloat16), bound())
        judged(row, "kda, chain", x.errors(x.chain), bound())
        judged(row, "kda, recurrence", x.errors(lambda conv, pool: x.recurrence(pool), chain=False), bound())
        calls["kda_decode, bf16 states"] = partial(x.fused, x.conv, pool)
        calls["kda, chain"] = partial(x.chain, x.conv, x.pool)
        calls["kda, recurrence"] = partial(x.recurrence, x.pool)
        nbytes |= {"kda_decode, bf16 states": half, "kda, chain": chain, "kda, recurrence": recurrence}
    if "vllm" in session.peers:
        session.add_peer(row, calls, "vllm, chain", lambda: peers.vllm_chain(x))
        if full:
            session.add_peer(row, calls, "vllm, recurrence", lambda: peers.vllm_recurrence(x))
        nbytes |= {"vllm, chain": chain, "vllm, recurrence": recurrence}
    session.floor(row, nbytes)
    session.time(row, calls, {"kda_decode": ("graph", "eager")} if full else None)
    session.launching(row, calls["kda_decode"])


def on_cpu(session: Session, row: Row, x: Step, full: bool, states: str) -> None:
    H, N = x.work.H, x.N
    mib = 2**20 if not session.quick else 2**14
    sets = max(-(-COLD_MIB * mib // (N * H * D * D * 4)), 2) if states == "cold" else 1
    pools = [x.pool.clone() for _ in range(sets)]
    given = [t.transpose(0, 1).contiguous() for t in (x.q, x.k, x.v)]  # [N, 1, H, D]
    y = kda.fused_kda_gate(x.g.flatten(1)[:, None], x.A_log, D, x.bias, safe_gate=True, lower_bound=-5.0)
    given += [y, x.beta.float().sigmoid().to(x.work.dtype)[:, None]]
    turn = {name: itertools.cycle(pools) for name in ("fused", "given", "transformers", "reference", "compiled")}

    def ours(turn):
        return kda.fused_recurrent_kda(*given, initial_state=next(turn)[1:], use_qk_l2norm_in_kernel=True)

    def eager():
        with kda.use_backend("reference"):
            return ours(turn["reference"])

    calls = {
        "kda, decays given": lambda: ours(turn["given"]), "kda_decode": lambda: x.fused(x.conv, next(turn["fused"])),
    }  # fmt: skip
    if "transformers" in session.peers:
        theirs = peers.transformers_forms()["transformers"]
        calls["transformers"] = lambda: theirs(given, next(turn["transformers"])[1:])
    if "reference" in session.peers and full:
        calls["reference"] = eager
    if "compiled" in session.peers and full and states == "hot":
        from kda.reference import recurrent as reference

        quick = peers.compiled(reference.fused_recurrent_kda)
        rest = (None, None, None, True, False, None, None, None, None, None)
        compiled = lambda: quick(*given, D**-0.5, next(turn["compiled"])[1:], *rest)  # noqa: E731
        session.add_peer(row, calls, "compiled", lambda: compiled() and compiled)
    copy, nbytes = measure.copy_call(session.device, COPY_MIB if not session.quick else 8)
    session.time(row, calls | {"copy": copy}, share=1.0 if full else 0.5)
    rate = nbytes / (row.ms.pop("copy")["ms"] * 1e-3)
    row.facts["copy_bytes_per_s"] = rate
    recurrence, chain, _ = floors(x)
    session.floor(row, {name: chain if name == "kda_decode" else recurrence for name in calls}, rate)
