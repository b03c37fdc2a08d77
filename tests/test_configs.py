# SPDX-License-Identifier: Apache-2.0
"""Launch configurations: regimes and devices' tables, and what a launcher is given."""

import itertools
import json
import subprocess
import sys
import types

import pytest
import torch
from helpers import BF16, DTYPES, FP32, ROOT

pytest.importorskip("triton")

from kda.triton import configs  # noqa: E402
from kda.triton.configs import nvidia_h200, regimes, table  # noqa: E402

GPU = torch.device("cuda", 0)
SIZES = {
    "chunk": dict(N=(1, 3, 64), HV=(1, 16, 64), K=(64, 96, 128, 256), V=(64, 128), T=(1, 8192), dtype=DTYPES, bounded=(True, False)),
    "kda_decode": dict(K=(64, 128, 256), V=(64, 128), itemsize=(2, 4)),
    "fused_recurrent": dict(N=(1, 256), HV=(64,), K=(64, 128), V=(64, 128), T=(1, 300)),
    "causal_conv1d_fwd": dict(dim=(48, 255, 256, 24576), T=(0, 1, 1024, 1025, 65536)),
    "causal_conv1d_update": dict(dim=(48, 24576), window=(0, 1, 2, 8, 9)),
    "rms_norm_gated": dict(D=(64, 128, 256), rows=(1, 1 << 20)),
    "fused_kda_gate": dict(T=(1, 1024, 1025), HV=(1, 64), K=(64, 128)),
    "chunk_combine": dict(K=(64, 128), V=(128,)),
}  # fmt: skip
SIZES |= {"kda_verify": SIZES["kda_decode"], "kda_commit": SIZES["kda_decode"]}


def shapes(kernel):
    for values in itertools.product(*SIZES[kernel].values()):
        yield dict(zip(SIZES[kernel], values))


@pytest.fixture
def pretend(monkeypatch):
    """A function that makes GPU the named one of NVIDIA's."""
    caches = (configs._warp_size, configs._large_shared_memory, configs.multiprocessors, table.of)

    def become(name, capability):
        monkeypatch.setattr(torch.version, "hip", None)
        about = types.SimpleNamespace(name=name, multi_processor_count=132, warp_size=32)
        for function, value in dict(
            is_available=True, get_device_name=name, get_device_capability=capability, get_device_properties=about
        ).items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
        for cache in caches:
            cache.cache_clear()

    yield become
    for cache in caches:
        cache.cache_clear()


def test_no_shape_is_in_two_regimes():
    """And each regime is met by some shape, so that none is dead."""
    assert {part for kernel in SIZES for part in regimes.parts(kernel)} == set(regimes.REGIMES)
    for kernel in SIZES:
        for part in regimes.parts(kernel):
            met = set()
            for shape in shapes(kernel):
                holding = [name for name, holds in regimes.REGIMES[part].items() if holds(**shape)]
                assert len(holding) <= 1, (part, shape, holding)
                assert regimes.find(part, shape) == (holding[0] if holding else None)
                met.update(holding)
            assert met == set(regimes.REGIMES[part])


@pytest.mark.parametrize("kernel", ["kda_decode", "kda_verify", "kda_commit", "fused_recurrent", "rms_norm_gated"])
def test_a_requests_regime_does_not_depend_on_others(kernel):
    for shape in shapes(kernel):
        found = {regimes.find(kernel, shape | dict(N=N, T=T, rows=N)) for N in (1, 7, 500) for T in (1, 7, 500)}
        assert len(found) == 1, shape


