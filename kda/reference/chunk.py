# SPDX-License-Identifier: Apache-2.0
"""The chunked form of KDA, vectorised over batch, heads and chunks (contract section 2; Kimi Linear,
arXiv 2510.26692, section 3).

With G the inclusive cumulative sum of the log decay y inside a chunk of C tokens,

    A[i,j] = b_i sum_k k_i k_j exp(G_i - G_j), i > j       M = (I + A)^-1 diag(b)
    P[i,j] = sum_k q_i k_j exp(G_i - G_j), i >= j          v_new = M (v - (k exp(G)) S^T)
    o = (q exp(G)) S^T + P v_new                           S = S * exp(G_last) + v_new^T (k exp(G_last - G))

Neither G nor the exponential of a difference is formed. `exp(G_i - G_j)` is the product of the decays exp(y)
of the tokens j+1 .. i, and is split where an even block of h tokens meets the odd block behind it, for h = 1,
2, 4, .. C/2: one factor decays j to the end of the even block, the other decays from there to i. Both are
products that the recurrence itself would form, so none overflows while its partner underflows, whatever the
gate. The inverse grows with the blocks: that of [[E, 0], [A, O]] is [[E^-1, 0], [-O^-1 A E^-1, O^-1]].
"""

import torch

from kda.reference._common import (
    full_precision, gate_parameters, l2_normalise, log_decay, per_value_head, sigmoid, token_ranges,
)  # fmt: skip

C = 32  # tokens a chunk: a power of two
SLAB_TOKENS = 4096  # tokens x value heads in work at a time: bounds memory, and fits a CPU's cache


def _within_chunks(q, k, y, b):
    """What a chunk computes without its initial state, for X = chunks x heads at once. Overwrites k and y.

    q, k, y [X, C, K]; b [X, C]. Returns M [X, C, C]; P [X, C, C]; D [X, 2C, K], the rows k_i exp(G_i) and q_i
    exp(G_i) in turn; U [X, C, K] = k_j exp(G_last - G_j); decay [X, 1, K] = exp(G_last).
    """
    X, _, K = k.shape
    MP = k.new_ones(2, X, C, 1, 1)  # the diagonal blocks of (I + A)^-1 and of P, [2, X, C/h, h, h]
    MP[1, :, :, 0, 0] = (q * k).sum(-1)
    decay = y.exp_()  # over a block: [X, C/h, K]
    D = k.new_empty(X, C, 2, K)  # k and q decayed from the start of their block on
    torch.mul(k, decay, out=D[:, :, 0])
    torch.mul(q, decay, out=D[:, :, 1])
    U = k  # decayed to the end of its block
    h = 1
    while h < C:
        n = X * C // (2 * h)
        D_odd = D.view(n, 2, 2 * h, K)[:, 1]
        U_even = U.view(n, 2, h, K)[:, 0]
        decay_even, decay_odd = decay.view(n, 2, 1, K).unbind(1)

        AP = torch.bmm(D_odd, U_even.mT).view(n, h, 2, h)  # odd rows, even columns
        A = AP[:, :, 0] * b.view(n, 2, h, 1)[:, 1]
        even, odd = MP.view(2, n, 2, h, h).unbind(2)
        MP = MP.new_zeros(2, n, 2 * h, 2 * h)
        MP[:, :, :h, :h] = even
        MP[:, :, h:, h:] = odd
        torch.neg(torch.bmm(odd[0], torch.bmm(A, even[0])), out=MP[0, :, h:, :h])
        MP[1, :, h:, :h] = AP[:, :, 1]

        D_odd *= decay_even
        U_even *= decay_odd
        decay = decay_even * decay_odd
        h *= 2
    M, P = MP.view(2, X, C, C)
    return M * b.view(X, 1, C), P, D.view(X, 2 * C, K), U, decay.view(X, 1, K)


