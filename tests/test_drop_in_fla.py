# SPDX-License-Identifier: Apache-2.0
"""kda.drop_in.fla: the cases of flash-linear-attention's own forward tests, against the fp64 oracle and fla's PyTorch."""

import doctest
import inspect
import re
import sys

import oracle
import pytest
import torch
from helpers import (BF16, FP16, FP32, ROOT, assert_accurate, call, dtype_id, frame, make, on_backends, randn,
                     replace, subprocess_python)

from kda.drop_in import fla as drop_in

FORMS = {"chunk": drop_in.chunk_kda, "recurrent": drop_in.fused_recurrent_kda}
each_form = pytest.mark.parametrize("form", FORMS)


def run(form, x, *, v_first=False, gate=True, sigmoid=True, **overrides):
    """`form` on `x`, whose states are V-first, with everything in the kernel; states come back V-first. Inputs guarded."""
    state = x.initial_state if v_first or x.initial_state is None else x.initial_state.transpose(-1, -2).contiguous()
    args = dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, initial_state=state, output_final_state=True, state_v_first=v_first,
                use_qk_l2norm_in_kernel=x.l2norm, use_beta_sigmoid_in_kernel=True, cu_seqlens=x.cu)
    if gate:
        args.update(use_gate_in_kernel=True, A_log=x.A_log, dt_bias=x.g_bias, lower_bound=x.lower_bound)
    else:
        args.update(g=x.log_decay())
    args.update(overrides)
    o, final = call(FORMS[form], **args)
    if final is None:
        return o, None
    assert final.is_contiguous() and final.dtype == FP32
    return o, final if v_first else final.transpose(-1, -2)


def assert_right(got, want, dtype):
    assert_accurate(got[0], want[0], dtype)
    assert_accurate(got[1], want[1], dtype, "state")


