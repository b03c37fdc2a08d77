# SPDX-License-Identifier: Apache-2.0
"""One decode step of a KDA layer between its projections, in one kernel; contract.md section 2.

    z   = W - 1 columns of the conv state ++ x          the state moves on to z[1:]
    q, k, v = silu(sum_w weight[w] z[w])                rounded to the activation dtype
    S   = S * exp(y)      d = b (v - S k^)      S = S + d k^T      o = S q^
    out = o / sqrt(mean(o * o) + eps) * weight * act(gate)

One program takes a request and a key head through all of the head's value heads: the norm needs every output of a value
head, and the channels of a program are no other's, so that its conv states have one reader and one writer. The state of
a value head passes through registers in slices [BV, K]; on a GPU one slice is the whole of it at the usual head dims.
There it is a tile [K / KI, BV, KI], the last dim across a few lanes and the first one in each lane's registers: a sum
over K is an addition of registers first and takes few shuffles after it.
"""
import torch
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.conv import convolve, load_taps, load_window, store_window
from kda.triton.launch import Launch
from kda.triton.tiles import along_k, along_v, cast, log_decay, state_tile, sum_k


@triton.jit
def sum_all(x, NV: tl.constexpr):
    """Sum over all outputs of a value head, [BV] or in slices [PV, BV]."""
    if NV == 1:
        return tl.sum(x, 0)
    else:
        return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def queries_and_keys(z_q, z_k, w_q, w_k, b_q, b_k, scale, W: tl.constexpr, KI: tl.constexpr, dtype: tl.constexpr):
    """q^ with its scale and k^ as factors of a state tile, and their product."""
    q, k = convolve(z_q, w_q, b_q, True, W, dtype), convolve(z_k, w_k, b_k, True, W, dtype)
    q_norm = scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
    k_norm = 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    kq = tl.sum(k * q, 0) * (k_norm * q_norm)
    return along_k(q * q_norm, KI), along_k(k * k_norm, KI), kq


@triton.jit
def decay_and_beta(g, g_bias, A_log, beta, lower_bound, KI: tl.constexpr, BOUNDED: tl.constexpr):
    """exp(y) as a factor of a state tile, and b."""
    y = g.to(tl.float32)
    if g_bias is not None:
        y += g_bias.to(tl.float32)
    y = log_decay(y, tl.exp(A_log.to(tl.float32)), lower_bound, 1.0, 20.0, BOUNDED)
    return along_k(tl.exp(y), KI), tl.sigmoid(beta.to(tl.float32))


