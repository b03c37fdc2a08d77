# SPDX-License-Identifier: Apache-2.0
"""kda_decode: a decode step in one kernel, against the oracle and against the separate operations."""

import dataclasses

import oracle
import pytest
import torch
from helpers import (BF16, BOUNDS, FP16, FP32, GPU, assert_accurate, assert_only_view_written, call, dtype_id,
                     each_dtype, frame, gpu_subset, ints, needs_gpu, on_backends, rand, randn, state_dtype_of)

import kda

NAN = float("nan")

SMALL = {
    "decode": dict(N=3),
    "one": dict(N=1, K=16, V=24, W=2),
    "grouped": dict(N=2, H=2, HV=6, K=16, V=32),
    "odd": dict(N=2, H=3, K=40, V=20, W=3),
    "glm": dict(N=2, H=1, K=128, V=128),
}
COMPILED = {
    "64": dict(N=5, H=4, K=64, V=64),
    "128": dict(N=9, H=4, K=128, V=128),
    "uneven": dict(N=3, H=2, HV=4, K=96, V=80, W=5),
    "tall": dict(N=2, H=2, K=32, V=200),
    "wide": dict(N=2, H=1, K=250, V=48),
    "widest": dict(N=2, H=1, HV=2, K=256, V=256, W=8),
}
LARGE = {"glm-64": dict(N=64, H=64, K=128, V=128), "glm-16": dict(N=70, H=16, K=128, V=128)}
SHAPES = {**SMALL, **COMPILED, **LARGE}
each_shape = on_backends("shape", SMALL, COMPILED, LARGE)


@dataclasses.dataclass
class Step:
    """What kda_decode takes; row n is in slot `slots[n]`. Slots of no row hold NaN."""

    qkv: torch.Tensor
    raw_g: torch.Tensor
    beta: torch.Tensor
    out_gate: torch.Tensor
    conv_state: torch.Tensor
    ssm_state: torch.Tensor
    ssm_state_indices: torch.Tensor
    conv_weight: torch.Tensor
    A_log: torch.Tensor
    g_bias: torch.Tensor
    norm_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    lower_bound: float | None
    H: int

    def __getitem__(self, name):
        return getattr(self, name)

    @property
    def args(self):
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if name != "H"}

    @property
    def slots(self):
        return self.ssm_state_indices.tolist()

    def but(self, **fields):
        return dataclasses.replace(self, **fields)

    def copy(self):
        """With pools of its own."""
        conv = torch.empty_like(self.conv_state.transpose(1, 2)).transpose(1, 2).copy_(self.conv_state)
        return self.but(conv_state=conv, ssm_state=self.ssm_state.clone())

    def heads(self, x):
        """q, k [N, H, K] and v [N, HV, V] of [N, dim]."""
        HV, V, K = self.ssm_state.shape[1:]
        q, k, v = x.split([self.H * K, self.H * K, HV * V], -1)
        return q.unflatten(-1, (self.H, K)), k.unflatten(-1, (self.H, K)), v.unflatten(-1, (HV, V))


def make(N, H=2, HV=None, K=32, V=16, W=4, dtype=BF16, device="cpu", state_dtype=FP32, conv_dtype=None, gate="bounded",
         spare=0, dim_last=True, conv_bias=False, seed=0):
    HV = HV or H
    dim, slots, put = 2 * H * K + HV * V, N + 3, dict(dtype=dtype, device=device)
    seed = 100 * seed
    order = [N + 1 - n for n in range(N)]
    conv = torch.full((slots, W - 1 + spare, dim), NAN, dtype=conv_dtype or dtype, device=device)
    conv = conv.transpose(1, 2) if dim_last else conv.transpose(1, 2).contiguous()
    conv[order, :, :W - 1] = randn(N, dim, W - 1, seed=seed + 1, device=device).to(conv.dtype)
    state = torch.full((slots, HV, V, K), NAN, dtype=state_dtype, device=device)
    state[order] = randn(N, HV, V, K, seed=seed + 2, scale=0.3, device=device).to(state_dtype)
    return Step(
        qkv=randn(N, dim, seed=seed + 3, **put), raw_g=randn(N, HV, K, seed=seed + 4, **put),
        beta=randn(N, HV, seed=seed + 5, **put), out_gate=randn(N, HV, V, seed=seed + 6, **put),
        conv_state=conv, ssm_state=state, ssm_state_indices=ints(order, device),
        conv_weight=randn(dim, W, seed=seed + 7, scale=0.5, device=device),
        A_log=rand(HV, seed=seed + 8).clamp(min=0.01).log().to(device),
        g_bias=randn(HV * K, seed=seed + 9, scale=0.1, device=device),
        norm_weight=1 + 0.1 * randn(V, seed=seed + 10, device=device),
        conv_bias=randn(dim, seed=seed + 11, device=device) if conv_bias else None,
        lower_bound=-5.0 if gate == "bounded" else None, H=H,
    )


