# SPDX-License-Identifier: Apache-2.0
"""`kda doctor` on machines other than this one: known-bad versions, drivers, GPUs, caches. The rest is in test_cli.py."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from helpers import subprocess_python

from kda.cli import doctor as command


@pytest.fixture
def report():
    return command.Report()


def found(report):
    """{what: (broken, todo)}"""
    return {f.what: (f.broken, f.todo) for f in report.findings}


def has(report, what, todo, broken=True):
    (finding,) = [f for f in report.findings if what in f.what]
    assert todo in finding.todo and finding.broken is broken
    return True


def versions_of(monkeypatch, brought=("triton",), **found):
    monkeypatch.setattr(command, "version", found.get)
    monkeypatch.setattr(command.importlib.metadata, "packages_distributions", lambda: {"triton": list(brought)})
    monkeypatch.setattr(command.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


GOOD = dict(torch="2.13.0", triton="3.9.0", llvmlite="0.50.0", numpy="2.4.6")


def test_good_versions_are_found_good(monkeypatch, report):
    versions_of(monkeypatch, **GOOD)
    command.versions(report)
    assert found(report) == {}


@pytest.mark.parametrize(
    "bad, what, todo",
    [
        (dict(torch="2.9.1"), "torch 2.9.1 is older than 2.10", "pip install -U 'torch>=2.10'"),
        (dict(llvmlite="0.44.0"), "llvmlite 0.44.0 is older than 0.45", "pip install -U 'llvmlite>=0.45'"),
        (dict(triton="3.5.1", numpy="2.3.5"), "triton 3.5.1 is older than 3.6", "pip install -U triton"),
        (dict(triton=None), "triton is not installed", "pip install"),
    ],
)
def test_bad_versions_are_broken(monkeypatch, report, bad, what, todo):
    versions_of(monkeypatch, **GOOD | bad)
    command.versions(report)
    assert len(report.findings) == 1 and has(report, what, todo)


def test_two_packages_with_a_triton_are_broken(monkeypatch, report):
    versions_of(monkeypatch, brought=("triton", "pytorch-triton-rocm"), **GOOD)
    command.versions(report)
    assert has(report, "pytorch-triton-rocm and triton both bring a module named triton", "pip uninstall")


def test_drivers_are_named(tmp_path, report, capsys, monkeypatch):
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(command.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    command.drivers(report, tmp_path)
    assert "none for a GPU" in capsys.readouterr().out
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: 12.2.0\n")  # fmt: skip
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.12.12\n")
    command.drivers(report, tmp_path)
    assert "nvidia 570.133.20, amdgpu 6.12.12" in capsys.readouterr().out and found(report) == {}


def test_gpu_without_a_compiler_for_launchers_is_broken(tmp_path, report, monkeypatch):
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(command.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    command.drivers(report, tmp_path)
    assert len(report.findings) == 2
    assert has(report, "there is no C compiler", "install gcc") and has(report, "Python.h is missing", "python3-dev")


def gpu(monkeypatch, report, triton="3.9.0", cuda=None, driver=13, **about):
    monkeypatch.setattr(command, "version", dict(GOOD, triton=triton).get)
    monkeypatch.setattr(torch.version, "hip", None if cuda else "7.0")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(command, "cuda_of_driver", lambda: driver)
    command.gpu(report, "cuda:0", SimpleNamespace(**about))


def test_gpu_of_a_known_target_is_fine(monkeypatch, report, capsys):
    gpu(monkeypatch, report, gcnArchName="gfx942:sramecc+:xnack-")
    gpu(monkeypatch, report, cuda="13.0", major=9, minor=0)
    out = capsys.readouterr().out
    assert "target hip:gfx942" in out and "target cuda:90" in out and found(report) == {}


def test_gpu_that_this_triton_gave_up_is_broken(monkeypatch, report):
    gpu(monkeypatch, report, gcnArchName="gfx1030")
    assert has(report, "Triton 3.9.0 is newer than 3.6", "pip install triton==3.6.0")
    older = command.Report()
    gpu(monkeypatch, older, triton="3.6.0", gcnArchName="gfx1030")
    assert found(older) == {}


def test_gpu_with_an_old_driver_is_broken(monkeypatch, report):
    gpu(monkeypatch, report, cuda="13.0", driver=12, major=9, minor=0)
    assert has(report, "the driver serves CUDA 12 and torch is built for CUDA 13.0", "newer driver")


def test_unknown_gpu_is_a_note(monkeypatch, report):
    gpu(monkeypatch, report, gcnArchName="gfx906")
    assert has(report, "cuda:0 is a hip:gfx906", "docs/porting.md", broken=False)


def test_the_driver_is_asked_itself(monkeypatch):
    """torch has no public way to, and some of its builds none at all."""

    def driver(number, status=0):
        def version(place):
            place._obj.value = number
            return status

        monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=version))

    def none(name):
        raise OSError(f"{name}: cannot open shared object file")

    driver(12080)
    assert command.cuda_of_driver() == 12
    driver(13000, status=3)
    assert command.cuda_of_driver() is None
    monkeypatch.setattr(ctypes, "CDLL", none)
    assert command.cuda_of_driver() is None


def test_what_cannot_be_looked_at_is_broken_and_the_rest_is_told(monkeypatch, capsys):
    def fails(report, *args):
        raise RuntimeError("TRITON_X must be a number\nand more")

    for name in ("versions", "switches", "drivers", "processor", "cache", "find_devices", "device"):
        with monkeypatch.context() as patch:
            patch.setattr(command, name, fails)
            assert command.run(SimpleNamespace(run_kernels=False)) == 1
        lines = capsys.readouterr().out.splitlines()
        broken = [line for line in lines if line.startswith("broken") and "cannot be looked at" in line]
        assert len(broken) == 1 or name == "device" and broken  # one for each kind of device that is here
        assert all("(RuntimeError: TRITON_X must be a number)" in line for line in broken) and lines[-1].startswith("verdict")
        if name != "device":
            assert any(line.startswith("cpu ") and "backend" in line for line in lines) is (name != "switches")


ON_AN_H200 = """
import types, torch
from kda.cli import doctor, pretend, targets
pretend.become(targets.find("cuda:90"))
torch.version.cuda, torch.cuda.get_device_properties().total_memory = "13.0", 141 << 30
raise SystemExit(doctor.run(types.SimpleNamespace(run_kernels=False)))
"""


@pytest.mark.parametrize(
    "env, message",
    [
        (dict(KDA_BACKEND="fast"), "KDA_BACKEND=fast is unknown"),
        (dict(KDA_CPU_ISA="sse9"), "accepted are generic, avx2"),
        (dict(TRITON_CACHE_DIR="/proc/kda"), "cache folder /proc/kda cannot be written"),
        (dict(TRITON_CACHE_DIR=""), "TRITON_CACHE_DIR names no folder"),
        (dict(TRITON_DEFAULT_BACKEND="fast", OMP_NUM_THREADS="few", KDA_CPU_BOUNDS="?", TRITON_INTERPRET="?"), None),
    ],
    ids=["backend", "isa", "cache", "no-cache", "others"],
)
def test_a_wrong_variable_is_one_finding_beside_a_gpu_too(env, message, tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("llvmlite")
    run = subprocess_python(ON_AN_H200, **{"TRITON_CACHE_DIR": str(tmp_path), "CC": "cc"} | env)
    assert run.returncode == (1 if message else 0), run.stdout + run.stderr
    assert ("target cuda:90" in run.stdout) is ("KDA_BACKEND" not in env)
    found = [line for line in run.stdout.splitlines() if line.startswith("broken")]
    assert len(found) == (1 if message else 0) and all(message in line for line in found), found


def test_full_disk_and_large_cache_are_told(monkeypatch, report, tmp_path):
    pytest.importorskip("triton")
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    (tmp_path / "entry").write_bytes(b"x" * 100)
    monkeypatch.setattr(command, "LARGE_CACHE", 1000)
    assert command.cache(report) and found(report) == {}
    monkeypatch.setattr(command, "LARGE_CACHE", 99)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    assert command.cache(report)
    assert has(report, "Triton never removes anything", "kernels compile anew", broken=False)
    assert has(report, "has 5 MiB left", "TRITON_CACHE_DIR")
