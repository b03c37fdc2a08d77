# SPDX-License-Identifier: Apache-2.0
"""The first call of an operation in a fresh process, with an empty cache of compiled kernels and with a full one.

Without the import of Triton and its digest of its own files, which are measured apart.
"""
from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch

import kda
from kda.cli.bench import child, measure
from kda.cli.bench.rows import Row
from kda.cli.bench.session import Session
from kda.cli.bench.tensors import D, Prompt, Step
from kda.cli.workloads import Work

H, T, N = 16, 64, 2


def fill(session: Session, row: Row, operation: str) -> None:
    with tempfile.TemporaryDirectory() as cache:
        for filled in ("empty", "full"):
            got = child.measure(session, "first call", row.name, dict(operation=operation), {"TRITON_CACHE_DIR": cache})
            if got.failed:
                raise RuntimeError("; ".join(got.failed.values()))
            row.ms[f"kda, {filled} cache"] = got.ms["kda, first"]
            row.facts[f"{filled} cache"] = got.facts
    row.ms["kda, second call"] = got.ms["kda, second"]


def fill_here(session: Session, row: Row, operation: str) -> None:
    with kda.use_backend("reference"):  # nothing of Triton before it is timed
        call = operations(session.device)[operation]()
    kernels: list[dict] = []
    if kda.backend_for(session.device).startswith("triton"):
        row.facts |= _triton(kernels)
    for name in ("kda, first", "kda, second"):
        begin = time.perf_counter()
        call()
        row.ms[name] = measure.spread([1e3 * (time.perf_counter() - begin)])
    row.facts["kernels"] = kernels


def _triton(kernels: list[dict]) -> dict[str, float]:
    """Imports Triton and listens for what it compiles; milliseconds of the import and of its digest of itself."""
    begin = time.perf_counter()
    import triton
    from triton import knobs

    imported = time.perf_counter()
    triton.runtime.cache.triton_key()  # part of every key: once a process
    digested = time.perf_counter()

    def listener(src, metadata, metadata_group, times, cache_hit):
        stages = {name: us / 1e3 for name, us in times.lowering_stages}
        frontend = times.ir_initialization / 1e3
        kernels.append({"kernel": metadata["name"], "hit": cache_hit, "frontend": frontend, **stages})

    knobs.compilation.listener = listener
    return dict(import_ms=1e3 * (imported - begin), digest_ms=1e3 * (digested - imported))


def operations(device: torch.device) -> dict[str, Callable[[], Callable[[], object]]]:
    """By name, what makes the tensors of a call, and the call."""

    def prompt(call):
        def make():
            x = Prompt(Work(H, (T,), D), device)
            return call(x)

        return make

    def step(call):
        return lambda: call(Step(H, N, device))

    def conv(x: Prompt):
        tokens, pool, has = x.randn(x.T, x.dim).t(), x.conv_pool(), torch.ones(1, dtype=torch.bool, device=device)
        return lambda: kda.causal_conv1d_fn(tokens, x.weight, None, pool, x.cu, x.slots, has)

    def given(x: Prompt):
        tokens = x.given()
        return lambda: kda.chunk_kda(*tokens, initial_state=x.h0, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def states(x: Step):
        has = torch.ones(N, dtype=torch.bool, device=device)
        return lambda: kda.gather_initial_states(x.pool, x.slots, has)

    def scatter(x: Step):
        src = x.pool[1:].clone()
        return lambda: kda.scatter_states(x.pool, src, x.slots)

    return {
        "causal_conv1d_fn": prompt(conv),
        "causal_conv1d_update": step(lambda x: lambda: kda.causal_conv1d_update(
            x.qkv, x.conv, x.weight, activation="silu", conv_state_indices=x.slots)),
        "fused_kda_gate": prompt(lambda x: lambda: kda.fused_kda_gate(x.g.flatten(2), x.A_log, D, x.bias, safe_gate=True)),
        "chunk_kda": prompt(given),
        "chunk_kda_with_fused_gate": prompt(lambda x: x.chunk),
        "fused_recurrent_kda": step(lambda x: lambda: x.recurrence(x.pool)),
        "rms_norm_gated": step(lambda x: lambda: x.norm(x.g, x.gate)),
        "gather_initial_states": step(states),
        "scatter_states": step(scatter),
    }  # fmt: skip
