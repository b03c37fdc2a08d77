# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding from one checkpoint a request and a record of each draft token; contract.md section 2.

    verify    as decode, token after token, on a copy of the state; of each token k^ [K], exp(y) [K] and d [V] are kept
    commit    S = S * exp(y) + d k^T for the accepted tokens, in one pass over the state

A record says all that a token does to the state, in 2 K + V values instead of V K. The conv state holds the checkpoint's
W - 1 columns and behind them the inputs of the window; with `a` tokens accepted columns a .. a + W - 2 are the history.
What commit computes has the bits of what verify went on with: both multiply, then take one fma.

As in decode.py a program takes a request and a key head through all of the head's value heads, whose states pass through
registers in slices [BV, K]; the tokens of a window are rows of tiles [PT, .]. Verify can commit the last window first.
"""
import torch
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.launch import Launch
from kda.triton.tiles import along_k, along_v, cast, log_decay, row, sequence_range, silu, state_tile, sum_k


@triton.jit
def request(indices, accepted, n, N, slots, window, idx_n, acc_n, commits):
    """Slot of row `n`, how many records are to be applied, and whether all that is in range."""
    slot = tl.load(indices + n * idx_n, n < N, 0).to(tl.int64)
    count = tl.load(accepted + n * acc_n, n < N, 0).to(tl.int64) * commits
    return slot, count, (slot > 0) & (slot < slots) & (count >= 0) & (count <= window)


@triton.jit
def queries_and_keys(q, k, scale, L):
    """q^ with its scale and k^ [PT, BK], and their products [PT].

    Sums are taken row by row: the layout of a tile of loads must not decide in which order they are added up.
    """
    o_t = tl.arange(0, q.shape[0])
    qq = tl.zeros(o_t.shape, tl.float32)
    kk, kq = qq, qq
    for t in range(L):
        q_t, k_t, here = row(q, t), row(k, t), o_t == t
        qq_t, kk_t, kq_t = tl.reduce((q_t * q_t, k_t * k_t, k_t * q_t), 0, add_three)
        qq, kk, kq = tl.where(here, qq_t, qq), tl.where(here, kk_t, kk), tl.where(here, kq_t, kq)
    q_norm, k_norm = scale / tl.sqrt(qq + 1e-6), 1.0 / tl.sqrt(kk + 1e-6)
    return q * q_norm[:, None], k * k_norm[:, None], kq * (k_norm * q_norm)


@triton.jit
def add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def step(S, k, decay, d, KI: tl.constexpr, BK: tl.constexpr):
    """The decayed state takes a token up. An fma said in words: no compiler chooses which product it rounds."""
    return tl.fma(along_v(d, KI, BK), along_k(k, KI), S * along_k(decay, KI))


@triton.jit
def load_records(record, count, o_k, m_k, o_v, m_v, rec_t, K: tl.constexpr, PT: tl.constexpr):
    """k^, decays [PT, BK] and d [PT, BV] of the accepted tokens."""
    o_t = tl.arange(0, PT)[:, None]
    m_t = o_t < count
    place = record + o_t * rec_t
    k = tl.load(place + o_k[None, :], m_t & m_k[None, :], 0.0)
    decay = tl.load(place + K + o_k[None, :], m_t & m_k[None, :], 0.0)
    return k, decay, tl.load(place + 2 * K + o_v[None, :], m_t & m_v[None, :], 0.0)


@triton.jit
def load_history(state, count, m, sh_w, W: tl.constexpr, BW: tl.constexpr):
    """Columns count .. count + W - 2 of the conv state, if they are to move; `state` is [BD] pointers."""
    w = tl.arange(0, BW)[:, None].to(tl.int64)  # [BW, BD]
    m_w = m[None, :] & (w < tl.where(count > 0, W - 1, 0))
    return tl.load(state[None, :] + (w + count) * sh_w, m_w, 0.0)


@triton.jit
def store_history(state, z, count, m, sh_w, W: tl.constexpr, BW: tl.constexpr):
    """They become columns 0 .. W - 2. A column is overwritten once every warp has read it: barriers are the caller's."""
    w = tl.arange(0, BW)[:, None].to(tl.int64)
    m_w = m[None, :] & (w < tl.where(count > 0, W - 1, 0))
    tl.store(state[None, :] + w * sh_w, z, m_w)


