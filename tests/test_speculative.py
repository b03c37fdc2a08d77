# SPDX-License-Identifier: Apache-2.0
"""kda_verify and kda_commit: draft tokens on one checkpoint a request, against the oracle and against plain decoding."""

import dataclasses
import itertools

import oracle
import pytest
import torch
from helpers import (BF16, BOUNDS, FP16, FP32, assert_accurate, assert_only_view_written, call, dtype_id, each_dtype, frame,
                     gpu_subset, ints, needs_gpu, on_backends, rand, randn, starts, state_dtype_of, subprocess_python,
                     unchanged)

import kda

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

NAN = float("nan")
SLOTS = 9
TOKENS = ("qkv", "raw_g", "beta", "out_gate")
POOLS = ("conv_state", "ssm_state", "records")

SMALL = {
    "drafts": dict(lens=(4, 2, 1)),
    "one": dict(lens=(3,), K=16, V=24, W=2, window=3),
    "grouped": dict(lens=(5, 3), H=2, HV=6, K=16, V=32, window=5, conv_bias=True),
    "odd": dict(lens=(7, 8), H=3, K=40, V=20, W=3, window=8),
}
COMPILED = {
    "glm": dict(lens=(4, 4, 4), H=2, K=128, V=128),
    "uneven": dict(lens=(1, 6), H=2, HV=4, K=96, V=80, W=5, window=6),
    "tall": dict(lens=(2, 2), H=2, K=32, V=200, window=2),
    "widest": dict(lens=(8, 3), H=1, HV=2, K=256, V=256, W=8, window=8),
}
LARGE = {"glm-64": dict(lens=(4,) * 8, H=64, K=128, V=128)}
SHAPES = {**SMALL, **COMPILED, **LARGE}
each_shape = on_backends("shape", SMALL, COMPILED, LARGE)


@dataclasses.dataclass
class Layer:
    """Pools and parameters. A slot that no request has holds NaN, and so does what no token has written yet."""

    conv_state: torch.Tensor
    ssm_state: torch.Tensor
    records: torch.Tensor
    conv_weight: torch.Tensor
    A_log: torch.Tensor
    g_bias: torch.Tensor
    norm_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    lower_bound: float | None
    H: int
    dtype: torch.dtype

    @property
    def device(self):
        return self.ssm_state.device

    @property
    def past(self):
        return self.conv_weight.shape[1] - 1

    @property
    def window(self):
        return self.records.shape[1]

    @property
    def pools(self):
        return {name: getattr(self, name) for name in POOLS}

    @property
    def parameters(self):
        names = ("conv_weight", "A_log", "g_bias", "norm_weight", "conv_bias", "lower_bound")
        return {name: getattr(self, name) for name in names}

    def copy(self, **fields):
        """With pools of its own."""
        own = dict(conv_state=self.conv_state.mT.clone().mT, ssm_state=self.ssm_state.clone(), records=self.records.clone())
        return dataclasses.replace(self, **{**own, **fields})

    def tokens(self, T, seed):
        (HV, V, K), put = self.ssm_state.shape[1:], dict(dtype=self.dtype, device=self.device)
        return dict(qkv=randn(T, self.conv_state.shape[1], seed=seed, **put), raw_g=randn(T, HV, K, seed=seed + 1, **put),
                    beta=randn(T, HV, seed=seed + 2, **put), out_gate=randn(T, HV, V, seed=seed + 3, **put))

    def verify(self, x, lens, slots, accepted=None, **overrides):
        args = {**x, **self.pools, **self.parameters, "ssm_state_indices": ints(slots, self.device),
                "cu_seqlens": ints(starts(lens), self.device),
                "num_accepted_tokens": None if accepted is None else ints(accepted, self.device), **overrides}
        return call(kda.kda_verify, **args, written=(*POOLS, "out"))

    def commit(self, slots, accepted, **overrides):
        args = {**self.pools, "ssm_state_indices": ints(slots, self.device),
                "num_accepted_tokens": ints(accepted, self.device), **overrides}
        with unchanged(self.records):
            assert call(kda.kda_commit, **args, written=POOLS) is None

    def decode(self, x, slots):
        return kda.kda_decode(**x, conv_state=self.conv_state, ssm_state=self.ssm_state, **self.parameters,
                              ssm_state_indices=ints(slots, self.device))

    def checkpoint(self, slot):
        return self.conv_state[slot, :, :self.past], self.ssm_state[slot]

    def oracle(self, x, history, state):
        """Output, convolution history and state after the tokens `x` of one request, in fp64."""
        if not len(x["qkv"]):
            return x["out_gate"].double(), history, state.double()
        (HV, V, K), new = self.ssm_state.shape[1:], x["qkv"].to(self.conv_state.dtype)
        y, history = oracle.conv(new.T, self.conv_weight, self.conv_bias, history, True)
        q, k, v = y.T.to(self.dtype).split([self.H * K, self.H * K, HV * V], -1)  # contract section 2: rounded
        heads = [t[None].unflatten(-1, (n, -1)) for t, n in ((q, self.H), (k, self.H), (v, HV))]
        o, state = oracle.kda(*heads, x["raw_g"][None], x["beta"][None], sigmoid_beta=True, A_log=self.A_log,
                              g_bias=self.g_bias, lower_bound=self.lower_bound, initial_state=state[None])
        o, _ = oracle.rms_norm_gated(o[0], x["out_gate"], self.norm_weight, None, "sigmoid", eps=1e-5)
        return o, history, state[0]


