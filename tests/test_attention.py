# SPDX-License-Identifier: Apache-2.0
"""The whole layer of `kda.serving`: from published checkpoints, on the steps of an engine, in one piece and by heads.

transformers writes the checkpoints, so that their names and shapes are not this package's idea of them.
"""

import copy
import doctest
import inspect
import json
import shutil

import oracle
import pytest
import torch
from helpers import BF16, FP16, FP32, assert_accurate, bf16_on_gpu, dtype_id, randn

import kda
from kda.cli.check import in_pytorch
from kda.serving import Batch, Decode, KDAAttention, Prefill, StatePool, Verify, attention

with in_pytorch():
    pytest.importorskip("transformers.models.kimi_linear")
    from transformers.models.glm5_next import modeling_glm5_next as glm
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
safetensors = pytest.importorskip("safetensors.torch")

HEADS, DIM, HIDDEN = 4, 32, 48
PREFIX = "layers.0.self_attn"
SIZES = dict(hidden_size=HIDDEN, num_heads=HEADS, head_dim=DIM)
BOUND = {"glm": -5.0, "kimi": None}

# ------------------------------------------------------------------------------------------------------------ the peers


@pytest.fixture(scope="module")
def peers():
    """{name: the whole model in fp32} of transformers, with seeded weights."""
    small = dict(hidden_size=HIDDEN, intermediate_size=16, moe_intermediate_size=16, num_experts_per_tok=1, vocab_size=32,
                 kv_lora_rank=16, linear_num_heads=HEADS, linear_head_dim=DIM, num_attention_heads=2,
                 num_key_value_heads=2, num_hidden_layers=1, pad_token_id=0)
    models = {
        "glm": glm.Glm5NextTextModel(Glm5NextTextConfig(**small, q_lora_rank=16, n_routed_experts=2)),
        "kimi": kimi.KimiLinearModel(KimiLinearConfig(**small, bos_token_id=1, eos_token_id=2, num_local_experts=2)),
    }
    for model in models.values():
        layer = model.layers[0].self_attn
        with torch.no_grad():
            for seed, parameter in enumerate(layer.parameters()):
                fan = parameter.shape[-1] if parameter.ndim in (2, 3) else 1
                parameter.copy_(randn(*parameter.shape, seed=seed + 1, scale=fan**-0.5))
            layer.o_norm.weight.add_(1.0)
    return models


@pytest.fixture(scope="module")
def saved(peers, tmp_path_factory):
    """{name: directory} of the models as transformers writes them: GLM's in several files, Kimi's in one."""
    paths = {name: tmp_path_factory.mktemp(name) for name in peers}
    for name, model in peers.items():
        model.save_pretrained(paths[name], max_shard_size="40KB" if name == "glm" else "50GB")
    return paths


def weights(path):
    """All tensors in the files of a directory."""
    return {name: x for file in sorted(path.glob("*.safetensors")) for name, x in safetensors.load_file(file).items()}


def layer_weights(path):
    return {name.removeprefix(f"{PREFIX}."): x for name, x in weights(path).items() if name.startswith(PREFIX)}


@pytest.mark.parametrize("module", [glm, kimi], ids=["glm", "kimi"])
def test_transformers_runs_its_pytorch_code(module):
    """Not flash-linear-attention's kernels, which on a CPU would run on the backend under test."""
    for function in (module.recurrent_kimi_delta_attention, module.chunk_kimi_delta_attention, module.causal_conv1d_fn):
        assert inspect.getclosurevars(function).nonlocals["is_new_implementation"] is False


def loaded(checkpoint, device, prefix="", **how):
    layer = KDAAttention(**{**SIZES, **how}, device=device)
    layer.load_checkpoint(checkpoint, prefix)
    return layer


# ------------------------------------------------------------------------------------------------------------ the steps


