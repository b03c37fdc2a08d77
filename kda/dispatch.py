# SPDX-License-Identifier: Apache-2.0
"""Which backend serves a device, and why not a better one.

`KDA_BACKEND=auto|triton|reference` asks for one for the whole process, `use_backend()` for a block of code:

    >>> import kda
    >>> with kda.use_backend("reference"):
    ...     kda.backend_for("cpu")
    'reference'
"""
from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Callable
from types import ModuleType

import torch

REQUESTS = ("auto", "triton", "reference")
OLDEST_TRITON = (3, 6)

_override: contextvars.ContextVar[str | None] = contextvars.ContextVar("kda_backend", default=None)


def backend_for(device: torch.device | str) -> str:
    """The backend that serves tensors on `device`.

    Returns:
        `"triton-cuda"`, `"triton-rocm"`, `"triton-cpu"`, `"triton-interpret"` or `"reference"`.

    Raises:
        RuntimeError: Triton was asked for and cannot serve the device.
        ValueError: `KDA_BACKEND` holds an unknown word.
    """
    return _resolve(torch.device(device).type, *_asked())[0]


def why(device: torch.device | str) -> str:
    """In words: which backend serves `device`, and why not a better one."""
    kind = torch.device(device).type
    backend, reason = _resolve(kind, *_asked())
    return f"{kind} tensors go to {backend}: {reason}"


@contextlib.contextmanager
def use_backend(name: str):
    """Within the block, ask for `"auto"`, `"triton"` or `"reference"`, whatever `KDA_BACKEND` says.

    Holds for the current thread or task only. Raises ValueError for another name.
    """
    token = _override.set(_known(name, "use_backend()"))
    try:
        yield
    finally:
        _override.reset(token)


def call(stage: str, operation: str, device: torch.device, *args, **hints):
    """Runs `operation` of `stage` ("conv", "chunk", ..) as the backend of `device` implements it.

    `hints` are for Triton's launchers: they may save time and change no result.
    """
    backend = _resolve(device.type, *_asked())[0]
    function = getattr(_module(stage, backend == "reference"), operation)
    if backend == "reference":
        return function(*args)
    if backend == "triton-cpu":
        with _on_cpu()():
            return function(*args, **hints)
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton launches on the current one
        with torch.cuda.device(device):
            return function(*args, **hints)
    return function(*args, **hints)


@functools.cache
def _on_cpu() -> Callable:
    """`on_cpu` of the CPU backend: within it this thread's launches go to the CPU, on a GPU host too."""
    return importlib.import_module("kda.triton_cpu.driver").on_cpu


@functools.cache
def _module(stage: str, reference: bool) -> ModuleType:
    return importlib.import_module(f"kda.{'reference' if reference else 'triton'}.{stage}")


_environment = getattr(os.environ, "_data", None)


def variable(name: str) -> str | None:
    """An environment variable. Every operation asks for three, and `os.environ` takes most of a microsecond for each."""
    if type(_environment) is not dict or os.name == "nt":
        return os.environ.get(name)
    value = _environment.get(_encoded(name))
    return None if value is None else os.fsdecode(value)


@functools.cache
def _encoded(name: str) -> bytes:
    return os.fsencode(name)


def _known(name: str, source: str) -> str:
    if name not in REQUESTS:
        raise ValueError(f"{source}: got {name!r}; accepted: {', '.join(REQUESTS)}")
    return name


def _asked() -> tuple[str | None, str | None, str | None]:
    return _override.get(), variable("KDA_BACKEND"), variable("TRITON_INTERPRET")


@functools.cache
def _resolve(kind: str, override: str | None, wanted: str | None, interpret: str | None) -> tuple[str, str]:
    """(backend, reason) for a device type and what was asked for; cached, as every call of an operation asks."""
    request = override or _known(wanted or "auto", "KDA_BACKEND")
    interpreting = interpret is not None and interpret.lower() in ("1", "true", "on", "yes", "y")
    if request == "reference":
        return "reference", "it was asked for by KDA_BACKEND or use_backend()"
    problem = _triton_problem()
    if problem is None and interpreting:
        return "triton-interpret", "TRITON_INTERPRET is set: the Triton kernels run in numpy, for tests, slowly"
    if problem is None and kind == "cuda":
        if torch.version.hip:
            return "triton-rocm", "Triton compiles the kernels for this AMD GPU"
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
        if capability >= (8, 0):
            return "triton-cuda", "Triton compiles the kernels for this NVIDIA GPU"
        problem = f"the GPU has compute capability {capability[0]}.{capability[1]} and the kernels need 8.0 or newer"
    if problem is None and kind == "cpu":
        problem = _cpu_problem()
        if problem is None:
            return "triton-cpu", "Triton's backend named cpu compiles the kernels for this processor"
    if problem is None:
        problem = f"there are no Triton kernels for devices of type {kind!r}"
    if request == "triton":
        raise RuntimeError(f"the Triton kernels were asked for and cannot serve {kind} tensors: {problem}")
    return "reference", problem


@functools.cache
def _triton_problem() -> str | None:
    """Why Triton cannot be used at all, or None. Does not import it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    for distribution in importlib.metadata.packages_distributions().get("triton", []):
        version = importlib.metadata.version(distribution)
        found = re.match(r"(\d+)\.(\d+)", version)
        if found and tuple(map(int, found.groups())) < OLDEST_TRITON:
            return f"Triton {version} is installed and the kernels need {'.'.join(map(str, OLDEST_TRITON))} or newer"
    return None


@functools.cache
def _cpu_problem() -> str | None:
    """Why Triton's backend named cpu cannot be used, or None. Does not import Triton."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"Triton's CPU backend has been tried on x86-64 only, not on {platform.machine()}"
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed, which Triton's CPU backend compiles with (pip install llvmlite)"
    return None
