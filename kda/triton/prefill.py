# SPDX-License-Identifier: Apache-2.0
"""Prefill of a KDA layer between its projections: convolution, chunked rule and gated norm on the states in place.

The stages are the kernels of conv.py, chunk.py, walk.py and norm.py; nothing is gathered or scattered between them.
Checkpoints cut sequences in parts: to the chunked rule a part is what a sequence is, and the walk goes through those of
its sequence. A checkpoint's convolution state is copied before the convolution moves the states of the slots on.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kda.triton import chunk, configs, conv, norm
from kda.triton.launch import Launch, Scratch
from kda.triton.tiles import sequence_range
from kda.triton.walk import Checkpoints


@triton.jit
def clamped(offsets, i, stride, entries, first, last):
    """Entries `i` of offsets, within first .. last; `first` past their end."""
    at = tl.load(offsets + i * stride, i < entries, 0).to(tl.int64)
    return tl.where(i < entries, tl.minimum(tl.maximum(at, first), last), first)


@triton.jit
def cut(
    cu_seqlens, checkpoint_offsets, checkpoint_indices, offsets, kept_slots, parts, j, N, M, T, slots, off_m, ck_m,
    B: tl.constexpr,
):  # fmt: skip
    """Merges sequences' offsets and checkpoints: each of them, `j`, finds its place by counting those before it.

    A checkpoint at a sequence's end comes before the next one's offset; one that lies in no sequence is moved to where
    they begin or end and keeps nothing. Every place is taken, also if offsets do not rise: they are made to.
    """
    first = clamped(cu_seqlens, j * 0, 1, N + 1, 0, T)
    is_cut, m = (j > N) & (j <= N + M), j - N - 1
    top, at = first, first  # of all offsets, and of those up to j
    for i0 in range(0, N + 1, B):
        i = i0 + tl.arange(0, B)[None, :]
        begin = clamped(cu_seqlens, i, 1, N + 1, 0, T)
        top = tl.maximum(top, tl.max(begin, 1))
        at = tl.maximum(at, tl.max(tl.where(i <= j[:, None], begin, 0), 1))
    last = top
    given = tl.load(checkpoint_offsets + m * off_m, is_cut, 0).to(tl.int64)
    within = (given > first) & (given <= last)
    at = tl.where(is_cut, tl.minimum(tl.maximum(given, first), last), at)
    before = tl.where(is_cut, N + 1, j)  # the offsets before j: of a cut, those before the first one that reaches it
    for i0 in range(0, N + 1, B):
        i = i0 + tl.arange(0, B)[None, :]
        reached = is_cut[:, None] & (clamped(cu_seqlens, i, 1, N + 1, 0, T) >= at[:, None]) & (i <= N)
        before = tl.minimum(before, tl.min(tl.where(reached, i, N + 1), 1))
    place = before.to(tl.int64)
    for i0 in range(0, M, B):
        i = i0 + tl.arange(0, B)[None, :]
        other = clamped(checkpoint_offsets, i, off_m, M, tl.min(first, 0), tl.max(last, 0))
        earlier = tl.where(is_cut[:, None] & (i >= m[:, None]), other < at[:, None], other <= at[:, None]) & (i < M)
        place += tl.sum(earlier.to(tl.int32), 1)
    live = j <= N + M
    tl.store(offsets + place, at.to(tl.int32), live)
    tl.store(parts + j, place.to(tl.int32), j <= N)
    slot = tl.load(checkpoint_indices + m * ck_m, is_cut, 0).to(tl.int64)
    good = is_cut & within & (slot > 0) & (slot < slots)
    tl.store(kept_slots + place, tl.where(good, slot, 0).to(tl.int32), live)


@triton.jit
def keep_conv_state(
    x, conv_state, cu_seqlens, indices, has_initial, checkpoint_offsets, checkpoint_indices, m, d,
    N, T, slots, dim, x_t, s_n, s_d, s_w, off_m, ck_m, idx_n, PAST: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Channels `d` of the PAST inputs before checkpoint `m`, from x [T, dim] and, behind their start, the slot's state."""
    cut = tl.load(checkpoint_offsets + m * off_m).to(tl.int64)
    kept = tl.load(checkpoint_indices + m * ck_m).to(tl.int64)
    # The last sequence that begins before the checkpoint; the ones after it that do are empty.
    lo, hi = m * 0, m * 0 + N
    while lo < hi:
        mid = (lo + hi + 1) // 2
        if tl.minimum(tl.maximum(tl.load(cu_seqlens + mid).to(tl.int64), 0), T) < cut:
            lo = mid
        else:
            hi = mid - 1
    bos, eos = sequence_range(cu_seqlens, lo, N, T)
    row = tl.load(indices + lo * idx_n, lo < N, 0).to(tl.int64)
    live = (row > 0) & (row < slots) & (cut > bos) & (cut <= eos) & (kept > 0) & (kept < slots)
    if live:
        begins = tl.load(has_initial + lo) != 0
        w = tl.arange(0, BW)[:, None].to(tl.int64)
        t = cut - PAST + w
        m_wd = (w < PAST) & (d < dim)[None, :]
        token = tl.load(x + t * x_t + d[None, :], m_wd & (t >= bos), 0.0).to(conv_state.dtype.element_ty)
        m_old = m_wd & (t < tl.where(begins, bos, bos - PAST))
        old = tl.load(conv_state + row * s_n + (t - bos + PAST) * s_w + d[None, :] * s_d, m_old, 0.0)
        tl.store(conv_state + kept * s_n + w * s_w + d[None, :] * s_d, tl.where(t >= bos, token, old), m_wd)


