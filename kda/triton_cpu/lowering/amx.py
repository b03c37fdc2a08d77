# SPDX-License-Identifier: Apache-2.0
"""Matrix products in AMX tile registers: `tdpbf16ps` on [16, 32] bf16 times [32, 16] bf16 into [16, 16] fp32.

Operands are words of two bf16 that are neighbours in K: a [M, K / 2] and b [K / 2, N], both row-major. A block of c is
2 x 2 tiles; K goes in runs that are written out, so that no tile crosses a loop's edge.
"""
from __future__ import annotations

from kda.triton_cpu.lowering.emit import Code

RUN = 4  # tiles along K that are written out


class Tiles:
    """The instructions. Sizes are rows and bytes of a row; LLVM writes the tile configuration from them."""

    @staticmethod
    def zero(code: Code, rows: int, width: int) -> str:
        return code.intrinsic("llvm.x86.tilezero.internal", "x86_amx", ["i16"] * 2, [str(rows), str(width)])

    @staticmethod
    def load(code: Code, rows: int, width: int, pointer: str, step: int) -> str:
        types, args = ["i16", "i16", "ptr", "i64"], [str(rows), str(width), pointer, str(step)]
        return code.intrinsic("llvm.x86.tileloadd64.internal", "x86_amx", types, args)

    @staticmethod
    def store(code: Code, rows: int, width: int, pointer: str, step: int, tile: str) -> None:
        name = "llvm.x86.tilestored64.internal"
        code.module.declare(name, "void", "i16, i16, ptr, i64, x86_amx")
        code.do(f"call void @{name}(i16 {rows}, i16 {width}, ptr {pointer}, i64 {step}, x86_amx {tile})")

    @staticmethod
    def multiply_add(code: Code, rows: int, width: int, inner: int, c: str, a: str, b: str) -> str:
        types = ["i16"] * 3 + ["x86_amx"] * 3
        args = [str(rows), str(width), str(inner), c, a, b]
        return code.intrinsic("llvm.x86.tdpbf16ps.internal", "x86_amx", types, args)


def write(code: Code, rows: int, columns: int, inner: int, am: int, bk: int, cm: int, zero: bool) -> None:
    """The body of `(a, b, c)`: c += a @ b, or c = a @ b with `zero`. `inner` and all steps are in 4-byte words."""
    tiles = Tiles
    height, width, depth = min(rows, 16), min(columns, 16), min(inner, 16)
    tall, wide = min(rows // height, 2), min(columns // width, 2)
    steps = inner // depth
    run = max(n for n in range(1, RUN + 1) if steps % n == 0)

    def place(base: str, *terms: tuple[str, int]) -> str:
        for index, step in terms:
            amount = str(int(index) * step) if index.isdigit() else code.ins(f"mul i64 {index}, {step}")
            base = code.ins(f"getelementptr i32, ptr {base}, i64 {amount}")
        return base

    def block(n: str, m: str, k: str, fresh: bool) -> None:
        sums = {}
        for i in range(tall):
            for j in range(wide):
                at = place("%c", (m, cm), (str(i * height), cm), (n, 1), (str(j * width), 1))
                tile = tiles.zero(code, height, 4 * width) if fresh else tiles.load(code, height, 4 * width, at, 4 * cm)
                sums[i, j] = (at, tile)
        for step in range(run):
            at_k = [(k, 1), (str(step * depth), 1)]
            left = [
                tiles.load(code, height, 4 * depth, place("%a", (m, am), (str(i * height), am), *at_k), 4 * am)
                for i in range(tall)
            ]
            for j in range(wide):
                at = place("%b", *((index, bk * scale) for index, scale in at_k), (n, 1), (str(j * width), 1))
                right = tiles.load(code, depth, 4 * width, at, 4 * bk)
                for i in range(tall):
                    at_c, tile = sums[i, j]
                    sums[i, j] = at_c, tiles.multiply_add(code, height, 4 * width, 4 * depth, tile, left[i], right)
        for at, tile in sums.values():
            tiles.store(code, height, 4 * width, at, 4 * cm, tile)

    with code.loop("0", str(columns), str(wide * width)) as n, code.loop("0", str(rows), str(tall * height)) as m:
        block(n, m, "0", zero)
        if steps > run:
            with code.loop(str(run * depth), str(inner), str(run * depth)) as k:
                block(n, m, k, False)
    code.do("ret void")
