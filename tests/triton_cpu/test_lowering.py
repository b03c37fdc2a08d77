# SPDX-License-Identifier: Apache-2.0
"""Every operation against torch, over dtypes, shapes, masks and layouts, on this machine's best path and on others."""

import dataclasses
import platform
import struct

import pytest
import torch

pytest.importorskip("llvmlite")

from kda.triton_cpu import codegen, lowering, runtime, ttir  # noqa: E402
from kda.triton_cpu.lowering import amx  # noqa: E402

GROUPS = (
    "binary", "division_never_traps functions diagnostics", "casts", "float8 shapes masks", "reductions",
    "memory control", "products",
)  # fmt: skip


# All groups on the path that users get; on the others what is lowered differently there.
PATHS = [isa for isa in runtime.ISAS if not runtime.missing(isa)]
CASES = [(groups, PATHS[-1]) for groups in GROUPS] + [("products casts memory", isa) for isa in PATHS[:-1]]


@pytest.mark.parametrize("groups,isa", CASES)
def test_operations_equal_torch(session_programs, groups, isa):
    session_programs.run(f"import lowering_cases; lowering_cases.run({groups!r})", KDA_CPU_ISA=isa)


# c += a @ b for bf16 a [32, 64] and b [64, 32], from tiles whose elements lie side by side.
PRODUCT = """
module {
  tt.func public @product(%p: !tt.ptr<bf16>, %q: !tt.ptr<f32>) {
    %i = tt.make_range {end = 2048 : i32, start = 0 : i32} : tensor<2048xi32>
    %j = tt.make_range {end = 1024 : i32, start = 0 : i32} : tensor<1024xi32>
    %p0 = tt.splat %p : !tt.ptr<bf16> -> tensor<2048x!tt.ptr<bf16>>
    %p1 = tt.addptr %p0, %i : tensor<2048x!tt.ptr<bf16>>, tensor<2048xi32>
    %x = tt.load %p1 : tensor<2048x!tt.ptr<bf16>>
    %a = tt.reshape %x : tensor<2048xbf16> -> tensor<32x64xbf16>
    %b = tt.reshape %x : tensor<2048xbf16> -> tensor<64x32xbf16>
    %q0 = tt.splat %q : !tt.ptr<f32> -> tensor<1024x!tt.ptr<f32>>
    %q1 = tt.addptr %q0, %j : tensor<1024x!tt.ptr<f32>>, tensor<1024xi32>
    %y = tt.load %q1 : tensor<1024x!tt.ptr<f32>>
    %c = tt.reshape %y : tensor<1024xf32> -> tensor<32x32xf32>
    %d = tt.dot %a, %b, %c : tensor<32x64xbf16> * tensor<64x32xbf16> -> tensor<32x32xf32>
    %z = tt.reshape %d : tensor<32x32xf32> -> tensor<1024xf32>
    tt.store %q1, %z : tensor<1024x!tt.ptr<f32>>
    tt.return
  }
}
"""
INSTRUCTIONS = {
    "generic": ({"mulps", "addps"}, {"%ymm", "%zmm"}),
    "avx2": ({"vfmadd", "%ymm"}, {"%zmm"}),
    "avx512": ({"vfmadd", "%zmm"}, {"vdpbf16ps"}),
    "avx512bf16": ({"vdpbf16ps", "%zmm"}, {"tdpbf16ps"}),
    "amx": ({"tdpbf16ps", "tileloadd", "tilestored", "ldtilecfg"}, set()),
}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86-64 code")
@pytest.mark.parametrize("isa", INSTRUCTIONS)
def test_a_product_uses_the_instructions_of_its_processor_path(isa):
    features = runtime.features(isa)
    cpu, flags = runtime._FORCED[isa]  # whatever this machine has
    features = dataclasses.replace(features, cpu=cpu, features=flags)
    text = lowering.lower(ttir.parse(PRODUCT), features=features)
    assembly = codegen.assembly(codegen.optimize(text, features), features)
    present, absent = INSTRUCTIONS[isa]
    assert not [word for word in present if word not in assembly]
    assert not [word for word in absent if f"\t{word}" in assembly or word in assembly and word[0] == "%"]


