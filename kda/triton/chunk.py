# SPDX-License-Identifier: Apache-2.0
"""Chunked delta rule (prefill) in two kernels, cut where the parallelism changes; contract.md section 2.

Inside a chunk of C tokens, with y the log decays, G their inclusive cumulative sum, b = beta:

    A[i, j] = b_i sum_k k_i k_j exp(G_i - G_j)  (i > j)      M = (I + A)^-1
    u = M (b v)      w = M (b k exp(G))      P[i, j] = scale sum_k q_i k_j exp(G_i - G_j)  (i > j)
    qk_i = scale sum_k q_i k_i, the diagonal of P: kept apart in fp32, as it is most of a short sequence's output

`chunk_intra_kernel` computes these for every chunk at once (one program a chunk and value head), and
`chunk_walk_kernel` carries the state S [V, K] through the chunks of a sequence (one program a sequence, value head and
slice of V):

    d = u - w S^T      o = scale (q exp(G)) S^T + P d + qk d      S = S exp(G_last) + d^T (k exp(G_last - G))

No exponential can overflow, however negative a gate is: pairs (i, j) are split into levels h = 1, 2, 4, .., C/2. At
level h, i lies in the odd and j in the even half of a block of 2h tokens, and

    G_i - G_j = (sum of y from the odd half's start to i) + (sum of y after j to the even half's end)

so both factors are exp of a sum that is never positive for a decaying gate. The inverse is built up by the same levels:
M_2h = M_h - M_h A_h M_h, with A_h the entries of A at level h. A gate bounded from below needs no levels inside
blocks of DIAG tokens: there one product anchored at the block's middle stays in range.
"""
import torch
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.tiles import (
    cast, dot, find_sequence, first_slot, halves, level_pairs, log_decay,
    sequence_range, sign_dot, unit_triangular_inverse,
)  # fmt: skip