def decode(x, **overrides):
    return call(kda.kda_decode, **{**x.args, **overrides}, written=("conv_state", "ssm_state", "out"))


def expected(x, scale=None, activation="sigmoid", eps=1e-5, norm_weight=...):
    """Output, convolution histories and recurrent states of the rows, in fp64, all rows being requests."""
    W = x.conv_weight.shape[1]
    new = x.qkv.to(x.conv_state.dtype)
    rows = [oracle.conv(new[n][:, None], x.conv_weight, x.conv_bias, x.conv_state[slot][:, :W - 1], True)
            for n, slot in enumerate(x.slots)]
    y = torch.stack([out[:, 0] for out, _ in rows]).to(x.qkv.dtype)  # contract section 2: rounded
    q, k, v = (t[:, None] for t in x.heads(y))
    o, state = oracle.kda(q, k, v, x.raw_g[:, None], x.beta[:, None], scale=scale, sigmoid_beta=True, A_log=x.A_log,
                          g_bias=x.g_bias, lower_bound=x.lower_bound, initial_state=x.ssm_state[x.slots])
    weight = x.norm_weight if norm_weight is ... else norm_weight
    o, _ = oracle.rms_norm_gated(o[:, 0], x.out_gate, weight, None, activation, eps=eps)
    return o, torch.stack([left for _, left in rows]), state


def assert_moved_on(x, before, history, state, dtype):
    """The rows' slots hold their new states, every other slot and column what it held."""
    W = x.conv_weight.shape[1]
    want = before.conv_state.clone()
    want[x.slots, :, :W - 1] = history.to(want.dtype)
    assert torch.equal(x.conv_state.nan_to_num(3e4), want.nan_to_num(3e4))
    assert_accurate(x.ssm_state[x.slots], state, state_dtype_of(dtype, x.ssm_state.dtype), "state")
    others = [s for s in range(len(x.ssm_state)) if s not in x.slots]
    assert torch.equal(x.ssm_state[others].nan_to_num(7.0), before.ssm_state[others].nan_to_num(7.0))


def separate(x):
    """The same step by the separate operations."""
    y = kda.causal_conv1d_update(x.qkv, x.conv_state, x.conv_weight, x.conv_bias, "silu", x.ssm_state_indices)
    q, k, v = (t[:, None] for t in x.heads(y))
    o, _ = kda.fused_recurrent_kda(
        q, k, v, x.raw_g[:, None], x.beta[:, None], initial_state=x.ssm_state, ssm_state_indices=x.ssm_state_indices,
        sigmoid_beta=True, a_log=x.A_log, g_bias=x.g_bias, compute_gate=True, lower_bound=x.lower_bound)
    return kda.rms_norm_gated(o[:, 0], x.out_gate, x.norm_weight, None, activation="sigmoid", eps=1e-5)


def assert_near(o, other):
    """Outputs of this operation and of the separate ones, which round once more: each may be off by the bound."""
    assert o.isfinite().all() and oracle.err(o, other) <= 2 * BOUNDS[o.dtype]["output"]


# ----------------------------------------------------------------------------------------------------------- what it is


@gpu_subset(lambda shape, gate, dtype, **_: dtype == BF16 and (gate == "bounded" or shape == "decode"))
@each_dtype
@pytest.mark.parametrize("gate", ["bounded", "unbounded"])
@each_shape
def test_output_and_both_states_equal_the_oracle(backend, shape, gate, dtype):
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device, gate=gate, conv_bias=shape == "odd")
    before = x.copy()
    want, history, state = expected(x)
    o = decode(x)
    assert o.dtype == dtype and o.shape == x.out_gate.shape and o.is_contiguous()
    assert_accurate(o, want, dtype)
    assert_moved_on(x, before, history, state, dtype)