def serve(layer, hidden, padding=0):
    """Three requests' hidden states [T, HIDDEN] through prefill, decode and mixed steps; returns outputs and states.

    Slots hold NaN before, and so do `padding` tokens behind each step's.
    """
    device = hidden[0].device
    pool = StatePool(8, layer.geometry(), device=device)
    pool.pages.fill_(-1)
    slots, at, got = pool.allocate(3), [0, 0, 0], [[], [], []]
    first, second, third = range(3)
    for rows in (
        [(first, 19), (second, 35)],
        [(second, 1), (first, 1)],
        [(third, 6), (first, 1), (second, 4)],  # the third comes in, the second goes on by a prefill
        [(first, 1), (third, 1), (second, 1)],
        [(third, 40), (first, 1)],
    ):
        step = [Decode(slots[r]) if n == 1 else Prefill(slots[r], n, at[r] > 0) for r, n in rows]
        x = torch.cat([hidden[r][at[r]:at[r] + n] for r, n in rows])
        x = torch.cat([x, torch.full((padding, HIDDEN), float("nan"), dtype=x.dtype, device=device)])
        y = layer(x, Batch.of(step, pool=pool), pool.layers[0])
        assert y.shape == x.shape and y.dtype == x.dtype
        assert padding == 0 or not y[-padding:].any(), "padding has an output"
        for (r, n), piece in zip(rows, y.split([n for _, n in rows] + [padding] * (padding > 0))):
            got[r].append(piece), at.__setitem__(r, at[r] + n)
    return [torch.cat(pieces) for pieces in got], [pool.layers[0].ssm_state[slot] for slot in slots]


def requests(dtype, device):
    return [randn(n, HIDDEN, seed=40 + n, dtype=dtype, device=device) for n in (23, 41, 47)]


def exact(w, hidden, lower_bound, H, HV, K, V):
    """The layer in fp64 on one request [T, HIDDEN], from a checkpoint's tensors; returns output and final state."""
    w, x = {name: t.to(hidden.device).double() for name, t in w.items()}, hidden.double()
    parts = []
    for name, heads in (("q", H), ("k", H), ("v", HV)):
        filters = w[f"{name}_conv1d.weight"].flatten(1)
        y, _ = oracle.conv(w[f"{name}_proj.weight"] @ x.T, filters, None, x.new_zeros(len(filters), filters.shape[1] - 1), True)
        parts.append(y.T.unflatten(-1, (heads, -1))[None])
    gate = x @ w["g_proj.weight"].T if "g_proj.weight" in w else x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    g = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T).unflatten(-1, (HV, K))
    o, state = oracle.kda(*parts, g[None], (x @ w["b_proj.weight"].T)[None], A_log=w["A_log"].flatten()[:HV],
                          g_bias=w["dt_bias"].flatten(), lower_bound=lower_bound, sigmoid_beta=True)
    y, _ = oracle.rms_norm_gated(o[0], gate.unflatten(-1, (HV, V)), w["o_norm.weight"], activation="sigmoid", eps=1e-5)
    return y.flatten(1) @ w["o_proj.weight"].T, state[0]


# ------------------------------------------------------------------------------------------------------------- accuracy


@torch.no_grad()
@pytest.mark.parametrize("name", ["glm", "kimi"])
def test_equals_transformers_layer_and_the_oracle_from_the_files_that_transformers_wrote(backend, peers, saved, name):
    hidden = requests(FP32, backend.device)
    layer = loaded(saved[name], backend.device, PREFIX, lower_bound=BOUND[name], dtype=FP32)
    outputs, states = serve(layer, hidden)
    theirs, w = peers[name].layers[0].self_attn, layer_weights(saved[name])
    for x, got, state in zip(hidden, outputs, states):
        want, want_state = exact(w, x, BOUND[name], HEADS, HEADS, DIM, DIM)
        assert_accurate(got, want, FP32)
        assert_accurate(state, want_state, FP32, "state")
        assert_accurate(got, theirs(x[None].cpu())[0].to(got.device), FP32)


