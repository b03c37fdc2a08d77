# SPDX-License-Identifier: Apache-2.0
"""Loading and launching object code: threads, fork, signals, failures, the cache, and processor paths."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

pytest.importorskip("llvmlite")

from kda.triton_cpu import codegen, objects, runtime  # noqa: E402

# counts[p] += 1 for every program id p; `body` runs inside with %p as the id.
COUNT = """
@k.arena = constant i64 {arena}
define void @k(ptr %args, i32 %gx, i32 %gy, i32 %gz, i64 %first, i64 %last, ptr %arena) {{
entry:
  %counts = load ptr, ptr %args
  br label %check
check:
  %p = phi i64 [ %first, %entry ], [ %next, %after ]
  %in = icmp slt i64 %p, %last
  br i1 %in, label %run, label %done
run:
  %at = getelementptr i64, ptr %counts, i64 %p
  %old = load i64, ptr %at
  %new = add i64 %old, 1
  store i64 %new, ptr %at
{body}
  br label %after
after:
  %next = add i64 %p, 1
  br label %check
done:
  ret void
}}
"""
SCRATCH = """
  %c0 = getelementptr i64, ptr %arena, i64 0
  store volatile i64 %p, ptr %c0
  %c1 = getelementptr i8, ptr %arena, i64 99992
  store volatile i64 %p, ptr %c1
  %back = load volatile i64, ptr %c0
  %sum.at = getelementptr i64, ptr %counts, i64 %back
"""
SLEEP = "  %ignored = call i32 @usleep(i32 {microseconds})\n"
FAIL = """
  %bad = icmp eq i64 %p, 5
  br i1 %bad, label %report, label %after
report:
  %message.at = getelementptr i8, ptr %arena, i64 -248
  store ptr @text, ptr %message.at
  %program.at = getelementptr i8, ptr %arena, i64 -240
  store i64 %p, ptr %program.at
  %status.at = getelementptr i8, ptr %arena, i64 -256
  store i64 {status}, ptr %status.at
  ret void
unreached:
"""


def kernel(body="", arena=100000, extra="", isa="generic"):
    features = runtime.features(isa)
    module = codegen.optimize(COUNT.format(arena=arena, body=body) + extra + runtime.launch_code(), features)
    return runtime.Kernel("k", codegen.object_code(module, features), isa)


def launch(loaded, *grid, threads=2):
    gx, gy, gz = (*grid, 1, 1)[:3]
    counts = torch.zeros(gx * gy * gz, dtype=torch.int64)
    loaded.launch(gx, gy, gz, ctypes.c_uint64(counts.data_ptr()).value.to_bytes(8, "little"), threads)
    return counts


@pytest.mark.parametrize("grid", [(1,), (2,), (7,), (1000,), (3, 5, 7), (0,), (4, 0)])
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_every_program_runs_once(grid, threads):
    assert launch(kernel(SCRATCH), *grid, threads=threads).eq(1).all()


def test_without_openmp_programs_run_one_after_another(monkeypatch):
    monkeypatch.setattr(runtime, "openmp", runtime.OpenMP)
    assert launch(kernel(), 100, threads=4).eq(1).all()


def test_torchs_own_threads_run_the_grid():
    launch(kernel(), 1000)
    assert "torch" in runtime.openmp().path


def test_launches_from_several_threads_at_once():
    loaded, wrong = kernel(SCRATCH), []

    def work():
        for _ in range(200):
            if not launch(loaded, 64).eq(1).all():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_compiling_from_several_threads_at_once():
    done = []
    threads = [threading.Thread(target=lambda: done.append(launch(kernel(), 10).sum().item())) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert done == [10] * 4


def test_arenas_are_kept_and_grow():
    small, large = kernel(arena=10), kernel(SCRATCH, arena=1 << 20)
    launch(small, 4)
    launch(large, 4)
    assert sum(arena.size for arena in runtime._pool) >= 2 << 20
    before = len(runtime._pool)
    launch(small, 4)
    launch(large, 4)
    assert len(runtime._pool) == before


@pytest.mark.parametrize("status, error", [(1, AssertionError), (2, RuntimeError)])
def test_a_failed_program_is_named(status, error):
    text = '@text = private constant [12 x i8] c"why it fails"\n'
    text = text.replace("12 x", "13 x").replace('fails"', 'fails\\00"')
    loaded = kernel(FAIL.format(status=status), extra=text)
    with pytest.raises(error, match=r"kernel k, program \(2, 1, 0\).*why it fails"):
        launch(loaded, 3, 4)
    assert launch(loaded, 3).eq(1).all()


def fork_and(child):
    """Exit status of `child()` in a forked process, None if it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if child() else 1
        finally:
            os._exit(code)
    end = time.time() + 30
    while time.time() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def test_fork_after_first_use():
    loaded = kernel(SCRATCH)
    launch(loaded, 100)

    def child():
        grandchild = fork_and(lambda: launch(loaded, 50).eq(1).all())
        return launch(loaded, 100).eq(1).all() and launch(kernel(), 9).eq(1).all() and grandchild == 0

    assert fork_and(child) == 0
    assert launch(loaded, 100).eq(1).all()