@gpu_subset(lambda shape, dtype, **_: dtype == BF16 or shape == "decode")
@each_dtype
@pytest.mark.parametrize("dim_last", [True, False], ids=["conv-state-dim-last", "conv-state-dim-first"])
@each_shape
def test_it_equals_the_separate_operations(backend, shape, dim_last, dtype):
    """The convolution states to the bit."""
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device, dim_last=dim_last, spare=2, seed=1)
    other = x.copy()
    want = separate(other)
    o = decode(x)
    assert torch.equal(x.conv_state.nan_to_num(3e4), other.conv_state.nan_to_num(3e4))
    assert oracle.err(x.ssm_state[x.slots], other.ssm_state[x.slots].double()) <= 1e-5
    assert_near(o, want)


@pytest.mark.parametrize("conv_dtype", [BF16, FP32], ids=lambda d: "conv-" + dtype_id(d))
@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=lambda d: "state-" + dtype_id(d))
@gpu_subset(lambda dtype, **_: dtype != FP16)
@each_dtype
def test_states_of_other_dtypes(backend, dtype, state_dtype, conv_dtype):
    for shape in (dict(N=3), dict(N=2, H=1, K=128, V=128)):
        x = make(**shape, dtype=dtype, device=backend.device, state_dtype=state_dtype, conv_dtype=conv_dtype)
        before = x.copy()
        want, history, state = expected(x)
        other = x.copy()
        separate(other)
        assert_accurate(decode(x), want, dtype)
        assert_moved_on(x, before, history, state, dtype)
        assert torch.equal(x.conv_state[x.slots], other.conv_state[x.slots])


def test_gate_beta_and_weights_in_dtypes_of_their_own(backend):
    x = make(N=3, device=backend.device)
    x = x.but(raw_g=x.raw_g.float(), beta=x.beta.to(FP16), out_gate=x.out_gate.float(), A_log=x.A_log.to(BF16),
              g_bias=x.g_bias.to(BF16), norm_weight=x.norm_weight.to(BF16), conv_weight=x.conv_weight.to(BF16))
    want, _, _ = expected(x)
    o = decode(x)
    assert o.dtype == BF16
    assert_accurate(o, want, BF16)


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "swish"])
def test_activations_of_the_output_gate(backend, activation):
    x = make(N=2, dtype=FP32, device=backend.device)
    want, _, _ = expected(x, activation=activation)
    assert_accurate(decode(x, activation=activation), want, FP32)


def test_scale_eps_and_no_norm_weight(backend):
    x = make(N=2, dtype=FP32, device=backend.device)
    want, _, _ = expected(x, scale=0.01, eps=1e-2, norm_weight=None)
    assert_accurate(decode(x, scale=0.01, eps=1e-2, norm_weight=None), want, FP32)


@pytest.mark.parametrize("amplitude", ["[H]", "[1, 1, HV, 1]", "no bias"])
def test_gate_parameters_of_query_heads_or_value_heads(backend, amplitude):
    x = make(N=2, H=2, HV=4, dtype=FP32, device=backend.device)
    if amplitude == "[H]":
        x = x.but(A_log=x.A_log[:2].clone(), g_bias=x.g_bias[:2 * 32].view(2, 32).clone())
    elif amplitude == "no bias":
        x = x.but(g_bias=None)
    want, _, state = expected(x)
    args = dict(A_log=x.A_log.view(1, 1, -1, 1)) if amplitude.startswith("[1") else {}
    assert_accurate(decode(x, **args), want, FP32)
    assert_accurate(x.ssm_state[x.slots], state, FP32, "state")


def test_conv_weights_of_any_stride(backend):
    x = make(N=2, device=backend.device)
    want = decode(x.copy())
    assert torch.equal(decode(x, conv_weight=x.conv_weight.T.contiguous().T), want)


def test_steps_continue_each_other(backend):
    """Ten tokens of three requests one by one equal the separate operations' and the oracle's."""
    x, other = (make(N=3, dtype=FP32, device=backend.device, W=4) for _ in range(2))
    for t in range(10):
        new = make(N=3, dtype=FP32, device=backend.device, seed=t + 2)
        tokens = dict(qkv=new.qkv, raw_g=new.raw_g, beta=new.beta, out_gate=new.out_gate)
        x, other = x.but(**tokens), other.but(**tokens)
        want, _, state = expected(x)
        o = decode(x)
        assert_accurate(o, want, FP32)
        assert_near(o, separate(other))
        assert_accurate(x.ssm_state[x.slots], state, FP32, "state")
    assert torch.equal(x.conv_state[x.slots], other.conv_state[x.slots])


