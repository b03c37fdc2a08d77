# SPDX-License-Identifier: Apache-2.0
"""`kda tune`: sweeps on this machine's CPU end to end, what is dropped and why, and when a candidate wins."""

import csv
import itertools
import json
import math
import os
import runpy
import signal

import pytest
import torch
from helpers import BF16, INTERPRETED

pytest.importorskip("triton")
pytest.importorskip("llvmlite")
if INTERPRETED:
    pytest.skip("nothing is compiled there", allow_module_level=True)

import kda  # noqa: E402
from kda import validation  # noqa: E402
from kda.cli import main, space, stopwatch, sweep, tables, trial, tune, using, verdict, workloads  # noqa: E402
from kda.cli import record as records  # noqa: E402
from kda.cli.trial import Outcome  # noqa: E402
from kda.cli.workloads import Work  # noqa: E402
from kda.triton import chunk, configs, walk  # noqa: E402
from kda.triton.configs import regimes  # noqa: E402
from kda.triton.configs.table import Row  # noqa: E402

if kda.backend_for("cpu") != "triton-cpu":
    pytest.skip("for Triton's backend named cpu", allow_module_level=True)

CPU = torch.device("cpu")
CONV, REGIME = "causal_conv1d_fwd", "prefill, to 1,024 tokens"
GOOD, WRONG, FAILING = {"BT": 32, "BD": 256}, {"BT": 2, "BD": 128}, {"BT": 12, "BD": 64}
SLOW = {"BT": 16, "BD": 1, "num_warps": 4}


def sweep_conv(folder, *more):
    return main(["tune", "--device", "cpu", "--small", "--kernel", CONV, "--regime", "to 1,024", "--jobs", "1", "--rounds", "6",
                 "--out", str(folder), *more])  # fmt: skip


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def conv_space(monkeypatch):
    """A space with a candidate that is right, one that is wrong (its second program reads what the first one has
    overwritten) and one that no compiler takes; the configuration in use is a slow one, in this process."""
    monkeypatch.setitem(space.CPU, CONV, [GOOD, WRONG, FAILING])
    monkeypatch.setitem(configs.DEFAULTS, CONV, lambda **_: SLOW)
    monkeypatch.setattr(validation, "_seen", {})


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
    assert module["NAMES"] == (configs.table.processor(),)
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
    monkeypatch.setattr(trial, "Worker", None)  # nothing is compiled and checked again
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


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path):
    found = records.Record(tmp_path, {})
    found.timed(("part", "regime"), "size", 0, {}, 1.0, 1.0)
    os.rename(tmp_path / "times.csv", tmp_path / "kept.csv")
    (tmp_path / "times.csv").mkdir()
    with pytest.raises(records.CommandError, match="cannot be written.*goes on from there"):
        found.timed(("part", "regime"), "size", 1, {}, 1.0, 1.0)
    assert len(rows(tmp_path / "kept.csv")) == 1


def test_list_names_every_regime(capsys):
    assert main(["tune", "--list", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, space.SIZES.values()))
    assert tuple(space.SIZES) == tune.PARTS == tuple(space.CPU) == tuple(space.GPU)


# ---------------------------------------------------------------------------------------------------------------- trials


def test_a_process_that_dies_costs_one_candidate(monkeypatch):
    script = (
        "import json, os, sys\nfor line in sys.stdin:\n    item = json.loads(line)\n"
        "    if item['config'] == 'dies': os.kill(os.getpid(), 9)\n    print(json.dumps(dict(ok=True, why=item['config'])), flush=True)"
    )
    popen = trial.subprocess.Popen
    monkeypatch.setattr(trial.subprocess, "Popen", lambda command, **kwargs: popen([command[0], "-c", script], **kwargs))
    ended = {}
    names = ["a", "dies", "b", "c"]
    trial.try_all([dict(config=n) for n in names], "cpu", 1, lambda item, outcome: ended.update({item["config"]: outcome}),
                  lambda: False)  # fmt: skip
    assert set(ended) == set(names)
    assert ended["dies"] == Outcome(False, f"its process ended with status {-signal.SIGKILL}")
    assert all(ended[n] == Outcome(True, n) for n in "abc")


