# SPDX-License-Identifier: Apache-2.0
"""The public operations: validate, dispatch on the tensors' device, return.

Names, argument order, defaults and the in-place update of states are those of vLLM 0.33's functions, so that a caller
changes only its import. No input other than states and `out=` is ever written. Symbols: B batch, T tokens (packed
sequences: B == 1, T all tokens), N sequences, H query/key heads, HV value heads (a multiple of H), K and V head dims
(16 to 256), W convolution width (2 to 8). Activations are bf16, fp16 or fp32, recurrent states fp32 or bf16. Token
inputs are strided: any batch, token and head stride, the last dim contiguous; they are read in place.

All operations raise TypeError for a wrong dtype and ValueError for any other bad argument, before anything is written.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kda import known, library
from kda import validation as check
from kda.dispatch import call
from kda.library import operation


def _only_hints(kwargs: dict) -> None:
    unknown = sorted(set(kwargs) - library.HINTS)
    if unknown:
        raise TypeError(f"got unexpected keyword arguments: {', '.join(unknown)}")


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


@operation(library.like("x"), mutates=("conv_states",))
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = 0,
    metadata=None,
    validate_data: bool = False,
) -> Tensor:
    """Depthwise causal convolution of packed sequences (prefill), with states that carry over.

    Args:
        x: [dim, T], any strides; usually the transpose of a column slice of a [T, wide] projection.
        weight: [dim, W]; bias: [dim] or None.
        conv_states: [slots, dim, W - 1 (+ num_spec)], any strides; the last W - 1 inputs of each request, in columns
            0 to W - 2. Read where `has_initial_state`, updated in place for every sequence. None keeps nothing.
        query_start_loc: [N + 1] int32 or int64, cumulative sequence lengths.
        cache_indices: [N] slots (any stride), or None: sequence n owns row n. A slot <= 0, >= slots, or equal to
            `pad_slot_id` or `null_block_id` marks padding: its state is untouched and its output zero.
        has_initial_state: [N] bool; None and False start from zeros, whatever the slot holds.
        activation: "silu", "swish" or True for SiLU, None or False for none.
        metadata, validate_data: accepted for vLLM's callers; not needed.

    Returns:
        [dim, T] in the dtype of `x`; zero past the last sequence's end.

    Example:
        >>> import torch, kda
        >>> x = torch.randn(5, 48).t()  # 5 tokens of 48 channels
        >>> states = torch.zeros(3, 48, 3)
        >>> starts, slots = torch.tensor([0, 2, 5]), torch.tensor([1, 2])
        >>> kda.causal_conv1d_fn(x, torch.randn(48, 4), None, states, starts, cache_indices=slots).shape
        torch.Size([48, 5])
    """
    del metadata, validate_data
    seen = known.once(_check_conv, locals())
    return call(
        "conv", "causal_conv1d_fn", x.device,
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, bool(activation),
        (pad_slot_id, null_block_id or 0), seen=seen,
    )  # fmt: skip


def _check_conv(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, **_) -> None:
    dim, T = check.tensor("x", x, ("dim", "T"), check.ACTIVATIONS).shape
    W = _check_conv_weights(x, dim, weight, bias, activation)
    if query_start_loc is None:
        check.refuse("query_start_loc", "None", "N + 1 offsets")
    N = check.sequences(query_start_loc, 1, T, x, "query_start_loc")
    if conv_states is not None:
        check.conv_states("conv_states", conv_states, dim, W - 1, x)
        if cache_indices is not None:
            check.slots("cache_indices", cache_indices, N, conv_states.shape[0], x)
        elif conv_states.shape[0] < N:
            check.refuse("conv_states", f"{conv_states.shape[0]} rows", f"at least {N}, one a sequence")
    elif cache_indices is not None or has_initial_state is not None:
        check.refuse("conv_states", "None", "a tensor, beside `cache_indices` or `has_initial_state`")
    if has_initial_state is not None:
        check.flags("has_initial_state", has_initial_state, N, x)


def _check_conv_weights(x, dim: int, weight, bias, activation) -> int:
    """Checks what both convolutions have alike; returns W."""
    if check.overlaps_itself(x):
        check.refuse("x", f"strides {x.stride()}", "elements that do not overlap")
    if activation not in (None, True, False, "silu", "swish"):
        check.refuse("activation", repr(activation), "'silu', 'swish', True, False or None")
    return check.conv_weights(weight, bias, dim, x)


@operation(library.like("x"), mutates=("conv_state",))
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = 0,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Depthwise causal convolution of one or a few new tokens a request (decode, speculative verify).

    Args:
        x: [batch, dim], [batch, dim, seqlen], or [num_tokens, dim] with `query_start_loc`; any strides. Not written
            (vLLM's function overwrites it when `out` is missing).
        conv_state: [slots, dim, W - 1 (+ num_spec)], any strides; updated in place.
        weight: [dim, W]; bias: [dim] or None; activation: as in `causal_conv1d_fn`.
        conv_state_indices: [batch] slots (any stride), or None: row n owns slot n. A slot <= 0, >= slots or equal to
            `null_block_id` marks padding: state untouched, output zero.
        num_accepted_tokens: [batch]; how many tokens of the request's last window were accepted. The history then
            starts at column `accepted - 1`, and the window's inputs are all kept. 0, or more than num_spec + 1, marks a
            stale row, treated as padding.
        query_start_loc: [batch + 1] cumulative lengths of packed rows; max_query_len: their upper bound.
        out: buffer shaped like `x`; rows past the last token stay as they are there and are zero in a fresh output.

    Returns:
        `out`, or a fresh tensor shaped like `x`.

    Example:
        >>> import torch, kda
        >>> state = torch.zeros(4, 48, 3)
        >>> kda.causal_conv1d_update(torch.randn(2, 48), state, torch.randn(48, 4), activation="silu").shape
        torch.Size([2, 48])
    """
    del validate_data
    seen = known.once(_check_conv_update, locals())
    single = x.dim() == 2 and query_start_loc is None
    y = call(
        "conv", "causal_conv1d_update", x.device,
        x.unsqueeze(-1) if single else x, conv_state, weight, bias, bool(activation), conv_state_indices,
        num_accepted_tokens, query_start_loc, (null_block_id or 0,),
        out.unsqueeze(-1) if single and out is not None else out, seen=seen,
    )  # fmt: skip
    return out if out is not None else y.squeeze(-1) if single else y


