# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention kernels: every stage once in Triton, and in plain PyTorch where Triton cannot run.

The public names are resolved on first use: `import kda` imports neither Triton nor a backend.
"""
from kda.lazy import names as _names

__version__ = "0.1.0"

_HOME = {
    "backend_for": "dispatch",
    "use_backend": "dispatch",
    "why": "dispatch",
    "FusedRMSNormGated": "modules",
    "causal_conv1d_fn": "ops",
    "causal_conv1d_update": "ops",
    "chunk_kda": "ops",
    "chunk_kda_with_fused_gate": "ops",
    "fused_kda_gate": "ops",
    "fused_recurrent_kda": "ops",
    "gather_initial_states": "ops",
    "kda_commit": "layer_ops",
    "kda_decode": "layer_ops",
    "kda_prefill": "layer_ops",
    "kda_verify": "layer_ops",
    "rms_norm_gated": "ops",
    "scatter_states": "ops",
    "speculation_bytes": "layer_ops",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = _names(__name__, _HOME)
