# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention 0.6.0's KDA functions, computed by this package; for inference.

    from kda.drop_in.fla import chunk_kda, fused_recurrent_kda     # in place of fla.ops.kda

or, for code that is not yours, `kda.drop_in.fla.install()` before it is imported. Signatures, layouts and defaults are
fla's. B sequences of T tokens (packed: B == 1, `cu_seqlens` [N + 1] says where the N sequences lie), H query/key heads,
HV value heads, head dims K and V.
"""
from __future__ import annotations

import inspect
import sys
import warnings

import torch
from torch import Tensor

import kda
from kda import validation as check


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context=None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule over whole sequences in its chunked form, as `fla.ops.kda.chunk_kda` has it.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], of one dtype: bf16, fp16 or fp32.
        g: [B, T, HV, K] log decays, or with `use_gate_in_kernel` raw gate values.
        beta: [B, T, HV], or with `use_beta_sigmoid_in_kernel` its logits; `allow_neg_eigval` doubles the sigmoid.
        scale: of the queries; default K ** -0.5.
        initial_state: [N, HV, K, V] fp32, with `state_v_first` [N, HV, V, K], which saves a copy. Not written.
        A_log, dt_bias (by name): [HV] and [HV * K] or None, of the gate in the kernel: with `lower_bound`
            `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`, where A_log may be None for a factor of 1, else
            `-exp(A_log) * softplus(g + dt_bias)`.
        disable_recompute, safe_gate, cu_seqlens_cpu, use_graph, max_num_seqs, chunk_size (by name): accepted; they change
            no result. Any call can be captured in a CUDA graph.

    Returns:
        The output [B, T, HV, V] in the dtype of v (zeros past the last sequence's end), and the final states in fp32, laid
        out as `initial_state`, or None without `output_final_state`.

    Raises:
        NotImplementedError: `return_intermediate_states` or `cp_context` is asked for.
        TypeError, ValueError: as `kda.chunk_kda`, and for an argument that fla does not have.

    Example:
        >>> import torch
        >>> from kda.drop_in.fla import chunk_kda
        >>> q, k, v, g = (torch.randn(1, 40, 2, 32) for _ in range(4))
        >>> o, state = chunk_kda(
        ...     q, k, v, g, torch.randn(1, 40, 2), output_final_state=True, use_qk_l2norm_in_kernel=True,
        ...     use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=torch.zeros(2), lower_bound=-5.0)
        >>> o.shape, state.shape
        (torch.Size([1, 40, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    for name, value in (("return_intermediate_states", return_intermediate_states), ("cp_context", cp_context)):
        if value:
            raise NotImplementedError(f"`{name}`: got {value!r}; accepted: {'False' if value is True else None}")
    state_v_first = _state_v_first(state_v_first, kwargs)
    A_log, dt_bias, chunk_size = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None), kwargs.pop("chunk_size", 64)
    _no_more(kwargs)
    if chunk_size not in (32, 64):
        raise ValueError(f"`chunk_size` must be either 32 or 64 for KDA, got {chunk_size}.")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("`lower_bound`: got None; accepted: a negative number, beside `safe_gate` and `use_gate_in_kernel`")
    q, k, v, g, beta = map(_addressable, (q, k, v, g, beta))
    beta, sigmoid_beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if initial_state is not None:
        initial_state = (initial_state if state_v_first else initial_state.transpose(-1, -2)).contiguous()
    options = dict(
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, sigmoid_beta=sigmoid_beta,
    )  # fmt: skip
    if use_gate_in_kernel:
        bound = {} if lower_bound is None else dict(safe_gate=True, lower_bound=lower_bound)
        o, state = kda.chunk_kda_with_fused_gate(q, k, v, g, beta, _A_log(A_log, lower_bound, v), dt_bias, **options, **bound)
    else:
        o, state = kda.chunk_kda(q, k, v, g, beta, **options)
    return o, state if state_v_first or state is None else state.transpose(-1, -2).contiguous()


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule token by token, as `fla.ops.kda.fused_recurrent_kda` has it.

    Arguments, result and errors are those of `chunk_kda`; beta may also be headwise, [B, T, HV, V].

    Example:
        >>> import torch
        >>> from kda.drop_in.fla import fused_recurrent_kda
        >>> q, k, v, g = (torch.randn(3, 1, 2, 32) for _ in range(4))
        >>> state = torch.zeros(3, 2, 32, 32)
        >>> o, state = fused_recurrent_kda(
        ...     q, k, v, -g.abs(), torch.rand(3, 1, 2), initial_state=state, output_final_state=True,
        ...     use_qk_l2norm_in_kernel=True, state_v_first=True)
        >>> o.shape, state.shape
        (torch.Size([3, 1, 2, 32]), torch.Size([3, 2, 32, 32]))
    """
    state_v_first = _state_v_first(state_v_first, kwargs)
    _no_more(kwargs)
    q, k, v, g, beta = map(_addressable, (q, k, v, g, beta))
    beta, sigmoid_beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_gate_in_kernel:
        gate = dict(compute_gate=True, a_log=_A_log(A_log, lower_bound, v), g_bias=dt_bias, lower_bound=lower_bound)
    else:
        gate = {}
    state = initial_state
    if state is not None:  # a copy moves on in place
        state = state if state_v_first else state.transpose(-1, -2)
        state = state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    o, state = kda.fused_recurrent_kda(
        q, k, v, g, beta, scale=scale, initial_state=state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens, sigmoid_beta=sigmoid_beta, **gate,
    )  # fmt: skip
    if not output_final_state:
        return o, None
    return o, state if state_v_first else state.transpose(-1, -2).contiguous()


