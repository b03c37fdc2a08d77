# SPDX-License-Identifier: Apache-2.0
"""Log decay of every key channel from the raw gate, in fp32.

    y = lower_bound * sigmoid(exp(A_log[h]) * (g + bias))                       bounded
    y = -exp(A_log[h]) * softplus(g + bias, beta, threshold)                    unbounded
    softplus(x) = x where beta * x > threshold, else log(1 + exp(beta * x)) / beta

One program walks BT tokens of a [BH, K] tile (heads x key channels); it loads amplitudes and biases once.
"""
import torch
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.launch import Launch
from kda.triton.tiles import log_decay


@triton.jit(do_not_specialize=["T"])
def kda_gate_kernel(
    g, A_log, g_bias, y, T, HV, K, sg_b, sg_t, sg_h, beta, threshold, lower_bound,
    BOUNDED: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    head_blocks = tl.cdiv(HV, BH)
    h = pid % head_blocks * BH + tl.arange(0, BH)
    token_blocks = tl.cdiv(T, BT)
    b = pid // head_blocks // token_blocks
    t0 = pid // head_blocks % token_blocks * BT
    k = tl.arange(0, BK)[None, :]
    mask = (h < HV)[:, None] & (k < K)  # [BH, BK]

    A = tl.exp(tl.load(A_log + h, mask=h < HV, other=0.0).to(tl.float32))[:, None]
    if g_bias is not None:
        bias = tl.load(g_bias + h[:, None] * K + k, mask=mask, other=0.0).to(tl.float32)
    g += b * sg_b + h[:, None] * sg_h + k
    y += (b * T * HV + h[:, None]) * K + k
    for i in range(0, tl.minimum(BT, T - t0)):
        t = t0 + i
        x = tl.load(g + t * sg_t, mask=mask, other=0.0).to(tl.float32)
        if g_bias is not None:
            x += bias
        decay = log_decay(x, A, lower_bound, beta, threshold, BOUNDED)
        tl.store(y + t * HV * K, decay, mask=mask)


_launch = Launch(kda_gate_kernel)


def fused_kda_gate(g, A_log, g_bias, beta, threshold, lower_bound, seen=None):
    """[B, T, HV, K] raw gate -> fp32 log decay of the same shape, contiguous."""
    B, T, HV, K = g.shape
    y = torch.empty_like(g, dtype=torch.float32, memory_format=torch.contiguous_format)
    tensors = (g, A_log, g_bias, y)
    if _launch.again(seen, tensors):
        return y
    config = configs.pick("fused_kda_gate", T=T, HV=HV, K=K, device=g.device)
    _launch(
        seen, B * triton.cdiv(T, config["BT"]) * triton.cdiv(HV, config["BH"]), tensors,
        (T, HV, K, *g.stride()[:3], float(beta), float(threshold), 0.0 if lower_bound is None else float(lower_bound)),
        BOUNDED=lower_bound is not None, BK=triton.next_power_of_2(K), **config,
    )  # fmt: skip
    return y
