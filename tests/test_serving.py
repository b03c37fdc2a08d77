# SPDX-License-Identifier: Apache-2.0
"""A serving engine, simulated: requests come and go at random through kda_forward and StatePool, against one plain
recurrence a request in fp64."""

import collections
import random

import oracle
import pytest
import torch
from helpers import BF16, FP32, INTERPRETED, assert_accurate, bf16_on_gpu, dtype_id, rand, randn

from kda.serving import (Batch, Decode, Geometry, Prefill, StatePool, Verify, kda_forward, load_snapshots, save_snapshots)

H, K, V, W, WINDOW = 2, 16, 16, 4, 8
DIM = H * (2 * K + V)
LENGTH, BLOCK = 96, 8  # tokens of a stream; prefixes are cached at multiples of BLOCK
STREAMS, DOCUMENTS = 40, 4
STEPS, SLOTS, MOST_LIVE = 500, 64, 6


class Streams:
    """Token streams and what their requests must give. Those of one document begin with the same tokens."""

    def __init__(self, dtype, device):
        put = dict(dtype=dtype, device=device)
        shapes = dict(qkv=(DIM,), raw_g=(H, K), beta=(H,), out_gate=(H, V))
        self.tokens = {name: randn(STREAMS, LENGTH, *shape, seed=n, **put) for n, (name, shape) in enumerate(shapes.items())}
        self.shared = [BLOCK * (stream % 5) for stream in range(STREAMS)]  # tokens of the document at its beginning
        for stream in range(DOCUMENTS, STREAMS):
            for x in self.tokens.values():
                x[stream, :self.shared[stream]] = x[stream % DOCUMENTS, :self.shared[stream]]
        self.wrong = {name: randn(WINDOW, *shape, seed=50 + n, **put) for n, (name, shape) in enumerate(shapes.items())}
        self.weights = dict(
            conv_weight=randn(DIM, W, seed=60, scale=0.5, device=device), A_log=rand(H, seed=61).log().to(device),
            g_bias=randn(H * K, seed=62, device=device), norm_weight=1 + randn(V, seed=63, scale=0.1, device=device))
        self.outputs, self.states = self._in_fp64(dtype)

    def _in_fp64(self, dtype):
        """Outputs [streams, tokens, H, V] and the states after each token, [streams, tokens, H, V, K]."""
        x, w = self.tokens, self.weights
        history = torch.zeros(DIM, W - 1, device=x["qkv"].device)
        y = torch.stack([oracle.conv(qkv.T, w["conv_weight"], None, history, True)[0].T for qkv in x["qkv"]])
        q, k, v = (t.unflatten(-1, (H, -1)) for t in y.to(dtype).split([H * K, H * K, H * V], -1))
        gate = dict(A_log=w["A_log"], g_bias=w["g_bias"], lower_bound=-5.0, sigmoid_beta=True)
        o, states = oracle.kda(q, k, v, x["raw_g"], x["beta"], **gate, token_states=True)
        o, _ = oracle.rms_norm_gated(o, x["out_gate"], w["norm_weight"], None, "sigmoid", eps=1e-5)
        return o, states.unflatten(0, (STREAMS, LENGTH))


class Request:
    def __init__(self, stream, prompt, way):
        self.stream, self.prompt, self.way = stream, prompt, way
        self.at = 0  # tokens accepted
        self.begun = False  # whether its slot holds its state
        self.slots = []  # its own, and with full states those of a window
        self.speculating, self.accepted = False, 0  # of the last window
        self.saved = None
        self.ended = False
        self.outputs = None


