# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding from one checkpoint a request and a record of each draft token (contract section 2).

The record of a token is all that it does to the state, `S = S * exp(y) + outer(d, k^)`: k^ [K], exp(y) [K] and d [V] side
by side. The checkpoint of a request is its recurrent state and columns 0 to W-2 of its conv state; columns W-1 on hold the
convolution's inputs of the window.
"""

import torch

from kda.reference._common import (
    full_precision, gate_parameters, is_live, l2_normalise, log_decay, per_value_head, sigmoid, token_ranges,
)  # fmt: skip
from kda.reference.conv import causal_conv1d_update
from kda.reference.norm import rms_norm_gated
from kda.reference.tokens import place_rows


def _live_rows(ssm_state_indices, num_accepted_tokens, *pools):
    """Rows that are requests, their slots, and how many records of each are to be applied; on the host."""
    slots = ssm_state_indices.cpu().long()
    counts = torch.zeros_like(slots) if num_accepted_tokens is None else num_accepted_tokens.cpu().long()
    live = is_live(slots, min(map(len, pools))) & (counts >= 0) & (counts <= pools[-1].shape[1])
    return live.nonzero().flatten(), slots[live], counts[live]


def kda_commit(conv_state, ssm_state, records, ssm_state_indices, num_accepted_tokens):
    """The checkpoints of the rows' slots move on by the accepted tokens, in place.

    conv_state [slots, dim, W-1+window]; ssm_state [slots, HV, V, K]; records [slots, window, HV, 2K+V];
    ssm_state_indices, num_accepted_tokens [N]. Padding rows and rows without an accepted token change nothing.
    """
    past, K = conv_state.shape[2] - records.shape[1], ssm_state.shape[-1]
    _, slots, counts = _live_rows(ssm_state_indices, num_accepted_tokens, conv_state, ssm_state, records)
    for slot, count in zip(slots.tolist(), counts.tolist()):
        if count:
            S = ssm_state[slot].float()
            for k, decay, d in (row.split([K, K, row.shape[-1] - 2 * K], -1) for row in records[slot, :count]):
                S = (S * decay[:, None]).addcmul_(d[..., None], k[:, None])
            ssm_state[slot] = S
            conv_state[slot, :, :past] = conv_state[slot, :, count:count + past].clone()


@full_precision()
def kda_verify(qkv, raw_g, beta, out_gate, conv_state, ssm_state, records, ssm_state_indices, cu_seqlens,
               num_accepted_tokens, conv_weight, conv_bias, A_log, g_bias, norm_weight, scale, lower_bound, eps,
               activation, out, out_rows=None):
    """Output [T, HV, V] (or into `out`) of windows of tokens; their records, and conv inputs, go to the rows' slots.

    qkv [T, dim], dim = 2*H*K + HV*V; raw_g [T, HV, K]; beta [T, HV] logits; out_gate [T, HV, V]; conv_state, ssm_state,
    records and ssm_state_indices as `kda_commit` takes them; cu_seqlens [N+1]; num_accepted_tokens [N] of the last
    window, which are committed first, or None (nothing to commit). conv_weight [dim, W]; conv_bias [dim] or None;
    A_log [H or HV]; g_bias [H or HV, K] or None; norm_weight [V] or None; activation "sigmoid" or "silu", of the gate.
    out_rows [T] or None: the output of token t of a row goes to `out[out_rows[t]]`, if that exists.
    """
    if num_accepted_tokens is not None:
        kda_commit(conv_state, ssm_state, records, ssm_state_indices, num_accepted_tokens)
    T, (HV, V, K), past, dev = len(qkv), ssm_state.shape[1:], conv_weight.shape[1] - 1, qkv.device
    H = (qkv.shape[1] - HV * V) // (2 * K)
    rows, slots, _ = _live_rows(ssm_state_indices, num_accepted_tokens, conv_state, ssm_state, records)
    _, first, length = token_ranges(cu_seqlens, 1, T)
    y = qkv.new_zeros(T, HV, V) if out is None or out_rows is not None else out
    for begin, end in zip(first.tolist(), (first + length).tolist()):
        y[begin:end] = 0
    first, length = first[rows], length[rows].clamp(max=records.shape[1])

    history = conv_state[slots.to(dev), :, :past]  # a copy
    for slot, begin, L in zip(slots.tolist(), first.tolist(), length.tolist()):
        conv_state[slot, :, past:past + L] = qkv[begin:begin + L].t().to(conv_state.dtype)
    S = ssm_state[slots.to(dev)].float()
    A_log, g_bias = gate_parameters(A_log, g_bias, HV, K)
    A_log = A_log[:, None]
    for t in range(max(length.tolist(), default=0)):
        now = length > t
        i, at, slot = now.nonzero().flatten().to(dev), (first + t)[now].to(dev), slots[now].to(dev)
        line = history[i]
        x = causal_conv1d_update(qkv[at, :, None], line, conv_weight, conv_bias, True, None, None, None, (), None)
        history[i] = line
        q, k, v = x[..., 0].float().split([H * K, H * K, HV * V], -1)
        q = per_value_head(l2_normalise(q.unflatten(-1, (H, K))) * scale, HV, 1)
        k = per_value_head(l2_normalise(k.unflatten(-1, (H, K))), HV, 1)
        decay = log_decay(raw_g[at], A_log, g_bias, lower_bound).exp()

        S_t = S[i] * decay[:, :, None]
        d = sigmoid(beta[at].float())[..., None] * (v.unflatten(-1, (HV, V)) - _state_times(S_t, k))
        S[i] = S_t.addcmul_(d[..., None], k[:, :, None])
        records[slot, t] = torch.cat([k, decay, d], -1)
        o = torch.empty(len(i), HV, V, dtype=y.dtype, device=dev)
        rms_norm_gated(_state_times(S_t, q), out_gate[at], norm_weight, None, activation, None, None, eps, o)
        y[at] = o
    return y if out_rows is None else place_rows(out, out_rows, y, end=int(cu_seqlens[-1].clamp(0, T)))


def _state_times(S, x):
    """`S @ x`, [n, HV, V, K] x [n, HV, K] -> [n, HV, V]."""
    return torch.bmm(x.flatten(0, 1)[:, None], S.flatten(0, 1).mT).view(*S.shape[:3])
