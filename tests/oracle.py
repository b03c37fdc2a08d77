# SPDX-License-Identifier: Apache-2.0
"""The oracle: contract section 2 in fp64, token by token, as plain as the equations.

Everything takes exactly what an operation gets: bf16, fp16 and fp32 inputs are upcast to fp64 without rounding. Nothing
here is shared with the package, so that an error in one is not repeated in the other.
"""

import torch


def err(x, ref):
    """|x - ref| / |ref| (Frobenius), in fp64. A zero reference must be met exactly; two empty tensors agree."""
    x, ref = x.detach().double(), ref.detach().to(x.device).double()
    assert x.shape == ref.shape, f"shape {tuple(x.shape)} where the oracle has {tuple(ref.shape)}"
    distance, size = (x - ref).norm().item(), ref.norm().item()
    if distance == 0.0:
        return 0.0
    return distance / size if size > 0.0 else float("inf")


def silu(x):
    return x * torch.sigmoid(x)


def l2norm(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def per_value_head(x, HV, dim):
    """Repeat the `H` entries of `dim` so that value head `hv` finds its own, `hv // (HV // H)`."""
    return x.repeat_interleave(HV // x.shape[dim], dim=dim)


def gate(g, A_log, g_bias=None, lower_bound=None, beta=1.0, threshold=20.0):
    """y [..., HV, K] from raw g [..., HV, K], A_log [H or HV] (any shape of so many elements), g_bias or None."""
    HV, K = g.shape[-2:]
    x = g.double()
    if g_bias is not None:
        x = x + per_value_head(g_bias.double().reshape(-1, K), HV, 0)
    A = per_value_head(A_log.double().reshape(-1), HV, 0)[:, None].exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(A * x)
    softplus = torch.where(x * beta > threshold, x, torch.log1p((x * beta).clamp(max=threshold).exp()) / beta)
    return -A * softplus


def recurrence(q, k, v, y, b, S):
    """N sequences of T tokens each: q, k, y [N, T, HV, K], v [N, T, HV, V], b [N, T, HV, 1 or V], S [N, HV, V, K].

    Returns o [N, T, HV, V] and the state after every token, [N, T, HV, V, K].
    """
    outputs, states = [], []
    for t in range(q.shape[1]):
        S = S * y[:, t].exp()[:, :, None, :]
        d = b[:, t] * (v[:, t] - (S * k[:, t, :, None, :]).sum(-1))
        S = S + d[..., None] * k[:, t, :, None, :]
        outputs.append((S * q[:, t, :, None, :]).sum(-1))
        states.append(S)
    return torch.stack(outputs, 1), states


def kda(q, k, v, g, beta=None, *, scale=None, l2norm_qk=True, sigmoid_beta=False, A_log=None, g_bias=None,
        lower_bound=None, initial_state=None, cu_seqlens=None, token_states=False):
    """The whole rule. `A_log` given: g is raw; else g is the log decay. `cu_seqlens`: a list of ints, or None.

    Returns o [B, T, HV, V] (zeros past the last sequence) and the final states [N, HV, V, K]; with `token_states`
    the states after every token, [B * T, HV, V, K], instead.
    """
    B, T, _, K = k.shape
    HV, V = v.shape[-2:]
    q, k, v = (x.double() for x in (q, k, v))
    if l2norm_qk:
        q, k = l2norm(q), l2norm(k)
    q, k = (per_value_head(x, HV, 2) for x in (q * (K**-0.5 if scale is None else scale), k))
    y = gate(g, A_log, g_bias, lower_bound) if A_log is not None else g.double()
    b = torch.ones_like(v[..., 0]) if beta is None else beta.double()
    b = torch.sigmoid(b) if sigmoid_beta else b
    b = b[..., None] if b.ndim == 3 else b

    flat = [x.flatten(0, 1) for x in (q, k, v, y, b)]
    starts = [n * T for n in range(B + 1)] if cu_seqlens is None else list(cu_seqlens)
    N = len(starts) - 1
    S = torch.zeros(N, HV, V, K, dtype=torch.float64, device=q.device)
    if initial_state is not None:
        S = S + initial_state.double()
    o = torch.zeros_like(flat[2])
    every = torch.zeros(B * T, HV, V, K, dtype=torch.float64, device=q.device) if token_states else None

    lengths = [starts[n + 1] - starts[n] for n in range(N)]
    for length in sorted(set(lengths) - {0}):  # sequences of one length walk together
        rows = [n for n in range(N) if lengths[n] == length]
        tokens = torch.tensor([[starts[n] + t for t in range(length)] for n in rows], device=q.device)
        o_rows, states = recurrence(*(x[tokens] for x in flat), S[rows])
        o[tokens] = o_rows
        S[rows] = states[-1]
        if token_states:
            every[tokens] = torch.stack(states, 1)
    return o.unflatten(0, (B, T)), every if token_states else S


def conv(x, weight, bias, history, activation):
    """One sequence: x [dim, T], weight [dim, W], history [dim, W - 1]. Returns out [dim, T] and the new history."""
    W = weight.shape[1]
    line = torch.cat([history.double(), x.double()], dim=1)  # [dim, W - 1 + T]
    out = sum(line[:, w:w + x.shape[1]] * weight.double()[:, w, None] for w in range(W))
    if bias is not None:
        out = out + bias.double()[:, None]
    return silu(out) if activation else out, line[:, line.shape[1] - (W - 1):]


def rms_norm_gated(x, g, weight=None, bias=None, activation="swish", residual=None, eps=1e-6):
    """Returns y and the residual stream x + residual, both fp64."""
    x, g = x.double(), g.double()
    if residual is not None:
        x = x + residual.double()
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.double()
    if bias is not None:
        y = y + bias.double()
    return y * (torch.sigmoid(g) if activation == "sigmoid" else silu(g)), x
