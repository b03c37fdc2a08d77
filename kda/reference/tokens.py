# SPDX-License-Identifier: Apache-2.0
"""Tokens of one kind of row that lie between others', brought side by side, and outputs to where they belong."""

import torch


def gather_tokens(inputs, kinds, out):
    """Dense copies of the tokens of those kinds that lie apart, kind after kind; `out` gets zeros where no row has a token.

    inputs: qkv [T, dim], raw_g [T, HV, K], beta [T, HV], out_gate [T, HV, V]. out: [T, HV, V] or None.
    kinds: (tokens, where, end) of each of the three kinds in turn. where: the first token of those that lie side by side,
    or the indices [tokens] of those that lie apart; out of range they give zeros. end: a tensor with offsets whose last
    one is the end of what rows own of them, or None: they own all.
    """
    T, total, apart = len(inputs[0]), 0, []
    for tokens, where, end in kinds:
        total += tokens
        if isinstance(where, int):
            where = torch.arange(where, where + tokens, device=inputs[0].device)
        else:
            where = where.long()
            apart.append(where)
        if out is not None and end is not None:
            place_rows(out, where, out.new_zeros(tokens, *out.shape[1:]), min(max(int(end[-1]), 0), tokens))
    if out is not None:
        out[total:] = 0
    if not apart:
        return [None] * 4
    index = torch.cat(apart)
    inside = (index >= 0) & (index < T)
    index = index.where(inside, 0)
    return [x[index].masked_fill_(~inside.view(-1, *[1] * (x.dim() - 1)), 0) for x in inputs]


def place_rows(out, rows, y, first=0, end=None):
    """`out[rows[i]] = y[i]` for i from `first` up to `end`; a row out of range is left out."""
    rows, y = rows[first:end].long(), y[first:end]
    inside = (rows >= 0) & (rows < len(out))
    out[rows[inside]] = y[inside]
    return out
