# SPDX-License-Identifier: Apache-2.0
"""Tokens of one kind of row that lie between others': brought side by side, and their outputs back to their places.

    gather    y[i] = x[index[i]]              of all four inputs of a layer at once
    place     out[index[i]] = y[i]            and zeros where no row has a token

One program takes a few heads of a token. The third and last kind of row follows the second one, and that the first.
"""
import torch
import triton
import triton.language as tl

from kda.triton.configs import next_power_of_2
from kda.triton.launch import Launch

MOST = 2048  # elements of a tile


@triton.jit(do_not_specialize=["N_0", "N_1", "N_2", "T"])
def gather_tokens_kernel(
    x, g, beta, gate, index_0, index_1, index_2, x_out, g_out, beta_out, gate_out,
    N_0, N_1, N_2, T, dim, x_t, g_t, g_h, beta_t, gate_t, gate_h,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(HV, BH)
    i, block = pid // blocks, pid % blocks
    t = tl.load(index_0 + i, i < N_0, 0).to(tl.int64)
    j = i - N_0
    if index_1 is not None:
        t += tl.load(index_1 + j, (j >= 0) & (j < N_1), 0).to(tl.int64)
    j -= N_1
    if index_2 is not None:
        t += tl.load(index_2 + j, (j >= 0) & (j < N_2), 0).to(tl.int64)
    inside = (t >= 0) & (t < T)
    h, k, v = block * BH + tl.arange(0, BH), tl.arange(0, BK)[None, :], tl.arange(0, BV)[None, :]
    d = block * BD + tl.arange(0, BD)  # [BD] this block's part of q, k and v
    m_t = h < tl.where(inside, HV, 0)

    tl.store(x_out + i * dim + d, tl.load(x + t * x_t + d, d < tl.where(inside, dim, 0), 0.0), d < dim)
    tl.store(beta_out + i * HV + h, tl.load(beta + t * beta_t + h, m_t, 0.0), h < HV)
    h, m_h, m_t = h[:, None], (h < HV)[:, None], m_t[:, None]
    o_g = tl.load(g + t * g_t + h * g_h + k, m_t & (k < K), 0.0)
    tl.store(g_out + (i * HV + h) * K + k, o_g, m_h & (k < K))
    o_gate = tl.load(gate + t * gate_t + h * gate_h + v, m_t & (v < V), 0.0)
    tl.store(gate_out + (i * HV + h) * V + v, o_gate, m_h & (v < V))


@triton.jit
def token_of(i, first, tokens, start, index, end, N, row):
    """Of entry `i`, if it is of the kind that begins at `first`: its token, its row of outputs, whether a row owns it."""
    j = i - first
    here = (j >= 0) & (j < tokens)
    t = start + j
    if index is not None:
        t = tl.load(index + j, here, 0).to(tl.int64)
    owned = here
    if end is not None:
        owned = here & (j < tl.load(end + N).to(tl.int64))
    return here, t, row + j, owned


@triton.jit(
    do_not_specialize=["T", "N_d", "N_p", "N_v", "T_p", "T_v", "start_d", "start_p", "start_v", "row_d", "row_p", "row_v"]
)
def place_tokens_kernel(
    index_d, index_p, index_v, end_p, end_v, y, out,
    T, N_p, N_v, N_d, T_p, T_v, start_d, start_p, start_v, row_d, row_p, row_v, out_t, out_h,
    HV: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(HV, BH)
    i, h = pid // blocks, pid % blocks * BH + tl.arange(0, BH)[:, None]
    is_d, t_d, y_d, owned_d = token_of(i, 0, N_d, start_d, index_d, None, 0, row_d)
    is_p, t_p, y_p, owned_p = token_of(i, N_d, T_p, start_p, index_p, end_p, N_p, row_p)
    is_v, t_v, y_v, owned_v = token_of(i, N_d + T_p, T_v, start_v, index_v, end_v, N_v, row_v)
    t = tl.where(is_d, t_d, tl.where(is_p, t_p, tl.where(is_v, t_v, i)))
    row = tl.where(is_d, y_d, tl.where(is_p, y_p, y_v))
    owned = owned_d | owned_p | owned_v
    moved = i < 0
    if index_d is not None:
        moved |= is_d
    if index_p is not None:
        moved |= is_p
    if index_v is not None:
        moved |= is_v
    if owned & (moved == 0):  # written in place
        return
    v = tl.arange(0, BV)[None, :]
    inside = (t >= 0) & (t < T)
    m_y = (h < tl.where(inside & owned, HV, 0)) & (v < V)
    o = tl.zeros([BH, BV], out.dtype.element_ty)
    if y is not None:
        o = tl.load(y + (row * HV + h) * V + v, m_y, 0.0)
    if FRESH:
        m_y = (h < tl.where(inside, HV, 0)) & (v < V)
    tl.store(out + t * out_t + h * out_h + v, o, m_y)


_gather = Launch(gather_tokens_kernel)
_place = Launch(place_tokens_kernel)


def _tile(HV: int, *dims: int) -> dict:
    return {"BH": min(next_power_of_2(HV), max(MOST // next_power_of_2(max(dims)), 1)), "num_warps": 4}


def gather_tokens(inputs, indices, seen=None):
    """Launcher; the arguments as `kda.reference.tokens.gather_tokens` takes them, three indices at most."""
    x, g, beta, gate = inputs
    counts = ([*map(len, indices)] + [0, 0])[:3]
    (T, dim), (HV, K), V, n = x.shape, g.shape[1:], gate.shape[2], sum(counts)
    copies = [torch.empty(n, *t.shape[1:], dtype=t.dtype, device=t.device) for t in inputs]
    tensors = (*inputs, *(*indices, None, None)[:3], *copies)
    if n and not _gather.again(seen, tensors):
        cfg = _tile(HV, K, V)
        blocks = triton.cdiv(HV, cfg["BH"])
        _gather(
            seen, n * blocks, tensors,
            (*counts, T, dim, x.stride(0), *g.stride()[:2], beta.stride(0), *gate.stride()[:2]),
            HV=HV, K=K, V=V, BK=next_power_of_2(K), BV=next_power_of_2(V), BD=next_power_of_2(triton.cdiv(dim, blocks)),
            **cfg,
        )  # fmt: skip
    return copies


def place_tokens(out, gathered, kinds, fresh, seen=None):
    """Launcher; the arguments as `kda.reference.tokens.place_tokens` takes them."""
    (T, HV, V), counts = out.shape, [tokens for tokens, _, _ in kinds]
    indices = [None if isinstance(where, int) else where for _, where, _ in kinds]
    ends = [end for _, _, end in kinds[1:]]
    tensors = (*indices, *ends, gathered, out)
    total = T if fresh else sum(counts)
    if total and not _place.again(seen, tensors):
        starts = [where if isinstance(where, int) else 0 for _, where, _ in kinds]
        rows = [sum(n for n, i in zip(counts[:kind], indices) if i is not None) for kind in range(3)]
        cfg = _tile(HV, V)
        _place(
            seen, total * triton.cdiv(HV, cfg["BH"]), tensors,
            (T, *(0 if end is None else len(end) - 1 for end in ends), *counts, *starts, *rows, *out.stride()[:2]),
            HV=HV, V=V, BV=next_power_of_2(V), FRESH=fresh, **cfg,
        )  # fmt: skip
