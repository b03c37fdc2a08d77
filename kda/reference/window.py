# SPDX-License-Identifier: Apache-2.0
"""Windows of draft tokens with a full state each (contract sections 2 and 5): the separate operations in turn."""

import torch

from kda.reference.conv import causal_conv1d_update
from kda.reference.norm import rms_norm_gated
from kda.reference.recurrent import fused_recurrent_kda
from kda.reference.tokens import place_rows


def kda_window(qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, cu_seqlens, num_accepted_tokens,
               conv_weight, conv_bias, A_log, g_bias, norm_weight, scale, lower_bound, eps, activation, out,
               out_rows=None):
    """Output into `out` [T, HV, V]; token t of row n leaves its state in slot `ssm_state_indices[n, t]`.

    qkv, raw_g, beta, out_gate as `kda_prefill` takes them; conv_state [slots, dim, W-2+window], a row's in the slot of
    column 0; ssm_state [slots, HV, V, K]; ssm_state_indices [N, window]; cu_seqlens [N+1]; num_accepted_tokens [N], the
    column of the state that a row goes on from, and one. Padding and stale rows give zeros; tokens past the last row
    stay as they are. out_rows [T] or None: the output of token t goes to `out[out_rows[t]]`, if that exists.
    """
    T, (HV, V, K) = len(qkv), ssm_state.shape[1:]
    H = (qkv.shape[1] - HV * V) // (2 * K)
    x = causal_conv1d_update(qkv, conv_state, conv_weight, conv_bias, True, ssm_state_indices[:, 0], num_accepted_tokens,
                             cu_seqlens, (), None)
    q, k, v = x[None].split([H * K, H * K, HV * V], -1)
    o = torch.zeros(1, T, HV, V, device=qkv.device)  # the norm sees it before it is rounded
    fused_recurrent_kda(
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), raw_g[None], beta[None], scale,
        ssm_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, True, True, A_log, g_bias, lower_bound, None, o,
    )
    end = int(cu_seqlens[-1].clamp(0, T))
    o, normed = o[:, :end], out[:end] if out_rows is None else qkv.new_empty(end, HV, V)
    padding = ~o[0].any(-1, keepdim=True)
    rms_norm_gated(o, out_gate[None, :end], norm_weight, None, activation, None, None, eps, normed[None])
    normed.masked_fill_(padding, 0)
    return out if out_rows is None else place_rows(out, out_rows[:end], normed)
