# SPDX-License-Identifier: Apache-2.0
"""rms_norm_gated and FusedRMSNormGated: rms_norm(x) * weight * activation(gate), in fp32."""

import oracle
import pytest
import torch
from helpers import (BF16, DTYPES, FP32, assert_accurate, assert_only_view_written, call, each_dtype, frame,
                     on_backends, randn)

import kda

SHAPES = [(7, 32), (2, 5, 2, 48), (3, 4, 128), (1, 1, 1, 16), (0, 32)]
COMPILED = [(5, 80), (4, 9, 3, 256), (3, 1024), (2, 65, 4, 128)]
GPU = [(1, 2048, 64, 128), (512, 4096)]


def inputs(shape, dtype, device, seed=0):
    x, g = (randn(*shape, seed=seed + i, dtype=dtype, device=device) for i in (1, 2))
    weight = randn(shape[-1], seed=seed + 3, device=device) + 1.0
    bias = randn(shape[-1], seed=seed + 4, device=device)
    return x, g, weight, bias


@each_dtype
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@on_backends("shape", SHAPES, COMPILED, GPU, ids=lambda s: "x".join(map(str, s)))
def test_norm_equals_the_oracle(backend, shape, activation, dtype):
    x, g, weight, bias = inputs(shape, dtype, backend.device)
    y = call(kda.rms_norm_gated, x, g, weight, bias, activation=activation, eps=1e-5)
    assert y.dtype == dtype
    assert_accurate(y, oracle.rms_norm_gated(x, g, weight, bias, activation, eps=1e-5)[0], dtype)


