# SPDX-License-Identifier: Apache-2.0
"""Run a GLM-5.3-Flash KDA layer (seeded weights) over the bytes of a text file.

Four requests of different length are prefilled together, then decoded together one byte at a time; on the
way a fifth is prefilled in two pieces in the same batches. A decode step consumes the next byte of the text,
so that everything can be checked: against the recurrence and the layer in fp64, and transformers' layer.
Exit status 1 when an error is over its bound, 2 when the command itself is wrong.
"""
from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kda.cli import CommandError
from kda.cli.progress import progress

if TYPE_CHECKING:
    import torch

    from kda.cli.check import Check
    from kda.cli.schedule import Rates
    from kda.serving import Geometry

HELP = "run a GLM-5.3-Flash KDA layer over a text file: speed, memory, errors"
KDA_LAYERS = 34  # of GLM-5.3-Flash's 45


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="text to run over (default: this README.md)")
    parser.add_argument("--heads", type=int, default=64, help="heads of 128 (default: 64, the real layer)")
    parser.add_argument("--tokens", type=int, help="prompt tokens of the first four requests together"
                        " (default: 640 on a CPU, 4096 on a GPU; less when the file is short)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps (default: 32)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16",
                        help="of activations and projection weights (default: bfloat16)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and byte embedding (default: 0)")


