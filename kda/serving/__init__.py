# SPDX-License-Identifier: Apache-2.0
"""What a serving engine keeps around the operations: the states of its requests, and the description of a step."""

from kda.serving.batch import Batch, Decode, Prefill, Verify
from kda.serving.pool import ForeignSlot, Geometry, LayerStates, NotAllocated, OutOfSlots, PoolError, StatePool
from kda.serving.snapshot import Snapshot, SnapshotMismatch, load_snapshots, save_snapshots

__all__ = [
    "Batch",
    "Decode",
    "ForeignSlot",
    "Geometry",
    "LayerStates",
    "NotAllocated",
    "OutOfSlots",
    "PoolError",
    "Prefill",
    "Snapshot",
    "SnapshotMismatch",
    "StatePool",
    "Verify",
    "load_snapshots",
    "save_snapshots",
]
