# SPDX-License-Identifier: Apache-2.0
"""Launching a kernel again with other tensors and all else as before, without Triton's binder.

Triton looks at every argument of every launch, which on a CPU takes longer than a decode step of one request, and on a
GPU longer than most kernels of a small batch run. What was launched once can be launched again from the tensors'
addresses alone.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from math import prod
from operator import or_

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver


class Launch:
    """Launches of one kernel, `kernel[(programs,)](*tensors, *numbers, **constants)`.

    `seen` (kda.known.Seen) stands for all that decides programs, numbers and constants, beside `tag` where an
    operation launches the kernel more than once. Which code runs depends on nothing else but which addresses are
    multiples of 16.
    """

    def __init__(self, kernel):
        self.kernel = kernel

    def find(self, seen, tensors: tuple[Tensor | int | None, ...], tag=None) -> Callable[[], None] | None:
        """A launch as before for the same `seen`, of tensors or their addresses; None if that is not to be had."""
        if seen is None or not seen.launches or _hooked():
            return None
        addresses = [x if type(x) is int else x.data_ptr() for x in tensors if x is not None]
        launch = seen.launches.get((self, tag, _alignment(addresses)))
        return None if launch is None else partial(launch, addresses)

    def again(self, seen, tensors: tuple[Tensor | int | None, ...], tag=None) -> bool:
        """Launches as before, if that is to be had."""
        launch = self.find(seen, tensors, tag)
        if launch is None:
            return False
        launch()
        return True

    def __call__(
        self, seen, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple, tag=None, **constants
    ) -> None:
        compiled = self.kernel[(programs,)](*tensors, *numbers, **constants)
        if seen is None or compiled is None:  # Triton's interpreter compiles nothing
            return
        repeat = getattr(compiled.run, "repeat", None)
        if repeat is not None:
            count = sum(x is not None for x in tensors)
            launch = repeat(compiled.function, programs, count, (*tensors, *numbers))
        else:
            launch = self._repeat_on_gpu(compiled, programs, tensors, numbers, constants)
        if launch is not None:
            seen.launches[self, tag, _alignment([x.data_ptr() for x in tensors if x is not None])] = launch

    def _repeat_on_gpu(self, compiled, programs: int, tensors: tuple, numbers: tuple, constants: dict) -> Callable:
        """A launch from addresses: Triton's own launchers take them in place of tensors."""
        names = self.kernel.arg_names[len(tensors) + len(numbers) :]
        rest = (*numbers, *[constants[name] for name in names])
        places = [n for n, x in enumerate(tensors) if x is not None]
        dense = len(places) == len(tensors)
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        device = next(x.device.index for x in tensors if x is not None)
        stream = driver.active.get_current_stream

        def launch(addresses: list[int]) -> None:
            if not dense:
                spread = [None] * len(tensors)
                for n, address in zip(places, addresses):
                    spread[n] = address
                addresses = spread
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *addresses, *rest)

        return launch


class Scratch:
    """What kernels of one operation hand on to one another, in one allocation: tensors of given shapes and dtypes."""

    def __init__(self, device: torch.device, *parts: tuple[tuple[int, ...], torch.dtype]) -> None:
        self.device, self.parts, self.places, self.bytes = device, parts, [], 0
        for shape, dtype in parts:
            self.places.append(self.bytes)
            self.bytes += -(-prod(shape) * dtype.itemsize // 256) * 256

    def empty(self) -> Tensor:
        return torch.empty(self.bytes, dtype=torch.uint8, device=self.device)

    def addresses(self, memory: Tensor) -> list[int]:
        base = memory.data_ptr()
        return [base + place for place in self.places]

    def tensors(self, memory: Tensor) -> list[Tensor]:
        return [
            memory[place : place + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for place, (shape, dtype) in zip(self.places, self.parts)
        ]


def _alignment(addresses: list[int]) -> tuple[int, ...] | None:
    """Which addresses are multiples of 16; None if all are."""
    return tuple([address % 16 for address in addresses]) if reduce(or_, addresses, 0) % 16 else None


def _hooked() -> bool:
    """Whether a profiler wants to see launches."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
