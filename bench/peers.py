# SPDX-License-Identifier: Apache-2.0
"""Public KDA kernels to measure beside ours, from a folder on PYTHONPATH; ImportError where they are missing.

Each function takes what the operation needs and returns a call to time. Contiguous inputs, in the layouts
that the peer wants; nothing is copied inside the call but what the peer itself copies.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

Call = Callable[..., tuple[Tensor, Tensor]]


def flashkda_chunk(x: dict[str, Tensor], cu: Tensor, lower_bound: float) -> Call:
    """FlashKDA (CUTLASS) as vLLM ships it."""
    library = next((lib for p in sys.path if (lib := Path(p) / "vllm/_flashkda_C.abi3.so").exists()), None)
    if library is None:
        raise ImportError("no vllm/_flashkda_C.abi3.so on PYTHONPATH")
    torch.ops.load_library(os.path.abspath(library))
    T, H, D = x["q"].shape[1:]
    size = torch.ops._flashkda_C.get_workspace_size(T, H, len(cu) - 1)
    ws = torch.empty(size, dtype=torch.uint8, device=x["q"].device)
    out, final, cu64 = torch.empty_like(x["v"]), torch.empty_like(x["h0"]), cu.long()
    bias = x["bias"].view(H, D)

    def call() -> tuple[Tensor, Tensor]:
        torch.ops._flashkda_C.fwd(
            x["q"], x["k"], x["v"], x["g"], x["beta"], D**-0.5, out, ws, x["A_log"], bias, lower_bound,
            x["h0"], final, cu64,
        )
        return out, final

    return call


def vllm_chunk(x: dict[str, Tensor], cu: Tensor, lower_bound: float) -> Call:
    from vllm.models.glm5next.nvidia.ops.third_party.kda.kernels import chunk_kda_with_fused_gate

    v, beta = x["v"].clone(), x["beta"].float().sigmoid()  # it writes its output over v

    def call() -> tuple[Tensor, Tensor]:
        return chunk_kda_with_fused_gate(
            q=x["q"], k=x["k"], v=v, raw_g=x["g"], beta=beta, A_log=x["A_log"], g_bias=x["bias"],
            initial_state=x["h0"], output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu,
            safe_gate=True, lower_bound=lower_bound,
        )

    return call


def fla_chunk(x: dict[str, Tensor], cu: Tensor, lower_bound: float) -> Call:
    from fla.ops.kda import chunk_kda

    cu64 = cu.long()

    def call() -> tuple[Tensor, Tensor]:
        return chunk_kda(
            q=x["q"], k=x["k"], v=x["v"], g=x["g"], beta=x["beta"], scale=x["q"].shape[-1] ** -0.5,
            initial_state=x["h0"], output_final_state=True, use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True, A_log=x["A_log"],
            dt_bias=x["bias"], lower_bound=lower_bound, state_v_first=True, cu_seqlens=cu64,
        )

    return call


CHUNK = {"flashkda": flashkda_chunk, "vllm": vllm_chunk, "fla": fla_chunk}


def vllm_recurrent(x: dict[str, Tensor], cu: Tensor, pool: Tensor, slots: Tensor, lower_bound: float) -> Call:
    from vllm.models.glm5next.nvidia.ops.third_party.kda.kernels import fused_recurrent_kda

    out = torch.empty_like(x["v"], memory_format=torch.contiguous_format)

    def call(q: Tensor = x["q"], k: Tensor = x["k"], v: Tensor = x["v"]) -> tuple[Tensor, Tensor]:
        return fused_recurrent_kda(
            q=q, k=k, v=v, g=x["g"], beta=x["beta"], initial_state=pool, use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu, ssm_state_indices=slots, out=out, sigmoid_beta=True, a_log=x["A_log"],
            g_bias=x["bias"], compute_gate=True, lower_bound=lower_bound,
        )

    return call


def vllm_conv_fn(*args) -> Callable[[], Tensor]:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

    return lambda: causal_conv1d_fn(*args, activation="silu")


def vllm_conv_update(x: Tensor, pool: Tensor, weight: Tensor, slots: Tensor) -> Callable[[], Tensor]:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    return lambda: causal_conv1d_update(x, pool, weight, None, activation="silu", conv_state_indices=slots)


def vllm_gate(g: Tensor, A_log: Tensor, D: int, bias: Tensor, lower_bound: float) -> Callable[[], Tensor]:
    from vllm.models.glm5next.nvidia.ops.third_party.kda.kernels import fused_kda_gate

    return lambda: fused_kda_gate(g, A_log, D, bias, safe_gate=True, lower_bound=lower_bound)


def vllm_norm(D: int, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """vLLM's FusedRMSNormGated with a sigmoid gate and a weight of ones."""
    from vllm.third_party.flash_linear_attention.ops.kda import FusedRMSNormGated

    norm = FusedRMSNormGated(D, activation="sigmoid", device=device, dtype=dtype).requires_grad_(False)
    torch.nn.init.ones_(norm.weight)
    return norm
