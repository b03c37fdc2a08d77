# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d_fn (varlen prefill) and causal_conv1d_update (decode, speculative window)."""

import oracle
import pytest
import torch
from helpers import (BF16, FP16, FP32, assert_accurate, assert_only_view_written, call, dtype_id, each_dtype, frame,
                     gpu_subset, ints, on_backends, randn, starts)

import kda

NAN = float("nan")
RAGGED = (0, 1, 2, 3, 5, 15, 16, 17, 0)
LONG = (63, 64, 65, 130, 1, 0)
GPU_LONG = (1300, 0, 547, 2, 199)


def tokens(dim, lens, dtype, device, seed=0, tail=0):
    """x [dim, T + tail] as a merged projection gives it: [T, dim] transposed; the tail is NaN."""
    x = randn(sum(lens) + tail, dim, seed=seed, dtype=dtype, device=device)
    x[sum(lens):] = NAN
    return x.T


def conv_pool(slots, dim, length, dtype, device, seed=50, dim_last=True):
    """[slots, dim, length], stored either way round."""
    states = randn(slots, dim, length, seed=seed, dtype=dtype, device=device)
    return states.transpose(1, 2).contiguous().transpose(1, 2) if dim_last else states


def expected(x, weight, bias, states, lens, slots, fresh, activation=True):
    """Outputs [dim, T] in fp64 and the states that every sequence leaves, from copies of what the op gets."""
    W = weight.shape[1]
    out, left = torch.zeros(x.shape, dtype=torch.float64, device=x.device), {}
    rounded = x if states is None else x.to(states.dtype)
    for n, (bos, length) in enumerate(zip(starts(lens), lens)):
        history = torch.zeros(x.shape[0], W - 1, dtype=torch.float64, device=x.device)
        if not fresh[n]:
            history = states[slots[n], :, :W - 1].double()
        out[:, bos:bos + length], left[slots[n]] = oracle.conv(rounded[:, bos:bos + length], weight, bias, history,
                                                               activation)
    return out, left


def assert_states(states, before, left, W):
    """Columns 0 .. W-2 of the written slots are exactly the last tokens; every other element is as it was."""
    want = before.clone()
    for slot, history in left.items():
        want[slot, :, :W - 1] = history.to(want.dtype)
    assert torch.equal(states.nan_to_num(3e4), want.nan_to_num(3e4))


# ----------------------------------------------------------------------------------------------------------- prefill


@gpu_subset(lambda dim_last, dtype, W, **_: dim_last and (dtype == BF16 or W == 4))
@each_dtype
@pytest.mark.parametrize("dim_last", [True, False], ids=["state-dim-last", "state-dim-first"])
@on_backends("lens,dim,W", [(RAGGED, 24, 4), (RAGGED, 40, 2), (RAGGED, 16, 8)],
             [(LONG, 384, 4), (LONG, 100, 3), (LONG, 64, 5)], [(GPU_LONG, 6144, 4), (LONG, 1000, 6)],
             ids=lambda c: f"T{sum(c[0])}-dim{c[1]}-W{c[2]}")
def test_prefill_equals_the_oracle_and_leaves_the_last_tokens_as_state(backend, lens, dim, W, dim_last, dtype):
    x = tokens(dim, lens, dtype, backend.device)
    weight, bias = randn(dim, W, seed=2, device=backend.device), randn(dim, seed=3, device=backend.device)
    N = len(lens)
    states = conv_pool(N + 4, dim, W - 1, dtype, backend.device, dim_last=dim_last)
    slots = [N + 3 - n for n in range(N)]
    fresh = [n % 2 == 1 for n in range(N)]
    before = states.clone()
    want, left = expected(x, weight, bias, before, lens, slots, fresh)
    out = call(kda.causal_conv1d_fn, x, weight, bias, conv_states=states, query_start_loc=ints(starts(lens), x.device),
               cache_indices=ints(slots, x.device), has_initial_state=~torch.tensor(fresh, device=x.device),
               activation="silu", written=("conv_states",))
    assert out.dtype == dtype and out.shape == x.shape
    assert_accurate(out, want, dtype)
    assert_states(states, before, left, W)


