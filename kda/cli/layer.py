# SPDX-License-Identifier: Apache-2.0
"""A KDA layer of GLM-5.3-Flash, built from the public operations as a serving engine runs it.

One merged projection feeds every stage: q, k, v and beta are column slices of it, read in place. Requests
live in slots of two pools (recurrent states and convolution states); a batch is decode rows first, then
prefill rows, packed along the tokens without padding.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kda


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer; the defaults are GLM-5.3-Flash's."""

    hidden: int = 4096
    heads: int = 64
    head_dim: int = 128
    conv_width: int = 4
    lower_bound: float = -5.0
    eps: float = 1e-5

    @property
    def qkv_dim(self) -> int:
        return self.heads * self.head_dim


class StatePools:
    """What requests keep: `recurrent` [slots, H, V, K] fp32, `conv` [slots, 3*H*K, W-1]. Slot 0 is null."""

    def __init__(self, geo: Geometry, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        D = geo.head_dim
        self.recurrent = torch.zeros(slots, geo.heads, D, D, device=device)
        # stored [slots, W-1, dim], so that a token's channels are dense, and used as [slots, dim, W-1]
        conv = torch.zeros(slots, geo.conv_width - 1, 3 * geo.qkv_dim, dtype=dtype, device=device)
        self.conv = conv.transpose(1, 2)


@dataclass
class Batch:
    """Which tokens belong to whom: one of each decode row first, then those of the prefill rows.

    `decode_slots` [Nd], `prefill_slots` [Np] int32; `cu_seqlens` [Np+1] int32, from the first prefill token;
    `continued` [Np] bool: the row goes on from what its slot holds, otherwise it starts from zeros.
    """

    decode_slots: Tensor
    prefill_slots: Tensor
    cu_seqlens: Tensor
    continued: Tensor

    @classmethod
    def of(cls, decode: list[int], prefill: list[tuple[int, int, bool]], device: torch.device | str) -> Batch:
        """`decode`: slots. `prefill`: (slot, tokens, continued) for each row."""
        ends = torch.tensor([0, *(n for _, n, _ in prefill)]).cumsum(0)
        i32 = dict(dtype=torch.int32, device=device)
        return cls(
            torch.tensor(decode, **i32),
            torch.tensor([s for s, _, _ in prefill], **i32),
            ends.to(**i32),
            torch.tensor([c for _, _, c in prefill], dtype=torch.bool, device=device),
        )


@dataclass
class Projected:
    """Columns of the merged projection [T, 3*H*D + H], and the two low-rank gates [T, H*D]."""

    qkv: Tensor
    beta: Tensor
    raw_g: Tensor
    out_gate: Tensor


# What the KDA operations saw and gave: qkv [T, 3*H*D], raw_g and out_gate [T, H, D], beta [T, H], output y [T, H, D].
Trace = Callable[[dict[str, Tensor]], None]


class KDALayer(nn.Module):
    """Projections in the activation dtype; convolution, A_log and dt_bias in fp32, as the model has them."""

    def __init__(self, geo: Geometry, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.geo = geo
        hidden, wide, H, D = geo.hidden, geo.qkv_dim, geo.heads, geo.head_dim
        like = dict(dtype=dtype, device=device)
        f32 = dict(dtype=torch.float32, device=device)

        def weight(*shape: int, **kw) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, **kw))

        self.in_proj = weight(3 * wide + H, hidden, **like)  # rows: q, k, v, beta
        self.gates_a = weight(2 * D, hidden, **like)  # rows: decay gate, output gate
        self.f_b_proj = weight(wide, D, **like)
        self.g_b_proj = weight(wide, D, **like)
        self.o_proj = weight(hidden, wide, **like)
        self.conv_weight = weight(3 * wide, geo.conv_width, **f32)
        self.A_log = weight(H, **f32)
        self.dt_bias = weight(wide, **f32)
        self.o_norm = kda.FusedRMSNormGated(D, eps=geo.eps, activation="sigmoid", **like)
        self.requires_grad_(False)

    @torch.no_grad()
    def seed(self, seed: int) -> KDALayer:
        """Fan-in scaled; A_log and dt_bias as the model initialises them. The same on every device."""
        gen = torch.Generator().manual_seed(seed)
        for w in (self.in_proj, self.gates_a, self.f_b_proj, self.g_b_proj, self.o_proj, self.conv_weight):
            w.copy_(torch.randn(w.shape, generator=gen).mul_(w.shape[1] ** -0.5))
        self.A_log.zero_()
        dt = torch.empty(self.dt_bias.shape).uniform_(math.log(1e-3), math.log(1e-1), generator=gen).exp_()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse softplus
        self.o_norm.weight.copy_(1 + 0.1 * torch.randn(self.geo.head_dim, generator=gen))
        return self

    def forward(self, x: Tensor, batch: Batch, pools: StatePools) -> Tensor:
        """`x` [T, hidden] -> [T, hidden]; states in `pools` move on by these tokens."""
        p = self.project(x)
        return self.output(self.mix(p, batch, pools))

    def project(self, x: Tensor) -> Projected:
        wide, D = 3 * self.geo.qkv_dim, self.geo.head_dim
        merged, low = F.linear(x, self.in_proj), F.linear(x, self.gates_a)
        raw_g, out_gate = F.linear(low[:, :D], self.f_b_proj), F.linear(low[:, D:], self.g_b_proj)
        return Projected(merged[:, :wide], merged[:, wide:], raw_g, out_gate)

    def mix(self, p: Projected, batch: Batch, pools: StatePools, trace: Trace | None = None) -> Tensor:
        """The KDA operations alone: convolution, gate, delta rule, gated norm. -> [T, H*D]"""
        n, heads = len(batch.decode_slots), (self.geo.heads, self.geo.head_dim)
        raw_g, out_gate = p.raw_g.unflatten(-1, heads), p.out_gate.unflatten(-1, heads)
        y = torch.empty(out_gate.shape, dtype=out_gate.dtype, device=out_gate.device)
        own = (self.conv_weight, self.A_log, self.dt_bias, self.o_norm.weight)
        how = dict(lower_bound=self.geo.lower_bound, activation=self.o_norm.activation, eps=self.o_norm.eps)
        if n:
            kda.kda_decode(
                p.qkv[:n], raw_g[:n], p.beta[:n], out_gate[:n], pools.conv, pools.recurrent, batch.decode_slots, *own,
                **how, out=y[:n],
            )
        if n < len(y):
            kda.kda_prefill(
                p.qkv[n:], raw_g[n:], p.beta[n:], out_gate[n:], pools.conv, pools.recurrent, batch.prefill_slots,
                batch.cu_seqlens, batch.continued, *own, **how, out=y[n:],
            )
        if trace:
            trace(dict(qkv=p.qkv, raw_g=raw_g, beta=p.beta, out_gate=out_gate, y=y))
        return y.flatten(1)

    def output(self, o: Tensor) -> Tensor:
        return F.linear(o, self.o_proj)
