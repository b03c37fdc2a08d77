# SPDX-License-Identifier: Apache-2.0
"""Operations of Triton on CPU tensors against torch; `run(groups)` runs every case of the groups (test_lowering.py)."""

import sys

import torch
import triton
import triton.language as tl

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
GROUPS = {}


def group(function):
    GROUPS[function.__name__] = function
    return function


def run(names):
    for name in names.split():
        torch.manual_seed(0)
        GROUPS[name]()


def values(shape, dtype):
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -(2**40)), min(info.max, 2**40), shape, dtype=torch.int64).to(dtype)


def check(label, got, want, tolerance=0.0):
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= tolerance * (1 + want.abs()))
    wrong = ~same
    assert same.all(), f"{label}: {got[wrong][:4].tolist()} for {want[wrong][:4].tolist()}, {wrong.sum()} wrong"


# ---- elementwise ----------------------------------------------------------------------------------------------------


@triton.jit
def binary_kernel(x, y, out, M, N, sx_m, sx_n, so_m, so_n, BM: tl.constexpr, BN: tl.constexpr, OP: tl.constexpr):
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    mask = (m < M) & (n < N)
    a = tl.load(x + m * sx_m + n * sx_n, mask, 1)
    b = tl.load(y + m * sx_m + n * sx_n, mask, 1)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "floordiv":
        r = a // b
    elif OP == "mod":
        r = a % b
    elif OP == "max":
        r = tl.maximum(a, b)
    elif OP == "min_nan":
        r = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "less":
        r = (a < b).to(out.dtype.element_ty)
    elif OP == "where":
        r = tl.where(a > b, a, b * 2)
    elif OP == "xor":
        r = a ^ b
    elif OP == "shl":
        r = a << (b & 7)
    elif OP == "shr":
        r = a >> (b & 7)
    tl.store(out + m * so_m + n * so_n, r.to(out.dtype.element_ty), mask)


BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "less": torch.lt,
    "min_nan": torch.minimum, "where": lambda a, b: torch.where(a > b, a, b * 2), "mod": torch.fmod,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "xor": torch.bitwise_xor,
    "shl": lambda a, b: a << (b & 7), "shr": lambda a, b: a >> (b & 7),
}  # fmt: skip


@group
def binary():
    for dtype in FLOATS + INTEGERS:
        skipped = ("floordiv", "mod", "xor", "shl", "shr") if dtype.is_floating_point else ("div", "min_nan")
        for i, (op, reference) in enumerate((op, f) for op, f in BINARY.items() if op not in skipped):
            M, N, BM, BN = [(1, 1, 1, 1), (5, 37, 8, 64), (16, 3, 16, 4)][i % 3]
            x, y = values((M, N), dtype), values((M, N), dtype)
            if not dtype.is_floating_point:
                y[y == 0] = 1
            elif op == "min_nan":
                x[0, 0] = float("nan")
            wide = (lambda t: t.float()) if dtype in FLOATS[:2] else (lambda t: t)
            want = reference(wide(x), wide(y)).to(dtype)
            for out in (torch.zeros(M, N, dtype=dtype), torch.zeros(N, M, dtype=dtype).t()):
                binary_kernel[(1,)](x, y, out, M, N, *x.stride(), *out.stride(), BM=BM, BN=BN, OP=op)
                check((op, dtype, M, N), out, want)


@triton.jit
def zero_divisor_kernel(x, y, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i) // tl.load(y + i))


@group
def division_never_traps():
    for dtype in (torch.int32, torch.int64):
        x = torch.tensor([torch.iinfo(dtype).min, 5, -7, 9], dtype=dtype)
        out = torch.zeros(4, dtype=dtype)
        zero_divisor_kernel[(1,)](x, torch.tensor([-1, 0, 2, 0], dtype=dtype), out, B=4)
        assert out[2] == -3 and out[0] == torch.iinfo(dtype).min


@triton.jit
def unary_kernel(x, out, n, B: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i, i < n, 0)
    r = a if OP == "cast" else getattr(tl, OP)(a)
    tl.store(out + i, r.to(out.dtype.element_ty), i < n)