class Engine:
    """What an engine does, at random: `did` counts it."""

    def __init__(self, streams, dtype, device, seed, tmp_path):
        self.x, self.dtype, self.device, self.tmp_path = streams, dtype, device, tmp_path
        self.pool = StatePool(SLOTS, Geometry(HV=H, V=V, K=K, dim=DIM, W=W, num_spec=WINDOW - 1, record_tokens=WINDOW,
                                              conv_dtype=dtype), device=device)
        self.pool.pages.fill_(-1)  # NaN
        self.random, self.did = random.Random(seed), collections.Counter()
        self.live, self.preempted = [], []
        self.cache = {}  # (document, tokens) -> slot, or a snapshot in host memory
        self.coming = {}  # what this step will put there
        self.origin = {}  # (document, tokens) -> the request that it was taken from, and that one's slot
        self.reused = set()  # cached prefixes whose origin has ended and whose slot has had another owner since

    # ---- slots

    def allocate(self, n=1, zero=False):
        while self.pool.available < n:
            self.evict()
        slots = self.pool.allocate(n, zero=zero)
        for key, (request, slot) in self.origin.items():
            if slot in slots and request.ended:
                self.reused.add(key)
        return slots

    def evict(self):
        """A cached prefix goes to host memory, or for good."""
        key = self.random.choice([key for key, kept in self.cache.items() if isinstance(kept, int)])
        slot = self.cache.pop(key)
        if self.random.random() < 0.5:
            self.cache[key] = self.pool.snapshot(slot, tokens=key[1], accepted=0)
            self.did["prefix moved to the host"] += 1
        self.free([slot])

    def free(self, slots):
        self.pool.free(slots)
        if self.random.random() < 0.5:  # otherwise the next owner finds the old states
            self.pool.pages[:, slots] = -1

    def state(self, request):
        """As it would be saved now: a request's pending tokens are part of it."""
        pending = request.accepted if request.way == "records" else 0
        return self.pool.snapshot(request.slots[0], tokens=request.at, accepted=pending)

    # ---- what is right

    def check_state(self, request, snapshot):
        self.did["state checked"] += 1
        assert snapshot.tokens == request.at
        want = self.x.states[request.stream, request.at - 1].cpu()
        assert_accurate(snapshot.ssm_state[0], want, self.dtype, "state")
        past = [t for t in range(request.at - W + 1, request.at)]
        qkv = self.x.tokens["qkv"][request.stream].cpu()
        history = torch.stack([qkv[t] if t >= 0 else torch.zeros_like(qkv[0]) for t in past], 1)
        assert torch.equal(snapshot.conv_state[0, :, :W - 1], history)

    def check_outputs(self, request):
        o, want = request.outputs[:request.at], self.x.outputs[request.stream, :request.at]
        assert_accurate(o, want, self.dtype)

    # ---- requests come, wait and go

    def arrive(self):
        stream = self.random.randrange(STREAMS)
        request = Request(stream, self.random.randint(self.x.shared[stream], LENGTH - 12),
                          self.random.choice(["full", "records"]))
        request.outputs = torch.full_like(self.x.outputs[0], float("nan"))
        self.did["arrived"] += 1
        if self.random.random() < 0.1:
            request.prompt = 0
        self.place(request)
        self.live.append(request)

    def place(self, request):
        """A slot for a request from its first token on, with the longest cached prefix in it."""
        if not request.prompt:
            request.slots, request.at, request.begun = self.allocate(zero=True), 0, True
            self.did["began with a decode"] += 1
            return
        document = request.stream % DOCUMENTS
        hits = [n for doc, n in self.cache if doc == document and n <= self.x.shared[request.stream]]
        if not hits or self.random.random() < 0.1:
            request.slots, request.at, request.begun = self.allocate(), 0, False
            return
        key = (document, max(hits))
        kept = self.cache[key]
        while not self.pool.available and key in self.cache:
            self.evict()
        kept = self.cache.get(key)
        if kept is None:  # it had to make room itself
            return self.place(request)
        on_host = not isinstance(kept, int)
        request.slots = [self.pool.restore(kept) if on_host else self.pool.fork(kept)]
        request.at, request.begun = key[1], True
        request.outputs[:key[1]] = self.x.outputs[request.stream, :key[1]]  # someone else's
        self.did["prefix hit"] += 1
        self.did["prefix hit from the host"] += on_host
        self.did["prefix hit after its origin ended and its slot was reused"] += key in self.reused

    def settle(self, request):
        """Out of full states without a step."""
        if request.speculating and request.way == "full":
            self.pool.settle(request.slots, request.accepted)
            self.free(request.slots[1:])
            del request.slots[1:]
            request.speculating, request.accepted = False, 0

    def preempt(self, request):
        self.live.remove(request)
        self.preempted.append(request)
        self.did["preempted"] += 1
        self.did["preempted while speculating"] += request.speculating
        self.settle(request)
        if request.begun and request.at and self.random.random() < 0.7:
            request.saved = self.state(request)
            self.check_state(request, request.saved)
        else:
            request.begun = False
            self.did["preempted to recompute"] += 1
        self.free(request.slots)
        request.slots, request.speculating, request.accepted = [], False, 0

    def resume(self):
        request = self.preempted.pop(self.random.randrange(len(self.preempted)))
        self.did["resumed"] += 1
        if request.saved is None:
            self.place(request)
        else:
            if self.random.random() < 0.3:
                save_snapshots(self.tmp_path / "states", {"request": request.saved})
                request.saved = load_snapshots(self.tmp_path / "states")["request"]
                self.did["resumed from a file"] += 1
            request.slots = self.allocate()
            self.pool.restore(request.saved, request.slots[0])
        request.saved = None
        self.live.append(request)

    def fork(self, request):
        """A second request that goes on with the same tokens."""
        self.settle(request)
        child = Request(request.stream, request.prompt, request.way)
        if not self.pool.available:
            self.evict()
        child.slots, child.outputs = [self.pool.fork(request.slots[0])], request.outputs.clone()
        child.at, child.begun, child.speculating, child.accepted = request.at, True, request.speculating, request.accepted
        self.live.append(child)
        self.did["forked"] += 1
        self.did["forked with records"] += child.speculating

    def end(self, request):
        self.live.remove(request)
        request.ended = True
        self.did["ended"] += 1
        self.did["ended at its last token"] += request.at == LENGTH
        self.settle(request)
        if request.begun and request.at:
            self.check_outputs(request)
            self.check_state(request, self.state(request))
        self.free(request.slots)

    # ---- a step

    def row(self, request, way):
        """A row of this step; its tokens; how many of them are accepted, kept for `finish`."""
        left, rng = LENGTH - request.at, self.random
        if request.at < request.prompt or rng.random() < 0.1:
            tokens = rng.randint(1, min(left, max(request.prompt - request.at, 4), 24))
            checkpoints = self.checkpoints(request, tokens)
            self.settle(request)
            self.did["continued prefill" if request.begun else "fresh prefill"] += 1
            self.did["left speculation by a prefill"] += request.speculating
            row = Prefill(request.slots[0], tokens, request.begun, checkpoints, request.accepted if request.begun else 0)
            request.speculating = False
            return row, tokens, tokens
        if request.way == way and rng.random() < 0.8:
            return self.verify(request, left)
        if request.speculating and request.way == "full":
            if request.way == way and rng.random() < 0.5:
                row = Verify(list(request.slots), 1, request.accepted)
                request.leaving = True
                self.did["left full states by a window of one token"] += 1
                return row, 1, 1
            self.settle(request)
        self.did["decoded"] += 1
        self.did["left speculation by a decode"] += request.speculating
        row = Decode(request.slots[0], request.accepted)
        request.speculating = False
        return row, 1, 1

    def verify(self, request, left):
        rng, full = self.random, request.way == "full"
        tokens = rng.choice([rng.randint(1, WINDOW), WINDOW])
        self.did[f"entered speculation, {request.way}"] += not request.speculating
        if full and not request.speculating:
            request.slots += self.allocate(WINDOW - 1)
            request.accepted = 1
        request.speculating = True
        if full and self.random.random() < 0.1:
            self.did["stale row"] += 1
            return Verify(list(request.slots), tokens, 0), tokens, None
        most = min(tokens, left)
        accepted = rng.choice([rng.randint(1 if full else 0, most), most])
        self.did[f"{request.way}: accepted {accepted}"] += 1
        return Verify(list(request.slots) if full else request.slots[0], tokens, request.accepted), tokens, accepted

    def checkpoints(self, request, tokens):
        """Slots for the document's prefixes that this prefill passes and nobody has cached."""
        kept, document = {}, request.stream % DOCUMENTS
        for at in range(BLOCK, self.x.shared[request.stream] + 1, BLOCK):
            key = (document, at)
            known = key in self.cache or key in self.coming
            if request.at < at <= request.at + tokens and not known and self.pool.available > 4:
                (kept[at - request.at],) = self.allocate()
                self.coming[key] = kept[at - request.at]
                self.origin[key] = (request, request.slots[0])
                self.reused.discard(key)
                self.did["checkpoint"] += 1
        return kept

    def step(self):
        way, rng = self.random.choice(["full", "records"]), self.random
        rows = []  # row, its request, tokens, accepted
        for request in rng.sample(self.live, rng.randint(1, len(self.live))):
            if request.way != way and request.speculating and rng.random() < 0.5:
                continue
            rows.append((*self.row(request, way), request))
        for _ in range(rng.choice([0, 0, 1, 2])):
            tokens = rng.randint(0, 3)
            null = Verify(0 if way == "records" else [0] * WINDOW, tokens, 1)
            rows.append(rng.choice([(Decode(0), 1, None, None), (Prefill(0, tokens, True), tokens, None, None),
                                    (null, tokens, None, None)]))
            self.did["padding row"] += 1
        if rng.random() < 0.5:
            rows.sort(key=lambda row: type(row[0]).__name__)  # decodes, prefills, verify rows
        else:
            rng.shuffle(rows)
        batch = Batch.of([row for row, *_ in rows], pool=self.pool)
        kinds = {type(row) for row, _, _, request in rows if request}
        self.did["step of all kinds"] += len(kinds) == 3
        self.did["step with gathered tokens"] += batch.token_indices is not None
        tail = rng.choice([0, 0, 3])
        parts = [self.tokens_of(*row) for row in rows]
        x = {name: torch.cat([*(part[name] for part in parts), torch.full_like(t[0, :tail], float("nan"))])
             for name, t in self.x.tokens.items()}
        states = dict(zip(("conv_state", "ssm_state"), self.pool.layers[0]), records=self.pool.records[0])
        o = kda_forward(**x, **states, **self.x.weights, batch=batch)
        assert not o[batch.num_tokens:].any()
        self.cache.update(self.coming)
        self.coming.clear()
        at = 0
        for _, tokens, accepted, request in rows:
            self.finish(request, o[at:at + tokens], accepted)
            at += tokens

    def tokens_of(self, row, tokens, accepted, request):
        """A request's next tokens; what is not accepted are wrong guesses, and NaN where the row is none."""
        if accepted is None:
            return {name: torch.full_like(t[0, :tokens], float("nan")) for name, t in self.x.tokens.items()}
        right = {name: t[request.stream, request.at:request.at + accepted] for name, t in self.x.tokens.items()}
        return {name: torch.cat([t, self.x.wrong[name][:tokens - accepted]]) for name, t in right.items()}

    def finish(self, request, o, accepted):
        if accepted is None:
            assert not o.any()
            return
        request.outputs[request.at:request.at + accepted] = o[:accepted]
        request.at += accepted
        request.begun = True
        request.accepted = accepted if request.speculating else 0
        if getattr(request, "leaving", False):
            self.free(request.slots[1:])
            del request.slots[1:], request.leaving
            request.speculating, request.accepted = False, 0

    def run(self, steps):
        rng = self.random
        for _ in range(steps):
            for request in list(self.live):
                if request.at == LENGTH or rng.random() < 0.02:
                    self.end(request)
                elif rng.random() < 0.04:
                    self.preempt(request)
                elif request.begun and request.at and len(self.live) < MOST_LIVE and rng.random() < 0.02:
                    self.fork(request)
            while len(self.live) < MOST_LIVE and (not self.live or rng.random() < 0.4):
                self.resume() if self.preempted and rng.random() < 0.5 else self.arrive()
            if any(isinstance(kept, int) for kept in self.cache.values()) and rng.random() < 0.03:
                self.evict()
            self.step()
            plain = [r for r in self.live if r.begun and r.at and not (r.speculating and r.way == "full")]
            if plain:
                request = rng.choice(plain)
                self.check_state(request, self.state(request))
        for request in list(self.live):
            self.end(request)


