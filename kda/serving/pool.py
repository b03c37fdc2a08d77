# SPDX-License-Identifier: Apache-2.0
"""The states of all requests of an engine: a slot each, in memory that the operations read and write in place.

One slot number serves all layers. In each layer a slot is one page: the recurrent state [HV, V, K], then the convolution
state [dim, columns], then the records of draft tokens, if the pool has them, then what padding the page has. So a fork is
one copy, whatever the number of layers.

Which slots are whose is known on the host alone: to allocate, free or fork waits for nothing, and what touches memory is
queued on the current stream as the operations are. Not for several threads at once.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kda import validation as check
from kda.serving.snapshot import Geometry, PoolError, Snapshot, SnapshotMismatch

PAGE_ALIGNMENT = 256  # bytes: what the operations' widest loads like
_NAN = -1  # all bits set: NaN in every dtype of a state


class OutOfSlots(PoolError, RuntimeError):
    """Fewer slots are free than were asked for; nothing was allocated."""


class ForeignSlot(PoolError, ValueError):
    """Not a slot that a request can own: the null slot, or a number outside the pool."""


class NotAllocated(PoolError, ValueError):
    """A slot of the pool that no request owns: freed before, or never allocated."""


class LayerStates(NamedTuple):
    """One layer's states, as the operations take them.

    Attributes:
        conv_state: [slots, dim, columns], a token's channels dense in memory.
        ssm_state: [slots, HV, V, K], each slot dense.
    """

    conv_state: Tensor
    ssm_state: Tensor


class StatePool:
    """Slots for the recurrent and convolution states of requests, for one layer or many.

    Slot 0 is the null slot: it belongs to padding rows and is never handed out. A slot that is allocated anew holds what
    its last owner left. Prefill starts it from zeros where `has_initial_state` is false, which costs nothing; for a first
    step without that flag (decode, speculative verify), ask for zeros: `allocate(zero=True)`. Under `KDA_CHECK=1` slots
    that nobody owns are filled with NaN, which shows who reads one.

    Args:
        slots: number of slots, the null slot included; 2 or more.
        geometry: what a slot holds.
        page_bytes: bytes from one slot to the next in a layer, as an engine's page pool has them: a multiple of 256 that
            both states fit into. None: the smallest.
        device: where the states live.

    Attributes:
        slots, geometry, page_bytes, device: as given.
        layers: one `LayerStates` a layer, in the memory of the pages. To torch each is a tensor with a storage of its own,
            so that `torch.compile` takes a graph that writes several of them.
        records: a layer each, [slots, record_tokens, HV, 2 * K + V] fp32 in the pages too, as `kda_verify` takes them;
            None where the geometry has none.
        pages: [layers, slots, page_bytes / 8] int64, all memory of the pool.

    Example:
        >>> from kda.serving import Geometry, StatePool
        >>> pool = StatePool(8, Geometry(HV=2, V=32, K=32, dim=192, layers=3))
        >>> first, second = pool.allocate(2)
        >>> conv_state, ssm_state = pool.layers[0]  # arguments of kda_prefill, kda_decode, ..
        >>> conv_state.shape, ssm_state.shape
        (torch.Size([8, 192, 3]), torch.Size([8, 2, 32, 32]))
        >>> saved = pool.snapshot(first, tokens=5)  # in host memory
        >>> pool.free([first, second])
        >>> pool.restore(saved), pool.available, pool.bytes_per_slot
        (1, 6, 28416)
    """

    def __init__(
        self, slots: int, geometry: Geometry, *, page_bytes: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if type(slots) is not int or slots < 2:
            check.refuse("slots", repr(slots), "an integer, 2 or more: the null slot and one to use")
        self._conv_start = _aligned(geometry.ssm_bytes)
        self._record_start = self._conv_start + _aligned(geometry.conv_bytes)
        least = self._record_start + _aligned(geometry.record_bytes)
        page_bytes = least if page_bytes is None else page_bytes
        if type(page_bytes) is not int or page_bytes < least or page_bytes % PAGE_ALIGNMENT:
            check.refuse("page_bytes", repr(page_bytes), f"a multiple of {PAGE_ALIGNMENT}, {least} or more")
        self.slots, self.geometry, self.page_bytes = slots, geometry, page_bytes
        self.pages = torch.zeros(geometry.layers, slots, page_bytes // 8, dtype=torch.int64, device=device)
        self.device = self.pages.device
        if check.checking():
            self.pages.fill_(_NAN)
        self._bind()
        self._free = list(range(slots - 1, 0, -1))  # a stack: the slot freed last, perhaps still in a cache, goes first
        self._owned: set[int] = set()

    def _bind(self) -> None:
        """Makes the tensors that lie in the pages."""
        geo = self.geometry
        self._conv_states, self._ssm_states, records = self._views(self.pages)
        self.layers = tuple(LayerStates(_alone(c), _alone(s)) for c, s in zip(self._conv_states, self._ssm_states))
        self.records = tuple(map(_alone, records)) if geo.record_tokens else (None,) * geo.layers

    def __getstate__(self) -> dict:
        bound = ("_conv_states", "_ssm_states", "layers", "records")
        return {name: value for name, value in vars(self).items() if name not in bound}

    def __setstate__(self, state: dict) -> None:  # of a copy, or from a file: its states lie in its own pages
        vars(self).update(state)
        self._bind()

    def _views(self, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolution states [layers, slots, dim, columns], recurrent states and records in `pages`."""
        geo = self.geometry

        def part(start: int, dtype: torch.dtype, *shape: int) -> Tensor:
            values = pages.view(dtype)[..., start // dtype.itemsize :]
            return values[..., : math.prod(shape)].unflatten(-1, shape)

        return (
            part(self._conv_start, geo.conv_dtype, geo.columns, geo.dim).mT,
            part(0, geo.state_dtype, geo.HV, geo.V, geo.K),
            part(self._record_start, torch.float32, geo.record_tokens, geo.HV, 2 * geo.K + geo.V),
        )

    # -------------------------------------------------------------------------------------------------- who owns what

    def allocate(self, n: int | None = None, *, zero: bool = False) -> int | list[int]:
        """A slot or, given `n`, a list of n slots; with `zero` their states become zeros.

        Raises:
            OutOfSlots: fewer than n are free; nothing is allocated then.
        """
        count = 1 if n is None else operator.index(n)
        if count < 0:
            check.refuse("n", n, "0 or more")
        if count > len(self._free):
            raise OutOfSlots(f"{count} slots were asked for and {len(self._free)} of {self.slots - 1} are free")
        new = [self._free.pop() for _ in range(count)]
        self._owned.update(new)
        if zero:
            self.zero(new)
        return new[0] if n is None else new

    def free(self, slots: int | Iterable[int]) -> None:
        """Gives one slot or several back.

        Raises:
            NotAllocated: one is not in use (a double free, also twice in this call), or ForeignSlot: one cannot be.
                Nothing is freed then.
        """
        gone = self.owned(slots)
        if len(set(gone)) < len(gone):
            check.refuse("slots", gone, "every slot once", NotAllocated)
        self._owned.difference_update(gone)
        self._free.extend(reversed(gone))
        if check.checking():
            for slot in gone:
                self.pages[:, slot].fill_(_NAN)

    def owned(self, slots: int | Iterable[int]) -> list[int]:
        """`slots` as a list, if all of them are in use; otherwise raises ForeignSlot or NotAllocated."""
        found = [_number(slot) for slot in ([slots] if not isinstance(slots, Iterable) else slots)]
        for slot in found:
            if not 0 < slot < self.slots:
                what = "the null slot" if slot == 0 else f"slot {slot}"
                check.refuse("slots", what, f"slots 1 to {self.slots - 1} of this pool", ForeignSlot)
            if slot not in self._owned:
                check.refuse("slots", f"slot {slot}, which is not in use", "slots from allocate()", NotAllocated)
        return found

    def __contains__(self, slot: int) -> bool:
        """Whether the slot is in use."""
        return slot in self._owned

    @property
    def in_use(self) -> list[int]:
        """The slots in use, in ascending order."""
        return sorted(self._owned)

    @property
    def available(self) -> int:
        """How many slots are free."""
        return len(self._free)

    # ----------------------------------------------------------------------------------------------------- the states

    def zero(self, slots: int | Iterable[int]) -> None:
        """Sets the states of slots in use to zeros."""
        for slot in self.owned(slots):
            self.pages[:, slot].zero_()

    def fork(self, slot: int, n: int | None = None) -> int | list[int]:
        """A new slot or, given `n`, a list of n new slots, with the states of `slot` as they are now, records included.

        Raises OutOfSlots, ForeignSlot or NotAllocated, and nothing is allocated then.
        """
        (source,) = self.owned([slot])
        new = self.allocate(n)
        for target in [new] if n is None else new:
            self.pages[:, target].copy_(self.pages[:, source])
        return new

    def settle(self, slots: Sequence[int], accepted: int) -> None:
        """Brings a request that speculates with full states into the plain form, in slots[0].

        There it can be decoded, prefilled further, forked or saved, and its other slots may be freed.

        Args:
            slots: of its window, as in its last `Verify`.
            accepted: how many tokens of that were accepted, 1 to len(slots).
        """
        slots, geo = self.owned(slots), self.geometry
        most = min(len(slots), geo.columns - geo.W + 2)
        if type(accepted) is not int or not 1 <= accepted <= most:
            check.refuse("accepted", repr(accepted), f"1 to {most}")
        if accepted > 1:
            history = self._conv_states[:, slots[0], :, accepted - 1 : accepted + geo.W - 2]
            self._conv_states[:, slots[0], :, : geo.W - 1] = history.clone()
            self._ssm_states[:, slots[0]] = self._ssm_states[:, slots[accepted - 1]]

    def snapshot(self, slot: int, tokens: int = 0, *, accepted: int | None = None) -> Snapshot:
        """The states of `slot` as they are now, in host memory. Waits for the device.

        For a token inside a prompt, let `kda_prefill` leave its checkpoint in a slot, and take that slot's.

        Args:
            tokens: how many tokens the request has seen, noted in the snapshot.
            accepted: of a pool with records, which must be told: how many of the slot's records the snapshot is to have
                applied, 0 for a request that does not speculate. The slot stays as it is, and so do its records.
        """
        (slot,), most = self.owned([slot]), self.geometry.record_tokens
        if (accepted is None) != (most == 0) or (most and (type(accepted) is not int or not 0 <= accepted <= most)):
            wanted = f"0 to {most}, as the pool has records" if most else "None, as the pool has no records"
            check.refuse("accepted", repr(accepted), wanted)
        conv_states, ssm_states = self._conv_states[:, slot], self._ssm_states[:, slot]
        if accepted:
            from kda.layer_ops import kda_commit

            copy = self.pages[:, [slot, slot]]  # in the second, as the first is a null slot
            views = self._views(copy)
            conv_states, ssm_states = (x[:, 1] for x in views[:2])
            index, count = (torch.tensor([n], dtype=torch.int32, device=self.device) for n in (1, accepted))
            for conv_state, ssm_state, records in zip(*views):
                kda_commit(conv_state[..., : self.geometry.W - 1 + most], ssm_state, records, index, count)
        on_host = (torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x) for x in (conv_states, ssm_states))
        return Snapshot(self.geometry, *on_host, tokens)

    def restore(self, snapshot: Snapshot, slot: int | None = None) -> int:
        """Writes the states of `snapshot` to `slot`, or to a new one (None), and returns it.

        Any pool of the same geometry will do, also one of other pages or on another device. A request goes on from there
        with `has_initial_state` true; none of the slot's records are its own.

        Raises:
            SnapshotMismatch: the geometry or a dtype differs. OutOfSlots, ForeignSlot, NotAllocated: as above.
        """
        if snapshot.geometry != self.geometry:
            got = f"states with {self.geometry.differences(snapshot.geometry)}"
            check.refuse("snapshot", got, f"states of {self.geometry}", SnapshotMismatch)
        slot = self.allocate() if slot is None else self.owned([slot])[0]
        self._conv_states[:, slot].copy_(snapshot.conv_state, non_blocking=True)
        self._ssm_states[:, slot].copy_(snapshot.ssm_state, non_blocking=True)
        return slot

    # ----------------------------------------------------------------------------------------------------- its memory

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all layers, padding included."""
        return self.geometry.layers * self.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.slots * self.bytes_per_slot

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the slots in use."""
        return len(self._owned) * self.bytes_per_slot

    def __repr__(self) -> str:
        used = f"{len(self._owned)} of {self.slots - 1} slots in use"
        return f"StatePool({self.geometry}, {used}, {self.nbytes} bytes on {self.device})"


def _alone(x: Tensor) -> Tensor:
    """The same memory as a tensor with a storage to itself.

    torch.compile takes no two tensors of one storage that are both written, unless it can tell that they do not overlap.
    """
    if x.device.type not in ("cpu", "cuda") or type(x) is not Tensor:
        return x
    return torch.from_dlpack(x).as_strided(x.shape, x.stride(), 0)  # DLPack forgets strides of dims of one


def _aligned(size: int) -> int:
    return -(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def _number(slot) -> int:
    # a tensor would do too, at the price of a synchronisation that no one would see
    if isinstance(slot, (bool, Tensor)) or not hasattr(slot, "__index__"):
        check.refuse("slots", type(slot).__name__, "integers", TypeError)
    return operator.index(slot)
