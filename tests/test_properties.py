# SPDX-License-Identifier: Apache-2.0
"""Properties over random requests: where a prompt is cut, who its neighbours are, which slot it has, do not matter.

Geometry is random too: every example checks against the fp64 oracle or, bit for bit, against another order of the same.
"""

import oracle
import pytest
import torch
from helpers import (BF16, DTYPES, FP32, GPU, INTERPRETED, Mixer, assert_accurate, chunk, cut, ints, make, randn,
                     recurrent, starts)

import kda

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

NAN = float("nan")
# The interpreter takes most of a second for an example; the seed is fixed so that a run can be repeated.
prop = settings(max_examples=8 if INTERPRETED else 25, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))

lengths = st.one_of(st.integers(0, 5), st.sampled_from([15, 16, 17, 31, 32, 33, 47]))
seeds = st.integers(0, 1000)


@prop
@given(data=st.data())
def test_a_prompt_may_be_cut_anywhere_and_continued_by_decoding(backend, data):
    """Pieces are prefilled beside NaN neighbours, or decoded when they are one token; states wait in the pools."""
    dtype = data.draw(st.sampled_from([FP32, BF16]))
    T = data.draw(st.integers(1, 45))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(T - 1, 1)), max_size=4)))
    mixer = Mixer(backend.device, dtype)
    slot, others = 3, [1, 5]
    x = mixer.tokens(T, seed=10 * data.draw(seeds))
    pieces = []
    for a, b in zip((0, *cuts), (*cuts, T)):
        if b - a == 1 and a > 0 and data.draw(st.booleans()):
            rows = [(cut(x, a, b), slot), (mixer.tokens(1, 0, fill=NAN), others[0])]
            pieces.append(mixer.decode(rows)[0])
            continue
        rows = [(cut(x, a, b), slot, a > 0)]
        for other in others:
            neighbour = (mixer.tokens(data.draw(st.integers(0, 5)), 0, fill=NAN), other, data.draw(st.booleans()))
            rows.insert(data.draw(st.integers(0, len(rows))), neighbour)
        mine = next(n for n, row in enumerate(rows) if row[1] == slot)
        pieces.append(mixer.prefill(rows)[mine])
    want_o, want_state = mixer.oracle(x)
    assert_accurate(torch.cat(pieces), want_o, dtype)
    assert_accurate(mixer.pool[slot], want_state, dtype, "state")


@prop
@given(lens=st.lists(lengths, min_size=2, max_size=4), data=st.data())
def test_requests_may_be_packed_in_any_order(backend, lens, data):
    order = data.draw(st.permutations(range(len(lens))))
    slots = data.draw(st.permutations(range(1, 8)))[:len(lens)]
    runs = []
    for permutation in (range(len(lens)), order):
        mixer = Mixer(backend.device)
        rows = [(mixer.tokens(lens[n], seed=100 * n), slots[n], False) for n in permutation]
        o = mixer.prefill(rows)
        runs.append(({n: o[place] for place, n in enumerate(permutation)}, mixer))
    for n in range(len(lens)):
        assert torch.equal(runs[0][0][n], runs[1][0][n])
    used = sorted(slots)
    assert torch.equal(runs[0][1].pool[used], runs[1][1].pool[used])
    assert torch.equal(runs[0][1].conv_pool[used], runs[1][1].conv_pool[used])


