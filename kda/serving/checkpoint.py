# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model's checkpoint, by name, from safetensors files."""
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

INDEX = "model.safetensors.index.json"


def import_safetensors():
    try:
        import safetensors.torch
    except ImportError as problem:
        raise ImportError("safetensors files need a package that is not installed: pip install safetensors") from problem
    return safetensors


def tensors_under(checkpoint: str | os.PathLike | Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names.

    Those of files are CPU tensors over the mapped file: nothing is read before it is used, and then only that part.

    Args:
        checkpoint: tensors by name; or the path of a safetensors file, of the index of several, or of a directory with
            `model.safetensors.index.json` or `model.safetensors`.

    Raises:
        ValueError: a file is damaged. OSError: it cannot be read. ImportError: safetensors is not installed.
    """
    if isinstance(checkpoint, Mapping):
        return {name[len(prefix) :]: x for name, x in checkpoint.items() if name.startswith(prefix)}
    safetensors, found = import_safetensors(), {}
    for path in _files(Path(checkpoint), prefix):
        try:
            with safetensors.safe_open(path, framework="pt", device="cpu") as file:
                found |= {name[len(prefix) :]: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}
        except safetensors.SafetensorError as problem:
            raise ValueError(f"{path} is no safetensors file: {problem}") from problem
    return found


def _files(path: Path, prefix: str) -> list[Path]:
    """The files that may hold names under `prefix`: of a model in many files, few do."""
    if path.is_dir():
        path = path / INDEX if (path / INDEX).is_file() else path / "model.safetensors"
    if path.suffix != ".json":
        return [path]
    try:
        names = json.loads(path.read_text())["weight_map"]
        return sorted({path.parent / file for name, file in names.items() if name.startswith(prefix)})
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} is no index of safetensors files: {problem!r}") from problem