@pytest.mark.parametrize("module", table.modules(), ids=lambda m: m.__name__.rpartition(".")[2])
def test_rows_are_well_formed(module):
    """Known kernels and regimes, entries that the default has too (or options of a compilation), evidence in words."""
    options = configs.OPTIONS
    assert module.NAMES and all(isinstance(name, str) and name for name in module.NAMES)
    kernel_of = {part: kernel for kernel in configs.DEFAULTS for part in regimes.parts(kernel)}
    for part, rows in module.TABLE.items():
        assert rows and set(rows) <= set(regimes.REGIMES[part]), part
        for name, row in rows.items():
            where = (module.__name__, part, name)
            assert isinstance(row, table.Row) and row.config and len(row.evidence) > 20, where
            kernel = kernel_of[part]
            shape = next(s for s in shapes(kernel) if regimes.REGIMES[part][name](**s))
            default = configs.DEFAULTS[kernel](**shape, device=torch.device("cpu"))
            assert set(row.config) <= set(default) | options, where
            for entry in row.config.values():
                if isinstance(entry, dict):
                    assert set(entry) <= options and {"num_warps", "num_stages"} <= set(entry), where


def test_tables_have_names_of_their_own():
    for a, b in itertools.permutations(table.modules(), 2):
        assert not any(table.is_for(a.NAMES, name) for name in b.NAMES), (a.__name__, b.__name__)


@pytest.mark.parametrize(
    "device, yes",
    [("NVIDIA H200", True), ("NVIDIA H200 NVL", True), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA GH200 480GB", True), ("H100", True),
     ("NVIDIA B200", False), ("NVIDIA H20", False), ("NVIDIA A100-SXM4-80GB", False), ("AMD Instinct MI300X", False), ("", False)],
)  # fmt: skip
def test_a_table_is_found_by_words_of_the_devices_name(device, yes):
    assert table.is_for(nvidia_h200.NAMES, device) == yes


CHUNK = dict(C=16, PRECISION="tf32x3")
RULE = CHUNK | dict(BV=64, PARTS=2, walk=dict(num_warps=4, num_stages=5))
ON_H200 = [
    ("chunk", dict(N=1, HV=64, K=128, V=128, T=8192, dtype=BF16, bounded=True), RULE | dict(intra=dict(num_warps=1, num_stages=1))),
    ("chunk", dict(N=1, HV=16, K=128, V=128, T=65536, dtype=BF16, bounded=True), RULE | dict(intra=dict(num_warps=1, num_stages=1))),
    ("chunk", dict(N=8, HV=64, K=128, V=128, T=8192, dtype=BF16, bounded=False),
     RULE | dict(intra=dict(num_warps=2, num_stages=1))),
    ("chunk", dict(N=1, HV=64, K=96, V=32, T=256, dtype=BF16, bounded=True),
     RULE | dict(BV=32, intra=dict(num_warps=1, num_stages=1))),
    ("chunk", dict(N=1, HV=16, K=128, V=128, T=8192, dtype=FP32),
     CHUNK | dict(BV=16, PARTS=1, intra=dict(num_warps=4, num_stages=1), walk=dict(num_warps=2, num_stages=1))),
    ("chunk", dict(N=4, HV=64, K=64, V=64, T=8192, dtype=BF16),
     CHUNK | dict(BV=64, PARTS=1, intra=dict(num_warps=2, num_stages=1), walk=dict(num_warps=4, num_stages=3))),
    ("kda_decode", dict(K=128, V=128, itemsize=4), dict(BV=128, KI=64, STREAM=False, num_warps=4, num_stages=1)),
    ("kda_decode", dict(K=128, V=128, itemsize=2), dict(BV=64, KI=64, STREAM=False, num_warps=2, num_stages=1)),
    ("kda_decode", dict(K=256, V=80, itemsize=2), dict(BV=16, KI=64, STREAM=False, num_warps=2, num_stages=1)),
    ("kda_verify", dict(K=128, V=128, itemsize=4), dict(BV=128, KI=32, num_warps=4, num_stages=1)),
    ("kda_commit", dict(K=128, V=128, itemsize=2), dict(BV=128, KI=64, num_warps=4, num_stages=1)),
    ("fused_recurrent", dict(N=256, HV=64, K=128, V=128, T=256), dict(BV=8, STREAM=False, num_warps=1, num_stages=3)),
    ("causal_conv1d_fwd", dict(dim=24576, T=8192), dict(BT=32, BD=128, num_warps=1)),
    ("causal_conv1d_fwd", dict(dim=24576, T=64), dict(BT=16, BD=128, num_warps=1)),
    ("causal_conv1d_update", dict(dim=24576, window=1), dict(BT=1, BD=256, num_warps=4)),
    ("causal_conv1d_update", dict(dim=24576, window=4), dict(BT=4, BD=128, num_warps=2)),
    ("rms_norm_gated", dict(D=128, rows=64), dict(BR=16, BD=128, PRECISION="tf32x3", num_warps=4)),
    ("rms_norm_gated", dict(D=128, rows=1 << 19), dict(BR=16, BD=128, PRECISION="tf32x3", num_warps=2)),
]  # fmt: skip