def _check_conv_update(
    x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens, query_start_loc, max_query_len, out,
    **_,
) -> None:  # fmt: skip
    check.tensor("x", x, None, check.ACTIVATIONS)
    packed = query_start_loc is not None
    if x.dim() not in ((2,) if packed else (2, 3)):
        accepted = "[num_tokens, dim]" if packed else "[batch, dim] or [batch, dim, seqlen]"
        check.refuse("x", f"shape {list(x.shape)}", accepted)
    dim = x.shape[1]
    W = _check_conv_weights(x, dim, weight, bias, activation)
    batch, longest = (x.shape[0], 1 if x.dim() == 2 else x.shape[2])
    if packed:
        if conv_state_indices is None:
            check.refuse("conv_state_indices", "None", "slots, beside `query_start_loc`")
        batch, longest = check.sequences(query_start_loc, 1, x.shape[0], x, "query_start_loc"), max_query_len
        if num_accepted_tokens is not None and max_query_len < 1:
            check.refuse("max_query_len", max_query_len, "the longest row, 1 or more")
    kept = W - 1 if num_accepted_tokens is None else W - 2 + max(longest, 1)
    check.conv_states("conv_state", conv_state, dim, kept, x)
    if conv_state_indices is not None:
        check.slots("conv_state_indices", conv_state_indices, batch, conv_state.shape[0], x)
    elif conv_state.shape[0] < batch:
        check.refuse("conv_state", f"{conv_state.shape[0]} rows", f"at least {batch}, one a row of `x`")
    if num_accepted_tokens is not None:
        check.vector("num_accepted_tokens", num_accepted_tokens, batch, check.INDICES, x)
    check.output(out, x.shape, x.dtype, x, last_dim=False)


