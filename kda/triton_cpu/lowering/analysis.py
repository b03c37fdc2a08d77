# SPDX-License-Identifier: Apache-2.0
"""What is known about a function before code is written: value ranges, strides, and what is kept in memory.

A tensor is *lazy* where its lanes are computed anew inside the loop nest of each consumer, and a *buffer* (a row-major
tile in the arena) otherwise. The operations that run a loop nest of their own are a value's *consumers*: those reached
from it through lazy values only.
"""
from __future__ import annotations

import math

from kda.triton_cpu.lowering.types import I1, element, shape
from kda.triton_cpu.ttir import Block, Function, Op, Pointer, Scalar, Tensor, Value

VIEWS = {"tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.join", "tt.split"}
_LAZY_TT = VIEWS | {
    "tt.make_range", "tt.addptr", "tt.bitcast", "tt.fp_to_fp", "tt.clampf", "tt.mulhiui", "tt.precise_sqrt",
    "tt.precise_divf", "tt.approx_divf", "tt.int_to_ptr", "tt.ptr_to_int", "tt.load",
    "tt.extern_elementwise",
}  # fmt: skip
_COSTLY = {"tt.extern_elementwise": 30, "arith.divf": 5, "arith.remf": 30, "math.sqrt": 5, "math.rsqrt": 6,
           "tt.precise_divf": 5, "tt.approx_divf": 5, "tt.precise_sqrt": 5,
           "arith.truncf": 2, "arith.divsi": 4, "arith.divui": 4, "arith.remsi": 4, "arith.remui": 4}  # fmt: skip
_CHEAP_MATH = {"math.absf", "math.fma", "math.floor", "math.ceil", "math.absi"}
_WRITES = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_store", "tt.call", "tt.debug_barrier",
           "ttg.barrier", "gpu.barrier"}  # fmt: skip
ENOUGH = 4.0  # recomputing is cheaper than a buffer up to this cost, in vector additions


def lazy_kind(op: Op | None) -> bool:
    """Whether `op` can be computed lane by lane inside its consumer."""
    return op is not None and (op.name.startswith(("arith.", "math.", "ub.")) or op.name in _LAZY_TT)


def ancestor(op: Op, block: Block) -> Op | None:
    """The operation of `block` that is `op` or holds it."""
    while op.parent is not block:
        region = op.parent.parent if op.parent else None
        op = region.parent if region else None
        if not isinstance(op, Op):
            return None
    return op


def loops_between(op: Op, block: Block) -> int:
    """How many loops lie between `op` and `block`, which holds it."""
    count = 0
    while op.parent is not block:
        op = op.parent.parent.parent
        if not isinstance(op, Op):
            break
        count += op.name in ("scf.for", "scf.while")
    return count


