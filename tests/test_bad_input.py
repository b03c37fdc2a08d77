# SPDX-License-Identifier: Apache-2.0
"""Contract section 6: bad input raises before anything is written, naming the argument and what it got.

A case is an operation, one or more arguments replaced in a valid call, the error, and the argument that the message
must name. TypeError is for a wrong dtype and for what is no tensor, ValueError for the rest.
"""

import contextlib

import pytest
import torch
from helpers import BF16, FP16, FP32, ints, randn, subprocess_python, unchanged

import kda

N, T, H, HV, K, V, W, DIM, SLOTS, WINDOW = 2, 3, 2, 4, 32, 16, 4, 24, 6, 3


def rule(device):
    put = dict(dtype=BF16, device=device)
    return dict(
        q=randn(N, T, H, K, seed=1, **put), k=randn(N, T, H, K, seed=2, **put), v=randn(N, T, HV, V, seed=3, **put),
        g=-randn(N, T, HV, K, seed=4, **put).abs(), beta=randn(N, T, HV, seed=5, **put).sigmoid(),
        initial_state=randn(N, HV, V, K, seed=6, device=device),
    )


def chunk_kda(device):
    return {**rule(device), "out": torch.full((N, T, HV, V), 7.0, dtype=BF16, device=device)}


def chunk_kda_with_fused_gate(device):
    args = chunk_kda(device)
    args["raw_g"] = args.pop("g")
    return {**args, "A_log": randn(HV, seed=7, device=device), "g_bias": randn(HV * K, seed=8, device=device),
            "safe_gate": True}


def fused_recurrent_kda(device):
    return {**chunk_kda(device), "initial_state": randn(SLOTS, HV, V, K, seed=6, device=device),
            "ssm_state_indices": ints([3, 1], device), "a_log": randn(HV, seed=7, device=device),
            "g_bias": randn(HV * K, seed=8, device=device), "compute_gate": True}


def causal_conv1d_fn(device):
    return dict(x=randn(N * T, DIM, seed=1, dtype=BF16, device=device).T, weight=randn(DIM, W, seed=2, device=device),
                bias=randn(DIM, seed=3, device=device),
                conv_states=randn(SLOTS, W - 1, DIM, seed=4, dtype=BF16, device=device).transpose(1, 2),
                query_start_loc=ints([0, T, 2 * T], device), cache_indices=ints([3, 1], device),
                has_initial_state=torch.tensor([True, False], device=device))


def causal_conv1d_update(device):
    return dict(x=randn(N, DIM, T, seed=1, dtype=BF16, device=device), weight=randn(DIM, W, seed=2, device=device),
                bias=randn(DIM, seed=3, device=device),
                conv_state=randn(SLOTS, W + 1, DIM, seed=4, dtype=BF16, device=device).transpose(1, 2),
                conv_state_indices=ints([3, 1], device),
                out=torch.full((N, DIM, T), 7.0, dtype=BF16, device=device))


def fused_kda_gate(device):
    return dict(g=randn(T, H * K, seed=1, dtype=BF16, device=device), A=randn(H, seed=2, device=device), head_k_dim=K,
                g_bias=randn(H * K, seed=3, device=device), safe_gate=True)


def rms_norm_gated(device):
    put = dict(dtype=BF16, device=device)
    return dict(x=randn(T, HV, V, seed=1, **put), g=randn(T, HV, V, seed=2, **put),
                weight=randn(V, seed=3, device=device), bias=randn(V, seed=4, device=device),
                residual=randn(T, HV, V, seed=5, **put), out=torch.full((T, HV, V), 7.0, **put))