@operation(library.gate)
def fused_kda_gate(
    g: Tensor,
    A: Tensor,
    head_k_dim: int,
    g_bias: Tensor | None = None,
    beta: float = 1.0,
    threshold: float = 20.0,
    safe_gate: bool = False,
    lower_bound: float | None = -5.0,
) -> Tensor:
    """Log decays of the KDA gate from its raw projection.

    `lower_bound * sigmoid(exp(A) * (g + g_bias))` with `safe_gate`, else
    `-exp(A) * softplus(g + g_bias, beta, threshold)`.

    Args:
        g: [..., H * K], last dim contiguous, the leading dims any that merge into two.
        A: [H] or [1, 1, H, 1], the logarithm of the amplitude; g_bias: [H * K], [H, K] or None.
        head_k_dim: K.
        beta, threshold: of the softplus; threshold: linear above it.
        lower_bound: the bounded gate's floor; None means -5.

    Returns:
        [..., H, K] in fp32, natural logarithms, <= 0.

    Example:
        >>> import torch, kda
        >>> kda.fused_kda_gate(torch.randn(7, 4 * 32), torch.zeros(4), 32, safe_gate=True).shape
        torch.Size([7, 4, 32])
    """
    seen = known.once(_check_gate, locals())
    H, K = g.shape[-1] // head_k_dim, head_k_dim

    def views() -> list[Tensor | None]:
        rows = check.common_rows("g", [g], 2)[0]
        return [rows.unflatten(-1, (H, K)), A.view(H), None if g_bias is None else g_bias.view(H, K)]

    y = call(
        "gate", "fused_kda_gate", g.device,
        *seen.views((g, A, g_bias), views), beta, threshold,
        (-5.0 if lower_bound is None else float(lower_bound)) if safe_gate else None, seen=seen,
    )  # fmt: skip
    return y.view(*g.shape[:-1], H, K)


def _check_gate(g, A, head_k_dim, g_bias, beta, safe_gate, lower_bound, **_) -> None:
    check.strided("g", check.tensor("g", g, None, check.ACTIVATIONS))
    K = head_k_dim
    if g.dim() < 1 or not isinstance(K, int) or K < 1 or g.shape[-1] % K:
        check.refuse("g", f"shape {list(g.shape)} beside head_k_dim={K}", "[..., H * head_k_dim]")
    H = g.shape[-1] // K
    check.gate_parameters(A, g_bias, H, H, K, g, names=("A", "g_bias"))
    if not beta > 0:
        check.refuse("beta", beta, "a positive number")
    if safe_gate and lower_bound is not None:
        check.bound(lower_bound)


