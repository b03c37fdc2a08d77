# SPDX-License-Identifier: Apache-2.0
"""The depthwise causal convolution in front of KDA (contract section 2), with its states (section 5).

Every sequence is laid out behind its history of W-1 tokens. Then one plain convolution serves all of them,
and the state that a sequence leaves is a window of the same layout, however short it is.
"""

import torch

from kda.reference._common import is_live, sigmoid, token_ranges

BLOCK = 1 << 20  # elements convolved at a time: the fp32 temporaries stay in a CPU's cache


def _live_rows(N, indices, states, null_slots):
    """`(slot [N], live bool [N])` on the host: row n uses slot n without indices; not live is padding."""
    num_slots = 2**31 if states is None else states.shape[0]
    if indices is None:
        slots = torch.arange(N)
        return slots, slots < num_slots
    slots = indices.cpu().long()
    return slots, is_live(slots, num_slots, null_slots)


def _lay_out(x, first, length, history):
    """Histories and tokens of all sequences in a row.

    x [T, dim]; first, length int64 [N] (host) name the tokens of sequence n; history [N, W-1, dim]. Returns
    `(line [N*(W-1) + tokens, dim] in the dtype of history, start [N] of every history in it, src, dst)`:
    token `src[i]` of x is row `dst[i]` of the line.
    """
    N, past, dim = history.shape
    start = length.cumsum(0) - length + past * torch.arange(N)
    n = torch.arange(N).repeat_interleave(length)
    within = torch.arange(len(n)) - (length.cumsum(0) - length)[n]
    src, dst = (first[n] + within).to(x.device), (start[n] + past + within).to(x.device)
    line = history.new_empty(N * past + len(n), dim)
    line[(start[:, None] + torch.arange(past)).to(x.device)] = history
    block = max(1, BLOCK // dim)
    for s, d in zip(src.split(block), dst.split(block)):
        line[d] = x[s].to(line.dtype)
    return line, start, src, dst


def _convolve(line, src, dst, weight, bias, silu, out):
    """`out[src[i]] = act(sum_w weight[:, w] * line[dst[i] - (W-1) + w] + bias)`, in fp32; out [T, dim]."""
    W = weight.shape[1]
    taps = weight.float().t().contiguous()
    block = max(1, BLOCK // line.shape[1])
    for s, d in zip(src.split(block), dst.split(block)):
        acc = line[d - (W - 1)] * taps[0]
        for w in range(1, W):
            acc.addcmul_(line[d - (W - 1) + w].float(), taps[w])
        if bias is not None:
            acc += bias.float()
        out[s] = (acc * sigmoid(acc) if silu else acc).to(out.dtype)


def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, silu,
                     null_slots):
    """Convolution of a packed prefill: fresh [dim, T] in the dtype and memory order of x.

    x [dim, T]; weight [dim, W]; bias [dim] or None; query_start_loc [N+1]; conv_states [slots, dim, >= W-1]
    or None; cache_indices [N] or None (sequence n uses slot n); has_initial_state bool [N] or None (none has
    one).

    Columns 0 .. W-2 of a sequence's slot are its history (taken as zeros without an initial state), and
    afterwards the last W-1 columns of history and tokens. x is rounded to the dtype of the states first, so
    that a split prefill equals an unsplit one. Padding rows and tokens that no sequence owns give zeros.
    """
    (dim, T), past, N = x.shape, weight.shape[1] - 1, len(query_start_loc) - 1
    _, first, length = token_ranges(query_start_loc, 1, T)
    slots, live = _live_rows(N, cache_indices, conv_states, null_slots)
    first, length, slots = first[live], length[live], slots[live].to(x.device)

    history = x.new_zeros(len(slots), past, dim, dtype=x.dtype if conv_states is None else conv_states.dtype)
    if conv_states is not None and has_initial_state is not None:
        old = has_initial_state[live.to(x.device)]
        history[old] = conv_states[slots[old], :, :past].mT

    out = torch.zeros_like(x)
    line, start, src, dst = _lay_out(x.t(), first, length, history)
    _convolve(line, src, dst, weight, bias, silu, out.t())
    if conv_states is not None:
        end = (start + length)[:, None] + torch.arange(past)
        conv_states[slots, :, :past] = line[end.to(x.device)].mT
    return out


def causal_conv1d_update(x, conv_state, weight, bias, silu, conv_state_indices, num_accepted_tokens,
                         query_start_loc, null_slots, out):
    """Convolution of a decode or speculative batch: out (or fresh) like x.

    x [batch, dim, seqlen], or [num_tokens, dim] with query_start_loc [batch+1]; conv_state [slots, dim, L];
    conv_state_indices [batch] or None (row n uses slot n); num_accepted_tokens [batch] or None.
    Plain: columns 0 .. W-2 are the history, and afterwards the last W-1 columns of history and tokens.
    Speculative, with a tokens accepted: columns a-1 .. a+W-3 are the history, and afterwards the columns from
    0 on hold the history but its first, then the tokens, as far as L reaches: any number can come next.
    Padding rows give zeros; tokens past the last row's are left untouched in `out`.
    """
    past, L = weight.shape[1] - 1, conv_state.shape[2]
    out = torch.zeros_like(x) if out is None else out
    if query_start_loc is None:
        batch, dim, seqlen = x.shape
        row, first, length = token_ranges(None, batch, seqlen)
        first = first + row * seqlen
        tokens = x.transpose(1, 2).reshape(batch * seqlen, dim)
    else:
        _, first, length = token_ranges(query_start_loc, 1, len(x))
        tokens, begin, end = x, min(first.tolist(), default=0), max((first + length).tolist(), default=0)

    slots, live = _live_rows(len(first), conv_state_indices, conv_state, null_slots)
    column = torch.zeros_like(first)  # of the history
    if num_accepted_tokens is not None:
        column = num_accepted_tokens.cpu().long() - 1
        live &= (column >= 0) & (column <= L - past)  # else the row is stale
    live &= length > 0  # a row with no tokens leaves its state as it is
    first, length, slots, column = (i[live] for i in (first, length, slots, column))

    history = conv_state[slots.to(x.device)[:, None], :, (column[:, None] + torch.arange(past)).to(x.device)]
    line, start, src, dst = _lay_out(tokens, first, length, history)
    y = tokens.new_zeros(tokens.shape)
    _convolve(line, src, dst, weight, bias, silu, y)

    # columns 0 .. kept-1 of the slot receive rows start+skip .. of the line
    skip = length if num_accepted_tokens is None else torch.ones_like(length)
    kept = (past + length - skip).clamp(max=L)
    n = torch.arange(len(kept)).repeat_interleave(kept)
    col = torch.arange(len(n)) - (kept.cumsum(0) - kept)[n]
    conv_state[slots[n].to(x.device), :, col.to(x.device)] = line[(start[n] + skip[n] + col).to(x.device)]

    if query_start_loc is None:
        return out.copy_(y.view(batch, seqlen, dim).transpose(1, 2))
    out[begin:end] = y[begin:end]
    return out
