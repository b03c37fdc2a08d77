# SPDX-License-Identifier: Apache-2.0
"""StatePool: who owns which slot, and states that survive forks, snapshots, files and new owners."""

import copy
import dataclasses
import json
import os
import sys

import pytest
import torch
from helpers import BF16, FP16, FP32, INTERPRETED, call, ints, needs_gpu, rand, randn, starts, subprocess_python

import kda
from kda.serving import (Batch, Decode, ForeignSlot, Geometry, KDAAttention, NotAllocated, OutOfSlots, PoolError, Prefill,
                         SnapshotMismatch, StatePool, Verify, load_snapshots, save_snapshots)

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

prop = settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

GEO = Geometry(HV=2, V=16, K=32, dim=160, layers=2)
PADDED = 6400  # bytes a page; the smallest for GEO is 5120


def poisoned(slots=8, geometry=GEO, device="cpu", **kwargs):
    """A pool whose memory holds NaN, padding included."""
    pool = StatePool(slots, geometry, device=device, **kwargs)
    pool.pages.fill_(-1)
    return pool


def fill(pool, slot, seed):
    """Random states in `slot`; returns copies of them, a layer each."""
    for n, (conv, ssm) in enumerate(pool.layers):
        conv[slot] = randn(*conv.shape[1:], seed=seed + 2 * n, device=pool.device).to(conv.dtype)
        ssm[slot] = randn(*ssm.shape[1:], seed=seed + 2 * n + 1, device=pool.device).to(ssm.dtype)
    return content(pool, slot)


def content(pool, slot):
    return [x[slot].clone() for layer in pool.layers for x in layer]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("page_bytes", [None, PADDED])
@pytest.mark.parametrize("geo", [
    GEO,
    Geometry(HV=3, V=20, K=40, dim=299, W=3, num_spec=2, state_dtype=BF16, conv_dtype=FP32),
    Geometry(HV=1, V=16, K=16, dim=7, W=2, layers=3, conv_dtype=FP16),
    Geometry(HV=2, V=20, K=24, dim=136, record_tokens=5, num_spec=2, layers=2),
], ids=["glm-like", "odd", "tiny", "records"])
def test_views_are_apart_and_laid_out_as_the_operations_take_them(geo, page_bytes):
    page_bytes = page_bytes and 4 * PADDED
    pool = StatePool(5, geo, page_bytes=page_bytes)
    assert len(pool.layers) == geo.layers and not pool.pages.any()
    for conv, ssm in pool.layers:
        columns = geo.W - 1 + max(geo.num_spec, geo.record_tokens)
        assert conv.shape == (5, geo.dim, columns) and conv.dtype == geo.conv_dtype
        assert ssm.shape == (5, geo.HV, geo.V, geo.K) and ssm.dtype == geo.state_dtype
        assert conv.stride()[1:] == (1, geo.dim) and ssm.stride()[1:] == (geo.V * geo.K, geo.K, 1)
        for x in (conv, ssm):
            assert x.stride(0) * x.element_size() == pool.page_bytes and x.data_ptr() % 16 == 0
            assert page_bytes in (None, pool.page_bytes)
    for records in pool.records:
        assert (records is None) == (geo.record_tokens == 0)
        if records is not None:
            assert records.shape == (5, geo.record_tokens, geo.HV, 2 * geo.K + geo.V) and records.dtype == FP32
            assert records[0].is_contiguous() and records.data_ptr() % 16 == 0
    every = [x for layer, records in zip(pool.layers, pool.records) for x in (*layer, records) if x is not None]
    views = [x[slot] for x in every for slot in range(5)]
    for n, x in enumerate(views):  # each its own mark: none may be overwritten by a later one
        x.fill_(n + 1)
    assert all((x == n + 1).all() for n, x in enumerate(views))