class Plan:
    """The decisions for one function."""

    def __init__(self, function: Function):
        self.ops = list(function.body.walk())
        blocks = {id(op.parent): op.parent for op in self.ops}
        self.index = {op: i for block in blocks.values() for i, op in enumerate(block.ops)}  # place in its block
        self.ranges: dict[Value, tuple[int, int]] = {}
        self.strides: dict[Value, tuple[int | None, ...]] = {}
        for op in self.ops:
            find_ranges(op, self.ranges)
            find_strides(op, self.ranges, self.strides)
        self.shifts = {op: shifts for op in self.ops if op.name == "scf.for" and (shifts := find_shifts(op))}
        self.writes = {op: self._writes(op) for op in reversed(self.ops)}
        self.lazy: set[Value] = set()
        self.consumers: dict[Value, dict[Op, float]] = {}
        for _ in range(2):  # costs depend on decisions, decisions on costs
            self._decide()
        self.dying: dict[Op, list[Value]] = {}
        for op in self.ops:
            for value in op.results:
                if isinstance(value.type, Tensor) and value not in self.lazy:
                    last = self.death(value)
                    if last is not None:
                        self.dying.setdefault(last, []).append(value)

    def range(self, value: Value) -> tuple[int, int] | None:
        """The smallest and largest signed value an integer (each element of a tensor) can have, if known."""
        return self.ranges.get(value)

    def axis(self, value: Value) -> int | None:
        """The dim along which a pointer tensor moves element by element."""
        extents, steps = shape(value.type), self.strides.get(value)
        if steps:
            for axis in reversed(range(len(extents))):
                if extents[axis] > 1 and steps[axis] == 1:
                    return axis
        return None

    def death(self, value: Value) -> Op | None:
        """The last operation of its block that needs `value`; None where another block of the function needs it."""
        block, last = value.op.parent, value.op
        for user in self.consumers.get(value, {}):
            holder = ancestor(user, block)
            if holder is None:
                return None
            if self.index[holder] > self.index[last]:
                last = holder
        return last

    def comes_before(self, user: Op, op: Op) -> bool:
        """Whether `user` (or what holds it in the block of `op`) lies before `op`."""
        holder = ancestor(user, op.parent)
        return holder is not None and self.index[holder] < self.index[op]

    def last_use(self, value: Value, op: Op) -> bool:
        """Whether all uses of `value` lie before `op`, of the same block, or are `op` itself."""
        for user in self.consumers.get(value, {}):
            holder = ancestor(user, op.parent)
            if user is not op and (holder is None or self.index[holder] >= self.index[op]):
                return False
        return True

    def reads(self, value: Value, aligned: bool = True) -> dict[Value, bool]:
        """The buffers that evaluating `value` reads; True where only element i of it is read for element i."""
        found: dict[Value, bool] = {}
        seen: set[tuple[Value, bool]] = set()
        stack = [(value, aligned)]
        while stack:
            value, aligned = stack.pop()
            if (value, aligned) in seen or not isinstance(value.type, Tensor):
                continue
            seen.add((value, aligned))
            if value in self.lazy:
                same = aligned and value.op.name not in VIEWS
                stack += [(operand, same) for operand in value.op.operands]
            else:
                found[value] = found.get(value, True) and aligned
        return found

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _writes(self, op: Op) -> bool:
        return op.name in _WRITES or any(
            inner.name in _WRITES for region in op.regions for inner in region.walk()
        )

    def _decide(self) -> None:
        costs = self._costs()
        self.lazy, self.consumers, self.staged = set(), {}, set()
        for op in reversed(self.ops):
            for value in op.results:
                if isinstance(value.type, Tensor):
                    self._consumers(value)
                    if lazy_kind(op) and self._stays_lazy(op, value, costs):
                        self.lazy.add(value)
            for region in op.regions:
                for block in region.blocks:
                    for value in block.args:
                        self._consumers(value)

    def _consumers(self, value: Value) -> None:
        found: dict[Op, float] = {}
        size = math.prod(shape(value.type))
        for user in value.uses:
            if user in self.shifts:
                self._pass_on(user, value, found)
            if self._only_shift(user, value):
                continue
            results = [result for result in user.results if result in self.lazy]
            if results:
                for result in results:
                    repeats = max(math.prod(shape(result.type)) / size, 1)
                    for op, times in self.consumers[result].items():
                        found[op] = max(found.get(op, 0), times * repeats)
            elif not (lazy_kind(user) and user.results and isinstance(user.results[0].type, Tensor)
                      and not self.consumers.get(user.results[0], True)):  # fmt: skip
                found[user] = max(found.get(user, 0), 1)
        home = value.op.parent if value.op else value.block
        if home is not None:
            for op in found:
                if op.parent is not home and ancestor(op, home) is not None:
                    found[op] *= 4 ** loops_between(op, home)
        self.consumers[value] = found

    def _pass_on(self, loop: Op, value: Value, found: dict[Op, float]) -> None:
        """Who reads a shifted tensor of `loop`, inside or after it, reads the tensor it started from."""
        for i in self.shifts[loop]:
            if loop.operands[3 + i] is value:
                for other in (loop.regions[0].entry.args[1 + i], loop.results[i]):
                    for op, times in self.consumers.get(other, {}).items():
                        found[op] = max(found.get(op, 0), times)

    def _only_shift(self, user: Op, value: Value) -> bool:
        """Whether `user` is a loop or its yield that needs `value` for nothing but a shift."""
        loop, skip = user, 3
        if user.name == "scf.yield":
            loop, skip = user.parent.parent.parent, 0
        shifts = self.shifts.get(loop, {})
        places = [i for i, operand in enumerate(user.operands) if operand is value]
        return bool(shifts) and all(i - skip in shifts for i in places)

    def _stays_lazy(self, op: Op, value: Value, costs: dict[Value, float]) -> bool:
        if op.name == "arith.constant":
            return not isinstance(op.attrs["value"], (list, bytes, tuple))
        known = self.ranges.get(value)
        if op.name in VIEWS or known and known[0] == known[1]:  # what lies behind is kept, if anything, or not needed
            return True
        users = self.consumers[value]
        if op.name == "tt.load" and (op.attrs.get("isVolatile") or not self._movable(op, value)):
            return False
        times, cost = sum(users.values()), costs[value]
        if len(users) > 1 and cost > 1 and any(user.name == "tt.dot" for user in users):
            return False
        return cost * (times - 1) <= ENOUGH

    def _movable(self, op: Op, value: Value) -> bool:
        """No memory is written between the load and the last nest that would do it.

        A store whose value loads from elsewhere computes it whole before it writes: it is `staged`.
        """
        staged: list[Op] = []
        for user in self.consumers[value]:
            holder = ancestor(user, op.parent)
            if holder is None:
                return False
            span = op.parent.ops[self.index[op] + 1 : self.index[holder]]
            if any(self.writes[between] for between in span):
                return False
            if self.writes[holder] and not (user is holder and user.name in ("scf.for", "scf.while")):
                if user is not holder or user.name != "tt.store":
                    return False
                same = user.operands[0] is op.operands[0]
                if not (same and self._aligned(user.operands[1:], value)):
                    if self._reaches([user.operands[0], *user.operands[2:]], value):
                        return False
                    staged.append(user)
        self.staged.update(staged)
        return True

    def _reaches(self, starts: list[Value], target: Value) -> bool:
        """Whether evaluating `starts` evaluates `target`."""
        seen: set[Value] = set()
        stack = list(starts)
        while stack:
            value = stack.pop()
            if value is target:
                return True
            if value not in seen and value in self.lazy:
                seen.add(value)
                stack += value.op.operands
        return False

    def _aligned(self, starts: list[Value], target: Value) -> bool:
        """Every path from `starts` to `target` through lazy values keeps elements in place."""
        seen: set[tuple[Value, bool]] = set()
        stack = [(value, True) for value in starts]
        while stack:
            value, aligned = stack.pop()
            if (value, aligned) in seen:
                continue
            seen.add((value, aligned))
            if value is target:
                if not aligned:
                    return False
            elif value in self.lazy and value.op is not None:
                same = aligned and value.op.name not in VIEWS
                stack += [(operand, same) for operand in value.op.operands]
        return True

    def _costs(self) -> dict[Value, float]:
        """Vector operations that one vector of a lazy value takes."""
        costs: dict[Value, float] = {}
        uniform: set[Value] = set()
        for op in self.ops:
            for value in op.results:
                if not isinstance(value.type, Tensor):
                    continue
                inner = sum(
                    costs.get(v, 0.5) if v in self.lazy or not self.consumers else 0.5
                    for v in set(op.operands) if isinstance(v.type, Tensor)
                )  # fmt: skip
                own = self._own_cost(op, value)
                tensors = [v for v in op.operands if isinstance(v.type, Tensor)]
                if op.name in ("tt.splat", "arith.constant") or tensors and all(v in uniform for v in tensors):
                    if op.name != "tt.load":
                        uniform.add(value)
                        own = inner = 0
                costs[value] = own + inner
        return costs

    def _own_cost(self, op: Op, value: Value) -> float:
        kind = element(value.type)
        if op.name == "tt.load":
            return 1.5 if self.axis(op.operands[0]) is not None else 8
        if op.name in ("tt.make_range", "tt.broadcast", "tt.expand_dims", "tt.splat", "tt.trans"):
            return 0
        if op.name in ("tt.reshape", "tt.join", "tt.split"):
            return 1
        steps = self.strides.get(value)
        if steps is not None and None not in steps or isinstance(kind, Pointer):
            return 0  # an affine index: a scalar addition
        if op.name in _COSTLY:
            return _COSTLY[op.name]
        if op.name.startswith("math.") and op.name not in _CHEAP_MATH:  # a polynomial, or a call
            return 12
        return 0.5


