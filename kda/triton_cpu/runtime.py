# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel needs of the machine: processor features, loading, threads and scratch memory.

A launch runs the grid's programs split statically over the threads of the OpenMP runtime that torch has loaded, so
that there is one pool of threads in the process. Every thread slot owns a block of scratch memory, the kernel's arena,
behind a control block of CONTROL bytes (offsets before the arena):

    -256 i64 status (0 fine, 1 assertion failed, 2 out of bounds), -248 ptr message, -240 i64 linear program id,
    -232 i64, -224 i64 details of the failure; -128 i64 next program, -120 i64 end of the slot's programs;
    of slot 0: -112 i64 deadline, -104 i32 stop

Threads return after SLICE seconds at the next program boundary and are sent back for the rest, so that Python sees
signals during a long launch.
"""
from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
import os
import platform
import queue
import struct
import sys
import threading

from kda.triton_cpu import objects

ISAS = ("generic", "avx2", "avx512", "avx512bf16", "amx")

# What each path needs of the processor, and the LLVM processor that stands for it where it is forced.
_NEEDS = {
    "generic": (),
    "avx2": ("avx2", "fma", "f16c", "bmi", "bmi2"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"),
    "avx512bf16": ("avx512bf16",),
    "amx": ("amx-tile", "amx-bf16"),
}
_FORCED = {
    "generic": ("x86-64", ""),
    "avx2": ("x86-64-v3", ""),
    "avx512": ("x86-64-v4", ""),
    "avx512bf16": ("x86-64-v4", "+avx512bf16"),
    "amx": ("sapphirerapids", "+amx-tile,+amx-bf16"),
}
_VECTOR_BYTES = {"generic": 16, "avx2": 32, "avx512": 64, "avx512bf16": 64, "amx": 64}

CONTROL = 256
SLICE = 0.2
_HEADER = struct.Struct("<QqiiixxxxQqQQQQ")  # what every launch record starts with; the arguments follow
_LAUNCH = "triton_cpu_launch"


# ---- processor ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Features:
    """A processor path: its name, vector width, and what LLVM compiles for."""

    isa: str
    vector_bytes: int
    cpu: str
    features: str

    def has(self, name: str) -> bool:
        """Whether the LLVM feature `name` (`f16c`, `avx512fp16`, ..) may be used."""
        if f"+{name}" in self.features.split(","):
            return True
        return any(name in _NEEDS[isa] for isa in _closure(self.isa))


def _closure(isa: str) -> tuple[str, ...]:
    """The paths whose needs `isa` includes."""
    return ISAS[: ISAS.index(isa) + 1]


@functools.cache
def _host() -> tuple[str, dict[str, bool]]:
    import llvmlite.binding as llvm

    try:
        return llvm.get_host_cpu_name(), dict(llvm.get_host_cpu_features())
    except RuntimeError:  # LLVM cannot tell on this processor
        return "", {}


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def missing(isa: str) -> str:
    """What this machine lacks for a path, in words; "" if nothing."""
    if isa == "generic":
        return ""
    if not _is_x86():
        return f"the processor is {platform.machine()}, not x86-64"
    _, has = _host()
    lacking = [name for path in _closure(isa) for name in _NEEDS[path] if not has.get(name)]
    if lacking:
        return f"the processor lacks {', '.join(lacking)}"
    if isa == "amx" and not amx_permitted():
        return "the kernel does not permit this process to use AMX tiles"
    return ""


@functools.cache
def best_isa() -> str:
    """The widest path that this machine runs."""
    return next(isa for isa in reversed(ISAS) if not missing(isa))


@functools.cache
def selected_isa() -> str:
    """The path kernels are compiled for: KDA_CPU_ISA, or the widest that this machine runs.

    Raises:
        RuntimeError: KDA_CPU_ISA names an unknown path, or one that this machine lacks.
    """
    forced = os.environ.get("KDA_CPU_ISA", "").strip().lower()
    if not forced or forced == "auto":
        return best_isa()
    if forced not in ISAS:
        raise RuntimeError(f"KDA_CPU_ISA={forced!r}: accepted are {', '.join(ISAS)}")
    if why := missing(forced):
        raise RuntimeError(f"KDA_CPU_ISA={forced}: {why}; this machine can run {best_isa()}")
    return forced


@functools.cache
def features(isa: str) -> Features:
    """What to compile a path for. A path other than this machine's best may be compiled too, to look at its code."""
    if isa not in ISAS:
        raise ValueError(f"{isa!r} is not a processor path; accepted are {', '.join(ISAS)}")
    cpu, has = _host()
    if not _is_x86():
        return Features("generic", 16, cpu, ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(has.items())))
    if isa == best_isa():
        listed = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(has.items()))
        return Features(isa, _VECTOR_BYTES[isa], cpu, listed)
    return Features(isa, _VECTOR_BYTES[isa], *_FORCED[isa])


