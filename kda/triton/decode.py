# SPDX-License-Identifier: Apache-2.0
"""One decode step of a KDA layer between its projections, in one kernel; contract.md section 2.

    z   = W - 1 columns of the conv state ++ x          the state moves on to z[1:]
    q, k, v = silu(sum_w weight[w] z[w])                rounded to the activation dtype
    S   = S * exp(y)      d = b (v - S k^)      S = S + d k^T      o = S q^
    out = o / sqrt(mean(o * o) + eps) * weight * act(gate)

One program takes a request and a key head through all of the head's value heads: the norm needs every output of a value
head, and the channels of a program are no other's, so that its conv states have one reader and one writer. The state of
a value head passes through registers in slices [BV, K]; on a GPU one slice is the whole of it at the usual head dims.
There a row of K lies as K / KI pieces of KI in each lane, [K / KI, BV, KI]: a sum over K then needs few shuffles.
"""
import torch
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.launch import Launch
from kda.triton.tiles import cast, log_decay


@triton.jit
def convolve(x, history, weight, bias, m, sh_w, sw_w, W: tl.constexpr):
    """silu of the convolution at the newest token, in fp32 but rounded as `x` is; pointers are [BD]."""
    acc = tl.zeros(m.shape, tl.float32)
    for w in tl.static_range(W - 1):
        z = tl.load(history + w * sh_w, m, 0.0).to(tl.float32)
        acc += z * tl.load(weight + w * sw_w, m, 0.0).to(tl.float32)
    z = cast(tl.load(x, m, 0.0).to(tl.float32), history.dtype.element_ty).to(tl.float32)
    acc += z * tl.load(weight + (W - 1) * sw_w, m, 0.0).to(tl.float32)
    if bias is not None:
        acc += tl.load(bias, m, 0.0).to(tl.float32)
    acc *= tl.sigmoid(acc)
    return cast(acc, x.dtype.element_ty).to(tl.float32)


@triton.jit
def move_on(x, history, m, sh_w, W: tl.constexpr):
    """Columns 0 .. W - 2 of the conv state become 1 .. W - 2 and `x`: each is read before it is written."""
    for w in tl.static_range(W - 2):
        tl.store(history + w * sh_w, tl.load(history + (w + 1) * sh_w, m, 0.0), m)
    z = cast(tl.load(x, m, 0.0).to(tl.float32), history.dtype.element_ty)
    tl.store(history + (W - 2) * sh_w, z, m)


