# SPDX-License-Identifier: Apache-2.0
"""Programs that use Triton's backend `cpu`, each in a process of its own: Triton finds backends once, when imported."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Programs:
    """Runs Python programs in which Triton knows the backend, whether the package is installed or not."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.cache = folder / "cache"
        info = folder / "entry" / "kda_entry-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kda-entry\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[triton.backends]\ncpu = kda.triton_cpu\n")

    def start(self, source: str, **env: str) -> subprocess.Popen:
        kept = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "KDA_CPU_ISA")}
        path = os.pathsep.join(map(str, filter(None, [info_root(self), ROOT, HERE, kept.get("PYTHONPATH")])))
        program = self.folder / f"program{len(list(self.folder.glob('program*')))}.py"
        program.write_text(textwrap.dedent(source))
        return subprocess.Popen(
            [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**kept, "TRITON_CACHE_DIR": str(self.cache), "CUDA_VISIBLE_DEVICES": "", **env, "PYTHONPATH": path},
        )  # fmt: skip

    def run(self, source: str, ok: bool = True, **env: str) -> str:
        """The program's output; its errors too where it is expected to fail."""
        process = self.start(source, **env)
        out, err = process.communicate(timeout=300)
        assert (process.returncode == 0) == ok, f"exit {process.returncode}\n{out}\n{err}"
        return out if ok else out + err


def info_root(programs: Programs) -> Path:
    return programs.folder / "entry"


@pytest.fixture
def programs(tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("llvmlite")
    return Programs(tmp_path)


@pytest.fixture(scope="session")
def session_programs(tmp_path_factory):
    pytest.importorskip("triton")
    pytest.importorskip("llvmlite")
    return Programs(tmp_path_factory.mktemp("triton_cpu"))