def layer(slots, *, H=2, HV=None, K=32, V=16, W=4, window=4, dtype=BF16, device="cpu", state_dtype=FP32, conv_dtype=None,
          gate="bounded", conv_bias=False, seed=0):
    HV, seed, conv_dtype = HV or H, 100 * seed, conv_dtype or dtype
    dim = 2 * H * K + HV * V
    conv = torch.full((SLOTS, W - 1 + window, dim), NAN, dtype=conv_dtype, device=device).mT
    state = torch.full((SLOTS, HV, V, K), NAN, dtype=state_dtype, device=device)
    for n, slot in enumerate(slots):
        conv[slot, :, :W - 1] = randn(dim, W - 1, seed=seed + 20 + n, device=device).to(conv_dtype)
        state[slot] = randn(HV, V, K, seed=seed + 40 + n, scale=0.3, device=device).to(state_dtype)
    return Layer(
        conv, state, torch.full((SLOTS, window, HV, 2 * K + V), NAN, device=device),
        conv_weight=randn(dim, W, seed=seed + 5, scale=0.5, device=device),
        A_log=rand(HV, seed=seed + 6).clamp(min=0.01).log().to(device),
        g_bias=randn(HV * K, seed=seed + 7, scale=0.1, device=device),
        norm_weight=1 + randn(V, seed=seed + 8, scale=0.1, device=device),
        conv_bias=randn(dim, seed=seed + 9, device=device) if conv_bias else None,
        lower_bound=-5.0 if gate == "bounded" else None, H=H, dtype=dtype,
    )


def case(shape, **kwargs):
    """A layer, tokens, lengths and slots."""
    spec = {**SHAPES[shape], **kwargs}
    lens = spec.pop("lens")
    slots = [len(lens) - n for n in range(len(lens))]
    x = layer(slots, **spec)
    return x, x.tokens(sum(lens), 7), lens, slots


def cut(x, a, b):
    return {name: t[a:b] for name, t in x.items()}


def join(parts):
    return {name: torch.cat([part[name] for part in parts]) for name in TOKENS}


def same(a, b):
    return torch.equal(a.nan_to_num(3e4), b.nan_to_num(3e4)) and torch.equal(a.isnan(), b.isnan())


def assert_near(o, other):
    """Outputs of two ways, each of which may be off by the bound."""
    assert o.isfinite().all() and oracle.err(o, other) <= 2 * BOUNDS[o.dtype]["output"]


def assert_same_checkpoint(x, other, slots, dtype):
    """conv histories to the bit, recurrent states within rounding."""
    for slot in slots:
        (history, state), (other_history, other_state) = x.checkpoint(slot), other.checkpoint(slot)
        assert torch.equal(history, other_history)
        assert_accurate(state, other_state, state_dtype_of(FP32, state.dtype), "state")


# ----------------------------------------------------------------------------------------------------------- what it is


@gpu_subset(lambda shape, gate, dtype, **_: dtype == BF16 and (gate == "bounded" or shape == "drafts"))
@each_dtype
@pytest.mark.parametrize("gate", ["bounded", "unbounded"])
@each_shape
def test_outputs_and_what_commit_makes_of_the_checkpoint_equal_the_oracle(backend, shape, gate, dtype):
    """One to seven drafts; every count of accepted tokens, from nothing to all, of the same window."""
    x, tokens, lens, slots = case(shape, gate=gate, dtype=dtype, device=backend.device)
    before = x.copy()
    o = x.verify(tokens, lens, slots)
    assert torch.equal(x.ssm_state.nan_to_num(7.0), before.ssm_state.nan_to_num(7.0))
    assert same(x.conv_state[..., :x.past], before.conv_state[..., :x.past])
    others = [s for s in range(SLOTS) if s not in slots]
    assert x.records[others].isnan().all() and x.conv_state[others].isnan().all()
    rows = [(n, slot, *bounds) for n, (slot, *bounds) in enumerate(zip(slots, starts(lens), starts(lens)[1:]))]
    want = [x.oracle(cut(tokens, a, b), *before.checkpoint(slot))[0] for _, slot, a, b in rows]
    assert_accurate(o, torch.cat(want), dtype)

    for accepted in range(max(lens) + 1):
        y, counts = x.copy(), [min(accepted, length) for length in lens]
        y.commit(slots, counts)
        for n, slot, a, _ in rows:
            _, history, state = x.oracle(cut(tokens, a, a + counts[n]), *before.checkpoint(slot))
            assert torch.equal(y.conv_state[slot, :, :x.past], history.to(x.conv_state.dtype))
            assert_accurate(y.ssm_state[slot], state, dtype, "state")
        assert y.ssm_state[others].isnan().all() and y.conv_state[others].isnan().all()
        assert same(y.conv_state[..., x.past:], x.conv_state[..., x.past:])


@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=dtype_id)
@on_backends("shape", ["drafts", "grouped"], ["glm", "widest"])
def test_the_next_verify_commits_to_the_same_bits_as_commit(backend, shape, state_dtype):
    x, tokens, lens, slots = case(shape, device=backend.device, state_dtype=state_dtype)
    x.verify(tokens, lens, slots)
    apart, more = x.copy(), x.tokens(sum(lens), 60)
    counts = [(n + 2) % (length + 1) for n, length in enumerate(lens)]
    o = x.verify(more, lens, slots, counts)
    apart.commit(slots, counts)
    want = apart.verify(more, lens, slots)
    assert torch.equal(o, want)
    for name in POOLS:
        assert same(getattr(x, name), getattr(apart, name))


