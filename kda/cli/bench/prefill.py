# SPDX-License-Identifier: Apache-2.0
"""Prompts through the chunked delta rule, gate and l2 norm in the kernel, from initial to final states.

"kda, decays given" gets the log decays and beta ready made, as its peers on a CPU do.
"""
from __future__ import annotations

from functools import partial

from torch import Tensor

import kda
from kda.cli.bench import peers
from kda.cli.bench.rows import Row
from kda.cli.bench.session import Session, bound, errors, judged
from kda.cli.bench.tensors import D, Prompt, few
from kda.cli.workloads import Work

MODES = {name: ("graph", "eager") for name in ("kda", "flashkda")} | {"vllm": ("eager",), "fla": ("eager",)}


def fill(session: Session, row: Row, H: int, lens: list[int], full: bool = True, triton_peers: bool = False) -> None:
    T, N = sum(lens), len(lens)
    row.dims |= dict(T=T, N=N)
    x = Prompt(Work(H, tuple(lens), D), session.device)
    heads = few(H, 4)
    ref = x.oracle(heads)

    def check(name: str, call, limits: list[float] | None) -> None:
        o, states = call()
        judged(row, name, errors((o[:, :, heads], states[:, heads]), ref), limits)

    check("kda", x.chunk, bound())
    calls = {"kda": x.chunk}
    if session.gpu:
        rivals = ("vllm", "fla") if triton_peers else ("flashkda",)
        for peer in (p for p in rivals if p in session.peers):
            session.add_peer(row, calls, peer, lambda: checked(check, peer, peers.CHUNK[peer](x)))
    elif N == 1:
        on_cpu(session, row, x, calls, full)
    if full and not triton_peers:
        calls["kda, strided inputs"] = x.strided().chunk
        calls["kda, unbounded gate"] = x.unbounded().chunk
    nbytes = T * H * D * 2 * 5 + 2 * N * H * D * D * 4
    session.floor(row, dict.fromkeys(calls, nbytes))
    session.time(row, calls, MODES, share=1.0 if session.gpu else 2.0 if full else 0.5)
    session.launching(row, x.chunk)


def checked(check, name: str, call):
    check(name, call, None)
    return call


def on_cpu(session: Session, row: Row, x: Prompt, calls: dict, full: bool) -> None:
    from kda.reference import chunk as reference

    given = x.given()
    flipped = x.h0.transpose(-1, -2).contiguous()

    def ours() -> tuple[Tensor, Tensor]:
        return kda.chunk_kda(*given, initial_state=x.h0, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def eager() -> tuple[Tensor, Tensor]:
        with kda.use_backend("reference"):
            return ours()

    calls["kda, decays given"] = ours
    if "transformers" in session.peers:
        forms = peers.transformers_forms()
        for name in forms if full else ("transformers",):
            calls[name] = partial(forms[name], given, flipped)
    if "reference" in session.peers and full:
        calls["reference"] = eager
    if "compiled" in session.peers and full and x.T <= 512:
        quick = peers.compiled(reference.chunk_kda)
        arguments = (*given, D**-0.5, x.h0, True, None, True, False, None, None, None, None)
        session.add_peer(row, calls, "compiled", lambda: called(partial(quick, *arguments)))


def called(call):
    call()
    return call
