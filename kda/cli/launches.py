# SPDX-License-Identifier: Apache-2.0
"""Every kernel launch of the public operations: the one list that `kda compile` and the tests go through.

`python -m kda.cli.launches TARGET` pretends to have the target's device, calls the operations and compiles what they
launch. It prints a JSON line for each call, {"op", "called", "error"}, one when a compilation begins, {"op", "kernel",
"grid", "number"}, and one when it has ended, the same with "ok" and what is known of the code (code.py) or the error.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch

from kda.cli import targets
from kda.cli.pretend import become, launches_to, tables, take, tensor

BF16, FP16, FP32, INT = torch.bfloat16, torch.float16, torch.float32, torch.int32

# What decides a configuration beside the device, each apart from the first: head dims, dtypes, how much there is to do.
REGIMES: dict[str, dict] = {
    "usual": dict(T=256, N=3, H=16),
    "many": dict(T=4096, N=64, H=64),
    "D=64": dict(T=256, N=3, H=16, D=64),
    "D=96": dict(T=256, N=3, H=16, D=96),
    "D=256": dict(T=256, N=3, H=4, D=256),
    "fp16": dict(T=256, N=3, H=16, dtype=FP16),
    "fp32": dict(T=256, N=3, H=16, dtype=FP32),
    "fp32 D=64": dict(T=256, N=3, H=16, D=64, dtype=FP32),
    "bf16 states": dict(T=256, N=3, H=16, state_dtype=BF16),
}
LARGE = dict(T=1 << 19, N=1 << 17, H=64)  # a large deployment


def _mixed_step(N, T, window):
    """verify_slots -> a batch of N rows of each kind, their tokens between one another."""
    from kda.serving import Batch

    Tv = min(N * window, T // 2)
    Tp = T // 2 - N
    index, cu = tensor(N, dtype=INT), tensor(N + 1, dtype=INT)
    return lambda verify_slots: Batch(
        decode_slots=index, prefill_slots=index, prefill_query_start_loc=cu, verify_slots=verify_slots[:N],
        verify_query_start_loc=cu, num_accepted_tokens=index, token_indices=tensor(N + Tp, dtype=INT),
        verify_token_indices=tensor(Tv, dtype=INT), num_prefill_tokens=Tp, num_verify_tokens=Tv, window=window)


def operations(
    *, T: int, N: int, H: int, D: int = 128, W: int = 4, slots: int | None = None, window: int = 4,
    dtype: torch.dtype = BF16, state_dtype: torch.dtype = FP32,
) -> dict[str, Callable]:
    """name -> a call of a public operation with tokens as column slices of merged projections."""
    import kda
    from kda.serving import kda_forward

    x = functools.partial(tensor, dtype=dtype)  # activations
    slots = slots or N + 1
    dim = 3 * H * D
    q, k, v = (s.unflatten(-1, (H, D)) for s in x(1, T, dim).split(H * D, -1))
    g, beta = x(1, T, H, D), x(1, T, 2 * H)[..., :H]
    y = tensor(1, T, H, D, dtype=FP32)
    A_log, g_bias = tensor(H, dtype=FP32), tensor(H * D, dtype=FP32)
    cu, index = tensor(N + 1, dtype=INT), tensor(N, dtype=INT)
    table, accepted = tensor(N, window, dtype=INT), tensor(N, dtype=INT)
    has = tensor(N, dtype=torch.bool)
    pool, states = tensor(slots, H, D, D, dtype=state_dtype), tensor(N, H, D, D, dtype=state_dtype)
    conv_pool = x(slots, W - 1 + window, dim).transpose(1, 2)
    weight, norm_weight = tensor(dim, W, dtype=FP32), tensor(D, dtype=FP32)
    qkv, records = x(T, dim), tensor(slots, window, H, 3 * D, dtype=FP32)
    one = dict(q=q[:, :N], k=k[:, :N], v=v[:, :N], g=g[:, :N], beta=beta[:, :N])
    rows = min(T // window, N)
    draft = {n: t[0, :rows * window].unflatten(0, (rows, window))
             for n, t in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
    step = _mixed_step(min(T // 4, N), T, window)
    gate = dict(a_log=A_log, g_bias=g_bias, compute_gate=True)
    fused = dict(A_log=A_log, g_bias=g_bias, use_qk_l2norm_in_kernel=True, sigmoid_beta=True)

    return {
        "causal_conv1d_fn": lambda: kda.causal_conv1d_fn(qkv.T, weight, None, conv_pool, cu, index, has),
        "causal_conv1d_fn/fresh": lambda: kda.causal_conv1d_fn(qkv.T, weight, weight[:, 0].clone(), None, cu),
        "causal_conv1d_update": lambda: kda.causal_conv1d_update(qkv[:N], conv_pool, weight, activation="silu",
                                                                 conv_state_indices=index),
        "causal_conv1d_update/window": lambda: kda.causal_conv1d_update(
            qkv, conv_pool, weight, activation="silu", conv_state_indices=index, num_accepted_tokens=accepted,
            query_start_loc=cu, max_query_len=window),
        "fused_kda_gate/bounded": lambda: kda.fused_kda_gate(g.flatten(2), A_log, D, g_bias, safe_gate=True),
        "fused_kda_gate/unbounded": lambda: kda.fused_kda_gate(g.flatten(2), A_log, D, g_bias),
        "chunk_kda_with_fused_gate": lambda: kda.chunk_kda_with_fused_gate(
            q, k, v, g, beta, initial_state=states, output_final_state=True, cu_seqlens=cu, safe_gate=True, **fused),
        "chunk_kda/batch": lambda: kda.chunk_kda(
            *(t[0].unflatten(0, (2, T // 2)) for t in (q, k, v, y, beta)), use_qk_l2norm_in_kernel=True),
        "chunk_kda_with_fused_gate/segments": lambda: kda.chunk_kda_with_fused_gate(
            *(x(1, 1 << 14, 2, D) for _ in "qkvg"), x(1, 1 << 14, 2), tensor(2, dtype=FP32),
            tensor(2 * D, dtype=FP32), initial_state=tensor(1, 2, D, D, dtype=state_dtype), output_final_state=True,
            cu_seqlens=cu[:2], safe_gate=True, use_qk_l2norm_in_kernel=True, sigmoid_beta=True),
        "kda_prefill": lambda: kda.kda_prefill(
            qkv, g[0], beta[0], v[0], conv_pool, pool, index, cu, has, weight, A_log, g_bias, norm_weight),
        "kda_prefill/checkpoints": lambda: kda.kda_prefill(
            qkv, g[0], beta[0], v[0], conv_pool, pool, index, cu, has, weight, A_log, g_bias, norm_weight,
            checkpoint_offsets=index, checkpoint_indices=index),
        "fused_recurrent_kda/decode": lambda: kda.fused_recurrent_kda(
            **one, initial_state=pool, cu_seqlens=cu, ssm_state_indices=index, sigmoid_beta=True, **gate),
        "fused_recurrent_kda/log-decay": lambda: kda.fused_recurrent_kda(
            **{**one, "g": y[:, :N], "beta": x(1, N, H, D)}, initial_state=states, cu_seqlens=cu),
        "fused_recurrent_kda/window": lambda: kda.fused_recurrent_kda(
            **draft, initial_state=pool, ssm_state_indices=table[:rows], num_accepted_tokens=accepted[:rows],
            sigmoid_beta=True, **gate),
        "fused_recurrent_kda/states": lambda: kda.fused_recurrent_kda(
            **draft, initial_state=states[:rows], inplace_final_state=False, lower_bound=None, **gate),
        "kda_decode": lambda: kda.kda_decode(
            qkv[:N], g[0, :N], beta[0, :N], v[0, :N], conv_pool, pool, index, weight, A_log, g_bias, norm_weight),
        "kda_decode/grouped": lambda: kda.kda_decode(
            x(N, 4 * 256 + 8 * 80), x(N, 8, 256), x(N, 8), x(N, 8, 80),
            x(slots, 4 * 256 + 8 * 80, 3), tensor(slots, 8, 80, 256, dtype=BF16), index, x(4 * 256 + 8 * 80, 4),
            tensor(8, dtype=FP32), lower_bound=None, activation="silu"),
        "kda_verify": lambda: kda.kda_verify(
            qkv, g[0], beta[0], v[0], conv_pool, pool, records, index, cu, accepted, weight, A_log, g_bias, norm_weight),
        "kda_verify/grouped": lambda: kda.kda_verify(
            x(N, 4 * 256 + 8 * 80), x(N, 8, 256), x(N, 8), x(N, 8, 80),
            x(slots, 4 * 256 + 8 * 80, 11), tensor(slots, 8, 80, 256, dtype=BF16), tensor(slots, 8, 8, 592, dtype=FP32), index,
            cu, None, x(4 * 256 + 8 * 80, 4), tensor(8, dtype=FP32), lower_bound=None, activation="silu"),
        "kda_commit": lambda: kda.kda_commit(conv_pool, pool, records, index, accepted),
        "kda_forward/records": lambda: kda_forward(
            qkv, g[0], beta[0], v[0], conv_pool, pool, step(tensor(N, dtype=INT)), weight, A_log, g_bias, norm_weight,
            records=records),
        "kda_forward/full": lambda: kda_forward(
            qkv, g[0], beta[0], v[0], conv_pool, pool, step(table), weight, A_log, g_bias, norm_weight),
        "rms_norm_gated": lambda: kda.rms_norm_gated(v[0], g[0], norm_weight, None, activation="sigmoid"),
        "rms_norm_gated/residual": lambda: kda.rms_norm_gated(v[0], g[0], norm_weight, norm_weight, residual=g[0],
                                                              prenorm=True),
        "gather_initial_states": lambda: kda.gather_initial_states(pool, index, has),
        "gather_initial_states/conv": lambda: kda.gather_initial_states(conv_pool, index, has),
        "scatter_states": lambda: kda.scatter_states(pool, states, index),
    }


def calls(regimes: list[str], tables: Iterable = (None,), shapes: dict = REGIMES) -> Iterator[tuple[str, Callable]]:
    """(name, call) of each operation in each regime under each table; the name says both behind an @."""
    for table in tables:
        take(table)
        for regime in regimes:
            words = [regime] * (regime != "usual") + ([table.__name__.split(".")[-1]] if table else [])
            for op, call in operations(**shapes[regime]).items():
                yield f"{op} @ {', '.join(words)}" if words else op, call


class Worker:
    """Goes through the launches of a target and says what it does, a JSON line each."""

    def __init__(self, target: targets.Target, out):
        self.target, self.out = target, out
        self.number = 0  # of the launch, over all calls
        self.decided: set[str] = set()  # names of constants and options that configurations decide
        self.known: dict[str, dict] = {}  # facts of compiled code, by Triton's hash: compilers print only once

    def say(self, **facts) -> None:
        print(json.dumps(facts), file=self.out, flush=True)

    def go(self, every: Iterator[tuple[str, Callable]], see: Callable) -> None:
        """Makes the calls; `see(facts, kernel, compile)` for each launch. Says how they went the first time."""
        first, self.number = self.number == 0, 0

        def launched(kernel, compile, grid):
            facts = dict(op=op, kernel=f"{kernel.fn.__module__}.{kernel.fn.__name__}", grid=list(grid), number=self.number)
            self.number += 1
            see(facts, kernel, compile)

        with launches_to(launched), _picked(self.decided):
            for op, call in every:
                try:
                    call()
                    outcome = dict(called=True)
                except Exception as error:
                    outcome = dict(called=False, error=_words(error))
                if first:
                    self.say(op=op, **outcome)

    def compile(self, wanted: Callable[[dict], bool], facts: dict, kernel, compile: Callable) -> None:
        """One launch: begun, compiled, and what came of it."""
        if not wanted(facts):
            return
        from kda.cli import code

        self.say(**facts)
        begin = time.perf_counter()
        with _captured() as printed:
            try:
                compiled = compile()
                outcome = dict(ok=True)
            except Exception as error:
                outcome = dict(ok=False, error=_words(error))
        seconds = round(time.perf_counter() - begin, 2)
        if outcome["ok"]:
            try:
                if compiled.hash not in self.known:
                    self.known[compiled.hash] = code.facts(self.target, compiled, printed.text)
                outcome.update(self.known[compiled.hash])
                outcome["config"] = {n: value for n, value in outcome["config"].items() if n in self.decided}
            except Exception as error:
                outcome = dict(ok=False, error=f"compiled, but its code cannot be read: {_words(error)}")
        self.say(**facts, **outcome, seconds=seconds)


@contextlib.contextmanager
def _picked(names: set[str]):
    """Adds the names in every configuration that launchers pick within the block."""
    from kda.triton import configs

    pick = configs.pick

    def noted(*args, **kwargs):
        chosen = pick(*args, **kwargs)
        for name, value in chosen.items():
            names.update(value if isinstance(value, dict) else (name,))
        return chosen

    configs.pick = noted
    try:
        yield
    finally:
        configs.pick = pick


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:4000]


@contextlib.contextmanager
def _captured():
    """What anything in this process prints within the block, compilers included: `.text`, afterwards."""

    class Printed:
        text = ""

    printed = Printed()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = [(fd, os.dup(fd)) for fd in (1, 2)]
        try:
            for fd, _ in kept:
                os.dup2(file.fileno(), fd)
            yield printed
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, copy in kept:
                os.dup2(copy, fd)
                os.close(copy)
            file.seek(0)
            printed.text = file.read().decode(errors="replace")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kda.cli.launches", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--regime", action="append", choices=list(REGIMES), help="default: the first")
    parser.add_argument("--kernel", help="compile kernels that have this in their names")
    parser.add_argument("--without", action="append", default=[], metavar="CALL", help="leave out what this call launches")
    parser.add_argument("--measured", action="store_true", help="leave out the defaults where the device has a table")
    parser.add_argument("--one", action="store_true", help="one configuration a kernel, the first")
    parser.add_argument("--skip", type=json.loads, default=[], metavar="JSON", help="numbers of launches to leave out")
    parser.add_argument("--part", type=json.loads, default=[0, 1], metavar="[I,N]", help="every N-th launch from the I-th")
    parser.add_argument("--large", action="store_true", help="the launches of a large deployment, not compiled")
    args = parser.parse_args(argv)

    target = targets.find(args.target)
    out = os.fdopen(os.dup(1), "w")
    become(target)
    warnings.filterwarnings("ignore", message=r"TRITON_DEFAULT_FP_FUSION")  # once a process, whatever the kernel
    worker = Worker(target, out)
    if args.large:
        worker.go(calls(["usual"], shapes={"usual": LARGE}), lambda facts, *_: worker.say(**facts))
        return

    chosen, kernels = set(), set()
    measured = tables(target)
    every = functools.partial(calls, args.regime or ["usual"], measured if args.measured and measured else [*measured, None])

    def choose(facts, *_):
        named = args.kernel is None or args.kernel in facts["kernel"]
        if not named or facts["op"].split(" @ ")[0] in args.without or args.one and facts["kernel"] in kernels:
            return
        kernels.add(facts["kernel"])
        chosen.add(facts["number"])

    worker.go(every(), choose)
    mine = set(sorted(chosen)[args.part[0]::args.part[1]]) - set(args.skip)
    worker.say(launches=len(mine))
    worker.go(every(), functools.partial(worker.compile, lambda facts: facts["number"] in mine))


if __name__ == "__main__":
    main()
