# SPDX-License-Identifier: Apache-2.0
"""Prefill of a KDA layer between its projections (contract sections 2 and 3): the separate operations in turn.

Checkpoints cut a sequence in parts; the parts run one after another, each from the states that the one before it left.
"""

import torch

from kda.reference._common import is_live, token_ranges
from kda.reference.chunk import chunk_kda
from kda.reference.conv import causal_conv1d_fn
from kda.reference.norm import rms_norm_gated
from kda.reference.states import gather_initial_states, scatter_states
from kda.reference.tokens import place_rows


def kda_prefill(qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, cu_seqlens, has_initial_state,
                conv_weight, conv_bias, A_log, g_bias, norm_weight, scale, lower_bound, eps, activation,
                checkpoint_offsets, checkpoint_indices, out, out_rows=None):
    """Output [T, HV, V] (or into `out`); the states of the sequences' slots move on in place.

    qkv [T, dim], dim = 2*H*K + HV*V; raw_g [T, HV, K]; beta [T, HV] logits; out_gate [T, HV, V]; conv_state
    [slots, dim, >= W-1]; ssm_state [slots, HV, V, K]; ssm_state_indices [N], a slot of both pools; cu_seqlens [N+1];
    has_initial_state bool [N] or None (none has one); checkpoint_offsets [M] positions among the tokens, each behind
    the last token that its state knows, or None; checkpoint_indices [M] the slots that those states go to; out_rows [T]
    or None: the output of token t of a sequence goes to `out[out_rows[t]]`, if that exists.
    """
    T, (HV, V, K) = len(qkv), ssm_state.shape[1:]
    H, slots = (qkv.shape[1] - HV * V) // (2 * K), min(len(conv_state), len(ssm_state))
    conv_state, ssm_state = conv_state[:slots], ssm_state[:slots]
    live = is_live(ssm_state_indices, slots)
    indices = torch.where(live, ssm_state_indices, 0)
    y = qkv.new_zeros(T, HV, V) if out is None or out_rows is not None else out
    old = torch.zeros_like(live) if has_initial_state is None else has_initial_state

    _, first, length = token_ranges(cu_seqlens, 1, T)
    cuts = {}
    if checkpoint_offsets is not None:
        cuts = sorted(zip(checkpoint_offsets.tolist(), checkpoint_indices.tolist()))
    for n, (bos, tokens) in enumerate(zip(first.tolist(), length.tolist())):
        mine = [(at, slot) for at, slot in cuts if bos < at <= bos + tokens]
        begin, index, initial = bos, indices[n:n + 1], old[n:n + 1]
        for end, kept in [*mine, (bos + tokens, None)]:
            part = slice(begin, end)
            offsets = torch.tensor([0, end - begin], dtype=torch.int32)
            x = causal_conv1d_fn(qkv[part].t(), conv_weight, conv_bias, conv_state, offsets.to(qkv.device), index,
                                 initial, True, ()).t()
            q, k, v = x[None].split([H * K, H * K, HV * V], -1)
            state = gather_initial_states(ssm_state, index, initial)
            o, state = chunk_kda(
                q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), raw_g[None, part],
                beta[None, part], scale, state.float(), True, None, True, True, A_log, g_bias, lower_bound, None,
            )
            scatter_states(ssm_state, state, index)
            if live[n]:
                rms_norm_gated(o, out_gate[None, part], norm_weight, None, activation, None, None, eps,
                               y[None, part])
                if kept is not None and 0 < kept < slots:
                    ssm_state[kept] = ssm_state[index[0]]
                    conv_state[kept, :, :conv_weight.shape[1] - 1] = conv_state[index[0], :, :conv_weight.shape[1] - 1]
            else:
                y[part] = 0
            begin, initial = end, torch.ones_like(initial)
    return y if out_rows is None else place_rows(out, out_rows, y, end=int(cu_seqlens[-1].clamp(0, T)))
