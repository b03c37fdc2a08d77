# SPDX-License-Identifier: Apache-2.0
"""chunk_kda and chunk_kda_with_fused_gate: prefill. Both must equal the recurrence for every gate value."""

import importlib

import oracle
import pytest
import torch
from helpers import (BF16, DTYPES, FP16, FP32, GPU, assert_accurate, assert_only_view_written, bf16_on_gpu, call,
                     chunk, dtype_id, each_dtype, frame, gpu_subset, head_major, ints, make, merged, on_backends, rand, randn,
                     recurrent, replace, starts)

import kda
from kda import known

NAN = float("nan")
TOKENS = ("q", "k", "v", "g", "beta")
HEADS = 2 if GPU else 1  # the interpreter's time is in heads, the compiler's in geometries

# Lengths around every block size from 16 to 64, sequences without tokens among them.
SMALL = {
    "ragged": dict(lens=(0, 1, 15, 16, 17, 0, 31, 33, 0), H=1, K=16, V=16),
    "blocks": dict(lens=(63, 64, 65), H=1, K=32, V=16),
    "grouped": dict(lens=(5, 37), H=1, HV=2, K=16, V=48),
    "batch": dict(B=2, T=35, K=24, V=20),
    "glm": dict(lens=(1, 18), H=1, K=128, V=128),
}
COMPILED = {
    "glm-ragged": dict(lens=(63, 64, 65, 130, 1, 0, 257), H=4, K=128, V=128),
    "uneven-dims": dict(lens=(33, 70), H=3, HV=6, K=96, V=80),
    "256": dict(lens=(3, 70), H=1, K=256, V=256),
    "batch-128": dict(B=3, T=100, H=2, K=128, V=64),
}
LARGE = {
    "prefill": dict(lens=(1300, 547, 1, 200), H=16, K=128, V=128),
    "one-long": dict(lens=(4097,), H=16, K=128, V=128),
    "ragged-128": dict(lens=(63, 64, 65, 130, 1, 0, 257), H=16, K=128, V=128),
    "tp1": dict(lens=(500, 524), H=64, K=128, V=128),
    "256-long": dict(B=2, T=700, H=4, K=256, V=256),
}
SHAPES = {**SMALL, **COMPILED, **LARGE, "packed": dict(lens=(1, 17, 0, 33), H=2, K=16, V=24)}


def compiled_cases(shape, gate, dtype, **_):
    """One geometry of 128 in full, the others where they differ."""
    if shape in ("prefill", "one-long", "ragged-128", "ragged"):
        return dtype != FP16 or gate == "bounded"
    if shape == "256-long":
        return gate == "bounded" and dtype != FP16
    return shape in ("tp1", "uneven-dims", "batch", "grouped") and dtype == BF16 and gate == "bounded"


@gpu_subset(compiled_cases)
@each_dtype
@pytest.mark.parametrize("gate", ["bounded", "unbounded", "steep"])
@on_backends("shape", SMALL, COMPILED, LARGE)
def test_fused_gate_prefill_equals_the_recurrence(backend, shape, gate, dtype):
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device, gate=gate)
    o, final = chunk(x)
    want_o, want_state = x.oracle()
    assert o.dtype == dtype and o.shape == x.v.shape
    assert final.dtype == FP32 and final.is_contiguous()
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


@gpu_subset(lambda shape, gate, dtype, **_: shape == "prefill" and dtype != FP16 or shape == "ragged" and dtype == FP16)
@each_dtype
@pytest.mark.parametrize("gate", ["bounded", "unbounded", "steep"])
@on_backends("shape", ["ragged", "batch"], ["glm-ragged", "uneven-dims"], ["prefill"])
def test_prefill_from_log_decays_equals_the_recurrence(backend, shape, gate, dtype):
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device, gate=gate)
    o, final = chunk(x, fused=False)
    want_o, want_state = x.oracle(g=x.log_decay(), A_log=None)
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