@functools.cache
def amx_permitted() -> bool:
    """Asks Linux, once a process, to let it use AMX tiles (arch_prctl ARCH_REQ_XCOMP_PERM)."""
    if platform.system() != "Linux" or not _is_x86():
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(ctypes.c_long(arch_prctl), ctypes.c_long(request_permission), ctypes.c_long(tile_data)) == 0


# ---- threads --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OpenMP:
    """Addresses of the OpenMP runtime's entry points; zeros where there is none."""

    parallel: int = 0
    thread_num: int = 0
    num_threads: int = 0
    path: str = ""


@functools.cache
def openmp() -> OpenMP:
    """The OpenMP runtime that torch has loaded."""
    loaded: list[str] = []
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                path = line.split(maxsplit=5)[-1].strip()
                name = os.path.basename(path)
                if name.startswith(("libgomp", "libiomp5", "libomp")) and ".so" in name and path not in loaded:
                    loaded.append(path)
    except OSError:
        pass
    for path in sorted(loaded, key=lambda path: "torch" not in path):  # torch's own before any other
        try:
            library = ctypes.CDLL(path)
            return OpenMP(
                *(
                    ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
                    for symbol in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
                ),
                path,
            )
        except (OSError, AttributeError):
            continue
    return OpenMP()


@functools.cache
def _clock() -> int:
    libc = ctypes.CDLL(None)
    return ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value


class _Helper:
    """A thread that launches for its callers.

    libgomp keeps its pool with the thread that made it. A forked child has the parent's pool without its threads and
    would wait for them for ever, so there a new thread, which gets a pool of its own, launches.
    """

    def __init__(self):
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True, name="triton-cpu").start()

    def work(self):
        while True:
            function, record, resume, done, answer = self.jobs.get()
            try:
                answer.append(function(record, resume))
            finally:
                done.set()

    def run(self, function, record, resume) -> int:
        done, answer = threading.Event(), []
        self.jobs.put((function, record, resume, done, answer))
        try:
            done.wait()
        except BaseException:
            done.wait()  # a slice is short; the record and the arena must outlive it
            raise
        return answer[0]


_pool: list[Arena] = []
_helper: _Helper | None = None
_hop = False  # launches with several threads go through the helper
_held = None
_threads_before_fork = 1