@pytest.mark.parametrize("activation", [None, "silu", "swish", True, False])
def test_prefill_activation_names(backend, activation):
    lens, dim = (3, 6), 16
    x, weight = tokens(dim, lens, FP32, backend.device), randn(dim, 4, seed=2, device=backend.device)
    out = kda.causal_conv1d_fn(x, weight, None, None, ints(starts(lens), x.device), activation=activation)
    want, _ = expected(x, weight, None, None, lens, [1, 2], [True, True], activation in ("silu", "swish", True))
    assert_accurate(out, want, FP32)


def test_prefill_activation_defaults_to_silu(backend):
    lens, dim = (3, 6), 16
    x, weight = tokens(dim, lens, FP32, backend.device), randn(dim, 4, seed=2, device=backend.device)
    out = kda.causal_conv1d_fn(x, weight, None, None, ints(starts(lens), x.device))
    assert_accurate(out, expected(x, weight, None, None, lens, [1, 2], [True, True])[0], FP32)


@pytest.mark.parametrize("weight_dtype", [FP32, BF16, FP16], ids=dtype_id)
def test_prefill_takes_weights_of_another_dtype_and_any_stride(backend, weight_dtype):
    lens, dim = (5, 9), 24
    x = tokens(dim, lens, BF16, backend.device)
    weight = randn(4, dim, seed=2, dtype=weight_dtype, device=backend.device).T
    bias = randn(dim, seed=3, dtype=weight_dtype, device=backend.device)
    out = call(kda.causal_conv1d_fn, x, weight, bias, None, ints(starts(lens), x.device))
    assert_accurate(out, expected(x, weight, bias, None, lens, [1, 2], [True, True])[0], BF16)


def test_prefill_without_indices_uses_row_n_for_sequence_n(backend):
    """cache_indices None: row 0 is a row like any other; has_initial_state None: no sequence has one."""
    lens, dim = (5, 0, 2), 16
    x, weight = tokens(dim, lens, BF16, backend.device), randn(dim, 4, seed=2, device=backend.device)
    states = torch.full((3, dim, 3), NAN, dtype=BF16, device=x.device)
    before = states.clone()
    out = kda.causal_conv1d_fn(x, weight, None, states, ints(starts(lens), x.device))
    want, left = expected(x, weight, None, before, lens, [0, 1, 2], [True] * 3)
    assert_accurate(out, want, BF16)
    assert_states(states, before, left, 4)


def test_prefill_leaves_columns_beyond_the_window_alone(backend):
    """A pool with room for speculative tokens is longer than W - 1: those columns are neither read nor written."""
    lens, dim, W = (6, 1, 0), 16, 4
    x, weight = tokens(dim, lens, BF16, backend.device), randn(dim, W, seed=2, device=backend.device)
    states = conv_pool(5, dim, W - 1 + 3, BF16, backend.device)
    states[:, :, W - 1:] = NAN
    before = states.clone()
    out = kda.causal_conv1d_fn(x, weight, None, states, ints(starts(lens), x.device), ints([3, 1, 4], x.device),
                               torch.tensor([True, True, True], device=x.device))
    want, left = expected(x, weight, None, before, lens, [3, 1, 4], [False] * 3)
    assert_accurate(out, want, BF16)
    assert_states(states, before, left, W)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_prefill_padding_rows_give_zeros_and_touch_no_state(backend, index_dtype):
    """Slot 0, -1 and a slot past the pool mark padding; the tail past the last sequence is zero, even from NaN."""
    lens, dim = (4, 3, 5, 2), 16
    x, weight = tokens(dim, lens, BF16, backend.device, tail=6), randn(dim, 4, seed=2, device=backend.device)
    x[:, 4:12] = NAN  # what padding rows hold is not to be looked at
    states = conv_pool(6, dim, 3, BF16, backend.device)
    before = states.clone()
    wide = torch.full((4, 2), 3, dtype=index_dtype, device=x.device)
    wide[:, 0] = torch.tensor([5, 0, -1, 6], device=x.device)
    out = kda.causal_conv1d_fn(x, weight, None, states, ints(starts(lens), x.device, index_dtype), wide[:, 0],
                               torch.ones(4, dtype=torch.bool, device=x.device))
    want, left = expected(x[:, :4], weight, None, before, lens[:1], [5], [False])
    assert_accurate(out[:, :4], want, BF16)
    assert torch.equal(out[:, 4:], torch.zeros_like(out[:, 4:]))
    assert_states(states, before, left, 4)