def kda_decode(device):
    put, dim = dict(dtype=BF16, device=device), 2 * H * K + HV * V
    return dict(
        qkv=randn(N, dim, seed=1, **put), raw_g=randn(N, HV, K, seed=2, **put), beta=randn(N, HV, seed=3, **put),
        out_gate=randn(N, HV, V, seed=4, **put),
        conv_state=randn(SLOTS, W - 1, dim, seed=5, **put).transpose(1, 2),
        ssm_state=randn(SLOTS, HV, V, K, seed=6, device=device), ssm_state_indices=ints([3, 1], device),
        conv_weight=randn(dim, W, seed=7, device=device), A_log=randn(HV, seed=8, device=device),
        g_bias=randn(HV * K, seed=9, device=device), norm_weight=randn(V, seed=10, device=device),
        conv_bias=randn(dim, seed=11, device=device), out=torch.full((N, HV, V), 7.0, **put),
    )


def gather_initial_states(device):
    return dict(state=randn(SLOTS, HV, V, K, seed=1, device=device), indices=ints([3, 1], device),
                has_initial_state=torch.tensor([True, False], device=device))


def scatter_states(device):
    return dict(state=randn(SLOTS, HV, V, K, seed=1, device=device), src=randn(N, HV, V, K, seed=2, device=device),
                indices=ints([3, 1], device))


# What is done to an argument. Each takes the valid tensor and gives a bad one.
def to(dtype):
    return lambda x: x.to(dtype)


def meta(x):
    return x.to("meta")


def every_other(x):
    """The same shape with a last dim that is not contiguous."""
    return x.repeat_interleave(2, -1)[..., ::2]


def one_token(x):
    """The first token expanded to all: tokens overlap."""
    return x[:, :1].expand_as(x)


def one_row(x):
    """The first row expanded to all."""
    return x[:1].expand_as(x)


def overlapping(x):
    """[B, T, heads, dim] with a token stride of one head: tokens share heads."""
    B, T, heads, dim = x.shape
    flat = x.flatten().clone()
    return flat.as_strided(x.shape, (T * dim, dim, dim, 1))


def resized(*shape):
    return lambda x: torch.zeros(shape, dtype=x.dtype, device=x.device)


def value(v):
    return lambda x: v


def drop(dim):
    return lambda x: x.select(dim, 0)


def fewer(dim, by=1):
    return lambda x: x.narrow(dim, 0, x.shape[dim] - by)


def like(name):
    """The very tensor of another argument: aliasing."""
    return lambda x, args: args[name]


TENSOR = "a list instead of a tensor"
ATTENTION = [
    # argument, what is done to it, error
    ("q", lambda x: x.tolist(), TypeError), ("q", to(torch.float64), TypeError), ("q", to(torch.int32), TypeError),
    ("q", drop(0), ValueError), ("k", drop(0), ValueError), ("v", drop(0), ValueError),
    ("k", to(FP16), TypeError), ("v", to(FP32), TypeError),
    ("k", fewer(1), ValueError), ("v", fewer(1), ValueError), ("k", fewer(2), ValueError), ("k", fewer(3), ValueError),
    ("v", fewer(2), ValueError),  # 3 value heads beside 2
    ("k", meta, ValueError), ("v", meta, ValueError), ("beta", meta, ValueError), ("initial_state", meta, ValueError),
    ("out", meta, ValueError),
    ("q", every_other, ValueError), ("k", every_other, ValueError), ("v", every_other, ValueError),
    ("beta", every_other, ValueError), ("out", every_other, ValueError),
    ("q", one_token, ValueError), ("k", one_token, ValueError), ("v", one_token, ValueError),
    ("q", overlapping, ValueError), ("k", overlapping, ValueError), ("v", overlapping, ValueError),
    ("beta", one_token, ValueError), ("out", one_token, ValueError), ("out", overlapping, ValueError),
    ("beta", fewer(2), ValueError), ("beta", fewer(1), ValueError), ("beta", to(torch.int64), TypeError),
    ("beta", drop(0), ValueError),
    ("initial_state", to(FP16), TypeError), ("initial_state", to(torch.float64), TypeError),
    ("initial_state", fewer(1), ValueError), ("initial_state", fewer(2), ValueError),
    ("initial_state", fewer(3), ValueError), ("initial_state", drop(0), ValueError),
    ("initial_state", resized(N, HV, K, V), ValueError),  # K-major
    ("initial_state", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), ValueError),  # not dense V-major
    ("initial_state", every_other, ValueError), ("initial_state", lambda x: x[:1].expand_as(x), ValueError),
    ("out", fewer(1), ValueError), ("out", to(FP32), TypeError), ("out", drop(0), ValueError),
    ("out", like("v"), ValueError),
    ("cu_seqlens", lambda x: ints([0, T, N * T], "cpu"), ValueError),  # with B = 2
]
GATE_OUT = [("out", lambda x, args: args["g"][..., :V], ValueError), ("g", to(torch.int8), TypeError),
            ("g", fewer(3), ValueError), ("g", fewer(2), ValueError), ("g", every_other, ValueError),
            ("g", one_token, ValueError), ("g", overlapping, ValueError), ("g", meta, ValueError),
            ("g", drop(0), ValueError)]