def test_fork_while_another_thread_launches():
    loaded, stop = kernel(SLEEP.format(microseconds=100), extra="declare i32 @usleep(i32)\n"), threading.Event()
    thread = threading.Thread(target=lambda: [launch(loaded, 50) for _ in iter(stop.is_set, True)])
    thread.start()
    try:
        assert [fork_and(lambda: launch(loaded, 10).eq(1).all()) for _ in range(5)] == [0] * 5
    finally:
        stop.set()
        thread.join()


def test_fork_while_another_thread_compiles():
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [kernel() for _ in iter(stop.is_set, True)])
    thread.start()
    try:
        assert [fork_and(lambda: launch(kernel(), 10).eq(1).all()) for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        thread.join()


def test_an_interrupt_ends_a_long_launch():
    loaded = kernel(SLEEP.format(microseconds=1000), extra="declare i32 @usleep(i32)\n")
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.time()
    with pytest.raises(KeyboardInterrupt):
        launch(loaded, 60_000)  # half a minute
    assert time.time() - start < 3
    assert launch(loaded, 10).eq(1).all()


def test_a_launch_longer_than_a_slice_is_completed():
    loaded = kernel(SLEEP.format(microseconds=1000), extra="declare i32 @usleep(i32)\n")
    assert launch(loaded, 1000).eq(1).all()


def test_sealed_objects_refuse_damage_and_other_kernels():
    sealed = objects.seal(b"code", "key", "avx2")
    assert objects.unseal(sealed, "key") == (b"code", "avx2") == objects.unseal(sealed, None)
    with pytest.raises(objects.DamagedObject, match="another kernel"):
        objects.unseal(sealed, "other")
    for position in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[position] ^= 1
        with pytest.raises(objects.DamagedObject):
            objects.unseal(bytes(damaged), "key")
    for length in range(len(sealed)):
        with pytest.raises(objects.DamagedObject):
            objects.unseal(sealed[:length], "key")


def isa_in_a_process(isa):
    program = "from kda.triton_cpu import runtime; print(runtime.selected_isa())"
    return subprocess.run([sys.executable, "-c", program], env={**os.environ, "KDA_CPU_ISA": isa}, text=True,
                          capture_output=True)  # fmt: skip


@pytest.mark.parametrize("isa", runtime.ISAS)
def test_a_forced_path_is_taken_or_refused_in_words(isa):
    done = isa_in_a_process(isa)
    if why := runtime.missing(isa):
        assert done.returncode and f"KDA_CPU_ISA={isa}: {why}" in done.stderr
    else:
        assert done.stdout.strip() == isa, done.stderr


def test_an_unknown_path_is_refused():
    done = isa_in_a_process("sse9")
    assert done.returncode and "accepted are generic, avx2, avx512, avx512bf16, amx" in done.stderr


def test_paths_do_not_need_more_than_they_say(monkeypatch):
    has = {name: True for isa in ("avx2", "avx512", "avx512bf16") for name in runtime._NEEDS[isa]}
    monkeypatch.setattr(runtime, "_host", lambda: ("znver4", has))
    monkeypatch.setattr(runtime, "_is_x86", lambda: True)
    assert not runtime.missing("avx512bf16") and "amx-tile" in runtime.missing("amx")
    has["avx512bf16"] = False
    assert not runtime.missing("avx512") and "avx512bf16" in runtime.missing("avx512bf16")


DPBF16PS = "<16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %a, <32 x bfloat> %b, <32 x bfloat> %b)"


@pytest.mark.skipif(not runtime._is_x86(), reason="the paths are of x86")
@pytest.mark.parametrize("isa, call, instruction", [
    ("avx2", "<8 x float> @llvm.fma.v8f32(<8 x float> %a, <8 x float> %a, <8 x float> %a)", "vfmadd"),
    ("avx512", "<16 x float> @llvm.fma.v16f32(<16 x float> %a, <16 x float> %a, <16 x float> %a)", "zmm"),
    ("avx512bf16", DPBF16PS, "vdpbf16ps"), ("amx", DPBF16PS, "vdpbf16ps"),
])  # fmt: skip
def test_code_of_every_path_can_be_looked_at(isa, call, instruction):
    lanes = call.split(" ")[0][1:]
    declared = call.replace("%a", "").replace("%b", "")
    text = f"""
define void @f(ptr %p, ptr %q) {{
  %a = load <{lanes} x float>, ptr %p
  %b = load <32 x bfloat>, ptr %q
  %r = call {call}
  store <{lanes} x float> %r, ptr %p
  ret void
}}
declare {declared}
"""
    features = runtime.features(isa)
    module = codegen.optimize(text, features)
    assert instruction in codegen.assembly(module, features)
    assert instruction in codegen.assembly(str(module), features)


def test_llvm_errors_are_reported():
    with pytest.raises(codegen.CodegenError, match="not valid LLVM IR"):
        codegen.optimize("define void @f() { ret i32 }", runtime.features("generic"))


# ---- through Triton -------------------------------------------------------------------------------------------------

ADD = """
import glob, json, os, sys, time
import torch, triton
from sample_kernels import add

def run(n=5000):
    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    kernel = add[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    assert torch.equal(out, x + y)
    return kernel
"""


def test_a_kernel_runs_and_is_cached(programs):
    assert "cold" in programs.run(ADD + "run(); run(1); print('cold')")
    warm = ADD + """
import kda.triton_cpu.codegen as codegen
def refuse(*_): raise RuntimeError("compiled again")
codegen.optimize = codegen.object_code = refuse
kernel = run()
print(sorted(kernel.asm))
"""
    assert "'llir', 'obj', 'source', 'ttir'" in programs.run(warm)


def test_damaged_and_foreign_cache_entries_are_compiled_anew(programs):
    program = ADD + """
def again(path, data):
    open(path, "wb").write(data)
    add.device_caches.clear()
    run()

run()
(path,) = glob.glob(os.environ["TRITON_CACHE_DIR"] + "/*/add.obj")
good = open(path, "rb").read()
flip = lambda at: good[:at] + bytes([good[at] ^ 64]) + good[at + 1:]
for data in (b"", good[:-100], flip(0), flip(len(good) // 2), flip(len(good) - 1), b"\x7fELF" + bytes(5000)):
    again(path, data)
    assert open(path, "rb").read() == good

add[(1,)](*[torch.ones(64)] * 3, 64, BLOCK=64)
(other,) = set(glob.glob(os.environ["TRITON_CACHE_DIR"] + "/*/add.obj")) - {path}
again(path, open(other, "rb").read())
assert open(path, "rb").read() == good
print("fine")
"""
    assert "fine" in programs.run(program)


def test_two_processes_compile_at_once(programs):
    started = [programs.start(ADD + "run()\nprint('ran')") for _ in range(3)]
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and "ran" in out, err


def test_each_path_has_its_own_cache_entry(programs):
    isas = [isa for isa in runtime.ISAS if not runtime.missing(isa)]
    for isa in isas:
        programs.run(ADD + "run()", KDA_CPU_ISA=isa)
    assert len(list(programs.cache.glob("*/add.obj"))) == len(isas)


def test_dumps_hold_every_stage(programs):
    folder = programs.folder / "dump"
    programs.run(ADD + "run()", TRITON_KERNEL_DUMP="1", TRITON_DUMP_DIR=str(folder))
    assert {path.suffix for path in folder.glob("*/add.*")} >= {".ttir", ".llir", ".asm"}


def test_thread_counts_are_torchs(programs):
    program = ADD + """
import kda.triton_cpu.runtime as runtime
asked = []
launch = runtime.Kernel.launch
runtime.Kernel.launch = lambda self, *a: (asked.append(a[-1]), launch(self, *a))[1]
run(); torch.set_num_threads(1); run(); torch.set_num_threads(3); run()
print(json.dumps(asked))
"""
    assert json.loads(programs.run(program, OMP_NUM_THREADS="2")) == [2, 1, 3]


def test_arguments_that_cannot_be_run_are_refused_in_words(programs):
    program = ADD + """
run()
for bad in (torch.empty(8, device="meta"),):
    try:
        add[(1,)](bad, bad, bad, 8, BLOCK=1024)
    except ValueError as error:
        print(error)
"""
    assert "argument x: the tensor is on meta, and the kernel runs on the CPU" in programs.run(program)


def test_tuples_and_fork_through_triton(programs):
    program = ADD + """
from sample_kernels import tuples
x, y = torch.randn(16), torch.empty(16)
tuples[(1,)]((x, y, 2.5), 3, BLOCK=16)
assert torch.equal(y, x + 2.5 + 3)
pid = os.fork()
if pid == 0:
    run(100_000); run(7)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("fine")
"""
    assert "fine" in programs.run(program)


def test_a_driver_of_another_device_is_left_alone(programs):
    program = ADD + """
import threading
from triton.runtime.driver import driver
from kda.triton_cpu.driver import on_cpu
class Other:
    def get_current_device(self): return 7
    def __getattr__(self, name): raise AssertionError("the GPU's driver was asked for " + name)
other = Other()
driver._default = driver._active = other
with on_cpu():
    run()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(driver.active.get_current_device()))
    thread.start(); thread.join()
    assert seen == [7], seen
assert driver.active.get_current_device() == 7 and isinstance(driver.active, Other)
with on_cpu():
    run(99)
print("fine")
"""
    assert "fine" in programs.run(program)


def test_a_driver_in_the_making_does_not_take_a_launch_on_the_cpu(programs):
    """Triton makes its GPU driver at the first use, in whichever thread that is, and then makes it the active one."""
    program = ADD + """
import threading
import importlib
module = importlib.import_module("triton.runtime.driver")
from kda.triton_cpu.driver import on_cpu
class Other:
    def get_current_device(self): return 7
making, go_on = threading.Event(), threading.Event()
def create():
    making.set(); go_on.wait(60)
    return Other()
module._create_driver = create
config = module.driver
config._default = config._active = None
thread = threading.Thread(target=lambda: config.active.get_current_device())
thread.start(); making.wait(60)
with on_cpu():
    run()
    go_on.set(); thread.join()
    assert config.active.get_current_device() == "cpu"
    run(99)
assert config.active.get_current_device() == 7
print("fine")
"""
    assert "fine" in programs.run(program)
