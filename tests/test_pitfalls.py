# SPDX-License-Identifier: Apache-2.0
"""Faults that users of KDA kernels have reported in public (pitfalls.md), each pinned by what must happen instead.

The number in front of each group is the line of that page. Line 13 (states exported inside a prompt) is tested in
test_prefill.py and test_serving.py, 14 (a CPU path gated on AMX) in triton_cpu/, 17 (transformers without a GPU) in
test_drop_in_transformers.py, 18 in test_compile.py.
"""

import fcntl
import os

import pytest
import torch
from helpers import (BF16, FP16, FP32, GPU, NULL, Mixer, assert_accurate, bf16_on_gpu, chunk, cut, dtype_id, each_dtype, frame,
                     ints, make, merged, needs_gpu, on_backends, pool_of, randn, recurrent, replace, unchanged)

import kda

NAN = float("nan")
TOKENS = ("q", "k", "v", "g", "beta")

# ------------------------------------------------------------- 1. grid dimensions that carry more than 65,535 programs


@on_backends("N,H", [], [(1024, 64)], [(4100, 64)])
def test_65536_sequences_times_heads_decode(backend, N, H):
    """1,024 requests x 64 heads, one token each, in the recurrence and in the chunked form."""
    x = make(lens=(1,) * N, H=H, K=16, V=16, dtype=BF16, device=backend.device)
    pool = torch.cat([x.initial_state[:1] * NAN, x.initial_state])
    want_o, want_state = x.oracle()
    o, _ = recurrent(x, state=pool, ssm_state_indices=torch.arange(1, N + 1, device=x.device))
    assert_accurate(o, want_o, BF16)
    assert_accurate(pool[1:], want_state, BF16, "state")
    o, final = chunk(x)
    assert_accurate(o, want_o, BF16)
    assert_accurate(final, want_state, BF16, "state")


@on_backends("rows", [], [70_000])
def test_70000_rows_of_every_other_operation(backend, rows):
    device, dim = backend.device, 16
    states = randn(rows + 1, dim, 3, seed=1, dtype=BF16, device=device)
    before, index = states.clone(), torch.arange(rows, 0, -1, device=device)
    has = torch.ones(rows, dtype=torch.bool, device=device)
    assert torch.equal(kda.gather_initial_states(states, index, has), before[index])
    kda.scatter_states(states, before[:rows], index)
    assert torch.equal(states[1:], before[:rows].flip(0))
    x, weight = randn(rows, dim, seed=2, dtype=BF16, device=device), randn(dim, 4, seed=3, device=device)
    few = slice(rows - 3, None)  # what the last rows give, they give alone
    states = before.clone()
    got = kda.causal_conv1d_update(x, states, weight, activation="silu", conv_state_indices=index)
    alone = before.clone()
    want = kda.causal_conv1d_update(x[few], alone, weight, activation="silu", conv_state_indices=index[few])
    assert torch.equal(got[few], want) and torch.equal(states[1:4], alone[1:4])
    cu = torch.arange(rows + 1, device=device)
    got = kda.causal_conv1d_fn(x.T, weight, None, before.clone(), cu, index, has)
    assert torch.equal(got.T[few], want)
    A_log = randn(1, seed=4, device=device)
    assert torch.equal(kda.fused_kda_gate(x, A_log, dim)[few], kda.fused_kda_gate(x[few], A_log, dim))
    norm = kda.rms_norm_gated(x, x, None, None)
    assert torch.equal(norm[few], kda.rms_norm_gated(x[few], x[few], None, None))


# ------------------------------------------------------------------------------------------ 2. a batch that is not dense


