# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: the backend a test runs on, and fresh memory that shows when nobody wrote it."""

import os
import signal

import torch

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


@pytest.fixture(autouse=True)
def poisoned_allocations():
    """Fresh memory holds NaN (or the largest integer), so that output which no kernel wrote shows."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite on a GPU is mostly compilation: with pytest-xdist installed, workers compile side by side.

    `-n 0` keeps it in one process, as a run without pytest-xdist is.
    """
    whole = all(os.path.isdir(path) for path in config.args)
    if helpers.GPU and whole and not hasattr(config, "workerinput"):
        if getattr(config.option, "numprocesses", 0) is None and not config.option.usepdb:
            config.option.numprocesses = max(1, min(8, (os.cpu_count() or 1) // 2))


def pytest_collection_modifyitems(config, items):
    """On a GPU every dtype, geometry and switch is another compilation: `gpu_subset` names the cases worth one."""
    if helpers.GPU:
        dropped = [item for item in items if not helpers.wanted_on_gpu(item)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background jobs; some tests interrupt themselves
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "gpu_subset(predicate): parameters with which the test runs on a GPU")
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation.*")