LOG2E = tl.constexpr(1.4426950408889634)


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
def diagonal_products(q, k, y, DIAG: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, dt: tl.constexpr):
    """The same for the pairs i > j inside blocks of DIAG tokens, anchored at the middle."""
    C: tl.constexpr = q.shape[0]
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if DIAG == 1:
        return tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    else:
        mid = i // DIAG * DIAG + DIAG // 2
        sums = tl.where((j > mid) & (j <= i), 1.0, tl.where((j > i) & (j <= mid), -1.0, 0.0))
        e = sign_dot(sums, y, SPLIT, PRECISION)
        up, cols = tl.exp2(e), tl.trans(cast(k * tl.exp2(-e), dt))
        pairs = (i // DIAG == j // DIAG) & (i > j)
        kk = tl.where(pairs, dot(cast(k * up, dt), cols, None, PRECISION), 0.0)
        return kk, tl.where(pairs, dot(cast(q * up, dt), cols, None, PRECISION), 0.0)


@triton.jit(do_not_specialize=["T", "N", "NC"])
def chunk_intra_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, A_log_ptr, bias_ptr, cu_seqlens,  # inputs
    w_ptr, qg_ptr, kg_ptr, P_ptr,  # [slots, HV, ..]: [C, K], [C, K], [C, K], [C, C] in the products' dtype
    u_ptr, qk_ptr, decay_ptr,  # [slots, HV, ..]: [V, C], [C], [K] in fp32
    out_ptr,
    scale, lower_bound, T, N, NC,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, out_t, out_h,  # strides
    H: tl.constexpr, HV: tl.constexpr, HA: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DIAG: tl.constexpr,
    IS_VARLEN: tl.constexpr, L2NORM: tl.constexpr, HAS_BETA: tl.constexpr, SIGMOID_BETA: tl.constexpr,
    RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr, ZERO_TAIL: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    slot, hv = pid // HV, pid % HV
    h = hv // (HV // H)
    i, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    if IS_VARLEN:
        seq, c = find_sequence(cu_seqlens, slot, N, T, C)
        bos, eos = sequence_range(cu_seqlens, seq, N, T)
        batch, t0, length = seq * 0, bos + c * C, eos - bos - c * C
        if seq == N:  # the tail that belongs to no sequence
            if ZERO_TAIL:
                for v0 in tl.static_range(0, V, BV):
                    row = out_ptr + (t0 + i)[:, None] * out_t + hv * out_h + (v0 + o_v)[None, :]
                    m_tail = (i < length)[:, None] & (v0 + o_v < V)[None, :]
                    tl.store(row, tl.zeros([C, BV], out_ptr.dtype.element_ty), m_tail)
            return
    else:
        batch, t0 = slot // NC, slot % NC * C
        length = T - t0
    if length <= 0:
        return

    # q^, k^ [C, K], log2 of the decays y [C, K], b [C]; rows past the sequence's end are zero.
    dt = w_ptr.dtype.element_ty
    t, live = t0 + i, i < length
    r, s = i[:, None], i[None, :]
    m_k = live[:, None] & (o_k < K)[None, :]
    q = tl.load(q_ptr + batch * q_b + t[:, None] * q_t + h * q_h + o_k[None, :], m_k, 0.0).to(dt)
    k = tl.load(k_ptr + batch * k_b + t[:, None] * k_t + h * k_h + o_k[None, :], m_k, 0.0).to(dt)
    y = tl.load(g_ptr + batch * g_b + t[:, None] * g_t + hv * g_h + o_k[None, :], m_k, 0.0).to(tl.float32)
    # Sums over K come from products, whose order does not depend on how the inputs are aligned in memory.
    qk = tl.sum(tl.where(r == s, dot(q, tl.trans(k), None, PRECISION), 0.0), 1) * scale
    if L2NORM:
        q_norm = tl.sqrt(tl.sum(tl.where(r == s, dot(q, tl.trans(q), None, PRECISION), 0.0), 1) + 1e-6)
        k_norm = tl.sqrt(tl.sum(tl.where(r == s, dot(k, tl.trans(k), None, PRECISION), 0.0), 1) + 1e-6)
        qk = qk / q_norm / k_norm
        q, k = q.to(tl.float32) / q_norm[:, None], k.to(tl.float32) / k_norm[:, None]
    else:
        q, k = q.to(tl.float32), k.to(tl.float32)
    if RAW_GATE:
        h_a = hv // (HV // HA)
        if HAS_BIAS:
            y += tl.load(bias_ptr + h_a * K + o_k, o_k < K, 0.0).to(tl.float32)[None, :]
        y = log_decay(y, tl.exp(tl.load(A_log_ptr + h_a).to(tl.float32)), lower_bound, 1.0, 20.0, BOUNDED)
        y = tl.where(m_k, y, 0.0)
    y *= LOG2E
    y = tl.where(y < -1e4, -1e4, y)  # exp2 is zero long before; keeps -inf out of the sums, and a NaN a NaN
    if HAS_BETA:
        b = tl.load(beta_ptr + batch * beta_b + t * beta_t + hv, live, 0.0).to(tl.float32)
        if SIGMOID_BETA:
            b = tl.sigmoid(b)
    else:
        b = tl.full([C], 1.0, tl.float32)

    A, P = diagonal_products(q, k, y, DIAG, SPLIT, PRECISION, dt)
    for level in tl.static_range(0, 6):
        if (1 << level) >= DIAG and (1 << level) < C:
            dA, dP = level_products(q, k, y, 1 << level, SPLIT, PRECISION, dt)
            A += dA
            P += dP
    M = unit_triangular_inverse(A * b[:, None], C, SPLIT, PRECISION)
    M_low = tl.trans(cast(tl.where(r > s, M, 0.0), dt))  # without the unit diagonal, which stays exact

    at = slot * HV + hv
    o_ck = at * C * K + r * K + o_k[None, :]
    m_ck = (o_k < K)[None, :] & (r < C)
    up = tl.exp2(sign_dot(tl.where(s <= r, 1.0, 0.0), y, SPLIT, PRECISION))  # exp(G)
    down = tl.exp2(sign_dot(tl.where(s > r, 1.0, 0.0), y, SPLIT, PRECISION))  # exp(G_last - G)
    bk = b[:, None] * k * up
    tl.store(w_ptr + o_ck, cast(dot(tl.trans(M_low), cast(bk, dt), bk, PRECISION), dt), m_ck)
    tl.store(qg_ptr + o_ck, cast(q * up * scale, dt), m_ck)
    tl.store(kg_ptr + o_ck, cast(k * down, dt), m_ck)
    tl.store(qk_ptr + at * C + i, qk)
    tl.store(decay_ptr + at * K + o_k, tl.sum(tl.where(r == C - 1, up, 0.0), 0), o_k < K)
    tl.store(P_ptr + at * C * C + r * C + s, cast(P * scale, dt))
    for v0 in tl.static_range(0, V, BV):
        m_v = v0 + o_v < V
        o_tv = batch * v_b + t[:, None] * v_t + hv * v_h + (v0 + o_v)[None, :]
        bv = tl.trans(tl.load(v_ptr + o_tv, live[:, None] & m_v[None, :], 0.0).to(tl.float32) * b[:, None])  # [V, C]
        u = dot(cast(bv, dt), M_low, bv, PRECISION)
        tl.store(u_ptr + at * C * V + (v0 + o_v)[:, None] * C + s, u, m_v[:, None] & (s < C))


@triton.jit(do_not_specialize=["T", "N", "NC"])
def chunk_walk_kernel(
    w_ptr, qg_ptr, kg_ptr, P_ptr, u_ptr, qk_ptr, decay_ptr, initial_state, cu_seqlens,  # inputs
    out_ptr, final_state,
    T, N, NC, state_n, out_b, out_t, out_h,  # sizes and strides
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_INITIAL: tl.constexpr, STORE_FINAL: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    NV: tl.constexpr = (V + BV - 1) // BV
    n, hv, v0 = pid // (HV * NV), pid // NV % HV, pid % NV * BV
    if IS_VARLEN:
        bos, eos = sequence_range(cu_seqlens, n, N, T)
        batch, slot = n * 0, first_slot(cu_seqlens, n, T, C)
    else:
        bos, eos = n * 0, n * 0 + T
        batch, slot = n, n * NC

    i, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), v0 + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_ck, m_vc = m_k[None, :] & (i < C)[:, None], m_v[:, None] & (i < C)[None, :]
    m_vk = m_v[:, None] & m_k[None, :]
    o_vk = hv * V * K + o_v[:, None] * K + o_k[None, :]
    S = tl.zeros([BV, BK], tl.float32)
    if HAS_INITIAL:
        S += tl.load(initial_state + n * state_n + o_vk, m_vk, 0.0).to(tl.float32)

    # Everything is held transposed, [V, ..] in front: S and d then enter the products from registers.
    dt = w_ptr.dtype.element_ty
    for t0 in range(bos, eos, C):
        at = slot * HV + hv
        o_ck = at * C * K + i[:, None] * K + o_k[None, :]
        w = tl.load(w_ptr + o_ck, m_ck, 0.0)  # [C, K]
        u = tl.load(u_ptr + at * C * V + o_v[:, None] * C + i[None, :], m_vc, 0.0)  # [V, C]
        qg = tl.load(qg_ptr + o_ck, m_ck, 0.0)
        kg = tl.load(kg_ptr + o_ck, m_ck, 0.0)
        P = tl.load(P_ptr + at * C * C + i[:, None] * C + i[None, :])  # [C, C]
        qk = tl.load(qk_ptr + at * C + i)  # [C]
        decay = tl.load(decay_ptr + at * K + o_k, m_k, 0.0)

        S_in = cast(S, dt)
        d = u - dot(S_in, tl.trans(w), None, PRECISION)  # [V, C]
        o = dot(S_in, tl.trans(qg), qk[None, :] * d, PRECISION)
        S *= decay[None, :]
        if SPLIT:  # the state takes d in two halves: its error is then the keys' rounding alone
            d, d_rest = halves(d)
            S = dot(d_rest, kg, S, PRECISION)
        S = dot(d, kg, S, PRECISION)
        o = dot(d, tl.trans(P), o, PRECISION)

        t = t0 + i
        row = out_ptr + batch * out_b + t[None, :] * out_t + hv * out_h + o_v[:, None]
        tl.store(row, cast(o, out_ptr.dtype.element_ty), m_v[:, None] & (t < eos)[None, :])
        slot += 1

    if STORE_FINAL:
        tl.store(final_state + n * HV * V * K + o_vk, S, m_vk)


def diagonal_block(C: int, lower_bound: float | None) -> int:
    """Tokens in a block whose decays, anchored at the middle, stay within exp(+-44); 1 without a bound."""
    if lower_bound is None:
        return 1
    block = 1
    while block < C and block * abs(lower_bound) <= 44:
        block *= 2
    return block


def chunk_kda(
    q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm, sigmoid_beta,
    A_log, g_bias, lower_bound, out,
):  # fmt: skip
    """Launcher; the arguments as `kda.reference.chunk.chunk_kda` takes them. Returns (out, final_state or None)."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    fresh = out is None
    if fresh:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final_state = torch.empty(N, HV, V, K, dtype=torch.float32, device=v.device) if output_final_state else None

    cfg = configs.pick("chunk", N=N, HV=HV, K=K, V=V, T=T, dtype=q.dtype, device=q.device)
    C, BK = cfg["C"], max(configs.next_power_of_2(K), 16)
    NC = -(-T // C)
    slots = B * NC if cu_seqlens is None else T // C + N
    # Products take bf16 operands where sums over many channels average their rounding out; else fp32 ones.
    dt = torch.bfloat16 if q.dtype == torch.bfloat16 and BK > 64 else torch.float32
    shapes = dict(
        w_ptr=(dt, C, K), qg_ptr=(dt, C, K), kg_ptr=(dt, C, K), P_ptr=(dt, C, C),
        u_ptr=(torch.float32, V, C), qk_ptr=(torch.float32, C), decay_ptr=(torch.float32, K),
    )  # fmt: skip
    scratch = {x: torch.empty(slots, HV, *size, dtype=kind, device=q.device) for x, (kind, *size) in shapes.items()}
    bounded = A_log is not None and lower_bound is not None
    if T and HV:
        chunk_intra_kernel[((slots + (cu_seqlens is not None)) * HV,)](
            q, k, v, g, beta, A_log, g_bias, cu_seqlens, **scratch, out_ptr=out,
            scale=scale, lower_bound=lower_bound or 0.0, T=T, N=N, NC=NC,
            q_b=q.stride(0), q_t=q.stride(1), q_h=q.stride(2), k_b=k.stride(0), k_t=k.stride(1), k_h=k.stride(2),
            v_b=v.stride(0), v_t=v.stride(1), v_h=v.stride(2), g_b=g.stride(0), g_t=g.stride(1), g_h=g.stride(2),
            beta_b=0 if beta is None else beta.stride(0), beta_t=0 if beta is None else beta.stride(1),
            out_t=out.stride(1), out_h=out.stride(2),
            H=H, HV=HV, HA=HV if A_log is None else A_log.numel(), K=K, V=V,
            C=C, BK=BK, BV=min(max(configs.next_power_of_2(V), 16), 64),
            DIAG=diagonal_block(C, lower_bound if bounded else None),
            IS_VARLEN=cu_seqlens is not None, L2NORM=use_qk_l2norm, HAS_BETA=beta is not None,
            SIGMOID_BETA=sigmoid_beta, RAW_GATE=A_log is not None, HAS_BIAS=g_bias is not None, BOUNDED=bounded,
            ZERO_TAIL=fresh, SPLIT=q.dtype != torch.float32, PRECISION=cfg["PRECISION"],
            num_warps=cfg["intra_warps"], num_stages=cfg["intra_stages"],
        )  # fmt: skip
    BV = cfg["BV"]
    if N and HV:
        chunk_walk_kernel[(N * HV * -(-V // BV),)](
            **scratch, initial_state=initial_state, cu_seqlens=cu_seqlens, out_ptr=out, final_state=final_state,
            T=T, N=N, NC=NC, state_n=0 if initial_state is None else initial_state.stride(0),
            out_b=out.stride(0), out_t=out.stride(1), out_h=out.stride(2),
            HV=HV, K=K, V=V, C=C, BK=BK, BV=BV, IS_VARLEN=cu_seqlens is not None,
            HAS_INITIAL=initial_state is not None, STORE_FINAL=output_final_state,
            SPLIT=dt == torch.bfloat16, PRECISION=cfg["PRECISION"],
            num_warps=cfg["walk_warps"], num_stages=cfg["walk_stages"],
        )  # fmt: skip
    return out, final_state
