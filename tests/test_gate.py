# SPDX-License-Identifier: Apache-2.0
"""fused_kda_gate: both gates, [..., H * K] -> [..., H, K] in fp32."""

import oracle
import pytest
import torch
from helpers import BF16, DTYPES, FP32, call, each_dtype, frame, gpu_subset, on_backends, randn, unchanged

import kda

# The output is fp32 whatever the input's dtype, so it answers to the contract's fp32 row.
BOUND = 2e-5

SHAPES = [((7,), 2, 32), ((2, 5), 3, 24), ((1, 17), 2, 128), ((0,), 2, 16)]
COMPILED = [((33,), 4, 96), ((3, 64), 2, 256), ((1, 65), 16, 128)]
GPU = [((2, 1024), 64, 128)]


def inputs(lead, H, K, dtype, device, seed=0):
    g = randn(*lead, H * K, seed=seed, dtype=dtype, device=device, scale=3.0)
    A_log = randn(H, seed=seed + 1, device=device)
    g_bias = randn(H * K, seed=seed + 2, device=device)
    return g, A_log, g_bias


def check(y, ref):
    assert y.dtype == FP32 and y.shape == ref.shape
    assert y.isfinite().all()
    error = oracle.err(y, ref)
    assert error <= BOUND, f"gate error {error:.2e}"


@gpu_subset(lambda shape, dtype, **_: dtype == BF16 or shape[2] in (32, 128))
@each_dtype
@pytest.mark.parametrize("safe_gate", [True, False], ids=["bounded", "unbounded"])
@on_backends("shape", SHAPES, COMPILED, GPU, ids=lambda s: f"{s[0]}x{s[1]}x{s[2]}")
def test_gate_equals_the_oracle(backend, shape, safe_gate, dtype):
    lead, H, K = shape
    g, A_log, g_bias = inputs(lead, H, K, dtype, backend.device)
    y = call(kda.fused_kda_gate, g, A_log, K, g_bias=g_bias, safe_gate=safe_gate, lower_bound=-5.0)
    check(y, oracle.gate(g.unflatten(-1, (H, K)), A_log, g_bias, -5.0 if safe_gate else None))


def test_gate_is_unbounded_unless_asked(backend):
    g, A_log, g_bias = inputs((9,), 2, 16, FP32, backend.device)
    check(kda.fused_kda_gate(g, A_log, 16, g_bias), oracle.gate(g.unflatten(-1, (2, 16)), A_log, g_bias, None))


@pytest.mark.parametrize("lower_bound", [-5.0, -2.5])
def test_bounded_gate_stays_between_the_bound_and_zero(backend, lower_bound):
    g, A_log, _ = inputs((33,), 2, 32, FP32, backend.device)
    g[0], g[1] = 1e4, -1e4
    y = kda.fused_kda_gate(g, A_log, 32, safe_gate=True, lower_bound=lower_bound)
    assert y.min() >= lower_bound and y.max() <= 0.0
    check(y, oracle.gate(g.unflatten(-1, (2, 32)), A_log, None, lower_bound))


@pytest.mark.parametrize("beta,threshold", [(1.0, 20.0), (2.0, 20.0), (0.5, 1.0)])
def test_unbounded_gate_takes_softplus_beta_and_threshold(backend, beta, threshold):
    g, A_log, g_bias = inputs((33,), 2, 32, FP32, backend.device)
    y = kda.fused_kda_gate(g, A_log, 32, g_bias=g_bias, beta=beta, threshold=threshold)
    check(y, oracle.gate(g.unflatten(-1, (2, 32)), A_log, g_bias, None, beta, threshold))


def test_unbounded_gate_is_linear_and_finite_far_above_the_threshold(backend):
    g, A_log, _ = inputs((5,), 2, 16, FP32, backend.device)
    g[:] = torch.tensor([-1e4, -100.0, 19.0, 21.0, 1e4], device=g.device)[:, None]
    check(kda.fused_kda_gate(g, A_log, 16), oracle.gate(g.unflatten(-1, (2, 16)), A_log))


@pytest.mark.parametrize("safe_gate", [True, False], ids=["bounded", "unbounded"])
def test_A_log_and_bias_shapes_mean_the_same(backend, safe_gate):
    """A_log [H] or [1, 1, H, 1]; bias [H * K] or [H, K]; no bias is a bias of zero."""
    H, K = 3, 16
    g, A_log, g_bias = inputs((2, 6), H, K, FP32, backend.device)
    want = kda.fused_kda_gate(g, A_log, K, g_bias, safe_gate=safe_gate)
    assert torch.equal(want, kda.fused_kda_gate(g, A_log.view(1, 1, H, 1), K, g_bias, safe_gate=safe_gate))
    assert torch.equal(want, kda.fused_kda_gate(g, A_log, K, g_bias.view(H, K), safe_gate=safe_gate))
    assert not torch.equal(want, kda.fused_kda_gate(g, A_log, K, safe_gate=safe_gate))
    zero = torch.zeros_like(g_bias)
    assert torch.equal(kda.fused_kda_gate(g, A_log, K, safe_gate=safe_gate),
                       kda.fused_kda_gate(g, A_log, K, zero, safe_gate=safe_gate))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before,after", [(16, 16), (3, 5)], ids=["aligned", "odd"])
def test_gate_reads_a_column_slice_with_a_batch_stride_of_its_own(backend, dtype, before, after):
    g, A_log, g_bias = inputs((2, 9), 2, 32, dtype, backend.device)
    view = frame(g, before=before, after=after)
    assert not view.is_contiguous() and view.stride(0) != view.shape[1] * view.stride(1)
    with unchanged(view):
        y = kda.fused_kda_gate(view, A_log, 32, g_bias, safe_gate=True)
    assert torch.equal(y, kda.fused_kda_gate(g, A_log, 32, g_bias, safe_gate=True))


def test_a_token_has_the_same_gate_in_any_row(backend):
    g, A_log, g_bias = inputs((40,), 2, 32, FP32, backend.device)
    y = kda.fused_kda_gate(g, A_log, 32, g_bias)
    order = torch.arange(39, -1, -1, device=g.device)
    assert torch.equal(kda.fused_kda_gate(g[order].contiguous(), A_log, 32, g_bias), y[order])
    assert torch.equal(kda.fused_kda_gate(g[7:8], A_log, 32, g_bias), y[7:8])