def test_memory_is_reported_in_bytes():
    pool = StatePool(9, GEO)
    assert (GEO.ssm_bytes, GEO.conv_bytes) == (2 * 16 * 32 * 4, 160 * 3 * 2)
    assert pool.page_bytes == 5120 >= GEO.ssm_bytes + GEO.conv_bytes
    assert pool.bytes_per_slot == 2 * 5120 and pool.nbytes == 9 * 2 * 5120 == pool.pages.untyped_storage().nbytes()
    pool.allocate(3)
    assert pool.bytes_in_use == 3 * pool.bytes_per_slot
    assert pool.snapshot(1).nbytes == 2 * (GEO.ssm_bytes + GEO.conv_bytes)
    assert str(pool.nbytes) in repr(pool)


def test_the_bytes_of_both_ways_to_speculate():
    """As `kda.speculation_bytes` counts them; in a pool each of the full states has a convolution state beside it."""
    glm = dict(HV=64, V=128, K=128, dim=3 * 64 * 128)
    bytes_of = kda.speculation_bytes(window=8, H=64, HV=64, K=128, V=128)
    full, recovery = Geometry(**glm, num_spec=7), Geometry(**glm, record_tokens=8)
    assert recovery.ssm_bytes + recovery.record_bytes + recovery.conv_bytes == bytes_of["recovery"]
    assert 8 * full.ssm_bytes + full.conv_bytes == bytes_of["full"]
    pool = StatePool(3, recovery, device="meta")
    assert pool.bytes_per_slot == bytes_of["recovery"] and pool.nbytes == 3 * pool.bytes_per_slot


def test_geometry_of_glm():
    geo = Geometry(HV=64, V=128, K=128, dim=3 * 64 * 128, layers=34)
    assert geo.ssm_bytes == 64 * 64 * 1024 and geo.conv_bytes == 24576 * 3 * 2


@pytest.mark.parametrize("field,value,error", [
    ("K", 8, ValueError), ("V", 257, ValueError), ("HV", 0, ValueError), ("W", 9, ValueError), ("num_spec", -1, ValueError),
    ("record_tokens", 9, ValueError), ("layers", 0, ValueError), ("dim", 1.5, ValueError), ("state_dtype", FP16, TypeError),
    ("conv_dtype", torch.float64, TypeError),
])
def test_a_bad_geometry_is_named(field, value, error):
    with pytest.raises(error, match=f"`{field}`"):
        dataclasses.replace(GEO, **{field: value})


@pytest.mark.parametrize("kwargs", [dict(slots=1), dict(slots=2.0), dict(page_bytes=4864), dict(page_bytes=6401)], ids=str)
def test_a_bad_pool_is_named(kwargs):
    with pytest.raises(ValueError, match=f"`{next(iter(kwargs))}`"):
        StatePool(**{**dict(slots=4, geometry=GEO), **kwargs})


# ------------------------------------------------------------------------------------------------------------ ownership


def test_every_slot_but_the_null_slot_is_handed_out_once():
    pool = StatePool(6, GEO)
    first = pool.allocate()
    assert sorted([first, *pool.allocate(4)]) == [1, 2, 3, 4, 5] == pool.in_use
    assert pool.available == 0 and all(slot in pool for slot in range(1, 6)) and 0 not in pool and 6 not in pool


def test_out_of_slots_allocates_nothing():
    pool = StatePool(4, GEO)
    pool.allocate()
    for attempt in (lambda: pool.allocate(3), lambda: pool.fork(1, 3)):
        with pytest.raises(OutOfSlots, match="3 slots were asked for and 2 of 3 are free"):
            attempt()
    assert pool.in_use == [1] and pool.allocate(0) == []
    saved = pool.snapshot(1)
    pool.allocate(2)
    with pytest.raises(RuntimeError) as caught:
        pool.restore(saved)
    assert isinstance(caught.value, PoolError)


BAD_SLOTS = {
    "null": (0, ForeignSlot), "negative": (-1, ForeignSlot), "past-the-end": (8, ForeignSlot), "free": (5, NotAllocated),
    "float": (1.0, TypeError), "bool": (True, TypeError), "tensor": (torch.tensor(1), TypeError), "none": (None, TypeError),
}


