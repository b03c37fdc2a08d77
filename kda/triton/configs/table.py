# SPDX-License-Identifier: Apache-2.0
"""Devices' tables: modules beside this one with `NAMES` and `TABLE`; whatever is put there is found.

`TABLE` is {kernel: {regime: Row}}. `NAMES` are words of the device's name, as torch (or, for a processor, Linux) has it:
"H200" is for "NVIDIA H200" and "NVIDIA H200 NVL".
"""
from __future__ import annotations

import functools
import importlib
import pkgutil
import platform
import re
from pathlib import Path
from typing import NamedTuple

import torch


class Row(NamedTuple):
    """Entries that override those of the defaults, and what speaks for them: times, versions, date."""

    config: dict
    evidence: str


Table = dict[str, dict[str, Row]]

_WITHOUT_TABLE = ("regimes", "table")


@functools.cache
def modules() -> tuple:
    """The modules that hold a device's table each."""
    folder = Path(__file__).parent
    names = [m.name for m in pkgutil.iter_modules([str(folder)]) if m.name not in _WITHOUT_TABLE]
    return tuple(importlib.import_module(f"kda.triton.configs.{name}") for name in sorted(names))


@functools.cache
def of(device: torch.device) -> Table:
    """The device's table; an empty one where there is none. Asks the driver once, and never waits for the device."""
    name = device_name(device)
    return next((module.TABLE for module in modules() if is_for(module.NAMES, name)), {})


def is_for(names: tuple[str, ...], device: str) -> bool:
    """Whether one of `names` is among the words of the device's name."""
    return any(f" {_words(name)} " in f" {_words(device)} " for name in names)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    return processor() if device.type == "cpu" else ""


@functools.cache
def processor() -> str:
    try:
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor()


def _words(name: str) -> str:
    return " ".join(name.lower().split())
