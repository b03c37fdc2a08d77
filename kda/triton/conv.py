# SPDX-License-Identifier: Apache-2.0
"""Short causal convolution, a filter of width W over the tokens of every channel, with an optional SiLU.

    z = history ++ x                                    W - 1 tokens before the sequence, then its L tokens
    out[t] = act(sum_w weight[w] * z[t + w] + bias)     0 <= t < L, in fp32; z is rounded to the state's dtype

The history of a sequence is its conv state, zeros if it has none. Afterwards the state holds what the next
call reads: `z[L : L + W - 1]` in columns 0 .. W - 2. A speculative window keeps every candidate instead,
`z[1 : L + W - 1]` from column 0 on, and the next call starts at column `num_accepted_tokens - 1`.

One program computes [BT, BD] (tokens x channels) of one sequence, a row of channels after the other: every input is
loaded once, all rows ahead of the first use. The program that holds the first token is the only one that reads the state,
and the one that writes it.
"""
import torch
import triton
import triton.language as tl

from kda.triton import configs
from kda.triton.launch import Launch
from kda.triton.tiles import cast, find_sequence, sequence_range, silu


@triton.jit
def pool_slot(indices, n, s_indices, N, slots, NULL_SLOTS: tl.constexpr):
    """Slot of sequence `n`, and whether there is one; `indices` None: sequence `n` has slot `n`."""
    slot = n
    live = n < N
    if indices is not None:
        slot = tl.load(indices + n * s_indices, mask=live, other=0).to(tl.int64)
        live &= slot > 0
        for null in tl.static_range(len(NULL_SLOTS)):
            live &= slot != NULL_SLOTS[null]
    return slot, live & (slot < slots)


