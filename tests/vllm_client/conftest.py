# SPDX-License-Identifier: Apache-2.0
"""Tests inside a real vLLM, in an environment of its own: `make test-vllm`. Elsewhere there is nothing to collect."""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("vllm") is None else []
