# SPDX-License-Identifier: Apache-2.0
"""fused_recurrent_kda: decode, packed rows, state slots, the speculative window."""

import oracle
import pytest
import torch
from helpers import (BF16, DTYPES, FP16, FP32, assert_accurate, assert_only_view_written, bf16_on_gpu, call, dtype_id,
                     each_dtype, frame, gpu_subset, head_major, ints, make, merged, on_backends, pool_of, randn, recurrent, replace,
                     state_dtype_of, unchanged)

import kda

NAN = float("nan")

# name -> arguments of `make`. Interpreted on a CPU: small.
SMALL = {
    "decode": dict(lens=(1, 1, 1)),
    "ragged": dict(lens=(0, 1, 6, 2, 0), K=16, V=24),
    "grouped": dict(lens=(3, 2), H=1, HV=3, K=16, V=16),
    "batch": dict(B=2, T=4, K=24, V=20),
    "glm": dict(lens=(1, 3), H=1, K=128, V=128),
    "widest": dict(lens=(2,), H=1, K=256, V=256),
}
COMPILED = {
    "blocks": dict(lens=(0, 1, 15, 16, 17, 3, 0), K=16, V=16),
    "long": dict(lens=(63, 64, 65, 130), H=4, K=128, V=128),
    "uneven-dims": dict(lens=(33, 7), H=3, HV=6, K=96, V=80),
    "batch-128": dict(B=3, T=33, H=2, K=128, V=64),
}
LARGE = {
    "glm-decode": dict(lens=(1,) * 64, H=64, K=128, V=128),
    "prefill": dict(lens=(1300, 547, 1, 200), H=16, K=128, V=128),
    "256": dict(B=4, T=100, H=8, K=256, V=256),
}
SHAPES = {**SMALL, **COMPILED, **LARGE}
each_shape = on_backends("shape", SMALL, COMPILED, LARGE)


@gpu_subset(lambda shape, gate, dtype, **_: dtype == BF16 or shape in LARGE and gate == "bounded")
@each_dtype
@pytest.mark.parametrize("gate", ["bounded", "unbounded", "steep"])
@each_shape
def test_output_and_state_equal_the_oracle(backend, shape, gate, dtype):
    """Without indices `initial_state` has one row a sequence and is updated in place."""
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device, gate=gate)
    state = x.initial_state.clone()
    o, final = recurrent(x, state=state)
    want_o, want_state = x.oracle()
    assert final is state and o.dtype == dtype and o.shape == x.v.shape
    assert_accurate(o, want_o, dtype)
    assert_accurate(state, want_state, dtype, "state")


@bf16_on_gpu
@each_dtype
@on_backends("shape", ["ragged", "batch"], ["long"])
def test_gate_computed_outside_gives_the_same_result(backend, shape, dtype):
    """compute_gate=False takes the log decay itself, of any float dtype; fp32 here."""
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device)
    state = x.initial_state.clone()
    o, _ = recurrent(x, state=state, g=x.log_decay(), compute_gate=False, a_log=None, g_bias=None)
    want_o, want_state = x.oracle()
    assert_accurate(o, want_o, dtype)
    assert_accurate(state, want_state, dtype, "state")


def test_log_decay_of_minus_infinity_wipes_the_channel(backend):
    x = make(lens=(6, 5), dtype=FP32, device=backend.device)
    y = x.log_decay()
    y[:, ::4, :, ::3] = -float("inf")
    state = x.initial_state.clone()
    o, _ = recurrent(x, state=state, g=y, compute_gate=False, a_log=None, g_bias=None)
    want_o, want_state = x.oracle(g=y, A_log=None)
    assert_accurate(o, want_o, FP32)
    assert_accurate(state, want_state, FP32, "state")