@torch.no_grad()
@pytest.mark.parametrize("name,dtype", [("glm", BF16), ("kimi", BF16), ("glm", FP16)], ids=dtype_id)
@bf16_on_gpu
def test_in_half_precision_it_is_as_close_to_fp64_as_transformers_layer_is(backend, peers, saved, name, dtype):
    """Every projection rounds, so that an operation's bound does not hold for the whole layer: the peer's error does."""
    w = {key: x.to(dtype) if "proj" in key else x for key, x in layer_weights(saved[name]).items()}
    theirs = copy.deepcopy(peers[name].layers[0].self_attn)
    for key, parameter in theirs.named_parameters():
        parameter.data = parameter.to(dtype if "proj" in key else FP32)
    layer = loaded(w, backend.device, lower_bound=BOUND[name], dtype=dtype)
    hidden = requests(dtype, backend.device)
    for x, got in zip(hidden, serve(layer, hidden)[0]):
        want = exact(w, x, BOUND[name], HEADS, HEADS, DIM, DIM)[0]
        peer_error = oracle.err(theirs(x[None].cpu())[0], want)
        assert oracle.err(got, want) <= 1.25 * peer_error, "further from the layer in fp64 than transformers' layer"


def made(H, HV, K, V, dtype=FP32, hidden=HIDDEN, A_log=None, full_rank_gate=False):
    """Seeded tensors under the checkpoint's names."""
    shapes = {
        **{f"{x}_proj.weight": (heads, hidden) for x, heads in (("q", H * K), ("k", H * K), ("v", HV * V), ("b", HV))},
        "f_a_proj.weight": (K, hidden), "f_b_proj.weight": (HV * K, K),
        **({"g_proj.weight": (HV * V, hidden)} if full_rank_gate else
           {"g_a_proj.weight": (V, hidden), "g_b_proj.weight": (HV * V, V)}),
        **{f"{x}_conv1d.weight": (dim, 1, 4) for x, dim in (("q", H * K), ("k", H * K), ("v", HV * V))},
        "A_log": A_log or (HV,), "dt_bias": (HV * K,), "o_norm.weight": (V,), "o_proj.weight": (hidden, HV * V),
    }
    scaled = {name: randn(*shape, seed=200 + n, scale=(shape[-1] if "proj" in name else 1) ** -0.5)
              for n, (name, shape) in enumerate(shapes.items())}
    return {name: x.to(dtype) if "proj" in name else x for name, x in scaled.items()}


GROUPED = dict(num_heads=4, num_v_heads=8, head_dim=32, head_v_dim=16)
GROUPED_WEIGHTS = dict(H=4, HV=8, K=32, V=16)


@torch.no_grad()
def test_grouped_value_heads_with_a_value_dim_of_their_own_equal_the_oracle(backend):
    w, hidden = made(**GROUPED_WEIGHTS), requests(FP32, backend.device)
    outputs, states = serve(loaded(w, backend.device, **GROUPED, dtype=FP32), hidden, padding=3)
    for x, got, state in zip(hidden, outputs, states):
        want, want_state = exact(w, x, -5.0, **GROUPED_WEIGHTS)
        assert_accurate(got, want, FP32)
        assert_accurate(state, want_state, FP32, "state")


@torch.no_grad()
def test_full_rank_gate_and_padded_A_log_of_kimi_k3_equal_the_oracle(backend):
    """K3 has a single `g_proj`, and an A_log of 128 entries for its 96 heads."""
    sizes = dict(H=3, HV=3, K=32, V=32)
    w, hidden = made(**sizes, A_log=(4,), full_rank_gate=True), requests(FP32, backend.device)
    w["A_log"][3] = float("nan")
    layer = loaded(w, backend.device, num_heads=3, full_rank_gate=True, dtype=FP32)
    for x, got in zip(hidden, serve(layer, hidden)[0]):
        assert_accurate(got, exact(w, x, -5.0, **sizes)[0], FP32)