def gate_parameters(A, bias):
    return [(A, fewer(0), ValueError), (A, to(torch.int32), TypeError), (A, meta, ValueError),
            (A, resized(1, HV, 1, 1), ValueError), (bias, fewer(0), ValueError), (bias, resized(K, HV), ValueError),
            (bias, to(torch.float64), TypeError), (bias, meta, ValueError)]


CASES = {
    chunk_kda: [
        *ATTENTION, *GATE_OUT,
        ("initial_state", fewer(0), ValueError),
        ("beta", lambda x: x[..., None].expand(N, T, HV, V).contiguous(), ValueError),  # headwise is for decoding
    ],
    chunk_kda_with_fused_gate: [
        *ATTENTION, *gate_parameters("A_log", "g_bias"),
        *[("raw_g", bad, error) for name, bad, error in GATE_OUT if name == "g"],
        ("out", lambda x, args: args["raw_g"][..., :V], ValueError),
        ("initial_state", fewer(0), ValueError),
        ("A_log", value(None), ValueError), ("lower_bound", value(0.5), ValueError),
        ("lower_bound", value(float("-inf")), ValueError),
    ],
    fused_recurrent_kda: [
        *ATTENTION, *GATE_OUT, *gate_parameters("a_log", "g_bias"),
        ("a_log", value(None), ValueError), ("lower_bound", value(0.5), ValueError),
        ("beta", lambda x: x[..., None].expand(N, T, HV, V - 1).contiguous(), ValueError),
        ("initial_state", fewer(0, SLOTS), ValueError),  # a pool with no slot
        ("initial_state", value(None), ValueError),
        ("ssm_state_indices", to(FP32), TypeError), ("ssm_state_indices", fewer(0), ValueError),
        ("ssm_state_indices", lambda x: x[:, None, None], ValueError), ("ssm_state_indices", meta, ValueError),
        ("ssm_state_indices", lambda x: torch.ones(N, T - 1, dtype=torch.int32, device=x.device), ValueError),  # window
        ("num_accepted_tokens", lambda x: ints([1, 1, 1], "cpu"), ValueError),
        ("num_accepted_tokens", lambda x: torch.ones(N), TypeError),
        ("num_accepted_tokens", lambda x: ints([1, 1], "meta"), ValueError),
    ],
    causal_conv1d_fn: [
        ("x", drop(0), ValueError), ("x", to(torch.int32), TypeError), ("x", to(torch.float64), TypeError),
        ("x", lambda x: x.tolist(), TypeError), ("x", lambda x: x[:1].expand_as(x), ValueError),
        ("x", lambda x: x[:, :1].expand_as(x), ValueError),
        ("weight", fewer(0), ValueError), ("weight", resized(DIM, 1), ValueError),
        ("weight", resized(DIM, 9), ValueError), ("weight", drop(1), ValueError), ("weight", meta, ValueError),
        ("weight", to(torch.int32), TypeError), ("bias", fewer(0), ValueError), ("bias", meta, ValueError),
        ("bias", to(torch.int32), TypeError),
        ("conv_states", fewer(2), ValueError), ("conv_states", fewer(1), ValueError),
        ("conv_states", drop(0), ValueError), ("conv_states", fewer(0, SLOTS), ValueError),
        ("conv_states", to(torch.float64), TypeError), ("conv_states", meta, ValueError),
        ("conv_states", lambda x: x[:1].expand_as(x), ValueError), ("conv_states", value(None), ValueError),
        ("query_start_loc", value(None), (TypeError, ValueError)), ("query_start_loc", to(FP32), TypeError),
        ("query_start_loc", resized(0), ValueError), ("query_start_loc", lambda x: x[None], ValueError),
        ("query_start_loc", meta, ValueError),
        ("cache_indices", fewer(0), ValueError), ("cache_indices", to(FP32), TypeError),
        ("cache_indices", lambda x: x[:, None], ValueError), ("cache_indices", meta, ValueError),
        ("has_initial_state", fewer(0), ValueError), ("has_initial_state", to(FP32), TypeError),
        ("has_initial_state", meta, ValueError),
        ("activation", value("gelu"), ValueError),
    ],
    causal_conv1d_update: [
        ("x", lambda x: x[0, 0], ValueError), ("x", lambda x: x[None], ValueError), ("x", to(torch.float64), TypeError),
        ("x", lambda x: x[:1].expand_as(x), ValueError), ("x", lambda x: x.tolist(), TypeError),
        ("weight", fewer(0), ValueError), ("weight", resized(DIM, 9), ValueError), ("weight", meta, ValueError),
        ("bias", fewer(0), ValueError),
        ("conv_state", fewer(2, 3), ValueError), ("conv_state", fewer(1), ValueError),
        ("conv_state", fewer(0, SLOTS), ValueError), ("conv_state", to(torch.int16), TypeError),
        ("conv_state", meta, ValueError), ("conv_state", lambda x: x[:1].expand_as(x), ValueError),
        ("conv_state_indices", fewer(0), ValueError), ("conv_state_indices", to(FP32), TypeError),
        ("conv_state_indices", meta, ValueError),
        ("num_accepted_tokens", lambda x: torch.ones(N), TypeError),
        ("conv_state", lambda x, args: args.update(num_accepted_tokens=ints([1, 1], "cpu")) or x[:, :, :W - 1],
         ValueError),  # no room for the window
        ("query_start_loc", lambda x, args: args.update(x=args["x"][..., 0], out=None) or torch.ones(N + 1), TypeError),
        ("out", fewer(2), ValueError), ("out", to(FP32), TypeError), ("out", meta, ValueError),
        ("out", like("x"), ValueError), ("out", lambda x: x[:1].expand_as(x), ValueError),
        ("activation", value("relu"), ValueError),
    ],
    fused_kda_gate: [
        ("g", to(torch.int32), TypeError), ("g", fewer(1), ValueError), ("g", every_other, ValueError),
        ("g", lambda x: x.tolist(), TypeError), ("g", lambda x: x[:1].expand_as(x), ValueError),
        ("A", fewer(0), ValueError), ("A", to(torch.int32), TypeError), ("A", meta, ValueError),
        ("g_bias", fewer(0), ValueError), ("g_bias", meta, ValueError), ("g_bias", to(torch.float64), TypeError),
        ("lower_bound", value(1.0), ValueError),
    ],
    rms_norm_gated: [
        ("x", to(torch.int32), TypeError), ("x", every_other, ValueError), ("x", lambda x: x.tolist(), TypeError),
        ("g", fewer(0), ValueError), ("g", fewer(2), ValueError), ("g", every_other, ValueError),
        ("g", to(torch.int32), TypeError), ("g", meta, ValueError),
        ("weight", fewer(0), ValueError), ("weight", lambda x: x[None], ValueError), ("weight", meta, ValueError),
        ("bias", fewer(0), ValueError), ("bias", to(torch.int32), TypeError),
        ("residual", fewer(0), ValueError), ("residual", every_other, ValueError), ("residual", meta, ValueError),
        ("out", to(FP32), TypeError), ("out", fewer(0), ValueError), ("out", every_other, ValueError),
        ("out", like("x"), ValueError), ("out", like("g"), ValueError), ("out", like("residual"), ValueError),
        ("activation", value("gelu"), ValueError),
    ],
    kda_decode: [
        ("qkv", lambda x: x.tolist(), TypeError), ("qkv", to(torch.float64), TypeError), ("qkv", drop(0), ValueError),
        ("qkv", fewer(1), ValueError), ("qkv", fewer(1, 2 * H * K), ValueError), ("qkv", every_other, ValueError),
        ("qkv", one_row, ValueError),
        ("qkv", lambda x: torch.cat([x, x[:, :2 * K]], 1), ValueError),  # 3 query heads beside 4 value heads
        ("raw_g", to(torch.int32), TypeError), ("raw_g", fewer(0), ValueError),
        ("raw_g", drop(0), ValueError), ("raw_g", every_other, ValueError), ("raw_g", one_row, ValueError),
        ("raw_g", meta, ValueError), ("raw_g", lambda x: x[..., :8], ValueError),
        ("beta", to(torch.int32), TypeError), ("beta", fewer(1), ValueError), ("beta", every_other, ValueError),
        ("beta", one_row, ValueError), ("beta", meta, ValueError), ("beta", value(None), TypeError),
        ("out_gate", to(torch.int32), TypeError), ("out_gate", fewer(0), ValueError),
        ("out_gate", fewer(1), ValueError), ("out_gate", every_other, ValueError), ("out_gate", one_row, ValueError),
        ("out_gate", meta, ValueError), ("out_gate", lambda x: x[..., :8], ValueError),
        ("conv_state", fewer(2), ValueError), ("conv_state", fewer(1), ValueError),
        ("conv_state", fewer(0, SLOTS), ValueError), ("conv_state", to(torch.int16), TypeError),
        ("conv_state", meta, ValueError), ("conv_state", one_row, ValueError),
        ("ssm_state", to(FP16), TypeError), ("ssm_state", fewer(0, SLOTS), ValueError),
        ("ssm_state", fewer(1), ValueError), ("ssm_state", fewer(3), ValueError),
        ("ssm_state", resized(SLOTS, HV, K, V), ValueError),
        ("ssm_state", every_other, ValueError), ("ssm_state", one_row, ValueError), ("ssm_state", meta, ValueError),
        ("ssm_state_indices", to(FP32), TypeError), ("ssm_state_indices", fewer(0), ValueError),
        ("ssm_state_indices", lambda x: x[:, None], ValueError), ("ssm_state_indices", meta, ValueError),
        ("ssm_state_indices", value(None), TypeError),
        ("conv_weight", fewer(0), ValueError), ("conv_weight", lambda x: x[:, :1], ValueError),
        ("conv_weight", lambda x: x.repeat(1, 3), ValueError), ("conv_weight", to(torch.int32), TypeError),
        ("conv_weight", meta, ValueError), ("conv_bias", fewer(0), ValueError), ("conv_bias", meta, ValueError),
        ("norm_weight", fewer(0), ValueError), ("norm_weight", to(torch.int32), TypeError),
        ("norm_weight", meta, ValueError), *gate_parameters("A_log", "g_bias"), ("A_log", value(None), TypeError),
        ("lower_bound", value(0.5), ValueError), ("activation", value("gelu"), ValueError),
        ("out", to(FP32), TypeError), ("out", fewer(0), ValueError), ("out", fewer(1), ValueError),
        ("out", every_other, ValueError), ("out", one_row, ValueError), ("out", meta, ValueError),
        ("out", like("out_gate"), ValueError), ("out", lambda x, args: args["raw_g"][..., :V], ValueError),
        ("out", lambda x, args: args["qkv"][:, -HV * V:].unflatten(1, (HV, V)), ValueError),
    ],
    gather_initial_states: [
        ("state", to(torch.int32), TypeError), ("state", fewer(0, SLOTS), ValueError),
        ("state", lambda x: x.tolist(), TypeError), ("state", lambda x: x[:1].expand_as(x), ValueError),
        ("state", every_other, ValueError),
        ("indices", to(FP32), TypeError), ("indices", lambda x: x[:, None], ValueError), ("indices", meta, ValueError),
        ("has_initial_state", fewer(0), ValueError), ("has_initial_state", to(FP32), TypeError),
        ("has_initial_state", meta, ValueError),
    ],
    scatter_states: [
        ("state", to(torch.int32), TypeError), ("state", fewer(0, SLOTS), ValueError),
        ("state", lambda x: x[:1].expand_as(x), ValueError), ("state", every_other, ValueError),
        ("src", fewer(0), ValueError), ("src", fewer(3), ValueError), ("src", to(torch.int32), TypeError),
        ("src", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), ValueError), ("src", meta, ValueError),
        ("indices", to(FP32), TypeError), ("indices", meta, ValueError), ("indices", lambda x: x[:, None], ValueError),
    ],
}
ALL = [pytest.param(builder, *case, id=f"{builder.__name__}-{case[0]}-{n}")
       for builder, cases in CASES.items() for n, case in enumerate(cases)]