def run(args: argparse.Namespace) -> int:
    for name, least in (("heads", 1), ("tokens", 16), ("steps", 4)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise CommandError(f"--{name} must be at least {least}, got {value}")
    name, text = read_text(args.file)

    import torch

    with torch.no_grad():
        return demo(args, name, text)


def demo(args: argparse.Namespace, name: str, text: bytes) -> int:
    import torch

    import kda
    from kda.cli import check
    from kda.cli.layer import Geometry, KDALayer
    from kda.cli.schedule import MIN_BYTES, only, plan, serve

    started = time.perf_counter()
    if len(text) < MIN_BYTES:
        raise CommandError(f"{name!r} has {len(text)} bytes; the demo needs at least {MIN_BYTES}")
    device, dtype = pick_device(args.device), getattr(torch, args.dtype)
    geo = Geometry(heads=args.heads)
    requests, batches = plan(len(text), args.tokens or (640 if device.type == "cpu" else 4096), args.steps)
    total = requests[-1].stop

    with progress("seeded weights"):
        layer = KDALayer(geo, dtype, device).seed(args.seed)
        embedding = torch.randn(256, geo.hidden, generator=torch.Generator().manual_seed(args.seed + 1))
        embedding = embedding.to(device, dtype)
        x = [embedding[torch.tensor(list(text[r.start : r.stop]), device=device)] for r in requests]

    weights = sum(p.numel() for p in layer.parameters())
    prompts = ", ".join(str(r.prompt) for r in requests[:-1])
    print(f"layer     GLM-5.3-Flash KDA: hidden {geo.hidden}, {geo.heads} heads of {geo.head_dim}, "
          f"convolution {geo.conv_width}, gate bound {geo.lower_bound:g};\n"
          f"          {weights / 1e6:.1f} M weights, {args.dtype}, seed {args.seed}")
    print(f"text      {name}, {total:,} of {len(text):,} bytes, a byte a token")
    print(f"requests  {prompts} tokens prefilled together, then {requests[0].decode} decode steps together;\n"
          f"          one of {requests[-1].prompt} prefilled in two pieces beside two of them, then decoded")
    print(f"backend   {kda.backend_for(device)} on {device.type} ({device_name(device)})")
    print(f"why       {kda.why(device)}", flush=True)

    with progress("warm-up"):  # a GPU compiles its kernels here, for these very shapes
        if device.type == "cuda":
            serve(layer, x, requests, batches)
        else:
            short, few = plan(MIN_BYTES, 16, 4)
            serve(layer, [x[0].repeat(4, 1)] * len(short), short, few)
    with progress("prefill, decode, and both together", total, "tokens") as bar:
        served = serve(layer, x, requests, batches, bar.update)
    print_rates(served.rates, len(requests))
    print_states(layer.geometry(), len(requests))
    sys.stdout.flush()

    with progress(f"check: the recurrence in fp64, all {geo.heads} heads", total, "tokens") as bar:
        checks = check.check_operations(layer, requests, served, bar.update)

    # The whole layer on two requests, all of them would take long: the shortest, and the late one, which was
    # prefilled in pieces.
    kept = [len(requests) - 2, len(requests) - 1]
    x, outputs = [x[r] for r in kept], [served.outputs[r] for r in kept]
    requests, batches = only(requests, batches, kept)
    total, why_not = sum(len(xr) for xr in x), None
    with progress("check: the layer in fp64"):
        ref = check.layer64(layer, x)
    for run_dtype in dict.fromkeys([dtype, torch.float32]):
        label = str(run_dtype).removeprefix("torch.")
        if run_dtype != dtype:
            layer, x = copy.deepcopy(layer).to(run_dtype), [xr.to(run_dtype) for xr in x]
            with progress(f"check: the layer in {label}", total, "tokens") as bar:
                outputs = serve(layer, x, requests, batches, bar.update).outputs
        theirs = why_not
        if not why_not:
            with progress(f"check: transformers' layer in {label}", total, "tokens") as bar:
                theirs = check.transformers_outputs(layer, x, bar.update)
        if isinstance(theirs, str):
            theirs, why_not = None, theirs
        checks += check.check_layer(run_dtype, outputs, theirs, ref)

    print_checks(checks)
    lengths = " and ".join(str(r.prompt) for r in requests)
    print(f"operations: all requests, all heads; layer: the requests of {lengths} tokens")
    if why_not:
        print(f"not compared with transformers: {why_not}")
    over = sum(not c.ok for c in checks)
    verdict = f"FAILED: {over} over the bound" if over else "all within bounds"
    print(f"{verdict}; {time.perf_counter() - started:.0f} s in all")
    return 1 if over else 0


# ---- where it runs, over what


def read_text(name: str | None) -> tuple[str, bytes]:
    if name is None:
        beside = Path(__file__).resolve().parents[2] / "README.md"
        path = beside if beside.is_file() else Path("README.md")
        if not path.is_file():
            raise CommandError("name a text FILE: there is no README.md here")
    else:
        path = Path(name)
    try:
        return path.name, path.read_bytes()
    except OSError as e:
        raise CommandError(f"cannot read {str(path)!r}: {e.strerror}") from None


def pick_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except Exception as e:  # torch raises many kinds: unknown name, not compiled in, no such device
        raise CommandError(f"--device {name} cannot be used here: {str(e).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise CommandError(f"--device {name}: the demo runs on cpu or cuda (AMD GPUs are cuda to torch)")
    return device


def device_name(device: torch.device) -> str:
    import platform

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


# ---- what is printed


def print_rates(rates: dict[str, Rates], requests: int) -> None:
    labels = {
        "prefill": f"prefill, {requests - 1} requests in one batch",
        "decode": f"decode, {requests - 1} or {requests} rows a step",
        "mixed": "decode and prefill in one batch",
    }
    print(f"\n{'tokens/s':36}{'tokens':>8}{'whole layer':>14}{'KDA operations alone':>24}")
    for kind, label in labels.items():
        r = rates[kind]
        print(f"{label:36}{r.tokens:8,}{r.tokens / r.layer_s:14,.0f}{r.tokens / r.kda_s:24,.0f}")


def print_states(geometry: Geometry, requests: int) -> None:
    states = (
        ("recurrent [H, V, K]", geometry.state_dtype, geometry.ssm_bytes),
        ("convolution [3*H*K, W-1]", geometry.conv_dtype, geometry.conv_bytes),
    )
    print(f"\n{'states, MiB':36}{'dtype':>8}{'a request':>14}{f'{requests} requests':>24}")
    for label, dtype, nbytes in states:
        mib = nbytes / 2**20
        print(f"{label:36}{str(dtype).removeprefix('torch.'):>8}{mib:14.3f}{requests * mib:24.2f}")
    total = sum(nbytes for *_, nbytes in states) / 2**20
    print(f"over the model's {KDA_LAYERS} KDA layers a request keeps {KDA_LAYERS * total:.1f} MiB\n")


def print_checks(checks: list[Check]) -> None:
    width = max(len(c.what) for c in checks)

    def number(e: float) -> str:
        return f"{e:.1e}" if e < 1e-3 else f"{e:.4f}"

    print(f"\n{'error |x - ref| / |ref|, worst request':{width}}{'got':>10}{'bound':>10}")
    for c in checks:
        bound, verdict = ("-", "") if c.bound is None else (number(c.bound), "  ok" if c.ok else "  OVER")
        print(f"{c.what:{width}}{number(c.got):>10}{bound:>10}{verdict}{f'  ({c.note})' if c.note else ''}")
