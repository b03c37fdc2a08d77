# SPDX-License-Identifier: Apache-2.0
"""Kernels and host code in the patterns of Triton's tutorials 01 to 06 and 08, and kernels of fla-core as they are.

The tutorials' host code asks the driver for its device and its properties, compiles ahead (`warmup`), starts as many
programs as fit, and tunes a matrix product by timing it: all of that must work on the CPU.
"""

import sys

import torch
import triton
import triton.language as tl
from language_cases import philox
from lowering_cases import check, group, run  # noqa: F401 - `run` is called from outside
from triton.runtime import driver

DEVICE = driver.active.get_active_torch_device()


# ---- 01: vector addition --------------------------------------------------------------------------------------------


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@group
def vector_addition():
    def add(x, y):
        out = torch.empty_like(x)
        add_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel(), BLOCK=1024)
        return out

    for count in (1, 1024, 98432):
        x, y = torch.rand(count, device=DEVICE), torch.rand(count, device=DEVICE)
        check(count, add(x, y), x + y)
    times = triton.testing.do_bench(lambda: add(x, y), warmup=2, rep=5, quantiles=[0.5, 0.2, 0.8])
    assert len(times) == 3 and 0 < times[1] <= times[0] <= times[2]


# ---- 02: softmax by persistent programs -----------------------------------------------------------------------------


@triton.jit
def softmax_kernel(out_ptr, in_ptr, in_stride, out_stride, rows, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(in_ptr + row * in_stride + offsets, mask=mask, other=-float("inf"))
        weights = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * out_stride + offsets, weights / tl.sum(weights, axis=0), mask=mask)


