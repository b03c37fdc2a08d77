# SPDX-License-Identifier: Apache-2.0
"""vLLM's own KDA layers on the CPU, driven as its model runner drives them, and what the oracle says to the same tokens."""

import contextlib
import importlib
import importlib.util
import sys
import tempfile
import types
from dataclasses import dataclass, field

import oracle
import torch
from helpers import assert_accurate, ints, randn, starts
from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder

HIDDEN, HEADS, DIM, W = 64, 2, 128, 4
INNER = HEADS * DIM
PREFIX = "model.layers.0.self_attn"
BLOCK = 512  # tokens of a state block: no request here outgrows it


def layer_module(name):
    """A module of vLLM with this package's plugin loaded, as in every process of vLLM's."""
    load_general_plugins()
    package = "vllm.models.glm5next"
    if name.startswith(package) and package not in sys.modules:
        # the package itself imports the vision tower, which needs a torchvision built for this torch
        bare = types.ModuleType(package)
        bare.__path__ = list(importlib.util.find_spec(package).submodule_search_locations)
        sys.modules[package] = bare
    return importlib.import_module(name)


def glm_layer(config):
    from transformers import Glm5NextTextConfig

    module = layer_module("vllm.models.glm5next.common.kda")
    text = Glm5NextTextConfig(hidden_size=HIDDEN, linear_num_heads=HEADS, linear_head_dim=DIM, linear_lower_bound=-5.0)
    return module.Glm5NextLinearAttention(text, config, PREFIX)


def kimi_layer(config):
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    module = layer_module("vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn")
    linear = dict(kda_layers=[1], full_attn_layers=[], head_dim=DIM, num_heads=HEADS, short_conv_kernel_size=W)
    text = KimiLinearConfig(hidden_size=HIDDEN, rms_norm_eps=1e-5, linear_attn_config=linear)
    return module.KimiGatedDeltaNetAttention(text, config, PREFIX)


LAYERS = {"glm-5.3": glm_layer, "kimi-linear": kimi_layer}


@contextlib.contextmanager
def one_process(config):
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            file = tempfile.NamedTemporaryFile().name
            init_distributed_environment(1, 0, f"file://{file}", 0, "gloo")
            initialize_model_parallel()
        yield


@dataclass
class Row:
    """What a step does for one request: its next tokens; `accepted` of the window before, where they are a draft."""

    request: int
    tokens: int
    accepted: int | None = None


@dataclass
class Request:
    """slots: one for each token of a window; history: per kept token what the layer's modules saw and made.

    column: which of its slots holds the state after its last token.
    """

    slots: list
    hidden: torch.Tensor
    column: int = 0
    history: dict = field(default_factory=lambda: {name: [] for name in ("proj", "raw_g", "o", "z", "y", "out")})
    draft: dict | None = None

    @property
    def kept(self):
        return sum(len(x) for x in self.history["o"])


