# SPDX-License-Identifier: Apache-2.0
"""What kernels use of `triton.language` besides plain arithmetic, on CPU tensors, against torch and numpy."""

import contextlib
import os
import sys
import tempfile
import warnings

import numpy as np
import torch
import triton
import triton.language as tl
from lowering_cases import FLOATS, check, group, run  # noqa: F401 - `run` is called from outside
from triton.language.extra import libdevice

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
AS_NUMPY = {torch.uint8: np.uint8, torch.uint16: np.uint16, torch.uint32: np.uint32, torch.uint64: np.uint64}


# ---- random numbers -------------------------------------------------------------------------------------------------


@triton.jit
def random_kernel(out, seed, B: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, B)
    if OP == "randint4x":
        a, b, c, d = tl.randint4x(seed, i)
        tl.store(out + i, a)
        tl.store(out + B + i, b)
        tl.store(out + 2 * B + i, c)
        tl.store(out + 3 * B + i, d)
    elif OP == "philox":
        zero = tl.zeros([B], tl.int64)
        a, b, c, d = tl.philox(seed, i.to(tl.int64), zero, zero, zero)
        tl.store(out + i, a)
        tl.store(out + B + i, c)
    else:
        tl.store(out + i, getattr(tl, OP)(seed, i))


def philox(seed, counter, bits):
    """Salmon et al. 2011, ten rounds."""
    whole = (1 << bits) - 1
    weyl, multiply = ((0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57)) if bits == 32 else (
        (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B), (0xD2E7470EE14C6C93, 0xCA5A826395121157))  # fmt: skip
    c0, c1, c2, c3 = counter, 0, 0, 0
    k0, k1 = seed & whole, seed >> 32 & whole if bits == 32 else 0
    for _ in range(10):
        p, q = multiply[0] * c0, multiply[1] * c2
        c0, c1, c2, c3 = q >> bits ^ c1 ^ k0, q & whole, p >> bits ^ c3 ^ k1, p & whole
        k0, k1 = k0 + weyl[0] & whole, k1 + weyl[1] & whole
    return c0, c1, c2, c3


@group
def random_numbers():
    B = 64
    for seed in (0, 123, 2**40 + 5, -7):
        rows = np.array([philox(seed, i, 32) for i in range(B)], np.uint32).T.copy()
        words = torch.from_numpy(rows.view(np.int32))
        out = torch.zeros(4, B, dtype=torch.int32)
        random_kernel[(1,)](out, seed, B=B, OP="randint4x")
        check(("randint4x", seed), out, words)
        random_kernel[(1,)](out, seed, B=B, OP="randint")
        check(("randint", seed), out[0], words[0])
        uniform = torch.where(words < 0, -words - 1, words).float() * torch.tensor(4.6566127342e-10)
        out = torch.zeros(B)
        random_kernel[(1,)](out, seed, B=B, OP="rand")
        check(("rand", seed), out, uniform[0])
        random_kernel[(1,)](out, seed, B=B, OP="randn")
        radius = (-2 * uniform[0].clamp(min=1e-7).double().log()).sqrt()
        check(("randn", seed), out, radius * torch.cos(2 * torch.pi * uniform[1].double()), 1e-5)
        out = torch.zeros(2, B, dtype=torch.int64)
        random_kernel[(1,)](out, seed, B=B, OP="philox")
        rows = np.array([philox(seed, i, 64)[::2] for i in range(B)], np.uint64).T.copy()
        assert torch.equal(out, torch.from_numpy(rows.view(np.int64))), seed


# ---- integers and bools ---------------------------------------------------------------------------------------------


