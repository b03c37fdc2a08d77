# SPDX-License-Identifier: Apache-2.0
"""What is known of a compiled kernel: registers, spills, shared memory, occupancy, size, warnings.

NVIDIA's figures come from ptxas (`-v`) and the cubin, AMD's from the metadata in LLVM's assembly, a processor's from
the object file and its assembly.
"""
from __future__ import annotations

import re
import struct

from kda.cli.targets import Target

_EXECUTABLE = 4  # SHF_EXECINSTR
_SHAPING = ("num_warps", "num_stages", "maxnreg", "waves_per_eu")


def facts(target: Target, compiled, printed: str) -> dict:
    """Of what Triton's compile() gave for the target, and what was printed meanwhile.

    Returns:
        `registers` a lane (None on a CPU), `spills` of them to memory, `shared` bytes a program (on a CPU: scratch bytes
        a thread), `occupancy` as a part of a core's warps (None on a CPU), `code` bytes, `config`, `warnings`, `hash`.
    """
    found = {"cuda": _nvidia, "hip": _amd, "cpu": _cpu}[target.backend](compiled, printed)
    found["shared"] = compiled.metadata.shared + found.pop("static", 0)
    found["occupancy"] = None
    if target.cores:
        occupancy = target.cores.occupancy(found["registers"], found["shared"], compiled.metadata.num_warps)
        found["occupancy"] = round(occupancy, 4)
    threads = compiled.metadata.num_warps * target.warp_size
    if target.cores and threads > 1024:
        found["warnings"].append(f"{threads} threads a program, and a device has 1024")
    return dict(config=_config(target, compiled), **found, hash=compiled.hash)


def _config(target: Target, compiled) -> dict:
    """The constants and options of a launch: what a configuration decides, and what follows from the call."""
    src = compiled.src
    names = src.fn.arg_names
    constants = {names[path[0]]: value for path, value in src.constants.items() if isinstance(value, (int, str, float))}
    if target.backend == "cpu":
        return constants
    options = {name: getattr(compiled.metadata, name, None) for name in _SHAPING}
    return constants | {name: value for name, value in options.items() if value}


def _nvidia(compiled, printed: str) -> dict:
    used = re.search(r"Used (\d+) registers", printed)
    stored = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    if not used or not stored:
        raise ValueError("ptxas did not say how many registers it used")
    told = [line.split(":", 1)[-1].strip() for line in printed.splitlines()
            if "warning" in line.lower() or "performance loss" in line.lower()]  # fmt: skip
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    if tensor_memory > 512:
        told.append(f"{tensor_memory} columns of tensor memory, and a device has 512")
    return dict(
        registers=int(used[1]), spills=max(map(int, stored.groups())) // 4,
        code=_text_bytes(compiled.asm["cubin"], compiled.metadata.name), warnings=_once(told),
    )  # fmt: skip


def _amd(compiled, printed: str) -> dict:
    text = compiled.asm["amdgcn"]

    def count(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", text, re.M)
        if not found:
            raise ValueError(f"the assembly has no .{name}")
        return int(found[1])

    told = [line.strip() for line in printed.splitlines() if re.search(r"\bwarning\b", line, re.I)]
    scalar = count("sgpr_spill_count")
    if scalar:  # to lanes of a vector register: no memory is touched
        told.append(f"{scalar} scalar registers spilled to lanes of vector registers")
    # .vgpr_count counts accumulation registers too where they share a file with the others (gfx90a, gfx942, gfx950).
    return dict(
        registers=count("vgpr_count"), spills=count("vgpr_spill_count"), static=count("group_segment_fixed_size"),
        code=_text_bytes(compiled.asm["hsaco"], compiled.metadata.name), warnings=_once(told),
    )  # fmt: skip


def _cpu(compiled, printed: str) -> dict:
    from kda.triton_cpu import codegen, objects, runtime

    code, isa = objects.unseal(compiled.asm["obj"], None)
    machine = codegen.target_machine(runtime.features(isa))
    machine.set_asm_verbosity(True)  # or it does not say what is spilled
    text = machine.emit_assembly(codegen.parse(compiled.asm["llir"]))
    told = [line.strip() for line in printed.splitlines() if re.search(r"\bwarning\b", line, re.I)]
    told += getattr(compiled.metadata, "remarks", ())
    return dict(registers=None, spills=len(re.findall(r"-byte Spill", text)), code=_text_bytes(code), warnings=_once(told))


def _once(lines: list[str]) -> list[str]:
    return list(dict.fromkeys(lines))


def _text_bytes(elf: bytes, kernel: str | None = None) -> int:
    """Bytes of the executable sections of a 64-bit ELF file; only the kernel's own where it has one."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("the code is no 64-bit ELF file")
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    names = rows[names_at][4]
    sizes = {}
    for name, _, flags, _, _, length in rows:
        if flags & _EXECUTABLE:
            start = names + name
            sizes[elf[start:elf.index(b"\0", start)].decode()] = length
    return sizes.get(f".text.{kernel}", sum(sizes.values()))
