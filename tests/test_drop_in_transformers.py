# SPDX-License-Identifier: Apache-2.0
"""kda.drop_in.transformers: GLM-5.3 and Kimi Linear before and after the patch, and its functions against the oracle."""

import copy
import doctest
import inspect
import re

import oracle
import pytest
import torch
from helpers import BF16, FP32, ROOT, assert_accurate, each_dtype, ints, make, randn, subprocess_python

from kda.cli.check import in_pytorch
from kda.drop_in import transformers as drop_in

with in_pytorch():
    pytest.importorskip("transformers.models.glm5_next")
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration, KimiLinearConfig, KimiLinearForCausalLM
    from transformers.cache_utils import DynamicCache
    from transformers.models.glm5_next import modeling_glm5_next as glm
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

VOCABULARY, W = 97, 4
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=5,
    num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2, kv_lora_rank=16, v_head_dim=16,
    qk_nope_head_dim=16, linear_head_dim=32, linear_num_heads=2, pad_token_id=0,
)


def glm_model():
    text = dict(SMALL, n_routed_experts=4, q_lora_rank=24, index_topk=8, index_head_dim=16, index_n_heads=2, index_kpool=4)
    vision = dict(hidden_size=32, intermediate_size=32, depth=1, num_heads=2, out_hidden_size=48,
                  projection_intermediate_size=32)
    return Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision))


def kimi_model():
    return KimiLinearForCausalLM(KimiLinearConfig(
        **SMALL, num_local_experts=4, qk_rope_head_dim=16, layer_types=["linear_attention"] * 3 + ["full_attention"] +
        ["linear_attention"], mlp_layer_types=["dense"] + ["sparse"] * 4))


MODELS = {"glm": glm_model, "kimi": kimi_model}


@pytest.fixture(params=MODELS)
def model(request, backend):
    torch.manual_seed(0)
    made = MODELS[request.param]().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("dt_bias", "A_log", "o_norm.weight")):  # they all begin alike
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made.to(backend.device)


@pytest.fixture(autouse=True)
def unpatched():
    yield
    drop_in.unpatch()


def test_transformers_runs_its_pytorch_code():
    for file in (glm, kimi):
        for function in ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention", "causal_conv1d_fn",
                         "causal_conv1d_update"):
            assert inspect.getclosurevars(getattr(file, function)).nonlocals["is_new_implementation"] is False


# ------------------------------------------------------------------------------------------------------------- the models


def prompts(device, padded):
    """Two prompts, of one length or the first one padded on the left."""
    ids = torch.randint(1, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :6] = 0
    return dict(input_ids=(ids * mask).to(device), attention_mask=mask.to(device))


def generate(model, inputs, use_cache):
    made = model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=use_cache, output_logits=True,
                          return_dict_in_generate=True, eos_token_id=None)
    return made.sequences, torch.stack(made.logits)


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_generate_gives_the_same_tokens_and_logits(model, backend, padded, use_cache):
    inputs = prompts(backend.device, padded)
    tokens, logits = generate(model, inputs, use_cache)
    drop_in.patch(model)
    got_tokens, got_logits = generate(model, inputs, use_cache)
    assert torch.equal(got_tokens, tokens)
    assert_accurate(got_logits, logits, FP32)
    assert not torch.equal(got_logits, logits), "to the last bit: is it patched?"
    drop_in.unpatch(model)
    assert torch.equal(generate(model, inputs, use_cache)[1], logits)


def test_beams_and_prompts_in_pieces(model, backend):
    """Beams reorder the cached states; a prompt in pieces continues from them with more than a token at once."""
    inputs = prompts(backend.device, padded=True)

    def beams():
        return model.generate(**inputs, max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None)

    @torch.no_grad()
    def pieces():
        cache = DynamicCache(config=model.config.get_text_config())
        ids = inputs["input_ids"][1:]
        return torch.cat([model(ids[:, a:b], cache=cache).logits for a, b in ((0, 2), (2, 15), (15, 16), (16, 21))], 1)

    want = beams(), pieces()
    drop_in.patch(model)
    assert torch.equal(beams(), want[0])
    assert_accurate(pieces(), want[1], FP32)


@torch.no_grad()
def test_in_bf16_logits_are_as_close_to_fp32_as_transformers_are(backend):
    """Every projection rounds: what counts is the distance to the same weights in fp32, beside that of the peer."""
    torch.manual_seed(0)
    exact = glm_model().eval().to(backend.device)
    half = copy.deepcopy(exact).to(BF16)
    for name, parameter in exact.named_parameters():
        other = half.get_parameter(name)
        if any(kept in name for kept in exact._keep_in_fp32_modules_strict):
            other.data = parameter.data.clone()
        else:
            parameter.copy_(other.float())
    inputs = prompts(backend.device, padded=True)
    want = exact(**inputs).logits
    theirs = oracle.err(half(**inputs).logits, want)
    drop_in.patch(half)
    assert oracle.err(half(**inputs).logits, want) <= 1.25 * theirs


# ------------------------------------------------------------------------------------------------------ patch and unpatch


