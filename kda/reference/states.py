# SPDX-License-Identifier: Apache-2.0
"""Rows of a state pool, gathered and scattered by slot (contract section 5)."""

from kda.reference._common import is_live


def _memory_order(state):
    """The dims of `state` after the slots, outermost in memory first, as a permutation of all dims."""
    return [0] + sorted(range(1, state.dim()), key=state.stride, reverse=True)


def gather_initial_states(state, indices, has_initial_state):
    """The states that the sequences of a batch start from: [N, *row], rows laid out as those of `state`.

    state [slots, *row]; indices [N]; has_initial_state bool [N]. Row n is `state[indices[n]]` where the
    sequence has an initial state and its slot is usable; zeros elsewhere, whatever the slot held.
    """
    order = _memory_order(state)
    pool, indices = state.permute(order), indices.long()
    live = is_live(indices, state.shape[0]) & has_initial_state
    rows = pool.new_zeros(len(indices), *pool.shape[1:])
    rows[live] = pool[indices[live]]
    return rows.permute([order.index(d) for d in range(state.dim())])


def scatter_states(state, src, indices):
    """`state[indices[n]] = src[n]` for every usable slot; null and out-of-range rows are skipped.

    state [slots, *row], written in place; src [N, *row], converted to the dtype of `state`; indices [N].
    """
    indices = indices.long()
    live = is_live(indices, state.shape[0])
    state[indices[live]] = src[live].to(state.dtype)
