# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding's two ways: bytes a request keeps, and times of a step's verify rows.

"kda, full states": a recurrent state a token (`ssm_state_indices` [N, window], as vLLM has them): convolution update,
recurrence and gated norm, three launches. "kda_verify": one checkpoint and compact records, which commits the last window
first. "kda_verify + kda_commit": the same in two steps, for requests that go on otherwise.

All go through `kda_forward`, on windows of which a random number of tokens was accepted. The floor is the bytes of states
and records, read and written. "output" is the difference between the two ways, each of which may be off by its bound.
"""
from __future__ import annotations

import torch
from torch import Tensor

import kda
from kda.cli.bench.rows import Row
from kda.cli.bench.session import Session, bound, judged
from kda.cli.bench.tensors import D
from kda.cli.check import err
from kda.serving import Batch, Geometry, StatePool, kda_forward

W = 4
FULL, VERIFY, APART = "kda, full states", "kda_verify", "kda_verify + kda_commit"


class Window:
    """N requests of H heads with a window of tokens each, in random states; both ways from the same ones."""

    def __init__(self, H: int, N: int, window: int, device: torch.device) -> None:
        gen = torch.Generator(device).manual_seed(0)
        dim, T, bf16 = 3 * H * D, N * window, torch.bfloat16

        def randn(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
            return torch.randn(*shape, device=device, generator=gen).to(dtype)

        def ints(values) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(device)

        self.tokens = (randn(T, dim), randn(T, H, D), randn(T, H), randn(T, H, D))
        self.weights = (randn(dim, W, dtype=torch.float32), torch.zeros(H, device=device), None, torch.ones(D, device=device))
        geometry = Geometry(HV=H, V=D, K=D, dim=dim, W=W, record_tokens=window)
        self.records = StatePool(N + 1, geometry, device=device)
        self.full_ssm = torch.empty(N * window + 1, H, D, D, device=device)
        self.full_conv = torch.empty(N * window + 1, window + W - 2, dim, dtype=bf16, device=device).mT
        conv, ssm = self.records.layers[0]
        for slot in range(1, N + 1):
            ssm[slot] = 0.1 * randn(H, D, D)
            conv[slot] = randn(*conv.shape[1:])
            self.full_ssm[slot] = ssm[slot]
            self.full_conv[slot] = conv[slot, :, : window + W - 2]
        for slot in range(N + 1, N * window + 1):
            self.full_ssm[slot] = self.full_ssm[(slot - 1) % N + 1]
        first, more = torch.arange(1, N + 1)[:, None], torch.arange(N + 1, N * window + 1).view(N, window - 1)
        self.accepted = torch.randint(1, window + 1, (N,), device=device, generator=gen, dtype=torch.int32)
        self.slots, common = ints(first[:, 0]), dict(
            verify_query_start_loc=ints(range(0, T + 1, window)), num_verify_tokens=T, window=window
        )
        self.batches = {
            FULL: Batch(verify_slots=ints(torch.cat([first, more], 1)), num_accepted_tokens=self.accepted, **common),
            VERIFY: Batch(verify_slots=self.slots, num_accepted_tokens=self.accepted, **common),
            APART: Batch(verify_slots=self.slots, num_accepted_tokens=torch.zeros_like(self.accepted), **common),
        }

    def run(self, way: str, batch: Batch | None = None) -> Tensor:
        states, records = self.records.layers[0], self.records.records[0]
        if way == FULL:
            states, records = (self.full_conv, self.full_ssm), None
        o = kda_forward(*self.tokens, *states, batch or self.batches[way], *self.weights, records=records)
        if way == APART:
            kda.kda_commit(*states, records, self.slots, self.accepted)
        return o

    def difference(self) -> float:
        """Of the outputs of both ways, on requests that enter speculation with this step."""
        outputs = []
        for way, entering in ((FULL, 1), (VERIFY, 0)):
            fields = {**self.batches[way].fields, "num_accepted_tokens": torch.full_like(self.accepted, entering)}
            outputs.append(self.run(way, Batch(**fields)))
        return err(outputs[1], outputs[0])


def fill(session: Session, row: Row, H: int, N: int, window: int) -> None:
    x = Window(H, N, window, session.device)
    judged(row, VERIFY, {"output": x.difference()}, [2 * bound()[0], None])
    kept = kda.speculation_bytes(window, H, H, D, D, W)
    row.facts["bytes_a_request"] = {FULL: kept["full"], VERIFY: kept["recovery"]}
    state, record = H * D * D * 4, window * H * 3 * D * 4
    accepted = float(x.accepted.float().mean()) / window
    moved = {FULL: (1 + window) * state, VERIFY: 2 * state + (1 + accepted) * record}
    session.floor(row, {way: N * nbytes for way, nbytes in moved.items()})
    session.time(row, {way: lambda way=way: x.run(way) for way in x.batches})
    session.launching(row, lambda: x.run(VERIFY))
