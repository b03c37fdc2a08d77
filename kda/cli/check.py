# SPDX-License-Identifier: Apache-2.0
"""What the demo compares against: the recurrence and the layer in fp64, and transformers' layer.

Nothing here calls a kda operation.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda.cli.layer import KDALayer
from kda.cli.schedule import Request, Served

# Contract: |x - ref| / |ref| of an operation, (output, final state), by the dtype of its inputs.
BOUNDS = {torch.bfloat16: (0.0040, 0.0028), torch.float16: (0.0010, 0.0010), torch.float32: (2e-5, 2e-5)}

Tick = Callable[[int], object]


@dataclass
class Check:
    """The error `got`, worst over the requests, against `bound`; without a bound it is only told."""

    what: str
    got: float
    bound: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.bound is None or self.got <= self.bound  # NaN is not ok


def err(x: Tensor, ref: Tensor) -> float:
    """Relative Frobenius error."""
    ref = ref.double()
    return ((x.to(ref) - ref).norm() / ref.norm()).item()


def worst(errors: list[float]) -> float:
    return max(errors, key=lambda e: float("inf") if e != e else e)  # a NaN is the worst


def recurrence64(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence token by token in fp64, from `state` or from zeros.

    q, k, v, raw_g [T, H, D], beta logits [T, H], A_log [H], dt_bias [H*D] -> o [T, H, D], state [H, V, K]. A
    `lower_bound` of None is the unbounded gate.
    """
    q, k, v, g, beta, A_log, dt_bias = (x.double() for x in (q, k, v, raw_g, beta, A_log, dt_bias))
    T, H, D = q.shape
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * D**-0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    g, rate = g + dt_bias.view(H, D), A_log.exp()[:, None]
    y = -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
    decay, b = y.exp(), beta.sigmoid()
    S = q.new_zeros(H, D, D) if state is None else state.double().clone()
    o = torch.empty_like(v)
    for t in range(T):
        S *= decay[t, :, None, :]
        d = b[t, :, None] * (v[t] - torch.bmm(S, k[t, :, :, None])[..., 0])
        S.baddbmm_(d[:, :, None], k[t, :, None, :])
        o[t] = torch.bmm(S, q[t, :, :, None])[..., 0]
    return o, S


def conv64(layer: KDALayer, qkv: Tensor) -> Tensor:
    """The convolution of one sequence [T, 3*H*D] from its first token on, with SiLU."""
    padded = F.pad(qkv.double().t()[None], (layer.geo.conv_width - 1, 0))
    return F.silu(F.conv1d(padded, layer.conv_weight.double()[:, None], groups=3 * layer.geo.qkv_dim))[0].t()


def norm64(layer: KDALayer, o: Tensor, gate: Tensor) -> Tensor:
    o = o * (o.square().mean(-1, keepdim=True) + layer.geo.eps).rsqrt()
    return o * layer.o_norm.weight.double() * gate.double().sigmoid()


def layer64(layer: KDALayer, x: list[Tensor]) -> list[Tensor]:
    """The whole layer in fp64, nothing rounded on the way: sequences [T, hidden] -> [T, hidden]."""
    geo, lengths = layer.geo, [len(xr) for xr in x]
    tokens, heads = torch.cat(x).double(), (geo.heads, geo.head_dim)

    def linear(y: Tensor, weight: Tensor) -> Tensor:
        return F.linear(y, weight.double())

    columns = [3 * geo.qkv_dim, geo.heads, geo.head_dim, geo.head_dim]
    qkv, beta, f_a, g_a = linear(tokens, layer.in_proj.weight).split(columns, -1)
    raw_g = linear(f_a, layer.f_b_proj.weight).unflatten(-1, heads)
    gate = linear(g_a, layer.g_b_proj.weight).unflatten(-1, heads)
    o = []
    for qkv, beta, g in zip(*(x.split(lengths) for x in (qkv, beta, raw_g))):
        q, k, v = conv64(layer, qkv).unflatten(-1, (3, *heads)).unbind(1)
        o.append(recurrence64(q, k, v, g, beta, layer.A_log, layer.dt_bias, geo.lower_bound)[0])
    return list(linear(norm64(layer, torch.cat(o), gate).flatten(1), layer.o_proj.weight).split(lengths))


@contextlib.contextmanager
def in_pytorch() -> Iterator[None]:
    """Within the block transformers' modules are imported as if no kernels were there for them to take.

    With flash-linear-attention installed they would take its Triton kernels for good, and those may run on this
    package's backend for Triton: no independent reference.
    """
    names = ("fla", "causal_conv1d")
    there = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(there)


