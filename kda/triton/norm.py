# SPDX-License-Identifier: Apache-2.0
"""Gated RMSNorm over the last dim of D values, in fp32.

    x   = x + residual                                                  also stored in residual_out
    out = (x / sqrt(mean(x * x) + eps) * weight + bias) * act(g)        sigmoid(g) or g * sigmoid(g) (SiLU)

One program normalises BR rows, a tile [BR, BD] at a time. The mean square comes from a product x x^T, whose order of
summation does not depend on how the rows are aligned in memory.
"""
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.launch import Launch
from kda.triton.tiles import cast, dot


@triton.jit
def residual_sum(x, residual, residual_out, d, mask):
    """A tile [BR, BD] of x (+ residual) in fp32, also stored in residual_out; pointers are [BR, 1]."""
    a = tl.load(x + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        a += tl.load(residual + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_out is not None:
        tl.store(residual_out + d[None, :], cast(a, residual_out.dtype.element_ty), mask=mask)
    return a


@triton.jit
def row_squares(a, dtype: tl.constexpr, acc, PRECISION: tl.constexpr):
    """acc + a a^T [BR, BR], its diagonal the sum of squares of every row; `dtype` holds `a` exactly."""
    a = a.to(dtype)
    return dot(a, tl.trans(a), acc, PRECISION)


@triton.jit
def gated(a, scale, gate, w, b, out, d, mask, opens, SILU: tl.constexpr):
    """Stores a tile [BR, BD] of the output from `a`, the rows' 1 / rms [BR, 1] and the factors."""
    y = a * scale
    if w is not None:
        y *= w.to(tl.float32)[None, :]
    if b is not None:
        y += b.to(tl.float32)[None, :]
    gate = tl.where(opens, gate.to(tl.float32), 0.0)
    if SILU:
        y *= gate
    y *= tl.sigmoid(gate)
    tl.store(out + d[None, :], cast(y, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R1", "R", "rows"], do_not_specialize_on_alignment=["out_rows"])
def rms_norm_gated_kernel(
    x, g, weight, bias, residual, residual_out, out, limit, out_rows, eps, R1, R, D, rows,
    sx_0, sx_1, sx_r, sg_0, sg_1, sg_r, sr_0, sr_1, sr_r, sn_0, sn_1, sn_r, so_0, so_1, so_r,
    SILU: tl.constexpr, PADDED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, ONE_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(R, BR)
    r0, r1 = pid // blocks // R1, pid // blocks % R1
    if limit is not None:
        if r1 >= tl.load(limit):
            return
    row = r1
    if out_rows is not None:
        row = tl.load(out_rows + r1).to(tl.int64)
        if (row < 0) | (row >= rows):
            return
    r = pid % blocks * BR + tl.arange(0, BR)[:, None]
    i, d = tl.arange(0, BR), tl.arange(0, BD)

    x += r0 * sx_0 + r1 * sx_1 + r * sx_r
    g += r0 * sg_0 + r1 * sg_1 + r * sg_r
    out += r0 * so_0 + row * so_1 + r * so_r
    if residual is not None:
        residual += r0 * sr_0 + r1 * sr_1 + r * sr_r
    if residual_out is not None:
        residual_out += r0 * sn_0 + r1 * sn_1 + r * sn_r

    exact: tl.constexpr = x.dtype.element_ty if residual is None else tl.float32
    squares = tl.zeros([BR, BR], tl.float32)
    if ONE_TILE:
        mask = (r < R) & (d < D)[None, :]
        a = residual_sum(x, residual, residual_out, d, mask)
        w, b = None, None
        gate = tl.load(g + d[None, :], mask=mask, other=0.0)  # on its way beside x, as are the weight and the bias
        if weight is not None:
            w = tl.load(weight + d, mask=d < D, other=0.0)
        if bias is not None:
            b = tl.load(bias + d, mask=d < D, other=0.0)
        squares = row_squares(a, exact, squares, PRECISION)
    else:
        for d0 in range(0, D, BD):
            mask = (r < R) & (d0 + d < D)[None, :]
            a = residual_sum(x, residual, residual_out, d0 + d, mask)
            squares = row_squares(a, exact, squares, PRECISION)
    total = tl.sum(tl.where(i[:, None] == i[None, :], squares, 0.0), 1)
    scale = (1.0 / tl.sqrt(total / D + eps))[:, None]
    opens = (total != 0)[:, None] if PADDED else True  # rows of zeros are padding, whose gate may be anything
    if ONE_TILE:
        gated(a, scale, gate, w, b, out, d, mask, opens, SILU)
    else:
        for d0 in range(0, D, BD):
            mask = (r < R) & (d0 + d < D)[None, :]
            a = residual_sum(x, residual, None, d0 + d, mask)
            w, b = None, None
            gate = tl.load(g + (d0 + d)[None, :], mask=mask, other=0.0)
            if weight is not None:
                w = tl.load(weight + d0 + d, mask=d0 + d < D, other=0.0)
            if bias is not None:
                b = tl.load(bias + d0 + d, mask=d0 + d < D, other=0.0)
            gated(a, scale, gate, w, b, out, d0 + d, mask, opens, SILU)


_launch = Launch(rms_norm_gated_kernel)


def find(seen, *tensors, tag=None):
    """`rms_norm_gated` as before on `tensors` in the kernel's order, see Launch.find."""
    return _launch.find(seen, tensors, tag)


def rms_norm_gated(
    x, g, weight, bias, activation, residual, residual_out, eps, out, padded=False, limit=None, out_rows=None, seen=None,
    tag=None,
):  # fmt: skip
    """`out` [R0, R1, R2, D] (and `residual_out`) from `x` and the gate `g` of the same shape.

    With `padded` rows of zeros give zeros whatever their gate; of R1 the indices from `limit` [1] on, if given, are
    left as they are. `out_rows` [R1] says which index of R1 in `out` each one goes to; out of range, nowhere.
    """
    tensors = (x, g, weight, bias, residual, residual_out, out, limit, out_rows)
    if _launch.again(seen, tensors, tag):
        return out
    R0, R1, R, D = x.shape
    strides = [(x if t is None else t).stride()[:3] for t in (x, g, residual, residual_out, out)]
    config = configs.pick("rms_norm_gated", D=D, rows=R0 * R1 * R, device=x.device)
    _launch(
        seen, R0 * R1 * triton.cdiv(R, config["BR"]), tensors,
        (eps, R1, R, D, out.shape[1], *(step for steps in strides for step in steps)), tag,
        SILU=activation == "silu", PADDED=padded, ONE_TILE=D <= config["BD"], **config,
    )  # fmt: skip
    return out
