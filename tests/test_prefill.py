# SPDX-License-Identifier: Apache-2.0
"""kda_prefill: prompts through a layer's operations on states in their slots, and checkpoints inside prompts."""

import dataclasses
import importlib

import oracle
import pytest
import torch
from helpers import (BF16, DEVICE, FP16, FP32, GPU, INTERPRETED, KERNELS, assert_accurate, assert_only_view_written,
                     bf16_on_gpu, call, each_dtype, frame, gpu_subset, ints, on_backends, rand, randn, starts, state_dtype_of)

import kda
from kda import known

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

NAN = float("nan")
SLOTS = 12


@dataclasses.dataclass
class Prompts:
    """What kda_prefill takes; slots of no sequence hold NaN, and so do tokens past the last sequence's end."""

    qkv: torch.Tensor
    raw_g: torch.Tensor
    beta: torch.Tensor
    out_gate: torch.Tensor
    conv_state: torch.Tensor
    ssm_state: torch.Tensor
    ssm_state_indices: torch.Tensor
    cu_seqlens: torch.Tensor
    has_initial_state: torch.Tensor
    conv_weight: torch.Tensor
    A_log: torch.Tensor
    g_bias: torch.Tensor
    norm_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    lower_bound: float | None
    checkpoint_offsets: torch.Tensor | None = None
    checkpoint_indices: torch.Tensor | None = None

    @property
    def args(self):
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def but(self, **fields):
        """A copy with pools of its own, so that one run does not see another's states."""
        own = dict(conv_state=self.conv_state.mT.clone().mT, ssm_state=self.ssm_state.clone())
        return dataclasses.replace(self, **{**own, **fields})

    def run(self, **kwargs):
        return call(kda.kda_prefill, **self.args, written=("conv_state", "ssm_state", "out"), **kwargs)


def prompts(lens, slots=None, has=None, *, H=2, HV=None, K=32, V=32, W=4, dtype=BF16, state_dtype=FP32, device="cpu",
            tail=3, bias=False, gate="bounded", seed=0):
    HV, N, T = HV or H, len(lens), sum(lens) + tail
    slots = list(range(1, N + 1)) if slots is None else slots
    has = [n % 2 == 0 for n in range(N)] if has is None else has
    dim = 2 * H * K + HV * V
    put = dict(dtype=dtype, device=device)
    at = 100 * seed
    tokens = dict(qkv=randn(T, dim, seed=at + 1, **put), raw_g=randn(T, HV, K, seed=at + 2, **put),
                  beta=randn(T, HV, seed=at + 3, **put), out_gate=randn(T, HV, V, seed=at + 4, **put))
    for x in tokens.values():
        x[sum(lens):] = NAN
    conv_state = torch.full((SLOTS, W - 1, dim), NAN, **put).mT  # a token's channels are dense
    ssm_state = torch.full((SLOTS, HV, V, K), NAN, dtype=state_dtype, device=device)
    for n, (slot, begins) in enumerate(zip(slots, has)):
        if 0 < slot < SLOTS and begins:
            conv_state[slot] = randn(dim, W - 1, seed=at + 10 + n, **put)
            ssm_state[slot] = randn(HV, V, K, seed=at + 40 + n, scale=0.1, device=device).to(state_dtype)
    fp32 = dict(device=device)
    return Prompts(
        **tokens, conv_state=conv_state, ssm_state=ssm_state, ssm_state_indices=ints(slots, device),
        cu_seqlens=ints(starts(lens), device), has_initial_state=torch.tensor(has, dtype=torch.bool, device=device),
        conv_weight=randn(dim, W, seed=at + 5, scale=0.5, **fp32), A_log=rand(H, seed=at + 6).clamp(min=0.01).log().to(device),
        g_bias=randn(H * K, seed=at + 7, scale=0.1, **fp32), norm_weight=1 + randn(V, seed=at + 8, scale=0.1, **fp32),
        conv_bias=randn(dim, seed=at + 9, **fp32) if bias else None, lower_bound=-5.0 if gate == "bounded" else None,
    )


