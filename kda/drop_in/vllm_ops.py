# SPDX-License-Identifier: Apache-2.0
"""The operations under the names and in the shapes in which vLLM's KDA layers call them.

vLLM pads its metadata: slots and counts come with more rows than a step has, or tokens with more than there are slots.
Here they are cut to the rows at hand, or filled up with the null slot. Kimi Linear's layer calls functions of its own
names; these end in `_kimi`.
"""
from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

import kda
from kda import FusedRMSNormGated, causal_conv1d_fn, chunk_kda_with_fused_gate, gather_initial_states

__all__ = [
    "FusedRMSNormGated",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_kda_with_fused_gate",
    "chunk_kda_with_fused_gate_kimi",
    "fused_recurrent_kda",
    "fused_recurrent_kda_kimi",
    "fused_recurrent_kda_packed_decode_kimi",
    "gather_initial_states",
    "scatter_states",
]


def _rows(x: Tensor | None, count: int) -> Tensor | None:
    return x if x is None or x.shape[0] == count else x[:count]


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = 0,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`kda.causal_conv1d_update` for as many requests as `conv_state_indices` names."""
    if conv_state_indices is not None:
        if query_start_loc is not None:
            query_start_loc = _rows(query_start_loc, conv_state_indices.shape[0] + 1)
        elif conv_state_indices.shape[0] < x.shape[0]:
            conv_state_indices = pad(conv_state_indices, (0, x.shape[0] - conv_state_indices.shape[0]))
        num_accepted_tokens = _rows(num_accepted_tokens, conv_state_indices.shape[0])
    return kda.causal_conv1d_update(
        x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens, query_start_loc,
        max_query_len, null_block_id, validate_data, out,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """`kda.fused_recurrent_kda` for as many requests as `cu_seqlens` names."""
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return kda.fused_recurrent_kda(
        q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        _rows(ssm_state_indices, count), _rows(num_accepted_tokens, count), out, sigmoid_beta, a_log, g_bias,
        compute_gate, lower_bound, **kwargs,
    )  # fmt: skip


def scatter_states(state: Tensor, src: Tensor, indices: Tensor) -> None:
    """`kda.scatter_states`."""
    kda.scatter_states(state, src, indices)


# vLLM's layer tells its function the shapes to compile ahead of the first request; ours compiles when it is called
scatter_states.register_warmup = lambda **shapes: None


def chunk_kda_with_fused_gate_kimi(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """`kda.chunk_kda_with_fused_gate` from the logits of beta; the gate is bounded where there is a bound."""
    bound = {} if lower_bound is None else dict(safe_gate=True, lower_bound=lower_bound)
    return chunk_kda_with_fused_gate(
        q, k, v, raw_g, raw_beta, A_log, g_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens, sigmoid_beta=True, out=out, **bound, **kwargs,
    )  # fmt: skip


def fused_recurrent_kda_kimi(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    uniform_sequence_length: int | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`kda.fused_recurrent_kda` on raw gate and beta. `uniform_sequence_length` and `fuse_gate` are hints, not needed."""
    return fused_recurrent_kda(
        q, k, v, raw_g, raw_beta, None, initial_state, True, True, cu_seqlens, ssm_state_indices, num_accepted_tokens,
        out, True, A_log, dt_bias, True, lower_bound,
    )  # fmt: skip


def fused_recurrent_kda_packed_decode_kimi(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`kda.fused_recurrent_kda` of one token a request: mixed_qkv [B, 2 * H * K + H * V], all else [1, B, H, ...]."""
    H, V, K = initial_state.shape[1:]
    q, k, v = (
        x.unflatten(-1, (H, -1))[:, None] for x in mixed_qkv.split([H * K, H * K, H * V], -1)
    )
    o, state = fused_recurrent_kda(
        q, k, v, raw_g.transpose(0, 1), raw_beta.transpose(0, 1), scale, initial_state,
        ssm_state_indices=state_indices, out=None if out is None else out.transpose(0, 1), sigmoid_beta=True,
        a_log=A_log, g_bias=dt_bias, compute_gate=True, lower_bound=lower_bound,
    )  # fmt: skip
    return o.transpose(0, 1), state
