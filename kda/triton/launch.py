# SPDX-License-Identifier: Apache-2.0
"""Launching a kernel again with other tensors and all else as before, without Triton's binder.

Triton looks at every argument of every launch, which on a CPU takes longer than a decode step of one request. A
launcher that has `repeat` (that of the backend named `cpu`) can launch again from the tensors' addresses alone.
"""
from __future__ import annotations

from torch import Tensor
from triton import knobs


class Launch:
    """Launches of one kernel, `kernel[(programs,)](*tensors, *numbers, **constants)`.

    `seen` (kda.validation.Seen) stands for all that decides programs, numbers and constants. Which code runs depends on
    nothing else but which addresses are multiples of 16.
    """

    def __init__(self, kernel):
        self.kernel = kernel

    def again(self, seen, tensors: tuple[Tensor | None, ...]) -> bool:
        """Launches as before for the same `seen`; False if that is not to be had."""
        if seen is None or not seen.launches or _hooked():
            return False
        addresses = [x.data_ptr() for x in tensors if x is not None]
        launch = seen.launches.get((self, *[address % 16 for address in addresses]))
        if launch is None:
            return False
        launch(addresses)
        return True

    def __call__(self, seen, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple, **constants) -> None:
        compiled = self.kernel[(programs,)](*tensors, *numbers, **constants)
        repeat = getattr(getattr(compiled, "run", None), "repeat", None)
        if seen is not None and repeat is not None:
            addresses = [x.data_ptr() for x in tensors if x is not None]
            launch = repeat(compiled.function, programs, len(addresses), (*tensors, *numbers))
            if launch is not None:
                seen.launches[(self, *[address % 16 for address in addresses])] = launch


def _hooked() -> bool:
    """Whether a profiler wants to see launches."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
