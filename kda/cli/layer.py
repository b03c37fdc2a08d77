# SPDX-License-Identifier: Apache-2.0
"""The layer that the demo runs: `KDAAttention` at GLM-5.3-Flash's sizes, with seeded weights."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kda.serving.attention import KDAAttention


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer; the defaults are GLM-5.3-Flash's."""

    hidden: int = 4096
    heads: int = 64
    head_dim: int = 128
    conv_width: int = 4
    lower_bound: float = -5.0
    eps: float = 1e-5

    @property
    def qkv_dim(self) -> int:
        return self.heads * self.head_dim


class KDALayer(KDAAttention):
    """`KDAAttention` of a `Geometry`, without a checkpoint."""

    def __init__(self, geo: Geometry, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(
            geo.hidden, geo.heads, geo.head_dim, conv_size=geo.conv_width, lower_bound=geo.lower_bound, eps=geo.eps,
            dtype=dtype, device=device,
        )
        self.geo = geo

    @torch.no_grad()
    def seed(self, seed: int) -> KDALayer:
        """Fan-in scaled; A_log and dt_bias as the model initialises them. The same on every device."""
        gen = torch.Generator().manual_seed(seed)
        linear = (self.in_proj, self.f_b_proj, self.g_b_proj, self.o_proj)
        for w in (*(projection.weight for projection in linear), self.conv_weight):
            w.copy_(torch.randn(w.shape, generator=gen).mul_(w.shape[1] ** -0.5))
        self.A_log.zero_()
        dt = torch.empty(self.dt_bias.shape).uniform_(math.log(1e-3), math.log(1e-1), generator=gen).exp_()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse softplus
        self.o_norm.weight.copy_(1 + 0.1 * torch.randn(self.geo.head_dim, generator=gen))
        return self
