# SPDX-License-Identifier: Apache-2.0
"""Triton's second door to the backend: the device, loading a kernel, and launching it."""
from __future__ import annotations

import contextlib
import functools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable

if "triton" not in sys.modules:
    raise ImportError(f"import triton before {__name__}: Triton imports it while it looks for backends")

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from kda.triton_cpu import objects, other_backend, runtime

_pending = threading.local()  # the launcher that was made just before its kernel is loaded


# ---- arguments ------------------------------------------------------------------------------------------------------

_FORMATS = {"fp32": "f4x", "f32": "f4x", "fp64": "d", "f64": "d", "fp16": "e6x", "f16": "e6x", "u64": "Q"}


def _flatten(types, path: str = "a") -> list[tuple[str, str]]:
    """(expression, type) of each kernel argument that is not a constexpr."""
    found = []
    for index, type in enumerate(types):
        where = f"{path}{index}" if path == "a" else f"{path}[{index}]"
        if isinstance(type, (tuple, list)):
            found += _flatten(type, where)
        elif type != "constexpr":
            found.append((where, type))
    return found


def _descriptor_items(where: str, type: str) -> list[str]:
    """What follows the pointer of a tensor descriptor made on the host: the kernel has shape and strides twice."""
    from triton.backends import driver

    rank = type[type.index("[") + 1:type.index("]")].count(",") + 1
    shape = [f"{where}.shape[{axis}]" for axis in range(rank)]
    strides = [f"{where}.strides[{axis}]" for axis in range(rank)]
    flags = [f'{where}.padding == "nan"']
    if hasattr(driver, "decompose_descriptor"):  # newer than 3.6
        flags.append(f"{where}.round_f32_to_tf32")
    return [*shape, *strides, *flags, *shape, *strides]


def _pack_bf16(value: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if value != value:
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _wrap(value: int) -> int:
    """An integer as the signed 64-bit one of the same low bits."""
    return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)


def _pointer(value, name: str) -> int:
    """The address behind a pointer argument that is no plain CPU tensor."""
    if isinstance(value, int):
        return value
    if value is None:
        return 0
    if not hasattr(value, "data_ptr"):
        raise TypeError(f"argument {name}: a tensor is expected, got {type(value).__name__}")
    device = getattr(value, "device", None)
    kind = getattr(device, "type", str(device))
    if device is not None and kind != "cpu":
        raise ValueError(f"argument {name}: the tensor is on {device}, and the kernel runs on the CPU")
    return value.data_ptr()


def _float(value: float) -> float:
    """A float that fits fp32, infinity where it is too large."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _extent(value) -> tuple[int, int]:
    """Lowest and end address that a tensor's view reaches."""
    base = getattr(value, "base", value)
    if not hasattr(base, "stride") or isinstance(value, int):
        return 0, (1 << 63) - 1  # nothing is known
    start = value.data_ptr()
    shape, strides = tuple(base.shape), tuple(base.stride())
    if 0 in shape:
        return start, start
    reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    return start, start + (reach + 1) * base.element_size()


def make_packer(signature: list, names: list[str], bounds: bool) -> Callable[..., bytes]:
    """A function from a launch's arguments to the kernel's 8-byte slots.

    It is written out for the signature: a launch then costs one call a tensor and one `struct.pack`.
    """
    slots: list[tuple[str, str, str, str]] = []  # expression, quick and careful value, format
    pointers: list[tuple[int, str]] = []
    for where, type in _flatten(signature):
        name = names[len(slots)] if len(slots) < len(names) else where
        if type.startswith("tensordesc"):
            base = f"{where}.base"
            pointers.append((len(slots), base))
            slots.append((base, f"{base}.data_ptr()", f"pointer({base}, {name!r})", "Q"))
            slots += [(item, item, item, "q") for item in _descriptor_items(where, type)]
        elif type.startswith("*"):
            pointers.append((len(slots), where))
            slots.append((where, f"{where}.data_ptr()", f"pointer({where}, {name!r})", "Q"))
        elif type == "bf16":
            slots.append((where, f"bf16({where})", f"bf16({where})", "H6x"))
        elif type in _FORMATS:
            careful = f"short({where})" if type in ("fp32", "f32") else where
            slots.append((where, where, careful, _FORMATS[type]))
        else:  # integers and bools, sign-extended
            slots.append((where, where, f"wrap({where})", "q"))
    formats = "".join(slot[3] for slot in slots)
    quick = ", ".join(slot[1] for slot in slots)
    careful = ", ".join(slot[2].replace("'", '"') for slot in slots)
    arguments = ", ".join(f"a{index}" for index in range(len(signature)))
    on_cpu = " and ".join(f"{where}.is_cpu" for _, where in pointers) or "True"
    ranges = ""
    if bounds:
        formats += "QQ" * len(slots)
        at = dict(pointers)
        ranges = "".join(f", *extent({at[index]})" if index in at else ", 0, 0" for index in range(len(slots)))
    source = f"""
def pack_arguments({arguments}):
    try:
        if {on_cpu}:
            return pack({quick}{ranges})
    except (AttributeError, TypeError, ArithmeticError, error):
        pass
    return pack({careful}{ranges})
"""
    scope = {
        "pack": struct.Struct("<" + formats).pack, "pointer": _pointer, "wrap": _wrap, "bf16": _pack_bf16,
        "short": _float, "extent": _extent, "error": struct.error,
    }  # fmt: skip
    exec(source, scope)  # noqa: S102 - written above from types and positions
    return scope["pack_arguments"]