@full_precision()
def chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm,
              sigmoid_beta, A_log, g_bias, lower_bound, out):
    """`(o [B, T, HV, V], final_state fp32 [N, HV, V, K] or None)`.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K], a log decay of any value, or raw with A_log [H or HV]
    and g_bias [H or HV, K] or None; beta [B, T, HV] or None (ones); initial_state [N, HV, V, K] or None, only
    read. Tokens that no sequence owns give zeros in a fresh output and are left untouched in `out`.
    """
    (B, T, HV, V), K, dev = v.shape, q.shape[-1], v.device
    batch, bos, length = token_ranges(cu_seqlens, B, T)
    if A_log is not None:
        A_log, g_bias = gate_parameters(A_log, g_bias, HV, K)
        A_log, g_bias = A_log[:, None, None], None if g_bias is None else g_bias[:, None]
    if out is None:
        out = v.new_zeros(B, T, HV, V)

    # The work list: chunks by (step, sequence), the longest sequence first. So the chunks of a step lie side
    # by side, and the states that it needs are the first ones.
    order = torch.argsort(length, descending=True, stable=True)
    batch, bos, length = batch[order], bos[order], length[order]
    chunks = (length + C - 1) // C
    sequence = torch.arange(len(order)).repeat_interleave(chunks)
    step = torch.arange(len(sequence)) - (chunks.cumsum(0) - chunks)[sequence]
    by_step = torch.argsort(step, stable=True)
    sequence, step = sequence[by_step], step[by_step]
    first_chunk = [0, *step.bincount().cumsum(0).tolist()]  # of every step
    token = bos[sequence, None] + step[:, None] * C + torch.arange(C)  # [chunks, C]
    padding = token >= (bos + length)[sequence, None]
    token = torch.where(padding, bos[sequence, None], token)  # a token of the same sequence, masked below
    token += batch[sequence, None] * T
    q, k, v, g = (x.flatten(0, 1) for x in (q, k, v, g))  # a copy only where the batch stride is not dense
    beta = None if beta is None else beta.flatten(0, 1)

    S = torch.zeros(len(order), HV, V, K, device=dev)
    if initial_state is not None:
        S.copy_(initial_state[order.to(dev)])

    slab = max(1, SLAB_TOKENS // (C * HV))
    for lo in range(0, len(sequence), slab):
        hi = min(lo + slab, len(sequence))
        tok, pad = token[lo:hi].flatten().to(dev), padding[lo:hi].to(dev)

        def tile(x):
            """The tokens of the slab in fp32, [chunks, heads, C, ...] contiguous."""
            x = x.index_select(0, tok).unflatten(0, (-1, C)).transpose(1, 2)
            return torch.empty(x.shape, dtype=torch.float32, device=dev).copy_(x)

        q_, k_, v_, y = tile(q), tile(k), tile(v), tile(g)
        b = torch.ones_like(v_[..., 0]) if beta is None else tile(beta)
        if use_qk_l2norm:
            q_, k_ = l2_normalise(q_), l2_normalise(k_)
        q_ = q_.mul_(scale)
        if A_log is not None:
            y = log_decay(y, A_log, g_bias, lower_bound)
        if sigmoid_beta and beta is not None:
            b = sigmoid(b)
        has_pad = bool(padding[lo:hi].any())
        if has_pad:  # a token that changes nothing: no decay, no key
            for x in (q_, k_, v_, y):
                x.masked_fill_(pad[:, None, :, None], 0)
            b.masked_fill_(pad[:, None], 0)
        q_, k_ = per_value_head(q_, HV, 1), per_value_head(k_, HV, 1)
        M, P, D, U, decay = _within_chunks(*(x.flatten(0, 1) for x in (q_, k_, y, b)))

        o = v_.flatten(0, 1)  # every chunk's values are replaced by its outputs
        for s in range(int(step[lo]), int(step[hi - 1]) + 1):  # the walk: all sequences and heads at once
            i, j = max(lo, first_chunk[s]), min(hi, first_chunk[s + 1])
            x = slice((i - lo) * HV, (j - lo) * HV)
            S_x = S[i - first_chunk[s] : j - first_chunk[s]].flatten(0, 1)  # [X, V, K]
            kS, qS = torch.bmm(D[x], S_x.mT).view(-1, C, 2, V).unbind(2)
            v_new = torch.bmm(M[x], o[x] - kS)
            torch.baddbmm(qS, P[x], v_new, out=o[x])
            S_x.mul_(decay[x]).baddbmm_(v_new.mT, U[x])

        o = o.view(-1, HV, C, V).transpose(1, 2).to(out.dtype).flatten(0, 1)
        if has_pad:
            tok, o = tok[~pad.flatten()], o[~pad.flatten()]
        out[tok // T, tok % T] = o

    if not output_final_state:
        return out, None
    final_state = torch.empty_like(S)
    final_state[order.to(dev)] = S
    return out, final_state