def kda_layers(model):
    return [m for m in model.modules() if type(m).__name__ in ("Glm5NextTextLinearAttention", "KimiLinearDeltaAttention")]


@torch.no_grad()
def test_patching_one_model_leaves_others_alone(backend):
    one, other = kimi_model().eval().to(backend.device), kimi_model().eval().to(backend.device)
    other.load_state_dict(one.state_dict())
    inputs = prompts(backend.device, padded=True)
    want = other(**inputs).logits
    drop_in.patch(one)
    drop_in.patch(one)  # again: nothing more happens
    assert torch.equal(other(**inputs).logits, want)
    assert not torch.equal(one(**inputs).logits, want)
    twin = copy.deepcopy(one)
    assert kda_layers(twin)[0].forward.__self__ is kda_layers(twin)[0], "a copy computes with its own weights"
    drop_in.unpatch(one)
    assert torch.equal(one(**inputs).logits, want)
    assert not [m for m in one.modules() if "forward" in vars(m)]


@torch.no_grad()
@pytest.mark.parametrize("make_model", [glm_model, kimi_model])
def test_patching_all_serves_models_made_before_and_after(backend, make_model):
    torch.manual_seed(0)
    before = make_model().eval().to(backend.device)
    inputs = prompts(backend.device, padded=True)
    want = before(**inputs).logits
    drop_in.patch()
    after = make_model().eval().to(backend.device)
    after.load_state_dict(before.state_dict())
    got = before(**inputs).logits
    assert torch.equal(after(**inputs).logits, got) and not torch.equal(got, want)
    assert_accurate(got, want, FP32)
    drop_in.unpatch()
    assert torch.equal(after(**inputs).logits, want)


def test_what_is_patched_calls_nothing_of_transformers_for_kda(model, backend, monkeypatch):
    drop_in.patch(model)
    for file in (glm, kimi):
        for name in drop_in._FUNCTIONS:
            monkeypatch.setattr(file, name, None)
    generate(model, prompts(backend.device, padded=True), use_cache=True)


@torch.no_grad()
def test_accelerate_hooks_stay_in_place(backend):
    """add_hook_to_module keeps the bound `forward` as `_old_forward` and calls that between its hooks."""
    model, hooked = kimi_model().eval().to(backend.device), []

    def add_hook(layer):
        layer._old_forward = layer.forward
        layer.forward = lambda *args, **kwargs: (hooked.append(layer), layer._old_forward(*args, **kwargs))[1]

    inputs, layers = prompts(backend.device, padded=False), kda_layers(model)
    want = model(**inputs).logits
    for layer in layers:
        add_hook(layer)
    drop_in.patch(model)
    got = model(**inputs).logits
    assert hooked == layers and not torch.equal(got, want)
    assert_accurate(got, want, FP32)
    drop_in.unpatch(model)
    assert torch.equal(model(**inputs).logits, want) and hooked == layers * 2


def test_a_model_without_kda_is_refused():
    with pytest.raises(ValueError, match="Linear without KDA layers; accepted: glm5_next, kimi_linear"):
        drop_in.patch(torch.nn.Linear(2, 2))


def test_another_transformers_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(kimi, "chunk_kimi_delta_attention")
    with pytest.raises(ImportError, match="modeling_kimi_linear has no chunk_kimi_delta_attention"):
        drop_in.patch()
    assert glm.causal_conv1d_fn is not drop_in.causal_conv1d_fn, "half patched"


def test_the_page_of_the_docs_prints_what_it_says():
    """On a CPU. Where a GPU is visible and fla on the path, transformers hands CPU tensors to fla, with or without us."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "transformers.md").read_text(), re.S)[1]
    done = subprocess_python(code, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.stdout.startswith("same tokens: True\ncpu tensors go to "), done.stdout + done.stderr[-2000:]


def test_examples_of_the_docstrings():
    result = doctest.testmod(drop_in)
    assert result.attempted and not result.failed


def test_importing_the_drop_in_imports_neither_transformers_nor_triton():
    done = subprocess_python("import sys, kda.drop_in.transformers; print({'transformers', 'triton'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


# -------------------------------------------------------------------------------------------- the cache, compile, gradients


@torch.no_grad()
def test_cached_states_move_on_in_place_in_the_kernels_layout(model, backend):
    """No token copies or transposes a state; its values are those of transformers' cache."""
    ids = prompts(backend.device, padded=False)["input_ids"]

    def caches():
        cache = DynamicCache(config=model.config.get_text_config())
        model(ids[:, :15], cache=cache)
        first = cache.get_recurrent_state(0)
        for t in range(15, 21):
            model(ids[:, t:t + 1], cache=cache)
        return first, cache

    _, want = caches()
    drop_in.patch(model)
    first, got = caches()
    state = got.get_recurrent_state(0)
    assert state is first and state.transpose(-1, -2).is_contiguous()
    assert_accurate(state, want.get_recurrent_state(0), FP32, "state")
    assert_accurate(got.get_conv_state(0)[..., 1:], want.get_conv_state(0)[..., 1:], FP32)


