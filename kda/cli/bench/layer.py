# SPDX-License-Identifier: Apache-2.0
"""A layer's prefill: `kda_prefill` beside its operations one by one, and what checkpoints inside prompts add."""
from __future__ import annotations

import torch
from torch import Tensor

import kda
from kda.cli.bench.rows import Row
from kda.cli.bench.session import Session, bound, errors, judged
from kda.cli.bench.tensors import D, columns, few, norm_of_ones, part_of
from kda.cli.workloads import LB, Tensors, Work, norm64

MODES = {"kda_prefill": ("graph", "eager")}


class Prompts(Tensors):
    """Merged projection qkv [T, 3*H*D] and the rest of a layer's prefill; states in slots 1 to N, checkpoints behind them
    after every `every` tokens."""

    def __init__(self, work: Work, every: int, device: torch.device) -> None:
        super().__init__(work, device)
        self.qkv, self.g, self.gate = self.randn(self.T, self.dim), self.heads(), self.heads()
        self.beta, self.norm = self.randn(self.T, work.H), norm_of_ones(device)
        starts = self.cu.tolist()
        at = [start + end for start, length in zip(starts, work.lens) for end in range(every, length, every)]
        slots = self.N + 1 + len(at)
        self.slots = torch.arange(1, self.N + 1, dtype=torch.int32, device=device)
        self.pool = self.randn(slots, work.H, D, D, dtype=torch.float32) * 0.1
        self.conv = self.randn(slots, 3, self.dim).transpose(1, 2)
        self.has = torch.ones(self.N, dtype=torch.bool, device=device)
        self.checkpoints = dict(checkpoint_offsets=self.ints(at), checkpoint_indices=self.ints(list(range(self.N + 1, slots))))

    def whole(self, **checkpoints: Tensor) -> Tensor:
        return kda.kda_prefill(
            self.qkv, self.g, self.beta, self.gate, self.conv, self.pool, self.slots, self.cu, self.has, self.weight,
            self.A_log, self.bias, self.norm.weight, lower_bound=LB, eps=self.norm.eps, **checkpoints,
        )  # fmt: skip

    def apart(self) -> Tensor:
        y = kda.causal_conv1d_fn(
            self.qkv.T, self.weight, None, self.conv, self.cu, self.slots, self.has, activation="silu"
        ).T
        q, k, v = (t[None] for t in self.split(y))
        o, h = kda.chunk_kda_with_fused_gate(
            q, k, v, self.g[None], self.beta[None], self.A_log, self.bias,
            initial_state=kda.gather_initial_states(self.pool, self.slots, self.has), output_final_state=True,
            use_qk_l2norm_in_kernel=True, cu_seqlens=self.cu, safe_gate=True, lower_bound=LB, sigmoid_beta=True,
        )  # fmt: skip
        kda.scatter_states(self.pool, h, self.slots)
        return self.norm(o[0], self.gate)

    def errors(self) -> dict[str, float]:
        """Of one call; the states move on."""
        heads = few(self.work.H, 4)
        part, at = part_of(self, heads, list(range(self.N))), columns(self, heads)
        y, _ = part.conv64(self.qkv[:, at], self.conv[:, at])
        states = self.pool[self.slots][:, heads]
        o, states = part.rule64(y.to(self.work.dtype), self.g[:, heads], self.beta[:, heads], states)
        got = self.whole(**self.checkpoints)[:, heads]
        return errors((got, self.pool[self.slots][:, heads]), (norm64(o, self.gate[:, heads], self.norm.weight), states))


def fill(session: Session, row: Row, H: int, lens: list[int], every: int) -> None:
    T, N = sum(lens), len(lens)
    x = Prompts(Work(H, tuple(lens), D), every, session.device)
    row.dims |= dict(T=T, N=N)
    row.facts["checkpoints"] = len(x.checkpoints["checkpoint_offsets"])
    judged(row, "kda_prefill", x.errors(), bound())
    calls = {
        "kda_prefill": x.whole, "kda_prefill, checkpoints": lambda: x.whole(**x.checkpoints), "kda, operations apart": x.apart,
    }  # fmt: skip
    nbytes = T * H * D * 2 * 6 + N * H * D * (2 * D * 4 + 2 * 3 * 3 * 2)
    session.floor(row, dict.fromkeys(calls, nbytes))
    session.time(row, calls, MODES)
    session.launching(row, x.whole)