# Sums run in the order in which a warp holds its loads, so the alignment of an input must not decide it.
@triton.jit(
    do_not_specialize=["slots", "rows", "idx_n"],
    do_not_specialize_on_alignment=[
        "x_ptr", "g_ptr", "beta_ptr", "gate_ptr", "conv_ptr", "out_ptr", "out_rows", "x_n", "g_n", "g_h", "beta_n",
        "gate_n", "gate_h", "conv_n", "conv_d", "conv_w", "out_n", "out_h",
    ],
)  # fmt: skip
def kda_decode_kernel(
    x_ptr, g_ptr, beta_ptr, gate_ptr, indices, weight_ptr, conv_bias_ptr, A_log_ptr, bias_ptr, norm_ptr,  # inputs
    conv_ptr, state_ptr, out_ptr, out_rows,
    scale, lower_bound, eps, slots, rows,
    x_n, g_n, g_h, beta_n, gate_n, gate_h, idx_n, weight_d, weight_w, conv_n, conv_d, conv_w, state_n, out_n, out_h,
    H: tl.constexpr, HV: tl.constexpr, HA: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PV: tl.constexpr, KI: tl.constexpr, STREAM: tl.constexpr,
    BOUNDED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    n, h = pid // H, pid % H
    R: tl.constexpr = HV // H
    NV: tl.constexpr = (V + BV - 1) // BV
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    slot = tl.load(indices + n * idx_n).to(tl.int64)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    if NV == 1:
        o_v = tl.arange(0, BV)  # of all outputs of a value head
    else:
        o_v = tl.arange(0, PV)[:, None] * BV + tl.arange(0, BV)[None, :]
    m_v = o_v < V
    m_out, row = m_v, n
    if out_rows is not None:
        row = tl.load(out_rows + n).to(tl.int64)
        m_out = o_v < tl.where((row >= 0) & (row < rows), V, 0)
    out_ptr += row * out_n + h * R * out_h
    if (slot <= 0) | (slot >= slots):  # padding
        for r in range(R):
            tl.store(out_ptr + r * out_h + o_v, tl.zeros(o_v.shape, out_ptr.dtype.element_ty), m_out)
        return

    x_ptr += n * x_n
    conv_ptr += slot * conv_n
    c_q = h * K + o_k
    c_k = c_q + H * K
    z_q = load_window(x_ptr + c_q, conv_ptr + c_q * conv_d, m_k, conv_w, W)
    z_k = load_window(x_ptr + c_k, conv_ptr + c_k * conv_d, m_k, conv_w, W)
    w_q = load_taps(weight_ptr + c_q * weight_d, m_k, weight_w, W)
    w_k = load_taps(weight_ptr + c_k * weight_d, m_k, weight_w, W)
    b_q, b_k = None, None
    if conv_bias_ptr is not None:
        b_q, b_k = tl.load(conv_bias_ptr + c_q, m_k, 0.0), tl.load(conv_bias_ptr + c_k, m_k, 0.0)

    t_k, t_v = state_tile(o_k, BV, KI)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + o_v, m_v, 0.0)
    SLICES: tl.constexpr = STREAM or R * NV > 1
    if SLICES:
        q, k, kq = queries_and_keys(z_q, z_k, w_q, w_k, b_q, b_k, scale, W, KI, dtype)
    for r in range(R):
        hv = h * R + r
        h_a = hv // (HV // HA)
        g = tl.load(g_ptr + n * g_n + hv * g_h + o_k, m_k, 0.0)
        g_bias = None
        if bias_ptr is not None:
            g_bias = tl.load(bias_ptr + h_a * K + o_k, m_k, 0.0)
        A_log, beta = tl.load(A_log_ptr + h_a), tl.load(beta_ptr + n * beta_n + hv)
        gate = tl.load(gate_ptr + n * gate_n + hv * gate_h + o_v, m_v, 0.0)
        if SLICES:
            decay, b = decay_and_beta(g, g_bias, A_log, beta, lower_bound, KI, BOUNDED)

        o = tl.zeros(o_v.shape, tl.float32)
        for i in range(NV):
            v0 = i * BV
            c = v0 + tl.arange(0, BV)
            m_c = c < V
            c_v = 2 * H * K + hv * V + c
            z_v = load_window(x_ptr + c_v, conv_ptr + c_v * conv_d, m_c, conv_w, W)
            w_v = load_taps(weight_ptr + c_v * weight_d, m_c, weight_w, W)
            b_v = None
            if conv_bias_ptr is not None:
                b_v = tl.load(conv_bias_ptr + c_v, m_c, 0.0)
            state = state_ptr + slot * state_n + (hv * V + v0) * K + (t_v * K + t_k)
            m_s = (t_k < K) & (v0 + t_v < V)
            if not STREAM:  # the last load and the longest one: what follows is done while it is on its way
                S_0 = tl.load(state, m_s, 0.0)

            tl.debug_barrier()  # a conv state is overwritten once every warp has read it
            store_window(conv_ptr + c_v * conv_d, z_v, m_c, conv_w, W)
            if r + i == 0:
                store_window(conv_ptr + c_q * conv_d, z_q, m_k, conv_w, W)
                store_window(conv_ptr + c_k * conv_d, z_k, m_k, conv_w, W)
            if STREAM:
                loaded = True
            else:  # it is; but a compiler that does not know leaves what follows behind the loads of S
                loaded = tl.load(indices + n * idx_n) == slot
            if loaded:
                v = convolve(z_v, w_v, b_v, True, W, dtype)
                if not SLICES:
                    q, k, kq = queries_and_keys(z_q, z_k, w_q, w_k, b_q, b_k, scale, W, KI, dtype)
                    decay, b = decay_and_beta(g, g_bias, A_log, beta, lower_bound, KI, BOUNDED)

                if STREAM:  # a row is loaded, used and stored before the next one
                    S_0 = tl.load(state, m_s, 0.0)
                S = S_0.to(tl.float32) * decay
                Sq = sum_k(S * q, KI, BK)
                d = (v - sum_k(S * k, KI, BK)) * b
                S += along_v(d, KI, BK) * k
                tl.store(state, cast(S, state_ptr.dtype.element_ty), m_s)
                Sq += d * kq  # of the new state
                if NV == 1:
                    o = Sq
                else:
                    o = tl.where(tl.arange(0, PV)[:, None] == i, Sq[None, :], o)

        o *= 1.0 / tl.sqrt(sum_all(o * o, NV) / V + eps)
        if norm_ptr is not None:
            o *= norm.to(tl.float32)
        z = gate.to(tl.float32)
        if SILU:
            o *= z
        o *= tl.sigmoid(z)
        tl.store(out_ptr + r * out_h + o_v, cast(o, out_ptr.dtype.element_ty), m_out)


_launch = Launch(kda_decode_kernel)


def kda_decode(
    qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, conv_weight, conv_bias, A_log, g_bias,
    norm_weight, scale, lower_bound, eps, activation, out, out_rows=None, seen=None,
):  # fmt: skip
    """Launcher; the arguments as `kda.reference.decode.kda_decode` takes them. Returns the output."""
    if out is None:
        out = torch.empty(out_gate.shape, dtype=qkv.dtype, device=qkv.device)
    tensors = (
        qkv, raw_g, beta, out_gate, ssm_state_indices, conv_weight, conv_bias, A_log, g_bias, norm_weight, conv_state,
        ssm_state, out, out_rows,
    )  # fmt: skip
    if _launch.again(seen, tensors):
        return out
    N, HV, V, K = len(qkv), *ssm_state.shape[1:]
    if not N:
        return out
    H = (qkv.shape[1] - HV * V) // (2 * K)
    cfg = configs.pick("kda_decode", K=K, V=V, itemsize=ssm_state.element_size(), device=qkv.device)
    _launch(
        seen, N * H, tensors,
        (scale, 0.0 if lower_bound is None else lower_bound, eps, min(len(conv_state), len(ssm_state)), len(out),
         qkv.stride(0), *raw_g.stride()[:2], beta.stride(0), *out_gate.stride()[:2], ssm_state_indices.stride(0),
         *conv_weight.stride(), *conv_state.stride(), ssm_state.stride(0), *out.stride()[:2]),
        H=H, HV=HV, HA=A_log.numel(), K=K, V=V, W=conv_weight.shape[1], BK=configs.next_power_of_2(K),
        PV=configs.next_power_of_2(-(-V // cfg["BV"])), BOUNDED=lower_bound is not None, SILU=activation == "silu",
        **cfg,
    )  # fmt: skip
    return out