@prop
@given(first=st.integers(1, 20), second=st.integers(1, 20), seed=seeds)
def test_a_new_request_in_a_used_slot_equals_one_in_a_fresh_slot(backend, first, second, seed):
    used, fresh = Mixer(backend.device), Mixer(backend.device)
    used.prefill([(used.tokens(first, seed), 2, False)])
    x = used.tokens(second, seed + 5000)
    runs = []
    for mixer in (used, fresh):
        o = mixer.prefill([(x, 2, False)])[0]
        step = mixer.decode([(mixer.tokens(1, seed + 9000), 2)])[0]
        runs.append((o, step, mixer.pool[2], mixer.conv_pool[2]))
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@prop
@given(data=st.data(), prompt=st.integers(1, 18))
def test_speculative_rounds_equal_the_accepted_tokens_in_one_piece(backend, data, prompt):
    """Rounds of three tokens of which one to three are accepted, two requests side by side."""
    window, turns = 3, data.draw(st.integers(1, 3))
    mixer = Mixer(backend.device, slots=12, drafts=window - 1)
    table, conv_slots, accepted = [[1, 2, 3], [7, 5, 6]], [4, 9], [1, 1]
    taken = [mixer.tokens(prompt + n, seed=50 * n + 7) for n in range(2)]
    # The prompt's states go where a window starts: column 0, and the head of the convolution's columns.
    for n in range(2):
        rows = [(taken[n], conv_slots[n], False)]
        mixer.prefill(rows)
        mixer.pool[table[n][0]] = mixer.pool[conv_slots[n]]
    outputs = [[], []]
    for turn in range(turns):
        rows = [mixer.tokens(window, seed=1000 * turn + 300 * n + 1) for n in range(2)]
        o = mixer.verify(rows, table, conv_slots, accepted)
        accepted = [data.draw(st.integers(1, window)) for _ in range(2)]
        for n in range(2):
            taken[n] = {name: torch.cat([t, rows[n][name][:accepted[n]]]) for name, t in taken[n].items()}
            outputs[n].append(o[n][:accepted[n]])
    for n in range(2):
        want_o, want_state = mixer.oracle(taken[n])
        assert_accurate(torch.cat(outputs[n]), want_o[prompt + n:], FP32)
        assert_accurate(mixer.pool[table[n][accepted[n] - 1]], want_state, FP32, "state")


# On a GPU a geometry is a compilation: there the lengths are random, and the heads and dims are those of other tests.
def size(smallest, largest, on_gpu):
    return st.just(on_gpu) if GPU else st.integers(smallest, largest)


geometry = st.fixed_dictionaries(dict(
    lens=st.lists(lengths, min_size=1, max_size=3), H=size(1, 2, 2), K=size(16, 40, 32), V=size(16, 40, 16),
    dtype=st.sampled_from(DTYPES), gate=st.sampled_from(["bounded", "unbounded", "steep"]), seed=seeds,
))


@prop
@given(shape=geometry, groups=size(1, 3, 1))
def test_chunked_rule_equals_the_recurrence_for_any_geometry(backend, shape, groups):
    x = make(**shape, HV=shape["H"] * groups, device=backend.device)
    o, final = chunk(x)
    want_o, want_state = x.oracle()
    assert_accurate(o, want_o, x.dtype)
    assert_accurate(final, want_state, x.dtype, "state")


@prop
@given(shape=geometry, groups=size(1, 3, 1))
def test_recurrent_rule_equals_the_oracle_for_any_geometry(backend, shape, groups):
    if INTERPRETED:  # it has no blocks whose edges would matter, and the interpreter takes a token at a time
        shape["lens"] = [n % 8 for n in shape["lens"]]
    x = make(**shape, HV=shape["H"] * groups, device=backend.device)
    state = x.initial_state.clone()
    o, _ = recurrent(x, state=state)
    want_o, want_state = x.oracle()
    assert_accurate(o, want_o, x.dtype)
    assert_accurate(state, want_state, x.dtype, "state")


@prop
@given(lens=st.lists(lengths, min_size=1, max_size=4), dim=st.integers(1, 70), W=size(2, 8, 4), seed=seeds,
       dtype=st.sampled_from([BF16] if GPU else DTYPES))
def test_convolution_equals_the_oracle_for_any_geometry(backend, lens, dim, W, seed, dtype):
    x = randn(sum(lens), dim, seed=seed, dtype=dtype, device=backend.device).T
    weight = randn(dim, W, seed=seed + 1, device=backend.device)
    states = randn(len(lens) + 1, dim, W - 1, seed=seed + 2, dtype=dtype, device=backend.device)
    before = states.clone()
    slots = list(range(len(lens), 0, -1))
    out = kda.causal_conv1d_fn(x, weight, None, states, ints(starts(lens), x.device), ints(slots, x.device),
                               torch.ones(len(lens), dtype=torch.bool, device=x.device))
    want = []
    for n, bos in enumerate(starts(lens)[:-1]):
        o, left = oracle.conv(x[:, bos:bos + lens[n]], weight, None, before[slots[n]], True)
        want.append(o)
        assert torch.equal(states[slots[n]], left.to(dtype))
    assert_accurate(out, torch.cat(want, 1), dtype)
