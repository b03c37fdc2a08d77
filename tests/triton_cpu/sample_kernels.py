# SPDX-License-Identifier: Apache-2.0
"""Kernels that hold every form of TTIR, and what each is compiled for. `python sample_kernels.py` prints their TTIR."""

import json

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask, other=float("inf")), mask=mask)


@triton.jit
def early_return(x, n):
    pid = tl.program_id(0)
    if pid >= n:
        return
    value = tl.load(x + pid)
    if value < 0:
        tl.store(x + pid, -value)
        return
    tl.store(x + pid, value * 2)


@triton.jit
def both(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit(noinline=True)
def larger_first(x, y):
    if x > y:
        return x * 2, y
    return y * 2, x


@triton.jit
def regions(x, y, z, h, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i).to(tl.float32)
    b = tl.load(y + i)
    s, t = tl.associative_scan((a, b), 0, both)
    m, where = tl.max(a, axis=0, return_indices=True)
    r, q = tl.reduce((a, b), 0, both)
    j = 0
    acc = tl.zeros((BLOCK,), tl.float32)
    while j < n:
        acc += s * j
        j += 1
        if j % 3 == 0:
            acc = acc * 2
        else:
            acc = acc - a
    for k in range(n):
        for step in tl.range(0, k, 2, num_stages=3):
            acc += step
        if k > 2:
            tl.store(z, k)
    u, v = larger_first(n, j)
    tl.store(h, u + v)
    tl.store(z + i, acc + t + m + where + r + q)
    tl.store(z + i, tl.cumsum(a, 0, reverse=True) + tl.xor_sum(b, 0))


@triton.jit
def larger(x, y):
    if x > y:
        return x
    return y


@triton.jit
def others(x, y, z, h, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i).to(tl.float32)
    b = tl.load(y + i)
    tl.atomic_add(z + i, a, mask=i < n)
    tl.atomic_cas(h + 0, n, 3)
    tl.atomic_max(h + 1, n, sem="relaxed", scope="cta")
    tl.device_print('a "quoted" ', a, n)
    tl.device_print("bare")
    tl.device_assert(n > 0, 'n must be > 0: "x" @ loc(')
    tl.store(h + tl.arange(0, 16), tl.histogram(b, 16))
    left, right = tl.split(tl.reshape(a, (BLOCK // 2, 2)))
    pairs = tl.reshape(tl.permute(tl.join(left, right), (1, 0)), (BLOCK,))
    tl.store(z + i, pairs + tl.gather(a, b, 0) + tl.sort(a))
    tl.store(z + i, tl.erf(a) + tl.clamp(a, -1.0, 2.0) + tl.fma(a, a, a) + tl.umulhi(b, b) + tl.floor(a))
    word = tl.inline_asm_elementwise("mov $0, 1; // x", "=r", [], tl.int32, False, 1)
    tl.store(z + i, tl.map_elementwise(larger, a, a) + word)
    tl.store(z + i, tl.sqrt_rn(a) + tl.div_rn(a, a) + tl.abs(a) + tl.abs(b) + libdevice.tanh(a))
    tl.debug_barrier()


@triton.jit
def types(b16, h16, f64, i8, i1, u32, i64, f8, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(b16 + i)
    tl.store(h16 + i, (a.to(tl.float32) * 0.1).to(tl.float16) + tl.load(h16 + i, mask=i < 3, other=-float("inf")))
    tl.store(f64 + i, tl.load(f64 + i, mask=i < 3, other=float("nan")) + 1e-300)
    e = tl.load(i8 + i)
    tl.store(i8 + i, (e // 3) * 2 + (e % 5) - (e >> 1) ^ (e << 1))
    tl.store(i1 + i, tl.load(i1 + i) ^ (e > 0))
    u = tl.load(u32 + i)
    tl.store(u32 + i, u // 7 + (u >> 3) + u % 3, cache_modifier=".cg", eviction_policy="evict_first")
    tl.store(i64 + i, tl.load(i64 + i) * 0x7FFFFFFFFFFF + u)
    tl.store(f8 + i, (tl.load(f8 + i).to(tl.float32) + 1).to(tl.float8e5))
    tl.store(b16 + i, a.to(tl.int16, bitcast=True).to(tl.bfloat16, bitcast=True) * 3.0)
    tl.store(b16.to(tl.int64).to(tl.pointer_type(tl.float32)), 1.0)
    product = tl.dot(tl.full((16, 32), 1, tl.int8), tl.full((32, 16), 2, tl.int8))
    tl.store(u32 + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], product)
    tl.store(f64, tl.sum(tl.sum(tl.dot(tl.zeros((4, 4), tl.float32), tl.zeros((4, 4), tl.float32)), 0), 0))


@triton.jit
def descriptors(x, made, M, N, BM: tl.constexpr, BN: tl.constexpr):
    d = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    made.store([0, 0], d.load([tl.program_id(0) * BM, tl.program_id(1) * BN]) * 2)


@triton.jit
def tuples(t, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(t[1] + i, tl.load(t[0] + i) + t[2] + n)


SAMPLES = {
    "add": (add, dict(x="*fp32", y="*fp32", out="*fp32", n="i32"), dict(BLOCK=1024)),
    "early_return": (early_return, dict(x="*i32", n="i32"), {}),
    "regions": (regions, dict(x="*bf16", y="*i32", z="*fp32", h="*i32", n="i32"), dict(BLOCK=32)),
    "others": (others, dict(x="*bf16", y="*i32", z="*fp32", h="*i32", n="i32"), dict(BLOCK=32)),
    "types": (types, dict(b16="*bf16", h16="*fp16", f64="*fp64", i8="*i8", i1="*i1", u32="*u32", i64="*i64",
                          f8="*fp8e5"), dict(BLOCK=16)),
    "descriptors": (descriptors, dict(x="*fp32", made="tensordesc<fp32[8, 16]>", M="i32", N="i32"),
                    dict(BM=8, BN=16)),
    "tuples": (tuples, dict(t=("*fp32", "*fp32", "fp32"), n="i32"), dict(BLOCK=16)),
}  # fmt: skip


def ttir(name: str) -> dict:
    """A sample's TTIR with and without locations, and what Triton's own walk over it sees."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kda.triton_cpu.compiler import CPUBackend

    function, signature, constants = SAMPLES[name]
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    attributes = {(0,): [["tt.divisibility", 16]]} if name == "add" else {}
    backend = CPUBackend(GPUTarget("cpu", "generic", 1))
    options = backend.parse_options({"debug": True})
    context = ir.context()
    ir.load_dialects(context)
    module = ASTSource(function, signature, constants, attributes).make_ir(
        backend.target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    module = backend.make_ttir(module, {}, options)
    seen: list = []
    module.walk(lambda op: seen.append((op.get_name(), op.get_num_operands(), op.get_num_results())))
    return {"text": str(module), "bare": module.str_nodebug(), "seen": seen}


if __name__ == "__main__":
    print(json.dumps({name: ttir(name) for name in SAMPLES}))
