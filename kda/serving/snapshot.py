# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the states of one request in host memory, and files of them."""
from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kda import validation as check
from kda.serving.checkpoint import import_safetensors

_FORMAT = {"format": "kda-states", "version": "1"}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in check.ACTIVATIONS}


class PoolError(Exception):
    """What `StatePool` and snapshots raise; each kind is a builtin exception too."""


class SnapshotMismatch(PoolError, ValueError):
    """States of another geometry or dtype than the pool's, or a file that holds no states."""


@dataclass(frozen=True)
class Geometry:
    """What one slot holds: in every layer a recurrent state [HV, V, K], a convolution state [dim, columns] and, for
    speculative decoding by recovery, records [record_tokens, HV, 2 * K + V] in fp32.

    Attributes:
        HV, V, K: value heads, value and key head dim (16 to 256).
        dim: channels of the convolution, usually 2 * H * K + HV * V; W: its width (2 to 8).
        num_spec: further columns of the convolution state, for speculative windows of 1 + num_spec tokens, each of which
            leaves a full state in a slot of its own.
        record_tokens: the most tokens of a window whose records a slot keeps (0 to 8), and so many columns, as
            `kda_verify` takes them.
        layers: layers with states of this shape.
        state_dtype: of the recurrent state, fp32 or bf16; conv_dtype: of the convolution state, the activations'.

    Raises TypeError for a dtype that the operations do not take, ValueError for a size.
    """

    HV: int
    V: int
    K: int
    dim: int
    W: int = 4
    num_spec: int = 0
    record_tokens: int = 0
    layers: int = 1
    state_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name, least in dict(HV=1, V=16, K=16, dim=1, W=2, num_spec=0, record_tokens=0, layers=1).items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                check.refuse(name, repr(value), f"an integer, {least} or more")
        check.head_dim("V", self.V), check.head_dim("K", self.K)
        if self.W not in check.CONV_WIDTHS:
            check.refuse("W", self.W, f"{check.CONV_WIDTHS.start} to {check.CONV_WIDTHS.stop - 1}")
        if self.record_tokens >= check.WINDOWS.stop:
            check.refuse("record_tokens", self.record_tokens, f"0 to {check.WINDOWS.stop - 1}")
        for name, dtypes in (("state_dtype", check.STATES), ("conv_dtype", check.ACTIVATIONS)):
            if getattr(self, name) not in dtypes:
                check.refuse(name, getattr(self, name), ", ".join(map(str, dtypes)), TypeError)

    @property
    def columns(self) -> int:
        """W - 1, and the further ones that windows need."""
        return self.W - 1 + max(self.num_spec, self.record_tokens)

    @property
    def ssm_bytes(self) -> int:
        """Bytes of one recurrent state of one layer."""
        return self.HV * self.V * self.K * self.state_dtype.itemsize

    @property
    def conv_bytes(self) -> int:
        """Bytes of one convolution state of one layer."""
        return self.dim * self.columns * self.conv_dtype.itemsize

    @property
    def record_bytes(self) -> int:
        """Bytes of the records of one slot of one layer."""
        return self.record_tokens * self.HV * (2 * self.K + self.V) * torch.float32.itemsize

    def differences(self, other: Geometry) -> str:
        """In words: the fields in which `other` differs."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)]
        return ", ".join(f"{name} {theirs} (here {ours})" for name, ours, theirs in pairs if ours != theirs)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The states of one request after `tokens` tokens, in host memory; `StatePool.snapshot` makes them. No records.

    Attributes:
        geometry: what the states were made for; a pool takes back only its own.
        conv_state: [layers, dim, columns]; ssm_state: [layers, HV, V, K]; contiguous CPU tensors, bit by bit the pool's.
        tokens: how many tokens of the request they have seen: the caller's number, kept and not interpreted.
    """

    geometry: Geometry
    conv_state: Tensor
    ssm_state: Tensor
    tokens: int = 0

    def __post_init__(self) -> None:
        geo = self.geometry
        for name, shape, dtype in (
            ("conv_state", (geo.layers, geo.dim, geo.columns), geo.conv_dtype),
            ("ssm_state", (geo.layers, geo.HV, geo.V, geo.K), geo.state_dtype),
        ):
            x = getattr(self, name)
            if x.shape != shape or x.dtype != dtype or x.device.type != "cpu":
                got = f"shape {list(x.shape)}, {x.dtype}, on {x.device}"
                check.refuse(name, got, f"shape {list(shape)}, {dtype}, on cpu", SnapshotMismatch)
        if type(self.tokens) is not int or self.tokens < 0:
            check.refuse("tokens", repr(self.tokens), "an integer, 0 or more")

    @property
    def nbytes(self) -> int:
        """Bytes of both states."""
        return self.conv_state.nbytes + self.ssm_state.nbytes


