# SPDX-License-Identifier: Apache-2.0
"""What measures the rows of each part: `fill(session, row, **dims)`."""
from __future__ import annotations

from kda.cli.bench import accuracy, decode, first, layer, operations, paths, prefill, speculation

FILL = {
    "accuracy": accuracy.fill,
    "prefill": prefill.fill,
    "layer": layer.fill,
    "decode": decode.fill,
    "speculation": speculation.fill,
    "ops": operations.fill,
    "isa": paths.fill,
    "first": first.fill,
    "first call": first.fill_here,  # in a process of its own
}
