# SPDX-License-Identifier: Apache-2.0
"""The public operations as torch.library custom ops, for torch.compile, torch.export and whatever else traces.

torch.library's dispatch takes longer than some kernels, so that `operation` goes around it: `torch.ops.kda.NAME` is
called only where something traces, or where gradients are asked for, which it refuses in the backward pass. Its schema
is the operation's signature; but an op may return neither an argument nor None, so that it returns an empty tensor in
such a place, which the operation replaces again.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _any_requires_grad as any_requires_grad
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as functorch_level
from torch.compiler import is_compiling

_SCHEMA = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "float | None": "float?", "int": "SymInt",
    "int | None": "SymInt?", "bool": "bool", "str": "str", "bool | str | None": "str?",
}  # fmt: skip

# What vLLM's and fla's callers pass and that has nothing to say here: the grid needs no tables from the host.
HINTS = frozenset({"chunk_indices", "chunk_offsets", "chunk_size", "cu_seqlens_cpu"})


def operation(returns: Callable[..., tuple], mutates: tuple[str, ...] = ()) -> Callable:
    """Makes a public operation of a function that validates and computes.

    Args:
        returns: takes the arguments by name, gives a tuple with an entry a result: the argument, or None, that the
            result is, else a function that makes an empty tensor of the result's shape, strides and dtype.
        mutates: names of the tensors that are written, beside `out`.
    """

    def wrap(function: Callable) -> Callable:
        first = next(iter(inspect.signature(function).parameters))
        traced, recorded = _custom_op(function, returns, (*mutates, "out"))

        @functools.wraps(function)
        def run(*args, **kwargs):
            if (
                is_compiling()
                or (dispatch_modes() and _is_traced())
                or functorch_level() is not None
                or (type(x := args[0] if args else kwargs.get(first)) is not Tensor and _is_subclass(x))
            ):
                return traced(*args, **kwargs)
            if is_grad_enabled() and any_requires_grad(*args, **kwargs):
                return recorded(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    return wrap


def _is_traced() -> bool:
    """Whether tensors are fake or recorded: modes that watch real ones are welcome to see what an operation does."""
    modes = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in (modes.FAKE, modes.FUNCTIONAL, modes.PROXY))


def _is_subclass(x) -> bool:
    return isinstance(x, Tensor) and type(x) is not torch.nn.Parameter


class _Inference(torch.autograd.Function):
    """Runs `compute` without gradients; its results say that when they are asked for theirs."""

    @staticmethod
    def forward(ctx, compute, refuse, *values):
        ctx.refuse = refuse
        return compute(*values)

    @staticmethod
    def backward(ctx, *grads):
        ctx.refuse()


def _custom_op(function: Callable, returns: Callable[..., tuple], mutates: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Defines `torch.ops.kda.NAME`; returns the operation by way of it, and by way of `_Inference`."""
    name, signature = function.__name__, inspect.signature(function)
    parameters = {p.name: p for p in signature.parameters.values() if p.annotation in _SCHEMA}
    names, positions = tuple(parameters), tuple(signature.parameters)
    known = {*positions, *HINTS} if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()) else {*positions}
    words = [n for n, p in parameters.items() if p.annotation == "bool | str | None"]
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    written = [n for n in names if n in mutates]
    count = {"None": 0, "Tensor": 1}.get(signature.return_annotation, 2)
    if count == 1 and written and all(parameters[n].annotation == "Tensor | None" for n in written):
        count = 2  # inductor (torch 2.13) fails on an op of one result that could write and is given nothing to write to

    def only_fresh(given: dict, fresh: Callable[[int, Callable], Tensor]):
        """The op's results; `fresh` gives those that are neither None nor an argument."""
        wanted = [*returns(**given), None][:count]
        like = next(x for x in given.values() if isinstance(x, Tensor))
        got = [fresh(i, make) if callable(make) else like.new_empty(0) for i, make in enumerate(wanted)]
        return None if count == 0 else got[0] if count == 1 else tuple(got)

    def compute(*values):
        given = dict(zip(names, values))
        got = function(**given)
        got = got if isinstance(got, tuple) else (got,)
        return only_fresh(given, lambda i, make: got[i])

    def fake(*values):
        return only_fresh(dict(zip(names, values)), lambda i, make: make())

    def refuse(*_):
        raise RuntimeError(f"kda.{name} is for inference and has no backward pass: call it under torch.no_grad()")

    def argument(i: int, n: str) -> str:
        kind = _SCHEMA[parameters[n].annotation]
        return f"{kind.replace('Tensor', f'Tensor(a{i}!)') if n in written else kind} {n}"

    schema = ", ".join(argument(i, n) for i, n in enumerate(names))
    result = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    definition = torch.library.custom_op(
        f"kda::{name}", compute, mutates_args=written, schema=f"({schema}) -> {result}"
    )
    definition.register_fake(fake)
    definition._backward_fn = refuse  # what register_autograd sets; it will not for an op that writes

    def by_way_of(call: Callable) -> Callable:
        def by(*args, **kwargs):
            given = {**defaults, **dict(zip(positions, args)), **kwargs}
            unknown, missing = [n for n in given if n not in known], [n for n in names if n not in given]
            if unknown or missing:
                raise TypeError(f"kda.{name} got unexpected arguments {unknown} and none for {missing}")
            given = {n: given[n] for n in names}
            for n in words:
                if isinstance(given[n], bool):
                    given[n] = "silu" if given[n] else None
            got = call(*given.values())
            got = (got,) if count == 1 else got
            results = tuple([got[i] if callable(r) else r for i, r in enumerate(returns(**given))])
            return None if count == 0 else results[0] if len(results) == 1 else results

        return by

    op = getattr(torch.ops.kda, name).default
    return by_way_of(op), by_way_of(lambda *values: _Inference.apply(compute, refuse, *values))