@pytest.mark.parametrize("bad", BAD_SLOTS)
@pytest.mark.parametrize("use", ["free", "free-list", "fork", "zero", "snapshot", "restore", "owned"])
def test_a_slot_that_is_not_in_use_is_refused_and_nothing_changes(use, bad):
    slot, error = BAD_SLOTS[bad]
    if (use, bad) == ("restore", "none"):
        pytest.skip("restore(slot=None) allocates")
    pool = StatePool(8, GEO)
    pool.allocate(2)
    saved, before = pool.snapshot(1), fill(pool, 1, seed=1)
    with pytest.raises(error) as caught:
        {"free-list": lambda: pool.free([1, slot]), "restore": lambda: pool.restore(saved, slot)}.get(
            use, lambda: getattr(pool, use)(slot))()
    assert error is TypeError or isinstance(caught.value, (PoolError, ValueError))
    assert pool.in_use == [1, 2] and pool.available == 5 and same(content(pool, 1), before)


def test_a_double_free_is_refused():
    pool = StatePool(8, GEO)
    a, b = pool.allocate(2)
    with pytest.raises(NotAllocated, match="every slot once"):
        pool.free([a, b, a])
    pool.free(a)
    with pytest.raises(NotAllocated, match=f"slot {a}, which is not in use"):
        pool.free(a)
    pool.free(iter([b, *pool.allocate(2)]))
    assert pool.available == 7 and pool.in_use == [] and pool.bytes_in_use == 0


def test_bookkeeping_reads_no_value_of_a_device():
    """On the meta device, where nothing has a value; and slots of freed requests are used again."""
    pool = StatePool(4, GEO, device="meta")
    a = pool.allocate(zero=True)
    b, c = pool.fork(a, 2)
    pool.zero([b, c]), pool.free([a, b])
    assert {pool.fork(c), pool.allocate()} == {a, b}


@needs_gpu
def test_bookkeeping_does_not_wait_for_the_gpu():
    pool = StatePool(6, GEO, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        a, b = pool.allocate(2, zero=True)
        pool.free([pool.fork(a), b])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_slots_of_nobody_hold_nan_under_kda_check(monkeypatch, backend):
    monkeypatch.setenv("KDA_CHECK", "1")
    pool = StatePool(4, GEO, device=backend.device)
    assert all(x.isnan().all() for layer in pool.layers for x in layer)
    a = pool.allocate(zero=True)
    assert not any(x.any() for x in content(pool, a))
    pool.free(a)
    assert all(x.isnan().all() for x in content(pool, a))


# --------------------------------------------------------------------------------------------------------------- states


def test_what_a_new_owner_finds():
    """What was there, or zeros on request."""
    pool = poisoned()
    a = pool.allocate()
    left = fill(pool, a, seed=3)
    pool.free(a)
    assert pool.allocate() == a and same(content(pool, a), left)
    pool.free(a)
    assert pool.allocate(zero=True) == a and not any(x.any() for x in content(pool, a))


OPS = ["allocate", "zeros", "write", "free", "fork", "snapshot", "restore", "restore into", "save and load"]


@prop
@given(steps=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 99)), max_size=40),
       page_bytes=st.sampled_from([None, PADDED]), state_dtype=st.sampled_from([FP32, BF16]))
