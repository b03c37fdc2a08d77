# SPDX-License-Identifier: Apache-2.0
"""`kda compile`: what it finds out about compiled code, what it refuses, and what it does when a compiler dies."""

import csv
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading

import pytest
from helpers import ROOT

pytest.importorskip("triton")
pytest.importorskip("llvmlite")

from kda.cli import compile as command  # noqa: E402
from kda.cli import farm, main, targets  # noqa: E402

@pytest.fixture(scope="module")
def scatter(tmp_path_factory):
    """One small kernel for a target of each vendor: (exit status, output, rows of the CSV, what the JSON holds)."""
    folder = tmp_path_factory.mktemp("compile")
    names = ["cuda:90", "hip:gfx942", "hip:gfx1100"] + ["cpu:avx512"] * (platform.machine() == "x86_64")
    done = subprocess.run(
        [sys.executable, "-m", "kda", "compile", "--one", "--kernel", "scatter_kernel", "--jobs", "2",
         *[word for name in names for word in ("--target", name)],
         "--csv", str(folder / "rows.csv"), "--json", str(folder / "all.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    with open(folder / "rows.csv", newline="") as file:
        rows = {row["target"]: row for row in csv.DictReader(file)}
    return done, names, rows, folder / "all.json"


def test_table_has_a_row_for_each_target(scatter):
    done, names, rows, _ = scatter
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(rows) == sorted(names)
    heading, *lines = done.stdout.strip().splitlines()
    assert heading == "states.scatter_kernel" and lines[0].split()[:3] == ["target", "configuration", "registers"]
    for line, name in zip(lines[1:], names):
        assert line.split()[0] == name and "BS=4096" in line and "scatter_states" in line
    assert lines[-1].startswith(f"{len(names)} compilations of 1 kernels for {len(names)} targets: all compile")


def test_facts_are_of_the_code(scatter):
    """A kernel that copies rows: a few registers, no spills, no shared memory, a few KiB of code."""
    _, _, rows, _ = scatter
    for name, row in rows.items():
        assert 500 < int(row["code"]) < 20_000, row
        if name.startswith("cpu:"):
            assert row["registers"] == row["occupancy"] == ""
            continue
        assert 10 <= int(row["registers"]) <= 128 and int(row["spills"]) == 0 == int(row["shared"]), row
        assert 0.25 <= float(row["occupancy"]) <= 1, row


def test_saved_results_are_taken_for_the_same_sources_and_tasks_only(scatter, monkeypatch):
    _, names, _, saved = scatter
    tasks = [farm.Task(name, ("usual",), True, "scatter_kernel") for name in names]
    found = farm.Results.load(saved, tasks)
    assert found is not None and {f["target"] for f in found.launches} == set(names)
    assert found.of("cuda:90").launches == [f for f in found.launches if f["target"] == "cuda:90"]
    assert farm.Results.load(saved, tasks[1:]) is None
    monkeypatch.setattr(farm, "sources", lambda: "others")
    assert farm.Results.load(saved, tasks) is None
    saved.write_text(saved.read_text()[:100])
    assert farm.Results.load(saved, tasks) is None


def test_spills_of_each_vendor_are_counted(tmp_path):
    """128 values a lane that live until the last load, where options leave few registers; and 8."""
    source = """
import json, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kda.cli import code, launches, targets

@triton.jit
def crowded(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.debug_barrier()
    b = tl.load(y + i)
    tl.debug_barrier()
    tl.store(x + i, tl.sqrt(a) + b)
    tl.debug_barrier()
    tl.store(y + i, a - tl.sqrt(b))

target = targets.find(sys.argv[1])
size, options = json.loads(sys.argv[2])
src = ASTSource(crowded, {"x": "*fp32", "y": "*fp32", "N": "constexpr"}, {(2,): size})
with launches._captured() as printed:
    compiled = triton.compile(src, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)
print(json.dumps(code.facts(target, compiled, printed.text)))
"""
    script = tmp_path / "crowded.py"
    script.write_text(source)
    for name, width, few_registers in (
        ("cuda:90", 32, dict(maxnreg=32)), ("hip:gfx942", 64, dict(waves_per_eu=8)), ("hip:gfx1100", 32, dict(waves_per_eu=16))
    ):  # fmt: skip
        found = []
        for values in (8, 128):
            case = json.dumps([values * width, dict(num_warps=1, **few_registers)])
            done = subprocess.run([sys.executable, str(script), name, case], capture_output=True, text=True,
                                  env=farm.environment(str(tmp_path / f"{name}{values}")), timeout=120)  # fmt: skip
            assert done.returncode == 0, done.stderr
            found.append(json.loads(done.stdout))
        few, many = found
        assert few["spills"] == 0 < many["spills"] and few["registers"] <= many["registers"] <= 96, found
        assert few["code"] < many["code"], found


# ---- what is refused and what is wrong


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name a --target, or --all"),
        (["--target", "cuda:77"], "there is no target cuda:77; accepted are cuda:80"),
        (["--target", "cuda:90", "--jobs", "0"], "--jobs must be at least 1"),
        (["--target", "cuda:90", "--csv", "/proc/kda/x.csv"], "/proc/kda/x.csv cannot be written"),
        (["--target", "cuda:90", "--check", "--one"], "--check says itself what is compiled"),
    ],
)
def test_refuses_in_one_sentence(capsys, arguments, message):
    assert main(["compile", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1, err


def test_target_that_triton_gave_up_says_how_to_compile_for_it(capsys, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.9.0")
    assert main(["compile", "--target", "gfx1030"]) == 2
    assert "make compile-gfx1030" in capsys.readouterr().err
    assert targets.find("gfx1030").problem("3.6.0", "x86_64") is None
    assert "x86-64" in targets.find("cpu:amx").problem("3.9.0", "aarch64")
    assert re.search(r"^compile-gfx1030:", (ROOT / "Makefile").read_text(), re.M)


def test_kernel_that_nothing_launches_is_an_error(capsys):
    assert main(["compile", "--target", "cuda:90", "--one", "--kernel", "nonesuch", "--jobs", "1"]) == 1
    assert "WRONG cuda:90: nothing was launched" in capsys.readouterr().out


def row(**facts):
    return dict(target="cuda:86", kernel="kda.triton.x.y", number=0, op="call", ops=["call"], ok=True, config={},
                registers=64, spills=0, shared=0, occupancy=1.0, code=100, warnings=[], hash="h", seconds=1.0) | facts  # fmt: skip


def test_problems_of_a_row():
    assert command.problems(row(), 8) == []
    assert command.problems(row(spills=8, shared=99 * 1024), 8) == []
    assert "spills 9 registers a lane, and --max-spills is 8" in command.problems(row(spills=9), 8)[0]
    assert "101377 bytes of shared memory, and a program can have 101376" in command.problems(row(shared=101_377), 8)[0]
    assert command.problems(row(ok=False, error="no"), 8) == ["does not compile: no"]
    assert command.problems(row(target="cpu:avx2", spills=900, shared=1 << 20, registers=None), 8) == []


def test_verdict_fails_on_anything_wrong(capsys):
    fine = farm.Results(calls=[dict(target="cuda:86", op="call", called=True)])
    names = ["cuda:86"]
    assert command.verdict(fine, [row()], names, 8) == 0
    assert command.verdict(fine, [row(spills=9)], names, 8) == 1
    assert command.verdict(fine, [], names, 8) == 1
    assert command.verdict(farm.Results(problems={"cuda:86": "died"}), [row()], names, 8) == 1
    read = farm.Results(calls=[dict(target="cuda:86", op="call", called=False, error="it read a value")])
    assert command.verdict(read, [row()], names, 8) == 1
    assert "WRONG cuda:86: the call call failed before its launch: it read a value" in capsys.readouterr().out


def test_same_code_is_one_row():
    rows = command.merged([row(op="a", number=1, seconds=2.0), row(op="b", number=2, seconds=0.0),
                           row(op="c", number=3, hash="other"), row(op="d", number=4, target="cuda:90")])  # fmt: skip
    assert [r["ops"] for r in rows] == [["a", "b"], ["c"], ["d"]] and rows[0]["seconds"] == 2.0


# ---- compilers that die


DEATHS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
    "aborted": ("sys.stderr.write('LLVM ERROR: no\\n'), sys.stderr.flush(), os.abort()", "ended by SIGABRT"),
    "hung": ("time.sleep(600)", "no end after 3 s"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_dead_compiler_loses_one_launch(monkeypatch, tmp_path, death):
    """A process that stands for launches.py: 4 launches, of which the second ends it."""
    do, says = DEATHS[death]
    worker = tmp_path / "worker.py"
    worker.write_text(f"""
import json, os, signal, sys, time
skip = json.loads(sys.argv[sys.argv.index("--skip") + 1])
say = lambda **facts: print(json.dumps(facts), flush=True)
say(op="call", called=True)
say(launches=4 - len(skip))
for number in range(4):
    if number not in skip:
        facts = dict(op="call", kernel="k", grid=[1], number=number)
        say(**facts)
        if number == 1:
            {do}
        say(**facts, ok=True, seconds=0.0)
""")
    start = subprocess.Popen
    monkeypatch.setattr(farm.subprocess, "Popen",
                        lambda command, **rest: start([command[0], str(worker), *command[3:]], **rest))  # fmt: skip
    monkeypatch.setattr(farm, "TIMEOUT", 3.0)
    counted = []
    results = farm.compile_all([farm.Task("cuda:90")], 1, lambda launches=0, ended=None: counted.append((launches, ended)))
    assert [f["ok"] for f in sorted(results.launches, key=lambda f: f["number"])] == [True, False, True, True]
    (lost,) = [f for f in results.launches if not f["ok"]]
    assert says in lost["error"] and ("LLVM ERROR: no" in lost["error"]) == (death == "aborted")
    assert results.problems == {} and len(results.calls) == 1
    assert sum(n for n, _ in counted) == 4 == sum(ended is not None for _, ended in counted)


def test_process_that_cannot_start_is_a_problem_of_its_target(monkeypatch):
    start = subprocess.Popen
    monkeypatch.setattr(farm.subprocess, "Popen",
                        lambda command, **rest: start([command[0], "-c", "raise SystemExit('no such luck')"], **rest))  # fmt: skip
    results = farm.compile_all([farm.Task("cuda:90")], 1)
    assert results.launches == [] and "exit status 1" in results.problems["cuda:90"]
    assert "no such luck" in results.problems["cuda:90"]


def test_interrupt_ends_the_processes(monkeypatch):
    """Also one that had begun a launch: it is not started again for the rest."""
    start, started = subprocess.Popen, []
    says = "import json, time\nfor facts in dict(op='x', kernel='k', number=0), dict(launches=2):\n"
    says += "    print(json.dumps(facts), flush=True)\ntime.sleep(600)"

    def popen(command, **rest):
        started.append(start([command[0], "-c", says], **rest))
        return started[-1]

    def interrupt(**_):  # in a thread of the farm's; the interrupt reaches the main one, as from a keyboard
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(farm.subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        farm.compile_all([farm.Task("cuda:90"), farm.Task("cuda:80")], 1, interrupt)
    assert [process.wait(10) for process in started] == [-signal.SIGKILL]


def test_no_room_for_files_is_said(monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(farm.tempfile, "TemporaryDirectory", full)
    assert main(["compile", "--target", "cuda:90", "--one", "--jobs", "1"]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("python -m kda compile: ")]
    assert len(err) == 1 and err[0].endswith("(TMPDIR): No space left on device")


# ---- what is compiled


def test_every_regime_calls_every_operation():
    """None reads a value of the device, and none is refused by validation."""
    from kda.cli import launches

    assert tuple(launches.REGIMES) == command.REGIMES
    regimes = [word for name in command.REGIMES for word in ("--regime", name)]
    done = subprocess.run([sys.executable, "-m", "kda.cli.launches", "hip:gfx942", "--kernel", "nonesuch", *regimes],
                          env=farm.environment("none"), capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    *calls, last = map(json.loads, done.stdout.splitlines())
    assert last == {"launches": 0} and [f for f in calls if not f["called"]] == []
    assert len(calls) == len(command.REGIMES) * len({f["op"].split(" @ ")[0] for f in calls}) > 200


def test_parts_of_a_task_are_all_of_it():
    tasks = [farm.Task("cuda:90"), farm.Task("cpu:avx2")]
    parts = farm.split(tasks, 8)
    assert len(parts) == 8 and {t.part for t in parts if t.target == "cuda:90"} == {(i, 4) for i in range(4)}
    assert farm.split([farm.Task("cuda:90", one=True)], 8) == [farm.Task("cuda:90", one=True)]
    checked = farm.checked(targets.TARGETS)
    assert [t.target for t in checked] == list(targets.TARGETS)
    assert {t.target for t in checked if not t.one} == set(farm.ALL_CALLS)
    for op, of in farm.ONE_OF_A_VENDOR.items():
        assert {t.target for t in checked if not t.one and op not in t.without} == set(of)


def test_workflows_call_targets_of_the_makefile():
    phony = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M)[1].split()
    called = re.findall(r"run: make (\S+)", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"test", "compile", "demo", "compile-gfx1030"} <= set(called) <= set(phony)


# ---- targets


def test_names_of_targets():
    for asked, name in (("sm_90", "cuda:90"), ("sm_90a", "cuda:90"), ("cuda:100", "cuda:100"), ("gfx942", "hip:gfx942"),
                        ("HIP:GFX1100", "hip:gfx1100"), ("cpu:sapphirerapids", "cpu:amx"), ("cpu:znver4", "cpu:avx512bf16"),
                        ("cpu:haswell", "cpu:avx2")):  # fmt: skip
        assert targets.find(asked).name == name
    wanted = {f"cuda:{arch}" for arch in (80, 86, 89, 90, 100, 120)}
    wanted |= {f"hip:gfx{arch}" for arch in ("90a", "942", "950", "1030", "1100", "1201")}
    assert wanted | {"cpu:avx2", "cpu:avx512", "cpu:avx512bf16", "cpu:amx"} <= set(targets.TARGETS)
    for target in targets.TARGETS.values():
        assert target.products and (target.cores is None) == (target.backend == "cpu")


def test_devices_are_known_by_the_names_that_drivers_give_them():
    for device, name in (("NVIDIA A100-SXM4-80GB", "cuda:80"), ("NVIDIA A10", "cuda:86"), ("NVIDIA L40S", "cuda:89"),
                         ("NVIDIA H200", "cuda:90"), ("NVIDIA GeForce RTX 4090", "cuda:89"), ("AMD Instinct MI300X", "hip:gfx942"),
                         ("AMD Radeon RX 7900 XTX", "hip:gfx1100"), ("Radeon 8060S Graphics", "hip:gfx1151"),
                         ("NVIDIA H20", None)):  # fmt: skip
        assert [t.name for t in targets.TARGETS.values() if t.is_named(device)] == [name] * (name is not None), device
    for device in ("AMD EPYC 9B14 96-Core Processor", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"):
        assert {t.backend for t in targets.TARGETS.values() if t.is_named(device)} == {"cpu"}
    assert [t.name for t in targets.TARGETS.values() if t.is_named("AMD family 25 model 17, avx512bf16")] == ["cpu:avx512bf16"]


@pytest.mark.parametrize(
    "name, registers, shared, warps, occupancy",
    [
        ("cuda:90", 32, 0, 4, 1.0),  # 16 programs of 4 of 64 warps
        ("cuda:90", 128, 0, 4, 0.25),  # 64 Ki registers / 128 = 512 lanes = 16 warps
        ("cuda:90", 255, 0, 1, 0.125),  # 255 are given as 256: 8 warps
        ("cuda:90", 32, 100 * 1024, 4, 2 * 4 / 64),  # two programs of 101 KiB with CUDA's own in 228
        ("cuda:90", 32, 227 * 1024, 8, 8 / 64),
        ("cuda:86", 32, 0, 1, 16 / 48),  # 16 programs at most
        ("cuda:86", 32, 100 * 1024, 4, 0.0),  # a program can have 99 KiB
        ("hip:gfx942", 64, 0, 4, 1.0),  # 8 waves a SIMD
        ("hip:gfx942", 256, 0, 4, 0.25),
        ("hip:gfx942", 64, 33 * 1024, 4, 4 / 32),
        ("hip:gfx942", 64, 65 * 1024, 4, 0.0),
        ("hip:gfx950", 64, 65 * 1024, 4, 8 / 32),  # 160 KiB
        ("hip:gfx1100", 96, 0, 4, 1.0),  # 1536 / 96 = 16 waves
        ("hip:gfx1030", 96, 0, 4, 10 / 16),  # 1024 / 96
    ],
)
def test_occupancy(name, registers, shared, warps, occupancy):
    assert targets.find(name).cores.occupancy(registers, shared, warps) == pytest.approx(occupancy)


@pytest.mark.parametrize("name, warps", [("hip:gfx90a", 4), ("hip:gfx942", 4), ("hip:gfx1100", 4), ("hip:gfx1201", 4)])
def test_occupancy_by_registers_is_what_llvm_says(tmp_path, name, warps):
    """LLVM writes its own figure, in waves a SIMD and from registers alone, into the assembly."""
    source = """
import json, re, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kda.cli import targets

@triton.jit
def add(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) * 2 + tl.load(y + i))

target = targets.find(sys.argv[1])
for values in (4, 64, 128):
    size = values * target.warp_size * int(sys.argv[2])
    src = ASTSource(add, {"x": "*fp32", "y": "*fp32", "N": "constexpr"}, {(2,): size})
    compiled = triton.compile(src, target=GPUTarget(target.backend, target.arch, target.warp_size),
                              options=dict(num_warps=int(sys.argv[2])))
    text = compiled.asm["amdgcn"]
    registers = int(re.search(r"\\.vgpr_count:\\s*(\\d+)", text)[1])
    said = int(re.search(r"; Occupancy: (\\d+)", text)[1])
    ours = target.cores.occupancy(registers, 0, 1) * target.cores.warps
    print(json.dumps([registers, said, ours]))
"""
    script = tmp_path / "add.py"
    script.write_text(source)
    done = subprocess.run([sys.executable, str(script), name, str(warps)], capture_output=True, text=True,
                          env=farm.environment(str(tmp_path / "cache")), timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [said for _, said, _ in cases] == [ours for _, _, ours in cases], cases
    assert len({said for _, said, _ in cases}) > 1, cases


def test_environment_of_a_compiling_process_has_no_switches(monkeypatch):
    for name in ("KDA_CPU_ISA", "TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"):
        monkeypatch.setenv(name, "asked")
    env = farm.environment("mine")
    assert "KDA_CPU_ISA" not in env and "TRITON_INTERPRET" not in env and env["TRITON_CACHE_DIR"] == "mine"
    assert env["TRITON_PTXAS_PATH"] == "asked" and env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
