# SPDX-License-Identifier: Apache-2.0
"""Sizes that `kda tune` runs operations at, their inputs, and the recurrence and the convolution over them in fp64.

Sizes are of GLM-5.3-Flash's kind: heads of equal key and value dims, a convolution over four tokens.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kda.cli.check import BOUNDS, err, recurrence64

W, LB, EPS = 4, -5.0, 1e-5
ODD = (70, 33, 40)  # the most tokens of requests where results are checked: no multiples of a tile
# Bytes of states that calls use in turn: more than caches hold, as a model's other layers come between two steps of one.
COLD, MOST_SETS = 128 << 20, 256


@dataclass(frozen=True)
class Work:
    """Tokens of each request, at `H` heads of `D`; `checked`: of each request's where results are checked, if not ODD."""

    H: int
    lens: tuple[int, ...]
    D: int = 128
    bounded: bool = True
    state_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    checked: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        N = len(self.lens)
        tokens = f"{N} x {self.lens[0]}" if len(set(self.lens)) == 1 else f"{sum(self.lens)} in {N}"
        return f"H={self.H} T={tokens}" + (f" D={self.D}" if self.D > 128 else "")

    @property
    def bytes(self) -> int:
        """An upper bound of what a sweep keeps: states and outputs in copies, an error in fp64, tokens, scratch."""
        return self.H * self.D * (len(self.lens) * self.D * 48 + sum(self.lens) * 60) + 2 * COLD

    def short(self) -> Work:
        """As few tokens as an oracle in fp64 soon goes through, of the same code."""
        return replace(self, lens=tuple(min(n, most) for n, most in zip(self.lens, self.checked or ODD)), checked=None)


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
    from kda.cli.cases import CASES

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

    def in_turn(self, *pools: Tensor) -> itertools.cycle:
        """(slots, pools) of one set of states after the other, without end: copies of `pools` [N + 1, ..]."""
        each = sum(pool[1:].numel() * pool.element_size() for pool in pools)
        sets = min(-(-COLD // each), MOST_SETS)
        copies = []
        for pool in pools:
            shape = (sets * self.N + 1, *pool.shape[1:])
            copy = torch.empty_strided(shape, pool.stride(), dtype=pool.dtype, device=self.device)
            copy[0] = pool[0]
            for n in range(sets):
                copy[1 + n * self.N : 1 + (n + 1) * self.N] = pool[1:]
            copies.append(copy)
        # Tensors of their own, as their addresses must be aligned alike.
        return itertools.cycle([(self.slots + n * self.N, *copies) for n in range(sets)])

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


class Turns:
    """Calls of `call(slots, *pools)` on sets of states of their own in turn (Tensors.in_turn), made when first called."""

    def __init__(self, call: Callable, x: Tensors, *pools: Tensor) -> None:
        self.call, self.x, self.pools, self.sets = call, x, pools, None

    def __call__(self):
        if self.sets is None:
            self.sets = self.x.in_turn(*self.pools)
        return self.call(*next(self.sets))


def norm64(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    o = o.double() * (o.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    return o * weight.double() * gate.double().sigmoid()
