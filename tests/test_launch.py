# SPDX-License-Identifier: Apache-2.0
"""Launching again without Triton's binder gives what the first launch would."""
import pytest
import torch

import kda

pytest.importorskip("triton")
pytest.importorskip("llvmlite")


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


def test_a_repeated_call_is_neither_checked_nor_bound_again(monkeypatch):
    if kda.backend_for("cpu") != "triton-cpu":
        pytest.skip("for Triton's backend named cpu")
    from kda import ops
    from kda.triton.recurrent import fused_recurrent_kernel

    wanted = step(2, 2, 32, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(type(fused_recurrent_kernel), "run", lambda *_, **__: pytest.fail("bound again"))
        patch.setattr(ops, "_check_recurrent", lambda *_: pytest.fail("checked again"))
        for got, want in zip(step(2, 2, 32, torch.float32)[0], wanted[0]):
            assert torch.equal(got, want)


def test_what_is_remembered_is_bounded(monkeypatch):
    from kda import validation

    monkeypatch.setattr(validation, "MOST_SEEN", 3)
    for N in range(1, 9):
        step(N, 2, 32, torch.float32)
        assert len(validation._seen) <= 3


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