def _llvm_lock():
    """llvmlite's lock around every call into LLVM, or None where llvmlite is not in use."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    lock = getattr(getattr(ffi, "lib", None), "_lock", None)
    return lock if hasattr(lock, "__enter__") else None


def _before_fork() -> None:
    global _threads_before_fork, _held
    lock = _llvm_lock()
    if lock:  # no thread may be inside LLVM: the child would wait for it when it compiles
        lock.__enter__()
        _held = lock
    try:
        _threads_before_fork = len(os.listdir("/proc/self/task"))
    except OSError:
        _threads_before_fork = 2


def _after_fork_in_parent() -> None:
    global _held
    lock, _held = _held, None
    if lock:
        lock.__exit__(None, None, None)


def _after_fork_in_child() -> None:
    global _helper, _hop
    _after_fork_in_parent()
    _helper = None
    _pool.clear()
    _hop = _hop or _threads_before_fork > 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )


class Arena:
    """Control blocks and scratch memory of a launch's thread slots, page-aligned."""

    __slots__ = ("memory", "size", "address")

    def __init__(self, size: int):
        self.memory = mmap.mmap(-1, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def read(self, offset: int, format: str) -> tuple:
        return struct.unpack_from(format, self.memory, offset)


# ---- object code ----------------------------------------------------------------------------------------------------


def launch_code() -> str:
    """LLVM IR of the launch function, which every object carries beside its kernel.

    `i32 @triton_cpu_launch(ptr record, i32 resume)` returns 0 when all programs ran, 1 when some are left after
    SLICE seconds, 2 when a program failed.
    """
    return _LAUNCH_IR


_LAUNCH_IR = f"""
define internal i64 @triton_cpu_now(ptr %record) nounwind {{
  %time = alloca [2 x i64], align 16
  %clock.at = getelementptr i8, ptr %record, i64 72
  %clock = load ptr, ptr %clock.at
  %ignored = call i32 %clock(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %rest.at = getelementptr i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.at
  %scaled = mul i64 %seconds, 1000000000
  %now = add i64 %scaled, %rest
  ret i64 %now
}}

define internal void @triton_cpu_slot(ptr %record, i64 %slot) nounwind {{
entry:
  %kernel = load ptr, ptr %record
  %gx.at = getelementptr i8, ptr %record, i64 16
  %gx = load i32, ptr %gx.at
  %gy.at = getelementptr i8, ptr %record, i64 20
  %gy = load i32, ptr %gy.at
  %gz.at = getelementptr i8, ptr %record, i64 24
  %gz = load i32, ptr %gz.at
  %base.at = getelementptr i8, ptr %record, i64 32
  %base = load ptr, ptr %base.at
  %stride.at = getelementptr i8, ptr %record, i64 40
  %stride = load i64, ptr %stride.at
  %args = getelementptr i8, ptr %record, i64 {_HEADER.size}
  %offset = mul i64 %slot, %stride
  %control = getelementptr i8, ptr %base, i64 %offset
  %arena = getelementptr i8, ptr %control, i64 {CONTROL}
  %next.at = getelementptr i8, ptr %control, i64 128
  %last.at = getelementptr i8, ptr %control, i64 136
  %deadline.at = getelementptr i8, ptr %base, i64 144
  %stop.at = getelementptr i8, ptr %base, i64 152
  %first = load i64, ptr %next.at
  %last = load i64, ptr %last.at
  %deadline = load i64, ptr %deadline.at
  %start = sub i64 %deadline, {int(SLICE * 1e9)}
  %any = icmp slt i64 %first, %last
  br i1 %any, label %loop, label %done
loop:
  %next = phi i64 [ %first, %entry ], [ %end, %more ]
  %step = phi i64 [ 1, %entry ], [ %step.new, %more ]
  %before = phi i64 [ %start, %entry ], [ %now, %more ]
  %full = add i64 %next, %step
  %beyond = icmp sgt i64 %full, %last
  %end = select i1 %beyond, i64 %last, i64 %full
  call void %kernel(ptr %args, i32 %gx, i32 %gy, i32 %gz, i64 %next, i64 %end, ptr %arena)
  store i64 %end, ptr %next.at
  %status = load i64, ptr %control
  %fine = icmp eq i64 %status, 0
  br i1 %fine, label %ran, label %failed
failed:
  store atomic i32 1, ptr %stop.at monotonic, align 4
  br label %done
ran:
  %complete = icmp sge i64 %end, %last
  br i1 %complete, label %done, label %look
look:
  %now = call i64 @triton_cpu_now(ptr %record)
  %late = icmp sgt i64 %now, %deadline
  %stop = load atomic i32, ptr %stop.at monotonic, align 4
  %stopped = icmp ne i32 %stop, 0
  %leave = or i1 %late, %stopped
  br i1 %leave, label %done, label %more
more:
  %took = sub i64 %now, %before
  %quick = icmp slt i64 %took, 10000000
  %slow = icmp sgt i64 %took, 40000000
  %double = shl i64 %step, 1
  %less = add i64 %step, 1
  %half.1 = lshr i64 %less, 1
  %step.slow = select i1 %slow, i64 %half.1, i64 %step
  %step.new = select i1 %quick, i64 %double, i64 %step.slow
  br label %loop
done:
  ret void
}}

define internal void @triton_cpu_team(ptr %record) nounwind {{
entry:
  %slots.at = getelementptr i8, ptr %record, i64 8
  %slots = load i64, ptr %slots.at
  %thread.at = getelementptr i8, ptr %record, i64 56
  %thread.fn = load ptr, ptr %thread.at
  %threads.at = getelementptr i8, ptr %record, i64 64
  %threads.fn = load ptr, ptr %threads.at
  %thread.32 = call i32 %thread.fn()
  %threads.32 = call i32 %threads.fn()
  %thread = sext i32 %thread.32 to i64
  %threads = sext i32 %threads.32 to i64
  br label %check
check:
  %slot = phi i64 [ %thread, %entry ], [ %after, %body ]
  %inside = icmp slt i64 %slot, %slots
  br i1 %inside, label %body, label %done
body:
  call void @triton_cpu_slot(ptr %record, i64 %slot)
  %after = add i64 %slot, %threads
  br label %check
done:
  ret void
}}

define i32 @{_LAUNCH}(ptr %record, i32 %resume) nounwind {{
entry:
  %slots.at = getelementptr i8, ptr %record, i64 8
  %slots = load i64, ptr %slots.at
  %gx.at = getelementptr i8, ptr %record, i64 16
  %gx.32 = load i32, ptr %gx.at
  %gy.at = getelementptr i8, ptr %record, i64 20
  %gy.32 = load i32, ptr %gy.at
  %gz.at = getelementptr i8, ptr %record, i64 24
  %gz.32 = load i32, ptr %gz.at
  %gx = sext i32 %gx.32 to i64
  %gy = sext i32 %gy.32 to i64
  %gz = sext i32 %gz.32 to i64
  %plane = mul i64 %gx, %gy
  %total = mul i64 %plane, %gz
  %base.at = getelementptr i8, ptr %record, i64 32
  %base = load ptr, ptr %base.at
  %stride.at = getelementptr i8, ptr %record, i64 40
  %stride = load i64, ptr %stride.at
  %again = icmp ne i32 %resume, 0
  br i1 %again, label %start, label %split
split:
  %slot = phi i64 [ 0, %entry ], [ %slot.1, %split ]
  %offset = mul i64 %slot, %stride
  %control = getelementptr i8, ptr %base, i64 %offset
  %slot.1 = add i64 %slot, 1
  %low.n = mul i64 %total, %slot
  %low = udiv i64 %low.n, %slots
  %high.n = mul i64 %total, %slot.1
  %high = udiv i64 %high.n, %slots
  store i64 0, ptr %control
  %next.at = getelementptr i8, ptr %control, i64 128
  store i64 %low, ptr %next.at
  %last.at = getelementptr i8, ptr %control, i64 136
  store i64 %high, ptr %last.at
  %enough = icmp sge i64 %slot.1, %slots
  br i1 %enough, label %start, label %split
start:
  %now = call i64 @triton_cpu_now(ptr %record)
  %deadline = add i64 %now, {int(SLICE * 1e9)}
  %deadline.at = getelementptr i8, ptr %base, i64 144
  store i64 %deadline, ptr %deadline.at
  %stop.at = getelementptr i8, ptr %base, i64 152
  store i32 0, ptr %stop.at
  %single = icmp eq i64 %slots, 1
  br i1 %single, label %alone, label %together
alone:
  call void @triton_cpu_slot(ptr %record, i64 0)
  br label %judge
together:
  %parallel.at = getelementptr i8, ptr %record, i64 48
  %parallel = load ptr, ptr %parallel.at
  %slots.32 = trunc i64 %slots to i32
  call void %parallel(ptr @triton_cpu_team, ptr %record, i32 %slots.32, i32 0)
  br label %judge
judge:
  br label %each
each:
  %seen = phi i64 [ 0, %judge ], [ %seen.1, %each ]
  %result = phi i32 [ 0, %judge ], [ %result.2, %each ]
  %offset.2 = mul i64 %seen, %stride
  %control.2 = getelementptr i8, ptr %base, i64 %offset.2
  %status = load i64, ptr %control.2
  %bad = icmp ne i64 %status, 0
  %next.2.at = getelementptr i8, ptr %control.2, i64 128
  %next.2 = load i64, ptr %next.2.at
  %last.2.at = getelementptr i8, ptr %control.2, i64 136
  %last.2 = load i64, ptr %last.2.at
  %left = icmp slt i64 %next.2, %last.2
  %left.32 = zext i1 %left to i32
  %result.1 = or i32 %result, %left.32
  %result.2 = select i1 %bad, i32 2, i32 %result.1
  %seen.1 = add i64 %seen, 1
  %all = icmp sge i64 %seen.1, %slots
  br i1 %all, label %out, label %each
out:
  ret i32 %result.2
}}
"""


class Kernel:
    """Loaded object code, ready to be launched."""

    def __init__(self, name: str, code: bytes, isa: str):
        if why := missing(isa):
            raise RuntimeError(f"kernel {name} was compiled for {isa}: {why}")
        self.name = name
        self.isa = isa
        self._image = objects.load(code)
        self.address = self._image.address(name)
        launch = self._image.address(_LAUNCH)
        arena = self._image.address(f"{name}.arena")
        if not (self.address and launch and arena):
            raise RuntimeError(f"the object code of kernel {name} lacks a symbol")
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32)(launch)
        size = ctypes.c_int64.from_address(arena).value
        self.stride = -(-(CONTROL + size) // 4096) * 4096  # whole pages: slots share no cache line

    def launch(self, gx: int, gy: int, gz: int, args: bytes, threads: int) -> None:
        """Runs the grid over at most `threads` threads and returns when it is done.

        `args` are the slots of the kernel's parameters. Raises AssertionError for a failed device assertion and
        RuntimeError for an access out of bounds.
        """
        total = gx * gy * gz
        if total <= 0:
            return
        omp = openmp()
        slots = min(threads, total) if omp.parallel else 1
        need = slots * self.stride
        try:
            arena = _pool.pop()
        except IndexError:
            arena = Arena(need)
        if arena.size < need:
            arena = Arena(need)
        record = (
            _HEADER.pack(
                self.address, slots, gx, gy, gz, arena.address, self.stride,
                omp.parallel, omp.thread_num, omp.num_threads, _clock(),
            )
            + args
        )  # fmt: skip
        call = self._call if slots == 1 or not _hop else self._elsewhere
        state = call(record, 0)
        while state == 1:  # signals are seen here
            state = call(record, 1)
        if state:
            self._fail(arena, slots, gx, gy)
        _pool.append(arena)

    def _elsewhere(self, record: bytes, resume: int) -> int:
        global _helper
        if _helper is None:
            _helper = _Helper()
        return _helper.run(self._call, record, resume)

    def _fail(self, arena: Arena, slots: int, gx: int, gy: int):
        for slot in range(slots):
            status, message, program, place, index = arena.read(slot * self.stride, "<qQqqq")
            if status:
                break
        where = (program % gx, program // gx % gy, program // (gx * gy))
        text = ctypes.string_at(message).decode(errors="replace") if message else ""
        _pool.append(arena)
        if status == 1:
            raise AssertionError(f"kernel {self.name}, program {where}: {text}")
        raise RuntimeError(
            f"kernel {self.name}, program {where}: address {place:#x} is outside the tensor passed as {text or index}"
        )