OPS = [pytest.param(builder, id=builder.__name__) for builder in CASES]


@contextlib.contextmanager
def refused(error, name, *tensors):
    """The block raises `error` with a message that names the argument, and no byte of the tensors changes."""
    with unchanged(*(t for t in tensors if isinstance(t, torch.Tensor) and t.device.type != "meta")):
        with pytest.raises(error) as caught:
            yield
    assert f"`{name}`" in str(caught.value), f"the message does not name {name}: {caught.value}"
    assert "got" in str(caught.value) and "accepted" in str(caught.value), str(caught.value)


@pytest.mark.parametrize("builder", OPS)
def test_the_valid_call_that_the_cases_start_from_is_accepted(backend, builder):
    getattr(kda, builder.__name__)(**builder(backend.device))


@pytest.mark.parametrize("builder,name,bad,error", ALL)
def test_bad_argument_is_refused_and_nothing_is_written(backend, builder, name, bad, error):
    args = builder(backend.device)
    before = list(args.values())
    old = args.get(name)
    takes_args = bad.__code__.co_argcount == 2
    args[name] = bad(old, args) if takes_args else bad(old)
    if isinstance(args[name], torch.Tensor) and args[name].device.type == "cpu" and "meta" not in str(bad):
        args[name] = args[name].to(backend.device)
    with refused(error, name, *before, *args.values()):
        getattr(kda, builder.__name__)(**args)


