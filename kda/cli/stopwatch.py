# SPDX-License-Identifier: Apache-2.0
"""Times of one kernel under a configuration: CUDA graphs on a GPU, the wall clock on a CPU."""
from __future__ import annotations

import contextlib
import math
import time

import torch

from kda.cli import workloads
from kda.cli.trial import Outcome
from kda.cli.using import Scratch, alone, broken, using
from kda.cli.workloads import Work

# A sample is the fastest of some batches of calls, each so long at least: whatever else runs only ever adds time.
BATCHES, BATCH_MS = 5, 1.0
SOME = 8  # calls, to see how long one takes


def key_of(config: dict) -> str:
    return repr(sorted(config.items(), key=str))


class Stopwatch:
    """Milliseconds of calls of a regime's kernel, on its sizes; what was captured for a candidate is kept until dropped."""

    def __init__(self, part: str, device: torch.device) -> None:
        self.part, self.device, self.scratch = part, device, Scratch()
        self.cases: dict[Work, workloads.Case] = {}
        self.former: dict[Work, list] = {}  # outputs of the former configuration
        self.calls: dict[Work, int] = {}
        self.graphs: dict[tuple[str, Work], torch.cuda.CUDAGraph] = {}
        self.memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def case(self, work: Work) -> workloads.Case:
        if work not in self.cases:
            self.cases[work] = workloads.make(self.part, work, self.device)
        return self.cases[work]

    def agrees(self, config: dict, work: Work) -> Outcome:
        """Whether results at full size are those of the former configuration: no oracle goes through them all."""
        case = self.case(work)
        if work not in self.former:
            with using(self.part, {}):
                self.former[work] = [o.got for o in case.outputs(False)]
        with using(self.part, config):
            outputs = [o._replace(ref=ref, bound=2 * o.bound) for o, ref in zip(case.outputs(False), self.former[work])]
            why = workloads.wrong(outputs)
        return Outcome(not why, f"not the former's result at {work.name}: {why}" if why else "")

    def __call__(self, config: dict, work: Work) -> float:
        """Milliseconds of one call."""
        return self._on_gpu(config, work) if self.device.type == "cuda" else self._on_cpu(config, work)

    def drop(self, config: dict) -> None:
        for key in [key for key in self.graphs if key[0] == key_of(config)]:
            del self.graphs[key]

    def broken(self) -> bool:
        """Whether the GPU no longer answers this process."""
        return broken(self.device)

    @contextlib.contextmanager
    def ready(self, config: dict, work: Work):
        """Within the block calls launch the one kernel, on what the others have left for it."""
        case = self.case(work)
        with using(self.part, config), self.scratch.kept():
            case.call()
            with alone(self.part):
                case.call()  # prepares what is then repeated
                yield case.call

    def _on_cpu(self, config: dict, work: Work) -> float:
        with self.ready(config, work) as call:
            if work not in self.calls:
                self.calls[work] = _calls(_wall_ms(call, 1))
            return min(_wall_ms(call, self.calls[work]) for _ in range(BATCHES))

    def _on_gpu(self, config: dict, work: Work) -> float:
        if (key_of(config), work) not in self.graphs:
            self.graphs[key_of(config), work] = self._capture(config, work)
        graph = self.graphs[key_of(config), work]
        return min(self._replay_ms(graph) for _ in range(BATCHES)) / self.calls[work]

    def _capture(self, config: dict, work: Work) -> torch.cuda.CUDAGraph:
        with self.ready(config, work) as call:
            call()  # on the stream of the replays, before anything is captured: modules are loaded when first launched
            torch.cuda.synchronize(self.device)
            if work not in self.calls:
                # A launch takes the host several times as long as a small kernel runs: a graph of some is timed instead.
                some = self._graph(call, SOME)
                some.replay()
                self.calls[work] = _calls(self._replay_ms(some) / SOME)
            graph = self._graph(call, self.calls[work])
        graph.replay()
        torch.cuda.synchronize(self.device)
        return graph

    def _graph(self, call, calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            for _ in range(calls):
                call()
        return graph

    def _replay_ms(self, graph: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def _calls(ms: float) -> int:
    return min(max(math.ceil(BATCH_MS / max(ms, 1e-4)), 1), 256)


def _wall_ms(call, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e3 * (time.perf_counter() - begin) / calls
