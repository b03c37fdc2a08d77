# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every supported device, on a machine without one, from the launches that users cause.

kda/cli/launches.py makes the public operations launch their kernels on pretended tensors, and the farm behind
`kda compile` compiles them. What `make compile` has left in build/compile.json is used if it is of these sources;
otherwise the same is compiled now, once for all tests that ask.
"""

import ast
import fcntl
import json
import os
import pickle
import platform
import subprocess
import sys

import pytest
from helpers import ROOT

pytest.importorskip("triton")
pytest.importorskip("llvmlite")

from kda.cli import farm  # noqa: E402
from kda.cli.targets import TARGETS  # noqa: E402

SAVED = ROOT / "build" / "compile.json"
HERE = [name for name, target in TARGETS.items() if not target.problem(farm.versions()["triton"], platform.machine())]
# Walks are cut into segments where a device has many cores to fill and products are fast.
ONLY_ON_LARGE = {"kda.triton.walk.chunk_combine_kernel": {"cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950"}}


def launched_kernels():
    """module.kernel of every @triton.jit function in kda/triton launched as `kernel[grid](...)` or by `Launch(kernel)`."""
    jitted, launched = {}, set()
    for path in sorted((ROOT / "kda" / "triton").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                jitted[node.name] = f"{module}.{node.name}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).split(".")[-1])
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Launch":
                launched.add(ast.unparse(node.args[0]))
    return sorted(name for kernel, name in jitted.items() if kernel in launched)


KERNELS = launched_kernels()


def once_for_all_workers(tmp_path_factory, name, make):
    """Under xdist every worker has its own session: the first one makes the result, the others read it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    file = base / f"{name}.pickle"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_bytes(pickle.dumps(make()))
        return pickle.loads(file.read_bytes())


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """farm.Results of every target."""

    def make():
        tasks = farm.checked(HERE)
        return farm.Results.load(SAVED, tasks) or farm.compile_all(tasks, os.cpu_count())

    return once_for_all_workers(tmp_path_factory, "compiled", make)


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """The facts of the launches of a large deployment, not compiled."""

    def make():
        done = subprocess.run([sys.executable, "-m", "kda.cli.launches", "cuda:90", "--large"], capture_output=True,
                              env=farm.environment(str(tmp_path_factory.mktemp("no-cache"))), text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return once_for_all_workers(tmp_path_factory, "large", make)


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("kernel", KERNELS or ["none found"])
def test_kernel_compiles_for(compiled, kernel, target):
    results = compiled.of(target)
    facts = [f for f in results.launches if f["kernel"] == kernel]
    needed = target in ONLY_ON_LARGE.get(kernel, HERE)
    assert facts or not needed, f"no operation in kda/cli/launches.py launched {kernel}: {results.problems}"
    failed = [f"{f['op']}: {f['error']}" for f in facts if not f["ok"]]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("target", HERE)
def test_every_operation_reaches_its_kernels_without_reading_a_device_value(compiled, target):
    """The pretended tensors hold no data: a launcher that asks for a value, or for a copy on the host, raises."""
    results = compiled.of(target)
    assert results.problems == {} and len(results.calls) > 10
    assert [f for f in results.calls if not f["called"]] == []


def test_every_configuration_is_reached():
    """A configuration that no launch in the list picks would never be compiled, nor a table's row for such a regime."""
    from kda.triton.configs import DEFAULTS, regimes

    source = """
import json
from kda.cli import launches, pretend, targets
from kda.triton import configs
pretend.become(targets.find("cuda:90"))
pick, picked, regimes = configs.pick, set(), set()
def noted(kernel, **shape):
    picked.add(kernel)
    regimes.update((part, configs.regimes.find(part, shape)) for part in configs.regimes.parts(kernel))
    return pick(kernel, **shape)
configs.pick = noted
with pretend.launches_to(lambda *launch: None):
    for name, call in launches.calls(list(launches.REGIMES)):
        call()
print(json.dumps([sorted(picked), sorted(filter(lambda found: found[1], regimes))]))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    picked, found = json.loads(done.stdout)
    assert picked == sorted(DEFAULTS)
    assert found == sorted([part, name] for part, names in regimes.REGIMES.items() for name in names)


def test_every_table_is_compiled_for_some_target():
    from kda.cli.pretend import tables
    from kda.triton.configs import nvidia_h200, table

    assert tables(TARGETS["cuda:90"])[:1] == [nvidia_h200] and nvidia_h200 not in tables(TARGETS["cuda:100"])
    assert [m.__name__ for m in table.modules() if not any(m in tables(target) for target in TARGETS.values())] == []


def test_grid_dimensions_y_and_z_stay_small_at_any_size(large):
    """131,072 sequences x 64 heads, 524,288 tokens: what grows is in dimension x, which is not limited to 65,535."""
    grids = [(f["kernel"], f["op"], f["grid"]) for f in large if "grid" in f]
    assert {kernel for kernel, _, _ in grids} == set(KERNELS)
    assert [g for g in grids if any(size > 65_535 for size in g[2][1:])] == []
    assert [g for g in grids if g[2][0] >= 1 << 31] == []
    assert [f for f in large if f.get("called") is False] == []