# ---------------------------------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("given_out", [False, True], ids=["fresh", "out"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_padding_rows_give_zeros_and_touch_no_state(backend, index_dtype, given_out):
    """Slots 0, -1, past both pools and far past them; what padded rows hold is not looked at. Indices are strided."""
    x = make(N=6, H=2, HV=4, device=backend.device)
    before, padding, live = x.copy(), [1, 2, 4, 5], [0, 3]
    alone = x.but(ssm_state_indices=x.ssm_state_indices[live], **{
        name: x[name][live] for name in ("qkv", "raw_g", "beta", "out_gate")})
    want, history, state = expected(alone)
    wide = torch.full((6, 3), 4, dtype=index_dtype, device=x.qkv.device)
    wide[:, 1] = torch.tensor([x.slots[0], 0, -1, x.slots[3], 9, 1 << 30])
    for name in ("qkv", "raw_g", "beta", "out_gate"):
        x[name][padding] = NAN
    out = torch.full_like(x.out_gate, NAN) if given_out else None
    o = decode(x, ssm_state_indices=wide[:, 1], out=out)
    assert not given_out or o is out
    assert torch.equal(o[padding], torch.zeros_like(o[padding]))
    assert_accurate(o[live], want, BF16)
    assert_moved_on(x.but(ssm_state_indices=alone.ssm_state_indices), before, history, state, BF16)


@pytest.mark.parametrize("short", ["conv_state", "ssm_state"])
def test_a_slot_past_the_smaller_pool_is_padding(backend, short):
    x = make(N=3, device=backend.device)
    x = x.but(**{short: x[short][:4]})  # row 0 is in slot 4
    before = x.copy()
    o = decode(x)
    assert torch.equal(o[0], torch.zeros_like(o[0])) and o[1:].isfinite().all() and (o[1:] != 0).any()
    for name in ("conv_state", "ssm_state"):
        assert torch.equal(x[name][4:].nan_to_num(7.0), before[name][4:].nan_to_num(7.0))
        assert not torch.equal(x[name][2:4], before[name][2:4])


def test_a_batch_of_padding_only_and_one_of_no_rows(backend):
    x = make(N=3, device=backend.device)
    before = x.copy()
    o = decode(x, ssm_state_indices=torch.zeros_like(x.ssm_state_indices))
    assert torch.equal(o, torch.zeros_like(o))
    none = {name: x[name][:0] for name in ("qkv", "raw_g", "beta", "out_gate", "ssm_state_indices")}
    assert decode(x, **none).shape == (0, *x.out_gate.shape[1:])
    for name in ("conv_state", "ssm_state"):
        assert torch.equal(x[name].nan_to_num(7.0), before[name].nan_to_num(7.0))


@pytest.mark.parametrize("pad", [48, 5])
def test_pools_with_padded_pages(backend, pad):
    x = make(N=3, device=backend.device)
    other = x.copy()
    want = decode(other)
    slots, dim, columns = x.conv_state.shape
    pages = torch.full((slots, x.ssm_state[0].numel() + pad), NAN, device=x.qkv.device)
    state = pages[:, :x.ssm_state[0].numel()].view(x.ssm_state.shape).copy_(x.ssm_state)
    conv_pages = torch.full((slots, dim * columns + pad), NAN, dtype=BF16, device=x.qkv.device)
    conv = conv_pages[:, :dim * columns].unflatten(1, (columns, dim)).transpose(1, 2).copy_(x.conv_state)
    o = decode(x.but(conv_state=conv, ssm_state=state))
    assert_accurate(o, want, BF16)
    assert torch.equal(conv[x.slots], other.conv_state[x.slots])
    assert_accurate(state[x.slots], other.ssm_state[x.slots], FP32, "state")
    assert pages[:, x.ssm_state[0].numel():].isnan().all() and conv_pages[:, dim * columns:].isnan().all()


@on_backends("N,H", [], [(1024, 64)])
def test_65536_requests_times_heads(backend, N, H):
    x = make(N=N, H=H, K=16, V=16, device=backend.device)
    other = x.copy()
    o = decode(x)
    assert_near(o, separate(other))
    assert torch.equal(x.conv_state[1:-2].nan_to_num(), other.conv_state[1:-2].nan_to_num())


