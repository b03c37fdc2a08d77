# SPDX-License-Identifier: Apache-2.0
"""What an engine knows about one step: which tokens belong to which request, and where its states are.

Three kinds of rows, as in vLLM: decodes (one token each), then prefills (any number of tokens), and apart from them the
verify rows of speculative decoding (a window of draft tokens each). Each kind has tensors of its own, which are the
arguments of the operations that serve it. The step's tokens lie in that order too, decodes, prefills, verify rows,
unless the batch says otherwise: where a kind's tokens begin, or, if they lie between others', where each of them is. A
batch is made once a step and serves every layer.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kda import validation as check
from kda.serving.pool import StatePool

_STARTS = ("decode_start", "prefill_start", "verify_start")
_ANY_POOL = 2**31 - 1  # a batch does not know how many slots there are: the operations do


class Decode(NamedTuple):
    """One token of a request. A slot <= 0 is padding, here and below.

    accepted: how many records of the request's last `Verify` row to commit first, here and in `Prefill`: it leaves
        speculation with this step.
    """

    slot: int
    accepted: int = 0


class Prefill(NamedTuple):
    """Tokens of a prompt, from zeros or from what the slot holds.

    checkpoints: {tokens: slot}: after so many of this row's tokens (1 to all of them) the states go to that slot too.
    """

    slot: int
    tokens: int
    has_initial_state: bool = False
    checkpoints: Mapping[int, int] | None = None
    accepted: int = 0


class Verify(NamedTuple):
    """Draft tokens of a request, the sampled token before them included.

    slots: one for each token, for full states (the state after token t goes to slots[t]); or a single number, where the
        request has one slot and a record of each draft token.
    accepted: how many tokens of the request's last window were accepted. A request that comes from prefill or decode has
        had none: with full states it passes 1, as its state is that of slots[0] (0 marks a stale row, which is padding);
        with records it passes 0, as none are to be applied.
    """

    slots: int | Sequence[int]
    tokens: int
    accepted: int


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step. Symbols: Nd, Np, Nv rows of each kind; Tp, Tv tokens of the prefills and of the verify rows.

    `Batch.of` makes one from Python values and `Batch.from_vllm` one from vLLM's metadata. Made directly, from tensors,
    shapes, dtypes and devices are checked; values on the device only under `KDA_CHECK=1`, as in the operations.

    Attributes:
        decode_slots: [Nd] slots, int32 or int64 like all indices here; None where there is no such row.
        prefill_slots: [Np]; prefill_query_start_loc: [Np + 1] offsets, counted from the first prefill token.
        has_initial_state: [Np] bool: which prefills go on from their slots; None: none of them.
        checkpoint_offsets: [M] positions among the prefill tokens, as `kda_prefill` takes them; checkpoint_slots: [M].
        verify_slots: [Nv, window], or [Nv] with one slot a request; verify_query_start_loc: [Nv + 1], counted from the
            first verify token; num_accepted_tokens: [Nv].
        token_indices: [Nd + Tp], where in the step the tokens of decodes and prefills lie; verify_token_indices: [Tv].
            None: each kind's tokens lie side by side.
        num_prefill_tokens, num_verify_tokens: Tp and Tv.
        window: the most tokens of a verify row.
        commit_slots: [Nc] slots of decodes and prefills that leave speculation; num_committed_tokens: [Nc], how many
            records of each are to be applied first.
        decode_start, prefill_start, verify_start: the first token of a kind whose tokens lie side by side. None: as
            `token_indices` says or, without those, behind the tokens of the kinds before it.

    Raises:
        TypeError: a wrong dtype; ValueError: all else that is wrong.

    Example:
        >>> import torch
        >>> from kda.serving import Batch, Decode, Prefill, Verify
        >>> batch = Batch.of([Prefill(3, 40, checkpoints={32: 9}), Decode(5), Verify([6, 7, 8], 3, 1), Decode(2)])
        >>> batch.num_tokens, batch.decode_slots.tolist(), batch.decode_tokens.tolist(), batch.verify_tokens
        (45, [5, 2], [40, 44], slice(41, 44, None))
        >>> Batch.of([Decode(5), Decode(2), Prefill(3, 40)]).prefill_tokens
        slice(2, 42, None)
    """

    decode_slots: Tensor | None = None
    prefill_slots: Tensor | None = None
    prefill_query_start_loc: Tensor | None = None
    has_initial_state: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    checkpoint_slots: Tensor | None = None
    verify_slots: Tensor | None = None
    verify_query_start_loc: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    token_indices: Tensor | None = None
    verify_token_indices: Tensor | None = None
    num_prefill_tokens: int = 0
    num_verify_tokens: int = 0
    window: int = 0
    commit_slots: Tensor | None = None
    num_committed_tokens: Tensor | None = None
    decode_start: int | None = None
    prefill_start: int | None = None
    verify_start: int | None = None

    # --------------------------------------------------------------------------------------------------- what it holds

    @property
    def num_decodes(self) -> int:
        """Nd, padding rows included."""
        return 0 if self.decode_slots is None else self.decode_slots.shape[0]

    @property
    def num_prefills(self) -> int:
        """Np."""
        return 0 if self.prefill_slots is None else self.prefill_slots.shape[0]

    @property
    def num_verifies(self) -> int:
        """Nv."""
        return 0 if self.verify_slots is None else self.verify_slots.shape[0]

    @property
    def num_tokens(self) -> int:
        """Nd + Tp + Tv. What a step's tensors hold past that is padding."""
        return self.num_decodes + self.num_prefill_tokens + self.num_verify_tokens

    @property
    def decode_tokens(self) -> slice | Tensor:
        """Where the tokens of the decodes lie: `x[batch.decode_tokens]` are theirs, a view where they lie side by side."""
        return self._tokens(self.decode_start, 0, self.num_decodes, self.token_indices)

    @property
    def prefill_tokens(self) -> slice | Tensor:
        """Where the tokens of the prefills lie."""
        return self._tokens(self.prefill_start, self.num_decodes, self.num_prefill_tokens, self.token_indices)

    @property
    def verify_tokens(self) -> slice | Tensor:
        """Where the tokens of the verify rows lie."""
        indices, before = self.verify_token_indices, self.num_decodes + self.num_prefill_tokens
        return self._tokens(self.verify_start, before if indices is None else 0, self.num_verify_tokens, indices)

    def _tokens(self, start: int | None, first: int, count: int, indices: Tensor | None) -> slice | Tensor:
        if start is None and indices is not None:
            return indices[first : first + count]
        start = first if start is None else start
        return slice(start, start + count)

    @property
    def only_decodes(self) -> bool:
        """Whether there are decodes, in order, and nothing else."""
        others = (self.prefill_slots, self.verify_slots, self.commit_slots, self.token_indices)
        return self.num_decodes > 0 and all(x is None for x in others) and not self.decode_start

    @property
    def fields(self) -> dict[str, Tensor | int | None]:
        """All of it by name, to be passed on."""
        return {name: getattr(self, name) for name in _FIELDS}

    # ----------------------------------------------------------------------------------------------------- making one

    @classmethod
    def of(
        cls,
        rows: Sequence[Decode | Prefill | Verify],
        *,
        pool: StatePool | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """A batch from Python values, checked one by one; they go to the device in one transfer that nobody waits for.

        Args:
            rows: in the order of their tokens, kinds mixed as they come. Tokens of a kind whose rows follow one another
                need not be gathered.
            pool: where given, every slot has to be in use there.
            device: of the tensors; default the pool's, or "cpu".

        Raises:
            TypeError: a row is none of the three kinds. ValueError: a number in it makes no sense, or two rows share a
                slot. ForeignSlot, NotAllocated: a slot is not in use in `pool`.
        """
        device = torch.device(device if device is not None else pool.device if pool is not None else "cpu")
        kinds = (Decode, Prefill, Verify)
        spans, used, at = [], [], 0
        for n, row in enumerate(rows):
            if not isinstance(row, kinds):
                check.refuse(f"rows[{n}]", type(row).__name__, "a Decode, a Prefill or a Verify", TypeError)
            tokens, slots = _row(n, row)
            spans.append((kinds.index(type(row)), range(at, at + tokens)))
            used += [slot for slot in slots if slot > 0]
            at += tokens
        if len(set(used)) < len(used):
            twice = sorted({slot for slot in used if used.count(slot) > 1})
            check.refuse("rows", f"slots {twice} more than once", "every slot once: two rows must not share a state")
        if pool is not None:
            pool.owned(used)
        decodes, prefills, verifies = ([row for row in rows if isinstance(row, kind)] for kind in kinds)
        starts = [0, *itertools.accumulate(row.tokens for row in prefills)]
        verify_starts = [0, *itertools.accumulate(row.tokens for row in verifies)]
        checkpoints = [
            (start + tokens, slot)
            for start, row in zip(starts, prefills)
            for tokens, slot in (row.checkpoints or {}).items()
        ]
        window, verify_slots = _windows(verifies)
        commits = [row for row in (*decodes, *prefills) if row.accepted and row.slot > 0]
        by_kind = [[at for kind, span in spans if kind == wanted for at in span] for wanted in range(3)]
        starts_of_kinds, apart = _side_by_side(by_kind)
        sent = _upload(
            device,
            decode_slots=[row.slot for row in decodes] or None,
            prefill_slots=[row.slot for row in prefills] or None,
            prefill_query_start_loc=starts if prefills else None,
            has_initial_state=[row.has_initial_state for row in prefills] or None,
            checkpoint_offsets=[place for place, _ in checkpoints] or None,
            checkpoint_slots=[slot for _, slot in checkpoints] or None,
            verify_slots=verify_slots or None,
            verify_query_start_loc=verify_starts if verifies else None,
            num_accepted_tokens=[row.accepted for row in verifies] or None,
            token_indices=by_kind[0] + by_kind[1] if apart else None,
            verify_token_indices=by_kind[2] if apart else None,
            commit_slots=[row.slot for row in commits] or None,
            num_committed_tokens=[row.accepted for row in commits] or None,
        )
        if prefills:
            sent["has_initial_state"] = sent["has_initial_state"].bool()
        if window:
            sent["verify_slots"] = sent["verify_slots"].view(-1, window)
        longest = window or max((row.tokens for row in verifies), default=0)
        return cls(
            **sent, **starts_of_kinds, num_prefill_tokens=starts[-1], num_verify_tokens=verify_starts[-1], window=longest
        )

    @classmethod
    def from_vllm(cls, metadata) -> Batch:
        """A batch from the fields of vLLM 0.33's `GDNAttentionMetadata`, or of any object that has them.

        Nothing is copied: the tensors are the metadata's own or views of them, so that a captured CUDA graph sees what
        vLLM writes there later. Only the offsets of prefills behind decodes, and the positions of checkpoints, are
        computed, on the device. vLLM's padding (rows past its counts) is left out.

        Raises:
            TypeError: a field that these rows need is missing or None.
            ValueError: decode rows of more than one token before prefills.
        """
        Nd, Np, Nv = (_field(metadata, f"num_{kind}") for kind in ("decodes", "prefills", "spec_decodes"))
        decode_tokens = _field(metadata, "num_decode_tokens")
        if Np and decode_tokens != Nd:
            check.refuse("num_decode_tokens", f"{decode_tokens} beside {Nd} decodes", "one token a decode row")
        fields = {}
        if Nd:
            # of decodes alone rows or tokens may be padded, in the one count or the other; padding comes last
            fields["decode_slots"] = _field(metadata, "non_spec_state_indices_tensor")[: min(Nd, decode_tokens)]
        if Np:
            rows = slice(Nd, Nd + Np)
            starts = getattr(metadata, "prefill_query_start_loc", None)  # vLLM has rebased them, where there are decodes
            if starts is None:
                starts = _field(metadata, "non_spec_query_start_loc")[Nd:]
                starts = starts - Nd if Nd else starts
            fields.update(
                prefill_slots=_field(metadata, "non_spec_state_indices_tensor")[rows],
                prefill_query_start_loc=starts[: Np + 1],
                has_initial_state=_field(metadata, "has_initial_state")[rows],
                num_prefill_tokens=_field(metadata, "num_prefill_tokens"),
            )
            fields.update(_vllm_checkpoints(metadata, fields["prefill_query_start_loc"], Nd, Np))
        if Nv:
            slots = _field(metadata, "spec_state_indices_tensor")[:Nv]
            fields.update(
                verify_slots=slots,
                verify_query_start_loc=_field(metadata, "spec_query_start_loc")[: Nv + 1],
                num_accepted_tokens=_field(metadata, "num_accepted_tokens")[:Nv],
                num_verify_tokens=_field(metadata, "num_spec_decode_tokens"),
                window=slots.shape[1],
            )
            if Nd or Np:
                fields.update(
                    token_indices=_field(metadata, "non_spec_token_indx"),
                    verify_token_indices=_field(metadata, "spec_token_indx"),
                )
        return cls(**fields)

    @classmethod
    def unchecked(cls, fields: Mapping[str, Tensor | int | None]) -> Batch:
        """The batch that had these `fields`, once more."""
        batch = object.__new__(cls)
        batch.__dict__.update({name: fields[name] for name in _FIELDS})
        return batch

    # ------------------------------------------------------------------------------------------------------ its checks

    def __post_init__(self) -> None:
        like = next((x for x in (self.decode_slots, self.prefill_slots, self.verify_slots) if x is not None), None)
        if self.decode_slots is not None:
            check.slots("decode_slots", self.decode_slots, _rows(self.decode_slots), _ANY_POOL, like)
        self._check_prefills(like)
        self._check_verifies(like)
        self._check_commits(like)
        for name, count in zip(_STARTS, (self.num_decodes, self.num_prefill_tokens, self.num_verify_tokens)):
            start = getattr(self, name)
            if start is not None and (type(start) is not int or not 0 <= start <= self.num_tokens - count):
                check.refuse(name, repr(start), f"0 to {self.num_tokens - count}, of {self.num_tokens} tokens")
        self._together("token_indices", "verify_token_indices")
        if self.token_indices is not None:
            count = self.num_decodes + self.num_prefill_tokens
            check.vector("token_indices", self.token_indices, count, check.INDICES, like)
            check.vector("verify_token_indices", self.verify_token_indices, self.num_verify_tokens, check.INDICES, like)
        if check.checking() and like is not None:
            self._check_values()

    def _check_prefills(self, like: Tensor | None) -> None:
        self._together("prefill_slots", "prefill_query_start_loc")
        self._together("checkpoint_offsets", "checkpoint_slots")
        _count("num_prefill_tokens", self.num_prefill_tokens, self.prefill_slots is not None)
        if self.prefill_slots is None:
            for name in ("has_initial_state", "checkpoint_offsets"):
                if getattr(self, name) is not None:
                    check.refuse("prefill_slots", "None", f"a tensor, beside `{name}`")
            return
        starts = self.prefill_query_start_loc
        N = check.sequences(starts, 1, self.num_prefill_tokens, like, "prefill_query_start_loc")
        check.slots("prefill_slots", self.prefill_slots, N, _ANY_POOL, like)
        if self.has_initial_state is not None:
            check.flags("has_initial_state", self.has_initial_state, N, like)
        if self.checkpoint_offsets is not None:
            check.vector("checkpoint_offsets", self.checkpoint_offsets, None, check.INDICES, like)
            check.slots("checkpoint_slots", self.checkpoint_slots, _rows(self.checkpoint_offsets), _ANY_POOL, like)

    def _check_verifies(self, like: Tensor | None) -> None:
        self._together("verify_slots", "verify_query_start_loc", "num_accepted_tokens")
        for name in ("num_verify_tokens", "window"):
            _count(name, getattr(self, name), self.verify_slots is not None)
        if self.verify_slots is None:
            return
        N = check.sequences(self.verify_query_start_loc, 1, self.num_verify_tokens, like, "verify_query_start_loc")
        check.slots("verify_slots", self.verify_slots, N, _ANY_POOL, like, window=True)
        check.vector("num_accepted_tokens", self.num_accepted_tokens, N, check.INDICES, like)
        if self.verify_slots.dim() == 2 and self.window > self.verify_slots.shape[1]:
            check.refuse("window", self.window, f"{self.verify_slots.shape[1]}, the columns of `verify_slots`, or fewer")

    def _check_commits(self, like: Tensor | None) -> None:
        self._together("commit_slots", "num_committed_tokens")
        if self.commit_slots is not None:
            if self.decode_slots is None and self.prefill_slots is None:
                check.refuse("commit_slots", "a tensor", "None, as there are neither decodes nor prefills")
            check.slots("commit_slots", self.commit_slots, _rows(self.commit_slots), _ANY_POOL, like)
            check.vector("num_committed_tokens", self.num_committed_tokens, _rows(self.commit_slots), check.INDICES, like)

    def _check_values(self) -> None:
        """What needs values from the device: KDA_CHECK."""
        named = ("decode_slots", "prefill_slots", "checkpoint_slots", "verify_slots")
        every = [getattr(self, name).flatten().long() for name in named if getattr(self, name) is not None]
        used = torch.cat(every)
        used = used[used > 0]
        if used.unique().numel() != used.numel():
            check.refuse("/".join(named), sorted(used.tolist()), "every slot once (KDA_CHECK)")
        for name, total in (("prefill", self.num_prefill_tokens), ("verify", self.num_verify_tokens)):
            starts = getattr(self, f"{name}_query_start_loc")
            if starts is not None and int(starts[-1]) != total:
                check.refuse(f"{name}_query_start_loc", starts.tolist(), f"offsets that end at {total} (KDA_CHECK)")
        if self.verify_query_start_loc is not None and self.verify_query_start_loc.numel() > 1:
            longest = int(self.verify_query_start_loc.diff().max())
            if longest > self.window:
                check.refuse("window", self.window, f"{longest}, the longest verify row, or more (KDA_CHECK)")
        if self.commit_slots is not None:
            kinds = [x.flatten().tolist() for x in (self.decode_slots, self.prefill_slots) if x is not None]
            if not {slot for slot in self.commit_slots.tolist() if slot > 0} <= set().union(*kinds):
                check.refuse("commit_slots", self.commit_slots.tolist(), "slots of decodes and prefills (KDA_CHECK)")
        places = []
        for where in (self.decode_tokens, self.prefill_tokens, self.verify_tokens):
            places += range(where.start, where.stop) if isinstance(where, slice) else where.tolist()
        if sorted(places) != list(range(self.num_tokens)):
            named = "token_indices" if self.token_indices is not None else "/".join(_STARTS)
            check.refuse(named, sorted(places), f"each of {self.num_tokens} tokens once (KDA_CHECK)")

    def _together(self, *names: str) -> None:
        missing = [name for name in names if getattr(self, name) is None]
        if missing and len(missing) < len(names):
            given = next(name for name in names if name not in missing)
            check.refuse(missing[0], "None", f"a tensor, beside `{given}`")


_FIELDS = tuple(field.name for field in dataclasses.fields(Batch))


def _rows(x) -> int:
    return x.shape[0] if isinstance(x, Tensor) and x.dim() else 0


def _count(name: str, value, wanted: bool) -> None:
    if type(value) is not int or value < 0 or (value and not wanted):
        check.refuse(name, repr(value), "an integer, 0 or more" if wanted else "0, as there are no such rows")


def _whole(n: int, field: str, value, least: int | None = None, most: int | None = None) -> int:
    if type(value) is not int:
        check.refuse(f"rows[{n}].{field}", repr(value), "an integer", TypeError)
    if (least is not None and value < least) or (most is not None and value > most):
        accepted = f"{least} to {most}" if most is not None else f"{least} or more"
        check.refuse(f"rows[{n}].{field}", value, accepted)
    return value


def _row(n: int, row: Decode | Prefill | Verify) -> tuple[int, list[int]]:
    """The tokens of row n and all its slots, checked."""
    if isinstance(row, Decode):
        _whole(n, "accepted", row.accepted, 0)
        return 1, [_whole(n, "slot", row.slot)]
    tokens = _whole(n, "tokens", row.tokens, 0)
    if isinstance(row, Prefill):
        for at, slot in (row.checkpoints or {}).items():
            _whole(n, "checkpoints", at, 1, tokens), _whole(n, "checkpoints", slot)
        if not isinstance(row.has_initial_state, bool):
            check.refuse(f"rows[{n}].has_initial_state", repr(row.has_initial_state), "True or False", TypeError)
        _whole(n, "accepted", row.accepted, 0, None if row.has_initial_state else 0)
        return tokens, [_whole(n, "slot", row.slot), *(row.checkpoints or {}).values()]
    single = isinstance(row.slots, int)
    slots = [_whole(n, "slots", slot) for slot in ([row.slots] if single else row.slots)]
    if not slots:
        check.refuse(f"rows[{n}].slots", "none", "at least one")
    if not single and tokens > len(slots):
        check.refuse(f"rows[{n}].tokens", tokens, f"{len(slots)} or fewer, a slot each")
    _whole(n, "accepted", row.accepted, 0, None if single else len(slots))
    return tokens, slots


def _windows(rows: list[Verify]) -> tuple[int, list[int]]:
    """The slots of verify rows in one list, and how many a row has (0: a single one, without a window)."""
    single = {isinstance(row.slots, int) for row in rows}
    if len(single) > 1:
        check.refuse("rows", "verify rows of both kinds", "slots for each token in all of them, or in none")
    if True in single:
        return 0, [row.slots for row in rows]
    window = max((len(row.slots) for row in rows), default=0)
    # a shorter row has null slots behind its own: it has no tokens that would go there
    return window, [slot for row in rows for slot in (*row.slots, *[0] * (window - len(row.slots)))]


def _side_by_side(by_kind: list[list[int]]) -> tuple[dict[str, int], bool]:
    """Where the kinds' tokens begin, unless they lie in order; and whether those of one lie between others'."""
    if sum(by_kind, []) == list(range(sum(map(len, by_kind)))):
        return {}, False
    starts = {
        name: places[0] if places else 0
        for name, places in zip(_STARTS, by_kind)
        if not places or places == list(range(places[0], places[0] + len(places)))
    }
    return starts, len(starts) < len(_STARTS)


def _upload(device: torch.device, **lists: list[int] | None) -> dict[str, Tensor]:
    """int32 tensors on `device`, views of one buffer, through one transfer."""
    flat: list[int] = []
    spans = {}
    for name, values in lists.items():
        if values is not None:
            # to the next 16 bytes: kernels are compiled anew for another alignment
            flat += [0] * (-len(flat) % 4)
            spans[name] = slice(len(flat), len(flat) + len(values))
            flat += values
    buffer = torch.tensor(flat, dtype=torch.int32, device="cpu")
    if device.type == "cuda":
        buffer = buffer.pin_memory()  # from other memory the copy would wait
    buffer = buffer.to(device, non_blocking=True)
    return {name: buffer[span] for name, span in spans.items()}


def _field(metadata, name: str):
    value = getattr(metadata, name, None)
    if value is None:
        check.refuse(f"metadata.{name}", "None" if hasattr(metadata, name) else "nothing", "a value", TypeError)
    return value


def _vllm_checkpoints(metadata, starts: Tensor, Nd: int, Np: int) -> dict[str, Tensor]:
    """vLLM has one checkpoint a row at most: its offset in the row, 0 for none, beside its slot."""
    kept = getattr(metadata, "checkpoint", None)
    if kept is None:
        return {}
    offsets, slots = _field(kept, "checkpoint_offsets"), _field(kept, "state_indices")
    first = 0 if offsets.shape[0] == Np else Nd  # rows of prefills alone, or of decodes too
    offsets, slots = offsets[first : first + Np], slots[first : first + Np]
    # position 0 is in no sequence, whereas the start of one is the end of the one before
    return dict(checkpoint_offsets=torch.where(offsets > 0, starts[:-1] + offsets, 0), checkpoint_slots=slots)
