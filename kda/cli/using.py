# SPDX-License-Identifier: Apache-2.0
"""The configuration of a launch, launches with one of one's own, and of one kernel of an operation alone."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kda import known
from kda.cli.workloads import Work
from kda.triton import chunk, configs, launch, walk
from kda.triton.configs import regimes

# Of operations that launch several kernels, those that are left out for one to be timed alone.
OTHERS = {
    "chunk_intra": (walk._walk, walk._combine), "chunk_walk": (chunk._intra,), "chunk_combine": (chunk._intra, walk._walk),
}  # fmt: skip


def broken(device: torch.device) -> bool:
    """Whether the GPU no longer answers this process, as after an access outside of memory."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def kernel_of(part: str) -> str:
    """The name under which launchers ask for a configuration that has `part`."""
    return next((kernel for kernel, parts in regimes.PARTS.items() if part in parts), part)


def shape(kernel: str, work: Work, device: torch.device) -> dict:
    """What launchers tell `configs.pick` about a size."""
    N, T, longest, H, D = len(work.lens), sum(work.lens), max(work.lens), work.H, work.D
    states = dict(K=D, V=D, itemsize=work.state_dtype.itemsize)
    told = {
        "chunk": dict(N=N, HV=H, K=D, V=D, T=T, dtype=work.dtype, bounded=work.bounded),
        "chunk_combine": dict(K=D, V=D),
        "kda_decode": states, "kda_verify": states, "kda_commit": states,
        "fused_recurrent": dict(N=N, HV=H, K=D, V=D, T=T),
        "causal_conv1d_fwd": dict(dim=3 * H * D, T=T),
        "causal_conv1d_update": dict(dim=3 * H * D, window=longest),
        "rms_norm_gated": dict(D=D, rows=T * H),
        "fused_kda_gate": dict(T=T, HV=H, K=D),
    }  # fmt: skip
    return told[kernel] | dict(device=device)


def in_use(part: str, work: Work, device: torch.device) -> dict:
    """The configuration that a call of this very size is launched with: defaults and rows may depend on the size."""
    kernel = kernel_of(part)
    return configs.pick(kernel, **shape(kernel, work, device))


@contextlib.contextmanager
def using(part: str, config: dict) -> Iterator[None]:
    """Within the block launches of `part` take `config` where it differs; {} is what they take anyway."""
    before = dict(configs.overrides)
    configs.overrides[part] = config
    known.forget()  # or what was launched before would be launched again
    try:
        yield
    finally:
        configs.overrides.clear()
        configs.overrides.update(before)
        known.forget()


class _Nothing:
    """A kernel that is not launched; as quick as a launch that is repeated (kda.triton.launch)."""

    run = property(lambda self: self)
    function = None

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self

    def repeat(self, *args):
        return lambda addresses: None


@contextlib.contextmanager
def alone(part: str) -> Iterator[None]:
    """Within the block no other kernel of the operation is launched."""
    others = OTHERS.get(part, ())
    kernels = [other.kernel for other in others]
    for other in others:
        other.kernel = _Nothing()
    known.forget()
    try:
        yield
    finally:
        for other, kernel in zip(others, kernels):
            other.kernel = kernel
        known.forget()


class Scratch:
    """Memory between kernels that outlives a call: what one kernel left there another one finds when it runs alone."""

    def __init__(self) -> None:
        self.buffers: dict[tuple, torch.Tensor] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        fresh = launch.Scratch.empty

        def empty(scratch) -> torch.Tensor:
            key = (scratch.device, *scratch.parts)
            if key not in self.buffers:
                self.buffers[key] = fresh(scratch)
            return self.buffers[key]

        launch.Scratch.empty = empty
        try:
            yield
        finally:
            launch.Scratch.empty = fresh
