# SPDX-License-Identifier: Apache-2.0
"""The state's walk through the chunks that chunk.py prepared (its docstring has the formulas and names).

One program takes a sequence, a value head and a slice of V from chunk to chunk. Where these are too few to fill a GPU
and sequences are long, the walk is cut into segments of SEGMENT chunks. A segment maps the state that enters linearly,

    S' = S F + E        F [K, K]: where rows of the identity go without v        E [V, K]: where zeros go

so a first walk of all segments at once gives E and F, `chunk_combine_kernel` the state that enters each of them, and a
second walk of all segments at once the outputs.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.tiles import cast, dot, find_sequence, fine_dot, first_slot, halves, sequence_range


@triton.jit(do_not_specialize=["T", "N", "NC"])
def chunk_walk_kernel(
    tiles_ptr, vectors_ptr, v_ptr, initial_state, cu_seqlens,  # what chunk_intra_kernel left, and inputs
    out_ptr, final_state,
    segments,  # [segment slots, HV, V + K, K] fp32: E and F if MAPS, else the state that enters in E's place
    T, N, NC, state_n, v_b, v_t, v_h, out_b, out_t, out_h,  # sizes and strides
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SEGMENT: tl.constexpr, MAPS: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_INITIAL: tl.constexpr, STORE_FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    NV: tl.constexpr = (V + BV - 1) // BV
    SLICES: tl.constexpr = NV + (K + BV - 1) // BV if MAPS else NV
    n, hv, v0 = pid // (HV * SLICES), pid // SLICES % HV, pid % SLICES * BV

    # Tokens bos .. eos - 1, whose chunks begin at `slot`; `last` if none of the sequence follow.
    where, c = n, n * 0
    if IS_VARLEN:
        if SEGMENT:
            n, c = find_sequence(cu_seqlens, where, N, T, C * SEGMENT)
            if n == N:
                return
        bos, eos = sequence_range(cu_seqlens, n, N, T)
        batch, slot = n * 0, first_slot(cu_seqlens, n, T, C)
    else:
        if SEGMENT:
            n, c = where // tl.cdiv(NC, SEGMENT), where % tl.cdiv(NC, SEGMENT)
        bos, eos = n * 0, n * 0 + T
        batch, slot = n, n * NC
    last = True
    if SEGMENT:
        bos += c * (SEGMENT * C)
        last = bos + SEGMENT * C >= eos
        if (c > 0) & (bos >= eos) | (MAPS & last):
            return
        eos = tl.minimum(eos, bos + SEGMENT * C)
        slot += c * SEGMENT

    i, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), v0 + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_ck, m_vk = m_k[None, :] & (i < C)[:, None], m_v[:, None] & m_k[None, :]
    o_vk = hv * V * K + o_v[:, None] * K + o_k[None, :]
    if SEGMENT:
        p_segment = segments + (where * HV + hv) * (V + K) * K
    S = tl.zeros([BV, BK], tl.float32)
    if MAPS:
        if v0 >= NV * BV:
            S = tl.where(o_v[:, None] - NV * BV == o_k[None, :], 1.0, 0.0)
    elif SEGMENT:
        S = tl.load(p_segment + o_v[:, None] * K + o_k[None, :], m_vk, 0.0)
    elif HAS_INITIAL:
        S += tl.load(initial_state + n * state_n + o_vk, m_vk, 0.0).to(tl.float32)

    # Pointers move on by one chunk, as address arithmetic would be half of the loop. Vectors are loaded one chunk
    # ahead; of the tiles, which enter products, the compiler sees to that.
    dt = tiles_ptr.dtype.element_ty
    SIZE: tl.constexpr = 3 * C * K + 3 * C * C
    at = slot * HV + hv
    tiles, ii = tiles_ptr + at * SIZE, tl.arange(0, 2 * C)
    p_wz, p_kg = tiles + ii[:, None] * K + o_k[None, :], tiles + 2 * C * K + i[:, None] * K + o_k[None, :]
    tiles += 3 * C * K
    p_ur, p_rest = tiles + ii[:, None] * C + i[None, :], tiles + 2 * C * C + i[:, None] * C + i[None, :]
    p_r, p_decay = vectors_ptr + at * (C + K) + i, vectors_ptr + at * (C + K) + C + o_k
    p_v = v_ptr + batch * v_b + (bos + i)[None, :] * v_t + hv * v_h + o_v[:, None]
    p_out = out_ptr + batch * out_b + (bos + i)[None, :] * out_t + hv * out_h + o_v[:, None]
    left, chunk = (eos - bos).to(tl.int32), tl.full([], C, tl.int64)
    r_next = tl.load(p_r, (i < C) & (left > 0), 0.0)
    decay_next = tl.load(p_decay, m_k & (left > 0), 0.0)

    # Everything is held transposed, [V, ..] in front: S and d then enter the products from registers.
    for _ in range(0, tl.cdiv(left, C)):
        r, decay = r_next, decay_next
        p_r += HV * (C + K)
        p_decay += HV * (C + K)
        r_next = tl.load(p_r, (i < C) & (left > C), 0.0)  # [C]
        decay_next = tl.load(p_decay, m_k & (left > C), 0.0)  # [K]
        m_vt = m_v[:, None] & (i < left)[None, :]
        v = tl.load(p_v, m_vt, 0.0).to(dt)  # [V, C]
        UR = tl.load(p_ur)  # [2 C, C]
        if K == BK:
            wz, kg = tl.load(p_wz), tl.load(p_kg)  # [2 C, K], [C, K]
        else:
            wz, kg = tl.load(p_wz, m_k[None, :] & (ii < 2 * C)[:, None], 0.0), tl.load(p_kg, m_ck, 0.0)

        both = dot(cast(S, dt), tl.trans(wz), dot(v, tl.trans(UR), None, PRECISION), PRECISION)  # [V, 2 C]
        d, o = tl.split(tl.permute(tl.reshape(both, [BV, 2, C]), [0, 2, 1]))  # [V, C]
        if dt == tl.bfloat16:
            d = dot(v, tl.trans(tl.load(p_rest)), d, PRECISION)
        S *= decay[None, :]
        if dt == tl.bfloat16:  # the state takes d in two halves: its error is then the keys' rounding alone
            d, d_rest = halves(d)
            S = dot(d_rest, kg, S, PRECISION)
        S = dot(d, kg, S, PRECISION)
        if not MAPS:
            o += v.to(tl.float32) * r[None, :]
            tl.store(p_out, cast(o, out_ptr.dtype.element_ty), m_vt)
        p_wz += HV * SIZE
        p_kg += HV * SIZE
        p_ur += HV * SIZE
        p_rest += HV * SIZE
        p_v += chunk * v_t
        p_out += chunk * out_t
        left -= C

    if MAPS:
        rows = tl.where(o_v < NV * BV, o_v, o_v - NV * BV + V)
        tl.store(p_segment + rows[:, None] * K + o_k[None, :], S, m_k[None, :] & (m_v | (o_v >= NV * BV))[:, None])
    elif STORE_FINAL:
        if last:
            tl.store(final_state + n * HV * V * K + o_vk, S, m_vk)


@triton.jit(do_not_specialize=["T", "N", "NC"])
def chunk_combine_kernel(
    segments, initial_state, cu_seqlens, T, N, NC, state_n,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, TOKENS: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_INITIAL: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """In place of each segment's E, the state that enters it; K is a power of two."""
    pid = tl.program_id(0).to(tl.int64)
    NV: tl.constexpr = (V + BV - 1) // BV
    n, hv, v0 = pid // (HV * NV), pid // NV % HV, pid % NV * BV
    if IS_VARLEN:
        bos, eos = sequence_range(cu_seqlens, n, N, T)
        where = first_slot(cu_seqlens, n, T, TOKENS)
    else:
        bos, eos = n * 0, n * 0 + T
        where = n * tl.cdiv(T, TOKENS)
    o_v, o_k = v0 + tl.arange(0, BV), tl.arange(0, K)
    m_vk = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_vk, o_kk = o_v[:, None] * K + o_k[None, :], V * K + o_k[:, None] * K + o_k[None, :]
    S = tl.zeros([BV, K], tl.float32)
    if HAS_INITIAL:
        S += tl.load(initial_state + n * state_n + hv * V * K + o_vk, m_vk, 0.0).to(tl.float32)
    left = (eos - bos).to(tl.int32)
    for _ in range(0, tl.maximum(tl.cdiv(left, TOKENS), 1)):
        segment = segments + (where * HV + hv) * (V + K) * K
        on = left > TOKENS  # the last segment maps nothing
        E = tl.load(segment + o_vk, m_vk & on, 0.0)
        F = tl.load(segment + o_kk, on & (o_kk >= 0), 0.0)
        tl.store(segment + o_vk, S, m_vk)
        S = E + fine_dot(S, F, SPLIT, PRECISION)
        where += 1
        left -= TOKENS


