# SPDX-License-Identifier: Apache-2.0
"""Tile helpers that several kernels share: token ranges, the gate, products, the state's tiles in decode."""
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 `x` in `dtype`, rounded to nearest even (Triton's interpreter would cut off the bits of a bf16)."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b, accumulated in fp32; PRECISION says how fp32 operands enter the product."""
    if INTERPRETED:  # Triton's interpreter would multiply the bit patterns of bf16 operands as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def sequence_range(cu_seqlens, n, N, T):
    """Tokens [bos, eos) of sequence `n`, clamped to [0, T); `n == N` is the tail that belongs to no sequence."""
    bos = tl.load(cu_seqlens + n).to(tl.int64)
    bos = tl.minimum(tl.maximum(bos, 0), T)
    eos = tl.load(cu_seqlens + n + 1, mask=n < N, other=0).to(tl.int64)
    eos = tl.where(n < N, tl.minimum(tl.maximum(eos, bos), T), T)
    return bos, eos


@triton.jit
def first_slot(cu_seqlens, n, T, BLOCK: tl.constexpr):
    """First chunk slot of sequence `n`: from one sequence to the next there is room for every (partial) chunk."""
    bos = tl.load(cu_seqlens + n).to(tl.int64)
    return tl.minimum(tl.maximum(bos, 0), T) // BLOCK + n


@triton.jit
def find_sequence(cu_seqlens, slot, N, T, BLOCK: tl.constexpr):
    """Which sequence and which chunk of it a chunk slot is, found by bisection on the device.

    Sequence `n` owns the slots from `cu_seqlens[n] // BLOCK + n` on, at least one and never fewer than its chunks, so
    `T // BLOCK + N + 1` slots hold every layout of N sequences in T tokens (and the tail behind them, n == N). The
    grid is thus known from shapes alone; a slot without a chunk returns a chunk index past its sequence's end.
    """
    lo = slot * 0
    hi = lo + N
    while lo < hi:
        mid = (lo + hi + 1) // 2
        if first_slot(cu_seqlens, mid, T, BLOCK) <= slot:
            lo = mid
        else:
            hi = mid - 1
    return lo, slot - first_slot(cu_seqlens, lo, T, BLOCK)


@triton.jit
def log1p(e):
    """log(1 + e), 0 <= e <= 1, also where u = 1 + e is rounded: log(u) / (u - 1) varies slowly there."""
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def log_decay(g, A, lower_bound, beta, threshold, BOUNDED: tl.constexpr):
    """Log decay y of raw gate values `g` (bias added) and amplitude `A = exp(A_log)`; contract.md section 2."""
    if BOUNDED:
        # lower_bound sigmoid(A g), in the fewest instructions of a GPU: exp2, and two factors for a division
        root = tl.rsqrt(1.0 + tl.exp2(g * (A * -1.4426950408889634)))
        return lower_bound * root * root
    else:
        z = beta * g
        softplus = (tl.maximum(z, 0.0) + log1p(tl.exp(-tl.abs(z)))) / beta
        return -A * tl.where(z > threshold, g, softplus)


@triton.jit
def silu(x):
    """x sigmoid(x), in the fewest instructions of a GPU: exp2, and two factors for a division."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * root * root


@triton.jit
def halves(x):
    """fp32 `x` as a bf16 head, cut off, and a bf16 rest: 16 bits of it."""
    head = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return cast(head, tl.bfloat16), cast(x - head, tl.bfloat16)


@triton.jit
def sign_dot(a, x, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """a @ x for a matrix `a` of 0, 1 and -1 and an fp32 `x`; SPLIT takes `x` in bf16 halves."""
    if SPLIT:
        a = a.to(tl.bfloat16)
        head, rest = halves(x)
        return dot(a, rest, dot(a, head, None, PRECISION), PRECISION)
    else:
        return dot(a, x, None, PRECISION)


@triton.jit
def fine_dot(a, x, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """a @ x in fp32, or with SPLIT from bf16 halves: 2**-16 relative, where TF32 would leave 2**-11."""
    if SPLIT:
        a_head, a_rest = halves(a)
        x_head, x_rest = halves(x)
        small = dot(a_head, x_rest, dot(a_rest, x_head, None, PRECISION), PRECISION)
        return dot(a_head, x_head, small, PRECISION)
    else:
        return dot(a, x, None, PRECISION)


@triton.jit
def row(x, i):
    """Row `i` of a tile [C, K]: a sum with one term, the same bits in any order."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0])[:, None] == i, x, 0.0), 0)


@triton.jit
def level_pairs(i, j, HALF: tl.constexpr):
    """Pairs (i, j) of level HALF: i in the odd, j in the even half of the same block of 2 * HALF."""
    return (i // HALF % 2 == 1) & (j // HALF == i // HALF - 1)


@triton.jit
def unit_triangular_inverse(A, C: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [C, C], C <= 64, block by block: M_2h = M_h - M_h A_h M_h."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    M = tl.where(i == j, 1.0, 0.0) - tl.where(level_pairs(i, j, 1), A, 0.0)
    for level in tl.static_range(1, 6):
        if (1 << level) < C:
            A_h = tl.where(level_pairs(i, j, 1 << level), A, 0.0)
            M -= fine_dot(M, fine_dot(A_h, M, SPLIT, PRECISION), SPLIT, PRECISION)
    return M


# Of two dims that are equally far apart in memory, which one a warp's lanes go along first depends on Triton: it is to be
# V and not the pieces of K, which a lane then adds up by itself.
PIECES_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))


@triton.jit
def state_tile(o_k, BV: tl.constexpr, KI: tl.constexpr):
    """Columns and rows of a state tile, [BV, BK] or, K in pieces, [BK / KI, BV, KI] or [BV, BK / KI, KI]."""
    BK: tl.constexpr = o_k.shape[0]
    o_v, piece, o_i = tl.arange(0, BV), tl.arange(0, BK // KI) * KI, tl.arange(0, KI)
    if KI == BK:
        return o_k[None, :], o_v[:, None]
    elif PIECES_FIRST:
        return piece[:, None, None] + o_i[None, None, :], o_v[None, :, None]
    else:
        return piece[None, :, None] + o_i[None, None, :], o_v[:, None, None]


@triton.jit
def along_k(x, KI: tl.constexpr):
    """[BK] as a factor of a state tile."""
    BK: tl.constexpr = x.shape[0]
    if KI == BK:
        return x[None, :]
    elif PIECES_FIRST:
        return tl.reshape(x, (BK // KI, 1, KI))
    else:
        return tl.reshape(x, (1, BK // KI, KI))


@triton.jit
def along_v(x, KI: tl.constexpr, BK: tl.constexpr):
    """[BV] as a factor of a state tile."""
    if KI == BK:
        return x[:, None]
    elif PIECES_FIRST:
        return x[None, :, None]
    else:
        return x[:, None, None]


@triton.jit
def sum_k(S, KI: tl.constexpr, BK: tl.constexpr):
    """[BV] sums over K of a state tile."""
    if KI == BK:
        return tl.sum(S, 1)
    elif PIECES_FIRST:
        return tl.sum(tl.sum(S, 0), 1)
    else:
        return tl.sum(tl.sum(S, 1), 1)