def test_any_sequence_of_operations_keeps_the_states_of_live_slots(backend, tmp_path, steps, page_bytes, state_dtype):
    """Against a dict of what each slot must hold, None where that is nobody's promise."""
    geo = dataclasses.replace(GEO, state_dtype=state_dtype)
    pool = poisoned(6, geo, backend.device, page_bytes=page_bytes)
    model, saved = {}, []
    for n, (op, pick) in enumerate(steps):
        live = sorted(model)
        slot, snapshot = live[pick % len(live)] if live else None, saved[pick % len(saved)] if saved else None
        needs_slot, needs_new = op in ("write", "free", "fork", "snapshot", "restore into"), op in (
            "allocate", "zeros", "fork", "restore")
        if (needs_slot and slot is None) or (op in ("restore", "restore into", "save and load") and snapshot is None):
            continue
        if needs_new and len(model) == 5:
            with pytest.raises(OutOfSlots):
                pool.allocate()
            continue
        if op in ("allocate", "zeros"):
            new = pool.allocate(zero=op == "zeros")
            assert new not in model and 0 < new < 6
            model[new] = [torch.zeros_like(x) for x in content(pool, new)] if op == "zeros" else None
        elif op == "write":
            model[slot] = fill(pool, slot, seed=10 * n)
        elif op == "free":
            pool.free(slot)
            del model[slot]
        elif op == "fork":
            new = pool.fork(slot)
            assert new not in model
            model[new] = model[slot]
        elif op == "snapshot":
            saved.append((pool.snapshot(slot, tokens=n), model[slot]))
        elif op == "save and load":
            save_snapshots(tmp_path / "states", {str(i): s for i, (s, _) in enumerate(saved)})
            loaded = load_snapshots(tmp_path / "states")
            assert [s.tokens for s in loaded.values()] == [s.tokens for s, _ in saved]
            saved = [(s, want) for s, (_, want) in zip(loaded.values(), saved, strict=True)]
        else:
            new = pool.restore(snapshot[0], slot if op == "restore into" else None)
            assert (new == slot) if op == "restore into" else (new not in model)
            model[new] = snapshot[1]
        assert pool.in_use == sorted(model) and pool.available == 5 - len(model)
        for s, want in model.items():
            assert want is None or same(content(pool, s), want), f"slot {s} after {op}"
    assert (pool.pages[:, 0] == -1).all(), "the null slot was written"


def test_restore_writes_one_slot_and_no_padding():
    pool, other = poisoned(page_bytes=PADDED), StatePool(3, GEO)
    want = fill(other, other.allocate(), seed=5)
    slot = pool.restore(other.snapshot(1))
    assert same(content(pool, slot), want)
    assert not (pool.pages[:, slot] == -1).all()
    for conv, ssm in pool.layers:
        conv[slot].mT.view(torch.int16).fill_(-1), ssm[slot].view(torch.int16).fill_(-1)
    assert (pool.pages == -1).all(), "something besides the slot's states was written"


@needs_gpu
def test_snapshots_move_between_devices():
    cpu, gpu = poisoned(), poisoned(device="cuda", page_bytes=PADDED)
    want = fill(cpu, cpu.allocate(), seed=5)
    slot = gpu.restore(cpu.snapshot(1))
    assert same([x.cpu() for x in content(gpu, slot)], want)
    back = cpu.restore(gpu.snapshot(slot))
    assert back == 2 and same(content(cpu, back), want)


@pytest.mark.parametrize("field,value", [("layers", 1), ("HV", 4), ("V", 32), ("dim", 96), ("W", 3), ("num_spec", 1),
                                         ("state_dtype", BF16), ("conv_dtype", FP32)])
def test_states_of_another_geometry_are_refused(field, value):
    other = StatePool(4, dataclasses.replace(GEO, **{field: value}))
    foreign, pool = other.snapshot(other.allocate()), poisoned()
    slot = pool.allocate()
    for target in (None, slot):
        with pytest.raises(SnapshotMismatch, match=field):
            pool.restore(foreign, target)
    assert pool.in_use == [slot] and (pool.pages == -1).all()
    with pytest.raises(ValueError, match=field):
        save_snapshots("unwritten", {"a": foreign, "b": pool.snapshot(slot)})
    assert not os.path.exists("unwritten")


def test_a_snapshot_counts_tokens():
    pool = StatePool(3, GEO)
    slot = pool.allocate()
    assert pool.snapshot(slot).tokens == 0 and pool.snapshot(slot, tokens=7).tokens == 7
    with pytest.raises(ValueError, match="`tokens`"):
        pool.snapshot(slot, tokens=-1)


# -------------------------------------------------------------------------------------------------------- speculation

DRAFT = Geometry(HV=2, V=16, K=32, dim=160, layers=2, num_spec=2, record_tokens=3)