@triton.jit
def unsigned_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    kind = out.dtype.element_ty
    tl.store(out + i, a // b)
    tl.store(out + B + i, a % b)
    tl.store(out + 2 * B + i, a >> (b & 7).to(kind))
    tl.store(out + 3 * B + i, tl.maximum(a, b))
    tl.store(out + 4 * B + i, tl.minimum(a, b))
    tl.store(out + 5 * B + i, (a < b).to(kind))
    tl.store(out + 6 * B + i, a.to(tl.float64).to(kind))
    if kind.primitive_bitwidth >= 32:
        tl.store(out + 7 * B + i, tl.umulhi(a, b))
    tl.store(out + 8 * B, tl.max(a, 0))
    tl.store(out + 8 * B + 1, tl.min(a, 0))
    tl.store(out + 8 * B + 2, tl.argmax(a, 0).to(kind))
    tl.store(out + 8 * B + 3, tl.xor_sum(a, 0))


@group
def unsigned_integers():
    rng = np.random.default_rng(0)
    for dtype in UNSIGNED:
        kind, B = AS_NUMPY[dtype], 32
        high = np.iinfo(kind).max
        x, y = (rng.integers(1, high, B, dtype=kind, endpoint=True) for _ in range(2))
        x[3], y[5] = high, 1
        out = torch.from_numpy(np.zeros(9 * B, kind))
        unsigned_kernel[(1,)](torch.from_numpy(x), torch.from_numpy(y), out, B=B)
        got, bits = out.numpy().reshape(9, B), 8 * np.dtype(kind).itemsize
        back = [int(float(a)) for a in x.tolist()]
        wanted = [x // y, x % y, x >> (y & kind(7)), np.maximum(x, y), np.minimum(x, y), (x < y).astype(kind),
                  np.array([min(a, int(high)) for a in back], kind)]  # fmt: skip
        for i, want in enumerate(wanted):
            assert (got[i] == want).all(), (dtype, i, got[i], want)
        if bits >= 32:
            assert got[7].tolist() == [a * b >> bits for a, b in zip(x.tolist(), y.tolist())], dtype
        assert got[8][:4].tolist() == [x.max(), x.min(), x.argmax(), np.bitwise_xor.reduce(x)], dtype


@triton.jit
def bool_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a & b)
    tl.store(out + B + i, a | b)
    tl.store(out + 2 * B + i, a ^ b)
    tl.store(out + 3 * B + i, ~a)
    tl.store(out + 4 * B + i, a == b)
    tl.store(out + 5 * B, tl.reduce_or(a, 0))
    tl.store(out + 5 * B + 1, tl.sum(a.to(tl.int32), 0) > B // 2)
    tl.store(out + 5 * B + 2, tl.xor_sum(b.to(tl.int32), 0) != 0)


@group
def bools():
    for B in (1, 8, 64):
        x, y = torch.rand(B) > 0.5, torch.rand(B) > 0.5
        out = torch.zeros(5 * B + 3, dtype=torch.bool)
        bool_kernel[(1,)](x, y, out, B=B)
        ends = torch.tensor([x.any(), x.sum() > B // 2, y.sum() % 2 == 1])
        assert torch.equal(out, torch.cat([x & y, x | y, x ^ y, ~x, x == y, ends])), B


# ---- arguments, quotients, hints ------------------------------------------------------------------------------------


@triton.jit
def arguments_kernel(out, flag, large, half, number, nothing, pair, kind: tl.constexpr, negative):
    if nothing is None:
        tl.store(out, 1)
    tl.store(out + 1, flag.to(tl.int64))
    tl.store(out + 2, large.to(tl.int64))
    tl.store(out + 3, (half * 8).to(tl.int64))
    tl.store(out + 4, tl.cast(number, kind).to(tl.int64))
    tl.store(out + 5, pair[0] + pair[1][0])
    tl.store(out + 6, negative)


@triton.jit
def quotient_kernel(x, y, out, B: tl.constexpr, APPROX: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.fdiv(a, b))
    tl.store(out + B + i, tl.math.fdiv(a, b, ieee_rounding=True))
    tl.store(out + 2 * B + i, tl.div_rn(a, b))
    tl.store(out + 3 * B + i, tl.fdiv(a, b, approx=True) if APPROX else a / b)
    tl.store(out + 4 * B + i, a % b)


@triton.jit
def hints_kernel(x, out, n, B: tl.constexpr):
    i = tl.max_contiguous(tl.multiple_of(tl.arange(0, B), 4), 4)
    tl.assume(n >= 0)
    a = tl.load(x + i, mask=i < n, other=0, eviction_policy="evict_last", cache_modifier=".ca", volatile=True)
    tl.debug_barrier()
    for k in tl.range(0, 2, flatten=True, warp_specialize=False, disallow_acc_multi_buffer=True, num_stages=3):
        a += k
    tl.store(out + i, a, mask=i < n, cache_modifier=".wb", eviction_policy="evict_first")


@group
def arguments():
    out = torch.zeros(7, dtype=torch.int64)
    arguments_kernel[(1,)](out, True, 2**63 + 5, 0.5, 3.7, None, (3, (4, 5)), tl.int32, -(2**40))
    assert out.tolist() == [1, 1, 5 - 2**63, 4, 3, 7, -(2**40)], out
    x, y, out = torch.randn(32) * 10, torch.randn(32), torch.zeros(5, 32)
    quotient_kernel[(1,)](x, y, out, B=32, APPROX=TRITON >= (3, 9))
    check("quotients", out, torch.stack([x / y] * 4 + [torch.fmod(x, y)]))
    x, out = torch.arange(64, dtype=torch.int32), torch.zeros(64)
    hints_kernel[(1,)](x, out, 50, B=64)
    check("hints", out, torch.where(x < 50, x + 1, 0))


# ---- 8-bit floats ---------------------------------------------------------------------------------------------------


@triton.jit
def float8_kernel(x, out, M: tl.constexpr):
    i = tl.arange(0, M)
    at = i[:, None] * M + i[None, :]
    a = tl.load(x + at)
    tl.store(out + at, tl.dot(a, tl.trans(a)).to(tl.float32))
    tl.store(out + M * M + at, a.to(tl.float32) * 2)


@triton.jit
def copy_kernel(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@group
def float8_products():
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        x, out = torch.randn(16, 16).to(dtype), torch.zeros(2, 16, 16)
        float8_kernel[(1,)](x, out, M=16)
        check(("product", dtype), out[0], x.double() @ x.double().t(), 1e-6)
        check(("product", dtype), out[1], x.double() * 2)
        for other in (torch.float32, torch.float16, torch.bfloat16):
            x, small, out = (torch.randn(64) * 3).to(other), torch.zeros(64).to(dtype), torch.zeros(64, dtype=other)
            copy_kernel[(1,)](x, small, B=64)
            check(("to", dtype, other), small.float(), x.to(dtype).float())
            copy_kernel[(1,)](small, out, B=64)
            check(("from", dtype, other), out, small.to(other))


# ---- functions of the C library -------------------------------------------------------------------------------------


@triton.jit
def libdevice_kernel(x, y, out, B: tl.constexpr, OP: tl.constexpr, ARITY: tl.constexpr):
    i = tl.arange(0, B)
    if ARITY == 1:
        tl.store(out + i, getattr(libdevice, OP)(tl.load(x + i)))
    elif ARITY == 2:
        tl.store(out + i, getattr(libdevice, OP)(tl.load(x + i), tl.load(y + i)))
    else:
        tl.store(out + i, libdevice.fma(tl.load(x + i), tl.load(y + i), 2.0))


@triton.jit
def bits_kernel(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, libdevice.float_as_int(libdevice.int_as_float(tl.load(x + i))))


UNARY = {
    "abs": torch.abs, "acos": torch.acos, "acosh": lambda x: torch.acosh(x + 1), "asin": torch.asin,
    "asinh": torch.asinh, "atan": torch.atan, "atanh": torch.atanh, "cbrt": lambda x: x ** (1 / 3), "ceil": torch.ceil,
    "cos": torch.cos, "cosh": torch.cosh, "erf": torch.erf, "erfc": torch.erfc, "exp": torch.exp, "exp2": torch.exp2,
    "exp10": lambda x: 10**x, "expm1": torch.expm1, "floor": torch.floor, "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1, "lgamma": torch.lgamma, "log": torch.log, "log10": torch.log10, "log1p": torch.log1p,
    "log2": torch.log2, "logb": lambda x: x.log2().floor(), "nearbyint": torch.round, "rint": torch.round,
    "round": lambda x: (x + 0.5).floor(), "rcp_rn": torch.reciprocal, "rsqrt": torch.rsqrt, "sin": torch.sin,
    "sinh": torch.sinh, "sqrt": torch.sqrt, "sqrt_rn": torch.sqrt, "tan": torch.tan, "tanh": torch.tanh,
    "tgamma": lambda x: torch.exp(torch.lgamma(x)), "trunc": torch.trunc, "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1, "fast_expf": torch.exp, "fast_logf": torch.log, "fast_tanhf": torch.tanh,
    "isnan": torch.isnan, "isinf": torch.isinf, "finitef": torch.isfinite, "signbit": torch.signbit,
}  # fmt: skip
BINARY = {
    "atan2": torch.atan2, "copysign": torch.copysign, "div_rn": torch.div, "fmod": torch.fmod, "hypot": torch.hypot,
    "fdim": lambda a, b: torch.clamp(a - b, min=0), "nextafter": torch.nextafter, "pow": torch.pow,
    "remainder": lambda a, b: a - b * torch.round(a / b), "fast_powf": torch.pow,
}  # fmt: skip


@group
def libdevice_functions():
    for dtype in (torch.float32, torch.float64):
        near = 1e-5 if dtype == torch.float32 else 1e-12
        for i, (op, reference) in enumerate((UNARY | BINARY).items()):
            if dtype == torch.float64 and i % 3:
                continue
            B = (1, 8, 32)[i % 3]
            x, y = torch.rand(B, dtype=dtype) * 0.9 + 0.05, torch.rand(B, dtype=dtype) + 0.1
            out = torch.zeros(B, dtype=dtype)
            libdevice_kernel[(1,)](x + 1 if op == "acosh" else x, y, out, B=B, OP=op, ARITY=1 + (op in BINARY))
            args = (x, y) if op in BINARY else (x,)
            want = reference(*args) if op == "nextafter" else reference(*(arg.double() for arg in args))
            check((op, dtype), out, want.to(dtype), near)
        edges = torch.tensor([0.0, -0.0, 1, -1, float("inf"), -float("inf"), float("nan"), -5e-324], dtype=dtype)
        for op in ("isnan", "isinf", "finitef", "signbit"):
            out = torch.zeros(8, dtype=dtype)
            libdevice_kernel[(1,)](edges, edges, out, B=8, OP=op, ARITY=1)
            check((op, "edges"), out, UNARY[op](edges))
    out = torch.zeros(8)
    libdevice_kernel[(1,)](torch.full((8,), 3.0), torch.full((8,), 4.0), out, B=8, OP="fma", ARITY=3)
    check("fma", out, torch.full((8,), 14.0))
    x, out = torch.randint(-(2**31), 2**31, (16,), dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    bits_kernel[(1,)](x, out, B=16)
    check("bits", out, x)


# ---- tiles ----------------------------------------------------------------------------------------------------------


@triton.jit
def tile_kernel(x, y, out, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    at = m[:, None] * N + n[None, :]
    a, b = tl.load(x + at), tl.load(y + at)
    wide = m[:, None] * (2 * N) + tl.arange(0, 2 * N)[None, :]
    if OP == "interleave":
        tl.store(out + wide, tl.interleave(a, b))
    elif OP == "flip rows":
        tl.store(out + at, tl.flip(a, 0))
    elif OP == "flip columns":
        tl.store(out + at, tl.flip(a, 1))
    elif OP == "ravel":
        tl.store(out + tl.arange(0, M * N), tl.ravel(tl.trans(a)))
    elif OP == "view":
        tl.store(out + tl.arange(0, M * N), tl.view(a, [M * N]))
    elif OP == "cat rows":
        tl.store(out + tl.arange(0, 2 * M)[:, None] * N + n[None, :], tl.cat(a, b, dim=0))
    elif OP == "cat columns":
        tl.store(out + wide, tl.cat(a, b, dim=1))
    elif OP == "sort":
        tl.store(out + at, tl.sort(a))
    elif OP == "sort down":
        tl.store(out + at, tl.sort(a, descending=True))
    elif OP == "topk":
        tl.store(out + m[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :], tl.topk(a, N // 2))
    elif OP == "cumprod":
        tl.store(out + at, tl.cumprod(a, 1))
    elif OP == "softmax":
        tl.store(out + at, tl.softmax(a, 1, keep_dims=True))
    elif OP == "or":
        tl.store(out + m, tl.reduce_or(a, 1))
    elif OP == "xor":
        tl.store(out + m, tl.xor_sum(a, 1))
    elif OP == "first largest":
        value, place = tl.max(a, 1, return_indices=True)
        tl.store(out + m, place.to(out.dtype.element_ty))
    elif OP == "first smallest":
        tl.store(out + n, tl.argmin(a, 0).to(out.dtype.element_ty))
    elif OP == "some largest":
        place = tl.argmax(a, 1, tie_break_left=False)
        tl.store(out + m, tl.sum(tl.where(n[None, :] == place[:, None], a, 0), 1).to(out.dtype.element_ty))
    elif OP == "gather rows":
        tl.store(out + at, tl.gather(a, b.to(tl.int32) & (M - 1), 0))
    elif OP == "kept dims":
        tl.store(out + at, tl.minimum(a, tl.min(tl.max(a, 1, keep_dims=True), 0, keep_dims=True)))
    elif OP == "swizzle":
        i, j = tl.swizzle2d(m[:, None], n[None, :], M, N, 4)
        tl.store(out + i * N + j, a)


def swizzled(x):
    M, N = x.shape
    out = torch.zeros_like(x)
    for i in range(M):
        for j in range(N):
            index = i * N + j
            rows = min(M - index // (4 * N) * 4, 4)
            inside = index % (4 * N)
            out[index // (4 * N) * 4 + inside % rows, inside // rows] = x[i, j]
    return out


@group
def tiles():
    warnings.simplefilter("ignore")  # tl.view is deprecated
    dtypes = FLOATS + [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
    for i, dtype in enumerate(dtypes):
        for M, N in ((1, 1), (2, 16), (16, 2)) if dtype in (torch.float32, torch.int32) else ((4, 8),):
            low = 0 if not dtype.is_signed else -50
            x, y = (torch.randint(low, 50, (M, N)).to(dtype) for _ in range(2))
            X, Y = (t.double() if dtype.is_floating_point else t.long() for t in (x, y))
            wanted = {
                "interleave": torch.stack([X, Y], -1), "flip rows": X.flip(0), "flip columns": X.flip(1),
                "ravel": X.t(), "view": X, "sort": X.sort(1).values, "sort down": X.sort(1, descending=True).values,
                "first largest": X.argmax(1), "first smallest": X.argmin(0), "some largest": X.amax(1),
                "kept dims": X.clamp(max=X.amax(1).min()), "swizzle": swizzled(X),
            }  # fmt: skip
            if TRITON >= (3, 9):
                wanted |= {"cat rows": torch.cat([X, Y]), "cat columns": torch.cat([X, Y], 1)}
            if N > 1:
                wanted["topk"] = X.sort(1, descending=True).values[:, : N // 2]
            if dtype in (torch.float32, torch.float64):
                wanted["softmax"] = torch.softmax(X, 1)
            if not dtype.is_floating_point:
                wanted |= {"gather rows": X.gather(0, Y & (M - 1)), "xor": np.bitwise_xor.reduce(X.numpy(), 1),
                           "or": np.bitwise_or.reduce(X.numpy(), 1)}  # fmt: skip
            if dtype == torch.int32:
                wanted["cumprod"] = X.cumprod(1)
            for j, (op, want) in enumerate(wanted.items()):
                if dtype not in (torch.float32, torch.int32) and (i + j) % 4:
                    continue
                want = torch.as_tensor(want).to(dtype)
                out = torch.zeros(want.shape, dtype=dtype)
                tile_kernel[(1,)](x, y, out, OP=op, M=M, N=N)
                check((op, dtype, M, N), out, want, 1e-6 if op == "softmax" else 0)


@triton.jit
def cube_kernel(x, moved, sums, ran, largest, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A)[:, None, None], tl.arange(0, B)[None, :, None], tl.arange(0, C)[None, None, :]
    v = tl.load(x + a * (B * C) + b * C + c)
    tl.store(moved + c * (A * B) + a * B + b, v)
    tl.store(sums + tl.arange(0, A)[:, None] * C + tl.arange(0, C)[None, :], tl.sum(v, 1))
    tl.store(ran + a * (B * C) + b * C + c, tl.cumsum(v, 1) + tl.cumsum(v, 2))
    tl.store(largest + tl.arange(0, A), tl.max(tl.max(v, 2), 1))


@group
def three_dims():
    for A, B, C in ((2, 4, 8), (1, 1, 1), (4, 1, 32), (1, 16, 2), (8, 8, 1)):
        x = torch.randint(-9, 9, (A, B, C)).float()
        moved, sums, ran, largest = torch.zeros(C, A, B), torch.zeros(A, C), torch.zeros(A, B, C), torch.zeros(A)
        cube_kernel[(1,)](x, moved, sums, ran, largest, A=A, B=B, C=C)
        check(("moved", A, B, C), moved, x.permute(2, 0, 1))
        check(("sums", A, B, C), sums, x.sum(1))
        check(("ran", A, B, C), ran, x.cumsum(1) + x.cumsum(2))
        check(("largest", A, B, C), largest, x.amax((1, 2)))


@triton.jit
def layout_kernel(x, out, M, N, xm, xn, om, on, BM: tl.constexpr, BN: tl.constexpr):
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    mask = (m < M) & (n < N)
    tl.store(out + m * om + n * on, tl.load(x + m * xm + n * xn, mask, -1) * 2, mask)


@group
def layouts():
    """Strides of either sign and none at all, from the last element back."""
    for dtype in (torch.float32, torch.int8, torch.bfloat16, torch.float64):
        for M, N in ((5, 13), (1, 7)) if dtype.itemsize == 4 else ((7, 16),):
            x = torch.randint(-50, 50, (M, N)).to(dtype)
            backward = x.view(-1)[M * N - 1 :]
            ways = ((x, (N, 1), x), (backward, (-N, -1), x.flip(0, 1)), (x.view(-1)[N - 1 :], (N, -1), x.flip(1)),
                    (x, (0, 1), x[:1].expand(M, N)), (x.t().contiguous(), (1, M), x),
                    (x, (0, 0), x[0, 0].expand(M, N)))  # fmt: skip
            for source, strides, want in ways:
                out = torch.zeros(M, N, dtype=dtype)
                layout_kernel[(1,)](source, out, M, N, *strides, N, 1, BM=8, BN=16)
                check(("loaded", dtype, M, N, strides), out, want * 2)
            out = torch.zeros(M, N, dtype=dtype)
            layout_kernel[(1,)](x, out.view(-1)[M * N - 1 :], M, N, N, 1, -N, -1, BM=8, BN=16)
            check(("stored", dtype, M, N), out, x.flip(0, 1) * 2)


# ---- functions given to reduce, scan and map ------------------------------------------------------------------------


@triton.jit
def larger_first(a, i, b, j):
    if a > b:
        return a, i
    elif a == b:
        return a, min(i, j)
    return b, j


@triton.jit
def then(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def best_kernel(x, out, place, ran, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    v = tl.load(x + m * N + n)
    index = tl.broadcast_to(n if AXIS == 1 else m, [M, N])
    best, where = tl.reduce((v, index), AXIS, larger_first)
    i = tl.arange(0, M if AXIS == 1 else N)
    tl.store(out + i, best)
    tl.store(place + i, where)
    tl.store(ran + m * N + n, tl.associative_scan((v, index), AXIS, larger_first)[0])


@triton.jit
def recurrence_kernel(a, b, out, B: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, B)[:, None] * C + tl.arange(0, C)[None, :]
    _, state = tl.associative_scan((tl.load(a + at), tl.load(b + at)), AXIS, then, reverse=BACK)
    tl.store(out + at, state)


@triton.jit
def steps(x, y):
    if x > 0:
        return x * y
    total = y
    for k in range(3):
        total += x * k
    return total


@triton.jit
def both(x, y):
    return x + y, x - y


@triton.jit
def swapped(a, b):
    return b, a


@triton.jit
def map_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.map_elementwise(steps, a, b))
    p, q = tl.map_elementwise(both, a, b)
    tl.store(out + B + i, p * q)
    tl.store(out + 2 * B + i, tl.map_elementwise(swapped, a, pack=2)[0])


@group
def combine_functions():
    for M, N in ((4, 16), (16, 4), (1, 32), (32, 1)):
        for axis in (0, 1):
            x = torch.randint(-5, 5, (M, N)).float()
            out, place, ran = torch.zeros(x.shape[1 - axis]), torch.zeros(x.shape[1 - axis]), torch.zeros(M, N)
            best_kernel[(1,)](x, out, place, ran, M=M, N=N, AXIS=axis)
            check(("reduce", M, N, axis), out, x.amax(axis))
            check(("reduce, place", M, N, axis), place, x.argmax(axis))
            check(("scan", M, N, axis), ran, x.cummax(axis).values)
    for B, C in ((1, 1), (2, 1), (1, 2), (1, 16), (64, 1), (1, 256), (4, 64), (64, 4), (8, 8)):
        for axis in (0, 1):
            for back in (False, True):
                a, b, out = torch.rand(B, C), torch.randn(B, C), torch.zeros(B, C)
                recurrence_kernel[(1,)](a, b, out, B=B, C=C, BACK=back, AXIS=axis)
                pairs = [t.double().movedim(axis, 0) for t in (a, b)]
                pairs = [t.flip(0) for t in pairs] if back else pairs
                state, rows = torch.zeros_like(pairs[0][0]), []
                for decay, added in zip(*pairs):
                    state = decay * state + added
                    rows.append(state)
                want = torch.stack(rows[::-1] if back else rows).movedim(0, axis)
                check(("recurrence", B, C, axis, back), out, want, 1e-5)
    x, y, out = torch.randn(64), torch.randn(64), torch.zeros(3 * 64)
    map_kernel[(1,)](x, y, out, B=64)
    want = torch.where(x > 0, x * y, y + 3 * x), (x + y) * (x - y), x.view(-1, 2).flip(1).flatten()
    check("map", out, torch.cat(want), 1e-6)


# ---- atomics --------------------------------------------------------------------------------------------------------


@triton.jit
def atomic_kernel(total, x, old, n, B: tl.constexpr, OP: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i, i < n)
    tl.store(old + i, getattr(tl, "atomic_" + OP)(total + i % 7, a, i < n), i < n)


@triton.jit
def swap_kernel(x, out, n, B: tl.constexpr):
    """Each element is put in by whoever finds zero there; float compare and swap goes by bits."""
    i = tl.arange(0, B)
    tl.store(out + i, tl.atomic_cas(x + i, tl.zeros([B], x.dtype.element_ty), tl.full([B], 3, x.dtype.element_ty)))


@triton.jit
def atomic_move_kernel(x, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_store(out + i, tl.atomic_load(x + i, mask=i < 5), mask=i < 7)
    tl.atomic_store(out + B, tl.atomic_load(x + 1))


@triton.jit
def ticket_kernel(ticket, served, log, n):
    """Programs on several threads wait for their turn at a lock and see what the one before stored."""
    for _ in range(n):
        while tl.atomic_cas(ticket, 0, 1) != 0:
            pass
        turn = tl.load(served, volatile=True)
        tl.store(log + turn, turn)
        tl.store(served, turn + 1)
        tl.atomic_xchg(ticket, 0)


REDUCED = {"add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
           "xor": np.bitwise_xor}  # fmt: skip


@group
def atomics():
    torch.set_num_threads(2)
    n, B = 700, 64
    for dtype in (torch.int32, torch.int64, torch.uint32, torch.uint64, *FLOATS):
        for op in (*REDUCED, "xchg"):
            if dtype.is_floating_point and (op in ("and", "or", "xor") or dtype.itemsize == 2 and op != "add"):
                continue
            x = torch.randint(-4 if dtype.is_signed else 0, 5, (n,)).to(dtype)
            total, old = torch.ones(7).to(dtype), torch.zeros(n).to(dtype)
            atomic_kernel[(triton.cdiv(n, B),)](total, x, old, n, B=B, OP=op)
            for place in range(7):
                these = x[place::7].double() if dtype.is_floating_point else x[place::7].long()
                got = total[place].item()
                if op == "xchg":  # each value was put in once and taken out once, but for the last
                    taken = sorted([*old[place::7].tolist(), got])
                    assert taken == sorted([1, *these.tolist()]), (op, dtype)
                else:
                    assert got == REDUCED[op].reduce(np.append(these.numpy(), these.new_ones(1).numpy())), (op, dtype)
    for dtype in (torch.int32, torch.int64, torch.float32):
        x = torch.tensor([0, 1, 0, 2], dtype=dtype)
        out = torch.ones(4, dtype=dtype)
        swap_kernel[(1,)](x, out, 4, B=4)
        check(("cas", dtype), out, torch.tensor([0, 1, 0, 2]))
        check(("cas", dtype), x, torch.tensor([3, 1, 3, 2]))
    served, log = torch.zeros(1, dtype=torch.int32), torch.zeros(640, dtype=torch.int32)
    ticket_kernel[(64,)](torch.zeros(1, dtype=torch.int32), served, log, 10)
    check("lock", log, torch.arange(640))
    if hasattr(tl, "atomic_load"):  # newer than 3.6
        for dtype in (torch.int32, torch.int64, torch.float32):
            x, out = torch.arange(1, 17).to(dtype), torch.zeros(17, dtype=dtype)
            atomic_move_kernel[(1,)](x, out, B=16)
            check("atomic load and store", out, torch.tensor([1, 2, 3, 4, 5] + [0] * 11 + [2]))


# ---- tensor descriptors ---------------------------------------------------------------------------------------------


@triton.jit
def descriptor_kernel(x, out, M, N, xm, om, BM: tl.constexpr, BN: tl.constexpr, OP: tl.constexpr):
    a = tl.make_tensor_descriptor(x, shape=[M, N], strides=[xm, 1], block_shape=[BM, BN])
    b = tl.make_tensor_descriptor(out, shape=[M, N], strides=[om, 1], block_shape=[BM, BN])
    at = [tl.program_id(0) * BM, tl.program_id(1) * BN]
    doubled = a.load(at) * 2
    if OP == "store":
        b.store(at, doubled)
    else:
        b.atomic_add(at, doubled)


@triton.jit
def host_descriptor_kernel(a, b, BM: tl.constexpr, BN: tl.constexpr):
    at = [tl.program_id(0) * BM, tl.program_id(1) * BN]
    b.store(at, a.load(at) + 1)


@triton.jit
def descriptor_rows_kernel(x, out, rows, M, N, BN: tl.constexpr, K: tl.constexpr):
    a = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[1, BN])
    b = tl.make_tensor_descriptor(out, shape=[M, N], strides=[N, 1], block_shape=[1, BN])
    picked = tl.load(rows + tl.arange(0, K))
    b.scatter(a.gather(picked, 0) * 2, picked, 0)


@triton.jit
def block_pointer_kernel(x, out, M, N, BM: tl.constexpr, BN: tl.constexpr):
    p = tl.make_block_ptr(x, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    q = tl.make_block_ptr(out, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    for _ in range(0, N, BN):
        tl.store(q, tl.load(p, boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))
        p, q = tl.advance(p, (0, BN)), tl.advance(q, (0, BN))


@group
def descriptors():
    from triton.tools.tensor_descriptor import TensorDescriptor

    M, N = 21, 40
    x, room = torch.randn(M, 48)[:, :N], torch.ones(M, 48)
    for op, want in (("store", 2 * x), ("add", 1 + 2 * x)):
        room.fill_(1)
        descriptor_kernel[(3, 3)](x, room[:, :N], M, N, 48, 48, BM=8, BN=16, OP=op)
        check(("descriptor", op), room[:, :N], want)
        check("outside the descriptor's shape", room[:, N:], torch.ones(M, 8))
    made = [TensorDescriptor(t, [M, N], [48, 1], [8, 16]) for t in (x, room[:, :N])]
    host_descriptor_kernel[(3, 3)](*made, BM=8, BN=16)
    check("made on the host", room[:, :N], x + 1)
    whole, out = x.contiguous(), torch.zeros(M, N)
    rows = torch.tensor([3, 7, 20, 0, 1, 2, 9, 11], dtype=torch.int32)
    descriptor_rows_kernel[(1,)](whole, out, rows, M, N, BN=32, K=8)
    want = torch.zeros(M, N)
    want[rows.long(), :32] = 2 * whole[rows.long(), :32]
    check("gather and scatter", out, want)
    if TRITON < (3, 9):
        out.zero_()
        block_pointer_kernel[(1,)](whole, out, M, N, BM=32, BN=16)
        check("block pointer", out, whole)


# ---- control flow ---------------------------------------------------------------------------------------------------


@triton.jit
def three(a, b, c):
    if a > b:
        if c > 0:
            return a, b, c
        return b, a, c
    for k in range(3):
        c += k
    return a + b, a - b, c


@triton.jit
def several_returns(x, n):
    u, v, w = three(x, n, n + 1)
    if u > 5:
        return u
    return v + w


@triton.jit(do_not_specialize=["n"])
def nested_kernel(out, x, n, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    first = several_returns(n, n - 2)
    total = tl.zeros([B], tl.float32)
    k = 0
    while k < n:
        if k % 2 == 0:
            j = 0
            while j < k:
                total += a * j
                if j == 2:
                    total = total * 0.5
                    a = a + 1
                j += 1
        else:
            for m in range(k, 0, -1):
                total -= m
                if m > 3:
                    a = a - tl.sum(a) / B
                    total, a = a, total
        k += 1
    tl.store(out + i, total + first)
    tl.store(out + B + i, a)


def nested(x, n):
    a, total, B = x.double(), torch.zeros_like(x).double(), len(x)
    for k in range(n):
        if k % 2 == 0:
            for j in range(k):
                total = total + a * j
                if j == 2:
                    total, a = total * 0.5, a + 1
        else:
            for m in range(k, 0, -1):
                total = total - m
                if m > 3:
                    a = a - a.sum() / B
                    total, a = a, total
    return torch.cat([total + several_returns_in_python(n, n - 2), a])


def several_returns_in_python(x, n):
    if x > n:
        u, v, w = (x, n, n + 1) if n + 1 > 0 else (n, x, n + 1)
    else:
        u, v, w = x + n, x - n, n + 4
    return u if u > 5 else v + w


@triton.jit
def branch_kernel(x, p, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    if tl.max(a) > 0.5:
        b = a * 2
        index = i
    else:
        b = tl.where(a > 0, a, -a)
        index = B - 1 - i
    q = x + i if n > 3 else p + index
    tl.store(out + index, b + tl.load(q))


@triton.jit(do_not_specialize=["n"])
def loops_kernel(out, n, B: tl.constexpr):
    t = 0
    for a in tl.static_range(3):
        t += a
    for a in range(n, 0, -2):
        t = t * 3 + a
    for a in tl.range(0, n, num_stages=3, loop_unroll_factor=2):
        t = t * 2 + a
    i = tl.arange(0, B)
    v = tl.zeros([B], tl.int32)
    for a in tl.range(0, n, loop_unroll_factor=4):
        v = v * 2 + i + a
    tl.store(out, t)
    tl.store(out + 1 + i, v)


@triton.jit(do_not_specialize=["n"])
def scalar_kernel(x, out, n, f):
    a, b = tl.load(x), tl.load(x + 1)
    tl.store(out, tl.exp(a) + tl.sqrt(b) * f + n // 3 + n % 5 + tl.cdiv(n, 7))
    tl.store(out + 1, tl.where(n > 3, a, b))
    tl.store(out + 2, tl.fma(a, b, f))
    tl.store(out + 3, tl.clamp(a, 0.0, 0.5))
    tl.store(out + 4, (n * n).to(tl.float32))
    tl.store(out + 5, n.to(tl.float32, bitcast=True).to(tl.int32, bitcast=True))


@group
def flow():
    for n in range(8):
        x, out = torch.randn(32), torch.zeros(64)
        nested_kernel[(1,)](out, x, n, B=32)
        check(("nested", n), out, nested(x, n), 1e-4)
    for n in (1, 5):
        for size in (0.1, 10):
            x, p, out, want = torch.rand(64) * size - size / 4, torch.randn(64), torch.zeros(64), torch.zeros(64)
            branch_kernel[(1,)](x, p, out, n, B=64)
            high = x.max() > 0.5
            index = torch.arange(64) if high else 63 - torch.arange(64)
            want[index] = (x * 2 if high else x.abs()) + (x if n > 3 else p[index])
            check(("branch", n, size), out, want)
    for n in range(10):
        out = torch.zeros(17, dtype=torch.int32)
        loops_kernel[(1,)](out, n, B=16)
        t, v = 3, torch.zeros(16, dtype=torch.int32)
        for a in range(n, 0, -2):
            t = t * 3 + a
        for a in range(n):
            t, v = t * 2 + a, v * 2 + torch.arange(16) + a
        check(("loops", n), out, torch.cat([torch.tensor([t]), v]))
    for n in (-8, 0, 1, 4, 100_000):
        x, out = torch.rand(2), torch.zeros(6)
        scalar_kernel[(1,)](x, out, n, 0.25)
        a, b = x.double()
        whole = int(n / 3) + int(np.fmod(n, 5)) + int((n + 6) / 7)
        square = (n * n + 2**31) % 2**32 - 2**31
        want = [a.exp() + b.sqrt() * 0.25 + whole, a if n > 3 else b, a * b + 0.25, a.clamp(0, 0.5), square, n]
        check(("scalars", n), out, torch.tensor(want), 1e-6)


# ---- printing, checking, refusing -----------------------------------------------------------------------------------


@triton.jit
def printing_kernel(x, n, B: tl.constexpr):
    tl.static_print("block", B)
    tl.static_assert(B == 2, "B must be 2")
    i = tl.arange(0, B)
    tl.device_print("value: ", tl.load(x + i), n)
    tl.device_print("bare 100%")
    tl.device_print("hex ", n, hex=True)
    tl.device_print("square", i[:, None] > i[None, :])


def printed(launch):
    """What the C library's printf wrote to standard output meanwhile."""
    import ctypes

    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            launch()
            ctypes.CDLL(None).fflush(None)
            sys.stdout.flush()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        return file.read().decode().splitlines()


@group
def printing():
    lines = printed(lambda: printing_kernel[(1,)](torch.tensor([0.5, -2.0]), -3, B=2))
    pid = "pid (0, 0, 0)"
    assert lines == [
        "block 2", f"{pid} idx (0) value: 0.500000", f"{pid} idx (1) value: -2.000000", f"{pid} value: -3",
        f"{pid} bare 100%", f"{pid} hex: 0xfffffffd", f"{pid} idx (0, 0) square: 0", f"{pid} idx (0, 1) square: 0",
        f"{pid} idx (1, 0) square: 1", f"{pid} idx (1, 1) square: 0",
    ], lines  # fmt: skip
    with refused("B must be 2"):
        printing_kernel[(1,)](torch.zeros(4), 1, B=4)


@contextlib.contextmanager
def refused(*words):
    """The block raises, and the error or what it came from holds all the words."""
    try:
        yield
    except Exception as error:
        texts = []
        while error is not None:
            texts.append(str(error))
            error = error.__cause__
        for word in words:
            assert any(word in text for text in texts), (word, texts)
    else:
        raise AssertionError(f"not refused: {words}")


@triton.jit
def refused_kernel(x, OP: tl.constexpr):
    i = tl.arange(0, 16)
    if OP == "tt.elementwise_inline_asm":
        tl.store(x + i, tl.inline_asm_elementwise("nop", "=r,r", [tl.load(x + i)], tl.float32, True, 1))
    elif OP == "tt.dot_scaled":
        a = tl.full([16, 64], 0, tl.uint8)
        b = tl.full([64, 16], 0, tl.uint8)
        s = tl.full([16, 2], 127, tl.uint8)
        tl.store(x + i, tl.sum(tl.dot_scaled(a, s, "e5m2", b, s, "e5m2"), 0))
    elif OP == "tt.atomic_poll":
        tl.atomic_poll(x.to(tl.pointer_type(tl.int32)), 1)
    elif OP == "tt.extern_elementwise":
        tl.store(x + i, missing(tl.load(x + i)))
    elif OP == "libdevice.erfcinv":
        tl.store(x + i, libdevice.erfcinv(tl.load(x + i)))


@tl.core.extern
def missing(arg, _semantic=None):
    whole, known = arg.to(tl.int32, _semantic=_semantic), {(tl.int32,): ("abs", tl.int32)}
    return tl.core.extern_elementwise("libm", "", [whole], known, True, _semantic=_semantic)


@group
def refusals():
    """What is not supported is a compile error with the operation and the line of this file."""
    with open(__file__) as file:
        lines = file.read().splitlines()
    operations = {"tt.elementwise_inline_asm": "tl.inline_asm_elementwise(", "tt.dot_scaled": "tl.dot_scaled(",
                  "tt.atomic_poll": "tl.atomic_poll(", "tt.extern_elementwise": "missing(tl"}  # fmt: skip
    for operation, text in operations.items():
        if operation == "tt.atomic_poll" and not hasattr(tl, "atomic_poll"):
            continue
        line = next(i for i, each in enumerate(lines, 1) if text in each)
        with refused(operation, f"language_cases.py:{line}"):
            refused_kernel[(1,)](torch.zeros(16), OP=operation)
    with refused("libdevice.erfcinv is not available on the CPU"):
        refused_kernel[(1,)](torch.zeros(16), OP="libdevice.erfcinv")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(name)
        print(name)