def find_shifts(loop: Op) -> dict[int, Value]:
    """Carried tensors that grow by a uniform amount an iteration, such as a tile's pointers: place -> amount."""
    shifts = {}
    block = loop.regions[0].entry
    for i, (arg, value) in enumerate(zip(block.args[1:], block.terminator.operands)):
        step = value.op
        if isinstance(arg.type, Tensor) and step is not None and step.name in ("tt.addptr", "arith.addi"):
            amount = step.operands[1].op
            uniform = amount is not None and (
                amount.name == "tt.splat"
                or amount.name == "arith.constant" and not isinstance(amount.attrs["value"], (list, bytes, tuple))
            )
            if step.operands[0] is arg and step.parent is block and uniform:
                shifts[i] = step.operands[1]
    return shifts


# ---- ranges ---------------------------------------------------------------------------------------------------------


def full_range(type: Scalar) -> tuple[int, int]:
    return (0, 1) if type == I1 else (-(1 << (type.bits - 1)), (1 << (type.bits - 1)) - 1)


def find_ranges(op: Op, ranges: dict[Value, tuple[int, int]]) -> None:
    """Sets the ranges of the results of `op` (and of a loop's counter) from those of its operands."""
    if op.name == "scf.for":
        low, high, step = (ranges.get(value) for value in op.operands[:3])
        counter = op.regions[0].entry.args[0]
        if low and high and step and step[0] > 0:
            ranges[counter] = (low[0], max(high[1] - 1, low[0]))
        return
    for value in op.results:
        kind = element(value.type)
        if isinstance(kind, Scalar) and kind.is_int:
            whole = full_range(kind)
            known = [ranges.get(operand) for operand in op.operands]
            found = _range(op, kind, known)
            ranges[value] = found if found and whole[0] <= found[0] and found[1] <= whole[1] else whole


