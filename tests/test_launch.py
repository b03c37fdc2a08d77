# SPDX-License-Identifier: Apache-2.0
"""Launching again without Triton's binder gives what the first launch would, for every operation."""
import inspect

import pytest
import test_bad_input as valid
import torch
from helpers import BF16, DEVICE, FP32, GPU, INTERPRETED, KERNELS, randn
from test_library import CASES

import kda
from kda import known, validation
from kda.serving import Batch, Decode, Prefill, Verify
from kda.serving.forward import kda_step

pytest.importorskip("triton")
pytest.importorskip("llvmlite")
compiled = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter compiles nothing to launch again")

# ------------------------------------------------------------------------------------------ every operation, many a call


def without_checkpoints(device):
    return {name: x for name, x in CASES["kda_prefill"][1](device).items() if "checkpoint" not in name}


def serving(*rows):
    """A step of these rows, whose verify rows have a full state a token."""

    def build(device):
        batch, layer = Batch.of(rows, device=device), valid.kda_decode(device)
        weights = {name: layer[name] for name in ("conv_weight", "A_log", "g_bias", "norm_weight", "conv_bias")}
        tokens = {name: randn(batch.num_tokens, *layer[name].shape[1:], seed=seed, dtype=BF16, device=device)
                  for seed, name in enumerate(("qkv", "raw_g", "beta", "out_gate"), 20)}
        dim = layer["qkv"].shape[1]
        conv_state = randn(12, valid.W, dim, seed=30, dtype=BF16, device=device).mT  # a window of two has W columns
        ssm_state = randn(12, *layer["ssm_state"].shape[1:], seed=31, device=device)
        return dict(**tokens, conv_state=conv_state, ssm_state=ssm_state, **weights, records=None, scale=None,
                    lower_bound=-5.0, activation="sigmoid", eps=1e-5, out=torch.full_like(tokens["out_gate"], 7.0),
                    **batch.fields)

    return build


AMONG_OTHERS = (Prefill(1, 5, True, {3: 9}), Decode(2), Verify([3, 4], 2, 1), Prefill(7, 3), Verify([5, 6], 2, 2))
BY_KIND = sorted(AMONG_OTHERS, key=lambda row: type(row).__name__)  # the norms of prompts and of windows aligned alike

OPERATIONS = {
    **CASES,
    "kda_prefill, no checkpoints": ("kda_prefill", without_checkpoints),
    "kda_step, windows": ("kda_step", serving(Verify([3, 4], 2, 1), Verify([5, 6], 1, 2))),
    "kda_step, every kind": ("kda_step", serving(*AMONG_OTHERS)),
    "kda_step, by kind": ("kda_step", serving(*BY_KIND)),
}
SMALL = ("conv1d", "kda_gate", "rms_norm", "states")  # kernels that compile in no time
SWITCHES = dict(activation="silu", scale=0.5, eps=0.1, lower_bound=-3.0, safe_gate=False, threshold=0.5, prenorm=True,
                null_block_id=3, residual_in_fp32=True)  # fmt: skip


def remembered():
    return sum(len(called.all) for called in known._known.values())


def shifted(x):
    """The same values and strides one element into a buffer: another alignment."""
    extent = 1 + sum(stride * (n - 1) for stride, n in zip(x.stride(), x.shape))
    return x.new_empty(extent + 1).as_strided(x.shape, x.stride(), 1).copy_(x)


def apart(x):
    """The same values, rows of the outermost dim further apart."""
    strides = list(x.stride())
    if x.dim() > 1:
        strides[strides.index(max(strides))] += 8
    extent = 1 + sum(stride * (n - 1) for stride, n in zip(strides, x.shape))
    return x.new_empty(extent).as_strided(x.shape, strides).copy_(x)


def spread(x):
    """The same slots, every other element of a buffer."""
    return x.repeat_interleave(2, 0)[::2]


