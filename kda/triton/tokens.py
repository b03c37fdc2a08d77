# SPDX-License-Identifier: Apache-2.0
"""Tokens of one kind of row that lie between others', brought side by side; and a fresh output made ready.

    gather    y[i] = x[index[i]]              of all four inputs of a layer at once
    clear     out[t] = 0                      where no row has a token

One program takes a few heads of a token. The third and last kind of row follows the second one, and that the first.
"""
import torch
import triton
import triton.language as tl

from kda.triton.configs import next_power_of_2
from kda.triton.launch import Launch

MOST = 2048  # elements of a tile


@triton.jit
def token_of(i, first, tokens, start, index, end, N, row):
    """Of entry `i`, if it is of the kind that begins at `first`: its token, its row of copies, whether a row owns it."""
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
    do_not_specialize=["T", "N_p", "N_v", "N_d", "T_p", "T_v", "start_d", "start_p", "start_v", "row_d", "row_p", "row_v"]
)
def gather_tokens_kernel(
    x, g, beta, gate, index_d, index_p, index_v, end_p, end_v, x_out, g_out, beta_out, gate_out, out,
    T, N_p, N_v, N_d, T_p, T_v, start_d, start_p, start_v, row_d, row_p, row_v,
    dim, x_t, g_t, g_h, beta_t, gate_t, gate_h, out_t, out_h,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(HV, BH)
    i, block = pid // blocks, pid % blocks
    is_d, t_d, y_d, owned_d = token_of(i, 0, N_d, start_d, index_d, None, 0, row_d)
    is_p, t_p, y_p, owned_p = token_of(i, N_d, T_p, start_p, index_p, end_p, N_p, row_p)
    is_v, t_v, y_v, owned_v = token_of(i, N_d + T_p, T_v, start_v, index_v, end_v, N_v, row_v)
    t = tl.where(is_d, t_d, tl.where(is_p, t_p, tl.where(is_v, t_v, i)))
    inside = (t >= 0) & (t < T)
    h, k, v = block * BH + tl.arange(0, BH), tl.arange(0, BK)[None, :], tl.arange(0, BV)[None, :]

    if out is not None:
        cleared = h[:, None] < tl.where(inside & ((owned_d | owned_p | owned_v) == 0), HV, 0)
        zeros = tl.zeros([BH, BV], out.dtype.element_ty)
        tl.store(out + t * out_t + h[:, None] * out_h + v, zeros, cleared & (v < V))

    if x_out is not None:
        moved = i < 0
        if index_d is not None:
            moved |= is_d
        if index_p is not None:
            moved |= is_p
        if index_v is not None:
            moved |= is_v
        if moved == 0:
            return
        i = tl.where(is_d, y_d, tl.where(is_p, y_p, y_v))
        d = block * BD + tl.arange(0, BD)  # [BD] this block's part of q, k and v
        m_t = h < tl.where(inside, HV, 0)
        tl.store(x_out + i * dim + d, tl.load(x + t * x_t + d, d < tl.where(inside, dim, 0), 0.0), d < dim)
        tl.store(beta_out + i * HV + h, tl.load(beta + t * beta_t + h, m_t, 0.0), h < HV)
        h, m_h, m_t = h[:, None], (h < HV)[:, None], m_t[:, None]
        o_g = tl.load(g + t * g_t + h * g_h + k, m_t & (k < K), 0.0)
        tl.store(g_out + (i * HV + h) * K + k, o_g, m_h & (k < K))
        o_gate = tl.load(gate + t * gate_t + h * gate_h + v, m_t & (v < V), 0.0)
        tl.store(gate_out + (i * HV + h) * V + v, o_gate, m_h & (v < V))


_gather = Launch(gather_tokens_kernel)


def gather_tokens(inputs, kinds, out, seen=None):
    """Launcher; the arguments as `kda.reference.tokens.gather_tokens` takes them."""
    x, g, beta, gate = inputs
    (T, dim), (HV, K), V = x.shape, g.shape[1:], gate.shape[2]
    indices = [None if isinstance(where, int) else where for _, where, _ in kinds]
    moved = [0 if index is None else tokens for (tokens, _, _), index in zip(kinds, indices)]
    n = sum(moved)
    copies, ends = [None] * 4, [None] * 2
    if n:
        copies = [torch.empty(n, *y.shape[1:], dtype=y.dtype, device=y.device) for y in inputs]
    if out is not None:
        ends = [end for _, _, end in kinds[1:]]
    tensors = (*inputs, *indices, *ends, *copies, out)
    total = n if out is None else T
    if total and not _gather.again(seen, tensors):
        counts = moved if out is None else [tokens for tokens, _, _ in kinds]
        starts = [where if isinstance(where, int) else 0 for _, where, _ in kinds]
        cfg = {"BH": min(next_power_of_2(HV), max(MOST // next_power_of_2(max(K, V)), 1)), "num_warps": 4}
        blocks = triton.cdiv(HV, cfg["BH"])
        _gather(
            seen, total * blocks, tensors,
            (T, *(0 if end is None else len(end) - 1 for end in ends), *counts, *starts, 0, moved[0], sum(moved[:2]),
             dim, x.stride(0), *g.stride()[:2], beta.stride(0), *gate.stride()[:2],
             *((0, 0) if out is None else out.stride()[:2])),
            HV=HV, K=K, V=V, BK=next_power_of_2(K), BV=next_power_of_2(V), BD=next_power_of_2(triton.cdiv(dim, blocks)),
            **cfg,
        )  # fmt: skip
    return copies