@pytest.mark.parametrize("dim,accepted", [(15, False), (16, True), (256, True), (257, False)])
@pytest.mark.parametrize("which", ["K", "V"])
def test_head_dims_from_16_to_256(backend, which, dim, accepted):
    k, v = (dim, 16) if which == "K" else (16, dim)
    q, g = randn(1, 1, 1, k, seed=1, device=backend.device), torch.zeros(1, 1, 1, k, device=backend.device)
    args = dict(q=q, k=q.clone(), v=randn(1, 1, 1, v, seed=2, device=backend.device), g=g, beta=None)
    for op in (kda.chunk_kda, kda.fused_recurrent_kda):
        if accepted:
            op(**args)
        else:
            with refused(ValueError, "q" if which == "K" else "v", *args.values()):
                op(**args)


@pytest.mark.parametrize("builder", [chunk_kda, chunk_kda_with_fused_gate, fused_recurrent_kda],
                         ids=lambda b: b.__name__)
def test_packed_sequences_need_one_row(backend, builder):
    args = builder(backend.device)
    args["cu_seqlens"] = ints([0, T, N * T], backend.device)
    with refused(ValueError, "cu_seqlens", *args.values()):
        getattr(kda, builder.__name__)(**args)


def test_packed_rows_need_state_indices(backend):
    args = causal_conv1d_update(backend.device)
    args.update(x=args["x"].flatten(1).T.contiguous()[:N * T, :DIM], out=None, conv_state_indices=None,
                query_start_loc=ints([0, 1, 2], backend.device))
    args["x"] = randn(N, DIM, seed=1, dtype=BF16, device=backend.device)
    with refused(ValueError, "conv_state_indices", *args.values()):
        kda.causal_conv1d_update(**args)


