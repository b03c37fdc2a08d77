# SPDX-License-Identifier: Apache-2.0
"""Kernels whose reductions and stores run row by row in one loop, and such as must not; against torch."""

import torch
import triton
import triton.language as tl

from kda.triton_cpu.lowering.rows import Rows

runs = []
emit_rows = Rows.emit_rows


def counted(self, run):
    runs.append([role for role, _ in run.steps])
    return emit_rows(self, run)


@triton.jit
def softmax(x, y, row_step, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    at = i * row_step + j
    a = tl.load(x + at, j < N, float("-inf"))
    e = tl.exp(a - tl.max(a, 1)[:, None])
    tl.store(y + at, e / tl.sum(e, 1)[:, None], j < N)


@triton.jit
def delta(x, v, o, R: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, V_STEP: tl.constexpr):
    """Two sums with a rank-1 update between; v may lie in x."""
    r = tl.arange(0, R)
    i, j = r[:, None], tl.arange(0, C)[None, :]
    S = tl.load(x + i * STEP + j)
    k = 1.0 / (1.0 + tl.arange(0, C).to(tl.float32))
    d = tl.load(v + r * V_STEP) - tl.sum(S * k[None, :], 1)
    S = S * 0.5 + d[:, None] * k[None, :]
    out = tl.sum(S * S, 1)
    tl.store(x + i * STEP + j, S)
    tl.store(o + r, out + d)


@triton.jit
def kept(x, y, z, R: tl.constexpr, C: tl.constexpr):
    """Tiles and columns of a run that are read after it, one of them transposed."""
    r, c = tl.arange(0, R), tl.arange(0, C)
    at = r[:, None] * C + c[None, :]
    a = tl.load(x + at)
    m = tl.sum(a, 1)
    b = tl.exp(a - m[:, None]) + a
    n = tl.max(b, 1)
    tl.store(y + at, b * n[:, None])
    tl.store(z + c[:, None] * R + r[None, :], tl.trans(b) + m[None, :] * n[None, :])


@triton.jit
def carried(x, k, o, T, R: tl.constexpr, C: tl.constexpr):
    r, c = tl.arange(0, R), tl.arange(0, C)
    at = r[:, None] * C + c[None, :]
    S = tl.load(x + at)
    for t in range(T):
        key = tl.load(k + t * C + c)
        S *= 0.75
        d = 1.0 - tl.sum(S * key[None, :], 1)
        S += d[:, None] * key[None, :]
        tl.store(o + t * R + r, tl.sum(S * key[None, :], 1))
    tl.store(x + at, S)


def near(a, b):
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def delta_of(S, v):
    k = 1 / (1 + torch.arange(S.shape[1], dtype=torch.float64))
    d = v - (S * k).sum(1)
    S = S * 0.5 + d[:, None] * k
    return S, (S * S).sum(1) + d


def run():
    Rows.emit_rows = counted
    torch.manual_seed(0)
    for R, C, N in ((8, 128, 128), (4, 64, 50), (16, 256, 200)):
        x, y = torch.randn(R, C + 3), torch.zeros(R, C + 3)
        want = x[:, :N].softmax(1)
        softmax[(1,)](x, y, C + 3, R, C, N)
        near(y[:, :N], want)
        assert not y[:, N:].any()
        softmax[(1,)](x, x, C + 3, R, C, N)
        near(x[:, :N], want)

    R, C = 16, 64
    for dtype in (torch.float32, torch.bfloat16):
        x, v, o = torch.randn(R, C).to(dtype), torch.randn(R), torch.zeros(R)
        S, want = delta_of(x.double(), v.double())
        runs.clear()
        delta[(1,)](x, v, o, R, C, C, 1)
        assert runs and runs[-1][-1] == "store", runs
        near(o, want.float())
        torch.testing.assert_close(x, S.to(dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)
    # v is the row before, which the loop has overwritten by then: it must be read first.
    x, o = torch.randn(R + 1, C), torch.zeros(R)
    S, want = delta_of(x[1:].double(), x[:-1, 0].double())
    delta[(1,)](x[1:], x, o, R, C, C, C)
    near(o, want.float())
    near(x[1:], S.float())

    x, y, z = torch.randn(R, C) * 0.1, torch.zeros(R, C), torch.zeros(C, R)
    a = x.double()
    b = (a - a.sum(1, keepdim=True)).exp() + a
    kept[(1,)](x, y, z, R, C)
    n = b.amax(1, keepdim=True)
    near(y, (b * n).float())
    near(z, (b.t() + (a.sum(1, keepdim=True) * n).t()).float())

    T = 5
    x, k, o = torch.randn(R, C), torch.randn(T, C) * 0.1, torch.zeros(T, R)
    S, outs = x.double(), []
    for t in range(T):
        key = k[t].double()
        S = S * 0.75
        S = S + (1 - S @ key)[:, None] * key
        outs.append(S @ key)
    carried[(1,)](x, k, o, T, R, C)
    near(o, torch.stack(outs).float())
    near(x, S.float())
