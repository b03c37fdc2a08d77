# SPDX-License-Identifier: Apache-2.0
"""Whole models in vLLM's engine on the CPU, with the package installed and nothing else done.

A Kimi Linear without its few softmax-attention layers (theirs have no CPU code in vLLM), and a Llama: with a CPU backend
in Triton, vLLM runs the bookkeeping and the sampling of every model as Triton kernels on it.
"""

import json

import oracle
import pytest
import torch
from helpers import randn, subprocess_python
from safetensors.torch import save_file

HIDDEN, MLP, VOCAB, LAYERS, HEADS, DIM, W = 128, 256, 512, 2, 2, 64, 4
INNER = HEADS * DIM
PROMPTS = [[(7 * i * j + 3) % 500 for j in range(n)] for i, n in ((1, 5), (2, 33), (3, 70))]
PROMPTS.append([5, 6, 7, 8] * 5)  # what n-gram drafts live on
NEW = 12

ENGINE = """
import json, os
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_STREAM="ext://sys.stderr")
os.environ.update(VLLM_KIMI_K3_GEMM_AR="0")  # a kernel for GPUs whose import fails without their packages
from vllm import LLM, SamplingParams
from vllm.triton_utils import HAS_TRITON
llm = LLM({path!r}, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4, enforce_eager=True, dtype="float32",
          **{options!r})
greedy = SamplingParams(max_tokens={new}, temperature=0, detokenize=False, ignore_eos=True)
best = SamplingParams(max_tokens={new}, temperature=1, top_k=4, top_p=0.9, seed=3, detokenize=False, ignore_eos=True)
said = dict(has_triton=HAS_TRITON, v2=llm.llm_engine.vllm_config.use_v2_model_runner)
for name, how in dict(greedy=greedy, best=best).items():
    made = llm.generate([dict(prompt_token_ids=p) for p in {prompts}], how, use_tqdm=False)
    said[name] = [list(o.outputs[0].token_ids) for o in made]
    said["cached"] = [o.num_cached_tokens for o in made]  # of the second round: the prompts of the first again
print(json.dumps(said))
"""