@bf16_on_gpu
@each_dtype
def test_a_batch_with_a_gap_between_its_rows_reads_no_other_request(backend, dtype):
    """Between the two rows lies NaN: an address made from the token stride alone reads it."""
    x = make(B=2, T=18, dtype=dtype, device=backend.device)
    view = merged(x)
    assert view.q.stride(0) != 18 * view.q.stride(1)
    for a, b in zip(chunk(x), chunk(view)):
        assert torch.equal(a, b)
    states = [x.initial_state.clone() for _ in range(2)]
    assert torch.equal(recurrent(x, state=states[0])[0], recurrent(view, state=states[1])[0])
    assert torch.equal(*states)
    flat = x.g.flatten(2)
    assert torch.equal(kda.fused_kda_gate(frame(flat), x.A_log, 32), kda.fused_kda_gate(flat, x.A_log, 32))
    assert torch.equal(kda.rms_norm_gated(view.v, frame(x.v), None, None), kda.rms_norm_gated(x.v, x.v, None, None))
    weight, rows = randn(18, 4, seed=1, device=x.device), x.v.flatten(2)
    conv = [kda.causal_conv1d_update(t, torch.zeros(2, 18, 3, dtype=dtype, device=x.device), weight)
            for t in (rows, frame(rows))]
    assert torch.equal(*conv)


