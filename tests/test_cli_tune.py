# SPDX-License-Identifier: Apache-2.0
"""`kda tune`: sweeps on this machine's CPU end to end, what is dropped and why, and when a candidate wins."""

import csv
import itertools
import json
import math
import os
import runpy
import time
import types

import pytest
import torch
from helpers import BF16, INTERPRETED

pytest.importorskip("triton")
pytest.importorskip("llvmlite")
if INTERPRETED:
    pytest.skip("nothing is compiled there", allow_module_level=True)

import kda  # noqa: E402
from kda import known  # noqa: E402
from kda.cli import main, space, stopwatch, sweep, tables, trial, tune, tuner, using, verdict, workloads  # noqa: E402
from kda.cli import record as records  # noqa: E402
from kda.cli.trial import Outcome  # noqa: E402
from kda.cli.workloads import Work  # noqa: E402
from kda.triton import chunk, configs, walk  # noqa: E402
from kda.triton.configs import regimes, table  # noqa: E402
from kda.triton.configs.table import Row  # noqa: E402

if kda.backend_for("cpu") != "triton-cpu":
    pytest.skip("for Triton's backend named cpu", allow_module_level=True)

CPU = torch.device("cpu")
CONV, REGIME = "causal_conv1d_fwd", "prefill, to 1,024 tokens"
GOOD, WRONG, FAILING = {"BT": 32, "BD": 256}, {"BT": 2, "BD": 128}, {"BT": 8, "BD": 48}
SLOW = {"BT": 16, "BD": 1, "num_warps": 4}


def sweep_conv(folder, *more):
    return main(["tune", "--device", "cpu", "--small", "--kernel", CONV, "--regime", "to 1,024", "--jobs", "1", "--rounds", "6",
                 "--out", str(folder), *more])  # fmt: skip


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    """The processor that the tests run on has no table, as most have none."""
    others = tuple(module for module in table.modules() if not table.is_for(module.NAMES, table.device_name(CPU)))
    monkeypatch.setattr(table, "modules", lambda: others)
    table.of.cache_clear()
    yield
    table.of.cache_clear()


@pytest.fixture
def conv_space(monkeypatch):
    """A space with a candidate that is right, one that is wrong (its second program reads what the first one has
    overwritten) and one that no compiler takes; the configuration in use is a slow one, in this process."""
    monkeypatch.setitem(space.CPU, CONV, [GOOD, WRONG, FAILING])
    monkeypatch.setitem(configs.DEFAULTS, CONV, lambda **_: SLOW)
    monkeypatch.setattr(known, "_known", {})


# ------------------------------------------------------------------------------------------------------------ end to end


def test_a_sweep_drops_what_is_wrong_and_writes_the_winners_table(conv_space, tmp_path, capsys):
    assert sweep_conv(tmp_path) == 0
    out = capsys.readouterr().out
    trials = {row["config"]: row for row in rows(tmp_path / "trials.csv")}
    assert trials[records.text(GOOD)]["ok"] == trials["{}"]["ok"] == "True"
    assert trials[records.text(WRONG)]["why"].startswith("wrong: output error")
    assert "power of 2" in trials[records.text(FAILING)]["why"]
    assert out.count("dropped: ") == 2

    times = rows(tmp_path / "times.csv")
    assert [row["config"] for row in times].count(records.text(GOOD)) == 6
    assert {row["config"] for row in times} == {records.text(GOOD), "{}"}
    for row in times:
        assert float(row["ratio"]) == pytest.approx(float(row["ms"]) / float(row["former_ms"]), rel=1e-3)

    (path,) = tmp_path.glob("*.py")
    module = runpy.run_path(str(path))
    row = module["TABLE"][CONV][REGIME]
    assert module["TABLE"] == {CONV: {REGIME: row}} and isinstance(row, Row) and row.config == GOOD
    assert module["NAMES"] == configs.table.names_for(CPU) and path.name == configs.table.file_name(CPU)
    ratio = float(row.evidence.split("x")[0])
    assert ratio < 0.9 and "spread" in row.evidence and torch.__version__ in row.evidence
    assert "not for use" in module["__doc__"]


def test_an_interrupted_sweep_goes_on(conv_space, tmp_path, monkeypatch, capsys):
    timed, count = records.Record.timed, itertools.count(1)

    def interrupted(self, *args):
        timed(self, *args)
        if next(count) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(records.Record, "timed", interrupted)
    assert sweep_conv(tmp_path) == 130
    assert configs.overrides == {}
    first = (tmp_path / "times.csv").read_text()
    assert len(first.splitlines()) == 1 + 5
    with open(tmp_path / "times.csv", "a") as file:  # cut off while it was written
        file.write("2026-01-01T00:00:00+00:00,causal_conv")

    monkeypatch.setattr(records.Record, "timed", timed)
    monkeypatch.setattr(trial.Worker, "start", None)  # nothing is compiled and checked again
    assert sweep_conv(tmp_path) == 0
    assert (tmp_path / "times.csv").read_text().startswith(first)
    times = rows(tmp_path / "times.csv")
    places = [(row["round"], row["config"]) for row in times]
    assert sorted(places) == sorted((str(n), c) for n in range(6) for c in (records.text(GOOD), "{}"))
    assert len(list(tmp_path.glob("*.py"))) == 1

    before = (tmp_path / "times.csv").read_bytes()  # and once more there is nothing left to do
    assert sweep_conv(tmp_path) == 0
    assert (tmp_path / "times.csv").read_bytes() == before


