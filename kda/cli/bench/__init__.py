# SPDX-License-Identifier: Apache-2.0
"""Times every operation of KDA beside its peers, with errors against the recurrence in fp64, and compares two such runs.

DIR/bench.json is written row by row, DIR/report.md and plots at the end. The same command goes on where an interrupted one
stopped: rows that are there are not measured again. Exit status 1 when an error is over its bound or an operation failed.
"""
from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from kda.cli import CommandError
from kda.cli.bench.regimes import PARTS, USUAL
from kda.cli.progress import progress

HELP = "time the operations beside their peers, write a report, and compare two runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder of the measurements, the report and its plots")
    add("--device", help="cuda or cpu; default: the GPU if there is one")
    add("--part", type=names, metavar="A,B",
        help=f"of {', '.join(PARTS)}; default: {', '.join(USUAL['cuda'])} on a GPU, "
        f"{', '.join(USUAL['cpu'])} on a CPU")  # fmt: skip
    add("--peers", type=names, metavar="A,B",
        help="code to measure beside ours, where it is installed: of flashkda, vllm, fla on a GPU (default: flashkda,vllm), of "
        "transformers, reference, compiled on a CPU (default: transformers,reference); '' for none")  # fmt: skip
    add("--all-peers", action="store_true", help="all peers, also where they tune themselves or compile for minutes")
    add("--minutes", type=float, metavar="M", help="begin no row after so long; the most important ones come first")
    add("--threads", type=int, metavar="N", help="threads of a CPU (default: torch's)")
    add("--quick", action="store_true", help="tiny shapes, to try the command: their times mean nothing")
    add("--fresh", action="store_true", help="measure everything again")
    add("--list", action="store_true", help="what would be measured, and end")
    add("--report", type=Path, metavar="DIR", help="write the report and plots of DIR/bench.json again, and end")
    add("--compare", type=Path, nargs=2, metavar=("A", "B"),
        help="two runs, files or folders: what became slower or faster beyond the noise; exit status 1 on a "
        "regression")  # fmt: skip
    add("--limit", type=float, default=1.10, metavar="X",
        help="with --compare: a time of ours over X times the former is a regression (default %(default)s)")  # fmt: skip


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def run(args: argparse.Namespace) -> int:
    if args.compare:
        from kda.cli.bench import compare

        return compare.run(*args.compare, args.limit)
    if args.report:
        return report_again(args.report)
    if args.out is None and not args.list:
        raise CommandError("name a folder for the measurements with --out")
    if args.threads is not None and args.threads < 1:
        raise CommandError(f"--threads must be at least 1, got {args.threads}")
    import torch

    from kda.cli.tune import chosen

    device = chosen(args.device)
    cases, skipped = selected(args, device)
    if args.list:
        for case in cases:
            print(f"{case.part:12} {case.name}")
        for sentence in skipped:
            print(sentence)
        return 0
    before = torch.get_num_threads()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        return measured(args, device, cases, skipped)
    finally:
        torch.set_num_threads(before)


def selected(args: argparse.Namespace, device) -> tuple[list, list[str]]:
    """The cases to measure, the most important ones first, and in sentences what this machine cannot."""
    import torch

    import kda
    from kda.cli.bench import paths, regimes
    from kda.cli.workloads import Work

    parts = args.part or USUAL[device.type]
    if unknown := [part for part in parts if part not in PARTS]:
        raise CommandError(f"--part {','.join(unknown)} is unknown; accepted are {', '.join(PARTS)}")
    cases = [c for c in regimes.cases(device.type, args.quick, args.all_peers) if c.part in parts]
    skipped = []
    if device.type == "cuda":
        memory = 0.8 * torch.cuda.get_device_properties(device).total_memory

        def fits(case) -> bool:
            lens = case.dims.get("lens") or [case.dims.get("window", 1)] * case.dims.get("N", 1)
            return Work(case.dims.get("H", 16), tuple(lens)).bytes < memory

        skipped += [f"left out, the GPU's memory is too small: {c.part}: {c.name}" for c in cases if not fits(c)]
        cases = [c for c in cases if fits(c)]
    if any(c.part in ("isa", "first") for c in cases) and (device.type != "cpu" or kda.backend_for(device) != "triton-cpu"):
        skipped.append(f"left out, parts isa and first are for triton-cpu: {kda.why(device)}")
        cases = [c for c in cases if c.part not in ("isa", "first")]
    lacking = {path: paths.missing(path) for path in dict.fromkeys(c.dims["path"] for c in cases if c.part == "isa")}
    skipped += [f"left out, path {path}: {why}" for path, why in lacking.items() if why]
    cases = [c for c in cases if c.part != "isa" or not lacking[c.dims["path"]]]
    if not cases:
        raise CommandError("; ".join(skipped) or f"nothing of --part {','.join(parts)} is measured on a {device.type} device")
    return cases, skipped