AT_LEAST = {  # of each, in STEPS steps: with fewer the test would say little
    "arrived": 50, "began with a decode": 5, "fresh prefill": 20, "continued prefill": 200, "checkpoint": 10,
    "prefix hit": 30, "prefix hit from the host": 2, "prefix hit after its origin ended and its slot was reused": 10,
    "prefix moved to the host": 2, "preempted": 40, "preempted while speculating": 20, "preempted to recompute": 10,
    "resumed": 40, "resumed from a file": 5, "forked": 10, "forked with records": 2, "ended": 50,
    "ended at its last token": 20, "decoded": 200, "entered speculation, full": 50, "entered speculation, records": 50,
    "left speculation by a decode": 20, "left speculation by a prefill": 10, "left full states by a window of one token": 10,
    "stale row": 10, "padding row": 200, "step of all kinds": 50, "step with gathered tokens": 50, "state checked": 500,
    "records: accepted 0": 10,
    **{f"{way}: accepted {n}": 5 for way in ("full", "records") for n in range(1, WINDOW + 1)},
}


@bf16_on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=dtype_id)
def test_no_request_ever_gets_another_output_or_state(backend, dtype, tmp_path):
    pytest.importorskip("safetensors")
    if INTERPRETED:
        pytest.skip("hundreds of steps take the interpreter hours")
    engine = Engine(Streams(dtype, backend.device), dtype, backend.device, seed=1, tmp_path=tmp_path)
    engine.run(STEPS)
    few = {what: engine.did[what] for what, least in AT_LEAST.items() if engine.did[what] < least}
    assert not few, f"too few of {few}, in all {dict(engine.did)}"
    cached = {slot for slot in engine.cache.values() if isinstance(slot, int)}
    assert set(engine.pool.in_use) == cached, "a slot was lost"
    assert (engine.pool.pages[:, 0] == -1).all(), "the null slot was written"