def test_without_time_nothing_is_begun(conv_space, tmp_path, capsys):
    assert sweep_conv(tmp_path, "--minutes", "0") == 0
    out = capsys.readouterr().out
    assert f"out of time; the same command goes on with: {CONV}, {REGIME}" in out and "no table was written" in out
    assert rows(tmp_path / "trials.csv") == rows(tmp_path / "times.csv") == []


def test_measurements_of_other_kernels_are_not_gone_on_with(conv_space, tmp_path, monkeypatch, capsys):
    about = records.made_of("some device", True, 1)
    records.Record(tmp_path, about)
    assert sweep_conv(tmp_path) == 2
    assert "does not compare with this one (other device" in capsys.readouterr().err
    records.Record(tmp_path, about)  # as it was


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name a folder"),
        (["--rounds", "1", "--out", "x"], "--rounds must be at least 2, got 1"),
        (["--regime", "nowhere", "--out", "x"], "no regime has nowhere in its name"),
        (["--device", "tpu", "--out", "x"], "--device tpu cannot be used here"),
    ],
)
def test_refuses_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("minutes", ["-1", "nan"])
def test_refuses_times_that_are_none(tmp_path, capsys, minutes):
    assert main(["tune", "--minutes", minutes, "--out", str(tmp_path)]) == 2
    assert "--minutes must be at least 0.0" in capsys.readouterr().err


def test_a_full_disk_loses_nothing(conv_space, tmp_path, monkeypatch, capsys):
    """It ends in one sentence when the fourth measurement cannot be written, and goes on from the third."""
    opened, count = open, itertools.count(1)

    def full(path, *args, **kwargs):
        if os.path.basename(path) == "times.csv" and next(count) == 5:  # one for the header
            return opened("/dev/full", *args, **kwargs)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(records, "open", full, raising=False)
    assert sweep_conv(tmp_path) == 2
    err = capsys.readouterr().err
    assert "times.csv cannot be written (No space left on device): what was measured before is kept" in err
    first = (tmp_path / "times.csv").read_text()
    assert len(first.splitlines()) == 1 + 3 and not list(tmp_path.glob("*.py"))
    assert sweep_conv(tmp_path) == 0
    assert (tmp_path / "times.csv").read_text().startswith(first)
    assert len(rows(tmp_path / "times.csv")) == 12 and len(list(tmp_path.glob("*.py"))) == 1


def test_a_table_that_cannot_be_written_leaves_the_former_one(conv_space, tmp_path, monkeypatch, capsys):
    assert sweep_conv(tmp_path) == 0
    (path,) = tmp_path.glob("*.py")
    before = path.read_text()

    def full(self, text):
        with open(self, "w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.Path, "write_text", full)
    capsys.readouterr()
    assert sweep_conv(tmp_path) == 2
    assert "the measurements are kept, and the same command writes it" in capsys.readouterr().err
    assert path.read_text() == before and sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [path.name, "about.json", "times.csv", "trials.csv"])  # fmt: skip


def test_a_record_that_was_cut_short_anywhere_is_read(tmp_path, capsys):
    """At every byte of its files: rows before the cut count, and what is written next is read again."""
    found = records.Record(tmp_path, {})
    for n in range(2):
        found.timed(("part", "regime, of two"), "size", n, {"BV": n}, 1.0 + n, 1.0)
    whole = (tmp_path / "times.csv").read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        (tmp_path / "times.csv").write_bytes(whole[:cut])
        again = records.Record(tmp_path, {})
        kept = max(sum(end <= cut for end in ends) - 1, 0)
        assert len(again.ratios.get(("part", "regime, of two"), {})) == kept
        again.timed(("part", "regime, of two"), "size", 0, {"BV": 5}, 1.0, 1.0)
        assert len(records.Record(tmp_path, {}).ratios["part", "regime, of two"]) == kept + 1
    assert capsys.readouterr().err == ""