@triton.jit(do_not_specialize=["N", "M", "T", "slots", "dim", "off_m", "ck_m", "idx_n"])
def checkpoints_kernel(
    x, conv_state, cu_seqlens, indices, has_initial, checkpoint_offsets, checkpoint_indices, offsets, kept_slots, parts,
    N, M, T, slots, dim, x_t, s_n, s_d, s_w, off_m, ck_m, idx_n,
    PAST: tl.constexpr, BW: tl.constexpr, B: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    cuts, blocks = tl.cdiv(N + M + 1, B), tl.cdiv(dim, BD)
    if pid < cuts:
        cut(cu_seqlens, checkpoint_offsets, checkpoint_indices, offsets, kept_slots, parts, pid * B + tl.arange(0, B),
            N, M, T, slots, off_m, ck_m, B)  # fmt: skip
    else:
        m, d = (pid - cuts) // blocks, (pid - cuts) % blocks * BD + tl.arange(0, BD)
        keep_conv_state(x, conv_state, cu_seqlens, indices, has_initial, checkpoint_offsets, checkpoint_indices, m, d,
                        N, T, slots, dim, x_t, s_n, s_d, s_w, off_m, ck_m, idx_n, PAST, BW)  # fmt: skip


_checkpoints = Launch(checkpoints_kernel)


def scratch_of_checkpoints(cu_seqlens, offsets) -> Scratch:
    """Of the tensors of `Checkpoints`."""
    N, M = cu_seqlens.numel() - 1, offsets.numel()
    return Scratch(cu_seqlens.device, *(((entries,), torch.int32) for entries in (N + M + 1, N + M + 1, N + 1)))


def checkpoints(x, conv_state, W: int, cu_seqlens, indices, has_initial, offsets, kept, slots: int, seen) -> Checkpoints:
    """Parts of sequences between checkpoints `offsets`; the convolution states there go to slots `kept`; x [T, dim]."""
    scratch = scratch_of_checkpoints(cu_seqlens, offsets)
    cuts = Checkpoints(*scratch.tensors(scratch.empty()))
    tensors = (x, conv_state, cu_seqlens, indices, has_initial, offsets, kept, *cuts)
    if _checkpoints.again(seen, tensors):
        return cuts
    (T, dim), N, M = x.shape, cu_seqlens.numel() - 1, offsets.numel()
    config = configs.pick("checkpoints", entries=N + M + 1, dim=dim)
    _checkpoints(
        seen, triton.cdiv(N + M + 1, config["B"]) + M * triton.cdiv(dim, config["BD"]), tensors,
        (N, M, T, slots, dim, x.stride(0), *conv_state.stride(), offsets.stride(0), kept.stride(0), indices.stride(0)),
        PAST=W - 1, BW=triton.next_power_of_2(W - 1), **config,
    )  # fmt: skip
    return cuts


def kda_prefill(
    qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, cu_seqlens, has_initial_state, conv_weight,
    conv_bias, A_log, g_bias, norm_weight, scale, lower_bound, eps, activation, checkpoint_offsets, checkpoint_indices,
    out, out_rows=None, seen=None,
):  # fmt: skip
    """Launcher; the arguments as `kda.reference.prefill.kda_prefill` takes them. Returns the output."""
    T, HV, V = out_gate.shape
    fresh = out is None
    if fresh:
        out = torch.empty(T, HV, V, dtype=qkv.dtype, device=qkv.device)
    keeps = checkpoint_offsets is not None and checkpoint_offsets.numel() and T
    kept = (checkpoint_offsets, checkpoint_indices) if keeps else ()
    if has_initial_state is not None and repeat(
        seen, qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, cu_seqlens, has_initial_state,
        conv_weight, conv_bias, A_log, g_bias, norm_weight, out, fresh, out_rows, *kept,
    ):  # fmt: skip
        return out

    K, W = raw_g.shape[2], conv_weight.shape[1]
    H = (qkv.shape[1] - HV * V) // (2 * K)
    limit = None if fresh else cu_seqlens[-1:]
    slots = min(conv_state.shape[0], ssm_state.shape[0])
    conv_state, ssm_state = conv_state[:slots], ssm_state[:slots]
    if has_initial_state is None:
        has_initial_state = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.bool, device=qkv.device)
    cuts = None
    if keeps:
        cuts = checkpoints(qkv, conv_state, W, cu_seqlens, ssm_state_indices, has_initial_state, *kept, slots, seen)
    x = conv.causal_conv1d_fn(qkv.t(), conv_weight, conv_bias, conv_state, cu_seqlens, ssm_state_indices,
                              has_initial_state, True, (), seen).t()  # fmt: skip
    q, k, v = x[None].split([H * K, H * K, HV * V], -1)
    v = v.unflatten(-1, (HV, V))
    o, _ = chunk.chunk_kda(
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v, raw_g[None], beta[None], scale, ssm_state, False,
        cu_seqlens, True, True, A_log, g_bias, lower_bound, None, ssm_state_indices, has_initial_state, cuts, seen,
    )  # fmt: skip
    if T:
        norm.rms_norm_gated(o, out_gate[None], norm_weight, None, activation, None, None, eps, out[None], True, limit,
                            out_rows, seen)  # fmt: skip
    if seen is not None and "chunk" in seen.launches:
        parts = [(y.shape, qkv.dtype) for y in (qkv, out_gate)]
        if keeps:
            parts += scratch_of_checkpoints(cu_seqlens, checkpoint_offsets).parts
        scratch = Scratch(qkv.device, *parts, *seen.launches["chunk"].scratch.parts)
        seen.launches["prefill"] = scratch, H * K * qkv.element_size(), (len(cu_seqlens) - 1) * cu_seqlens.element_size()
    return out


