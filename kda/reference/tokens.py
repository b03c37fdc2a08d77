# SPDX-License-Identifier: Apache-2.0
"""Tokens of one kind of row that lie between others': brought side by side, and their outputs back to their places."""

import torch


def gather_tokens(inputs, indices):
    """Dense copies of the tokens at `indices`, a list of [n] tensors, one behind the other; an index out of range: zeros.

    inputs: qkv [T, dim], raw_g [T, HV, K], beta [T, HV], out_gate [T, HV, V].
    """
    index = torch.cat([i.long() for i in indices])
    inside = (index >= 0) & (index < len(inputs[0]))
    index = index.where(inside, 0)
    return [x[index].masked_fill_(~inside.view(-1, *[1] * (x.dim() - 1)), 0) for x in inputs]


def place_tokens(out, gathered, kinds, fresh):
    """`out` [T, HV, V] gets the outputs `gathered` [n, HV, V], and with `fresh` zeros where no row has a token.

    kinds: (tokens, where, end) of each of the three kinds in turn. where: the first token of those that are in their
    places, or the indices [tokens] of those that `gathered` holds, kind after kind. end: a tensor with offsets whose last
    one is the end of what rows own of them, or None: they own all.
    """
    row = total = 0
    for tokens, where, end in kinds:
        total += tokens
        owned = tokens if end is None else min(max(int(end[-1]), 0), tokens)
        if isinstance(where, int):
            if fresh:
                out[where + owned:where + tokens] = 0
            continue
        inside = (where >= 0) & (where < len(out))
        places, y = where.long()[inside], gathered[row:row + tokens][inside]
        mine = (torch.arange(tokens, device=out.device) < owned)[inside]
        out[places[mine]] = y[mine]
        if fresh:
            out[places[~mine]] = 0
        row += tokens
    if fresh:
        out[total:] = 0