@triton.jit
def along_k(x, KI: tl.constexpr):
    """[BK] as a factor of a state tile, [BV, BK] or [BK / KI, BV, KI]."""
    BK: tl.constexpr = x.shape[0]
    if KI == BK:
        return x[None, :]
    else:
        return tl.reshape(x, (BK // KI, 1, KI))


@triton.jit
def along_v(x, KI: tl.constexpr, BK: tl.constexpr):
    """[BV] as a factor of a state tile."""
    if KI == BK:
        return x[:, None]
    else:
        return x[None, :, None]


@triton.jit
def sum_k(S, KI: tl.constexpr, BK: tl.constexpr):
    """[BV] sums over K of a state tile."""
    if KI == BK:
        return tl.sum(S, 1)
    else:
        return tl.sum(tl.sum(S, 0), 1)


@triton.jit
def sum_all(x, NV: tl.constexpr):
    if NV == 1:
        return tl.sum(x, 0)
    else:
        return tl.sum(tl.sum(x, 1), 0)


# Sums run in the order in which a warp holds its loads, so the alignment of an input must not decide it.
@triton.jit(
    do_not_specialize=["slots", "idx_n"],
    do_not_specialize_on_alignment=[
        "x_ptr", "g_ptr", "beta_ptr", "gate_ptr", "conv_ptr", "out_ptr", "x_n", "g_n", "g_h", "beta_n", "gate_n",
        "gate_h", "conv_n", "conv_d", "conv_w", "out_n", "out_h",
    ],
)  # fmt: skip
def kda_decode_kernel(
    x_ptr, g_ptr, beta_ptr, gate_ptr, indices, weight_ptr, conv_bias_ptr, A_log_ptr, bias_ptr, norm_ptr,  # inputs
    conv_ptr, state_ptr, out_ptr,
    scale, lower_bound, eps, slots,
    x_n, g_n, g_h, beta_n, gate_n, gate_h, idx_n, weight_d, weight_w, conv_n, conv_d, conv_w, state_n, out_n, out_h,
    H: tl.constexpr, HV: tl.constexpr, HA: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PV: tl.constexpr, KI: tl.constexpr, STREAM: tl.constexpr,
    BOUNDED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    n, h = pid // H, pid % H
    R: tl.constexpr = HV // H
    NV: tl.constexpr = (V + BV - 1) // BV

    slot = tl.load(indices + n * idx_n).to(tl.int64)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    if NV == 1:
        o_v = tl.arange(0, BV)  # of all outputs of a value head
    else:
        o_v = tl.arange(0, PV)[:, None] * BV + tl.arange(0, BV)[None, :]
    m_v = o_v < V
    out_ptr += n * out_n + h * R * out_h
    if (slot <= 0) | (slot >= slots):  # padding
        for r in range(R):
            tl.store(out_ptr + r * out_h + o_v, tl.zeros(o_v.shape, out_ptr.dtype.element_ty), m_v)
        return

    x_ptr += n * x_n
    conv_ptr += slot * conv_n
    c_q = h * K + o_k
    c_k = c_q + H * K
    bias_q, bias_k = None, None
    if conv_bias_ptr is not None:
        bias_q, bias_k = conv_bias_ptr + c_q, conv_bias_ptr + c_k
    q = convolve(x_ptr + c_q, conv_ptr + c_q * conv_d, weight_ptr + c_q * weight_d, bias_q, m_k, conv_w, weight_w, W)
    k = convolve(x_ptr + c_k, conv_ptr + c_k * conv_d, weight_ptr + c_k * weight_d, bias_k, m_k, conv_w, weight_w, W)

    if KI == BK:
        t_k, t_v = o_k[None, :], tl.arange(0, BV)[:, None]  # of the state tile
    else:
        t_k = tl.arange(0, BK // KI)[:, None, None] * KI + tl.arange(0, KI)[None, None, :]
        t_v = tl.arange(0, BV)[None, :, None]
    for r in range(R):
        hv = h * R + r
        h_a = hv // (HV // HA)
        y = tl.load(g_ptr + n * g_n + hv * g_h + o_k, m_k, 0.0).to(tl.float32)
        A = tl.exp(tl.load(A_log_ptr + h_a).to(tl.float32))
        if bias_ptr is not None:
            y += tl.load(bias_ptr + h_a * K + o_k, m_k, 0.0).to(tl.float32)
        b = tl.sigmoid(tl.load(beta_ptr + n * beta_n + hv).to(tl.float32))
        gate = tl.load(gate_ptr + n * gate_n + hv * gate_h + o_v, m_v, 0.0).to(tl.float32)

        o = tl.zeros(o_v.shape, tl.float32)
        for i in range(NV):
            v0 = i * BV
            c = v0 + tl.arange(0, BV)
            m_c = c < V
            c_v = 2 * H * K + hv * V + c
            bias_v = None
            if conv_bias_ptr is not None:
                bias_v = conv_bias_ptr + c_v
            v = convolve(
                x_ptr + c_v, conv_ptr + c_v * conv_d, weight_ptr + c_v * weight_d, bias_v, m_c, conv_w, weight_w, W
            )  # fmt: skip
            state = state_ptr + slot * state_n + (hv * V + v0) * K + (t_v * K + t_k)
            m_s = (t_k < K) & (v0 + t_v < V)
            if not STREAM:  # on its way while q, k and v are made
                S = tl.load(state, m_s, 0.0).to(tl.float32)
            tl.debug_barrier()  # a column is overwritten once every warp has read it
            move_on(x_ptr + c_v, conv_ptr + c_v * conv_d, m_c, conv_w, W)

            q_norm = scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
            k_norm = 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
            kq = tl.sum(k * q, 0) * (k_norm * q_norm)
            t_q, t_key = along_k(q * q_norm, KI), along_k(k * k_norm, KI)
            decay = along_k(tl.exp(log_decay(y, A, lower_bound, 1.0, 20.0, BOUNDED)), KI)
            if STREAM:  # a row is loaded, used and stored before the next one
                S = tl.load(state, m_s, 0.0).to(tl.float32)
            S *= decay
            Sq = sum_k(S * t_q, KI, BK)
            d = (v - sum_k(S * t_key, KI, BK)) * b
            S += along_v(d, KI, BK) * t_key
            tl.store(state, cast(S, state_ptr.dtype.element_ty), m_s)
            Sq += d * kq  # of the new state
            if NV == 1:
                o = Sq
            else:
                o = tl.where(tl.arange(0, PV)[:, None] == i, Sq[None, :], o)

        o *= 1.0 / tl.sqrt(sum_all(o * o, NV) / V + eps)
        if norm_ptr is not None:
            o *= tl.load(norm_ptr + o_v, m_v, 0.0).to(tl.float32)
        if SILU:
            o *= gate
        o *= tl.sigmoid(gate)
        tl.store(out_ptr + r * out_h + o_v, cast(o, out_ptr.dtype.element_ty), m_v)

    move_on(x_ptr + c_q, conv_ptr + c_q * conv_d, m_k, conv_w, W)
    move_on(x_ptr + c_k, conv_ptr + c_k * conv_d, m_k, conv_w, W)


_launch = Launch(kda_decode_kernel)


def kda_decode(
    qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, conv_weight, conv_bias, A_log, g_bias,
    norm_weight, scale, lower_bound, eps, activation, out, seen=None,
):  # fmt: skip
    """Launcher; the arguments as `kda.reference.decode.kda_decode` takes them. Returns the output."""
    N, HV, V, K = len(qkv), *ssm_state.shape[1:]
    if out is None:
        out = torch.empty(N, HV, V, dtype=qkv.dtype, device=qkv.device)
    tensors = (
        qkv, raw_g, beta, out_gate, ssm_state_indices, conv_weight, conv_bias, A_log, g_bias, norm_weight, conv_state,
        ssm_state, out,
    )  # fmt: skip
    if not N or _launch.again(seen, tensors):
        return out
    H = (qkv.shape[1] - HV * V) // (2 * K)
    cfg = configs.pick("kda_decode", K=K, V=V, itemsize=ssm_state.element_size(), device=qkv.device)
    _launch(
        seen, N * H, tensors,
        (scale, 0.0 if lower_bound is None else lower_bound, eps, min(len(conv_state), len(ssm_state)), qkv.stride(0),
         *raw_g.stride()[:2], beta.stride(0), *out_gate.stride()[:2], ssm_state_indices.stride(0),
         *conv_weight.stride(), *conv_state.stride(), ssm_state.stride(0), *out.stride()[:2]),
        H=H, HV=HV, HA=A_log.numel(), K=K, V=V, W=conv_weight.shape[1], BK=configs.next_power_of_2(K),
        PV=configs.next_power_of_2(-(-V // cfg["BV"])), BOUNDED=lower_bound is not None, SILU=activation == "silu", **cfg,
    )  # fmt: skip
    return out
