# SPDX-License-Identifier: Apache-2.0
"""kda_forward: rows of all kinds in any order, against each row alone, against the operations and against the oracle."""

import dataclasses

import oracle
import pytest
import torch
from helpers import (BF16, BOUNDS, FP32, INTERPRETED, assert_accurate, assert_only_view_written, call, frame, ints, needs_gpu,
                     rand, randn, starts)
from test_batch import ROWS, made, metadata_of, tokens_of

import kda
from kda.serving import Batch, Decode, Geometry, Prefill, StatePool, Verify, kda_forward

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

NAN = float("nan")
H, K, V, W, WINDOW = 2, 32, 16, 4, 4
DIM = H * (2 * K + V)
INPUTS = ("qkv", "raw_g", "beta", "out_gate")
prop = settings(max_examples=2 if INTERPRETED else 12, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))


@dataclasses.dataclass
class Layer:
    """Parameters, and a pool whose slots all hold random states and records; padding and the null slot hold NaN."""

    pool: StatePool
    weights: dict

    @property
    def device(self):
        return self.pool.device

    @property
    def states(self):
        return dict(zip(("conv_state", "ssm_state"), self.pool.layers[0]), records=self.pool.records[0])

    def tokens(self, T, seed=7, dtype=BF16):
        put = dict(dtype=dtype, device=self.device)
        return dict(qkv=randn(T, DIM, seed=seed, **put), raw_g=randn(T, H, K, seed=seed + 1, **put),
                    beta=randn(T, H, seed=seed + 2, **put), out_gate=randn(T, H, V, seed=seed + 3, **put))

    def forward(self, rows, x, **overrides):
        batch = rows if isinstance(rows, Batch) else Batch.of(rows, device=self.device)
        args = dict(**x, **self.states, **self.weights, batch=batch, **overrides)
        return call(kda_forward, written=("conv_state", "ssm_state", "records", "out"), **args)

    def copy(self):
        pool = StatePool(self.pool.slots, self.pool.geometry, device=self.device)
        pool.pages.copy_(self.pool.pages)
        pool.allocate(pool.available)
        return dataclasses.replace(self, pool=pool)


def layer(device, slots=24, conv_dtype=BF16, W=W):
    pool = StatePool(slots, Geometry(HV=H, V=V, K=K, dim=DIM, W=W, num_spec=WINDOW - 1, record_tokens=WINDOW,
                                     conv_dtype=conv_dtype), device=device)
    pool.pages.fill_(-1)
    (conv_state, ssm_state), records = pool.layers[0], pool.records[0]
    for slot in pool.allocate(slots - 1):
        conv_state[slot] = randn(*conv_state.shape[1:], seed=400 + slot, device=device).to(conv_dtype)
        ssm_state[slot] = randn(H, V, K, seed=800 + slot, scale=0.1, device=device)
        records[slot] = rand(*records.shape[1:], seed=1200 + slot, device=device)
    weights = dict(conv_weight=randn(DIM, W, seed=1, scale=0.5, device=device), A_log=rand(H, seed=2, device=device),
                   g_bias=randn(H * K, seed=3, device=device), norm_weight=1 + randn(V, seed=4, scale=0.1, device=device))
    return Layer(pool, weights)


def cut(x, a, b):
    return {name: t[a:b] for name, t in x.items()}


def with_records(rows):
    """The same with one slot a verify row; every other plain row that goes on leaves speculation."""
    def change(n, row):
        if isinstance(row, Verify):
            return Verify(row.slots[0], row.tokens, row.accepted)
        goes_on = isinstance(row, Decode) or row.has_initial_state
        return row._replace(accepted=1 + n % WINDOW) if goes_on and n % 2 else row

    return [change(n, row) for n, row in enumerate(rows)]


def spoil(x, rows):
    """NaN in the tokens of padding rows and behind the last row."""
    ends = starts([tokens_of(row) for row in rows])
    for row, a, b in zip(rows, ends, ends[1:]):
        if (row.slots if isinstance(row, Verify) else row.slot) in (0, [0, 0], -3):
            for t in x.values():
                t[a:b] = NAN
    for t in x.values():
        t[ends[-1]:] = NAN
    return ends