# Log decays that a recurrence takes without a blink. Each y is [T, K] for T tokens of K = 32 channels.
EXTREME = {
    "all-minus-infinity": lambda T: torch.full((T, 32), -float("inf")),
    "minus-infinity-channels": lambda T: torch.full((T, 32), -0.1).masked_fill(torch.arange(32) % 3 == 0,
                                                                               -float("inf")),
    "minus-infinity-here-and-there": lambda T: torch.where(randn(T, 32, seed=1) > 1.0, -float("inf"), -0.05),
    "one-wiped-token": lambda T: torch.full((T, 32), -0.01).index_fill(0, torch.tensor([T // 2]), -float("inf")),
    "minus-1e4-here-and-there": lambda T: torch.where(randn(T, 32, seed=1) > 1.0, -1e4, -0.05),
    "minus-1e30": lambda T: torch.where(randn(T, 32, seed=1) > 1.0, -1e30, -0.05),
    "slow-next-to-steep-channels": lambda T: torch.where(torch.arange(32) % 2 == 0, -1e-3, -50.0).expand(T, 32).clone(),
    "no-decay": lambda T: torch.zeros(T, 32),
    "some-growth": lambda T: randn(T, 32, seed=1) * 0.1,
    "just-over-the-fp32-exponent": lambda T: torch.full((T, 32), -89.0),
}


@each_dtype
@pytest.mark.parametrize("name", EXTREME)
def test_prefill_equals_the_recurrence_for_any_log_decay(backend, name, dtype):
    """No exponential may overflow when its partner underflows: no NaN, and the contract's bound."""
    lens = (65, 20)
    x = make(lens=lens, H=HEADS, dtype=dtype, device=backend.device)
    y = EXTREME[name](sum(lens)).view(1, -1, 1, 32).expand(1, -1, HEADS, 32).contiguous().to(x.device)
    o, final = chunk(x, fused=False, g=y)
    want_o, want_state = x.oracle(g=y, A_log=None)
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


@bf16_on_gpu
@each_dtype
def test_log_decays_may_come_in_the_activation_dtype(backend, dtype):
    x = make(lens=(20, 35), dtype=dtype, device=backend.device)
    y = x.log_decay().to(dtype)
    o, final = chunk(x, fused=False, g=y)
    want_o, want_state = x.oracle(g=y, A_log=None)
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


def repeated_keys(K, decay, dtype, device):
    """Nearly the same key in every token, almost no decay, beta 1: I + A is as far from the identity as it gets."""
    T = 70
    x = make(lens=(T,), H=1, K=K, V=K, dtype=dtype, device=device)
    base = randn(1, 1, 1, K, seed=31)
    x = replace(x, k=(base + 0.05 * randn(1, T, 1, K, seed=32)).to(dtype).to(x.device))
    ones, y = torch.ones_like(x.beta), torch.full((1, T, 1, K), decay, device=x.device)
    got = chunk(x, fused=False, g=y, beta=ones, sigmoid_beta=False)
    return got, x.oracle(g=y, A_log=None, beta=ones, sigmoid_beta=False)


@each_dtype
@pytest.mark.parametrize("decay", [0.0, -0.02])
def test_repeated_keys_do_not_amplify_the_error_of_the_inverse(backend, decay, dtype):
    (o, final), (want_o, want_state) = repeated_keys(32, decay, dtype, backend.device)
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


@bf16_on_gpu
@each_dtype
def test_chunks_of_slow_fast_and_growing_decays_in_turn(backend, dtype):
    """Log decays as they are given: sums of a chunk on either side of what the products take at once, zeros, and y > 0."""
    kinds = torch.tensor([-0.01, -4.9, -5.1, -60.0, 0.0, 0.02]).repeat_interleave(16)
    x = make(lens=(7, 16 * 18 + 5), H=2, K=128, V=64, dtype=dtype, device=backend.device)
    T = x.q.shape[1]
    y = kinds.repeat(4)[:T, None, None] * (1 + 0.02 * rand(T, 2, 128, seed=5))
    y = y.to(x.device)[None]
    o, final = chunk(x, fused=False, g=y)
    want_o, want_state = x.oracle(g=y, A_log=None)
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


def keys_around_one(T, noise, gate, lower_bound, dtype, device):
    """Beta 1, one raw gate value, and keys that are one key with noise."""
    x = make(lens=(T,), H=2, K=128, V=128, dtype=dtype, device=device)
    keys = randn(1, 1, 2, 128, seed=31) + noise * randn(1, T, 2, 128, seed=32)
    return replace(
        x, k=keys.to(dtype).to(x.device), g=torch.full_like(x.g, gate), beta=torch.full_like(x.beta, 40.0),
        A_log=torch.zeros_like(x.A_log), g_bias=torch.zeros_like(x.g_bias), lower_bound=lower_bound,
    )  # fmt: skip


@bf16_on_gpu
@pytest.mark.parametrize("gate", [-40.0, -8.0, -5.5, -3.0, 0.0, 5.0])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@each_dtype
def test_repeated_keys_at_the_main_head_dim(backend, dtype, lower_bound, noise, gate):
    """The same key again and again, under no, a slow and a fast decay: roundings of its copies must not add up."""
    x = keys_around_one(500, noise, gate, lower_bound, dtype, backend.device)
    o, final = chunk(x)
    want_o, want_state = x.oracle()
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


@pytest.mark.parametrize("noise", [1.0, 2.0])
@pytest.mark.parametrize("gate", [-40.0, -8.0])
def test_beta_of_one_and_next_to_no_decay(backend, gate, noise):
    """What is left over the contract in bf16 (README, Accuracy), whatever the keys: by 15% for the state."""
    x = keys_around_one(1024, noise, gate, -5.0, BF16, backend.device)
    o, final = chunk(x)
    want_o, want_state = x.oracle()
    assert oracle.err(o, want_o) <= 0.0045 and oracle.err(final, want_state) <= 0.0033


@bf16_on_gpu
@each_dtype
def test_zero_keys_queries_and_values_are_tokens_like_any_other(backend, dtype):
    """The l2 norm of a zero vector is guarded: a masked-out token writes nothing and gives zeros."""
    x = make(lens=(20,), dtype=dtype, device=backend.device)
    for name in ("q", "k", "v"):
        getattr(x, name)[:, 3:9] = 0.0
    o, final = chunk(x)
    want_o, want_state = x.oracle()
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")
    assert not o[:, 3:9].any()


def test_large_fp16_values_do_not_overflow_between_the_kernels(backend):
    """Outputs near 1e4 fit fp16; sums on the way to them do not, and must not be kept in it."""
    x = make(lens=(50,), dtype=FP16, device=backend.device)
    x = replace(x, v=x.v * 8e3, initial_state=x.initial_state * 8e4)
    o, final = chunk(x)
    want_o, want_state = x.oracle()
    assert want_o.abs().max() < 6e4
    assert_accurate(o, want_o, FP16)
    assert_accurate(final, want_state, FP16, "state")


@bf16_on_gpu
@each_dtype
@pytest.mark.parametrize("beta", ["logits", "probabilities", "fp32-probabilities"])
def test_beta_forms(backend, beta, dtype):
    x = make(lens=(4, 36), dtype=dtype, device=backend.device)
    logits = beta == "logits"
    value = x.beta if logits else torch.sigmoid(x.beta.float())
    value = value.to(dtype) if beta == "probabilities" else value
    o, final = chunk(x, beta=value, sigmoid_beta=logits)
    want_o, want_state = x.oracle(beta=value, sigmoid_beta=logits)
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


@bf16_on_gpu
@each_dtype
def test_without_l2norm_and_with_a_scale_of_its_own(backend, dtype):
    x = make(lens=(4, 36), dtype=dtype, device=backend.device, l2norm=False)
    o, final = chunk(x, scale=0.5)
    want_o, want_state = x.oracle(scale=0.5)
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


def test_defaults_are_no_l2norm_no_final_state_and_plain_beta(backend):
    x = make(B=2, T=20, dtype=FP32, device=backend.device, l2norm=False)
    beta, y = torch.sigmoid(x.beta), x.log_decay()
    o, final = call(kda.chunk_kda, x.q, x.k, x.v, y, beta, initial_state=x.initial_state)
    assert final is None
    assert_accurate(o, x.oracle(g=y, A_log=None, beta=beta, sigmoid_beta=False)[0], FP32)
    o, final = call(kda.chunk_kda_with_fused_gate, x.q, x.k, x.v, x.g, beta, x.A_log, x.g_bias)
    assert final is None
    assert_accurate(o, x.oracle(lower_bound=None, beta=beta, sigmoid_beta=False, initial_state=None)[0], FP32)


@pytest.mark.parametrize("lower_bound", [-5.0, -1.0])
def test_bounded_gate_takes_its_bound(backend, lower_bound):
    x = replace(make(lens=(40,), dtype=FP32, device=backend.device), lower_bound=lower_bound)
    o, final = chunk(x)
    want_o, want_state = x.oracle()
    assert_accurate(o, want_o, FP32)
    assert_accurate(final, want_state, FP32, "state")


@pytest.mark.parametrize("amplitude", ["[H]", "[1, 1, H, 1]", "[HV]"])
def test_gate_parameters_per_query_head_or_value_head(backend, amplitude):
    x = make(lens=(4, 20), H=2, HV=4, dtype=FP32, device=backend.device)
    A_log, g_bias = x.A_log, x.g_bias
    if amplitude == "[HV]":
        A_log, g_bias = randn(4, seed=77, device=x.device), randn(4 * 32, seed=78, device=x.device)
    o, _ = chunk(x, A_log=A_log.view(1, 1, -1, 1) if "1, 1" in amplitude else A_log,
                 g_bias=g_bias.view(len(A_log), -1))
    assert_accurate(o, x.oracle(A_log=A_log, g_bias=g_bias)[0], FP32)
    assert_accurate(chunk(x, g_bias=None)[0], x.oracle(g_bias=None)[0], FP32)


@pytest.mark.parametrize("state", ["none", "fp32", "bf16", "padded-rows"])
def test_initial_states(backend, state):
    """None: zeros. fp32 or bf16, rows of any stride: read, never written. Sequences without tokens pass theirs on."""
    x = make(lens=(0, 20, 0, 3), dtype=FP32, device=backend.device, state_dtype=BF16 if state == "bf16" else FP32)
    initial = None if state == "none" else x.initial_state
    if state == "padded-rows":
        backing = torch.full((4, x.initial_state[0].numel() + 24), NAN, device=x.device)
        initial = backing[:, :-24].unflatten(-1, x.initial_state.shape[1:])
        initial.copy_(x.initial_state)
    o, final = chunk(x, initial_state=initial)
    want_o, want_state = x.oracle(initial_state=initial)
    assert_accurate(o, want_o, FP32)
    assert_accurate(final, want_state, FP32, "state")
    empty = torch.zeros_like(x.initial_state[:1]) if initial is None else initial[[0]]
    assert torch.equal(final[[0]], empty.float())


@bf16_on_gpu
@each_dtype
@pytest.mark.parametrize("given_out", [False, True], ids=["fresh", "out"])
def test_rows_past_the_last_token(backend, given_out, dtype):
    """A padded token buffer: its tail is not read; it is zero in a fresh output and left alone in out=."""
    full = make(lens=(18, 3, 20), dtype=dtype, device=backend.device)
    x = replace(full, lens=[18, 3], initial_state=full.initial_state[:2],
                **{n: getattr(full, n).clone() for n in TOKENS})
    for name in TOKENS:
        getattr(x, name)[:, 21:] = NAN
    out = torch.full_like(x.v, 7.0) if given_out else None
    o, final = chunk(x, out=out)
    want_o, want_state = replace(x, **{n: getattr(x, n)[:, :21] for n in TOKENS}).oracle()
    assert_accurate(o[:, :21], want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")
    assert torch.equal(o[:, 21:], torch.full_like(o[:, 21:], 7.0 if given_out else 0.0))


@pytest.mark.parametrize("form", [dict(lens=()), dict(lens=(0, 0)), dict(B=2, T=0)], ids=["no-sequence", "empty", "T0"])
def test_no_tokens_at_all(backend, form):
    x = make(**form, dtype=BF16, device=backend.device)
    o, final = chunk(x)
    assert o.shape == x.v.shape
    assert torch.equal(final, x.initial_state)


# ------------------------------------------------------------------------------------------- chunked against recurrent


@each_dtype
@pytest.mark.parametrize("cuts", [(1,), (16,), (17, 18), (48,), (3, 35, 67)])
def test_prefill_cut_anywhere_with_the_state_carried_equals_the_recurrence(backend, cuts, dtype):
    T = 70
    x = make(lens=(T,), dtype=dtype, device=backend.device)
    pieces, state = [], x.initial_state
    for a, b in zip((0, *cuts), (*cuts, T)):
        piece = replace(x, **{n: getattr(x, n)[:, a:b] for n in TOKENS}, lens=[b - a])
        o, state = chunk(piece, initial_state=state)
        pieces.append(o)
    want_o, want_state = x.oracle()
    assert_accurate(torch.cat(pieces, 1), want_o, dtype)
    assert_accurate(state, want_state, dtype, "state")


@each_dtype
def test_prefill_then_decode_equals_the_recurrence_over_all(backend, dtype):
    T, prompt = 40, 35
    x = make(lens=(T,), dtype=dtype, device=backend.device)
    o, state = chunk(replace(x, **{n: getattr(x, n)[:, :prompt] for n in TOKENS}, lens=[prompt]))
    steps = [o]
    for t in range(prompt, T):
        step = replace(x, **{n: getattr(x, n)[:, t:t + 1] for n in TOKENS}, lens=[1])
        steps.append(recurrent(step, state=state)[0])
    want_o, want_state = x.oracle()
    assert_accurate(torch.cat(steps, 1), want_o, dtype)
    assert_accurate(state, want_state, dtype, "state")


# -------------------------------------------------------------------------------------------------------------- bits

LAYOUTS = {
    "column-slices": merged,
    "head-major": head_major,
    "aligned-slices": lambda x: replace(x, **{n: frame(getattr(x, n), before=16, after=16, rows=1) for n in TOKENS}),
}


def strided_cases(shape, layout, gate, dtype, **_):
    if gate == "unbounded":
        return False  # it reads what the bounded gate reads
    return shape == "packed" and dtype != FP16 or shape in ("prefill", "batch") and dtype == BF16


@gpu_subset(strided_cases)
@each_dtype
@pytest.mark.parametrize("gate", ["bounded", "unbounded"])
@pytest.mark.parametrize("layout", LAYOUTS)
@on_backends("shape", ["packed", "batch"], ["grouped", "glm-ragged", "uneven-dims", "batch-128"], ["prefill"])
def test_strides_do_not_change_a_bit(backend, shape, layout, gate, dtype):
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device, gate=gate)
    view = LAYOUTS[layout](x)
    assert view.q.stride() != x.q.stride() or view.v.stride() != x.v.stride()
    for a, b in zip(chunk(x), chunk(view)):
        assert torch.equal(a, b)


@bf16_on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_log_decays_are_read_through_their_strides(backend, dtype):
    x = make(B=2, T=20, dtype=dtype, device=backend.device)
    y = x.log_decay()
    for a, b in zip(chunk(x, fused=False, g=y), chunk(x, fused=False, g=frame(y))):
        assert torch.equal(a, b)


@gpu_subset(lambda shape, dtype, **_: shape == "batch" and dtype == BF16)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=dtype_id)
@pytest.mark.parametrize("shape", ["ragged", "batch"])
@pytest.mark.parametrize("fused", [True, False], ids=["raw-gate", "log-decay"])
def test_out_may_be_a_strided_view(backend, fused, shape, dtype):
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device)
    want, state = chunk(x, fused=fused)
    out = frame(torch.full_like(x.v, NAN))
    got, final = chunk(x, fused=fused, out=out)
    assert got is out and torch.equal(out, want) and torch.equal(final, state)
    assert_only_view_written(out)


@gpu_subset(lambda K, dtype, **_: K == 128 and dtype == BF16 or K == 16 and dtype != BF16)
@each_dtype
@on_backends("K,T", [(16, 33)], [(128, 150)])
def test_a_sequence_gives_the_same_bits_at_any_place_and_alone(backend, K, T, dtype):
    x = make(B=4, T=T, H=1, K=K, V=K, dtype=dtype, device=backend.device)
    o, state = chunk(x)
    order = [3, 0, 2, 1]
    moved_o, moved_state = chunk(replace(x, **{n: getattr(x, n)[order].contiguous()
                                               for n in (*TOKENS, "initial_state")}))
    assert torch.equal(moved_o, o[order]) and torch.equal(moved_state, state[order])
    alone_o, alone_state = chunk(replace(x, **{n: getattr(x, n)[2:3] for n in (*TOKENS, "initial_state")}))
    assert torch.equal(alone_o, o[2:3]) and torch.equal(alone_state, state[2:3])


@gpu_subset(lambda K, dtype, **_: K == 128 and dtype == BF16 or K == 16 and dtype != BF16)
@each_dtype
@on_backends("K,lens", [(16, (17, 3, 33))], [(128, (130, 3, 70))])
def test_a_packed_sequence_does_not_see_its_neighbours(backend, K, lens, dtype):
    """Packed beside others, in another order, beside NaN neighbours, and alone: one result, bit for bit."""
    x = make(lens=lens, H=1, K=K, V=K, dtype=dtype, device=backend.device)
    o, state = chunk(x)
    bounds = starts(lens)
    for order in ([2, 0, 1], [2], [1, 2]):
        rows = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in order]).to(x.device)
        moved = replace(x, **{n: getattr(x, n)[:, rows] for n in TOKENS}, initial_state=x.initial_state[order],
                        lens=[lens[n] for n in order])
        moved_o, moved_state = chunk(moved)
        assert torch.equal(moved_o, o[:, rows]) and torch.equal(moved_state, state[order])
    bad = replace(x, **{n: getattr(x, n).clone() for n in (*TOKENS, "initial_state")})
    for n in (0, 2):
        for name in TOKENS:
            getattr(bad, name)[:, bounds[n]:bounds[n + 1]] = NAN
        bad.initial_state[n] = NAN
    bad_o, bad_state = chunk(bad)
    middle = slice(bounds[1], bounds[2])
    assert torch.equal(bad_o[:, middle], o[:, middle]) and torch.equal(bad_state[1], state[1])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_cu_seqlens_of_either_integer_type(backend, index_dtype):
    x = make(lens=(5, 20), dtype=BF16, device=backend.device)
    want = chunk(x)
    got = chunk(x, cu_seqlens=ints(x.cu_list, x.device, index_dtype))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_oracle_chunked_form_of_the_contract_equals_its_recurrence():
    """The contract's second set of equations, written out once in fp64 for one chunk, against its first."""
    x = make(lens=(12,), H=1, dtype=FP32)
    want_o, want_state = x.oracle()
    K = 32
    q, k = (oracle.l2norm(t[0, :, 0].double()) for t in (x.q, x.k))
    v, b = x.v[0, :, 0].double(), torch.sigmoid(x.beta[0, :, 0].double())
    G = oracle.gate(x.g, x.A_log, x.g_bias, x.lower_bound)[0, :, 0].cumsum(0)
    S = x.initial_state[0, 0].double()
    decay = (G[:, None] - G[None, :]).exp()
    A = torch.tril(b[:, None] * (k[:, None] * k[None] * decay).sum(-1), -1)
    M = torch.linalg.inv(torch.eye(12, dtype=torch.float64) + A)
    v_new = M @ (b[:, None] * v) - M @ (b[:, None] * k * G.exp()) @ S.T
    o = K**-0.5 * ((q * G.exp()) @ S.T + torch.tril((q[:, None] * k[None] * decay).sum(-1)) @ v_new)
    S = S * G[-1].exp() + v_new.T @ (k * (G[-1] - G).exp())
    assert oracle.err(o, want_o[0, :, 0]) < 1e-12 and oracle.err(S, want_state[0, 0]) < 1e-12