@triton.jit
def move_history(state, count, m, sh_w, W: tl.constexpr, BW: tl.constexpr):
    """The conv state commits."""
    z = load_history(state, count, m, sh_w, W, BW)
    tl.debug_barrier()
    store_history(state, z, count, m, sh_w, W, BW)


@triton.jit
def conv_tile(x, history, weight, bias, L, channels, sx_t, sh_w, sw_w,
              W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """[BT, BD] fp32 outputs, SiLU included, of L tokens; pointers are [BD], at token 0, column 0 of W - 1, tap 0."""
    i = tl.arange(0, BT)[:, None].to(tl.int64)
    tokens = channels[None, :] & (i < L)
    acc = tl.zeros([BT, BD], tl.float32)
    if bias is not None:
        acc += tl.load(bias, mask=channels, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        j = i + (w - (W - 1))  # [BT, 1] the token under tap w; the history (column i + w) ends at token -1
        z = tl.load(x[None, :] + j * sx_t, mask=tokens & (j >= 0), other=0.0).to(tl.float32)
        if history.dtype.element_ty != x.dtype.element_ty:
            z = cast(z, history.dtype.element_ty).to(tl.float32)
        if w < W - 1:
            old = tl.load(history[None, :] + (i + w) * sh_w, mask=tokens & (i + w < W - 1), other=0.0)
            z = tl.where(j < 0, old.to(tl.float32), z)
        acc += z * tl.load(weight + w * sw_w, mask=channels, other=0.0).to(tl.float32)[None, :]
    return silu(acc)


@triton.jit
def load_window(x, state, weight, bias, count, L, m, x_t, sh_w, sw_w,
                W: tl.constexpr, BW: tl.constexpr, PT: tl.constexpr):  # fmt: skip
    """[PT, BD] convolved tokens, rounded as `x` is, and what `store_window` takes: history [BW, BD], inputs [PT, BD]."""
    BD: tl.constexpr = m.shape[0]
    y = conv_tile(x, state + count * sh_w, weight, bias, L, m, x_t, sh_w, sw_w, W, PT, BD)
    z = load_history(state, count, m, sh_w, W, BW)
    t = tl.arange(0, PT)[:, None].to(tl.int64)
    new = tl.load(x[None, :] + t * x_t, m[None, :] & (t < L), 0.0)
    return cast(y, x.dtype.element_ty).to(tl.float32), z, new


@triton.jit
def store_window(state, z, new, count, L, m, sh_w, W: tl.constexpr, BW: tl.constexpr, PT: tl.constexpr):
    """The conv state commits and takes the tokens up behind its history."""
    store_history(state, z, count, m, sh_w, W, BW)
    t = tl.arange(0, PT)[:, None].to(tl.int64)
    place = state[None, :] + (W - 1 + t) * sh_w
    tl.store(place, cast(new.to(tl.float32), state.dtype.element_ty), m[None, :] & (t < L))


@triton.jit
def row_of(out_rows, t, rows, mask):
    """Which row of the output token(s) `t` go to, and whether they go anywhere."""
    if out_rows is None:
        return t, mask
    else:
        to = tl.load(out_rows + t, mask, -1).to(tl.int64)
        return to, (to >= 0) & (to < rows)


# Sums run in the order in which a warp holds its loads, so the alignment of an input must not decide it.
@triton.jit(
    do_not_specialize=["N", "T", "slots", "rows", "window", "commits", "idx_n", "acc_n"],
    do_not_specialize_on_alignment=[
        "x_ptr", "g_ptr", "beta_ptr", "gate_ptr", "conv_ptr", "record_ptr", "out_ptr", "out_rows", "x_t", "g_t", "g_h",
        "beta_t", "gate_t", "gate_h", "conv_n", "conv_d", "conv_w", "rec_n", "out_t", "out_h",
    ],
)  # fmt: skip
def kda_verify_kernel(
    x_ptr, g_ptr, beta_ptr, gate_ptr, indices, cu_seqlens, accepted, weight_ptr, conv_bias_ptr, A_log_ptr, bias_ptr,
    norm_ptr,  # inputs
    conv_ptr, state_ptr, record_ptr, out_ptr, out_rows,
    scale, lower_bound, eps, N, T, slots, rows, window, commits,
    x_t, g_t, g_h, beta_t, gate_t, gate_h, idx_n, acc_n, weight_d, weight_w, conv_n, conv_d, conv_w, state_n, rec_n, out_t,
    out_h,
    H: tl.constexpr, HV: tl.constexpr, HA: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PV: tl.constexpr, PT: tl.constexpr, KI: tl.constexpr,
    BOUNDED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    n, h = pid // H, pid % H
    R: tl.constexpr = HV // H
    NV: tl.constexpr = (V + BV - 1) // BV
    RECORD: tl.constexpr = 2 * K + V
    bos, eos = sequence_range(cu_seqlens, n, N, T)
    slot, count, live = request(indices, accepted, n, N, slots, window, idx_n, acc_n, commits)
    L = tl.where(live, tl.minimum(eos - bos, window), 0)

    o_t = tl.arange(0, PT).to(tl.int64)
    o_v = tl.arange(0, PV)[:, None] * BV + tl.arange(0, BV)[None, :]  # [PV, BV] all outputs of a value head
    out_ptr += h * R * out_h
    for t in range(bos + L, eos):  # padding, tokens past the window, the tail that belongs to no row (n == N)
        to, m_to = row_of(out_rows, t, rows, t < eos)
        for r in range(R):
            zeros = tl.zeros(o_v.shape, out_ptr.dtype.element_ty)
            tl.store(out_ptr + to * out_t + r * out_h + o_v, zeros, o_v < tl.where(m_to, V, 0))
    if not live:
        return

    o_k = tl.arange(0, BK)
    m_t, m_k = o_t < L, o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    x_ptr += bos * x_t
    conv_ptr += slot * conv_n
    record_ptr += slot * rec_n
    c_q = h * K + o_k
    c_k = c_q + H * K
    bias_q, bias_k = None, None
    if conv_bias_ptr is not None:
        bias_q, bias_k = conv_bias_ptr + c_q, conv_bias_ptr + c_k
    q_0, z_q, n_q = load_window(x_ptr + c_q, conv_ptr + c_q * conv_d, weight_ptr + c_q * weight_d, bias_q, count, L, m_k,
                                x_t, conv_w, weight_w, W, BW, PT)  # fmt: skip
    k_0, z_k, n_k = load_window(x_ptr + c_k, conv_ptr + c_k * conv_d, weight_ptr + c_k * weight_d, bias_k, count, L, m_k,
                                x_t, conv_w, weight_w, W, BW, PT)  # fmt: skip
    SLICES: tl.constexpr = R * NV > 1
    if SLICES:
        tl.debug_barrier()
        store_window(conv_ptr + c_q * conv_d, z_q, n_q, count, L, m_k, conv_w, W, BW, PT)
        store_window(conv_ptr + c_k * conv_d, z_k, n_k, count, L, m_k, conv_w, W, BW, PT)
        q, k, kq = queries_and_keys(q_0, k_0, scale, L)

    to, m_to = row_of(out_rows, bos + o_t, rows, m_t)
    m_to = m_to[:, None, None] & (o_v < V)[None, :, :]
    t_k, t_v = state_tile(o_k, BV, KI)
    for r in range(R):
        hv = h * R + r
        h_a = hv // (HV // HA)
        y = tl.load(g_ptr + (bos + o_t)[:, None] * g_t + hv * g_h + o_k[None, :], m_tk, 0.0).to(tl.float32)
        A = tl.exp(tl.load(A_log_ptr + h_a).to(tl.float32))
        if bias_ptr is not None:
            y += tl.load(bias_ptr + h_a * K + o_k, m_k, 0.0).to(tl.float32)[None, :]
        decay = tl.exp(log_decay(y, A, lower_bound, 1.0, 20.0, BOUNDED))
        b = tl.sigmoid(tl.load(beta_ptr + (bos + o_t) * beta_t + hv, m_t, 0.0).to(tl.float32))
        o_tv = (bos + o_t)[:, None, None] * gate_t + hv * gate_h + o_v[None, :, :]
        m_tv = m_t[:, None, None] & (o_v < V)[None, :, :]
        gate = tl.load(gate_ptr + o_tv, m_tv, 0.0).to(tl.float32)

        record = record_ptr + hv * RECORD
        o = tl.zeros([PT, PV, BV], tl.float32)
        for i in range(NV):
            v0 = i * BV
            c = v0 + tl.arange(0, BV)
            m_c = c < V
            c_v = 2 * H * K + hv * V + c
            bias_v = None
            if conv_bias_ptr is not None:
                bias_v = conv_bias_ptr + c_v
            v, z_v, n_v = load_window(x_ptr + c_v, conv_ptr + c_v * conv_d, weight_ptr + c_v * weight_d, bias_v, count, L,
                                      m_c, x_t, conv_w, weight_w, W, BW, PT)  # fmt: skip
            state = state_ptr + slot * state_n + (hv * V + v0) * K + (t_v * K + t_k)
            m_s = (t_k < K) & (v0 + t_v < V)
            # Before the state: Triton lays tiles out as the last loads want it, and the state's sums should be in few lanes.
            old_k, old_decay, old_d = load_records(record, count, o_k, m_k, c, m_c, HV * RECORD, K, PT)
            S_0 = tl.load(state, m_s, 0.0)  # the longest load: what can be done without it follows

            tl.debug_barrier()  # conv states and records are overwritten once every warp has read them
            store_window(conv_ptr + c_v * conv_d, z_v, n_v, count, L, m_c, conv_w, W, BW, PT)
            if not SLICES:
                store_window(conv_ptr + c_q * conv_d, z_q, n_q, count, L, m_k, conv_w, W, BW, PT)
                store_window(conv_ptr + c_k * conv_d, z_k, n_k, count, L, m_k, conv_w, W, BW, PT)
                q, k, kq = queries_and_keys(q_0, k_0, scale, L)
            S = S_0.to(tl.float32)
            if count > 0:
                for t in range(count):
                    S = step(S, row(old_k, t), row(old_decay, t), row(old_d, t), KI, BK)
                checkpoint = cast(S, state_ptr.dtype.element_ty)
                tl.store(state, checkpoint, m_s)
                S = checkpoint.to(tl.float32)
            for t in range(L):
                k_t, decay_t = row(k, t), row(decay, t)
                t_S = S * along_k(decay_t, KI)
                d = row(v, t) - sum_k(t_S * along_k(k_t, KI), KI, BK)
                d *= tl.sum(tl.where(o_t == t, b, 0.0), 0)
                o_i = sum_k(t_S * along_k(row(q, t), KI), KI, BK) + d * tl.sum(tl.where(o_t == t, kq, 0.0), 0)
                S = step(S, k_t, decay_t, d, KI, BK)
                tl.store(record + t * HV * RECORD + 2 * K + c, d, m_c)
                here = (o_t == t)[:, None, None] & (tl.arange(0, PV) == i)[None, :, None]
                o = tl.where(here, o_i[None, None, :], o)
            if i == NV - 1:
                place = record + o_t[:, None] * (HV * RECORD) + o_k[None, :]
                tl.store(place, k, m_tk)
                tl.store(place + K, decay, m_tk)

        o *= (1.0 / tl.sqrt(tl.sum(tl.sum(o * o, 2), 1) / V + eps))[:, None, None]
        if norm_ptr is not None:
            o *= tl.load(norm_ptr + o_v, o_v < V, 0.0).to(tl.float32)[None, :, :]
        if SILU:
            o *= gate
        o *= tl.sigmoid(gate)
        o_tv = to[:, None, None] * out_t + r * out_h + o_v[None, :, :]
        tl.store(out_ptr + o_tv, cast(o, out_ptr.dtype.element_ty), m_to)


@triton.jit(
    do_not_specialize=["N", "slots", "window", "idx_n", "acc_n"],
    do_not_specialize_on_alignment=["conv_ptr", "record_ptr", "conv_n", "conv_d", "conv_w", "rec_n"],
)
def kda_commit_kernel(
    indices, accepted, record_ptr, conv_ptr, state_ptr, N, slots, window, idx_n, acc_n, rec_n, conv_n, conv_d, conv_w,
    state_n,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BW: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PT: tl.constexpr, KI: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    n, h = pid // H, pid % H
    R: tl.constexpr = HV // H
    NV: tl.constexpr = (V + BV - 1) // BV
    RECORD: tl.constexpr = 2 * K + V
    slot, count, live = request(indices, accepted, n, N, slots, window, idx_n, acc_n, 1)
    if not (live & (count > 0)):
        return

    o_k = tl.arange(0, BK)
    m_k = o_k < K
    conv_ptr += slot * conv_n
    c_q = h * K + o_k
    move_history(conv_ptr + c_q * conv_d, count, m_k, conv_w, W, BW)
    move_history(conv_ptr + (c_q + H * K) * conv_d, count, m_k, conv_w, W, BW)
    t_k, t_v = state_tile(o_k, BV, KI)
    for r in range(R):
        hv = h * R + r
        record = record_ptr + slot * rec_n + hv * RECORD
        for i in range(NV):
            v0 = i * BV
            c = v0 + tl.arange(0, BV)
            move_history(conv_ptr + (2 * H * K + hv * V + c) * conv_d, count, c < V, conv_w, W, BW)
            state = state_ptr + slot * state_n + (hv * V + v0) * K + (t_v * K + t_k)
            m_s = (t_k < K) & (v0 + t_v < V)
            k, decay, d = load_records(record, count, o_k, m_k, c, c < V, HV * RECORD, K, PT)
            S = tl.load(state, m_s, 0.0).to(tl.float32)
            for t in range(count):
                S = step(S, row(k, t), row(decay, t), row(d, t), KI, BK)
            tl.store(state, cast(S, state_ptr.dtype.element_ty), m_s)


_verify = Launch(kda_verify_kernel)
_commit = Launch(kda_commit_kernel)


def kda_verify(
    qkv, raw_g, beta, out_gate, conv_state, ssm_state, records, ssm_state_indices, cu_seqlens, num_accepted_tokens,
    conv_weight, conv_bias, A_log, g_bias, norm_weight, scale, lower_bound, eps, activation, out, out_rows=None,
    seen=None,
):  # fmt: skip
    """Launcher; the arguments as `kda.reference.speculative.kda_verify` takes them. Returns the output."""
    T, HV, V, K = len(qkv), *ssm_state.shape[1:]
    fresh = out is None
    if fresh:
        out = torch.empty(T, HV, V, dtype=qkv.dtype, device=qkv.device)
    # None is a factor of zero and no kernel of its own: the sums of one kernel have one order.
    commits = num_accepted_tokens is not None
    accepted = num_accepted_tokens if commits else ssm_state_indices
    tensors = (
        qkv, raw_g, beta, out_gate, ssm_state_indices, cu_seqlens, accepted, conv_weight, conv_bias, A_log,
        g_bias, norm_weight, conv_state, ssm_state, records, out, out_rows,
    )  # fmt: skip
    if _verify.again(seen, tensors):
        return out
    N, window, W = len(ssm_state_indices), records.shape[1], conv_weight.shape[1]
    H, rows = (qkv.shape[1] - HV * V) // (2 * K), N + (fresh and T > 0)  # one more row clears what no row owns
    if not rows:
        return out
    cfg = configs.pick("kda_verify", K=K, V=V, itemsize=ssm_state.element_size(), device=qkv.device)
    _verify(
        seen, rows * H, tensors,
        (scale, 0.0 if lower_bound is None else lower_bound, eps, N, T,
         min(len(conv_state), len(ssm_state), len(records)), len(out), window, int(commits), qkv.stride(0),
         *raw_g.stride()[:2], beta.stride(0), *out_gate.stride()[:2], ssm_state_indices.stride(0), accepted.stride(0),
         *conv_weight.stride(), *conv_state.stride(), ssm_state.stride(0), records.stride(0), *out.stride()[:2]),
        H=H, HV=HV, HA=A_log.numel(), K=K, V=V, W=W, BW=configs.next_power_of_2(W - 1), BK=configs.next_power_of_2(K),
        PV=configs.next_power_of_2(-(-V // cfg["BV"])), PT=configs.next_power_of_2(window),
        BOUNDED=lower_bound is not None, SILU=activation == "silu", **cfg,
    )  # fmt: skip
    return out


def kda_commit(conv_state, ssm_state, records, ssm_state_indices, num_accepted_tokens, seen=None):
    """Launcher; the arguments as `kda.reference.speculative.kda_commit` takes them."""
    tensors = (ssm_state_indices, num_accepted_tokens, records, conv_state, ssm_state)
    N, window = len(ssm_state_indices), records.shape[1]
    if not N or _commit.again(seen, tensors):
        return
    HV, V, K = ssm_state.shape[1:]
    dim, W = conv_state.shape[1], conv_state.shape[2] + 1 - window
    H = (dim - HV * V) // (2 * K)
    cfg = configs.pick("kda_commit", K=K, V=V, itemsize=ssm_state.element_size(), device=ssm_state.device)
    _commit(
        seen, N * H, tensors,
        (N, min(len(conv_state), len(ssm_state), len(records)), window, ssm_state_indices.stride(0),
         num_accepted_tokens.stride(0), records.stride(0), *conv_state.stride(), ssm_state.stride(0)),
        H=H, HV=HV, K=K, V=V, W=W, BW=configs.next_power_of_2(W - 1), BK=configs.next_power_of_2(K),
        PT=configs.next_power_of_2(window), **cfg,
    )  # fmt: skip
