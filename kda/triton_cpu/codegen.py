# SPDX-License-Identifier: Apache-2.0
"""LLVM IR text to optimised IR, object code and assembly, through llvmlite."""
from __future__ import annotations

import functools

import llvmlite.binding as llvm

from kda.triton_cpu.runtime import Features


class CodegenError(RuntimeError):
    """LLVM refused the module: a defect of the lowering, with LLVM's words."""


@functools.cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def target_machine(features: Features) -> llvm.TargetMachine:
    """A target machine for `features`: position-independent, small code model."""
    _initialize()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=features.cpu, features=features.features, opt=3, reloc="pic", codemodel="small", jit=False
    )


def join(first: str, second: str) -> str:
    """Two texts of LLVM IR as one: what both declare is declared once."""
    seen = {line for line in first.splitlines() if line.startswith("declare ")}
    return "\n".join([first, *(line for line in second.splitlines() if line not in seen)]) + "\n"


def optimize(text: str, features: Features) -> llvm.ModuleRef:
    """Parses, verifies and optimises LLVM IR.

    Raises:
        CodegenError: the text is not valid LLVM IR.
    """
    machine = target_machine(features)
    try:
        module = llvm.parse_assembly(text, llvm.create_context())
        module.triple = machine.triple
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        raise CodegenError(f"the lowered kernel is not valid LLVM IR: {error}") from error
    # The lowering writes its vectors itself: LLVM's vectorisers would only touch tails and cost time.
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = False
    tuning.slp_vectorization = False
    tuning.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return module


def object_code(module: llvm.ModuleRef, features: Features) -> bytes:
    """An object file of the module."""
    return target_machine(features).emit_object(module)


def assembly(module: llvm.ModuleRef | str, features: Features) -> str:
    """The assembly of a module, or of optimised LLVM IR text."""
    if isinstance(module, str):
        module = parse(module)
    return target_machine(features).emit_assembly(module)


def parse(text: str) -> llvm.ModuleRef:
    """Optimised LLVM IR text, such as the stage `llir` leaves in the cache."""
    _initialize()
    return llvm.parse_assembly(text, llvm.create_context())
