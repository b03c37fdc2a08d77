# SPDX-License-Identifier: Apache-2.0
"""What `kda tune` runs of each operation: a call to be timed, and a call from fresh states beside the oracle in fp64."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import kda
from kda.cli.check import BOUNDS
from kda.cli.workloads import EPS, LB, Case, Output, Tensors, Turns, W, Work, norm64


def chunk(work: Work, x: Tensors) -> Case:
    qkv, g, beta = x.randn(x.T, x.dim), x.heads(), x.randn(x.T, work.H)
    h0 = x.state_pool()[1:].float()
    q, k, v = (part[None] for part in x.split(qkv))

    def call():
        return kda.chunk_kda_with_fused_gate(
            q, k, v, g[None], beta[None], x.A_log, x.bias, initial_state=h0, output_final_state=True, cu_seqlens=x.cu,
            use_qk_l2norm_in_kernel=True, sigmoid_beta=True, safe_gate=work.bounded, lower_bound=LB,
        )  # fmt: skip

    def outputs(oracle: bool) -> list[Output]:
        o, state = call()
        ref_o, ref_state = x.rule64(qkv, g, beta, h0) if oracle else (None, None)
        return [Output("output", o[0], ref_o, x.bound[0]), Output("state", state, ref_state, x.bound[1])]

    return Case(call, outputs)


def recurrent(work: Work, x: Tensors) -> Case:
    qkv, g, beta, pool = x.randn(x.T, x.dim), x.heads(), x.randn(x.T, work.H), x.state_pool()
    q, k, v = (part[None] for part in x.split(qkv))

    def call(slots, pool):
        return kda.fused_recurrent_kda(
            q, k, v, g[None], beta[None], initial_state=pool, use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu,
            ssm_state_indices=slots, sigmoid_beta=True, a_log=x.A_log, g_bias=x.bias, compute_gate=True,
            lower_bound=x.lower_bound,
        )  # fmt: skip

    def outputs(oracle: bool) -> list[Output]:
        states = pool.clone()
        ref_o, ref_state = x.rule64(qkv, g, beta, states[x.slots]) if oracle else (None, None)
        o, _ = call(x.slots, states)
        return [Output("output", o[0], ref_o, x.bound[0]), Output("state", states[x.slots], ref_state, x.bound[1])]

    return Case(Turns(call, x, pool), outputs)


def decode(work: Work, x: Tensors) -> Case:
    qkv, g, beta, gate = x.randn(x.N, x.dim), x.heads(), x.randn(x.N, work.H), x.heads()
    conv, pool, norm = x.conv_pool(), x.state_pool(), x.randn(work.D, dtype=torch.float32)
    out = torch.empty_like(gate)

    def call(slots, conv, pool):
        return kda.kda_decode(qkv, g, beta, gate, conv, pool, slots, x.weight, x.A_log, x.bias, norm,
                              lower_bound=x.lower_bound, eps=EPS, out=out)  # fmt: skip

    def outputs(oracle: bool) -> list[Output]:
        ref_o = ref_state = ref_conv = None
        if oracle:
            y, ref_conv = x.conv64(qkv, conv)
            o, ref_state = x.rule64(y.to(work.dtype), g, beta, pool[x.slots])
            ref_o = norm64(o, gate, norm)
        history, states = conv.clone(), pool.clone()
        o = call(x.slots, history, states).clone()
        return [Output("output", o, ref_o, x.bound[0]), Output("state", states[x.slots], ref_state, x.bound[1]),
                Output("convolution state", history[x.slots], ref_conv, 0.0)]  # fmt: skip

    return Case(Turns(call, x, conv, pool), outputs)


def verify(work: Work, x: Tensors) -> Case:
    """Windows of drafts, each committing the whole window before it."""
    qkv, g, beta, gate = x.randn(x.T, x.dim), x.heads(), x.randn(x.T, work.H), x.heads()
    window = max(work.lens)
    conv, pool, norm = x.conv_pool(W - 1 + window), x.state_pool(), x.randn(work.D, dtype=torch.float32)
    records = torch.zeros(x.N + 1, window, work.H, 3 * work.D, device=x.device)
    none, whole, out = x.ints([0] * x.N), x.ints(list(work.lens)), torch.empty_like(gate)

    def call(slots, conv, pool, records, accepted=whole):
        return kda.kda_verify(qkv, g, beta, gate, conv, pool, records, slots, x.cu, accepted, x.weight, x.A_log, x.bias,
                              norm, lower_bound=x.lower_bound, eps=EPS, out=out)  # fmt: skip

    def outputs(oracle: bool) -> list[Output]:
        """Two windows of the same tokens, the second one on the first's records."""
        refs, states = [None, None, None], pool[x.slots]
        if oracle:
            history, steps = conv, []
            for _ in range(2):
                y, last = x.conv64(qkv, history)
                o, states = x.rule64(y.to(work.dtype), g, beta, states)
                steps.append((norm64(o, gate, norm), states))
                history = conv.clone()
                history[x.slots, :, : W - 1] = last
            refs = [steps[0][0], steps[1][0], steps[0][1]]
        mine = conv.clone(), pool.clone(), torch.zeros_like(records)
        first = call(x.slots, *mine, none).clone()
        second = call(x.slots, *mine, whole).clone()
        return [Output("output", first, refs[0], x.bound[0]), Output("output after a commit", second, refs[1], x.bound[0]),
                Output("state", mine[1][x.slots], refs[2], x.bound[1])]  # fmt: skip

    return Case(Turns(call, x, conv, pool, records), outputs)


