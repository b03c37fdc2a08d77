# SPDX-License-Identifier: Apache-2.0
"""Batch: the description of a step, from Python values, from tensors and from vLLM's metadata."""

import dataclasses
import types

import pytest
import torch
from helpers import ints, needs_gpu, starts

from kda.serving import Batch, Decode, ForeignSlot, Geometry, NotAllocated, Prefill, StatePool, Verify

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

prop = settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

INDEX_FIELDS = [f.name for f in dataclasses.fields(Batch) if f.type == "Tensor | None"]


def values(batch):
    """All fields as Python values."""
    return {f.name: x.tolist() if isinstance(x := getattr(batch, f.name), torch.Tensor) else x
            for f in dataclasses.fields(batch)}


def flags(*given, device="cpu"):
    return torch.tensor(given, dtype=torch.bool, device=device)


# ---------------------------------------------------------------------------------------------------- from Python values


def test_rows_in_the_order_of_kinds(backend):
    batch = Batch.of([Decode(5), Decode(0), Prefill(7, 40, True, {32: 9, 40: 1}), Prefill(3, 2, checkpoints={1: 4}),
                      Verify([6, 8, 2], 3, 1), Verify([10, 11], 1, 2)], device=backend.device)
    assert values(batch) == dict(
        decode_slots=[5, 0], prefill_slots=[7, 3], prefill_query_start_loc=[0, 40, 42], has_initial_state=[True, False],
        checkpoint_offsets=[32, 40, 41], checkpoint_slots=[9, 1, 4], verify_slots=[[6, 8, 2], [10, 11, 0]],
        verify_query_start_loc=[0, 3, 4], num_accepted_tokens=[1, 2], token_indices=None, verify_token_indices=None,
        num_prefill_tokens=42, num_verify_tokens=4, window=3, commit_slots=None, num_committed_tokens=None,
        decode_start=None, prefill_start=None, verify_start=None)
    assert (batch.num_decodes, batch.num_prefills, batch.num_verifies, batch.num_tokens) == (2, 2, 2, 48)
    assert (batch.decode_tokens, batch.prefill_tokens, batch.verify_tokens) == (slice(0, 2), slice(2, 44), slice(44, 48))
    for name in INDEX_FIELDS:
        x = getattr(batch, name)
        assert x is None or x.device.type == backend.device.type
        assert x is None or x.dtype == (torch.bool if name == "has_initial_state" else torch.int32)
        assert x is None or name == "has_initial_state" or x.data_ptr() % 16 == 0


def test_one_slot_a_verify_row(backend):
    batch = Batch.of([Verify(6, 3, 0), Verify(0, 5, 2)], device=backend.device)
    assert batch.verify_slots.tolist() == [6, 0] and batch.window == 5 and batch.num_decodes == batch.num_prefills == 0
    assert batch.verify_tokens == slice(0, 8)


def test_rows_that_leave_speculation_are_committed():
    batch = Batch.of([Decode(5, 2), Decode(6), Prefill(3, 4, True, None, 3), Decode(0, 1), Prefill(2, 4)])
    assert batch.commit_slots.tolist() == [5, 3] and batch.num_committed_tokens.tolist() == [2, 3]


def test_no_rows():
    batch = Batch.of([])
    assert batch.num_tokens == 0 and batch.decode_tokens == batch.prefill_tokens == batch.verify_tokens == slice(0, 0)
    assert values(batch) == values(Batch())


ROWS = st.one_of(
    st.builds(lambda: ("decode",)),
    st.builds(lambda tokens, begun, kept: ("prefill", tokens, begun, sorted(kept)), st.integers(0, 9), st.booleans(),
              st.sets(st.integers(1, 9), max_size=2)),
    st.builds(lambda window, tokens, accepted: ("verify", window, min(tokens, window), min(accepted, window)),
              st.integers(1, 4), st.integers(0, 4), st.integers(0, 4)),
)