# ----------------------------------------------------------------------------------------------------- rows in any order


@prop
@given(kinds=st.lists(ROWS, max_size=6), way=st.sampled_from(["full", "records"]), padding=st.integers(0, 2),
       data=st.data())
def test_rows_in_any_order_equal_each_row_alone(backend, kinds, way, padding, data):
    """Outputs and states to the bit, checkpoints and records included; padding rows and tokens change nothing."""
    x, alone = (layer(backend.device) for _ in range(2))
    rows = made(kinds) + [Decode(0), Prefill(-3, 2, True), Verify([0, 0], 2, 1)] * (padding > 0)
    rows = data.draw(st.permutations(rows))
    if way == "records":
        rows = with_records(rows)
    T = sum(map(tokens_of, rows)) + 3 * (padding > 1)
    tokens = x.tokens(T)
    ends = spoil(tokens, rows)
    want = torch.zeros(T, H, V, dtype=BF16, device=backend.device)
    for row, a, b in zip(rows, ends, ends[1:]):
        want[a:b] = alone.forward([row], cut(tokens, a, b))
        slot = row.slots if isinstance(row, Verify) else row.slot
        assert slot not in (0, [0, 0], -3) or not want[a:b].any()
    for out in (None, torch.full_like(want, 7.0)):
        y = x.copy()
        o = y.forward(rows, tokens, out=out)
        assert torch.equal(o[:ends[-1]], want[:ends[-1]])
        assert o[ends[-1]:].eq(0.0 if out is None else 7.0).all()
        assert torch.equal(y.pool.pages, alone.pool.pages) and (y.pool.pages[:, 0] == -1).all()


@prop
@given(kinds=st.lists(ROWS, min_size=1, max_size=5))
def test_vllms_metadata_give_the_same_step(backend, kinds):
    from test_batch import fitting

    x = layer(backend.device)
    y, rows = x.copy(), made(fitting(kinds))
    rows = [Prefill(row.slot, 1, True) if isinstance(row, Decode) else row for row in rows]
    tokens = x.tokens(sum(map(tokens_of, rows)))
    o = x.forward(Batch.from_vllm(metadata_of(rows, device=backend.device, pad=1)), tokens)
    assert torch.equal(o, y.forward(rows, tokens)) and torch.equal(x.pool.pages, y.pool.pages)


def test_each_kind_alone_is_its_operation(backend):
    """To the bit, what kda_decode, kda_prefill, kda_verify and kda_commit give."""
    x = layer(backend.device)
    plain, tokens, index = x.copy(), x.tokens(6), lambda *slots: ints(slots, backend.device)
    states = {name: t for name, t in plain.states.items() if name != "records"}
    prefilled = dict(ssm_state_indices=index(3, 4), cu_seqlens=index(0, 4, 6),
                     has_initial_state=torch.tensor([True, False], device=backend.device),
                     checkpoint_offsets=index(3), checkpoint_indices=index(9))
    drafted = dict(ssm_state_indices=index(7, 8), cu_seqlens=index(0, 4, 6), num_accepted_tokens=index(2, 0))
    for rows, want in [
        ([Decode(slot) for slot in range(1, 7)],
         lambda: kda.kda_decode(**tokens, **states, **x.weights, ssm_state_indices=index(*range(1, 7)))),
        ([Prefill(3, 4, True, {3: 9}), Prefill(4, 2)], lambda: kda.kda_prefill(**tokens, **states, **x.weights, **prefilled)),
        ([Verify(7, 4, 2), Verify(8, 2, 0)], lambda: kda.kda_verify(**tokens, **plain.states, **x.weights, **drafted)),
        ([Verify(7, 0, 3), Verify(8, 0, 1)], lambda: kda.kda_commit(**plain.states, ssm_state_indices=index(7, 8),
                                                                   num_accepted_tokens=index(3, 1))),
    ]:
        o, want_o = x.forward(rows, tokens if sum(map(tokens_of, rows)) else cut(tokens, 0, 0)), want()
        assert want_o is None or torch.equal(o, want_o)
        assert torch.equal(x.pool.pages, plain.pool.pages)