@bf16_on_gpu
@each_dtype
@pytest.mark.parametrize("beta", ["logits", "probabilities", "headwise-logits", "headwise", "none"])
def test_beta_forms(backend, beta, dtype):
    """A scalar per head or a vector over V; raw logits with sigmoid_beta, else as they are; None means ones."""
    x = make(lens=(4, 6), dtype=dtype, device=backend.device, headwise=beta.startswith("headwise"))
    logits = beta.endswith("logits")
    value = None if beta == "none" else (x.beta if logits else torch.sigmoid(x.beta.float()).to(dtype))
    state = x.initial_state.clone()
    o, _ = recurrent(x, state=state, beta=value, sigmoid_beta=logits)
    want_o, want_state = x.oracle(beta=value, sigmoid_beta=logits)
    assert_accurate(o, want_o, dtype)
    assert_accurate(state, want_state, dtype, "state")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_without_l2norm_and_with_a_scale_of_its_own(backend, dtype):
    x = make(lens=(4, 6), dtype=dtype, device=backend.device, l2norm=False)
    state = x.initial_state.clone()
    o, _ = recurrent(x, state=state, scale=0.5)
    want_o, want_state = x.oracle(scale=0.5)
    assert_accurate(o, want_o, dtype)
    assert_accurate(state, want_state, dtype, "state")


def test_defaults_are_l2norm_plain_beta_and_a_log_decay(backend):
    """fused_recurrent_kda(q, k, v, g, beta, initial_state=...) as the public signature defaults it."""
    x = make(B=2, T=3, dtype=FP32, device=backend.device)
    beta, y, state = torch.sigmoid(x.beta), x.log_decay(), x.initial_state.clone()
    o, final = call(kda.fused_recurrent_kda, x.q, x.k, x.v, y, beta, initial_state=state, written=("initial_state",))
    want_o, want_state = x.oracle(g=y, A_log=None, beta=beta, sigmoid_beta=False)
    assert final is state
    assert_accurate(o, want_o, FP32)
    assert_accurate(state, want_state, FP32, "state")


def test_without_an_initial_state_it_starts_from_zeros_and_returns_a_fresh_fp32_state(backend):
    x = make(lens=(3, 0, 2), dtype=BF16, device=backend.device)
    o, final = recurrent(x, state=None)
    want_o, want_state = x.oracle(initial_state=None)
    assert final.dtype == FP32
    assert_accurate(o, want_o, BF16)
    assert_accurate(final, want_state, BF16, "state")


@pytest.mark.parametrize("amplitude", ["[H]", "[1, 1, H, 1]", "[HV]"])
def test_gate_parameters_per_query_head_or_value_head(backend, amplitude):
    """The gate of value head hv is that of head hv // (HV // H) when A_log has H entries."""
    x = make(lens=(4, 3), H=2, HV=4, dtype=FP32, device=backend.device)
    A_log, g_bias = x.A_log, x.g_bias
    if amplitude == "[HV]":
        A_log, g_bias = randn(4, seed=77, device=x.device), randn(4 * 32, seed=78, device=x.device)
    state = x.initial_state.clone()
    o, _ = recurrent(x, state=state, a_log=A_log.view(1, 1, -1, 1) if "1, 1" in amplitude else A_log,
                     g_bias=g_bias.view(len(A_log), -1))
    want_o, want_state = x.oracle(A_log=A_log, g_bias=g_bias)
    assert_accurate(o, want_o, FP32)
    assert_accurate(state, want_state, FP32, "state")
    state = x.initial_state.clone()
    o, _ = recurrent(x, state=state, g_bias=None)
    assert_accurate(o, x.oracle(g_bias=None)[0], FP32)


# -------------------------------------------------------------------------------------------------------- state slots


@pytest.mark.parametrize("pad", [0, 48, 5])
@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=lambda d: "state-" + dtype_id(d))
@pytest.mark.parametrize("dtype,index_dtype", [(BF16, torch.int32), (FP16, torch.int32), (FP32, torch.int64)],
                         ids=dtype_id)