def test_amx_tiles_cover_a_product(monkeypatch):
    """The blocks and steps around the tile instructions; those themselves done in memory, as few machines have them."""
    monkeypatch.setattr(amx, "Tiles", TilesInMemory)
    text = lowering.lower(ttir.parse(PRODUCT), features=runtime.features("amx"))
    assert "@amx.32x32" in text
    features = runtime.features(runtime.best_isa())
    module = codegen.optimize(codegen.join(text, runtime.launch_code()), features)
    kernel = runtime.Kernel("product", codegen.object_code(module, features), features.isa)
    x, c = torch.randint(-4, 5, (2048,)).bfloat16(), torch.ones(32, 32)
    kernel.launch(1, 1, 1, struct.pack("<QQ", x.data_ptr(), c.data_ptr()), 1)
    assert torch.equal(c, x.view(32, 64).float() @ x.view(64, 32).float() + 1)


class TilesInMemory:
    """`amx.Tiles` with a tile as a vector of 16 x 16 words."""

    TILE = "<256 x i32>"

    @staticmethod
    def zero(code, rows, width):
        return "zeroinitializer"

    @classmethod
    def load(cls, code, rows, width, pointer, step):
        def body(inner):
            tile = inner.slot(cls.TILE, "zeroinitializer")
            with inner.loop("0", str(rows)) as i, inner.loop("0", str(width // 4)) as j:
                word = inner.get("i32", cls.word(inner, "%p", i, step // 4, j))
                inner.set("i32", cls.word(inner, tile, i, 16, j), word)
            inner.do(f"ret {cls.TILE} {inner.get(cls.TILE, tile)}")

        function = code.module.helper(f"load.{rows}.{width}.{step}", cls.TILE, "ptr %p", body)
        return code.call(cls.TILE, function, f"ptr {pointer}")

    @classmethod
    def store(cls, code, rows, width, pointer, step, tile):
        def body(inner):
            held = inner.slot(cls.TILE, "%t")
            with inner.loop("0", str(rows)) as i, inner.loop("0", str(width // 4)) as j:
                word = inner.get("i32", cls.word(inner, held, i, 16, j))
                inner.set("i32", cls.word(inner, "%p", i, step // 4, j), word)
            inner.do("ret void")

        function = code.module.helper(f"store.{rows}.{width}.{step}", "void", f"ptr %p, {cls.TILE} %t", body)
        code.do(f"call void {function}(ptr {pointer}, {cls.TILE} {tile})")

    @classmethod
    def multiply_add(cls, code, rows, width, inner_width, c, a, b):
        def body(inner):
            sums, left, right = (inner.slot(cls.TILE, f"%{name}") for name in "cab")
            with (
                inner.loop("0", str(rows)) as i, inner.loop("0", str(width // 4)) as j,
                inner.loop("0", str(inner_width // 4)) as k,
            ):  # fmt: skip
                place = cls.word(inner, sums, i, 16, j)
                total = inner.get("float", place)
                words = [inner.get("i32", cls.word(inner, *at)) for at in ((left, i, 16, k), (right, k, 16, j))]
                for take in ("shl i32 {}, 16", "and i32 {}, -65536"):
                    x, y = (inner.ins(f"bitcast i32 {inner.ins(take.format(word))} to float") for word in words)
                    total = inner.ins(f"fadd float {total}, {inner.ins(f'fmul float {x}, {y}')}")
                inner.set("float", place, total)
            inner.do(f"ret {cls.TILE} {inner.get(cls.TILE, sums)}")

        types = ", ".join(f"{cls.TILE} %{name}" for name in "cab")
        function = code.module.helper(f"multiply.{rows}.{width}.{inner_width}", cls.TILE, types, body)
        return code.call(cls.TILE, function, ", ".join(f"{cls.TILE} {tile}" for tile in (c, a, b)))

    @staticmethod
    def word(code, base, i, step, j):
        offset = code.ins(f"add i64 {code.ins(f'mul i64 {i}, {step}')}, {j}")
        return code.ins(f"getelementptr i32, ptr {base}, i64 {offset}")


@pytest.mark.parametrize("isa", PATHS)
def test_rows_done_in_one_loop_equal_torch(session_programs, isa):
    session_programs.run("import row_cases; row_cases.run()", KDA_CPU_ISA=isa)