@on_backends("N", [], [2_000], [40_000])
def test_thousands_of_short_sequences_give_what_each_gives_alone(backend, N):
    """Of 0 to 34 tokens; a few of them against the oracle too, among them the last one."""
    lens = [(7 * n) % 35 for n in range(N)]
    x = make(lens=lens, H=1, K=128, V=16, dtype=BF16, device=backend.device)
    o, final = chunk(x)
    assert o.isfinite().all() and final.isfinite().all()
    begins = torch.tensor([0, *lens]).cumsum(0).tolist()
    for n in (0, 1, 4, N // 2, N - 2, N - 1):
        part = slice(begins[n], begins[n + 1])
        tokens = {name: getattr(x, name)[:, part] for name in TOKENS}
        one = replace(x, **tokens, initial_state=x.initial_state[n:n + 1], lens=[lens[n]])
        alone, state = chunk(one)
        assert torch.equal(alone, o[:, part]) and torch.equal(state, final[n:n + 1])
        want_o, want_state = one.oracle()
        if lens[n]:
            assert_accurate(alone, want_o, BF16)
        assert_accurate(state, want_state, BF16, "state")


# --------------------------------------------------------------------------------------------- 3. more than 2**31 elements


BIG = 2**31  # what a 32-bit offset cannot reach


def needs_memory(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")


@pytest.fixture
def gpu(tmp_path_factory):
    """A GPU that no other test worker fills, without NaN in fresh memory (it costs seconds at this size)."""
    torch.use_deterministic_algorithms(False)
    base = tmp_path_factory.getbasetemp()
    with open((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "gpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield torch.device("cuda")
        torch.cuda.empty_cache()


@needs_gpu
def test_state_pools_of_more_than_2_31_elements(gpu):
    """The last slot gives what slot 1 gives: recurrence, gather, scatter, both convolutions."""
    needs_memory(24)
    x = make(B=1, T=2, H=64, K=128, V=128, dtype=BF16, device=gpu, state_dtype=BF16)
    slots = BIG // x.initial_state.numel() + 8
    pool = torch.empty(slots, 64, 128, 128, dtype=BF16, device=gpu)
    assert pool.numel() > BIG
    pool[1], pool[slots - 1] = x.initial_state[0], x.initial_state[0]
    o = [recurrent_unguarded(x, pool, slot) for slot in (1, slots - 1)]
    assert torch.equal(*o) and torch.equal(pool[1], pool[slots - 1])
    has = torch.ones(1, dtype=torch.bool, device=gpu)
    rows = [kda.gather_initial_states(pool, ints([slot], gpu), has) for slot in (1, slots - 1)]
    assert torch.equal(*rows)
    kda.scatter_states(pool, rows[0] * 2, ints([slots - 1], gpu))
    assert torch.equal(pool[slots - 1], pool[1] * 2)
    del pool

    dim = 3 * 64 * 128
    slots = BIG // (3 * dim) + 8
    conv_pool = torch.empty(slots, 3, dim, dtype=BF16, device=gpu).transpose(1, 2)
    conv_pool[1] = randn(dim, 3, seed=1, dtype=BF16, device=gpu)
    conv_pool[slots - 1] = conv_pool[1]
    line, weight = randn(5, dim, seed=2, dtype=BF16, device=gpu), randn(dim, 4, seed=3, device=gpu)
    for slot in (1, slots - 1):
        o.append(kda.causal_conv1d_fn(line.T, weight, None, conv_pool, ints([0, 5], gpu), ints([slot], gpu), has))
        o.append(kda.causal_conv1d_update(line[:1], conv_pool, weight, conv_state_indices=ints([slot], gpu)))
    assert torch.equal(o[2], o[4]) and torch.equal(o[3], o[5])
    assert torch.equal(conv_pool[1], conv_pool[slots - 1])


def recurrent_unguarded(x, pool, slot):
    """Without the copies that `recurrent` makes to see that nothing else is written."""
    return kda.fused_recurrent_kda(
        x.q, x.k, x.v, x.g, x.beta, initial_state=pool, ssm_state_indices=ints([slot], x.device), sigmoid_beta=True,
        a_log=x.A_log, g_bias=x.g_bias, compute_gate=True)[0]


def rule_of(x, cu, fused, **extra):
    """Both forms without guards: o and the final states of the last sequence."""
    if fused:
        o, final = kda.chunk_kda_with_fused_gate(
            x["q"], x["k"], x["v"], x["g"], x["beta"], x["A_log"], None, cu_seqlens=cu, sigmoid_beta=True,
            safe_gate=True, use_qk_l2norm_in_kernel=True, output_final_state=True, **extra)
    else:
        o, final = kda.fused_recurrent_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], cu_seqlens=cu, sigmoid_beta=True,
                                           a_log=x["A_log"], compute_gate=True, **extra)
    return o, final[-1]


def wide_rows(T, width, device, last=100, K=32, V=16):
    """Token inputs in the last columns of a [T, width] projection, and the last tokens of them, contiguous."""
    wide = torch.empty(T, width, dtype=BF16, device=device)
    sizes = dict(q=2 * K, k=2 * K, v=2 * V, g=2 * K, beta=2)
    columns = wide[:, width - sum(sizes.values()):]
    columns.copy_(torch.randn(columns.shape, device=device, generator=torch.Generator(device).manual_seed(0)))
    shapes = dict(q=(2, K), k=(2, K), v=(2, V), g=(2, K), beta=(2,))
    parts = {n: t.unflatten(-1, shapes[n])[None] for n, t in zip(sizes, columns.split(list(sizes.values()), -1))}
    tail = {n: t[:, -last:].contiguous() for n, t in parts.items()}
    A_log = randn(2, seed=1, device=device)
    return {**parts, "A_log": A_log}, {**tail, "A_log": A_log}, columns


@needs_gpu
def test_token_offsets_of_more_than_2_31_elements(gpu):
    """Rows of a wide projection: the last sequence gives what it gives alone."""
    needs_memory(16)
    last, width = 100, 1 << 16
    T, device = BIG // width + 2 * last, gpu
    parts, tail, columns = wide_rows(T, width, device, last)
    cu, alone = ints([0, T - last, T], device), ints([0, last], device)
    for fused in (True, False):
        for a, b in zip(rule_of(parts, cu, fused), rule_of(tail, alone, fused)):
            assert torch.equal(a[:, -last:] if a.ndim == 4 else a, b)
    g, A_log = columns[:, 160:224], parts["A_log"]
    assert torch.equal(kda.fused_kda_gate(g, A_log, 32)[-last:], kda.fused_kda_gate(g[-last:].contiguous(), A_log, 32))
    norm = kda.rms_norm_gated(parts["v"], parts["v"], None, None)
    assert torch.equal(norm[:, -last:], kda.rms_norm_gated(tail["v"], tail["v"], None, None))
    x, weight = columns[:, :48], randn(48, 4, seed=2, device=device)
    want = kda.causal_conv1d_fn(x[-last:].contiguous().T, weight, None, None, alone)
    assert torch.equal(kda.causal_conv1d_fn(x.T, weight, None, None, cu)[:, -last:], want)
    states = torch.zeros(T, 48, 3, dtype=BF16, device=device)
    want = kda.causal_conv1d_update(x[-last:].contiguous(), states[-last:].clone(), weight)
    assert torch.equal(kda.causal_conv1d_update(x, states, weight)[-last:], want)


@needs_gpu
@pytest.mark.parametrize("fused", [True, False], ids=["chunk", "recurrent"])
def test_values_and_outputs_of_more_than_2_31_elements(gpu, fused):
    """T x HV x V > 2**31, contiguous; also every buffer between the kernels."""
    needs_memory(48)
    each, H, K, V = 128, 64, 16, 128
    N = BIG // (each * H * V) + 30
    T = each * N
    generator = torch.Generator(gpu).manual_seed(0)
    new = lambda *shape: torch.randn(*shape, dtype=BF16, device=gpu, generator=generator)  # noqa: E731
    x = dict(q=new(1, T, 1, K), k=new(1, T, 1, K), v=new(1, T, H, V), g=new(1, T, H, K), beta=new(1, T, H),
             A_log=randn(H, seed=1, device=gpu))
    tail = {n: t if n == "A_log" else t[:, -each:].contiguous() for n, t in x.items()}
    o, final = rule_of(x, torch.arange(0, T + 1, each, device=gpu), fused)
    want_o, want_final = rule_of(tail, ints([0, each], gpu), fused)
    assert torch.equal(o[:, -each:], want_o) and torch.equal(final, want_final)


@needs_gpu
def test_states_after_every_token_of_more_than_2_31_elements(gpu):
    needs_memory(24)
    x = make(B=BIG // (4 * 64 * 128 * 128) + 10, T=4, H=64, K=128, V=128, dtype=BF16, device=gpu, state_dtype=BF16)
    run = lambda x: kda.fused_recurrent_kda(x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state,  # noqa: E731
                                            inplace_final_state=False, sigmoid_beta=True, a_log=x.A_log,
                                            compute_gate=True)
    o, every = run(x)
    assert every.numel() > BIG
    last = replace(x, **{n: getattr(x, n)[-1:] for n in (*TOKENS, "initial_state")})
    want_o, want_every = run(last)
    assert torch.equal(o[-1:], want_o) and torch.equal(every[-4:], want_every)


@needs_gpu
def test_gate_norm_and_convolution_of_more_than_2_31_elements(gpu):
    needs_memory(40)
    H, K = 64, 128
    T = BIG // (H * K) + 64
    x = torch.randn(T, H * K, dtype=BF16, device=gpu, generator=torch.Generator(gpu).manual_seed(0))
    last, A_log, few = slice(T - 50, None), randn(H, seed=1, device=gpu), ints([0, 50], gpu)
    y = kda.fused_kda_gate(x, A_log, K)[last].clone()
    assert torch.equal(y, kda.fused_kda_gate(x[last].clone(), A_log, K))
    rows = x.view(T, H, K)
    y = kda.rms_norm_gated(rows, rows, None, None)[last].clone()
    assert torch.equal(y, kda.rms_norm_gated(rows[last].clone(), rows[last].clone(), None, None))
    weight = randn(H * K, 4, seed=2, device=gpu)
    y = kda.causal_conv1d_fn(x.T, weight, None, None, ints([0, T - 50, T], gpu))[:, last].clone()
    assert torch.equal(y, kda.causal_conv1d_fn(x[last].clone().T, weight, None, None, few))


# ---------------------------------------------------------------------------------- 4., 5. the speculative window's slots


def test_a_stale_row_reads_no_state_and_not_the_last_of_the_pool(backend):
    """Zero accepted tokens: column -1 is no column. The pool's last row is a trap of NaN, and stays it."""
    x = make(B=2, T=2, dtype=FP32, device=backend.device)
    pool = pool_of(x.initial_state, [1, 3], extra=2)
    before = pool.clone()
    o, _ = recurrent(x, state=pool, ssm_state_indices=ints([[1, 2], [3, 4]], x.device),
                     num_accepted_tokens=ints([0, 1], x.device))
    assert torch.equal(o[0], torch.zeros_like(o[0]))
    assert torch.equal(pool[1], before[1]) and pool[2].isnan().all() and pool[-1].isnan().all()
    assert_accurate(o[1], x.oracle()[0][1], FP32)
    dim = 24
    states = torch.full((4, dim, 5), NAN, device=x.device)
    states[2] = 1.0
    before = states.clone()
    tokens = randn(2, dim, 3, seed=1, device=x.device)
    out = kda.causal_conv1d_update(tokens, states, randn(dim, 4, seed=2, device=x.device), activation="silu",
                                   conv_state_indices=ints([1, 2], x.device), num_accepted_tokens=ints([0, 1], x.device))
    assert torch.equal(out[0], torch.zeros_like(out[0])) and out[1].isfinite().all()
    assert torch.equal(states[[0, 1, 3]].nan_to_num(7.0), before[[0, 1, 3]].nan_to_num(7.0))


def test_a_request_may_move_between_the_speculative_and_the_plain_path(backend):
    """Its live state is in column accepted - 1: the plain path continues from that slot, and back."""
    x = make(B=1, T=8, dtype=FP32, device=backend.device)
    window = [3, 5, 1]
    pool = pool_of(x.initial_state, [window[0]])
    step = lambda a, b: replace(x, **{n: getattr(x, n)[:, a:b] for n in TOKENS})  # noqa: E731
    table, outputs = ints([window], x.device), []
    o, _ = recurrent(step(0, 3), state=pool, ssm_state_indices=table, num_accepted_tokens=ints([1], x.device))
    outputs.append(o[:, :2])  # two of three accepted
    o, _ = recurrent(step(2, 3), state=pool, ssm_state_indices=ints([window[1]], x.device))
    outputs.append(o)
    o, _ = recurrent(step(3, 4), state=pool, ssm_state_indices=ints([window[1]], x.device))
    outputs.append(o)
    o, _ = recurrent(step(4, 7), state=pool, ssm_state_indices=table, num_accepted_tokens=ints([2], x.device))
    outputs.append(o)
    o, _ = recurrent(step(7, 8), state=pool, ssm_state_indices=ints([window[2]], x.device))
    outputs.append(o)
    want_o, want_state = x.oracle()
    assert_accurate(torch.cat(outputs, 1), want_o, FP32)
    assert_accurate(pool[window[2]], want_state[0], FP32, "state")


# ------------------------------------------------------------------------------- 6., 15. padded rows and padded buffers


def test_fresh_memory_holds_nan_in_these_tests(backend):
    """What makes the other tests see an output that no kernel wrote."""
    for fresh in (torch.empty(1000, dtype=BF16, device=backend.device), torch.empty_like(torch.zeros(5).to(backend.device))):
        assert fresh.isnan().all()


def test_padded_rows_do_not_spread_nan_through_the_layer(backend):
    """Decode of a padded batch: convolution, recurrence, norm. Fresh memory is NaN here; the padding comes out zero."""
    mixer = Mixer(backend.device, BF16)
    mixer.prefill([(mixer.tokens(4, 1), 2, False), (mixer.tokens(3, 9), 5, False)])
    bad = mixer.tokens(1, 0, fill=NAN)
    rows = [(mixer.tokens(1, 20), 2), (bad, NULL), (mixer.tokens(1, 30), 5), (bad, -1), (bad, 99)]
    pools = [mixer.pool.clone(), mixer.conv_pool.clone()]
    o = torch.cat(mixer.decode(rows))
    y = kda.rms_norm_gated(o, torch.ones_like(o), None, None, activation="sigmoid")
    padding, live = [1, 3, 4], [0, 2]
    assert torch.equal(o[padding], torch.zeros_like(o[padding])) and torch.equal(y[padding], o[padding])
    assert y[live].isfinite().all() and (o[live] != 0).any()
    for pool, before in zip((mixer.pool, mixer.conv_pool), pools):
        keep = [0, 1, 3, 4, 6, 7]
        assert torch.equal(pool[keep].nan_to_num(7.0), before[keep].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=dtype_id)
def test_the_tail_of_a_padded_buffer_is_not_read_as_tokens(backend, dtype):
    """A token buffer of a fixed size whose tail was never written: prefill of all operations, then the pools."""
    full, padded = Mixer(backend.device, dtype), Mixer(backend.device, dtype)
    x = full.tokens(21, 3)
    want = full.prefill([(cut(x, 0, 18), 2, False), (cut(x, 18, 21), 4, False)])
    tail = padded.tokens(9, 0, fill=NAN)
    cu, index = ints([0, 18, 21], backend.device), ints([2, 4], backend.device)
    has = torch.zeros(2, dtype=torch.bool, device=backend.device)
    buffer = {n: torch.cat([x[n], tail[n]]) for n in x}
    y = kda.causal_conv1d_fn(buffer["qkv"].T, padded.weight, None, padded.conv_pool, cu, index, has)
    assert torch.equal(y[:, 21:], torch.zeros_like(y[:, 21:]))
    y[:, 21:] = NAN
    q, k, v = padded.heads(y.T)
    o, final = kda.chunk_kda_with_fused_gate(
        q, k, v, buffer["g"][None], buffer["beta"][None], padded.A_log, padded.g_bias, safe_gate=True,
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu, sigmoid_beta=True)
    assert torch.equal(o[0, :21], torch.cat(want)) and torch.equal(o[0, 21:], torch.zeros_like(o[0, 21:]))
    assert torch.equal(final, full.pool[[2, 4]]) and torch.equal(padded.conv_pool[[2, 4]], full.conv_pool[[2, 4]])


# -------------------------------------------------------------------------------------------------- 7. aliased outputs


@pytest.mark.parametrize("name", TOKENS[:4])
def test_an_output_over_an_input_is_refused(backend, name):
    """The gate above all: the kernel still reads it. Nothing is written."""
    x = make(B=1, T=4, K=16, V=16, dtype=BF16, device=backend.device)
    over = getattr(x, name).as_strided(x.v.shape, x.v.stride())
    state = x.initial_state.clone()
    for run in (lambda: chunk(x, out=over), lambda: recurrent(x, state=state, out=over)):
        with unchanged(state, *(getattr(x, n) for n in TOKENS)), pytest.raises(ValueError, match=f"`out`.*`(raw_)?{name}`"):
            run()


def test_an_output_beside_the_gate_in_one_buffer_is_written_alone(backend):
    x = make(B=1, T=20, dtype=BF16, device=backend.device)
    buffer = torch.full((1, 20, 2, 32 + 16), NAN, dtype=BF16, device=x.device)
    buffer[..., :32] = x.g
    g, out = buffer[..., :32], buffer[..., 32:]
    want_o, want_state = chunk(x)
    o, final = chunk(replace(x, g=g), out=out)
    assert torch.equal(o, want_o) and torch.equal(out, want_o) and torch.equal(final, want_state)
    assert torch.equal(g, x.g)


def test_prefill_does_not_reuse_v_as_its_output(backend):
    x = make(lens=(5, 18), dtype=BF16, device=backend.device)
    with unchanged(*(getattr(x, n) for n in TOKENS), x.initial_state):
        o, _ = kda.chunk_kda(x.q, x.k, x.v, x.log_decay(), x.beta, None, x.initial_state, True, True, x.cu)
    assert o.untyped_storage().data_ptr() not in {getattr(x, n).untyped_storage().data_ptr() for n in TOKENS}


# ------------------------------------------------------------------------------------- 8. sequences shorter than a block


@bf16_on_gpu
@each_dtype
def test_sequences_of_1_to_17_tokens_packed(backend, dtype):
    x = make(lens=tuple(range(1, 18)), H=1, K=16, V=16, dtype=dtype, device=backend.device)
    o, final = chunk(x)
    want_o, want_state = x.oracle()
    assert_accurate(o, want_o, dtype)
    assert_accurate(final, want_state, dtype, "state")


@pytest.mark.parametrize("T", [1, 2, 7, 15, 16, 17])
def test_a_single_short_sequence(backend, T):
    for form in (dict(lens=(T,)), dict(B=1, T=T)):
        x = make(**form, dtype=BF16, device=backend.device)
        o, final = chunk(x)
        want_o, want_state = x.oracle()
        assert_accurate(o, want_o, BF16)
        assert_accurate(final, want_state, BF16, "state")


# -------------------------------------------------------------------------------- 9. a strongly negative unbounded gate


@each_dtype
def test_strongly_negative_gates_give_in_chunks_what_they_give_token_by_token(backend, dtype):
    """y of -1e3 to -1e4 in one channel of twenty: exp(-G) would overflow where the recurrence is fine."""
    x = make(lens=(40,), dtype=dtype, device=backend.device, gate="steep")
    y = x.log_decay()
    assert y.min() < -5e3 and (y > -0.1).any()
    want_o, want_state = x.oracle()
    state = x.initial_state.clone()
    for o, final in (chunk(x), chunk(x, fused=False), (recurrent(x, state=state)[0], state)):
        assert_accurate(o, want_o, dtype)
        assert_accurate(final, want_state, dtype, "state")


# ------------------------------------------------------------------------------------ 10. TF32 in the triangular inverse


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_fp32_stays_fp32_whatever_matmul_precision_the_user_allows(backend, precision):
    """torch.set_float32_matmul_precision is for the user's own products."""
    x = make(lens=(70,), K=64, V=64, dtype=FP32, device=backend.device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        o, final = chunk(x)
    finally:
        torch.set_float32_matmul_precision(before)
    want_o, want_state = x.oracle()
    assert_accurate(o, want_o, FP32)
    assert_accurate(final, want_state, FP32, "state")


# -------------------------------------------------------------------- 11. a configuration fixed by whichever shape came first


def test_no_kernel_is_tuned_on_the_users_first_call():
    import importlib
    import pkgutil

    import triton.runtime

    import kda.triton

    tuned = (triton.runtime.Autotuner, triton.runtime.Heuristics)
    modules = [m.name for m in pkgutil.walk_packages(kda.triton.__path__, "kda.triton.")]
    objects = [(m, n, o) for m in modules for n, o in vars(importlib.import_module(m)).items()]
    assert len(modules) >= 7 and [f"{m}.{n}" for m, n, o in objects if isinstance(o, tuned)] == []


def test_results_do_not_depend_on_which_shape_came_first(backend):
    """Prefill, decode, prefill again, and a larger batch between: the same bits."""
    small, large = (make(lens=lens, dtype=BF16, device=backend.device, seed=n) for n, lens in
                    enumerate([(1, 1), (20, 35)]))
    run = lambda x: (*chunk(x), recurrent(x, state=(s := x.initial_state.clone()))[0], s)  # noqa: E731
    first = run(large)
    run(small)
    for a, b in zip(first, run(large)):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------- 12. synchronisation; capture in a CUDA graph


def layer_step(mixer, x, cu, index, has, table, accepted):
    """Every operation once, on fixed buffers."""
    o = mixer.packed(x, cu, index, has)
    N = len(index)
    one = {n: t[:N] for n, t in x.items()}
    y = kda.causal_conv1d_update(one["qkv"], mixer.conv_pool, mixer.weight, activation="silu", conv_state_indices=index)
    q, k, v = (t[0][:, None] for t in mixer.heads(y))
    gate = dict(sigmoid_beta=True, a_log=mixer.A_log, g_bias=mixer.g_bias, compute_gate=True)
    step, _ = kda.fused_recurrent_kda(q, k, v, one["g"][:, None], one["beta"][:, None], initial_state=mixer.pool,
                                      ssm_state_indices=index, **gate)
    drafted, _ = kda.fused_recurrent_kda(q, k, v, one["g"][:, None], one["beta"][:, None], initial_state=mixer.pool,
                                         ssm_state_indices=table, num_accepted_tokens=accepted, **gate)
    y = kda.fused_kda_gate(x["g"].flatten(1), mixer.A_log, mixer.K, mixer.g_bias)
    plain, _ = kda.chunk_kda(*(t for t in mixer.heads(x["qkv"])), y[None], x["beta"][None],
                             use_qk_l2norm_in_kernel=True, cu_seqlens=cu, sigmoid_beta=True)
    normed = kda.rms_norm_gated(o, o, None, None, activation="sigmoid")
    return o, step, drafted, plain, normed


def layer_buffers(device):
    mixer = Mixer(device, BF16, H=4, K=64, V=64)
    mixer.pool.zero_(), mixer.conv_pool.zero_()
    x = mixer.tokens(130, 5)
    fixed = dict(cu=ints([0, 60, 61, 130], device), index=ints([3, 1, 2], device),
                 has=torch.tensor([True, False, True], device=device), table=ints([[4], [5], [6]], device),
                 accepted=ints([1, 1, 0], device))
    return mixer, x, fixed


@needs_gpu
def test_no_operation_synchronises_with_the_device(gpu):
    """(Without a GPU test_compile.py shows that no launcher reads a device value.)"""
    mixer, x, fixed = layer_buffers(gpu)
    layer_step(mixer, x, **fixed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer_step(mixer, x, **fixed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_a_cuda_graph_replays_with_other_lengths_slots_and_tokens(gpu):
    """Captured once; then the contents of cu_seqlens, indices and tokens change, and the replay equals a plain call."""
    mixer, x, fixed = layer_buffers(gpu)
    eager, _, _ = layer_buffers(gpu)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer_step(mixer, x, **fixed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer_step(mixer, x, **fixed)
    for seed, cu, index, accepted in ((50, [0, 1, 100, 120], [7, 2, 5], [1, 0, 1]), (60, [0, 0, 130, 130], [0, 4, 99],
                                                                                      [1, 1, 1])):
        for name, value in mixer.tokens(130, seed).items():
            x[name].copy_(value)
        for name, value in dict(cu=cu, index=index, accepted=accepted).items():
            fixed[name].copy_(ints(value, gpu))
        pools = [mixer.pool.clone(), mixer.conv_pool.clone()]
        eager.pool.copy_(pools[0]), eager.conv_pool.copy_(pools[1])
        graph.replay()
        for got, want in zip(captured, layer_step(eager, x, **fixed)):
            assert torch.equal(got, want)
        assert torch.equal(mixer.pool, eager.pool) and torch.equal(mixer.conv_pool, eager.conv_pool)


@pytest.mark.skipif(not GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu_than_the_current_one():
    a, b = torch.device("cuda", 0), torch.device("cuda", 1)
    with torch.cuda.device(a):
        results = [layer_step(mixer, x, **fixed) for mixer, x, fixed in map(layer_buffers, (a, b))]
        assert torch.cuda.current_device() == 0
    for first, second in zip(*results):
        assert second.device == b and torch.equal(first.cpu(), second.cpu())


# --------------------------------------------------------------------------------- 13. a prefix restored or recomputed


@each_dtype
@on_backends("prefix,T", [(32, 39)], [(1152, 1159)])
def test_a_restored_prefix_equals_a_recomputed_one(backend, prefix, T, dtype):
    """1,152 of 1,159 tokens from a cache: both pools saved at the boundary, restored into another slot."""
    mixer = Mixer(backend.device, dtype)
    x = mixer.tokens(T, 3)
    saved = mixer.prefill([(cut(x, 0, prefix), 2, False)])[0]
    mixer.pool[6], mixer.conv_pool[6] = mixer.pool[2], mixer.conv_pool[2]
    mixer.prefill([(mixer.tokens(5, 77), 2, True)])  # slot 2 goes on elsewhere
    rest = mixer.prefill([(cut(x, prefix, T), 6, True)])[0]
    want_o, want_state = mixer.oracle(x)
    assert_accurate(torch.cat([saved, rest]), want_o, dtype)
    assert_accurate(mixer.pool[6], want_state, dtype, "state")


# ---------------------------------------------------------------------- 16. a slot's former owner leaks into the next one


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=dtype_id)
def test_a_finished_request_leaves_nothing_to_the_new_owner_of_its_slot(backend, dtype):
    """The slot holds NaN and Inf, the worst that a finished request can leave; prompts of 0, 1 and 2 tokens too."""
    for T in (0, 1, 2, 20):
        used, fresh = Mixer(backend.device, dtype), Mixer(backend.device, dtype)
        used.pool[3], used.conv_pool[3] = float("inf"), NAN
        fresh.pool[3], fresh.conv_pool[3] = 0.0, 0.0
        x, step = used.tokens(T, 40), used.tokens(1, 50)
        for a, b in zip(*([*m.prefill([(x, 3, False)]), *m.decode([(step, 3)])] for m in (used, fresh))):
            assert torch.equal(a, b) and a.isfinite().all()
        assert torch.equal(used.pool[3], fresh.pool[3]) and torch.equal(used.conv_pool[3], fresh.conv_pool[3])