# ------------------------------------------------------------------------------------------------------ against the oracle


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=dtype_id)
@each_form
@on_backends("B,T,H,HV,D", [(2, 19, 2, 4, 32)], [(2, 130, 3, 3, 60)])
@pytest.mark.parametrize("gate", ["bounded", "unbounded", "made before"])
def test_batches(backend, form, B, T, H, HV, D, gate, dtype):
    x = make(B=B, T=T, H=H, HV=HV, K=D, V=D, dtype=dtype, device=backend.device,
             gate="bounded" if gate == "bounded" else "unbounded")
    A_log, g_bias = x.A_log.repeat_interleave(HV // H), x.g_bias.view(H, D).repeat_interleave(HV // H, 0).flatten()
    x = replace(x, A_log=A_log, g_bias=g_bias)  # fla has them by value heads
    assert_right(run(form, x, gate=gate != "made before"), x.oracle(), dtype)


@each_form
@pytest.mark.parametrize("lens", [[15], [0, 31, 65, 64]], ids=str)
@pytest.mark.parametrize("gate", ["bounded", "steep"])
def test_packed_sequences(backend, form, lens, gate):
    x = make(lens, K=32, V=32, dtype=FP16, device=backend.device, gate=gate)
    hints = dict(cu_seqlens_cpu=x.cu.cpu(), use_graph=True, max_num_seqs=len(lens)) if form == "chunk" else {}
    want = x.oracle()
    assert_right(run(form, x, cu_seqlens=x.cu.long(), **hints), want, FP16)


@each_form
@pytest.mark.parametrize("v_first", [False, True], ids=["K V", "V K"])
def test_states_of_either_layout_in_heads_that_are_not_square(backend, form, v_first):
    x = make(B=2, T=9, K=32, V=16, dtype=FP32, device=backend.device)
    assert_right(run(form, x, v_first=v_first), x.oracle(), FP32)
    fresh = replace(x, initial_state=None)
    assert_right(run(form, fresh, v_first=v_first), fresh.oracle(), FP32)
    assert run(form, x, v_first=v_first, output_final_state=False)[1] is None


@each_form
def test_a_state_that_is_stored_the_other_way_round_is_not_written(backend, form):
    x = make(B=2, T=9, V=32, dtype=FP32, device=backend.device)
    assert_right(run(form, x, initial_state=x.initial_state.transpose(-1, -2)), x.oracle(), FP32)  # `call` guards


@each_form
@pytest.mark.parametrize("doubled", [False, True], ids=["0 to 1", "0 to 2"])
@pytest.mark.parametrize("in_kernel", [False, True], ids=["made before", "in kernel"])
def test_beta_and_negative_eigenvalues(backend, form, doubled, in_kernel):
    x = make(B=2, T=40, V=32, dtype=FP16, device=backend.device)
    beta = x.beta.double().sigmoid() * (2 if doubled else 1)
    want = x.oracle(beta=beta, sigmoid_beta=False)
    if in_kernel:
        got = run(form, x, allow_neg_eigval=doubled)
    else:
        got = run(form, x, beta=beta.float(), use_beta_sigmoid_in_kernel=False)
    assert_right(got, want, FP16)


def test_headwise_beta(backend):
    x = make(B=2, T=9, V=16, dtype=FP32, device=backend.device, headwise=True)
    assert_right(run("recurrent", x), x.oracle(), FP32)


@each_form
def test_a_gate_without_amplitude_and_bias(backend, form):
    """`lower_bound * sigmoid(g)`."""
    x = replace(make(B=2, T=9, V=32, dtype=FP32, device=backend.device), lower_bound=-2.5)
    want = x.oracle(A_log=torch.zeros_like(x.A_log), g_bias=None)
    assert_right(run(form, x, A_log=None, dt_bias=None), want, FP32)


@each_form
def test_scale_and_no_l2norm(backend, form):
    x = make(B=2, T=9, V=32, dtype=FP32, device=backend.device, l2norm=False)
    assert_right(run(form, x, scale=0.3), x.oracle(scale=0.3), FP32)


@each_form
def test_any_strides(backend, form):
    """Slices are read in place; what has no dense heads, or heads that share memory, is copied as fla copies it."""
    x = make(B=2, T=9, V=32, dtype=FP32, device=backend.device)
    want = run(form, x)
    shared = x.g[:, :1].expand_as(x.g)
    turned = replace(x, q=frame(x.q), k=x.k.repeat_interleave(2, -1)[..., ::2], v=x.v.mT.contiguous().mT)
    for got, expected in zip(run(form, turned), want):
        assert torch.equal(got, expected)
    assert_right(run(form, replace(x, g=shared)), replace(x, g=shared.contiguous()).oracle(), FP32)


def test_options_that_change_no_result(backend):
    x = make(B=2, T=70, V=32, dtype=BF16, device=backend.device)
    want = run("chunk", x)
    for option in (dict(chunk_size=32), dict(disable_recompute=True), dict(safe_gate=True)):
        for got, expected in zip(run("chunk", x, **option), want):
            assert torch.equal(got, expected)


# ------------------------------------------------------------------------------------------------------------ what is refused


@each_form
@pytest.mark.parametrize("wrong, error, message", [
    (dict(nonsense=1), TypeError, "nonsense"),
    (dict(allow_neg_eigval=True, use_beta_sigmoid_in_kernel=False), ValueError, "allow_neg_eigval"),
    (dict(A_log=None, lower_bound=None), ValueError, "A_log"),
    (dict(state_v_first=True, transpose_state_layout=True), ValueError, "transpose_state_layout"),
    (dict(q="half"), TypeError, "q`: got str"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else None)
def test_wrong_arguments_are_named(backend, form, wrong, error, message):
    x = make(B=1, T=5, V=32, dtype=FP32, device=backend.device)
    with pytest.raises(error, match=f"`?{message}"):
        run(form, x, **wrong)


@pytest.mark.parametrize("wrong, error", [
    (dict(return_intermediate_states=True), NotImplementedError), (dict(cp_context=object()), NotImplementedError),
    (dict(chunk_size=16), ValueError), (dict(safe_gate=True, lower_bound=None), ValueError),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else None)
def test_what_chunk_cannot_do_is_named(backend, wrong, error):
    x = make(B=1, T=5, V=32, dtype=FP32, device=backend.device)
    with pytest.raises(error, match=f"`{[*wrong][-1]}`"):
        run("chunk", x, **wrong)


@each_form
def test_a_former_name_still_serves(backend, form):
    x = make(B=2, T=9, K=32, V=16, dtype=FP32, device=backend.device)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o, state = FORMS[form](x.q, x.k, x.v, x.log_decay(), x.beta.sigmoid(), initial_state=x.initial_state,
                               output_final_state=True, use_qk_l2norm_in_kernel=True, transpose_state_layout=True)
    assert_right((o, state), x.oracle(), FP32)


@each_form
def test_gradients_are_refused_when_asked_for(backend, form):
    x = make(B=1, T=5, V=32, dtype=FP32, device=backend.device)
    o, _ = FORMS[form](x.q.requires_grad_(), x.k, x.v, x.log_decay(), x.beta)
    with pytest.raises(RuntimeError, match="is for inference and has no backward pass"):
        o.sum().backward()


# --------------------------------------------------------------------------------------------------- beside and behind fla


@pytest.fixture(scope="module")
def fla():
    pytest.importorskip("triton")
    pytest.importorskip("fla")
    import fla.ops.kda
    import fla.ops.kda.gate
    import fla.ops.kda.naive

    return fla.ops.kda


@pytest.fixture
def installed(fla):
    drop_in.install()
    yield fla
    drop_in.uninstall()


def test_signatures_are_flas(fla):
    for function in FORMS.values():
        theirs = inspect.signature(getattr(fla, function.__name__)).parameters.values()
        ours = inspect.signature(function).parameters.values()
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@each_form
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=dtype_id)
@pytest.mark.parametrize("bound", [None, -5.0], ids=["unbounded", "bounded"])
def test_installed_functions_equal_flas_pytorch(backend, installed, form, bound, dtype):
    """fla's tests do it so: its naive gate and recurrence in fp32 as the reference."""
    B, T, H, HV, D = 2, 100, 2, 4, 64
    q, k = (oracle.l2norm(randn(B, T, H, D, seed=i)).to(dtype).to(backend.device) for i in (1, 2))
    v, g = (randn(B, T, HV, D, seed=i, dtype=dtype, device=backend.device) for i in (3, 4))
    beta = randn(B, T, HV, seed=5, dtype=dtype, device=backend.device).sigmoid()
    A_log, dt_bias = randn(HV, seed=6, device=backend.device), randn(HV * D, seed=7, device=backend.device)
    h0 = randn(B, HV, D, D, seed=8, device=backend.device)
    naive_gate = installed.gate.naive_kda_gate if bound is None else installed.gate.naive_kda_lowerbound_gate
    want = installed.naive.naive_recurrent_kda(q, k, v, naive_gate(g, A_log, dt_bias), beta, 0.1, h0, output_final_state=True)
    function = installed.chunk_kda if form == "chunk" else installed.fused_recurrent_kda
    assert function is FORMS[form]
    got = function(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, scale=0.1, initial_state=h0, output_final_state=True,
                   use_gate_in_kernel=True, lower_bound=bound)
    assert_right(got, want, dtype)


def test_install_reaches_flas_modules_and_uninstall_restores(fla):
    import fla.ops as ops
    import fla.ops.kda.chunk as file

    theirs = fla.chunk_kda, fla.fused_recurrent_kda
    places = [m for name, m in sys.modules.items() if name.startswith("fla") and vars(m).get("chunk_kda") is theirs[0]]
    drop_in.install()
    drop_in.install()
    assert {ops, fla, file} <= set(places) and all(m.chunk_kda is drop_in.chunk_kda for m in places)
    from fla.ops.kda import fused_recurrent_kda
    assert fused_recurrent_kda is drop_in.fused_recurrent_kda
    drop_in.uninstall()
    assert all(m.chunk_kda is theirs[0] for m in places) and (fla.chunk_kda, fla.fused_recurrent_kda) == theirs


def test_another_fla_is_refused(fla, monkeypatch):
    monkeypatch.setattr(fla, "fused_recurrent_kda", lambda q, k, v: None)
    before = fla.chunk_kda
    with pytest.raises(ImportError, match="fused_recurrent_kda has other arguments than in fla 0.6.0"):
        drop_in.install()
    assert fla.chunk_kda is before, "half installed"


def test_the_page_of_the_docs_prints_what_it_says(fla):
    page = (ROOT / "docs" / "fla.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", page, re.S)
    done = subprocess_python(first + second)
    printed = re.search(r"It prints\n\n```\n(.*?)```", page, re.S)[1] + "kda.drop_in.fla\n"
    assert done.stdout == printed, done.stderr[-2000:]


def test_examples_of_the_docstrings():
    result = doctest.testmod(drop_in)
    assert result.attempted and not result.failed


def test_importing_the_drop_in_imports_neither_fla_nor_triton():
    done = subprocess_python("import sys, kda.drop_in.fla; print({'fla', 'triton'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("form", FORMS)
def test_it_compiles_into_one_graph(backend, form):
    x = make(B=2, T=9, V=32, dtype=FP32, device=backend.device)
    args = (x.q, x.k, x.v, x.log_decay(), x.beta.sigmoid())
    options = dict(initial_state=x.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    torch._dynamo.reset()
    got = torch.compile(FORMS[form], fullgraph=True, backend="aot_eager")(*args, **options)
    for a, b in zip(got, FORMS[form](*args, **options)):
        assert torch.equal(a, b)
