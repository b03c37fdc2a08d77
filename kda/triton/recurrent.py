# SPDX-License-Identifier: Apache-2.0
"""The delta rule token by token (decode, speculative verify); contract.md section 2.

    S = S * exp(y)      d = b (v - S k^)      S = S + d k^T      o = S q^

One program carries a slice [BV, K] of the state of one sequence and value head through its tokens: each row of S takes
part in its own outputs only.
"""
import torch
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.launch import Launch
from kda.triton.tiles import cast, log_decay, sequence_range


@triton.jit
def state_slot(indices, accepted, n, slots, window, idx_n, idx_w, ACCEPTED: tl.constexpr):
    """Slot that row `n` starts from, and whether it is one: not the null slot, past the pool or a stale row."""
    column = n * 0
    live = column == 0
    if ACCEPTED:
        column += tl.load(accepted + n).to(tl.int64) - 1
        live = (column >= 0) & (column < window)
        column = tl.where(live, column, 0)
    slot = tl.load(indices + n * idx_n + column * idx_w).to(tl.int64)
    return slot, live & (slot > 0) & (slot < slots)


@triton.jit
def load_token(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, t, m_k, m_v, A, bias, lower_bound, q_t, k_t, v_t, g_t, beta_t,
    L2NORM: tl.constexpr, HAS_BETA: tl.constexpr, HEADWISE: tl.constexpr, SIGMOID_BETA: tl.constexpr,
    RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """q^, k^ [BK], v [BV], log decays y [BK] and b of token `t`."""
    q = tl.load(q_ptr + t * q_t, m_k, 0.0).to(tl.float32)
    k = tl.load(k_ptr + t * k_t, m_k, 0.0).to(tl.float32)
    v = tl.load(v_ptr + t * v_t, m_v, 0.0).to(tl.float32)
    y = tl.load(g_ptr + t * g_t, m_k, 0.0).to(tl.float32)
    if L2NORM:
        q, k = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6), k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    if RAW_GATE:
        if HAS_BIAS:
            y += bias
        y = log_decay(y, A, lower_bound, 1.0, 20.0, BOUNDED)
    b = 1.0
    if HAS_BETA:
        if HEADWISE:
            b = tl.load(beta_ptr + t * beta_t, m_v, 0.0).to(tl.float32)
        else:
            b = tl.load(beta_ptr + t * beta_t).to(tl.float32)
        if SIGMOID_BETA:
            b = tl.sigmoid(b)
    return q, k, v, y, b


@triton.jit
def advance(S, q, k, v, y, b):
    """The state after one token, and its output [BV]: S' q + d (k q), so that one sum need not wait for the other."""
    S *= tl.exp(y)[None, :]
    o = tl.sum(S * q[None, :], 1)
    d = (v - tl.sum(S * k[None, :], 1)) * b
    S += d[:, None] * k[None, :]
    return S, o + d * tl.sum(q * k, 0)


