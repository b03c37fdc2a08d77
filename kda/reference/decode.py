# SPDX-License-Identifier: Apache-2.0
"""One decode step of a KDA layer between its projections (contract section 2): the separate operations in turn."""

import torch

from kda.reference._common import is_live
from kda.reference.conv import causal_conv1d_update
from kda.reference.norm import rms_norm_gated
from kda.reference.recurrent import fused_recurrent_kda
from kda.reference.tokens import place_rows


def kda_decode(qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, conv_weight, conv_bias, A_log,
               g_bias, norm_weight, scale, lower_bound, eps, activation, out, out_rows=None):
    """Output [N, HV, V] (or into `out`); the states of the rows' slots move on in place.

    qkv [N, dim], dim = 2*H*K + HV*V; raw_g [N, HV, K]; beta [N, HV] logits; out_gate [N, HV, V]; conv_state
    [slots, dim, >= W-1]; ssm_state [slots, HV, V, K]; ssm_state_indices [N], a slot of both pools; conv_weight
    [dim, W]; conv_bias [dim] or None; A_log [H or HV]; g_bias [H or HV, K] or None; norm_weight [V] or None;
    activation "sigmoid" or "silu", of the output gate; out_rows [N] or None: row n of the output goes to
    `out[out_rows[n]]`, if that exists. Padding rows give zeros.

    Unlike in the chain of operations the norm sees the recurrence's output before it is rounded.
    """
    N, (HV, V, K) = len(qkv), ssm_state.shape[1:]
    H = (qkv.shape[1] - HV * V) // (2 * K)
    live = is_live(ssm_state_indices, min(len(conv_state), len(ssm_state)))
    slots = torch.where(live, ssm_state_indices, 0)

    x = causal_conv1d_update(qkv[..., None], conv_state, conv_weight, conv_bias, True, slots, None, None, (), None)
    q, k, v = x[..., 0].split([H * K, H * K, HV * V], -1)
    o = torch.empty(N, 1, HV, V, device=qkv.device)
    fused_recurrent_kda(
        q.view(N, 1, H, K), k.view(N, 1, H, K), v.view(N, 1, HV, V), raw_g[:, None], beta[:, None], scale, ssm_state,
        None, slots, None, True, True, A_log, g_bias, lower_bound, None, o,
    )
    y = qkv.new_empty(N, HV, V) if out is None or out_rows is not None else out
    rms_norm_gated(o, out_gate[:, None], norm_weight, None, activation, None, None, eps, y[:, None])
    y.masked_fill_(~live[:, None, None], 0)
    return y if out_rows is None else place_rows(out, out_rows, y)