def test_a_line_that_is_no_measurement_is_left_out_and_said(tmp_path, capsys):
    found = records.Record(tmp_path, {})
    found.timed(("part", "regime"), "size", 0, {}, 1.0, 1.0)
    with open(tmp_path / "times.csv", "ab") as file:
        file.write(b"\0\0\xff,x\nnow,part,regime,size,1,{},fast,1.0,1.0\n")
    found.timed(("part", "regime"), "size", 1, {}, 1.0, 2.0)
    again = records.Record(tmp_path, {})
    assert again.ratios["part", "regime"]["{}"]["size"] == [1.0, 0.5]
    err = capsys.readouterr().err.splitlines()
    assert [line.partition("times.csv")[2] for line in err] == [f", line {n} is left out: it is no measurement" for n in (3, 4)]


def test_a_record_of_another_version_is_not_gone_on_with(tmp_path):
    records.Record(tmp_path, dict(torch="2.11", sources="a"))
    with pytest.raises(records.CommandError, match="other torch, kernels or tables.: name another folder"):
        records.Record(tmp_path, dict(torch="2.13", sources="b"))
    (tmp_path / "about.json").write_text("")
    with pytest.raises(records.CommandError, match="its about.json cannot be read"):
        records.Record(tmp_path, dict(torch="2.11", sources="a"))
    (tmp_path / "about.json").unlink()
    (tmp_path / "times.csv").write_text("when,what\n")
    with pytest.raises(records.CommandError, match="does not compare"):
        records.Record(tmp_path, dict(torch="2.11", sources="a"))
    with pytest.raises(records.CommandError, match="times.csv is of another version"):
        records.Record(tmp_path, {})