# Sums over K run in the order in which a warp holds its loads, so the alignment of a token input must not decide it.
@triton.jit(
    do_not_specialize=["T", "N", "slots", "window", "idx_n", "idx_w"],
    do_not_specialize_on_alignment=["q_ptr", "k_ptr", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h"],
)
def fused_recurrent_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, A_log_ptr, bias_ptr, cu_seqlens, indices, accepted,  # inputs
    state_ptr, token_states_ptr, out_ptr,
    scale, lower_bound, T, N, slots, window,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, out_b, out_t, out_h, out_v,
    state_n, idx_n, idx_w,  # strides
    H: tl.constexpr, HV: tl.constexpr, HA: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STREAM: tl.constexpr,
    IS_VARLEN: tl.constexpr, INDEXED: tl.constexpr, WINDOW: tl.constexpr, ACCEPTED: tl.constexpr,
    HAS_STATE: tl.constexpr, PER_TOKEN: tl.constexpr, L2NORM: tl.constexpr, HAS_BETA: tl.constexpr,
    HEADWISE: tl.constexpr, SIGMOID_BETA: tl.constexpr, RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    NV: tl.constexpr = (V + BV - 1) // BV
    n, hv, v0 = pid // (HV * NV), pid // NV % HV, pid % NV * BV
    h, h_a = hv // (HV // H), hv // (HV // HA)
    if IS_VARLEN:
        bos, eos = sequence_range(cu_seqlens, n, N, T)
        batch = n * 0
    else:
        batch, bos, eos = n, n * 0, n * 0 + T

    o_k, o_v = tl.arange(0, BK), v0 + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_vk = m_v[:, None] & m_k[None, :]
    o_vk = hv * V * K + o_v[:, None] * K + o_k[None, :]
    q_ptr += batch * q_b + h * q_h + o_k
    k_ptr += batch * k_b + h * k_h + o_k
    v_ptr += batch * v_b + hv * v_h + o_v
    g_ptr += batch * g_b + hv * g_h + o_k
    out_ptr += batch * out_b + hv * out_h + o_v * out_v
    if HAS_BETA:
        beta_ptr += batch * beta_b + hv * beta_h
        if HEADWISE:
            beta_ptr += o_v

    slot, live = n, n < N
    if INDEXED:
        if live:
            slot, live = state_slot(indices, accepted, n, slots, window, idx_n, idx_w, ACCEPTED)
    if not live:  # padding, or (n == N) the tail that belongs to no sequence
        for t in range(bos, eos):
            tl.store(out_ptr + t * out_t, tl.zeros([BV], out_ptr.dtype.element_ty), m_v)
        return

    A, bias = 0.0, 0.0
    if RAW_GATE:
        A = tl.exp(tl.load(A_log_ptr + h_a).to(tl.float32))
        if HAS_BIAS:
            bias = tl.load(bias_ptr + h_a * K + o_k, m_k, 0.0).to(tl.float32)

    if STREAM and HAS_STATE and not PER_TOKEN and not WINDOW:  # one token: its state need not be kept between tokens
        if eos - bos == 1:
            q, k, v, y, b = load_token(
                q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, bos, m_k, m_v, A, bias, lower_bound, q_t, k_t, v_t, g_t, beta_t,
                L2NORM, HAS_BETA, HEADWISE, SIGMOID_BETA, RAW_GATE, HAS_BIAS, BOUNDED,
            )  # fmt: skip
            S = tl.load(state_ptr + slot * state_n + o_vk, m_vk, 0.0).to(tl.float32)
            S, o = advance(S, q * scale, k, v, y, b)
            tl.store(state_ptr + slot * state_n + o_vk, cast(S, state_ptr.dtype.element_ty), m_vk)
            tl.store(out_ptr + bos * out_t, cast(o, out_ptr.dtype.element_ty), m_v)
            return

    if HAS_STATE:
        S = tl.load(state_ptr + slot * state_n + o_vk, m_vk, 0.0).to(tl.float32)
    else:
        S = tl.zeros([BV, BK], tl.float32)
    for t in range(bos, eos):
        q, k, v, y, b = load_token(
            q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, t, m_k, m_v, A, bias, lower_bound, q_t, k_t, v_t, g_t, beta_t,
            L2NORM, HAS_BETA, HEADWISE, SIGMOID_BETA, RAW_GATE, HAS_BIAS, BOUNDED,
        )  # fmt: skip
        S, o = advance(S, q * scale, k, v, y, b)
        tl.store(out_ptr + t * out_t, cast(o, out_ptr.dtype.element_ty), m_v)
        if PER_TOKEN:
            row = token_states_ptr + (batch * T + t) * HV * V * K + o_vk
            tl.store(row, cast(S, token_states_ptr.dtype.element_ty), m_vk)
        elif WINDOW:
            slot = tl.load(indices + n * idx_n + (t - bos) * idx_w, t - bos < window, 0).to(tl.int64)
            if (slot > 0) & (slot < slots):
                tl.store(state_ptr + slot * state_n + o_vk, cast(S, state_ptr.dtype.element_ty), m_vk)

    if HAS_STATE and not PER_TOKEN and not WINDOW:
        if bos < eos:
            tl.store(state_ptr + slot * state_n + o_vk, cast(S, state_ptr.dtype.element_ty), m_vk)


_launch = Launch(fused_recurrent_kernel)


def find(seen, *tensors):
    """`fused_recurrent_kda` as before on `tensors` in the kernel's order, see Launch.find."""
    return _launch.find(seen, tensors)


def fused_recurrent_kda(
    q, k, v, g, beta, scale, state, cu_seqlens, ssm_state_indices, num_accepted_tokens, use_qk_l2norm, sigmoid_beta,
    A_log, g_bias, lower_bound, token_states, out, seen=None,
):  # fmt: skip
    """Launcher; the arguments as `kda.reference.recurrent.fused_recurrent_kda` takes them. Returns the output."""
    fresh = out is None
    if fresh:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    tensors = (
        q, k, v, g, beta, A_log, g_bias, cu_seqlens, ssm_state_indices, num_accepted_tokens, state, token_states, out
    )  # fmt: skip
    if _launch.again(seen, tensors):
        return out
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    varlen, indexed = cu_seqlens is not None, ssm_state_indices is not None
    N = cu_seqlens.numel() - 1 if varlen else B
    tail = varlen and fresh  # one more row of programs clears what lies past the last sequence
    window = indexed and ssm_state_indices.dim() == 2
    cfg = configs.pick("fused_recurrent", N=N, HV=HV, K=K, V=V, T=T, device=q.device)
    programs = (N + tail) * HV * -(-V // cfg["BV"])
    if programs and T:
        headwise = beta is not None and beta.dim() == 4
        strides = (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3],
            *((0, 0, 0) if beta is None else (*beta.stride()[:2], beta.stride(2) if headwise else 1)), *out.stride(),
            0 if state is None else state.stride(0),
            *((0, 0) if not indexed else ssm_state_indices.stride() if window else (ssm_state_indices.stride(0), 0)),
        )  # fmt: skip
        _launch(
            seen, programs, tensors,
            (scale, 0.0 if lower_bound is None else lower_bound, T, N, 0 if state is None else state.shape[0],
             ssm_state_indices.shape[1] if window else 1, *strides),
            H=H, HV=HV, HA=HV if A_log is None else A_log.numel(), K=K, V=V, BK=configs.next_power_of_2(K),
            IS_VARLEN=varlen, INDEXED=indexed, WINDOW=window, ACCEPTED=num_accepted_tokens is not None,
            HAS_STATE=state is not None, PER_TOKEN=token_states is not None, L2NORM=use_qk_l2norm,
            HAS_BETA=beta is not None, HEADWISE=headwise, SIGMOID_BETA=sigmoid_beta, RAW_GATE=A_log is not None,
            HAS_BIAS=g_bias is not None, BOUNDED=lower_bound is not None, **cfg,
        )  # fmt: skip
    return out