def test_without_indices_the_states_need_a_row_for_every_sequence(backend):
    args = causal_conv1d_update(backend.device)
    args.update(conv_state=args["conv_state"][:1], conv_state_indices=None)
    with refused(ValueError, "conv_state", *args.values()):
        kda.causal_conv1d_update(**args)
    args = causal_conv1d_fn(backend.device)
    args.update(conv_states=args["conv_states"][:1], cache_indices=None)
    with refused(ValueError, "conv_states", *args.values()):
        kda.causal_conv1d_fn(**args)


def test_counts_of_accepted_tokens_need_a_window_of_slots(backend):
    args = fused_recurrent_kda(backend.device)
    args.update(num_accepted_tokens=ints([1, 1], backend.device))
    with refused(ValueError, "ssm_state_indices", *args.values()):
        kda.fused_recurrent_kda(**args)


@pytest.mark.parametrize("builder", [chunk_kda, chunk_kda_with_fused_gate, fused_recurrent_kda],
                         ids=lambda b: b.__name__)
def test_a_misspelt_keyword_is_not_swallowed(backend, builder):
    args = builder(backend.device)
    with unchanged(*args.values()), pytest.raises(TypeError, match="use_qk_l2norm_in_kernal"):
        getattr(kda, builder.__name__)(**args, use_qk_l2norm_in_kernal=True)


