# SPDX-License-Identifier: Apache-2.0
"""Writes a device's table as kda/triton/configs/ has them: former rows, and the winners of a sweep in their place."""
from __future__ import annotations

from pathlib import Path

import torch

import kda.triton.configs.table as tables
from kda.triton.configs.regimes import REGIMES
from kda.triton.configs.table import Row, Table


def merged(old: Table, new: Table) -> Table:
    """The rows of both in the order of the regimes, new ones in place of old ones."""
    rows = {part: old.get(part, {}) | new.get(part, {}) for part in REGIMES}
    return {part: {name: rows[part][name] for name in REGIMES[part] if name in rows[part]} for part in REGIMES if rows[part]}


def source(device: torch.device, about: str, new: Table) -> tuple[str, str]:
    """(file name, text) of the module; a former one keeps its names and its docstring, to which `about` is added once."""
    device_name = tables.device_name(device)
    module = tables.module_of(device_name)
    if module is None:
        name, names, old = tables.file_name(device), tables.names_for(device), {}
        doc = f"{device_name}: measured configurations.\n\nRows by kernel and regime (regimes.py), each with its evidence."
    else:
        name, names, old = Path(module.__file__).name, module.NAMES, module.TABLE
        doc = module.__doc__.strip()
    if about not in doc:
        doc += f"\n\n{about}"
    lines = [
        "# SPDX-License-Identifier: Apache-2.0", f'"""{doc}', '"""', "from kda.triton.configs.table import Row",
        "", f"NAMES = {_literal(names)}", "", "TABLE = {",
    ]  # fmt: skip
    for part, rows in merged(old, new).items():
        lines.append(f"    {_literal(part)}: {{")
        for regime, row in rows.items():
            lines += [f"        {_literal(regime)}: Row(", f"            {_literal(row.config)},"]
            lines += [*_evidence(row), "        ),"]
        lines.append("    },")
    return name, "\n".join([*lines, "}", ""])


def _evidence(row: Row) -> list[str]:
    """A string in as many lines as it takes."""
    pieces, line = [], ""
    for word in row.evidence.split(" "):
        if line and len(line) + len(word) > 100:
            pieces.append(line + " ")
            line = word
        else:
            line = f"{line} {word}" if line else word
    pieces.append(line)
    return [f"            {_literal(piece)}" for piece in pieces[:-1]] + [f"            {_literal(pieces[-1])},"]


def _literal(value) -> str:
    """As Python has it, with double quotes."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_literal, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)
