# SPDX-License-Identifier: Apache-2.0
"""`kda bench`: tiny runs on this machine's CPU, what interrupts them, reports, comparisons; a GPU's side on a pretended one."""

import contextlib
import errno
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
import torch
from helpers import GPU, INTERPRETED, ROOT

if INTERPRETED:
    pytest.skip("kernels in the interpreter are not timed", allow_module_level=True)

import kda  # noqa: E402
from kda.cli import main  # noqa: E402
from kda.cli.bench import compare, measure, parts, peers, regimes, report, rows, session, tensors  # noqa: E402
from kda.cli.bench.rows import Results, Row  # noqa: E402
from kda.cli.bench.session import Session  # noqa: E402
from kda.cli.workloads import Work  # noqa: E402

CPU = torch.device("cpu")
PLOTS = importlib.util.find_spec("matplotlib") is not None
CASES = [case for case in regimes.cases("cpu", True) if case.part == "ops"]


def bench(out, *more, part="ops"):
    usual = ["bench", "--quick", "--device", "cpu", "--threads", "1", "--peers", ""]
    return main([*usual, "--part", part, "--out", str(out), *more])


def contents(folder) -> dict:
    return json.loads((folder / "bench.json").read_text())


def keys(folder) -> list[tuple]:
    return [(row["part"], row["name"]) for row in contents(folder)["rows"]]


def planted(case, ms=1.0):
    """A row that takes no time."""
    return Row(case.part, case.name, case.dims, {"kda": measure.spread([ms] * 5)})


@pytest.fixture
def measuring(monkeypatch):
    """Rows are planted, not measured; the keys that a run asked for."""
    asked = []

    def fill(self, case):
        asked.append(case.key)
        return planted(case)

    monkeypatch.setattr(Session, "measure", fill)
    return asked


# ------------------------------------------------------------------------------------------------------------ end to end