class CPULauncher:
    """Launches one compiled kernel: called by Triton's JIT with the grid and the bound arguments."""

    def __init__(self, src, metadata):
        self.src = src
        self.metadata = metadata
        signature = list(src.signature.values())
        names = getattr(metadata, "parameter_names", [])
        self.bounds = bool(getattr(metadata, "bounds", False))
        self.pack = make_packer(signature, names, self.bounds)
        self.owner = None
        _pending.launcher = self

    def load(self, name: str, data: bytes) -> runtime.Kernel:
        """Loads the kernel's object; one that is damaged or was made for another kernel is compiled anew."""
        try:
            code, isa = objects.unseal(data, self.metadata.hash)
        except objects.DamagedObject:
            code, isa = objects.unseal(self.compile_again(), self.metadata.hash)
        return runtime.Kernel(name, code, isa)

    def compile_again(self) -> bytes:
        from triton import knobs
        from triton.compiler.compiler import compile

        source = self.src if not hasattr(self.src, "path") else str(self.src.path)
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            return compile(source, target=self.metadata.target, options=self.metadata._asdict()).kernel

    def __call__(self, gx, gy, gz, stream, function, packed, launch_metadata, enter_hook, exit_hook, *args):
        if self.owner is not None:
            self.settle()
        if enter_hook is not None:
            enter_hook(launch_metadata)
        function.launch(gx, gy, gz, self.pack(*args), _thread_count())
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def repeat(self, function: runtime.Kernel, programs: int, tensors: int, args: tuple) -> Callable | None:
        """A launch of `programs` from the tensors' addresses alone, all else as in `args`; None if there is no such.

        `args` are the kernel's first arguments, `tensors` tensors and any Nones before the numbers; constants follow.
        """
        types = list(self.src.signature.values())
        if self.bounds or any(type != "constexpr" for type in types[len(args):]):
            return None
        rest = self.pack(*args, *[None] * (len(types) - len(args)))[8 * tensors:]
        addresses = struct.Struct(f"<{tensors}Q").pack

        def launch(places: list[int]) -> None:
            function.launch(programs, 1, 1, addresses(*places) + rest, _thread_count())

        return launch

    def settle(self) -> None:
        # Triton unloads the module of a kernel that dies through the driver that is active then, which may be a GPU's.
        # A kernel whose module belongs to no process is left alone, and its code goes with its last reference.
        if hasattr(self.owner, "_module_pid"):
            self.owner._module_pid = None
        self.owner = None


def _thread_count() -> int:
    global _thread_count
    import torch

    _thread_count = torch.get_num_threads
    return _thread_count()


# ---- the driver -----------------------------------------------------------------------------------------------------


class CPUUtils:
    """The functions of a driver that Triton calls by name."""

    @staticmethod
    def load_binary(name: str, data: bytes, shared: int, device):
        """(module, function, registers, spills, threads at most) of an object."""
        launcher = getattr(_pending, "launcher", None)
        _pending.launcher = None
        if launcher is None:
            code, isa = objects.unseal(data, None)
            kernel = runtime.Kernel(name, code, isa)
        else:
            kernel = launcher.load(name, data)
            launcher.owner = sys._getframe(1).f_locals.get("self")
        return kernel, kernel, 1, 0, 1 << 30

    @staticmethod
    def unload_module(module) -> None:
        if not isinstance(module, runtime.Kernel):  # a GPU's, whose kernel died while this driver was active
            from triton.runtime.driver import driver

            if not isinstance(driver.default, CPUDriver):
                driver.default.utils.unload_module(module)

    @staticmethod
    def get_device_properties(device) -> dict:
        """A multiprocessor is a thread. No kernel lacks registers (each has one of them) or scratch memory."""
        return {
            "max_shared_mem": 1 << 40, "multiprocessor_count": _thread_count(), "max_num_regs": 1 << 16, "warpSize": 1,
            "sm_clock_rate": 0, "mem_clock_rate": 0, "mem_bus_width": 0,
        }  # fmt: skip

    @staticmethod
    def set_printf_fifo_size(size: int) -> None:
        pass