def test_prefill_takes_other_padding_ids(backend):
    lens, dim = (4, 3), 16
    x, weight = tokens(dim, lens, BF16, backend.device), randn(dim, 4, seed=2, device=backend.device)
    states = conv_pool(4, dim, 3, BF16, backend.device)
    before = states.clone()
    out = kda.causal_conv1d_fn(x, weight, None, states, ints(starts(lens), x.device), ints([2, 3], x.device),
                               pad_slot_id=3, null_block_id=0)
    assert torch.equal(out[:, 4:], torch.zeros_like(out[:, 4:])) and not torch.equal(out[:, :4], out[:, :4] * 0)
    assert torch.equal(states[3], before[3]) and not torch.equal(states[2], before[2])


@each_dtype
@pytest.mark.parametrize("layout", ["column-slice", "odd-column-slice", "channel-major"])
def test_prefill_strides_do_not_change_a_bit(backend, layout, dtype):
    lens, dim = (7, 18), 24
    x = tokens(dim, lens, dtype, backend.device)
    weight = randn(dim, 4, seed=2, device=backend.device)
    view = {
        "column-slice": lambda: frame(x.T[None], before=32, after=32)[0].T,
        "odd-column-slice": lambda: frame(x.T[None], before=3, after=6)[0].T,
        "channel-major": lambda: x.contiguous(),
    }[layout]()
    assert view.stride() != x.stride()
    runs = []
    for t, dim_last in ((x, True), (view, False)):
        states = conv_pool(4, dim, 3, dtype, backend.device, dim_last=dim_last)
        out = call(kda.causal_conv1d_fn, t, weight, None, conv_states=states,
                   query_start_loc=ints(starts(lens), x.device), cache_indices=ints([2, 1], x.device),
                   has_initial_state=torch.tensor([True, False], device=x.device), written=("conv_states",))
        runs.append((out, states))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (5, 17), (0, 16, 18)])
@pytest.mark.parametrize("dtype,state_dtype", [(BF16, BF16), (FP32, FP32), (FP32, BF16), (BF16, FP32)],
                         ids=["bf16", "fp32", "fp32-over-bf16", "bf16-over-fp32"])
def test_prefill_cut_anywhere_is_the_uncut_one_bit_for_bit(backend, cuts, dtype, state_dtype):
    """Tokens pass through the state's dtype before use, so that it does not matter where they were when used."""
    T, dim = 21, 16
    x, weight = tokens(dim, (T,), dtype, backend.device), randn(dim, 4, seed=2, device=backend.device)
    whole, pieces = (conv_pool(3, dim, 3, state_dtype, backend.device) for _ in range(2))
    index, first = ints([2], x.device), torch.tensor([True], device=x.device)
    want = kda.causal_conv1d_fn(x, weight, None, whole, ints([0, T], x.device), index, first)
    got = [kda.causal_conv1d_fn(x[:, a:b], weight, None, pieces, ints([0, b - a], x.device), index, first)
           for a, b in zip((0, *cuts), (*cuts, T))]
    assert torch.equal(torch.cat(got, 1), want)
    assert torch.equal(pieces, whole)


@each_dtype
def test_prefill_output_does_not_depend_on_neighbours(backend, dtype):
    """A sequence gives the same bits alone, and beside NaN neighbours at another place."""
    dim, weight = 16, randn(16, 4, seed=2, device=backend.device)
    x = tokens(dim, (9,), dtype, backend.device)
    states = conv_pool(5, dim, 3, dtype, backend.device)
    alone = kda.causal_conv1d_fn(x, weight, None, states.clone(), ints([0, 9], x.device), ints([2], x.device),
                                 torch.tensor([True], device=x.device))
    bad = torch.full((dim, 5), NAN, dtype=dtype, device=x.device)
    packed = torch.cat([bad, x, bad[:, :2]], 1).T.contiguous().T
    pool = torch.full_like(states, NAN)
    pool[2] = states[2]
    out = kda.causal_conv1d_fn(packed, weight, None, pool, ints([0, 5, 14, 16], x.device), ints([1, 2, 3], x.device),
                               torch.tensor([True, True, False], device=x.device))
    assert torch.equal(out[:, 5:14], alone)