# ----------------------------------------------------------------------------------------------------------------- bits

TOKENS = ("qkv", "raw_g", "beta", "out_gate")


def in_frames(x, before, after):
    """The token inputs as column slices of poisoned buffers."""
    return x.but(**{name: frame(x[name][None], before=before, after=after)[0] for name in TOKENS})


def as_one_projection(x):
    """qkv and beta, raw_g and out_gate as columns of two projections, as a layer has them."""
    N, merged = len(x.qkv), torch.cat([x.qkv, x.beta], 1)
    low = torch.cat([x.raw_g.flatten(1), x.out_gate.flatten(1)], 1)
    (qkv, beta), parts = merged.split([x.qkv.shape[1], x.beta.shape[1]], 1), (x.raw_g[0].numel(), x.out_gate[0].numel())
    raw_g, gate = low.split(parts, 1)
    return x.but(qkv=qkv, beta=beta, raw_g=raw_g.view(N, *x.raw_g.shape[1:]),
                 out_gate=gate.view(N, *x.out_gate.shape[1:]))


LAYOUTS = {
    "aligned": lambda x: in_frames(x, 16, 16), "odd": lambda x: in_frames(x, 3, 6), "projection": as_one_projection,
    "head-major": lambda x: x.but(raw_g=x.raw_g.transpose(0, 1).contiguous().transpose(0, 1),
                                  out_gate=x.out_gate.transpose(0, 1).contiguous().transpose(0, 1)),
    "conv-state-dim-first": lambda x: x.but(conv_state=x.conv_state.contiguous()),
}


@gpu_subset(lambda shape, dtype, **_: dtype == BF16 or shape == "decode" and dtype == FP32)
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@on_backends("shape", ["decode", "grouped"], ["128", "uneven", "widest"])
def test_strides_do_not_change_a_bit(backend, shape, layout, dtype):
    x = make(**SHAPES[shape], dtype=dtype, device=backend.device)
    view = LAYOUTS[layout](x.copy())
    assert any(view[name].stride() != x[name].stride() for name in (*TOKENS, "conv_state"))
    assert torch.equal(decode(x), decode(view))
    assert torch.equal(x.ssm_state[x.slots], view.ssm_state[x.slots])
    assert torch.equal(x.conv_state[x.slots], view.conv_state[x.slots])


@pytest.mark.parametrize("before,after", [(16, 16), (3, 5)], ids=["aligned", "odd"])
def test_out_may_be_a_strided_view(backend, before, after):
    for shape in ("decode", "grouped"):
        x = make(**SHAPES[shape], device=backend.device)
        want = decode(x.copy())
        out = frame(torch.full_like(x.out_gate, NAN)[None], before=before, after=after)[0]
        assert decode(x, out=out) is out and torch.equal(out, want)
        assert_only_view_written(out)


@each_dtype
def test_a_request_gives_the_same_bits_at_any_place_and_alone(backend, dtype):
    x = make(N=7, H=2, HV=4, dtype=dtype, device=backend.device)
    moved, alone = x.copy(), x.copy()
    o, order = decode(x), [3, 0, 6, 4, 2, 1, 5]
    rows = lambda step, which: step.but(  # noqa: E731
        **{name: step[name][which].contiguous() for name in (*TOKENS, "ssm_state_indices")})
    assert torch.equal(decode(rows(moved, order)), o[order])
    assert torch.equal(moved.ssm_state[x.slots], x.ssm_state[x.slots])
    assert torch.equal(moved.conv_state[x.slots], x.conv_state[x.slots])
    assert torch.equal(decode(rows(alone, [2])), o[2:3])
    assert torch.equal(alone.ssm_state[x.slots[2]], x.ssm_state[x.slots[2]])


def test_a_nan_request_does_not_touch_its_neighbours(backend):
    x = make(N=4, device=backend.device)
    want = decode(x.copy())
    x.qkv[1], x.raw_g[2] = NAN, NAN
    o = decode(x)
    assert torch.equal(o[[0, 3]], want[[0, 3]]) and o[1].isnan().all()


# ------------------------------------------------------------------------------------------------------- configurations