def variants(name, given):
    """Names of calls that differ in what decides a launch, each with a function that changes the arguments."""

    def each(change):
        return lambda args: {n: change(x) if isinstance(x, torch.Tensor) else x for n, x in args.items()}

    found = {"as it is": dict, "unaligned": each(shifted), "rows apart": each(apart)}
    slots = [n for n, x in given.items() if n.endswith(("_indices", "_slots")) and "token" not in n and x is not None]
    if slots:
        found["slots apart"] = lambda args: {n: spread(x) if n in slots else x for n, x in args.items()}
    if not any(part in name for part in SMALL):
        return found
    optional = inspect.signature(getattr(kda, name)).parameters
    for n in given:
        if optional[n].annotation == "Tensor | None" and given[n] is not None:
            found[f"no {n}"] = lambda args, n=n: {**args, n: None}
    if not GPU:  # where each is another compilation of seconds
        for old, new in ((BF16, FP32), (torch.int32, torch.int64)):
            if any(isinstance(x, torch.Tensor) and x.dtype == old for x in given.values()):
                found[f"{new}"] = each(lambda x, old=old, new=new: x.to(new) if x.dtype == old else x)
        for n, value in SWITCHES.items():
            value = {"rms_norm_gated": "sigmoid", "causal_conv1d_fn": None}.get(name, value) if n == "activation" else value
            if n in optional and given.get(n) != value:
                found[n] = lambda args, n=n, value=value: {**args, n: value}
    return found


def arguments(build, change, turn):
    """The call's arguments with other values each turn, and other slots."""
    args = build(DEVICE[KERNELS])
    for name, x in args.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.mul_(1 + turn / 4)
        elif turn % 2 and name in ("indices", "has_initial_state") or name.endswith("_indices") and turn % 2:
            args[name] = x if x is None else x.flip(0)
    return change(args)


def results(name, args):
    """All that the operation returns and may have written."""
    got = (kda_step if name == "kda_step" else getattr(kda, name))(**args)
    got = got if isinstance(got, tuple) else (got,)
    return [x.clone() for x in (*got, *args.values()) if isinstance(x, torch.Tensor)]


@pytest.fixture
def bound(monkeypatch):
    """Kernels that go through Triton's binder, by name."""
    from triton.runtime.jit import JITFunction

    bind, names = JITFunction.run, []

    def run(self, *args, **kwargs):
        names.append(self.__name__)
        return bind(self, *args, **kwargs)

    monkeypatch.setattr(known, "_known", {})
    monkeypatch.setattr(JITFunction, "run", run)
    return names


@compiled
@pytest.mark.parametrize("case", OPERATIONS)
def test_launches_again_are_those_of_a_first_call(case, monkeypatch, bound):
    name, build = OPERATIONS[case]
    refused = []
    for turn in range(3):
        for variant, change in variants(name, build(DEVICE[KERNELS])).items():
            if variant in refused:
                continue
            bound.clear()
            try:
                got = results(name, arguments(build, change, turn))
            except ValueError:
                assert not turn and (variant.startswith("no ") or variant in SWITCHES), variant
                refused.append(variant)
                continue
            assert bool(bound) == (not turn), f"{variant}, turn {turn}: {bound} through the binder"
            with monkeypatch.context() as patch:
                patch.setattr(known, "find", lambda _, args: known.Known().find(args))
                want = results(name, arguments(build, change, turn))
            for a, b in zip(got, want, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), f"{variant}, turn {turn}"
            if turn:
                continue
            with kda.use_backend("reference"):
                for a, b in zip(got, results(name, arguments(build, change, turn)), strict=True):
                    torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


@compiled
@pytest.mark.parametrize("case", OPERATIONS)
def test_a_repeated_call_is_neither_checked_nor_bound_again(case, monkeypatch, bound):
    name, build = OPERATIONS[case]
    want, again = results(name, build(DEVICE[KERNELS])), build(DEVICE[KERNELS])
    bound.clear()
    for check in ("tensor", "strided", "overlaps_itself", "common_rows"):
        monkeypatch.setattr(validation, check, lambda *_, **__: pytest.fail("checked again"))
    got = results(name, again)
    assert not bound and all(map(torch.equal, got, want))


