# SPDX-License-Identifier: Apache-2.0
"""Times: on a GPU replays of CUDA graphs and calls between events, on a CPU the wall clock. All take turns, in bursts."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
Burst = Callable[[], list[float]]  # a few samples: milliseconds of a call each

GRAPH_MS, GRAPH_CALLS = 0.5, 100  # a replay takes so long at least, of so many calls at most
BURST_MS, BURST_CALLS = 2.0, 50  # on a CPU, the same of a burst
GPU_BURST = 4


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def spread(samples: list[float]) -> dict[str, float]:
    """Median `ms`, quartiles `q1` and `q3`, and the number of `samples`."""
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return {"ms": median, "q1": q1, "q3": q3, "samples": len(samples)}


def in_turn(bursts: dict[str, Burst], seconds: float) -> dict[str, dict[str, float]]:
    """Spreads by name, over about `seconds`, three bursts of each at least; whatever else runs there hits all alike."""
    turns, samples = {}, {name: [] for name in bursts}
    for name, burst in bursts.items():
        begin = time.perf_counter()
        burst()
        took = time.perf_counter() - begin
        turns[name] = int(min(max(seconds / len(bursts) / max(took, 1e-6), 3), 300))
    most = max(turns.values(), default=0)
    for i in range(most):
        for name, burst in bursts.items():
            if (i + 1) * turns[name] // most > i * turns[name] // most:
                samples[name] += burst()
    return {name: spread(times) for name, times in samples.items()}


def bursts_of(name: str, call: Call, device: torch.device, modes: tuple[str, ...]) -> dict[str, Callable[[], Burst]]:
    """What prepares the bursts of a call: on a GPU, as `modes` has them, out of a "graph" and launched one by one, "eager"."""
    if not on_gpu(device):
        return {name: lambda: on_cpu(call)}
    makers: dict[str, Callable[[], Burst]] = {}
    if "graph" in modes:
        makers[name] = lambda: _graph(call)
    if "eager" in modes:
        makers[f"{name}, eager"] = lambda: _events(call)
    return makers


def on_cpu(call: Call) -> Burst:
    call()
    calls = int(min(max(BURST_MS / max(_wall_ms(call), 1e-4), 1), BURST_CALLS))
    return lambda: [_wall_ms(call) for _ in range(calls)]


def _events(call: Call) -> Burst:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    return lambda: [_event_ms(call) for _ in range(GPU_BURST)]


def _graph(call: Call) -> Burst:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        calls = _calls(_event_ms(call) / 2)  # of a small kernel half of it is the launch, at least
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return lambda: [_event_ms(graph.replay) / calls for _ in range(GPU_BURST)]


def _calls(ms: float) -> int:
    return int(min(max(GRAPH_MS / max(ms, 1e-4), 2), GRAPH_CALLS))


def _event_ms(call: Call) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _wall_ms(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def copy_call(device: torch.device, mib: int) -> tuple[Call, int]:
    """A copy of a tensor of `mib` MiB, and the bytes that it reads and writes."""
    src = torch.ones(mib << 18, device=device)
    dst = torch.empty_like(src)
    return lambda: dst.copy_(src), 2 * src.numel() * 4


def copy_bytes_per_s(device: torch.device, mib: int) -> float:
    """Bandwidth of a large copy, bytes read and written."""
    call, nbytes = copy_call(device, mib)
    burst = _events(call) if on_gpu(device) else on_cpu(call)
    return nbytes / (statistics.median(sum((burst() for _ in range(4)), [])) * 1e-3)


def host_us(call: Call, device: torch.device, calls: int = 50) -> tuple[float | None, float | None]:
    """Microseconds that a launch keeps the host, the GPU working beside it, and those of torch's `add_`; None on a CPU.

    The two take turns: hosts are shared, and launch half as fast at one time as at another.
    """
    if not on_gpu(device):
        return None, None
    one, times = torch.ones(1, device=device), ([], [])
    for _ in range(calls):
        for launch, taken in zip((call, lambda: one.add_(1)), times):
            torch.cuda.synchronize()
            taken.append(1e3 * _wall_ms(launch))
    ours, add = map(statistics.median, times)
    return ours, add


def kernel_us(call: Call, device: torch.device) -> dict[str, float]:
    """Microseconds on the GPU by kernel name, of one call."""
    if not on_gpu(device):
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] = times.get(event.name, 0.0) + event.device_time
    return {name: round(us, 2) for name, us in times.items()}


def waits(call: Call, device: torch.device) -> str | None:
    """What torch says where a call waits for the GPU, or None. Only torch's own waits are seen."""
    if not on_gpu(device):
        return None
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as e:
        return str(e).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None
