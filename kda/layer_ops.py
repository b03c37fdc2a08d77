# SPDX-License-Identifier: Apache-2.0
"""The public operations that do all between a KDA layer's projections at once: decode, prefill, speculative decoding.

Conventions are those of kda/ops.py; symbols: N requests or sequences, T packed tokens, H query/key heads, HV value heads,
K and V head dims, W convolution width.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kda import known, library
from kda import validation as check
from kda.dispatch import call
from kda.library import operation


@operation(library.like("qkv", shape="out_gate"), mutates=("conv_state", "ssm_state"))
def kda_decode(
    qkv: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    ssm_state_indices: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    conv_bias: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    activation: str = "sigmoid",
    eps: float = 1e-5,
    out: Tensor | None = None,
) -> Tensor:
    """One token of each request through all that lies between a KDA layer's projections, in one kernel.

    It does what `causal_conv1d_update` with SiLU on q, k and v, `fused_recurrent_kda` (l2 norm, gate and sigmoid of
    beta in the kernel) and `rms_norm_gated` do one after another: the same convolution states to the bit, recurrent
    states and output within rounding (the norm sees the recurrence's output before it is rounded).

    Args:
        qkv: [N, dim] merged projection, dim = 2 * H * K + HV * V: the columns of q, then of k, then of v, by heads.
        raw_g: [N, HV, K] raw gate values; beta: [N, HV] logits; out_gate: [N, HV, V]. Like `qkv` column slices of
            projections (any stride of the other dims, the last one contiguous), each in a dtype of its own.
        conv_state: [slots, dim, W - 1 (+ num_spec)], any strides; columns 0 to W - 2 are the last inputs. In place.
        ssm_state: [slots, HV, V, K] recurrent states, `stride(0)` free, each slot dense; fp32 or bf16. In place.
        ssm_state_indices: [N] slots of both pools, any stride, none twice. A slot <= 0, or past one of the pools, is
            padding: no state is touched and the row's output is zero.
        conv_weight: [dim, W], any strides; conv_bias: [dim] or None.
        A_log: [HV] or [1, 1, HV, 1]; g_bias: [HV * K], [HV, K] or None (or H in place of HV: one a query head).
        norm_weight: [V] of the output norm, or None.
        scale: of the queries; default K ** -0.5.
        lower_bound: the bounded gate's floor; None is the unbounded gate.
        activation: "sigmoid" for `sigmoid(out_gate)`, "silu" or "swish" for `out_gate * sigmoid(out_gate)`.
        eps: of the norm.
        out: [N, HV, V] buffer in the dtype of `qkv`, sharing memory with no input; with it nothing is allocated.

    Returns:
        [N, HV, V] in the dtype of `qkv`.

    Example:
        >>> import torch, kda
        >>> N, H, D, W, slots = 3, 2, 32, 4, 8  # three requests
        >>> conv_state, ssm_state = torch.zeros(slots, 3 * H * D, W - 1), torch.zeros(slots, H, D, D)
        >>> qkv, g, gate = torch.randn(N, 3 * H * D), torch.randn(N, H, D), torch.randn(N, H, D)
        >>> o = kda.kda_decode(
        ...     qkv, g, torch.randn(N, H), gate, conv_state, ssm_state, torch.tensor([5, 2, 7]),
        ...     torch.randn(3 * H * D, W), torch.zeros(H), norm_weight=torch.ones(D))
        >>> o.shape, [int(slot) for slot in ssm_state.flatten(1).any(1).nonzero()]
        (torch.Size([3, 2, 32]), [2, 5, 7])
    """
    seen = known.once(_check_decode, locals())
    return call(
        "decode", "kda_decode", qkv.device,
        qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, conv_weight, conv_bias,
        *layer_rule(raw_g.shape[2], A_log, g_bias, norm_weight, scale, lower_bound, eps, activation), out, seen=seen,
    )  # fmt: skip


def _check_decode(ssm_state_indices, out, **layer) -> None:
    N, slots = check_layer_tokens(**layer), min(len(layer["ssm_state"]), len(layer["conv_state"]))
    check.slots("ssm_state_indices", ssm_state_indices, N, slots, layer["qkv"])
    _check_out(out, **layer)


def _check_out(out, qkv, out_gate, **_) -> None:
    check.output(out, out_gate.shape, qkv.dtype, qkv)


def _key_heads(name: str, what: str, dim: int, HV: int, K: int, V: int) -> int:
    """H, as `dim` channels of q, k and v leave it."""
    H, rest = divmod(dim - HV * V, 2 * K)
    if rest or H < 1 or HV % H:
        wanted = f"2 * H * {K} + {HV} * {V}, H a divisor of {HV}"
        check.refuse(name, f"{dim} {what} beside {HV} value heads, K = {K} and V = {V}", wanted)
    return H


def layer_rule(K, A_log, g_bias, norm_weight, scale, lower_bound, eps, activation) -> tuple:
    """The layer's own arguments, as backends take them."""
    return (
        A_log, g_bias, norm_weight,
        K**-0.5 if scale is None else float(scale), None if lower_bound is None else float(lower_bound), float(eps),
        "sigmoid" if activation == "sigmoid" else "silu",
    )  # fmt: skip


def check_layer_tokens(
    qkv, raw_g, beta, out_gate, conv_state, ssm_state, conv_weight, A_log, g_bias, norm_weight, conv_bias, lower_bound,
    activation, **_,
) -> int:  # fmt: skip
    """Checks what `kda_decode`, `kda_prefill` and `kda_verify` have alike; returns the number of tokens."""
    N, dim = check.tokens("qkv", qkv, ("N", "dim"), check.ACTIVATIONS).shape
    HV, K = check.tokens("raw_g", raw_g, (N, "HV", "K"), check.ACTIVATIONS, qkv).shape[1:]
    V = check.tokens("out_gate", out_gate, (N, HV, "V"), check.ACTIVATIONS, qkv).shape[2]
    for name, size in (("raw_g", K), ("out_gate", V)):
        check.head_dim(name, size)
    H = _key_heads("qkv", "columns", dim, HV, K, V)
    check.tokens("beta", beta, (N, HV), check.ACTIVATIONS, qkv)
    W = check.conv_weights(conv_weight, conv_bias, dim, qkv, "conv_weight", "conv_bias")
    check.conv_states("conv_state", conv_state, dim, W - 1, qkv)
    check.states("ssm_state", ssm_state, None, HV, V, K, qkv)
    check.gate_parameters(A_log, g_bias, H, HV, K, qkv)
    if lower_bound is not None:
        check.bound(lower_bound)
    if norm_weight is not None:
        check.vector("norm_weight", norm_weight, V, check.ACTIVATIONS, qkv)
    if activation not in ("swish", "silu", "sigmoid"):
        check.refuse("activation", repr(activation), "'swish', 'silu' or 'sigmoid'")
    return N


@operation(library.like("qkv", shape="out_gate"), mutates=("conv_state", "ssm_state"))
def kda_prefill(
    qkv: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    ssm_state_indices: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor | None,
    conv_weight: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    conv_bias: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    activation: str = "sigmoid",
    eps: float = 1e-5,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Whole prompts through all that lies between a KDA layer's projections, on the states in their slots.

    It does what `causal_conv1d_fn` with SiLU on q, k and v, `chunk_kda_with_fused_gate` (l2 norm, gate and sigmoid of
    beta in the kernel) and `rms_norm_gated` do one after another, without gathering and scattering states between.

    Args:
        qkv: [T, dim] packed tokens of the merged projection, dim = 2 * H * K + HV * V: the columns of q, then of k,
            then of v, by heads.
        raw_g: [T, HV, K] raw gate values; beta: [T, HV] logits; out_gate: [T, HV, V]. Like `qkv` column slices of
            projections (any stride of the other dims, the last one contiguous), each in a dtype of its own.
        conv_state: [slots, dim, W - 1 (+ num_spec)], any strides; columns 0 to W - 2 are the last inputs. In place.
        ssm_state: [slots, HV, V, K] recurrent states, `stride(0)` free, each slot dense; fp32 or bf16. In place.
        ssm_state_indices: [N] slots of both pools, any stride, none twice. A slot <= 0, or past one of the pools, is
            padding: no state is touched and the sequence's output is zero.
        cu_seqlens: [N + 1] int32 or int64 offsets of the sequences.
        has_initial_state: [N] bool: which sequences go on from what their slots hold; the others, and all with None,
            start from zeros.
        checkpoint_offsets: [M] int32 or int64 positions among the packed tokens, in any order; with
            `checkpoint_indices` [M], slots that both states go to as they are before token `checkpoint_offsets[m]`, for
            prefix caching. A position p belongs to the sequence with cu_seqlens[n] < p <= cu_seqlens[n + 1]; one in no
            sequence, or a slot outside the pools, keeps nothing. No slot of a sequence, none twice.
        out: [T, HV, V] buffer in the dtype of `qkv`; tokens past the last sequence's end stay as they are there and are
            zero in a fresh output.

    The other arguments are those of `kda_decode`.

    Returns:
        [T, HV, V] in the dtype of `qkv`.

    Example:
        >>> import torch, kda
        >>> T, H, D, W, slots = 70, 2, 32, 4, 8  # two prompts, of 40 and 30 tokens, in slots 5 and 2
        >>> conv_state, ssm_state = torch.zeros(slots, 3 * H * D, W - 1), torch.zeros(slots, H, D, D)
        >>> qkv, g, gate = torch.randn(T, 3 * H * D), torch.randn(T, H, D), torch.randn(T, H, D)
        >>> o = kda.kda_prefill(
        ...     qkv, g, torch.randn(T, H), gate, conv_state, ssm_state, torch.tensor([5, 2]), torch.tensor([0, 40, 70]),
        ...     None, torch.randn(3 * H * D, W), torch.zeros(H), norm_weight=torch.ones(D),
        ...     checkpoint_offsets=torch.tensor([32]), checkpoint_indices=torch.tensor([7]))
        >>> o.shape, [int(slot) for slot in ssm_state.flatten(1).any(1).nonzero()]
        (torch.Size([70, 2, 32]), [2, 5, 7])
    """
    seen = known.once(_check_prefill, locals())
    return call(
        "prefill", "kda_prefill", qkv.device,
        qkv, raw_g, beta, out_gate, conv_state, ssm_state, ssm_state_indices, cu_seqlens, has_initial_state, conv_weight,
        conv_bias, *layer_rule(raw_g.shape[2], A_log, g_bias, norm_weight, scale, lower_bound, eps, activation),
        checkpoint_offsets, checkpoint_indices, out, seen=seen,
    )  # fmt: skip


def _check_prefill(
    ssm_state_indices, cu_seqlens, has_initial_state, checkpoint_offsets, checkpoint_indices, out, **layer
) -> None:  # fmt: skip
    T, qkv = check_layer_tokens(**layer), layer["qkv"]
    N, pool = _packed(cu_seqlens, T, qkv), min(len(layer["ssm_state"]), len(layer["conv_state"]))
    check.slots("ssm_state_indices", ssm_state_indices, N, pool, qkv)
    if has_initial_state is not None:
        check.flags("has_initial_state", has_initial_state, N, qkv)
    if (checkpoint_offsets is None) != (checkpoint_indices is None):
        names = ["checkpoint_offsets", "checkpoint_indices"]
        given, missing = names if checkpoint_indices is None else names[::-1]
        check.refuse(missing, "None", f"a tensor, beside `{given}`")
    if checkpoint_offsets is not None:
        check.vector("checkpoint_offsets", checkpoint_offsets, None, check.INDICES, qkv)
        check.slots("checkpoint_indices", checkpoint_indices, checkpoint_offsets.numel(), pool, qkv)
    _check_out(out, **layer)


def _packed(cu_seqlens, T: int, like: Tensor) -> int:
    """How many sequences T tokens are."""
    if cu_seqlens is None:
        check.refuse("cu_seqlens", "None", "N + 1 offsets")
    return check.sequences(cu_seqlens, 1, T, like)


@operation(library.like("qkv", shape="out_gate"), mutates=("conv_state", "ssm_state", "records"))
def kda_verify(
    qkv: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    records: Tensor,
    ssm_state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor | None,
    conv_weight: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    conv_bias: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    activation: str = "sigmoid",
    eps: float = 1e-5,
    out: Tensor | None = None,
) -> Tensor:
    """A window of draft tokens of each request, as `kda_decode` computes them one by one, in one kernel.

    A request keeps one checkpoint: its recurrent state and the first W - 1 columns of its conv state, as every other
    operation has them. Its draft tokens leave them alone and go to `records` (what each does to the recurrent state) and
    to the last columns of `conv_state` (the convolution's inputs). Once it is known how many tokens of a window were
    accepted, those are committed: by `kda_commit`, or by the next `kda_verify`, which then reads and writes each state
    once. A window that is forgotten instead (a request preempted, or all of it rejected) leaves no trace.

    Args:
        qkv, raw_g, beta, out_gate: packed tokens as in `kda_prefill`; row n has 0 to `window` tokens: the last one sampled,
            and the draft. Tokens past the window give zeros.
        conv_state: [slots, dim, W - 1 + window], any strides. In place.
        ssm_state: [slots, HV, V, K] recurrent states, `stride(0)` free, each slot dense; fp32 or bf16. Written only
            where records are committed.
        records: [slots, window, HV, 2 * K + V] fp32, `stride(0)` free, each slot dense; window 1 to 8. In place: k^, decay
            and d of each token.
        ssm_state_indices: [N] slots of the three pools, any stride, none twice. A slot <= 0, or past one of the pools, is
            padding: nothing of it is touched and the row's output is zero.
        cu_seqlens: [N + 1] int32 or int64 offsets of the rows.
        num_accepted_tokens: [N] int32 or int64: how many tokens of a row's last window to commit first, 0 to `window`. 0 for
            a row that comes from `kda_prefill`, `kda_decode` or `kda_commit`: the checkpoint is taken as it is. Anything
            else marks a stale row, treated as padding. A row without tokens commits only. None commits nothing.
        out: [T, HV, V] buffer in the dtype of `qkv`; tokens past the last row's end stay as they are there and are zero in
            a fresh output.

    The other arguments are those of `kda_decode`.

    Returns:
        [T, HV, V] in the dtype of `qkv`.

    Example:
        >>> import torch, kda
        >>> H, D, W, slots, window = 2, 32, 4, 8, 4  # two requests, in slots 5 and 2
        >>> conv_state, ssm_state = torch.zeros(slots, 3 * H * D, W - 1 + window), torch.zeros(slots, H, D, D)
        >>> records, index = torch.zeros(slots, window, H, 3 * D), torch.tensor([5, 2])
        >>> weight, A_log, norm = torch.randn(3 * H * D, W), torch.zeros(H), torch.ones(D)
        >>> for accepted in ([0, 0], [3, 1], [1, 4]):  # of the window before: there is none at first
        ...     qkv, g, gate = torch.randn(7, 3 * H * D), torch.randn(7, H, D), torch.randn(7, H, D)
        ...     o = kda.kda_verify(
        ...         qkv, g, torch.randn(7, H), gate, conv_state, ssm_state, records, index, torch.tensor([0, 3, 7]),
        ...         torch.tensor(accepted), weight, A_log, norm_weight=norm)
        >>> kda.kda_commit(conv_state, ssm_state, records, index, torch.tensor([2, 0]))  # slot 5 can go on in kda_decode
        >>> o.shape, [int(slot) for slot in ssm_state.flatten(1).any(1).nonzero()]
        (torch.Size([7, 2, 32]), [2, 5])
    """
    seen = known.once(_check_verify, locals())
    return call(
        "speculative", "kda_verify", qkv.device,
        qkv, raw_g, beta, out_gate, conv_state, ssm_state, records, ssm_state_indices, cu_seqlens, num_accepted_tokens,
        conv_weight, conv_bias, *layer_rule(raw_g.shape[2], A_log, g_bias, norm_weight, scale, lower_bound, eps, activation),
        out, seen=seen,
    )  # fmt: skip


def _check_verify(records, ssm_state_indices, cu_seqlens, num_accepted_tokens, out, **layer) -> None:
    T, qkv, conv_state = check_layer_tokens(**layer), layer["qkv"], layer["conv_state"]
    N, past = _packed(cu_seqlens, T, qkv), layer["conv_weight"].shape[1] - 1
    window = check_draft(conv_state, layer["ssm_state"], records, ssm_state_indices, num_accepted_tokens, N, qkv)
    if conv_state.shape[2] != past + window:
        check.refuse("conv_state", f"{conv_state.shape[2]} columns", f"{past} + {window}, for a window of {window}")
    if check.checking() and N and int(cu_seqlens.diff().max()) > window:
        check.refuse("cu_seqlens", f"a row of {int(cu_seqlens.diff().max())} tokens", f"{window} or fewer (KDA_CHECK)")
    _check_out(out, **layer)


@operation(library.nothing, mutates=("conv_state", "ssm_state"))
def kda_commit(
    conv_state: Tensor, ssm_state: Tensor, records: Tensor, ssm_state_indices: Tensor, num_accepted_tokens: Tensor
) -> None:
    """Applies the accepted tokens of each request's last `kda_verify` to its checkpoint, in place.

    Afterwards recurrent and conv state are those that plain decoding of the accepted tokens leaves: the conv state to the
    bit, the recurrent state within rounding (a bf16 state is rounded once, not once a token). The next `kda_verify` can
    do the same work in passing, to the same bits; this is for requests that go on in another operation, and for
    snapshots.

    Args:
        conv_state: [slots, dim, W - 1 + window]; ssm_state: [slots, HV, V, K]; records: [slots, window, HV, 2 * K + V];
            the pools that `kda_verify` was given.
        ssm_state_indices: [N] slots, any stride, none twice; slots <= 0, or past one of the pools, are padding.
        num_accepted_tokens: [N] int32 or int64, 0 to `window`. With 0, or a count out of range, nothing changes. It must not
            be more than the row had tokens, and a window must not be committed twice.

    Example:
        >>> import torch, kda
        >>> conv_state, ssm_state = torch.arange(7.0).expand(3, 96, 7).clone(), torch.zeros(3, 1, 32, 32)
        >>> records = torch.ones(3, 4, 1, 96)
        >>> kda.kda_commit(conv_state, ssm_state, records, torch.tensor([2, 1]), torch.tensor([3, 0]))
        >>> conv_state[2, 0, :3].tolist(), ssm_state[:, 0, 0, 0].tolist()
        ([3.0, 4.0, 5.0], [0.0, 0.0, 3.0])
    """
    seen = known.once(_check_commit, locals())
    call(
        "speculative", "kda_commit", ssm_state.device,
        conv_state, ssm_state, records, ssm_state_indices, num_accepted_tokens, seen=seen,
    )  # fmt: skip


def _check_commit(conv_state, ssm_state, records, ssm_state_indices, num_accepted_tokens) -> None:
    if num_accepted_tokens is None:
        check.refuse("num_accepted_tokens", "None", "N counts")
    HV, V, K = check.tensor("ssm_state", ssm_state, ("slots", "HV", "V", "K"), check.STATES).shape[1:]
    for size in (K, V):
        check.head_dim("ssm_state", size)
    check.states("ssm_state", ssm_state, None, HV, V, K, ssm_state)
    dim = check.tensor("conv_state", conv_state, ("slots", "dim", "columns"), check.ACTIVATIONS, ssm_state).shape[1]
    _key_heads("conv_state", "channels", dim, HV, K, V)
    N = len(ssm_state_indices) if isinstance(ssm_state_indices, Tensor) and ssm_state_indices.dim() else 0
    window = check_draft(conv_state, ssm_state, records, ssm_state_indices, num_accepted_tokens, N, ssm_state)
    check.conv_states("conv_state", conv_state, dim, check.CONV_WIDTHS.start - 1 + window, ssm_state)
    if conv_state.shape[2] + 1 - window not in check.CONV_WIDTHS:
        check.refuse("conv_state", f"{conv_state.shape[2]} columns", f"W - 1 + {window}, W from 2 to 8")


def check_draft(
    conv_state, ssm_state, records, ssm_state_indices, num_accepted_tokens, N: int, like: Tensor
) -> int:  # fmt: skip
    """Checks the records, slots and counts of `kda_verify` and `kda_commit`; returns the window."""
    HV, V, K = ssm_state.shape[1:]
    check.tensor("records", records, ("slots", "window", HV, 2 * K + V), (torch.float32,), like)
    window = records.shape[1]
    if records.shape[0] == 0 or window not in check.WINDOWS:
        accepted = f"[slots, 1 to {check.WINDOWS.stop - 1}, {HV}, {2 * K + V}], at least one slot"
        check.refuse("records", f"shape {list(records.shape)}", accepted)
    size = window * HV * (2 * K + V)
    if not records[0].is_contiguous() or (records.shape[0] > 1 and records.stride(0) < size):
        wanted = f"dense slots: strides ({size} or more, {size // window}, {2 * K + V}, 1)"
        check.refuse("records", f"strides {records.stride()}", wanted)
    pool = min(conv_state.shape[0], ssm_state.shape[0], records.shape[0])
    check.slots("ssm_state_indices", ssm_state_indices, N, pool, like)
    if num_accepted_tokens is not None:
        check.tensor("num_accepted_tokens", num_accepted_tokens, (N,), check.INDICES, like)
        if check.checking() and N and not 0 <= int(num_accepted_tokens.min()) <= int(num_accepted_tokens.max()) <= window:
            check.refuse("num_accepted_tokens", num_accepted_tokens.tolist(), f"counts from 0 to {window} (KDA_CHECK)")
    return window


def speculation_bytes(
    window: int, H: int, HV: int, K: int, V: int, W: int = 4, state_dtype: torch.dtype = torch.float32,
    conv_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, int]:
    """Bytes of a request's states in one layer, for windows of `window` tokens.

    Returns:
        `"full"`: a recurrent state a token, as `fused_recurrent_kda` takes them (`ssm_state_indices` [N, window]), and the
        conv state of `causal_conv1d_update`. `"recovery"`: the checkpoint, records and conv state of `kda_verify`.

    Example:
        >>> import kda
        >>> kda.speculation_bytes(window=4, H=64, HV=64, K=128, V=128)
        {'full': 17072128, 'recovery': 4931584}
    """
    state, column = HV * V * K * state_dtype.itemsize, (2 * H * K + HV * V) * conv_dtype.itemsize
    return {
        "full": window * state + (W - 2 + window) * column,
        "recovery": state + window * HV * (2 * K + V) * 4 + (W - 1 + window) * column,
    }
