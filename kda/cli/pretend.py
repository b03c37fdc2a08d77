# SPDX-License-Identifier: Apache-2.0
"""A device that is not there: public operations called on it launch what they would launch, and nothing runs.

Tensors have shapes and dtypes and no data: reading a value raises. One target a process, as launchers remember what
they have found out about a device.
"""
from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from kda.cli.targets import Target

_addresses = itertools.count(1 << 45, 1 << 45)
_device = torch.device("cuda", 0)


class Pretended(torch.Tensor):
    """A meta tensor that says it is on the device."""

    @property
    def device(self):
        return _device

    @property
    def is_cuda(self):
        return _device.type == "cuda"

    def data_ptr(self):
        """Far from any other's: no two of them share memory."""
        return next(_addresses)


class _OnDevice(TorchFunctionMode):
    """Factory calls for the device give pretended tensors, and so does every operation on one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Pretended, lambda x: x.as_subclass(torch.Tensor), (args, kwargs or {}))
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == _device.type:
            kwargs["device"] = "meta"
        return tree_map_only(torch.Tensor, lambda x: x.as_subclass(Pretended) if x.is_meta else x,
                             func(*args, **kwargs))  # fmt: skip


class _Driver:
    """What the JIT asks of a GPU's driver up to the launch."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return _device


def become(target: Target) -> None:
    """From here on this process has the target's device, and no other; one without a table."""
    global _device
    if target.backend == "cpu":
        _device = torch.device("cpu")
        from kda.triton_cpu import runtime

        runtime.best_isa = lambda: ""  # code for any processor of the path, not for this machine's
        runtime.selected_isa = lambda: target.arch
    else:
        # Before anything asks which vendor's torch this is.
        torch.version.hip = (torch.version.hip or "7.0") if target.backend == "hip" else None
        import triton
        from triton.backends.compiler import GPUTarget

        major, minor = divmod(target.arch, 10) if target.backend == "cuda" else (9, 4)
        about = SimpleNamespace(
            name=target.products.split(",")[0], major=major, minor=minor, warp_size=target.warp_size,
            multi_processor_count=target.multiprocessors, shared_memory_per_block_optin=target.cores.shared,
            gcnArchName=str(target.arch),
        )  # fmt: skip
        torch.cuda.current_device = lambda: 0
        torch.cuda.device_count = lambda: 1
        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_properties = lambda device=None: about
        torch.cuda.get_device_name = lambda device=None: about.name
        torch.cuda.get_device_capability = lambda device=None: (major, minor)
        triton.runtime.driver.set_active(_Driver(GPUTarget(target.backend, target.arch, target.warp_size)))

    from kda import library

    library._is_subclass = lambda x: False  # or an operation on one would count as traced
    take(None)


def tables(target: Target) -> list[ModuleType]:
    """The measured configurations (modules of kda.triton.configs) of devices that the target stands for."""
    from kda.triton.configs import table

    return [module for module in table.modules() if any(map(target.is_named, module.NAMES))]


def take(table_of: ModuleType | None) -> None:
    """From here on the device is one that has this table, or none."""
    from kda import known
    from kda.triton.configs import table

    name = table_of.NAMES[0] if table_of else ""
    table.device_name = lambda device: name
    table.of.cache_clear()
    known.forget()  # it remembers what launchers have decided


@contextlib.contextmanager
def launches_to(see: Callable) -> Iterator[Callable]:
    """Within the block, factory calls for the device are pretended, and every launch is `see(kernel, compile, grid)`.

    `kernel` is the JITFunction; `compile()` compiles it as this launch would have it, and returns what Triton returns.
    """
    from triton.runtime.jit import JITFunction, MockTensor

    import kda

    jit_run = JITFunction.run

    def mock(x):
        return MockTensor(x.dtype) if isinstance(x, torch.Tensor) else x

    def run(self, *args, grid, warmup, **kwargs):
        def compile():
            given = {name: mock(x) for name, x in kwargs.items()}
            return jit_run(self, *map(mock, args), grid=grid, warmup=True, **given)

        see(self, compile, grid)

    JITFunction.run = run
    try:
        with _OnDevice(), kda.use_backend("triton"):
            yield
    finally:
        JITFunction.run = jit_run


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor on the device, within `launches_to`."""
    return torch.empty(*shape, dtype=dtype, device=_device.type)
