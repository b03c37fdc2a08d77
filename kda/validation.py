# SPDX-License-Identifier: Apache-2.0
"""Every check of what a caller passes in (contract.md section 6), and the normal forms that the backends take.

Dtypes and things that are no tensor raise TypeError, all else ValueError; the message names the argument, what it got
and what is accepted. Nothing here reads a value from a device, except under `KDA_CHECK=1`.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kda.dispatch import variable

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
STATES = (torch.float32, torch.bfloat16)
INDICES = (torch.int32, torch.int64)
HEAD_DIMS = range(16, 257)
CONV_WIDTHS = range(2, 9)
WINDOWS = range(1, 9)  # tokens of a speculative window


def refuse(name: str, got, accepted: str, error: type[Exception] = ValueError):
    raise error(f"`{name}`: got {got}; accepted: {accepted}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def tensor(name: str, x, shape: tuple | None, dtypes: Sequence[torch.dtype], like: Tensor | None = None) -> Tensor:
    """`x` is a tensor of one of `dtypes`, on the device of `like`, of `shape` (None or a word: any size)."""
    if not isinstance(x, Tensor):
        refuse(name, type(x).__name__, "a torch.Tensor", TypeError)
    if x.dtype not in dtypes:
        refuse(name, f"dtype {_names([x.dtype])}", f"dtype {_names(dtypes)}", TypeError)
    if like is not None and x.device != like.device:
        refuse(name, f"a tensor on {x.device}", f"one on {like.device}, where the other inputs are")
    if shape is not None and x.shape != shape and not _fits(x.shape, shape):
        refuse(name, f"shape {list(x.shape)}", f"shape [{', '.join('any' if s is None else str(s) for s in shape)}]")
    return x


def _fits(got: Sequence[int], shape: tuple) -> bool:
    if len(got) != len(shape):
        return False
    for n, wanted in zip(got, shape):
        if n != wanted and isinstance(wanted, int):
            return False
    return True


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of `x` share memory (an expanded tensor, say)."""
    if x.is_contiguous():
        return False
    extent = 1
    for stride, size in sorted((st, si) for st, si in zip(x.stride(), x.shape) if si > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def strided(name: str, x: Tensor) -> Tensor:
    """`x` has a contiguous last dim and tokens that do not overlap: what the kernels can address."""
    if x.is_contiguous() or x.numel() == 0:
        return x
    if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        refuse(name, f"strides {x.stride()}", "a contiguous last dim (stride 1)")
    if overlaps_itself(x):
        refuse(name, f"shape {list(x.shape)} with strides {x.stride()}", "tokens that do not overlap")
    return x


def tokens(name: str, x, shape: tuple, dtypes: Sequence[torch.dtype], like: Tensor | None = None) -> Tensor:
    """A strided token input: any batch and token stride, the last dim contiguous."""
    return strided(name, tensor(name, x, shape, dtypes, like))


def vector(name: str, x, size: int | None, dtypes: Sequence[torch.dtype], like: Tensor) -> Tensor:
    """A contiguous one-dimensional tensor."""
    tensor(name, x, (size,), dtypes, like)
    if x.numel() > 1 and x.stride(0) != 1:
        refuse(name, f"stride {x.stride(0)}", "a contiguous tensor")
    return x


def head_dim(name: str, size: int) -> None:
    if size not in HEAD_DIMS:
        refuse(name, f"a head dim of {size}", f"{HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}")


def attention_inputs(q, k, v, g, beta, cu_seqlens, headwise: bool, g_name: str = "g") -> tuple[int, ...]:
    """Checks the token inputs that every form of the rule takes; returns B, T, H, HV, K, V, number of sequences."""
    B, T, H, K = tokens("q", q, ("B", "T", "H", "K"), ACTIVATIONS).shape
    tokens("k", k, (B, T, H, K), (q.dtype,), q)
    HV, V = tokens("v", v, (B, T, "HV", "V"), (q.dtype,), q).shape[2:]
    for name, size in (("q", K), ("v", V)):
        head_dim(name, size)
    if H == 0 or HV == 0 or HV % H:
        refuse("v", f"{HV} value heads beside {H} query heads", "a multiple of the query heads")
    tokens(g_name, g, (B, T, HV, K), ACTIVATIONS, q)
    if beta is not None:
        if headwise and isinstance(beta, Tensor) and beta.dim() == 4:
            tokens("beta", beta, (B, T, HV, V), ACTIVATIONS, q)
        else:
            tokens("beta", beta, (B, T, HV), ACTIVATIONS, q)
    return B, T, H, HV, K, V, sequences(cu_seqlens, B, T, q)


def sequences(cu_seqlens, B: int, T: int, like: Tensor, name: str = "cu_seqlens") -> int:
    """Number of sequences: the batch, or what `cu_seqlens` (then B must be 1) cuts the packed tokens into."""
    if cu_seqlens is None:
        return B
    vector(name, cu_seqlens, None, INDICES, like)
    if cu_seqlens.numel() == 0:
        refuse(name, "an empty tensor", "N + 1 offsets, the first one 0")
    if B != 1:
        refuse(name, f"a batch of {B}", f"B == 1 beside `{name}`: packed sequences, all tokens in one row")
    if checking():
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] > T:
            refuse(name, offsets, f"offsets that start at 0, never fall and end at {T} or before (KDA_CHECK)")
    return cu_seqlens.numel() - 1


