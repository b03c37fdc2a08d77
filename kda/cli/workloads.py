# SPDX-License-Identifier: Apache-2.0
"""What `kda tune` runs of an operation: a call to be timed, and a call from fresh states beside the oracle in fp64.

Sizes are of GLM-5.3-Flash's kind: heads of equal key and value dims, a convolution over four tokens.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kda
from kda.cli.check import BOUNDS, err, recurrence64

W, LB, EPS = 4, -5.0, 1e-5
ODD = (70, 33, 40)  # the most tokens of requests where results are checked: no multiples of a tile


@dataclass(frozen=True)
class Work:
    """Tokens of each request, at `H` heads of `D`."""

    H: int
    lens: tuple[int, ...]
    D: int = 128
    bounded: bool = True
    state_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        N = len(self.lens)
        tokens = f"{N} x {self.lens[0]}" if len(set(self.lens)) == 1 else f"{sum(self.lens)} in {N}"
        return f"H={self.H} T={tokens}"

    @property
    def bytes(self) -> int:
        """An upper bound of what a sweep keeps: states and outputs in copies, an error in fp64, tokens, scratch."""
        return self.H * self.D * (len(self.lens) * self.D * 48 + sum(self.lens) * 60)

    def short(self) -> Work:
        """As few tokens as an oracle in fp64 soon goes through, of the same code."""
        return replace(self, lens=tuple(min(n, most) for n, most in zip(self.lens, ODD)))


class Output(NamedTuple):
    """One result beside the oracle's, and the relative error it may have."""

    what: str
    got: Tensor
    ref: Tensor | None
    bound: float


class Case(NamedTuple):
    """`call` again and again, on states of its own that move on; `outputs(oracle)` of one call from fresh states.

    Each output has a `ref` where `oracle` is true.
    """

    call: Callable[[], object]
    outputs: Callable[[bool], list[Output]]


def wrong(outputs: list[Output]) -> str | None:
    """Which output is over its bound, in words."""
    for what, got, ref, bound in outputs:
        e = err(got, ref)
        if not e <= bound:
            return f"{what} error {e:.1e}, bound {bound:g}"
    return None


def make(part: str, work: Work, device: torch.device) -> Case:
    return CASES[part](work, Tensors(work, device))