@operation(library.output_and_final_state)
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    sigmoid_beta: bool = False,
    out: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule over whole sequences in its chunked form (prefill), from log decays.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], all of one dtype.
        g: [B, T, HV, K] log decays (natural logarithm), of any size; `fused_kda_gate` makes them.
        beta: [B, T, HV], raw logits with `sigmoid_beta`; None is 1.
        scale: of the queries; default K ** -0.5.
        initial_state: [N, HV, V, K] fp32 or bf16, or None for zeros. Not written.
        output_final_state: whether to return the states after the last token.
        use_qk_l2norm_in_kernel: divide q and k by their l2 norm.
        cu_seqlens: [N + 1] int32 or int64 offsets of packed sequences (then B == 1); None: N = B sequences.
        out: [B, T, HV, V] buffer; tokens past the last sequence's end stay as they are there and are zero in a fresh
            output.

    Returns:
        The output [B, T, HV, V] in the dtype of v, and the final states [N, HV, V, K] in fp32 or None.

    Example:
        >>> import torch, kda
        >>> q, k, v = (torch.randn(1, 40, 2, 32) for _ in range(3))
        >>> g, beta = -torch.rand(1, 40, 2, 32), torch.rand(1, 40, 2)
        >>> o, state = kda.chunk_kda(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([1, 40, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    _only_hints(kwargs)
    del kwargs
    seen = known.once(_check_chunk, locals())
    return call(
        "chunk", "chunk_kda", q.device,
        q, k, v, g, beta, _scale(scale, q), initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel,
        sigmoid_beta, None, None, None, out, seen=seen,
    )  # fmt: skip


def _check_chunk(
    q, k, v, g, beta, initial_state, cu_seqlens, out, A_log=None, g_bias=None, g_name: str = "g", **_
) -> None:  # fmt: skip
    _, _, H, HV, K, V, N = check.attention_inputs(q, k, v, g, beta, cu_seqlens, headwise=False, g_name=g_name)
    if A_log is not None:
        check.gate_parameters(A_log, g_bias, H, HV, K, q)
    if initial_state is not None:
        check.states("initial_state", initial_state, N, HV, V, K, q)
    check.output(out, v.shape, v.dtype, q)


@operation(library.output_and_final_state)
def chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor | None,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
    *,
    sigmoid_beta: bool = False,
    out: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda` from the gate's raw projection; the gate is computed in the kernel.

    Args:
        raw_g: [B, T, HV, K] raw gate values.
        A_log: [HV] or [1, 1, HV, 1]; g_bias: [HV * K], [HV, K] or None (or H in place of HV: one a query head).
        safe_gate: the bounded gate `lower_bound * sigmoid(exp(A_log) * (raw_g + g_bias))`, else the unbounded
            `-exp(A_log) * softplus(raw_g + g_bias)`.

    The other arguments and the result are those of `chunk_kda`.

    Example:
        >>> import torch, kda
        >>> q, k, v, g = (torch.randn(1, 40, 2, 32) for _ in range(4))
        >>> o, state = kda.chunk_kda_with_fused_gate(
        ...     q, k, v, g, torch.rand(1, 40, 2), torch.zeros(2), None, use_qk_l2norm_in_kernel=True, safe_gate=True)
        >>> o.shape, state
        (torch.Size([1, 40, 2, 32]), None)
    """
    _only_hints(kwargs)
    del kwargs
    seen = known.once(_check_chunk_with_gate, locals())
    return call(
        "chunk", "chunk_kda", q.device,
        q, k, v, raw_g, beta, _scale(scale, q), initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel,
        sigmoid_beta, A_log, g_bias, float(lower_bound) if safe_gate else None, out, seen=seen,
    )  # fmt: skip


def _check_chunk_with_gate(raw_g, A_log, safe_gate, lower_bound, **given) -> None:
    if A_log is None:
        check.refuse("A_log", "None", "[HV] amplitudes")
    if safe_gate:
        check.bound(lower_bound)
    _check_chunk(g=raw_g, A_log=A_log, g_name="raw_g", **given)


@operation(library.output_and_states, mutates=("initial_state",))
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token (decode, speculative verify), with states in a pool.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], all of one dtype.
        g: [B, T, HV, K] log decays, or raw gate values with `compute_gate`.
        beta: [B, T, HV], or headwise [B, T, HV, V]; raw logits with `sigmoid_beta`; None is 1.
        scale: of the queries; default K ** -0.5.
        initial_state: with `ssm_state_indices` the pool [slots, HV, V, K] (`stride(0)` free, each slot dense), else one
            state a sequence [N, HV, V, K]; fp32 or bf16. None (without indices): zeros.
        inplace_final_state: update `initial_state`; False leaves it alone and returns the state after every token.
        cu_seqlens: [N + 1] int32 or int64 offsets of packed sequences (then B == 1); None: N = B sequences.
        ssm_state_indices: [N] slots, or [N, window]: token t then writes column t. A slot <= 0 or >= slots is padding:
            no state is touched and the row's output is zero.
        num_accepted_tokens: [N]; with [N, window] slots the initial state is read from column `accepted - 1`. 0, or more
            than the window, marks a stale row, treated as padding.
        out: [B, T, HV, V] buffer; tokens past the last sequence's end stay as they are there and are zero in a fresh
            output.
        a_log, g_bias, compute_gate, lower_bound: the gate computed in the kernel, as in `chunk_kda_with_fused_gate`;
            `lower_bound=None` is the unbounded gate.

    Returns:
        The output [B, T, HV, V] in the dtype of v, and the states: `initial_state` itself (or, where it was None, fresh
        fp32 states [N, HV, V, K]), or without `inplace_final_state` the state after every token [B * T, HV, V, K].

    Example:
        >>> import torch, kda
        >>> q, k, v, g = (torch.randn(3, 1, 2, 32) for _ in range(4))  # three requests, one token each
        >>> pool = torch.zeros(8, 2, 32, 32)
        >>> o, _ = kda.fused_recurrent_kda(
        ...     q, k, v, g, torch.rand(3, 1, 2), initial_state=pool, ssm_state_indices=torch.tensor([5, 2, 7]),
        ...     a_log=torch.zeros(2), compute_gate=True)
        >>> o.shape, [int(slot) for slot in pool.flatten(1).any(1).nonzero()]
        (torch.Size([3, 1, 2, 32]), [2, 5, 7])
    """
    _only_hints(kwargs)
    del kwargs
    if not compute_gate:
        a_log = g_bias = lower_bound = None
    seen = known.once(_check_recurrent, locals())
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    lower_bound = None if lower_bound is None else float(lower_bound)
    state, token_states = initial_state, None
    if not inplace_final_state:
        dtype = torch.float32 if state is None else state.dtype
        token_states = torch.zeros(B * T, HV, V, K, dtype=dtype, device=q.device)
    elif state is None:
        N = B if cu_seqlens is None else cu_seqlens.numel() - 1
        state = torch.zeros(N, HV, V, K, dtype=torch.float32, device=q.device)
    out = call(
        "recurrent", "fused_recurrent_kda", q.device,
        q, k, v, g, beta, _scale(scale, q), state, cu_seqlens, ssm_state_indices,
        num_accepted_tokens, use_qk_l2norm_in_kernel, sigmoid_beta, a_log, g_bias, lower_bound, token_states, out,
        seen=seen,
    )  # fmt: skip
    return out, state if token_states is None else token_states


def _check_recurrent(
    q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, out, a_log, g_bias, compute_gate,
    lower_bound, **_,
) -> None:  # fmt: skip
    B, T, H, HV, K, V, N = check.attention_inputs(q, k, v, g, beta, cu_seqlens, headwise=True)
    if compute_gate:
        if a_log is None:
            check.refuse("a_log", "None", "[HV] amplitudes, beside `compute_gate`")
        check.gate_parameters(a_log, g_bias, H, HV, K, q, names=("a_log", "g_bias"))
        if lower_bound is not None:
            check.bound(lower_bound)
    if ssm_state_indices is None:
        if num_accepted_tokens is not None:
            check.refuse("ssm_state_indices", "None", "[N, window] slots, beside `num_accepted_tokens`")
        if initial_state is not None:
            check.states("initial_state", initial_state, N, HV, V, K, q)
    else:
        if initial_state is None:
            check.refuse("initial_state", "None", "a state pool, beside `ssm_state_indices`")
        pool = check.states("initial_state", initial_state, None, HV, V, K, q).shape[0]
        check.slots("ssm_state_indices", ssm_state_indices, N, pool, q, window=True)
        _window(ssm_state_indices, num_accepted_tokens, cu_seqlens, N, T, q)
    check.output(out, v.shape, v.dtype, q)


def _window(indices: Tensor, accepted: Tensor | None, cu_seqlens: Tensor | None, N: int, T: int, like: Tensor) -> None:
    """The speculative window: as many slots a row as the row has tokens."""
    if accepted is not None:
        check.vector("num_accepted_tokens", accepted, N, check.INDICES, like)
        if indices.dim() != 2:
            check.refuse("ssm_state_indices", f"shape {list(indices.shape)}", "[N, window], beside `num_accepted_tokens`")
    if indices.dim() != 2 or N == 0:
        return
    longest = T
    if cu_seqlens is not None:
        longest = int(cu_seqlens.diff().max()) if check.checking() else 0
    if longest > indices.shape[1]:
        check.refuse("ssm_state_indices", f"a window of {indices.shape[1]}", f"{longest}, the longest sequence, or more")


@operation(library.output_and_residual)
def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    *,
    out: Tensor | None = None,
):
    """`rms_norm(x + residual) * weight + bias`, times `g * sigmoid(g)` ("swish", "silu") or `sigmoid(g)`, in fp32.

    Args:
        x, g, residual: [..., D], last dim contiguous, leading dims any that merge into three; g may also be a view of
            the same elements with other leading dims ([T, H * D] beside [T, H, D]).
        weight, bias: [D] or None.
        prenorm: also return `x + residual`, in the dtype of `residual` (without one: fp32 with `residual_in_fp32`).
        out: buffer shaped like x, sharing memory with no input.

    Returns:
        A tensor shaped like x in its dtype; with `prenorm` a pair of it and the new residual.

    Example:
        >>> import torch, kda
        >>> x, g = torch.randn(5, 2, 32), torch.randn(5, 64)
        >>> kda.rms_norm_gated(x, g, torch.ones(32), None, activation="sigmoid").shape
        torch.Size([5, 2, 32])
    """
    seen = known.once(_check_norm, locals())
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    residual_out = None
    if prenorm:
        kind = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
        if residual is None and kind == x.dtype:
            residual_out = x
        else:
            residual_out = torch.empty_like(x, dtype=kind, memory_format=torch.contiguous_format)
    written = None if residual_out is x else residual_out
    x, g, residual, written, rows = seen.views(
        (x, g, residual, written, out),
        lambda: check.common_rows("x", [x, g.view(x.shape), residual, written, out], 3),
    )
    call(
        "norm", "rms_norm_gated", x.device,
        x, g, weight, bias, "sigmoid" if activation == "sigmoid" else "silu", residual, written, eps, rows, seen=seen,
    )  # fmt: skip
    return (out, residual_out) if prenorm else out


def _check_norm(x, g, weight, bias, activation, residual, out, **_) -> None:
    check.strided("x", check.tensor("x", x, None, check.ACTIVATIONS))
    D = x.shape[-1] if x.dim() else 0
    if D == 0:
        check.refuse("x", f"shape {list(x.shape)}", "[..., D]")
    check.strided("g", check.tensor("g", g, None, check.ACTIVATIONS, x))
    if g.shape != x.shape:
        try:
            g.view(x.shape)
        except RuntimeError:
            check.refuse("g", f"shape {list(g.shape)} with strides {g.stride()}", f"a view of shape {list(x.shape)}")
    if activation not in ("swish", "silu", "sigmoid"):
        check.refuse("activation", repr(activation), "'swish', 'silu' or 'sigmoid'")
    for name, x_d in (("weight", weight), ("bias", bias)):
        if x_d is not None:
            check.vector(name, x_d, D, check.ACTIVATIONS, x)
    if residual is not None:
        check.tokens("residual", residual, tuple(x.shape), check.ACTIVATIONS, x)
    check.output(out, x.shape, x.dtype, x)


@operation(library.rows_of_pool)
def gather_initial_states(state: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    """Rows of a state pool as one tensor, zeros where a request starts fresh.

    Args:
        state: [slots, ...] recurrent or convolution states; each slot a dense block, `stride(0)` free.
        indices: [N] slots of any stride; has_initial_state: [N] bool.

    Returns:
        [N, ...] in the dtype and the dim order of `state`. Rows without an initial state, of the null slot (<= 0) or
        past the pool are zeros.

    Example:
        >>> import torch, kda
        >>> pool = torch.randn(4, 2, 16, 16)
        >>> kda.gather_initial_states(pool, torch.tensor([3, 1]), torch.tensor([True, False]))[1].any()
        tensor(False)
    """
    seen = known.once(_check_gather, locals())
    return call("states", "gather_initial_states", state.device, state, indices, has_initial_state, seen=seen)


def _check_gather(state, indices, has_initial_state) -> None:
    _check_rows(state, indices)
    check.flags("has_initial_state", has_initial_state, indices.shape[0], state)


@operation(library.nothing, mutates=("state",))
def scatter_states(state: Tensor, src: Tensor, indices: Tensor) -> None:
    """Writes rows into a state pool: `state[indices] = src`, in place.

    Args:
        state: [slots, ...], each slot a dense block, `stride(0)` free.
        src: [N, ...] rows in the same dim order, any dtype of a state; converted to the pool's.
        indices: [N] slots of any stride, each at most once; rows of the null slot (<= 0) or past the pool are skipped.

    Example:
        >>> import torch, kda
        >>> pool = torch.zeros(4, 2, 16, 16)
        >>> kda.scatter_states(pool, torch.ones(2, 2, 16, 16), torch.tensor([3, 0]))
        >>> pool.flatten(1).any(1)
        tensor([False, False, False,  True])
    """
    seen = known.once(_check_scatter, locals())
    call("states", "scatter_states", state.device, state, src, indices, seen=seen)


def _check_scatter(state, src, indices) -> None:
    _check_rows(state, indices)
    check.tensor("src", src, (indices.shape[0], *state.shape[1:]), check.ACTIVATIONS, state)
    if any(a != b for a, b, n in zip(src.stride()[1:], state.stride()[1:], src.shape[1:]) if n > 1):
        check.refuse("src", f"strides {src.stride()}", f"rows laid out like the pool's: strides {state.stride()[1:]}")
    if src.shape[0] > 1 and src.stride(0) < state[0].numel():
        check.refuse("src", f"strides {src.stride()}", "rows that do not overlap")


def _check_rows(state, indices) -> None:
    """A pool of any states, and slots in it."""
    check.tensor("state", state, None, check.ACTIVATIONS)
    if state.dim() < 2 or state.shape[0] == 0:
        check.refuse("state", f"shape {list(state.shape)}", "[slots, ...] with at least one slot")
    extent = 1
    for stride, size in sorted((st, si) for st, si in zip(state.stride()[1:], state.shape[1:]) if si > 1):
        if stride != extent:
            check.refuse("state", f"strides {state.stride()}", "slots that are dense blocks (any order of their dims)")
        extent *= size
    if state.shape[0] > 1 and state.stride(0) < extent:
        check.refuse("state", f"strides {state.stride()}", "slots that do not overlap")
    check.slots("indices", indices, indices.numel() if isinstance(indices, Tensor) else 0, state.shape[0], state)
