# SPDX-License-Identifier: Apache-2.0
"""Reductions and scans with any combine region and several operands; map_elementwise, histogram, gather and cat.

A region without control flow runs on vectors, one with branches, loops or calls element by element.
"""
from __future__ import annotations

import math

from kda.triton_cpu.lowering.analysis import VIEWS, lazy_kind
from kda.triton_cpu.lowering.emit import Code, shuffle
from kda.triton_cpu.lowering.lanes import ZERO, Address, Buffer, Lane
from kda.triton_cpu.lowering.memory import MOST_UNROLLED, UNROLLED_LINES
from kda.triton_cpu.lowering.types import element, ir, shape, unsupported
from kda.triton_cpu.ttir import Op, Pointer, Region, Tensor, Value


def straight(region: Region) -> bool:
    """Whether a region is elementwise operations one after another."""
    return len(region.blocks) == 1 and all(lazy_kind(op) for op in region.entry.ops[:-1])


class Reduce:
    """Mixin of the lowering."""

    code: Code

    def apply_region(self, region: Region, lanes: list[Lane]) -> list[Lane]:
        """The function that a region holds, on lanes."""
        if not straight(region):
            return self.call_region(region, lanes)
        block = region.entry
        for arg, lane in zip(block.args, lanes):
            self.env[arg] = lane
        with self.fresh_memo():
            for op in block.ops[:-1]:
                args = [self.at(operand, ()) for operand in op.operands]
                for result in op.results:
                    self.env[result] = self.apply(op, args, result.index)
            return [self._lane(self.at(operand, ())) for operand in block.terminator.operands]

    def _lane(self, lane: Lane | Address) -> Lane:
        return self.address_lanes(lane) if isinstance(lane, Address) else lane

    # ---- reductions -------------------------------------------------------------------------------------------------

    def emit_reduce(self, op: Op) -> None:
        axis, inputs, region = op.attrs["axis"], op.operands, op.regions[0]
        extents = shape(inputs[0].type)
        outer = extents[:axis] + extents[axis + 1 :]
        kinds = [element(value.type) for value in inputs]
        if any(isinstance(kind, Pointer) for kind in kinds):
            raise unsupported(op, "a reduction of pointers")
        updates = self._updates(op)
        outputs = [self.buffer_for(r) if isinstance(r.type, Tensor) else None for r in op.results]

        def put(point: tuple[Lane, ...], lanes: list[Lane]) -> None:
            for result, buffer, lane in zip(op.results, outputs, lanes):
                if buffer is not None:
                    self.write(buffer, point, lane)
                else:
                    self.env[result] = lane.ssa

        def full(point: tuple[Lane, ...], at: Lane) -> tuple[Lane, ...]:
            return point[:axis] + (at,) + point[axis:]

        def across(point: tuple[Lane, ...]) -> None:  # lanes along another dim: no lane meets another
            slots = self._start(kinds, inputs, full(point, ZERO), updates)
            if extents[axis] > 1:
                with self.code.loop("1", str(extents[axis]), compare="ult") as i, self.fresh_memo():
                    self._accumulate(region, kinds, inputs, full(point, Lane("u", i)), slots, updates)
            put(point, self._get(kinds, slots))

        def along(point: tuple[Lane, ...]) -> None:
            with self.lanes_of(min(self.lanes, extents[axis])):
                lanes = self._along(region, kinds, inputs, extents[axis], lambda at: full(point, at), updates)
                width = self.width
            put(point, self._fold(region, kinds, lanes, width))

        if not straight(region):
            self.nest(outer, across, scalar=True)
        elif self._lanes_along(inputs, extents, axis):
            self.nest(outer, along, scalar=True)
        else:
            self.nest(outer, across, self._outer_axis(inputs, extents, axis))
        for value, tile in updates.items():
            self.env[value] = tile

    def _updates(self, op: Op) -> dict[Value, Buffer]:
        """Values that this reduction computes anyway and that a loop carries on: they are put in place on the way.

        That is right for a value needed only here and by the loop's yield, where its tile is read element by element
        here and by nothing else from here on.
        """
        found: dict[Value, Buffer] = {}
        last = op.parent.terminator
        owner = op.parent.parent.parent
        if last.name != "scf.yield" or getattr(owner, "name", "") != "scf.for":
            return found
        reads: dict[Value, bool] = {}
        for value in op.operands:
            for source, aligned in self.plan.reads(value).items():
                reads[source] = reads.get(source, True) and aligned
        seen, stack = set(), list(op.operands)
        while stack:
            value = stack.pop()
            if value in seen or value not in self.plan.lazy or value.op.name in VIEWS or value.op.name == "tt.load":
                continue
            seen.add(value)
            stack += value.op.operands
            places = [i for i, operand in enumerate(last.operands) if operand is value]
            if len(places) != 1 or set(self.plan.consumers[value]) != {op, last} or value.op.parent is not op.parent:
                continue
            arg = owner.regions[0].entry.args[1 + places[0]]
            tile = self.env.get(arg)
            others = [operand for i, operand in enumerate(last.operands) if i != places[0]]
            after = [user for user in self.plan.consumers[arg] if user not in (op, last)]
            if (
                isinstance(tile, Buffer) and shape(value.type) == shape(op.operands[0].type) and reads.get(arg, False)
                and not any(arg in self.plan.reads(other) for other in others if isinstance(other.type, Tensor))
                and all(self.plan.comes_before(user, op) for user in after)
            ):  # fmt: skip
                found[value] = tile
        return found

    def _update(self, updates: dict[Value, Buffer], point: tuple[Lane, ...]) -> None:
        lanes = [(tile, self.at(value, point)) for value, tile in updates.items()]
        for tile, lane in lanes:
            self.write(tile, point, lane)

    def _lanes_along(self, inputs: list[Value], extents: tuple[int, ...], axis: int) -> bool:
        others = [n for d, n in enumerate(extents) if d != axis]
        if extents[axis] == 1:
            return False
        if max(others, default=1) == 1:
            return True
        best = self.best_axis(inputs[0])
        if best is None:
            best = max(d for d, n in enumerate(extents) if n > 1)
        return best == axis and (extents[axis] >= self.lanes or max(others) < extents[axis])

    def _outer_axis(self, inputs: list[Value], extents: tuple[int, ...], axis: int) -> int | None:
        best = self.best_axis(inputs[0])
        return None if best is None or best == axis else best - (best > axis)

    def _start(self, kinds: list, inputs: list[Value], point: tuple[Lane, ...], updates: dict) -> list[str]:
        with self.fresh_memo():
            texts = [self.vector(self.at(v, point), kind) for v, kind in zip(inputs, kinds)]
            self._update(updates, point)
        return [self.code.slot(ir(kind, self.width), text) for kind, text in zip(kinds, texts)]

    def _get(self, kinds: list, slots: list[str]) -> list[Lane]:
        lane = "u" if self.width == 1 else "v"
        return [Lane(lane, self.code.get(ir(kind, self.width), slot)) for kind, slot in zip(kinds, slots)]

    def _accumulate(self, region: Region, kinds: list, inputs: list[Value], point, slots: list[str],
                    updates: dict) -> None:  # fmt: skip
        right = self._vectors(kinds, [self._lane(self.at(value, point)) for value in inputs])
        self._update(updates, point)
        for kind, slot, lane in zip(kinds, slots, self.apply_region(region, self._get(kinds, slots) + right)):
            self.code.set(ir(kind, self.width), slot, self.vector(lane, kind))

    def _along(self, region: Region, kinds: list, inputs: list[Value], extent: int, full,
               updates: dict) -> list[Lane]:  # fmt: skip
        """One vector that holds partial results of all chunks of the axis; several in flight where it is long."""
        width = self.width
        chunks = extent // width
        flight = 4 if chunks >= 8 else 2 if chunks >= 4 else 1

        def chunk(start: str, multiple: int) -> tuple[Lane, ...]:
            return full(Lane("a", start, 1, multiple) if width > 1 else Lane("u", start))

        mark = len(self.code.lines)
        slots = [self._start(kinds, inputs, chunk(str(j * width), width), updates) for j in range(flight)]
        if chunks <= MOST_UNROLLED and (len(self.code.lines) - mark) * chunks <= UNROLLED_LINES * flight:
            for j in range(flight, chunks):
                with self.fresh_memo():
                    self._accumulate(region, kinds, inputs, chunk(str(j * width), width), slots[j % flight], updates)
        elif chunks > flight:
            with self.code.loop(str(flight * width), str(extent), str(flight * width), compare="ult") as i:
                for j in range(flight):
                    with self.fresh_memo():
                        start = i if j == 0 else self.code.ins(f"add i64 {i}, {j * width}")
                        self._accumulate(region, kinds, inputs, chunk(start, width), slots[j], updates)
        parts = [self._get(kinds, each) for each in slots]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self._vectors(kinds, self.apply_region(region, parts[j] + parts[j + half])) for j in range(half)]
        return parts[0]

    def _vectors(self, kinds: list, lanes: list[Lane]) -> list[Lane]:
        return [Lane("u" if self.width == 1 else "v", self.vector(lane, kind)) for lane, kind in zip(lanes, kinds)]

    def _fold(self, region: Region, kinds: list, lanes: list[Lane], width: int) -> list[Lane]:
        """All lanes into one, the low half with the high half."""
        while width > 1:
            half = width // 2
            sides = []
            for start in (0, half):
                side = []
                for lane, kind in zip(lanes, kinds):
                    if half == 1:
                        text = self.code.ins(f"extractelement {ir(kind, width)} {lane.ssa}, i64 {start}")
                        side.append(Lane("u", text))
                    else:
                        index = list(range(start, start + half))
                        side.append(Lane("v", shuffle(self.code, ir(kind, width), lane.ssa, "poison", index)))
                sides.append(side)
            with self.lanes_of(half):
                lanes = self._vectors(kinds, self.apply_region(region, sides[0] + sides[1]))
            width = half
        return lanes

    # ---- scans ------------------------------------------------------------------------------------------------------

    def emit_scan(self, op: Op) -> None:
        axis, inputs, region, back = op.attrs["axis"], op.operands, op.regions[0], bool(op.attrs.get("reverse"))
        extents = shape(inputs[0].type)
        kinds = [element(value.type) for value in inputs]
        outputs = [self.buffer_for(result) for result in op.results]
        others = [d for d, n in enumerate(extents) if n > 1 and d != axis]
        outer = extents[:axis] + extents[axis + 1 :]
        in_rows = straight(region) and extents[axis] > 1 and all(d < axis for d in others)

        def full(point: tuple[Lane, ...], at: Lane) -> tuple[Lane, ...]:
            return point[:axis] + (at,) + point[axis:]

        def along(point: tuple[Lane, ...]) -> None:
            with self.lanes_of(min(self.lanes, extents[axis])):
                self._scan_row(region, kinds, inputs, outputs, extents[axis], lambda at: full(point, at), back)

        def across(point: tuple[Lane, ...]) -> None:  # step by step
            first = Lane("u", str(extents[axis] - 1)) if back else ZERO
            values = self._vectors(kinds, [self._lane(self.read(tile, full(point, first))) for tile in tiles])
            slots = [self.code.slot(ir(kind, self.width), lane.ssa) for kind, lane in zip(kinds, values)]
            for output, lane in zip(outputs, values):
                self.write(output, full(point, first), lane)
            if extents[axis] == 1:
                return
            with self.code.loop("1", str(extents[axis]), compare="ult") as i, self.fresh_memo():
                at = full(point, Lane("u", self.code.ins(f"sub i64 {extents[axis] - 1}, {i}") if back else i))
                right = self._vectors(kinds, [self._lane(self.read(tile, at)) for tile in tiles])
                lanes = self._vectors(kinds, self.apply_region(region, self._get(kinds, slots) + right))
                for kind, slot, lane, output in zip(kinds, slots, lanes, outputs):
                    self.code.set(ir(kind, self.width), slot, lane.ssa)
                    self.write(output, at, lane)

        if in_rows:
            self.nest(outer, along, scalar=True)
            return
        held = [self.tile_of(value) for value in inputs]
        tiles = [tile for tile, _ in held]
        lane_axis = others[-1] - (others[-1] > axis) if others else None
        self.nest(outer, across, lane_axis, scalar=not straight(region))
        for tile, fresh in held:
            if fresh:
                self.free_buffer(tile)

    def _scan_row(self, region: Region, kinds: list, inputs: list[Value], outputs: list[Buffer], extent: int, full,
                  back: bool) -> None:  # fmt: skip
        """A vector at a time: its own prefixes, then what came before it combined with each."""
        width = self.width
        last = 0 if back else width - 1

        def prefixes(start: str) -> tuple[tuple[Lane, ...], list[Lane]]:
            point = full(Lane("a", start, 1, width))
            return point, self._prefixes(region, kinds, [self._lane(self.at(value, point)) for value in inputs], back)

        def put(point: tuple[Lane, ...], lanes: list[Lane], slots: list[str]) -> None:
            for kind, lane, output, slot in zip(kinds, lanes, outputs, slots):
                self.write(output, point, lane)
                total = self.code.ins(f"extractelement {ir(kind, width)} {lane.ssa}, i64 {last}")
                self.code.set(ir(kind), slot, total)

        slots = [self.code.slot(ir(kind)) for kind in kinds]
        with self.fresh_memo():
            point, lanes = prefixes(str(extent - width) if back else "0")
            put(point, lanes, slots)
        if extent == width:
            return
        with self.code.loop(str(width), str(extent), str(width), compare="ult") as i, self.fresh_memo():
            point, lanes = prefixes(self.code.ins(f"sub i64 {extent - width}, {i}") if back else i)
            totals = [Lane("u", self.code.get(ir(kind), slot)) for kind, slot in zip(kinds, slots)]
            put(point, self._vectors(kinds, self.apply_region(region, self._vectors(kinds, totals) + lanes)), slots)

    def _prefixes(self, region: Region, kinds: list, lanes: list[Lane], back: bool) -> list[Lane]:
        """Lane i combined with all before it, in log2(width) steps: each doubles how many a lane holds."""
        width, lanes, reach = self.width, self._vectors(kinds, lanes), 1
        while reach < width:
            source = [i + reach if back else i - reach for i in range(width)]
            inside = [0 <= i < width for i in source]
            order = [i if good else 0 for i, good in zip(source, inside)]
            mask = "<" + ", ".join(f"i1 {str(good).lower()}" for good in inside) + ">"
            moved = [Lane("v", shuffle(self.code, ir(kind, width), lane.ssa, "poison", order))
                     for kind, lane in zip(kinds, lanes)]  # fmt: skip
            combined = self._vectors(kinds, self.apply_region(region, moved + lanes))
            lanes = [
                Lane("v", self.code.ins(f"select <{width} x i1> {mask}, {vector} {new.ssa}, {vector} {old.ssa}"))
                for vector, new, old in zip((ir(kind, width) for kind in kinds), combined, lanes)
            ]
            reach *= 2
        return lanes

    # ---- others that need whole tiles -------------------------------------------------------------------------------

    def emit_map(self, op: Op) -> None:
        """`pack` elements a call: neighbours in row-major order."""
        region, pack = op.regions[0], op.attrs["pack"]
        kinds = [element(result.type) for result in op.results]
        outputs = [self.buffer_for(result) for result in op.results]
        extents = outputs[0].shape

        def one(point: tuple[Lane, ...]) -> None:
            lanes = [self._lane(self.at(value, point)) for value in op.operands]
            for output, kind, lane in zip(outputs, kinds, self.apply_region(region, lanes)):
                self.write(output, point, lane)

        def several(point: tuple[Lane, ...]) -> None:
            first = self.times(point[0], pack)
            places = [self.unlinear(self.add(first, Lane("u", str(j))), extents) for j in range(pack)]
            found = self.apply_region(
                region, [self._lane(self.at(value, place)) for value in op.operands for place in places]
            )
            for i, output in enumerate(outputs):
                for place, lane in zip(places, found[i * pack : (i + 1) * pack]):
                    self.write(output, place, lane)

        if pack == 1:
            self.nest(extents, one, scalar=not straight(region))
        else:
            self.nest((math.prod(extents) // pack,), several, scalar=True)

    def tile_of(self, value: Value) -> tuple[Buffer, bool]:
        """A row-major tile that holds `value`, and whether it is a temporary one."""
        bound = self.env.get(value)
        if isinstance(bound, Buffer):
            return bound, False
        tile = self.new_buffer(shape(value.type), element(value.type))
        self.materialise(value, tile)
        return tile, True

    def emit_gather(self, op: Op) -> None:
        source, fresh = self.tile_of(op.operands[0])
        axis, index = op.attrs["axis"], op.operands[1]
        output = self.buffer_for(op.result)

        def body(point: tuple[Lane, ...]) -> None:
            lane = self._widen(self.at(index, point), element(index.type))
            where = point[:axis] + (lane,) + point[axis + 1 :]
            self.write(output, point, self.read(source, where))

        self.nest(output.shape, body)
        if fresh:
            self.free_buffer(source)

    def emit_cat(self, op: Op) -> None:
        output = self.buffer_for(op.result)
        start = 0
        for value in op.operands:
            extents = shape(value.type)

            def body(point: tuple[Lane, ...], value=value, start=start) -> None:
                there = (self.add(point[0], Lane("u", str(start))), *point[1:])
                self.write(output, there, self.at(value, point))

            self.nest(extents, body)
            start += extents[0]

    def emit_histogram(self, op: Op) -> None:
        source, mask = op.operands[0], op.operands[1] if len(op.operands) > 1 else None
        kind, wide = element(source.type), element(op.result.type)
        output = self.buffer_for(op.result)
        bins = output.shape[0]
        zero = "0"
        self.nest(output.shape, lambda point: self.write(output, point, Lane("u", zero)))

        def body(point: tuple[Lane, ...]) -> None:
            bin = self._widen(self.at(source, point), kind).ssa
            good = self.code.ins(f"icmp ult i64 {bin}, {bins}")
            if mask is not None:
                good = self.code.ins(f"and i1 {good}, {self.at(mask, point).ssa}")
            with self.code.when(good):
                place = self.code.ins(f"getelementptr {ir(wide)}, ptr {output.ptr}, i64 {bin}")
                count = self.code.get(ir(wide), place)
                self.code.set(ir(wide), place, self.code.ins(f"add {ir(wide)} {count}, 1"))

        self.nest(shape(source.type), body, scalar=True)

