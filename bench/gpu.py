#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every operation on one GPU: its error against an fp64 recurrence, its time beside the public kernels.

    PYTHONPATH=.:.peers python bench/gpu.py --out DIR [--part accuracy|prefill|layer|decode|ops] [--peers ...]

`.peers` holds public kernels to compare with (vLLM's Triton ones, FlashKDA, flash-linear-attention); what is
not there is left out. Peers get contiguous inputs in the layouts that they want; so do we, but for `strided`.
Times are medians of 20 calls with CUDA events; decode, and what is called `graph`, out of a CUDA graph. vLLM
and fla autotune for minutes: they run on the prefill rows marked `*` only, unless --all-rows is given.
DIR/gpu[-PART].json is written row by row. Exit status 1 when an error is over the contract's bound.
Without a GPU it runs on the CPU's backend: for the accuracy part, and with --small to try the script.
"""
from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

import kda
import peers
from common import Results, copy_bytes_per_s, graph_ms, host_us, kernel_us, median_ms, synchronises
from kda.cli.check import BOUNDS, err, recurrence64

R = TypeVar("R")
Ms = float | str  # a time, or in words why there is none

D, LB = 128, -5.0
BF16 = torch.bfloat16
DEV = "cuda" if torch.cuda.is_available() else "cpu"
SIX = [1300, 547, 2048, 963, 271, 3063]
# H, lengths, whether the peers that autotune run by default
PREFILL = [
    (64, [8192], False), (64, SIX, True), (64, [1024] * 8, False),
    (16, [8192], False), (16, SIX, True), (16, [1024] * 8, False),
    (16, [1024], True), (16, [65536], False),
]
DECODE = [(H, N) for H in (64, 16) for N in (1, 8, 64, 256)]


def offsets(lens: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=DEV)


def shorter(lens: list[int]) -> list[int]:
    return [max(n // 64, 1) for n in lens]


def inputs(T: int, H: int, N: int, dtype: torch.dtype = BF16, bounded: bool = True) -> dict[str, Tensor]:
    """q, k, v, g [1, T, H, D], beta logits [1, T, H], A_log [H], bias [H*D], h0 [N, H, D, D] fp32."""
    gen = torch.Generator(DEV).manual_seed(0)
    randn = partial(torch.randn, device=DEV, generator=gen)
    x = {name: randn(1, T, H, D).to(dtype) for name in ("q", "k", "v", "g")}
    x["beta"] = randn(1, T, H).to(dtype)
    rate = torch.rand(H, device=DEV, generator=gen)
    x["A_log"] = (rate if bounded else 1 + 15 * rate).log()
    return x | {"bias": randn(H * D) * 0.1, "h0": randn(N, H, D, D) * 0.1}


def strided(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values with q, k, v as column slices of one tensor and beta of another."""
    H = x["q"].shape[2]
    qkv = torch.cat([x[name].flatten(2) for name in "qkv"], -1)
    q, k, v = (part.unflatten(-1, (H, D)) for part in qkv.split(H * D, -1))
    return x | dict(q=q, k=k, v=v, beta=torch.cat([x["beta"], x["beta"]], -1)[..., :H])


def alike(x: dict[str, Tensor], gate: float) -> dict[str, Tensor]:
    """The hardest case for a chunked form: keys that are nearly one and the same, beta 1, and one slow decay."""
    gen = torch.Generator(DEV).manual_seed(1)
    noise = torch.randn(x["k"].shape, device=DEV, generator=gen) * 0.05
    k, ones = (x["k"][:, :1].float() + noise).to(x["k"].dtype), torch.ones_like
    return x | dict(k=k, g=ones(x["g"]) * gate, beta=ones(x["beta"]) * 40, A_log=x["A_log"] * 0, bias=x["bias"] * 0)


def recurrence(x: dict[str, Tensor], lens: list[int], lower_bound: float | None) -> tuple[Tensor, Tensor]:
    """The recurrence in fp64 -> o [1, T, H, D], final states [N, H, V, K]."""
    tokens = zip(*(x[name][0].split(lens) for name in ("q", "k", "v", "g", "beta")))
    done = [recurrence64(*t, x["A_log"], x["bias"], lower_bound, h0) for t, h0 in zip(tokens, x["h0"])]
    return torch.cat([o for o, _ in done])[None], torch.stack([S for _, S in done])


def our_chunk(x: dict[str, Tensor], cu: Tensor, bounded: bool = True) -> tuple[Tensor, Tensor]:
    return kda.chunk_kda_with_fused_gate(
        x["q"], x["k"], x["v"], x["g"], x["beta"], x["A_log"], x["bias"], initial_state=x["h0"],
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu, safe_gate=bounded,
        lower_bound=LB, sigmoid_beta=True,
    )


def our_recurrent(
    x: dict[str, Tensor], cu: Tensor, pool: Tensor, slots: Tensor, bounded: bool = True
) -> tuple[Tensor, Tensor]:
    return kda.fused_recurrent_kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=pool, use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu, ssm_state_indices=slots, sigmoid_beta=True, a_log=x["A_log"], g_bias=x["bias"],
        compute_gate=True, lower_bound=LB if bounded else None,
    )