@compiled
@pytest.mark.parametrize("case", [
    "causal_conv1d_update, fresh", "fused_kda_gate", "rms_norm_gated", "scatter_states", "kda_prefill"])
def test_what_is_asked_for_later_takes_effect(case, monkeypatch, bound):
    """Checks of values, another backend, another configuration: after many calls alike."""
    from kda.cli.using import using

    name, build = OPERATIONS[case]
    part = {"causal_conv1d_update": ("causal_conv1d_update", dict(BD=16)), "fused_kda_gate": ("fused_kda_gate", dict(BH=1)),
            "rms_norm_gated": ("rms_norm_gated", dict(BR=16)), "scatter_states": ("states", dict(BS=32)),
            "kda_prefill": ("checkpoints", dict(BD=16))}[name]  # fmt: skip
    device, call = DEVICE[KERNELS], getattr(kda, name)
    for _ in range(3):
        call(**build(device))
    bound.clear()
    with using(*part):
        call(**build(device))
        call(**build(device))
    assert len(bound) == (5 if name == "kda_prefill" else 1), "one call of the other configuration, and one again of that"
    call(**build(device))
    bound.clear()
    from kda.triton.launch import Launch

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "find", lambda *_, **__: pytest.fail("launched"))
        with kda.use_backend("reference"):
            call(**build(device))
        patch.setenv("KDA_BACKEND", "reference")
        call(**build(device))
    bad = {"causal_conv1d_update": "conv_state_indices", "scatter_states": "indices"}.get(name)
    if bad is None:
        return
    wrong = torch.tensor([3, 999], dtype=torch.int32, device=device)
    call(**{**build(device), bad: wrong})  # made harmless in the kernel
    monkeypatch.setenv("KDA_CHECK", "1")
    with pytest.raises(ValueError, match="got slot 999"):
        call(**{**build(device), bad: wrong})


