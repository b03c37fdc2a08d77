# SPDX-License-Identifier: Apache-2.0
"""What several stages share: token ranges, slots, the gate, the l2 norm."""

import contextlib

import torch


@contextlib.contextmanager
def full_precision():
    """fp32 products stay fp32, whatever the user allows for their own (`torch.set_float32_matmul_precision`)."""
    places = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    allowed = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, precision in zip(places, allowed):
            place.fp32_precision = precision


def token_ranges(cu_seqlens, B, T):
    """Where the sequences lie: int64 `(batch [N], first token [N], length [N])` on the host.

    Without `cu_seqlens` every batch row is a sequence of T tokens. Offsets that run backwards or past T are
    clamped.
    """
    if cu_seqlens is None:
        return torch.arange(B), torch.zeros(B, dtype=torch.int64), torch.full((B,), T)
    cu = cu_seqlens.cpu().long().clamp(0, T)
    bos, eos = cu[:-1], torch.maximum(cu[:-1], cu[1:])
    return torch.zeros_like(bos), bos, eos - bos


def is_live(slots, num_slots, null_slots=()):
    """Which entries of an integer tensor name a usable slot: positive, in the pool, none of `null_slots`."""
    live = (slots > 0) & (slots < num_slots)
    for null in null_slots:
        live &= slots != null
    return live


def per_value_head(x, HV, dim):
    """Repeat the H heads of `x` along `dim` for grouped values: value head hv has head `hv // (HV // H)`."""
    return x if x.shape[dim] == HV else x.repeat_interleave(HV // x.shape[dim], dim)


def gate_parameters(A_log, g_bias, HV, K):
    """`A_log` [HV] and `g_bias` [HV, K] or None, as callers may give them: [H or HV] or [1, 1, .., 1]; [H or HV (*) K]."""
    A_log = per_value_head(A_log.view(-1), HV, 0)
    return A_log, None if g_bias is None else per_value_head(g_bias.view(-1, K), HV, 0)


def l2_normalise(x):
    """`x / sqrt(sum(x*x) + 1e-6)` over the last dim, in place."""
    return x.mul_(torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() + 1e-6))


def sigmoid(x):
    """`1 / (1 + exp(-x))`.

    torch's sigmoid (as its silu, softplus and exp2) rounds the last elements of a CPU vector loop differently
    from the others, so the bits of a token would depend on where in the batch it stands. Its exp and log1p do
    not.
    """
    return x.neg().exp_().add_(1).reciprocal_()


def log_decay(g, A_log, bias, lower_bound, beta=1.0, threshold=20.0):
    """Contract section 2: raw gate -> log decay y, fp32. `A_log` and `bias` (or None) broadcast to `g`."""
    x = g.float() if bias is None else g.float() + bias.float()
    A = A_log.float().exp()
    if lower_bound is not None:
        return sigmoid(A * x).mul_(lower_bound)
    softplus = torch.where(beta * x > threshold, x, torch.log1p(torch.exp(beta * x)) / beta)
    return softplus.mul_(-A)