def test_slots_are_read_and_written_in_place(backend, dtype, index_dtype, state_dtype, pad):
    """1-D indices, strided: state from the slot, back to the slot; no other slot is touched. Pages may be padded."""
    x = make(lens=(1, 4, 0, 3), dtype=dtype, device=backend.device, state_dtype=state_dtype)
    slots = [5, 2, 3, 1]
    pool = pool_of(x.initial_state, slots, pad=pad)
    before = pool.clone()
    table = torch.full((4, 3), 4, dtype=index_dtype, device=x.device)
    table[:, 1] = torch.tensor(slots, device=x.device)
    o, final = recurrent(x, state=pool, ssm_state_indices=table[:, 1])
    want_o, want_state = x.oracle()
    assert final is pool
    assert_accurate(o, want_o, dtype)
    assert_accurate(pool[slots], want_state, state_dtype_of(dtype, state_dtype), "state")
    others = [s for s in range(len(pool)) if s not in slots]
    assert torch.equal(pool[others].nan_to_num(7.0), before[others].nan_to_num(7.0))
    assert torch.equal(pool[3], before[3]), "a sequence without tokens passes its state through"


@pytest.mark.parametrize("given_out", [False, True], ids=["fresh", "out"])
@pytest.mark.parametrize("null", [0, -1, 7, 1 << 30])
def test_padding_rows_give_zeros_and_touch_no_state(backend, null, given_out):
    """The null slot, a negative one and one past the pool; what the padded tokens hold is not looked at."""
    x = make(lens=(2, 3, 1), dtype=BF16, device=backend.device)
    for t in (x.q, x.k, x.v, x.g, x.beta):
        t[:, 2:5] = NAN
    pool = pool_of(x.initial_state, [6, 2, 1], extra=0)
    pool[2] = 3.0
    before = pool.clone()
    out = torch.full_like(x.v, NAN) if given_out else None
    o, _ = recurrent(x, state=pool, ssm_state_indices=ints([6, null, 1], x.device), out=out)
    assert torch.equal(o[:, 2:5], torch.zeros_like(o[:, 2:5]))
    alone = make(lens=(2, 3, 1), dtype=BF16, device=backend.device)
    want_o, want_state = alone.oracle()
    keep = [0, 1, 5]
    assert_accurate(o[:, keep], want_o[:, keep], BF16)
    assert_accurate(pool[[6, 1]], want_state[[0, 2]], BF16, "state")
    others = [0, 2, 3, 4, 5]
    assert torch.equal(pool[others].nan_to_num(7.0), before[others].nan_to_num(7.0))


@pytest.mark.parametrize("given_out", [False, True], ids=["fresh", "out"])
def test_rows_past_the_last_token(backend, given_out):
    """A padded token buffer: its tail is not read; it is zero in a fresh output and left alone in out=."""
    x = make(lens=(2, 1, 3), dtype=BF16, device=backend.device)
    x = replace(x, lens=[2, 1])
    for t in (x.q, x.k, x.v, x.g, x.beta):
        t[:, 3:] = NAN
    state = x.initial_state[:2].clone()
    x = replace(x, initial_state=state.clone())
    out = torch.full_like(x.v, 7.0) if given_out else None
    o, _ = recurrent(x, state=state, out=out)
    short = replace(x, **{name: getattr(x, name)[:, :3] for name in ("q", "k", "v", "g", "beta")})
    want_o, want_state = short.oracle()
    assert_accurate(o[:, :3], want_o, BF16)
    assert_accurate(state, want_state, BF16, "state")
    assert torch.equal(o[:, 3:], torch.full_like(o[:, 3:], 7.0 if given_out else 0.0))