@torch.no_grad()
@pytest.mark.parametrize("model_of", [glm_model, kimi_model])
def test_a_patched_layer_compiles_into_one_graph_and_exports(backend, model_of):
    torch.manual_seed(0)
    layer = kda_layers(model_of().eval().to(backend.device))[1]
    x = randn(2, 13, 48, seed=3, device=backend.device)
    want = layer(x)
    owner = torch.nn.ModuleList([layer])
    drop_in.patch(owner)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(layer, (x,)).module()
    assert_accurate(compiled(x), want, FP32)
    assert_accurate(exported(x), want, FP32)
    names = {str(node.target) for node in exported.graph.nodes}
    assert {"kda.chunk_kda.default", "kda.causal_conv1d_fn.default", "kda.rms_norm_gated.default"} <= names


def test_training_is_refused_by_name(backend):
    model = kimi_model().to(backend.device)
    drop_in.patch(model)
    loss = model(**prompts(backend.device, padded=False)).logits.sum()
    with pytest.raises(RuntimeError, match="is for inference and has no backward pass"):
        loss.backward()


# ------------------------------------------------------------------------------------- the functions, against the oracle


@each_dtype
@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
@pytest.mark.parametrize("lens", [None, [5, 0, 20]], ids=["batch", "packed"])
def test_rule_equals_the_oracle_with_states_k_major(backend, name, lens, dtype):
    x = make(lens, B=1 if lens else 2, T=None if lens else 19, V=32, dtype=dtype, device=backend.device)
    initial_state = x.initial_state.transpose(-1, -2).contiguous()
    before = initial_state.clone()
    beta = x.beta.float().sigmoid()
    o, state = getattr(drop_in, name)(
        x.q, x.k, x.v, g=x.log_decay(), beta=beta, initial_state=initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu)
    want, want_state = x.oracle(beta=beta, sigmoid_beta=False)
    assert_accurate(o, want, dtype)
    assert_accurate(state.transpose(-1, -2), want_state, dtype, "state")
    assert torch.equal(initial_state, before), "a state stored K before V is not written"
    o, state = getattr(drop_in, name)(x.q, x.k, x.v, x.log_decay(), beta, initial_state=None, output_final_state=False,
                                      use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu)
    assert state is None
    assert_accurate(o, x.oracle(beta=beta, sigmoid_beta=False, initial_state=None)[0], dtype)


def test_a_state_stored_v_before_k_moves_on_in_place(backend):
    x = make(B=2, T=1, V=32, dtype=FP32, device=backend.device)
    state = x.initial_state.clone().transpose(-1, -2)
    o, final = drop_in.recurrent_kimi_delta_attention(
        x.q, x.k, x.v, x.log_decay(), x.beta.sigmoid(), state, True, True)
    assert final is state, "the cache would copy it"
    assert_accurate(o, x.oracle()[0], FP32)
    assert_accurate(state.transpose(-1, -2), x.oracle()[1], FP32, "state")


def test_a_state_that_nobody_keeps_is_not_written(backend):
    x = make(B=2, T=1, V=32, dtype=FP32, device=backend.device)
    state = x.initial_state.clone()
    o, final = drop_in.recurrent_kimi_delta_attention(
        x.q, x.k, x.v, x.log_decay(), x.beta.sigmoid(), state.transpose(-1, -2), False, True)
    assert final is None and torch.equal(state, x.initial_state)
    assert_accurate(o, x.oracle()[0], FP32)


@pytest.mark.parametrize("layout", ["token-major", "channel-major"])
def test_convolution_equals_the_oracle(backend, layout):
    B, dim, T = 3, 24, 7
    x = randn(B, T, dim, seed=1, dtype=BF16, device=backend.device).transpose(1, 2)
    x = x if layout == "token-major" else x.contiguous()
    weight, bias = randn(dim, W, seed=2, device=backend.device), randn(dim, seed=3, device=backend.device)
    history = randn(B, dim, W, seed=4, dtype=BF16, device=backend.device)
    y = drop_in.causal_conv1d_fn(x, weight, bias, activation="silu")
    state = history.clone()
    step = torch.cat([drop_in.causal_conv1d_update(x[..., t:t + 1], state, weight, bias, "silu") for t in range(T)], -1)
    for n in range(B):
        none = torch.zeros_like(history[n, :, 1:])
        assert_accurate(y[n], oracle.conv(x[n], weight, bias, none, True)[0], BF16)
        want, left = oracle.conv(x[n], weight, bias, history[n, :, 1:], True)
        assert_accurate(step[n], want, BF16)
        assert torch.equal(state[n, :, 1:].double(), left)
    packed = drop_in.causal_conv1d_fn(x[:1], weight, None, "silu", cu_seqlens=ints([0, 4, T], backend.device))[0]
    for a, b in ((0, 4), (4, T)):
        assert_accurate(packed[:, a:b], oracle.conv(x[0, :, a:b], weight, None, none, True)[0], BF16)


def test_packed_sequences_without_their_offsets_are_refused(backend):
    x = randn(1, 24, 7, seed=1, device=backend.device)
    with pytest.raises(ValueError, match="`seq_idx`"):
        drop_in.causal_conv1d_fn(x, randn(24, W, seed=2, device=backend.device), seq_idx=ints([[0] * 7], backend.device))
