# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every supported GPU, on a machine without one, from the launches that users cause.

launches.py makes the public operations launch their kernels on pretended GPU tensors, one process a target, so that a
compiler that dies takes only that process down. The processes run side by side, once for all tests that ask.
"""

import ast
import fcntl
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import ROOT
from launches import TARGETS

pytest.importorskip("triton")


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


def launches(target, cache, *flags):
    """The facts that launches.py prints, and how it ended."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KDA_BACKEND", "KDA_CHECK")}
    env.update(TRITON_CACHE_DIR=str(cache), OMP_NUM_THREADS="1",
               PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")])))
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "launches.py"), target, *flags], env=env,
                          capture_output=True, text=True, timeout=900)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done


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
    """target -> (facts, stderr, exit status) of one launches.py each."""

    def make():
        cache = tmp_path_factory.mktemp("triton-cache")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = pool.map(lambda target: launches(target, cache / target), TARGETS)
            return {t: (facts, done.stderr, done.returncode) for t, (facts, done) in zip(TARGETS, results)}

    return once_for_all_workers(tmp_path_factory, "compiled", make)


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """The facts of the launches of a large deployment, not compiled."""
    return once_for_all_workers(tmp_path_factory, "large",
                                lambda: launches("sm_90", tmp_path_factory.mktemp("no-cache"), "--grids")[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS or ["none found"])
def test_kernel_compiles_for(compiled, kernel, target):
    facts, stderr, status = compiled[target]
    facts = [f for f in facts if f.get("kernel") == kernel]
    assert facts, f"no operation in launches.py launched {kernel} (exit status {status}): {stderr[-3000:]}"
    begun, ended = ([f for f in facts if ("ok" in f) == done] for done in (False, True))
    failed = [f"{f['op']}: {f['error']}" for f in ended if not f["ok"]]
    assert not failed, "\n".join(failed)
    assert len(begun) == len(ended), f"{begun[-1]['op']} took the compiler down (exit status {status}): {stderr[-3000:]}"


@pytest.mark.parametrize("target", TARGETS)
def test_every_operation_reaches_its_kernels_without_reading_a_device_value(compiled, target):
    """The pretended tensors hold no data: a launcher that asks for a value, or for a copy on the host, raises."""
    facts, stderr, status = compiled[target]
    calls = [f for f in facts if "called" in f]
    assert status == 0 and len(calls) > 10, stderr[-3000:]
    assert [f for f in calls if not f["called"]] == []


def test_grid_dimensions_y_and_z_stay_small_at_any_size(large):
    """131,072 sequences x 64 heads, 524,288 tokens: what grows is in dimension x, which is not limited to 65,535."""
    grids = [(f["kernel"], f["op"], f["grid"]) for f in large if "grid" in f]
    assert {kernel for kernel, _, _ in grids} == set(KERNELS)
    assert [g for g in grids if any(size > 65_535 for size in g[2][1:])] == []
    assert [g for g in grids if g[2][0] >= 1 << 31] == []
    assert [f for f in large if f.get("called") is False] == []