def test_decode_steps_continue_each_other(backend):
    """Token by token through the pool equals all tokens in one call."""
    x = make(B=2, T=5, dtype=FP32, device=backend.device)
    pool = pool_of(x.initial_state, [3, 1])
    index = ints([3, 1], x.device)
    steps = []
    for t in range(5):
        step = replace(x, **{n: getattr(x, n)[:, t:t + 1] for n in ("q", "k", "v", "g", "beta")})
        steps.append(recurrent(step, state=pool, ssm_state_indices=index)[0])
    want_o, want_state = x.oracle()
    assert_accurate(torch.cat(steps, 1), want_o, FP32)
    assert_accurate(pool[[3, 1]], want_state, FP32, "state")


# ---------------------------------------------------------------------------------------- the state after every token


@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=lambda d: "state-" + dtype_id(d))
@pytest.mark.parametrize("form", [dict(lens=(3, 0, 4)), dict(B=2, T=4)], ids=["packed", "batch"])
def test_inplace_false_returns_the_state_after_every_token(backend, form, state_dtype):
    x = make(**form, dtype=FP32, device=backend.device, state_dtype=state_dtype)
    state = x.initial_state.clone()
    with unchanged(state):
        o, every = recurrent(x, state=state, inplace_final_state=False)
    want_o, want_every = x.oracle(token_states=True)
    assert every.dtype == state_dtype and every.shape == want_every.shape
    assert_accurate(o, want_o, FP32)
    assert_accurate(every, want_every, state_dtype_of(FP32, state_dtype), "state")


def test_inplace_false_reads_slots_and_leaves_the_pool_alone(backend):
    x = make(lens=(2, 2, 1), dtype=FP32, device=backend.device)
    pool = pool_of(x.initial_state, [4, 0, 2])
    with unchanged(pool):
        o, every = recurrent(x, state=pool, inplace_final_state=False, ssm_state_indices=ints([4, 0, 2], x.device))
    want_o, want_every = x.oracle(token_states=True)
    keep = [0, 1, 4]
    assert_accurate(o[:, keep], want_o[:, keep], FP32)
    assert_accurate(every[keep], want_every[keep], FP32, "state")
    assert torch.equal(o[:, 2:4], torch.zeros_like(o[:, 2:4]))
    assert torch.equal(every[2:4], torch.zeros_like(every[2:4])), "states of padding tokens"


# ------------------------------------------------------------------------------------------------- speculative window


@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=lambda d: "state-" + dtype_id(d))
@pytest.mark.parametrize("form", [dict(B=3, T=4), dict(lens=(4, 2, 1))], ids=["batch", "packed"])
@bf16_on_gpu
@each_dtype
def test_window_starts_at_the_accepted_column_and_keeps_a_state_per_token(backend, form, dtype, state_dtype):
    x = make(**form, dtype=dtype, device=backend.device, state_dtype=state_dtype)
    table = torch.arange(1, 13).view(3, 4)
    accepted = [1, 3, 4]
    pool = pool_of(x.initial_state, [int(table[n, a - 1]) for n, a in enumerate(accepted)], extra=13)
    pool[:13] = pool[:13].nan_to_num(5.0)  # a finite value in the slots not yet written
    before = pool.clone()
    o, final = recurrent(x, state=pool, ssm_state_indices=table.to(x.device, torch.int32),
                         num_accepted_tokens=ints(accepted, x.device))
    want_o, want_every = x.oracle(token_states=True)
    assert final is pool
    assert_accurate(o, want_o, dtype)
    lens = form.get("lens", (4, 4, 4))
    written, token = [], 0
    for n, length in enumerate(lens):
        for t in range(length):
            slot = int(table[n, t])
            assert_accurate(pool[slot], want_every[token], state_dtype_of(dtype, state_dtype), "state")
            written.append(slot)
            token += 1
    others = [s for s in range(len(pool)) if s not in written]
    assert torch.equal(pool[others].nan_to_num(7.0), before[others].nan_to_num(7.0))