# ------------------------------------------------------------------------------------------------------------ decode


def layout_3d(x, kind):
    """[batch, dim, seqlen] stored batch-major, or token-major inside ([batch, seqlen, dim] transposed)."""
    return x.contiguous() if kind == "dim-major" else x.transpose(1, 2).contiguous().transpose(1, 2)


@each_dtype
@on_backends("batch,dim,seqlen,W,L", [(3, 24, 1, 4, 3), (2, 16, 5, 4, 3), (2, 16, 2, 2, 1), (2, 16, 3, 8, 9)],
             [(33, 384, 1, 4, 3), (5, 100, 9, 3, 4)], [(256, 6144, 1, 4, 3), (7, 1000, 4, 5, 7)],
             ids=lambda c: f"N{c[0]}-dim{c[1]}-T{c[2]}-W{c[3]}-L{c[4]}")
def test_update_equals_the_oracle_and_shifts_the_state(backend, batch, dim, seqlen, W, L, dtype):
    for kind, dim_last in (("dim-major", True), ("token-major", False)):
        x = layout_3d(randn(batch, dim, seqlen, seed=1, dtype=dtype, device=backend.device), kind)
        weight, bias = randn(dim, W, seed=2, device=backend.device), randn(dim, seed=3, device=backend.device)
        states = conv_pool(batch + 3, dim, L, dtype, backend.device, dim_last=dim_last)
        states[:, :, W - 1:] = NAN
        slots = [batch + 2 - n for n in range(batch)]
        before = states.clone()
        out = call(kda.causal_conv1d_update, x, conv_state=states, weight=weight, bias=bias, activation="silu",
                   conv_state_indices=ints(slots, x.device), written=("conv_state",))
        assert out.shape == x.shape and out.dtype == dtype
        flat = x.transpose(1, 2).flatten(0, 1).T
        want, left = expected(flat, weight, bias, before, [seqlen] * batch, slots, [False] * batch)
        assert_accurate(out, want.T.unflatten(0, (batch, seqlen)).transpose(1, 2), dtype)
        assert_states(states, before, left, W)


@each_dtype
def test_update_takes_one_token_as_a_matrix_and_no_activation_by_default(backend, dtype):
    """x [batch, dim]; conv_state_indices None: row n uses slot n, row 0 included."""
    batch, dim = 3, 16
    x, weight = randn(batch, dim, seed=1, dtype=dtype, device=backend.device), randn(dim, 4, seed=2)
    weight = weight.to(backend.device)
    states = conv_pool(batch, dim, 3, dtype, backend.device)
    before = states.clone()
    out = call(kda.causal_conv1d_update, x, conv_state=states, weight=weight, written=("conv_state",))
    want, left = expected(x.T, weight, None, before, [1] * batch, range(batch), [False] * batch, activation=False)
    assert_accurate(out, want.T, dtype)
    assert_states(states, before, left, 4)


def test_update_packed_rows_of_any_length(backend):
    """x [num_tokens, dim] with query_start_loc; a row without tokens leaves its state alone."""
    lens, dim = (2, 0, 1, 6), 16
    x, weight = tokens(dim, lens, BF16, backend.device, tail=2).T, randn(dim, 4, seed=2, device=backend.device)
    states = conv_pool(6, dim, 3, BF16, backend.device)
    before = states.clone()
    slots = [3, 1, 5, 2]
    out = call(kda.causal_conv1d_update, x, conv_state=states, weight=weight, activation="silu",
               conv_state_indices=ints(slots, x.device), query_start_loc=ints(starts(lens), x.device),
               max_query_len=6, written=("conv_state",))
    want, left = expected(x[:9].T, weight, None, before, lens, slots, [False] * 4)
    assert_accurate(out[:9], want.T, BF16)
    assert torch.equal(out[9:], torch.zeros_like(out[9:])), "tokens past the last row"
    assert_states(states, before, left, 4)


