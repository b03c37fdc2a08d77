# SPDX-License-Identifier: Apache-2.0
"""The folder of a sweep: every trial and every measurement as rows of CSV, written at once, read when it goes on."""
from __future__ import annotations

import csv
import datetime
import hashlib
import json
import os
import sys
from pathlib import Path

from kda.cli import CommandError
from kda.cli.trial import Outcome

ROOT = Path(__file__).resolve().parents[2]
TRIALS = ("part", "regime", "config", "ok", "why", "spills", "code")
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
    ours = [ROOT / "kda/cli" / f"{name}.py" for name in ("cases", "space", "stopwatch", "trial", "using", "workloads")]
    for path in sorted([*sources, *ours]):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    versions = {name: of(name) for name in ("torch", "triton", "llvmlite")}
    cpu = dict(threads=threads) if threads else {}
    return dict(device=device_name, small=small, sources=digest.hexdigest()[:16], **versions, **cpu)


def replace(path: Path, text: str) -> None:
    """All of a file or nothing: what was there stays where the new text cannot be written."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_text(text)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


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
        path, begun = self.folder / "about.json", any((self.folder / name).exists() for name in ("trials.csv", "times.csv"))
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            found = None
        except ValueError:
            found = {}
        changed = [name for name in about if found is None or found.get(name) != about[name]]
        if changed and begun:
            raise CommandError(
                f"{self.folder} holds a sweep that does not compare with this one "
                + ("(its about.json cannot be read)" if not found else
                   f"(other {', '.join('kernels or tables' if name == 'sources' else name for name in changed)})")
                + ": name another folder with --out"
            )  # fmt: skip
        if changed:
            replace(path, json.dumps(about, indent=1) + "\n")
        for row in self._rows("trials.csv", TRIALS, self._read_trial):
            self._tried(*row)
        for row in self._rows("times.csv", TIMES, self._read_time):
            self._timed(*row)

    @staticmethod
    def _read_trial(row: dict) -> tuple:
        spills = int(row["spills"]) if row["spills"] else None
        json.loads(row["config"])
        outcome = Outcome({"True": True, "False": False}[row["ok"]], row["why"], spills, row["code"])
        return (row["part"], row["regime"]), row["config"], outcome

    @staticmethod
    def _read_time(row: dict) -> tuple:
        json.loads(row["config"])
        return (row["part"], row["regime"]), row["size"], row["config"], float(row["ms"]), float(row["ratio"])

    def _rows(self, name: str, columns: tuple[str, ...], read) -> list[tuple]:
        """Complete rows of a file as `read` has them; it is begun if there is none. A row that was cut short is cut off, and
        one that cannot be read is left out."""
        path = self.folder / name
        lines = path.read_bytes() if path.exists() else b""
        whole = lines[: lines.rfind(b"\n") + 1]
        if len(whole) < len(lines):
            os.truncate(path, len(whole))
        text = whole.decode(errors="replace").splitlines()
        if not text:
            self._append(name, columns)
            return []
        if tuple(next(csv.reader(text[:1]))) != columns:
            raise CommandError(
                f"{path} is of another version (its columns are not {', '.join(columns)}): name another folder with --out"
            )
        rows = []
        for n, line in enumerate(text[1:], 2):
            try:
                cells = next(csv.reader([line], strict=True))
                rows.append(read(dict(zip(columns, cells, strict=True))))
            except (ValueError, KeyError, csv.Error, StopIteration):
                print(f"{path}, line {n} is left out: it is no measurement", file=sys.stderr)
        return rows

    def _append(self, name: str, row: tuple) -> None:
        try:
            with open(self.folder / name, "a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(row)
        except OSError as e:
            raise CommandError(
                f"{self.folder / name} cannot be written ({e.strerror or e}): what was measured before is kept, and the same "
                "command goes on from there"
            ) from e  # fmt: skip

    def tried(self, regime: tuple[str, str], config: dict, outcome: Outcome) -> None:
        spills = "" if outcome.spills is None else outcome.spills
        self._append("trials.csv", (*regime, text(config), outcome.ok, " ".join(outcome.why.split()), spills, outcome.code))
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