def test_the_message_says_what_it_got_and_what_is_accepted(backend):
    args = chunk_kda(backend.device)
    args["k"] = args["k"][:, :1]
    with pytest.raises(ValueError, match=rf"`k`.*\[{N}, 1, {H}, {K}\].*accepted.*\[{N}, {T}, {H}, {K}\]"):
        kda.chunk_kda(**args)
    args = chunk_kda(backend.device)
    args["v"] = args["v"].double()
    with pytest.raises(TypeError, match="`v`.*float64.*accepted.*bfloat16"):
        kda.chunk_kda(**args)
    args["v"] = args["v"][:, :, :3].to(BF16).contiguous()
    with pytest.raises(ValueError, match="`v`.*3 value heads.*2 query heads.*accepted"):
        kda.chunk_kda(**args)


CHECKED = """
import torch, kda
from test_bad_input import *

def expect(op, builder, name, **changes):
    args = builder("cpu")
    args.update(changes)
    args = {k: v for k, v in args.items() if v is not ...}
    with refused(ValueError, name, *args.values()):
        op(**args)

one = {n: t.flatten(0, 1)[None] for n, t in rule("cpu").items() if n != "initial_state"}
packed = dict(one, out=None)
fused = {k: v for k, v in packed.items()}
for bad in ([1, 3, 6], [0, 4, 3, 6], [0, 3, 7], [0, -1, 6]):
    state = torch.zeros(len(bad) - 1, HV, V, K)
    expect(kda.chunk_kda, chunk_kda, "cu_seqlens", **packed, initial_state=state, cu_seqlens=ints(bad, "cpu"))
    expect(kda.causal_conv1d_fn, causal_conv1d_fn, "query_start_loc", query_start_loc=ints(bad, "cpu"),
           cache_indices=None, has_initial_state=None)
expect(kda.fused_recurrent_kda, fused_recurrent_kda, "ssm_state_indices", ssm_state_indices=ints([3, SLOTS], "cpu"))
expect(kda.fused_recurrent_kda, fused_recurrent_kda, "ssm_state_indices", ssm_state_indices=ints([3, 3], "cpu"))
expect(kda.fused_recurrent_kda, fused_recurrent_kda, "ssm_state_indices", **packed, cu_seqlens=ints([0, 2, 6], "cpu"),
       ssm_state_indices=ints([[1, 2, 3], [4, 5, 0]], "cpu"))  # 4 tokens in a window of 3
expect(kda.causal_conv1d_fn, causal_conv1d_fn, "cache_indices", cache_indices=ints([SLOTS, 1], "cpu"))
expect(kda.causal_conv1d_update, causal_conv1d_update, "conv_state_indices",
       conv_state_indices=ints([1, SLOTS], "cpu"))
expect(kda.kda_decode, kda_decode, "ssm_state_indices", ssm_state_indices=ints([1, SLOTS], "cpu"))
expect(kda.kda_decode, kda_decode, "ssm_state_indices", ssm_state_indices=ints([1, 1], "cpu"))
expect(kda.scatter_states, scatter_states, "indices", indices=ints([1, SLOTS], "cpu"))
expect(kda.gather_initial_states, gather_initial_states, "indices", indices=ints([1, SLOTS], "cpu"))

kda.fused_recurrent_kda(**{**fused_recurrent_kda("cpu"), "ssm_state_indices": ints([0, -1], "cpu")})  # padding is fine
kda.causal_conv1d_fn(**{**causal_conv1d_fn("cpu"), "cache_indices": ints([0, -1], "cpu")})
kda.chunk_kda(**{**chunk_kda("cpu"), **packed, "cu_seqlens": ints([0, 3, 5], "cpu")})  # and so is a padded tail
print("checked")
"""


