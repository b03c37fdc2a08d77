# SPDX-License-Identifier: Apache-2.0
"""A whole KDA layer: the projections, and between them what `kda_forward` does on a step's rows."""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kda import validation as check
from kda.modules import FusedRMSNormGated
from kda.serving.batch import Batch
from kda.serving.checkpoint import tensors_under
from kda.serving.forward import kda_forward
from kda.serving.pool import LayerStates
from kda.serving.snapshot import Geometry


class Projected(NamedTuple):
    """A step's tokens, as `kda_prefill` and the others take them: columns of projections.

    Attributes:
        qkv: [T, 2 * H * K + HV * V]; raw_g: [T, HV, K]; beta: [T, HV] logits; out_gate: [T, HV, V].
    """

    qkv: Tensor
    raw_g: Tensor
    beta: Tensor
    out_gate: Tensor


class _Stored(NamedTuple):
    """A tensor of the checkpoint: its usual shape, and the dim of it that ranks share out (None: each has it whole)."""

    shape: tuple[int, ...]
    dim: int | None = 0
    other_shapes: tuple[tuple[int, ...], ...] = ()


class KDAAttention(nn.Module):
    """The KDA layer of GLM-5.3-Flash, Kimi Linear and Kimi K3, or one rank's heads of it.

    A new module's parameters are uninitialised: `load_checkpoint` fills them. There is no backward pass.

    Args:
        hidden_size: of the model.
        num_heads: query/key heads of the whole layer, a multiple of `world_size`.
        head_dim: K, of queries and keys, and the rank of the decay gate.
        num_v_heads: value heads of the whole layer, a multiple of `num_heads`; None: as many.
        head_v_dim: V, of values, and the rank of the output gate; None: `head_dim`.
        conv_size: W, of the convolutions.
        lower_bound: the bounded gate's floor; None is the unbounded gate (Kimi Linear).
        full_rank_gate: whether one projection makes the output gate (Kimi K3) in place of two of low rank.
        eps: of the output norm.
        rank, world_size: for tensor parallelism. Rank r has the r-th of `world_size` equal runs of heads; what it returns
            is its part of a sum over all ranks, which is left to the caller.
        dtype: of the projections and so of hidden states: bf16, fp16 or fp32.
        device: of the parameters.

    Attributes:
        H, HV: query/key and value heads of this rank. K, V, W: as above. dim: 2 * H * K + HV * V.
        in_proj: Linear to the columns of q, k, v, beta, and of both gates' first projections (or all of the output gate).
        f_b_proj, g_b_proj: Linear, second projections of decay and output gate (g_b_proj: None with `full_rank_gate`).
        conv_weight: [dim, W]; A_log: [HV]; dt_bias: [HV * K]; o_norm.weight: [V]; all fp32.
        o_proj: Linear to `hidden_size`.

    Raises:
        ValueError, TypeError: sizes, dtypes or ranks that the operations do not take.

    Example:
        >>> import torch
        >>> from kda.serving import Batch, Decode, KDAAttention, Prefill, StatePool
        >>> layer = KDAAttention(hidden_size=48, num_heads=2, head_dim=32, dtype=torch.float32)
        >>> shapes = {"q_proj.weight": (64, 48), "k_proj.weight": (64, 48), "v_proj.weight": (64, 48),
        ...     "b_proj.weight": (2, 48), "f_a_proj.weight": (32, 48), "f_b_proj.weight": (64, 32),
        ...     "g_a_proj.weight": (32, 48), "g_b_proj.weight": (64, 32), "q_conv1d.weight": (64, 1, 4),
        ...     "k_conv1d.weight": (64, 1, 4), "v_conv1d.weight": (64, 1, 4), "A_log": (2,), "dt_bias": (64,),
        ...     "o_norm.weight": (32,), "o_proj.weight": (48, 64)}
        >>> weights = {f"layers.0.self_attn.{name}": torch.randn(shape) for name, shape in shapes.items()}
        >>> layer.load_checkpoint(weights, "layers.0.self_attn")  # or the path of safetensors files
        >>> pool = StatePool(8, layer.geometry())
        >>> first, second = pool.allocate(2)
        >>> step = Batch.of([Prefill(first, 9), Prefill(second, 4)], pool=pool)
        >>> layer(torch.randn(13, 48), step, pool.layers[0]).shape
        torch.Size([13, 48])
        >>> layer(torch.randn(2, 48), Batch.of([Decode(second), Decode(first)]), pool.layers[0]).shape
        torch.Size([2, 48])
    """

    def __init__(
        self,
        hidden_size: int = 4096,
        num_heads: int = 64,
        head_dim: int = 128,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        lower_bound: float | None = -5.0,
        full_rank_gate: bool = False,
        eps: float = 1e-5,
        rank: int = 0,
        world_size: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        K, V = head_dim, head_dim if head_v_dim is None else head_v_dim
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        _whole("hidden_size", hidden_size, 1), _whole("num_heads", num_heads, 1), _whole("num_v_heads", num_v_heads, 1)
        _whole("world_size", world_size, 1), _whole("rank", rank, 0, world_size - 1)
        if num_v_heads % num_heads:
            check.refuse("num_v_heads", num_v_heads, f"a multiple of {num_heads}, the query heads")
        if num_heads % world_size:
            check.refuse("world_size", world_size, f"a divisor of {num_heads}, the heads")
        check.head_dim("head_dim", K), check.head_dim("head_v_dim", V)
        if conv_size not in check.CONV_WIDTHS:
            check.refuse("conv_size", conv_size, f"{check.CONV_WIDTHS.start} to {check.CONV_WIDTHS.stop - 1}")
        if dtype not in check.ACTIVATIONS:
            check.refuse("dtype", dtype, ", ".join(map(str, check.ACTIVATIONS)), TypeError)
        self.lower_bound = None if lower_bound is None else check.bound(lower_bound)
        self.hidden_size, self.rank, self.world_size, self.full_rank_gate = hidden_size, rank, world_size, full_rank_gate
        self.H, self.HV, self.K, self.V, self.W = num_heads // world_size, num_v_heads // world_size, K, V, conv_size
        self.dim = 2 * self.H * K + self.HV * V

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        def linear(columns: int, rows: int) -> nn.Linear:
            # nn.Linear itself would draw random weights, which takes seconds at the real size
            module = nn.Linear(columns, rows, bias=False, device="meta")
            module.weight = parameter(rows, columns, dtype=dtype)
            return module

        self._columns = [self.dim, self.HV, K, self.HV * V if full_rank_gate else V]
        self.in_proj = linear(hidden_size, sum(self._columns))
        self.f_b_proj = linear(K, self.HV * K)
        self.g_b_proj = None if full_rank_gate else linear(V, self.HV * V)
        self.conv_weight = parameter(self.dim, conv_size)
        self.A_log, self.dt_bias = parameter(self.HV), parameter(self.HV * K)
        self.o_norm = FusedRMSNormGated(V, eps=eps, activation="sigmoid", dtype=torch.float32, device=device)
        self.o_norm.weight.requires_grad_(False)
        self.o_proj = linear(self.HV * V, hidden_size)

    def geometry(self, **further) -> Geometry:
        """What a slot of the layer's `StatePool` holds; `further` fields of `Geometry` where they are not its defaults.

        Example: `StatePool(64, layer.geometry(layers=34, state_dtype=torch.bfloat16))`.
        """
        fields = dict(HV=self.HV, V=self.V, K=self.K, dim=self.dim, W=self.W, conv_dtype=self.in_proj.weight.dtype)
        return Geometry(**{**fields, **further})

    # -------------------------------------------------------------------------------------------------------- a step

    def forward(
        self, hidden_states: Tensor, batch: Batch, states: LayerStates, records: Tensor | None = None
    ) -> Tensor:
        """One step's tokens through the layer; the requests' states move on by them.

        Args:
            hidden_states: [T, hidden_size] in the dtype of the projections, a token a row; tokens past those of `batch` are
                padding.
            batch: the step's rows, as `kda_forward` takes them.
            states, records: this layer's: `pool.layers[n]` and, for rows with records, `pool.records[n]`. In place.

        Returns:
            [T, hidden_size], in token order: with several ranks this one's part of the sum. Zeros for padding.

        Raises:
            TypeError: a wrong dtype; ValueError: all else that is wrong. Nothing has been written then.
        """
        weight = self.in_proj.weight
        check.tensor("hidden_states", hidden_states, ("T", self.hidden_size), (weight.dtype,), weight)
        return self.o_proj(self.mix(self.project(hidden_states), batch, states, records).flatten(1))

    def project(self, hidden_states: Tensor) -> Projected:
        """The projections before `kda_forward`, of [T, hidden_size]."""
        qkv, beta, f_a, gate = self.in_proj(hidden_states).split(self._columns, -1)
        raw_g = self.f_b_proj(f_a).unflatten(-1, (self.HV, self.K))
        gate = gate if self.g_b_proj is None else self.g_b_proj(gate)
        return Projected(qkv, raw_g, beta, gate.unflatten(-1, (self.HV, self.V)))

    def mix(self, p: Projected, batch: Batch, states: LayerStates, records: Tensor | None = None) -> Tensor:
        """`kda_forward` with the layer's parameters: [T, HV, V]."""
        return kda_forward(
            *p, *states, batch, self.conv_weight, self.A_log, self.dt_bias, self.o_norm.weight, records=records,
            lower_bound=self.lower_bound, activation=self.o_norm.activation, eps=self.o_norm.eps,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- loading

    @torch.no_grad()
    def load_checkpoint(self, checkpoint: str | os.PathLike | Mapping[str, Tensor], prefix: str = "") -> None:
        """Fills the parameters, of this rank's heads, from a checkpoint of the whole layer.

        The names under `prefix` are those of the published checkpoints: `q_proj.weight`, `k_proj.weight`, `v_proj.weight`,
        `b_proj.weight`, `f_a_proj.weight`, `f_b_proj.weight`, `g_a_proj.weight` and `g_b_proj.weight` (or `g_proj.weight`),
        `q_conv1d.weight`, `k_conv1d.weight`, `v_conv1d.weight`, `A_log`, `dt_bias`, `o_norm.weight`, `o_proj.weight`.
        All are checked before the first is loaded. Values are rounded where a parameter's dtype is narrower.

        Args:
            checkpoint: tensors by name; or the path of a safetensors file, of the index of several, or of a directory with
                `model.safetensors.index.json` or `model.safetensors`. Of files only this rank's part is read.
            prefix: what comes before the names, such as "model.language_model.layers.0.self_attn".

        Raises:
            ValueError: a tensor is missing, unexpected or of another shape, or a file is damaged.
            TypeError: a tensor is neither bf16, fp16 nor fp32 (quantised weights).
            OSError: a file cannot be read. ImportError: safetensors is not installed.
        """
        if self.in_proj.weight.is_meta:
            check.refuse("device", "parameters on meta", "parameters in memory: call `to_empty(device=...)` before")
        prefix = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
        found, stored = tensors_under(checkpoint, prefix), self._stored()
        if missing := [prefix + name for name in stored if name not in found]:
            check.refuse("checkpoint", f"no {_some(missing)}", f"all of the layer's {len(stored)} tensors")
        if unexpected := [prefix + name for name in found if name not in stored]:
            check.refuse("checkpoint", _some(unexpected), f"under {prefix!r} only {', '.join(stored)}")
        shares = {name: self._share(prefix + name, found[name], *about) for name, about in stored.items()}
        gate = ("g_proj.weight",) if self.full_rank_gate else ("g_a_proj.weight",)
        merged = {
            "in_proj.weight": (*(f"{x}_proj.weight" for x in ("q", "k", "v", "b", "f_a")), *gate),
            "conv_weight": tuple(f"{x}_conv1d.weight" for x in "qkv"),
        }
        for name, parameter in self.named_parameters():
            parts = [shares[part] for part in merged.get(name, (name,))]
            for rows, part in zip(parameter.split([len(part) for part in parts]), parts):
                rows.copy_(part)

    def _stored(self) -> dict[str, _Stored]:
        """What a checkpoint of the whole layer holds, by name."""
        hidden, K, V, W = self.hidden_size, self.K, self.V, self.W
        HV = self.HV * self.world_size
        key, value = self.H * self.world_size * K, HV * V
        convolutions = {
            f"{x}_conv1d.weight": _Stored((dim, W), other_shapes=((dim, 1, W),))
            for x, dim in (("q", key), ("k", key), ("v", value))
        }
        if self.full_rank_gate:
            gate = {"g_proj.weight": _Stored((value, hidden))}
        else:
            gate = {"g_a_proj.weight": _Stored((V, hidden), None), "g_b_proj.weight": _Stored((value, V))}
        # Kimi K3's has 128 entries for 96 heads
        padded = ((1 << HV.bit_length(),),) if HV & (HV - 1) else ()
        return {
            "q_proj.weight": _Stored((key, hidden)),
            "k_proj.weight": _Stored((key, hidden)),
            "v_proj.weight": _Stored((value, hidden)),
            "b_proj.weight": _Stored((HV, hidden)),
            "f_a_proj.weight": _Stored((K, hidden), None),
            "f_b_proj.weight": _Stored((HV * K, K)),
            **gate,
            **convolutions,
            "A_log": _Stored((HV,), other_shapes=((1, 1, HV, 1), *padded)),
            "dt_bias": _Stored((HV * K,), other_shapes=((HV, K),)),
            "o_norm.weight": _Stored((V,), None),
            "o_proj.weight": _Stored((hidden, value), 1),
        }

    def _share(self, name: str, x, shape: tuple[int, ...], dim: int | None, other_shapes) -> Tensor:
        """This rank's part of a checkpoint's tensor, checked: a view of it."""
        check.tensor(name, x, None, check.ACTIVATIONS)
        if x.shape not in (shape, *other_shapes):
            check.refuse(name, f"shape {list(x.shape)}", " or ".join(str(list(s)) for s in (shape, *other_shapes)))
        if x.shape != shape:
            x = x.reshape(-1)[: torch.Size(shape).numel()].view(shape)
        return x if dim is None else x.chunk(self.world_size, dim)[self.rank]


def _whole(name: str, value, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        check.refuse(name, repr(value), f"an integer, {least} " + ("or more" if most is None else f"to {most}"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