@on_backends("shape", ["decode", "one"], [*SMALL, *COMPILED])
@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=lambda d: "state-" + dtype_id(d))
def test_the_configuration_of_a_gpu_computes_the_same(backend, shape, state_dtype, monkeypatch):
    """State tiles in three dims, slices of V: what runs on a GPU, here run where the tests run."""
    if backend.name == "reference":
        pytest.skip("has no configurations")
    from kda import known
    from kda.triton import configs

    x = make(**SHAPES[shape], dtype=FP32, device=backend.device, state_dtype=state_dtype)
    before = x.copy()
    want, history, state = expected(x)
    choose = configs.DEFAULTS["kda_decode"]
    monkeypatch.setattr(known, "_known", {})
    monkeypatch.setitem(configs.DEFAULTS, "kda_decode",
                        lambda **shape: choose(**{**shape, "device": torch.device("cuda")}))
    assert_accurate(decode(x), want, FP32)
    assert_moved_on(x, before, history, state, FP32)


# ------------------------------------------------------------------------------------------- launches, memory, graphs


def test_with_out_nothing_is_allocated(backend):
    if backend.name in ("reference", "triton-interpret"):
        pytest.skip("allocates as it likes")
    x = make(N=3, device=backend.device)
    out = torch.empty_like(x.out_gate)
    kda.kda_decode(**x.args, out=out)
    if GPU:
        count = torch.cuda.memory_stats()["allocation.all.allocated"]
        kda.kda_decode(**x.args, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == count
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        calls = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls.append(str(func))
            return func(*args, **kwargs or {})

    with Seen() as seen:
        kda.kda_decode(**x.args, out=out)
    assert set(seen.calls) <= {"aten.view.default"}


def test_a_bad_call_after_a_good_one_is_refused(backend):
    x = make(N=2, V=32, device=backend.device)
    out = torch.empty_like(x.out_gate)
    for _ in range(3):
        decode(x, out=out)
        for name, over in dict(out_gate=x.out_gate, qkv=x.qkv[:, :64].unflatten(1, (2, 32)), raw_g=x.raw_g).items():
            with pytest.raises(ValueError, match=f"`out`.*`{name}`"):
                decode(x, out=over)
        with pytest.raises(ValueError, match="`ssm_state`"):
            decode(x, ssm_state=x.ssm_state[:, :1])
        with pytest.raises(TypeError, match="`qkv`"):
            decode(x, qkv=x.qkv.double())


@needs_gpu
def test_it_does_not_synchronise_and_a_graph_replays_with_other_slots():
    x = make(N=4, H=4, K=128, V=128, device="cuda")
    x.conv_state.nan_to_num_(0.5), x.ssm_state.nan_to_num_(0.1)
    out, eager = torch.empty_like(x.out_gate), x.copy()
    kda.kda_decode(**x.args, out=out)
    kda.kda_decode(**eager.args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kda.kda_decode(**x.args, out=out)
        kda.kda_decode(**eager.args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda.kda_decode(**x.args, out=out)
    for slots in ([3, 6, 0, 1], [99, 2, 5, -1]):
        x.ssm_state_indices.copy_(ints(slots, "cuda"))
        eager.ssm_state_indices.copy_(ints(slots, "cuda"))
        graph.replay()
        assert torch.equal(out, kda.kda_decode(**eager.args))
        assert torch.equal(x.ssm_state, eager.ssm_state) and torch.equal(x.conv_state, eager.conv_state)


@needs_gpu
def test_pools_of_more_than_2_31_elements():
    """The last slot gives what slot 1 gives."""
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB of free GPU memory")
    x = make(N=1, H=64, K=128, V=128, device="cuda", state_dtype=BF16)
    dim = x.qkv.shape[1]
    slots = max(2**31 // x.ssm_state[0].numel(), 2**31 // (3 * dim)) + 8
    state = torch.empty(2**31 // x.ssm_state[0].numel() + 8, 64, 128, 128, dtype=BF16, device="cuda")
    conv = torch.empty(slots, 3, dim, dtype=BF16, device="cuda").transpose(1, 2)
    assert state.numel() > 2**31 and conv.numel() > 2**31
    # Slots of both pools: the last of the smaller pool is past 2**31 elements of it.
    last, outputs = len(state) - 1, []
    for slot in (1, last):
        state[slot], conv[slot] = x.ssm_state[x.slots[0]], x.conv_state[x.slots[0]]
        outputs.append(kda.kda_decode(**{**x.args, "conv_state": conv, "ssm_state": state,
                                         "ssm_state_indices": ints([slot], "cuda")}))
    assert torch.equal(*outputs) and torch.equal(state[1], state[last]) and torch.equal(conv[1], conv[last])