def our_norm() -> kda.FusedRMSNormGated:
    norm = kda.FusedRMSNormGated(D, activation="sigmoid", device=DEV, dtype=BF16).requires_grad_(False)
    torch.nn.init.ones_(norm.weight)
    return norm


def attempt(fn: Callable[[], R]) -> R | str:
    """`fn()`, or in words why it failed: one operation that fails must not cost the rest of the run."""
    try:
        return fn()
    except Exception as e:
        if not isinstance(e, ImportError):
            traceback.print_exc()
        return f"{type(e).__name__}: {e}".splitlines()[0][:200]


def show(value: Ms | None, unit: str = "", digits: int = 3) -> str:
    return "-" if value is None else "failed" if isinstance(value, str) else f"{value:.{digits}f}{unit}"


def ratio(a: Ms | None, b: Ms | None) -> float | None:
    return a / b if isinstance(a, float) and isinstance(b, float) else None


def times(a: Ms | None, b: Ms | None) -> str:
    return show(ratio(a, b), "x", 2)


# ---- parts


def accuracy(results: Results, opts: argparse.Namespace) -> bool:
    """Packed sequences from random states; one long sequence for drift. True: all within the contract."""
    lens, long = ([459, 64, 1, 17, 200, 283], [8192]) if not opts.small else ([70, 1, 17], [256])
    good = True
    for dtype, bounded in [(dtype, bounded) for dtype in BOUNDS for bounded in (True, False)]:
        cases = [("chunk", 8, lens), ("recurrent", 8, lens)]
        if dtype == BF16:
            cases += [("chunk", 2, long), ("recurrent", 2, long)]
        if dtype == BF16 and bounded:
            cases += [(peer, 8, lens) for peer in opts.peers]
        refs: dict[int, tuple[Tensor, Tensor]] = {}
        for op, H, lengths in cases:
            T, cu = sum(lengths), offsets(lengths)
            x = inputs(T, H, len(lengths), dtype, bounded)
            if T not in refs:
                refs[T] = recurrence(x, lengths, LB if bounded else None)
            got = attempt(partial(run_once, op, x, cu, bounded))
            ours = op not in peers.CHUNK
            gate = "bounded" if bounded else "unbounded"
            row = dict(op=op, dtype=str(dtype)[6:], gate=gate, H=H, lens=lengths)
            head = f"{op:10} {row['dtype']:9} {row['gate']:9} H={H} T={T:<5}"
            if isinstance(got, str):
                good = good and not ours
                results.add("accuracy", f"{head} {got}", **row, failed=got)
                continue
            (o, s), (ref_o, ref_s), (bound_o, bound_s) = got, refs[T], BOUNDS[dtype]
            windows = [err(a, b) for a, b in zip(o.split(256, 1), ref_o.split(256, 1))]
            e_o, e_s = err(o, ref_o), err(s, ref_s)
            ok = e_o <= bound_o and e_s <= bound_s
            good = good and (ok or not ours)
            verdict = ("ok" if ok else "OVER") if ours else "(a peer)"
            results.add(
                "accuracy",
                f"{head} output {e_o:.2e} (bound {bound_o:g})  state {e_s:.2e} (bound {bound_s:g})  "
                f"worst 256 tokens {max(windows):.2e}  {verdict}",
                **row, output=e_o, state=e_s, windows=windows, ok=ok,
            )
    for gate in (-40.0, -8.0, -5.5):  # decays of 1, 0.998 and 0.98 a token; shown, not judged
        x, cu = alike(inputs(70, 8, 1), gate), offsets([70])
        ref = recurrence(x, [70], LB)
        for op in ("chunk", "recurrent", *opts.peers):
            got = attempt(partial(run_once, op, x, cu, True))
            row = dict(op=op, case="keys alike", gate=gate)
            if isinstance(got, str):
                results.add("accuracy", f"{op:10} keys alike, gate {gate}: {got}", **row, failed=got)
                continue
            e_o, e_s = err(got[0], ref[0]), err(got[1], ref[1])
            text = f"{op:10} keys alike, gate {gate:5}: output {e_o:.2e}  state {e_s:.2e}"
            results.add("accuracy", text, **row, output=e_o, state=e_s)
    return good