def found_peers(args: argparse.Namespace, kind: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Peers that are here; and, by name, why others are not."""
    from kda.cli.bench import peers

    wanted = args.peers if args.peers is not None else (peers.KNOWN if args.all_peers else peers.USUAL)[kind]
    if unknown := [name for name in wanted if name not in peers.KNOWN[kind]]:
        raise CommandError(f"--peers {','.join(unknown)} is unknown; accepted are {', '.join(peers.KNOWN[kind])}")
    missing = {name: why for name in wanted if (why := peers.missing(name))}
    return tuple(name for name in wanted if name not in missing), missing


def about(args: argparse.Namespace, device, peers: tuple[str, ...], missing: dict[str, str]) -> dict:
    """Device, versions, date and command: what a figure means nothing without."""
    import torch

    import kda
    from kda.cli.bench import rows

    gpu, isa = device.type == "cuda", None
    backend = kda.backend_for(device)
    if backend == "triton-cpu":
        from kda.triton_cpu import runtime

        isa = runtime.selected_isa()
    set_ = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("KDA_")]
    script = Path(sys.argv[0]).name
    command = ["python", "-m", "kda"] if script == "__main__.py" else ["python", sys.argv[0]]
    found = rows.machine() | dict(
        kind=device.type, device=torch.cuda.get_device_name(device) if gpu else rows.processor(), backend=backend,
        threads=None if gpu else torch.get_num_threads(), why=kda.why(device), isa=isa, quick=args.quick,
        sources=rows.sources(), peers=list(peers), missing=missing,
        command=" ".join([*set_, shlex.join(command + sys.argv[1:])]),
    )  # fmt: skip
    if gpu:
        found |= {"capability": list(torch.cuda.get_device_capability(device)),
                  "hip" if torch.version.hip else "cuda": torch.version.hip or torch.version.cuda}  # fmt: skip
    return found


# What rows of one file have in common.
SAME = ("device", "backend", "isa", "threads", "quick", "torch", "triton", "sources")
SECONDS = {"cuda": 0.5, "cpu": 6.0}  # of calls for a row


def measured(args: argparse.Namespace, device, cases: list, skipped: list[str]) -> int:
    import torch

    from kda.cli.bench import measure, ratios, report
    from kda.cli.bench.rows import Results
    from kda.cli.bench.session import Session

    begin, kind = time.monotonic(), device.type
    peers, missing = found_peers(args, kind)
    results = Results(args.out, about(args, device, peers, missing), SAME, args.fresh)
    copy = measure.copy_bytes_per_s(device, 16 if args.quick else 512 if kind == "cpu" else 1024)
    results.about.setdefault("copy_bytes_per_s", copy)
    results.write()  # at once, so that a disk that is full or not ours shows before an hour is spent
    session = Session(
        str(device), peers, args.all_peers, args.quick, torch.get_num_threads(), 0.05 if args.quick else SECONDS[kind], copy
    )
    print(f"{results.about['device']}: {results.about['why']}; copy {copy / 1e9:,.0f} GB/s; torch {torch.__version__}")
    for name, why in missing.items():
        print(f"peer {name} is not here: {why}")
    for sentence in skipped:
        print(sentence)
    new = [c for c in cases if c.key not in results.rows]
    failed = [c for c in cases if c.key in results.rows and failing(results.rows[c.key])]
    if len(new) + len(failed) < len(cases):
        print(f"{len(cases) - len(new) - len(failed)} of {len(cases)} rows are in {results.path} and are not measured again")
    left = [*new, *failed]
    try:
        with progress("measured", len(left), "rows") as bar:
            while left and (args.minutes is None or time.monotonic() - begin < 60 * args.minutes):
                case = left.pop(0)
                bar.set_postfix_str(f"{case.part}: {case.name}")
                row = session.measure(case)
                results.add(row)
                with bar.external_write_mode():  # above the bar
                    print(ratios.line(row), flush=True)
                bar.update()
                if failing(row) and kind == "cuda":
                    answers(device, row)
    except KeyboardInterrupt:
        report.write(results, [f"{c.part}: {c.name}" for c in left])
        print(f"{len(left)} rows are left; the same command goes on with them", file=sys.stderr)
        raise
    names = [f"{c.part}: {c.name}" for c in left]
    if names:
        print(f"out of time, {len(names)} rows are left out: {report.few(names)}; the same command goes on with them")
    written, why_not = report.write(results, names)
    wrong = [f"{': '.join(c.key)}: {what}" for c in cases if c.key in results.rows for what in results.rows[c.key].wrong()]
    for what in wrong:
        print(f"NOT AS IT MUST BE: {what}")
    print(f"report: {written[0]}" + (f"; {len(written) - 1} plots beside it" if len(written) > 1 else ""))
    if why_not:
        print(why_not)
    return 1 if wrong else 0


def failing(row) -> bool:
    from kda.cli.bench.rows import ours

    return any(ours(name) for name in row.failed)


def answers(device, row) -> None:
    """After a failed row: an illegal access leaves a GPU that does nothing more for this process."""
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError as e:
        raise CommandError(
            f"after {row.part}: {row.name} the GPU answers no more ({str(e).splitlines()[0]}): what was measured is "
            "kept, and the same command goes on with the other rows"
        ) from e  # fmt: skip


def report_again(folder: Path) -> int:
    from kda.cli.bench import report
    from kda.cli.bench.rows import FILE, Results, load

    found, rows = load(folder / FILE)
    results = Results(folder, found, ())
    results.about, results.rows = found, rows
    written, why_not = report.write(results)
    print("\n".join([*map(str, written), *filter(None, [why_not])]))
    return 0