# ------------------------------------------------------------------------------------------------------------ segments


@bf16_on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", ["packed", "batch"])
@pytest.mark.parametrize("K, V", [(128, 128), (64, 80)])
def test_a_walk_in_segments_equals_the_recurrence(backend, monkeypatch, shape, K, V, dtype):
    """Sequences of no chunk, part of a segment, whole segments and more; sequences that would not be cut by themselves."""
    if backend.name == "reference":
        pytest.skip("the reference has no segments")
    walk = importlib.import_module("kda.triton.walk")
    kernel, launched = walk.chunk_combine_kernel, []
    counting = type("Counting", (), {"__getitem__": lambda self, grid: launched.append(grid) or kernel[grid]})
    counting.arg_names = kernel.arg_names
    monkeypatch.setattr(walk._combine, "kernel", counting())
    monkeypatch.setattr(walk, "segment_chunks", lambda *_: 2)
    monkeypatch.setattr(known, "_known", {})
    shape = dict(lens=(0, 5, 32, 0, 33, 64, 150, 1)) if shape == "packed" else dict(B=2, T=70)
    x = make(**shape, K=K, V=V, dtype=dtype, device=backend.device)
    o, final = chunk(x)
    want_o, want_state = x.oracle()
    assert launched
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")
    x = replace(x, initial_state=None)
    assert_accurate(chunk(x, output_final_state=False)[0], x.oracle()[0], dtype)
