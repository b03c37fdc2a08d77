# SPDX-License-Identifier: Apache-2.0
"""Against transformers' GLM-5.3-Flash: its two forms of the rule, and its layer composed from our operations."""

import inspect

import oracle
import pytest
import torch
from helpers import (BF16, FP16, FP32, assert_accurate, chunk, each_dtype, gpu_subset, make, on_backends, randn, recurrent,
                     state_dtype_of)

import kda

from kda.cli.check import in_pytorch

with in_pytorch():
    pytest.importorskip("transformers.models.glm5_next")
    from transformers.cache_utils import DynamicCache
    from transformers.models.glm5_next import modeling_glm5_next as glm
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

HEADS, DIM, HIDDEN = 2, 32, 48


def test_transformers_runs_its_pytorch_code():
    """Not flash-linear-attention's kernels, which on a CPU would run on the backend under test."""
    for function in (glm.recurrent_kimi_delta_attention, glm.chunk_kimi_delta_attention, glm.causal_conv1d_fn):
        assert inspect.getclosurevars(function).nonlocals["is_new_implementation"] is False


def peer(function, x):
    """transformers' function on the inputs of `x`; its states are [N, H, K, V], ours [N, H, V, K]."""
    y = oracle.gate(x.g, x.A_log, x.g_bias, x.lower_bound).float()
    o, state = function(x.q, x.k, x.v, g=y, beta=torch.sigmoid(x.beta.float()), output_final_state=True,
                        initial_state=x.initial_state.transpose(-1, -2).contiguous(), use_qk_l2norm_in_kernel=True)
    return o, state.transpose(-1, -2)


@gpu_subset(lambda D, dtype, gate, **_: D == 128 and dtype != FP16 and gate == "bounded" or D == 32 and dtype == BF16)
@each_dtype
@pytest.mark.parametrize("gate", ["bounded", "unbounded"])
@on_backends("B,T,D", [(2, 37, 32)], [(2, 130, 128)])
def test_both_forms_of_the_rule_equal_both_of_transformers(backend, B, T, D, gate, dtype):
    x = make(B=B, T=T, K=D, V=D, dtype=dtype, device=backend.device, gate=gate)
    state = x.initial_state.clone()
    ours = [chunk(x), (recurrent(x, state=state)[0], state)]
    for function in (glm.recurrent_kimi_delta_attention, glm.chunk_kimi_delta_attention):
        want_o, want_state = peer(function, x)
        for o, final in ours:
            assert_accurate(o, want_o, dtype)
            assert_accurate(final, want_state, dtype, "state")


def glm_layer(device, dtype, lower_bound=-5.0):
    config = Glm5NextTextConfig(hidden_size=HIDDEN, linear_num_heads=HEADS, linear_head_dim=DIM, num_hidden_layers=4,
                                linear_lower_bound=lower_bound, num_attention_heads=2, num_key_value_heads=2)
    layer = glm.Glm5NextTextLinearAttention(config, layer_idx=0)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            fan = parameter.shape[-1] if parameter.ndim > 1 else 1
            parameter.copy_(randn(*parameter.shape, seed=seed + 1, scale=fan**-0.5))
        layer.o_norm.weight.add_(1.0)
    kept = layer.conv1d.weight.data, layer.forget_gate.A_log.data, layer.forget_gate.dt_bias.data
    layer = layer.to(device, dtype).eval()
    for parameter, fp32 in zip((layer.conv1d.weight, layer.forget_gate.A_log, layer.forget_gate.dt_bias), kept):
        parameter.data = fp32.to(device)  # the checkpoint keeps these in fp32
    return config, layer


