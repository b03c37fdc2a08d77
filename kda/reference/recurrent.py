# SPDX-License-Identifier: Apache-2.0
"""The recurrence of KDA, token by token (contract section 2; Kimi Linear, arXiv 2510.26692, equation 1).

    S = S * exp(y)[None, :]
    d = b * (v - S @ k^)
    S = S + outer(d, k^)
    o = S @ q^

One loop over tokens; all sequences that have a token t, and all heads, take it together.
"""

import torch

from kda.reference._common import (
    full_precision, gate_parameters, is_live, l2_normalise, log_decay, per_value_head, sigmoid, token_ranges,
)  # fmt: skip

GROUP_BYTES = 4 << 20  # sequences are taken in groups whose fp32 states fit a CPU's cache


def _rows(N, state, ssm_state_indices, num_accepted_tokens):
    """Contract section 5, on the host: `(live [N], slot of the initial state [N], window [N, columns])`."""
    if state is None:
        return torch.ones(N, dtype=torch.bool), None, None
    if ssm_state_indices is None:  # row n belongs to sequence n, row 0 included
        slots = torch.arange(N)
        return slots < state.shape[0], slots, slots[:, None]
    window = ssm_state_indices.cpu().long()
    if window.dim() == 1:
        window = window[:, None]
    column = torch.zeros(N, dtype=torch.int64)
    if num_accepted_tokens is not None:
        column = num_accepted_tokens.cpu().long() - 1
    fresh = (column >= 0) & (column < window.shape[1])  # else the row is stale
    slots = window.gather(1, column.clamp(0, window.shape[1] - 1)[:, None])[:, 0]
    return fresh & is_live(slots, state.shape[0]), slots, window


@full_precision()
def fused_recurrent_kda(q, k, v, g, beta, scale, state, cu_seqlens, ssm_state_indices, num_accepted_tokens,
                        use_qk_l2norm, sigmoid_beta, A_log, g_bias, lower_bound, token_states, out):
    """Outputs [B, T, HV, V]; the states after the last token go to the pool in place.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K], a log decay, or raw with A_log [H or HV] and g_bias
    [H or HV, K] or None; beta [B, T, HV], headwise [B, T, HV, V] or None (ones). state [slots, HV, V, K] or
    None (start from zeros, keep nothing). ssm_state_indices None (sequence n uses row n), [N] (one state a
    sequence, written at its end) or [N, window] (token t writes column t; the initial state is column
    `num_accepted_tokens - 1`). token_states [B*T, HV, V, K] or None: receives the state after every token,
    and the pool is left alone. Padding rows give zeros; tokens that no sequence owns give zeros in a fresh
    output and are left untouched in `out`.
    """
    (B, T, HV, V), K = v.shape, q.shape[-1]
    batch, bos, length = token_ranges(cu_seqlens, B, T)
    live, slots, window = _rows(len(bos), state, ssm_state_indices, num_accepted_tokens)
    per_token = state is not None and ssm_state_indices is not None and ssm_state_indices.dim() == 2
    dev = v.device
    if A_log is not None:
        A_log, g_bias = gate_parameters(A_log, g_bias, HV, K)
        A_log = A_log[:, None]
    if out is None:
        out = v.new_zeros(B, T, HV, V)
    else:
        for n in (~live).nonzero().flatten().tolist():
            out[batch[n], bos[n] : bos[n] + length[n]] = 0
    if token_states is not None:
        token_states.zero_()

    def token(b, t):
        """One token of n sequences in fp32: q^, k^ [n, HV, K], v [n, HV, V], y [n, HV, K], beta."""
        q_t, k_t, v_t, y = (x[b, t].float().contiguous() for x in (q, k, v, g))
        if use_qk_l2norm:
            q_t, k_t = l2_normalise(q_t), l2_normalise(k_t)
        if A_log is not None:
            y = log_decay(y, A_log, g_bias, lower_bound)
        b_t = torch.ones((), device=dev) if beta is None else beta[b, t].float()
        if sigmoid_beta and beta is not None:
            b_t = sigmoid(b_t)
        if b_t.dim() == 2:
            b_t = b_t[..., None]
        return per_value_head(q_t * scale, HV, 1), per_value_head(k_t, HV, 1), v_t, y, b_t

    def state_times(S, x):
        """`S @ x`, [n, HV, V, K] x [n, HV, K] -> [n, HV, V]; as a row times S^T, which is faster on a CPU."""
        return torch.bmm(x.flatten(0, 1)[:, None], S.flatten(0, 1).mT).view(*S.shape[:3])

    # longest sequence first, so that those with a token t are the first n of the group
    order = torch.argsort(length, descending=True, stable=True)
    order = order[(live & (length > 0))[order]]
    for group in order.split(max(1, GROUP_BYTES // (4 * HV * V * K))):
        if state is None:
            S = torch.zeros(len(group), HV, V, K, device=dev)
        else:
            S = state.index_select(0, slots[group].to(dev)).float()  # a copy, of these rows only
        for t in range(max(length[group].tolist(), default=0)):
            n = int((length[group] > t).sum())
            b_idx, t_idx = batch[group[:n]].to(dev), (bos[group[:n]] + t).to(dev)
            q_t, k_t, v_t, y, b_t = token(b_idx, t_idx)

            S_t = S[:n].mul_(y.exp()[:, :, None])  # [n, HV, V, K]
            d = b_t * (v_t - state_times(S_t, k_t))
            S_t.addcmul_(d[..., None], k_t[:, :, None])
            out[b_idx, t_idx] = state_times(S_t, q_t).to(out.dtype)

            if token_states is not None:
                token_states[b_idx * T + t_idx] = S_t.to(token_states.dtype)
            elif per_token and t < window.shape[1]:
                column = window[group[:n], t]
                keep = is_live(column, state.shape[0])
                state[column[keep].to(dev)] = S_t[keep.to(dev)].to(state.dtype)
        if state is not None and token_states is None and not per_token:
            state[slots[group].to(dev)] = S.to(state.dtype)
    return out
