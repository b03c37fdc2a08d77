# SPDX-License-Identifier: Apache-2.0
"""Sweeps launch configurations on the device at hand and writes its table for kda/triton/configs/.

Candidates come from kda/cli/space.py. They are compiled side by side; those that fail, spill more registers than the former
configuration, or give results outside the contract's bounds are dropped. The rest are timed in random order, the former
configuration between any two of them. A winner gains more than the spread over all sizes of its regime and loses on none.
The same command goes on where an interrupted one stopped.
"""
from __future__ import annotations

import argparse
import math
import os
import random
import time
from pathlib import Path

from kda.cli import CommandError

HELP = "sweep launch configurations on this machine's GPU or CPU and write the device's table"
PARTS = (  # in the order in which they are swept: what serving spends most time in comes first
    "kda_decode", "chunk_intra", "chunk_walk", "causal_conv1d_fwd", "kda_verify", "kda_commit", "fused_recurrent",
    "causal_conv1d_update", "rms_norm_gated", "fused_kda_gate", "chunk_combine",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder of the measurements (CSV) and of the table")
    add("--kernel", action="append", choices=PARTS, metavar="NAME",
        help=f"of {', '.join(PARTS)}; again for more; default: all")  # fmt: skip
    add("--regime", action="append", default=[], metavar="PART",
        help="only regimes with PART in their names; again for more")  # fmt: skip
    add("--list", action="store_true", help="what there is to sweep, and end")
    add("--minutes", type=float, default=30.0, metavar="M", help="stop after so long (default %(default)s)")
    add("--rounds", type=int, default=12, metavar="N", help="times that each candidate is timed (default %(default)s)")
    add("--sample", type=int, metavar="N", help="try N candidates of each space, at random")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that compile (default %(default)s)")
    add("--device", help="cuda or cpu; default: the GPU if there is one")
    add("--small", action="store_true", help="tiny sizes, to try the command: their times mean nothing")


def run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    for name, least in (("rounds", 2), ("jobs", 1), ("minutes", 0.0), ("sample", 1)):
        value = getattr(args, name)
        if value is not None and not value >= least:  # NaN is not
            raise CommandError(f"--{name} must be at least {least}, got {value}")
    if args.out is None and not args.list:
        raise CommandError("name a folder for the measurements with --out")
    import torch

    import kda

    device = chosen(args.device)
    backend = kda.backend_for(device)
    if not backend.startswith("triton-") or backend == "triton-interpret":
        raise CommandError(f"there is nothing to tune: {kda.why(device)}")
    if device.type == "cpu":
        from kda.triton_cpu.runtime import selected_isa

        try:
            selected_isa()
        except RuntimeError as e:  # KDA_CPU_ISA
            raise CommandError(str(e)) from e
    every = all_regimes(args, device)
    regimes = [r for r in every if named(args, *r.key)]
    if not regimes:
        why = f" has {' or '.join(args.regime)} in its name" if args.regime else " of it is for this device"
        raise CommandError(f"no regime{why}; --list shows them")
    if args.list:
        for regime in regimes:
            print(f"{regime.part:22}{regime.name:32}{len(regime.candidates):4} candidates; "
                  + ", ".join(work.name for work in regime.works))  # fmt: skip
        return 0

    from kda.cli.record import Record, made_of
    from kda.cli.trial import Workers
    from kda.cli.tuner import Tuner
    from kda.triton import configs
    from kda.triton.configs import table

    name = table.device_name(device)
    if stale := configs.stale(device):
        path = table.module_of(name).__file__
        raise CommandError(f"{path} is of another version ({'; '.join(stale)}): remove these rows, then tune")
    record = Record(args.out, made_of(name, args.small, torch.get_num_threads() if device.type == "cpu" else None))
    print(f"{name}, {backend}, torch {torch.__version__}: {sum(len(r.candidates) for r in regimes)} candidates in "
          f"{len(regimes)} regimes, at most {args.minutes:g} minutes", flush=True)  # fmt: skip
    with kda.use_backend("triton"), Workers(str(device), args.jobs) as workers:
        tuner = Tuner(regimes, record, device, workers, args.rounds, begin + 60 * args.minutes, args.small)
        tuner.settled([r for r in every if r not in regimes])
        tuner.go()
    tuner.summary()
    return 1 if tuner.wrong else 0


def chosen(name: str | None):
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu") or name == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"--device {name} cannot be used here; accepted are cuda, where there is a GPU, and cpu")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def named(args: argparse.Namespace, part: str, name: str) -> bool:
    return (not args.kernel or part in args.kernel) and (not args.regime or any(word in name for word in args.regime))


def all_regimes(args: argparse.Namespace, device) -> list:
    """In the order of a sweep, on sizes that the device's free memory holds together."""
    import torch

    from kda.cli import space
    from kda.cli.sweep import Regime

    memory = 0.8 * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    found = []
    for part in PARTS:
        for name, sizes in space.SIZES[part].items():
            candidates = space.candidates(part, device, name)
            if named(args, part, name) and args.sample is not None and args.sample < len(candidates):
                candidates = random.Random(f"{part} {name}").sample(candidates, args.sample)
            works, left = [], memory
            for work in sizes.on(device, args.small):
                if work.bytes < left:
                    works.append(work)
                    left -= work.bytes
            if works and candidates:
                found.append(Regime(part, name, tuple(works), list(candidates)))
    return sorted(found, key=lambda regime: "64 x 64" in regime.name)  # the smaller head dim, few models', comes last