def special_values():
    edges = [0.0, -0.0, 1, -1, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 1e-45, 88.7, 88.8, -87.3, -103,
             -104, 127.99, 128, -126.5, -149, -150, 3.4e38, 1.17549435e-38, 0.70710678, 1.4142135, 1.0000001, 0.9999999]
    spread = torch.exp(torch.randn(500) * 20)
    return torch.cat([torch.tensor(edges), torch.randn(500) * 20, torch.rand(500) * 2, spread])


@group
def functions():
    """At most 2 ulp (a sigmoid is a quotient: 4), right at zeros, infinities, NaN and subnormal numbers."""
    x = special_values()
    infinity = torch.tensor(float("inf"))
    for op in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "abs", "sigmoid"):
        for dtype in (torch.float32, torch.float64):
            out = torch.zeros(len(x), dtype=dtype)
            unary_kernel[(1,)](x.to(dtype), out, len(x), B=2048, OP=op)
            exact = getattr(torch, op)(x.double())
            if dtype == torch.float64:
                check((op, dtype), out, exact, 1e-14)
                continue
            want = exact.float()
            finite = want.isfinite() & out.isfinite()
            step = (torch.nextafter(want.abs(), infinity) - want.abs()).double()
            worst = ((out.double() - exact).abs() / step)[finite].max()
            assert worst <= (4 if op == "sigmoid" else 2), (op, worst)
            check((op, "special values"), out[~finite], want[~finite])


@group
def casts():
    for source in FLOATS + INTEGERS:
        for target in FLOATS + INTEGERS:
            x = values((300,), source)
            if source.is_floating_point:
                x = torch.cat([special_values(), torch.randn(100) * 1000]).to(source)
                if target in INTEGERS:
                    info = torch.iinfo(target)
                    x = torch.where(x.isfinite(), x, 0.0).double().clamp(info.min / 2, info.max / 2).to(source)
                    x = x.abs() if target == torch.uint8 else x
            out = torch.zeros(len(x), dtype=target)
            unary_kernel[(1,)](x, out, len(x), B=2048, OP="cast")
            check((source, target), out, x.to(target))


@triton.jit
def float8_kernel(x, out, bits, n, B: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i, i < n).to(KIND)
    tl.store(bits + i, a.to(tl.uint8, bitcast=True), i < n)
    tl.store(out + i, a.to(tl.float32), i < n)


@group
def float8():
    edges = torch.tensor([0.0, -0.0, 448, -448, 1e-9, 2**-9, 2**-10, 2**-16, 2**-17, 1.5 * 2**-17])
    x = torch.cat([torch.randn(300) * 10, torch.randn(300) * 0.01, edges])
    for dtype, kind in ((torch.float8_e5m2, tl.float8e5), (torch.float8_e4m3fn, tl.float8e4nv)):
        out, bits = torch.zeros(len(x)), torch.zeros(len(x), dtype=torch.uint8)
        float8_kernel[(1,)](x, out, bits, len(x), B=1024, KIND=kind)
        check(dtype, out, x.to(dtype).float())
        check(dtype, bits, x.to(dtype).view(torch.uint8))


