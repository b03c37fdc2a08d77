# SPDX-License-Identifier: Apache-2.0
"""The state's walk through the chunks that chunk.py prepared (its docstring has the formulas and names).

One program takes a sequence, a value head and a slice of V from chunk to chunk. States come from and go to rows of
their own or slots of a pool; at checkpoints inside a sequence they go to further slots. Where programs are too few to
fill a GPU and sequences are long, the walk is cut into segments of SEGMENT chunks. A segment maps the state linearly,

    S' = S F + E        F [K, K]: where rows of the identity go without v        E [V, K]: where zeros go

so a first walk of all segments at once gives E and F, `chunk_combine_kernel` the state that enters each of them, and a
second walk of all segments at once the outputs.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda.triton import configs
from kda.triton.launch import Launch
from kda.triton.tiles import cast, dot, find_sequence, fine_dot, first_slot, halves, sequence_range


class Checkpoints(NamedTuple):
    """M places inside sequences where the state is kept too; each cuts its sequence in parts (prefill.py makes them).

    `offsets` [N + M + 1]: where the N + M parts begin, and their end; `slots` [N + M + 1]: where the state goes that
    enters a part, 0 (as for every sequence's first part): nowhere; `parts` [N + 1]: each sequence's first part, and the number of all.
    """

    offsets: Tensor
    slots: Tensor
    parts: Tensor


@triton.jit
def walk_chunks(
    S, tiles_ptr, decay_ptr, v_ptr, out_ptr, bos, eos, at, o_v, m_v, v_t, out_t,
    HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAPS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state behind tokens bos .. eos - 1, whose first chunk is place `at` of the tiles; stores their outputs.

    MAPS stores none, and leaves z and R where they are.
    """
    dt: tl.constexpr = tiles_ptr.dtype.element_ty
    CW: tl.constexpr = 2 * C if dt == tl.bfloat16 else C
    SIZE: tl.constexpr = 3 * C * K + 2 * C * CW
    ROWS: tl.constexpr = C if MAPS else 2 * C
    i, ii, o_k = tl.arange(0, C), tl.arange(0, ROWS), tl.arange(0, BK)
    m_k = o_k < K
    m_ck = m_k[None, :] & (i < C)[:, None]

    # Pointers move on by one chunk, as address arithmetic would be half of the loop.
    tiles = tiles_ptr + at * SIZE
    p_wz, p_x = tiles + ii[:, None] * K + o_k[None, :], tiles + 2 * C * K + i[:, None] * K + o_k[None, :]
    p_ar = tiles + 3 * C * K + ii[:, None] * CW + i[None, :]
    p_decay = decay_ptr + at * K + o_k[None, :]
    p_v = v_ptr + (bos + i)[None, :] * v_t + o_v[:, None]
    p_out = out_ptr + (bos + i)[None, :] * out_t + o_v[:, None]
    left, chunk = (eos - bos).to(tl.int32), tl.full([], C, tl.int64)

    # Everything is held transposed, [V, ..] in front: S and e then enter the products from registers. All loads are on
    # their way STAGES - 1 chunks ahead; without being told so, Triton does that for those that lead to a product only.
    for _ in tl.range(0, tl.cdiv(left, C), num_stages=STAGES):
        v = tl.load(p_v, m_v[:, None] & (i < left)[None, :], 0.0).to(dt)  # [V, C]
        AR = tl.load(p_ar)  # [2 C, C]; MAPS: [C, C]
        if K == BK:
            wz, x = tl.load(p_wz), tl.load(p_x)  # [2 C, K], [C, K]
        else:
            wz, x = tl.load(p_wz, m_k[None, :] & (ii < ROWS)[:, None], 0.0), tl.load(p_x, m_ck, 0.0)
        decay = tl.load(p_decay, m_k[None, :], 0.0)  # [1, K]

        both = dot(v, tl.trans(AR), None, PRECISION)
        if CW > C:
            both = dot(v, tl.trans(tl.load(p_ar + C)), both, PRECISION)
        both = dot(cast(S, dt), tl.trans(wz), both, PRECISION)  # [V, 2 C]
        S *= decay
        if MAPS:
            e = both
        else:
            e, o = tl.split(tl.permute(tl.reshape(both, [BV, 2, C]), [0, 2, 1]))  # [V, C]
        if dt == tl.bfloat16:  # the state takes e in two halves, x alone is rounded
            e, e_rest = halves(e)
            S = dot(e_rest, x, S, PRECISION)
        S = dot(e, x, S, PRECISION)
        if not MAPS:
            tl.store(p_out, cast(o, out_ptr.dtype.element_ty), m_v[:, None] & (i < left)[None, :])
        p_wz += HV * SIZE
        p_x += HV * SIZE
        p_ar += HV * SIZE
        p_decay += HV * K
        p_v += chunk * v_t
        p_out += chunk * out_t
        left -= C
    return S


@triton.jit
def state_rows(n, indices, has_initial, slots, idx_n, INDEXED: tl.constexpr, HAS_FLAGS: tl.constexpr):
    """The row of sequence `n` among the states, whether it may be used, and whether the sequence starts from it."""
    row, live = n, n >= 0
    if INDEXED:
        row = tl.load(indices + n * idx_n).to(tl.int64)
        live = (row > 0) & (row < slots)
    begins = live
    if HAS_FLAGS:
        begins = live & (tl.load(has_initial + n) != 0)
    return row, live, begins


@triton.jit(do_not_specialize=["T", "N", "NC", "slots", "idx_n"])
def chunk_walk_kernel(
    tiles_ptr, decay_ptr, v_ptr, initial_state, cu_seqlens,  # what chunk_intra_kernel left, and inputs
    indices, has_initial, checkpoint_slots, parts,
    out_ptr, final_state,
    segments,  # fp32 [segment slots, HV, ..]: E and F [V + K, K] if MAPS, else the state that enters [V, K]
    T, N, NC, slots, state_n, final_n, idx_n, v_b, v_t, v_h, out_b, out_t, out_h,  # sizes and strides
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, SEGMENT: tl.constexpr, MAPS: tl.constexpr, INDEXED: tl.constexpr, HAS_FLAGS: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    IS_VARLEN: tl.constexpr, HAS_INITIAL: tl.constexpr, STORE_FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    NV: tl.constexpr = (V + BV - 1) // BV
    SLICES: tl.constexpr = NV + (K + BV - 1) // BV if MAPS else NV
    n, hv, v0 = pid // (HV * SLICES), pid // SLICES % HV, pid % SLICES * BV

    # Tokens bos .. eos - 1, whose chunks begin at `slot`; `last` if none of the sequence follow.
    where, c = n, n * 0
    if SEGMENT:
        if IS_VARLEN:
            n, c = find_sequence(cu_seqlens, where, N, T, C * SEGMENT)
            if n == N:
                return
        else:
            n, c = where // tl.cdiv(NC, SEGMENT), where % tl.cdiv(NC, SEGMENT)
    row, live, begins = state_rows(n, indices, has_initial, slots, idx_n, INDEXED, HAS_FLAGS)
    part, end = n, n + 1
    if CHECKPOINTS:
        part, end = tl.load(parts + n).to(tl.int64), tl.load(parts + n + 1).to(tl.int64)
    if IS_VARLEN:
        bos, eos = sequence_range(cu_seqlens, part, end, T)
        batch, slot = n * 0, first_slot(cu_seqlens, part, T, C)
    else:
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

    o_k, o_v = tl.arange(0, BK), v0 + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_vk = m_v[:, None] & m_k[None, :]
    o_vk = hv * V * K + o_v[:, None] * K + o_k[None, :]
    v_ptr += batch * v_b + hv * v_h
    out_ptr += batch * out_b + hv * out_h
    if INDEXED:
        if not live:  # padding: outputs are zero
            i = tl.arange(0, C)
            if CHECKPOINTS:
                eos = sequence_range(cu_seqlens, end - 1, end, T)[1]
            if not MAPS:
                for t in range(bos, eos, C):
                    p_out = out_ptr + (t + i)[None, :] * out_t + o_v[:, None]
                    tl.store(p_out, tl.zeros([BV, C], out_ptr.dtype.element_ty), m_v[:, None] & (t + i < eos)[None, :])
            return

    S = tl.zeros([BV, BK], tl.float32)
    if SEGMENT:
        p_segment = segments + (where * HV + hv) * (V + K if MAPS else V) * K
    if MAPS:
        S = tl.where(o_v[:, None] - NV * BV == o_k[None, :], 1.0, 0.0)  # of v's slices: zeros
    elif SEGMENT:
        S = tl.load(p_segment + o_v[:, None] * K + o_k[None, :], m_vk, 0.0)
    elif HAS_INITIAL:
        m_begins = m_v[:, None] & (o_k < tl.where(begins, K, 0))[None, :]
        S += tl.load(initial_state + row * state_n + o_vk, m_begins, 0.0).to(tl.float32)

    if CHECKPOINTS:
        for p in range(part + 1, end + 1):
            # Where the next part lies is on its way during this one; behind the last one there is nothing to keep.
            kept = tl.load(checkpoint_slots + p).to(tl.int64)
            next_bos, next_eos = sequence_range(cu_seqlens, p, end, T)
            next_slot = first_slot(cu_seqlens, p, T, C)
            S = walk_chunks(
                S, tiles_ptr, decay_ptr, v_ptr, out_ptr, bos, eos, slot * HV + hv, o_v, m_v, v_t, out_t,
                HV, K, C, BK, BV, MAPS, STAGES, PRECISION,
            )  # fmt: skip
            if (kept > 0) & (kept < slots):
                tl.store(final_state + kept * final_n + o_vk, cast(S, final_state.dtype.element_ty), m_vk)
            bos, eos, slot = next_bos, next_eos, next_slot
    else:
        S = walk_chunks(
            S, tiles_ptr, decay_ptr, v_ptr, out_ptr, bos, eos, slot * HV + hv, o_v, m_v, v_t, out_t,
            HV, K, C, BK, BV, MAPS, STAGES, PRECISION,
        )  # fmt: skip

    if MAPS:
        rows = tl.where(o_v < NV * BV, o_v, o_v - NV * BV + V)
        tl.store(p_segment + rows[:, None] * K + o_k[None, :], S, m_k[None, :] & (m_v | (o_v >= NV * BV))[:, None])
    elif STORE_FINAL:
        if last:
            tl.store(final_state + row * final_n + o_vk, cast(S, final_state.dtype.element_ty), m_vk)


@triton.jit(do_not_specialize=["T", "N", "slots", "idx_n"])
def chunk_combine_kernel(
    maps, entering, initial_state, cu_seqlens, indices, has_initial, T, N, slots, state_n, idx_n,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, TOKENS: tl.constexpr,
    INDEXED: tl.constexpr, HAS_FLAGS: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_INITIAL: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the segments' E and F the state that enters each of them; K is a power of two."""
    pid = tl.program_id(0).to(tl.int64)
    NV: tl.constexpr = (V + BV - 1) // BV
    n, hv, v0 = pid // (HV * NV), pid // NV % HV, pid % NV * BV
    row, live, begins = state_rows(n, indices, has_initial, slots, idx_n, INDEXED, HAS_FLAGS)
    if IS_VARLEN:
        bos, eos = sequence_range(cu_seqlens, n, N, T)
        where = first_slot(cu_seqlens, n, T, TOKENS)
    else:
        bos, eos = n * 0, n * 0 + T
        where = n * tl.cdiv(T, TOKENS)
    o_v, o_k = v0 + tl.arange(0, BV), tl.arange(0, K)
    m_v = (o_v < V)[:, None]
    m_vk = m_v & (o_k < K)[None, :]
    o_vk, o_kk = o_v[:, None] * K + o_k[None, :], V * K + o_k[:, None] * K + o_k[None, :]
    S = tl.zeros([BV, K], tl.float32)
    if HAS_INITIAL:
        m_begins = m_v & (o_k < tl.where(begins, K, 0))[None, :]
        S += tl.load(initial_state + row * state_n + hv * V * K + o_vk, m_begins, 0.0).to(tl.float32)
    left = (eos - bos).to(tl.int32)
    for _ in range(0, tl.maximum(tl.cdiv(left, TOKENS), 1)):
        segment = maps + (where * HV + hv) * (V + K) * K
        on = (o_k < tl.where((left > TOKENS) & live, K, 0))[None, :]  # the last segment maps nothing
        E = tl.load(segment + o_vk, m_v & on, 0.0)
        F = tl.load(segment + o_kk, on & (o_kk >= 0), 0.0)
        tl.store(entering + (where * HV + hv) * V * K + o_vk, S, m_vk)
        S = E + fine_dot(S, F, SPLIT, PRECISION)
        where += 1
        left -= TOKENS


class Segments(NamedTuple):
    """`chunks` in each segment; `places` for segments, of which some may stay empty."""

    chunks: int
    places: int


def segment_chunks(N: int, HV: int, T: int, K: int, slices: int, C: int, half: bool, device: torch.device) -> int:
    """Chunks in a segment; 0 for a walk in one piece, where its programs fill the GPU or sequences are short.

    Walking in segments is three times the work, at N HV slices times as many programs as there are segments: as many as
    fit a GPU at once, two on a multiprocessor. A power of two, as each is a kernel of its own.
    """
    if device.type != "cuda" or configs.rdna(device) or not half or K & (K - 1) or T < 3 * 128 * C * N:
        return 0
    programs, fit = N * HV * slices, configs.multiprocessors(device)
    if 3 * programs > fit:
        return 0
    chunks = -(-T // (N * C))
    return max(configs.next_power_of_2(-(-chunks // (2 * fit // programs))), 64)


def segments(
    N: int, HV: int, T: int, K: int, V: int, cfg: dict, half: bool, varlen: bool, device: torch.device
) -> Segments | None:  # fmt: skip
    """How N sequences of T tokens (together, if `varlen`) are cut, if they are; `half`: into bf16 tiles."""
    C = cfg["C"]
    chunks = segment_chunks(N, HV, T, K, -(-V // cfg["BV"]), C, half, device)
    if not chunks:
        return None
    return Segments(chunks, T // (C * chunks) + N if varlen else N * -(-T // (C * chunks)))


_walk, _combine = Launch(chunk_walk_kernel), Launch(chunk_combine_kernel)


def find(
    seen, tiles, decays, v, initial_state, cu_seqlens, out, final_state, maps, indices, has_initial, slots=None, parts=None
) -> list:  # fmt: skip
    """The launches as before, see Launch.find; `maps` empty for a walk in one piece; `slots`, `parts` as in Checkpoints."""
    begin = (tiles, decays, v, initial_state, cu_seqlens, indices, has_initial, slots, parts, out, final_state)
    if not maps:
        return [_walk.find(seen, (*begin, None), False)]
    return [
        _walk.find(seen, (*begin, maps[0]), True),
        _combine.find(seen, (*maps, initial_state, cu_seqlens, indices, has_initial)),
        _walk.find(seen, (*begin, maps[1]), False),
    ]


def walk(
    tiles, decays, v, initial_state, cu_seqlens, out, final_state, N: int, NC: int, K: int, cfg: dict,
    cut: Segments | None = None, maps=None, indices=None, has_initial=None, checkpoints: Checkpoints | None = None,
    seen=None,
) -> None:  # fmt: skip
    """Launcher: outputs into `out`, final states [N, HV, V, K] into `final_state` if not None.

    With `cut` in segments, `maps` being scratch for E and F and for the states that enter. With `indices` [N] both states
    are one pool [slots, HV, V, K] and sequence n uses slot `indices[n]`, if it is one; `has_initial` [N] says which begin
    from it. `cu_seqlens` are the parts' offsets if there are checkpoints.
    """
    (_, T, HV, V), C, BV = v.shape, cfg["C"], cfg["BV"]
    slices, varlen = -(-V // BV), cu_seqlens is not None
    segment, places = cut or (0, N)
    maps, entering = maps or (None, None)
    state_n, final_n = (0 if state is None else state.stride(0) for state in (initial_state, final_state))
    slots, idx_n = (0, 0) if indices is None else (initial_state.shape[0], indices.stride(0))
    common = dict(
        HV=HV, K=K, V=V, INDEXED=indices is not None, HAS_FLAGS=has_initial is not None, IS_VARLEN=varlen,
        HAS_INITIAL=initial_state is not None, PRECISION=cfg["PRECISION"],
    )  # fmt: skip

    def launch(programs: int, MAPS: bool) -> None:
        tensors = (
            tiles, decays, v, initial_state, cu_seqlens, indices, has_initial,
            *((checkpoints.slots, checkpoints.parts) if checkpoints else (None, None)), out, final_state,
            maps if MAPS else entering,
        )  # fmt: skip
        _walk(
            seen, programs, tensors,
            (T, N, NC, slots, state_n, final_n, idx_n, *v.stride()[:3], *out.stride()[:3]), MAPS,
            C=C, BK=max(configs.next_power_of_2(K), 16), BV=BV,
            STAGES=cfg["walk"]["num_stages"], SEGMENT=segment, MAPS=MAPS,
            CHECKPOINTS=checkpoints is not None, STORE_FINAL=final_state is not None, **common, **cfg["walk"],
        )  # fmt: skip

    if segment:
        launch(places * HV * (slices + -(-K // BV)), MAPS=True)
        combine = configs.pick("chunk_combine", K=K, V=V, device=v.device)
        _combine(
            seen, N * HV * -(-V // combine["BV"]), (maps, entering, initial_state, cu_seqlens, indices, has_initial),
            (T, N, slots, state_n, idx_n), TOKENS=C * segment, SPLIT=tiles.dtype == torch.bfloat16, **common, **combine,
        )  # fmt: skip
    launch(places * HV * slices, MAPS=False)
