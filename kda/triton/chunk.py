# SPDX-License-Identifier: Apache-2.0
"""Chunked delta rule (prefill), cut in kernels where the parallelism changes; contract.md section 2.

Inside a chunk of C tokens, with y the log decays, G their inclusive cumulative sum, b = beta and S [V, K] the state
that enters:

    A[i, j] = b_i sum_k k_i k_j exp(G_i - G_j)  (i > j)      P[i, j] = scale sum_k q_i k_j exp(G_i - G_j)  (i >= j)
    U = (I + A)^-1 diag(b)      w = U (k exp(G))             R = P U      z = scale q exp(G) - R (k exp(G))

    d = U v - w S^T      o = R v + z S^T      S' = S exp(G_last) + d^T (k exp(G_last - G))

`chunk_intra_kernel` computes U, R, w, z and the keys of the last product for every chunk at once (one program a chunk
and value head); walk.py carries S through the chunks of a sequence. Only d stands between one state and the next. k is
used as it came, its norm 1 / |k| kept in U, R and d: where nothing decays, keys then enter the products unrounded, and
errors of equal keys cancel as the keys do.

No exponential can overflow, however negative a gate is: pairs (i, j) are split into levels h = 1, 2, 4, .., C/2. At
level h, i lies in the odd and j in the even half of a block of 2h tokens, and

    G_i - G_j = (sum of y from the odd half's start to i) + (sum of y after j to the even half's end)

so both factors are exp of a sum that is never positive for a decaying gate. The inverse is built up by the same levels:
M_2h = M_h - M_h A_h M_h, with A_h the entries of A at level h. Under a gate with a lower bound that C tokens cannot
take out of the range of fp32, k exp(G) and k exp(-G) serve all pairs at once.
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
def level_products(q, k, y, HALF: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr):
    """sum_k k_i k_j exp(G_i - G_j) and the same with q_i, for the pairs (i, j) of level HALF; zero elsewhere."""
    C: tl.constexpr = q.shape[0]
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    odd = i // HALF % 2 == 1
    sums = tl.where((i // HALF == j // HALF) & tl.where(odd, j <= i, j > i), 1.0, 0.0)
    e = tl.exp2(sign_dot(sums, y, SPLIT, PRECISION))  # [C, K]
    rows = cast(k * e, dt)
    cols = tl.trans(rows)
    pairs = level_pairs(i, j, HALF)
    kk = tl.where(pairs, dot(rows, cols, None, PRECISION), 0.0)
    return kk, tl.where(pairs, dot(cast(q * e, dt), cols, None, PRECISION), 0.0)


@triton.jit
def products_by_levels(q, k, y, SPLIT: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr):
    """For any gate: both products [C, C], q exp(G), k exp(G) and k exp(G_last - G) [C, K], exp(G_last) [K]."""
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
    return kk, qk, cast(q * up, dt), cast(k * up, dt), k * down, row(up, C - 1)


@triton.jit
def products_at_once(q, k, y, SPLIT: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr):
    """The same for a gate with a lower bound, such that exp(-G) stays within 2**-RANGE .. 2**60."""
    C: tl.constexpr = q.shape[0]
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    G = sign_dot(tl.where(s <= r, 1.0, 0.0), y, SPLIT, PRECISION)
    up, k_down = tl.exp2(G), k * tl.exp2(-G - RANGE)
    q_up, k_up, cols = cast(q * up, dt), cast(k * up, dt), tl.trans(cast(k_down, dt))
    kk = tl.where(r > s, dot(k_up, cols, None, PRECISION), 0.0)
    qk = tl.where(r > s, dot(q_up, cols, None, PRECISION), 0.0)
    last = tl.min(G, 0)  # G falls from row to row
    back = tl.exp2(tl.zeros([1], tl.float32) + RANGE)
    return kk * back, qk * back, q_up, k_up, k_down * tl.exp2(last + RANGE)[None, :], tl.exp2(last)


@triton.jit
def part_of_channels(
    q_ptr, k_ptr, g_ptr, bias_ptr, live, A, lower_bound, kg_ptr, decay_ptr, q_t, k_t, g_t,
    K: tl.constexpr, K0: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, AT_ONCE: tl.constexpr,
    RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr,
):  # fmt: skip
    """Of channels K0 .. K0 + BP - 1: k k^T and q k^T with decays [C, C], sums q k, q q and k k [C], q exp(G) and
    k exp(G) [C, BP]; stores what the state takes."""
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
    if AT_ONCE:
        kk, qk, q_up, k_up, kg, decay = products_at_once(q, k, y, SPLIT, PRECISION, dt)
    else:
        kk, qk, q_up, k_up, kg, decay = products_by_levels(q, k, y, SPLIT, PRECISION, dt)
    tl.store(kg_ptr + i[:, None] * K + o_k[None, :], cast(kg, dt), (i < C)[:, None] & (o_k < K)[None, :])
    store_decay(decay_ptr + o_k, decay, o_k < K, K)
    return kk, qk, tl.sum(q * k, 1), tl.sum(q * q, 1), tl.sum(k * k, 1), q_up, k_up


@triton.jit
def store_wz(
    tiles, U, R, q_up, k_up, q_inv, K: tl.constexpr, K0: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr
):  # fmt: skip
    """w = U k_up and z = q_inv (q_up + R k_up) of channels K0 and on."""
    C: tl.constexpr = k_up.shape[0]
    i, o_k = tl.arange(0, C), K0 + tl.arange(0, k_up.shape[1])
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(dt)
    w = product_of_halves(U, k_up, None, PRECISION, dt)
    z = product_of_halves(R, k_up, dot(one, q_up, None, PRECISION), PRECISION, dt) * q_inv[:, None]
    o_ck, m_ck = i[:, None] * K + o_k[None, :], (i < C)[:, None] & (o_k < K)[None, :]
    tl.store(tiles + o_ck, cast(w, dt), m_ck)
    tl.store(tiles + C * K + o_ck, cast(z, dt), m_ck)


@triton.jit
def store_ur(tile, x, dt: tl.constexpr):
    """U or R [C, C]; in bf16 two halves side by side."""
    C: tl.constexpr = x.shape[0]
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if dt == tl.bfloat16:
        head, rest = halves(x)
        tl.store(tile + i * (2 * C) + j, head)
        tl.store(tile + i * (2 * C) + C + j, rest)
    else:
        tl.store(tile + i * C + j, x)


@triton.jit
def store_decay(decay_ptr, decay, m, K: tl.constexpr):
    """Of pointers [BP]: fp32, or three bf16 pieces in rows of K that add up to it."""
    if decay_ptr.dtype.element_ty == tl.bfloat16:
        head, rest = halves(decay)
        tl.store(decay_ptr, head, m)
        head, rest = halves(decay - head.to(tl.float32))
        tl.store(decay_ptr + K, head, m)
        tl.store(decay_ptr + 2 * K, rest, m)
    else:
        tl.store(decay_ptr, decay, m)


@triton.jit
def product_of_halves(a, b, acc, PRECISION: tl.constexpr, dt: tl.constexpr):
    """acc + a @ b for an fp32 `a`, which bf16 products take in two halves."""
    if dt == tl.bfloat16:
        head, rest = halves(a)
        return dot(head, b, dot(rest, b, acc, PRECISION), PRECISION)
    else:
        return dot(a, b, acc, PRECISION)


@triton.jit(do_not_specialize=["T", "N", "NC"])
def chunk_intra_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, bias_ptr, cu_seqlens,  # inputs
    tiles_ptr,  # [slots, HV, ..]: -w, z, k exp(G_last - G) [C, K], U, R [C, C] (or with their rests [C, 2 C])
    decay_ptr,  # [slots, HV, K] fp32 or [slots, HV, 3, K] bf16: exp(G_last)
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
        seq, c = find_sequence(cu_seqlens, slot, N, T, C)
        bos, eos = sequence_range(cu_seqlens, seq, N, T)
        batch, t0, length = seq * 0, bos + c * C, eos - bos - c * C
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
    a = 0.0
    if RAW_GATE:
        h_a = hv // (HV // HA)
        a = tl.exp(tl.load(A_log_ptr + h_a).to(tl.float32))
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
    decay_ptr += pid * (K if decay_ptr.dtype.element_ty == tl.float32 else 3 * K)
    BP: tl.constexpr = BK // PARTS
    q_up, k_up = (), ()
    for part in tl.static_range(PARTS):
        of_part = part_of_channels(
            q_ptr, k_ptr, g_ptr, bias_ptr, live, a, lower_bound, tiles + 2 * C * K, decay_ptr, q_t, k_t, g_t,
            K, part * BP, BP, C, AT_ONCE, RAW_GATE, HAS_BIAS, BOUNDED, SPLIT, PRECISION, dt,
        )  # fmt: skip
        q_up += (of_part[5],)
        k_up += (of_part[6],)
        if part == 0:
            A, P, p, qq, kk = of_part[0], of_part[1], of_part[2], of_part[3], of_part[4]
        else:
            A, P, p, qq, kk = A + of_part[0], P + of_part[1], p + of_part[2], qq + of_part[3], kk + of_part[4]
    if L2NORM:
        q_inv, k_inv = scale / tl.sqrt(qq + 1e-6), 1.0 / tl.sqrt(kk + 1e-6)
    else:
        q_inv, k_inv = qq * 0.0 + scale, kk * 0.0 + 1.0
    p *= k_inv  # the diagonal of P, in fp32; q_inv comes last everywhere

    A *= (b * k_inv)[:, None] * k_inv[None, :]
    P *= k_inv[None, :]
    M = tl.where(r > s, unit_triangular_inverse(A, C, SPLIT, PRECISION), 0.0)
    # What multiplies v: U with the norm that d carries, and R.
    R = tl.where(r == s, p[:, None], P + fine_dot(P, M, SPLIT, PRECISION) + p[:, None] * M) * b[None, :]
    U = tl.where(r == s, 1.0, M) * k_inv[:, None] * b[None, :]
    store_ur(tiles + 3 * C * K, U, dt)
    store_ur(tiles + 3 * C * K + C * CW, R * q_inv[:, None], dt)
    # What multiplies the state, through the keys; -w, to be added.
    U *= -k_inv[None, :]
    R *= -k_inv[None, :]
    for part in tl.static_range(PARTS):
        store_wz(tiles, U, R, q_up[part], k_up[part], q_inv, K, part * BP, PRECISION, dt)


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
    tile, decay = 3 * C * K + C * C * (4 if half else 2), cfg["PIECES"] * K
    scratch = [((slots, HV, tile), torch.bfloat16 if half else torch.float32),
               ((slots, HV, decay), torch.bfloat16 if cfg["PIECES"] > 1 else torch.float32)]  # fmt: skip
    if segments is not None:
        scratch += [((segments.places, HV, rows, K), torch.float32) for rows in (V + K, V)]
    return Plan(cfg, N, slots, chunks, segments, Scratch(device, *scratch))


def find(
    seen, q, k, v, g, beta, A_log, g_bias, cu_seqlens, initial_state, out, final_state, indices=None, has_initial=None,
    memory=None, scratch=None,
) -> Callable[[], None] | None:  # fmt: skip
    """The launches as before for the same `seen`, of tensors or their addresses; None if that is not to be had.

    `scratch`: where in `memory` its scratch is to lie, else it allocates some.
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
        *walk.find(seen, tiles, decays, v, initial_state, cu_seqlens, out, final_state, maps, indices, has_initial),
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
    if checkpoints is not None:
        cu_seqlens = checkpoints.offsets
    else:
        states = (initial_state, out, final_state, indices, has_initial)
        launch = find(seen, q, k, v, g, beta, A_log, g_bias, cu_seqlens, *states)
        if launch is not None:
            launch()
            return out, final_state

    bounded, varlen = A_log is not None and lower_bound is not None, cu_seqlens is not None
    at_once = bounded and configs.CHUNK * abs(lower_bound) * 1.4427 <= 118  # exp2 of it times |k| fits fp32 and bf16
    made = plan(B, T, K, HV, V, q.dtype, q.device, at_once, sequences, cu_seqlens.numel() - 1 if varlen else None)
    if seen is not None and checkpoints is None:
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
            C=C, BK=BK, BV=min(max(configs.next_power_of_2(V), 16), 64), AT_ONCE=at_once,
            PARTS=cfg["PARTS"], IS_VARLEN=varlen, L2NORM=use_qk_l2norm, HAS_BETA=beta is not None,
            SIGMOID_BETA=sigmoid_beta, RAW_GATE=A_log is not None, HAS_BIAS=g_bias is not None, BOUNDED=bounded,
            ZERO_TAIL=fresh, SPLIT=q.dtype != torch.float32, PRECISION=cfg["PRECISION"],
            **cfg["intra"],
        )  # fmt: skip
    if N and HV:
        walk.walk(tiles, decays, v, initial_state, cu_seqlens, out, final_state, sequences, NC, K, cfg, made.segments,
                  maps, indices, has_initial, checkpoints, seen)  # fmt: skip
    return out, final_state