@group
def softmax():
    properties = driver.active.utils.get_device_properties(DEVICE.index)
    for rows, columns in ((1823, 781), (3, 1), (1, 64)):
        x = torch.randn(rows, columns, device=DEVICE)
        out, warps = torch.empty_like(x), 8
        sizes = x.stride(0), out.stride(0), rows, columns
        block = triton.next_power_of_2(columns)
        kernel = softmax_kernel.warmup(out, x, *sizes, BLOCK=block, STAGES=4, num_warps=warps, grid=(1,))
        kernel._init_handles()
        fit = properties["max_num_regs"] // (kernel.n_regs * properties["warpSize"] * warps)
        fit = min(fit, properties["max_shared_mem"] // kernel.metadata.shared)
        programs = min(properties["multiprocessor_count"] * fit, rows)
        assert programs > 0
        kernel[(programs, 1, 1)](out, x, *sizes, block, 4)
        check(("softmax", rows, columns), out, torch.softmax(x.double(), 1), 1e-6)


# ---- 03: matrix product, tuned --------------------------------------------------------------------------------------


@triton.autotune(
    configs=[
        triton.Config({"BM": 32, "BN": 32, "BK": 64, "GROUP": 6, "matrix_instr_nonkdim": 16}, num_warps=8),
        triton.Config({"BM": 64, "BN": 16, "BK": 32, "GROUP": 4, "waves_per_eu": 2}, num_warps=4, num_stages=5),
    ],
    key=["M", "N", "K"],
)
@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, am, ak, bk, bn, cm, cn, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    pid = tl.program_id(axis=0)
    across = tl.cdiv(N, BN)
    in_group = GROUP * across
    first = pid // in_group * GROUP
    height = min(tl.cdiv(M, BM) - first, GROUP)
    pid_m = first + (pid % in_group) % height
    pid_n = (pid % in_group) // height
    tl.assume(pid_m >= 0)
    tl.assume(am > 0)
    m = (pid_m * BM + tl.arange(0, BM)) % M
    n = (pid_n * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    a_ptrs = a_ptr + (m[:, None] * am + k[None, :] * ak)
    b_ptrs = b_ptr + (k[:, None] * bk + n[None, :] * bn)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        a = tl.load(a_ptrs, mask=k[None, :] < K - step * BK, other=0.0)
        b = tl.load(b_ptrs, mask=k[:, None] < K - step * BK, other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BK * ak
        b_ptrs += BK * bk
    if ACTIVATION == "leaky_relu":
        total = leaky_relu(total)
    m = pid_m * BM + tl.arange(0, BM)
    n = pid_n * BN + tl.arange(0, BN)
    tl.store(c_ptr + cm * m[:, None] + cn * n[None, :], total.to(tl.float16), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@group
def matrix_product():
    half, eighth = torch.float16, torch.float8_e5m2
    cases = (((128, 96, 128), "", half), ((100, 61, 77), "leaky_relu", half), ((1, 1, 1), "", half),
             ((64, 64, 64), "", eighth))  # fmt: skip
    for (M, N, K), activation, dtype in cases:
        a, b = torch.randn(M, K, device=DEVICE).to(dtype), torch.randn(N, K, device=DEVICE).to(dtype).t()
        c = torch.empty(M, N, dtype=half)
        matmul_kernel[lambda meta: (triton.cdiv(M, meta["BM"]) * triton.cdiv(N, meta["BN"]),)](
            a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), ACTIVATION=activation)  # fmt: skip
        want = a.double() @ b.double()
        want = torch.where(want >= 0, want, 0.01 * want) if activation else want
        check(("product", M, N, K, dtype), c, want, 1e-3)
    assert len(matmul_kernel.cache) == 4 and matmul_kernel.best_config in matmul_kernel.configs


# ---- 04: dropout ----------------------------------------------------------------------------------------------------


@triton.jit
def dropout_kernel(x_ptr, keep_ptr, out_ptr, count, p, BLOCK: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.load(keep_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.where(keep != 0, x / (1 - p), 0.0), mask=mask)


@triton.jit
def seeded_dropout_kernel(x_ptr, out_ptr, count, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.rand(seed, offsets) > p
    tl.store(out_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)


@group
def dropout():
    count, p = 1500, 0.5
    x, out = torch.randn(count, device=DEVICE), torch.empty(count)
    keep = (torch.rand(count) > p).to(torch.int32)
    dropout_kernel[(2,)](x, keep, out, count, p, BLOCK=1024)
    check("dropout", out, torch.where(keep != 0, x / (1 - p), 0.0))
    for seed in (123, 512):
        seeded_dropout_kernel[(2,)](x, out, count, p, seed, BLOCK=1024)
        words = torch.tensor([philox(seed, i, 32)[0] for i in range(count)])
        words = torch.where(words >= 2**31, words - 2**32, words)
        keep = torch.where(words < 0, -words - 1, words).float() * torch.tensor(4.6566127342e-10) > p
        check(("seeded dropout", seed), out, torch.where(keep, x / (1 - p), 0.0))


# ---- 05: layer norm -------------------------------------------------------------------------------------------------


@triton.jit
def layer_norm_kernel(X, Y, W, B, Mean, Rstd, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    Y += row * stride
    X += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < N
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(Y + cols, (x - mean) * rstd * tl.load(W + cols, mask=mask) + tl.load(B + cols, mask=mask), mask=mask)


@triton.jit
def layer_norm_dx_kernel(DX, DY, DW, X, W, Mean, Rstd, Lock, stride, N, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    X += row * stride
    DY += row * stride
    DX += row * stride
    Lock += row % GROUP
    Count = Lock + GROUP
    DW = DW + row % GROUP * N + cols
    x = tl.load(X + cols, mask=mask, other=0).to(tl.float32)
    dy = tl.load(DY + cols, mask=mask, other=0).to(tl.float32)
    w = tl.load(W + cols, mask=mask).to(tl.float32)
    rstd = tl.load(Rstd + row)
    xhat = tl.where(mask, (x - tl.load(Mean + row)) * rstd, 0.0)
    wdy = tl.where(mask, w * dy, 0.0)
    c1 = tl.sum(xhat * wdy, axis=0) / N
    c2 = tl.sum(wdy, axis=0) / N
    tl.store(DX + cols, (wdy - (xhat * c1 + c2)) * rstd, mask=mask)
    dw = dy * xhat
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    count = tl.load(Count)
    if count == 0:  # the first adds to nothing
        tl.atomic_xchg(Count, 1)
    else:
        dw += tl.load(DW, mask=mask)
    tl.store(DW, dw, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(Lock, 0)


@group
def layer_norm():
    torch.set_num_threads(2)
    for (M, N), dtype in (((151, 1000), torch.float16), ((5, 64), torch.float32), ((3, 1), torch.float32)):
        x, dy = -2.3 + 0.5 * torch.randn(M, N), 0.1 * torch.randn(M, N)
        w, b = torch.rand(N), torch.rand(N)
        x, dy, w, b = (t.to(dtype) for t in (x, dy, w, b))
        y, mean, rstd = torch.empty_like(x), torch.empty(M), torch.empty(M)
        for block in (64, triton.next_power_of_2(N)):
            layer_norm_kernel[(M,)](x, y, w, b, mean, rstd, x.stride(0), N, 1e-5, BLOCK=block, num_warps=4, num_ctas=1)
            exact = [t.double().requires_grad_() for t in (x, w, b)]
            want = torch.nn.functional.layer_norm(exact[0], (N,), exact[1], exact[2], 1e-5)
            check(("forward", M, N, dtype, block), y, want, 1e-3 if dtype == torch.float16 else 1e-5)
            check("mean", mean, x.double().mean(1), 1e-6)
        want.backward(dy.double())
        groups = 4
        dx, partial = torch.empty_like(x), torch.full((groups, N), float("nan"))
        locks = torch.zeros(2 * groups, dtype=torch.int32)
        layer_norm_dx_kernel[(M,)](dx, dy, partial, x, w, mean, rstd, locks, x.stride(0), N, GROUP=groups,
                                   BLOCK=triton.next_power_of_2(N))  # fmt: skip
        check(("input gradient", M, N), dx, exact[0].grad, 1e-3 if dtype == torch.float16 else 1e-4)
        check(("weight gradient", M, N), partial[: min(M, groups)].sum(0), exact[1].grad, 1e-4)


# ---- 06: attention --------------------------------------------------------------------------------------------------


@triton.jit
def attend(total, weight, largest, q, k_ptr, v_ptr, first, last, scale, rows, CAUSAL: tl.constexpr, BN: tl.constexpr,
           D: tl.constexpr):  # fmt: skip
    d = tl.arange(0, D)
    for start in tl.range(first, last, BN, warp_specialize=False):
        start = tl.multiple_of(start, BN)
        n = start + tl.arange(0, BN)
        scores = tl.dot(q, tl.load(k_ptr + n[None, :] * D + d[:, None])) * scale
        if CAUSAL:
            scores += tl.where(rows[:, None] >= n[None, :], 0, -1.0e6)
        new = tl.maximum(largest, tl.max(scores, 1))
        p = tl.math.exp2(scores - new[:, None])
        alpha = tl.math.exp2(largest - new)
        v = tl.load(v_ptr + n[:, None] * D + d[None, :])
        total = tl.dot(p.to(v.dtype), v, total * alpha[:, None])
        weight = weight * alpha + tl.sum(p, 1)
        largest = new
    return total, weight, largest


@triton.jit
def attention_kernel(Q, K, V, O, L, scale, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
                     CAUSAL: tl.constexpr):  # fmt: skip
    start, head = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64)
    rows, d = start + tl.arange(0, BM), tl.arange(0, D)
    here = head * N * D
    q = tl.load(Q + here + rows[:, None] * D + d[None, :])
    largest = tl.zeros([BM], tl.float32) - float("inf")
    weight, total = tl.zeros([BM], tl.float32), tl.zeros([BM, D], tl.float32)
    scale *= 1.44269504
    whole = start if CAUSAL else N
    total, weight, largest = attend(total, weight, largest, q, K + here, V + here, 0, whole, scale, rows, False, BN, D)
    if CAUSAL:
        total, weight, largest = attend(total, weight, largest, q, K + here, V + here, start, start + BM, scale, rows,
                                        True, BN, D)  # fmt: skip
    tl.store(L + head * N + rows, largest + tl.math.log2(weight))
    tl.store(O + here + rows[:, None] * D + d[None, :], (total / weight[:, None]).to(O.dtype.element_ty))


@group
def attention():
    H, N, D, scale = 3, 128, 64, 0.5
    for dtype, near in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        for causal in (False, True):
            q, k, v = torch.randn(3, H, N, D).to(dtype)
            o, l = torch.empty(H, N, D, dtype=dtype), torch.empty(H, N)
            attention_kernel[(N // 64, H)](q, k, v, o, l, scale, N=N, BM=64, BN=32, D=D, CAUSAL=causal, num_stages=3)
            scores = q.double() @ k.double().mT * scale
            if causal:
                scores = scores.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -float("inf"))
            check(("attention", dtype, causal), o, scores.softmax(-1) @ v.double(), near)
            check(("its sums", dtype, causal), l, scores.logsumexp(-1) / torch.tensor(2.0).double().log(), 1e-3)


# ---- 08: products of several sizes, by pointers in memory -----------------------------------------------------------


@triton.jit
def grouped_kernel(a_ptrs, b_ptrs, c_ptrs, sizes, groups, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tile = tl.program_id(0)
    before = 0
    for g in range(groups):
        M, N, K = tl.load(sizes + g * 3), tl.load(sizes + g * 3 + 1), tl.load(sizes + g * 3 + 2)
        across = tl.cdiv(N, BN)
        count = tl.cdiv(M, BM) * across
        while tile >= before and tile < before + count:
            a = tl.load(a_ptrs + g).to(tl.pointer_type(tl.float16))
            b = tl.load(b_ptrs + g).to(tl.pointer_type(tl.float16))
            c = tl.load(c_ptrs + g).to(tl.pointer_type(tl.float16))
            m = (tile - before) // across * BM + tl.arange(0, BM)
            n = (tile - before) % across * BN + tl.arange(0, BN)
            k = tl.arange(0, BK)
            a = a + m[:, None] * K + k[None, :]
            b = b + k[:, None] * N + n[None, :]
            total = tl.zeros((BM, BN), tl.float32)
            for _ in range(0, tl.cdiv(K, BK)):
                total += tl.dot(tl.load(a), tl.load(b))
                a += BK
                b += BK * N
            tl.store(c + m[:, None] * N + n[None, :], total.to(tl.float16))
            tile += tl.num_programs(0)
        before += count


@group
def grouped_products():
    sizes = [(64, 32, 64), (32, 96, 32), (128, 64, 96)]
    a, b = ([torch.randn(s[i], s[j]).half() for s in sizes] for i, j in ((0, 2), (2, 1)))
    c = [torch.empty(M, N).half() for M, N, _ in sizes]
    places = [torch.tensor([t.data_ptr() for t in tensors]) for tensors in (a, b, c)]
    grouped_kernel[(5,)](*places, torch.tensor(sizes, dtype=torch.int32), 3, BM=32, BN=32, BK=32)
    for x, y, z in zip(a, b, c):
        check("grouped products", z, x.double() @ y.double(), 1e-3)


# ---- fla-core: kernels that no one here wrote -----------------------------------------------------------------------


@group
def fla_core():
    from fla.modules import FusedRMSNormGated
    from fla.modules.l2norm import l2norm
    from fla.ops.kda import fused_recurrent_kda

    for H, HV, D, dtype, near in ((2, 2, 64, torch.float32, 1e-5), (2, 4, 128, torch.bfloat16, 2e-2)):
        B, T = 2, 19
        q, k = torch.randn(2, B, T, H, D).to(dtype)
        v, g, beta = torch.randn(B, T, HV, D).to(dtype), -torch.rand(B, T, HV, D), torch.rand(B, T, HV).to(dtype)
        state = torch.randn(B, HV, D, D)
        o, final = fused_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True,
                                       use_qk_l2norm_in_kernel=True)  # fmt: skip
        s, rows = state.double(), []
        for t in range(T):
            unit = [torch.nn.functional.normalize(x[:, t].double(), dim=-1) for x in (q, k)]
            qt, kt = (x.repeat_interleave(HV // H, 1) for x in unit)
            s = s * g[:, t].double().exp()[..., None]
            change = (v[:, t].double() - torch.einsum("bhk,bhkv->bhv", kt, s)) * beta[:, t].double()[..., None]
            s = s + torch.einsum("bhk,bhv->bhkv", kt, change)
            rows.append(torch.einsum("bhk,bhkv->bhv", qt, s) * D**-0.5)
        check(("fused_recurrent_kda", dtype), o, torch.stack(rows, 1), near)
        check(("fused_recurrent_kda, state", dtype), final, s, near)
    cases = (((3, 7, 64), torch.float32, "swish", torch.nn.functional.silu, 1e-5),
             ((130, 100), torch.bfloat16, "sigmoid", torch.sigmoid, 2e-2))  # fmt: skip
    for shape, dtype, activation, function, near in cases:
        x, gate = torch.randn(2, *shape).to(dtype)
        check(("l2norm", shape, dtype), l2norm(x), torch.nn.functional.normalize(x.double(), dim=-1), near)
        norm = FusedRMSNormGated(shape[-1], activation=activation, eps=1e-5).to(dtype)
        with torch.no_grad():
            norm.weight.copy_(torch.rand(shape[-1]))
            got = norm(x, gate)
        x = x.double()
        want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight.double()
        check(("gated norm", shape, activation, dtype), got, want * function(gate.double()), near)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(name)
        print(name)