def made(kinds):
    """Rows with slots 1, 2, 3, .. in the order in which they are named."""
    rows, slot = [], iter(range(1, 999))
    for kind, *rest in kinds:
        if kind == "decode":
            rows.append(Decode(next(slot)))
        elif kind == "prefill":
            tokens, begun, kept = rest
            rows.append(Prefill(next(slot), tokens, begun, {at: next(slot) for at in kept if at <= tokens}))
        else:
            window, tokens, accepted = rest
            rows.append(Verify([next(slot) for _ in range(window)], tokens, accepted))
    return rows


def tokens_of(row):
    return 1 if isinstance(row, Decode) else row.tokens


@prop
@given(kinds=st.lists(ROWS, max_size=12), check=st.booleans())
def test_any_rows_give_each_kind_its_tokens(kinds, check):
    """`x[batch.decode_tokens]` and so on, cut at the offsets, are each row's own tokens, whatever the order."""
    rows = made(kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDA_CHECK", "1" if check else "0")
        batch = Batch.of(rows)
    ends = starts([tokens_of(row) for row in rows])
    x, own = torch.arange(ends[-1]), {id(row): list(range(a, b)) for row, a, b in zip(rows, ends, ends[1:])}
    assert batch.num_tokens == ends[-1]
    decodes, prefills, verifies = ([row for row in rows if isinstance(row, kind)] for kind in (Decode, Prefill, Verify))
    assert x[batch.decode_tokens].tolist() == [at for row in decodes for at in own[id(row)]]
    for group, tokens, offsets in ((prefills, batch.prefill_tokens, batch.prefill_query_start_loc),
                                   (verifies, batch.verify_tokens, batch.verify_query_start_loc)):
        bounds = [0] if offsets is None else offsets.tolist()
        assert [x[tokens][a:b].tolist() for a, b in zip(bounds, bounds[1:])] == [own[id(row)] for row in group]
    assert batch.token_indices is None or rows != [*decodes, *prefills, *verifies]
    for group, tokens in ((decodes, batch.decode_tokens), (prefills, batch.prefill_tokens), (verifies, batch.verify_tokens)):
        places = [at for row in group for at in own[id(row)]]
        assert isinstance(tokens, slice) == (not places or places[-1] - places[0] == len(places) - 1)
    if batch.checkpoint_offsets is not None:
        kept = dict(zip(batch.checkpoint_slots.tolist(), x[batch.prefill_tokens][batch.checkpoint_offsets.long() - 1].tolist()))
        assert kept == {slot: own[id(row)][at - 1] for row in prefills for at, slot in row.checkpoints.items()}
    if verifies:
        assert [[s for s in slots if s] for slots in batch.verify_slots.tolist()] == [row.slots for row in verifies]


BAD_ROWS = {
    "kind": ((1, 2), TypeError, r"rows\[1\]"),
    "slot": (Decode(1.0), TypeError, r"rows\[1\].slot"),
    "bool-slot": (Decode(True), TypeError, r"rows\[1\].slot"),
    "tensor-slot": (Decode(torch.tensor(1)), TypeError, r"rows\[1\].slot"),
    "tokens": (Prefill(3, -1), ValueError, r"rows\[1\].tokens"),
    "flag": (Prefill(3, 4, 1), TypeError, r"rows\[1\].has_initial_state"),
    "checkpoint-at-start": (Prefill(3, 4, False, {0: 6}), ValueError, r"rows\[1\].checkpoints"),
    "checkpoint-past-end": (Prefill(3, 4, False, {5: 6}), ValueError, r"rows\[1\].checkpoints"),
    "checkpoint-slot": (Prefill(3, 4, False, {4: None}), TypeError, r"rows\[1\].checkpoints"),
    "window": (Verify([3, 4], 3, 1), ValueError, r"rows\[1\].tokens"),
    "no-window": (Verify([], 0, 0), ValueError, r"rows\[1\].slots"),
    "accepted": (Verify([3, 4], 2, 3), ValueError, r"rows\[1\].accepted"),
    "accepted-negative": (Verify(3, 2, -1), ValueError, r"rows\[1\].accepted"),
    "committed": (Decode(3, -1), ValueError, r"rows\[1\].accepted"),
    "committed-and-fresh": (Prefill(3, 4, accepted=1), ValueError, r"rows\[1\].accepted"),
    "both-ways": (Verify(3, 2, 1), ValueError, "rows.*both kinds"),
    "twice": (Decode(5), ValueError, r"slots \[5\] more than once"),
    "twice-in-window": (Verify([3, 3], 2, 1), ValueError, r"slots \[3\] more than once"),
    "twice-in-checkpoint": (Prefill(3, 4, False, {1: 3}), ValueError, r"slots \[3\] more than once"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_bad_row_is_named(bad):
    row, error, match = BAD_ROWS[bad]
    with pytest.raises(error, match=match):
        Batch.of([Decode(5), row, Verify([8, 9], 2, 1)])


def test_padding_rows_may_share_the_null_slot():
    batch = Batch.of([Decode(0), Decode(0), Prefill(-1, 3), Verify([0, 0], 1, 1)])
    assert batch.num_tokens == 6


def test_slots_of_a_pool_have_to_be_in_use():
    pool = StatePool(8, Geometry(HV=1, V=16, K=16, dim=48), device="meta")
    a, b = pool.allocate(2)
    assert Batch.of([Decode(a), Decode(0), Prefill(b, 3)], pool=pool).decode_slots.device == pool.device
    with pytest.raises(NotAllocated, match="slot 5"):
        Batch.of([Decode(a), Verify([b, 5], 1, 1)], pool=pool)
    with pytest.raises(ForeignSlot, match="slot 8"):
        Batch.of([Prefill(a, 3, False, {2: 8})], pool=pool)


def test_nothing_on_the_device_is_read():
    """On the meta device, where nothing has a value."""
    batch = Batch.of([Decode(6), Verify([2, 3], 2, 1), Prefill(1, 9, True, {3: 4}), Decode(5)], device="meta")
    assert batch.num_tokens == 13 and batch.decode_tokens.shape == (2,) and batch.prefill_tokens == slice(3, 12)
    Batch.from_vllm(metadata_of([Decode(1), Prefill(2, 5, True, {2: 3})], device="meta"))


@needs_gpu
def test_making_a_batch_does_not_wait_for_the_gpu():
    torch.cuda.set_sync_debug_mode("error")
    try:
        Batch.of([Verify([2, 3], 2, 1), Prefill(1, 9, True, {3: 4}), Decode(5)], device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_batch_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Batch.of([Decode(1)]).window = 2


# ---------------------------------------------------------------------------------------------------------- from tensors


def whole(device="cpu"):
    """The fields of a batch with everything in it."""
    rows = [Decode(6), Verify([2, 3], 2, 1), Prefill(1, 9, True, {3: 4}), Decode(5)]
    batch = Batch.of(rows, device=device)
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}


BAD_FIELDS = {
    "decode-float": (lambda x: dict(decode_slots=x["decode_slots"].float()), TypeError, "decode_slots"),
    "decode-list": (lambda x: dict(decode_slots=[1]), TypeError, "decode_slots"),
    "decode-two-dims": (lambda x: dict(decode_slots=x["verify_slots"]), ValueError, "decode_slots"),
    "decode-scalar": (lambda x: dict(decode_slots=torch.tensor(1)), ValueError, "decode_slots"),
    "prefill-device": (lambda x: dict(prefill_slots=x["prefill_slots"].to("meta")), ValueError, "prefill_slots"),
    "prefill-rows": (lambda x: dict(prefill_slots=ints([1, 2], "cpu")), ValueError, "prefill_slots"),
    "offsets-missing": (lambda x: dict(prefill_query_start_loc=None), ValueError, "prefill_query_start_loc"),
    "offsets-strided": (lambda x: dict(prefill_query_start_loc=ints([0, 0, 9, 9], "cpu")[::2]), ValueError,
                        "prefill_query_start_loc"),
    "offsets-empty": (lambda x: dict(prefill_query_start_loc=ints([], "cpu")), ValueError, "prefill_query_start_loc"),
    "flags": (lambda x: dict(has_initial_state=x["has_initial_state"].int()), TypeError, "has_initial_state"),
    "flags-alone": (lambda x: dict(prefill_slots=None, prefill_query_start_loc=None, num_prefill_tokens=0), ValueError,
                    "prefill_slots"),
    "checkpoint-alone": (lambda x: dict(checkpoint_slots=None), ValueError, "checkpoint_slots"),
    "checkpoint-rows": (lambda x: dict(checkpoint_slots=ints([4, 6], "cpu")), ValueError, "checkpoint_slots"),
    "accepted-missing": (lambda x: dict(num_accepted_tokens=None), ValueError, "num_accepted_tokens"),
    "accepted-rows": (lambda x: dict(num_accepted_tokens=ints([1, 1], "cpu")), ValueError, "num_accepted_tokens"),
    "window": (lambda x: dict(window=3), ValueError, "window"),
    "tokens-negative": (lambda x: dict(num_verify_tokens=-1), ValueError, "num_verify_tokens"),
    "tokens-tensor": (lambda x: dict(num_prefill_tokens=torch.tensor(9)), ValueError, "num_prefill_tokens"),
    "tokens-of-none": (lambda x: dict(verify_slots=None, verify_query_start_loc=None, num_accepted_tokens=None), ValueError,
                       "num_verify_tokens"),
    "start": (lambda x: dict(prefill_start=5), ValueError, "prefill_start"),
    "start-float": (lambda x: dict(verify_start=0.0), ValueError, "verify_start"),
    "commit-alone": (lambda x: dict(commit_slots=ints([1], "cpu")), ValueError, "num_committed_tokens"),
    "commit-counts": (lambda x: dict(commit_slots=ints([1], "cpu"), num_committed_tokens=ints([1, 2], "cpu")), ValueError,
                      "num_committed_tokens"),
    "indices-alone": (lambda x: dict(verify_token_indices=None), ValueError, "verify_token_indices"),
    "indices-count": (lambda x: dict(token_indices=x["token_indices"][1:]), ValueError, "token_indices"),
}


@pytest.mark.parametrize("bad", BAD_FIELDS)
def test_a_bad_field_is_named(bad):
    change, error, named = BAD_FIELDS[bad]
    x = whole()
    with pytest.raises(error, match=f"`{named}`"):
        Batch(**{**x, **change(x)})


BAD_VALUES = {
    "slot-of-two-kinds": (dict(decode_slots=[2, 5]), "decode_slots"),
    "slot-twice": (dict(verify_slots=[[3, 3]]), "verify_slots"),
    "offsets-fall": (dict(prefill_query_start_loc=[9, 0]), "prefill_query_start_loc"),
    "offsets-too-far": (dict(prefill_query_start_loc=[0, 10]), "prefill_query_start_loc"),
    "offsets-too-short": (dict(verify_query_start_loc=[0, 1]), "verify_query_start_loc"),
    "window": (dict(window=1), "window"),
    "token-twice": (dict(token_indices=[0, 0, *range(3, 12)]), "token_indices"),
    "start": (dict(verify_start=2), "token_indices"),
    "commit-of-nobody": (dict(commit_slots=[2], num_committed_tokens=[1]), "commit_slots"),
}


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_values_on_the_device_are_checked_under_kda_check(backend, monkeypatch, bad):
    change, named = BAD_VALUES[bad]
    change = {name: ints(value, backend.device) if isinstance(value, list) else value for name, value in change.items()}
    fields = {**whole(backend.device), **change}
    Batch(**fields)
    monkeypatch.setenv("KDA_CHECK", "1")
    Batch(**whole(backend.device))
    with pytest.raises(ValueError, match=f"{named}.*KDA_CHECK"):
        Batch(**fields)


# ------------------------------------------------------------------------------------------------------------ from vLLM


def metadata_of(rows, device="cpu", pad=0, rebased=True, prefill_checkpoints=False):
    """What vLLM 0.33's builder makes of requests in the order of `rows`: decodes before prefills, verifies anywhere.

    Its rules: beside verify rows there are no decodes (they count as prefills of one token); a row has one checkpoint at
    most; `pad` rows of no tokens and the null slot come last. rebased: whether the prefills' own fields are there, which
    vLLM added later. prefill_checkpoints: a row of checkpoints for prefills alone, as in vLLM's builder for ROCm.
    """
    spec = [row for row in rows if isinstance(row, Verify)]
    plain = [row for row in rows if not isinstance(row, Verify)]
    decodes = [] if spec else [row for row in plain if isinstance(row, Decode)]
    prefills = plain[len(decodes):]
    lens = [tokens_of(row) for row in plain] + [0] * pad
    at, places = 0, {True: [], False: []}
    for row in rows:
        places[isinstance(row, Verify)] += range(at, at + tokens_of(row))
        at += tokens_of(row)
    m = types.SimpleNamespace(
        num_prefills=len(prefills), num_prefill_tokens=sum(map(tokens_of, prefills)), num_decodes=len(decodes),
        num_decode_tokens=len(decodes), num_spec_decodes=len(spec), num_spec_decode_tokens=sum(map(tokens_of, spec)),
        num_actual_tokens=at + pad, checkpoint=None, has_initial_state=None, spec_query_start_loc=None,
        non_spec_query_start_loc=None, spec_state_indices_tensor=None, non_spec_state_indices_tensor=None,
        spec_sequence_masks=None, spec_token_indx=None, non_spec_token_indx=None, num_accepted_tokens=None)
    if plain:
        table = ints([[row.slot, 90] for row in plain] + [[0, 0]] * pad, device)
        m.non_spec_state_indices_tensor = table[:, 0]  # a column of the block table: strided
        m.non_spec_query_start_loc = ints(starts(lens), device)
    if prefills:
        m.has_initial_state = flags(*(isinstance(row, Decode) or row.has_initial_state for row in plain), *[False] * pad,
                                    device=device)
        kept = [next(iter((getattr(row, "checkpoints", None) or {0: 0}).items())) for row in plain] + [(0, 0)] * pad
        if prefill_checkpoints:
            kept = kept[len(decodes):len(plain)]
        if any(at for at, _ in kept):
            m.checkpoint = types.SimpleNamespace(checkpoint_offsets=ints([at for at, _ in kept], device),
                                                 state_indices=ints([slot for _, slot in kept], device))
        if rebased:
            m.prefill_query_start_loc = m.non_spec_query_start_loc[len(decodes):] - len(decodes)
    if spec:
        m.spec_sequence_masks = flags(*(isinstance(row, Verify) for row in rows), device=device)
        window = max(len(row.slots) for row in spec)
        m.spec_state_indices_tensor = ints([row.slots + [0] * (window - len(row.slots)) for row in spec] + [[0] * window] * pad,
                                           device)
        m.spec_query_start_loc = ints(starts([tokens_of(row) for row in spec]) + [len(places[True])] * pad, device)
        m.num_accepted_tokens = ints([row.accepted for row in spec] + [1] * pad, device)
        m.spec_token_indx = ints(places[True], device)
        m.non_spec_token_indx = ints(places[False], device, torch.int64)
    return m


def fitting(kinds):
    """`kinds` in vLLM's order and without what it does not have: empty rows, more than one checkpoint a row."""
    fit = [(kind, max(rest[0], 2), rest[1], rest[2][:1]) if kind == "prefill" else
           (kind, rest[0], max(rest[1], 1), rest[2]) if kind == "verify" else (kind,) for kind, *rest in kinds]
    order = iter(sorted((k for k in fit if k[0] != "verify"), key=lambda k: k[0]))  # decodes before prefills
    return [k if k[0] == "verify" else next(order) for k in fit]


@prop
@given(kinds=st.lists(ROWS, max_size=8), pad=st.integers(0, 2), rebased=st.booleans(), by_prefill=st.booleans(),
       check=st.booleans())
def test_vllms_metadata_give_the_batch_of_the_same_rows(kinds, pad, rebased, by_prefill, check):
    rows = made(fitting(kinds))
    if any(isinstance(row, Verify) for row in rows):  # vLLM's builder runs decodes as prefills beside verify rows
        want = Batch.of([Prefill(row.slot, 1, True) if isinstance(row, Decode) else row for row in rows])
    else:
        want = Batch.of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDA_CHECK", "1" if check else "0")
        batch = Batch.from_vllm(metadata_of(rows, pad=pad, rebased=rebased, prefill_checkpoints=by_prefill))
    got, expected = values(batch), values(want)
    for fields in (got, expected):  # vLLM has a row of checkpoints for each prefill, most of them none
        pairs = zip(fields.pop("checkpoint_offsets") or [], fields.pop("checkpoint_slots") or [])
        fields["checkpoints"] = [(at, slot) for at, slot in pairs if slot]
    for kind in ("decode", "prefill", "verify"):
        places = (torch.arange(want.num_tokens)[getattr(b, f"{kind}_tokens")].tolist() for b in (batch, want))
        assert next(places) == next(places)
    for fields in (got, expected):
        for name in ("token_indices", "verify_token_indices", "decode_start", "prefill_start", "verify_start"):
            del fields[name]
    assert got == expected


def test_vllms_buffers_are_not_copied():
    """A CUDA graph has captured their addresses; vLLM writes the next step's values there."""
    m = metadata_of([Decode(3), Decode(4)], pad=2)
    assert Batch.from_vllm(m).decode_slots.data_ptr() == m.non_spec_state_indices_tensor.data_ptr()
    m = metadata_of([Verify([3, 4], 2, 1)], pad=2)
    batch = Batch.from_vllm(m)
    assert batch.token_indices is None
    for ours, theirs in (("verify_slots", "spec_state_indices_tensor"), ("verify_query_start_loc", "spec_query_start_loc"),
                         ("num_accepted_tokens", "num_accepted_tokens")):
        assert getattr(batch, ours).data_ptr() == getattr(m, theirs).data_ptr()


@pytest.mark.parametrize("field", ["num_decodes", "num_decode_tokens", "non_spec_state_indices_tensor", "has_initial_state",
                                   "num_prefill_tokens", "spec_query_start_loc", "num_accepted_tokens", "spec_token_indx"])
def test_a_missing_field_is_named(field):
    m = metadata_of([Prefill(2, 5, True), Verify([3, 4], 2, 1)])
    delattr(m, field)
    with pytest.raises(TypeError, match=f"`metadata.{field}`: got nothing"):
        Batch.from_vllm(m)


@pytest.mark.parametrize("rows,tokens", [(2, 4), (4, 2)])
def test_decodes_alone_may_be_padded_in_rows_or_in_tokens(rows, tokens):
    m = metadata_of([Decode(3), Decode(4)], pad=2)
    m.num_decodes, m.num_decode_tokens = rows, tokens
    assert Batch.from_vllm(m).decode_slots.tolist() == [3, 4]


def test_decodes_of_several_tokens_before_prefills_are_refused():
    m = metadata_of([Decode(3), Decode(4), Prefill(5, 3, True)])
    m.num_decode_tokens = 4
    with pytest.raises(ValueError, match="num_decode_tokens"):
        Batch.from_vllm(m)