def repeat(
    seen, qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, cu_seqlens, has_initial_state,
    conv_weight, conv_bias, A_log, g_bias, norm_weight, out, fresh: bool, out_rows, *kept,
) -> bool:  # fmt: skip
    """Launches again as before for the same `seen`; False if that is not to be had.

    `fresh`: `out` has no contents to keep; `kept`: offsets and slots of checkpoints, if there are any.
    """
    found = None if seen is None else seen.launches.get("prefill")
    if found is None:
        return False
    between, keys, last = found  # what the kernels hand on, of all stages; bytes of q's columns, and before the last offset
    memory = between.empty()
    x, o, *scratch = between.addresses(memory)
    q, k, v, limit = x, x + keys, x + 2 * keys, None if fresh else cu_seqlens.data_ptr() + last
    launches, parts = [], (cu_seqlens,)
    if kept:
        parts, scratch = scratch[:3], scratch[3:]
        rows = (qkv, conv_state, cu_seqlens, ssm_state_indices, has_initial_state)
        launches.append(_checkpoints.find(seen, (*rows, *kept, *parts)))
    launches += [
        conv.find(seen, qkv, conv_weight, conv_bias, conv_state, cu_seqlens, ssm_state_indices, has_initial_state, x),
        chunk.find(seen, q, k, v, raw_g, beta, A_log, g_bias, parts[0], ssm_state, o, ssm_state, ssm_state_indices,
                   has_initial_state, memory, scratch, *parts[1:]),
        norm.find(seen, o, out_gate, norm_weight, None, None, None, out, limit, out_rows),
    ]  # fmt: skip
    if None in launches:
        return False
    for launch in launches:
        launch()
    return True
