# SPDX-License-Identifier: Apache-2.0
"""A row measured in a process of its own, for what is decided when a process begins: `python -m kda.cli.bench.child JOB`."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

from kda.cli.bench.rows import PACKAGE, Row

MARK = "ROW "


def measure(session, part: str, name: str, dims: dict, env: dict[str, str]) -> Row:
    """The row that such a process gives; RuntimeError where it ended without one."""
    job = json.dumps(dict(settings=session.settings(), part=part, name=name, dims=dims))
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(session.threads)} | env
    done = subprocess.run([sys.executable, "-m", "kda.cli.bench.child", job], env=env, text=True, capture_output=True)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return Row(**json.loads(line[len(MARK) :]))
    said = done.stderr.strip().splitlines() or [""]
    raise RuntimeError(f"its process ended with status {done.returncode}: {said[-1]}")


def main() -> int:
    from kda.cli.bench.regimes import Case
    from kda.cli.bench.session import Session

    job = json.loads(sys.argv[1])
    settings = job["settings"] | {"peers": tuple(job["settings"]["peers"])}
    row = Session(**settings).measure(Case(job["part"], job["name"], job["dims"]))
    print(MARK + json.dumps(asdict(row)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
