# SPDX-License-Identifier: Apache-2.0
"""Plugin for vLLM (entry-point group `vllm.general_plugins`): its KDA layers call this package's operations.

vLLM loads it in each of its processes. On CPU it always serves, on CUDA and ROCm under `KDA_VLLM=1`; `VLLM_PLUGINS`,
vLLM's own variable, can leave it out. Only the modules of KDA layers change, and only once something imports them: other
models, and other layers that share a function with KDA, keep what they have.
"""
from __future__ import annotations

import functools
import importlib.abc
import logging
import os
import re
import sys
from types import ModuleType

import kda
from kda.drop_in import vllm_ops

# Below vLLM's own logger, so that its format and VLLM_LOGGING_LEVEL hold.
logger = logging.getLogger("vllm.plugins.kda")

VERSIONS = ((0, 32), (0, 33))

_SHARED = ("FusedRMSNormGated", "causal_conv1d_fn", "causal_conv1d_update", "gather_initial_states")
_KIMI = ("chunk_kda_with_fused_gate", "fused_recurrent_kda", "fused_recurrent_kda_packed_decode")

# Of each module the names that it imports (or, in the last two, hands out) and what they become.
REPLACED = {
    "vllm.models.glm5next.common.kda": {
        name: name for name in ("chunk_kda_with_fused_gate", "fused_recurrent_kda", *_SHARED, "scatter_states")
    },
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn": {name: name for name in _SHARED},
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda": {name: f"{name}_kimi" for name in _KIMI},
    "vllm.models.kimi_k3.amd.ops.third_party.kda": {name: f"{name}_kimi" for name in _KIMI},
}


def register() -> None:
    """Replaces the operations in modules that are imported already, and in the others once they are.

    vLLM may call it more than once.
    """
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        if os.environ.get("KDA_VLLM") != "1" or not (current_platform.is_cuda() or current_platform.is_rocm()):
            return
    version = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if version is None or tuple(map(int, version.groups())) not in VERSIONS:
        known = " and ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        logger.warning("triton-kda %s leaves vLLM %s as it is: it knows %s", kda.__version__, vllm.__version__, known)
        return
    for name in REPLACED:
        if name in sys.modules:
            _replace(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _replace(module: ModuleType) -> None:
    names = REPLACED[module.__name__]
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        logger.warning(
            "triton-kda %s leaves %s as it is: it has no %s", kda.__version__, module.__name__, ", ".join(missing)
        )
        return
    ours = {name: getattr(vllm_ops, to) for name, to in names.items()}
    if all(getattr(module, name) is value for name, value in ours.items()):
        return
    vars(module).update(ours)
    logger.info("triton-kda %s replaces %s of %s", kda.__version__, ", ".join(names), module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: has `_replace` run after the modules in REPLACED have."""

    def find_spec(self, name, path, target=None):
        if name not in REPLACED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)
                return spec
        return None


def _execute(exec_module, module: ModuleType) -> None:
    exec_module(module)
    _replace(module)