@compiled
def test_no_rows_launch_nothing_again_and_again():
    device = DEVICE[KERNELS]
    for _ in range(3):
        x, state = torch.empty(0, valid.DIM, device=device), torch.ones(2, valid.DIM, 3, device=device)
        weight, slots = torch.ones(valid.DIM, 4, device=device), torch.empty(0, dtype=torch.int32, device=device)
        assert kda.causal_conv1d_update(x, state, weight, conv_state_indices=slots).shape == x.shape
        assert kda.fused_kda_gate(x, torch.zeros(2, device=device), valid.DIM // 2).shape == (0, 2, valid.DIM // 2)
        assert kda.rms_norm_gated(x, x, None, None).shape == x.shape
        assert kda.gather_initial_states(state, slots, slots.bool()).shape == (0, valid.DIM, 3)
        kda.scatter_states(state, state[:0], slots)
        assert (state == 1).all()


@pytest.mark.parametrize("case", ["chunk_kda", "causal_conv1d_update", "rms_norm_gated", "kda_decode"])
def test_out_is_compared_with_every_input_in_every_call(case):
    name, build = OPERATIONS[case]
    for _ in range(2):
        args = build(DEVICE[KERNELS])
        getattr(kda, name)(**args)
        for n, x in args.items():
            if n != "out" and isinstance(x, torch.Tensor) and x.shape == args["out"].shape and x.dtype == BF16:
                with pytest.raises(ValueError, match=f"`out`: got memory that `{n}` uses"):
                    getattr(kda, name)(**{**args, "out": x})


def test_what_a_caller_hands_over_for_nothing_is_not_kept():
    """vLLM makes new metadata every step: it must not look like another call, nor stay alive."""
    import gc
    import weakref

    class Metadata:
        pass

    args, metadata = valid.causal_conv1d_fn(DEVICE[KERNELS]), Metadata()
    kda.causal_conv1d_fn(**args)
    count, gone = remembered(), weakref.ref(metadata)
    kda.causal_conv1d_fn(**args, metadata=metadata)
    kda.chunk_kda(**valid.chunk_kda(DEVICE[KERNELS]))
    after = remembered()
    kda.chunk_kda(**valid.chunk_kda(DEVICE[KERNELS]), chunk_indices=torch.zeros(1))
    del metadata
    gc.collect()
    assert gone() is None and count <= after <= count + 1 and remembered() == after


# ------------------------------------------------------------------------------------------------------ the decode step


def step(N, H, D, dtype, slots=None, offset=0, state_dtype=torch.float32):
    """One decode step on tensors `offset` elements into their buffers; (output, pool), and from the reference."""
    gen = torch.Generator().manual_seed(N + H + D + offset)

    def rand(*shape):
        flat = torch.empty(offset + torch.Size(shape).numel(), dtype=dtype)
        view = flat[offset:].view(shape)
        return view.copy_(torch.randn(shape, generator=gen))

    q, k, v, g = (rand(N, 1, H, D) for _ in range(4))
    pool = torch.randn(N + 2, H, D, D, generator=gen).to(state_dtype)
    slots = torch.arange(1, N + 1) if slots is None else slots
    arguments = dict(ssm_state_indices=slots, a_log=torch.zeros(H), compute_gate=True)
    results = []
    for backend in ("triton", "reference"):
        with kda.use_backend(backend):
            state = pool.clone()
            o, _ = kda.fused_recurrent_kda(q, k, v, g, rand(N, 1, H) * 0 + 0.5, initial_state=state, **arguments)
            results.append((o, state))
    return results


def test_repeated_launches_equal_the_reference():
    if kda.backend_for("cpu") != "triton-cpu":
        pytest.skip("for Triton's backend named cpu")
    cases = [
        (2, 2, 32, torch.float32), (2, 2, 32, torch.bfloat16), (3, 2, 32, torch.float32), (2, 2, 64, torch.float32),
        (2, 2, 32, torch.float32, None, 1), (2, 2, 32, torch.float32, torch.tensor([3, 1], dtype=torch.int32)),
        (2, 2, 32, torch.float32, None, 0, torch.bfloat16),
    ]  # fmt: skip
    for _ in range(3):
        for case in cases:
            (o, state), (ref_o, ref_state) = step(*case)
            loose = torch.bfloat16 in case
            for a, b in ((o, ref_o), (state, ref_state)):
                rtol, atol = (2e-2, 2e-2) if loose else (1e-4, 1e-5)
                torch.testing.assert_close(a.float(), b.float(), rtol=rtol, atol=atol)


def test_hooks_of_triton_still_see_every_launch(monkeypatch):
    if kda.backend_for("cpu") != "triton-cpu":
        pytest.skip("for Triton's backend named cpu")
    from triton import knobs

    step(2, 2, 32, torch.float32)
    seen = []

    def hook(metadata):
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        step(2, 2, 32, torch.float32)
        step(2, 2, 32, torch.float32)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["fused_recurrent_kernel"] * 2


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(known, "_known", {})
    monkeypatch.setattr(known, "MOST_SEEN", 3)
    for N in range(1, 9):
        step(N, 2, 32, torch.float32)
        assert remembered() <= 3


def test_a_bad_call_after_a_good_one_is_refused():
    x = {name: torch.randn(2, 1, 2, 32) for name in ("q", "k", "v", "g")}
    pool, out = torch.zeros(2, 2, 32, 32), torch.empty(2, 1, 2, 32)
    for _ in range(3):
        kda.fused_recurrent_kda(**x, initial_state=pool, out=out)
        with pytest.raises(ValueError, match="memory that `v` uses"):
            kda.fused_recurrent_kda(**x, initial_state=pool, out=x["v"])
        with pytest.raises(ValueError, match="`initial_state`"):
            kda.fused_recurrent_kda(**x, initial_state=pool[:1], out=out)
        with pytest.raises(TypeError, match="`k`"):
            kda.fused_recurrent_kda(**x | {"k": x["k"].double()}, initial_state=pool, out=out)
        with pytest.raises(TypeError, match="`k`"):
            kda.fused_recurrent_kda(**x | {"k": [1.0]}, initial_state=pool, out=out)
