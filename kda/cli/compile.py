# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel, in every configuration that kda would launch it with, for devices that need not be there.
Prints a table a kernel; ends with status 1 if one does not compile, spills more registers than --max-spills, or asks for
more shared memory than the device has.
"""
from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kda.cli import CommandError
from kda.cli.progress import progress

HELP = "compile the kernels for devices that are not here; registers, spills, shared memory, occupancy"
MAX_SPILLS = 64
REGIMES = ("usual", "many", "D=64", "D=96", "D=256", "fp16", "fp32", "fp32 D=64", "bf16 states")  # those of launches.py
COLUMNS = ("target", "configuration", "registers", "spills", "shared", "occupancy", "code", "seconds", "launched by")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", action="append", default=[], metavar="NAME",
        help="cuda:90, hip:gfx942, cpu:avx512, cpu:sapphirerapids, ..; again for more")  # fmt: skip
    add("--all", action="store_true", help="every target that the installed Triton compiles for")
    add("--kernel", metavar="PART", help="only kernels with PART in their names")
    add("--regime", action="append", choices=REGIMES, metavar="NAME",
        help=f"only these shapes and dtypes, of {', '.join(REGIMES)}; again for more")  # fmt: skip
    add("--one", action="store_true", help="one configuration a kernel, the one of GLM-5.3-Flash's layer")
    add("--check", action="store_true", help="what CI goes through: --one, and the usual regime where compilers differed")
    add("--max-spills", type=int, default=MAX_SPILLS, metavar="N",
        help="the most registers a lane that a GPU's kernel may spill to memory (default %(default)s)")  # fmt: skip
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="write a row a launch")
    add("--json", type=Path, metavar="FILE", help="write everything")
    add("--quiet", action="store_true", help="no tables, only what is wrong")


def run(args: argparse.Namespace) -> int:
    from kda.cli import farm

    names = chosen(args)
    if args.jobs < 1:
        raise CommandError(f"--jobs must be at least 1, got {args.jobs}")
    for path in filter(None, (args.csv, args.json)):
        prepare(path)
    if args.check:
        tasks = farm.checked(names)
    else:
        regimes = tuple(args.regime or (("usual",) if args.one else REGIMES))
        tasks = [farm.Task(name, regimes, args.one, args.kernel) for name in names]
    try:
        with progress("compilation", unit="launches") as bar:

            def heard(launches: int = 0, ended: dict | None = None) -> None:
                bar.total = (bar.total or 0) + launches
                if ended:
                    bar.set_postfix_str(f"{ended['target']} {short(ended['kernel'])}", refresh=False)
                bar.update(1 if ended else 0)

            results = farm.compile_all(tasks, args.jobs, heard)
    except OSError as e:
        raise CommandError(f"it needs room for files in {tempfile.gettempdir()} (TMPDIR): {e.strerror}") from None

    rows = merged(results.launches)
    if not args.quiet:
        for kernel in sorted({row["kernel"] for row in rows}):
            print_table(kernel, [row for row in rows if row["kernel"] == kernel], names)
    if args.json:
        written(args.json, lambda: results.save(args.json, tasks))
    if args.csv:
        written(args.csv, lambda: write_csv(args.csv, rows))
    return verdict(results, rows, names, args.max_spills)


def chosen(args: argparse.Namespace) -> list[str]:
    """The names of the targets asked for, each of which can be compiled for."""
    from importlib.metadata import PackageNotFoundError, version

    from kda.cli.targets import TARGETS, find

    try:
        triton = version("triton")
    except PackageNotFoundError:
        raise CommandError("triton is not installed (pip install triton)") from None
    if args.check and (args.one or args.kernel or args.regime):
        raise CommandError("--check says itself what is compiled: leave out --one, --kernel and --regime")
    names = []
    for asked in args.target:
        try:
            target = find(asked)
        except ValueError as e:
            raise CommandError(str(e)) from None
        if problem := target.problem(triton, platform.machine()):
            raise CommandError(f"{target.name} cannot be compiled for here: {problem}")
        names.append(target.name)
    if args.all:
        for name, target in TARGETS.items():
            if problem := target.problem(triton, platform.machine()):
                print(f"{name} is left out: {problem}", flush=True)
            else:
                names.append(name)
    if not names:
        raise CommandError("name a --target, or --all")
    return list(dict.fromkeys(names))


# ---- rows


def short(kernel: str) -> str:
    return kernel.removeprefix("kda.triton.")


def merged(launches: Iterable[dict]) -> list[dict]:
    """One row for launches of the same code, which say in `ops` what launches it."""
    rows: dict[tuple, dict] = {}
    for facts in sorted(launches, key=lambda f: (f["number"], f["target"])):
        code = facts.get("hash") or ("failed", facts["number"])
        row = rows.setdefault((facts["target"], facts["kernel"], code), {**facts, "ops": []})
        row["ops"].append(facts["op"])
        row["seconds"] = max(row["seconds"] or 0, facts["seconds"] or 0)
    return list(rows.values())


def problems(row: dict, max_spills: int) -> list[str]:
    """What is wrong with a row, in words."""
    from kda.cli.targets import find

    if not row["ok"]:
        return [f"does not compile: {row['error']}"]
    cores, found = find(row["target"]).cores, []
    if cores and row["spills"] > max_spills:
        found.append(f"spills {row['spills']} registers a lane, and --max-spills is {max_spills}")
    if cores and row["shared"] > cores.shared:
        found.append(f"asks for {row['shared']} bytes of shared memory, and a program can have {cores.shared}")
    return found


def configuration(row: dict) -> str:
    words = [f"{name}={value}" for name, value in row.get("config", {}).items() if not name.startswith("num_")]
    for name, letter in (("num_warps", "warps"), ("num_stages", "stages")):
        if value := row.get("config", {}).get(name):
            words.append(f"{letter}={value}")
    return " ".join(words)


def cells(row: dict) -> tuple[str, ...]:
    from kda.cli.targets import percent

    ops = row["ops"][0] + (f" and {len(row['ops']) - 1} more" if len(row["ops"]) > 1 else "")
    if not row["ok"]:
        return row["target"], "FAILED", "", "", "", "", "", "", ops
    registers = "-" if row["registers"] is None else str(row["registers"])
    occupancy = "-" if row["occupancy"] is None else percent(row["occupancy"])
    sizes = [f"{row[name] / 1024:.1f} KiB" if row[name] >= 1024 else f"{row[name]} B" for name in ("shared", "code")]
    return (row["target"], configuration(row), registers, str(row["spills"]), sizes[0], occupancy, sizes[1],
            f"{row['seconds']:.1f}", ops)  # fmt: skip


def print_table(kernel: str, rows: list[dict], order: list[str]) -> None:
    rows = sorted(rows, key=lambda row: (order.index(row["target"]), row["number"]))
    lines = [COLUMNS, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    right = {COLUMNS.index(name) for name in ("registers", "spills", "shared", "occupancy", "code", "seconds")}
    print(f"\n{short(kernel)}")
    for line in lines:
        print("  " + "  ".join(text.rjust(w) if i in right else text.ljust(w)
                               for i, (text, w) in enumerate(zip(line, widths))).rstrip())  # fmt: skip
    said: dict[str, list[str]] = {}
    for row in rows:
        for warning in row.get("warnings", ()):
            said.setdefault(warning, []).append(row["target"])
    for warning, where in said.items():
        print(f"  warning, {', '.join(dict.fromkeys(where))}: {warning}")


def verdict(results, rows: list[dict], names: list[str], max_spills: int) -> int:
    """Prints what is wrong and how much was compiled; the exit status."""
    wrong = [(row, problem) for row in rows for problem in problems(row, max_spills)]
    failed = [f for f in results.calls if not f["called"]]
    empty = [name for name in names if not any(row["target"] == name for row in rows) and name not in results.problems]
    print()
    for target, problem in sorted(results.problems.items()):
        print(f"WRONG {target}: {problem}")
    for facts in failed:
        print(f"WRONG {facts['target']}: the call {facts['op']} failed before its launch: {facts['error']}")
    for name in empty:
        print(f"WRONG {name}: nothing was launched")
    for row, problem in wrong:
        print(f"WRONG {row['target']} {short(row['kernel'])} ({row['ops'][0]}): {problem}")
    count = len(wrong) + len(failed) + len(results.problems) + len(empty)
    kernels = len({row["kernel"] for row in rows})
    print(f"{len(rows)} compilations of {kernels} kernels for {len(names)} targets: "
          + (f"{count} WRONG" if count else f"all compile, fit and spill at most {max_spills} registers"))  # fmt: skip
    return 1 if count else 0


# ---- files


def prepare(path: Path) -> None:
    """A folder for it, before the work is done that is to go there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a"):
            pass
    except OSError as e:
        raise CommandError(f"{path} cannot be written: {e.strerror}") from None


def written(path: Path, write) -> None:
    try:
        write()
    except OSError as e:
        raise CommandError(f"{path} cannot be written: {e.strerror}") from None


def write_csv(path: Path, rows: list[dict]) -> None:
    names = ("target", "kernel", "ops", "config", "ok", "registers", "spills", "shared", "occupancy", "code", "seconds",
             "warnings", "error")  # fmt: skip
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            plain = dict(row, ops=" | ".join(row["ops"]), config=json.dumps(row.get("config", {})),
                         warnings=" | ".join(row.get("warnings", ())))  # fmt: skip
            writer.writerow([plain.get(name, "") for name in names])