def generate(path, runner="1", **options):
    """What a fresh process with vLLM's engine generates, and the process's log."""
    code = ENGINE.format(path=str(path), options=options, new=NEW, prompts=PROMPTS)
    done = subprocess_python(code, VLLM_USE_V2_MODEL_RUNNER=runner)
    assert done.returncode == 0, done.stderr[-4000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["has_triton"] and got["v2"] == (runner == "1")
    return got, done.stderr


def check(got, logits_of):
    """Greedy tokens are those of the largest logit, the others among those of the largest four."""
    with torch.no_grad():
        for name, allowed in (("greedy", 1), ("best", 4)):
            for prompt, tokens in zip(PROMPTS, got[name]):
                assert len(tokens) == NEW
                logits = logits_of(torch.tensor(prompt + tokens))[len(prompt) - 1:-1]
                assert all(token in top for token, top in zip(tokens, logits.topk(allowed).indices.tolist())), name


class KimiLinear:
    """A random checkpoint all of whose layers are KDA, and its logits in fp64."""

    def __init__(self, path):
        shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
        for n in range(LAYERS):
            attention, mlp = f"model.layers.{n}.self_attn", f"model.layers.{n}.mlp"
            shapes |= {f"{attention}.{x}_proj": (INNER, HIDDEN) for x in "qkv"}
            shapes |= {f"{attention}.{x}_conv1d": (INNER, 1, W) for x in "qkv"}
            shapes |= {f"{attention}.{x}_a_proj": (DIM, HIDDEN) for x in "fg"}
            shapes |= {f"{attention}.{x}_b_proj": (INNER, DIM) for x in "fg"}
            shapes |= {f"{attention}.b_proj": (HEADS, HIDDEN), f"{attention}.o_proj": (HIDDEN, INNER),
                       f"{attention}.o_norm": (DIM,), f"{attention}.A_log": (HEADS,), f"{attention}.dt_bias": (INNER,)}
            shapes |= {f"{mlp}.gate_proj": (MLP, HIDDEN), f"{mlp}.up_proj": (MLP, HIDDEN), f"{mlp}.down_proj": (HIDDEN, MLP)}
            shapes |= {f"model.layers.{n}.{x}_layernorm": (HIDDEN,) for x in ("input", "post_attention")}
        bare = ("A_log", "dt_bias")
        self.weights = {
            name + ("" if name.endswith(bare) else ".weight"): randn(*shape, seed=seed) * (
                2 * shape[-1]**-0.5 if len(shape) > 1 else 0.3) + (1.0 if "norm" in name else 0.0)
            for seed, (name, shape) in enumerate(shapes.items())}
        save_file(self.weights, path / "model.safetensors")
        linear = dict(kda_layers=[*range(1, LAYERS + 1)], full_attn_layers=[], head_dim=DIM, num_heads=HEADS,
                      short_conv_kernel_size=W)
        config = dict(
            architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", hidden_size=HIDDEN, intermediate_size=MLP,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=DIM, vocab_size=VOCAB, rms_norm_eps=1e-5,
            hidden_act="silu", tie_word_embeddings=False, max_position_embeddings=256, torch_dtype="float32",
            linear_attn_config=linear)
        (path / "config.json").write_text(json.dumps(config))

    def __call__(self, tokens):
        at = lambda name: self.weights[name].double()  # noqa: E731
        x = at("model.embed_tokens.weight")[tokens]
        for n in range(LAYERS):
            layer = f"model.layers.{n}"
            x = x + self._kda(self._norm(x, at(f"{layer}.input_layernorm.weight")), f"{layer}.self_attn")
            y = self._norm(x, at(f"{layer}.post_attention_layernorm.weight"))
            y = oracle.silu(y @ at(f"{layer}.mlp.gate_proj.weight").T) * (y @ at(f"{layer}.mlp.up_proj.weight").T)
            x = x + y @ at(f"{layer}.mlp.down_proj.weight").T
        return self._norm(x, at("model.norm.weight")) @ at("lm_head.weight").T

    @staticmethod
    def _norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight

    def _kda(self, x, layer):
        at = lambda name: self.weights[f"{layer}.{name}"].double()  # noqa: E731
        heads = lambda t: t.unflatten(-1, (HEADS, DIM))[None]  # noqa: E731
        q, k, v = (
            heads(oracle.conv((x @ at(f"{n}_proj.weight").T).T, at(f"{n}_conv1d.weight")[:, 0], None,
                              torch.zeros(INNER, W - 1), True)[0].T) for n in "qkv")
        raw_g, z = (heads(x @ at(f"{n}_a_proj.weight").T @ at(f"{n}_b_proj.weight").T) for n in "fg")
        beta = (x @ at("b_proj.weight").T)[None]
        o, _ = oracle.kda(q, k, v, raw_g, beta, sigmoid_beta=True, A_log=at("A_log"), g_bias=at("dt_bias"))
        y, _ = oracle.rms_norm_gated(o, z, at("o_norm.weight"), activation="sigmoid", eps=1e-5)
        return y[0].flatten(-2) @ at("o_proj.weight").T


@pytest.mark.parametrize("options", [
    dict(), dict(max_num_batched_tokens=32, enable_prefix_caching=False),
    dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2)),
], ids=["prefix-caching", "prompts-in-pieces", "speculative"])  # fmt: skip
def test_kimi_linear_of_kda_layers(tmp_path, options):
    model = KimiLinear(tmp_path)
    got, log = generate(tmp_path, **options)
    check(got, model)
    assert max(got["cached"]) == (0 if "enable_prefix_caching" in options else 64)
    assert "replaces chunk_kda_with_fused_gate, fused_recurrent_kda, fused_recurrent_kda_packed_decode" in log


@pytest.mark.parametrize("runner", ["1", "0"], ids=["v2", "v1"])
def test_llama(tmp_path, runner):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=32, vocab_size=VOCAB, max_position_embeddings=256,
                         initializer_range=0.3, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    got, _ = generate(tmp_path, runner)
    check(got, lambda tokens: model(tokens[None]).logits[0])