class OurLayer:
    """The same layer from our operations: merged projections, packed prefill, pools, decode."""

    def __init__(self, layer, slots, fused=False):
        self.layer, self.device, self.fused = layer, layer.q_proj.weight.device, fused
        self.qkv = torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
        dtype = self.qkv.dtype
        self.conv_pool = torch.full((slots, 3, 3 * HEADS * DIM), float("nan"), dtype=dtype, device=self.device)
        self.conv_pool = self.conv_pool.transpose(1, 2)
        self.pool = torch.full((slots, HEADS, DIM, DIM), float("nan"), device=self.device)
        self.bound = layer.forget_gate.safe_gate_lower_bound

    def project(self, hidden):
        layer = self.layer
        gate = layer.forget_gate
        raw_g = gate.f_b_proj(gate.f_a_proj(hidden)).unflatten(-1, (HEADS, DIM))
        z = layer.g_b_proj(layer.g_a_proj(hidden)).unflatten(-1, (HEADS, DIM))
        return hidden @ self.qkv.T, raw_g, layer.b_proj(hidden), z

    def out(self, o, z):
        norm = self.layer.o_norm
        y = kda.rms_norm_gated(o, z, norm.weight, None, activation="sigmoid", eps=norm.variance_epsilon)
        return self.layer.o_proj(y.flatten(-2))

    def split(self, qkv):
        return (t.unflatten(-1, (HEADS, DIM)) for t in qkv.split(HEADS * DIM, -1))

    def prefill(self, hidden, cu, index, has):
        """hidden [T, hidden], packed."""
        qkv, raw_g, beta, z = self.project(hidden[None])
        y = kda.causal_conv1d_fn(qkv[0].T, self.layer.conv1d.weight.squeeze(1), None, self.conv_pool, cu, index, has)
        q, k, v = self.split(y.T[None])
        gate = self.layer.forget_gate
        o, final = kda.chunk_kda_with_fused_gate(
            q, k, v, raw_g, beta, gate.A_log, gate.dt_bias, sigmoid_beta=True, use_qk_l2norm_in_kernel=True,
            initial_state=kda.gather_initial_states(self.pool, index, has), output_final_state=True, cu_seqlens=cu,
            safe_gate=self.bound is not None)
        kda.scatter_states(self.pool, final, index)
        return self.out(o, z)[0]

    def decode(self, hidden, index):
        """hidden [N, hidden], one token a request."""
        qkv, raw_g, beta, z = self.project(hidden[:, None])
        gate, norm, weight = self.layer.forget_gate, self.layer.o_norm, self.layer.conv1d.weight.squeeze(1)
        if self.fused:
            y = kda.kda_decode(
                qkv[:, 0], raw_g[:, 0], beta[:, 0], z[:, 0], self.conv_pool, self.pool, index, weight, gate.A_log,
                gate.dt_bias, norm.weight, lower_bound=self.bound, eps=norm.variance_epsilon)
            return self.layer.o_proj(y.flatten(-2))
        y = kda.causal_conv1d_update(qkv[:, 0], self.conv_pool, weight, activation="silu", conv_state_indices=index)
        q, k, v = self.split(y[:, None])
        o, _ = kda.fused_recurrent_kda(
            q, k, v, raw_g, beta, initial_state=self.pool, ssm_state_indices=index, sigmoid_beta=True,
            a_log=gate.A_log, g_bias=gate.dt_bias, compute_gate=True, lower_bound=self.bound)
        return self.out(o, z)[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "kda_decode"])
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "unbounded"])
def test_layer_with_shared_weights_prefill_and_decode_with_cache(backend, lower_bound, fused):
    """Two requests of different length packed into one prefill, decoded together, and continued by three tokens."""
    device = backend.device
    config, layer = glm_layer(device, FP32, lower_bound)
    ours, lens, steps = OurLayer(layer, slots=5, fused=fused), [19, 35], 4
    hidden = [randn(n + steps + 3, HIDDEN, seed=70 + n, device=device) for n in lens]

    want = []
    for h, n in zip(hidden, lens):
        cache = DynamicCache(config=config)
        pieces = [layer(h[None, :n], cache=cache)]
        pieces += [layer(h[None, t:t + 1], cache=cache) for t in range(n, n + steps)]
        pieces.append(layer(h[None, n + steps:], cache=cache))
        want.append((torch.cat(pieces, 1)[0], cache.get_recurrent_state(0, state_idx=0)[0].transpose(-1, -2)))

    index = torch.tensor([3, 1], dtype=torch.int32, device=device)
    cu = torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32, device=device)
    flags = [torch.tensor([value] * 2, device=device) for value in (False, True)]
    first = ours.prefill(torch.cat([h[:n] for h, n in zip(hidden, lens)]), cu, index, flags[0]).split(lens)
    got = [[piece] for piece in first]
    for t in range(steps):
        o = ours.decode(torch.stack([h[n + t] for h, n in zip(hidden, lens)]), index)
        got[0].append(o[:1]), got[1].append(o[1:])
    last = torch.cat([h[n + steps:] for h, n in zip(hidden, lens)])
    for n, piece in enumerate(ours.prefill(last, torch.tensor([0, 3, 6], device=device), index, flags[1]).split(3)):
        got[n].append(piece)

    for n in range(2):
        assert_accurate(torch.cat(got[n]), want[n][0], FP32)
        assert_accurate(ours.pool[index[n]], want[n][1], state_dtype_of(FP32, FP32), "state")


@torch.no_grad()
def test_layer_in_bf16_is_as_close_to_fp32_as_transformers_is(backend):
    """The layer rounds after every projection, so the rule's bound does not apply to it whole: the peer's error does."""
    device = backend.device
    _, layer = glm_layer(device, BF16)
    _, exact = glm_layer(device, FP32)
    for a, b in zip(exact.parameters(), layer.parameters()):
        a.copy_(b.float())  # the same bf16 weights
    n = 50
    hidden = randn(n, HIDDEN, seed=7, dtype=BF16, device=device)
    want = exact(hidden.float()[None])[0]
    ours = OurLayer(layer, slots=2)
    got = ours.prefill(hidden, torch.tensor([0, n], device=device), torch.tensor([1], device=device),
                       torch.tensor([False], device=device))
    theirs = oracle.err(layer(hidden[None])[0], want)
    assert oracle.err(got, want) <= 1.25 * theirs, "our bf16 layer is further from the fp32 layer than transformers'"
