# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3 (`glm5_next`) and Kimi Linear (`kimi_linear`) in transformers 5.24, with KDA computed by this package.

    import kda.drop_in.transformers
    kda.drop_in.transformers.patch(model)      # one model; patch() is for all, those yet to be made included

The functions have the signatures of those in transformers' modeling files that they stand for. B sequences of T tokens,
H heads, head dims K and V, convolution width W.
"""
from __future__ import annotations

import importlib
import sys
from types import CellType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor, nn

import kda

# model type: classes of its modeling file for the layer, its decay gate and its output norm
_MODELS = {
    "glm5_next": ("Glm5NextTextLinearAttention", "Glm5NextTextForgetGate", "Glm5NextTextRMSNormGated"),
    "kimi_linear": ("KimiLinearDeltaAttention", "KimiLinearForgetGate", "KimiLinearRMSNormGated"),
}


# ---- what the layer calls


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *,
    cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None, **kwargs,
) -> Tensor:  # fmt: skip
    """hidden_states [B, dim, T], weight [dim, W], bias [dim] -> [B, dim, T]; no state. `cu_seqlens`: packed, B == 1."""
    if seq_idx is not None and cu_seqlens is None:
        raise ValueError("`seq_idx`: got packed sequences without their `cu_seqlens`; accepted: both, or `cu_seqlens`")
    B, dim, T = hidden_states.shape
    rows = hidden_states.transpose(1, 2).reshape(B * T, dim).contiguous()  # the rule needs dense heads after it
    starts = cu_seqlens
    if starts is None:
        starts = torch.arange(B + 1, dtype=torch.int32, device=rows.device) * T
    out = kda.causal_conv1d_fn(rows.t(), weight, bias, None, starts, activation=activation)
    return out.t().unflatten(0, (B, T)).transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """hidden_states [B, dim, T] after conv_state [B, dim, W - 1 or more], whose last W - 1 columns move on in place.

    transformers keeps W columns; no token that comes reads the first.
    """
    history = conv_state[..., 1 - weight.shape[1]:]
    return kda.causal_conv1d_update(hidden_states, history, weight, bias, activation)


def chunk_kimi_delta_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, *,
    cu_seqlens: Tensor | None = None, **kwargs,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query, key, g [B, T, H, K], value [B, T, H, V], beta [B, T, H], states [N, H, K, V]; see `kda.chunk_kda`.

    The final state is stored V before K, as the kernels have it; transformers' cache then keeps it so.
    """
    if initial_state is not None:
        initial_state = initial_state.transpose(-1, -2).contiguous()
    out, state = kda.chunk_kda(
        query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return out, None if state is None else state.transpose(-1, -2)


def recurrent_kimi_delta_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool = False, *, cu_seqlens: Tensor | None = None, **kwargs,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `chunk_kimi_delta_attention`, token by token. A state stored V before K moves on in place and is returned."""
    state, mine = None, True
    if initial_state is not None:
        state = initial_state.transpose(-1, -2)
        mine = not (output_final_state and state.is_contiguous())
        state = state.clone(memory_format=torch.contiguous_format) if mine else state
    out, state = kda.fused_recurrent_kda(
        query, key, value, g, beta, initial_state=state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    # The very tensor of the cache: copying it onto itself is no work.
    return out, (state.transpose(-1, -2) if mine else initial_state) if output_final_state else None


def _gate(self, hidden_states: Tensor) -> Tensor:
    """`forward` of the decay gate: hidden_states [B, T, hidden] -> log decays [B, T, H, K] in fp32."""
    bound = getattr(self, "safe_gate_lower_bound", None)
    return kda.fused_kda_gate(
        self.f_b_proj(self.f_a_proj(hidden_states)), self.A_log, self.head_dim, self.dt_bias,
        safe_gate=bound is not None, lower_bound=bound,
    )  # fmt: skip


def _norm(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    """`forward` of the output norm: hidden_states and gate [..., V] -> [..., V]."""
    return kda.rms_norm_gated(
        hidden_states, gate, self.weight, None, activation=self.activation, eps=self.variance_epsilon
    )


_FUNCTIONS = {
    function.__name__: function
    for function in (causal_conv1d_fn, causal_conv1d_update, chunk_kimi_delta_attention, recurrent_kimi_delta_attention)
}

# ---- putting it there


_originals: dict[tuple[object, str], object] = {}  # what patch() replaced, in modeling files and their classes


def patch(model: nn.Module | None = None) -> None:
    """Routes KDA to this package: in `model` only, or (without one) in all models of this process.

    Convolution, decay gate, delta rule and output norm then run as `kda.why(device)` says, on CPUs and GPUs, for
    inference: backward passes are refused. Weights, caches and outputs keep their names and shapes.

    Raises:
        ValueError: the model has no KDA layer that is known here.
        ImportError: transformers is missing, has neither model, or has other names in them.

    Example:
        >>> import torch
        >>> import kda.drop_in.transformers as drop_in
        >>> from transformers import KimiLinearConfig, KimiLinearForCausalLM
        >>> config = KimiLinearConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=2, kv_lora_rank=16, linear_num_heads=2, linear_head_dim=16, pad_token_id=0,
        ...     bos_token_id=None, eos_token_id=None, layer_types=["linear_attention", "full_attention"],
        ...     mlp_layer_types=["dense", "dense"])
        >>> model = KimiLinearForCausalLM(config).eval()
        >>> drop_in.patch(model)
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False).shape
        torch.Size([1, 8])
    """
    if model is not None:
        _patch_model(model)
        return
    for file, (_, gate, norm) in _modeling_files():
        for name, function in _FUNCTIONS.items():
            _replace(file, name, function)
        _replace(getattr(file, gate), "forward", _gate)
        _replace(getattr(file, norm), "forward", _norm)


def unpatch(model: nn.Module | None = None) -> None:
    """Undoes `patch(model)`, or without a model `patch()`."""
    if model is None:
        while _originals:
            (owner, name), original = _originals.popitem()
            setattr(owner, name, original)
        return
    for module in model.modules():
        if "_kda_replaced" in module.__dict__:
            name, original = module.__dict__.pop("_kda_replaced")
            del module.__dict__[name]
            if original is not None:
                setattr(module, name, original)


def _modeling_files() -> list[tuple[ModuleType, tuple[str, ...]]]:
    """Those of the models that this transformers has, and the classes in them."""
    files = []
    for model, classes in _MODELS.items():
        try:
            files.append((importlib.import_module(f"transformers.models.{model}.modeling_{model}"), classes))
        except ModuleNotFoundError as e:
            if not (e.name or "").startswith(f"transformers.models.{model}"):
                raise
    if not files:
        raise ImportError(f"this transformers has neither {' nor '.join(_MODELS)}; 5.24 has both")
    for file, classes in files:
        missing = [name for name in (*_FUNCTIONS, *classes) if not hasattr(file, name)]
        if missing:
            raise ImportError(f"{file.__name__} has no {', '.join(missing)}: not the transformers 5.24 that this is for")
    return files


def _replace(owner: object, name: str, value: object) -> None:
    _originals.setdefault((owner, name), getattr(owner, name))
    setattr(owner, name, value)


def _patch_model(model: nn.Module) -> None:
    forwards = {}
    for file, classes in _modeling_files():
        layer, gate, norm = (getattr(file, name) for name in classes)
        forwards |= {layer: _with_globals(layer.forward, vars(_twin(file))), gate: _gate, norm: _norm}
    modules = [module for module in model.modules() if type(module) in forwards]
    if not modules:
        raise ValueError(f"`model`: got a {type(model).__name__} without KDA layers; accepted: {', '.join(_MODELS)}")
    for module in modules:
        if "_kda_replaced" not in module.__dict__:
            name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"  # accelerate's hooks call the former
            module.__dict__["_kda_replaced"] = (name, module.__dict__.get(name))
            setattr(module, name, MethodType(forwards[type(module)], module))


def _twin(file: ModuleType) -> ModuleType:
    """A copy of a modeling file with our functions in it. torch.compile finds it by its name."""
    name = f"{__name__}.{file.__name__.rpartition('.')[2]}"
    if name not in sys.modules:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update({**vars(file), **_FUNCTIONS, "__name__": name})
    return sys.modules[name]


def _with_globals(function: FunctionType, scope: dict[str, object]) -> FunctionType:
    """A copy of a function, decorators included, that looks for its globals in `scope`."""
    inner, cells = getattr(function, "__wrapped__", None), function.__closure__
    if inner is not None:
        copy = _with_globals(inner, scope)
        cells = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in cells)
        scope = function.__globals__
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