# ---- results of the operations


def like(name: str, shape: str | None = None) -> Callable[..., tuple]:
    """One result: `out`, or a dense tensor in the dtype of argument `name` and the shape of argument `shape`.

    Without `shape` it has the strides of `name` too, as `torch.empty_like` has them.
    """

    def returns(out: Tensor | None = None, **given):
        x = given[name]
        fresh = (lambda: torch.empty_like(x)) if shape is None else (lambda: x.new_empty(given[shape].shape))
        return (fresh if out is None else out,)

    return returns


def nothing(**given) -> tuple:
    return ()


def gate(g: Tensor, head_k_dim: int, **given) -> tuple:
    heads = (g.shape[-1] // head_k_dim, head_k_dim)
    return (lambda: g.new_empty(*g.shape[:-1], *heads, dtype=torch.float32),)


def output_and_final_state(q, v, cu_seqlens, output_final_state, out, **given) -> tuple:
    """Of the chunked form."""
    final = (lambda: _states(q, v, _sequences(q, cu_seqlens))) if output_final_state else None
    return (lambda: v.new_empty(v.shape)) if out is None else out, final


def output_and_states(q, v, cu_seqlens, initial_state, inplace_final_state, out, **given) -> tuple:
    """Of the recurrent form."""
    state = initial_state
    if not inplace_final_state:
        dtype = torch.float32 if initial_state is None else initial_state.dtype
        state = lambda: _states(q, v, q.shape[0] * q.shape[1], dtype)  # noqa: E731
    elif initial_state is None:
        state = lambda: _states(q, v, _sequences(q, cu_seqlens))  # noqa: E731
    return (lambda: v.new_empty(v.shape)) if out is None else out, state


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def _states(q: Tensor, v: Tensor, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return q.new_empty(rows, v.shape[2], v.shape[3], q.shape[3], dtype=dtype)


def output_and_residual(x, residual, prenorm, residual_in_fp32, out, **given) -> tuple:
    """Of the gated norm: without a residual or a dtype to convert to, `x` is the new residual."""
    y = (lambda: x.new_empty(x.shape)) if out is None else out
    if not prenorm:
        return (y,)
    dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    return y, x if residual is None and dtype == x.dtype else lambda: x.new_empty(x.shape, dtype=dtype)


def rows_of_pool(state: Tensor, indices: Tensor, **given) -> tuple:
    return (lambda: torch.empty_like(state[:1].expand(indices.shape[0], *state.shape[1:])),)