def transformers_layer(layer: KDALayer) -> nn.Module:
    """transformers' Glm5NextTextLinearAttention over the same weights (shared, not copied).

    ImportError where transformers is missing or has no GLM-5.3 model.
    """
    with in_pytorch():
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns that it falls back to PyTorch: it is here as a reference
    geo = layer.geo
    wide, D = geo.qkv_dim, geo.head_dim
    config = Glm5NextTextConfig(
        hidden_size=geo.hidden, linear_num_heads=geo.heads, linear_head_dim=D,
        linear_conv_kernel_dim=geo.conv_width, linear_lower_bound=geo.lower_bound, rms_norm_eps=geo.eps,
    )
    with torch.device("meta"):
        theirs = Glm5NextTextLinearAttention(config, layer_idx=0)
    merged = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj")
    weights = {
        **{f"{name}.weight": w for name, w in zip(merged, layer.in_proj.weight.split([wide, wide, wide, geo.heads, D, D]))},
        "conv1d.weight": layer.conv_weight[:, None],
        "forget_gate.f_b_proj.weight": layer.f_b_proj.weight,
        "forget_gate.A_log": layer.A_log,
        "forget_gate.dt_bias": layer.dt_bias,
        "g_b_proj.weight": layer.g_b_proj.weight,
        "o_norm.weight": layer.o_norm.weight,
        "o_proj.weight": layer.o_proj.weight,
    }
    theirs.load_state_dict({name: w.detach() for name, w in weights.items()}, assign=True)
    return theirs.eval().requires_grad_(False)


def transformers_outputs(layer: KDALayer, x: list[Tensor], tick: Tick) -> list[Tensor] | str:
    """transformers' layer over each request in one pass; or the sentence that says why it did not run."""
    try:
        theirs = transformers_layer(layer)
    except ImportError as e:
        return f"transformers with a GLM-5.3 model is not installed ({e})"
    outputs = []
    try:
        for xr in x:
            outputs.append(theirs(xr[None])[0])
            tick(len(xr))
    except Exception as e:  # such as "0 active drivers", with flash-linear-attention installed and no GPU
        return f"transformers' layer does not run here: {type(e).__name__}: {e}"
    return outputs


def check_operations(layer: KDALayer, requests: list[Request], served: Served, tick: Tick) -> list[Check]:
    """Outputs and states against convolution, recurrence and norm in fp64 over the very inputs that they got."""
    gate, heads = (layer.A_log, layer.dt_bias, layer.geo.lower_bound), (layer.geo.heads, layer.geo.head_dim)
    outputs: dict[str, list[float]] = {"prefill": [], "decode": []}
    states: dict[str, list[float]] = {"prefill": [], "decode": []}
    for r, trace, prefilled, final in zip(requests, served.traces, served.prefilled, served.final):
        state, parts = None, {"prefill": slice(0, r.prompt), "decode": slice(r.prompt, None)}
        qkv = conv64(layer, trace["qkv"]).to(trace["qkv"].dtype)  # contract: rounded
        for (stage, part), got in zip(parts.items(), (prefilled, final)):
            g, beta, out_gate, y = (trace[name][part] for name in ("raw_g", "beta", "out_gate", "y"))
            q, k, v = qkv[part].unflatten(-1, (3, *heads)).unbind(1)
            o, state = recurrence64(q, k, v, g, beta, *gate, state)
            outputs[stage].append(err(y, norm64(layer, o, out_gate)))
            states[stage].append(err(got, state))
            tick(len(q))
    output, final_state = BOUNDS[layer.in_proj.weight.dtype]
    return [
        check
        for stage in outputs
        for check in (
            Check(f"KDA operations, {stage}: output vs fp64", worst(outputs[stage]), output),
            Check(f"KDA operations, {stage}: state vs fp64", worst(states[stage]), final_state),
        )
    ]


def check_layer(
    dtype: torch.dtype, ours: list[Tensor], theirs: list[Tensor] | None, ref: list[Tensor]
) -> list[Check]:
    """Layer outputs [T, hidden] against the layer in fp64, transformers' beside them.

    In fp32 the contract's bound for an operation holds for the whole layer. In bf16 and fp16 every projection
    rounds, in both layers: ours may add to transformers' error what the contract allows an operation.
    """
    name, output = str(dtype).removeprefix("torch."), BOUNDS[dtype][0]
    checks = [Check(f"layer in {name}, ours vs fp64 layer", worst([err(o, r) for o, r in zip(ours, ref)]))]
    if dtype == torch.float32:
        checks[0].bound = output
    if theirs is not None:
        peer = worst([err(o, r) for o, r in zip(theirs, ref)])
        checks.append(Check(f"layer in {name}, transformers' vs fp64 layer", peer))
        between = worst([err(o, t) for o, t in zip(ours, theirs)])
        checks.append(Check(f"layer in {name}, ours vs transformers'", between))
        if dtype != torch.float32:
            checks[0].bound, checks[0].note = peer + output, f"transformers' + {output:.4f}"
        else:
            checks[2].bound, checks[2].note = 2 * output, "both may be off"
    return checks
