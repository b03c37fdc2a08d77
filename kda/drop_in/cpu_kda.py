# SPDX-License-Identifier: Apache-2.0
"""The KDA operations of vLLM's GLM-5.3-Flash layer in one module, as its `cpu/kda.py` would have them.

`chunk_kda_with_fused_gate` and `fused_recurrent_kda` take what those of
`vllm.models.glm5next.nvidia.ops.third_party.kda` take; the others are what that layer imports beside them. All run on
any device and without Triton too.
"""
from kda.drop_in.vllm_ops import (
    FusedRMSNormGated,
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_kda_with_fused_gate,
    fused_recurrent_kda,
    gather_initial_states,
    scatter_states,
)

__all__ = [
    "FusedRMSNormGated",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_kda_with_fused_gate",
    "fused_recurrent_kda",
    "gather_initial_states",
    "scatter_states",
]