# ---- reductions and scans -------------------------------------------------------------------------------------------


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def sum_and_max(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit
def reduce_kernel(x, out, second, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, OP: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + at)
    i = tl.arange(0, N if AXIS == 0 else M)
    if OP == "sum":
        tl.store(out + i, tl.sum(a, AXIS))
    elif OP == "max":
        tl.store(out + i, tl.max(a, AXIS))
    elif OP == "argmin":
        tl.store(out + i, tl.argmin(a, AXIS))
    elif OP == "prod":
        tl.store(out + i, tl.reduce(a, AXIS, product))
    elif OP == "two":
        p, q = tl.reduce((a, a * 2), AXIS, sum_and_max)
        tl.store(out + i, p)
        tl.store(second + i, q)
    elif OP == "all":
        tl.store(out, tl.sum(a))
    elif OP == "cumsum":
        tl.store(out + at, tl.cumsum(a, AXIS))
    elif OP == "back":
        tl.store(out + at, tl.cumsum(a, AXIS, reverse=True))
    elif OP == "sort":
        tl.store(out + at, tl.sort(a))


@group
def reductions():
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2}
    shapes = ((1, 1), (1, 64), (64, 1), (16, 32), (4, 128), (32, 4), (128, 8))
    for dtype in (torch.float32, torch.int32, torch.float16, torch.int64):
        for i, (M, N) in enumerate(shapes):
            x = values((M, N), dtype) if dtype.is_floating_point else values((M, N), dtype) % 1000
            for axis in (0, 1):
                for op in ("sum", "max", "argmin", "prod", "two", "all", "cumsum", "back"):
                    if dtype != torch.float32 and op in ("two", "back", "argmin"):
                        continue
                    if dtype == torch.float16 and op == "cumsum":
                        continue
                    L = N if axis == 0 else M
                    out = torch.zeros((M, N) if op in ("cumsum", "back") else (1,) if op == "all" else (L,),
                                      dtype=torch.int32 if op == "argmin" else dtype)  # fmt: skip
                    second = torch.zeros(L, dtype=dtype)
                    reduce_kernel[(1,)](x, out, second, M=M, N=N, AXIS=axis, OP=op)
                    wide = x.double() if dtype.is_floating_point else x
                    near = tolerance.get(dtype, 0)
                    if op == "argmin":
                        out, want = x.gather(axis, out.long().unsqueeze(axis)), x.amin(axis, keepdim=True)
                    elif op == "back":
                        want = wide.flip(axis).cumsum(axis).flip(axis)
                    else:
                        want = {"sum": lambda: wide.sum(axis), "max": lambda: wide.amax(axis), "all": wide.sum,
                                "prod": lambda: wide.prod(axis), "two": lambda: wide.sum(axis),
                                "cumsum": lambda: wide.cumsum(axis)}[op]()  # fmt: skip
                    check((op, dtype, M, N, axis), out, want.to(out.dtype), 10 * near)
                    if op == "two":
                        check((op, dtype, M, N, axis), second, 2 * x.amax(axis))
    for dtype in (torch.float32, torch.int32):
        for M, N in ((1, 16), (4, 32), (2, 2)):
            x = values((M, N), dtype)
            out = torch.zeros_like(x)
            reduce_kernel[(1,)](x, out, out, M=M, N=N, AXIS=1, OP="sort")
            check(("sort", dtype, M, N), out, x.sort(1).values)


# ---- shapes ---------------------------------------------------------------------------------------------------------


@triton.jit
def shape_kernel(x, y, out, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(x + at), tl.load(y + at)
    H: tl.constexpr = N // 2
    if OP == "reshape":
        tl.store(out + tl.arange(0, M * N), tl.reshape(a, [M * N]))
    elif OP == "trans":
        tl.store(out + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], tl.trans(a) * 2)
    elif OP == "join":
        tl.store(out + tl.arange(0, 2 * M * N), tl.reshape(tl.join(a, b), [2 * M * N]))
    elif OP == "split":
        p, q = tl.split(tl.reshape(a, [M, H, 2]))
        tl.store(out + tl.arange(0, M)[:, None] * H + tl.arange(0, H)[None, :], p - q)
    elif OP == "cat":
        both = tl.cat(tl.reshape(a, [M * N]), tl.reshape(b, [M * N]), can_reorder=True)
        tl.store(out + tl.arange(0, 2 * M * N), both)
    elif OP == "permute":
        h, m, pair = tl.arange(0, H)[:, None, None], tl.arange(0, M)[None, :, None], tl.arange(0, 2)[None, None, :]
        at = h * (2 * M) + m * 2 + pair
        tl.store(out + at, tl.permute(tl.reshape(a, [M, 2, H]), (2, 0, 1)))