@each_dtype
@on_backends("shape", ["drafts", "odd"], ["glm"])
def test_a_verify_of_one_token_and_its_commit_are_a_decode_step(backend, shape, dtype):
    x, _, lens, slots = case(shape, dtype=dtype, device=backend.device)
    plain, lens = x.copy(), [1] * len(slots)
    for t in range(4):
        tokens = x.tokens(len(slots), 10 * t)
        o = x.verify(tokens, lens, slots, [min(t, 1)] * len(slots))
        assert_near(o, plain.decode(tokens, slots))
    x.commit(slots, lens)
    assert_same_checkpoint(x, plain, slots, dtype)


@pytest.mark.parametrize("conv_dtype", [FP32, FP16], ids=lambda d: "conv-" + dtype_id(d))
@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=lambda d: "state-" + dtype_id(d))
def test_states_in_dtypes_of_their_own(backend, state_dtype, conv_dtype):
    x, tokens, lens, slots = case("drafts", device=backend.device, state_dtype=state_dtype, conv_dtype=conv_dtype)
    before = x.copy()
    o = x.verify(tokens, lens, slots)
    x.commit(slots, lens)
    for slot, a, b in zip(slots, starts(lens), starts(lens)[1:]):
        want, history, state = x.oracle(cut(tokens, a, b), *before.checkpoint(slot))
        assert_accurate(o[a:b], want, BF16)
        assert torch.equal(x.conv_state[slot, :, :x.past], history.to(conv_dtype))
        assert_accurate(x.ssm_state[slot], state, state_dtype_of(BF16, state_dtype), "state")


def test_gate_and_norm_options_are_those_of_decode(backend):
    x, tokens, lens, slots = case("drafts", dtype=FP32, device=backend.device)
    options = dict(activation="silu", eps=1e-2, scale=0.01)
    want = kda.kda_decode(**cut(tokens, 0, 1), **{n: t.clone() for n, t in x.pools.items() if n != "records"},
                          **{**x.parameters, "norm_weight": None}, ssm_state_indices=ints(slots[:1], x.device), **options)
    x = dataclasses.replace(x, norm_weight=None)
    assert_near(x.verify(tokens, lens, slots, **options)[:1], want)


# ------------------------------------------------------------------------------------------------- step after step


class Requests:
    """Requests that speculate, seen from an engine; each keeps the tokens that it has accepted."""

    def __init__(self, x, slots):
        self.x, self.plain, self.seed = x, x.copy(), itertools.count(1000, 10)
        self.start = {slot: tuple(t.clone() for t in x.checkpoint(slot)) for slot in slots}
        self.accepted = {slot: [] for slot in slots}
        self.draft, self.pending = {}, {slot: 0 for slot in slots}

    def _plain(self, slot, tokens, o):
        for t in range(len(tokens["qkv"])):
            assert_near(o[t:t + 1], self.plain.decode(cut(tokens, t, t + 1), [slot]))
        self.accepted[slot].append(tokens)

    def verify(self, lens, fused):
        """lens: slot -> tokens. Records pending are committed by verify itself, or before."""
        slots = list(lens)
        if not fused:
            self.commit(slots)
        tokens = {slot: self.x.tokens(lens[slot], next(self.seed)) for slot in slots}
        counts = [self.pending[slot] for slot in slots] if fused or any(self.pending[s] for s in slots) else None
        o = self.x.verify(join([tokens[slot] for slot in slots]), lens.values(), slots, counts)
        for slot, o_n in zip(slots, o.split(list(lens.values()))):
            self.draft[slot], self.pending[slot] = (tokens[slot], o_n), 0

    def accept(self, counts):
        for slot, count in counts.items():
            tokens, o = self.draft.pop(slot)
            self.pending[slot] = count
            self._plain(slot, cut(tokens, 0, count), o)

    def commit(self, slots):
        self.x.commit(slots, [self.pending[slot] for slot in slots])
        self.pending.update(dict.fromkeys(slots, 0))

    def decode(self, slot):
        self.commit([slot])
        tokens = self.x.tokens(1, next(self.seed))
        self._plain(slot, tokens, self.x.decode(tokens, [slot]))

    def check(self):
        """Every checkpoint is plain decoding's, and the oracle's over all tokens accepted."""
        self.commit(list(self.start))
        assert_same_checkpoint(self.x, self.plain, self.start, self.x.dtype)
        for slot, parts in self.accepted.items():
            if parts:
                _, history, state = self.x.oracle(join(parts), *self.start[slot])
                assert torch.equal(self.x.checkpoint(slot)[0], history.to(self.x.conv_state.dtype))
                assert_accurate(self.x.checkpoint(slot)[1], state, self.x.dtype, "state")


STEPS = st.lists(
    st.tuples(st.sampled_from(["fused", "apart"]),
              st.lists(st.tuples(st.sampled_from(["verify", "decode", "idle"]), st.integers(1, 8), st.integers(0, 8)),
                       min_size=3, max_size=3)),
    min_size=1, max_size=5)


@settings(max_examples=25, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS, window=st.integers(2, 8), dtype=st.sampled_from([BF16, FP32]))
def test_any_drafts_any_accepted_counts_any_order_of_steps(backend, steps, window, dtype):
    """Rows with 1 to 7 drafts of which any number is accepted, plain decode steps and pauses between."""
    slots = [3, 8, 1]
    x = Requests(layer(slots, K=16, V=16, H=2, window=window, dtype=dtype, device=backend.device), slots)
    for way, rows in steps:
        moves = dict(zip(slots, rows))
        lens = {slot: min(length, window) for slot, (move, length, _) in moves.items() if move == "verify"}
        if lens:
            x.verify(lens, way == "fused")
            x.accept({slot: min(moves[slot][2], length) for slot, length in lens.items()})
        for slot, (move, *_) in moves.items():
            if move == "decode":
                x.decode(slot)
    x.check()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