class Client:
    """A layer, its state pages, the builder of its metadata, and requests of seeded hidden states."""

    def __init__(self, name, dtype, requests=3, drafts=0, slots=16):
        self.drafts, self.dtype = drafts, dtype
        self.config = VllmConfig(
            device_config=DeviceConfig("cpu"), cache_config=CacheConfig(mamba_block_size=BLOCK),
            scheduler_config=SchedulerConfig(max_num_seqs=8, max_model_len=BLOCK, is_encoder_decoder=False))
        # of the model and of the draft model the layer and the builder read these alone
        self.config.model_config = types.SimpleNamespace(
            dtype=dtype, hf_text_config=None, enforce_eager=True, is_moe=False, max_model_len=BLOCK)
        if drafts:
            self.config.speculative_config = types.SimpleNamespace(
                method="ngram", num_speculative_tokens=drafts, parallel_drafting=False)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with one_process(self.config), torch.no_grad():
                self.layer = LAYERS[name](self.config)
                self._load()
                self.builder = GDNAttentionMetadataBuilder(
                    self.layer.get_kv_cache_spec(self.config), [PREFIX], self.config, torch.device("cpu"))
        finally:
            torch.set_default_dtype(default)
        self._bind(slots)
        window = 1 + drafts
        self.requests = [
            Request(list(range(1 + n * window, 1 + (n + 1) * window)), randn(128, HIDDEN, seed=400 + n, dtype=dtype))
            for n in range(requests)
        ]
        self._watch()

    def _load(self):
        """Weights as a checkpoint would bring them."""
        for seed, (name, parameter) in enumerate(self.layer.named_parameters()):
            fan = 1 if parameter.dim() < 2 or name == "A_log" else parameter.shape[-1]
            value = randn(*parameter.shape, seed=seed + 1, scale=fan**-0.5)
            parameter.copy_(1 + 0.1 * value if name == "o_norm.weight" else value)
        # vLLM packs the matrices for its own products, and drops them
        self.weights = {name: p.double() for name, p in self.layer.named_parameters()}
        for module in self.layer.modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)

    def _bind(self, slots):
        """Pages as vLLM's allocator cuts them: both states of a slot behind each other, padded, all bytes NaN."""
        self.page = self.builder.kv_cache_spec.page_size_bytes
        self.pages = torch.full((slots, 1, 1, self.page + 256), -1, dtype=torch.int8)
        self.layer.bind_kv_cache(self.pages)

    def _watch(self):
        self.seen = {}
        layer = self.layer
        keep = lambda name: lambda module, args, out: self.seen.update({name: out[0]})  # noqa: E731
        in_proj = getattr(layer, "in_proj_qkvbfg_a", None) or layer.in_proj_qkvgfab
        in_proj.register_forward_hook(keep("proj"))
        layer.f_b_proj.register_forward_hook(keep("raw_g"))
        layer.o_norm.register_forward_hook(
            lambda module, args, out: self.seen.update(
                o=args[0].clone().view(-1, HEADS, DIM), z=args[1].view(-1, HEADS, DIM), y=out.view(-1, HEADS, DIM)))

    def metadata(self, rows) -> GDNAttentionMetadata:
        lens = [row.tokens for row in rows]
        requests = [self.requests[row.request] for row in rows]
        starts_ = ints(starts(lens), "cpu")
        seq_lens = ints([request.kept + n for request, n in zip(requests, lens)], "cpu")
        common = CommonAttentionMetadata(
            query_start_loc=starts_, query_start_loc_cpu=starts_, seq_lens=seq_lens, num_reqs=len(rows),
            num_actual_tokens=sum(lens), max_query_len=max(lens), max_seq_len=BLOCK,
            block_table_tensor=ints([request.slots for request in requests], "cpu"),
            slot_mapping=torch.zeros(sum(lens), dtype=torch.int64), seq_lens_cpu_upper_bound=seq_lens,
            is_prefilling=torch.tensor([request.kept == 0 for request in requests]))
        drafted = {}
        if self.drafts:
            drafted = dict(
                num_accepted_tokens=ints([row.accepted or 1 for row in rows], "cpu"),
                num_decode_draft_tokens_cpu=ints(
                    [-1 if row.accepted is None else row.tokens - 1 for row in rows], "cpu"))
        return self.builder.build(0, common, **drafted)

    @torch.no_grad()
    def step(self, *rows):
        """One forward pass. Tokens of a draft are kept once the next step says how many of them were accepted."""
        for row in rows:
            self._settle(self.requests[row.request], row.accepted)
        metadata = self.metadata(rows)
        hidden = torch.cat([
            self.requests[row.request].hidden[self.requests[row.request].kept:][:row.tokens] for row in rows])
        with set_current_vllm_config(self.config), set_forward_context({PREFIX: metadata}, self.config):
            self.seen["out"] = self.layer(hidden, torch.zeros(len(hidden), dtype=torch.int64))
        at = 0
        for row in rows:
            request = self.requests[row.request]
            request.draft = {name: x[at:at + row.tokens].clone() for name, x in self.seen.items()}
            at += row.tokens
            request.column = 0 if row.accepted is None else row.tokens - 1
            if row.accepted is None:
                self._settle(request, row.tokens)
        return metadata

    def _settle(self, request, accepted):
        if request.draft is not None:
            for name, x in request.draft.items():
                request.history[name].append(x[:accepted])
            request.draft = None

    def check(self):
        """Every kept token and the last states of every request against the oracle; returns how many tokens there were."""
        for request in self.requests:
            self._settle(request, None)
        used = {slot for request in self.requests if request.kept for slot in request.slots}
        unused = [slot for slot in range(len(self.pages)) if slot not in used]
        assert 0 in unused and (self.pages[unused] == -1).all(), "a slot of no request was written, or the null slot"
        assert (self.pages[..., self.page:] == -1).all(), "written behind a slot's states"
        return sum(self._check(request) for request in self.requests if request.kept)

    def _check(self, request):
        x = {name: torch.cat(parts) for name, parts in request.history.items()}
        layer, T = self.layer, request.kept
        conv = getattr(layer, "conv1d", None)
        weight = torch.cat([m.weight for m in ([conv] if conv else [layer.q_conv1d, layer.k_conv1d, layer.v_conv1d])])
        bound = getattr(layer, "kda_lower_bound", None)
        qkv, inputs = oracle.conv(x["proj"][:, :3 * INNER].T, weight[:, 0], None, torch.zeros(3 * INNER, W - 1), True)
        q, k, v = (t.unflatten(-1, (HEADS, DIM))[None] for t in qkv.T.to(self.dtype).split(INNER, -1))
        o, state = oracle.kda(
            q, k, v, x["raw_g"].unflatten(-1, (HEADS, DIM))[None], x["proj"][None, :, 3 * INNER:3 * INNER + HEADS],
            sigmoid_beta=True, A_log=layer.A_log, g_bias=layer.dt_bias, lower_bound=bound)
        assert_accurate(x["o"], o[0], self.dtype)
        y, _ = oracle.rms_norm_gated(x["o"], x["z"], layer.o_norm.weight, activation="sigmoid", eps=1e-5)
        assert_accurate(x["y"], y, self.dtype)
        conv_states, states = layer.kv_cache
        assert_accurate(states[request.slots[request.column]], state[0], self.dtype, "state")
        last_inputs = conv_states[request.slots[0], request.column:request.column + W - 1].T
        assert torch.equal(last_inputs.double(), inputs)
        if self.dtype == torch.float32:  # nothing was rounded on the way: the layer as a whole
            assert_accurate(x["out"], self._whole(request.hidden[:T].double(), weight, bound), self.dtype)
        return T

    def _whole(self, hidden, weight, bound):
        """The layer of one request in fp64, from its hidden states."""
        layer = self.layer

        def linear(name, x):
            return x @ self.weights[f"{name}.weight"].T

        if hasattr(layer, "in_proj_qkvbfg_a"):
            qkv, beta, f_a, g_a = linear("in_proj_qkvbfg_a", hidden).split([3 * INNER, HEADS, DIM, DIM], -1)
        else:
            qkv, beta, f_a = linear("in_proj_qkvgfab", hidden).split([3 * INNER, HEADS, DIM], -1)
            g_a = linear("g_a_proj", hidden)
        qkv, _ = oracle.conv(qkv.T, weight[:, 0], None, torch.zeros(3 * INNER, W - 1), True)
        q, k, v = (t.unflatten(-1, (HEADS, DIM))[None] for t in qkv.T.split(INNER, -1))
        raw_g, z = (linear(m, x).unflatten(-1, (HEADS, DIM)) for m, x in (("f_b_proj", f_a), ("g_b_proj", g_a)))
        o, _ = oracle.kda(q, k, v, raw_g[None], beta[None], sigmoid_beta=True, A_log=layer.A_log,
                          g_bias=layer.dt_bias, lower_bound=bound)
        y, _ = oracle.rms_norm_gated(o[0], z, layer.o_norm.weight, activation="sigmoid", eps=1e-5)
        return linear("o_proj", y.flatten(-2))
