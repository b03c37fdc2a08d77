# SPDX-License-Identifier: Apache-2.0
"""Consecutive operations on tiles of one shape [R, C] done row by row in one loop.

A reduction over C, arithmetic on its results [R], another reduction, a store: where each needs only its own row of what
came before, a row is read from memory once and stays in registers between them. Values that do not depend on the run
are computed before the loop. A store ends a run, so that nothing in it can read what it wrote.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from kda.triton_cpu.lowering.analysis import VIEWS, lazy_kind
from kda.triton_cpu.lowering.emit import Code
from kda.triton_cpu.lowering.lanes import Buffer, Lane
from kda.triton_cpu.lowering.reduce import straight
from kda.triton_cpu.lowering.types import element, shape
from kda.triton_cpu.ttir import Op, Pointer, Tensor, Value

FEWEST_VECTORS, MOST_VECTORS = 4, 16  # of a row: one is written out, and shorter ones are better done side by side


@dataclass
class Run:
    """What one loop does: `early` before it, then `steps` row by row (the role of each operation beside it)."""

    extents: tuple[int, int]
    early: list[Op] = field(default_factory=list)
    steps: list[tuple[str, Op]] = field(default_factory=list)
    made: set[Value] = field(default_factory=set)  # by a step
    staged: list[Value] = field(default_factory=list)  # loads to be done before the loop, as it stores


class Rows:
    """Mixin of the lowering."""

    code: Code

    def row_run(self, ops: list[Op]) -> tuple[Run | None, int]:
        """The run that starts with the first of `ops` and how many of them it takes; (None, 1) if there is none."""
        extents = self._row_extents(ops[0])
        if extents is None:
            return None, 1
        run, best, tiles = Run(extents), 0, 0
        for count, op in enumerate(ops, 1):
            role = self._role(run, op)
            if role is None:
                break
            if role == "early":
                run.early.append(op)
            elif role != "lazy":
                run.steps.append((role, op))
                run.made.update(op.results)
            if role in ("reduce", "tile", "store"):
                tiles += 1
                best, kept = count, (len(run.early), len(run.steps))
            if role == "store":
                break
        if tiles < 2:
            return None, 1
        del run.early[kept[0] :], run.steps[kept[1] :]
        return run, best

    def _row_extents(self, op: Op) -> tuple[int, int] | None:
        """The shape of the tiles of a run that may start with `op`."""
        if op.name == "tt.reduce":
            extents = shape(op.operands[0].type)
        elif lazy_kind(op) and op.results[0] not in self.plan.lazy and self.plan.consumers.get(op.results[0]):
            extents = shape(op.results[0].type)
        else:
            return None
        good = len(extents) == 2 and extents[0] > 1 and FEWEST_VECTORS <= extents[1] // self.lanes <= MOST_VECTORS
        return extents if good else None

    def _role(self, run: Run, op: Op) -> str | None:
        """What `op` is in a run: lazy, early, column [R], tile [R, C], reduce or store; None: it ends the run."""
        tensors = [value for value in op.operands if isinstance(value.type, Tensor)]
        free = not any(self._depends(value, run.made) for value in tensors)
        if op.name == "tt.reduce" and self._reduces_rows(run, op):
            return "reduce"
        if op.name == "tt.store":
            return "store" if self._stores_rows(run, op) else None
        if op.name == "tt.reduce":
            return "early" if free and run.steps else None
        if not lazy_kind(op):
            return None
        value = op.results[0]
        if not isinstance(value.type, Tensor):
            return "early" if free else None
        if value in self.plan.lazy or not self.plan.consumers.get(value):
            return "lazy"
        if op.name == "arith.constant":
            return "early"
        if shape(value.type) == run.extents and self._in_rows(run, op.operands) and self.best_axis(value) in (None, 1):
            return "tile"
        if free:
            return "early"
        if shape(value.type) == run.extents[:1] and self._in_rows(run, op.operands):
            return "column"
        return None

    def _reduces_rows(self, run: Run, op: Op) -> bool:
        inputs = op.operands
        return (
            shape(inputs[0].type) == run.extents and op.attrs["axis"] == 1 and straight(op.regions[0])
            and not any(isinstance(element(value.type), Pointer) for value in inputs)
            and self._lanes_along(inputs, run.extents, 1) and self._in_rows(run, inputs)
        )  # fmt: skip

    def _stores_rows(self, run: Run, op: Op) -> bool:
        """A store along the rows that cannot touch what other rows of the run still read."""
        pointer = op.operands[0]
        if shape(pointer.type) != run.extents or self.plan.axis(pointer) != 1 or op in self.plan.staged:
            return False
        if not self._in_rows(run, op.operands):
            return False
        step = self.plan.strides[pointer][0]
        apart = step is not None and abs(step) >= run.extents[1]
        staged = []
        loads = [each for _, each in run.steps if each.name == "tt.load"]
        loads += self._loads([value for _, each in run.steps for value in each.operands] + list(op.operands))
        for load in loads:
            if load.operands[0] is pointer and apart:
                continue  # a row of its own
            if len(shape(load.results[0].type)) > 1 or self._depends(load.results[0], run.made):
                return False
            staged.append(load.results[0])
        run.staged = staged
        return True

    def _loads(self, values: list[Value]) -> list[Op]:
        """The loads that evaluating `values` evaluates."""
        found, seen, stack = [], set(), list(values)
        while stack:
            value = stack.pop()
            if value not in seen and value in self.plan.lazy:
                seen.add(value)
                if value.op.name == "tt.load":
                    found.append(value.op)
                stack += value.op.operands
        return found

    def _depends(self, value: Value, made: set[Value]) -> bool:
        seen, stack = set(), [value]
        while stack:
            value = stack.pop()
            if value in made:
                return True
            if value not in seen and value in self.plan.lazy:
                seen.add(value)
                stack += value.op.operands
        return False

    def _in_rows(self, run: Run, values: list[Value]) -> bool:
        """Whether row i of each value needs only row i of what the run makes."""
        seen: set[Value] = set()
        stack = [value for value in values if isinstance(value.type, Tensor)]
        while stack:
            value = stack.pop()
            if value in seen or value in run.made or value not in self.plan.lazy:
                continue
            seen.add(value)
            op, extents = value.op, shape(value.type)
            if op.name in VIEWS:
                rows = op.name == "tt.broadcast" and extents == run.extents and shape(op.operands[0].type)[0] > 1 \
                    or op.name == "tt.expand_dims" and op.attrs["axis"] == 1 and len(extents) == 2
                if not rows:
                    if any(self._depends(operand, run.made) for operand in op.operands):
                        return False
                    continue
            stack += [operand for operand in op.operands if isinstance(operand.type, Tensor)]
        return True

    # ---- code -------------------------------------------------------------------------------------------------------

    def emit_rows(self, run: Run) -> None:
        for op in run.early:
            self.emit_op(op)
        staged = {value: self.new_buffer(shape(value.type), element(value.type)) for value in run.staged}
        for value, tile in staged.items():
            self.materialise(value, tile)
        self.env.update(staged)
        inside = {op for _, op in run.steps}
        kept = [value for _, op in run.steps for value in op.results
                if any(user not in inside for user in self.plan.consumers.get(value, ()))]  # fmt: skip
        tiles = {value: self.new_buffer(shape(value.type), element(value.type)) for value in kept}
        rows, columns = run.extents
        width = self.lanes
        columns = [Lane("a", str(start), 1, start and width) for start in range(0, columns, width)]
        with self.lanes_of(width), self.code.loop("0", str(rows), compare="ult") as i, self.fresh_memo():
            row = Lane("u", i)
            for role, op in run.steps:
                self._row_step(role, op, row, [(row, column) for column in columns], tiles)
        for value in run.made:
            self.env.pop(value, None)
        for value, tile in tiles.items():
            self.bind_buffer(value, tile)
        for value, tile in staged.items():
            del self.env[value]
            self.free_buffer(tile)

    def _row_step(
        self, role: str, op: Op, row: Lane, points: list[tuple[Lane, Lane]], tiles: dict[Value, Buffer]
    ) -> None:
        if role == "store":
            for point in points:
                self.store_lanes(op, point)
            return
        if role == "tile":
            (value,) = op.results
            self.plan.lazy.add(value)  # computed this once like a lazy value
            for point in points:
                lane = self.at(value, point)
                if value in tiles:
                    self.write(tiles[value], point, lane)
            self.plan.lazy.discard(value)
            return
        if role == "column":
            with self.lanes_of(1):
                self.plan.lazy.update(op.results)
                lanes = [self.at(value, (row,)) for value in op.results]
                self.plan.lazy.difference_update(op.results)
        else:
            lanes = self._reduce_row(op, points)
        for value, lane in zip(op.results, lanes):
            self.env[value] = lane
            if value in tiles:
                with self.lanes_of(1):
                    self.write(tiles[value], (row,), lane)

    def _reduce_row(self, op: Op, points: list[tuple[Lane, Lane]]) -> list[Lane]:
        """In the order of `_along`, so that a sum has the same bits in a run and alone."""
        kinds, region = [element(value.type) for value in op.operands], op.regions[0]
        flight = 4 if len(points) >= 8 else 2 if len(points) >= 4 else 1
        parts: list[list[Lane]] = []
        for j, point in enumerate(points):
            lanes = self._vectors(kinds, [self.at(value, point) for value in op.operands])
            if j < flight:
                parts.append(lanes)
            else:
                parts[j % flight] = self._vectors(kinds, self.apply_region(region, parts[j % flight] + lanes))
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self._vectors(kinds, self.apply_region(region, parts[j] + parts[j + half])) for j in range(half)]
        return self._fold(region, kinds, parts[0], self.width)
