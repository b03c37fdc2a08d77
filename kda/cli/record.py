# SPDX-License-Identifier: Apache-2.0
"""The folder of a sweep: every trial and every measurement as rows of CSV, written at once, read when it goes on."""
from __future__ import annotations

import csv
import datetime
import hashlib
import json
import os
from pathlib import Path

from kda.cli import CommandError
from kda.cli.trial import Outcome

ROOT = Path(__file__).resolve().parents[2]
TRIALS = ("part", "regime", "config", "ok", "why", "spills")
TIMES = ("when", "part", "regime", "size", "round", "config", "ms", "former_ms", "ratio")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def text(config: dict) -> str:
    """A configuration in one cell; {} is the former one."""
    return json.dumps(config, sort_keys=True)


def made_of(device_name: str, small: bool, threads: int | None) -> dict:
    """What measurements must have in common to be compared: device, versions, kernels and their former tables."""
    from importlib.metadata import PackageNotFoundError, version

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    digest = hashlib.sha256()
    sources = [path for folder in ("kda/triton", "kda/triton_cpu") for path in (ROOT / folder).rglob("*.py")]
    for path in sorted([*sources, ROOT / "kda/cli/space.py", ROOT / "kda/cli/workloads.py"]):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    versions = {name: of(name) for name in ("torch", "triton", "llvmlite")}
    cpu = dict(threads=threads, isa=os.environ.get("KDA_CPU_ISA")) if threads else {}
    return dict(device=device_name, small=small, sources=digest.hexdigest()[:16], **versions, **cpu)


class Record:
    """What a folder holds of a sweep, by (part, regime)."""

    def __init__(self, folder: Path, about: dict) -> None:
        self.folder = folder
        self.trials: dict[tuple[str, str], dict[str, Outcome]] = {}
        self.ratios: dict[tuple[str, str], dict[str, dict[str, list[float]]]] = {}  # by configuration and size
        self.ms: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._continue(about)
        except OSError as e:
            raise CommandError(f"{folder} cannot be used: {e.strerror or e}") from e

    def _continue(self, about: dict) -> None:
        path = self.folder / "about.json"
        if path.exists():
            try:
                found = json.loads(path.read_text())
            except ValueError:
                found = {}
            changed = [name for name in about if found.get(name) != about[name]]
            if changed:
                raise CommandError(
                    f"{self.folder} holds a sweep that does not compare with this one (other {', '.join(changed)}): "
                    "name another folder with --out"
                )  # fmt: skip
        else:
            path.write_text(json.dumps(about, indent=1) + "\n")
        for row in self._rows("trials.csv", TRIALS):
            spills = int(row["spills"]) if row["spills"] else None
            self._tried((row["part"], row["regime"]), row["config"], Outcome(row["ok"] == "True", row["why"], spills))
        for row in self._rows("times.csv", TIMES):
            self._timed((row["part"], row["regime"]), row["size"], row["config"], float(row["ms"]), float(row["ratio"]))

    def _rows(self, name: str, columns: tuple[str, ...]) -> list[dict]:
        """Complete rows of a file; it is begun if there is none. A row that was cut short is cut off."""
        path = self.folder / name
        if not path.exists():
            with open(path, "w", newline="") as file:
                csv.writer(file).writerow(columns)
            return []
        lines = path.read_bytes()
        whole = lines[: lines.rfind(b"\n") + 1]
        if len(whole) < len(lines):
            path.write_bytes(whole)
        return list(csv.DictReader(whole.decode().splitlines()))

    def _append(self, name: str, row: tuple) -> None:
        try:
            with open(self.folder / name, "a", newline="") as file:
                csv.writer(file).writerow(row)
        except OSError as e:
            raise CommandError(
                f"{self.folder / name} cannot be written ({e.strerror or e}): what was measured before is kept, and the same "
                "command goes on from there"
            ) from e  # fmt: skip

    def tried(self, regime: tuple[str, str], config: dict, outcome: Outcome) -> None:
        spills = "" if outcome.spills is None else outcome.spills
        self._append("trials.csv", (*regime, text(config), outcome.ok, " ".join(outcome.why.split()), spills))
        self._tried(regime, text(config), outcome)

    def timed(self, regime: tuple[str, str], size: str, round: int, config: dict, ms: float, former_ms: float) -> None:
        ratio = ms / former_ms
        figures = f"{ms:.6f}", f"{former_ms:.6f}", f"{ratio:.5f}"
        self._append("times.csv", (now(), *regime, size, round, text(config), *figures))
        self._timed(regime, size, text(config), ms, ratio)

    def _tried(self, regime, config: str, outcome: Outcome) -> None:
        self.trials.setdefault(regime, {})[config] = outcome

    def _timed(self, regime, size: str, config: str, ms: float, ratio: float) -> None:
        self.ratios.setdefault(regime, {}).setdefault(config, {}).setdefault(size, []).append(ratio)
        self.ms.setdefault(regime, {}).setdefault((config, size), []).append(ms)
