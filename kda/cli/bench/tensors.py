# SPDX-License-Identifier: Apache-2.0
"""Inputs of a prompt and of a decode step, our calls on them, and the recurrence in fp64 over a part of them."""
from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

import kda
from kda.cli.check import err
from kda.cli.workloads import EPS, LB, Tensors, Work, norm64

D = 128


def few(n: int, most: int) -> list[int]:
    """`most` of `n` things at most, the first and the last ones."""
    half = most // 2
    return list(range(n)) if n <= most else [*range(half), *range(n - half, n)]


def columns(x: Tensors, heads: list[int]) -> Tensor:
    """Columns of the merged projection that belong to some heads."""
    H = x.work.H
    at = torch.arange(x.dim, device=x.device).view(3, H, D)
    return at[:, heads].flatten()


def part_of(x: Tensors, heads: list[int], requests: list[int]) -> Tensors:
    """The same layer with some heads and requests alone: they do not depend on the others."""
    part = copy.copy(x)
    part.work = replace(x.work, H=len(heads), lens=tuple(x.work.lens[n] for n in requests))
    part.A_log, part.bias = x.A_log[heads], x.bias.view(-1, D)[heads].flatten()
    part.weight, part.slots = x.weight[columns(x, heads)], x.slots[requests]
    return part


class Prompt(Tensors):
    """Packed prompts: q, k, v, raw g [1, T, H, D], beta logits [1, T, H], initial states h0 [N, H, V, K] fp32."""

    def __init__(self, work: Work, device: torch.device) -> None:
        super().__init__(work, device)
        self.q, self.k, self.v, self.g = (self.heads()[None] for _ in range(4))
        self.beta = self.randn(self.T, work.H)[None]
        self.h0 = self.randn(self.N, work.H, D, D, dtype=torch.float32) * 0.1

    def strided(self) -> Prompt:
        """The same values with q, k, v as column slices of one tensor and beta of another."""
        other = copy.copy(self)
        qkv = torch.cat([t.flatten(2) for t in (self.q, self.k, self.v)], -1)
        other.q, other.k, other.v = (t.unflatten(-1, (self.work.H, D)) for t in qkv.chunk(3, -1))
        other.beta = torch.cat([self.beta, self.beta], -1)[..., : self.work.H]
        return other

    def unbounded(self) -> Prompt:
        other = copy.copy(self)
        other.work, other.lower_bound = replace(self.work, bounded=False), None
        other.A_log = (1 + 15 * self.A_log.exp()).log()
        return other

    def alike(self, gate: float) -> Prompt:
        """The hardest case for a chunked form: keys that are nearly one and the same, beta 1, and one slow decay."""
        other = copy.copy(self)
        noise = self.randn(*self.k.shape, dtype=torch.float32) * 0.05
        other.k = (self.k[:, :1].float() + noise).to(self.k.dtype)
        other.g, other.beta = torch.full_like(self.g, gate), torch.full_like(self.beta, 40.0)
        other.A_log, other.bias = torch.zeros_like(self.A_log), torch.zeros_like(self.bias)
        return other

    def chunk(self) -> tuple[Tensor, Tensor]:
        return kda.chunk_kda_with_fused_gate(
            self.q, self.k, self.v, self.g, self.beta, self.A_log, self.bias, initial_state=self.h0,
            output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=self.cu, safe_gate=self.work.bounded,
            lower_bound=LB, sigmoid_beta=True,
        )  # fmt: skip

    def recurrent(self) -> tuple[Tensor, Tensor]:
        """Token by token, on states in a pool."""
        pool = torch.cat([torch.full_like(self.h0[:1], float("nan")), self.h0])  # the null slot is never read
        slots = torch.arange(1, self.N + 1, dtype=torch.int32, device=self.device)
        o, _ = kda.fused_recurrent_kda(
            self.q, self.k, self.v, self.g, self.beta, initial_state=pool, use_qk_l2norm_in_kernel=True,
            cu_seqlens=self.cu, ssm_state_indices=slots, sigmoid_beta=True, a_log=self.A_log, g_bias=self.bias,
            compute_gate=True, lower_bound=self.lower_bound,
        )  # fmt: skip
        return o, pool[1:]

    def given(self) -> list[Tensor]:
        """q, k, v, log decays [1, T, H, D] fp32 and beta [1, T, H]: what code without the gate takes."""
        y = kda.fused_kda_gate(self.g.flatten(2), self.A_log, D, self.bias, safe_gate=True, lower_bound=LB)
        return [self.q, self.k, self.v, y, self.beta.float().sigmoid().to(self.work.dtype)]

    def oracle(self, heads: list[int]) -> tuple[Tensor, Tensor]:
        """o [1, T, heads, D] and final states [N, heads, V, K] in fp64."""
        qkv = torch.cat([t[0, :, heads].flatten(1) for t in (self.q, self.k, self.v)], -1)
        part = part_of(self, heads, list(range(self.N)))
        o, states = part.rule64(qkv, self.g[0, :, heads], self.beta[0, :, heads], self.h0[:, heads])
        return o[None], states