def gate_parameters(A_log, g_bias, H: int, HV: int, K: int, like: Tensor, names=("A_log", "g_bias")):
    """`A_log` as [HA] and the bias as [HA, K] or None, HA being HV (one a value head) or H (one a query head)."""
    tensor(names[0], A_log, None, ACTIVATIONS, like)
    HA = A_log.numel()
    if HA not in (H, HV) or A_log.dim() not in (1, 4) or (A_log.dim() == 4 and A_log.shape[2] != HA):
        refuse(names[0], f"shape {list(A_log.shape)}", f"[H] or [1, 1, H, 1], H being {HV}" + f" or {H}" * (H != HV))
    if not A_log.is_contiguous():
        refuse(names[0], f"strides {A_log.stride()}", "a contiguous tensor")
    if g_bias is not None:
        tensor(names[1], g_bias, None, ACTIVATIONS, like)
        if tuple(g_bias.shape) not in ((HA * K,), (HA, K)):
            refuse(names[1], f"shape {list(g_bias.shape)}", f"[{HA * K}] or [{HA}, {K}], or None")
        if not g_bias.is_contiguous():
            refuse(names[1], f"strides {g_bias.stride()}", "a contiguous tensor")
        g_bias = g_bias.view(HA, K)
    return A_log.view(-1), g_bias


def bound(lower_bound, name: str = "lower_bound") -> float:
    """The bounded gate's floor: a negative number."""
    if not isinstance(lower_bound, (int, float)) or not float("-inf") < lower_bound < 0:
        refuse(name, repr(lower_bound), "a finite negative number")
    return float(lower_bound)


def states(name: str, state, rows: int | None, HV: int, V: int, K: int, like: Tensor) -> Tensor:
    """Recurrent states [rows, HV, V, K] (rows None: a pool of any size), each slot dense, `stride(0)` free."""
    tensor(name, state, (rows, HV, V, K), STATES, like)
    if rows is None and state.shape[0] == 0:
        refuse(name, "a pool with no slot", "at least one slot")
    if state.is_contiguous():
        return state
    slot = [(st, want) for st, want, si in zip(state.stride()[1:], (V * K, K, 1), (HV, V, K)) if si > 1]
    if any(st != want for st, want in slot) or (state.shape[0] > 1 and state.stride(0) < HV * V * K):
        refuse(name, f"strides {state.stride()}", f"dense slots: strides ({HV * V * K} or more, {V * K}, {K}, 1)")
    return state


def slots(name: str, indices, rows: int, pool: int, like: Tensor, window: bool = False) -> Tensor:
    """Slot indices [rows] (or, with `window`, [rows, window]) of any stride."""
    tensor(name, indices, None, INDICES, like)
    if indices.shape[:1] != (rows,) or indices.dim() not in ((1, 2) if window else (1,)):
        refuse(name, f"shape {list(indices.shape)}", f"[{rows}]" + f" or [{rows}, window]" * window)
    if checking():
        used = indices[indices > 0]
        if (used >= pool).any():
            refuse(name, f"slot {int(used.max())}", f"slots below {pool} (KDA_CHECK)")
        if used.unique().numel() != used.numel():
            refuse(name, used.tolist(), "every slot once: two rows must not share a state (KDA_CHECK)")
    return indices


