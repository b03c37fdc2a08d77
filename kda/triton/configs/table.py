# SPDX-License-Identifier: Apache-2.0
"""Devices' tables: modules beside this one with `NAMES` and `TABLE`; whatever is put there is found.

`TABLE` is {kernel: {regime: Row}}. `NAMES` are words of the device's name. A GPU's name is torch's: "H200" is for "NVIDIA
H200" and "NVIDIA H200 NVL". A processor's ends with its vendor's family and model and the path that its kernels are compiled
for (kda.triton_cpu.runtime.ISAS), and its table has these words: product names in virtual machines are often no more than
"AMD EPYC", and tiles that suit one path do not suit another. So a table holds for all processors of the same model, on the
path that it was measured on, and for no others.
"""
from __future__ import annotations

import functools
import importlib
import pkgutil
import platform
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch


class Row(NamedTuple):
    """Entries that override those of the defaults, and what speaks for them: times, versions, date."""

    config: dict
    evidence: str


Table = dict[str, dict[str, Row]]

_WITHOUT_TABLE = ("regimes", "table")
_VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}


@functools.cache
def modules() -> tuple:
    """The modules that hold a device's table each."""
    folder = Path(__file__).parent
    names = [m.name for m in pkgutil.iter_modules([str(folder)]) if m.name not in _WITHOUT_TABLE]
    return tuple(importlib.import_module(f"kda.triton.configs.{name}") for name in sorted(names))


@functools.cache
def of(device: torch.device) -> Table:
    """The device's table; an empty one where there is none. Asks the driver once, and never waits for the device."""
    module = module_of(device_name(device))
    return {} if module is None else module.TABLE


def module_of(device: str) -> ModuleType | None:
    """The module that has the table of a device of this name, or None."""
    return next((module for module in modules() if is_for(module.NAMES, device)), None)


def is_for(names: tuple[str, ...], device: str) -> bool:
    """Whether one of `names` is among the words of the device's name."""
    return any(f" {_words(name)} " in f" {_words(device)} " for name in names)


def device_name(device: torch.device) -> str:
    """What tables are found by: "NVIDIA H200", "AMD EPYC (AMD family 25 model 17), avx512bf16"; "" if there is no name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    if device.type != "cpu":
        return ""
    path = processor_path()
    return f"{processor().name} ({model_words()}), {path}" if path else ""


def names_for(device: torch.device) -> tuple[str, ...]:
    """`NAMES` of a table measured on the device."""
    return (f"{model_words()}, {processor_path()}",) if device.type == "cpu" else (device_name(device),)


def file_name(device: torch.device) -> str:
    """Of the module for the device's table: nvidia_h200.py, amd_epyc_25_17_avx512bf16.py."""
    name = device_name(device)
    if device.type == "cpu":
        name = f"{processor().name} {processor().family} {processor().model} {processor_path()}"
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"\((r|tm)\)", "", name.lower())).strip("_") + ".py"


class Processor(NamedTuple):
    name: str
    vendor: str
    family: str
    model: str


@functools.cache
def processor() -> Processor:
    """As Linux tells it; elsewhere a name alone."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    said = dict(re.findall(r"^(\S.*?)[ \t]*:[ \t]*(.*)$", text.partition("\n\n")[0], re.M))
    name = said.get("model name") or platform.processor() or platform.machine()
    vendor = said.get("vendor_id", "unknown")
    return Processor(name, _VENDORS.get(vendor, vendor), said.get("cpu family", "0"), said.get("model", "0"))


def model_words() -> str:
    """The processor's model, as its vendor numbers it; its name where that is all there is."""
    _, vendor, family, model = processor()
    return processor().name if vendor == "unknown" else f"{vendor} family {family} model {model}"


def processor_path() -> str:
    """The path that kernels are compiled for; "" where none are, as in Triton's interpreter."""
    from triton import knobs

    if knobs.runtime.interpret:
        return ""
    try:
        from kda.triton_cpu.runtime import selected_isa

        return selected_isa()
    except (ImportError, RuntimeError):  # no llvmlite; KDA_CPU_ISA names no path of this machine, which compiling will say
        return ""


def _words(name: str) -> str:
    return " ".join(re.sub(r"[(),]", " ", name.lower()).split())