@triton.jit
def conv_rows(x, history, weight, bias, out, d, live, t, L, H, dim, sx_t, sh_w, sw_w, so_t,
              SILU: tl.constexpr, W: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """Stores tokens t .. t + BT - 1, zeros if not `live`; pointers are [BD] channels `d`, at token 0, column 0, tap 0.

    The history has H = W - 1 columns, or H = 0: then zeros stand for it.
    """
    PW: tl.constexpr = triton.next_power_of_2(W)
    taps, z = (), ()
    H = tl.where((t >= 0) & live, H, 0)
    for r in tl.static_range(BT + W - 1):
        j = t + (r - (W - 1))  # the token under tap 0 of row r; column j + W - 1 of the history is token j
        new = tl.load(x + j * sx_t, d < tl.where((j >= 0) & (j < L) & live, dim, 0), 0.0)
        if history is not None:
            if r < W - 1:
                if history.dtype.element_ty != x.dtype.element_ty:
                    new = cast(new.to(tl.float32), history.dtype.element_ty)
                at = j + (W - 1)
                old = tl.load(history + at * sh_w, d < tl.where((j < 0) & (at < H), dim, 0), 0.0)
                new = tl.where(j < 0, old, new.to(old.dtype))
        z += (new,)
    for w in tl.static_range(W):
        taps += (tl.load(weight + w * sw_w, d < dim, 0.0).to(tl.float32),)
    first = tl.zeros(d.shape, tl.float32)
    if bias is not None:
        first += tl.load(bias, d < dim, 0.0).to(tl.float32)

    wide = ()
    for r in tl.static_range(BT + W - 1):
        new = z[r].to(tl.float32)
        if history is not None:
            if history.dtype.element_ty != x.dtype.element_ty:
                if r >= W - 1:
                    new = cast(new, history.dtype.element_ty).to(tl.float32)
        wide += (new,)
        if r >= W - 1:
            y = first
            for w in tl.static_range(W):
                y += wide[r - (W - 1) + w] * taps[w]
            if SILU:
                y = silu(y)
            i = t + (r - (W - 1))
            y = cast(tl.where(live, y, 0.0), out.dtype.element_ty)
            tl.store(out + i * so_t, y, d < tl.where((i >= 0) & (i < L), dim, 0))


@triton.jit
def load_window(x, history, m, sh_w, W: tl.constexpr):
    """The W newest inputs as the conv state holds them, the oldest first; pointers are [BD]."""
    z = ()
    for w in tl.static_range(W - 1):
        z += (tl.load(history + w * sh_w, m, 0.0),)
    return z + (cast(tl.load(x, m, 0.0).to(tl.float32), history.dtype.element_ty),)


@triton.jit
def load_taps(weight, m, sw_w, W: tl.constexpr):
    """The W weights of each channel."""
    taps = ()
    for w in tl.static_range(W):
        taps += (tl.load(weight + w * sw_w, m, 0.0),)
    return taps


@triton.jit
def convolve(z, taps, bias, SILU: tl.constexpr, W: tl.constexpr, dtype: tl.constexpr):
    """The convolution at the newest token, in fp32 but rounded to `dtype`."""
    y = tl.zeros(z[0].shape, tl.float32)
    if bias is not None:
        y += bias.to(tl.float32)
    for w in tl.static_range(W):
        y += z[w].to(tl.float32) * taps[w].to(tl.float32)
    if SILU:
        y = silu(y)
    return cast(y, dtype).to(tl.float32)


@triton.jit
def store_window(history, z, m, sh_w, W: tl.constexpr):
    """The conv state moves on: it holds all of the window but the oldest input."""
    for w in tl.static_range(W - 1):
        tl.store(history + w * sh_w, z[w + 1], m)


@triton.jit
def roll_state(x, history, state, shift, columns, H, channels, sx_t, sh_w, W: tl.constexpr, BW: tl.constexpr):
    """Columns 0 .. columns - 1 of `state` become z[shift:]; the first H of z are columns of `history`."""
    w = tl.arange(0, BW)[:, None].to(tl.int64)  # [BW, BD] tiles; BW >= W - 1: the first holds all history
    channels = channels[None, :]
    old = tl.load(history[None, :] + (w + shift) * sh_w, mask=channels & (w + shift < H), other=0.0)
    tl.debug_barrier()  # a column is overwritten once every warp has read it
    for first in range(0, columns, BW):
        column = first + w
        j = column + shift - (W - 1)
        mask = channels & (column < columns)
        new = tl.load(x[None, :] + j * sx_t, mask=mask & (j >= 0), other=0.0).to(tl.float32)
        new = tl.where(j < 0, old, cast(new, state.dtype.element_ty))
        tl.store(state[None, :] + column * sh_w, new, mask=mask)


@triton.jit(do_not_specialize=["N", "T", "slots"])
def causal_conv1d_fwd_kernel(
    x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, out,
    N, T, dim, slots, sx_d, sx_t, sw_d, sw_w, sh_n, sh_d, sh_w, s_indices, s_initial, so_d, so_t,
    NULL_SLOTS: tl.constexpr, SILU: tl.constexpr,
    W: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(dim, BD)
    d = pid % blocks * BD + tl.arange(0, BD)
    n, c = find_sequence(query_start_loc, pid // blocks, N, T, BT)
    bos, eos = sequence_range(query_start_loc, n, N, T)
    L = eos - bos
    slot, live = pool_slot(cache_indices, n, s_indices, N, slots, NULL_SLOTS)
    H = 0
    if has_initial_state is not None:
        H = tl.where(tl.load(has_initial_state + n * s_initial, mask=live, other=0) != 0, W - 1, 0)

    x += bos * sx_t + d * sx_d
    out += bos * so_t + d * so_d
    if conv_states is not None:
        conv_states += slot * sh_n + d * sh_d
    if bias is not None:
        bias += d
    conv_rows(x, conv_states, weight + d * sw_d, bias, out, d, live, c * BT, L, H, dim, sx_t, sh_w, sw_w, so_t,
              SILU, W, BT)  # fmt: skip
    if conv_states is not None:
        if live & (c == 0):
            roll_state(x, conv_states, conv_states, L, W - 1, H, d < dim, sx_t, sh_w, W, BW)


@triton.jit(do_not_specialize=["N", "T", "slots"])
def causal_conv1d_update_kernel(
    x, weight, bias, conv_state, conv_state_indices, num_accepted_tokens, query_start_loc, out,
    N, T, dim, slots, columns, sx_n, sx_d, sx_t, sw_d, sw_w, sh_n, sh_d, sh_w, s_indices, s_accepted,
    so_n, so_d, so_t,
    NULL_SLOTS: tl.constexpr, SILU: tl.constexpr, ONE_TOKEN: tl.constexpr,
    W: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(dim, BD)
    d = pid % blocks * BD + tl.arange(0, BD)
    n = pid // blocks
    if query_start_loc is not None:
        bos, eos = sequence_range(query_start_loc, n, N, T)
    else:
        bos, eos = n * 0, n * 0 + T
    L = eos - bos
    slot, live = pool_slot(conv_state_indices, n, s_indices, N, slots, NULL_SLOTS)
    state = conv_state + slot * sh_n + d * sh_d
    if num_accepted_tokens is not None:
        accepted = tl.load(num_accepted_tokens + n * s_accepted, mask=live, other=0).to(tl.int64)
        live &= (accepted >= 1) & (accepted + W - 2 <= columns)
        history = state + (accepted - 1) * sh_w
        shift, kept = n * 0 + 1, tl.minimum(L + W - 2, columns)
    else:
        history, shift, kept = state, L, W - 1

    x += n * sx_n + bos * sx_t + d * sx_d
    out += n * so_n + bos * so_t + d * so_d
    if bias is not None:
        bias += d
    if ONE_TOKEN:  # all that the state keeps is in registers
        m, m_live, b = d < dim, d < tl.where(live, dim, 0), None
        z, taps = load_window(x, state, m_live, sh_w, W), load_taps(weight + d * sw_d, m, sw_w, W)
        if bias is not None:
            b = tl.load(bias, m, 0.0)
        tl.debug_barrier()  # a column is overwritten once every warp has read it
        store_window(state, z, m_live, sh_w, W)
        y = convolve(z, taps, b, SILU, W, out.dtype.element_ty)
        tl.store(out, cast(tl.where(live, y, 0.0), out.dtype.element_ty), m)
    else:
        for t in range(0, L, BT):
            conv_rows(x, history, weight + d * sw_d, bias, out, d, live, t, L, W - 1, dim, sx_t, sh_w, sw_w, so_t,
                      SILU, W, BT)  # fmt: skip
        if live & (L > 0):
            roll_state(x, history, state, shift, kept, W - 1, d < dim, sx_t, sh_w, W, BW)


_fwd = Launch(causal_conv1d_fwd_kernel)
_update = Launch(causal_conv1d_update_kernel)


def find(seen, *tensors):
    """`causal_conv1d_fn` as before into the last of `tensors`, see Launch.find."""
    return _fwd.find(seen, tensors)


def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, silu,
                     null_slots, seen=None):  # fmt: skip
    """[dim, T] outputs of all sequences; conv states are read and replaced in their slots."""
    keeps, out = conv_states is not None, torch.empty_like(x)
    tensors = (
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state if keeps else None, out,
    )  # fmt: skip
    if _fwd.again(seen, tensors):
        return out
    (dim, T), W, N = x.shape, weight.shape[1], query_start_loc.numel() - 1
    config = configs.pick("causal_conv1d_fwd", dim=dim, T=T, device=x.device)
    _fwd(
        seen, (T // config["BT"] + N + 1) * triton.cdiv(dim, config["BD"]), tensors,
        (N, T, dim, conv_states.shape[0] if keeps else 2**62,
         *x.stride(), *weight.stride(), *(conv_states.stride() if keeps else (0, 0, 0)),
         cache_indices.stride(0) if cache_indices is not None else 0,
         has_initial_state.stride(0) if has_initial_state is not None else 0, *out.stride()),
        NULL_SLOTS=tuple(s for s in null_slots if s > 0), SILU=silu,
        W=W, BW=triton.next_power_of_2(W - 1), **config,
    )  # fmt: skip
    return out


def find_update(seen, *tensors):
    """`causal_conv1d_update` as before into the last of `tensors`, see Launch.find."""
    return _update.find(seen, tensors)


def causal_conv1d_update(x, conv_state, weight, bias, silu, conv_state_indices, num_accepted_tokens,
                         query_start_loc, null_slots, out, seen=None):  # fmt: skip
    """Outputs of one token or one speculative window a row; conv states move on in place."""
    fresh = out is None
    out = torch.empty_like(x) if fresh else out
    tensors = (x, weight, bias, conv_state, conv_state_indices, num_accepted_tokens, query_start_loc, out)
    if _update.again(seen, tensors):
        return out
    if query_start_loc is None:
        (N, dim, T), rows, window = x.shape, x.shape[0], x.shape[2]
        x_strides, out_strides = x.stride(), out.stride()
    else:  # the extra row of a fresh output is the tail of tokens that no row owns
        (T, dim), N = x.shape, query_start_loc.numel() - 1
        rows, window = N + fresh, triton.cdiv(T, max(N, 1))
        x_strides, out_strides = (0, x.stride(1), x.stride(0)), (0, out.stride(1), out.stride(0))
    W = weight.shape[1]
    config = configs.pick("causal_conv1d_update", dim=dim, window=window, device=x.device)
    _update(
        seen, rows * triton.cdiv(dim, config["BD"]), tensors,
        (N, T, dim, conv_state.shape[0], conv_state.shape[2], *x_strides, *weight.stride(), *conv_state.stride(),
         conv_state_indices.stride(0) if conv_state_indices is not None else 0,
         num_accepted_tokens.stride(0) if num_accepted_tokens is not None else 0, *out_strides),
        NULL_SLOTS=tuple(s for s in null_slots if s > 0), SILU=silu,
        ONE_TOKEN=query_start_loc is None and num_accepted_tokens is None and T == 1,
        W=W, BW=triton.next_power_of_2(W - 1), **config,
    )  # fmt: skip
    return out
