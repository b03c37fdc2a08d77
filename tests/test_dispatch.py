# SPDX-License-Identifier: Apache-2.0
"""Which backend serves a device, and what is imported for it. New processes, as imports cannot be undone."""

import threading

import pytest
import torch
from helpers import GPU, KERNELS, Backend, needs_gpu, subprocess_python

import kda


def run(code, **env):
    done = subprocess_python(code, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


# Hides packages as if they were not installed, and records who looks for them.
HIDE = """
from importlib.machinery import PathFinder
asked, real = [], PathFinder.find_spec
def find_spec(name, path=None, target=None):
    if name.split(".")[0] in {names}:
        asked.append(name)
        return None
    return real(name, path, target)
PathFinder.find_spec = find_spec
"""

# Every operation once, on small CPU tensors.
ALL_OPERATIONS = """
import torch, kda
import test_bad_input as valid
for build in valid.CASES:
    getattr(kda, build.__name__)(**build("cpu"))
kda.FusedRMSNormGated(16)(torch.ones(2, 16), torch.ones(2, 16))
"""


def test_import_loads_neither_triton_nor_transformers_nor_a_backend():
    lines = run("import sys, kda; print(*sorted(m for m in sys.modules if m.split('.')[0] in ('triton', "
                "'transformers', 'kda')))")
    loaded = lines[0].split()
    assert not [m for m in loaded if m.startswith(("triton", "transformers", "kda.triton", "kda.reference"))], loaded


def test_every_public_name_resolves():
    assert {"chunk_kda", "chunk_kda_with_fused_gate", "fused_recurrent_kda", "causal_conv1d_fn", "rms_norm_gated",
            "causal_conv1d_update", "fused_kda_gate", "FusedRMSNormGated", "gather_initial_states", "scatter_states",
            "backend_for", "why", "use_backend"} <= set(dir(kda))
    for name in kda.__all__:
        assert callable(getattr(kda, name))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kda.nonsense  # noqa: B018


@pytest.mark.parametrize("how", ["KDA_BACKEND", "use_backend"])
def test_reference_never_imports_triton(how):
    """All operations, with Triton installed and without it; nothing may even look for it."""
    code = ALL_OPERATIONS if how == "KDA_BACKEND" else (
        "import kda\nwith kda.use_backend('reference'):\n" + "".join(
            f"    {line}\n" for line in ALL_OPERATIONS.strip().splitlines()))
    env = {"KDA_BACKEND": "reference"} if how == "KDA_BACKEND" else {}
    report = "\nimport sys; print('triton' in sys.modules, any(m.startswith('kda.triton') for m in sys.modules))"
    assert run(code + report, **env) == ["False False"]
    hidden = HIDE.replace("{names}", "('triton', 'transformers')")
    assert run(hidden + code + "\nprint(asked)", **env) == ["[]"]


def test_cpu_tensors_work_without_triton_and_are_told_why():
    code = HIDE.replace("{names}", "('triton',)") + ALL_OPERATIONS + "\nprint(kda.backend_for('cpu'), '|', kda.why('cpu'))"
    backend, _, reason = run(code)[0].partition(" | ")
    assert backend == "reference" and "not installed" in reason and "pip install triton" in reason


def test_cpu_tensors_go_to_native_kernels_on_a_machine_without_a_gpu():
    """No "0 active drivers": the kernels are compiled for the CPU."""
    code = ALL_OPERATIONS + "\nprint(kda.backend_for('cpu'))\nprint(kda.why('cpu'))"
    first, reason = run(code, CUDA_VISIBLE_DEVICES="")
    assert first == "triton-cpu" and "triton-cpu" in reason and "processor" in reason


def test_cpu_tensors_work_without_llvmlite_and_are_told_why():
    code = HIDE.replace("{names}", "('llvmlite',)") + ALL_OPERATIONS + "\nprint(kda.backend_for('cpu'), '|', kda.why('cpu'))"
    backend, _, reason = run(code, CUDA_VISIBLE_DEVICES="")[0].partition(" | ")
    assert backend == "reference" and "pip install llvmlite" in reason


@needs_gpu
def test_beside_a_gpu_cpu_tensors_go_to_native_kernels_and_each_thread_to_its_own():
    """Threads of both devices launch side by side from the first moment on, when Triton makes its GPU driver."""
    code = """
import threading
import torch, kda
def inputs(seed, device):
    gen = torch.Generator().manual_seed(seed)
    q, k, v, y = (torch.randn(1, 70, 2, 64, generator=gen) for _ in range(4))
    return [x.to(device) for x in (q, k, v, -y.abs(), torch.rand(1, 70, 2, generator=gen))]
def work(device):
    start.wait()
    for seed in range(10):
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            o, _ = kda.chunk_kda(*inputs(seed, device), use_qk_l2norm_in_kernel=True)
            o = o.cpu()
        with kda.use_backend("reference"):
            want, _ = kda.chunk_kda(*inputs(seed, "cpu"), use_qk_l2norm_in_kernel=True)
        right.append(bool((o - want).norm() < 1e-4 * want.norm()))
print(kda.backend_for("cpu"))
start, right = threading.Barrier(4), []
threads = [threading.Thread(target=work, args=(device,)) for device in ("cuda", "cpu") * 2]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(right), all(right))
"""
    assert run(code) == ["triton-cpu", "40 True"]


def test_interpreter_serves_cpu_tensors_when_asked():
    code = "import torch, kda\nprint(kda.backend_for('cpu'), kda.backend_for(torch.device('cpu')))\nprint(kda.why('cpu'))"
    first, reason = run(code, TRITON_INTERPRET="1")
    assert first == "triton-interpret triton-interpret" and "TRITON_INTERPRET" in reason


@needs_gpu
def test_gpu_tensors_go_to_triton():
    assert kda.backend_for("cuda") == ("triton-rocm" if torch.version.hip else "triton-cuda")
    assert "GPU" in kda.why("cuda")


@pytest.mark.parametrize("value,backend", [("auto", "triton-cpu"), ("reference", "reference"), ("", "triton-cpu"),
                                           ("triton", "triton-cpu")])
def test_KDA_BACKEND_values(value, backend):
    code = "import kda; print(kda.backend_for('cpu'))"
    assert run(code, KDA_BACKEND=value, CUDA_VISIBLE_DEVICES="") == [backend]


def test_KDA_BACKEND_reference_wins_over_the_interpreter():
    assert run("import kda; print(kda.backend_for('cpu'))", KDA_BACKEND="reference", TRITON_INTERPRET="1") == ["reference"]


@pytest.mark.parametrize("value", ["cuda", "Triton", "nonsense"])
def test_an_unknown_KDA_BACKEND_raises_and_says_what_is_known(value):
    done = subprocess_python("import kda; kda.backend_for('cpu')", KDA_BACKEND=value)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError") and "KDA_BACKEND" in last and repr(value) in last
    assert all(word in last for word in ("auto", "triton", "reference"))


def test_triton_asked_for_where_it_cannot_run_raises_in_words():
    code = """
import torch, kda
q = torch.randn(1, 1, 1, 16)
for call in (lambda: kda.backend_for("cpu"), lambda: kda.fused_recurrent_kda(q, q, q, q)):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""
    lines = run(HIDE.replace("{names}", "('llvmlite',)") + code, KDA_BACKEND="triton")
    assert len(lines) == 2 and all("cpu" in line and "Triton" in line for line in lines)


def test_use_backend_overrides_nests_and_ends_with_its_block():
    outside = kda.backend_for("cpu")
    with kda.use_backend("reference"):
        assert kda.backend_for("cpu") == "reference" and "asked for" in kda.why("cpu")
        with kda.use_backend("auto"):
            assert kda.backend_for("cpu") == outside
        assert kda.backend_for("cpu") == "reference"
    assert kda.backend_for("cpu") == outside
    with pytest.raises(KeyError):
        with kda.use_backend("reference"):
            raise KeyError
    assert kda.backend_for("cpu") == outside


def test_use_backend_holds_for_its_thread_only():
    answers = []
    with kda.use_backend("reference"):
        thread = threading.Thread(target=lambda: answers.append(kda.backend_for("cpu")))
        thread.start()
        thread.join()
    assert answers == ["triton-cpu" if GPU else KERNELS]


def test_use_backend_wins_over_KDA_BACKEND():
    code = "import kda\nwith kda.use_backend('reference'):\n    print(kda.backend_for('cpu'))"
    assert run(code, KDA_BACKEND="triton") == ["reference"]


@pytest.mark.parametrize("name", ["cuda", "", None, "Reference"])
def test_use_backend_refuses_an_unknown_name(name):
    before = kda.backend_for("cpu")
    with pytest.raises(ValueError, match="auto, triton, reference"):
        with kda.use_backend(name):
            pass
    assert kda.backend_for("cpu") == before


def test_the_backend_fixture_forces_what_it_says(backend):
    assert isinstance(backend, Backend)
    assert kda.backend_for(backend.device) == backend.name and backend.name in kda.why(backend.device)


def test_old_triton_is_not_used_and_named():
    """A Triton older than the oldest supported one is as good as none."""
    code = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "3.2.0" if name.startswith(("triton", "pytorch-triton")) else real(name)
import kda
print(kda.backend_for("cpu"), "|", kda.why("cpu"))
"""
    pytest.importorskip("triton")
    backend, _, reason = run(code, TRITON_INTERPRET="1")[0].partition(" | ")
    assert backend == "reference" and "3.2.0" in reason
