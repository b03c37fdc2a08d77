# SPDX-License-Identifier: Apache-2.0
"""TTIR to LLVM IR with explicit vectors.

    analysis.py     value ranges, strides, what is kept in memory
    lanes.py        lazy evaluation: uniform, affine and vector lanes
    elementwise.py  arith and math on scalars and vectors; casts.py, mathfn.py
    memory.py       loads, stores, atomics, loop nests, tiles in the arena
    control.py      functions, blocks, loops, branches
    reduce.py       reductions, scans, histogram, gather; rows.py: several in one loop over rows
    dot.py          matrix products; amx.py
    emit.py         text of LLVM IR; types.py how types look there

`lower` returns a module with one exported function

    void @<kernel>(ptr %args, i32 %gx, i32 %gy, i32 %gz, i64 %first, i64 %last, ptr %arena)

that runs the programs first .. last - 1 of a grid (x fastest), and an i64 constant `@<kernel>.arena`: the bytes of
scratch memory a thread needs, 64 byte aligned. `args` points to 8-byte slots, one a parameter. A failed assertion is
recorded in the control block before the arena (runtime.py).
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kda.triton_cpu import ttir
from kda.triton_cpu.lowering.control import Control
from kda.triton_cpu.lowering.dot import Dot
from kda.triton_cpu.lowering.emit import Code, Module
from kda.triton_cpu.lowering.lanes import Buffer, Lanes
from kda.triton_cpu.lowering.memory import Arena, Memory
from kda.triton_cpu.lowering.reduce import Reduce
from kda.triton_cpu.lowering.rows import Rows
from kda.triton_cpu.lowering.types import I1, Unsupported, ir
from kda.triton_cpu.ttir import Pointer, Scalar, Value

__all__ = ["Unsupported", "lower"]


def lower(module: ttir.Module, *, features, options=None) -> str:
    """LLVM IR of the module's kernel for a processor with `features` (`.isa`, `.vector_bytes`)."""
    return Lowering(module, features, options).run()


class Lowering(Lanes, Memory, Control, Reduce, Rows, Dot):
    """One module being lowered."""

    HANDLERS = {
        "tt.get_program_id": Control.emit_program_id, "tt.get_num_programs": Control.emit_num_programs,
        "tt.store": Memory.store_op, "tt.atomic_rmw": Memory.atomic, "tt.atomic_cas": Memory.atomic,
        "tt.atomic_load": Memory.atomic, "tt.atomic_store": Memory.atomic,
        "tt.reduce": Reduce.emit_reduce, "tt.scan": Reduce.emit_scan, "tt.gather": Reduce.emit_gather,
        "tt.map_elementwise": Reduce.emit_map, "tt.cat": Reduce.emit_cat, "tt.histogram": Reduce.emit_histogram,
        "tt.dot": Dot.emit_dot,
        "scf.for": Control.emit_for, "scf.if": Control.emit_if, "scf.while": Control.emit_while,
        "tt.call": Control.emit_call, "tt.assert": Control.emit_assert, "tt.print": Control.emit_print,
    }  # fmt: skip

    def __init__(self, module: ttir.Module, features, options):
        self.ttir, self.features, self.options = module, features, options
        self.vector_bytes = features.vector_bytes
        self.lanes = features.vector_bytes // 4
        self.masks_any = features.isa.startswith(("avx512", "amx"))  # masked moves of any element size
        self.has_gather = self.masks_any or features.isa == "avx2"
        self.amx = features.isa == "amx"
        self.pairs = features.isa in ("avx512bf16", "amx")
        self.module = Module(features.vector_bytes, features.isa != "generic")
        self.code = Code(self.module)
        self.arena = Arena()
        self.width = 1
        self.env: dict[Value, object] = {}
        self.memo: dict = {}
        self.owner: dict[int, Value] = {}
        self.packed: dict[tuple, Buffer] = {}
        self.plans: dict[str, object] = {}
        self.calling: list[str] = []

    @contextlib.contextmanager
    def lanes_of(self, width: int) -> Iterator[None]:
        saved, self.width = self.width, width
        yield
        self.width = saved

    def run(self) -> str:
        kernel = self.ttir.kernel
        self.plan = self.plan_of(kernel)
        self.bounds = bool(getattr(self.options, "bounds", False))
        self.arguments = {value: i for i, value in enumerate(kernel.args)}
        self._parameters(kernel)
        with self.code.loop("%first", "%last") as pid:
            linear = self.code.ins(f"trunc i64 {pid} to i32")
            rest = self.code.ins(f"udiv i32 {linear}, %gx")
            self.program = (
                self.code.ins(f"urem i32 {linear}, %gx"), self.code.ins(f"urem i32 {rest}, %gy"),
                self.code.ins(f"udiv i32 {rest}, %gy"), pid,
            )  # fmt: skip
            self.leave = self.code.fresh("next")
            self.emit_body(kernel.body, lambda op: self.code.jump(self.leave))
            self.code.start(self.leave)
        self.code.do("ret void")
        parameters = "ptr noalias %args, i32 %gx, i32 %gy, i32 %gz, i64 %first, i64 %last, ptr noalias %arena"
        self.module.globals.append(f"@{kernel.name}.arena = constant i64 {self.arena.size + 64}")
        self.module.functions[kernel.name] = (
            f"define void @{kernel.name}({parameters}) #0 {{\n{self.code.text()}}}\n"
        )
        return self.module.text()

    def _parameters(self, kernel: ttir.Function) -> None:
        for i, value in enumerate(kernel.args):
            slot = self.code.ins(f"getelementptr i64, ptr %args, i64 {i}")
            if not isinstance(value.type, (Scalar, Pointer)):
                raise Unsupported("tt.func", kernel.loc, f"an argument of type {value.type}")
            if value.type == I1:
                byte = self.code.get("i8", slot)
                self.env[value] = self.code.ins(f"icmp ne i8 {byte}, 0")
            else:
                self.env[value] = self.code.get(ir(value.type), slot)