def test_a_fork_has_the_records_and_a_new_owner_may_have_none(backend):
    pool = poisoned(geometry=DRAFT, device=backend.device)
    a = pool.allocate()
    for n, records in enumerate(pool.records):
        records[a] = randn(*records.shape[1:], seed=n, device=pool.device)
    b = pool.fork(a)
    assert all(torch.equal(records[a], records[b]) for records in pool.records)
    pool.free(b)
    assert pool.allocate(zero=True) == b and not any(records[b].any() for records in pool.records)
    assert all(records[a].any() for records in pool.records)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_snapshot_has_the_records_applied_that_it_is_told_of(backend, accepted):
    """In every layer what kda_commit makes of the slot, which stays as it is."""
    pool = poisoned(geometry=DRAFT, device=backend.device)
    a = pool.allocate()
    fill(pool, a, seed=3)
    for n, records in enumerate(pool.records):
        records[a] = rand(*records.shape[1:], seed=n, device=pool.device)
    before = pool.pages.clone()
    saved = pool.snapshot(a, 7, accepted=accepted)
    assert torch.equal(pool.pages, before) and saved.tokens == 7
    for states, records in zip(pool.layers, pool.records):
        kda.kda_commit(*states, records, ints([a], pool.device), ints([accepted], pool.device))
    b = pool.restore(saved)
    assert same(content(pool, b), content(pool, a)) and (accepted == 0) == torch.equal(pool.pages[:, a], before[:, a])


@pytest.mark.parametrize("geometry,accepted", [(DRAFT, None), (DRAFT, 4), (DRAFT, -1), (DRAFT, True), (DRAFT, 1.0), (GEO, 0),
                                               (GEO, 1)])
def test_a_snapshot_that_leaves_records_open_is_refused(geometry, accepted):
    pool = poisoned(geometry=geometry)
    with pytest.raises(ValueError, match="`accepted`"):
        pool.snapshot(pool.allocate(), accepted=accepted)


def test_settled_full_states_are_a_plain_request(backend):
    """The state after the last token accepted goes to the first slot, and its convolution state is moved to the front."""
    pool = poisoned(geometry=dataclasses.replace(DRAFT, record_tokens=0), device=backend.device)
    for accepted in (1, 2, 3):
        slots = pool.allocate(3)
        want = [fill(pool, slot, seed=slot) for slot in slots]
        others = pool.pages[:, slots[1:]].clone()
        pool.settle(slots, accepted)
        for n, (conv, ssm) in enumerate(pool.layers):
            assert torch.equal(ssm[slots[0]], want[accepted - 1][2 * n + 1])
            assert torch.equal(conv[slots[0], :, :3], want[0][2 * n][:, accepted - 1:accepted + 2])
        assert torch.equal(pool.pages[:, slots[1:]], others)
        pool.free(slots)


@pytest.mark.parametrize("slots,accepted,error", [([1, 2, 3], 0, ValueError), ([1, 2, 3], 4, ValueError),
                                                  ([1, 2], 3, ValueError), ([1, 2, 3], None, ValueError),
                                                  ([1, 7], 1, NotAllocated)])
def test_what_cannot_be_settled_is_refused_and_nothing_changes(slots, accepted, error):
    pool = poisoned(geometry=DRAFT)
    pool.allocate(3)
    with pytest.raises(error):
        pool.settle(slots, accepted)
    assert (pool.pages == -1).all()


# ---------------------------------------------------------------------------------------------------------------- files


def two_snapshots():
    pool = poisoned()
    for slot in pool.allocate(2):
        fill(pool, slot, seed=slot)
    pool.layers[0].ssm_state[1, 0, 0, :2] = torch.tensor([float("nan"), float("-inf")])
    return {"a": pool.snapshot(1, tokens=3), "with.dots": pool.snapshot(2, tokens=4)}


def test_a_file_holds_snapshots_to_the_bit(tmp_path):
    saved = two_snapshots()
    save_snapshots(tmp_path / "states", saved)
    loaded = load_snapshots(str(tmp_path / "states"))
    assert list(loaded) == ["a", "with.dots"] and os.listdir(tmp_path) == ["states"]
    for name, snapshot in loaded.items():
        assert snapshot.geometry == GEO and snapshot.tokens == saved[name].tokens
        for field in ("conv_state", "ssm_state"):
            got, want = getattr(snapshot, field), getattr(saved[name], field)
            assert got.dtype == want.dtype and torch.equal(got.view(torch.int16), want.view(torch.int16))