def test_what_spills_more_than_the_former_is_dropped(tmp_path):
    regime = sweep.Regime("kda_decode", "some", (), [{"BV": 1}, {"BV": 2}, {"BV": 3}])
    found = records.Record(tmp_path, {})
    for config, spills in (({}, 4), ({"BV": 1}, 4), ({"BV": 2}, 5), ({"BV": 3}, None)):
        found.tried(regime.key, config, Outcome(True, spills=spills))
    tune.drop_spilling(regime, found)
    again = records.Record(tmp_path, {}).trials[regime.key]
    assert [again[records.text(c)].ok for c in ({}, *regime.candidates)] == [True, True, False, True]
    assert again[records.text({"BV": 2})].why == "spills 5 registers, the former configuration 4"


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
    monkeypatch.setattr(validation, "_seen", {})
    call = workloads.make("fused_recurrent", Work(2, (1, 1)), CPU).call
    with kda.use_backend("triton"):
        for config in ({}, {"BV": 32}, {}):
            with using.using("fused_recurrent", config):
                for _ in range(3):
                    call()
                (seen,) = validation._seen.values()
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
            validation._seen.clear()
            got, last = call()
            assert launched == [own]
            call()
        if part == "chunk_walk":
            assert torch.equal(got, want) and torch.equal(last, state)
        for launch in (chunk._intra, walk._walk, walk._combine):
            assert isinstance(launch.kernel, JITFunction)
        assert watch({}, work) > 0


# --------------------------------------------------------------------------------------------------- what is declared


def shape(part, work, device):
    """What launchers tell `pick` about a workload."""
    N, T, longest, H, D = len(work.lens), sum(work.lens), max(work.lens), work.H, work.D
    states = dict(K=D, V=D, itemsize=work.state_dtype.itemsize)
    kinds = {
        "chunk": dict(N=N, HV=H, K=D, V=D, T=T, dtype=work.dtype, bounded=work.bounded),
        "kda_decode": states, "kda_verify": states,
        "fused_recurrent": dict(N=N, HV=H, K=D, V=D, T=T),
        "causal_conv1d_fwd": dict(dim=3 * H * D, T=T),
        "causal_conv1d_update": dict(dim=3 * H * D, window=longest),
        "rms_norm_gated": dict(D=D),
    }  # fmt: skip
    return kinds[part] | dict(device=device)


def kernel_of(part):
    return "chunk" if part.startswith("chunk") else part


CASES = [(part, name) for part, sizes in space.SIZES.items() for name in sizes]


@pytest.mark.parametrize("part, name", CASES)
def test_sizes_are_in_their_regime(part, name):
    sizes = space.SIZES[part][name]
    for work in itertools.chain(*sizes):
        assert regimes.find(part, shape(kernel_of(part), work, CPU)) == name, work
    for works in sizes:
        assert works and len({work.name for work in works}) == len(works)
    assert set(space.SIZES[part]) == set(regimes.REGIMES[part])


@pytest.mark.parametrize("part", space.SIZES)
def test_launchers_ask_as_the_sizes_say(part, monkeypatch):
    """So that the regimes above are those which a sweep's launches are in."""
    asked, pick = [], configs.pick
    monkeypatch.setattr(configs, "pick", lambda kernel, **shape: asked.append((kernel, shape)) or pick(kernel, **shape))
    monkeypatch.setattr(validation, "_seen", {})
    work = next(iter(space.SIZES[part].values())).small[0]
    with kda.use_backend("triton"):
        workloads.make(part, work, CPU).call()
    kernel, got = asked[0]
    assert kernel == kernel_of(part) and got == shape(kernel, work, CPU)


@pytest.mark.parametrize("part", space.SIZES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_candidates_name_the_same_entries_each(part, device):
    found = space.candidates(part, torch.device(device))
    assert len({records.text(c) for c in found}) == len(found) > 1
    assert len({frozenset(c) for c in found}) == 1
    work = next(iter(space.SIZES[part].values())).gpu[0]
    default = configs.DEFAULTS[kernel_of(part)](**shape(kernel_of(part), work, torch.device(device)))
    assert set(found[0]) <= set(default)


@pytest.mark.parametrize("part", space.SIZES)
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


def test_a_table_keeps_former_rows(tmp_path):
    new = {"kda_verify": {"bf16 states, 128 x 128": Row({"BV": 64}, 'found "fast" ' + "and so on " * 20)},
           "chunk_walk": {"bf16, 128 x 128, few heads": Row({"BV": 32, "walk": {"num_warps": 2, "num_stages": 3}}, "new")}}  # fmt: skip
    name, source = tables.source("NVIDIA H200", "Changed.", new)
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


def test_a_tables_module_is_named_after_the_device():
    assert tables.slug("NVIDIA H200") == "nvidia_h200"
    assert tables.slug("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.00GHz") == "intel_xeon_platinum_8481c_cpu_2_00ghz"


def test_sizes_go_to_other_processes_and_back():
    work = Work(4, (3, 5), D=64, bounded=False, state_dtype=BF16)
    assert trial.work_of(json.loads(json.dumps(trial.facts_of(work)))) == work
