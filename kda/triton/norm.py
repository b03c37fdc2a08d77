# SPDX-License-Identifier: Apache-2.0
"""Gated RMSNorm over the last dim of D values, in fp32.

    x   = x + residual                                                  also stored in residual_out
    out = (x / sqrt(mean(x * x) + eps) * weight + bias) * act(g)        sigmoid(g) or g * sigmoid(g) (SiLU)

One program normalises a [BR, D] tile of rows.
"""
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.tiles import cast


# The sum over D runs in the order in which a warp holds x (+ residual): their alignment must not decide it.
@triton.jit(
    do_not_specialize=["R1", "R"],
    do_not_specialize_on_alignment=[
        "x", "sx_0", "sx_1", "sx_r", "residual", "sr_0", "sr_1", "sr_r", "residual_out", "sn_0", "sn_1", "sn_r"
    ],
)
def rms_norm_gated_kernel(
    x, g, weight, bias, residual, residual_out, out, eps, R1, R, D,
    sx_0, sx_1, sx_r, sg_0, sg_1, sg_r, sr_0, sr_1, sr_r, sn_0, sn_1, sn_r, so_0, so_1, so_r,
    SILU: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(R, BR)
    r0, r1 = pid // blocks // R1, pid // blocks % R1
    r = pid % blocks * BR + tl.arange(0, BR)[:, None]
    d = tl.arange(0, BD)
    mask = (r < R) & (d < D)[None, :]  # [BR, BD]

    x += r0 * sx_0 + r1 * sx_1 + r * sx_r
    g += r0 * sg_0 + r1 * sg_1 + r * sg_r
    out += r0 * so_0 + r1 * so_1 + r * so_r
    a = tl.load(x + d[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(g + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        residual += r0 * sr_0 + r1 * sr_1 + r * sr_r
        a += tl.load(residual + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_out is not None:
        residual_out += r0 * sn_0 + r1 * sn_1 + r * sn_r
        tl.store(residual_out + d[None, :], cast(a, residual_out.dtype.element_ty), mask=mask)
    y = a * (1.0 / tl.sqrt(tl.sum(a * a, 1, keep_dims=True) / D + eps))
    if weight is not None:
        y *= tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        y += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y *= gate
    y *= tl.sigmoid(gate)
    tl.store(out + d[None, :], cast(y, out.dtype.element_ty), mask=mask)


def fold_rows(sizes, strides):
    """Row dims of several tensors, right-aligned: dims that one stride walks in every tensor become one.

    Returns the sizes, then the strides of each tensor; as many as before, the outer ones padded with size 1.
    """
    dims = []
    for size, *steps in zip(sizes, *strides):
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1:], steps)):
            dims[-1] = (dims[-1][0] * size, *steps)
        elif size != 1:
            dims.append((size, *steps))
    dims = [(1,) + (0,) * len(strides)] * (len(sizes) - len(dims)) + dims
    return tuple(zip(*dims))


def rms_norm_gated(x, g, weight, bias, activation, residual, residual_out, eps, out):
    """`out` [R0, R1, R2, D] (and `residual_out`) from `x` and the gate `g` of the same shape."""
    *rows, D = x.shape
    tensors = (x, g, residual, residual_out, out)
    strides = [t.stride()[:-1] if t is not None else x.stride()[:-1] for t in tensors]
    (R0, R1, R), *strides = fold_rows(rows, strides)
    config = configs.pick("rms_norm_gated", D=D)
    rms_norm_gated_kernel[(R0 * R1 * triton.cdiv(R, config["BR"]),)](
        x, g, weight, bias, residual, residual_out, out, eps, R1, R, D,
        *(step for steps in strides for step in steps),
        SILU=activation == "silu", BD=triton.next_power_of_2(D), **config,
    )  # fmt: skip
    return out
