# SPDX-License-Identifier: Apache-2.0
"""Lazy evaluation: the lanes of a tensor at one point of a loop nest.

A point is one coordinate a dim. A coordinate, like every value found at a point, is one of three kinds of `Lane`:
uniform (a scalar, the same in all lanes), affine (a scalar start and a constant step a lane) or a vector.
Affine index arithmetic stays scalar, so that a load can see that its lanes lie side by side.

A 32-bit index is taken not to wrap around where it is widened to 64 bits, as Triton's own analysis takes it.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kda.triton_cpu.lowering import elementwise
from kda.triton_cpu.lowering.emit import Code, constant, iota, splat
from kda.triton_cpu.lowering.types import (
    BF16, F32, I1, I32, I64, element, ir, literal, shape, size_of, stored, unsupported,
)  # fmt: skip
from kda.triton_cpu.ttir import Op, Pointer, Scalar, Value


@dataclass(eq=False, frozen=True)
class Lane:
    kind: str  # "u", "a" or "v"
    ssa: str  # the scalar, the start, or the vector
    step: int = 0
    multiple: int = 1  # a known divisor of the start, for coordinates

    @property
    def const(self) -> int | None:
        return constant(self.ssa) if self.kind == "u" else None


@dataclass(eq=False, frozen=True)
class Address:
    """Pointer lanes: a scalar base and offsets in bytes."""

    base: str
    offset: Lane


@dataclass(eq=False)
class Buffer:
    """A tensor in memory: the element at index i is at `ptr` + sum(i * steps), in elements."""

    ptr: str
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    kind: Scalar | Pointer
    offset: int = -1  # in the arena; -1: elsewhere


@dataclass(eq=False)
class Shifted:
    """A loop-carried tensor that is `start` plus a scalar that grows by a uniform amount an iteration."""

    start: Value
    shift: str


ZERO = Lane("u", "0", 0, 0)


def row_major(extents: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for extent in reversed(extents):
        steps.append(step)
        step *= extent
    return tuple(reversed(steps))


class Lanes:
    """Mixin of the lowering: `at(value, point)` and the arithmetic of lanes."""

    code: Code
    width: int  # lanes of the nest that is being written; 1: all is uniform
    env: dict[Value, object]
    memo: dict

    # ---- index arithmetic, always on 64 bits ------------------------------------------------------------------------

    def vector(self, lane: Lane, kind: Scalar | Pointer) -> str:
        """The lanes as one vector (a scalar at width 1)."""
        if self.width == 1 or lane.kind == "v":
            return lane.ssa
        first = splat(self.code, ir(kind), lane.ssa, self.width)
        if lane.kind == "u" or lane.step == 0:
            return first
        return self.code.ins(f"add {ir(kind, self.width)} {first}, {iota(ir(kind), self.width, lane.step)}")

    def scalar_op(self, name: str, a: str, b: str, type: str = "i64") -> str:
        """Integer arithmetic on scalars, folded where both are literals of index size."""
        x, y = constant(a), constant(b)
        if x is not None and y is not None and type == "i64":
            return str({"add": x + y, "sub": x - y, "mul": x * y}[name])
        if name == "add" and y == 0 or name == "sub" and y == 0 or name == "mul" and y == 1:
            return a
        if name == "add" and x == 0 or name == "mul" and x == 1:
            return b
        if name == "mul" and 0 in (x, y):
            return "0"
        return self.code.ins(f"{name} {type} {a}, {b}")

    def add(self, a: Lane, b: Lane, kind: Scalar = I64, name: str = "add") -> Lane:
        if "v" in (a.kind, b.kind):
            if b.const == 0 or a.const == 0 and name == "add":
                return a if b.const == 0 else b
            left, right = self.vector(a, kind), self.vector(b, kind)
            return Lane("v", self.code.ins(f"{name} {ir(kind, self.width)} {left}, {right}"))
        step = a.step + b.step if name == "add" else a.step - b.step
        start = self.scalar_op(name, a.ssa, b.ssa, ir(kind))
        multiple = math.gcd(_multiple(a), _multiple(b))
        return Lane("a" if step else "u", start, step, multiple)

    def times(self, a: Lane, factor: int, kind: Scalar = I64) -> Lane:
        if factor == 1:
            return a
        if a.kind == "v":
            amount = splat(self.code, ir(kind), str(factor), self.width)
            return Lane("v", self.code.ins(f"mul {ir(kind, self.width)} {a.ssa}, {amount}"))
        start = self.scalar_op("mul", a.ssa, str(factor), ir(kind))
        step = a.step * factor
        return Lane("a" if step else "u", start, step, _multiple(a) * abs(factor))

    def divide(self, lane: Lane, by: int) -> tuple[Lane, Lane]:
        """Quotient and remainder of a coordinate (never negative) by a constant."""
        if by == 1:
            return lane, ZERO
        if lane.kind == "a" and lane.step == 1 and _multiple(lane) % self.width == 0 and by % self.width == 0:
            quotient, rest = self.divide(Lane("u", lane.ssa, 0, lane.multiple), by)
            return quotient, Lane("a", rest.ssa, 1, math.gcd(_multiple(lane), by))
        if lane.const is not None:
            return Lane("u", str(lane.const // by)), Lane("u", str(lane.const % by), 0, math.gcd(lane.const % by, by))
        if lane.kind == "a" and lane.step % by == 0 and _multiple(lane) % by == 0:
            return Lane("a", self.code.ins(f"udiv i64 {lane.ssa}, {by}"), lane.step // by), ZERO
        width = 1 if lane.kind == "u" else self.width
        value = lane.ssa if width == 1 else self.vector(lane, I64)
        amount = splat(self.code, "i64", str(by), width)
        parts = [self.code.ins(f"{name} {ir(I64, width)} {value}, {amount}") for name in ("udiv", "urem")]
        kind = "u" if lane.kind == "u" else "v"
        return Lane(kind, parts[0]), Lane(kind, parts[1], 0, math.gcd(_multiple(lane), by) if kind == "u" else 1)

    def linear(self, point: tuple[Lane, ...], steps: tuple[int, ...]) -> Lane:
        total = ZERO
        for lane, step in zip(point, steps):
            if lane is not ZERO:
                total = self.add(total, self.times(lane, step))
        return total

    def unlinear(self, lane: Lane, extents: tuple[int, ...]) -> tuple[Lane, ...]:
        """The point of a row-major index."""
        point = []
        for extent in reversed(extents[1:]):
            lane, rest = self.divide(lane, extent)
            point.append(rest if extent > 1 else ZERO)
        point.append(lane if extents and extents[0] > 1 else ZERO)
        return tuple(reversed(point))[-len(extents) :] if extents else ()

    # ---- evaluation -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def fresh_memo(self) -> Iterator[None]:
        """What is computed inside does not dominate what follows."""
        saved, self.memo = self.memo, {}
        yield
        self.memo = saved

    def at(self, value: Value, point: tuple[Lane, ...]) -> Lane | Address:
        """The lanes of `value` at `point`; `Address` for pointers."""
        kind = element(value.type)
        bound = self.env.get(value)
        if isinstance(bound, str):
            return Address(bound, ZERO) if isinstance(kind, Pointer) else Lane("u", bound)
        key = (value, point)
        if key not in self.memo:
            if isinstance(bound, (Lane, Address)):  # an argument of a combine region
                return bound
            known = self.plan.range(value)
            if known and known[0] == known[1]:
                self.memo[key] = Lane("u", literal(known[0], kind))
            elif isinstance(bound, Buffer):
                self.memo[key] = self.read(bound, point)
            elif isinstance(bound, Shifted):
                self.memo[key] = self._shifted(bound, kind, point)
            elif value.op is not None and value in self.plan.lazy:
                self.memo[key] = self._evaluate(value, point)
            else:
                raise unsupported(value.op, "a value that was never computed") if value.op else AssertionError(value)
        return self.memo[key]

    def _shifted(self, bound: Shifted, kind: Scalar | Pointer, point: tuple[Lane, ...]) -> Lane | Address:
        start = self.at(bound.start, point)
        if isinstance(start, Address):
            return Address(start.base, self.add(start.offset, Lane("u", bound.shift)))
        return self.add(start, Lane("u", bound.shift), kind)

    def _evaluate(self, value: Value, point: tuple[Lane, ...]) -> Lane | Address:
        op = value.op
        view = _VIEWS.get(op.name)
        if view is not None:
            return view(self, op, value, point)
        if op.name == "tt.load":
            return self.load_lanes(op, point)
        args = [self.at(operand, point) for operand in op.operands]
        return self.apply(op, args, value.index)

    def apply(self, op: Op, args: list[Lane | Address], index: int = 0) -> Lane | Address:
        """An elementwise operation on lanes."""
        kind = element(op.results[0].type)
        if op.name == "arith.constant":
            return Lane("u", literal(op.attrs["value"], kind))
        if op.name == "ub.poison":
            return Address("null", ZERO) if isinstance(kind, Pointer) else Lane("u", literal(0, kind))
        if any(isinstance(arg, Address) for arg in args) or isinstance(kind, Pointer):
            return self._pointer_op(op, args, kind)
        if all(arg.kind == "u" for arg in args):
            ranges = [self.plan.range(operand) for operand in op.operands]
            return Lane("u", elementwise.emit(self.code, op, [arg.ssa for arg in args], 1, ranges)[index])
        affine = self._affine(op, args, kind)
        if affine is not None:
            return affine
        if op.name in ("arith.andi", "arith.ori") and kind == I1:  # a true or false side decides
            for one, other in (args, reversed(args)):
                if one.kind == "u" and one.ssa in ("1", "true", "0", "false"):
                    yes = one.ssa in ("1", "true")
                    return other if yes == (op.name == "arith.andi") else one
        texts = [self.vector(arg, element(v.type)) for arg, v in zip(args, op.operands)]
        if op.name == "arith.select" and args[0].kind == "u":  # a scalar condition picks whole vectors
            vector = ir(kind, self.width)
            return Lane("v", self.code.ins(f"select i1 {args[0].ssa}, {vector} {texts[1]}, {vector} {texts[2]}"))
        if op.name == "arith.truncf" and kind == BF16 and self.width == 16 and element(op.operands[0].type) == F32 \
                and self.only_pairs(op.result):
            name, half = "llvm.x86.avx512bf16.cvtneps2bf16.512", "<16 x bfloat>"
            rounded = self.code.intrinsic(name, half, [ir(F32, 16)], texts)
            return Lane("v", self.code.ins(f"bitcast {half} {rounded} to {ir(BF16, 16)}"))
        ranges = [self.plan.range(operand) for operand in op.operands]
        return Lane("v", elementwise.emit(self.code, op, texts, self.width, ranges)[index])

    def _affine(self, op: Op, args: list[Lane], kind: Scalar) -> Lane | None:
        """Index arithmetic that keeps a constant step a lane, None if this is no such."""
        if any(arg.kind == "v" for arg in args) or kind == I1 or kind.is_float:
            return None
        name = op.name
        if name in ("arith.addi", "arith.subi"):
            return self.add(args[0], args[1], kind, "add" if name == "arith.addi" else "sub")
        if name == "arith.muli":
            for a, b in (args, reversed(args)):
                if b.const is not None:
                    return self.times(a, b.const, kind)
            return None
        source = element(op.operands[0].type)
        if name in ("arith.extsi", "arith.index_cast") and source.bits < kind.bits and source.bits >= 32:
            start = self.code.ins(f"sext {ir(source)} {args[0].ssa} to {ir(kind)}")
            return Lane("a", start, args[0].step, args[0].multiple)
        if name in ("arith.extsi", "arith.index_cast") and source.bits == kind.bits:
            return args[0]
        if name in ("arith.trunci", "arith.index_cast") and kind.bits >= 16 and source.bits > kind.bits:
            start = self.code.ins(f"trunc {ir(source)} {args[0].ssa} to {ir(kind)}")
            return Lane("a", start, args[0].step, args[0].multiple)
        return None

    # ---- pointers ---------------------------------------------------------------------------------------------------

    def _pointer_op(self, op: Op, args: list, kind: Scalar | Pointer) -> Lane | Address:
        if op.name == "tt.addptr":
            source = element(op.operands[1].type)
            offset = self._widen(args[1], source)
            return Address(args[0].base, self.add(args[0].offset, self.times(offset, size_of(kind.element))))
        if op.name == "tt.bitcast":
            return args[0]
        if op.name == "tt.int_to_ptr":
            return Address("null", self._widen(args[0], element(op.operands[0].type)))
        if op.name == "tt.ptr_to_int":
            return self.address_lanes(args[0])
        if op.name == "arith.select":
            condition, a, b = args
            if a.base == b.base:
                base, lanes = a.base, (a.offset, b.offset)
            else:
                base, lanes = "null", (self.address_lanes(a), self.address_lanes(b))
            if all(lane.kind == "u" for lane in (condition, *lanes)):
                text = f"select i1 {condition.ssa}, i64 {lanes[0].ssa}, i64 {lanes[1].ssa}"
                return Address(base, Lane("u", self.code.ins(text)))
            texts = [self.vector(lane, I64) for lane in lanes]
            mask, wide = self.vector(condition, I1), ir(I64, self.width)
            text = f"select {ir(I1, self.width)} {mask}, {wide} {texts[0]}, {wide} {texts[1]}"
            return Address(base, Lane("v", self.code.ins(text)))
        if op.name == "arith.cmpi":
            lanes = [self.address_lanes(arg) for arg in args]
            width = 1 if all(lane.kind == "u" for lane in lanes) else self.width
            texts = [lane.ssa if width == 1 else self.vector(lane, I64) for lane in lanes]
            text = f"icmp {op.attrs['predicate']} {ir(I64, width)} {texts[0]}, {texts[1]}"
            return Lane("u" if width == 1 else "v", self.code.ins(text))
        raise unsupported(op, "not an operation on pointers")

    def _widen(self, lane: Lane, kind: Scalar) -> Lane:
        """An offset in 64 bits."""
        if kind.bits == 64:
            return lane
        if lane.const is not None:
            return lane
        if lane.kind == "v":
            return Lane("v", self.code.ins(f"sext {ir(kind, self.width)} {lane.ssa} to {ir(I64, self.width)}"))
        return Lane(lane.kind, self.code.ins(f"sext {ir(kind)} {lane.ssa} to i64"), lane.step, lane.multiple)

    def address_lanes(self, address: Address) -> Lane:
        """Addresses as integers."""
        if address.base == "null":
            return address.offset
        return self.add(Lane("u", self.code.ins(f"ptrtoint ptr {address.base} to i64")), address.offset)

    def pointer(self, address: Address) -> str:
        """The pointer of the first (or only) lane."""
        if address.offset.const == 0:
            return address.base
        if address.base == "null":
            return self.code.ins(f"inttoptr i64 {address.offset.ssa} to ptr")
        return self.code.ins(f"getelementptr i8, ptr {address.base}, i64 {address.offset.ssa}")

    def pointers(self, address: Address) -> str:
        """A vector of pointers."""
        offsets = self.vector(address.offset, I64)
        if self.width == 1:
            return self.pointer(address)
        if address.base == "null":
            return self.code.ins(f"inttoptr {ir(I64, self.width)} {offsets} to <{self.width} x ptr>")
        return self.code.ins(f"getelementptr i8, ptr {address.base}, {ir(I64, self.width)} {offsets}")

    # ---- views ------------------------------------------------------------------------------------------------------

    def _range(self, op: Op, value: Value, point: tuple[Lane, ...]) -> Lane:
        lane = self.add(point[0], Lane("u", str(op.attrs["start"])))
        if lane.kind == "v":
            return Lane("v", self.code.ins(f"trunc {ir(I64, self.width)} {lane.ssa} to {ir(I32, self.width)}"))
        start = lane.ssa if constant(lane.ssa) is not None else self.code.ins(f"trunc i64 {lane.ssa} to i32")
        return Lane(lane.kind, start, lane.step, lane.multiple)

    def _splat(self, op: Op, value: Value, point: tuple[Lane, ...]) -> Lane | Address:
        return self.at(op.operands[0], tuple(ZERO for _ in shape(op.operands[0].type)))

    def _broadcast(self, op: Op, value: Value, point: tuple[Lane, ...]) -> Lane | Address:
        source = shape(op.operands[0].type)
        return self.at(op.operands[0], tuple(ZERO if extent == 1 else lane for extent, lane in zip(source, point)))

    def _expand(self, op: Op, value: Value, point: tuple[Lane, ...]) -> Lane | Address:
        axis = op.attrs["axis"]
        return self.at(op.operands[0], point[:axis] + point[axis + 1 :])

    def _trans(self, op: Op, value: Value, point: tuple[Lane, ...]) -> Lane | Address:
        source: list[Lane] = [ZERO] * len(point)
        for lane, axis in zip(point, op.attrs["order"]):
            source[axis] = lane
        return self.at(op.operands[0], tuple(source))

    def _reshape(self, op: Op, value: Value, point: tuple[Lane, ...]) -> Lane | Address:
        source, target = shape(op.operands[0].type), shape(value.type)
        if [n for n in source if n > 1] == [n for n in target if n > 1]:  # only dims of size 1 come or go
            lanes = iter(lane for lane, n in zip(point, target) if n > 1)
            return self.at(op.operands[0], tuple(next(lanes) if n > 1 else ZERO for n in source))
        bound = self.env.get(op.operands[0])
        same = next((i for i, (a, b) in enumerate(zip(source, target)) if a != b), 0)
        if same and not (isinstance(bound, Buffer) and bound.steps == row_major(source)):  # leading dims stay
            rest = self.linear(point[same:], row_major(target[same:]))
            return self.at(op.operands[0], point[:same] + self.unlinear(rest, source[same:]))
        linear = self.linear(point, row_major(target))
        if isinstance(bound, Buffer) and bound.steps == row_major(source):
            flat = Buffer(bound.ptr, (math.prod(source),), (1,), bound.kind, bound.offset)
            return self.read(flat, (linear,))
        return self.at(op.operands[0], self.unlinear(linear, source))

    def _join(self, op: Op, value: Value, point: tuple[Lane, ...]) -> Lane | Address:
        sides, which = op.operands, point[-1]
        if which.const is not None:
            return self.at(sides[which.const], point[:-1])
        kind = element(value.type)
        lanes = [self.at(side, point[:-1]) for side in sides]
        if isinstance(kind, Pointer):
            lanes, kind = [self.address_lanes(lane) for lane in lanes], I64
        width = 1 if which.kind == "u" and all(lane.kind == "u" for lane in lanes) else self.width
        texts = [lane.ssa if width == 1 else self.vector(lane, kind) for lane in lanes]
        index = which.ssa if width == 1 else self.vector(which, I64)
        test = self.code.ins(f"icmp eq {ir(I64, width)} {index}, {splat(self.code, 'i64', '0', width)}")
        vector = ir(kind, width)
        text = self.code.ins(f"select {ir(I1, width)} {test}, {vector} {texts[0]}, {vector} {texts[1]}")
        lane = Lane("u" if width == 1 else "v", text)
        return Address("null", lane) if isinstance(element(value.type), Pointer) else lane

    def _split(self, op: Op, value: Value, point: tuple[Lane, ...]) -> Lane | Address:
        return self.at(op.operands[0], (*point, Lane("u", str(value.index))))

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def read(self, buffer: Buffer, point: tuple[Lane, ...]) -> Lane | Address:
        kind = buffer.kind
        offset = self.times(self.linear(point, buffer.steps), size_of(kind))
        lane = self.load_address(Address(buffer.ptr, offset), stored(kind), None, None)
        if isinstance(kind, Pointer):
            return Address("null", lane)
        if kind == I1:
            width = self.width if lane.kind == "v" else 1
            return Lane(lane.kind, self.code.ins(f"trunc {ir(stored(I1), width)} {lane.ssa} to {ir(I1, width)}"))
        return lane

    def write(self, buffer: Buffer, point: tuple[Lane, ...], lane: Lane | Address) -> None:
        kind = buffer.kind
        if isinstance(lane, Address):
            lane = self.address_lanes(lane)
        offset = self.times(self.linear(point, buffer.steps), size_of(kind))
        self.store_address(Address(buffer.ptr, offset), lane, kind, None)


def _multiple(lane: Lane) -> int:
    """A divisor of a scalar start (0 divides by everything)."""
    known = constant(lane.ssa) if lane.kind != "v" else None
    return abs(known) if known is not None else lane.multiple


_VIEWS = {
    "tt.make_range": Lanes._range, "tt.splat": Lanes._splat, "tt.unsplat": Lanes._splat,
    "tt.broadcast": Lanes._broadcast, "tt.expand_dims": Lanes._expand, "tt.trans": Lanes._trans,
    "tt.reshape": Lanes._reshape,
    "tt.join": Lanes._join, "tt.split": Lanes._split,
}  # fmt: skip
