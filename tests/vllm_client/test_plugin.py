# SPDX-License-Identifier: Apache-2.0
"""What the installed package does to a vLLM process, and that it takes all that vLLM passes."""

import inspect
from pathlib import Path

import pytest
from client import layer_module
from helpers import subprocess_python

import kda
from kda.drop_in import vllm_ops
from kda.drop_in.vllm import REPLACED

GLM, KIMI = "vllm.models.glm5next.nvidia.ops.third_party.kda", "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
OPS = "vllm.model_executor.layers.mamba.ops"


def test_it_says_what_it_replaced():
    """In a fresh process, with the plugin loaded twice: a line a module, each when vLLM imports the module."""
    done = subprocess_python(f"""
import logging, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from client import layer_module
logging.basicConfig(format="%(message)s", stream=sys.stdout, level="WARNING")
logging.getLogger("vllm.plugins.kda").setLevel("INFO")
from vllm.plugins import load_general_plugins
import vllm.plugins
load_general_plugins()
vllm.plugins.plugins_loaded = False
load_general_plugins()
print("plugins are loaded")
layer_module("vllm.models.glm5next.common.kda")
layer_module("vllm.models.kimi_k3.nvidia.ops.third_party.kda")
vllm.plugins.plugins_loaded = False
load_general_plugins()
""")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[said.index("plugins are loaded") + 1:] == [
        f"triton-kda {kda.__version__} replaces chunk_kda_with_fused_gate, fused_recurrent_kda, FusedRMSNormGated, "
        "causal_conv1d_fn, causal_conv1d_update, gather_initial_states, scatter_states of "
        "vllm.models.glm5next.common.kda",
        f"triton-kda {kda.__version__} replaces FusedRMSNormGated, causal_conv1d_fn, causal_conv1d_update, "
        "gather_initial_states of vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
        f"triton-kda {kda.__version__} replaces chunk_kda_with_fused_gate, fused_recurrent_kda, "
        "fused_recurrent_kda_packed_decode of vllm.models.kimi_k3.nvidia.ops.third_party.kda",
    ]


@pytest.mark.parametrize("module", [name for name in REPLACED if ".amd." not in name])
def test_the_layers_call_ours(module):
    found = layer_module(module)
    for name, ours in REPLACED[module].items():
        assert getattr(found, name) is getattr(vllm_ops, ours)


@pytest.mark.parametrize("theirs,name,ours", [
    (f"{GLM}.kernels", "chunk_kda_with_fused_gate", "chunk_kda_with_fused_gate"),
    (f"{GLM}.kernels", "fused_recurrent_kda", "fused_recurrent_kda"),
    (f"{OPS}.gather_initial_states", "gather_initial_states", "gather_initial_states"),
    (f"{OPS}.scatter_states", "scatter_states", "scatter_states"),
    (f"{KIMI}.chunk", "chunk_kda_with_fused_gate", "chunk_kda_with_fused_gate_kimi"),
    (f"{KIMI}.fused_recurrent", "fused_recurrent_kda", "fused_recurrent_kda_kimi"),
    (f"{KIMI}.fused_recurrent", "fused_recurrent_kda_packed_decode", "fused_recurrent_kda_packed_decode_kimi"),
])  # fmt: skip
def test_every_argument_of_vllm_is_taken_in_its_order(theirs, name, ours):
    taken = inspect.signature(getattr(vllm_ops, ours)).parameters
    wanted = inspect.signature(getattr(layer_module(theirs), name)).parameters
    assert [argument for argument in taken if argument in wanted] == list(wanted)
    for argument, parameter in wanted.items():
        ours_default = taken[argument].default
        assert (ours_default is inspect.Parameter.empty) <= (parameter.default is inspect.Parameter.empty)
        if parameter.default is not inspect.Parameter.empty:
            assert ours_default == parameter.default, argument