def heads(x, qkv):
    HV, V, K = x.ssm_state.shape[1:]
    H = (qkv.shape[-1] - HV * V) // (2 * K)
    q, k, v = qkv.split([H * K, H * K, HV * V], -1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def want(x, n, end=None, activation="sigmoid"):
    """Sequence n in fp64, up to its token `end`: output [tokens, HV, V], convolution history, state."""
    bos, eos = x.cu_seqlens.tolist()[n:n + 2]
    eos = eos if end is None else bos + end
    slot, begins = int(x.ssm_state_indices[n]), bool(x.has_initial_state[n])
    past, dtype = x.conv_weight.shape[1] - 1, x.qkv.dtype
    history = x.conv_state[slot, :, :past] if begins else torch.zeros_like(x.conv_state[0, :, :past])
    state = x.ssm_state[slot][None] if begins else torch.zeros_like(x.ssm_state[:1])
    y, history = oracle.conv(x.qkv[bos:eos].T, x.conv_weight, x.conv_bias, history, True)
    q, k, v = heads(x, y.T.to(dtype))  # as the operations hand it on
    if eos == bos:
        return x.out_gate.new_zeros(0, *x.out_gate.shape[1:]).double(), history, state[0].double()
    o, state = oracle.kda(q[None], k[None], v[None], x.raw_g[None, bos:eos], x.beta[None, bos:eos], sigmoid_beta=True,
                          A_log=x.A_log, g_bias=x.g_bias, lower_bound=x.lower_bound, initial_state=state,
                          cu_seqlens=[0, eos - bos])
    o, _ = oracle.rms_norm_gated(o[0], x.out_gate[bos:eos], x.norm_weight, None, activation, eps=1e-5)
    return o, history, state[0]


def assert_right(x, o, conv_state, ssm_state):
    dtype, past = x.qkv.dtype, x.conv_weight.shape[1] - 1
    for n, (bos, eos) in enumerate(zip(x.cu_seqlens.tolist(), x.cu_seqlens.tolist()[1:])):
        slot = int(x.ssm_state_indices[n])
        if not 0 < slot < SLOTS:
            assert not o[bos:eos].any()
            continue
        want_o, history, state = want(x, n)
        if eos > bos:
            assert oracle.err(o[bos:eos], want_o) <= 2 * {BF16: 0.004, FP16: 0.001, FP32: 2e-5}[dtype]  # rounded twice
        assert_accurate(ssm_state[slot], state, state_dtype_of(dtype, ssm_state.dtype), "state")
        assert torch.equal(conv_state[slot, :, :past], history.to(conv_state.dtype))


SMALL = {
    "mixed": dict(lens=(0, 5, 17, 1), slots=[3, 1, 0, 7]),
    "grouped": dict(lens=(20, 3), H=2, HV=6, K=16, V=32, W=2, bias=True),
}
COMPILED = {
    "lengths": dict(lens=(15, 16, 17, 63, 64, 65), slots=[5, 0, 3, 99, -1, 8], K=64, V=64),
    "glm": dict(lens=(70, 33), K=128, V=128),
    "odd": dict(lens=(40, 9), H=3, K=40, V=20, W=3, gate="unbounded"),
}
LARGE = {"long": dict(lens=(1500, 300), H=16, K=128, V=128)}
SHAPES = {**SMALL, **COMPILED, **LARGE}
each_shape = on_backends("shape", SMALL, COMPILED, LARGE)


@gpu_subset(lambda shape, dtype, **_: dtype == BF16 or shape == "glm")
@each_dtype
@each_shape
def test_prefill_equals_the_oracle(backend, shape, dtype):
    x = prompts(**SHAPES[shape], dtype=dtype, device=backend.device)
    before = x.but()
    o = x.run()
    assert_right(before, o, x.conv_state, x.ssm_state)
    assert not o[x.cu_seqlens[-1]:].any()
    used = {int(s) for s in x.ssm_state_indices}
    for slot in set(range(SLOTS)) - used:
        assert x.ssm_state[slot].isnan().all() and x.conv_state[slot].isnan().all()


@bf16_on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_walk_in_segments_reads_and_writes_the_pool(backend, monkeypatch, dtype):
    if backend.name == "reference":
        pytest.skip("the reference has no segments")
    monkeypatch.setattr(importlib.import_module("kda.triton.walk"), "segment_chunks", lambda *_: 2)
    monkeypatch.setattr(known, "_known", {})
    x = prompts((0, 100, 32, 5, 64, 33), [5, 3, 0, 99, 2, 7], K=64, V=48, device=backend.device, dtype=dtype)
    before, o = x.but(), x.run()
    assert_right(before, o, x.conv_state, x.ssm_state)
    for slot in (0, 1, 4, 6, 8, 9, 10, 11):
        assert x.ssm_state[slot].isnan().all()


@bf16_on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_prefill_equals_the_separate_operations(backend, dtype):
    x = prompts((33, 0, 20, 5), [4, 2, 9, 6], device=backend.device, dtype=dtype, K=64, V=48, tail=0)
    apart, o = x.but(), x.run()
    y = kda.causal_conv1d_fn(apart.qkv.T, apart.conv_weight, None, apart.conv_state, apart.cu_seqlens,
                             apart.ssm_state_indices, apart.has_initial_state).T
    q, k, v = heads(apart, y)
    state = kda.gather_initial_states(apart.ssm_state, apart.ssm_state_indices, apart.has_initial_state)
    want_o, state = kda.chunk_kda_with_fused_gate(
        q[None], k[None], v[None], apart.raw_g[None], apart.beta[None], apart.A_log, apart.g_bias, initial_state=state,
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=apart.cu_seqlens, safe_gate=True,
        sigmoid_beta=True)
    kda.scatter_states(apart.ssm_state, state, apart.ssm_state_indices)
    want_o = kda.rms_norm_gated(want_o[0], apart.out_gate, apart.norm_weight, None, activation="sigmoid", eps=1e-5)
    assert_accurate(o, want_o, dtype)
    assert torch.equal(x.conv_state.nan_to_num(), apart.conv_state.nan_to_num())
    for slot in (4, 2, 9, 6):
        assert_accurate(x.ssm_state[slot], apart.ssm_state[slot], dtype, "state")


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_options(backend, activation):
    """bf16 states, indices of any stride, 64-bit offsets, no flags, a scale, a wider convolution state."""
    x = prompts((20, 6), has=[False, False], state_dtype=BF16, device=backend.device, K=64, V=64)
    wide = torch.full((SLOTS, 5, x.qkv.shape[1]), NAN, dtype=BF16, device=backend.device).mT
    x = x.but(conv_state=wide, cu_seqlens=x.cu_seqlens.long(),
              ssm_state_indices=torch.stack([x.ssm_state_indices, -x.ssm_state_indices], 1)[:, 0])
    o = kda.kda_prefill(**{**x.args, "has_initial_state": None}, activation=activation, scale=64**-0.5)
    for n, (bos, eos) in enumerate(((0, 20), (20, 26))):
        want_o, history, state = want(x, n, activation=activation)
        assert oracle.err(o[bos:eos], want_o) <= 0.008
        assert_accurate(x.ssm_state[n + 1], state, BF16, "state")
        assert torch.equal(wide[n + 1, :, :3], history.to(BF16)) and wide[n + 1, :, 3:].isnan().all()


@bf16_on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_strided_inputs_and_out_give_the_same_bits(backend, dtype):
    x = prompts((21, 30), device=backend.device, dtype=dtype, K=64, V=64)
    framed = {name: frame(getattr(x, name)[None], before=5)[0] for name in ("qkv", "raw_g", "beta", "out_gate")}
    out = frame(torch.full_like(x.out_gate, 7.0)[None])[0]
    y, o = x.but(**framed), x.but().run()
    assert y.run(out=out) is out
    assert torch.equal(out[:51], o[:51]) and (out[51:] == 7.0).all()
    assert_only_view_written(out)
    z = x.but()
    z.run()
    assert torch.equal(y.ssm_state.nan_to_num(), z.ssm_state.nan_to_num())
    assert torch.equal(y.conv_state.nan_to_num(), z.conv_state.nan_to_num())


def test_no_tokens_and_no_sequences(backend):
    x = prompts((0, 0), [2, 4], [True, False], device=backend.device, tail=0)
    kept = x.ssm_state[2].clone()
    assert x.run().shape == (0, 2, 32)
    assert torch.equal(x.ssm_state[2], kept) and not x.ssm_state[4].any()  # taken over without a state: zeros
    empty = prompts((), device=backend.device, tail=4)
    assert not empty.run().any()


# --------------------------------------------------------------------------------------------------------- checkpoints


def kept_at(x, places):
    """`x` with checkpoints: {slot: (sequence, tokens)}."""
    begin, device = x.cu_seqlens.tolist(), x.qkv.device
    return x.but(checkpoint_offsets=ints([begin[n] + t for n, t in places.values()], device),
                 checkpoint_indices=ints(list(places), device))


@bf16_on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("K", [32, 128])
def test_checkpoints_hold_the_states_of_the_cut_prompts(backend, K, dtype):
    """In any order, at chunk boundaries and beside them, before the convolution's width, at a prompt's end."""
    x = prompts((40, 0, 70, 2, 33), [1, 2, 3, 4, 5], [True, True, False, True, True], K=K, V=K, device=backend.device,
                dtype=dtype)
    places = {10: (2, 64), 6: (0, 16), 7: (2, 1), 8: (3, 2), 9: (4, 17), 11: (2, 32)}
    y = kept_at(x, places)
    o = y.run()
    assert_right(x, o, y.conv_state, y.ssm_state)
    for slot, (n, tokens) in places.items():
        _, history, state = want(x, n, tokens)
        assert_accurate(y.ssm_state[slot], state, dtype, "state")
        assert torch.equal(y.conv_state[slot, :, :3], history.to(dtype))


def test_checkpoints_in_no_sequence_or_slot_keep_nothing(backend):
    x = prompts((20, 30, 5), [1, 0, 3], [True, False, True], device=backend.device)
    offsets = ints([0, -7, 30, 56, 999, 10, 52, 15], backend.device)  # at the start, in padding, past the end
    slots = ints([5, 6, 7, 8, 9, 0, 99, -3], backend.device)
    y = x.but(checkpoint_offsets=offsets, checkpoint_indices=slots)
    o = y.run()
    assert_right(x, o, y.conv_state, y.ssm_state)
    for slot in (0, 2, *range(4, SLOTS)):
        assert y.ssm_state[slot].isnan().all() and y.conv_state[slot].isnan().all()


def merged(cu, cuts, slots, T, SLOTS):
    """The fields of walk.Checkpoints by sorting: a checkpoint comes before the sequence that begins where it lies."""
    begin, entries = 0, []
    for n, at in enumerate(cu):
        begin = max(begin, min(max(at, 0), T))
        entries.append((begin, 1, n, 0))
    first, last = entries[0][0], entries[-1][0]
    for m, (at, slot) in enumerate(zip(cuts, slots)):
        keeps = first < at <= last and 0 < slot < SLOTS
        entries.append((min(max(at, first), last), 0, m, slot if keeps else 0))
    entries.sort()
    return [e[0] for e in entries], [e[3] for e in entries], [place for place, e in enumerate(entries) if e[1]]


@pytest.mark.skipif(INTERPRETED, reason="takes minutes there")
@pytest.mark.parametrize("sane", [True, False])
@pytest.mark.parametrize("N, M", [(1, 1), (3, 60), (60, 3), (63, 64), (130, 200), (1, 300), (300, 1)])
def test_offsets_and_checkpoints_are_merged_in_order(N, M, sane):
    """Also ties, offsets out of range, and offsets that do not rise; more of both than a tile holds."""
    pytest.importorskip("triton")
    from kda.triton.prefill import checkpoints

    device, T, dim, slots = DEVICE[KERNELS], 500, 8, 40
    generator = torch.Generator().manual_seed(N + 1000 * M + sane)
    cu = torch.randint(-30, T + 30, (N + 1,), generator=generator)
    cu = cu.clamp(0, T).sort().values if sane else cu
    cuts = torch.cat([torch.randint(-30, T + 30, (M - M // 2,), generator=generator),
                      cu[torch.randint(0, N + 1, (M // 2,), generator=generator)]])  # fmt: skip
    to = torch.randint(-2, slots + 2, (M,), generator=generator)
    x, states = randn(T, dim, seed=1, device=device), randn(slots, 3, dim, seed=2, device=device).mT
    has = torch.ones(N, dtype=torch.bool, device=device)
    got = checkpoints(x, states, 4, ints(cu.tolist(), device), ints([1] * N, device), has, ints(cuts.tolist(), device),
                      ints(to.tolist(), device), slots, None)  # fmt: skip
    assert [field.tolist() for field in got] == list(merged(cu.tolist(), cuts.tolist(), to.tolist(), T, slots))


prop = settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@prop
@given(data=st.data())
def test_a_restored_checkpoint_goes_on_as_the_prompt_did(backend, data):
    """A prompt's rest, prefilled by another request from a checkpoint, equals the prompt's own rest."""
    dtype = data.draw(st.sampled_from([FP32, BF16]))
    lens = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=4))
    n = data.draw(st.integers(0, len(lens) - 1))
    hypothesis.assume(lens[n] > 1)
    cuts = sorted(data.draw(st.sets(st.integers(1, lens[n] - 1), min_size=1, max_size=3)))
    x = prompts(lens, K=32, V=16, device=backend.device, dtype=dtype, seed=data.draw(st.integers(0, 99)))
    y = kept_at(x, dict(zip((8, 9, 10), ((n, at) for at in cuts))))
    o = y.run()
    bos, eos = sum(lens[:n]), sum(lens[:n + 1])
    want_o, history, state = want(x, n)
    for slot, at in zip((8, 9, 10), cuts):
        rest = {name: getattr(y, name)[bos + at:eos] for name in ("qkv", "raw_g", "beta", "out_gate")}
        again = y.but(**rest, cu_seqlens=ints([0, eos - bos - at], backend.device),
                      ssm_state_indices=ints([slot], backend.device), checkpoint_offsets=None, checkpoint_indices=None,
                      has_initial_state=torch.tensor([True], device=backend.device))
        o_rest = again.run()
        assert oracle.err(o_rest, want_o[at:]) <= {BF16: 0.008, FP32: 4e-5}[dtype]
        assert_accurate(again.ssm_state[slot], state, dtype, "state")
        assert torch.equal(again.conv_state[slot, :, :3], history.to(dtype))
    assert oracle.err(o[bos:eos], want_o) <= {BF16: 0.008, FP32: 4e-5}[dtype]


@bf16_on_gpu
@pytest.mark.parametrize("dtype", [BF16])
def test_checkpoints_do_not_change_the_output_beyond_rounding(backend, dtype):
    x = prompts((65, 20), K=128, V=128, device=backend.device, dtype=dtype)
    plain, y = x.but(), kept_at(x, {7: (0, 17), 8: (0, 33)})
    assert_accurate(y.run()[:85], plain.run()[:85], dtype)


# ----------------------------------------------------------------------------------------------------------- bad input

BAD = {
    "qkv-columns": (lambda x: dict(qkv=x.qkv[:, :-1]), "qkv"),
    "qkv-strides": (lambda x: dict(qkv=x.qkv.T.contiguous().T), "qkv"),
    "raw_g-rows": (lambda x: dict(raw_g=x.raw_g[1:]), "raw_g"),
    "beta-shape": (lambda x: dict(beta=x.beta[..., None]), "beta"),
    "out_gate-heads": (lambda x: dict(out_gate=x.out_gate[:, :1]), "out_gate|qkv|beta|raw_g"),
    "ssm_state-shape": (lambda x: dict(ssm_state=x.ssm_state.mT[:, :, :-1]), "ssm_state"),
    "ssm_state-dtype": (lambda x: dict(ssm_state=x.ssm_state.half()), "ssm_state"),
    "conv_state-narrow": (lambda x: dict(conv_state=x.conv_state[..., :2]), "conv_state"),
    "indices-many": (lambda x: dict(ssm_state_indices=ints([1, 2, 3], x.qkv.device)), "ssm_state_indices"),
    "indices-float": (lambda x: dict(ssm_state_indices=x.ssm_state_indices.float()), "ssm_state_indices"),
    "cu_seqlens-none": (lambda x: dict(cu_seqlens=None), "cu_seqlens"),
    "flags-dtype": (lambda x: dict(has_initial_state=x.has_initial_state.int()), "has_initial_state"),
    "checkpoints-alone": (lambda x: dict(checkpoint_offsets=x.cu_seqlens), "checkpoint_indices"),
    "checkpoints-uneven": (lambda x: dict(checkpoint_offsets=x.cu_seqlens, checkpoint_indices=x.ssm_state_indices),
                           "checkpoint_indices"),
    "lower_bound": (lambda x: dict(lower_bound=1.0), "lower_bound"),
    "activation": (lambda x: dict(activation="relu"), "activation"),
    "out-dtype": (lambda x: dict(out=x.out_gate.double()), "out"),
    "out-aliases": (lambda x: dict(out=x.out_gate), "out"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named_and_nothing_is_written(backend, bad):
    change, named = BAD[bad]
    x = prompts((5, 6), device=backend.device)
    args = {**x.args, **change(x)}
    with pytest.raises((TypeError, ValueError), match=f"`({named})`"):
        call(kda.kda_prefill, **args)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_cuda_graph_replays_with_other_lengths_and_checkpoints():
    device = torch.device("cuda")
    x = kept_at(prompts((60, 1, 69), K=128, V=128, H=4, device=device), {7: (0, 16), 8: (2, 33)})
    x.ssm_state.zero_(), x.conv_state.zero_()
    x.run()
    graph, eager = torch.cuda.CUDAGraph(), x.but()
    with torch.cuda.graph(graph):
        captured = kda.kda_prefill(**x.args)
    for cu, slots, offsets in ([[0, 1, 100, 120], [6, 2, 5], [50, 120]], [[0, 0, 130, 130], [0, 4, 99], [129, 3]]):
        for name, value in dict(cu_seqlens=cu, ssm_state_indices=slots, checkpoint_offsets=offsets).items():
            getattr(x, name).copy_(ints(value, device))
        eager.ssm_state.copy_(x.ssm_state), eager.conv_state.copy_(x.conv_state)
        graph.replay()
        want_o = kda.kda_prefill(**dataclasses.replace(
            x, ssm_state=eager.ssm_state, conv_state=eager.conv_state).args)
        assert torch.equal(captured.nan_to_num(), want_o.nan_to_num())
        assert torch.equal(x.ssm_state, eager.ssm_state) and torch.equal(x.conv_state, eager.conv_state)
