# SPDX-License-Identifier: Apache-2.0
"""The operations as torch.library custom ops: opcheck, torch.compile, torch.export, fake tensors, gradients."""

import inspect
import io
import shutil

import oracle
import pytest
import test_bad_input as valid
import torch
from helpers import BF16, FP32, assert_accurate, ints, randn
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kda
import kda.layer_ops
import kda.ops

H, D, HIDDEN, W, SLOTS = 2, 32, 48, 4, 6


# ---------------------------------------------------------------------------------------------------------------- opcheck


def without_out(build, **more):
    def built(device):
        return {**build(device), "out": None, **more}

    return built


def kda_prefill(device):
    return {**valid.kda_decode(device), "ssm_state_indices": ints([2], device), "cu_seqlens": ints([0, 2], device),
            "has_initial_state": torch.tensor([True], device=device), "checkpoint_offsets": ints([1], device),
            "checkpoint_indices": ints([4], device)}


def kda_verify(device):
    x = valid.kda_decode(device)
    window, (slots, HV, V, K) = 2, x["ssm_state"].shape
    conv_state = randn(slots, x["qkv"].shape[1], W - 1 + window, seed=1, dtype=BF16, device=device)
    return {**x, "conv_state": conv_state, "records": randn(slots, window, HV, 2 * K + V, seed=2, device=device),
            "cu_seqlens": ints([0, 1, 2], device), "num_accepted_tokens": ints([1, 0], device)}


def kda_commit(device):
    return {name: x for name, x in kda_verify(device).items() if name in inspect.signature(kda.kda_commit).parameters}


CASES = {
    **{build.__name__: (build.__name__, build) for build in (*valid.CASES, kda_prefill, kda_verify, kda_commit)},
    "chunk_kda, fresh": ("chunk_kda", without_out(valid.chunk_kda, output_final_state=True)),
    "fused_recurrent_kda, fresh": ("fused_recurrent_kda", without_out(valid.fused_recurrent_kda)),
    "fused_recurrent_kda, no state": ("fused_recurrent_kda", without_out(
        valid.fused_recurrent_kda, initial_state=None, ssm_state_indices=None)),
    "fused_recurrent_kda, every state": ("fused_recurrent_kda", without_out(
        valid.fused_recurrent_kda, inplace_final_state=False)),
    "rms_norm_gated, prenorm": ("rms_norm_gated", without_out(valid.rms_norm_gated, prenorm=True)),
    "rms_norm_gated, x is the residual": ("rms_norm_gated", without_out(
        valid.rms_norm_gated, prenorm=True, residual=None)),
    "causal_conv1d_update, fresh": ("causal_conv1d_update", without_out(valid.causal_conv1d_update)),
    "kda_decode, fresh": ("kda_decode", without_out(valid.kda_decode)),
    "causal_conv1d_fn, channels dense": ("causal_conv1d_fn", lambda device: {
        **valid.causal_conv1d_fn(device), "x": randn(valid.DIM, 6, seed=1, dtype=BF16, device=device)}),
    "causal_conv1d_update, a slice": ("causal_conv1d_update", lambda device: {
        **valid.causal_conv1d_update(device), "out": None, "x": randn(2, 40, seed=1, dtype=BF16, device=device)[:, :24]}),
    "rms_norm_gated, a slice": ("rms_norm_gated", lambda device: {
        **valid.rms_norm_gated(device), "out": None, "prenorm": True,
        "x": randn(3, 4, 40, seed=1, dtype=BF16, device=device)[..., :16]}),
    "gather_initial_states, conv states": ("gather_initial_states", lambda device: {
        **valid.gather_initial_states(device), "state": randn(6, 3, 24, seed=1, device=device).mT}),
}


def values(name, given):
    """All arguments of `torch.ops.kda.NAME` in its order."""
    defaults = {n: None if p.default is p.empty else p.default
                for n, p in inspect.signature(getattr(kda, name)).parameters.items()}
    return [given.get(a.name, defaults[a.name]) for a in getattr(torch.ops.kda, name).default._schema.arguments]


@pytest.mark.parametrize("case", CASES)
def test_opcheck(backend, case):
    """Schema (what is written is declared, nothing returned is an argument), fake implementation, autograd key, AOT."""
    name, build = CASES[case]
    torch.library.opcheck(getattr(torch.ops.kda, name).default, tuple(values(name, build(backend.device))))