def test_a_table_of_another_version_is_named_before_anything_is_compiled(conv_space, tmp_path, monkeypatch, capsys):
    rows_ = {CONV: {REGIME: Row({"BT": 8, "LANES": 2}, "planted")}, "kda_decode": {"all": Row({"BV": 8}, "planted")}}
    module = types.SimpleNamespace(NAMES=table.names_for(CPU), TABLE=rows_, __file__="configs/some.py")
    monkeypatch.setattr(table, "modules", lambda: (module,))
    table.of.cache_clear()
    assert sweep_conv(tmp_path) == 2
    table.of.cache_clear()
    err = capsys.readouterr().err
    assert f"configs/some.py is of another version ({CONV}, {REGIME} has LANES; kda_decode, all is no regime): remove these" in err
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_in_use_that_is_wrong_costs_its_regime_and_the_exit_status(conv_space, tmp_path, monkeypatch, capsys):
    """The other regimes are swept all the same."""
    monkeypatch.setattr(trial.Workers, "try_all", lambda self, items, ended, *_: [
        ended(item, Outcome(item["part"] != CONV or item["config"] != {}, "wrong: output", code=str(item["config"]))) for item in items])
    monkeypatch.setattr(tuner.Sweep, "go", lambda self: True)
    args = ["tune", "--device", "cpu", "--small", "--kernel", CONV, "--kernel", "rms_norm_gated", "--regime", "1", "--rounds", "6"]
    assert main([*args, "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"WRONG {CONV}, {REGIME}: the configuration in use does not pass itself" in out and out.count("WRONG") >= 1
    assert "rms_norm_gated, 128: none gains" in out


def test_other_regimes_winners_stay_in_the_table(conv_space, tmp_path, monkeypatch):
    """A second command for another kernel writes the first one's rows too, from their measurements."""
    assert sweep_conv(tmp_path) == 0
    monkeypatch.setattr(tuner.Sweep, "go", lambda self: True)
    args = ["tune", "--device", "cpu", "--small", "--kernel", "rms_norm_gated", "--sample", "1", "--jobs", "1", "--rounds", "6"]
    for path in tmp_path.glob("*.py"):
        path.unlink()
    assert main([*args, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.py")
    assert runpy.run_path(str(path))["TABLE"][CONV][REGIME].config == GOOD


def test_list_names_every_regime(capsys):
    assert main(["tune", "--list", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(sizes) for part, sizes in space.SIZES.items() if space.CPU[part])
    assert tuple(space.SIZES) == tune.PARTS == tuple(space.CPU) == tuple(space.GPU)
    assert set(space.SIZES) == set(regimes.REGIMES)


# ---------------------------------------------------------------------------------------------------------------- trials


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Processes that do what the candidate's name says: die, sleep, have no room; `once` dies the first time only."""
    text = f"""
import json, os, sys, time
for line in sys.stdin:
    name, seen = json.loads(line)['config'], {str(tmp_path / "seen")!r}
    if name == 'dies' or name == 'once' and not os.path.exists(seen):
        open(seen, 'w').close()
        os.kill(os.getpid(), 9)
    if name == 'sleeps':
        time.sleep(60)
    print(json.dumps(dict(fatal='OSError: full') if name == 'full' else dict(ok=True, why=name)), flush=True)
"""
    popen = trial.subprocess.Popen
    monkeypatch.setattr(trial.subprocess, "Popen", lambda command, **kwargs: popen([command[0], "-c", text], **kwargs))


def tried(names, jobs=1, end_at=math.inf):
    ended = {}
    with trial.Workers("cpu", jobs) as workers:
        workers.try_all([dict(config=n) for n in names], lambda item, outcome: ended.update({item["config"]: outcome}), math.inf,
                        end_at)  # fmt: skip
    return ended


def test_a_process_that_dies_costs_one_candidate_and_only_if_it_dies_again(script):
    ended = tried(["a", "once", "b", "dies", "c"])
    assert ended["dies"] == Outcome(False, "its process was ended by SIGKILL, and again")
    assert all(ended[n] == Outcome(True, n) for n in ("a", "b", "c", "once"))


def test_no_candidate_is_dropped_for_a_full_disk(script):
    with pytest.raises(trial.CommandError, match="OSError: full.*what was measured is kept, and the same command goes on"):
        tried(["a", "full"])
    error = RuntimeError("while compiling")
    error.__cause__ = OSError(28, "No space left on device")
    assert trial.not_its_fault(error) and trial.not_its_fault(torch.OutOfMemoryError()) and not trial.not_its_fault(RuntimeError())


def test_what_compiles_for_too_long_is_given_up_at_the_end(script):
    begin = time.monotonic()
    ended = tried(["a", "sleeps", "b"], end_at=begin + 2)
    assert set(ended) <= {"a", "b"} and time.monotonic() - begin < 20


def test_processes_stay_for_the_next_part(script):
    with trial.Workers("cpu", 1) as workers:
        for _ in range(2):
            workers.try_all([dict(config="a")], lambda *_: None, math.inf, math.inf)
            (worker,) = workers.all
            first = getattr(workers, "first", worker.process.pid)
            workers.first = first
            assert worker.process.pid == first
    assert worker.process is None


def test_what_spills_more_than_the_former_is_dropped(tmp_path):
    regime = sweep.Regime("kda_decode", "some", (), [{"BV": 1}, {"BV": 2}, {"BV": 3}])
    found = records.Record(tmp_path, {})
    for config, spills in (({}, 4), ({"BV": 1}, 4), ({"BV": 2}, 5), ({"BV": 3}, None)):
        found.tried(regime.key, config, Outcome(True, spills=spills, code="used" if config in ({}, {"BV": 1}) else "other"))
    tuner.Tuner([regime], found, CPU, None, 8, math.inf, True).drop(regime)
    again = records.Record(tmp_path, {}).trials[regime.key]
    assert [again[records.text(c)].ok for c in ({}, *regime.candidates)] == [True, False, False, True]
    assert again[records.text({"BV": 1})].why == "the configuration in use"
    assert again[records.text({"BV": 2})].why == "spills 5 registers, the former configuration 4"


class InThisProcess:
    """Stands for `trial.Workers`; `launched` has the options of what every item launched."""

    def __init__(self, monkeypatch):
        from triton.runtime.jit import JITFunction

        monkeypatch.setattr(JITFunction, "run", JITFunction.run)  # which a Trial replaces
        self.trial, self.launched = trial.Trial(CPU), []

    def try_all(self, items, ended, *_):
        for item in items:
            with kda.use_backend("triton"):
                ended(item, self.trial(**json.loads(json.dumps(item))))
            self.launched.append((item["config"], [kernel.metadata.num_warps for kernel in self.trial.compiled]))


def swept(folder, monkeypatch, part, name, works, candidates):
    """(outcomes by configuration, what each launched) of a regime whose candidates are compiled and checked."""
    regime, found, workers = sweep.Regime(part, name, works, candidates), records.Record(folder, {}), InThisProcess(monkeypatch)
    tuner.Tuner([regime], found, CPU, workers, 8, math.inf, True).try_candidates([regime], math.inf)
    return found.trials[regime.key], workers.launched


def test_the_configuration_in_use_is_the_one_of_the_timed_size(tmp_path, monkeypatch):
    """The gate's tile grows with the tokens, so it is another one where results are checked: that one is to be timed."""
    works = (Work(1, (2048,)), Work(1, (3000,)))
    candidates = [{"BT": BT, "BH": 1, "num_warps": 4} for BT in (1, 2)]
    assert [using.in_use("fused_kda_gate", work, CPU)["BT"] for work in (works[0].short(), *works)] == [1, 2, 2]
    tried_, _ = swept(tmp_path, monkeypatch, "fused_kda_gate", "K of 128, more tokens", works, candidates)
    assert tried_[records.text(candidates[0])].ok
    assert tried_[records.text(candidates[1])].why == "the configuration in use"


def test_only_what_is_in_use_at_all_timed_sizes_is_no_candidate(tmp_path, monkeypatch):
    works = (Work(1, (2048,)), Work(1, (5000,)))
    candidates = [{"BT": BT, "BH": 1, "num_warps": 4} for BT in (2, 4)]
    assert [using.in_use("fused_kda_gate", work, CPU)["BT"] for work in works] == [2, 4]
    tried_, _ = swept(tmp_path, monkeypatch, "fused_kda_gate", "K of 128, more tokens", works, candidates)
    assert all(outcome.ok for outcome in tried_.values()) and len(tried_) == 3


def test_entries_that_a_candidate_leaves_to_the_default_are_those_of_the_timed_size(tmp_path, monkeypatch):
    works = (Work(32, (1,)), Work(32, (4096,)))
    _, launched = swept(tmp_path, monkeypatch, "rms_norm_gated", "128", works, [{"BR": 32, "BD": 128}])
    assert launched == [({}, [4, 2]), ({"BR": 32, "BD": 128}, [4, 2])]


# -------------------------------------------------------------------------------------------------- verdicts and rounds


def around(center, width, count=8):
    return [center + width * (2 * n / (count - 1) - 1) for n in range(count)]


@pytest.mark.parametrize(
    "candidate, former, wins",
    [
        (dict(a=around(0.9, 0.02)), dict(a=around(1, 0.02)), True),
        (dict(a=around(0.97, 0.08)), dict(a=around(1, 0.01)), False),  # within its own spread
        (dict(a=around(0.97, 0.01)), dict(a=around(1, 0.08)), False),  # within the former's
        (dict(a=around(0.995, 0.0)), dict(a=around(1, 0.0)), False),  # not worth a change
        (dict(a=around(0.8, 0.01), b=around(1.05, 0.01)), dict(a=around(1, 0.01), b=around(1, 0.01)), False),  # loses on b
        (dict(a=around(0.8, 0.01), b=around(1.004, 0.01)), dict(a=around(1, 0.01), b=around(1, 0.01)), True),
        (dict(a=around(0.8, 0.01), b=around(1.03, 0.08)), dict(a=around(1, 0.01), b=around(1, 0.08)), False),  # noise is no excuse
        (dict(a=around(0.8, 0.01), b=[0.8]), dict(a=around(1, 0.01), b=[1.0]), False),  # no spread is known
    ],
)
def test_a_winner_gains_more_than_the_spread_and_loses_nowhere(candidate, former, wins):
    found = verdict.judge(candidate, former)
    assert found.wins == wins, found
    assert found.gain == pytest.approx(1 - math.prod(found.medians.values()) ** (1 / len(candidate)))


def test_clear_losers():
    assert verdict.hopeless(dict(a=[1.2, 1.1, 1.06])) and verdict.hopeless(dict(a=[0.5] * 3, b=[2.1, 2.2]))
    assert not verdict.hopeless(dict(a=[1.2, 1.1, 1.04])) and not verdict.hopeless(dict(a=[1.2, 1.9], b=[3.0]))


class Fake:
    """A stopwatch on a machine that becomes one percent slower with each call; times by candidate."""

    def __init__(self, speed):
        self.speed, self.calls, self.asked = speed, 0, []

    def __call__(self, config, work):
        self.calls += 1
        self.asked.append(config)
        return self.speed[records.text(config)] * 1.01**self.calls

    def agrees(self, config, work):
        return Outcome(True)

    def drop(self, config):
        pass

    def broken(self):
        return False


def faked(tmp_path, speeds, rounds=8, deadline=math.inf):
    candidates = [{"BV": n} for n in range(len(speeds))]
    regime = sweep.Regime("kda_decode", "some", (Work(2, (1,)), Work(2, (1, 1))), candidates)
    found = records.Record(tmp_path, {})
    for config in ({}, *candidates):
        found.tried(regime.key, config, Outcome(True))
    watch = Fake({records.text(c): s for c, s in zip([{}, *candidates], [1.0, *speeds])})
    return sweep.Sweep(regime, found, watch, rounds, deadline)


def test_drift_is_no_gain_and_no_loss(tmp_path):
    """Every candidate is timed beside the former one: that the machine slows down 250-fold meanwhile does not show."""
    made = faked(tmp_path, [1.0, 0.95, 0.97, 1.02])
    assert made.go()
    assert made.watch.calls > 150
    config, found = made.winner()
    assert config == {"BV": 1} and found.gain == pytest.approx(0.05, abs=2e-4)
    assert all(r == pytest.approx(1, abs=2e-4) for samples in made.ratios({}).values() for r in samples)
    asked = made.watch.asked
    assert all({} in pair for pair in zip(asked, asked[1:])), "two candidates without the former configuration between them"


def test_none_wins_where_all_are_alike(tmp_path):
    made = faked(tmp_path, [1.0, 1.001, 0.999])
    assert made.go() and made.winner() is None


def test_losers_stop_early_and_the_order_is_another_in_each_round(tmp_path):
    made = faked(tmp_path, [0.9, 1.3, 3.0, 1.0, 1.01, 1.02, 1.03])
    assert made.go()
    lengths = [[len(samples) for samples in made.ratios({"BV": n}).values()] for n in range(7)]
    # three samples show a loser, two one that is hopeless, half of the rounds leave four candidates
    assert lengths == [[8, 8], [3, 3], [2, 2], [8, 8], [8, 8], [8, 8], [4, 4]]
    times = [row for row in rows(tmp_path / "times.csv") if row["size"] == "H=2 T=1 x 1"]
    orders = {tuple(row["config"] for row in times if row["round"] == n) for n in "4567"}
    assert len(orders) > 1 and len({frozenset(order) for order in orders}) == 1


def test_a_sweep_that_ends_early_is_judged_by_what_it_has(tmp_path):
    """Six rounds that chose and three more are enough for a verdict, one is not."""
    made = faked(tmp_path, [0.9, 1.01], rounds=12)
    found = []
    made.tick = lambda round, candidates: found.append((round, made.winner()))
    assert made.go()
    assert [round for round, winner in found if winner] == [9, 10, 11, 12]


def test_with_little_time_the_best_are_chosen_early(tmp_path, monkeypatch):
    """Ten candidates for twelve rounds in the time of eight rounds: a verdict all the same."""
    clock = [0.0]
    monkeypatch.setattr(sweep.time, "monotonic", lambda: clock[0])
    speeds = [1.0, 0.9, *[1.02 + n / 1000 for n in range(8)]]
    made = faked(tmp_path, speeds, rounds=12)
    call = made.watch.__class__.__call__

    def timed(self, config, work):
        clock[0] += 1.0
        return call(self, config, work)

    monkeypatch.setattr(Fake, "__call__", timed)
    made.deadline = 2 * 2 * 11 * 8.0
    assert made.go() and made.half < 6
    assert made.winner()[0] == {"BV": 1}
    assert clock[0] <= made.deadline


@pytest.mark.parametrize("error, said", [(OSError(28, "No space left"), "measurements are kept"), (RuntimeError("bad"), None)])
def test_a_candidate_that_fails_while_it_is_timed(tmp_path, error, said):
    made = faked(tmp_path, [0.5, 0.9])
    call = made.watch.__call__

    class Failing(Fake):
        def __call__(self, config, work):
            if config == {"BV": 0}:
                raise error
            return call(config, work)

    made.watch = Failing(made.watch.speed)
    again = records.Record(tmp_path, {}).trials[made.regime.key]
    if said:
        with pytest.raises(sweep.CommandError, match=said):
            made.go()
        assert again[records.text({"BV": 0})].ok  # not its fault
    else:
        assert made.go() and made.winner()[0] == {"BV": 1}
        assert records.Record(tmp_path, {}).trials[made.regime.key][records.text({"BV": 0})].why == "RuntimeError: bad"


def test_a_gpu_that_no_longer_answers_ends_the_sweep_without_the_candidate(tmp_path):
    made = faked(tmp_path, [0.5, 0.9])

    def fails(config, work):
        raise RuntimeError("CUDA error: an illegal memory access")

    made.watch.agrees, made.watch.broken = fails, lambda: True
    with pytest.raises(sweep.CommandError, match="illegal memory access: the GPU no longer answers; the same command goes on"):
        made.go()
    assert sum(not outcome.ok for outcome in records.Record(tmp_path, {}).trials[made.regime.key].values()) == 1


def test_out_of_time_then_on(tmp_path):
    made = faked(tmp_path, [0.9], deadline=-math.inf)
    assert not made.go() and made.watch.calls == 0
    made.deadline = math.inf
    assert made.go() and made.winner()[0] == {"BV": 0}


def test_a_result_that_differs_at_full_size_is_out(tmp_path):
    made = faked(tmp_path, [0.5, 0.9])
    made.watch.agrees = lambda config, work: Outcome(config != {"BV": 0}, "not the former's result")
    assert made.go() and made.winner()[0] == {"BV": 1}
    assert made.ratios({"BV": 0}) == {}
    assert not records.Record(tmp_path, {}).trials[made.regime.key][records.text({"BV": 0})].ok


# ------------------------------------------------------------------------------------------------ one kernel, configured


def test_overrides_hold_for_launches_that_are_repeated(monkeypatch):
    """A call is launched again from addresses as it was before, until a configuration is put in, and after it is gone."""
    asked, pick = [], configs.pick
    monkeypatch.setattr(configs, "pick", lambda kernel, **shape: asked.append(pick(kernel, **shape)) or asked[-1])
    monkeypatch.setattr(known, "_known", {})
    call = workloads.make("fused_recurrent", Work(2, (1, 1)), CPU).call
    with kda.use_backend("triton"):
        for config in ({}, {"BV": 32}, {}):
            with using.using("fused_recurrent", config):
                for _ in range(3):
                    call()
                (called,) = known._known.values()
                (seen,) = called.all.values()
                assert len(seen.launches) == 1
        call()
    assert [found["BV"] for found in asked] == [128, 32, 128, 128]
    assert configs.overrides == {}


@pytest.mark.parametrize("part, own", [("chunk_intra", chunk.chunk_intra_kernel), ("chunk_walk", walk.chunk_walk_kernel)])
def test_a_kernel_alone_works_on_what_the_others_left(part, own, monkeypatch):
    """Only it is launched, and what it computes is what it does in the operation."""
    from triton.runtime.jit import JITFunction

    launched = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: launched.append(kernel) or run(kernel, *args, **kwargs))
    work = Work(2, (70, 20), D=128)
    watch = stopwatch.Stopwatch(part, CPU)
    with kda.use_backend("triton"):
        want, state = watch.case(work).call()
        with watch.ready({}, work) as call:
            launched.clear()
            known.forget()
            got, last = call()
            assert launched == [own]
            call()
        if part == "chunk_walk":
            assert torch.equal(got, want) and torch.equal(last, state)
        for launch in (chunk._intra, walk._walk, walk._combine):
            assert isinstance(launch.kernel, JITFunction)
        assert watch({}, work) > 0


class Graphs:
    """Stands for CUDA graphs: what was called while one was captured takes `ms` each when it is replayed."""

    def __init__(self, monkeypatch, ms):
        self.ms, self.captured, self.clock, self.now = ms, [], 0.0, None
        graphs = self

        class Graph:
            calls = 0

            def replay(self):
                graphs.clock += graphs.ms * self.calls

        class Capture:
            def __init__(self, graph, pool):
                self.graph = graph

            def __enter__(self):
                graphs.now = self.graph
                graphs.captured.append(self.graph)

            def __exit__(self, *error):
                graphs.now = None

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = graphs.clock

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        for name, what in dict(CUDAGraph=Graph, graph=Capture, Event=Event, synchronize=lambda device=None: None).items():
            monkeypatch.setattr(torch.cuda, name, what)

    def call(self):
        if self.now is not None:
            self.now.calls += 1


@pytest.mark.parametrize("ms, calls", [(0.005, 200), (0.4, 3), (3.0, 1), (1e-5, 256)])
def test_on_a_gpu_a_graph_of_as_many_calls_as_take_a_millisecond_is_timed(monkeypatch, ms, calls):
    graphs = Graphs(monkeypatch, ms)
    watch, work = stopwatch.Stopwatch("rms_norm_gated", CPU), Work(2, (1,))
    watch.memory = None
    call = workloads.make("rms_norm_gated", work, CPU).call
    watch.cases[work] = workloads.Case(lambda: (graphs.call(), call()), None)
    with kda.use_backend("triton"):
        for config in ({}, {"BR": 32}):
            for _ in range(2):
                assert watch._on_gpu(config, work) == pytest.approx(ms)
    # The first one only to see how long a call takes; one for each candidate, replayed again and again.
    assert [graph.calls for graph in graphs.captured] == [stopwatch.SOME, calls, calls]
    watch.drop({"BR": 32})
    assert [key[0] for key in watch.graphs] == [stopwatch.key_of({})]


@pytest.mark.parametrize("part", ["kda_decode", "kda_verify", "kda_commit", "fused_recurrent", "causal_conv1d_update"])
def test_states_are_not_those_of_the_call_before(part, monkeypatch):
    """As in serving, where the states of all other layers pass through the caches between two steps of one."""
    monkeypatch.setattr(workloads, "COLD", 1 << 20)
    work = Work(2, (1, 1), D=64)
    case = workloads.make(part, work, CPU)
    with kda.use_backend("triton"):
        case.call()
    sets = [next(case.call.sets) for _ in range(600)]
    seen = [tuple(slots.tolist()) for slots, *_ in sets]
    count = len(set(seen))
    assert 1 < count <= workloads.MOST_SETS and seen[:count] == seen[count : 2 * count]
    slots, *pools = sets[0]
    of_a_set = sum(pool[0].numel() * pool.element_size() for pool in pools) * len(slots)
    assert count == workloads.MOST_SETS or (count - 1) * of_a_set < workloads.COLD <= count * of_a_set
    assert sorted(slot for found in set(seen) for slot in found) == list(range(1, 2 * count + 1))  # no slot in two sets
    assert all(x[0].data_ptr() % 16 == 0 for x in sets)  # one kernel for all of them
    for pool in pools:
        assert len(pool) == 2 * count + 1


# --------------------------------------------------------------------------------------------------- what is declared


ON_CPU = [part for part in space.SIZES if space.CPU[part]]


CASES = [(part, name) for part, sizes in space.SIZES.items() for name in sizes]


@pytest.mark.parametrize("part, name", CASES)
def test_sizes_are_in_their_regime(part, name):
    sizes = space.SIZES[part][name]
    for work in itertools.chain(*sizes):
        assert regimes.find(part, using.shape(using.kernel_of(part), work, CPU)) == name, work
    assert sizes.gpu and bool(sizes.cpu) == bool(space.CPU[part])
    for works in sizes:
        assert len({work.name for work in works}) == len(works)
    assert set(space.SIZES[part]) == set(regimes.REGIMES[part])


@pytest.mark.parametrize("part, name", [case for case in CASES if case[0] in ON_CPU])
def test_launchers_ask_as_the_sizes_say(part, name, monkeypatch):
    """So that the regimes above are those which a sweep's launches are in, and the configuration in use is theirs."""
    asked, pick = [], configs.pick
    monkeypatch.setattr(configs, "pick", lambda kernel, **shape: asked.append((kernel, shape)) or pick(kernel, **shape))
    monkeypatch.setattr(known, "_known", {})
    work = space.SIZES[part][name].small[0]
    with kda.use_backend("triton"):
        workloads.make(part, work, CPU).call()
    kernel, got = asked[0]
    assert kernel == using.kernel_of(part) and got.items() <= using.shape(kernel, work, CPU).items()
    assert regimes.find(part, got) == name


@pytest.mark.parametrize("part, device", [(p, d) for p in space.SIZES for d in ("cpu", "cuda") if d == "cuda" or p in ON_CPU])
def test_candidates_name_the_same_entries_each(part, device):
    found = space.candidates(part, torch.device(device))
    assert len({records.text(c) for c in found}) == len(found) > 1
    assert len({frozenset(c) for c in found}) == 1
    work = next(iter(space.SIZES[part].values())).gpu[0]
    kernel = using.kernel_of(part)
    default = configs.DEFAULTS[kernel](**using.shape(kernel, work, torch.device(device)))
    assert set(found[0]) <= set(default)


@pytest.mark.parametrize("part", ON_CPU)
def test_the_oracle_finds_a_planted_error(part):
    """Every output counts: each is checked against the oracle, and one that is off is named."""
    work = next(iter(space.SIZES[part].values())).small[0].short()
    with kda.use_backend("triton"):
        outputs = workloads.make(part, work, CPU).outputs(True)
    assert workloads.wrong(outputs) is None
    for n, output in enumerate(outputs):
        off = output._replace(got=output.got.float() * (1 + 2 * output.bound + 1e-6))
        assert workloads.wrong([*outputs[:n], off, *outputs[n + 1:]]).startswith(output.what)


# ---------------------------------------------------------------------------------------------------------------- table


def test_a_table_keeps_former_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "device_name", lambda device: "NVIDIA H200")
    new = {"kda_verify": {"bf16 states, 128 x 128": Row({"BV": 64}, 'found "fast" ' + "and so on " * 20)},
           "chunk_walk": {"bf16, 128 x 128, few heads": Row({"BV": 32, "walk": {"num_warps": 2, "num_stages": 3}}, "new")}}  # fmt: skip
    name, source = tables.source(torch.device("cuda", 0), "Changed.", new)
    (tmp_path / name).write_text(source)
    from kda.triton.configs import nvidia_h200

    module = runpy.run_path(str(tmp_path / name))
    assert name == "nvidia_h200.py" and module["NAMES"] == nvidia_h200.NAMES and "Changed." in module["__doc__"]
    want = {part: dict(found) for part, found in nvidia_h200.TABLE.items()}
    for part, found in new.items():
        want.setdefault(part, {}).update(found)
    assert module["TABLE"] == want
    assert list(module["TABLE"]) == [part for part in regimes.REGIMES if part in want]
    assert max(map(len, source.splitlines())) <= 125
    monkeypatch.setattr(table, "module_of", lambda name: types.SimpleNamespace(__file__=name, **{
        k: module[k] for k in ("__doc__", "NAMES", "TABLE")}))  # fmt: skip
    assert tables.source(torch.device("cuda", 0), "Changed.", {})[1] == source, "said once"


def test_a_tables_module_is_named_after_the_device(monkeypatch):
    monkeypatch.setattr(table, "device_name", lambda device: "NVIDIA H200")
    assert table.file_name(torch.device("cuda", 0)) == "nvidia_h200.py"
    xeon = table.Processor("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.00GHz", "Intel", "6", "143")
    monkeypatch.setattr(table, "processor", lambda: xeon)
    monkeypatch.setattr(table, "processor_path", lambda: "amx")
    assert table.file_name(CPU) == "intel_xeon_platinum_8481c_cpu_2_00ghz_6_143_amx.py"
    assert table.names_for(CPU) == ("Intel family 6 model 143, amx",)


def test_sizes_go_to_other_processes_and_back():
    work = Work(4, (3, 5), D=64, bounded=False, state_dtype=BF16)
    assert trial.work_of(json.loads(json.dumps(trial.facts_of(work)))) == work
