# SPDX-License-Identifier: Apache-2.0
"""Modules with parameters around the operations."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from kda.ops import rms_norm_gated


class FusedRMSNormGated(nn.Module):
    """Gated RMS norm over the last dim, as vLLM's class of this name (KDA's output norm: activation "sigmoid").

    Args:
        hidden_size: D, the size of the last dim.
        elementwise_affine: whether there is a `weight` [D].
        eps: added to the mean square.
        activation: "swish", "silu" or "sigmoid", applied to the gate.

    Example:
        >>> import torch, kda
        >>> norm = kda.FusedRMSNormGated(32, activation="sigmoid")
        >>> norm(torch.randn(5, 2, 32), torch.randn(5, 2, 32)).shape
        torch.Size([5, 2, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"`activation`: got {activation!r}; accepted: 'swish', 'silu' or 'sigmoid'")
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        self.activation = activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ):
        """x, g, residual [..., D] -> [..., D], with `prenorm` also the new residual; see `kda.rms_norm_gated`."""
        return rms_norm_gated(
            x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, self.eps
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation!r}"
