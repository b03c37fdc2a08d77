# SPDX-License-Identifier: Apache-2.0
"""The gated RMSNorm on the output of KDA (contract section 2; Kimi Linear, arXiv 2510.26692)."""

import torch

from kda.reference._common import sigmoid


def rms_norm_gated(x, g, weight, bias, activation, residual, residual_out, eps, out):
    """`out = (z / sqrt(mean(z*z) + eps) * weight + bias) * act(g)` in fp32, with `z = x + residual`.

    x, g, residual, residual_out, out [R0, R1, R2, D]; weight, bias [D] or None; activation "sigmoid" or
    "silu" (`g * sigmoid(g)`). `residual_out` (or None) receives z in its own dtype.
    """
    z = x.float()
    if residual is not None:
        z = z + residual.float()
    y = z * torch.rsqrt((z * z).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    gate = sigmoid(g.float())
    y = y * (gate if activation == "sigmoid" else gate * g.float())
    if residual_out is not None:
        residual_out.copy_(z)
    return out.copy_(y)
