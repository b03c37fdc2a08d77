# SPDX-License-Identifier: Apache-2.0
"""Other code for KDA to measure beside ours, where it is installed or in a folder on PYTHONPATH.

Each function takes what the operation needs and returns a call to time; ImportError where the peer is missing. Inputs are
contiguous, in the layout that the peer wants; nothing is copied inside the call but what the peer itself copies.
"""
from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kda.cli.bench.tensors import D, Prompt, Step
from kda.cli.check import in_pytorch
from kda.cli.workloads import LB

Call = Callable[[], object]

KNOWN = {"cuda": ("flashkda", "vllm", "fla"), "cpu": ("transformers", "reference", "compiled")}
USUAL = {"cuda": ("flashkda", "vllm"), "cpu": ("transformers", "reference")}

VLLM_KDA = "vllm.models.glm5next.nvidia.ops.third_party.kda.kernels"
VLLM_CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
VLLM_NORM = "vllm.third_party.flash_linear_attention.ops.kda"


def missing(name: str) -> str | None:
    """Why a peer is not here, in words, or None. Imports what is timed."""
    try:
        if name == "flashkda":
            _flashkda()
        elif name == "vllm":
            for module in (VLLM_KDA, VLLM_CONV, VLLM_NORM):
                importlib.import_module(module)
        elif name == "fla":
            importlib.import_module("fla.ops.kda")
        elif name == "transformers":
            transformers_forms()
    except Exception as e:
        return (f"{type(e).__name__}: {e}".splitlines() or [""])[0][:200]
    return None


# ---------------------------------------------------------------------------------------------------- on a GPU: prompts


def _flashkda() -> None:
    library = next((lib for p in sys.path if (lib := Path(p) / "vllm/_flashkda_C.abi3.so").exists()), None)
    if library is None:
        raise ImportError("no vllm/_flashkda_C.abi3.so on PYTHONPATH")
    torch.ops.load_library(os.path.abspath(library))


def flashkda(x: Prompt) -> Call:
    """FlashKDA (CUTLASS) as vLLM ships it."""
    _flashkda()
    size = torch.ops._flashkda_C.get_workspace_size(x.T, x.work.H, x.N)
    ws = torch.empty(size, dtype=torch.uint8, device=x.device)
    out, final, cu64 = torch.empty_like(x.v), torch.empty_like(x.h0), x.cu.long()
    bias = x.bias.view(x.work.H, D)

    def call() -> tuple[Tensor, Tensor]:
        torch.ops._flashkda_C.fwd(
            x.q, x.k, x.v, x.g, x.beta, D**-0.5, out, ws, x.A_log, bias, LB, x.h0, final, cu64,
        )
        return out, final

    return call


def vllm(x: Prompt) -> Call:
    chunk = importlib.import_module(VLLM_KDA).chunk_kda_with_fused_gate
    v, beta = x.v.clone(), x.beta.float().sigmoid()  # it writes its output over v

    def call() -> tuple[Tensor, Tensor]:
        return chunk(
            q=x.q, k=x.k, v=v, raw_g=x.g, beta=beta, A_log=x.A_log, g_bias=x.bias, initial_state=x.h0,
            output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu, safe_gate=True, lower_bound=LB,
        )  # fmt: skip

    return call


def fla(x: Prompt) -> Call:
    from fla.ops.kda import chunk_kda

    cu64 = x.cu.long()

    def call() -> tuple[Tensor, Tensor]:
        return chunk_kda(
            q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, scale=D**-0.5, initial_state=x.h0, output_final_state=True,
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
            A_log=x.A_log, dt_bias=x.bias, lower_bound=LB, state_v_first=True, cu_seqlens=cu64,
        )  # fmt: skip

    return call


CHUNK = {"flashkda": flashkda, "vllm": vllm, "fla": fla}


# ------------------------------------------------------------------------------------------ on a GPU: a decode step, stages


def vllm_recurrence(x: Step) -> Callable[..., Tensor]:
    step, out = importlib.import_module(VLLM_KDA).fused_recurrent_kda, torch.empty_like(x.v)
    g, beta = x.g[None], x.beta[None]

    def call(q: Tensor = x.q, k: Tensor = x.k, v: Tensor = x.v) -> Tensor:
        return step(
            q=q, k=k, v=v, g=g, beta=beta, initial_state=x.pool, use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu,
            ssm_state_indices=x.slots, out=out, sigmoid_beta=True, a_log=x.A_log, g_bias=x.bias, compute_gate=True,
            lower_bound=LB,
        )[0][0]  # fmt: skip

    return call


def vllm_chain(x: Step) -> Call:
    """Its three kernels: convolution update, recurrence, gated norm. The first writes its output over its input."""
    conv, H = vllm_conv_update(x.qkv.clone(), x.conv.clone(), x.weight, x.slots), x.work.H
    step, norm = vllm_recurrence(x), vllm_norm(x.device)
    return lambda: norm(step(*(p.reshape(1, x.N, H, D) for p in conv().split(H * D, -1))), x.gate)


def vllm_conv_fn(*args) -> Call:
    fn = importlib.import_module(VLLM_CONV).causal_conv1d_fn
    return lambda: fn(*args, activation="silu")


def vllm_conv_update(x: Tensor, pool: Tensor, weight: Tensor, slots: Tensor) -> Call:
    fn = importlib.import_module(VLLM_CONV).causal_conv1d_update
    return lambda: fn(x, pool, weight, None, activation="silu", conv_state_indices=slots)


def vllm_gate(g: Tensor, A_log: Tensor, bias: Tensor) -> Call:
    fn = importlib.import_module(VLLM_KDA).fused_kda_gate
    return lambda: fn(g, A_log, D, bias, safe_gate=True, lower_bound=LB)


def vllm_norm(device: torch.device) -> torch.nn.Module:
    """vLLM's FusedRMSNormGated in bf16, with a sigmoid gate and a weight of ones."""
    norm = importlib.import_module(VLLM_NORM).FusedRMSNormGated
    norm = norm(D, activation="sigmoid", device=device, dtype=torch.bfloat16).requires_grad_(False)
    torch.nn.init.ones_(norm.weight)
    return norm


# -------------------------------------------------------------------------------------------------------------- on a CPU


def transformers_forms() -> dict[str, Callable]:
    """Their two forms in PyTorch, (q, k, v, log decays, beta, state [N, H, K, V]) -> (o, state).

    What they define, that is: with flash-linear-attention installed they would call its Triton kernels.
    """
    with in_pytorch():
        from transformers.models.glm5_next import modeling_glm5_next as theirs
    logging.getLogger("transformers").setLevel(logging.ERROR)
    forms = {"transformers": theirs.recurrent_kimi_delta_attention, "transformers, chunked": theirs.chunk_kimi_delta_attention}

    def call(fn: Callable) -> Callable:
        fn = inspect.unwrap(fn)
        return lambda given, state: fn(*given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return {name: call(fn) for name, fn in forms.items()}


def compiled(operation: Callable) -> Callable:
    """The reference as torch.compile makes it: it takes what the public operation has validated."""
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it breaks the graph where sizes come from tensors
    return torch.compile(operation, dynamic=False)
