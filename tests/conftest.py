# SPDX-License-Identifier: Apache-2.0
"""Without a GPU the Triton kernels run in the interpreter: it has to be chosen before anything imports triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

import helpers  # noqa: E402
import pytest  # noqa: E402

import kda  # noqa: E402


@pytest.fixture(params=helpers.NAMES)
def backend(request):
    """One of this machine's backends, forced for the test: a Backend(name, device)."""
    chosen = helpers.Backend(request.param, helpers.DEVICE[request.param])
    with kda.use_backend(chosen.forced):
        assert kda.backend_for(chosen.device) == chosen.name
        yield chosen


@pytest.fixture(params=[helpers.KERNELS])
def kernels(request):
    """The Triton backend of this machine alone, for what only kernels can get wrong."""
    chosen = helpers.Backend(request.param, helpers.DEVICE[request.param])
    with kda.use_backend(chosen.forced):
        yield chosen


@pytest.fixture(autouse=True)
def poisoned_allocations():
    """Fresh memory holds NaN (or the largest integer), so that output which no kernel wrote shows."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation.*")
