# SPDX-License-Identifier: Apache-2.0
"""The devices that kernels are compiled for, and what their cores hold.

A target is named as Triton names it: `cuda:90`, `hip:gfx942`, `cpu:avx512`. NVIDIA's figures are those of the CUDA
programming guide's table of compute capabilities, AMD's those of LLVM (AMDGPUBaseInfo.cpp) and of the ISA manuals.
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Cores:
    """What the programs on a core share: an SM of NVIDIA's, a CU of CDNA's, a WGP (two CUs) of RDNA's.

    Attributes:
        shared: bytes of shared memory (LDS) that one program may ask for.
        shared_core: bytes that a core has for all of its programs, `reserved` of them lost to each.
        parts: register files a core has, one a SIMD; a warp lives in one.
        warps: warps (waves) that a part can hold.
        registers: 32-bit registers a lane, of all warps of a part together.
        granule: registers are given to a warp in multiples of this.
        programs: the most programs on a core.
    """

    shared: int
    shared_core: int
    parts: int
    warps: int
    registers: int
    granule: int
    programs: int
    reserved: int = 0
    most_registers: int = 256

    def occupancy(self, registers: int, shared: int, warps: int) -> float:
        """The part of a core's warps in use by programs of `warps` warps, with these registers a lane; 0: none fits."""
        each = -(-max(registers, 1) // self.granule) * self.granule
        by_registers = self.parts * min(self.registers // each, self.warps) // warps
        by_shared = self.shared_core // (shared + self.reserved) if shared + self.reserved else self.programs
        programs = min(by_registers, by_shared, self.programs) if shared <= self.shared else 0
        return programs * warps / (self.parts * self.warps)


@dataclass(frozen=True)
class Target:
    """A device by its Triton target, beside products that have it, by words of the names that drivers give them.

    `multiprocessors` is what a launcher that asks is told. `last_triton`: a newer Triton compiles no code for it.
    """

    backend: str
    arch: int | str
    products: str
    warp_size: int = 32
    cores: Cores | None = None
    multiprocessors: int = 1
    last_triton: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.backend}:{self.arch}"

    def is_named(self, device: str) -> bool:
        """Whether a device of this name, as torch or Linux has it, may be one of these."""
        if self.backend == "cpu":
            if path := re.search(r", (\w+)$", device):  # as tables have it
                return path[1] == self.arch
            return re.search(r"EPYC|Xeon|Ryzen|Threadripper|\bCore\b|Processor|CPU", device, re.I) is not None
        return any(re.search(rf"\b{product}\b", device, re.I) for product in self.products.split(", "))

    def problem(self, triton: str, machine: str) -> str | None:
        """Why this Triton on this machine has no code for it, with what to do; or None."""
        have = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in triton.split(".")[:2])
        if self.last_triton and have > self.last_triton:
            last = ".".join(map(str, self.last_triton))
            return f"Triton {last} compiles for it and {triton} is newer: make compile-{self.arch}"
        if self.backend == "cpu" and machine.lower() not in ("x86_64", "amd64"):
            return f"code for x86-64 processors is compiled on x86-64 only, and this machine is {machine}"
        return None


def _nvidia(arch: int, products: str, shared_core: int, warps: int, programs: int, sms: int) -> Target:
    # 64 Ki registers in four parts; 1 KiB of a program's shared memory is CUDA's own.
    cores = Cores(
        (shared_core - 1) * KIB, shared_core * KIB, parts=4, warps=warps // 4, registers=512, granule=8,
        programs=programs, reserved=KIB,
    )  # fmt: skip
    return Target("cuda", arch, products, 32, cores, sms)


def _cdna(arch: str, products: str, cus: int, lds: int = 64) -> Target:
    # Vector and accumulation registers are one file of 512.
    cores = Cores(lds * KIB, lds * KIB, parts=4, warps=8, registers=512, granule=8, programs=32, most_registers=512)
    return Target("hip", arch, products, 64, cores, cus)


def _rdna(arch: str, products: str, wgps: int, registers: int, granule: int, last=None) -> Target:
    cores = Cores(64 * KIB, 128 * KIB, parts=4, warps=16, registers=registers, granule=granule, programs=64)
    return Target("hip", arch, products, 32, cores, wgps, last)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia(80, "A100, A30", shared_core=164, warps=64, programs=32, sms=108),
        _nvidia(86, "A10, A40, RTX 3090", shared_core=100, warps=48, programs=16, sms=84),
        _nvidia(89, "L4, L40S, RTX 4090", shared_core=100, warps=48, programs=24, sms=142),
        _nvidia(90, "H100, H200, GH200", shared_core=228, warps=64, programs=32, sms=132),
        _nvidia(100, "B200, GB200", shared_core=228, warps=64, programs=32, sms=148),
        _nvidia(120, "RTX PRO 6000, RTX 5090", shared_core=100, warps=48, programs=24, sms=188),
        _cdna("gfx90a", "MI210, MI250", cus=104),
        _cdna("gfx942", "MI300X, MI325X", cus=304),
        _cdna("gfx950", "MI350X, MI355X", cus=256, lds=160),
        _rdna("gfx1030", "RX 6800, RX 6900", wgps=40, registers=1024, granule=16, last=(3, 6)),
        _rdna("gfx1100", "RX 7900, W7900", wgps=48, registers=1536, granule=24),
        _rdna("gfx1151", "Radeon 8060S", wgps=20, registers=1536, granule=24),
        _rdna("gfx1201", "RX 9070", wgps=32, registers=1536, granule=24),
        Target("cpu", "avx2", "Haswell, Zen 1 to 3", 1),
        Target("cpu", "avx512", "Skylake-SP, Ice Lake", 1),
        Target("cpu", "avx512bf16", "Cooper Lake, Zen 4 and 5", 1),
        Target("cpu", "amx", "Sapphire Rapids and newer Xeons", 1),
    )
}

# Processors by the names that compilers have for them.
_PROCESSORS = {
    "avx2": ("haswell", "broadwell", "znver1", "znver2", "znver3", "x86-64-v3"),
    "avx512": ("skylake-avx512", "cascadelake", "icelake-server", "x86-64-v4"),
    "avx512bf16": ("cooperlake", "znver4", "znver5"),
    "amx": ("sapphirerapids", "emeraldrapids", "graniterapids"),
}
_ALIASES = {f"cpu:{name}": f"cpu:{path}" for path, names in _PROCESSORS.items() for name in names}


def find(name: str) -> Target:
    """The target of a name such as `cuda:90`, `sm_90`, `hip:gfx942`, `gfx942`, `cpu:amx` or `cpu:sapphirerapids`.

    Raises:
        ValueError: there is none, in words.
    """
    asked = name.strip().lower()
    if asked.startswith("sm_"):
        asked = f"cuda:{asked[3:].rstrip('af')}"
    if asked.startswith("gfx"):
        asked = f"hip:{asked}"
    found = TARGETS.get(_ALIASES.get(asked, asked))
    if found is None:
        raise ValueError(f"there is no target {name}; accepted are {', '.join(TARGETS)}, and processors by their "
                         f"compilers' names ({', '.join(sorted(_ALIASES))})")  # fmt: skip
    return found


def percent(part: float) -> str:
    return f"{math.floor(100 * part + 0.5)}%"
