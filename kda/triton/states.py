# SPDX-License-Identifier: Apache-2.0
"""Rows of a state pool by slot index, one dense block of memory a row.

    gather    out[n] = state[indices[n]] where has_initial_state[n], else zeros
    scatter   state[indices[n]] = src[n]

Slot <= 0 and slot >= slots are padding: gathered as zeros, not scattered. One program copies BS values of
one row.
"""
from math import prod

import torch
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.launch import Launch
from kda.triton.tiles import cast


@triton.jit(do_not_specialize=["slots"])
def gather_kernel(
    state, indices, has_initial_state, out, slots, size, s_slot, s_indices, s_initial, BS: tl.constexpr
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(size, BS)
    n, i = pid // blocks, pid % blocks * BS + tl.arange(0, BS)
    slot = tl.load(indices + n * s_indices).to(tl.int64)
    live = (slot > 0) & (slot < slots) & (tl.load(has_initial_state + n * s_initial) != 0)
    row = tl.load(state + slot * s_slot + i, mask=i < tl.where(live, size, 0), other=0.0)
    tl.store(out + n * size + i, row, mask=i < size)


@triton.jit(do_not_specialize=["slots"])
def scatter_kernel(state, src, indices, slots, size, s_slot, s_src, s_indices, BS: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(size, BS)
    n, i = pid // blocks, pid % blocks * BS + tl.arange(0, BS)
    slot = tl.load(indices + n * s_indices).to(tl.int64)
    mask = i < tl.where((slot > 0) & (slot < slots), size, 0)
    row = tl.load(src + n * s_src + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(state + slot * s_slot + i, cast(row, state.dtype.element_ty), mask=mask)


_gather = Launch(gather_kernel)
_scatter = Launch(scatter_kernel)


def gather_initial_states(state, indices, has_initial_state, seen=None):
    """[N, *row] copies of the slots' rows, in the pool's dim order; zeros where there is no initial state."""
    N, size = indices.numel(), prod(state.shape[1:])
    shape, strides = (N, *state.shape[1:]), (size, *state.stride()[1:])
    out = torch.empty_strided(shape, strides, dtype=state.dtype, device=state.device)
    tensors = (state, indices, has_initial_state, out)
    if _gather.again(seen, tensors):
        return out
    config = configs.pick("states", size=size)
    _gather(
        seen, N * triton.cdiv(size, config["BS"]), tensors,
        (state.shape[0], size, state.stride(0), indices.stride(0), has_initial_state.stride(0)), **config,
    )  # fmt: skip
    return out


def scatter_states(state, src, indices, seen=None):
    """Writes `src` [N, *row] into the slots' rows, converted to the pool's dtype."""
    tensors = (state, src, indices)
    if _scatter.again(seen, tensors):
        return
    N, size = indices.numel(), prod(state.shape[1:])
    config = configs.pick("states", size=size)
    _scatter(
        seen, N * triton.cdiv(size, config["BS"]), tensors,
        (state.shape[0], size, state.stride(0), src.stride(0), indices.stride(0)), **config,
    )  # fmt: skip
