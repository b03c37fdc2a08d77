# SPDX-License-Identifier: Apache-2.0
"""A Triton backend named `cpu`: TTIR to LLVM IR to native code through llvmlite, the grid over torch's own threads.

Triton finds it through the entry-point group `triton.backends` while `import triton` is still running, so nothing
here imports Triton's top level, `triton.language` or torch at module level. It knows nothing of the package around it.

    ttir.py        printed TTIR to a typed SSA graph
    lowering/      that graph to LLVM IR with explicit vectors
    codegen.py     LLVM IR to object code and assembly
    objects.py     object code sealed for the cache, and loaded
    runtime.py     processor features, threads, scratch memory, the launch of a grid
    libdevice.py   `triton.language.extra.libdevice`
    compiler.py    Triton's first door: the stages of a compilation and its options
    driver.py      Triton's second door: the device, and the launch of a kernel
"""
from __future__ import annotations

import importlib
import importlib.metadata
import inspect

# Part of every cache key: raise it when the same TTIR may compile to other code or the call convention changes.
VERSION = "1"


def other_backend(module: str, base: type) -> type | None:
    """The class of another package that has registered a Triton backend named `cpu`: Triton is to find it in ours too.

    Two entry points of one name are one backend to Triton, whichever it reads last.
    """
    for entry in importlib.metadata.entry_points().select(group="triton.backends", name="cpu"):
        if entry.value != __name__:
            for found in vars(importlib.import_module(f"{entry.value}.{module}")).values():
                if inspect.isclass(found) and issubclass(found, base) and not inspect.isabstract(found):
                    return found
    return None
