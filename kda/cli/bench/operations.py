# SPDX-License-Identifier: Apache-2.0
"""The operations beside the delta rule, beside vLLM's of the same names or one line of torch."""
from __future__ import annotations

from functools import partial

import torch

import kda
from kda.cli.bench import peers
from kda.cli.bench.rows import Row
from kda.cli.bench.session import Session
from kda.cli.bench.tensors import D, norm_of_ones
from kda.cli.workloads import LB, Tensors, Work

# Ours, what makes the peer's call, the peer's name, and the bytes that must be read and written.
Stage = tuple


def fill(session: Session, row: Row, op: str, H: int, lens: list[int] | None, N: int | None) -> None:
    x = Tensors(Work(H, tuple(lens or [1] * N), D), session.device)
    row.dims |= dict(T=x.T, N=x.N)
    call, peer, name, nbytes = STAGES[op](x)
    calls = {"kda": call}
    if name == "torch" or name in session.peers:
        session.add_peer(row, calls, name, peer)
    session.floor(row, dict.fromkeys(calls, nbytes))
    modes = {"kda": ("graph", "eager")}
    if op == "causal_conv1d_fn":  # theirs reads lengths back to the host, which no graph captures
        modes["vllm"] = ("eager",)
    session.time(row, calls, modes)
    session.launching(row, call)


def conv_fn(x: Tensors) -> Stage:
    has = torch.ones(x.N, dtype=torch.bool, device=x.device)
    args = (x.randn(x.T, x.dim).t(), x.weight, None, x.conv_pool(), x.cu, x.slots, has)
    return partial(kda.causal_conv1d_fn, *args, activation="silu"), lambda: peers.vllm_conv_fn(*args), "vllm", 4 * x.T * x.dim


def conv_update(x: Tensors) -> Stage:
    tokens, pool = x.randn(x.N, x.dim), x.conv_pool()

    def ours():
        return kda.causal_conv1d_update(tokens, pool, x.weight, None, activation="silu", conv_state_indices=x.slots)

    nbytes = x.dim * (16 + x.N * (3 * 4 + 4))
    return ours, lambda: peers.vllm_conv_update(tokens.clone(), pool.clone(), x.weight, x.slots), "vllm", nbytes


def gate(x: Tensors) -> Stage:
    g = x.randn(x.T, x.work.H * D)

    def ours():
        return kda.fused_kda_gate(g, x.A_log, D, x.bias, safe_gate=True, lower_bound=LB)

    return ours, lambda: peers.vllm_gate(g, x.A_log, x.bias), "vllm", 6 * g.numel()


def norm(x: Tensors) -> Stage:
    ours, o, out_gate = norm_of_ones(x.device), x.heads(), x.heads()
    return partial(ours, o, out_gate), lambda: partial(peers.vllm_norm(x.device), o, out_gate), "vllm", 6 * o.numel()


def gather(x: Tensors) -> Stage:
    pool, has, rows = x.state_pool(), torch.ones(x.N, dtype=torch.bool, device=x.device), x.slots.long()

    def theirs():
        return torch.where(has[:, None, None, None], pool[rows], 0)

    return lambda: kda.gather_initial_states(pool, x.slots, has), lambda: theirs, "torch", 8 * pool[1:].numel()


def scatter(x: Tensors) -> Stage:
    pool, rows = x.state_pool(), x.slots.long()
    src = pool[1:].clone()
    return (lambda: kda.scatter_states(pool, src, x.slots), lambda: lambda: pool.index_copy_(0, rows, src), "torch",
            8 * src.numel())  # fmt: skip


STAGES = {
    "causal_conv1d_fn": conv_fn,
    "causal_conv1d_update": conv_update,
    "fused_kda_gate": gate,
    "FusedRMSNormGated": norm,
    "gather_initial_states": gather,
    "scatter_states": scatter,
}