def segment_chunks(N: int, HV: int, T: int, K: int, slices: int, C: int, split: bool, device: torch.device) -> int:
    """Chunks in a segment; 0 for a walk in one piece, where its programs fill the GPU or sequences are short.

    Walking in segments is three times the work, at N HV slices times as many programs as there are segments.
    """
    if device.type != "cuda" or not split or K & (K - 1) or T < 3 * 128 * C * N:
        return 0
    return 128 if 3 * N * HV * slices <= torch.cuda.get_device_properties(device).multi_processor_count else 0


def walk(tiles, vectors, v, initial_state, cu_seqlens, out, final_state, N: int, NC: int, K: int, cfg: dict) -> None:
    """Launcher: outputs into `out` and, if not None, final states [N, HV, V, K] into `final_state`."""
    (_, T, HV, V), C, BV = v.shape, cfg["C"], cfg["BV"]
    slices, varlen, split = -(-V // BV), cu_seqlens is not None, tiles.dtype == torch.bfloat16
    segment = segment_chunks(N, HV, T, K, slices, C, split, v.device)
    places, segments = N, None
    if segment:
        places = T // (C * segment) + N if varlen else N * -(-NC // segment)
        segments = torch.empty(places, HV, V + K, K, dtype=torch.float32, device=v.device)
    state_n = 0 if initial_state is None else initial_state.stride(0)
    common = dict(HV=HV, K=K, V=V, IS_VARLEN=varlen, HAS_INITIAL=initial_state is not None, PRECISION=cfg["PRECISION"])

    def launch(programs: int, MAPS: bool) -> None:
        chunk_walk_kernel[(programs,)](
            tiles, vectors, v, initial_state, cu_seqlens, out, final_state, segments,
            T, N, NC, state_n, v.stride(0), v.stride(1), v.stride(2), out.stride(0), out.stride(1), out.stride(2),
            C=C, BK=max(configs.next_power_of_2(K), 16), BV=BV, SEGMENT=segment, MAPS=MAPS,
            STORE_FINAL=final_state is not None, **common, **cfg["walk"],
        )  # fmt: skip

    if segment:
        launch(places * HV * (slices + -(-K // BV)), MAPS=True)
        chunk_combine_kernel[(N * HV * -(-V // 32),)](
            segments, initial_state, cu_seqlens, T, N, NC, state_n,
            BV=32, TOKENS=C * segment, SPLIT=split, **common, num_warps=8,
        )  # fmt: skip
    launch(places * HV * slices, MAPS=False)