class _Event:
    def __init__(self, enable_timing: bool = False, **_):
        self.time = 0.0

    def record(self, stream=None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end.time - self.time) * 1e3

    def synchronize(self) -> None:
        pass


class _Interface:
    """What `triton.testing` asks of a device: events and synchronization; launches here are synchronous."""

    Event = _Event

    @staticmethod
    def synchronize(device=None) -> None:
        pass

    @staticmethod
    def current_device() -> str:
        return "cpu"


class CPUDriver(DriverBase):
    """The CPU as a device of Triton."""

    def __init__(self):
        super().__init__()
        self.utils = CPUUtils()
        self.launcher_cls = CPULauncher

    @classmethod
    def is_active(cls) -> bool:
        """True where no other backend's device is visible, or TRITON_DEFAULT_BACKEND=cpu (Triton 3.7 and newer)."""
        from triton.backends import backends

        if os.environ.get("TRITON_DEFAULT_BACKEND") == "cpu" and _triton_selects():
            return True
        return not any(other.driver.is_active() for other in backends.values() if other.driver is not cls)

    def get_current_device(self) -> str:
        return "cpu"

    def set_current_device(self, device) -> None:
        pass

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", runtime.selected_isa(), 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_device_interface(self):
        return _Interface

    def get_benchmarker(self):
        """Shorter than a GPU's: launches are synchronous, and many configurations are the same code here."""
        from triton.testing import do_bench

        return functools.partial(do_bench, warmup=5, rep=30)

    def get_empty_cache_for_benchmark(self):
        import torch

        return torch.empty(64 << 20, dtype=torch.int8)

    def clear_cache(self, cache) -> None:
        cache.zero_()

    def map_python_to_cpp_type(self, ty: str) -> str:
        if ty.startswith("*"):
            return "void*"
        return {
            "i1": "int8_t", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t", "u1": "uint8_t",
            "u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "fp16": "_Float16",
            "bf16": "uint16_t", "fp32": "float", "f32": "float", "fp64": "double",
        }[ty]  # fmt: skip

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream):
        import torch

        return torch.zeros(size, dtype=torch.int8)


_here = threading.local()
_switching = threading.Lock()


def _per_thread(config, cpu: DriverBase) -> type:
    """The class of Triton's one `DriverConfig`, but within `on_cpu()` the thread's active driver is the CPU's.

    `set_active` would do so for all threads, and a thread that is just making the GPU's driver would undo it.
    """
    base = type(config)

    def active(self):
        return cpu if getattr(_here, "depth", 0) else base.active.fget(self)

    return type(base.__name__, (base,), {"active": property(active), "cpu": cpu})


class _OnCPU:
    """The context that `on_cpu` returns; one for all, as what it changes is the thread's own."""

    config = None  # Triton's, once it knows the CPU's driver

    def __enter__(self) -> None:
        if self.config is None:
            from triton.runtime.driver import driver

            with _switching:
                if not hasattr(driver, "cpu"):
                    driver.__class__ = _per_thread(driver, _registered()())
            self.config = driver
        _here.depth = getattr(_here, "depth", 0) + 1

    def __exit__(self, *error) -> None:
        _here.depth -= 1


_ON_CPU = _OnCPU()


def on_cpu() -> contextlib.AbstractContextManager:
    """Within the block, this thread's launches go to the backend named `cpu`; other threads see no change.

    Where no installed package has registered such a backend (this one on PYTHONPATH, say), it is registered now.
    """
    return _ON_CPU


def _registered() -> type[DriverBase]:
    from triton.backends import Backend, backends

    if "cpu" not in backends:
        from kda.triton_cpu.compiler import CPUBackend

        backends["cpu"] = Backend(compiler=CPUBackend, driver=CPUDriver)
    return backends["cpu"].driver


def _triton_selects() -> bool:
    """Whether this Triton reads TRITON_DEFAULT_BACKEND itself."""
    from triton.runtime.driver import _create_driver

    return "TRITON_DEFAULT_BACKEND" in _create_driver.__code__.co_consts


if _other := other_backend("driver", DriverBase):
    CPUDriver = _other