def test_a_run_writes_rows_errors_a_report_and_plots(tmp_path):
    command = [sys.executable, "-m", "kda", "bench", "--quick", "--device", "cpu", "--threads", "1", "--out", str(tmp_path),
               "--part", "prefill,decode,layer"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    data = contents(tmp_path)
    wanted = [c.key for c in regimes.cases("cpu", True) if c.part in ("prefill", "decode", "layer")]
    assert keys(tmp_path) == wanted
    for row in data["rows"]:
        main_name = {"prefill": "kda", "decode": "kda_decode", "layer": "kda_prefill"}[row["part"]]
        t, e = row["ms"][main_name], row["errors"][main_name]
        assert 0 < t["q1"] <= t["ms"] <= t["q3"] and t["samples"] >= 3
        assert 0 < e["output"] <= e["bound"][0] and 0 <= e["state"] <= e["bound"][1]
        assert row["floor_ms"][main_name] > 0 and not row["failed"] and row["seconds"] > 0
        assert f"{row['part']}: {row['name']}: " in done.stdout
    text = (tmp_path / "report.md").read_text()
    about = data["about"]
    assert text.startswith(f"# kda bench: {about['device']}\n")
    for words in (about["date"], f"torch {metadata.version('torch')}", "`python -m kda bench --quick --device cpu", "## In short",
                  "## Decode: one new token", "the times mean nothing", "1 threads", "our PyTorch reference"):  # fmt: skip
        assert words in text, words
    images = sorted(path.name for path in tmp_path.glob("*.png"))
    assert images == (sorted(name for name, _, _ in report.plots.PLOTS) if PLOTS else [])
    for name in images:
        assert f"]({name})" in text and (tmp_path / name).stat().st_size < 60_000


def test_the_list_is_what_a_run_measures(tmp_path, measuring, capsys):
    assert bench(tmp_path, "--list", part="ops,accuracy") == 0
    listed = [tuple(line.split(maxsplit=1)) for line in capsys.readouterr().out.splitlines()]
    assert not list(tmp_path.iterdir())
    assert bench(tmp_path, part="ops,accuracy") == 0
    assert [tuple(" ".join(key).split(maxsplit=1)) for key in measuring] == listed
    assert [case.rank for case in regimes.cases("cuda", False)] == sorted(case.rank for case in regimes.cases("cuda", False))


@pytest.mark.skipif(kda.backend_for("cpu") != "triton-cpu", reason="for Triton's backend named cpu")
def test_processor_paths_and_first_calls_run_in_processes_of_their_own(tmp_path, monkeypatch):
    path = {"path": "avx2", "part": "decode", "H": 2, "N": 2}
    some = [regimes.Case("isa", "avx2", path), regimes.Case("first", "rms_norm_gated", {"operation": "rms_norm_gated"})]
    monkeypatch.setattr(regimes, "cases", lambda *args: some)
    assert bench(tmp_path, part="isa,first") == 0
    isa, first = contents(tmp_path)["rows"]
    assert isa["dims"]["path"] == "avx2" and isa["errors"]["kda_decode"]["output"] > 0
    empty, full = (first["facts"][f"{cache} cache"]["kernels"] for cache in ("empty", "full"))
    assert not empty[0]["hit"] and full[0]["hit"]
    assert first["ms"]["kda, empty cache"]["ms"] > first["ms"]["kda, second call"]["ms"]


def test_a_path_that_the_machine_lacks_is_told(tmp_path, monkeypatch, measuring, capsys):
    if kda.backend_for("cpu") != "triton-cpu":
        pytest.skip("for Triton's backend named cpu")
    from kda.cli.bench import paths

    monkeypatch.setattr(paths, "missing", lambda path: "" if path == "avx2" else "no such instructions")
    assert bench(tmp_path, part="isa") == 0
    assert {name.split(":")[0] for _, name in measuring} == {"avx2"}
    assert "left out, path amx: no such instructions" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------- interrupted, going on


def test_a_killed_run_loses_nothing_and_goes_on(tmp_path, measuring):
    command = [sys.executable, "-m", "kda", "bench", "--quick", "--device", "cpu", "--threads", "1", "--peers", "", "--part",
               "ops", "--out", str(tmp_path)]  # fmt: skip
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "bench.json").exists() or len(keys(tmp_path)) < 2:
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = contents(tmp_path)["rows"]
    assert len(before) >= 2
    assert bench(tmp_path) == 0
    after = contents(tmp_path)["rows"]
    assert after[: len(before)] == before
    assert keys(tmp_path) == [case.key for case in CASES]
    assert measuring == keys(tmp_path)[len(before) :]

    measuring.clear()
    assert bench(tmp_path) == 0 and measuring == []
    assert bench(tmp_path, "--fresh") == 0 and len(measuring) == len(CASES)


def test_an_interrupted_run_still_reports(tmp_path, monkeypatch, capsys):
    count = itertools.count(1)

    def interrupted(self, case):
        if next(count) == 3:
            raise KeyboardInterrupt
        return planted(case)

    monkeypatch.setattr(Session, "measure", interrupted)
    assert bench(tmp_path) == 130
    assert keys(tmp_path) == [case.key for case in CASES[:2]]
    assert "the same command goes on with them" in capsys.readouterr().err
    assert CASES[-1].name in (tmp_path / "report.md").read_text()