def test_full_states_are_the_separate_operations_and_the_oracle(backend):
    """A state a token; the output but for rounding once where the chain rounds twice."""
    x = layer(backend.device)
    before, chain = x.copy(), x.copy()
    rows = [Verify([2, 3, 4, 5], 3, 2), Verify([6, 7, 8, 9], 4, 4), Verify([10, 11, 12, 13], 1, 1)]
    tokens, cu = x.tokens(8), [0, 3, 7, 8]
    o = x.forward(rows, tokens)

    table, counts = ints([row.slots for row in rows], x.device), ints([row.accepted for row in rows], x.device)
    (conv_state, ssm_state), weights = chain.pool.layers[0], x.weights
    y = kda.causal_conv1d_update(tokens["qkv"], conv_state, weights["conv_weight"], None, "silu",
                                 conv_state_indices=table[:, 0], num_accepted_tokens=counts,
                                 query_start_loc=ints(cu, x.device), max_query_len=WINDOW)
    q, k, v = (t.unflatten(-1, (H, -1))[None] for t in y.split([H * K, H * K, H * V], -1))
    want, _ = kda.fused_recurrent_kda(
        q, k, v, tokens["raw_g"][None], tokens["beta"][None], initial_state=ssm_state, cu_seqlens=ints(cu, x.device),
        ssm_state_indices=table, num_accepted_tokens=counts, sigmoid_beta=True, a_log=weights["A_log"],
        g_bias=weights["g_bias"], compute_gate=True)
    want = kda.rms_norm_gated(want[0], tokens["out_gate"], weights["norm_weight"], None, "sigmoid", eps=1e-5)
    assert oracle.err(o, want) <= BOUNDS[BF16]["output"]
    for name, got in x.states.items():  # conv_state[..., 6], of no window, has not moved either
        assert torch.equal(got.nan_to_num(), chain.states[name].nan_to_num())

    for row, a, b in zip(rows, cu, cu[1:]):
        history = before.states["conv_state"][row.slots[0], :, row.accepted - 1:row.accepted + W - 2]
        state = before.states["ssm_state"][row.slots[row.accepted - 1]]
        for t in range(a, b):  # token by token: each state has a slot
            o_t, history, state = in_fp64(x, cut(tokens, t, t + 1), history, state)
            assert_accurate(o[t:t + 1], o_t, BF16)
            assert_accurate(x.states["ssm_state"][row.slots[t - a]], state, BF16, "state")


def in_fp64(x, tokens, history=None, state=None):
    """Output, convolution history and state after the tokens of one request, in fp64; from zeros without a state."""
    dtype = tokens["qkv"].dtype
    weights, past = x.weights, x.weights["conv_weight"].shape[1] - 1
    history = torch.zeros(DIM, past, device=x.device) if history is None else history
    y, history = oracle.conv(tokens["qkv"].T, weights["conv_weight"], None, history, True)
    q, k, v = (t.unflatten(-1, (H, -1))[None] for t in y.T.to(dtype).split([H * K, H * K, H * V], -1))
    o, state = oracle.kda(q, k, v, tokens["raw_g"][None], tokens["beta"][None], sigmoid_beta=True, A_log=weights["A_log"],
                          g_bias=weights["g_bias"], lower_bound=-5.0, initial_state=None if state is None else state[None])
    o, _ = oracle.rms_norm_gated(o[0], tokens["out_gate"], weights["norm_weight"], None, "sigmoid", eps=1e-5)
    return o, history, state[0]


# -------------------------------------------------------------------------------------------- into speculation and out