class Step(Tensors):
    """One new token of each of N requests: merged projection qkv [N, 3*H*D], raw g and output gate [N, H, D], beta logits
    [N, H], convolution states [N + 1, 3*H*D, W - 1], recurrent states [N + 1, H, V, K] fp32."""

    def __init__(self, H: int, N: int, device: torch.device) -> None:
        super().__init__(Work(H, (1,) * N, D), device)
        self.qkv, self.g, self.gate = self.randn(N, self.dim), self.heads(), self.heads()
        self.beta, self.conv, self.pool = self.randn(N, H), self.conv_pool(), self.state_pool()
        self.norm, self.out = norm_of_ones(device), torch.empty_like(self.gate)
        self.q, self.k, self.v = (t[None].contiguous() for t in self.split(self.qkv))

    def recurrence(self, pool: Tensor, qkv: list[Tensor] | None = None) -> Tensor:
        q, k, v = qkv or (self.q, self.k, self.v)
        return kda.fused_recurrent_kda(
            q, k, v, self.g[None], self.beta[None], initial_state=pool, use_qk_l2norm_in_kernel=True, cu_seqlens=self.cu,
            ssm_state_indices=self.slots, sigmoid_beta=True, a_log=self.A_log, g_bias=self.bias, compute_gate=True,
            lower_bound=LB,
        )[0][0]  # fmt: skip

    def chain(self, conv: Tensor, pool: Tensor) -> Tensor:
        """Convolution update, recurrence and gated norm, one after the other."""
        y = kda.causal_conv1d_update(self.qkv, conv, self.weight, None, "silu", conv_state_indices=self.slots)
        return self.norm(self.recurrence(pool, [t[None] for t in self.split(y)]), self.gate)

    def fused(self, conv: Tensor, pool: Tensor) -> Tensor:
        return kda.kda_decode(
            self.qkv, self.g, self.beta, self.gate, conv, pool, self.slots, self.weight, self.A_log, self.bias,
            self.norm.weight, lower_bound=LB, eps=self.norm.eps, out=self.out,
        )  # fmt: skip

    def errors(self, call, dtype: torch.dtype = torch.float32, chain: bool = True) -> dict[str, float]:
        """Of `call(conv, pool)` from fresh states, on the first and the last requests; without `chain`, of the recurrence."""
        rows = few(self.N, 8)
        part = part_of(self, few(self.work.H, 4), rows)
        heads = few(self.work.H, 4)
        conv, pool = self.conv.clone(), self.pool.to(dtype)
        before = pool[part.slots][:, heads]
        o = call(conv, pool)[rows][:, heads]
        after = pool[part.slots][:, heads]
        at = columns(self, heads)
        y = self.qkv[rows][:, at]
        if chain:
            y = part.conv64(y, self.conv[:, at])[0].to(self.work.dtype)
        ref, states = part.rule64(y, self.g[rows][:, heads], self.beta[rows][:, heads], before)
        if chain:
            ref = norm64(ref, self.gate[rows][:, heads], self.norm.weight)
        return {"output": err(o, ref), "state": err(after, states)}


def norm_of_ones(device: torch.device) -> kda.FusedRMSNormGated:
    norm = kda.FusedRMSNormGated(D, eps=EPS, activation="sigmoid", device=device, dtype=torch.bfloat16).requires_grad_(False)
    torch.nn.init.ones_(norm.weight)
    return norm
