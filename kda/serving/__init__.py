# SPDX-License-Identifier: Apache-2.0
"""What a serving engine keeps around the operations: the states of its requests, the description of a step, the layer.

What calls operations is resolved on first use: `import kda.serving` alone imports none of them.
"""
from kda.lazy import names as _names
from kda.serving.batch import Batch, Decode, Prefill, Verify
from kda.serving.pool import ForeignSlot, Geometry, LayerStates, NotAllocated, OutOfSlots, PoolError, StatePool
from kda.serving.snapshot import Snapshot, SnapshotMismatch, load_snapshots, save_snapshots

_HOME = {"KDAAttention": "attention", "kda_forward": "forward"}

__all__ = [
    "Batch",
    "Decode",
    "ForeignSlot",
    "Geometry",
    "KDAAttention",
    "LayerStates",
    "NotAllocated",
    "OutOfSlots",
    "PoolError",
    "Prefill",
    "Snapshot",
    "SnapshotMismatch",
    "StatePool",
    "Verify",
    "kda_forward",
    "load_snapshots",
    "save_snapshots",
]

__getattr__, __dir__ = _names(__name__, _HOME)