@pytest.mark.parametrize("way", ["full", "records"])
def test_a_request_enters_speculation_and_leaves_it_twice(backend, way):
    """From prefill and from decode; out by decode, by a further prefill, and (full states) by a window of one token."""
    x = layer(backend.device, conv_dtype=FP32)
    slots, own = [5, 6, 7, 8], 5
    full, fresh = way == "full", 1 if way == "full" else 0  # accepted, of a row that comes in
    draft = lambda tokens, accepted: Verify(slots if full else own, tokens, accepted)  # noqa: E731
    leave = [draft(1, 3)] if full else []
    steps = [  # row, how many of its tokens are accepted
        (Prefill(own, 6), 6), (draft(4, fresh), 2), (draft(3, 2), 3), *((row, 1) for row in leave),
        (Decode(own, 0 if full else 3), 1), (Decode(own), 1), (draft(2, fresh), 1), (draft(4, 1), 4), (draft(1, 4), 1),
        (Prefill(own, 5, True, None, 0 if full else 1), 5), (draft(4, fresh), 3),
    ]
    parts, outputs = [], []
    for n, (row, accepted) in enumerate(steps):
        tokens = x.tokens(tokens_of(row), seed=100 + 10 * n, dtype=FP32)
        outputs.append(x.forward([row], tokens)[:accepted])
        parts.append(cut(tokens, 0, accepted))
    if full:
        x.pool.settle(slots, 3)
        snapshot = x.pool.snapshot(own, accepted=0)
    else:
        before = x.pool.pages.clone()
        snapshot = x.pool.snapshot(own, accepted=3)
        assert torch.equal(x.pool.pages, before)
    every = {name: torch.cat([part[name] for part in parts]) for name in INPUTS}
    o, history, state = in_fp64(x, every)
    assert_accurate(torch.cat(outputs), o, FP32)
    assert_accurate(snapshot.ssm_state[0], state.cpu(), FP32, "state")
    assert torch.equal(snapshot.conv_state[0, :, :W - 1], history.cpu().float())


@pytest.mark.parametrize("row", [Decode(2), Prefill(3, 1), Verify(4, 1, 1), Verify([4, 5], 1, 1)], ids=lambda row: repr(row))
def test_a_single_kind_takes_a_buffer_too(backend, row):
    x = layer(backend.device)
    y, tokens = x.copy(), x.tokens(1)
    out = torch.full((1, H, V), NAN, dtype=BF16, device=x.device)
    want = x.forward([row], tokens)
    assert y.forward([row], tokens, out=out) is out and torch.equal(out, want) and want.any()


def test_a_row_without_accepted_tokens(backend):
    """Nothing pending with records; with full states a stale row, which is padding."""
    x = layer(backend.device)
    y, tokens = x.copy(), x.tokens(3)
    one_by_one = torch.cat([y.forward([Decode(4)], cut(tokens, t, t + 1)) for t in range(3)])
    z = x.copy()
    assert not x.forward([Verify([4, 5, 6], 3, 0)], tokens).any() and torch.equal(x.pool.pages, z.pool.pages)
    assert oracle.err(z.forward([Verify(4, 3, 0)], tokens), one_by_one) <= 2 * BOUNDS[BF16]["output"]


# ----------------------------------------------------------------------------------------------------- tokens and outputs


MIXED = [Prefill(1, 5, True, {3: 9}), Decode(2), Verify(3, 2, 1), Prefill(4, 3), Decode(5, 2), Verify(6, 4, 0)]


@pytest.mark.parametrize("order", ["interleaved", "by-kind"])
def test_strided_tokens_and_out_give_the_same_bits(backend, order):
    rows = MIXED if order == "interleaved" else sorted(MIXED, key=lambda row: type(row).__name__)
    x = layer(backend.device)
    y, tokens = x.copy(), x.tokens(16 + 2)
    want = x.forward(rows, tokens)
    framed = {name: frame(t[None], before=5)[0] for name, t in tokens.items()}
    out = frame(torch.full_like(want, 7.0)[None])[0]
    assert y.forward(rows, framed, out=out) is out
    assert torch.equal(out[:16], want[:16]) and (out[16:] == 7.0).all() and not want[16:].any()
    assert_only_view_written(out)
    assert torch.equal(x.pool.pages, y.pool.pages)


