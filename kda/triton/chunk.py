# SPDX-License-Identifier: Apache-2.0
"""Chunked delta rule (prefill), cut in kernels where the parallelism changes; contract.md section 2.

Inside a chunk of C tokens, with y the log decays, G their inclusive cumulative sum, b = beta, k and q as they came, and S
[V, K] the state that enters:

    A[i, j] = c_i sum_k k_i k_j exp(G_i - G_j)  (i > j)      a = b / |k|      P[i, j] = sum_k q_i k_j exp(G_i - G_j)  (i >= j)
    M = (I + A)^-1                                           c = a / |k|      R = scale / |q| P M diag(a)
    w = diag(c) k exp(G)        x = M^T (k exp(G_last - G))                   z = scale / |q| (q exp(G) - P M w)

    e = diag(a) v - w S^T       o = R v + z S^T              S' = S exp(G_last) + e^T x

`chunk_intra_kernel` computes diag(a), R, w, z and x for every chunk at once (one program a chunk and value head); walk.py
carries S through the chunks of a sequence. Only e stands between one state and the next. Without l2 norm |k| = |q| = 1.

The inverse could as well multiply v and w. But of nearly equal keys with beta 1 each value takes the place of the one
before, so that sums over tokens are sums of differences, and the roundings of each token's key and value would add up.
Here differences are taken between keys, in two halves: rows of x are small but for the last one, which is k itself, as
norms are left to e, and so a bf16 number. For the same reason columns of A and P come from products of halves.

No exponential can overflow, however negative a gate is: pairs (i, j) are split into levels h = 1, 2, 4, .., C/2. At
level h, i lies in the odd and j in the even half of a block of 2h tokens, and

    G_i - G_j = (sum of y from the odd half's start to i) + (sum of y after j to the even half's end)

so both factors are exp of a sum that is never positive for a decaying gate. The inverse is built up by the same levels:
M_2h = M_h - M_h A_h M_h, with A_h the entries of A at level h. Under a gate with a lower bound that C tokens cannot
take out of the range of fp32, k exp(G) and k exp(-G) serve all pairs at once, as they do on a CPU in any chunk whose decays
stay in that range.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda.triton import configs, walk
from kda.triton.launch import Launch, Scratch
from kda.triton.tiles import (
    cast, dot, find_sequence, fine_dot, halves, level_pairs, log_decay, row, sequence_range, sign_dot,
    unit_triangular_inverse,
)  # fmt: skip

LOG2E = tl.constexpr(1.4426950408889634)
RANGE = tl.constexpr(58.0)  # where all decays of a chunk fit 2**-118 .. 1, this centres exp(-G) in the range of fp32


@triton.jit
def two_halves(x, dt: tl.constexpr):
    """What stands for an fp32 tile in products of `dt`: two bf16 halves, or itself and something to ignore."""
    if dt == tl.bfloat16:
        return halves(x)
    else:
        return x, x


@triton.jit
def product_of_halves(a, b, acc, PRECISION: tl.constexpr, dt: tl.constexpr):
    """acc + a @ b for an fp32 `a`, which bf16 products take in two halves."""
    if dt == tl.bfloat16:
        head, rest = halves(a)
        return dot(head, b, dot(rest, b, acc, PRECISION), PRECISION)
    else:
        return dot(a, b, acc, PRECISION)


@triton.jit
def product_with_halves(a, head, rest, acc, PRECISION: tl.constexpr):
    """acc + a @ (head + rest), what `two_halves` made of a tile."""
    if head.dtype == tl.bfloat16:
        acc = dot(a, rest, acc, PRECISION)
    return dot(a, head, acc, PRECISION)


@triton.jit
def level_products(q, k, y, HALF: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr):
    """sum_k k_i k_j exp(G_i - G_j) and the same with q_i, for the pairs (i, j) of level HALF; zero elsewhere."""
    C: tl.constexpr = q.shape[0]
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    odd = i // HALF % 2 == 1
    sums = tl.where((i // HALF == j // HALF) & tl.where(odd, j <= i, j > i), 1.0, 0.0)
    e = tl.exp2(sign_dot(sums, y, SPLIT, PRECISION))  # [C, K]
    q, k = q * e, k * e
    pairs = level_pairs(i, j, HALF)
    kk = tl.where(pairs, fine_dot(k, tl.trans(k), dt == tl.bfloat16, PRECISION), 0.0)
    return kk, tl.where(pairs, fine_dot(q, tl.trans(k), dt == tl.bfloat16, PRECISION), 0.0)


@triton.jit
def products_by_levels(q, k, y, SPLIT: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr):
    """For any gate: both products [C, C]; q exp(G), k exp(G), and what makes up k exp(G_last - G) [C, K], two halves and
    a factor of their columns; exp(G_last) [K]."""
    C: tl.constexpr = q.shape[0]
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    y = tl.where(y < -1e4, -1e4, y)  # exp2 is zero long before; keeps -inf out of the sums, and a NaN a NaN
    kk, qk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for level in tl.static_range(0, 6):
        if (1 << level) < C:
            kk_h, qk_h = level_products(q, k, y, 1 << level, SPLIT, PRECISION, dt)
            kk += kk_h
            qk += qk_h
    up = tl.exp2(sign_dot(tl.where(s <= r, 1.0, 0.0), y, SPLIT, PRECISION))
    down = tl.exp2(sign_dot(tl.where(s > r, 1.0, 0.0), y, SPLIT, PRECISION))
    head, rest = two_halves(k * down, dt)
    one = tl.full([y.shape[1]], 1.0, tl.float32)
    return kk, qk, cast(q * up, dt), cast(k * up, dt), head, rest, one, row(up, C - 1)


@triton.jit
def products_at_once(q, k, y, SPLIT: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr):
    """The same for a gate with a lower bound, such that exp(-G) stays within 2**-RANGE .. 2**60."""
    C: tl.constexpr = q.shape[0]
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    G = sign_dot(tl.where(s <= r, 1.0, 0.0), y, SPLIT, PRECISION)
    up = tl.exp2(G)
    q_up, k_up = cast(q * up, dt), cast(k * up, dt)
    head, rest = two_halves(k * tl.exp2(-G - RANGE), dt)
    kk = tl.where(r > s, product_with_halves(k_up, tl.trans(head), tl.trans(rest), None, PRECISION), 0.0)
    qk = tl.where(r > s, product_with_halves(q_up, tl.trans(head), tl.trans(rest), None, PRECISION), 0.0)
    decay = tl.exp2(tl.min(G, 0))  # G falls from row to row
    back = tl.exp2(tl.zeros([1], tl.float32) + RANGE)
    return kk * back, qk * back, q_up, k_up, head, rest, decay * back, decay


@triton.jit
def part_of_channels(
    q_ptr, k_ptr, g_ptr, bias_ptr, live, A, lower_bound, decay_ptr, q_t, k_t, g_t,
    K: tl.constexpr, K0: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, AT_ONCE: tl.constexpr,
    RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr,
):  # fmt: skip
    """Of channels K0 .. K0 + BP - 1: k k^T and q k^T with decays [C, C], sums q k, q q and k k [C], and q exp(G),
    k exp(G) [C, BP] and what makes up k exp(G_last - G); stores the decays."""
    i, o_k = tl.arange(0, C), K0 + tl.arange(0, BP)
    t, m = i.to(tl.int64)[:, None], live[:, None] & (o_k < K)[None, :]
    q = tl.load(q_ptr + t * q_t + o_k[None, :], m, 0.0).to(dt)
    k = tl.load(k_ptr + t * k_t + o_k[None, :], m, 0.0).to(dt)
    y = tl.load(g_ptr + t * g_t + o_k[None, :], m, 0.0).to(tl.float32)  # becomes log2 of the decays
    if RAW_GATE:
        if HAS_BIAS:
            y += tl.load(bias_ptr + o_k, o_k < K, 0.0).to(tl.float32)[None, :]
        y = tl.where(live[:, None], log_decay(y, A, lower_bound * LOG2E, 1.0, 20.0, BOUNDED), 0.0)
    if not BOUNDED:
        y *= LOG2E
    # A product with the identity brings tiles into the layout of products, however they were loaded: sums over their
    # rows then have one order, whatever the inputs' alignment in memory.
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(dt)
    q, k = dot(one, q, None, PRECISION), dot(one, k, None, PRECISION)
    if AT_ONCE == "as decays are":
        if (tl.min(tl.sum(y, 0), 0) >= -2 * RANGE) & (tl.max(tl.max(y, 1), 0) <= 0.0):
            kk, qk, q_up, k_up, head, rest, factor, decay = products_at_once(q, k, y, SPLIT, PRECISION, dt)
        else:
            kk, qk, q_up, k_up, head, rest, factor, decay = products_by_levels(q, k, y, SPLIT, PRECISION, dt)
    elif AT_ONCE == "always":
        kk, qk, q_up, k_up, head, rest, factor, decay = products_at_once(q, k, y, SPLIT, PRECISION, dt)
    else:
        kk, qk, q_up, k_up, head, rest, factor, decay = products_by_levels(q, k, y, SPLIT, PRECISION, dt)
    tl.store(decay_ptr + o_k, decay, o_k < K)
    return kk, qk, tl.sum(q * k, 1), tl.sum(q * q, 1), tl.sum(k * k, 1), (q_up, k_up, head, rest, factor)


@triton.jit
def store_x(tile, X, head, rest, factor, K: tl.constexpr, K0: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr):
    """x of channels K0 and on: X [C, C] by keys in two halves, times a factor of their columns."""
    C: tl.constexpr = head.shape[0]
    i, o_k = tl.arange(0, C), K0 + tl.arange(0, head.shape[1])
    x = product_of_halves(X, head, None, PRECISION, dt)
    if dt == tl.bfloat16:
        x = dot(halves(X)[0], rest, x, PRECISION)
    tl.store(tile + i[:, None] * K + o_k[None, :], cast(x * factor[None, :], dt), (i < C)[:, None] & (o_k < K)[None, :])


@triton.jit
def store_wz(
    tiles, W, R, q_up, k_up, q_inv, K: tl.constexpr, K0: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr
):  # fmt: skip
    """-w and z of channels K0 and on, from products of W and R [C, C] with k exp(G)."""
    C: tl.constexpr = k_up.shape[0]
    i, o_k = tl.arange(0, C), K0 + tl.arange(0, k_up.shape[1])
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(dt)
    w = product_of_halves(W, k_up, None, PRECISION, dt)
    z = product_of_halves(R, k_up, dot(one, q_up, None, PRECISION), PRECISION, dt) * q_inv[:, None]
    o_ck, m_ck = i[:, None] * K + o_k[None, :], (i < C)[:, None] & (o_k < K)[None, :]
    tl.store(tiles + o_ck, cast(w, dt), m_ck)
    tl.store(tiles + C * K + o_ck, cast(z, dt), m_ck)


@triton.jit
def store_ar(tile, x, dt: tl.constexpr):
    """diag(a) or R [C, C]; in bf16 two halves side by side."""
    C: tl.constexpr = x.shape[0]
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if dt == tl.bfloat16:
        head, rest = halves(x)
        tl.store(tile + i * (2 * C) + j, head)
        tl.store(tile + i * (2 * C) + C + j, rest)
    else:
        tl.store(tile + i * C + j, x)


@triton.jit(do_not_specialize=["T", "N", "NC"])
def chunk_intra_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, bias_ptr, cu_seqlens,  # inputs
    tiles_ptr,  # [slots, HV, ..]: -w, z, x [C, K], diag(a), R [C, C] (or with their rests [C, 2 C])
    decay_ptr,  # [slots, HV, K] fp32: exp(G_last)
    out_ptr,
    scale, lower_bound, T, N, NC,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, out_t, out_h,  # strides
    H: tl.constexpr, HV: tl.constexpr, HA: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, AT_ONCE: tl.constexpr, PARTS: tl.constexpr,
    IS_VARLEN: tl.constexpr, L2NORM: tl.constexpr, HAS_BETA: tl.constexpr, SIGMOID_BETA: tl.constexpr,
    RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr, ZERO_TAIL: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    slot, hv = pid // HV, pid % HV
    h = hv // (HV // H)
    i = tl.arange(0, C)
    if IS_VARLEN:
        seq, chunk = find_sequence(cu_seqlens, slot, N, T, C)
        bos, eos = sequence_range(cu_seqlens, seq, N, T)
        batch, t0, length = seq * 0, bos + chunk * C, eos - bos - chunk * C
        if seq == N:  # the tail that belongs to no sequence
            if ZERO_TAIL:
                o_v = tl.arange(0, BV)
                for v0 in tl.static_range(0, V, BV):
                    rows = out_ptr + (t0 + i)[:, None] * out_t + hv * out_h + (v0 + o_v)[None, :]
                    m_tail = (i < length)[:, None] & (v0 + o_v < V)[None, :]
                    tl.store(rows, tl.zeros([C, BV], out_ptr.dtype.element_ty), m_tail)
            return
    else:
        batch, t0 = slot // NC, slot % NC * C
        length = T - t0
    if length <= 0:
        return

    dt = tiles_ptr.dtype.element_ty
    t, live = t0 + i, i < length  # rows past the sequence's end are zero
    r, s = i[:, None], i[None, :]
    q_ptr += batch * q_b + t0 * q_t + h * q_h
    k_ptr += batch * k_b + t0 * k_t + h * k_h
    g_ptr += batch * g_b + t0 * g_t + hv * g_h
    amplitude = 0.0
    if RAW_GATE:
        h_a = hv // (HV // HA)
        amplitude = tl.exp(tl.load(A_log_ptr + h_a).to(tl.float32))
        if HAS_BIAS:
            bias_ptr += h_a * K
    if HAS_BETA:
        b = tl.load(beta_ptr + batch * beta_b + t * beta_t + hv, live, 0.0).to(tl.float32)
        if SIGMOID_BETA:
            b = tl.sigmoid(b)
    else:
        b = tl.where(live, 1.0, 0.0)

    CW: tl.constexpr = 2 * C if dt == tl.bfloat16 else C
    tiles = tiles_ptr + pid * (3 * C * K + 2 * C * CW)
    decay_ptr += pid * K
    BP: tl.constexpr = BK // PARTS
    of_parts = ()
    for part in tl.static_range(PARTS):
        of_part = part_of_channels(
            q_ptr, k_ptr, g_ptr, bias_ptr, live, amplitude, lower_bound, decay_ptr, q_t, k_t, g_t,
            K, part * BP, BP, C, AT_ONCE, RAW_GATE, HAS_BIAS, BOUNDED, SPLIT, PRECISION, dt,
        )  # fmt: skip
        of_parts += (of_part[5],)
        if part == 0:
            A, P, p, qq, kk = of_part[0], of_part[1], of_part[2], of_part[3], of_part[4]
        else:
            A, P, p, qq, kk = A + of_part[0], P + of_part[1], p + of_part[2], qq + of_part[3], kk + of_part[4]
    if L2NORM:
        q_inv, k_inv = scale / tl.sqrt(qq + 1e-6), 1.0 / tl.sqrt(kk + 1e-6)
    else:
        q_inv, k_inv = qq * 0.0 + scale, kk * 0.0 + 1.0
    a, c = b * k_inv, b * k_inv * k_inv
    M = tl.where(r > s, unit_triangular_inverse(A * c[:, None], C, SPLIT, PRECISION), 0.0)
    X = tl.trans(tl.where(r == s, 1.0, M))
    for part in tl.static_range(PARTS):
        _, _, head, rest, factor = of_parts[part]
        store_x(tiles + 2 * C * K, X, head, rest, factor, K, part * BP, PRECISION, dt)
    # The diagonal of P is p, in fp32; that of M is one.
    R = tl.where(r == s, p[:, None], P + fine_dot(P, M, SPLIT, PRECISION) + p[:, None] * M)
    store_ar(tiles + 3 * C * K, tl.where(r == s, a[:, None], 0.0), dt)
    store_ar(tiles + 3 * C * K + C * CW, R * a[None, :] * q_inv[:, None], dt)
    W, R = tl.where(r == s, -c[:, None], 0.0), R * -c[None, :]
    for part in tl.static_range(PARTS):
        store_wz(tiles, W, R, of_parts[part][0], of_parts[part][1], q_inv, K, part * BP, PRECISION, dt)


_intra = Launch(chunk_intra_kernel)


class Plan(NamedTuple):
    """What follows from shapes: for `parts` of sequences (or as many sequences) `slots` places of a chunk."""

    cfg: dict
    parts: int
    slots: int
    chunks: int  # of a sequence, where all are of one length
    segments: walk.Segments | None
    scratch: Scratch


def plan(
    B: int, T: int, K: int, HV: int, V: int, dtype, device, bounded: bool, sequences: int, parts: int | None
) -> Plan:  # fmt: skip
    """`parts` of `sequences`, None: a batch of B sequences that are not packed."""
    N = B if parts is None else parts
    cfg = configs.pick("chunk", N=N, HV=HV, K=K, V=V, T=T, dtype=dtype, device=device, bounded=bounded)
    C = cfg["C"]
    chunks = -(-T // C)
    slots = B * chunks if parts is None else T // C + parts
    # Products take bf16 operands where sums over many channels average their rounding out; else fp32 ones.
    half = dtype == torch.bfloat16 and K > 64
    segments = None
    if parts is None or parts == sequences:
        segments = walk.segments(sequences, HV, T, K, V, cfg, half, parts is not None, device)
    tile = 3 * C * K + C * C * (4 if half else 2)
    scratch = [((slots, HV, tile), torch.bfloat16 if half else torch.float32), ((slots, HV, K), torch.float32)]
    if segments is not None:
        scratch += [((segments.places, HV, rows, K), torch.float32) for rows in (V + K, V)]
    return Plan(cfg, N, slots, chunks, segments, Scratch(device, *scratch))


def find(
    seen, q, k, v, g, beta, A_log, g_bias, cu_seqlens, initial_state, out, final_state, indices=None, has_initial=None,
    memory=None, scratch=None, *marks,
) -> Callable[[], None] | None:  # fmt: skip
    """The launches as before for the same `seen`, of tensors or their addresses; None if that is not to be had.

    `scratch`: where in `memory` its scratch is to lie, else it allocates some. `marks`: slots and parts of
    walk.Checkpoints, whose offsets `cu_seqlens` then are.
    """
    found = None if seen is None else seen.launches.get("chunk")
    if found is None:
        return None
    if memory is None:
        memory = found.scratch.empty()
        scratch = found.scratch.addresses(memory)
    tiles, decays, *maps = scratch
    launches = [
        _intra.find(seen, (q, k, g, beta, A_log, g_bias, cu_seqlens, tiles, decays, out)),
        *walk.find(seen, tiles, decays, v, initial_state, cu_seqlens, out, final_state, maps, indices, has_initial, *marks),
    ]
    if None in launches:
        return None

    def launch(memory=memory) -> None:  # which has to last until then
        for one in launches:
            one()

    return launch


def chunk_kda(
    q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm, sigmoid_beta,
    A_log, g_bias, lower_bound, out, indices=None, has_initial=None, checkpoints=None, seen=None,
):  # fmt: skip
    """Launcher; the arguments as `kda.reference.chunk.chunk_kda` takes them. Returns (out, final_state or None).

    With `indices` and so on, which kda.triton.walk.walk explains, `initial_state` is a pool, written in place.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    fresh = out is None
    if fresh:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final_state = initial_state if indices is not None else None
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if indices is None and output_final_state:
        final_state = torch.empty(sequences, HV, V, K, dtype=torch.float32, device=v.device)
    marks = ()
    if checkpoints is not None:
        cu_seqlens, *marks = checkpoints
    states = (initial_state, out, final_state, indices, has_initial)
    launch = find(seen, q, k, v, g, beta, A_log, g_bias, cu_seqlens, *states, None, None, *marks)
    if launch is not None:
        launch()
        return out, final_state

    bounded, varlen = A_log is not None and lower_bound is not None, cu_seqlens is not None
    at_once = bounded and configs.CHUNK * abs(lower_bound) * 1.4427 <= 118  # exp2 of it times |k| fits fp32 and bf16
    made = plan(B, T, K, HV, V, q.dtype, q.device, at_once, sequences, cu_seqlens.numel() - 1 if varlen else None)
    if seen is not None:
        seen.launches["chunk"] = made
    cfg, N, slots, NC, _, scratch = made
    C, BK = cfg["C"], max(configs.next_power_of_2(K), 16)
    tiles, decays, *maps = scratch.tensors(scratch.empty())
    if T and HV:
        _intra(
            seen, (slots + varlen) * HV, (q, k, g, beta, A_log, g_bias, cu_seqlens, tiles, decays, out),
            (scale, lower_bound or 0.0, T, N, NC, *q.stride()[:3], *k.stride()[:3], *g.stride()[:3],
             *((0, 0) if beta is None else beta.stride()[:2]), *out.stride()[1:3]),
            H=H, HV=HV, HA=HV if A_log is None else A_log.numel(), K=K, V=V,
            C=C, BK=BK, BV=min(max(configs.next_power_of_2(V), 16), 64),
            AT_ONCE="always" if at_once else "as decays are" if q.device.type == "cpu" else "never",
            PARTS=cfg["PARTS"], IS_VARLEN=varlen, L2NORM=use_qk_l2norm, HAS_BETA=beta is not None,
            SIGMOID_BETA=sigmoid_beta, RAW_GATE=A_log is not None, HAS_BIAS=g_bias is not None, BOUNDED=bounded,
            ZERO_TAIL=fresh, SPLIT=q.dtype != torch.float32, PRECISION=cfg["PRECISION"],
            **cfg["intra"],
        )  # fmt: skip
    if N and HV:
        walk.walk(tiles, decays, v, initial_state, cu_seqlens, out, final_state, sequences, NC, K, cfg, made.segments,
                  maps, indices, has_initial, checkpoints, seen)  # fmt: skip
    return out, final_state