@on_backends("drafts", [1, 3, 7], [2, 4, 5, 6])
def test_many_steps_with_rejections(backend, drafts, fused):
    slots, window = [2, 5], drafts + 1
    x = Requests(layer(slots, window=window, dtype=FP32, device=backend.device), slots)
    for step in range(10):
        x.verify({slot: window for slot in slots}, fused)
        x.accept({slot: (step + 3 * slot) % (window + 1) for slot in slots})
    x.check()


def test_from_a_prompt_into_speculation_out_of_it_and_back(backend):
    """kda_prefill, two verifies, plain decode steps, another verify: one run of tokens in the oracle's eyes."""
    x = layer([], K=32, V=32, H=2, dtype=FP32, device=backend.device)
    parts, slot, zeros = [x.tokens(20, 1)], 4, x.tokens(0, 0)
    outputs = [kda.kda_prefill(**parts[0], conv_state=x.conv_state, ssm_state=x.ssm_state, **x.parameters,
                               ssm_state_indices=ints([slot], x.device), cu_seqlens=ints([0, 20], x.device),
                               has_initial_state=None)]

    def verify(seed, committed, accepted):
        tokens = x.tokens(4, seed)
        outputs.append(x.verify(tokens, [4], [slot], [committed])[:accepted])
        parts.append(cut(tokens, 0, accepted))

    verify(10, 0, 3)
    verify(20, 3, 1)
    assert not len(x.verify(zeros, [0], [slot], [1]))  # a row without tokens commits
    for seed in (30, 40):
        parts.append(x.tokens(1, seed))
        outputs.append(x.decode(parts[-1], [slot]))
    verify(50, 0, 4)
    verify(60, 4, 2)
    x.commit([slot], [2])
    state = torch.zeros_like(x.ssm_state[slot])
    want, history, state = x.oracle(join(parts), torch.zeros_like(x.conv_state[slot, :, :x.past]), state)
    assert_accurate(torch.cat(outputs), want, FP32)
    assert_accurate(x.ssm_state[slot], state, FP32, "state")
    assert torch.equal(x.conv_state[slot, :, :x.past], history.to(FP32))


def test_a_window_that_is_forgotten_leaves_no_trace(backend):
    """A request preempted after its verify: decoding goes on as if there had been none."""
    x, tokens, lens, slots = case("drafts", device=backend.device)
    plain, step = x.copy(), x.tokens(len(slots), 90)
    x.verify(tokens, lens, slots)
    assert torch.equal(x.decode(step, slots), plain.decode(step, slots))
    assert same(x.ssm_state, plain.ssm_state) and same(x.conv_state[..., :x.past], plain.conv_state[..., :x.past])


# ----------------------------------------------------------------------------------------------------- rows that are none