def test_window_without_counts_starts_at_its_first_column(backend):
    x = make(B=2, T=2, dtype=FP32, device=backend.device)
    table = ints([[3, 1], [2, 5]], x.device)
    pool = pool_of(x.initial_state, [3, 2])
    o, _ = recurrent(x, state=pool, ssm_state_indices=table)
    want_o, want_every = x.oracle(token_states=True)
    assert_accurate(o, want_o, FP32)
    assert_accurate(pool[[3, 1, 2, 5]], want_every, FP32, "state")


def test_window_table_is_read_through_its_strides(backend):
    x = make(B=2, T=3, dtype=FP32, device=backend.device)
    table = ints([[3, 1, 6], [2, 5, 4]], x.device)
    wide = torch.full((2, 9), 7, dtype=torch.int32, device=x.device)
    for view in (table, table.T.contiguous().T, wide[:, 1:7:2].copy_(table)):
        pool = pool_of(x.initial_state, [1, 5])
        o, _ = recurrent(x, state=pool, ssm_state_indices=view, num_accepted_tokens=ints([2, 2], x.device))
        want_o, want_every = x.oracle(token_states=True)
        assert_accurate(o, want_o, FP32)
        assert_accurate(pool[table.flatten().long()], want_every, FP32, "state")


@pytest.mark.parametrize("column", [0, -1, 99])
def test_window_columns_without_a_valid_slot_are_not_written(backend, column):
    """A padded window: the token is computed and its state is dropped."""
    x = make(B=2, T=3, dtype=FP32, device=backend.device)
    table = ints([[3, column, column], [2, 5, 4]], x.device)
    pool = pool_of(x.initial_state, [3, 2])
    before = pool.clone()
    o, _ = recurrent(x, state=pool, ssm_state_indices=table, num_accepted_tokens=ints([1, 1], x.device))
    want_o, want_every = x.oracle(token_states=True)
    assert_accurate(o, want_o, FP32)
    assert_accurate(pool[[3, 2, 5, 4]], want_every[[0, 3, 4, 5]], FP32, "state")
    others = [s for s in range(len(pool)) if s not in (2, 3, 4, 5)]
    assert torch.equal(pool[others].nan_to_num(7.0), before[others].nan_to_num(7.0))


@pytest.mark.parametrize("stale", [0, -1, 4, 1 << 30])
def test_stale_rows_are_padding(backend, stale):
    """No accepted token, or more than the window holds: zeros, and no state is read or written."""
    x = make(B=3, T=3, dtype=FP32, device=backend.device)
    for t in (x.q, x.k, x.v, x.g, x.beta):
        t[1] = NAN
    table = ints([[1, 2, 3], [4, 5, 6], [7, 8, 9]], x.device)
    pool = torch.full((11, *x.initial_state.shape[1:]), 3.0, device=x.device)
    pool[0], pool[10] = NAN, NAN
    pool[1], pool[8] = x.initial_state[0], x.initial_state[2]
    before = pool.clone()
    o, _ = recurrent(x, state=pool, ssm_state_indices=table, num_accepted_tokens=ints([1, stale, 2], x.device))
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    untouched = [0, 4, 5, 6, 10]
    assert torch.equal(pool[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))
    keep = make(B=3, T=3, dtype=FP32, device=backend.device)
    want_o, want_every = keep.oracle(token_states=True)
    assert_accurate(o[[0, 2]], want_o[[0, 2]], FP32)
    assert_accurate(pool[[1, 2, 3, 7, 8, 9]], want_every[[0, 1, 2, 6, 7, 8]], FP32, "state")


def test_a_row_whose_accepted_column_is_null_is_padding(backend):
    x = make(B=2, T=2, dtype=FP32, device=backend.device)
    pool = torch.full((6, *x.initial_state.shape[1:]), 3.0, device=x.device)
    pool[4] = x.initial_state[1]
    before = pool.clone()
    o, _ = recurrent(x, state=pool, ssm_state_indices=ints([[1, 0], [3, 4]], x.device),
                     num_accepted_tokens=ints([2, 2], x.device))
    assert torch.equal(o[0], torch.zeros_like(o[0])) and torch.equal(pool[:3], before[:3])
    want_o, want_every = x.oracle(token_states=True)
    assert_accurate(o[1], want_o[1], FP32)
    assert_accurate(pool[[3, 4]], want_every[2:], FP32, "state")