def run_once(op: str, x: dict[str, Tensor], cu: Tensor, bounded: bool) -> tuple[Tensor, Tensor]:
    if op == "chunk":
        return our_chunk(x, cu, bounded)
    if op == "recurrent":
        pool = torch.cat([torch.full_like(x["h0"][:1], float("nan")), x["h0"]])  # the null slot is never read
        slots = torch.arange(1, len(pool), dtype=torch.int32, device=DEV)
        return our_recurrent(x, cu, pool, slots, bounded)[0], pool[1:]
    return peers.CHUNK[op](x, cu, LB)()


def prefill(results: Results, opts: argparse.Namespace) -> None:
    for H, lens, marked in PREFILL:
        autotuned = marked or opts.all_rows
        if opts.small:
            lens = shorter(lens)
        prefill_row(results, opts, H, lens, [p for p in opts.peers if p == "flashkda" or autotuned], marked)
        if DEV == "cuda":
            torch.cuda.empty_cache()


def prefill_row(
    results: Results, opts: argparse.Namespace, H: int, lens: list[int], rivals: list[str], marked: bool
) -> None:
    T, N = sum(lens), len(lens)
    x, cu = inputs(T, H, N), offsets(lens)
    xs = strided(x)
    floor = (T * H * D * 2 * 5 + 2 * N * H * D * D * 4) / opts.bandwidth * 1e3
    ours = partial(our_chunk, x, cu)
    unbounded = partial(our_chunk, x | {"A_log": (x["A_log"].exp() * 15 + 1).log()}, cu, False)
    ms: dict[str, Ms] = {
        "ours": attempt(lambda: median_ms(ours, opts.runs)),
        "strided": attempt(lambda: median_ms(partial(our_chunk, xs, cu), opts.runs)),
        "graph": attempt(lambda: graph_ms(ours, 4)),
        "unbounded": attempt(lambda: graph_ms(unbounded, 4)),
    }
    for peer in rivals:
        ms[peer] = attempt(lambda: median_ms(peers.CHUNK[peer](x, cu, LB), opts.runs))
        if peer == "flashkda":
            ms["flashkda graph"] = attempt(lambda: graph_ms(peers.CHUNK[peer](x, cu, LB), 4))
    kernels, waits = attempt(lambda: kernel_us(ours)), attempt(lambda: synchronises(ours))
    launch = attempt(lambda: host_us(ours))
    results.add(
        "prefill",
        f"prefill T={T} H={H} N={N}{'*' if marked else ''}: "
        + "  ".join(f"{name} {show(t)}" for name, t in ms.items())
        + "".join(f"  ours/{p} {times(ms['ours'], ms[p])}" for p in rivals)
        + (f"  in graphs {times(ms['graph'], ms['flashkda graph'])}" if "flashkda graph" in ms else "")
        + f"  floor {floor:.3f} ms  launched in {show(launch, ' us', 1)}" + (f"  WAITS: {waits}" if waits else ""),
        T=T, H=H, lens=lens, launch_us=launch, ms=ms, ratios={p: ratio(ms["ours"], ms[p]) for p in rivals},
        graph_ratio=ratio(ms["graph"], ms.get("flashkda graph")),
        unbounded_ratio=ratio(ms["unbounded"], ms["graph"]), floor_ms=floor,
        kernel_us=kernels, synchronises=waits,
    )