def test_update_token_by_token_equals_prefill_bit_for_bit(backend):
    T, dim = 7, 16
    x, weight = tokens(dim, (T,), BF16, backend.device), randn(dim, 4, seed=2, device=backend.device)
    index = ints([2], x.device)
    whole, steps = (conv_pool(3, dim, 3, BF16, backend.device) for _ in range(2))
    want = kda.causal_conv1d_fn(x, weight, None, whole, ints([0, T], x.device), index,
                                torch.tensor([True], device=x.device))
    got = [kda.causal_conv1d_update(x[:, t][None], steps, weight, activation="silu", conv_state_indices=index)[0]
           for t in range(T)]
    assert torch.equal(torch.stack(got, 1), want)
    assert torch.equal(steps, whole)


def test_update_never_overwrites_its_input_and_writes_only_out(backend):
    """The public code reuses x as output; here out= is written, through its strides, and nothing else."""
    batch, dim = 3, 16
    x, weight = randn(batch, dim, seed=1, dtype=BF16, device=backend.device), randn(dim, 4, seed=2)
    weight = weight.to(backend.device)
    pools = [conv_pool(5, dim, 3, BF16, backend.device) for _ in range(2)]
    index = ints([4, 2, 1], x.device)
    want = call(kda.causal_conv1d_update, x, conv_state=pools[0], weight=weight, activation="silu",
                conv_state_indices=index, written=("conv_state",))
    out = frame(torch.full((1, batch, dim), NAN, dtype=BF16, device=x.device))[0]
    got = call(kda.causal_conv1d_update, x, conv_state=pools[1], weight=weight, activation="silu",
               conv_state_indices=index, out=out, written=("conv_state", "out"))
    assert got.data_ptr() == out.data_ptr() and torch.equal(out, want)
    assert_only_view_written(out)
    assert torch.equal(*pools)


def test_update_leaves_out_alone_past_the_last_token(backend):
    lens, dim = (2, 1), 16
    x, weight = tokens(dim, lens, BF16, backend.device, tail=3).T, randn(dim, 4, seed=2, device=backend.device)
    states = conv_pool(4, dim, 3, BF16, backend.device)
    out = torch.full_like(x, 7.0)
    kda.causal_conv1d_update(x, states, weight, activation="silu", conv_state_indices=ints([3, 1], x.device),
                             query_start_loc=ints(starts(lens), x.device), max_query_len=2, out=out)
    assert torch.equal(out[3:], torch.full_like(out[3:], 7.0)) and not (out[:3] == 7.0).any()


@pytest.mark.parametrize("given_out", [False, True], ids=["fresh", "out"])
def test_update_padding_rows_give_zeros_and_touch_no_state(backend, given_out):
    batch, dim = 4, 16
    x, weight = randn(batch, dim, seed=1, dtype=BF16, device=backend.device), randn(dim, 4, seed=2)
    x[1:] = NAN
    weight = weight.to(backend.device)
    states = conv_pool(5, dim, 3, BF16, backend.device)
    states[0] = NAN
    before = states.clone()
    out = torch.full_like(x, NAN) if given_out else None
    wide = torch.full((batch, 3), 2, dtype=torch.int32, device=x.device)
    wide[:, 1] = ints([4, 0, -1, 5], x.device)
    got = kda.causal_conv1d_update(x, states, weight, activation="silu", conv_state_indices=wide[:, 1], out=out)
    want, left = expected(x[:1].T, weight, None, before, [1], [4], [False])
    assert_accurate(got[:1], want.T, BF16)
    assert torch.equal(got[1:], torch.zeros_like(got[1:]))
    assert_states(states, before, left, 4)


@each_dtype
def test_update_strides_do_not_change_a_bit(backend, dtype):
    batch, dim = 3, 24
    x, weight = randn(batch, dim, seed=1, dtype=dtype, device=backend.device), randn(dim, 4, seed=2)
    weight, index = weight.to(backend.device), ints([3, 1, 2], backend.device)
    runs = []
    for view in (x, frame(x[None], before=3, after=4)[0], frame(x[None], before=16, after=24)[0]):
        states = conv_pool(4, dim, 3, dtype, backend.device)
        runs.append((call(kda.causal_conv1d_update, view, conv_state=states, weight=weight, activation="silu",
                          conv_state_indices=index, written=("conv_state",)), states))
    for out, states in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(states, runs[0][1])


# ------------------------------------------------------------------------------------------------- speculative window


