# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, gathers, atomics, the loop nests around them, and tiles in the arena.

The memory of a masked-off lane is never touched.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from kda.triton_cpu.lowering.analysis import VIEWS
from kda.triton_cpu.lowering.casts import from_f32, suffix, to_f32
from kda.triton_cpu.lowering.emit import Code, Module, splat
from kda.triton_cpu.lowering.lanes import ZERO, Address, Buffer, Lane, row_major
from kda.triton_cpu.lowering.types import I1, I8, I64, element, ir, literal, shape, size_of, stored, unsupported
from kda.triton_cpu.ttir import Op, Pointer, Scalar, Tensor, Value

MOST_UNROLLED, UNROLLED_LINES = 16, 96  # an innermost loop is written out if it has few steps and few instructions
_TRUE, _FALSE = ("1", "true"), ("0", "false")
_RMW = {"add": "add", "and": "and", "or": "or", "xor": "xor", "max": "max", "min": "min", "umax": "umax",
        "umin": "umin", "exch": "xchg", "fadd": "fadd"}  # fmt: skip


class Arena:
    """Offsets of tiles in a thread's scratch memory, given out while code is written."""

    def __init__(self):
        self.free = [(0, 1 << 40)]
        self.taken: dict[int, int] = {}
        self.size = 0

    def take(self, size: int) -> int:
        size = -(-max(size, 1) // 64) * 64
        for i, (start, end) in enumerate(self.free):
            if end - start >= size:
                self.free[i] = (start + size, end)
                self.taken[start] = size
                self.size = max(self.size, start + size)
                return start
        raise MemoryError("the arena is full")

    def give(self, start: int) -> None:
        spans = sorted([*self.free, (start, start + self.taken.pop(start))])
        merged = [spans[0]]
        for low, high in spans[1:]:
            if low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.free = [span for span in merged if span[0] < span[1]]


def _keeps_first_dim(op: Op) -> bool:
    """Whether row i of the result of an elementwise operation or a view comes from row i of its operands."""
    if op.name in ("tt.reshape", "tt.broadcast"):
        return shape(op.operands[0].type)[:1] == shape(op.results[0].type)[:1]
    if op.name == "tt.trans":
        return op.attrs["order"][0] == 0
    return op.name not in VIEWS or op.name == "tt.split"


class Memory:
    """Mixin of the lowering."""

    code: Code
    module: Module
    arena: Arena

    # ---- tiles ------------------------------------------------------------------------------------------------------

    def new_buffer(self, extents: tuple[int, ...], kind: Scalar | Pointer, axis: int | None = None) -> Buffer:
        """A row-major tile, or one of two dims that is contiguous along `axis`."""
        steps = row_major(extents)
        count = extents[0] * steps[0] if extents else 1
        if axis == 0 and len(extents) == 2:
            steps = (1, extents[0])
        offset = self.arena.take(count * size_of(kind))
        pointer = self.code.at_entry(f"getelementptr i8, ptr %arena, i64 {offset}")
        return Buffer(pointer, extents, steps, kind, offset)

    def free_buffer(self, buffer: Buffer) -> None:
        if buffer.offset >= 0:
            self.arena.give(buffer.offset)

    def buffer_for(self, value: Value) -> Buffer:
        """A new tile that holds `value` until the plan says it dies."""
        buffer = self.new_buffer(shape(value.type), element(value.type))
        self.bind_buffer(value, buffer)
        return buffer

    def bind_buffer(self, value: Value, buffer: Buffer) -> None:
        self.env[value] = buffer
        self.owner[buffer.offset] = value

    def materialise(self, value: Value, buffer: Buffer) -> None:
        """Evaluates `value` into `buffer`."""
        bound = self.env.get(value)
        if isinstance(bound, Buffer) and bound.ptr == buffer.ptr:
            return
        axis = self.best_axis(value)
        if axis == 0 and self.can_turn(buffer):  # contiguous where it is read, then turned round in registers
            turned = self.new_buffer(buffer.shape, buffer.kind, 0)
            self.materialise(value, turned)
            self.turn(turned, buffer)
            self.free_buffer(turned)
        else:
            self.nest(buffer.shape, lambda point: self.write(buffer, point, self.at(value, point)), axis)

    def best_axis(self, value: Value) -> int | None:
        """The dim along which most loads below `value` are contiguous; None: the last."""
        votes: dict[int, int] = {}
        stack, seen = [value], set()
        rank = len(shape(value.type))
        while stack:
            value = stack.pop()
            if value in seen or value not in self.plan.lazy:
                bound = self.env.get(value)
                if isinstance(bound, Buffer) and bound.steps == (1, *bound.shape[:1]) and rank == 2:
                    votes[0] = votes.get(0, 0) + 1
                continue
            seen.add(value)
            if value.op.name == "tt.load":
                axis = self.plan.axis(value.op.operands[0])
                if axis is not None and len(shape(value.type)) == rank:
                    votes[axis] = votes.get(axis, 0) + 1
            elif value.op.name.startswith(("arith.", "math.", "tt.fp", "tt.bitcast", "tt.clampf", "tt.precise")):
                stack += value.op.operands
        return max(votes, key=lambda axis: (votes[axis], axis)) if votes else None

    # ---- loop nests -------------------------------------------------------------------------------------------------

    def nest(self, extents: tuple[int, ...], body: Callable[[tuple[Lane, ...]], None], axis: int | None = None,
             scalar: bool = False) -> None:  # fmt: skip
        """Runs `body(point)` over all of `extents`, lanes along `axis` (else the last dim that has more than one)."""
        live = [d for d, n in enumerate(extents) if n > 1]
        if axis is None or extents[axis] == 1:
            axis = live[-1] if live else None
        order = [d for d in live if d != axis] + ([axis] if axis is not None else [])
        width = 1 if scalar or axis is None else min(self.lanes, extents[axis])
        point: list[Lane] = [ZERO] * len(extents)

        def level(depth: int) -> None:
            if depth == len(order):
                with self.fresh_memo():
                    body(tuple(point))
                return
            d = order[depth]
            step = width if d == axis else 1
            kind = "a" if step > 1 else "u"
            trips = extents[d] // step
            if d == axis and 1 < trips <= MOST_UNROLLED:
                mark = len(self.code.lines)
                point[d] = Lane(kind, "0", int(kind == "a"), 0)
                level(depth + 1)
                if (len(self.code.lines) - mark) * trips <= UNROLLED_LINES:
                    for i in range(1, trips):
                        point[d] = Lane(kind, str(i * step), int(kind == "a"), step)
                        level(depth + 1)
                    return
                del self.code.lines[mark:]
            if trips == 1:
                point[d] = Lane(kind, "0", int(kind == "a"), 0)
                level(depth + 1)
            else:
                with self.code.loop("0", str(extents[d]), str(step), compare="ult") as i:
                    point[d] = Lane(kind, i, int(kind == "a"), step)
                    level(depth + 1)

        with self.lanes_of(width):
            level(0)

    # ---- loads ------------------------------------------------------------------------------------------------------

    def load_lanes(self, op: Op, point: tuple[Lane, ...]) -> Lane | Address:
        address = self.at(op.operands[0], point)
        mask = self.at(op.operands[1], point) if len(op.operands) > 1 else None
        other = self.at(op.operands[2], point) if len(op.operands) > 2 else None
        kind = element(op.results[0].type)
        self.check_bounds(op, address, mask, kind, op.operands[0])
        if op.attrs.get("isVolatile"):  # another program may write there: nothing read before is reused
            self.code.do('fence syncscope("singlethread") seq_cst')
        if isinstance(other, Address):
            other = self.address_lanes(other)
        if kind == I1 and other is not None:
            width = self.width if other.kind == "v" else 1
            other = Lane(other.kind, self.code.ins(f"zext {ir(I1, width)} {other.ssa} to {ir(I8, width)}"))
        lane = self.load_address(address, stored(kind), mask, other)
        if isinstance(kind, Pointer):
            return Address("null", lane)
        if kind == I1:
            width = self.width if lane.kind == "v" else 1
            zero = splat(self.code, "i8", "0", width)
            return Lane(lane.kind, self.code.ins(f"icmp ne {ir(I8, width)} {lane.ssa}, {zero}"))
        return lane

    def load_address(self, address: Address, kind: Scalar, mask: Lane | None, other: Lane | None) -> Lane:
        """Lanes from memory; masked-off lanes are `other` (zero if there is none)."""
        width, scalar, vector, size = self.width, ir(kind), ir(kind, self.width), size_of(kind)
        if mask is not None and mask.kind == "u" and mask.ssa in _TRUE:
            mask = None
        if other is None:
            other = Lane("u", literal(0, kind))
        if mask is not None and mask.kind == "u" and mask.ssa in _FALSE:
            return other
        offset = address.offset
        if offset.kind == "u":
            return self._load_uniform(address, kind, mask, other)
        if offset.kind == "a" and offset.step == size:
            pointer = self.pointer(address)
            if mask is None:
                return Lane("v", self.code.ins(f"load {vector}, ptr {pointer}, align {size}"))
            return Lane("v", self._masked_load(pointer, kind, self.vector(mask, I1), self.vector(other, kind)))
        lanes = self.pointers(address)
        mask_text = splat(self.code, "i1", "true", width) if mask is None else self.vector(mask, I1)
        passed = self.vector(other, kind)
        if self.has_gather and size >= 4:
            name = f"llvm.masked.gather.{suffix(kind, width)}.v{width}p0"
            types = [f"<{width} x ptr>", "i32", f"<{width} x i1>", vector]
            return Lane("v", self.code.intrinsic(name, vector, types, [lanes, str(size), mask_text, passed]))

        def write(code: Code) -> None:
            slots = [code.slot(f"<{width} x ptr>", "%p"), code.slot(f"<{width} x i8>", "%b"), code.slot(vector, "%o")]
            with code.loop("0", str(width)) as i:
                bit = code.get("i8", code.ins(f"getelementptr i8, ptr {slots[1]}, i64 {i}"))
                with code.when(code.ins(f"icmp ne i8 {bit}, 0")):
                    pointer = code.get("ptr", code.ins(f"getelementptr ptr, ptr {slots[0]}, i64 {i}"))
                    value = code.ins(f"load {scalar}, ptr {pointer}, align {size}")
                    code.set(scalar, code.ins(f"getelementptr {scalar}, ptr {slots[2]}, i64 {i}"), value)
            code.do(f"ret {vector} {code.get(vector, slots[2])}")

        types = f"<{width} x ptr> %p, <{width} x i8> %b, {vector} %o"
        helper = self.module.helper(f"gather.{suffix(kind, width)}", vector, types, write, "noinline")
        bits = self.code.ins(f"zext <{width} x i1> {mask_text} to <{width} x i8>")
        args = f"<{width} x ptr> {lanes}, <{width} x i8> {bits}, {vector} {passed}"
        return Lane("v", self.code.call(vector, helper, args))

    def _load_uniform(self, address: Address, kind: Scalar, mask: Lane | None, other: Lane) -> Lane:
        scalar, size = ir(kind), size_of(kind)
        pointer = self.pointer(address)
        if mask is None:
            return Lane("u", self.code.ins(f"load {scalar}, ptr {pointer}, align {size}"))
        any_lane = mask.ssa
        if mask.kind == "v":
            name = f"llvm.vector.reduce.or.v{self.width}i1"
            any_lane = self.code.intrinsic(name, "i1", [f"<{self.width} x i1>"], [mask.ssa])
        first = other.ssa if other.kind == "u" else literal(0, kind)
        slot = self.code.slot(scalar, first)
        with self.code.when(any_lane):
            self.code.set(scalar, slot, self.code.ins(f"load {scalar}, ptr {pointer}, align {size}"))
        value = self.code.get(scalar, slot)
        if mask.kind == "u" and other.kind == "u":
            return Lane("u", value)
        vector, mask_type = ir(kind, self.width), ir(I1, self.width)
        texts = self.vector(mask, I1), self.vector(Lane("u", value), kind), self.vector(other, kind)
        return Lane("v", self.code.ins(f"select {mask_type} {texts[0]}, {vector} {texts[1]}, {vector} {texts[2]}"))

    def _masked_load(self, pointer: str, kind: Scalar, mask: str, other: str) -> str:
        width, vector, size = self.width, ir(kind, self.width), size_of(kind)
        types = ["ptr", "i32", f"<{width} x i1>", vector]
        if self.masks_any or self.has_gather and size >= 4:
            name = f"llvm.masked.load.{suffix(kind, width)}.p0"
            return self.code.intrinsic(name, vector, types, [pointer, str(size), mask, other])

        def write(code: Code) -> None:
            scalar = ir(kind)
            bits, slot = code.slot(f"<{width} x i8>", "%b"), code.slot(vector, "%o")
            with code.loop("0", str(width)) as i:
                bit = code.get("i8", code.ins(f"getelementptr i8, ptr {bits}, i64 {i}"))
                with code.when(code.ins(f"icmp ne i8 {bit}, 0")):
                    source = code.ins(f"getelementptr {scalar}, ptr %p, i64 {i}")
                    value = code.ins(f"load {scalar}, ptr {source}, align {size}")
                    code.set(scalar, code.ins(f"getelementptr {scalar}, ptr {slot}, i64 {i}"), value)
            code.do(f"ret {vector} {code.get(vector, slot)}")

        helper = self.module.helper(
            f"load.{suffix(kind, width)}", vector, f"ptr %p, <{width} x i8> %b, {vector} %o", write, "noinline"
        )
        # Nearly always all lanes are wanted.
        all_lanes = self.code.intrinsic(f"llvm.vector.reduce.and.v{width}i1", "i1", [f"<{width} x i1>"], [mask])
        slot, full, part, end = self.code.slot(vector), *(self.code.fresh(h) for h in ("full", "part", "end"))
        self.code.branch(all_lanes, full, part)
        self.code.start(full)
        self.code.set(vector, slot, self.code.ins(f"load {vector}, ptr {pointer}, align {size}"))
        self.code.jump(end)
        self.code.start(part)
        bits = self.code.ins(f"zext <{width} x i1> {mask} to <{width} x i8>")
        value = self.code.call(vector, helper, f"ptr {pointer}, <{width} x i8> {bits}, {vector} {other}")
        self.code.set(vector, slot, value)
        self.code.jump(end)
        self.code.start(end)
        return self.code.get(vector, slot)

    # ---- stores -----------------------------------------------------------------------------------------------------

    def store_op(self, op: Op) -> None:
        pointer, value = op.operands[:2]

        def body(point: tuple[Lane, ...]) -> None:
            self.store_lanes(op, point)

        extents = shape(pointer.type)
        at_once = math.prod(extents) == max(extents, default=1) <= self.lanes  # one vector: all loads come first
        axis = self.plan.axis(pointer)
        if op in self.plan.staged and not at_once:
            tile = self.new_buffer(extents, element(value.type), axis)
            with self.turned(value, axis):
                self.nest(extents, lambda point: self.write(tile, point, self.at(value, point)), axis)
            bound, self.env[value] = self.env.get(value), tile
            self.nest(extents, body, axis)
            self.env[value] = bound
            self.free_buffer(tile)
        else:
            with self.turned(value, axis):
                self.nest(extents, body, axis)

    @contextlib.contextmanager
    def turned(self, value: Value, axis: int | None) -> Iterator[None]:
        """Within, row-major tiles `value` reads along their first dim are contiguous there: turned in registers."""
        found: dict[Value, Buffer] = {}
        stack, seen = [value] if axis == 0 and len(shape(value.type)) == 2 else [], set()
        while stack:
            value = stack.pop()
            bound = self.env.get(value)
            if value in seen:
                continue
            seen.add(value)
            if isinstance(bound, Buffer):
                if self.can_turn(bound) and bound.shape[0] >= self.lanes:
                    found[value] = bound
            elif value in self.plan.lazy:
                op = value.op
                if _keeps_first_dim(op):
                    stack += [operand for operand in op.operands if isinstance(operand.type, Tensor)]
        tiles = {}
        for value, bound in found.items():
            tiles[value] = self.new_buffer(bound.shape, bound.kind, 0)
            self.turn(bound, tiles[value])
        self.env.update(tiles)
        yield
        self.env.update(found)
        for tile in tiles.values():
            self.free_buffer(tile)

    def store_lanes(self, op: Op, point: tuple[Lane, ...]) -> None:
        pointer, value, *rest = op.operands
        kind = element(value.type)
        mask = self.at(rest[0], point) if rest else None
        address = self.at(pointer, point)
        self.check_bounds(op, address, mask, kind, pointer)
        lane = self.at(value, point)
        if isinstance(lane, Address):
            lane = self.address_lanes(lane)
        self.store_address(address, lane, kind, mask)

    def store_address(self, address: Address, lane: Lane, kind: Scalar | Pointer, mask: Lane | None) -> None:
        width, size, held = self.width, size_of(kind), stored(kind)
        if mask is not None and mask.kind == "u":
            if mask.ssa in _FALSE:
                return
            if mask.ssa in _TRUE:
                mask = None
        text = self.vector(lane, kind if isinstance(kind, Scalar) else I64)
        if kind == I1:
            text = self.code.ins(f"zext {ir(I1, width)} {text} to {ir(held, width)}")
        vector = ir(held, width)
        contiguous = width == 1 or address.offset.kind == "a" and address.offset.step == size
        if mask is None or mask.kind == "u":  # a plain store, under a branch if need be
            context = self.code.when(mask.ssa) if mask is not None else None
            pointer = self.pointer(address) if contiguous else self.pointers(address)
            if context:
                context.__enter__()
            if contiguous:
                self.code.do(f"store {vector} {text}, ptr {pointer}, align {size}")
            else:
                self._scatter(pointer, held, text, splat(self.code, "i1", "true", width))
            if context:
                context.__exit__(None, None, None)
            return
        if contiguous and (self.masks_any or self.has_gather and size >= 4):
            name = f"llvm.masked.store.{suffix(held, width)}.p0"
            types = [vector, "ptr", "i32", f"<{width} x i1>"]
            self.module.declare(name, "void", ", ".join(types))
            args = zip(types, [text, self.pointer(address), str(size), mask.ssa])
            self.code.do(f"call void @{name}({', '.join(f'{t} {a}' for t, a in args)})")
            return
        self._scatter(self.pointers(address), held, text, self.vector(mask, I1))

    def _scatter(self, pointers: str, kind: Scalar, text: str, mask: str) -> None:
        """Lanes in order: of equal addresses the last one stays."""
        width, scalar, vector, size = self.width, ir(kind), ir(kind, self.width), size_of(kind)
        types = [vector, f"<{width} x ptr>", "i32", f"<{width} x i1>"]
        if self.masks_any and size >= 4:
            name = f"llvm.masked.scatter.{suffix(kind, width)}.v{width}p0"
            self.module.declare(name, "void", ", ".join(types))
            args = zip(types, [text, pointers, str(size), mask])
            self.code.do(f"call void @{name}({', '.join(f'{t} {a}' for t, a in args)})")
            return

        def write(code: Code) -> None:
            slots = [code.slot(f"<{width} x ptr>", "%p"), code.slot(f"<{width} x i8>", "%b"), code.slot(vector, "%v")]
            with code.loop("0", str(width)) as i:
                bit = code.get("i8", code.ins(f"getelementptr i8, ptr {slots[1]}, i64 {i}"))
                with code.when(code.ins(f"icmp ne i8 {bit}, 0")):
                    pointer = code.get("ptr", code.ins(f"getelementptr ptr, ptr {slots[0]}, i64 {i}"))
                    value = code.get(scalar, code.ins(f"getelementptr {scalar}, ptr {slots[2]}, i64 {i}"))
                    code.do(f"store {scalar} {value}, ptr {pointer}, align {size}")
            code.do("ret void")

        types = f"<{width} x ptr> %p, <{width} x i8> %b, {vector} %v"
        helper = self.module.helper(f"scatter.{suffix(kind, width)}", "void", types, write, "noinline")
        bits = self.code.ins(f"zext <{width} x i1> {mask} to <{width} x i8>")
        self.code.do(f"call void {helper}(<{width} x ptr> {pointers}, <{width} x i8> {bits}, {vector} {text})")

    # ---- atomics ----------------------------------------------------------------------------------------------------

    def atomic(self, op: Op) -> None:
        """Element by element; where masked off, the result is zero."""
        result = op.results[0] if op.results else None
        tensor = result is not None and isinstance(result.type, Tensor)
        kind = element(op.operands[0].type).element
        buffer = self.buffer_for(result) if tensor else None
        write, count = {
            "tt.atomic_rmw": (self._read_modify_write, 1), "tt.atomic_cas": (self._compare_exchange, 2),
            "tt.atomic_load": (self._atomic_load, 0), "tt.atomic_store": (self._atomic_store, 1),
        }[op.name]  # fmt: skip
        masks = op.operands[1 + count :]
        out: list[str] = []

        def body(point: tuple[Lane, ...]) -> None:
            mask = self.at(masks[0], point) if masks else None
            address = self.at(op.operands[0], point)
            self.check_bounds(op, address, mask, kind, op.operands[0])
            lanes = [self.at(value, point) for value in op.operands[1 : 1 + count]]
            texts = [(self.address_lanes(lane) if isinstance(lane, Address) else lane).ssa for lane in lanes]
            held = stored(kind)
            slot = self.code.slot(ir(held), literal(0, held))
            pointer = self.pointer(address)
            with self.code.when(mask.ssa if mask else "true"):
                self.code.set(ir(held), slot, write(op, pointer, texts, held))
            value = self.code.get(ir(held), slot)
            if buffer is not None:
                self.write(buffer, point, Lane("u", value))
            else:
                out.append(value)

        self.nest(shape(op.operands[0].type), body, scalar=True)
        if result is not None and not tensor:
            self.env[result] = out[0]

    def _atomic_load(self, op: Op, pointer: str, texts: list[str], kind: Scalar) -> str:
        return self.code.ins(f"load atomic {ir(kind)}, ptr {pointer} seq_cst, align {size_of(kind)}")

    def _atomic_store(self, op: Op, pointer: str, texts: list[str], kind: Scalar) -> str:
        self.code.do(f"store atomic {ir(kind)} {texts[0]}, ptr {pointer} seq_cst, align {size_of(kind)}")
        return texts[0]

    def _read_modify_write(self, op: Op, pointer: str, texts: list[str], kind: Scalar) -> str:
        what = op.attrs["atomic_rmw_op"]
        if what not in _RMW:
            raise unsupported(op, f"atomic {what}")
        if kind.name in ("bf16", "f16") and what == "fadd":
            return self.code.call(ir(kind), self._narrow_add(op, kind), f"ptr {pointer}, {ir(kind)} {texts[0]}")
        name = _RMW[what]
        if kind.is_float and name in ("max", "min"):
            name = "f" + name
        align = size_of(kind)
        return self.code.ins(f"atomicrmw {name} ptr {pointer}, {ir(kind)} {texts[0]} seq_cst, align {align}")

    def _compare_exchange(self, op: Op, pointer: str, texts: list[str], kind: Scalar) -> str:
        bits = f"i{kind.bits}"
        if kind.is_float and ir(kind) != bits:
            texts = [self.code.ins(f"bitcast {ir(kind)} {text} to {bits}") for text in texts]
        pair = self.code.ins(
            f"cmpxchg ptr {pointer}, {bits} {texts[0]}, {bits} {texts[1]} seq_cst seq_cst, align {size_of(kind)}"
        )
        old = self.code.ins(f"extractvalue {{ {bits}, i1 }} {pair}, 0")
        return self.code.ins(f"bitcast {bits} {old} to {ir(kind)}") if ir(kind) != bits else old

    def _narrow_add(self, op: Op, kind: Scalar) -> str:
        def write(code: Code) -> None:
            again, done = code.fresh("again"), code.fresh("done")
            code.jump(again)
            code.start(again)
            old = code.ins("load atomic i16, ptr %p monotonic, align 2")
            texts = [old if kind.name == "bf16" else code.ins(f"bitcast i16 {old} to half"), "%v"]
            a, b = (to_f32(code, op, text, kind, 1) for text in texts)
            new = from_f32(code, op, code.ins(f"fadd float {a}, {b}"), kind, 1)
            bits = new if kind.name == "bf16" else code.ins(f"bitcast half {new} to i16")
            pair = code.ins(f"cmpxchg ptr %p, i16 {old}, i16 {bits} seq_cst seq_cst, align 2")
            code.branch(code.ins(f"extractvalue {{ i16, i1 }} {pair}, 1"), done, again)
            code.start(done)
            code.do(f"ret {ir(kind)} {texts[0]}")

        return self.module.helper(f"atomic_fadd.{kind}", ir(kind), f"ptr %p, {ir(kind)} %v", write, "noinline")

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check_bounds(self, op: Op, address: Address, mask: Lane | None, kind: Scalar | Pointer, pointer: Value) -> None:
        """With bounds checking on: every accessed address lies in the tensor that its pointer argument came from.

        The launcher appends the tensors' first and end addresses to the arguments, two words an argument.
        """
        if not self.bounds:
            return
        root = self._argument(pointer)
        if root is None:
            return
        index, count = self.arguments[root], len(self.arguments)
        places = [self.code.ins(f"getelementptr i64, ptr %args, i64 {count + 2 * index + i}") for i in (0, 1)]
        low, high = (self.code.get("i64", place) for place in places)
        last = self.code.ins(f"sub i64 {high}, {size_of(kind)}")
        lane = self.address_lanes(address)
        width = 1 if lane.kind == "u" else self.width
        place = lane.ssa if width == 1 else self.vector(lane, I64)
        below, above = (
            self.code.ins(f"icmp {test} {ir(I64, width)} {place}, {splat(self.code, 'i64', bound, width)}")
            for test, bound in (("ult", low), ("ugt", last))
        )
        bad = self.code.ins(f"or {ir(I1, width)} {below}, {above}")
        if mask is not None:
            if mask.kind == "v" and width == 1:
                bad, width = splat(self.code, "i1", bad, self.width), self.width
            text = self.vector(mask, I1) if width > 1 else mask.ssa
            bad = self.code.ins(f"and {ir(I1, width)} {bad}, {text}")
        first = place
        if width > 1:
            bits = self.code.ins(f"bitcast <{width} x i1> {bad} to i{width}")
            lane_index = self.code.intrinsic(f"llvm.cttz.i{width}", f"i{width}", [f"i{width}", "i1"], [bits, "false"])
            bad = self.code.ins(f"icmp ne i{width} {bits}, 0")
            vector = self.vector(lane, I64)
            safe = self.code.ins(f"urem i{width} {lane_index}, {width}") if width > 2 else f"{0}"
            first = self.code.ins(f"extractelement <{width} x i64> {vector}, i{width} {safe}")
        with self.code.when(bad):
            self.fail(2, self.module.string(root.name), (first, str(index)))

    def _argument(self, pointer: Value) -> Value | None:
        """The kernel's argument that a pointer was computed from, None if that is not seen."""
        while pointer not in self.arguments:
            op = pointer.op
            if op is not None and op.name in ("tt.addptr", "tt.bitcast", "tt.splat", "tt.broadcast", "tt.expand_dims",
                                              "tt.reshape", "tt.trans"):  # fmt: skip
                pointer = op.operands[0]
            elif op is None and isinstance(owner := pointer.block.parent.parent, Op) and owner.name == "scf.for":
                pointer = owner.operands[2 + pointer.block.args.index(pointer)]
            else:
                return None
        return pointer
