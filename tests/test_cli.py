# SPDX-License-Identifier: Apache-2.0
"""The command line and the README's code."""
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