def rewritten(path, tensors=lambda t: None, metadata=lambda m: None):
    """The file again, after changes to its tensors and metadata."""
    import safetensors.torch

    with safetensors.safe_open(path, framework="pt") as file:
        about, held = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}
    tensors(held), metadata(about)
    safetensors.torch.save_file(held, path, metadata=about)


def geometry_with(**fields):
    return lambda about: about.update(geometry=json.dumps({**json.loads(about["geometry"]), **fields}))


BROKEN = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a file of tensors" * 10),
    "foreign": lambda path: rewritten(path, metadata=lambda about: about.clear()),
    "version": lambda path: rewritten(path, metadata=lambda about: about.update(version="2")),
    "tensor-missing": lambda path: rewritten(path, tensors=lambda held: held.pop("a.ssm_state")),
    "tensor-dtype": lambda path: rewritten(path, tensors=lambda t: t.update({"a.ssm_state": t["a.ssm_state"].to(BF16)})),
    "tensor-shape": lambda path: rewritten(path, tensors=lambda t: t.update({"a.conv_state": t["a.conv_state"][:1]})),
    "no-tokens": lambda path: rewritten(path, metadata=lambda about: about.pop("tokens")),
    "bad-tokens": lambda path: rewritten(path, metadata=lambda about: about.update(tokens='{"a": -1}')),
    "bad-json": lambda path: rewritten(path, metadata=lambda about: about.update(geometry="{")),
    "list": lambda path: rewritten(path, metadata=lambda about: about.update(tokens="[]")),
    "geometry-lies": lambda path: rewritten(path, metadata=geometry_with(K=64)),
    "geometry-dtype": lambda path: rewritten(path, metadata=geometry_with(state_dtype="float64")),
    "geometry-field": lambda path: rewritten(path, metadata=geometry_with(heads=3)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_of_something_else_is_refused(tmp_path, broken):
    path = tmp_path / "states"
    save_snapshots(path, two_snapshots())
    BROKEN[broken](path)
    with pytest.raises(SnapshotMismatch, match="states is no file of KDA states"):
        load_snapshots(path)


def test_a_missing_file_and_nothing_to_save(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_snapshots(tmp_path / "none")
    with pytest.raises(ValueError, match="`snapshots`"):
        save_snapshots(tmp_path / "none", {})


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    import safetensors.torch

    path, saved = tmp_path / "states", two_snapshots()
    save_snapshots(path, saved)
    before = path.read_bytes()

    def interrupted(tensors, filename, metadata):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", interrupted)
    with pytest.raises(OSError, match="disk full"):
        save_snapshots(path, saved)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["states"]


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    saved = two_snapshots()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for attempt in (lambda: save_snapshots(tmp_path / "states", saved), lambda: load_snapshots(tmp_path / "states")):
        with pytest.raises(ImportError, match="pip install safetensors"):
            attempt()


def test_the_package_imports_neither_safetensors_nor_triton():
    code = "import sys, kda.serving; print([m for m in ('safetensors', 'triton', 'kda.ops') if m in sys.modules])"
    result = subprocess_python(code)
    assert result.returncode == 0 and result.stdout.strip() == "[]", result.stdout + result.stderr


# ------------------------------------------------------------------------------------------------------------- requests


class Layer:
    """Two layers' parameters, and requests that run through them on a pool's states."""

    def __init__(self, device, dtype=BF16, state_dtype=FP32):
        self.device, self.dtype = device, dtype
        self.geo = dataclasses.replace(GEO, state_dtype=state_dtype, conv_dtype=dtype)
        self.weights = [
            dict(conv_weight=randn(160, 4, seed=70 + n, scale=0.5, device=device), norm_weight=torch.ones(16, device=device),
                 A_log=rand(2, seed=72 + n, device=device), g_bias=randn(64, seed=74 + n, device=device))
            for n in range(self.geo.layers)
        ]

    def pool(self, **kwargs):
        return poisoned(8, self.geo, self.device, **kwargs)

    def tokens(self, T, seed):
        put = dict(dtype=self.dtype, device=self.device)
        return dict(qkv=randn(T, 160, seed=seed, **put), raw_g=randn(T, 2, 32, seed=seed + 1, **put),
                    beta=randn(T, 2, seed=seed + 2, **put), out_gate=randn(T, 2, 16, seed=seed + 3, **put))

    def prefill(self, pool, rows, checkpoints=()):
        """rows: (tokens, slot, has_initial_state); checkpoints: (position, slot). Returns [layers, T, HV, V]."""
        x = {name: torch.cat([row[0][name] for row in rows]) for name in rows[0][0]}
        lens, flags = [len(row[0]["beta"]) for row in rows], [row[2] for row in rows]
        kept = dict(checkpoint_offsets=ints([at for at, _ in checkpoints], self.device),
                    checkpoint_indices=ints([slot for _, slot in checkpoints], self.device)) if checkpoints else {}
        return torch.stack([
            call(kda.kda_prefill, **x, **layer._asdict(), written=("conv_state", "ssm_state"),
                 ssm_state_indices=ints([row[1] for row in rows], self.device), cu_seqlens=ints(starts(lens), self.device),
                 has_initial_state=torch.tensor(flags, device=self.device), **weights, **kept)
            for layer, weights in zip(pool.layers, self.weights, strict=True)])

    def decode(self, pool, x, slot):
        """The tokens of one request, one by one, beside a padding row."""
        steps = []
        for t in range(len(x["beta"])):
            now = {name: torch.cat([v[t:t + 1], torch.full_like(v[:1], float("nan"))]) for name, v in x.items()}
            steps.append(torch.stack([
                call(kda.kda_decode, **now, **layer._asdict(), written=("conv_state", "ssm_state"),
                     ssm_state_indices=ints([slot, 0], self.device), **weights)[:1]
                for layer, weights in zip(pool.layers, self.weights, strict=True)]))
        return torch.cat(steps, 1) if steps else None


def cut(x, a, b):
    return {name: v[a:b] for name, v in x.items()}


@settings(prop, max_examples=2 if INTERPRETED else 12)
@given(prompt=st.integers(1, 40), decoded=st.integers(0, 3), inside=st.booleans(), by_file=st.booleans(), more=st.booleans(),
       dtypes=st.sampled_from([(BF16, FP32), (FP32, FP32), (BF16, BF16)]), data=st.data())
def test_a_restored_snapshot_goes_on_exactly_as_the_original(backend, tmp_path, prompt, decoded, inside, by_file, more,
                                                             dtypes, data):
    """Taken after any token, inside the prompt too; the original ends and its slots are taken over meanwhile."""
    layer = Layer(backend.device, *dtypes)
    pool, other = layer.pool(), layer.pool(page_bytes=PADDED)
    x = layer.tokens(prompt + 6, seed=data.draw(st.integers(0, 9)) * 10)
    slot, kept, busy = pool.allocate(3)
    at = data.draw(st.integers(1, prompt)) if inside else prompt + decoded
    layer.prefill(pool, [(cut(x, 0, prompt), slot, False), (layer.tokens(5, seed=99), busy, False)],
                  [(at, kept)] if inside else [])
    if inside:
        slot = kept
    else:
        layer.decode(pool, cut(x, prompt, at), slot)

    saved = pool.snapshot(slot, tokens=at)
    if by_file:
        save_snapshots(tmp_path / "states", {"request": saved})
        saved = load_snapshots(tmp_path / "states")["request"]
    rest = cut(x, saved.tokens, prompt + 6)

    def run(pool, slot):
        return layer.prefill(pool, [(rest, slot, True)]) if more else layer.decode(pool, rest, slot)

    want = run(pool, slot)
    want_states = content(pool, slot)
    pool.free(pool.in_use)
    for target in (pool, other):
        for taken in target.allocate(3):  # other requests come and use the slots
            fill(target, taken, seed=taken)
        restored = target.restore(saved)
        assert torch.equal(run(target, restored), want) and same(content(target, restored), want_states)
    assert torch.isfinite(want).all()


@settings(prop, max_examples=2 if INTERPRETED else 8)
@given(prompt=st.integers(1, 40), before=st.integers(1, 40), n=st.integers(2, 4))
def test_forks_go_on_on_their_own(backend, prompt, before, n):
    """Each fork decodes other tokens; each equals a request that had the prompt to itself."""
    layer = Layer(backend.device)
    pool, fresh = layer.pool(), layer.pool()
    x = layer.tokens(prompt, seed=before)
    slot = pool.allocate()
    layer.prefill(pool, [(x, slot, False)])
    family = [slot, *pool.fork(slot, n)]
    for seed, member in enumerate(family):
        more = layer.tokens(2, seed=200 + 10 * seed)
        alone = fresh.allocate()
        layer.prefill(fresh, [(x, alone, False)])
        assert torch.equal(layer.decode(pool, more, member), layer.decode(fresh, more, alone))
        assert same(content(pool, member), content(fresh, alone))


@settings(prop, max_examples=2 if INTERPRETED else 8)
@given(prompt=st.integers(0, 40), poison=st.booleans(), dtypes=st.sampled_from([(BF16, FP32), (FP32, BF16)]))
def test_a_new_request_in_a_reused_slot_equals_one_in_a_fresh_slot(backend, prompt, poison, dtypes):
    """With a prompt its flag starts it from zeros; one that only decodes asks the pool for zeros."""
    layer = Layer(backend.device, *dtypes)
    used, fresh = layer.pool(), StatePool(8, layer.geo, device=backend.device)
    slot = used.allocate()
    if not poison:
        layer.prefill(used, [(layer.tokens(30, seed=1), slot, False)])
    used.free(slot)
    outputs = []
    for pool in (used, fresh):
        slot = pool.allocate(zero=not prompt)
        parts = [layer.prefill(pool, [(layer.tokens(prompt, seed=2), slot, False)])] if prompt else []
        outputs.append((torch.cat([*parts, layer.decode(pool, layer.tokens(3, seed=3), slot)], 1), content(pool, slot)))
    (o, states), (want_o, want_states) = outputs
    assert torch.equal(o, want_o) and same(states, want_states) and torch.isfinite(o).all()


# -------------------------------------------------------------------------------------------------------------- compilation


@pytest.mark.parametrize("conv_dtype, layers", [(BF16, 1), (FP32, 2)], ids=["two dtypes", "two layers"])
@torch.no_grad()
def test_a_graph_writes_all_states_of_a_pool(backend, conv_dtype, layers):
    """torch.compile refuses tensors of one storage that are both written; the memory is one, and so are the values."""
    model = [KDAAttention(48, 2, 32, dtype=FP32, device=backend.device) for _ in range(layers)]
    for seed, parameter in enumerate(p for layer in model for p in layer.parameters()):
        parameter.copy_(randn(*parameter.shape, seed=seed, scale=0.2))
    geometry = model[0].geometry(layers=layers, conv_dtype=conv_dtype, record_tokens=3)
    pools = [StatePool(4, geometry, device=backend.device) for _ in range(2)]
    a, b = [pool.allocate(2) for pool in pools][0]

    def step(x, batch, pool):
        for layer, states, records in zip(model, pool.layers, pool.records):
            x = x + layer(x, batch, states, records)
        return x

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in ([Prefill(a, 9), Prefill(b, 4)], [Decode(a), Verify(b, 3, 0)]):
        batch = Batch.of(rows, pool=pools[0])
        x = randn(batch.num_tokens, 48, seed=len(rows), device=backend.device)
        want = step(x, batch, pools[0])
        assert torch.equal(compiled(x, batch, pools[1]), want) and want.isfinite().all()
        assert torch.equal(pools[0].pages, pools[1].pages)


def test_a_copy_has_states_in_pages_of_its_own(tmp_path):
    pool = poisoned()
    slot = pool.allocate()
    want = fill(pool, slot, seed=1)
    torch.save(pool, tmp_path / "pool")
    for twin in (copy.deepcopy(pool), torch.load(tmp_path / "pool", weights_only=False)):
        assert same(content(twin, slot), want) and twin.in_use == [slot]
        fork = twin.fork(slot)
        twin.zero(slot)
        assert same(content(twin, fork), want) and not any(x.any() for x in content(twin, slot))
        assert same(content(pool, slot), want) and twin.available == pool.available - 1