@pytest.mark.parametrize("kernel, shape, expected", ON_H200)
def test_picks_on_an_h200(pretend, kernel, shape, expected):
    pretend("NVIDIA H200", (9, 0))
    assert configs.pick(kernel, **shape, device=GPU) == expected


def test_only_a_device_with_a_table_takes_its_rows(pretend, monkeypatch):
    """A row that no default has: taken on the device and in the regime it is for, and nowhere else."""
    row = table.Row({"BV": 32, "num_warps": 8}, "planted")
    monkeypatch.setitem(nvidia_h200.TABLE, "kda_decode", {"fp32 states, 128 x 128": row})
    shape = dict(K=128, V=128, itemsize=4)
    for name, capability, has in (
        ("NVIDIA H200", (9, 0), True), ("NVIDIA B200", (10, 0), False), ("NVIDIA A100-SXM4-80GB", (8, 0), False)
    ):  # fmt: skip
        pretend(name, capability)
        for s in (shape, shape | dict(itemsize=2), shape | dict(V=64)):
            default = configs.DEFAULTS["kda_decode"](**s, device=GPU)
            assert default | row.config != default
            wanted = default | row.config if has and s is shape else default
            assert configs.pick("kda_decode", **s, device=GPU) == wanted, (name, s)
    monkeypatch.setattr(table, "modules", lambda: (nvidia_h200,))
    cpu = torch.device("cpu")
    assert configs.pick("kda_decode", **shape, device=cpu) == configs.DEFAULTS["kda_decode"](**shape, device=cpu)


ZEN4 = table.Processor("AMD EPYC", "AMD", "25", "17")