class Tensors:
    """Seeded inputs of a layer's stages on a device."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work, self.device = work, device
        self.gen = torch.Generator(device).manual_seed(0)
        self.N, self.T, self.dim = len(work.lens), sum(work.lens), 3 * work.H * work.D
        self.A_log = torch.rand(work.H, device=device, generator=self.gen).clamp(0.01)
        self.A_log = (self.A_log if work.bounded else 1 + 15 * self.A_log).log()
        self.bias = self.randn(work.H * work.D, dtype=torch.float32) * 0.1
        self.weight = self.randn(self.dim, W, dtype=torch.float32) * 0.5
        self.cu = self.ints([0, *accumulate(work.lens)])
        self.slots = torch.randperm(self.N, device=device, generator=self.gen).int() + 1
        self.bound, self.lower_bound = BOUNDS[work.dtype], LB if work.bounded else None

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.gen).to(dtype or self.work.dtype)

    def ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def heads(self) -> Tensor:
        return self.randn(self.T, self.work.H, self.work.D)

    def state_pool(self) -> Tensor:
        H, D = self.work.H, self.work.D
        return (self.randn(self.N + 1, H, D, D, dtype=torch.float32) * 0.1).to(self.work.state_dtype)

    def conv_pool(self, columns: int = W - 1) -> Tensor:
        return self.randn(self.N + 1, columns, self.dim).transpose(1, 2)

    def each(self, *tensors: Tensor) -> zip:
        """(n, rows of request n of each tensor)."""
        return enumerate(zip(*(x.split(self.work.lens) for x in tensors)))

    def split(self, qkv: Tensor) -> list[Tensor]:
        """q, k, v [.., H, D], column slices of the merged projection."""
        return [x.unflatten(-1, (self.work.H, self.work.D)) for x in qkv.chunk(3, -1)]

    def rule64(self, qkv: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The recurrence of every request, from row n of `states` -> o [T, H, D], states."""
        done = [recurrence64(*self.split(part), g_n, b_n, self.A_log, self.bias, self.lower_bound, states[n])
                for n, (part, g_n, b_n) in self.each(qkv, g, beta)]  # fmt: skip
        return torch.cat([o for o, _ in done]), torch.stack([S for _, S in done])

    def conv64(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Convolution and SiLU from the slots' histories -> y [T, dim] in fp64, the last inputs [N, dim, W - 1]."""
        outputs, last = [], []
        for n, (part,) in self.each(x):
            z = torch.cat([pool[self.slots[n], :, : W - 1], part.t()], 1)
            taps = (self.weight[:, w, None].double() * z[:, w : w + len(part)].double() for w in range(W))
            outputs.append(F.silu(sum(taps)).t())
            last.append(z[:, z.shape[1] - (W - 1) :])
        return torch.cat(outputs), torch.stack(last)


def norm64(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    o = o.double() * (o.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    return o * weight.double() * gate.double().sigmoid()


def chunk(work: Work, x: Tensors) -> Case:
    qkv, g, beta = x.randn(x.T, x.dim), x.heads(), x.randn(x.T, work.H)
    h0 = x.state_pool()[1:].float()
    q, k, v = (part[None] for part in x.split(qkv))

    def call():
        return kda.chunk_kda_with_fused_gate(
            q, k, v, g[None], beta[None], x.A_log, x.bias, initial_state=h0, output_final_state=True, cu_seqlens=x.cu,
            use_qk_l2norm_in_kernel=True, sigmoid_beta=True, safe_gate=work.bounded, lower_bound=LB,
        )  # fmt: skip

    def outputs(oracle: bool) -> list[Output]:
        o, state = call()
        ref_o, ref_state = x.rule64(qkv, g, beta, h0) if oracle else (None, None)
        return [Output("output", o[0], ref_o, x.bound[0]), Output("state", state, ref_state, x.bound[1])]

    return Case(call, outputs)


def recurrent(work: Work, x: Tensors) -> Case:
    qkv, g, beta, pool = x.randn(x.T, x.dim), x.heads(), x.randn(x.T, work.H), x.state_pool()
    q, k, v = (part[None] for part in x.split(qkv))

    def call(pool=pool.clone()):
        return kda.fused_recurrent_kda(
            q, k, v, g[None], beta[None], initial_state=pool, use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu,
            ssm_state_indices=x.slots, sigmoid_beta=True, a_log=x.A_log, g_bias=x.bias, compute_gate=True,
            lower_bound=x.lower_bound,
        )  # fmt: skip

    def outputs(oracle: bool) -> list[Output]:
        states = pool.clone()
        ref_o, ref_state = x.rule64(qkv, g, beta, states[x.slots]) if oracle else (None, None)
        o, _ = call(states)
        return [Output("output", o[0], ref_o, x.bound[0]), Output("state", states[x.slots], ref_state, x.bound[1])]

    return Case(call, outputs)


def decode(work: Work, x: Tensors) -> Case:
    qkv, g, beta, gate = x.randn(x.N, x.dim), x.heads(), x.randn(x.N, work.H), x.heads()
    conv, pool, norm = x.conv_pool(), x.state_pool(), x.randn(work.D, dtype=torch.float32)
    out = torch.empty_like(gate)

    def call(conv=conv.clone(), pool=pool.clone()):
        return kda.kda_decode(qkv, g, beta, gate, conv, pool, x.slots, x.weight, x.A_log, x.bias, norm,
                              lower_bound=x.lower_bound, eps=EPS, out=out)  # fmt: skip

    def outputs(oracle: bool) -> list[Output]:
        ref_o = ref_state = ref_conv = None
        if oracle:
            y, ref_conv = x.conv64(qkv, conv)
            o, ref_state = x.rule64(y.to(work.dtype), g, beta, pool[x.slots])
            ref_o = norm64(o, gate, norm)
        history, states = conv.clone(), pool.clone()
        o = call(history, states).clone()
        return [Output("output", o, ref_o, x.bound[0]), Output("state", states[x.slots], ref_state, x.bound[1]),
                Output("convolution state", history[x.slots], ref_conv, 0.0)]  # fmt: skip

    return Case(call, outputs)


def verify(work: Work, x: Tensors) -> Case:
    """Windows of drafts, each committing the whole window before it."""
    qkv, g, beta, gate = x.randn(x.T, x.dim), x.heads(), x.randn(x.T, work.H), x.heads()
    window = max(work.lens)
    conv, pool, norm = x.conv_pool(W - 1 + window), x.state_pool(), x.randn(work.D, dtype=torch.float32)
    records = torch.zeros(x.N + 1, window, work.H, 3 * work.D, device=x.device)
    none, whole, out = x.ints([0] * x.N), x.ints(list(work.lens)), torch.empty_like(gate)

    def call(conv=conv.clone(), pool=pool.clone(), records=records.clone(), accepted=whole):
        return kda.kda_verify(qkv, g, beta, gate, conv, pool, records, x.slots, x.cu, accepted, x.weight, x.A_log, x.bias,
                              norm, lower_bound=x.lower_bound, eps=EPS, out=out)  # fmt: skip

    def outputs(oracle: bool) -> list[Output]:
        """Two windows of the same tokens, the second one on the first's records."""
        refs, states = [None, None, None], pool[x.slots]
        if oracle:
            history, steps = conv, []
            for _ in range(2):
                y, last = x.conv64(qkv, history)
                o, states = x.rule64(y.to(work.dtype), g, beta, states)
                steps.append((norm64(o, gate, norm), states))
                history = conv.clone()
                history[x.slots, :, : W - 1] = last
            refs = [steps[0][0], steps[1][0], steps[0][1]]
        mine = conv.clone(), pool.clone(), torch.zeros_like(records)
        first = call(*mine, none).clone()
        second = call(*mine, whole).clone()
        return [Output("output", first, refs[0], x.bound[0]), Output("output after a commit", second, refs[1], x.bound[0]),
                Output("state", mine[1][x.slots], refs[2], x.bound[1])]  # fmt: skip

    return Case(call, outputs)


def conv_fwd(work: Work, x: Tensors) -> Case:
    tokens, pool = x.randn(x.T, x.dim), x.conv_pool()
    has = torch.ones(x.N, dtype=torch.bool, device=x.device)

    def call(pool=pool.clone()):
        return kda.causal_conv1d_fn(tokens.t(), x.weight, None, pool, x.cu, x.slots, has)

    return Case(call, partial(_conv_outputs, call, x, tokens, pool))


def conv_update(work: Work, x: Tensors) -> Case:
    tokens, pool = x.randn(x.T, x.dim), x.conv_pool()
    window = max(work.lens)
    rows = tokens if window == 1 else tokens.view(x.N, window, x.dim).transpose(1, 2)

    def call(pool=pool.clone()):
        return kda.causal_conv1d_update(rows, pool, x.weight, activation="silu", conv_state_indices=x.slots)

    def flat(pool):
        y = call(pool)
        return y.t() if window == 1 else y.transpose(1, 2).reshape(x.T, x.dim).t()

    return Case(call, partial(_conv_outputs, flat, x, tokens, pool))


def _conv_outputs(call, x: Tensors, tokens: Tensor, pool: Tensor, oracle: bool) -> list[Output]:
    ref, last = x.conv64(tokens, pool) if oracle else (None, None)
    history = pool.clone()
    y = call(history).t()
    return [Output("output", y, ref, x.bound[0]), Output("convolution state", history[x.slots], last, 0.0)]


def norm(work: Work, x: Tensors) -> Case:
    o, gate, weight = x.heads(), x.heads(), x.randn(work.D, dtype=torch.float32)

    def call():
        return kda.rms_norm_gated(o, gate, weight, None, activation="sigmoid", eps=EPS)

    def outputs(oracle: bool) -> list[Output]:
        return [Output("output", call(), norm64(o, gate, weight) if oracle else None, x.bound[0])]

    return Case(call, outputs)


CASES: dict[str, Callable[[Work, Tensors], Case]] = {
    "chunk_intra": chunk,
    "chunk_walk": chunk,
    "kda_decode": decode,
    "kda_verify": verify,
    "fused_recurrent": recurrent,
    "causal_conv1d_fwd": conv_fwd,
    "causal_conv1d_update": conv_update,
    "rms_norm_gated": norm,
}