def test_offsets_that_end_early_leave_the_rest_to_nobody(backend):
    """A captured graph has the shapes of the most tokens; a step with fewer ends its offsets early."""
    x = layer(backend.device)
    for order in ("in order", "interleaved"):
        y, z = x.copy(), x.copy()
        rows = [Decode(2), Prefill(1, 5), Prefill(0, 4), Verify(3, 2, 0), Verify(0, 3, 0)]
        fewer = [Decode(2), Prefill(1, 3), Verify(3, 1, 0)]
        batch = Batch.of(rows, device=x.device)
        changed = dict(prefill_query_start_loc=ints([0, 3, 3], x.device), verify_query_start_loc=ints([0, 1, 1], x.device))
        places = torch.arange(15)
        if order == "interleaved":
            places = torch.randperm(15, generator=torch.Generator().manual_seed(0))
            changed.update(token_indices=ints(places[:10].tolist(), x.device),
                           verify_token_indices=ints(places[10:].tolist(), x.device))
        own = torch.tensor([0, 1, 2, 3, 10])
        tokens, few = y.tokens(15), y.tokens(15)
        for name, t in few.items():
            t.copy_(tokens[name])
            tokens[name].fill_(NAN)
            tokens[name][places[own].to(x.device)] = t[:5]
        o = y.forward(dataclasses.replace(batch, **changed), tokens)
        want = z.forward(fewer, cut(few, 0, 5))
        assert torch.equal(o[places[own].to(x.device)], want) and int(o.any(-1).any(-1).sum()) == 5
        assert torch.equal(y.pool.pages, z.pool.pages)


def test_indices_out_of_range_touch_nothing(backend):
    x = layer(backend.device)
    tokens = x.tokens(16)
    batch = Batch.of(MIXED, device=x.device)
    places = batch.verify_token_indices.clone()
    places[0], places[3] = -5, 1 << 30
    o = x.forward(dataclasses.replace(batch, verify_token_indices=places, verify_start=None), tokens)
    assert o[:6].isfinite().all() and o[:6].any()


@pytest.mark.parametrize("way", ["full", "records"])
def test_outputs_go_where_the_indices_say_and_nowhere_else(backend, way):
    """The same shapes with the tokens at other places; then with indices out of range for a token of each kind."""
    x = layer(backend.device)
    rows = FULL if way == "full" else MIXED
    batch = Batch.of(rows, device=x.device)
    T = batch.num_tokens
    tokens, first = x.tokens(T), x.copy()
    want = first.forward(batch, tokens)
    lost = None
    for seed in range(4):
        places = torch.randperm(T + 2, generator=torch.Generator().manual_seed(seed))[:T].to(x.device)
        moved = {name: t.new_full((T + 2, *t.shape[1:]), NAN) for name, t in tokens.items()}
        for name, t in tokens.items():
            moved[name][places] = t
        indices = [places[where.long()].int() for where in (batch.token_indices, batch.verify_token_indices)]
        out, y = frame(torch.full((1, T + 2, H, V), 7.0, dtype=BF16, device=x.device))[0], x.copy()
        if seed == 3:
            indices[0][0], indices[0][-1], indices[1][-1] = -1, T + 2, 1 << 30
            lost = torch.cat([batch.token_indices[[0, -1]], batch.verify_token_indices[-1:]]).long()
        other = dataclasses.replace(batch, token_indices=indices[0], verify_token_indices=indices[1], decode_start=None,
                                    prefill_start=None, verify_start=None)
        y.forward(other, moved, out=out)
        expected = torch.full_like(out, 7.0)
        expected[places] = want
        if lost is not None:  # the decode's own, and the last tokens of a prefill and of a window
            expected[places[lost]] = 7.0
        assert torch.equal(out, expected)
        assert_only_view_written(out)
        assert torch.equal(y.pool.pages, first.pool.pages) or lost is not None


def test_no_rows_and_no_tokens(backend):
    x = layer(backend.device)
    before = x.pool.pages.clone()
    assert x.forward([], x.tokens(0)).shape == (0, H, V) and not x.forward([], x.tokens(3)).any()
    out = torch.full((3, H, V), 7.0, dtype=BF16, device=x.device)
    assert (x.forward([], x.tokens(3), out=out) == 7.0).all()
    assert not x.forward([Prefill(0, 0), Verify(0, 0, 0), Decode(0)], x.tokens(1)).any()
    assert torch.equal(x.pool.pages, before)


# -------------------------------------------------------------------------------------------------------------- bad input