def _range(op: Op, kind: Scalar, known: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    name = op.name
    if name == "arith.constant":
        value = op.attrs["value"]
        return (int(value), int(value)) if isinstance(value, (int, bool)) else None
    if name == "tt.make_range":
        return op.attrs["start"], op.attrs["end"] - 1
    if name == "tt.get_program_id":
        return 0, (1 << 31) - 1
    if name == "tt.get_num_programs":
        return 1, (1 << 31) - 1
    if name in VIEWS and name != "tt.join":
        return known[0]
    if name == "arith.select" and known[1] and known[2]:
        return min(known[1][0], known[2][0]), max(known[1][1], known[2][1])
    if not known or any(r is None for r in known):
        return None
    (a, b), (c, d) = known[0], known[-1]
    if name == "arith.addi":
        return a + c, b + d
    if name == "arith.subi":
        return a - d, b - c
    if name == "arith.muli":
        corners = a * c, a * d, b * c, b * d
        return min(corners), max(corners)
    if name in ("arith.divsi", "arith.divui") and c > 0 and (a >= 0 or name == "arith.divsi"):
        corners = [abs(x) // y * (1 if x >= 0 else -1) for x in (a, b) for y in (c, d)]
        return min(corners), max(corners)
    if name in ("arith.remsi", "arith.remui") and c > 0:
        if a >= 0:
            return (0, min(b, d - 1))
        return (-(d - 1), d - 1) if name == "arith.remsi" else (0, d - 1)
    if name == "arith.maxsi" and kind != I1:
        return max(a, c), max(b, d)
    if name == "arith.minsi" and kind != I1:
        return min(a, c), min(b, d)
    if name == "arith.andi":
        if kind == I1:
            return min(a, c), min(b, d)
        return (0, min(x for lo, x in ((a, b), (c, d)) if lo >= 0)) if a >= 0 or c >= 0 else None
    if name == "arith.ori" and kind == I1:
        return max(a, c), max(b, d)
    if name == "arith.xori" and kind == I1 and a == b and c == d:
        return a ^ c, a ^ c
    if name == "arith.shli" and a >= 0 and 0 <= c <= d < kind.bits:
        return a << c, b << d
    if name in ("arith.shrsi", "arith.shrui") and a >= 0 and 0 <= c <= d < kind.bits:
        return a >> d, b >> c
    if name == "arith.extsi":
        return (-b, -a) if element(op.operands[0].type) == I1 else (a, b)
    if name == "arith.extui":
        return (a, b) if a >= 0 else (0, (1 << element(op.operands[0].type).bits) - 1)
    if name == "arith.trunci" and kind != I1 or name in ("arith.index_cast", "arith.index_castui") and a >= 0:
        return a, b
    if name == "arith.cmpi" and (element(op.operands[0].type) != I1 or op.attrs["predicate"][0] != "s"):
        return _compare(op.attrs["predicate"], a, b, c, d)
    return None


def _compare(predicate: str, a: int, b: int, c: int, d: int) -> tuple[int, int] | None:
    """Whether x in [a, b] and y in [c, d] decide the comparison."""
    if predicate[0] == "u":
        if a < 0 or c < 0:
            return None
        predicate = "s" + predicate[1:]
    always = {"slt": b < c, "sle": b <= c, "sgt": a > d, "sge": a >= d, "eq": a == b == c == d, "ne": b < c or d < a}
    never = {"slt": a >= d, "sle": a > d, "sgt": b <= c, "sge": b < c, "eq": b < c or d < a, "ne": a == b == c == d}
    return (1, 1) if always[predicate] else (0, 0) if never[predicate] else None


# ---- strides --------------------------------------------------------------------------------------------------------


def find_strides(op: Op, ranges: dict[Value, tuple[int, int]], strides: dict[Value, tuple[int | None, ...]]) -> None:
    """How far an integer or pointer tensor moves from one element to the next in each dim; None: not known.

    Only to choose good loop orders: whether lanes are contiguous is decided where code is written.
    """
    for value in op.results:
        kind = element(value.type)
        if not isinstance(value.type, Tensor) or isinstance(kind, Scalar) and kind.is_float:
            continue
        none = (None,) * len(value.type.shape)
        known = [strides.get(operand) for operand in op.operands]
        strides[value] = _strides(op, value, known, ranges) or none
    if op.name == "scf.for":
        for i in find_shifts(op):  # a uniform amount an iteration leaves them alone
            start = strides.get(op.operands[3 + i])
            if start is not None:
                strides[op.regions[0].entry.args[1 + i]] = strides[op.results[i]] = start


def _strides(op: Op, value: Value, known: list, ranges: dict) -> tuple[int | None, ...] | None:
    name, rank = op.name, len(value.type.shape)
    if name == "tt.make_range":
        return (1,)
    if name == "tt.splat" or name == "arith.constant" and not isinstance(op.attrs["value"], (list, bytes, tuple)):
        return (0,) * rank
    if not known or known[0] is None or name == "tt.load":
        return None
    first, last = known[0], known[-1]
    if name == "tt.expand_dims":
        axis = op.attrs["axis"]
        return first[:axis] + (0,) + first[axis:]
    if name == "tt.broadcast":
        source = op.operands[0].type.shape
        return tuple(0 if n == 1 else s for n, s in zip(source, first))
    if name == "tt.trans":
        return tuple(first[i] for i in op.attrs["order"])
    if name in ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "tt.bitcast"):
        return first
    if last is None:
        return None
    if name in ("arith.addi", "tt.addptr"):
        return tuple(None if a is None or b is None else a + b for a, b in zip(first, last))
    if name == "arith.subi":
        return tuple(None if a is None or b is None else a - b for a, b in zip(first, last))
    if name == "arith.muli":
        for one, other in ((first, op.operands[1]), (last, op.operands[0])):
            factor = ranges.get(other)
            if factor and factor[0] == factor[1]:
                return tuple(None if a is None else a * factor[0] for a in one)
        return tuple(0 if a == b == 0 else None for a, b in zip(first, last))
    if all(step == 0 for steps in known if steps for step in steps):
        return (0,) * rank
    return None
