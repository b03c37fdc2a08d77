# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: timing, the machine it ran on, and results written as they come."""
from __future__ import annotations

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch


# ---- time


def median_ms(fn: Callable[[], object], runs: int = 20, warm: int = 3) -> float:
    """Median of `runs` calls: CUDA events on a GPU, the wall clock elsewhere."""
    for _ in range(warm):
        fn()
    if not torch.cuda.is_available():
        return statistics.median(_wall_ms(fn) for _ in range(runs))
    torch.cuda.synchronize()
    times = []
    for _ in range(runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def graph_ms(fn: Callable[[], object], calls: int = 10) -> float:
    """As `median_ms`, of one call out of a CUDA graph of `calls`: no launch or host time in it."""
    if not torch.cuda.is_available():
        return median_ms(fn)
    for _ in range(3):
        fn()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return median_ms(graph.replay) / calls


def host_us(fn: Callable[[], object], calls: int = 50) -> float:
    """Microseconds that the host takes for a call, the GPU working beside it; on a CPU, of the whole call."""
    fn()
    times = []
    for _ in range(calls):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * _wall_ms(fn))
    return statistics.median(times)


def side_by_side_ms(fns: dict[str, Callable[[], object]], runs: int, warm: int = 2) -> dict[str, float]:
    """Medians of wall-clock times of functions called in turn, so that a busy machine hits them alike."""
    for fn in fns.values():
        for _ in range(warm):
            fn()
    times: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(runs):
        for name, fn in fns.items():
            times[name].append(_wall_ms(fn))
    return {name: statistics.median(ts) for name, ts in times.items()}


def _wall_ms(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return 1e3 * (time.perf_counter() - start)


def copy_bytes_per_s(device: torch.device | str, mib: int = 1024) -> float:
    """Bandwidth of a large device-to-device copy, bytes read and written."""
    src = torch.ones(mib << 18, device=device)
    dst = torch.empty_like(src)
    return 2 * src.numel() * 4 / (median_ms(lambda: dst.copy_(src), runs=10) * 1e-3)


def kernel_us(fn: Callable[[], object]) -> dict[str, float]:
    """Microseconds on the GPU by kernel name, of one call."""
    if not torch.cuda.is_available():
        return {}
    fn()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        fn()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] = times.get(event.name, 0.0) + event.device_time
    return {name: round(us, 2) for name, us in times.items()}


def synchronises(fn: Callable[[], object]) -> str | None:
    """What torch says where a call waits for the device, or None. Only torch's own waits are seen."""
    if not torch.cuda.is_available():
        return None
    fn()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn()
    except RuntimeError as e:
        return str(e).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None


# ---- the machine


def machine() -> dict[str, object]:
    """Processor, threads, GPU, versions, date: what a figure means nothing without."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    info: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "numpy", "transformers")},
    }
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
        info["capability"] = list(torch.cuda.get_device_capability())
        info["hip" if torch.version.hip else "cuda"] = torch.version.hip or torch.version.cuda
    return info


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Results:
    """Rows by part, printed and written after each, so that a run cut short loses nothing."""

    def __init__(self, path: Path, **about: object) -> None:
        self.path = path
        self.data: dict[str, object] = {"machine": machine(), **about}
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, line: str, **row: object) -> None:
        print(line, flush=True)
        self.data.setdefault(part, []).append(row)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")