def _state_v_first(state_v_first: bool, kwargs: dict) -> bool:
    """Under its present or its former name."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`.")
    message = "`transpose_state_layout` is deprecated and renamed to `state_v_first`."
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return kwargs.pop("transpose_state_layout")


def _no_more(kwargs: dict) -> None:
    if kwargs:
        raise TypeError(f"got arguments that are not supported: {', '.join(sorted(kwargs))}")


def _addressable(x: Tensor) -> Tensor:
    """fla makes its inputs contiguous; this does so where it cannot be helped."""
    if not isinstance(x, Tensor) or (x.stride(-1) == 1 and not check.overlaps_itself(x)):
        return x
    return x.contiguous()


def _beta(beta: Tensor, sigmoid: bool, doubled: bool) -> tuple[Tensor, bool]:
    """beta, and whether the kernel has to take its sigmoid."""
    if not doubled:
        return beta, sigmoid
    if not sigmoid:
        raise ValueError("`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`.")
    return 2 * beta.float().sigmoid(), False


def _A_log(A_log: Tensor | None, lower_bound: float | None, v: Tensor) -> Tensor:
    if A_log is None and lower_bound is None:
        raise ValueError("`A_log` must be provided when `use_gate_in_kernel=True` and `lower_bound` is not set.")
    return v.new_zeros(v.shape[2], dtype=torch.float32) if A_log is None else A_log


# ---- behind fla.ops.kda

_FUNCTIONS = (chunk_kda, fused_recurrent_kda)
_replaced: list[tuple[object, str, object]] = []


def install() -> None:
    """Puts these functions behind `fla.ops.kda` in this process, for fla's own modules and for what imports them later.

    A module that has already taken the names from fla keeps those that it has, unless it is one of fla's.

    Raises:
        ImportError: fla is not installed, or its functions have other arguments than those of 0.6.0.
    """
    from fla.ops import kda as theirs

    originals = {f.__name__: getattr(theirs, f.__name__) for f in _FUNCTIONS}
    for function in _FUNCTIONS:
        if _arguments(originals[function.__name__]) != _arguments(function):
            raise ImportError(f"fla.ops.kda.{function.__name__} has other arguments than in fla 0.6.0, which this is for")
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "fla"]:
        for function in _FUNCTIONS:
            original = originals[function.__name__]
            if original is not function and vars(module).get(function.__name__) is original:
                _replaced.append((module, function.__name__, original))
                setattr(module, function.__name__, function)


def uninstall() -> None:
    """Undoes `install()`."""
    while _replaced:
        setattr(*_replaced.pop())


def _arguments(function) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