def test_norm_defaults_are_swish_and_1e_minus_6(backend):
    x, g, weight, _ = inputs((6, 32), FP32, backend.device)
    x = x * 1e-3  # so that eps counts
    y = kda.rms_norm_gated(x, g, weight, None)
    assert_accurate(y, oracle.rms_norm_gated(x, g, weight, None, "swish", eps=1e-6)[0], FP32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_without_weight_and_with_weight_of_the_activation_dtype(backend, dtype):
    x, g, weight, bias = inputs((5, 2, 32), dtype, backend.device)
    assert_accurate(call(kda.rms_norm_gated, x, g, None, None), oracle.rms_norm_gated(x, g)[0], dtype)
    weight, bias = weight.to(dtype), bias.to(dtype)
    assert_accurate(call(kda.rms_norm_gated, x, g, weight, bias), oracle.rms_norm_gated(x, g, weight, bias)[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_fp32", [False, True])
def test_prenorm_returns_the_residual_stream(backend, dtype, in_fp32):
    """residual is added in fp32 before the norm; prenorm returns the sum in the residual's dtype."""
    x, g, weight, bias = inputs((2, 7, 32), dtype, backend.device)
    residual = randn(*x.shape, seed=9, dtype=FP32 if in_fp32 else dtype, device=backend.device)
    y, stream = call(kda.rms_norm_gated, x, g, weight, bias, residual=residual, prenorm=True, residual_in_fp32=in_fp32)
    want_y, want_stream = oracle.rms_norm_gated(x, g, weight, bias, residual=residual)
    assert stream.dtype == residual.dtype
    assert_accurate(y, want_y, dtype)
    assert torch.equal(stream, want_stream.to(stream.dtype))
    assert torch.equal(y, kda.rms_norm_gated(x, g, weight, bias, residual=residual))


def test_prenorm_without_residual_returns_the_input_as_stream(backend):
    x, g, weight, _ = inputs((4, 32), BF16, backend.device)
    _, stream = kda.rms_norm_gated(x, g, weight, None, prenorm=True)
    assert stream.dtype == BF16 and torch.equal(stream, x)
    _, stream = kda.rms_norm_gated(x, g, weight, None, prenorm=True, residual_in_fp32=True)
    assert stream.dtype == FP32 and torch.equal(stream, x.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before,after", [(16, 16), (3, 5)], ids=["aligned", "odd"])
def test_norm_reads_strided_inputs_and_writes_a_strided_out(backend, dtype, before, after):
    """x, gate and residual are column slices with a batch stride of their own; out is one of a poisoned buffer."""
    x, g, weight, bias = inputs((2, 6, 3, 32), dtype, backend.device)
    residual = randn(*x.shape, seed=9, dtype=dtype, device=backend.device)
    want = kda.rms_norm_gated(x, g, weight, bias, residual=residual)
    out = frame(torch.full_like(x, float("nan")), before=before, after=after)
    views = [frame(t, before=before, after=after) for t in (x, g, residual)]
    got = call(kda.rms_norm_gated, views[0], views[1], weight, bias, residual=views[2], out=out, written=("out",))
    assert got is out
    assert torch.equal(out, want)
    assert_only_view_written(out)


def test_norm_reads_a_gate_that_is_a_column_slice_of_rows(backend):
    """x [tokens, HV, V] contiguous, gate a column slice of a [tokens, wide] projection: the serving layout."""
    x, g, weight, _ = inputs((9, 2, 32), BF16, backend.device)
    gate = frame(g[None], before=64, after=64)[0]
    want = kda.rms_norm_gated(x, g, weight, None, activation="sigmoid")
    assert torch.equal(kda.rms_norm_gated(x, gate, weight, None, activation="sigmoid"), want)


def test_a_row_has_the_same_norm_at_any_place(backend):
    x, g, weight, bias = inputs((40, 32), BF16, backend.device)
    y = kda.rms_norm_gated(x, g, weight, bias)
    order = torch.arange(39, -1, -1, device=x.device)
    assert torch.equal(kda.rms_norm_gated(x[order].contiguous(), g[order].contiguous(), weight, bias), y[order])
    assert torch.equal(kda.rms_norm_gated(x[7:8], g[7:8], weight, bias), y[7:8])


def test_nan_rows_stay_in_their_row(backend):
    x, g, weight, bias = inputs((9, 32), BF16, backend.device)
    want = kda.rms_norm_gated(x, g, weight, bias)
    x[4], g[4] = float("nan"), float("nan")
    got = kda.rms_norm_gated(x, g, weight, bias)
    keep = torch.arange(9, device=x.device) != 4
    assert torch.equal(got[keep], want[keep]) and got[4].isnan().all()


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_module_equals_the_function(backend, activation):
    norm = kda.FusedRMSNormGated(32, eps=1e-5, activation=activation, device=backend.device, dtype=FP32)
    x, g, weight, _ = inputs((3, 2, 32), BF16, backend.device)
    with torch.no_grad():
        norm.weight.copy_(weight)
    y = norm(x, g)
    assert torch.equal(y, kda.rms_norm_gated(x, g, weight, None, activation=activation, eps=1e-5))
    assert_accurate(y, oracle.rms_norm_gated(x, g, weight, None, activation, eps=1e-5)[0], BF16)
    y, stream = norm(x, g, residual=x, prenorm=True)
    assert_accurate(y, oracle.rms_norm_gated(x, g, weight, None, activation, residual=x, eps=1e-5)[0], BF16)
    assert torch.equal(stream, x + x)


def test_module_without_affine_has_no_weight_and_defaults_to_swish(backend):
    norm = kda.FusedRMSNormGated(32, elementwise_affine=False, device=backend.device)
    assert norm.weight is None and list(norm.parameters()) == []
    x, g, _, _ = inputs((3, 32), FP32, backend.device)
    x = x * 1e-2
    assert_accurate(norm(x, g), oracle.rms_norm_gated(x, g, activation="swish", eps=1e-5)[0], FP32)


def test_module_weights_load_from_a_state_dict(backend):
    norm = kda.FusedRMSNormGated(32, device=backend.device)
    assert list(norm.state_dict()) == ["weight"]
    norm.load_state_dict({"weight": torch.full((32,), 2.0)})
    x, g, _, _ = inputs((3, 32), FP32, backend.device)
    assert_accurate(norm(x, g), 2.0 * oracle.rms_norm_gated(x, g, eps=1e-5)[0], FP32)


def test_module_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="activation.*gelu"):
        kda.FusedRMSNormGated(32, activation="gelu")


@pytest.mark.parametrize("many", [600, 70_000])
def test_a_row_gives_the_same_bits_alone_and_among_others(backend, many):
    """Above 65,536 rows a GPU's programs have other numbers of warps."""
    x, g = (randn(many, 128, seed=seed, dtype=BF16, device=backend.device) for seed in (1, 2))
    weight = randn(128, seed=3, device=backend.device)
    whole = kda.rms_norm_gated(x, g, weight, None, activation="sigmoid")
    for rows in (slice(0, 1), slice(17, 90)):
        assert torch.equal(kda.rms_norm_gated(x[rows], g[rows], weight, None, activation="sigmoid"), whole[rows])