@pytest.mark.parametrize(
    "processor, path, takes",
    [
        (ZEN4, "avx512bf16", True),
        (ZEN4._replace(name="AMD EPYC 9354 32-Core Processor"), "avx512bf16", True),  # the same model, named in full
        (ZEN4, "avx512", False),  # KDA_CPU_ISA=avx512: other code, other tiles
        (ZEN4._replace(model="1"), "avx512bf16", False),
        (ZEN4._replace(model="170"), "avx512bf16", False),
        (ZEN4._replace(family="26", model="17"), "avx512bf16", False),  # of the same name
        (ZEN4._replace(vendor="Intel"), "avx512bf16", False),
        (ZEN4, "", False),  # the interpreter
    ],
)
def test_a_processor_takes_the_table_of_its_model_and_path(monkeypatch, processor, path, takes):
    """A table as one measured on ZEN4 is written: names in virtual machines are too short to tell processors apart."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(table, "processor", lambda: ZEN4)
    monkeypatch.setattr(table, "processor_path", lambda: "avx512bf16")
    rows = {"rms_norm_gated": {"128": table.Row({"BR": 64}, "planted")}}
    module = types.SimpleNamespace(NAMES=table.names_for(cpu), TABLE=rows)
    monkeypatch.setattr(table, "modules", lambda: (nvidia_h200, module))
    monkeypatch.setattr(table, "processor", lambda: processor)
    monkeypatch.setattr(table, "processor_path", lambda: path)
    table.of.cache_clear()
    found = [configs.pick("rms_norm_gated", D=D, rows=1, device=cpu)["BR"] for D in (128, 64)]
    table.of.cache_clear()
    assert found == [64 if takes else 16, 32]


@pytest.mark.parametrize(
    "text, words",
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n"
         "vendor_id\t: other\n", "AMD family 25 model 17"),
        ("vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nmodel name : Intel(R) Xeon(R)\n", "Intel family 6 model 143"),
        ("processor : 0\nBogoMIPS : 50.00\n", "some machine"),  # of another architecture
        (None, "some machine"),
    ],
)  # fmt: skip
def test_a_processors_model_is_what_linux_tells(monkeypatch, text, words):
    def read(path):
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(table.Path, "read_text", read)
    monkeypatch.setattr(table.platform, "processor", lambda: "some machine")
    table.processor.cache_clear()
    assert table.model_words() == words
    table.processor.cache_clear()


def test_no_path_no_table(monkeypatch):
    """In Triton's interpreter, and where KDA_CPU_ISA names no path of this machine."""
    from triton import knobs

    from kda.triton_cpu import runtime

    cpu = torch.device("cpu")
    if not knobs.runtime.interpret:
        assert table.processor_path() == runtime.selected_isa() and table.device_name(cpu).endswith(f", {runtime.selected_isa()}")
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "interpret", True)
        assert table.processor_path() == table.device_name(cpu) == ""

    def unknown():
        raise RuntimeError("KDA_CPU_ISA='x': accepted are ..")

    monkeypatch.setattr(runtime, "selected_isa", unknown)
    assert table.processor_path() == table.device_name(cpu) == ""
    assert not any(table.is_for(module.NAMES, "") for module in table.modules())


def test_a_table_of_another_version_says_so(pretend, monkeypatch):
    monkeypatch.setitem(nvidia_h200.TABLE, "rms_norm_gated", {"128": table.Row({"BR": 16, "ROWS": 4, "maxnreg": 64}, "planted")})
    pretend("NVIDIA H200", (9, 0))
    with pytest.raises(ValueError, match="NVIDIA H200 .* another version: rms_norm_gated, 128 has ROWS, which.*remove the row"):
        configs.pick("rms_norm_gated", D=128, rows=1, device=GPU)
    assert configs.pick("rms_norm_gated", D=64, rows=1, device=GPU)["BR"] == 32
    monkeypatch.setitem(nvidia_h200.TABLE, "kda_decode", {"wide states": table.Row({"BV": 16}, "planted")})
    assert configs.stale(GPU) == ["kda_decode, wide states is no regime", "rms_norm_gated, 128 has ROWS"]


@pytest.mark.parametrize("module", table.modules(), ids=lambda m: m.__name__.rpartition(".")[2])
def test_no_table_here_is_of_another_version(module, monkeypatch):
    monkeypatch.setattr(table, "device_name", lambda device: module.NAMES[0])
    for device in (torch.device("cpu"), torch.device("meta")):  # whose defaults have the entries of any device
        table.of.cache_clear()
        assert table.of(device) is module.TABLE and configs.stale(device) == []
    table.of.cache_clear()


def test_the_driver_is_asked_once(pretend, monkeypatch):
    pretend("NVIDIA H200", (9, 0))
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: asked.append(1) or "NVIDIA H200")
    for _ in range(3):
        configs.pick("rms_norm_gated", D=128, rows=1, device=GPU)
    assert asked == [1]