def flags(name: str, x, rows: int, like: Tensor) -> Tensor:
    return vector(name, x, rows, (torch.bool,), like)


def _rows(x: Tensor, origin: int, period: int) -> tuple[int, int] | None:
    """Bytes [first, last) that `x` takes in every `period` bytes from `origin` on; None if it has no such rows."""
    size, width = x.element_size(), 1
    for stride, n in zip(x.stride(), x.shape):
        if n > 1 and stride * size % period:
            if stride * size > period:
                return None
            width += stride * (n - 1)
    first = (x.data_ptr() - origin) % period
    return (first, first + width * size) if first + width * size <= period else None


def span(x: Tensor) -> tuple[int, int]:
    """First and end address of what `x` can touch."""
    start, size = x.data_ptr(), x.element_size()
    if x.is_contiguous():
        return start, start + size * x.numel()
    return start, start + size * (1 + sum(st * (n - 1) for st, n in zip(x.stride(), x.shape)))


def may_share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether an element of `a` may lie where one of `b` does. Column slices of one buffer are told apart."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    spans = [span(a), span(b)]
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    origin = min(a.data_ptr(), b.data_ptr())
    for period in {stride * x.element_size() for x in (a, b) for stride in x.stride()} - {0}:
        rows = [_rows(x, origin, period) for x in (a, b)]
        if None not in rows and (rows[0][1] <= rows[1][0] or rows[1][1] <= rows[0][0]):
            return False
    return True


def output(out, shape: tuple, dtype: torch.dtype, like: Tensor, last_dim: bool = True) -> None:
    """`out=`: a (possibly strided) tensor, or None."""
    if out is None:
        return
    tensor("out", out, tuple(shape), (dtype,), like)
    if last_dim:
        strided("out", out)
    elif overlaps_itself(out):
        refuse("out", f"strides {out.stride()}", "elements that do not overlap")


def common_rows(name: str, tensors: Sequence[Tensor | None], limit: int) -> list[Tensor | None]:
    """The leading dims that all tensors have alike, merged into `limit` dims (never copied); None passes through."""
    present = [x for x in tensors if x is not None]
    lead = present[0].shape[:-1]
    groups: list[list[int]] = []
    for dim in (d for d, n in enumerate(lead) if n != 1):
        if groups and all(x.stride(groups[-1][-1]) == x.stride(dim) * lead[dim] for x in present):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    if len(groups) > limit:
        refuse(name, f"shape {list(present[0].shape)} with leading dims that do not merge", f"{limit} after merging")
    pad = limit - len(groups)
    sizes = [1] * pad + [math.prod(lead[d] for d in group) for group in groups] + [present[0].shape[-1]]
    return [
        None if x is None else x.as_strided(sizes, [0] * pad + [x.stride(group[-1]) for group in groups] + [1])
        for x in tensors
    ]


def checking() -> bool:
    """Whether `KDA_CHECK=1` asks for checks of values on the device (each costs a synchronisation)."""
    return variable("KDA_CHECK") == "1"


def conv_weights(weight, bias, dim: int, like: Tensor, name: str = "weight", bias_name: str = "bias") -> int:
    """`weight` [dim, W] and `bias` [dim] or None; returns W."""
    W = tensor(name, weight, (dim, "W"), ACTIVATIONS, like).shape[1]
    if W not in CONV_WIDTHS:
        refuse(name, f"a width of {W}", f"{CONV_WIDTHS.start} to {CONV_WIDTHS.stop - 1}")
    if bias is not None:
        vector(bias_name, bias, dim, ACTIVATIONS, like)
    return W


def conv_states(name: str, state, dim: int, columns: int, like: Tensor) -> None:
    """A pool [slots, dim, columns or more], any strides."""
    tensor(name, state, ("slots", dim, "W - 1 or more"), ACTIVATIONS, like)
    if state.shape[0] == 0:
        refuse(name, "a pool with no slot", "at least one slot")
    if state.shape[2] < columns:
        refuse(name, f"{state.shape[2]} columns", f"{columns} or more")
    if overlaps_itself(state):
        refuse(name, f"strides {state.stride()}", "elements that do not overlap")