def save_snapshots(path: str | os.PathLike, snapshots: Mapping[str, Snapshot]) -> None:
    """Writes snapshots of one geometry, by name, to one safetensors file; an older file is replaced as a whole.

    The file holds the tensors `NAME.conv_state` and `NAME.ssm_state`, and the geometry and token counts as metadata.

    Args:
        path: of the file.
        snapshots: at least one, by any names.

    Raises:
        SnapshotMismatch: the snapshots differ in geometry.
        ImportError: safetensors is not installed.

    Example:
        >>> import os, tempfile
        >>> from kda.serving import Geometry, StatePool, load_snapshots, save_snapshots
        >>> pool = StatePool(4, Geometry(HV=2, V=32, K=32, dim=192))
        >>> path = os.path.join(tempfile.mkdtemp(), "states.safetensors")
        >>> save_snapshots(path, {"prompt": pool.snapshot(pool.allocate(zero=True), tokens=17)})
        >>> pool.restore(load_snapshots(path)["prompt"])
        2
    """
    save_file = import_safetensors().torch.save_file
    if not snapshots:
        check.refuse("snapshots", "none", "at least one")
    geometry = next(iter(snapshots.values())).geometry
    tensors: dict[str, Tensor] = {}
    for name, snapshot in snapshots.items():
        if snapshot.geometry != geometry:
            check.refuse(
                "snapshots", f"{name!r} with {geometry.differences(snapshot.geometry)}", "one geometry", SnapshotMismatch
            )
        tensors[f"{name}.conv_state"] = snapshot.conv_state.contiguous()
        tensors[f"{name}.ssm_state"] = snapshot.ssm_state.contiguous()
    about = {
        **_FORMAT,
        "geometry": json.dumps(dataclasses.asdict(geometry), default=lambda dtype: str(dtype).removeprefix("torch.")),
        "tokens": json.dumps({name: snapshot.tokens for name, snapshot in snapshots.items()}),
    }
    partial = f"{os.fspath(path)}.partial"  # what an interrupted write leaves must not take the place of a good file
    try:
        save_file(tensors, partial, metadata=about)
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def load_snapshots(path: str | os.PathLike) -> dict[str, Snapshot]:
    """The snapshots that `save_snapshots` wrote, by name, in host memory.

    Raises:
        SnapshotMismatch: the file holds no KDA states, or not those that its metadata promise.
        OSError: it cannot be read. ImportError: safetensors is not installed.
    """
    safetensors = import_safetensors()
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if {name: about.get(name) for name in _FORMAT} != _FORMAT:
            raise ValueError(f"its metadata are not those of {_FORMAT}")
        fields = json.loads(about["geometry"])
        dtypes = {name: _DTYPES[fields[name]] for name in ("state_dtype", "conv_dtype")}
        geometry = Geometry(**{**fields, **dtypes})
        return {
            name: Snapshot(geometry, tensors[f"{name}.conv_state"], tensors[f"{name}.ssm_state"], tokens)
            for name, tokens in json.loads(about["tokens"]).items()
        }
    except (safetensors.SafetensorError, KeyError, TypeError, AttributeError, ValueError) as problem:
        what = f"lacks {problem}" if isinstance(problem, KeyError) else str(problem)
        raise SnapshotMismatch(f"{os.fspath(path)} is no file of KDA states: {what}") from problem