# ------------------------------------------------------------------------------------------------------ bits and rows

LAYOUTS = {
    "column-slices": merged,
    "head-major": head_major,
    "aligned-slices": lambda x: replace(
        x, **{n: frame(getattr(x, n), before=16, after=16, rows=1) for n in ("q", "k", "v", "g", "beta")}
    ),
}


@gpu_subset(lambda shape, dtype, **_: dtype == BF16 or shape == "ragged" and dtype == FP32)
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@on_backends("shape", ["ragged", "batch", "grouped"], ["long", "uneven-dims"], ["prefill"])
def test_strides_do_not_change_a_bit(backend, shape, layout, dtype):
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device)
    view = LAYOUTS[layout](x)
    assert view.q.stride() != x.q.stride() or view.v.stride() != x.v.stride()
    a, b = x.initial_state.clone(), x.initial_state.clone()
    assert torch.equal(recurrent(x, state=a)[0], recurrent(view, state=b)[0])
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=dtype_id)
@pytest.mark.parametrize("shape", ["ragged", "batch"])
def test_out_may_be_a_strided_view(backend, shape, dtype):
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device)
    want, _ = recurrent(x, state=x.initial_state.clone())
    out = frame(torch.full_like(x.v, NAN))
    got, _ = recurrent(x, state=x.initial_state.clone(), out=out)
    assert got is out and torch.equal(out, want)
    assert_only_view_written(out)


@each_dtype
def test_a_sequence_gives_the_same_bits_at_any_place_and_alone(backend, dtype):
    x = make(B=5, T=3, dtype=dtype, device=backend.device)
    state = x.initial_state.clone()
    o, _ = recurrent(x, state=state)
    order = [3, 0, 4, 2, 1]
    moved = replace(x, **{n: getattr(x, n)[order].contiguous() for n in ("q", "k", "v", "g", "beta", "initial_state")})
    moved_state = moved.initial_state.clone()
    moved_o, _ = recurrent(moved, state=moved_state)
    assert torch.equal(moved_o, o[order]) and torch.equal(moved_state, state[order])
    alone = replace(x, **{n: getattr(x, n)[2:3] for n in ("q", "k", "v", "g", "beta", "initial_state")})
    alone_state = alone.initial_state.clone()
    assert torch.equal(recurrent(alone, state=alone_state)[0], o[2:3]) and torch.equal(alone_state, state[2:3])
    packed = replace(x, **{n: getattr(x, n).flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}, lens=[3] * 5)
    packed_state = x.initial_state.clone()
    assert torch.equal(recurrent(packed, state=packed_state)[0][0], o.flatten(0, 1))
    assert torch.equal(packed_state, state)


def test_oracle_agrees_with_a_hand_computed_token():
    """One head, K = V = 2: S = S exp(y), d = b (v - S k), S += d k, o = S q. Numbers worked by hand."""
    t = lambda *v: torch.tensor(v, dtype=torch.float64).view(1, 1, 1, -1)  # noqa: E731
    S = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64).view(1, 1, 2, 2)
    y = torch.tensor([0.5, 0.25], dtype=torch.float64).log().view(1, 1, 1, 2)
    o, S = oracle.kda(t(1.0, 2.0), t(1.0, 0.0), t(2.0, 2.0), y, torch.full((1, 1, 1), 0.5), scale=1.0,
                      l2norm_qk=False, initial_state=S)
    # S exp(y) = [[.5, .5], [1.5, 1]]; S k = [.5, 1.5]; d = [.75, .25]; S = [[1.25, .5], [1.75, 1]]
    assert S.flatten().tolist() == [1.25, 0.5, 1.75, 1.0] and o.flatten().tolist() == [2.25, 3.75]