FULL = [row if not isinstance(row, Verify) else Verify([row.slots, row.slots + 10], 1, 1) for row in MIXED]
BAD = {  # the first row that is served would be a decode: what is wrong concerns a later one
    "batch": (MIXED, lambda a: dict(batch=MIXED), "batch"),
    "too-few-tokens": (MIXED, lambda a: {name: a[name][:15] for name in INPUTS}, "qkv"),
    "beta-rows": (MIXED, lambda a: dict(beta=a["beta"][1:]), "beta"),
    "records-none": (MIXED, lambda a: dict(records=None), "records"),
    "records-none-to-commit": ([Decode(2, 1)], lambda a: dict(records=None), "records"),
    "records-window": (MIXED, lambda a: dict(records=a["records"].flatten(1)[:, :3 * 2 * 80].unflatten(1, (3, 2, 80))),
                       "records"),
    "records-dtype": (MIXED, lambda a: dict(records=a["records"].to(BF16)), "records"),
    "conv_state-records": (MIXED, lambda a: dict(conv_state=a["conv_state"][..., :-1]), "conv_state"),
    "conv_state-full": (FULL, lambda a: dict(conv_state=a["conv_state"][..., :3], batch=Batch.of(
        [Decode(1), Verify([2, 3, 4], 1, 1)], device=a["qkv"].device)), "conv_state"),
    "ssm_state-dtype": (MIXED, lambda a: dict(ssm_state=a["ssm_state"].half()), "ssm_state"),
    "other-device": (MIXED, lambda a: dict(batch=Batch.of(MIXED, device="meta")), "batch.decode_slots"),
    "A_log": (MIXED, lambda a: dict(A_log=a["A_log"][:1].repeat(3)), "A_log"),
    "lower_bound": (MIXED, lambda a: dict(lower_bound=0.5), "lower_bound"),
    "activation": (FULL, lambda a: dict(activation="relu"), "activation"),
    "out-shape": (MIXED, lambda a: dict(out=a["out_gate"][1:].clone()), "out"),
    "out-aliases": (MIXED, lambda a: dict(out=a["out_gate"]), "out"),
    "out-aliases-records": (MIXED, lambda a: dict(out=a["records"].view(-1)[:256].view(BF16)[:512].view(16, H, V)), "out"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named_and_nothing_is_written(backend, bad):
    rows, change, named = BAD[bad]
    x = layer(backend.device)
    batch = Batch.of(rows, device=x.device)
    args = dict(**x.tokens(batch.num_tokens), **{n: t.clone() for n, t in x.states.items()}, **x.weights, batch=batch)
    for _ in range(2):  # also where a good call of these shapes has gone before
        with pytest.raises((TypeError, ValueError), match=f"`{named}`.*got.*accepted"):
            call(kda_forward, **{**args, **change(args)})
        kda_forward(**args)


def test_slots_past_the_pool_are_found_under_kda_check(backend, monkeypatch):
    x = layer(backend.device)
    rows = [Decode(1), Verify([2, 99], 2, 1)]
    x.copy().forward(rows, x.tokens(3))
    monkeypatch.setenv("KDA_CHECK", "1")
    before = x.pool.pages.clone()
    with pytest.raises(ValueError, match="batch.verify_slots.*99.*KDA_CHECK"):
        x.forward(rows, x.tokens(3))
    assert torch.equal(x.pool.pages, before)


def test_windows_past_the_records_are_found_under_kda_check(backend, monkeypatch):
    x = layer(backend.device)
    batch = Batch.of([Decode(1), Verify(2, 3, 0), Verify(3, 3, 0)], device=x.device)
    batch.verify_query_start_loc.copy_(ints([0, 1, 6], x.device))
    monkeypatch.setenv("KDA_CHECK", "1")
    before = x.pool.pages.clone()
    with pytest.raises(ValueError, match="verify_query_start_loc.*5 tokens.*KDA_CHECK"):
        x.forward(batch, x.tokens(7))
    assert torch.equal(x.pool.pages, before)


# ---------------------------------------------------------------------------------------------------- launches and graphs


def launched(monkeypatch, run):
    """How many kernels a GPU would be given: Triton's launches, and torch's operations that compute or copy."""
    from triton.runtime.jit import JITFunction

    from kda.triton.launch import Launch

    count, jit_run = [], JITFunction.run
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "find", lambda *_: None)
        patch.setattr(JITFunction, "run", lambda self, *args, **kwargs: (count.append(self), jit_run(self, *args, **kwargs))[1])
        torch.use_deterministic_algorithms(False)  # it fills what is empty
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
            run()
    quiet = ("empty", "view", "slice", "select", "as_strided", "split", "unflatten", "narrow", "transpose", "t", "unsqueeze",
             "expand", "new_empty", "empty_like", "empty_strided", "reshape", "_unsafe_view", "squeeze", "permute", "detach",
             "split_with_sizes", "result_type", "resolve_conj", "resolve_neg", "resize_", "unbind", "alias", "numpy_T")
    # a torch operation is counted once, not its parts too
    ends, computed = 0.0, 0
    for event in sorted(prof.events(), key=lambda e: e.time_range.start):
        if event.name.startswith("aten::") and event.name[6:] not in quiet and event.time_range.start >= ends:
            ends, computed = event.time_range.end, computed + 1
    return len(count) + computed


@pytest.mark.parametrize("way", ["full", "records"])
def test_one_launch_more_than_its_parts_at_most(backend, way, monkeypatch):
    """None into a buffer, unless tokens lie between others': one gathers them, and makes a fresh output ready."""
    if not backend.name.startswith("triton") or backend.name == "triton-interpret":
        pytest.skip("it is about Triton's launches")
    rows = FULL if way == "full" else MIXED
    rows = [row if not isinstance(row, Prefill) else row._replace(checkpoints=None) for row in rows]
    by_kind = sorted(rows, key=lambda row: type(row).__name__)
    x = layer(backend.device)

    def count(rows, given_out=False, padding=0):
        batch = Batch.of(rows, device=x.device)
        tokens = x.tokens(batch.num_tokens + padding)
        args = dict(**tokens, **x.states, **x.weights, batch=batch)
        args["out"] = torch.zeros_like(tokens["out_gate"]) if given_out else None
        kda_forward(**args)
        return launched(monkeypatch, lambda: kda_forward(**args))

    kinds = [[row for row in rows if isinstance(row, kind)] for kind in (Decode, Prefill, Verify)]
    counts = [count(kind, given_out=True) for kind in kinds]
    parts = sum(counts)
    assert counts[0] == 2 and counts[2] == (3 if way == "full" else 1)  # of the decodes one is committed first
    assert count(by_kind, given_out=True) == count(by_kind[::-1], given_out=True) == parts
    assert count(by_kind) == count(by_kind, padding=5) == parts + 1
    assert count(rows) == count(rows, given_out=True) == count(rows, padding=5) == parts + 1


def test_torch_compile_and_gradients(backend):
    """One graph, whatever the rows; and asked for gradients it refuses in the backward pass."""
    x = layer(backend.device)
    tokens, eager, compiled = x.tokens(18), *({name: t.clone() for name, t in x.states.items()} for _ in range(2))
    batch = Batch.of(MIXED, device=x.device)

    def step(states):
        return kda_forward(**tokens, **states, **x.weights, batch=batch)

    want = step(eager)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(compiled), want)
    assert all(torch.equal(eager[name].nan_to_num(), compiled[name].nan_to_num()) for name in eager)
    tokens["qkv"].requires_grad_()
    with pytest.raises(RuntimeError, match="no backward pass"):
        step(eager).sum().backward()


@needs_gpu
@pytest.mark.parametrize("way", ["full", "records"])
def test_it_does_not_wait_and_a_graph_replays_with_other_rows(way):
    x = layer("cuda")
    rows = FULL if way == "full" else MIXED
    batch = Batch.of(rows, device="cuda")
    tokens = x.tokens(batch.num_tokens + 2)
    x.forward(batch, tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kda_forward(**tokens, **x.states, **x.weights, batch=batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kda_forward(**tokens, **x.states, **x.weights, batch=batch)
    eager = x.copy()
    batch.decode_slots.copy_(ints([0, 18], "cuda"))
    batch.prefill_slots.copy_(ints([19, 2], "cuda"))
    batch.prefill_query_start_loc.copy_(ints([0, 2, 7], "cuda"))
    batch.has_initial_state.copy_(~batch.has_initial_state)
    batch.num_accepted_tokens.fill_(2)
    graph.replay()
    want = kda_forward(**tokens, **eager.states, **eager.weights, batch=batch)
    assert torch.equal(captured, want) and torch.equal(x.pool.pages, eager.pool.pages)