@torch.no_grad()
def test_verify_rows_with_records_equal_decoded_tokens(backend):
    """Draft tokens of which none, then two are accepted, beside a request that comes in."""
    layer = loaded(made(4, 4, 32, 32), backend.device, dtype=FP32)
    prompt, other, *drafts = (randn(n, HIDDEN, seed=60 + n, device=backend.device) for n in (7, 9, 3, 2))
    pools = [StatePool(4, layer.geometry(record_tokens=3), device=backend.device) for _ in range(2)]
    for pool in pools:
        pool.pages.fill_(-1)
        layer(prompt, Batch.of([Prefill(pool.allocate(), 7)], pool=pool), pool.layers[0])
    a, b = 1, pools[0].allocate()
    steps = [([Verify(a, 3, 0)], drafts[0]), ([Prefill(b, 9), Verify(a, 2, 2)], torch.cat([other, drafts[1]]))]
    got = [layer(x, Batch.of(rows, pool=pools[0]), pools[0].layers[0], pools[0].records[0]) for rows, x in steps]
    want = [layer(x[None], Batch.of([Decode(a)], pool=pools[1]), pools[1].layers[0]) for x in (*drafts[0][:2], *drafts[1])]
    assert_accurate(torch.cat([got[0][:2], got[1][9:]]), torch.cat(want), FP32)


# ------------------------------------------------------------------------------------------------------ tensor parallel