@pytest.mark.parametrize("given_out", [False, True], ids=["fresh", "out"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_padding_and_stale_rows_give_zeros_and_touch_nothing(backend, index_dtype, given_out):
    """Null and foreign slots, counts below zero and past the window; NaN tokens in them; strided indices."""
    slots, live = [3, 0, 5, -1, SLOTS, 1 << 30, 2, 6], [0, 2]
    counts = [2, 1, 0, 1, 1, 1, -1, 5]
    x = layer([3, 5, 2, 6], device=backend.device)
    lens = [3, 2, 4, 1, 2, 0, 4, 3]
    first = x.tokens(8, 70)
    x.verify(first, [4, 4], [3, 5])
    before, alone, tokens = x.copy(), x.copy(), x.tokens(sum(lens), 80)
    bounds = list(zip(starts(lens), starts(lens)[1:]))
    for n, (a, b) in enumerate(bounds):
        if n not in live:
            for t in tokens.values():
                t[a:b] = NAN
    want = alone.verify(join([cut(tokens, *bounds[n]) for n in live]), [lens[n] for n in live], [3, 5], [2, 0])
    wide = torch.full((len(slots), 5), 4, dtype=index_dtype, device=x.device)
    wide[:, 1], wide[:, 3] = torch.tensor(slots), torch.tensor(counts)
    out = torch.full_like(tokens["out_gate"], NAN) if given_out else None
    o = x.verify(tokens, lens, slots, ssm_state_indices=wide[:, 1], num_accepted_tokens=wide[:, 3], out=out)
    assert not given_out or o is out
    assert torch.equal(torch.cat([o[slice(*bounds[n])] for n in live]), want)
    assert not any(o[a:b].any() for n, (a, b) in enumerate(bounds) if n not in live)
    for name in POOLS:
        assert same(getattr(x, name), getattr(alone, name))
        others = [s for s in range(SLOTS) if s not in (3, 5)]
        assert same(getattr(x, name)[others], getattr(before, name)[others])
    before = x.copy()
    x.commit(slots, counts, ssm_state_indices=wide[:, 1][1:], num_accepted_tokens=wide[:, 3][1:])
    assert all(same(getattr(x, name), getattr(before, name)) for name in POOLS)


@pytest.mark.parametrize("short", POOLS)
def test_a_slot_past_the_smallest_pool_is_padding(backend, short):
    x, tokens, lens, slots = case("drafts", device=backend.device)  # slots 3, 2, 1
    x = dataclasses.replace(x, **{short: getattr(x, short)[:3]})
    before = x.copy()
    o = x.verify(tokens, lens, slots)
    x.commit(slots, [1, 1, 1])
    assert not o[:lens[0]].any() and o[lens[0]:].isfinite().all() and o[lens[0]:].any()
    for name in POOLS:
        assert same(getattr(x, name)[3:], getattr(before, name)[3:])
        assert not same(getattr(x, name)[1:3], getattr(before, name)[1:3])


def test_records_past_the_accepted_ones_are_not_read(backend):
    x, tokens, lens, slots = case("drafts", device=backend.device)
    x.verify(tokens, lens, slots)
    spoilt, counts = x.copy(), [2, 1, 0]
    for slot, count in zip(slots, counts):
        spoilt.records[slot, count:] = NAN
        spoilt.conv_state[slot, :, x.past + count:] = NAN
    for y in (x, spoilt):
        y.commit(slots, counts)
    assert torch.equal(x.ssm_state[slots], spoilt.ssm_state[slots])
    assert torch.equal(*(y.conv_state[slots][..., :x.past] for y in (x, spoilt)))


def test_tokens_past_the_window_and_past_the_last_row(backend):
    """They give zeros, but in `out=` what no row owns stays."""
    x = layer([1, 2], window=3, device=backend.device)
    tokens, want = x.tokens(9, 4), x.copy()
    o = x.verify(tokens, [5, 2], [1, 2])
    rows = join([cut(tokens, 0, 3), cut(tokens, 5, 7)])
    assert torch.equal(o[[0, 1, 2, 5, 6]], want.verify(rows, [3, 2], [1, 2]))
    assert not o[3:5].any() and not o[7:].any()
    out = torch.full_like(o, NAN)
    x.copy().verify(tokens, [5, 2], [1, 2], out=out)
    assert torch.equal(out[:7], o[:7]) and out[7:].isnan().all()


def test_no_rows_no_tokens(backend):
    x = layer([1], device=backend.device)
    before = x.copy()
    assert x.verify(x.tokens(0, 1), [], []).shape == (0, 2, 16)
    assert not x.verify(x.tokens(3, 1), [], []).any()
    assert x.verify(x.tokens(0, 1), [0], [1], [0]).shape == (0, 2, 16)
    x.commit([], [])
    assert all(same(getattr(x, name), getattr(before, name)) for name in POOLS)


@on_backends("N,H", [], [(1024, 64)])
def test_65536_requests_times_heads(backend, N, H):
    K, put = 16, dict(dtype=BF16, device=backend.device)
    states = dict(conv_state=randn(N + 1, 3, 3 * H * K, seed=1, **put).mT.repeat(1, 1, 2)[..., :4],
                  ssm_state=randn(N + 1, H, K, K, seed=2, device=backend.device))
    records = torch.zeros(N + 1, 1, H, 3 * K, device=backend.device)
    plain = {name: t.clone() for name, t in states.items()}
    args = dict(qkv=randn(N, 3 * H * K, seed=3, **put), raw_g=randn(N, H, K, seed=4, **put),
                beta=randn(N, H, seed=5, **put), out_gate=randn(N, H, K, seed=6, **put),
                ssm_state_indices=torch.arange(N, 0, -1, device=backend.device),
                conv_weight=randn(3 * H * K, 4, seed=7, device=backend.device), A_log=torch.zeros(H, device=backend.device))
    o = kda.kda_verify(**args, **states, records=records, num_accepted_tokens=None,
                       cu_seqlens=torch.arange(N + 1, device=backend.device))
    assert_near(o, kda.kda_decode(**args, **plain))
    kda.kda_commit(**states, records=records, ssm_state_indices=args["ssm_state_indices"],
                   num_accepted_tokens=torch.ones(N, dtype=torch.int32, device=backend.device))
    assert_accurate(states["ssm_state"], plain["ssm_state"], FP32, "state")
    assert torch.equal(states["conv_state"][..., :3], plain["conv_state"][..., :3])


# ----------------------------------------------------------------------------------------------------------------- bits

LAYOUTS = {
    "aligned": lambda x, t: (x, {n: frame(v[None], before=16, after=16)[0] for n, v in t.items()}),
    "odd": lambda x, t: (x, {n: frame(v[None], before=3, after=6)[0] for n, v in t.items()}),
    "head-major": lambda x, t: (x, {n: v.transpose(0, 1).contiguous().transpose(0, 1) if v.dim() == 3 else v
                                    for n, v in t.items()}),
    "conv-dim-first": lambda x, t: (dataclasses.replace(x, conv_state=x.conv_state.contiguous()), t),
    "weight-taps-first": lambda x, t: (dataclasses.replace(x, conv_weight=x.conv_weight.T.contiguous().T), t),
    "pages": lambda x, t: (dataclasses.replace(x, **{n: paged(v, PAD) for n, v in x.pools.items()}), t),
}


PAD = 48  # elements, a multiple of 16 bytes: a pool of other pages is read in other pieces and summed in their order


def paged(pool, pad):
    """`pool` with a gap of NaN behind each slot; the conv state with its channels last."""
    turn = pool.mT if pool.dim() == 3 else pool
    pages = torch.full((len(pool), turn[0].numel() + pad), NAN, dtype=pool.dtype, device=pool.device)
    view = pages[:, :turn[0].numel()].unflatten(1, turn.shape[1:])
    view.copy_(turn)
    return view.mT if pool.dim() == 3 else view


@gpu_subset(lambda shape, dtype, **_: dtype == BF16)
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@on_backends("shape", ["drafts", "grouped"], ["glm", "uneven"])
def test_strides_do_not_change_a_bit(backend, shape, layout, dtype):
    x, tokens, lens, slots = case(shape, dtype=dtype, device=backend.device)
    other, view = LAYOUTS[layout](x.copy(), tokens)
    counts = [min(2, length) for length in lens]
    for accepted in (None, counts):
        assert torch.equal(x.verify(tokens, lens, slots, accepted), other.verify(view, lens, slots, accepted))
    x.commit(slots, counts), other.commit(slots, counts)
    assert all(same(getattr(x, name), getattr(other, name)) for name in POOLS)
    for name in POOLS:
        if layout == "pages":
            pages = torch.empty(0, dtype=getattr(other, name).dtype, device=x.device).set_(
                getattr(other, name).untyped_storage()).view(SLOTS, -1)
            assert pages[:, -PAD:].isnan().all()


def test_pages_at_odd_addresses(backend):
    x, tokens, lens, slots = case("drafts", device=backend.device)
    other = dataclasses.replace(x.copy(), **{name: paged(pool, 37) for name, pool in x.pools.items()})
    counts = [min(2, length) for length in lens]
    for accepted in (None, counts):
        assert_near(other.verify(tokens, lens, slots, accepted), x.verify(tokens, lens, slots, accepted))
    x.commit(slots, counts), other.commit(slots, counts)
    assert_same_checkpoint(other, x, slots, BF16)


@pytest.mark.parametrize("before,after", [(16, 16), (3, 5)], ids=["aligned", "odd"])
def test_out_may_be_a_strided_view(backend, before, after):
    x, tokens, lens, slots = case("grouped", device=backend.device)
    want = x.copy().verify(tokens, lens, slots)
    out = frame(torch.full_like(tokens["out_gate"], NAN)[None], before=before, after=after)[0]
    assert x.verify(tokens, lens, slots, out=out) is out and torch.equal(out, want)
    assert_only_view_written(out)


@each_dtype
def test_a_request_gives_the_same_bits_at_any_place_alone_and_cut_short(backend, dtype):
    """Also in a window of fewer tokens: what a draft gives does not depend on what is drafted behind it."""
    x, tokens, lens, slots = case("drafts", dtype=dtype, device=backend.device)
    moved, alone, short = x.copy(), x.copy(), x.copy()
    o, parts = x.verify(tokens, lens, slots), [cut(tokens, a, b) for a, b in zip(starts(lens), starts(lens)[1:])]
    order = [2, 0, 1]
    got = moved.verify(join([parts[n] for n in order]), [lens[n] for n in order], [slots[n] for n in order])
    assert torch.equal(got, torch.cat([o.split(list(lens))[n] for n in order]))
    assert all(same(getattr(x, name), getattr(moved, name)) for name in POOLS)
    assert torch.equal(alone.verify(parts[0], lens[:1], slots[:1]), o[:lens[0]])
    assert torch.equal(short.verify(cut(parts[0], 0, 2), [2], slots[:1]), o[:2])
    assert torch.equal(short.records[slots[0], :2], x.records[slots[0], :2])


def test_a_nan_request_does_not_touch_its_neighbours(backend):
    x, tokens, lens, slots = case("drafts", device=backend.device)
    other = x.copy()
    want = other.verify(tokens, lens, slots)
    tokens["qkv"][lens[0]:lens[0] + lens[1]] = NAN
    o = x.verify(tokens, lens, slots)
    assert torch.equal(o[:lens[0]], want[:lens[0]]) and torch.equal(o[sum(lens[:2]):], want[sum(lens[:2]):])
    assert o[lens[0]:sum(lens[:2])].isnan().all()
    for y in (x, other):
        y.commit(slots, lens)
    assert torch.equal(x.ssm_state[[slots[0], slots[2]]], other.ssm_state[[slots[0], slots[2]]])


def test_a_nan_draft_does_not_touch_the_tokens_before_it(backend):
    x, tokens, lens, slots = case("drafts", device=backend.device)
    other = x.copy()
    want = other.verify(tokens, lens, slots)
    for t in tokens.values():
        t[2:lens[0]] = NAN
    assert torch.equal(x.verify(tokens, lens, slots)[:2], want[:2])
    for y in (x, other):
        y.commit(slots[:1], [2])
    assert torch.equal(x.ssm_state[slots[0]], other.ssm_state[slots[0]])
    assert torch.equal(x.conv_state[slots[0], :, :x.past], other.conv_state[slots[0], :, :x.past])


@on_backends("shape", ["drafts", "one"], ["glm", "uneven", "tall"])
def test_the_configuration_of_a_gpu_computes_the_same(backend, shape, monkeypatch):
    """State tiles in three dims: what runs on a GPU, here run where the tests run."""
    if backend.name == "reference":
        pytest.skip("has no configurations")
    from kda import known
    from kda.triton import configs

    x, tokens, lens, slots = case(shape, dtype=FP32, device=backend.device)
    other, counts = x.copy(), [1] * len(slots)
    want = [other.verify(tokens, lens, slots), other.verify(tokens, lens, slots, counts)]
    other.commit(slots, counts)
    monkeypatch.setattr(known, "_known", {})
    for name in ("kda_verify", "kda_commit"):
        choose = configs.DEFAULTS[name]
        monkeypatch.setitem(configs.DEFAULTS, name,
                            lambda choose=choose, **shape: choose(**{**shape, "device": torch.device("cuda")}))
    got = [x.verify(tokens, lens, slots), x.verify(tokens, lens, slots, counts)]
    x.commit(slots, counts)
    for o, want_o in zip(got, want):
        assert_accurate(o, want_o, FP32)
    assert_same_checkpoint(x, other, slots, FP32)


# ------------------------------------------------------------------------------------------------------------- bad input

BAD = {
    "qkv-columns": (lambda x: dict(qkv=x["qkv"][:, :-1]), "qkv"),
    "qkv-strides": (lambda x: dict(qkv=x["qkv"].T.contiguous().T), "qkv"),
    "qkv-dtype": (lambda x: dict(qkv=x["qkv"].double()), "qkv"),
    "raw_g-rows": (lambda x: dict(raw_g=x["raw_g"][1:]), "raw_g"),
    "beta-shape": (lambda x: dict(beta=x["beta"][..., None]), "beta"),
    "out_gate-list": (lambda x: dict(out_gate=[1.0]), "out_gate"),
    "conv_state-columns": (lambda x: dict(conv_state=x["conv_state"][..., :-1]), "conv_state"),
    "conv_state-expanded": (lambda x: dict(conv_state=x["conv_state"][:1].expand(SLOTS, -1, -1)), "conv_state"),
    "ssm_state-shape": (lambda x: dict(ssm_state=x["ssm_state"][:, :, :-1]), "ssm_state"),
    "ssm_state-dtype": (lambda x: dict(ssm_state=x["ssm_state"].half()), "ssm_state"),
    "records-none": (lambda x: dict(records=None), "records"),
    "records-dtype": (lambda x: dict(records=x["records"].to(BF16)), "records"),
    "records-size": (lambda x: dict(records=x["records"][..., :-1]), "records"),
    "records-heads": (lambda x: dict(records=x["records"][:, :, :1]), "records"),
    "records-empty": (lambda x: dict(records=x["records"][:0]), "records"),
    "records-window": (lambda x: dict(records=x["records"].repeat(1, 3, 1, 1)), "records"),
    "records-gap": (lambda x: dict(records=x["records"].repeat(1, 2, 1, 1)[:, ::2]), "records"),
    "records-expanded": (lambda x: dict(records=x["records"][:1].expand(SLOTS, -1, -1, -1)), "records"),
    "indices-many": (lambda x: dict(ssm_state_indices=ints([1, 2, 3, 4], x["qkv"].device)), "ssm_state_indices"),
    "indices-window": (lambda x: dict(ssm_state_indices=x["ssm_state_indices"][:, None]), "ssm_state_indices"),
    "indices-float": (lambda x: dict(ssm_state_indices=x["ssm_state_indices"].float()), "ssm_state_indices"),
    "counts-many": (lambda x: dict(num_accepted_tokens=x["cu_seqlens"]), "num_accepted_tokens"),
    "counts-dtype": (lambda x: dict(num_accepted_tokens=x["ssm_state_indices"].float()), "num_accepted_tokens"),
    "cu_seqlens-none": (lambda x: dict(cu_seqlens=None), "cu_seqlens"),
    "cu_seqlens-short": (lambda x: dict(cu_seqlens=x["cu_seqlens"][:-1]), "ssm_state_indices"),
    "weight-rows": (lambda x: dict(conv_weight=x["conv_weight"][1:]), "conv_weight"),
    "weight-taps": (lambda x: dict(conv_weight=x["conv_weight"][:, 1:]), "conv_state"),
    "lower_bound": (lambda x: dict(lower_bound=1.0), "lower_bound"),
    "activation": (lambda x: dict(activation="relu"), "activation"),
    "out-dtype": (lambda x: dict(out=x["out_gate"].double()), "out"),
    "out-gate": (lambda x: dict(out=x["out_gate"]), "out"),
    "out-records": (lambda x: dict(out=x["records"].view(-1)[:x["out_gate"].numel()].view(BF16).view(-1)[
        :x["out_gate"].numel()].view(x["out_gate"].shape)), "out"),
}
BAD_COMMIT = {name: BAD[name] for name in BAD if name.split("-")[0] in ("conv_state", "ssm_state", "records", "counts")}
BAD_COMMIT.update({
    "conv_state-columns": (lambda x: dict(conv_state=x["conv_state"][..., :4]), "conv_state"),
    "conv_state-wide": (lambda x: dict(conv_state=x["conv_state"].repeat(1, 1, 3)), "conv_state"),
    "conv_state-dim": (lambda x: dict(conv_state=x["conv_state"][:, :-1]), "conv_state"),
    "counts-none": (lambda x: dict(num_accepted_tokens=None), "num_accepted_tokens"),
    "indices-float": BAD["indices-float"], "indices-window": BAD["indices-window"],
})


def arguments(device):
    x, tokens, lens, slots = case("drafts", device=device)
    return {**tokens, **x.pools, **x.parameters, "ssm_state_indices": ints(slots, device),
            "cu_seqlens": ints(starts(lens), device), "num_accepted_tokens": ints([0, 0, 0], device)}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named_and_nothing_is_written(backend, bad):
    change, named = BAD[bad]
    args = arguments(backend.device)
    with pytest.raises((TypeError, ValueError), match=f"`{named}`.*got.*accepted"):
        call(kda.kda_verify, **{**args, **change(args)})


@pytest.mark.parametrize("bad", BAD_COMMIT)
def test_commit_names_bad_input_and_writes_nothing(backend, bad):
    change, named = BAD_COMMIT[bad]
    args = arguments(backend.device)
    names = ("conv_state", "ssm_state", "records", "ssm_state_indices", "num_accepted_tokens")
    with pytest.raises((TypeError, ValueError), match=f"`{named}`.*got.*accepted"):
        call(kda.kda_commit, **{name: {**args, **change(args)}[name] for name in names})


def test_a_bad_call_after_a_good_one_is_refused(backend):
    args = arguments(backend.device)
    for _ in range(2):
        kda.kda_verify(**args)
        with pytest.raises(ValueError, match="`out`.*`records`"):
            kda.kda_verify(**args, out=args["records"].view(-1).view(BF16)[:224].view(7, 2, 16))
        with pytest.raises(TypeError, match="`records`"):
            kda.kda_verify(**{**args, "records": args["records"].double()})


CHECKED = """
import torch, kda, pytest
from test_speculative import *
args = arguments("cpu")
kda.kda_verify(**args)
for name, bad in dict(ssm_state_indices=[[1, 1, 2], [1, 2, 9]], num_accepted_tokens=[[0, 5, 0], [-1, 0, 0]],
                      cu_seqlens=[[0, 5, 6, 7], [0, 4, 3, 7]]).items():
    for values in bad:
        with pytest.raises(ValueError, match=f"`{name}`.*KDA_CHECK"):
            kda.kda_verify(**{**args, name: ints(values, "cpu")})
print("checked")
"""


def test_KDA_CHECK_reads_the_values_on_the_device():
    done = subprocess_python(CHECKED, KDA_CHECK="1")
    assert done.stdout.strip().endswith("checked"), done.stderr[-3000:]


# ----------------------------------------------------------------------------------------------- memory, launches, graphs


def test_bytes_of_both_ways():
    """Counted on the tensors that the operations take."""
    window, H, HV, K, V, W = 5, 2, 4, 32, 16, 4
    x = layer([], H=H, HV=HV, K=K, V=V, W=W, window=window)
    size = lambda t: t[0].numel() * t.element_size()  # noqa: E731
    full = window * size(x.ssm_state) + size(x.conv_state[..., :W - 2 + window])
    got = kda.speculation_bytes(window, H, HV, K, V, W)
    assert got == {"full": full, "recovery": sum(size(t) for t in x.pools.values())}
    glm = kda.speculation_bytes(8, 64, 64, 128, 128)
    assert 6 < glm["full"] / glm["recovery"] < 8
    assert 64 * 8 * 1536 == 8 * 64 * (2 * 128 + 128) * 4  # 1.5 KiB a head and token


@needs_gpu
def test_it_does_not_synchronise_and_a_graph_replays_with_other_counts_and_slots():
    x = layer([1, 2, 3, 4, 5, 6, 7], H=4, K=128, V=128, device="cuda")
    x.conv_state.nan_to_num_(0.5), x.ssm_state.nan_to_num_(0.1), x.records.nan_to_num_(0.1)
    tokens, eager = x.tokens(12, 3), x.copy()
    fixed = dict(ssm_state_indices=ints([3, 1, 2], "cuda"), cu_seqlens=ints([0, 4, 8, 12], "cuda"),
                 num_accepted_tokens=ints([0, 2, 4], "cuda"))
    run = lambda x: kda.kda_verify(**tokens, **x.pools, **x.parameters, **fixed)  # noqa: E731
    run(x), run(eager)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x), run(eager)
        for y in (x, eager):
            kda.kda_commit(**y.pools, ssm_state_indices=fixed["ssm_state_indices"],
                           num_accepted_tokens=fixed["num_accepted_tokens"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x)
    for slots, cu, counts in (([4, 0, 6], [0, 1, 5, 9], [1, 1, 3]), ([99, 2, 5], [0, 4, 4, 7], [1, 4, 0])):
        for name, value in dict(ssm_state_indices=slots, cu_seqlens=cu, num_accepted_tokens=counts).items():
            fixed[name].copy_(ints(value, "cuda"))
        graph.replay()
        assert torch.equal(captured, run(eager))
        assert all(torch.equal(getattr(x, name), getattr(eager, name)) for name in POOLS)


@needs_gpu
def test_pools_of_more_than_2_31_elements():
    """The last slot gives what slot 1 gives."""
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of free GPU memory")
    x = layer([1], H=64, K=128, V=128, window=8, device="cuda", state_dtype=BF16)
    slots = max(2**31 // pool[0].numel() for pool in x.pools.values()) + 8
    last, big = slots - 1, {}
    for name, pool in x.pools.items():
        if name == "conv_state":
            big[name] = torch.empty(slots, pool.shape[2], pool.shape[1], dtype=pool.dtype, device="cuda").mT
        else:
            count = 2**31 // pool[0].numel() + 8
            big[name] = torch.empty(count, *pool.shape[1:], dtype=pool.dtype, device="cuda")
        last = min(last, len(big[name]) - 1)
    tokens, outputs = x.tokens(8, 5), []
    for slot in (1, last):
        for name, pool in big.items():
            pool[slot] = getattr(x, name)[1].nan_to_num(0.0)
        fixed = dict(ssm_state_indices=ints([slot], "cuda"), num_accepted_tokens=ints([5], "cuda"))
        outputs.append(kda.kda_verify(**tokens, **big, **x.parameters, cu_seqlens=ints([0, 8], "cuda"), **fixed))
        kda.kda_commit(**big, **fixed)
    assert torch.equal(*outputs) and all(torch.equal(pool[1], pool[last]) for pool in big.values())
