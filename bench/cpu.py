#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The kernels as code for this processor, beside transformers' PyTorch path, our reference and a memory copy.

    python bench/cpu.py --out DIR [--threads 2] [--part prefill|decode|isa|first] [--isa avx2,avx512,avx512bf16,amx]

H=16, D=128, bf16; no GPU is used. Every part runs in processes of its own and writes DIR/cpu.json row by row.

prefill   tokens/s of 1 to 2048 tokens. All get the log decays and beta ready made and normalise q and k
          themselves; `gate in kernel` is ours from the raw gate projection
decode    one step of batches of 1, 16 and 64. `hot`: the same states every call; `cold`: the next of several
          sets that together exceed the caches, as they are where a model's layers take turns. Bytes of state read
          and written beside a copy of a large tensor, bytes read and written
isa       each path that this machine has (KDA_CPU_ISA), with its error against the recurrence in fp64
first     the first call of each operation in a fresh process, with an empty cache of compiled kernels and a full one;
          without Triton's digest of its own files, which is measured apart

Functions of a row take turns in short bursts; times are medians, ratios those of medians (`min_ms` is in the JSON).
"""
from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""

import argparse  # noqa: E402
import inspect  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kda  # noqa: E402
from common import Results  # noqa: E402
from kda.cli.check import BOUNDS, err, recurrence64  # noqa: E402

H, D, LB = 16, 128, -5.0
BF16 = torch.bfloat16
BASE = "transformers recurrent"
STATE = H * D * D * 4  # bytes of one sequence's states
COPY = 512 << 20  # bytes that the copy reads


# ---- what is timed


def inputs(B: int, T: int, heads: int = H) -> dict[str, Tensor]:
    """q, k, v, g [B, T, H, D], beta logits [B, T, H], A_log [H], bias [H*D]; y log decays and b for those without."""
    gen = torch.Generator().manual_seed(0)
    x = {name: torch.randn(B, T, heads, D, generator=gen).to(BF16) for name in ("q", "k", "v", "g")}
    x["beta"] = torch.randn(B, T, heads, generator=gen).to(BF16)
    x["A_log"] = torch.rand(heads, generator=gen).log()
    x["bias"] = torch.randn(heads * D, generator=gen) * 0.1
    x["y"] = kda.fused_kda_gate(x["g"].flatten(2), x["A_log"], D, x["bias"], safe_gate=True, lower_bound=LB)
    x["b"] = x["beta"].float().sigmoid().to(BF16)
    return x


def states(N: int, heads: int = H) -> Tensor:
    return torch.randn(N, heads, D, D, generator=torch.Generator().manual_seed(1)) * 0.1


def ready(x: dict[str, Tensor]) -> list[Tensor]:
    return [x[name] for name in ("q", "k", "v", "y", "b")]


def our_chunk(x: dict[str, Tensor], h0: Tensor):
    return kda.chunk_kda(*ready(x), initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True)


def our_chunk_raw(x: dict[str, Tensor], h0: Tensor):
    return kda.chunk_kda_with_fused_gate(
        x["q"], x["k"], x["v"], x["g"], x["beta"], x["A_log"], x["bias"], initial_state=h0, output_final_state=True,
        use_qk_l2norm_in_kernel=True, safe_gate=True, lower_bound=LB, sigmoid_beta=True,
    )


def our_step(x: dict[str, Tensor], pool: Tensor):
    return kda.fused_recurrent_kda(*ready(x), initial_state=pool, use_qk_l2norm_in_kernel=True)


def transformers_path() -> dict[str, Callable]:
    """Their recurrent and chunked form; nothing where this version of transformers has no such layer.

    What they define, that is: with flash-linear-attention installed they would call its Triton kernels.
    """
    try:
        from transformers.models.glm5_next import modeling_glm5_next as theirs
    except ImportError:
        return {}
    logging.getLogger("transformers").setLevel(logging.ERROR)
    forms = {BASE: theirs.recurrent_kimi_delta_attention, "transformers chunked": theirs.chunk_kimi_delta_attention}

    def call(fn: Callable) -> Callable:  # they keep the state [N, H, K, V]
        fn = inspect.unwrap(fn)
        return lambda x, h0: fn(*ready(x), initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return {name: call(fn) for name, fn in forms.items()}


def compiled(operation: Callable) -> Callable:
    """The reference as torch.compile makes it: it takes what the public operation has validated."""
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it breaks the graph where sizes come from tensors
    return torch.compile(operation, dynamic=False)


# ---- time


def in_turn(fns: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Sorted milliseconds by name, over about `seconds`: bursts of each function in turn, 3 calls each at least."""
    calls, burst, times = {}, {}, {name: [] for name in fns}
    for name, fn in fns.items():
        fn()
        start = time.perf_counter()
        fn()
        took = time.perf_counter() - start
        calls[name] = int(min(max(seconds / len(fns) / max(took, 1e-5), 3), 2000))
        burst[name] = int(min(max(2e-3 / took, 1), 50))
    turns = {name: -(-calls[name] // burst[name]) for name in fns}
    most = max(turns.values())
    for i in range(most):
        for name, fn in fns.items():
            if (i + 1) * turns[name] // most > i * turns[name] // most:
                for _ in range(burst[name]):
                    start = time.perf_counter()
                    fn()
                    times[name].append(1e3 * (time.perf_counter() - start))
    return {name: sorted(ts) for name, ts in times.items()}


def attempt(fns: dict[str, Callable[[], object]], name: str, fn: Callable[[], object]) -> None:
    """Adds a function that may fail for want of a compiler, say."""
    try:
        start = time.perf_counter()
        fn()
        say(f"  {name}: first call {time.perf_counter() - start:.1f} s")
        fns[name] = fn
    except Exception as e:
        say(f"  {name} left out: {type(e).__name__}: {str(e).splitlines()[0][:150]}")


def say(line: str) -> None:
    print(line, flush=True)


def row(part: str, line: str, **values: object) -> None:
    """From a part's process to the main one."""
    print("ROW " + json.dumps(dict(part=part, line=line, **values)), flush=True)


# ---- parts, each in a process of its own


def prefill(opts: argparse.Namespace) -> None:
    theirs = transformers_path()
    from kda.reference import chunk as reference

    for T in (1, 64, 512, 2048):
        x, h0 = inputs(1, T), states(1)
        flipped = h0.transpose(-1, -2).contiguous()
        arguments = (*ready(x), D**-0.5, h0, True, None, True, False, None, None, None, None)
        fns: dict[str, Callable[[], object]] = {
            "kda": lambda: our_chunk(x, h0), "kda, gate in kernel": lambda: our_chunk_raw(x, h0),
        }  # fmt: skip
        for name, fn in theirs.items():
            fns[name] = lambda fn=fn: fn(x, flipped)
        fns["reference eager"] = lambda: reference.chunk_kda(*arguments)
        if opts.compile and T <= 512:
            quick = compiled(reference.chunk_kda)
            attempt(fns, "reference compiled", lambda: quick(*arguments))
        ms = {name: (statistics.median(ts), ts[0]) for name, ts in in_turn(fns, opts.seconds * 2).items()}
        for name, (t, least) in ms.items():
            over = ms[BASE][0] / t if BASE in ms else None
            row("prefill",
                f"prefill T={T:<5} {name:24} {t:10.3f} ms {T / t * 1e3:12,.0f} tokens/s"
                + (f" {over:8.2f}x {BASE}" if over else ""),
                T=T, name=name, ms=t, min_ms=least, tokens_per_s=T / t * 1e3,
                over_transformers_recurrent=over)  # fmt: skip


def decode(opts: argparse.Namespace) -> None:
    theirs = transformers_path().get(BASE)
    from kda.reference import recurrent as reference

    src = torch.ones(COPY // 4)
    dst = torch.empty_like(src)
    for N, cold in [(N, cold) for N in (1, 16, 64) for cold in (False, True)]:
        x = inputs(N, 1)
        sets = max(-(-opts.cold_mib * 2**20 // (N * STATE)), 2) if cold else 1
        pools = [states(N) for _ in range(sets)]
        ours, eager, fast, other = (itertools.cycle(pools) for _ in range(4))
        arguments = (None, None, None, True, False, None, None, None, None, None)
        fns: dict[str, Callable[[], object]] = {"kda": lambda: our_step(x, next(ours))}
        if theirs:
            fns[BASE] = lambda: theirs(x, next(other))
        fns["reference eager"] = lambda: reference.fused_recurrent_kda(*ready(x), D**-0.5, next(eager), *arguments)
        if opts.compile and not cold:
            quick = compiled(reference.fused_recurrent_kda)
            attempt(fns, "reference compiled", lambda: quick(*ready(x), D**-0.5, next(fast), *arguments))
        fns["copy"] = lambda: dst.copy_(src)
        ms = {name: (statistics.median(ts), ts[0]) for name, ts in in_turn(fns, opts.seconds).items()}
        copy, where = 2 * COPY / ms.pop("copy")[0] * 1e3, "cold" if cold else "hot"
        for name, (t, least) in ms.items():
            rate, over = 2 * N * STATE / t * 1e3, ms[BASE][0] / t if BASE in ms else None
            row("decode",
                f"decode N={N:<3} {where:4} {name:24} {t:8.3f} ms {rate / 1e9:8.1f} GB/s {rate / copy:5.0%} of copy"
                + (f" {over:8.2f}x {BASE}" if over else ""),
                N=N, states=where, name=name, ms=t, min_ms=least, state_bytes_per_s=rate, copy_bytes_per_s=copy,
                share_of_copy=rate / copy, over_transformers_recurrent=over)  # fmt: skip


def isa(opts: argparse.Namespace) -> None:
    from kda.triton_cpu import runtime

    path, theirs = runtime.selected_isa(), transformers_path().get(BASE)
    T, N, slots = 512, 16, 4
    x, h0, step, pool = inputs(1, T), states(1), inputs(N, 1), states(N)
    fns: dict[str, Callable[[], object]] = {
        "prefill T=512": lambda: our_chunk(x, h0), "prefill T=512, gate in kernel": lambda: our_chunk_raw(x, h0),
        "decode N=16": lambda: our_step(step, pool),
    }  # fmt: skip
    if theirs:
        flipped = h0.transpose(-1, -2).contiguous()
        fns[BASE] = lambda: theirs(x, flipped)
    ms = {name: (statistics.median(ts), ts[0]) for name, ts in in_turn(fns, opts.seconds).items()}

    small, s0 = inputs(1, T, slots), states(1, slots)
    arguments = [small[name][0] for name in ("q", "k", "v", "g", "beta")] + [small["A_log"], small["bias"]]
    ref_o, ref_s = recurrence64(*arguments, LB, s0[0])
    errors, moving = {}, s0.clone()
    errors["prefill"] = our_chunk_raw(small, s0)
    errors["decode"] = kda.fused_recurrent_kda(
        *(small[name] for name in ("q", "k", "v", "g", "beta")), initial_state=moving, sigmoid_beta=True,
        a_log=small["A_log"], g_bias=small["bias"], compute_gate=True, lower_bound=LB,
    )
    errors = {name: (err(o[0], ref_o), err(s[0], ref_s)) for name, (o, s) in errors.items()}
    for name, (t, least) in ms.items():
        if name == BASE:
            continue
        form = name.split()[0]
        rate = T / t * 1e3 if form == "prefill" else N / t * 1e3
        over = ms[BASE][0] / t if form == "prefill" and BASE in ms else None
        (e_o, e_s), (bound_o, bound_s) = errors[form], BOUNDS[BF16]
        row("isa",
            f"{path:11} {name:30} {t:8.3f} ms {rate:10,.0f} tokens/s" + (f" {over:6.2f}x {BASE}" if over else " " * 30)
            + f"  error: output {e_o:.1e}, state {e_s:.1e}{'' if e_o <= bound_o and e_s <= bound_s else '  OVER'}",
            processor_path=path, name=name, ms=t, min_ms=least, tokens_per_s=rate, over_transformers_recurrent=over,
            output_error=e_o, state_error=e_s, ok=e_o <= bound_o and e_s <= bound_s)  # fmt: skip


def operations() -> dict[str, Callable[[], object]]:
    """One call of every operation; all tensors are made here."""
    T, N = 64, 2
    with kda.use_backend("reference"):
        x, step = inputs(1, T), inputs(N, 1)
    h0, pool = states(1), states(N + 1)
    wide, conv_w = torch.randn(T, 3 * H * D).to(BF16), torch.randn(3 * H * D, 4)
    conv = torch.randn(N + 1, 3, 3 * H * D).to(BF16).transpose(1, 2)
    slots, has = torch.arange(1, N + 1).int(), torch.ones(N, dtype=torch.bool)
    starts = torch.tensor([0, T // 2, T]).int()
    norm = kda.FusedRMSNormGated(D, activation="sigmoid", dtype=BF16).requires_grad_(False)
    torch.nn.init.ones_(norm.weight)
    return {
        "causal_conv1d_fn": lambda: kda.causal_conv1d_fn(wide.t(), conv_w, None, conv, starts, slots, has),
        "causal_conv1d_update": lambda: kda.causal_conv1d_update(
            wide[:N], conv, conv_w, activation="silu", conv_state_indices=slots),
        "fused_kda_gate": lambda: kda.fused_kda_gate(x["g"].flatten(2), x["A_log"], D, x["bias"], safe_gate=True),
        "chunk_kda": lambda: our_chunk(x, h0),
        "chunk_kda_with_fused_gate": lambda: our_chunk_raw(x, h0),
        "fused_recurrent_kda": lambda: our_step(step, pool[1:]),
        "rms_norm_gated": lambda: norm(x["v"], x["g"]),
        "gather_initial_states": lambda: kda.gather_initial_states(pool, slots, has),
        "scatter_states": lambda: kda.scatter_states(pool, pool[1:].clone(), slots),
    }  # fmt: skip


def first(opts: argparse.Namespace) -> None:
    call = operations()[opts.operation]
    start = time.perf_counter()
    import triton
    from triton import knobs

    imported = 1e3 * (time.perf_counter() - start)
    start = time.perf_counter()
    triton.runtime.cache.triton_key()  # Triton's digest of itself, part of every key: once a process
    digest = 1e3 * (time.perf_counter() - start)
    kernels: list[dict] = []

    def listener(src, metadata, metadata_group, times, cache_hit):
        stages = {name: us / 1e3 for name, us in times.lowering_stages}
        kernels.append(
            {"kernel": metadata["name"], "hit": cache_hit, "frontend": times.ir_initialization / 1e3, **stages}
        )

    knobs.compilation.listener = listener
    start = time.perf_counter()
    call()
    took = 1e3 * (time.perf_counter() - start)
    start = time.perf_counter()
    call()
    second = 1e3 * (time.perf_counter() - start)
    parts = "; ".join(
        f"{k['kernel']} {k['frontend']:.0f} + {k.get('ttir', 0):.0f} + {k.get('llir', 0):.0f} + {k.get('obj', 0):.0f}"
        for k in kernels if not k["hit"]
    )
    row("first",
        f"{opts.operation:26} {opts.cache:5} cache: first call {took:8.1f} ms, second {second:7.2f} ms,"
        f" Triton's own digest before {digest:.0f} ms"
        + (f"  (frontend + ttir + lowering and optimiser + code: {parts})" if parts else ""),
        operation=opts.operation, cache=opts.cache, ms=took, second_ms=second, import_triton_ms=imported,
        digest_ms=digest, kernels=kernels)  # fmt: skip


PARTS = {"prefill": prefill, "decode": decode, "isa": isa, "first": first}


# ---- the main process


def child(results: Results, opts: argparse.Namespace, part: str, env: dict[str, str], *arguments: str) -> bool:
    """Runs a part in a process of its own and takes its rows as they come."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", part, "--out", str(opts.out),
               "--seconds", str(opts.seconds), "--cold-mib", str(opts.cold_mib), *arguments]  # fmt: skip
    if not opts.compile:
        command.append("--no-compile")
    env = os.environ | {"OMP_NUM_THREADS": str(opts.threads), "PYTHONUNBUFFERED": "1"} | env
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("ROW "):
            values = json.loads(line[4:])
            results.add(values.pop("part"), values.pop("line"), **values)
        else:
            say(line.rstrip())
    if process.wait():
        say(f"{part}: the process ended with status {process.returncode}")
    return process.returncode == 0


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--part", choices=PARTS, help="default: all")
    parser.add_argument("--isa", default="avx2,avx512,avx512bf16,amx", help="paths of part isa (missing: skipped)")
    parser.add_argument("--seconds", type=float, default=6, help="of calls for a row of functions")
    parser.add_argument("--cold-mib", type=int, default=256, help="cold states exceed this, the caches' size")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    for hidden in ("--child", "--operation", "--cache"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    opts = parser.parse_args()
    if opts.child:
        with torch.no_grad():
            PARTS[opts.child](opts)
        return 0

    from kda.triton_cpu import runtime

    torch.set_num_threads(opts.threads)
    results = Results(opts.out / f"cpu{'-' + opts.part if opts.part else ''}.json", arguments=sys.argv[1:],
                      backend=kda.backend_for("cpu"), processor_path=runtime.selected_isa(), H=H, D=D)  # fmt: skip
    say(f"{results.data['machine']['cpu']}, {opts.threads} threads; {kda.why('cpu')}; path {runtime.selected_isa()}")
    good = True
    for part in ("prefill", "decode"):
        if opts.part in (None, part):
            good = child(results, opts, part, {}) and good
    if opts.part in (None, "isa"):
        for path in opts.isa.split(","):
            if why := runtime.missing(path):
                say(f"{path} skipped: {why}")
            else:
                good = child(results, opts, "isa", {"KDA_CPU_ISA": path}) and good
        good = good and all(entry["ok"] for entry in results.data.get("isa", []))
    if opts.part in (None, "first"):
        for name in operations():
            with tempfile.TemporaryDirectory() as cache:
                for filled in ("empty", "full"):
                    env = {"TRITON_CACHE_DIR": cache}
                    good = child(results, opts, "first", env, "--operation", name, "--cache", filled) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