@torch.no_grad()
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_sum_over_ranks_equals_the_whole_layer(backend, tmp_path, world_size):
    """Each rank has its part of the file, heads, parameters and states; grouped value heads stay with their group."""
    file = tmp_path / "layer.safetensors"
    safetensors.save_file(made(**GROUPED_WEIGHTS), file)
    how = dict(**GROUPED, dtype=FP32)
    hidden = requests(FP32, backend.device)
    ranks = [loaded(file, backend.device, **how, rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [serve(layer, hidden) for layer in ranks]
    outputs, states = serve(loaded(file, backend.device, **how), hidden)
    for n, (whole, state) in enumerate(zip(outputs, states)):
        assert_accurate(sum(outputs[n] for outputs, _ in parts), whole, FP32)
        assert_accurate(torch.cat([states[n] for _, states in parts]), state, FP32, "state")
    assert sum(layer.o_proj.weight.numel() for layer in ranks) == HIDDEN * 8 * 16
    assert {layer.geometry().HV for layer in ranks} == {8 // world_size}


# ------------------------------------------------------------------------------------------------------------- loading


def test_files_index_directory_and_mapping_give_the_same_layer(saved):
    """GLM's model came in several files, among which the layer's tensors are spread."""
    path = saved["glm"]
    files = set(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(files) > 2
    every = [path, str(path), path / "model.safetensors.index.json", weights(path)]
    layers = [loaded(checkpoint, "cpu", PREFIX) for checkpoint in every]
    layers += [loaded(layer_weights(path), "cpu"), loaded(path, "cpu", f"{PREFIX}.")]
    for layer in layers[1:]:
        for (name, want), got in zip(layers[0].named_parameters(), layer.parameters()):
            assert torch.equal(got, want), name
    file = saved["kimi"] / "model.safetensors"
    one = loaded(file, "cpu", PREFIX, lower_bound=None)
    assert torch.equal(one.A_log, weights(saved["kimi"])[f"{PREFIX}.A_log"].flatten())  # of shape [1, 1, H, 1]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), loaded(file.parent, "cpu", PREFIX).parameters()))


def test_other_shapes_of_the_same_tensors_give_the_same_layer():
    w = made(2, 2, 32, 32)
    other = {name: x.squeeze(1) if "conv1d" in name else x for name, x in w.items()}
    other |= {"A_log": w["A_log"].view(1, 1, 2, 1), "dt_bias": w["dt_bias"].view(2, 32)}
    for rank in range(2):
        layers = [loaded(tensors, "cpu", num_heads=2, rank=rank, world_size=2) for tensors in (w, other)]
        assert all(torch.equal(a, b) for a, b in zip(*(layer.parameters() for layer in layers)))


@pytest.mark.parametrize("stored", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_projections_have_the_modules_dtype_and_the_rest_is_fp32_whatever_the_checkpoint_has(dtype, stored):
    w = made(2, 2, 32, 32)
    w = {name: x.to(stored) if "proj" in name or stored == BF16 else x for name, x in w.items()}
    layer = loaded(w, "cpu", num_heads=2, dtype=dtype)
    for name in ("f_b_proj.weight", "g_b_proj.weight", "o_proj.weight"):
        got = layer.get_parameter(name)
        assert got.dtype == dtype and torch.equal(got, w[name].to(dtype)), name
    rows = torch.cat([w[f"{x}_proj.weight"] for x in ("q", "k", "v", "b", "f_a", "g_a")])
    assert layer.in_proj.weight.dtype == dtype and torch.equal(layer.in_proj.weight, rows.to(dtype))
    filters = torch.cat([w[f"{x}_conv1d.weight"] for x in "qkv"])[:, 0]
    for got, want in ((layer.conv_weight, filters), (layer.A_log, w["A_log"]), (layer.dt_bias, w["dt_bias"]),
                      (layer.o_norm.weight, w["o_norm.weight"])):
        assert got.dtype == FP32 and torch.equal(got, want.float())


def change(**changes):
    """A checkpoint with tensors replaced (or removed: None); `__` in a name is a dot."""
    def changed():
        w = made(2, 2, 32, 32) | {name.replace("__", "."): x for name, x in changes.items()}
        return {name: x for name, x in w.items() if x is not None}

    return changed


BAD = {
    "missing": (change(k_conv1d__weight=None), ValueError, r"got no `?layer\.k_conv1d\.weight; accepted: all"),
    "several missing": (change(A_log=None, dt_bias=None), ValueError, r"no layer\.A_log, layer\.dt_bias;"),
    "unexpected": (change(q_proj__bias=torch.zeros(64)), ValueError,
                   r"got layer\.q_proj\.bias; accepted: under 'layer\.' only"),
    "full-rank gate": (change(g_proj__weight=torch.zeros(64, 48)), ValueError, r"got layer\.g_proj\.weight;"),
    "transposed": (change(o_proj__weight=torch.zeros(64, 48)), ValueError,
                   r"`layer\.o_proj\.weight`: got shape \[64, 48\]; accepted: \[48, 64\]"),
    "heads": (change(A_log=torch.zeros(3)), ValueError,
              r"`layer\.A_log`: got shape \[3\]; accepted: \[2\] or \[1, 1, 2, 1\]"),
    "width": (change(v_conv1d__weight=torch.zeros(64, 1, 3)), ValueError, r"`layer\.v_conv1d\.weight`: got shape \[64, 1, 3\]"),
    "quantised": (change(k_proj__weight=torch.zeros(64, 48).to(torch.float8_e4m3fn)), TypeError,
                  r"`layer\.k_proj\.weight`: got dtype float8_e4m3fn; accepted: dtype bfloat16"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("file", [False, True], ids=["mapping", "file"])
def test_a_bad_checkpoint_is_an_error_that_names_the_tensor_and_nothing_is_loaded(tmp_path, case, file):
    checkpoint, error, message = BAD[case]
    checkpoint = {f"layer.{name}": x for name, x in checkpoint().items()}
    if file:
        safetensors.save_file(checkpoint, tmp_path / "bad.safetensors")
        checkpoint = tmp_path / "bad.safetensors"
    layer = loaded(made(2, 2, 32, 32), "cpu", num_heads=2)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    with pytest.raises(error, match=message):
        layer.load_checkpoint(checkpoint, "layer")
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())


def test_bad_files_are_errors_that_name_the_file(saved, tmp_path):
    layer = KDAAttention(**SIZES)
    with pytest.raises(FileNotFoundError):
        layer.load_checkpoint(tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        layer.load_checkpoint(tmp_path)
    whole = (saved["kimi"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors is no safetensors file"):
        layer.load_checkpoint(tmp_path)
    for text in ("{", "[]", "{}", '{"weight_map": {"layer.A_log": 3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match="index.json is no index of safetensors files"):
            layer.load_checkpoint(tmp_path, "layer")


def test_of_a_model_in_several_files_those_of_the_layer_are_needed_and_no_others(saved, tmp_path):
    several = tmp_path / "several"
    shutil.copytree(saved["glm"], several)
    index = json.loads((several / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith(PREFIX)}
    others = set(index.values()) - needed
    assert len(needed) > 1 and others
    for file in others:
        (several / file).unlink()
    layer = loaded(several, "cpu", PREFIX)
    file = sorted(needed)[-1]
    (several / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        layer.load_checkpoint(several, PREFIX)


def test_a_wrong_prefix_is_an_error_that_names_what_is_missing(saved):
    with pytest.raises(ValueError, match=r"no layers\.3\.self_attn\.q_proj\.weight, "):
        loaded(saved["glm"], "cpu", "layers.3.self_attn")


def test_parameters_on_meta_are_refused_until_they_have_memory(saved):
    layer = KDAAttention(**SIZES, device="meta")
    with pytest.raises(ValueError, match="got parameters on meta; accepted: parameters in memory"):
        layer.load_checkpoint(saved["glm"], PREFIX)
    layer.to_empty(device="cpu").load_checkpoint(saved["glm"], PREFIX)
    want = loaded(saved["glm"], "cpu", PREFIX)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), want.parameters()))


def test_the_example_in_the_documentation_runs():
    with kda.use_backend("reference"):
        result = doctest.testmod(attention)
    assert result.attempted > 8 and result.failed == 0


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("how,error,name", [
    (dict(num_heads=0), ValueError, "num_heads"), (dict(num_v_heads=6), ValueError, "num_v_heads"),
    (dict(world_size=3), ValueError, "world_size"), (dict(rank=2, world_size=2), ValueError, "rank"),
    (dict(head_dim=8), ValueError, "head_dim"), (dict(conv_size=9), ValueError, "conv_size"),
    (dict(lower_bound=0.0), ValueError, "lower_bound"), (dict(dtype=torch.float64), TypeError, "dtype"),
])
def test_what_the_operations_do_not_take_is_refused_when_the_module_is_made(how, error, name):
    with pytest.raises(error, match=f"`{name}`: got"):
        KDAAttention(**{**SIZES, **how})


def test_a_step_that_does_not_fit_is_refused_and_no_state_is_written():
    layer = loaded(made(4, 4, 32, 32), "cpu", dtype=FP32)
    pool = StatePool(4, layer.geometry())
    slot = pool.allocate(zero=True)
    batch = Batch.of([Decode(slot)], pool=pool)
    other, before = StatePool(4, layer.geometry(HV=2, dim=3 * 2 * 32)), pool.pages.clone()
    for x, states, error, name in (
        (torch.zeros(1, 40), pool.layers[0], ValueError, "hidden_states"),
        (torch.zeros(1, HIDDEN, dtype=BF16), pool.layers[0], TypeError, "hidden_states"),
        (torch.zeros(0, HIDDEN), pool.layers[0], ValueError, "qkv"),
        (torch.zeros(1, HIDDEN), other.layers[0], ValueError, "conv_state|ssm_state"),
    ):
        with pytest.raises(error, match=f"`({name})`: got"):
            layer(x, batch, states)
    assert torch.equal(pool.pages, before)
