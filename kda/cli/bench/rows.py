# SPDX-License-Identifier: Apache-2.0
"""One row a case, of whatever part and device, and the file that holds them: written after each, read when a run goes on."""
from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from kda.cli import CommandError

FORMAT = "kda bench 1"
FILE = "bench.json"
PACKAGE = Path(__file__).resolve().parents[2]


@dataclass
class Row:
    """What was measured of one case. Ours are the names that begin with "kda".

    `ms`: by name the median "ms", the quartiles "q1" and "q3", and "samples". `failed`: by name, in words. `floor_ms`: by
    name, what its bytes take at the bandwidth of a copy. `errors`: by name the relative "output" and "state" against the
    recurrence in fp64, None where not finite, and the "bound" of each, or None where they are only shown. `host_us`: how long
    a launch keeps the host, `add_us`: how long torch's `add_` does. `waits`: where a call waits for the GPU, in torch's words.
    """

    part: str
    name: str
    dims: dict = field(default_factory=dict)
    ms: dict[str, dict] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    floor_ms: dict[str, float] = field(default_factory=dict)
    errors: dict[str, dict] = field(default_factory=dict)
    host_us: float | None = None
    add_us: float | None = None
    kernel_us: dict[str, float] = field(default_factory=dict)
    waits: str | None = None
    facts: dict = field(default_factory=dict)
    seconds: float = 0.0
    when: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.name

    def time(self, name: str) -> float | None:
        """Median milliseconds."""
        return self.ms[name]["ms"] if name in self.ms else None

    def ratio(self, ours: str, theirs: str) -> float | None:
        a, b = self.time(ours), self.time(theirs)
        return a / b if a is not None and b else None

    def of_floor(self, name: str) -> float | None:
        t, floor = self.time(name), self.floor_ms.get(name)
        return t / floor if t is not None and floor else None

    def wrong(self) -> list[str]:
        """What is not as it must be, in words: errors over their bounds, ours that did not run."""
        found = [f"{name} failed: {why}" for name, why in self.failed.items() if ours(name)]
        for name, e in self.errors.items():
            for what, bound in zip(("output", "state"), e["bound"] or ()):
                value = e.get(what)
                if what in e and bound is not None and (value is None or value > bound):
                    found.append(f"{name}: {what} error {'not finite' if value is None else f'{value:.1e}'}, bound {bound:g}")
        return found


def ours(name: str) -> bool:
    return name.startswith("kda")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, object]:
    """Processor, versions, date: what a figure means nothing without."""
    versions = {name: version(name) for name in ("torch", "triton", "llvmlite", "transformers")}
    return dict(date=now(), cpu=processor(), python=platform.python_version(), **versions)


def sources() -> str:
    """A digest of the package without its commands."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] != "cli":
            digest.update(place.as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """DIR/bench.json, or another `file`: `about`, what the rows have in common, and the rows by key.

    A file that is there is gone on with. CommandError where it is broken, of something else, or of another device, other
    versions or sources, as `same` names them in `about`.
    """

    def __init__(self, folder: Path, about: dict, same: tuple[str, ...], fresh: bool = False, file: str = FILE) -> None:
        self.path, self.about, self.rows = folder / file, about, {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CommandError(f"{folder} cannot be used: {e.strerror or e}") from e
        if fresh or not self.path.exists():
            return
        try:
            found, self.rows = load(self.path)
        except CommandError as e:
            raise CommandError(f"{e}; move it away, or measure everything again with --fresh") from e
        changed = [name for name in same if found.get(name) != about[name]]
        if changed:
            raise CommandError(
                f"{self.path} holds measurements of another {', '.join(changed)}: name another folder with --out, or measure "
                "everything again with --fresh"
            )  # fmt: skip
        self.about = about | {"date": found.get("date"), "command": found.get("command")}

    def add(self, row: Row) -> None:
        row.when = now()
        self.rows[row.key] = row
        self.write()

    def write(self) -> None:
        """At once or not at all: a run that is cut off leaves the former file."""
        data = {"format": FORMAT, "about": self.about, "rows": [asdict(row) for row in self.rows.values()]}
        save(self.path, json.dumps(finite(data), indent=1) + "\n")


def save(path: Path, text: str | bytes) -> None:
    """CommandError where the disk is full or not ours."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(text.encode() if isinstance(text, str) else text)
        os.replace(part, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise CommandError(
            f"{path} cannot be written ({e.strerror or e}): what was written before is kept, and the same command goes on "
            "from there"
        ) from e  # fmt: skip


def load(path: Path) -> tuple[dict, dict[tuple[str, str], Row]]:
    """(about, rows by key) of a file, or of the bench.json in a folder."""
    path = path / FILE if path.is_dir() else path
    try:
        data = json.loads(path.read_text())
    except OSError as e:
        raise CommandError(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise CommandError(f"{path} is broken: {e}") from e
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CommandError(f"{path} is not a file that `kda bench` of this version wrote")
    try:
        rows = [Row(**row) for row in data["rows"]]
        return dict(data["about"]), {row.key: row for row in rows}
    except (KeyError, TypeError, ValueError) as e:
        raise CommandError(f"{path} is not a file that `kda bench` of this version wrote: {e}") from e


def finite(x):
    """The same with None for numbers that are none: JSON has no NaN."""
    if isinstance(x, dict):
        return {name: finite(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
