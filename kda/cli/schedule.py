# SPDX-License-Identifier: Apache-2.0
"""Requests cut from a text, the batches in which they are served, and the loop that serves them."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kda.cli.layer import KDALayer
from kda.serving import Batch, Decode, Prefill, StatePool

SHARES = (0.42, 0.27, 0.18, 0.13)  # of the prompt tokens, one a request
LATE_SHARE = 0.25  # the late request's prompt, in the others' prompt tokens
MIN_BYTES = 64  # the shortest text that can be cut so


@dataclass
class Request:
    """A stretch of the text: `prompt` tokens are prefilled, then `decode` tokens are decoded, one a step."""

    start: int
    prompt: int
    decode: int

    @property
    def stop(self) -> int:
        return self.start + self.prompt + self.decode


@dataclass
class Step:
    """One batch: requests that decode a token, and (request, first, last + 1) pieces that are prefilled."""

    kind: str  # "prefill", "decode" or "mixed"
    decode: list[int]
    prefill: list[tuple[int, int, int]]


def plan(n_bytes: int, tokens: int, steps: int) -> tuple[list[Request], list[Step]]:
    """Cut a text of `n_bytes` into requests, one after the other, and lay down the batches.

    The first four requests share `tokens` prompt tokens and decode for `steps` steps; a third of the way a
    late one is prefilled in two pieces beside two of these steps. A short text gives fewer tokens and steps.
    """
    needed = tokens * (1 + LATE_SHARE) + steps * (len(SHARES) + 1)
    if needed > n_bytes:
        steps = max(int(steps * n_bytes / needed), 4)
        tokens = int((n_bytes - steps * (len(SHARES) + 1)) / (1 + LATE_SHARE))
    late_at, late = steps // 3, len(SHARES)
    lengths = [(max(int(tokens * share), 2), steps) for share in SHARES]
    lengths.append((max(int(tokens * LATE_SHARE), 2), steps - late_at - 2))
    requests: list[Request] = []
    for prompt, decode in lengths:
        requests.append(Request(requests[-1].stop if requests else 0, prompt, decode))

    first, length = list(range(late)), requests[late].prompt
    cut = max(length * 5 // 8, 1)
    batches = [Step("prefill", [], [(r, 0, requests[r].prompt) for r in first])]
    for s in range(steps):
        if s in (late_at, late_at + 1):
            batches.append(Step("mixed", first, [(late, 0, cut) if s == late_at else (late, cut, length)]))
        else:
            batches.append(Step("decode", [*first, late] if s > late_at else first, []))
    return requests, batches


def only(requests: list[Request], batches: list[Step], kept: list[int]) -> tuple[list[Request], list[Step]]:
    """The same batches with the requests `kept` alone, renumbered."""
    new = {r: i for i, r in enumerate(kept)}
    steps = []
    for b in batches:
        decode = [new[r] for r in b.decode if r in new]
        prefill = [(new[r], first, last) for r, first, last in b.prefill if r in new]
        if decode or prefill:
            steps.append(Step(b.kind, decode, prefill))
    return [requests[r] for r in kept], steps


@dataclass
class Rates:
    tokens: int = 0
    layer_s: float = 0.0
    kda_s: float = 0.0


@dataclass
class Served:
    """Rates by kind of step; by request: layer outputs [T, hidden]; what the operations saw and gave (qkv [T, 3*H*D], raw_g
    and out_gate [T, H, D], beta [T, H], output y [T, H, D]); recurrent states [H, V, K] after prefill and at the end."""

    rates: dict[str, Rates] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    traces: list[dict[str, Tensor]] = field(default_factory=list)
    prefilled: list[Tensor] = field(default_factory=list)
    final: list[Tensor] = field(default_factory=list)


def serve(
    layer: KDALayer, x: list[Tensor], requests: list[Request], batches: list[Step],
    tick: Callable[[int], object] = lambda n: None,
) -> Served:
    """`x`: each request's embeddings [T, hidden]. `tick` is told the tokens of each batch that is done."""
    device = layer.in_proj.weight.device
    pool = StatePool(len(requests) + 1, layer.geometry(), device=device)
    slots = pool.allocate(len(requests))
    at = [0] * len(requests)
    outputs: list[list[Tensor]] = [[] for _ in requests]
    traces: list[list[dict[str, Tensor]]] = [[] for _ in requests]
    prefilled: dict[int, Tensor] = {}
    served = Served()

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for step in batches:
        rows = [(r, at[r], at[r] + 1) for r in step.decode] + step.prefill
        prefills = [Prefill(slots[r], b - a, has_initial_state=a > 0) for r, a, b in step.prefill]
        batch = Batch.of([Decode(slots[r]) for r in step.decode] + prefills, pool=pool)
        tokens = torch.cat([x[r][a:b] for r, a, b in rows])
        t0 = now()
        projected = layer.project(tokens)
        t1 = now()
        mixed = layer.mix(projected, batch, pool.layers[0])
        t2 = now()
        y = layer.o_proj(mixed.flatten(1))
        t3 = now()

        rates = served.rates.setdefault(step.kind, Rates())
        rates.tokens += len(tokens)
        rates.layer_s += t3 - t0
        rates.kda_s += t2 - t1
        sizes = [b - a for _, a, b in rows]
        y_rows = y.split(sizes)
        seen_rows = {name: t.split(sizes) for name, t in dict(projected._asdict(), y=mixed).items()}
        for i, (r, _, b) in enumerate(rows):
            outputs[r].append(y_rows[i])
            traces[r].append({name: parts[i] for name, parts in seen_rows.items()})
            at[r] = b
            if b == requests[r].prompt:
                prefilled[r] = pool.layers[0].ssm_state[slots[r]].clone()
        tick(len(tokens))

    served.outputs = [torch.cat(parts) for parts in outputs]
    served.traces = [{name: torch.cat([p[name] for p in parts]) for name in parts[0]} for parts in traces]
    served.prefilled = [prefilled[r] for r in range(len(requests))]
    served.final = [pool.layers[0].ssm_state[slot].clone() for slot in slots]
    return served
