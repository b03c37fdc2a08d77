# SPDX-License-Identifier: Apache-2.0
"""What kda finds on this machine: versions, drivers, the backend of each device and why, the processor path, threads,
the cache of compiled kernels; and what is wrong, with what to do about it. Ends with status 1 if something is broken.
"""
from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kda

HELP = "show backends, processor path, versions and cache, and what is wrong with them"
PACKAGES = ("torch", "triton", "llvmlite", "numpy")
OLDEST = {"torch": (2, 10), "llvmlite": (0, 45)}  # triton: kda.dispatch
LARGE_CACHE, LITTLE_SPACE = 4 << 30, 256 << 20
SWITCHES = ("KDA_BACKEND", "KDA_CHECK", "KDA_CPU_ISA", "KDA_CPU_BOUNDS", "TRITON_INTERPRET", "TRITON_CACHE_DIR",
            "TRITON_DEFAULT_BACKEND", "OMP_NUM_THREADS")  # fmt: skip


@dataclass
class Finding:
    """Something worth knowing: `broken` decides the exit status."""

    broken: bool
    what: str
    todo: str


class Report:
    """Lines of a table, printed at once, and findings, printed at the end."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def line(self, name: str, text: object) -> None:
        print(f"{name:12} {text}", flush=True)

    def broken(self, what: str, todo: str) -> None:
        self.findings.append(Finding(True, what, todo))

    def note(self, what: str, todo: str) -> None:
        self.findings.append(Finding(False, what, todo))

    def attempt(self, name: str, look: Callable, *args):
        """`look(self, *args)`; whatever keeps it from looking is a finding too, and gives None."""
        try:
            return look(self, *args)
        except Exception as e:
            self.line(name, "cannot be looked at")
            self.broken(f"{name} cannot be looked at ({_said(e)})",
                        "put right what it says; or unset a variable that torch or Triton cannot read")  # fmt: skip

    def close(self) -> int:
        for word, broken in (("broken", True), ("note", False)):
            for finding in self.findings:
                if finding.broken is broken:
                    self.line(word, f"{finding.what}: {finding.todo}")
        count = sum(finding.broken for finding in self.findings)
        self.line("verdict", "all is well" if not count else f"{count} broken")
        return 1 if count else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-run", dest="run_kernels", action="store_false", help="do not run a kernel on each device")


def run(args: argparse.Namespace) -> int:
    report = Report()
    report.attempt("versions", versions)
    requests_are_sound = report.attempt("environment", switches)
    report.attempt("drivers", drivers)
    has_path = report.attempt("processor", processor)
    can_write = report.attempt("cache", cache)
    devices = report.attempt("devices", find_devices) or ["cpu"]
    if requests_are_sound:
        for name in devices:
            run_kernels = args.run_kernels and can_write and (has_path or name != "cpu")
            report.attempt(name, device, name, run_kernels)
    return report.close()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def older(found: str, than: tuple[int, int]) -> bool:
    numbers = [int("".join(c for c in part if c.isdigit()) or 0) for part in found.split(".")[:2]]
    return tuple(numbers) < than


def versions(report: Report) -> None:
    found = {package: version(package) for package in PACKAGES}
    report.line("versions", f"kda {kda.__version__}, python {platform.python_version()}, "
                + ", ".join(f"{name} {text or 'missing'}" for name, text in found.items()))  # fmt: skip
    report.line("machine", f"{platform.system()} {platform.machine()}")
    on_linux = platform.system() == "Linux"
    if found["triton"] is None and on_linux:
        report.broken("triton is not installed, so everything runs in PyTorch", "pip install 'triton>=3.6'")
    elif found["triton"] and older(found["triton"], (3, 6)):
        report.broken(f"triton {found['triton']} is older than 3.6, so everything runs in PyTorch",
                      "pip install -U triton")  # fmt: skip
    for package, oldest in OLDEST.items():
        if found[package] and older(found[package], oldest):
            wanted = ".".join(map(str, oldest))
            report.broken(f"{package} {found[package]} is older than {wanted}", f"pip install -U '{package}>={wanted}'")
    brought = sorted(set(importlib.metadata.packages_distributions().get("triton", ())))
    if len(brought) > 1:
        report.broken(f"{' and '.join(brought)} both bring a module named triton, and which one is there is chance",
                      f"pip uninstall {' '.join(brought)}, then install the one that your torch asks for")  # fmt: skip
    if found["llvmlite"] is None and found["triton"] and platform.machine().lower() in ("x86_64", "amd64"):
        report.broken("llvmlite is not installed, so CPU tensors go to the slow reference backend",
                      "pip install llvmlite")  # fmt: skip
    if found["triton"] and found["numpy"] and not older(found["numpy"], (2, 4)) and older(found["triton"], (3, 7)):
        add = report.broken if _on("TRITON_INTERPRET") else report.note
        add(f"the interpreter of triton {found['triton']} fails with numpy {found['numpy']}",
            "pip install 'numpy<2.4' or a newer triton, if you want TRITON_INTERPRET=1")  # fmt: skip


def _on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "on", "yes", "y")


def switches(report: Report) -> bool:
    """Prints the environment variables that are set; False where KDA_BACKEND holds an unknown word."""
    found = [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]
    report.line("environment", " ".join(found) or "no variable of kda or Triton is set")
    from kda.dispatch import REQUESTS

    asked = os.environ.get("KDA_BACKEND") or "auto"
    if asked not in REQUESTS:
        report.broken(f"KDA_BACKEND={asked} is unknown", f"set it to one of {', '.join(REQUESTS)}, or unset it")
        return False
    return True


def drivers(report: Report, root: Path = Path("/")) -> None:
    """Prints the GPUs' kernel drivers, and what Triton needs to launch on a GPU."""
    found = []
    nvidia = _text(root / "proc/driver/nvidia/version")
    if nvidia:
        number = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", nvidia)
        found.append(f"nvidia {number[0] if number else nvidia.splitlines()[0]}")
    if (root / "sys/module/amdgpu").is_dir():
        found.append(f"amdgpu {_text(root / 'sys/module/amdgpu/version') or 'of the kernel ' + platform.release()}")
    report.line("drivers", ", ".join(found) or "none for a GPU")
    if not found:
        return
    if not any([os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")]):
        report.broken("there is no C compiler, with which Triton builds the launchers of GPU kernels",
                      "install gcc, or name one in CC")  # fmt: skip
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        report.broken(f"{header} is missing, which Triton needs to build the launchers of GPU kernels",
                      "install the package with Python's headers (python3-dev on Debian and Ubuntu)")  # fmt: skip


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def find_devices(report: Report) -> list[str]:
    import torch

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if not gpus:
        hidden = any(os.environ.get(name) == "" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
        nodes = [node for node in ("/dev/nvidia0", "/dev/kfd") if os.path.exists(node)]
        if nodes and not hidden:
            build = torch.version.cuda or torch.version.hip
            report.note(f"there is {nodes[0]}, but torch sees no GPU",
                        "check the driver with nvidia-smi or rocm-smi" if build else
                        f"torch {torch.__version__} is built without GPUs: install a build for yours")  # fmt: skip
    return [*gpus, "cpu"]


def device(report: Report, name: str, run_kernels: bool) -> None:
    import torch

    try:
        backend, why = kda.backend_for(name), kda.why(name)
    except RuntimeError as e:  # asked for by KDA_BACKEND and not to be had
        report.line(name, "no backend")
        report.broken(str(e), "unset KDA_BACKEND, or put right what it says")
        return
    if name != "cpu":
        about = torch.cuda.get_device_properties(name)
        runtime = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        report.line(name, f"{about.name}, {about.total_memory / 2**30:.0f} GiB, "
                    f"compute capability {about.major}.{about.minor}, {runtime}")  # fmt: skip
        gpu(report, name, about)
    report.line(name, f"backend {backend}")
    report.line("", why)
    if name == "cpu" and backend == "triton-cpu":
        backend_owner(report)
    if run_kernels:
        problem = kernel_problem(name)
        report.line("", "a kernel runs there and is right" if problem is None else "a kernel FAILS there")
        if problem is not None:
            report.broken(f"a kernel failed on {name} ({backend})", problem)


def gpu(report: Report, name: str, about) -> None:
    """Whether the driver, torch and Triton that are installed are for this GPU."""
    import torch

    from kda.cli.targets import TARGETS

    triton = version("triton")
    if torch.version.hip:
        arch = about.gcnArchName.split(":")[0]
        target = f"hip:{arch}"
        if triton and arch.startswith("gfx10") and not older(triton, (3, 7)):
            report.broken(f"Triton {triton} is newer than 3.6, which compiles for {arch}",
                          "pip install triton==3.6.0 'numpy<2.4'")  # fmt: skip
    else:
        target = f"cuda:{10 * about.major + about.minor}"
        has, wants = cuda_of_driver(), int(torch.version.cuda.split(".")[0])
        if has is not None and has < wants:
            report.broken(f"the driver serves CUDA {has} and torch is built for CUDA {torch.version.cuda}",
                          "install a newer driver, or a torch for an older CUDA")  # fmt: skip
    if target in TARGETS:
        report.line("", f"target {target}: python -m kda compile --target {target}")
    else:
        report.note(f"{name} is a {target}, for which nobody has compiled or tried the kernels",
                    "docs/porting.md says how to add it")  # fmt: skip


def cuda_of_driver() -> int | None:
    """The newest major version of CUDA that NVIDIA's driver serves; None where it does not say."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed or not number.value else number.value // 1000


def kernel_problem(name: str) -> str | None:
    """Runs a small operation and compares it with plain indexing; in words what went wrong, or None."""
    import torch

    pool = torch.arange(4 * 16.0, device=name).view(4, 16)
    try:
        got = kda.gather_initial_states(
            pool, torch.tensor([3, 1], device=name), torch.tensor([True, False], device=name)
        )
        want = torch.stack([pool[3], torch.zeros_like(pool[3])])
        return None if torch.equal(got, want) else f"it gave {got.tolist()} in place of {want.tolist()}"
    except Exception as e:
        return _said(e)


def _said(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no message'}"


def backend_owner(report: Report) -> None:
    """Whose backend named cpu Triton has."""
    entries = importlib.metadata.entry_points().select(group="triton.backends", name="cpu")
    others = sorted({entry.value for entry in entries if entry.value != "kda.triton_cpu"})
    if others:
        report.note(f"{', '.join(others)} also registers a Triton backend named cpu",
                    "that one is used; uninstall its package to use the one of kda")  # fmt: skip
    elif not list(entries):
        report.note("Triton itself does not see kda's backend named cpu, as kda is not installed but on the path",
                    "pip install . if other packages' kernels are to run on the CPU")  # fmt: skip


def processor(report: Report) -> bool:
    """Prints threads and processor path; False where there is no path to compile for."""
    import torch

    report.line("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors (torch.set_num_threads, "
                "OMP_NUM_THREADS)")  # fmt: skip
    if version("llvmlite") is None:
        return True
    from kda.triton_cpu import runtime

    runs = [isa for isa in runtime.ISAS if not runtime.missing(isa)]
    report.line("processor", f"{_processor_name()}; runs {', '.join(runs)}")
    omp = runtime.openmp()
    report.line("openmp", omp.path or "none")
    if not omp.path and torch.get_num_threads() > 1:
        report.note("no OpenMP runtime of torch's was found", "kernels run on one thread")
    try:
        isa = runtime.selected_isa()
    except RuntimeError as e:
        report.line("path", "none")
        report.broken(str(e), f"unset KDA_CPU_ISA, or set it to one of {', '.join(runs)}")
        return False
    forced = " (KDA_CPU_ISA)" if os.environ.get("KDA_CPU_ISA") else ""
    report.line("path", f"{isa}{forced}, vectors of {8 * runtime.features(isa).vector_bytes} bits")
    return True


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cache(report: Report) -> bool:
    """Prints the folder of compiled kernels; False where it cannot be written."""
    if version("triton") is None:
        return True
    from triton import knobs

    if not knobs.cache.dir:
        report.line("cache", "none")
        report.broken("TRITON_CACHE_DIR names no folder", "set TRITON_CACHE_DIR to a folder of yours, or unset it")
        return False
    folder = Path(knobs.cache.dir)
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files if path.exists())
    report.line("cache", f"{folder}: {size / 2**20:.1f} MiB in {len(files)} files")
    if size > LARGE_CACHE:
        report.note(f"the cache holds {size / 2**30:.1f} GiB, as Triton never removes anything from it",
                    f"delete {folder} when you like: kernels compile anew")  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as e:
        report.broken(f"the cache folder {folder} cannot be written ({e.strerror})",
                      "set TRITON_CACHE_DIR to a folder of yours")  # fmt: skip
        return False
    free = shutil.disk_usage(folder).free
    if free < LITTLE_SPACE:
        report.broken(f"the disk of the cache folder {folder} has {free / 2**20:.0f} MiB left",
                      "make room, or set TRITON_CACHE_DIR to a folder on another disk")  # fmt: skip
    return True
