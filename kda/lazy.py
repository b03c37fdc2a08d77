# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when somebody asks for them."""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable


def names(package: str, home: dict[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, whose submodule `home[name]` has each name."""

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home})