def decode(results: Results, opts: argparse.Namespace) -> None:
    for H, N in DECODE:
        decode_row(results, opts, H // 16 if opts.small else H, N)


def decode_row(results: Results, opts: argparse.Namespace, H: int, N: int) -> None:
    """The recurrence alone; the chain of convolution update, recurrence and gated norm; the chain in one kernel."""
    x, cu = inputs(N, H, 1), torch.arange(N + 1, device=DEV, dtype=torch.int32)
    pool = torch.randn(N + 1, H, D, D, device=DEV) * 0.1
    slots = (torch.randperm(N, device=DEV) + 1).int()
    qkv = torch.randn(N, 3 * H * D, device=DEV, dtype=BF16)
    conv_pool = torch.randn(N + 1, 3, 3 * H * D, device=DEV, dtype=BF16).transpose(1, 2)
    conv_w = torch.randn(3 * H * D, 4, device=DEV)
    gate = torch.randn(N, H, D, device=DEV, dtype=BF16)
    norm = our_norm()

    def our_chain() -> Tensor:
        y = kda.causal_conv1d_update(qkv, conv_pool, conv_w, None, "silu", conv_state_indices=slots)
        q, k, v = y.view(1, N, 3, H, D).unbind(2)
        return norm(our_recurrent(x | dict(q=q, k=k, v=v), cu, pool, slots)[0][0], gate)

    out = torch.empty_like(gate)

    def our_fused(pool: Tensor) -> Tensor:
        return kda.kda_decode(
            qkv, x["g"][0], x["beta"][0], gate, conv_pool, pool, slots, conv_w, x["A_log"], x["bias"], norm.weight,
            lower_bound=LB, out=out,
        )

    def vllm_chain() -> Callable[[], Tensor]:
        conv = peers.vllm_conv_update(qkv, conv_pool, conv_w, slots)
        step, their_norm = peers.vllm_recurrent(x, cu, pool, slots, LB), peers.vllm_norm(D, BF16, DEV)
        return lambda: their_norm(step(*(p.reshape(1, N, H, D) for p in conv().split(H * D, -1)))[0][0], gate)

    us: dict[str, Ms] = {
        "ours": attempt(lambda: 1e3 * graph_ms(partial(our_recurrent, x, cu, pool, slots))),
        "our chain": attempt(lambda: 1e3 * graph_ms(our_chain)),
        "fused": attempt(lambda: 1e3 * graph_ms(partial(our_fused, pool))),
        "fused, bf16 states": attempt(lambda: 1e3 * graph_ms(partial(our_fused, pool.bfloat16()))),
    }
    if "vllm" in opts.peers:
        us["vllm"] = attempt(lambda: 1e3 * graph_ms(peers.vllm_recurrent(x, cu, pool, slots, LB)))
        us["vllm chain"] = attempt(lambda: 1e3 * graph_ms(vllm_chain()))
    launch = attempt(lambda: host_us(partial(our_fused, pool)))
    kernels = attempt(lambda: kernel_us(lambda: (our_chain(), our_fused(pool))))
    waits = attempt(lambda: synchronises(lambda: (our_chain(), our_fused(pool))))
    floor = N * H * (D * D * 8 + D * 10) / opts.bandwidth * 1e6
    extra = N * H * D * (3 * 3 * 2 * 2 + 2)  # bytes: convolution state in and out, output gate
    chain_floor = floor + extra / opts.bandwidth * 1e6
    half_floor = chain_floor - N * H * D * D * 4 / opts.bandwidth * 1e6

    def part(name: str, our: str, vllm: str, floor: float) -> str:
        a, b = us[our], us.get(vllm)
        line = f"{name} {show(a, ' us', 1)} ({times(a, floor)} floor)"
        return line + (f", vllm {show(b, ' us', 1)}, ours/vllm {times(a, b)}" if b is not None else "")

    results.add(
        "decode",
        f"decode N={N} H={H}: {part('recurrence', 'ours', 'vllm', floor)};  "
        f"{part('chain', 'our chain', 'vllm chain', chain_floor)};  "
        f"{part('kda_decode', 'fused', 'vllm chain', chain_floor)};  "
        f"{part('bf16 states', 'fused, bf16 states', 'none', half_floor)};  launched in {show(launch, ' us', 1)}"
        + (f"  WAITS: {waits}" if waits else ""),
        N=N, H=H, us=us, floor_us=floor, chain_floor_us=chain_floor, ratio=ratio(us["ours"], us.get("vllm")),
        chain_ratio=ratio(us["our chain"], us.get("vllm chain")),
        fused_ratio=ratio(us["fused"], us.get("vllm chain")), bf16_state_floor_us=half_floor, launch_us=launch,
        kernel_us=kernels, synchronises=waits,
    )


def ops(results: Results, opts: argparse.Namespace) -> None:
    """The operations beside the delta rule: prefill shapes by events, decode shapes out of a graph."""
    lens = shorter(SIX) if opts.small else SIX
    T, N = sum(lens), len(lens)
    row = partial(ops_row, results, opts)
    for H in (2,) if opts.small else (64, 16):
        dim = 3 * H * D
        conv_w, cu = torch.randn(dim, 4, device=DEV), offsets(lens)
        x = torch.randn(T, dim, device=DEV, dtype=BF16).t()
        states = torch.randn(N + 1, 3, dim, device=DEV, dtype=BF16).transpose(1, 2)
        slots, has = torch.arange(1, N + 1, device=DEV).int(), torch.ones(N, dtype=torch.bool, device=DEV)
        conv = (x, conv_w, None, states, cu, slots, has)
        row(f"causal_conv1d_fn T={T} dim={dim}", partial(kda.causal_conv1d_fn, *conv, activation="silu"),
            lambda: peers.vllm_conv_fn(*conv), 4 * T * dim)

        g, gate = (torch.randn(T, H, D, device=DEV, dtype=BF16) for _ in range(2))
        a_log, bias, flat = torch.rand(H, device=DEV).log(), torch.randn(H * D, device=DEV), g.view(T, H * D)
        row(f"fused_kda_gate T={T} H={H}",
            lambda: kda.fused_kda_gate(flat, a_log, D, bias, safe_gate=True, lower_bound=LB),
            lambda: peers.vllm_gate(flat, a_log, D, bias, LB), 6 * T * H * D)
        norm = our_norm()
        row(f"FusedRMSNormGated T={T} H={H}", lambda: norm(g, gate),
            lambda: partial(peers.vllm_norm(D, BF16, DEV), g, gate), 6 * T * H * D)
        for n in (2,) if opts.small else (1, 8, 64, 256):
            decode_ops(row, n, H, conv_w, g[:n], gate[:n])


def decode_ops(row: Callable, n: int, H: int, conv_w: Tensor, g: Tensor, gate: Tensor) -> None:
    dim, norm = 3 * H * D, our_norm()
    slots = (torch.randperm(n, device=DEV) + 1).int()
    x, pool = torch.randn(n, dim, device=DEV, dtype=BF16), torch.randn(n + 1, 3, dim, device=DEV, dtype=BF16)
    pool = pool.transpose(1, 2)
    row(f"causal_conv1d_update N={n} dim={dim}",
        lambda: kda.causal_conv1d_update(x, pool, conv_w, None, activation="silu", conv_state_indices=slots),
        lambda: peers.vllm_conv_update(x, pool, conv_w, slots), dim * (16 + n * (3 * 4 + 4)), graph=True)
    row(f"FusedRMSNormGated N={n} H={H}", lambda: norm(g, gate),
        lambda: partial(peers.vllm_norm(D, BF16, DEV), g, gate), 6 * n * H * D, graph=True)

    states, has = torch.randn(n + 1, H, D, D, device=DEV), torch.ones(n, dtype=torch.bool, device=DEV)
    src, rows, nbytes = states[1:].clone(), slots.long(), 8 * n * H * D * D
    row(f"gather_initial_states N={n} H={H}", lambda: kda.gather_initial_states(states, slots, has),
        lambda: lambda: torch.where(has[:, None, None, None], states[rows], 0), nbytes, True, "torch")
    row(f"scatter_states N={n} H={H}", lambda: kda.scatter_states(states, src, slots),
        lambda: lambda: states.index_copy_(0, rows, src), nbytes, True, "torch")


def ops_row(
    results: Results, opts: argparse.Namespace, name: str, ours: Callable, peer: Callable[[], Callable],
    nbytes: float, graph: bool = False, label: str = "vllm",
) -> None:
    measure = graph_ms if graph else partial(median_ms, runs=opts.runs)
    us: dict[str, Ms] = {"ours": attempt(lambda: 1e3 * measure(ours))}
    if label == "torch" or label in opts.peers:
        us[label] = attempt(lambda: 1e3 * measure(peer()))
    waits, floor = attempt(lambda: synchronises(ours)), nbytes / opts.bandwidth * 1e6
    line = f"{name:44} ours {show(us['ours'], ' us', 1):>11} ({times(us['ours'], floor)} floor)"
    if label in us:
        line += f"  {label} {show(us[label], ' us', 1)}  ours/{label} {times(us['ours'], us[label])}"
    results.add(
        "ops", line + (f"  WAITS: {waits}" if waits else ""),
        op=name, us=us, floor_us=floor, ratio=ratio(us["ours"], us.get(label)), graph=graph,
        synchronises=waits,
    )


def layer(results: Results, opts: argparse.Namespace) -> None:
    """kda_prefill beside its operations one by one, and what checkpoints every 512 tokens add."""
    for H, lens in [(64, [8192]), (64, SIX), (16, SIX)]:
        layer_row(results, H, shorter(lens) if opts.small else lens, 16 if opts.small else 512)


def layer_row(results: Results, H: int, lens: list[int], every: int) -> None:
    T, N, dim = sum(lens), len(lens), 3 * H * D
    x, cu, norm = inputs(T, H, N), offsets(lens), our_norm()
    at = [sum(lens[:n]) + end for n, length in enumerate(lens) for end in range(every, length, every)]
    pool = torch.cat([x["h0"][:1]] + [x["h0"]] + [x["h0"][:1]] * len(at))
    slots, has = torch.arange(1, N + 1, device=DEV).int(), torch.ones(N, dtype=torch.bool, device=DEV)
    kept = torch.arange(N + 1, N + 1 + len(at), device=DEV).int()
    where = torch.tensor(at, device=DEV, dtype=torch.int32)
    qkv = torch.randn(T, dim, device=DEV, dtype=BF16)
    gate, g, beta = torch.randn(T, H, D, device=DEV, dtype=BF16), x["g"][0], x["beta"][0]
    conv_pool = torch.randn(len(pool), 3, dim, device=DEV, dtype=BF16).transpose(1, 2)
    weight = torch.randn(dim, 4, device=DEV)

    def whole(**checkpoints: Tensor) -> Tensor:
        return kda.kda_prefill(
            qkv, g, beta, gate, conv_pool, pool, slots, cu, has, weight, x["A_log"], x["bias"], norm.weight,
            lower_bound=LB, **checkpoints,
        )

    def apart() -> Tensor:
        y = kda.causal_conv1d_fn(qkv.T, weight, None, conv_pool, cu, slots, has, activation="silu").T
        q, k, v = y.view(1, T, 3, H, D).unbind(2)
        o, h = our_chunk(x | dict(q=q, k=k, v=v, h0=kda.gather_initial_states(pool, slots, has)), cu)
        kda.scatter_states(pool, h, slots)
        return norm(o[0], gate)

    keeping = partial(whole, checkpoint_offsets=where, checkpoint_indices=kept)
    ms = {"apart": attempt(lambda: graph_ms(apart, 4)), "kda_prefill": attempt(lambda: graph_ms(whole, 4)),
          "with checkpoints": attempt(lambda: graph_ms(keeping, 4))}
    launch = attempt(lambda: host_us(whole))
    kernels, waits = attempt(lambda: kernel_us(keeping)), attempt(lambda: synchronises(keeping))
    results.add(
        "layer",
        f"layer T={T} H={H} N={N}: " + "  ".join(f"{name} {show(t)} ms" for name, t in ms.items())
        + f"  {len(at)} checkpoints cost {times(ms['with checkpoints'], ms['kda_prefill'])}"
        + f"  launched in {show(launch, ' us', 1)}" + (f"  WAITS: {waits}" if waits else ""),
        T=T, H=H, lens=lens, checkpoints=len(at), ms=ms, launch_us=launch, kernel_us=kernels, synchronises=waits,
    )


PARTS = {"accuracy": accuracy, "prefill": prefill, "layer": layer, "decode": decode, "ops": ops}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--part", choices=PARTS, help="default: all")
    parser.add_argument("--peers", help="of flashkda, vllm, fla; '': none (default: flashkda,vllm on a GPU)")
    parser.add_argument("--all-rows", action="store_true", help="vllm and fla on every prefill row")
    parser.add_argument("--runs", type=int, default=20, help="calls of which a time is the median")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the script itself")
    opts = parser.parse_args()
    if opts.peers is None:
        opts.peers = "flashkda,vllm" if DEV == "cuda" else ""
    opts.peers = [p for p in opts.peers.split(",") if p]
    if unknown := set(opts.peers) - set(peers.CHUNK):
        parser.error(f"unknown peers {sorted(unknown)}; known: {', '.join(peers.CHUNK)}")

    opts.bandwidth = copy_bytes_per_s(DEV, 64 if opts.small else 1024)
    results = Results(
        opts.out / f"gpu{'-' + opts.part if opts.part else ''}.json", backend=kda.backend_for(DEV),
        why=kda.why(DEV), arguments=sys.argv[1:], copy_bytes_per_s=opts.bandwidth,
    )
    print(f"{kda.why(DEV)}; copy {opts.bandwidth / 1e12:.2f} TB/s; torch {torch.__version__}", flush=True)
    good = True
    with torch.no_grad():
        for part in [opts.part] if opts.part else PARTS:
            good = PARTS[part](results, opts) is not False and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
