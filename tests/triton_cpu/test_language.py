# SPDX-License-Identifier: Apache-2.0
"""What kernels of others use: `triton.language` as a whole, random kernels, Triton's tutorials, fla-core."""

import importlib.util
import os

import pytest

pytest.importorskip("llvmlite")

from kda.triton_cpu import runtime  # noqa: E402

# Each line is a process: most of its time goes into importing torch and Triton.
LANGUAGE = (
    "random_numbers unsigned_integers bools arguments float8_products three_dims",
    "tiles",
    "libdevice_functions layouts printing refusals",
    "combine_functions atomics descriptors flow",
)
TUTORIALS = ("vector_addition softmax matrix_product dropout", "layer_norm attention grouped_products")
PATHS = [isa for isa in runtime.ISAS if not runtime.missing(isa)]


@pytest.mark.parametrize("groups", LANGUAGE)
def test_the_language_equals_torch(session_programs, groups):
    session_programs.run(f"import language_cases; language_cases.run({groups!r})")


@pytest.mark.parametrize("isa", PATHS)
def test_random_kernels_equal_their_oracle(session_programs, isa):
    count = 60 if isa == PATHS[-1] else 20
    program = f"import random_programs; random_programs.run_found(); random_programs.run({count})"
    session_programs.run(program, KDA_CPU_ISA=isa)


@pytest.mark.parametrize("groups", TUTORIALS)
def test_tutorials_run(session_programs, groups):
    session_programs.run(f"import tutorial_cases; tutorial_cases.run({groups!r})")


def test_fla_core_runs_as_it_is(session_programs):
    if importlib.util.find_spec("fla") is None:
        assert not os.environ.get("CI"), "fla-core belongs to the extra `test`"
        pytest.skip("fla-core is not installed")
    session_programs.run("import tutorial_cases; tutorial_cases.run('fla_core')")
