# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin on stand-ins for vLLM's modules, and the operations in vLLM's shapes. vllm_client/ has the real one."""

import importlib
import inspect
import logging
import sys
import types

import oracle
import pytest
import torch
from helpers import FP32, assert_accurate, ints, make, on_backends, pool_of, randn, subprocess_python

import kda
from kda.drop_in import cpu_kda, vllm_ops
from kda.drop_in import vllm as plugin

GLM = "vllm.models.glm5next.common.kda"
KIMI = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
GLM_SAYS = (
    f"triton-kda {kda.__version__} replaces chunk_kda_with_fused_gate, fused_recurrent_kda, FusedRMSNormGated, "
    f"causal_conv1d_fn, causal_conv1d_update, gather_initial_states, scatter_states of {GLM}"
)


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A function that puts a vLLM of some version and platform in place; its modules are files that are imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv("KDA_VLLM", raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def put(name, text):
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in [file.parent, *file.parent.parents]:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
        file.write_text(text)

    def make_vllm(version="0.32.0", platform="cpu", without=()):
        put("vllm.ops", "def causal_conv1d_fn(): pass\n")
        for name in (GLM, KIMI):
            lines = [f"def {n}(): pass" for n in plugin.REPLACED[name] if n != "causal_conv1d_fn" and n not in without]
            put(name, "\n".join(["from vllm.ops import causal_conv1d_fn", *lines]))
        put("vllm.other_layer", "from vllm.ops import causal_conv1d_fn\n")
        put("vllm.platforms", "")
        (tmp_path / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        platforms = importlib.import_module("vllm.platforms")
        answers = {f"is_{kind}": lambda kind=kind: kind == platform for kind in ("cpu", "cuda", "rocm", "xpu")}
        platforms.current_platform = types.SimpleNamespace(**answers)

    yield make_vllm
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "vllm.plugins.kda"]


def served(name=GLM):
    module = importlib.import_module(name)
    ours = [getattr(module, n, None) is getattr(vllm_ops, to) for n, to in plugin.REPLACED[name].items()]
    assert all(ours) or not any(ours)
    return all(ours)


@pytest.mark.parametrize("first", ["register", "import"])
def test_it_replaces_once_and_says_so_once(vllm, caplog, first):
    vllm()
    caplog.set_level(logging.INFO, "vllm.plugins.kda")
    if first == "import":
        assert not served()
    plugin.register()
    plugin.register()
    assert served()
    plugin.register()
    assert said(caplog) == [GLM_SAYS]
    assert served(KIMI)
    assert len(said(caplog)) == 2 and said(caplog)[1].endswith(KIMI)


def test_other_modules_keep_what_they_share_with_kda_layers(vllm):
    vllm()
    plugin.register()
    assert served()
    theirs = importlib.import_module("vllm.ops").causal_conv1d_fn
    assert importlib.import_module("vllm.other_layer").causal_conv1d_fn is theirs is not vllm_ops.causal_conv1d_fn


@pytest.mark.parametrize("version,known", [
    ("0.32.0", True), ("0.33.1+cpu", True), ("0.31.2", False), ("0.34.0", False), ("1.32.0", False), ("dev", False),
])  # fmt: skip
def test_an_unknown_version_stays_as_it_is(vllm, caplog, version, known):
    vllm(version)
    plugin.register()
    assert served() == known
    told = [f"triton-kda {kda.__version__} leaves vLLM {version} as it is: it knows 0.32 and 0.33"]
    assert [text for text in said(caplog) if "leaves" in text] == ([] if known else told)


@pytest.mark.parametrize("platform,asked,serves", [
    ("cpu", None, True), ("cuda", None, False), ("cuda", "0", False), ("cuda", "1", True), ("rocm", None, False),
    ("rocm", "1", True), ("xpu", "1", False),
])  # fmt: skip
def test_on_a_gpu_it_waits_to_be_asked(vllm, monkeypatch, caplog, platform, asked, serves):
    vllm(platform=platform)
    if asked:
        monkeypatch.setenv("KDA_VLLM", asked)
    caplog.set_level(logging.INFO, "vllm.plugins.kda")
    plugin.register()
    assert served() == serves and said(caplog) == ([GLM_SAYS] if serves else [])


def test_a_module_that_lacks_a_name_stays_as_it_is(vllm, caplog):
    vllm(without=["scatter_states"])
    plugin.register()
    assert not served() and served(KIMI)
    assert said(caplog) == [f"triton-kda {kda.__version__} leaves {GLM} as it is: it has no scatter_states"]


def test_a_module_that_does_not_import_still_does_not(vllm):
    vllm()
    plugin.register()
    with pytest.raises(ModuleNotFoundError, match="kimi_k3"):
        importlib.import_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")


# ---------------------------------------------------------------------------------------------------------------------
# The layer file.


def test_the_layer_file_has_the_signatures_of_vllm():
    recurrent = ("q k v g beta scale initial_state inplace_final_state use_qk_l2norm_in_kernel cu_seqlens "
                 "ssm_state_indices num_accepted_tokens out sigmoid_beta a_log g_bias compute_gate lower_bound kwargs")
    chunk = ("q k v raw_g beta A_log g_bias scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens "
             "safe_gate lower_bound kwargs")
    for name, wanted in (("fused_recurrent_kda", recurrent), ("chunk_kda_with_fused_gate", chunk)):
        parameters = inspect.signature(getattr(cpu_kda, name)).parameters.values()
        assert [p.name for p in parameters if p.kind != p.KEYWORD_ONLY] == wanted.split()
    cpu_kda.scatter_states.register_warmup(state_shape=(2, 16, 16), state_dtype=FP32, indices_dtype=torch.int32,
                                           max_num_tokens=8)


def test_the_layer_file_works_without_triton():
    done = subprocess_python("""
import sys
sys.modules["triton"] = None
import kda, torch
from kda.drop_in.cpu_kda import chunk_kda_with_fused_gate, fused_recurrent_kda
q, k, v, g = torch.randn(4, 1, 5, 2, 32).unbind(0)
b, A = torch.rand(1, 5, 2), torch.zeros(2)
o, state = chunk_kda_with_fused_gate(
    q, k, v, g, b, A, None, output_final_state=True, use_qk_l2norm_in_kernel=True, safe_gate=True)
p, _ = fused_recurrent_kda(q, k, v, g, b, a_log=A, compute_gate=True)
torch.testing.assert_close(o, p)
assert "vllm" not in sys.modules
print(sys.modules["triton"], kda.why("cpu"))
""")
    assert done.stdout.startswith("None cpu tensors go to reference: Triton is not installed"), done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# The shapes of vLLM's calls.


def test_decode_with_more_slots_than_rows(backend):
    """vLLM hands over the slots of all rows that it has room for; the rows behind are cut off, not written."""
    x = make([1] * 3, dtype=FP32, device=backend.device)
    pool = pool_of(x.initial_state, [4, 2, 7])
    before = pool.clone()
    o, state = vllm_ops.fused_recurrent_kda(
        x.q, x.k, x.v, x.g, x.beta, initial_state=pool, cu_seqlens=x.cu,
        ssm_state_indices=ints([4, 2, 7, 1, 3], backend.device), sigmoid_beta=True, a_log=x.A_log,
        g_bias=x.g_bias, compute_gate=True)
    want, states = x.oracle()
    assert state is pool
    assert_accurate(o, want, FP32)
    assert_accurate(pool[[4, 2, 7]], states, FP32, "state")
    assert torch.equal(pool[[0, 1, 3, 5, 6]].isnan(), before[[0, 1, 3, 5, 6]].isnan())


@on_backends("packed", [False, True])
def test_convolution_of_padded_rows(backend, packed):
    """Two requests; packed, with offsets and counts for four rows, else with tokens for four."""
    dim, W, device = 48, 4, backend.device
    weight, states = randn(dim, W, seed=1, device=device), randn(6, dim, W + 2, seed=2, device=device)
    history = states.clone()
    slots = ints([3, 5], device)
    if packed:
        x = randn(7, dim, seed=3, device=device)
        lens, accepted = [3, 4], [2, 1]
        y = vllm_ops.causal_conv1d_update(
            x, states, weight, activation="silu", conv_state_indices=slots, max_query_len=4,
            num_accepted_tokens=ints([*accepted, 1, 1], device), query_start_loc=ints([0, 3, 7, 7, 7], device))
    else:
        x = randn(4, dim, seed=3, device=device)
        lens, accepted = [1, 1], [1, 1]
        y = vllm_ops.causal_conv1d_update(x, states, weight, activation="silu", conv_state_indices=slots)
        assert (y[2:] == 0).all()
    at = 0
    for slot, n, a in zip((3, 5), lens, accepted):
        want, _ = oracle.conv(x[at:at + n].T, weight, None, history[slot, :, a - 1:a + W - 2], True)
        assert_accurate(y[at:at + n].T, want, FP32)
        at += n
    assert torch.equal(states[[0, 1, 2, 4]], history[[0, 1, 2, 4]])


@on_backends("bound", [-5.0, None])
def test_kimi_linear_prefill_and_speculative_window(backend, bound):
    x = make([9, 4], K=32, V=32, dtype=FP32, device=backend.device, gate="bounded" if bound else "unbounded")
    raw = dict(raw_g=x.g, raw_beta=x.beta, A_log=x.A_log, lower_bound=bound, cu_seqlens=x.cu)
    o, final = vllm_ops.chunk_kda_with_fused_gate_kimi(
        x.q, x.k, x.v, g_bias=x.g_bias, initial_state=x.initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, **raw)
    want, states = x.oracle()
    assert_accurate(o, want, FP32)
    assert_accurate(final, states, FP32, "state")

    table = ints([[*range(1, 10)], [*range(10, 19)]], backend.device)  # a slot a token
    pool, out = pool_of(x.initial_state, [1, 10], extra=9), torch.full_like(x.v, float("nan"))
    vllm_ops.fused_recurrent_kda_kimi(
        x.q, x.k, x.v, dt_bias=x.g_bias, initial_state=pool, ssm_state_indices=table,
        num_accepted_tokens=ints([1, 1, 1], backend.device), out=out, uniform_sequence_length=4, **raw)
    assert_accurate(out, want, FP32)
    assert_accurate(pool[[9, 13]], states, FP32, "state")


@on_backends("given", ["out", "nothing"])
def test_kimi_linear_packed_decode(backend, given):
    """One row of 4 of the merged convolution a request, q, k and v behind each other, wider than they are."""
    N, H, K, V = 4, 2, 32, 16
    x = make(B=N, T=1, H=H, K=K, V=V, dtype=FP32, device=backend.device, gate="unbounded")
    wide = torch.cat([x.q.flatten(1), x.k.flatten(1), x.v.flatten(1), torch.full_like(x.v.flatten(1), 9.0)], -1)
    pool = pool_of(x.initial_state, [2, 5, 1, 3])
    out = torch.full((1, N, H, V), float("nan"), device=backend.device) if given == "out" else None
    o, state = vllm_ops.fused_recurrent_kda_packed_decode_kimi(
        wide[:, :H * (2 * K + V)], x.g.transpose(0, 1), x.beta.transpose(0, 1), x.A_log, x.g_bias, None, pool,
        ints([2, 5, 1, 3], backend.device), out=out)
    want, states = x.oracle()
    assert state is pool and (out is None or o.data_ptr() == out.data_ptr())
    assert_accurate(o, want.transpose(0, 1), FP32)
    assert_accurate(pool[[2, 5, 1, 3]], states, FP32, "state")