def test_KDA_CHECK_reads_the_values_on_the_device():
    done = subprocess_python(CHECKED, KDA_CHECK="1")
    assert done.stdout.strip().endswith("checked"), done.stderr[-3000:]


def test_without_KDA_CHECK_bad_values_on_the_device_are_harmless(backend):
    """Ranges that fall, run past the tokens or are negative touch nothing but what lies inside."""
    device = backend.device
    args = {n: t.flatten(0, 1)[None] for n, t in rule(device).items() if n != "initial_state"}
    for bad in ([0, 4, 3, 1 << 30], [-5, 2, 2, 6], [3, 3, 100, 4]):
        cu, state = ints(bad, device), torch.zeros(SLOTS, HV, V, K, device=device)
        covered = slice(max(bad[0], 0), None)  # a first offset over 0 leaves tokens that are no one's
        with unchanged(*args.values()):
            o, final = kda.chunk_kda(**args, cu_seqlens=cu, output_final_state=True)
            kda.fused_recurrent_kda(**args, initial_state=state, cu_seqlens=cu,
                                    ssm_state_indices=ints([1, 1 << 30, -(1 << 30)], device))
        assert o[:, covered].isfinite().all() and final.isfinite().all() and state[2:].eq(0).all()
        conv = causal_conv1d_fn(device)
        conv.update(query_start_loc=cu, cache_indices=ints([1, 1 << 30, -(1 << 30)], device),
                    has_initial_state=torch.ones(3, dtype=torch.bool, device=device))
        before = conv["conv_states"].clone()
        out = kda.causal_conv1d_fn(**conv)
        assert out[:, covered].isfinite().all() and torch.equal(conv["conv_states"][2:], before[2:])
