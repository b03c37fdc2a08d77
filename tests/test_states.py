# SPDX-License-Identifier: Apache-2.0
"""gather_initial_states and scatter_states: rows of the state pools."""

import pytest
import torch
from helpers import BF16, FP16, FP32, call, dtype_id, ints, on_backends, randn

import kda

NAN = float("nan")


def recurrent_pool(slots, pad=0, H=2, V=24, K=16, dtype=FP32, device="cpu"):
    """[slots, H, V, K]; `pad` elements between two slots, as a page pool leaves them."""
    size = H * V * K
    backing = randn(slots, size + pad, seed=1, device=device).to(dtype)
    return backing[:, :size].unflatten(-1, (H, V, K))


def conv_pool(slots, dim_last, dim=40, length=3, pad=0, dtype=BF16, device="cpu"):
    """[slots, dim, W - 1], stored either way round."""
    backing = randn(slots, dim * length + pad, seed=2, device=device).to(dtype)[:, :dim * length]
    return backing.unflatten(-1, (length, dim)).transpose(1, 2) if dim_last else backing.unflatten(-1, (dim, length))


POOLS = {
    "recurrent": lambda slots, dev: recurrent_pool(slots, device=dev),
    "recurrent-bf16": lambda slots, dev: recurrent_pool(slots, dtype=BF16, device=dev),
    "recurrent-paged": lambda slots, dev: recurrent_pool(slots, pad=32, device=dev),
    "recurrent-odd-page": lambda slots, dev: recurrent_pool(slots, pad=5, device=dev),
    "conv-dim-last": lambda slots, dev: conv_pool(slots, True, device=dev),
    "conv-dim-first": lambda slots, dev: conv_pool(slots, False, device=dev),
    "conv-dim-last-paged": lambda slots, dev: conv_pool(slots, True, pad=7, device=dev),
    "conv-fp16": lambda slots, dev: conv_pool(slots, False, dtype=FP16, device=dev),
}
each_pool = pytest.mark.parametrize("pool", POOLS)


@each_pool
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_gather_gives_the_rows_of_the_indices(backend, pool, index_dtype):
    state = POOLS[pool](7, backend.device)
    indices = ints([3, 6, 1], backend.device, index_dtype)
    rows = call(kda.gather_initial_states, state, indices, torch.ones(3, dtype=torch.bool, device=backend.device))
    assert rows.dtype == state.dtype
    assert torch.equal(rows, state[indices.long()])


@each_pool
def test_gather_starts_from_zeros_without_an_initial_state_whatever_the_slot_held(backend, pool):
    """No initial state, a null slot and a slot past the pool give zeros, also where the pool holds NaN and Inf."""
    state = POOLS[pool](5, backend.device)
    want = state[3].clone()
    state[0], state[1], state[2], state[4] = NAN, NAN, float("inf"), -float("inf")
    has = torch.tensor([True, False, False, True, True, True], device=backend.device)
    rows = call(kda.gather_initial_states, state, ints([3, 1, 2, 0, -1, 5], backend.device), has)
    assert torch.equal(rows[0], want)
    assert torch.equal(rows[1:], torch.zeros_like(rows[1:]))


@each_pool
def test_scatter_writes_the_rows_of_the_indices_and_no_other(backend, pool):
    state = POOLS[pool](7, backend.device)
    src = POOLS[pool](4, backend.device) * 2.0
    want = state.clone()
    want[5], want[2], want[1] = src[0], src[2], src[3]
    backing = torch.empty(0, dtype=state.dtype, device=state.device).set_(state.untyped_storage())
    gaps = torch.ones_like(backing, dtype=torch.bool)
    gaps.as_strided(state.shape, state.stride()).fill_(False)
    between = backing[gaps].clone()
    indices = ints([5, 0, 2, 1], backend.device)
    before = src.clone()
    assert kda.scatter_states(state, src, indices) is None
    assert torch.equal(state, want) and torch.equal(src, before)
    assert torch.equal(backing[gaps], between), "the gaps between two slots were written"


@each_pool
def test_scatter_skips_null_and_out_of_range_rows(backend, pool):
    state = POOLS[pool](4, backend.device)
    src = torch.full_like(POOLS[pool](5, backend.device), NAN)
    src[2] = 1.5
    want = state.clone()
    want[3] = 1.5
    kda.scatter_states(state, src, ints([0, -1, 3, 4, 1000], backend.device))
    assert torch.equal(state, want)


@pytest.mark.parametrize("state_dtype,src_dtype", [(BF16, FP32), (FP32, BF16), (BF16, FP16)])
def test_scatter_converts_to_the_pool_dtype(backend, state_dtype, src_dtype):
    state = recurrent_pool(4, dtype=state_dtype, device=backend.device)
    src = randn(2, 2, 24, 16, seed=3, dtype=src_dtype, device=backend.device)
    kda.scatter_states(state, src, ints([3, 1], backend.device))
    assert torch.equal(state[3], src[0].to(state_dtype)) and torch.equal(state[1], src[1].to(state_dtype))


def test_strided_indices_are_read_in_place(backend):
    """The first column of a [N, window] index table."""
    state = recurrent_pool(6, device=backend.device)
    table = torch.full((3, 4), 2, dtype=torch.int32, device=backend.device)
    table[:, 0] = ints([5, 1, 3], backend.device)
    has = torch.ones(3, dtype=torch.bool, device=backend.device)
    rows = call(kda.gather_initial_states, state, table[:, 0], has)
    assert torch.equal(rows, state[[5, 1, 3]])
    before = state.clone()
    kda.scatter_states(state, rows + 1.0, table[:, 0])
    assert torch.equal(state[[5, 1, 3]], rows + 1.0)
    assert torch.equal(state[[0, 2, 4]], before[[0, 2, 4]])


@each_pool
def test_gather_then_scatter_moves_requests_between_slots(backend, pool):
    state = POOLS[pool](8, backend.device)
    before = state.clone()
    has = torch.ones(3, dtype=torch.bool, device=backend.device)
    kda.scatter_states(state, kda.gather_initial_states(state, ints([1, 2, 3], backend.device), has),
                       ints([5, 6, 7], backend.device))
    assert torch.equal(state[5:8], before[1:4]) and torch.equal(state[:5], before[:5])


def test_no_rows_is_no_work(backend):
    state = recurrent_pool(4, device=backend.device)
    before = state.clone()
    none = ints([], backend.device)
    rows = kda.gather_initial_states(state, none, torch.empty(0, dtype=torch.bool, device=backend.device))
    assert rows.shape == (0, *state.shape[1:])
    kda.scatter_states(state, rows, none)
    assert torch.equal(state, before)


@on_backends("slots,rows", [(4, 2)], [(40, 33)], [(3000, 2500)])
def test_real_geometry_round_trip(backend, slots, rows):
    """Rows of 2 heads x 128 x 128: longer than any block of the kernels."""
    state = recurrent_pool(slots, H=2, V=128, K=128, device=backend.device)
    order = torch.randperm(slots - 1, generator=torch.Generator().manual_seed(0))[:rows].to(backend.device) + 1
    got = kda.gather_initial_states(state, order, torch.ones(rows, dtype=torch.bool, device=backend.device))
    assert torch.equal(got, state[order])
    target = torch.zeros_like(state)
    kda.scatter_states(target, got, order)
    assert torch.equal(target[order], state[order]) and not target[0].any()