def test_the_two_kernels_of_the_chunk_rule_have_rows_of_their_own(pretend, monkeypatch):
    pretend("NVIDIA H200", (9, 0))
    monkeypatch.setitem(
        nvidia_h200.TABLE["chunk_walk"], "bf16, 128 x 128, few heads",
        table.Row({"BV": 32, "walk": {"num_warps": 2, "num_stages": 3}}, "planted"),
    )  # fmt: skip
    shape = dict(N=1, K=128, V=128, T=8192, dtype=BF16, device=GPU, bounded=True)
    few, many = (configs.pick("chunk", HV=HV, **shape) for HV in (16, 64))
    assert (few["BV"], few["walk"]["num_stages"], many["BV"]) == (32, 3, 64)
    assert few["intra"] == many["intra"]


@pytest.mark.parametrize(
    "arch, parts, intra, BV, walk, verify",
    [("gfx1030", 4, 4, 32, 8, 8), ("gfx1100", 4, 1, 64, 4, 8), ("gfx1201", 4, 1, 64, 4, 8), ("gfx942", 2, 1, 64, 4, 2)],
)
def test_small_register_files_take_smaller_tiles(pretend, monkeypatch, arch, parts, intra, BV, walk, verify):
    pretend("AMD Radeon", (9, 4))
    about = types.SimpleNamespace(name="AMD Radeon", multi_processor_count=40, warp_size=64 if arch == "gfx942" else 32, gcnArchName=arch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: about)
    cfg = configs.pick("chunk", N=1, HV=64, K=128, V=128, T=8192, dtype=BF16, device=GPU, bounded=True)
    assert (cfg["PARTS"], cfg["intra"]["num_warps"], cfg["BV"], cfg["walk"]["num_warps"]) == (parts, intra, BV, walk)
    assert configs.pick("kda_verify", K=128, V=128, itemsize=4, device=GPU)["num_warps"] == verify


def test_overrides_come_before_tables(pretend, monkeypatch):
    pretend("NVIDIA H200", (9, 0))
    monkeypatch.setitem(configs.overrides, "chunk_walk", {"BV": 16})
    assert configs.pick("chunk", N=1, HV=64, K=128, V=128, dtype=BF16, device=GPU)["BV"] == 16
    assert configs.pick("rms_norm_gated", D=128, rows=1, device=GPU)["BR"] == 16


def test_launches_of_the_layer_find_their_row():
    """What launchers really ask on the table's device: one regime at most each, and one row for the layer's shapes."""
    source = """
import json
from kda.cli import launches, pretend, targets
from kda.triton import configs
from kda.triton.configs import regimes
pretend.become(targets.find("cuda:90"))
pick, asked = configs.pick, {}
def noted(kernel, **shape):
    for part in regimes.parts(kernel):
        held = [name for name, holds in regimes.REGIMES.get(part, {}).items() if holds(**shape)]
        asked.setdefault((regime, part), []).append(held)
    return pick(kernel, **shape)
configs.pick = noted
with pretend.launches_to(lambda *launch: None):
    for regime in ("many", "D=64", "D=96", "fp32", "bf16 states"):
        for name, call in launches.calls([regime]):
            if "grouped" not in name and "segments" not in name:
                call()
print(json.dumps([[*key, held] for key, held in asked.items()]))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    asked = json.loads(done.stdout)
    assert all(len(held) <= 1 for _, _, calls in asked for held in calls)
    layer = {part: calls for regime, part, calls in asked if regime == "many"}
    assert set(nvidia_h200.TABLE) - {"chunk_combine"} <= set(layer)  # which is for long sequences alone
    for part in ("chunk_intra", "chunk_walk", "kda_decode", "kda_verify", "kda_commit", "fused_recurrent", "causal_conv1d_fwd"):
        assert all(len(held) == 1 for held in layer[part]), part
        rows = nvidia_h200.TABLE.get(part, {})
        assert not rows or all(held[0] in rows for held in layer[part]), part
    states = {regime: {held[0] for held in calls} for regime, part, calls in asked if part == "kda_decode" and calls[0]}
    assert states["many"] == states["fp32"] == {"fp32 states, 128 x 128"} != states["bf16 states"]