@group
def shapes():
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for M, N in ((4, 64), (16, 2), (32, 32)):
            x, y = (torch.randint(-50, 50, (M, N)).to(dtype) for _ in range(2))
            pairs = x.view(M, -1, 2)
            wanted = {
                "reshape": x, "trans": x.t() * 2, "join": torch.stack([x, y], -1),
                "split": pairs[..., 0] - pairs[..., 1], "cat": torch.cat([x.flatten(), y.flatten()]),
                "permute": x.view(M, 2, N // 2).permute(2, 0, 1),
            }  # fmt: skip
            for op, want in wanted.items():
                out = torch.zeros(want.shape, dtype=dtype)
                shape_kernel[(1,)](x, y, out.view(-1), OP=op, M=M, N=N)
                check((op, dtype, M, N), out, want)


# ---- memory ---------------------------------------------------------------------------------------------------------


@triton.jit
def shift_kernel(x, B: tl.constexpr, D: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    tl.store(x + i + D, a * 2)
    b = tl.load(x + i + D)
    tl.store(x + i, a + b)


@triton.jit
def swap_kernel(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(x + i, b)
    tl.store(y + B - 1 - i, a)


@triton.jit
def atomic_kernel(x, index, out, n, B: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, B)
    a, place = tl.load(x + i, i < n), tl.load(index + i, i < n, 0)
    if OP == "add":
        tl.atomic_add(out + place, a, i < n)
    elif OP == "max":
        tl.atomic_max(out + place, a, i < n)
    else:
        tl.atomic_min(out + place, a, i < n)


@triton.jit
def lock_kernel(lock, count, n):
    for _ in range(n):
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
        tl.store(count, tl.load(count) + 1)
        tl.atomic_xchg(lock, 0)


@triton.jit
def table_kernel(x, index, out, bins, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    picked = tl.load(index + at)
    tl.store(out + at, tl.gather(tl.load(x + at), picked, 1))
    flat = tl.reshape(picked, [M * N])
    tl.store(bins + tl.arange(0, K), tl.histogram(flat, K, flat != 3))


@group
def memory():
    for D in (1, 7, 16, 33):
        x = torch.randn(300)
        want = x.clone()
        shift_kernel[(1,)](x, B=128, D=D)
        a = want[:128].clone()
        want[D : D + 128] = a * 2
        want[:128] = a + want[D : D + 128].clone()
        check(("loads come before a store that overlaps them", D), x, want)
    x, y = torch.randn(256), torch.randn(256)
    a, b = x.clone(), y.clone()
    swap_kernel[(1,)](x, y, B=256)
    check("swap", x, b)
    check("swap", y, a.flip(0))
    for dtype in (torch.int32, torch.float32, torch.float64, torch.float16, torch.bfloat16):
        a, index = torch.randint(-5, 5, (50,)), torch.randint(0, 7, (50,))
        for op in ("add", "max", "min") if dtype in (torch.int32, torch.float32) else ("add",):
            out = torch.zeros(8, dtype=dtype)
            atomic_kernel[(1,)](a.to(dtype), index, out, 50, B=64, OP=op)
            want = torch.zeros(8).scatter_reduce(0, index, a.float(), {"add": "sum", "max": "amax", "min": "amin"}[op])
            check((op, dtype), out, want)
    count = torch.zeros(1, dtype=torch.int32)
    lock_kernel[(64,)](torch.zeros(1, dtype=torch.int32), count, 10)
    assert count.item() == 640
    x, index = torch.randn(8, 32), torch.randint(0, 32, (8, 32), dtype=torch.int32)
    out, bins = torch.zeros(8, 32), torch.zeros(32, dtype=torch.int32)
    table_kernel[(1,)](x, index, out, bins, M=8, N=32, K=32)
    check("gather", out, x.gather(1, index.long()))
    check("histogram", bins, torch.bincount(index[index != 3], minlength=32))


@triton.jit
def guarded_kernel(x, out, n, stride, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i * stride, tl.load(x + i * stride, i < n, 7) + 1, i < n)


@group
def masks():
    """Masked-off lanes touch nothing: the tensors end at a page that may not be accessed."""
    import ctypes
    import mmap

    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + page), page, 0) == 0
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float64):
        for n, stride in ((1, 1), (13, 1), (5, 3)):
            count = (n - 1) * stride + 1
            x = torch.frombuffer(area, dtype=dtype, count=count, offset=page - count * dtype.itemsize)
            x.copy_(torch.arange(count))
            guarded_kernel[(1,)](x, x, n, stride, B=64)
            check(("in place", dtype, n, stride), x[::stride], torch.arange(count)[::stride] + 1)


# ---- control flow ---------------------------------------------------------------------------------------------------


@triton.jit
def doubled_if_large(x, n):
    if n > 3:
        return x * 2
    return x + 1


@triton.jit(noinline=True)
def far_away(n):
    if n > 100:
        return n * 0
    return n + 1


@triton.jit
def control_kernel(x, out, n, k, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    if n < 0:
        return
    b = a
    for s in range(n):
        a, b = b, a + b * 0.5
        if s % 2 == 0:
            a = a + 1
        else:
            b = b - tl.sum(a) / B
    j = 0
    while j < k:
        c = a
        a = tl.where(b > 0, b, a * 0.5)
        b = c
        j += 1
    a = doubled_if_large(a * far_away(n), n)
    tl.store(out + i, a)
    tl.store(out + B + i, b)


@triton.jit
def pointer_kernel(x, out, n, step, B: tl.constexpr):
    i = tl.arange(0, B)
    p, offset, q, total = x + i, i * 2, out + i, tl.zeros([B], tl.float32)
    for k in range(n):
        total += tl.load(p) + offset
        p += step
        offset += k
        tl.store(q, total)
        q += B
    tl.store(q, tl.load(p - step) + offset)


@triton.jit
def transposing_kernel(x, out, n, M: tl.constexpr):
    i = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    a = tl.load(x + i)
    b = a * 2
    for _ in range(n):
        a, b = tl.trans(b), a + b
    tl.store(out + i, a)
    tl.store(out + M * M + i, b)


@group
def control():
    for n in (-1, 0, 1, 5):
        x, out = torch.randn(32), torch.zeros(64)
        control_kernel[(1,)](x, out, n, 3, B=32)
        a = b = x.double()
        for s in range(n):
            a, b = b, a + b * 0.5
            a, b = (a + 1, b) if s % 2 == 0 else (a, b - a.sum() / 32)
        for _ in range(3):
            a, b = torch.where(b > 0, b, a * 0.5), a
        a = a * (n + 1)
        a = a * 2 if n > 3 else a + 1
        check(("control", n), out, torch.cat([a, b]) if n >= 0 else torch.zeros(64), 1e-5)
    n, step, B = 5, 3, 32
    x, out = torch.randn(200), torch.zeros(6 * B)
    pointer_kernel[(1,)](x, out, n, step, B=B)
    total, offset, rows = torch.zeros(B), torch.arange(B) * 2, []
    for k in range(n):
        total = total + x[k * step : k * step + B] + offset
        offset = offset + k
        rows.append(total)
    check("carried pointers", out, torch.cat([*rows, x[4 * step : 4 * step + B] + offset]), 1e-5)
    for n in (0, 1, 4):
        x, out = torch.randn(32, 32), torch.zeros(2, 32, 32)
        transposing_kernel[(1,)](x, out, n, M=32)
        a, b = x, x * 2
        for _ in range(n):
            a, b = b.t(), a + b
        check(("carried tiles", n), out, torch.stack([a, b]), 1e-5)


# ---- products -------------------------------------------------------------------------------------------------------


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TA: tl.constexpr, TB: tl.constexpr,
               OUT: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.trans(tl.load(a + k[:, None] * M + m[None, :])) if TA else tl.load(a + m[:, None] * K + k[None, :])
    y = tl.trans(tl.load(b + n[:, None] * K + k[None, :])) if TB else tl.load(b + k[:, None] * N + n[None, :])
    at = m[:, None] * N + n[None, :]
    if ADD:
        r = tl.dot(x, y, tl.load(c + at), out_dtype=OUT)
    else:
        r = tl.dot(x, y, out_dtype=OUT)
    tl.store(c + at, r)


@triton.jit
def batched_kernel(a, b, c, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    z, m, n, k = tl.arange(0, B)[:, None, None], tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + z * M * K + m[None, :, None] * K + k[None, None, :])
    y = tl.load(b + z * K * N + k[None, :, None] * N + n[None, None, :])
    tl.store(c + z * M * N + m[None, :, None] * N + n[None, None, :], tl.dot(x, y))


@triton.jit
def power_kernel(x, out, n, M: tl.constexpr):
    i = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    a = tl.load(x + i)
    c = a
    for _ in range(n):
        d = tl.dot(a, c, c)
        c = d * 0.5 + c
    tl.store(out + i, tl.dot(c, c, c))


@group
def products():
    kinds = (
        (torch.float32, torch.float32, tl.float32), (torch.bfloat16, torch.float32, tl.float32),
        (torch.float16, torch.float32, tl.float32), (torch.float16, torch.float16, tl.float16),
        (torch.int8, torch.int32, tl.int32), (torch.float64, torch.float64, tl.float64),
    )  # fmt: skip
    for dtype, out_dtype, out in kinds:
        near = 2e-3 if out_dtype == torch.float16 else 1e-5
        for i, (M, N, K) in enumerate(((16, 16, 16), (1, 32, 16), (32, 16, 64), (2, 4, 8), (16, 1, 16), (64, 128, 32))):
            a, b = values((M, K), dtype), values((K, N), dtype)
            add = i % 2 == 0 and out_dtype != torch.float16
            want = a.double() @ b.double() + add
            for TA, TB in ((False, False), (True, False), (False, True), (True, True)):
                c = torch.ones(M, N, dtype=out_dtype)
                dot_kernel[(1,)](a.t().contiguous() if TA else a, b.t().contiguous() if TB else b, c,
                                 M=M, N=N, K=K, TA=TA, TB=TB, OUT=out, ADD=add)  # fmt: skip
                check((dtype, out_dtype, M, N, K, TA, TB), c, want, near)
    for dtype in (torch.float32, torch.bfloat16):
        a, b, c = values((4, 16, 32), dtype), values((4, 32, 16), dtype), torch.zeros(4, 16, 16)
        batched_kernel[(1,)](a, b, c, B=4, M=16, N=16, K=32)
        check(("batched", dtype), c, a.double() @ b.double(), 1e-5)
    for n in (0, 1, 4):
        x, out = torch.randn(32, 32) * 0.1, torch.zeros(32, 32)
        power_kernel[(1,)](x, out, n, M=32)
        c = x.double()
        for _ in range(n):
            c = (x.double() @ c + c) * 0.5 + c
        check(("accumulated in place", n), out, c @ c + c, 1e-5)


# ---- diagnostics ----------------------------------------------------------------------------------------------------


@triton.jit
def positive_kernel(x):
    tl.device_assert(tl.load(x + tl.arange(0, 16)) > 0, "must be positive")


@triton.jit
def joined_kernel(x, y):
    i = tl.arange(0, 16)
    tl.store(y + i, tl.inline_asm_elementwise("nop", "=r,r", [tl.load(x + i)], tl.float32, True, 1))


@group
def diagnostics():
    positive_kernel[(1,)](torch.ones(16), debug=True)
    try:
        positive_kernel[(3,)](torch.zeros(16), debug=True)
    except AssertionError as error:
        assert "must be positive" in str(error) and "positive_kernel" in str(error)
    else:
        raise SystemExit("the assertion did not fail")
    try:
        joined_kernel[(1,)](torch.ones(16), torch.ones(16))
    except Exception as error:
        assert "tt.elementwise_inline_asm" in str(error) and "lowering_cases.py" in str(error), error
    else:
        raise SystemExit("inline assembly was compiled")


if __name__ == "__main__":
    for name in sys.argv[1:] or GROUPS:
        run(name)
        print(name)