def commit(work: Work, x: Tensors) -> Case:
    """Windows of records, of which all tokens are accepted when it is timed, and one or two fewer of some when checked."""
    window = max(work.lens)
    conv, pool = x.conv_pool(W - 1 + window), x.state_pool()
    k, d = x.randn(2, x.N + 1, window, work.H, work.D, dtype=torch.float32)
    decay = x.randn(x.N + 1, window, work.H, work.D, dtype=torch.float32).sigmoid()
    records = torch.cat([k * k.square().sum(-1, keepdim=True).rsqrt(), decay, d], -1)
    whole, counts = x.ints(list(work.lens)), [max(length - n % 3, 1) for n, length in enumerate(work.lens)]
    some = x.ints(counts)

    def call(slots, conv, pool, records, accepted=whole):
        kda.kda_commit(conv, pool, records, slots, accepted)

    def outputs(oracle: bool) -> list[Output]:
        ref_state = ref_conv = None
        if oracle:
            applied, kept = [], []
            for slot, count in zip(x.slots.tolist(), counts):
                S = pool[slot].double()
                for k, decay, d in (record.double().chunk(3, -1) for record in records[slot, :count]):
                    S = S * decay[:, None, :] + d[:, :, None] * k[:, None, :]
                applied.append(S)
                kept.append(conv[slot, :, count : count + W - 1])
            ref_state, ref_conv = torch.stack(applied), torch.stack(kept)
        mine = conv.clone(), pool.clone()
        call(x.slots, *mine, records, some)
        return [Output("state", mine[1][x.slots], ref_state, x.bound[1]),
                Output("convolution state", mine[0][x.slots, :, : W - 1], ref_conv, 0.0)]  # fmt: skip

    return Case(Turns(call, x, conv, pool, records), outputs)


def conv_fwd(work: Work, x: Tensors) -> Case:
    tokens, pool = x.randn(x.T, x.dim), x.conv_pool()
    has = torch.ones(x.N, dtype=torch.bool, device=x.device)

    def call(slots, pool):
        return kda.causal_conv1d_fn(tokens.t(), x.weight, None, pool, x.cu, slots, has)

    return Case(Turns(call, x, pool), partial(_conv_outputs, call, x, tokens, pool))


def conv_update(work: Work, x: Tensors) -> Case:
    tokens, pool = x.randn(x.T, x.dim), x.conv_pool()
    window = max(work.lens)
    rows = tokens if window == 1 else tokens.view(x.N, window, x.dim).transpose(1, 2)

    def call(slots, pool):
        return kda.causal_conv1d_update(rows, pool, x.weight, activation="silu", conv_state_indices=slots)

    def flat(slots, pool):
        y = call(slots, pool)
        return y.t() if window == 1 else y.transpose(1, 2).reshape(x.T, x.dim).t()

    return Case(Turns(call, x, pool), partial(_conv_outputs, flat, x, tokens, pool))


def _conv_outputs(call, x: Tensors, tokens: Tensor, pool: Tensor, oracle: bool) -> list[Output]:
    ref, last = x.conv64(tokens, pool) if oracle else (None, None)
    history = pool.clone()
    y = call(x.slots, history).t()
    return [Output("output", y, ref, x.bound[0]), Output("convolution state", history[x.slots], last, 0.0)]


def norm(work: Work, x: Tensors) -> Case:
    o, gate, weight = x.heads(), x.heads(), x.randn(work.D, dtype=torch.float32)

    def call():
        return kda.rms_norm_gated(o, gate, weight, None, activation="sigmoid", eps=EPS)

    def outputs(oracle: bool) -> list[Output]:
        return [Output("output", call(), norm64(o, gate, weight) if oracle else None, x.bound[0])]

    return Case(call, outputs)


def gate(work: Work, x: Tensors) -> Case:
    g = x.randn(1, x.T, work.H * work.D)

    def call():
        return kda.fused_kda_gate(g, x.A_log, work.D, x.bias, safe_gate=work.bounded, lower_bound=LB)

    def outputs(oracle: bool) -> list[Output]:
        ref = None
        if oracle:
            raw, rate = (g.double() + x.bias.double()).unflatten(-1, (work.H, work.D)), x.A_log.double().exp()[:, None]
            ref = LB * torch.sigmoid(rate * raw) if work.bounded else -rate * F.softplus(raw)
        return [Output("log decay", call(), ref, BOUNDS[torch.float32][0])]

    return Case(call, outputs)


CASES: dict[str, Callable[[Work, Tensors], Case]] = {
    "chunk_intra": chunk,
    "chunk_walk": chunk,
    "chunk_combine": chunk,
    "kda_decode": decode,
    "kda_verify": verify,
    "kda_commit": commit,
    "fused_recurrent": recurrent,
    "causal_conv1d_fwd": conv_fwd,
    "causal_conv1d_update": conv_update,
    "rms_norm_gated": norm,
    "fused_kda_gate": gate,
}