def verify(x, states, weight, slots, accepted, lens=None):
    extra = {} if lens is None else dict(query_start_loc=ints(starts(lens), x.device), max_query_len=max(lens))
    return call(kda.causal_conv1d_update, x, conv_state=states, weight=weight, activation="silu",
                conv_state_indices=ints(slots, x.device), num_accepted_tokens=ints(accepted, x.device),
                written=("conv_state",), **extra)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("W,drafts", [(4, 3), (2, 2), (4, 1)])
def test_speculative_window_equals_plain_decoding_of_the_accepted_tokens(backend, packed, W, drafts):
    """Rounds of 1 + drafts tokens of which some are accepted equal the accepted tokens decoded one by one."""
    batch, dim, L = 3, 16, W - 1 + drafts
    weight = randn(dim, W, seed=2, device=backend.device)
    states = conv_pool(batch + 1, dim, L, BF16, backend.device)
    states[:, :, W - 1:] = NAN
    plain = states[:, :, :W - 1].clone()
    slots = [2, 3, 1]
    accepted = [1] * batch
    for turn in range(4):
        x = randn(batch, dim, drafts + 1, seed=10 + turn, dtype=BF16, device=backend.device)
        if packed:
            flat = x.transpose(1, 2).flatten(0, 1)
            got = verify(flat, states, weight, slots, accepted, [drafts + 1] * batch)
            got = got.unflatten(0, (batch, drafts + 1)).transpose(1, 2)
        else:
            got = verify(x, states, weight, slots, accepted)
        accepted = [(turn + n) % (drafts + 1) + 1 for n in range(batch)]
        for n, count in enumerate(accepted):
            want = kda.causal_conv1d_update(x[n:n + 1, :, :count], plain, weight, activation="silu",
                                            conv_state_indices=ints(slots[n:n + 1], x.device))
            assert torch.equal(got[n, :, :count], want[0])


@pytest.mark.parametrize("stale", [0, -1, 5])
def test_speculative_rows_with_an_impossible_count_are_padding(backend, stale):
    """A window of L - (W - 1) + 1 = 4 tokens: 0, negative and 5 accepted mark a stale row."""
    batch, dim, W = 3, 16, 4
    x, weight = randn(batch, dim, 4, seed=1, dtype=BF16, device=backend.device), randn(dim, W, seed=2)
    weight = weight.to(backend.device)
    x[1] = NAN
    states = conv_pool(5, dim, W - 1 + 3, BF16, backend.device)
    before = states.clone()
    got = verify(x, states, weight, [1, 2, 3], [1, stale, 2])
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert torch.equal(states[2], before[2]) and torch.equal(states[4], before[4]) and torch.equal(states[0], before[0])
    keep = torch.tensor([0, 2], device=x.device)
    fresh = before.clone()
    assert torch.equal(got[keep], verify(x[keep], fresh, weight, [1, 3], [1, 2]))
    assert torch.equal(states, fresh)


def test_speculative_rows_of_unequal_length(backend):
    """Packed rows of 3, 0, 1 and 2 tokens over a window for 4: each keeps history[1:] ++ x and reads at its count."""
    lens, dim, W, accepted, slots = (3, 0, 1, 2), 16, 4, (2, 1, 4, 1), (4, 2, 1, 3)
    L = W - 1 + 3
    x, weight = tokens(dim, lens, BF16, backend.device, tail=2).T, randn(dim, W, seed=2, device=backend.device)
    states = conv_pool(6, dim, L, BF16, backend.device)
    before = states.clone()
    got = verify(x, states, weight, slots, accepted, lens)
    assert torch.equal(got[6:], torch.zeros_like(got[6:])), "tokens past the last row"
    for n, (bos, length) in enumerate(zip(starts(lens), lens)):
        old = before[slots[n]]
        history = old[:, accepted[n] - 1:accepted[n] - 1 + W - 1]
        row = x[bos:bos + length].T
        if length:
            assert_accurate(got[bos:bos + length].T, oracle.conv(row, weight, None, history, True)[0], BF16)
            kept = torch.cat([history[:, 1:], row], 1)
            assert torch.equal(states[slots[n]][:, :kept.shape[1]], kept)
        else:
            assert torch.equal(states[slots[n]], old)
    assert torch.equal(states[5], before[5]) and torch.equal(states[0], before[0])