def test_without_time_all_is_left_out_and_said(tmp_path, measuring, capsys):
    assert bench(tmp_path, "--minutes", "0") == 0
    assert measuring == [] and keys(tmp_path) == []
    assert f"out of time, {len(CASES)} rows are left out" in capsys.readouterr().out
    assert f"Left out for want of time, {len(CASES)} rows" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("text, message", [
    ('{"format": "kda bench 1", "rows": [', "is broken"),
    ('{"machine": {}, "prefill": []}', "not a file that `kda bench` of this version wrote"),
    ("[1, 2]", "not a file that `kda bench` of this version wrote"),
    ('{"format": "kda bench 1", "about": {}, "rows": [{"speed": 3}]}', "not a file that `kda bench` of this version wrote"),
])  # fmt: skip
def test_a_broken_or_foreign_file_is_left_alone(tmp_path, measuring, capsys, text, message):
    (tmp_path / "bench.json").write_text(text)
    assert bench(tmp_path) == 2
    said = capsys.readouterr().err
    assert message in said and "--fresh" in said and said.count("\n") == 1
    assert (tmp_path / "bench.json").read_text() == text and measuring == []
    assert bench(tmp_path, "--fresh") == 0 and len(keys(tmp_path)) == len(CASES)


def test_rows_of_another_device_or_version_are_not_gone_on_with(tmp_path, measuring, capsys):
    assert bench(tmp_path) == 0
    data = contents(tmp_path)
    data["about"] |= {"device": "another one", "torch": "1.0"}
    (tmp_path / "bench.json").write_text(json.dumps(data))
    assert bench(tmp_path) == 2
    assert "holds measurements of another device, torch" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path, monkeypatch, measuring, capsys):
    write, count = Path.write_bytes, itertools.count(1)

    def full(self, data):
        if self.name.endswith(".part") and next(count) > 4:  # the file itself, then three rows
            write(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    with monkeypatch.context() as m:
        m.setattr(Path, "write_bytes", full)
        assert bench(tmp_path) == 2
    said = capsys.readouterr().err
    assert "cannot be written (No space left on device)" in said and "the same command goes on" in said
    assert len(keys(tmp_path)) == 3 and [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert bench(tmp_path) == 0 and len(keys(tmp_path)) == len(CASES)


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(tmp_path, measuring, capsys):
    (tmp_path / "file").write_text("")
    assert bench(tmp_path / "file" / "out") == 2
    assert "cannot be used" in capsys.readouterr().err and measuring == []


@pytest.mark.parametrize("arguments, message", [
    ([], "name a folder"),
    (["--out", "x", "--part", "prefil"], "--part prefil is unknown; accepted are prefill"),
    (["--out", "x", "--device", "tpu"], "--device tpu cannot be used here"),
    (["--out", "x", "--device", "cpu", "--threads", "0"], "--threads must be at least 1"),
    (["--out", "x", "--device", "cpu", "--peers", "vllm"], "--peers vllm is unknown; accepted are transformers"),
    (["--report", "nowhere"], "cannot be read"),
    (["--compare", "nowhere", "x"], "cannot be read"),
])  # fmt: skip
def test_usage_errors_are_sentences(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ failures and errors


def test_an_operation_that_fails_costs_its_row_alone(tmp_path, monkeypatch, capsys):
    failing, fills = CASES[1], []

    def fill(session, row, **dims):
        fills.append(row.key)
        if row.key == failing.key and len(fills) < 10:
            raise RuntimeError("no such luck\nand more")
        row.ms["kda"] = measure.spread([1.0, 2.0, 3.0])

    monkeypatch.setitem(parts.FILL, "ops", fill)
    assert bench(tmp_path) == 1
    assert keys(tmp_path) == [case.key for case in CASES]
    assert f"NOT AS IT MUST BE: {': '.join(failing.key)}: kda failed: RuntimeError: no such luck" in capsys.readouterr().out
    assert "kda failed: RuntimeError: no such luck" in (tmp_path / "report.md").read_text()

    fills += [None] * 10  # the same command measures it again, and it alone
    assert bench(tmp_path) == 0
    assert fills[-1] == failing.key and fills[-2] is None
    assert "no such luck" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("value", [5e-3, float("nan")])
def test_an_error_over_its_bound_gives_status_1(tmp_path, monkeypatch, value):
    def fill(session_, row, **dims):
        session.judged(row, "kda", {"output": value if row.key == CASES[2].key else 1e-3, "state": 1e-3}, session.bound())
        session.judged(row, "flashkda", {"output": 1.0, "state": 1.0}, None)  # a peer's is shown only

    monkeypatch.setitem(parts.FILL, "ops", fill)
    assert bench(tmp_path) == 1
    text = (tmp_path / "report.md").read_text()
    assert text.count("output error 5.0e-03, bound 0.004" if value == value else "output error not finite") == 1
    assert "**5.0e-03**" in text or "**not finite**" in text
    assert "NaN" not in (tmp_path / "bench.json").read_text()  # which is no JSON


def test_wrong_results_are_noticed(monkeypatch):
    """Errors are measured on a part of the heads and requests: the first and the last of them."""
    here = Session("cpu", (), False, True, 1, 0.01, 1e10)
    chunk, decode = kda.chunk_kda_with_fused_gate, kda.kda_decode

    def off(*args, **kwargs):
        o, states = chunk(*args, **kwargs)
        states[-1, -1, 0, 0] += 1
        return o, states

    def shifted(*args, **kwargs):
        o = decode(*args, **kwargs)
        o[-1, -1] *= 1.1
        return o

    monkeypatch.setattr(kda, "chunk_kda_with_fused_gate", off)
    monkeypatch.setattr(kda, "kda_decode", shifted)
    with torch.no_grad():
        row = here.measure(regimes.prefill(6, [20, 3]))
        assert len(row.wrong()) == 1 and row.wrong()[0].startswith("kda: state error")
        row = here.measure(regimes.decode(6, 10, full=False))
        assert len(row.wrong()) == 1 and row.wrong()[0].startswith("kda_decode: output error")


def test_the_recurrence_over_some_heads_is_the_tests_oracle():
    x = tensors.Prompt(Work(3, (5, 2)), CPU)
    o, states = x.oracle([0, 2])
    ref_o, ref_s = oracle.kda(x.q, x.k, x.v, x.g, x.beta, A_log=x.A_log, g_bias=x.bias, lower_bound=-5.0,
                              initial_state=x.h0, cu_seqlens=x.cu.tolist(), sigmoid_beta=True)  # fmt: skip
    torch.testing.assert_close(o, ref_o[:, :, [0, 2]])
    torch.testing.assert_close(states, ref_s[:, [0, 2]])


# --------------------------------------------------------------------------------------------------- report, comparison


def test_without_matplotlib_the_report_says_what_to_install(tmp_path, monkeypatch, measuring, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench(tmp_path) == 0
    assert "pip install 'triton-kda[bench]'" in (tmp_path / "report.md").read_text()
    assert "pip install 'triton-kda[bench]'" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


def test_a_report_is_written_again_without_measuring(tmp_path, measuring, capsys):
    assert bench(tmp_path) == 0
    before = (tmp_path / "report.md").read_text()
    (tmp_path / "report.md").unlink()
    measuring.clear()
    assert main(["bench", "--report", str(tmp_path)]) == 0
    assert (tmp_path / "report.md").read_text() == before and measuring == []


def spread(ms, width=0.01, samples=20):
    return {"ms": ms, "q1": ms * (1 - width / 2), "q3": ms * (1 + width / 2), "samples": samples}


def written(folder, ms: dict, **about) -> Path:
    """A run with rows "a", "b" .. of `ms` by row and name."""
    results = Results(folder, dict(device="one", torch="2.13") | about, (), True)
    for name, times in ms.items():
        results.rows["decode", name] = Row("decode", name, dict(H=2, N=1), times)
    results.write()
    return folder


def compared(tmp_path, before, after, *more, **about) -> int:
    a, b = written(tmp_path / "a", before), written(tmp_path / "b", after, **about)
    return main(["bench", "--compare", str(a), str(b / "bench.json"), *more])


def test_comparing_tells_what_is_beyond_the_noise(tmp_path, capsys):
    before = {name: {"kda": spread(1.0)} for name in ("same", "noisy", "slow", "fast", "gone")}
    after = {"same": {"kda": spread(1.015)}, "noisy": {"kda": spread(1.3, width=0.4)}, "slow": {"kda": spread(1.08)},
             "fast": {"kda": spread(0.9)}, "new": {"kda": spread(1.0)}}  # fmt: skip
    assert compared(tmp_path, before, after) == 0
    out = capsys.readouterr().out
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("decode ")}
    assert set(lines) == {"slow", "fast"}
    assert lines["slow"].endswith("slower") and "1.08x" in lines["slow"]
    assert lines["fast"].endswith("faster") and "0.90x" in lines["fast"]
    assert "4 times in both: 1 slower, 1 faster, 2 unchanged within the noise" in out
    assert "decode: gone" in out and "decode: new" in out and "differ in" not in out


@pytest.mark.parametrize("name, after, limit, status", [
    ("kda", spread(1.2), "1.1", 1),
    ("kda", spread(1.2), "1.3", 0),
    ("kda", spread(1.2, width=0.3), "1.1", 0),  # within the noise
    ("vllm, chain", spread(1.2), "1.1", 0),  # not ours
    ("kda", spread(1.15, width=0.0, samples=1), "1.1", 0),  # taken once: its noise is not known
    ("kda", spread(0.5), "1.1", 0),
])  # fmt: skip
def test_a_regression_gives_status_1(tmp_path, capsys, name, after, limit, status):
    assert compared(tmp_path, {"row": {name: spread(1.0)}}, {"row": {name: after}}, "--limit", limit) == status
    assert ("are over" in capsys.readouterr().out) == bool(status)


def test_comparing_other_machines_warns(tmp_path, capsys):
    rows = {"row": {"kda": spread(1.0)}}
    assert compared(tmp_path, rows, rows, device="two") == 0
    assert "the two runs differ in device one and two: what changed may be due to that" in capsys.readouterr().out
    (tmp_path / "b" / "bench.json").write_text("{")
    assert main(["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "is broken" in capsys.readouterr().err


def test_noise_is_of_both_runs():
    assert compare.noise(spread(1.0, 0.1), spread(2.0, 0.2)) == pytest.approx(0.3)
    assert compare.noise(spread(1.0, 0.0), spread(2.0, 0.0)) == compare.LEAST_NOISE


def test_bursts_take_turns_in_about_the_time_given():
    calls = []

    def burst(name, seconds):
        def run():
            calls.append(name)
            time.sleep(seconds)
            return [seconds]

        return run

    got = measure.in_turn({"quick": burst("quick", 0.001), "slow": burst("slow", 0.01)}, 0.2)
    assert got["slow"]["samples"] >= 3 and got["quick"]["samples"] > 3 * got["slow"]["samples"]
    gaps = [i for i, name in enumerate(calls) if name == "slow"]
    assert max(b - a for a, b in zip(gaps, gaps[1:])) < len(calls) / 2  # spread over the whole, not one after the other
    assert measure.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == {"ms": 3.0, "q1": 2.0, "q3": 4.0, "samples": 5}
    assert measure.spread([2.0]) == {"ms": 2.0, "q1": 2.0, "q3": 2.0, "samples": 1}


# ----------------------------------------------------------------------------------------------------- a pretended GPU


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class Graph:
    replays = 0

    def replay(self):
        Graph.replays += 1


class Profile:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def events(self):
        kind = torch.autograd.DeviceType
        return [SimpleNamespace(name="kernel", device_type=kind.CUDA, device_time=2.0),
                SimpleNamespace(name="kernel", device_type=kind.CUDA, device_time=3.0),
                SimpleNamespace(name="aten::add", device_type=kind.CPU, device_time=9.0)]  # fmt: skip


@pytest.fixture
def pretended(monkeypatch):
    """CPU tensors are timed as a GPU's: events, graphs, launches; FlashKDA is our own kernel."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = dict(
        Event=Event, CUDAGraph=Graph, Stream=lambda: stream, current_stream=lambda: stream, synchronize=lambda *device: None,
        stream=lambda s: contextlib.nullcontext(), graph=lambda g: contextlib.nullcontext(), empty_cache=lambda: None,
        get_sync_debug_mode=lambda: 0, set_sync_debug_mode=lambda mode: None,
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile())
    monkeypatch.setattr(measure, "on_gpu", lambda device: True)
    monkeypatch.setitem(peers.CHUNK, "flashkda", lambda x: x.chunk)
    monkeypatch.setattr(Graph, "replays", 0)


@pytest.mark.skipif(GPU, reason="there is a real one")
def test_the_parts_of_a_gpu_run_on_a_pretended_one(tmp_path, pretended):
    here = Session("cpu", ("flashkda", "vllm"), False, True, 1, 0.002, measure.copy_bytes_per_s(CPU, 1))
    about = dict(kind="cuda", device="a pretended GPU", copy_bytes_per_s=here.copy, peers=["flashkda", "vllm"])
    results = Results(tmp_path, about, ())
    ran = {}
    for case in regimes.cases("cuda", True):
        if case.part in regimes.USUAL["cuda"] and not (case.part == "accuracy" and case.name.startswith("float")):
            row = ran[case.key] = here.measure(case)
            assert not row.wrong(), row.wrong()
            results.add(row)
    assert Graph.replays > 100

    row = ran["prefill", "H=2 T=70, one sequence"]
    assert set(row.ms) == {"kda", "kda, eager", "flashkda", "flashkda, eager", "kda, strided inputs", "kda, unbounded gate"}
    assert row.errors["flashkda"] == row.errors["kda"] | {"bound": None}
    assert row.host_us > row.add_us > 0 and row.waits is None and row.kernel_us == {"kernel": 5.0}
    row = ran["decode", "H=2 N=3"]
    assert set(row.ms) == {"kda_decode", "kda_decode, eager", "kda_decode, bf16 states", "kda, chain", "kda, recurrence"}
    assert set(row.failed) == {"vllm, chain", "vllm, recurrence"}  # which is not installed: told, and no fault of ours
    assert ran["accuracy", "bfloat16, bounded, H=2 T=88, 3 sequences"].errors["flashkda"]["bound"] is None

    report.write(results)
    text = (tmp_path / "report.md").read_text()
    for words in ("FlashKDA (CUTLASS), ms", "launched in us | torch's add_ |", "vLLM, chain: ModuleNotFoundError", "Targets: 0.7x vLLM's chain",
                  "| prefill: kda | FlashKDA (CUTLASS) |", "kda_decode, us", "their cost", "MiB a request"):  # fmt: skip
        assert words in text, words


@pytest.mark.skipif(GPU, reason="there is a real one")
def test_a_wait_for_the_gpu_is_told(pretended, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits():
        raise RuntimeError("called a synchronizing CUDA operation\nat ..")

    row = Row("ops", "row")
    Session("cpu", (), False, True, 1, 0.01, 1e10).launching(row, lambda: modes[-1:] == ["error"] and waits())
    assert row.waits == "called a synchronizing CUDA operation" and modes == ["error", 0]


def test_peers_that_are_missing_are_told(monkeypatch, tmp_path, measuring, capsys):
    monkeypatch.setattr(peers, "missing", lambda name: "ImportError: not there" if name == "transformers" else None)
    assert bench(tmp_path, "--peers", "transformers,reference") == 0
    assert "peer transformers is not here: ImportError: not there" in capsys.readouterr().out
    assert "not here: transformers, token by token (ImportError: not there)" in (tmp_path / "report.md").read_text()
    assert contents(tmp_path)["about"]["peers"] == ["reference"]
