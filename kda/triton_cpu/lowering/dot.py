# SPDX-License-Identifier: Apache-2.0
"""Matrix products: operands brought into the layout of a microkernel, then `c += a @ b` on tiles in the arena.

The microkernel holds a block of c in registers, MR rows by NR vectors, and walks K: it broadcasts elements of a (any
strides) and loads vectors of b (contiguous in N). bf16 operands go in pairs along K, a pair a 32-bit word, where the
processor multiplies such pairs into fp32; else they are widened to fp32 first, as fp16 always is.
"""
from __future__ import annotations

import functools

from kda.triton_cpu.lowering import amx
from kda.triton_cpu.lowering.casts import convert, suffix
from kda.triton_cpu.lowering.emit import Code, shuffle, splat
from kda.triton_cpu.lowering.lanes import Buffer, Lane, row_major
from kda.triton_cpu.lowering.types import BF16, F16, F32, F64, I32, element, ir, literal, shape, size_of, unsupported
from kda.triton_cpu.ttir import Op, Scalar, Value

PAIR = I32  # two bf16 that are neighbours in K


class Dot:
    """Mixin of the lowering."""

    code: Code

    def emit_dot(self, op: Op) -> None:
        a, b, c = op.operands[:3]
        kind = element(op.result.type)
        *batch, rows, inner = shape(a.type)
        columns = shape(b.type)[-1]
        source = element(a.type)
        sums = F32 if kind in (F16, BF16) else kind
        if kind.is_int != source.is_int or kind.name not in ("f32", "f64", "i32", "f16", "bf16"):
            raise unsupported(op, f"a product of {source} into {kind}")
        pairs = self.takes_pairs(op)
        tiles = pairs and self.amx and rows >= 8 and inner >= 16
        freed: list[Buffer] = []
        left = self._left(op, a, sums, pairs, freed)
        if tiles and left.steps[-1] != 1:
            left = self._transposed(op, (a, "tiles"), left, freed)
        right = self._right(op, b, sums, pairs, freed)
        output = self._output(op, c, sums, {left.ptr, right.ptr})
        zero = self.is_zero(c)
        if not zero:
            self._load_c(op, c, sums, output)
        helper = self._product(left, right, output, rows, columns, inner // 2 if pairs else inner, pairs, zero,
                               tiles)  # fmt: skip
        self._over_batches(tuple(batch), [left, right, output], helper)
        for buffer in freed:
            self.free_buffer(buffer)
        if sums is not kind:
            final = self.buffer_for(op.result)
            self._convert(op, output, final)
            self.free_buffer(output)
        elif self.env.get(op.result) is not output:
            self.bind_buffer(op.result, output)

    def takes_pairs(self, op: Op) -> bool:
        """Whether a product multiplies bf16 pairs in the processor (which takes subnormal numbers as zero)."""
        a, b = op.operands[:2]
        return (
            self.pairs and element(a.type) == element(b.type) == BF16 and element(op.result.type) in (F32, BF16, F16)
            and shape(a.type)[-1] % 2 == 0 and shape(b.type)[-1] >= self.lanes
        )  # fmt: skip

    def only_pairs(self, value: Value) -> bool:
        """Whether a bf16 value is read by such products alone: then it need not be rounded to a subnormal number."""
        users = self.plan.consumers.get(value)
        return bool(users) and all(user.name == "tt.dot" and self.takes_pairs(user) for user in users)

    def is_zero(self, value: Value) -> bool:
        op = value.op
        return op is not None and op.name == "arith.constant" and op.attrs["value"] in (0, 0.0) \
            and str(op.attrs["value"])[0] != "-"

    def _output(self, op: Op, c: Value, sums: Scalar, operands: set[str]) -> Buffer:
        """The tile of c itself where nothing else needs it, else a new one."""
        if sums == element(op.result.type):
            buffer = self.take_over(c, op)
            if buffer is not None and buffer.ptr not in operands and buffer.steps == row_major(buffer.shape):
                if c.op is None:
                    self.env[op.result] = buffer  # the loop that carries it keeps it
                else:
                    self.bind_buffer(op.result, buffer)
                return buffer
        return self.new_buffer(shape(op.result.type), sums)

    def _load_c(self, op: Op, c: Value, sums: Scalar, output: Buffer) -> None:
        kind = element(c.type)
        if kind == sums:
            self.materialise(c, output)
        else:
            self.nest(output.shape, lambda point: self.write(output, point, self._as(op, c, sums, point)), None)

    def _convert(self, op: Op, source: Buffer, target: Buffer) -> None:
        def body(point: tuple[Lane, ...]) -> None:
            lane = self.read(source, point)
            width = self.width if lane.kind == "v" else 1
            text = convert(self.code, op, lane.ssa, source.kind, target.kind, width)
            self.write(target, point, Lane(lane.kind, text))

        self.nest(target.shape, body)

    # ---- operands ---------------------------------------------------------------------------------------------------

    def _as(self, op: Op, value: Value, kind: Scalar, point: tuple[Lane, ...]) -> Lane:
        """Lanes of `value` widened to `kind`."""
        lane, source = self.at(value, point), element(value.type)
        if source == kind:
            return lane
        width = 1 if lane.kind == "u" else self.width
        text = lane.ssa if width == 1 else self.vector(lane, source)
        if source.is_int:
            text = self.code.ins(f"sext {ir(source, width)} {text} to {ir(kind, width)}")
        else:
            text = convert(self.code, op, text, source, kind, width)
        return Lane("u" if width == 1 else "v", text)

    def _view(self, op: Op, value: Value, kind: Scalar, freed: list[Buffer]) -> tuple[Buffer, Value]:
        """A tile of `value` as `kind` with any steps, and the value behind its transpositions."""
        order = list(range(len(shape(value.type))))
        root = value
        while root in self.plan.lazy and root.op.name == "tt.trans":
            order = [root.op.attrs["order"][axis] for axis in order]
            root = root.op.operands[0]
        tile = self.env.get(root)
        if not isinstance(tile, Buffer) or tile.kind != kind:
            key = (root, str(kind))
            if key in self.packed:
                tile = self.packed[key]
            else:
                tile = self.new_buffer(shape(root.type), kind)
                into = tile
                self.nest(tile.shape, lambda point: self.write(into, point, self._as(op, root, kind, point)),
                          self.best_axis(root))  # fmt: skip
                self._keep(op, key, tile, freed)
        steps = tuple(tile.steps[axis] for axis in order)
        return Buffer(tile.ptr, shape(value.type), steps, kind, tile.offset), root

    def _keep(self, op: Op, key: tuple, tile: Buffer, freed: list[Buffer]) -> None:
        """A packed operand stays for other products as long as its value lives."""
        root = key[0]
        alive = root.op is not None and root.op.parent is op.parent and root not in self.plan.lazy
        if alive and self.plan.death(root) is not None:
            self.packed[key] = tile
        else:
            freed.append(tile)

    def _left(self, op: Op, a: Value, sums: Scalar, pairs: bool, freed: list[Buffer]) -> Buffer:
        if not pairs:
            return self._view(op, a, sums, freed)[0]
        view, root = self._view(op, a, BF16, freed)
        if view.steps[-1] == 1 and all(step % 2 == 0 for step in view.steps[:-1]):
            steps = tuple(step // 2 for step in view.steps[:-1]) + (1,)
            return Buffer(view.ptr, (*view.shape[:-1], view.shape[-1] // 2), steps, PAIR)
        flipped = Buffer(view.ptr, (*view.shape[:-2], view.shape[-1], view.shape[-2]),
                         (*view.steps[:-2], view.steps[-1], view.steps[-2]), BF16)  # fmt: skip
        tile = self._interleave(op, (root, "pairs", flipped.steps), flipped, freed)
        steps = (*tile.steps[:-2], tile.steps[-1], tile.steps[-2])
        return Buffer(tile.ptr, (*view.shape[:-1], view.shape[-1] // 2), steps, PAIR)

    def _right(self, op: Op, b: Value, sums: Scalar, pairs: bool, freed: list[Buffer]) -> Buffer:
        view, root = self._view(op, b, BF16 if pairs else sums, freed)
        *batch, inner, columns = view.shape
        if not pairs:
            if view.steps[-1] == 1 or columns == 1:
                return view
            return self._transposed(op, (root, "rows", view.steps), view, freed)
        if view.steps[-2] == 1 and all(step % 2 == 0 for step in (*view.steps[:-2], view.steps[-1])):
            steps = tuple(step // 2 for step in view.steps)  # words [K / 2, N], contiguous along K
            words = Buffer(view.ptr, (*batch, inner // 2, columns), (*steps[:-2], 1, steps[-1]), PAIR)
            return self._transposed(op, (root, "words", view.steps), words, freed)
        return self._interleave(op, (root, "pairs", view.steps), view, freed)

    def _interleave(self, op: Op, key: tuple, view: Buffer, freed: list[Buffer]) -> Buffer:
        """[.., K, N] bf16 as words [.., K / 2, N] of two neighbours in K."""
        if key in self.packed:
            return self.packed[key]
        *batch, inner, columns = view.shape
        tile = self.new_buffer((*batch, inner // 2, columns), PAIR)

        def body(point: tuple[Lane, ...]) -> None:
            halves = []
            for odd in (0, 1):
                row = self.add(self.times(point[-2], 2), Lane("u", str(odd)))
                lane = self.read(view, (*point[:-2], row, point[-1]))
                width = self.width if lane.kind == "v" else 1
                halves.append(self.code.ins(f"zext {ir(BF16, width)} {lane.ssa} to {ir(PAIR, width)}"))
            high = self.code.ins(f"shl {ir(PAIR, width)} {halves[1]}, {splat(self.code, 'i32', '16', width)}")
            words = self.code.ins(f"or {ir(PAIR, width)} {halves[0]}, {high}")
            self.write(tile, point, Lane("v" if width > 1 else "u", words))

        self.nest(tile.shape, body)
        self._keep(op, key, tile, freed)
        return tile

    def _transposed(self, op: Op, key: tuple, view: Buffer, freed: list[Buffer]) -> Buffer:
        """A row-major copy of a view that is contiguous along its rows' dim (or not at all)."""
        if key in self.packed:
            return self.packed[key]
        tile = self.new_buffer(view.shape, view.kind)
        *batch, rows, columns = view.shape
        block = min(self.lanes, rows, columns)
        if view.steps[-2] != 1 or block < 4 or size_of(view.kind) != 4:
            self.nest(tile.shape, lambda point: self.write(tile, point, self.read(view, point)))
        else:
            helper = self._transpose_helper(columns, rows, view.steps[-1], block)
            self._over_batches(tuple(batch), [view, tile], helper)
        self._keep(op, key, tile, freed)
        return tile

    def can_turn(self, buffer: Buffer) -> bool:
        return (
            len(buffer.shape) == 2 and buffer.steps == row_major(buffer.shape) and min(buffer.shape) >= 4
            and size_of(buffer.kind) == 4
        )  # fmt: skip

    def turn(self, source: Buffer, target: Buffer) -> None:
        """Copies a tile that is contiguous along its first dim to a row-major one, or the other way round."""
        rows, columns = target.shape if target.steps[-1] == 1 else target.shape[::-1]
        helper = self._transpose_helper(columns, rows, rows, min(self.lanes, rows, columns))
        self.code.do(f"call void {helper}(ptr {source.ptr}, ptr {target.ptr})")

    def _over_batches(self, batch: tuple[int, ...], tiles: list[Buffer], helper: str) -> None:
        def body(point: tuple[Lane, ...]) -> None:
            args = []
            for tile in tiles:
                offset = self.times(self.linear(point, tile.steps[: len(batch)]), size_of(tile.kind))
                pointer = tile.ptr
                if offset.const != 0:
                    pointer = self.code.ins(f"getelementptr i8, ptr {tile.ptr}, i64 {offset.ssa}")
                args.append(f"ptr {pointer}")
            self.code.do(f"call void {helper}({', '.join(args)})")

        self.nest(batch, body, scalar=True)

    # ---- kernels ----------------------------------------------------------------------------------------------------

    def _transpose_helper(self, rows: int, columns: int, step: int, block: int) -> str:
        """[rows, columns] words, `step` from row to row, into contiguous [columns, rows]; by blocks in registers."""
        vector = f"<{block} x i32>"

        def write(code: Code) -> None:
            with code.loop("0", str(rows), str(block)) as i, code.loop("0", str(columns), str(block)) as j:
                source = code.ins(f"add i64 {code.ins(f'mul i64 {i}, {step}')}, {j}")
                lines = []
                for r in range(block):
                    place = code.ins(f"getelementptr i32, ptr %a, i64 {code.ins(f'add i64 {source}, {r * step}')}")
                    lines.append(code.ins(f"load {vector}, ptr {place}, align 4"))
                s = block // 2
                while s:
                    for r in range(block):
                        if not r & s:
                            a, b = lines[r], lines[r + s]
                            low = [(n if not n & s else block + n - s) for n in range(block)]
                            high = [(n + s if not n & s else block + n) for n in range(block)]
                            lines[r] = shuffle(code, vector, a, b, low)
                            lines[r + s] = shuffle(code, vector, a, b, high)
                    s //= 2
                target = code.ins(f"add i64 {code.ins(f'mul i64 {j}, {rows}')}, {i}")
                for r in range(block):
                    place = code.ins(f"getelementptr i32, ptr %b, i64 {code.ins(f'add i64 {target}, {r * rows}')}")
                    code.do(f"store {vector} {lines[r]}, ptr {place}, align 4")
            code.do("ret void")

        name = f"transpose.{rows}x{columns}.{step}.{block}"
        return self.module.helper(name, "void", "ptr noalias %a, ptr noalias %b", write, "noinline")

    def _product(self, left: Buffer, right: Buffer, output: Buffer, rows: int, columns: int, inner: int, pairs: bool,
                 zero: bool, tiles: bool) -> str:  # fmt: skip
        """The helper `(a, b, c)`: c += a @ b, or c = a @ b with `zero`; all sizes and steps are constants of it."""
        kind = output.kind
        (am, ak), (bk, bn), (cm, cn) = (tile.steps[-2:] for tile in (left, right, output))
        if columns > 1 and (bn != 1 or cn != 1):
            raise AssertionError("rows of b and c must be contiguous")
        args = "ptr %a, ptr %b, ptr noalias %c"
        shape_name = f"{rows}x{columns}x{inner}.{am}.{ak}.{bk}.{cm}{'.zero' if zero else ''}"
        if tiles:
            body = functools.partial(amx.write, rows=rows, columns=columns, inner=inner, am=am, bk=bk, cm=cm, zero=zero)
            return self.module.helper(f"amx.{shape_name}", "void", args, body, "noinline")
        lanes = min(self.lanes if kind != F64 else self.lanes // 2, columns)
        registers = 32 if self.vector_bytes == 64 else 16
        vectors = min(columns // lanes, 2)
        tall = min(rows, registers // 4 if vectors == 2 else registers // 2 if registers == 32 else 6)
        while rows % tall:
            tall -= 1
        word = ir(PAIR) if pairs else ir(kind)
        name = f"dot{'2' if pairs else ''}.{kind}.{shape_name}"

        def write(code: Code) -> None:
            vector = ir(kind, lanes)
            with code.loop("0", str(columns), str(vectors * lanes)) as n, code.loop("0", str(rows), str(tall)) as m:
                a_rows = [_place(code, word, "%a", [(m, am), (str(r), am)]) for r in range(tall)]
                b_first = _place(code, word, "%b", [(n, 1)])
                places, sums = [], []
                for r in range(tall):
                    for v in range(vectors):
                        place = _place(code, ir(kind), "%c", [(m, cm), (str(r), cm), (n, 1), (str(v * lanes), 1)])
                        places.append(place)
                        start = f"splat ({ir(kind)} {literal(0, kind)})" if lanes > 1 else literal(0, kind)
                        if not zero:
                            start = code.ins(f"load {vector}, ptr {place}, align {size_of(kind)}")
                        sums.append(code.slot(vector, start))
                with code.loop("0", str(inner)) as k:
                    line = _place(code, word, b_first, [(k, bk)])
                    wide = word if lanes == 1 else f"<{lanes} x {word}>"
                    bs = []
                    for v in range(vectors):
                        place = _place(code, word, line, [(str(v * lanes), 1)])
                        bs.append(code.ins(f"load {wide}, ptr {place}, align 4"))
                    for r in range(tall):
                        one = code.ins(f"load {word}, ptr {_place(code, word, a_rows[r], [(k, ak)])}, align 4")
                        many = splat(code, word, one, lanes)
                        for v in range(vectors):
                            slot = sums[r * vectors + v]
                            old = code.get(vector, slot)
                            code.set(vector, slot, _multiply_add(code, kind, lanes, pairs, many, bs[v], old))
                for place, slot in zip(places, sums):
                    code.do(f"store {vector} {code.get(vector, slot)}, ptr {place}, align {size_of(kind)}")
            code.do("ret void")

        return self.module.helper(name, "void", args, write, "noinline")


def _place(code: Code, kind: str, pointer: str, terms: list[tuple[str, int]]) -> str:
    """`pointer` + sum of index * step, in elements."""
    for index, step in terms:
        if index.lstrip("-").isdigit():
            amount = str(int(index) * step)
            if amount == "0":
                continue
        else:
            amount = index if step == 1 else code.ins(f"mul i64 {index}, {step}")
        pointer = code.ins(f"getelementptr {kind}, ptr {pointer}, i64 {amount}")
    return pointer


def _multiply_add(code: Code, kind: Scalar, lanes: int, pairs: bool, a: str, b: str, c: str) -> str:
    vector = ir(kind, lanes)
    if pairs:
        halves = f"<{2 * lanes} x bfloat>"
        a, b = (code.ins(f"bitcast <{lanes} x i32> {x} to {halves}") for x in (a, b))
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
        return code.intrinsic(name, vector, [vector, halves, halves], [c, a, b])
    if kind.is_int:
        return code.ins(f"add {vector} {c}, {code.ins(f'mul {vector} {a}, {b}')}")
    return code.intrinsic(f"llvm.fmuladd.{suffix(kind, lanes)}", vector, [vector] * 3, [a, b, c])
