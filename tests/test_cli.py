# SPDX-License-Identifier: Apache-2.0
"""The command line and the README's code."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kda.cli import main
from kda.cli.schedule import plan

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.txt"
    path.write_bytes(bytes(range(32, 127)) * 2)
    return str(path)


def test_demo_checks_itself(text, capsys):
    assert main(["demo", text, "--heads", "1", "--steps", "6", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for line in ("backend ", "why ", "prefill, ", "decode, ", "recurrent [H, V, K]", "all within bounds"):
        assert line in out, out


def test_demo_fails_when_an_error_is_over_the_bound(text, capsys, monkeypatch):
    import torch

    from kda.cli import check

    monkeypatch.setitem(check.BOUNDS, torch.bfloat16, (1e-9, 1e-9))
    assert main(["demo", text, "--heads", "1", "--steps", "4", "--device", "cpu"]) == 1
    assert "OVER" in capsys.readouterr().out


def test_demo_fails_on_nan():
    from kda.cli.check import Check, worst

    assert not Check("x", float("nan"), 1.0).ok
    assert str(worst([0.1, float("nan"), 0.2])) == "nan"


@pytest.mark.parametrize(
    "content, arguments, message",
    [
        (None, [], "No such file or directory"),
        (b"", [], "has 0 bytes"),
        (b"short", [], "needs at least 64"),
        (b"x" * 64, ["--heads", "0"], "--heads must be at least 1, got 0"),
        (b"x" * 64, ["--device", "nowhere"], "--device nowhere cannot be used here"),
    ],
)
def test_demo_refuses_in_one_sentence(tmp_path, capsys, content, arguments, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert main(["demo", str(path), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1, err


def test_plan_fits_the_text_and_serves_every_token():
    for size in [*range(64, 1200, 7), 10**6]:
        for tokens, steps in ((640, 32), (4096, 32), (16, 4), (64, 300)):
            requests, batches = plan(size, tokens, steps)
            assert requests[-1].stop <= size
            at = [0] * len(requests)
            for batch in batches:
                for r in batch.decode:
                    assert at[r] >= requests[r].prompt
                    at[r] += 1
                for r, first, stop in batch.prefill:
                    assert at[r] == first < stop
                    at[r] = stop
            assert at == [r.prompt + r.decode for r in requests]


def test_readme_code_runs_as_it_stands():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "prefill (1, 48, 4, 128)" in run.stdout and "decode  (2, 1, 4, 128)" in run.stdout
    assert "serving (22, 4, 128)" in run.stdout


def doctor(**env) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("KDA_CPU_ISA", "KDA_BACKEND")} | env
    command = [sys.executable, "-m", "kda", "doctor"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_doctor_tells_backend_processor_path_threads_cache_and_versions(tmp_path):
    import torch

    cache = tmp_path / "cache"
    run = doctor(TRITON_CACHE_DIR=str(cache), CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stdout + run.stderr
    lines = {line[:12].strip(): line[13:] for line in run.stdout.splitlines()}
    assert f"torch {torch.__version__.split('+')[0]}" in lines["versions"] and "triton" in lines["versions"]
    assert lines["cpu"].startswith("backend ") and "cpu tensors go to" in run.stdout
    assert re.match(r"\d+ of \d+ processors", lines["threads"])
    assert lines["cache"].startswith(str(cache)) and lines["verdict"] == "all is well"
    if "triton-cpu" in lines["cpu"]:
        assert lines["path"].split(",")[0] in lines["processor"].split("runs ")[1]
        assert "a kernel runs there and is right" in run.stdout


@pytest.mark.parametrize(
    "env, message",
    [
        (dict(KDA_BACKEND="fast"), "KDA_BACKEND=fast is unknown"),
        (dict(KDA_CPU_ISA="sse9"), "accepted are generic, avx2"),
        (dict(TRITON_CACHE_DIR="/proc/kda"), "cache folder /proc/kda cannot be written"),
    ],
)
def test_doctor_fails_and_says_what_to_do(env, message):
    if "KDA_CPU_ISA" in env:
        pytest.importorskip("llvmlite")
    run = doctor(**env)
    assert run.returncode == 1, run.stdout + run.stderr
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("broken"))
    assert message in line and ("unset" in line or "set TRITON_CACHE_DIR" in line)


def test_doctor_names_missing_and_old_packages(monkeypatch, capsys):
    from kda.cli import doctor as command

    report = command.Report()
    found = {"torch": "2.11.0", "triton": "3.5.1", "llvmlite": None, "numpy": "2.4.6"}
    monkeypatch.setattr(command, "version", found.get)
    monkeypatch.setattr(command.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command.versions(report)
    assert [f.broken for f in report.findings] == [True, True, True]
    assert report.close() == 1
    out = capsys.readouterr().out
    for part in ("pip install llvmlite", "triton 3.5.1 is older than 3.6", "numpy<2.4", "3 broken"):
        assert part in out, out


def test_doctor_tells_whose_cpu_backend_triton_has(monkeypatch):
    from importlib.metadata import EntryPoint, EntryPoints

    from kda.cli import doctor as command

    both = [EntryPoint("cpu", value, "triton.backends") for value in ("kda.triton_cpu", "other.cpu")]
    monkeypatch.setattr(command.importlib.metadata, "entry_points", lambda: EntryPoints(both))
    report = command.Report()
    command.backend_owner(report)
    (finding,) = report.findings
    assert not finding.broken and finding.what.startswith("other.cpu also registers")
