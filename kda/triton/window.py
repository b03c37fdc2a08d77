# SPDX-License-Identifier: Apache-2.0
"""Windows of draft tokens with a full state each: the kernels of conv.py, recurrent.py and norm.py in turn."""
from __future__ import annotations

import torch

from kda.triton import conv, norm, recurrent
from kda.triton.launch import Scratch


def kda_window(
    qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, cu_seqlens, num_accepted_tokens, conv_weight,
    conv_bias, A_log, g_bias, norm_weight, scale, lower_bound, eps, activation, out, out_rows=None, seen=None,
):  # fmt: skip
    """Launcher; the arguments as `kda.reference.window.kda_window` takes them."""
    T, HV, V, K = len(qkv), *ssm_state.shape[1:]
    if not T:
        return out
    H = (qkv.shape[1] - HV * V) // (2 * K)
    limit = cu_seqlens[-1:]
    # The norm sees the rule's output before it is rounded.
    between = Scratch(qkv.device, (qkv.shape, qkv.dtype), ((1, T, HV, V), torch.float32))
    memory = between.empty()
    x, o = between.addresses(memory)
    k, v = x + H * K * qkv.element_size(), x + 2 * H * K * qkv.element_size()
    launches = (
        conv.find_update(seen, qkv, conv_weight, conv_bias, conv_state, ssm_state_indices, num_accepted_tokens, cu_seqlens,
                         x),
        recurrent.find(seen, x, k, v, raw_g, beta, A_log, g_bias, cu_seqlens, ssm_state_indices, num_accepted_tokens,
                       ssm_state, None, o),
        norm.find(seen, o, out_gate, norm_weight, None, None, None, out, limit, out_rows, tag="window"),
    )  # fmt: skip
    if None not in launches:
        for launch in launches:
            launch()
        return out

    x, o = between.tensors(memory)
    conv.causal_conv1d_update(
        qkv, conv_state, conv_weight, conv_bias, True, ssm_state_indices[:, 0], num_accepted_tokens, cu_seqlens, (), x, seen
    )
    q, k, v = x[None].split([H * K, H * K, HV * V], -1)
    recurrent.fused_recurrent_kda(
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), raw_g[None], beta[None], scale,
        ssm_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, True, True, A_log, g_bias, lower_bound, None, o, seen,
    )  # fmt: skip
    norm.rms_norm_gated(
        o, out_gate[None], norm_weight, None, activation, None, None, eps, out[None], True, limit, out_rows, seen, "window",
    )  # fmt: skip
    return out