def test_every_public_operation_is_a_custom_op():
    names = {name for name in kda.__all__ if inspect.signature(getattr(kda, name)).return_annotation != "str"}
    operations = names - {"FusedRMSNormGated", "use_backend", "speculation_bytes"}
    assert operations == {name for name, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", [True, False], ids=["in its mode", "outside of it"])
def test_fake_tensors_give_what_real_ones_give(case, mode):
    """Shape, dtype and strides; and the results that are arguments."""
    name, build = CASES[case]
    op, given, fake_mode = getattr(kda, name), build("cpu"), FakeTensorMode()
    faked = {n: fake_mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    if mode:
        with fake_mode:
            got = op(**faked)
    else:
        got = op(**faked)
    with kda.use_backend("reference"):
        want = op(**given)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for g, w in zip(got, want):
        assert (g is None) == (w is None)
        if w is not None:
            assert (g.shape, g.dtype, g.stride()) == (w.shape, w.dtype, w.stride())
            assert [n for n, x in faked.items() if x is g] == [n for n, x in given.items() if x is w]


# -------------------------------------------------------------------------------------------------------- compile, export


class Layer(nn.Module):
    """A KDA layer over packed prompts, or (with `cu_seqlens` None) one token a request; states in its buffers."""

    def __init__(self, fused, device):
        super().__init__()
        self.fused, wide = fused, H * D
        shapes = dict(qkv=(3 * wide, HIDDEN), beta=(H, HIDDEN), g=(wide, HIDDEN), gate=(wide, HIDDEN), o=(HIDDEN, wide),
                      conv=(3 * wide, W), A_log=(H,), g_bias=(wide,))
        for seed, (name, shape) in enumerate(shapes.items()):
            weight = randn(*shape, seed=seed + 1, scale=shape[-1] ** -0.5 if len(shape) > 1 else 1, device=device)
            self.register_parameter(name, nn.Parameter(weight))
        self.norm = kda.FusedRMSNormGated(D, activation="sigmoid", device=device)
        self.register_buffer("conv_state", torch.full((SLOTS, W - 1, 3 * wide), float("nan"), device=device).mT)
        self.register_buffer("ssm_state", torch.full((SLOTS, H, D, D), float("nan"), device=device))

    def forward(self, x, slots, cu_seqlens=None, has=None):
        heads = (H, D)
        qkv, beta = x @ self.qkv.T, x @ self.beta.T
        g, gate = (x @ self.g.T).unflatten(-1, heads), (x @ self.gate.T).unflatten(-1, heads)
        tokens, pools, own = (qkv, g, beta, gate), (self.conv_state, self.ssm_state), (self.conv, self.A_log, self.g_bias)
        if cu_seqlens is None:
            y = kda.kda_decode(*tokens, *pools, slots, *own, self.norm.weight)
        elif self.fused:
            y = kda.kda_prefill(*tokens, *pools, slots, cu_seqlens, has, *own, self.norm.weight)
        else:
            qkv = kda.causal_conv1d_fn(qkv.T, self.conv, None, self.conv_state, cu_seqlens, slots, has, activation=True).T
            q, k, v = qkv[None].unflatten(-1, (3, H, D)).unbind(2)
            initial_state = kda.gather_initial_states(self.ssm_state, slots, has)
            o, state = kda.chunk_kda_with_fused_gate(
                q, k, v, g[None], beta[None], self.A_log, self.g_bias, initial_state=initial_state, safe_gate=True,
                output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens, sigmoid_beta=True)
            kda.scatter_states(self.ssm_state, state, slots)
            y = self.norm(o[0], gate)
        return y.flatten(-2) @ self.o.T

    def oracle(self, x):
        """One request in fp64, from its first token on."""
        w = {name: p.detach().double() for name, p in self.named_parameters()}
        x, heads = x.double(), (H, D)
        y, _ = oracle.conv((x @ w["qkv"].T).T, w["conv"], None, x.new_zeros(3 * H * D, W - 1), True)
        q, k, v = y.T[None].unflatten(-1, (3, *heads)).unbind(2)
        g, beta = (x @ w["g"].T).unflatten(-1, heads), x @ w["beta"].T
        o, _ = oracle.kda(q, k, v, g[None], beta[None], sigmoid_beta=True, A_log=w["A_log"], g_bias=w["g_bias"],
                          lower_bound=-5.0)
        gate = (x @ w["gate"].T).unflatten(-1, heads)
        return oracle.rms_norm_gated(o[0], gate, w["norm.weight"], None, "sigmoid", eps=1e-5)[0].flatten(-2) @ w["o"].T


def assert_serves(layer, run_prefill, run_decode, device):
    """Two prompts packed, then a token of each, equal the layer in fp64."""
    lens = (19, 35)
    x = [randn(n + 1, HIDDEN, seed=50 + n, device=device) for n in lens]
    slots, has = ints([4, 1], device), torch.tensor([False, False], device=device)
    first = run_prefill(torch.cat([row[:-1] for row in x]), slots, ints([0, lens[0], sum(lens)], device), has).split(lens)
    last = run_decode(torch.stack([row[-1] for row in x]), slots)
    for n, row in enumerate(x):
        assert_accurate(torch.cat([first[n], last[n:n + 1]]), layer.oracle(row), FP32)


@torch.no_grad()
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_a_compiled_layer_is_one_graph_and_right(backend, fused, compiler):
    torch._dynamo.reset()
    counters.clear()
    layer = Layer(fused, backend.device)
    compiled = torch.compile(layer, fullgraph=True, backend=compiler, dynamic=True)
    for _ in range(2):
        assert_serves(layer, compiled, compiled, backend.device)
    x, slots = randn(7, HIDDEN, seed=1, device=backend.device), ints([3], backend.device)
    none = torch.tensor([False], device=backend.device)
    assert_accurate(compiled(x, ints([3, 2], backend.device), ints([0, 5, 7], backend.device), none.repeat(2))[:5],
                    layer.oracle(x[:5]), FP32)
    assert counters["stats"]["unique_graphs"] == 2, "not one graph for prompts of any length and one for decoding"


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_an_exported_layer_is_right(backend, fused):
    """The programs own their states: decoding gets those that the exported prefill has left."""
    device = backend.device
    layer = Layer(fused, device)
    example = (randn(9, HIDDEN, seed=1, device=device), ints([4, 1], device), ints([0, 4, 9], device),
               torch.tensor([False, False], device=device))
    T = torch.export.Dim("T", min=2, max=1 << 20)
    prefill = torch.export.export(layer, example, dynamic_shapes=({0: T}, None, None, None))
    decode = torch.export.export(layer, (example[0][:2], example[1]))
    stored = io.BytesIO()
    torch.export.save(prefill, stored)
    prefill, decode = torch.export.load(io.BytesIO(stored.getvalue())).module(), decode.module()

    def decode_on(*args):
        for name, pool in decode.named_buffers():
            pool.copy_(prefill.get_buffer(name))
        return decode(*args)

    assert_serves(layer, prefill, decode_on, device)


@torch.no_grad()
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")
def test_inductor_compiles_a_convolution_that_keeps_no_state(backend):
    """An op with one result, declared to write and given nothing to write to, fails in the inductor of torch 2.13."""
    given = valid.causal_conv1d_fn(backend.device)
    given.update(conv_states=None, cache_indices=None, has_initial_state=None)
    got = torch.compile(kda.causal_conv1d_fn, fullgraph=True)(**given)
    assert torch.equal(got, kda.causal_conv1d_fn(**given))


def test_make_fx_on_real_tensors_records_an_operation(backend):
    x = randn(3, D, seed=1, device=backend.device)
    traced = make_fx(lambda x: kda.rms_norm_gated(x, x, None, None), tracing_mode="real")(x)
    assert torch.ops.kda.rms_norm_gated.default in {node.target for node in traced.graph.nodes}
    y = 2 * x
    assert torch.equal(traced(y), kda.rms_norm_gated(y, y, None, None))


# -------------------------------------------------------------------------------------------------- eager calls, gradients


def dispatched(call):
    """Names of this package's ops that torch's dispatcher ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events() if event.name.startswith("kda::")}


@torch.no_grad()
def test_eager_calls_go_around_the_dispatcher_and_compiled_ones_through_it(backend):
    norm, x = kda.FusedRMSNormGated(D, device=backend.device), randn(3, D, seed=1, device=backend.device)
    assert dispatched(lambda: norm(x, x)) == set()
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    assert dispatched(lambda: compiled(x, x)) == {"kda::rms_norm_gated"}


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", ["rms_norm_gated", "chunk_kda", "kda_decode"])
def test_gradients_are_refused_when_asked_for(backend, name, how):
    """Also by an operation that writes states; without asking, a call with parameters that want them works."""
    given = next(build for build in valid.CASES if build.__name__ == name)(backend.device)
    given["out"] = None
    wanting = next(n for n, x in given.items() if n in ("weight", "beta", "conv_weight") and x is not None)
    with torch.no_grad():
        want = getattr(kda, name)(**{n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()})
    given[wanting] = nn.Parameter(given[wanting])
    op = getattr(kda, name) if how == "eager" else torch.compile(getattr(kda, name), fullgraph=True, backend="eager")
    got, want = (x[0] if isinstance(x, tuple) else x for x in (op(**given), want))
    assert got.requires_grad and torch.equal(got.detach(), want)
    with pytest.raises(RuntimeError, match=rf"kda\.{name} is for inference and has no backward pass"):
        got.sum().backward()


def test_compiling_a_training_step_is_refused(backend):
    norm, x = kda.FusedRMSNormGated(D, device=backend.device), randn(3, D, seed=1, device=backend.device)
    with pytest.raises(RuntimeError, match="call it under torch.no_grad"):
        torch.compile(norm, fullgraph=True, backend="aot_eager")(x, x)


def test_vmap_is_refused_by_name(backend):
    x = randn(3, 4, D, seed=1, device=backend.device)
    with pytest.raises(RuntimeError, match="kda::rms_norm_gated"):
        torch.vmap(lambda row: kda.rms_norm_gated(row, row, None, None))(x)


def test_wrong_arguments_are_refused_while_tracing():
    x = randn(3, D, seed=1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(TypeError, match="nonsense"):
            kda.chunk_kda(x, x, x, x, x, nonsense=1)
        with pytest.raises(TypeError, match="weight"):
            kda.rms_norm_gated(x, x)
