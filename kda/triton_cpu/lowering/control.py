# SPDX-License-Identifier: Apache-2.0
"""Functions, blocks, loops and branches; values that they carry.

A scalar that a loop or a branch carries lives in a stack slot, a tensor in a tile of the arena. A loop's tile is
updated in place where each element of the new value needs only its own old one.
"""
from __future__ import annotations

from collections.abc import Callable

from kda.triton_cpu.lowering.analysis import Plan, lazy_kind
from kda.triton_cpu.lowering.casts import convert
from kda.triton_cpu.lowering.emit import Code
from kda.triton_cpu.lowering.lanes import ZERO, Address, Buffer, Lane, Shifted, row_major
from kda.triton_cpu.lowering.types import F64, I1, I64, element, ir, literal, shape, size_of, unsupported
from kda.triton_cpu.ttir import Block, Function, Op, Pointer, Region, Tensor, Value

_RETURNS = {"tt.return", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"}
_WHY_NOT = {
    "tt.atomic_poll": "it waits for another program, and programs run one after another here",
    "tt.elementwise_inline_asm": "inline assembly is that of a GPU",
}
# Launches are synchronous: a grid has nothing to wait for in the one before.
_NOTHING = {"ttg.barrier", "gpu.barrier", "tt.debug_barrier", "llvm.intr.assume", "scf.condition", "scf.yield",
            "tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents",
            "ttng.grid_dependency_wait", "ttng.grid_dependency_launch_dependents"}  # fmt: skip


class Control:
    """Mixin of the lowering: `emit_*` write code where they stand."""

    code: Code
    plan: Plan

    # ---- functions --------------------------------------------------------------------------------------------------

    def emit_body(self, region: Region, on_return: Callable[[Op], None]) -> None:
        """All blocks of a function; `on_return` leaves it."""
        labels = {id(block): self.code.fresh("bb") for block in region.blocks}
        slots: dict[int, list] = {}
        for block in region.blocks[1:]:
            slots[id(block)] = [self._carrier(arg) for arg in block.args]
        self.code.jump(labels[id(region.entry)])
        for block in region.blocks:
            self.code.start(labels[id(block)])
            for arg, carrier in zip(block.args, slots.get(id(block), [])):
                self.env[arg] = carrier if isinstance(carrier, Buffer) else self.code.get(ir(arg.type), carrier)
            self.emit_ops(block, block.ops[:-1])
            last = block.terminator
            if last.name in _RETURNS:
                on_return(last)
            elif last.name in ("cf.br", "cf.cond_br"):
                self._leave(last, labels, slots)
            else:
                raise unsupported(last, "a block ends in it")

    def _carrier(self, value: Value) -> Buffer | str:
        if isinstance(value.type, Tensor):
            return self.new_buffer(value.type.shape, element(value.type))
        return self.code.slot(ir(value.type))

    def _leave(self, op: Op, labels: dict[int, str], slots: dict[int, list]) -> None:
        successors = op.attrs["successors"]
        edges = [self.code.fresh("edge") for _ in successors]
        if len(edges) == 1:
            self.code.jump(edges[0])
        else:
            self.code.branch(self.scalar(op.operands[0]), edges[0], edges[1])
        for edge, (block, values) in zip(edges, successors):
            self.code.start(edge)
            self.assign(values, slots.get(id(block), []))
            self.code.jump(labels[id(block)])

    def emit_call(self, op: Op) -> None:
        """A device function, written out at the call."""
        function = self.ttir.functions.get(str(op.attrs.get("callee", "")).lstrip("@"))
        if function is None or function.body is None:
            raise unsupported(op, "no such function")
        if function.name in self.calling:
            raise unsupported(op, "recursion")
        temporary = []
        for arg, value in zip(function.args, op.operands):
            if isinstance(value.type, Tensor):
                buffer = self.new_buffer(value.type.shape, element(value.type))
                self.materialise(value, buffer)
                temporary.append(buffer)
                self.env[arg] = buffer
            else:
                self.env[arg] = self.scalar(value)
        results = [self._carrier(result) for result in op.results]
        end = self.code.fresh("returned")

        def leave(last: Op) -> None:
            self.assign(last.operands, results)
            self.code.jump(end)

        caller, self.plan = self.plan, self.plan_of(function)
        self.calling.append(function.name)
        with self.fresh_memo():
            self.emit_body(function.body, leave)
        self.calling.pop()
        self.plan = caller
        self.code.start(end)
        self._bind(op.results, results)
        for buffer in temporary:
            self.free_buffer(buffer)

    def call_region(self, region: Region, args: list[Lane]) -> list[Lane]:
        """The function of scalars that a reduction, a scan or `map_elementwise` holds, with any control flow."""
        for arg, lane in zip(region.entry.args, args):
            self.env[arg] = lane.ssa
        values = next(block.terminator.operands for block in region.blocks if block.terminator.name in _RETURNS)
        results = [self._carrier(value) for value in values]
        end = self.code.fresh("returned")

        def leave(last: Op) -> None:
            self.assign(last.operands, results)
            self.code.jump(end)

        with self.fresh_memo():
            self.emit_body(region, leave)
        self.code.start(end)
        return [Lane("u", self.code.get(ir(value.type), slot)) for value, slot in zip(values, results)]

    def plan_of(self, function: Function) -> Plan:
        if function.name not in self.plans:
            self.plans[function.name] = Plan(function)
        return self.plans[function.name]

    # ---- operations -------------------------------------------------------------------------------------------------

    def emit_ops(self, block: Block, ops: list[Op]) -> None:
        while ops:
            run, count = self.row_run(ops)
            if run:
                self.emit_rows(run)
            else:
                self.emit_op(ops[0])
            for op in ops[:count]:
                self.free_dead(op)
            ops = ops[count:]

    def free_dead(self, op: Op) -> None:
        for value in self.plan.dying.get(op, ()):
            for key in [key for key in self.packed if key[0] is value]:
                self.free_buffer(self.packed.pop(key))
            bound = self.env.get(value)
            if isinstance(bound, Buffer) and self.owner.get(bound.offset) is value:
                del self.owner[bound.offset]
                self.free_buffer(bound)

    def emit_op(self, op: Op) -> None:
        if op.name in self.HANDLERS:
            self.HANDLERS[op.name](self, op)
        elif op.name in _NOTHING:
            pass
        elif lazy_kind(op):
            for value in op.results:
                self._emit_value(op, value)
        else:
            raise unsupported(op, _WHY_NOT.get(op.name, "this operation is not supported on a CPU"))

    def _emit_value(self, op: Op, value: Value) -> None:
        if isinstance(value.type, Tensor):
            if value not in self.plan.lazy and self.plan.consumers.get(value):
                if op.name == "arith.constant":
                    self.env[value] = self._constant(op, value)
                    return
                self.plan.lazy.add(value)  # computed this once like a lazy value
                buffer = self.new_buffer(value.type.shape, element(value.type), self.best_axis(value))
                self.materialise(value, buffer)
                self.plan.lazy.discard(value)
                self.bind_buffer(value, buffer)
            return
        with self.lanes_of(1), self.fresh_memo():
            if op.name == "tt.load":
                lane = self.load_lanes(op, ())
            elif op.name == "tt.unsplat":
                lane = self.at(op.operands[0], tuple(ZERO for _ in shape(op.operands[0].type)))
            else:
                lane = self.apply(op, [self.at(operand, ()) for operand in op.operands], value.index)
        self.env[value] = self.pointer(lane) if isinstance(lane, Address) else lane.ssa

    def _constant(self, op: Op, value: Value) -> Buffer:
        kind = element(value.type)
        held = "i8" if kind == I1 else ir(kind)
        flat: list = []

        def collect(item: object) -> None:
            if isinstance(item, (list, tuple)):
                for part in item:
                    collect(part)
            else:
                flat.append(item)

        data = op.attrs["value"]
        if isinstance(data, bytes):
            raise unsupported(op, "a constant given as raw bytes")
        collect(data)
        texts = ", ".join(f"{held} {literal(item, kind)}" for item in flat)
        name = self.module.constant(f"[{len(flat)} x {held}] [{texts}]")
        return Buffer(name, value.type.shape, row_major(value.type.shape), kind)

    def scalar(self, value: Value) -> str:
        """The register of a scalar."""
        bound = self.env.get(value)
        if not isinstance(bound, str):
            raise unsupported(value.op, "a scalar that was never computed") if value.op else AssertionError(value)
        return bound

    # ---- values that are carried ------------------------------------------------------------------------------------

    def assign(self, values: list[Value], targets: list[Buffer | str]) -> None:
        """Puts all values into slots and tiles at once: the new ones may need the old ones of any target."""
        pairs = [(v, t) for v, t in zip(values, targets) if isinstance(t, Buffer)]
        pairs = [(v, t) for v, t in pairs if not (isinstance(self.env.get(v), Buffer) and self.env[v].ptr == t.ptr)]
        reads = [self._reads(value) for value, _ in pairs]
        late = []
        for i, (value, target) in enumerate(pairs):
            others = any(target.ptr in read for j, read in enumerate(reads) if j != i)
            if others or not reads[i].get(target.ptr, True):
                copy = self.new_buffer(target.shape, target.kind)
                self.materialise(value, copy)
                late.append((copy, target))
            else:
                late.append((value, target))
        for source, target in late:
            if isinstance(source, Value):
                self.materialise(source, target)
        for source, target in late:
            if isinstance(source, Buffer):
                self.copy(source, target)
                self.free_buffer(source)
        for value, target in zip(values, targets):
            if isinstance(target, str):
                self.code.set(ir(value.type), target, self.scalar(value))

    def _reads(self, value: Value) -> dict[str, bool]:
        """The tiles that evaluating `value` reads; True where element by element."""
        found: dict[str, bool] = {}
        for source, aligned in self.plan.reads(value).items():
            bound = self.env.get(source)
            if isinstance(bound, Shifted):
                for ptr in self._reads(bound.start):
                    found[ptr] = False
            elif isinstance(bound, Buffer):
                found[bound.ptr] = found.get(bound.ptr, True) and aligned
        return found

    def copy(self, source: Buffer, target: Buffer) -> None:
        count = target.shape[0] * target.steps[0] if target.shape else 1
        name = "llvm.memcpy.p0.p0.i64"
        self.module.declare(name, "void", "ptr, ptr, i64, i1")
        size = count * size_of(target.kind)
        self.code.do(f"call void @{name}(ptr align 64 {target.ptr}, ptr align 64 {source.ptr}, i64 {size}, i1 false)")

    def _bind(self, values: list[Value], carriers: list[Buffer | str]) -> None:
        for value, carrier in zip(values, carriers):
            if isinstance(carrier, Buffer):
                self.bind_buffer(value, carrier)
            else:
                self.env[value] = self.code.get(ir(value.type), carrier)

    def _enter(self, op: Op, inits: list[Value], args: list[Value], shifts: dict[int, Value]) -> list[Buffer | str]:
        """Slots and tiles of a loop, holding its first values."""
        carriers: list[Buffer | str] = []
        for i, (init, arg) in enumerate(zip(inits, args)):
            if i in shifts:
                carriers.append(self.code.slot(ir(self._shift_kind(arg)), "0"))
            elif not isinstance(init.type, Tensor):
                carriers.append(self.code.slot(ir(init.type), self.scalar(init)))
            else:
                buffer = self.take_over(init, op)
                if buffer is None:
                    buffer = self.new_buffer(shape(init.type), element(init.type))
                    self.materialise(init, buffer)
                self.owner[buffer.offset] = arg
                carriers.append(buffer)
        return carriers

    def take_over(self, value: Value, op: Op) -> Buffer | None:
        """The tile of `value`, to be overwritten by `op`, if nothing else needs it any more."""
        buffer = self.env.get(value)
        if not isinstance(buffer, Buffer) or buffer.offset < 0 or self.owner.get(buffer.offset) is not value:
            return None
        home = value.op.parent if value.op else value.block
        fits = buffer.steps == row_major(buffer.shape)
        return buffer if fits and home is op.parent and self.plan.last_use(value, op) else None

    # ---- loops and branches -----------------------------------------------------------------------------------------

    def emit_for(self, op: Op) -> None:
        low, high, step = (self.scalar(value) for value in op.operands[:3])
        block, inits = op.regions[0].entry, op.operands[3:]
        counter, args = block.args[0], block.args[1:]
        shifts = self.plan.shifts.get(op, {})
        carriers = self._enter(op, inits, args, shifts)
        compare = "ult" if op.attrs.get("unsignedCmp") else "slt"
        with self.code.loop(low, high, step, ir(counter.type), compare) as i:
            self.env[counter] = i
            self._open(args, inits, carriers, shifts)
            with self.fresh_memo():
                self.emit_ops(block, block.ops[:-1])
                self._yield(block.terminator, carriers, shifts)
        self._close(op.results, inits, carriers, shifts)

    def _open(self, args: list[Value], inits: list[Value], carriers: list, shifts: dict[int, Value]) -> None:
        for i, (arg, carrier) in enumerate(zip(args, carriers)):
            if i in shifts:
                self.env[arg] = Shifted(inits[i], self.code.get(ir(self._shift_kind(arg)), carrier))
            else:
                self.env[arg] = carrier if isinstance(carrier, Buffer) else self.code.get(ir(arg.type), carrier)

    def _yield(self, last: Op, carriers: list, shifts: dict[int, Value]) -> None:
        kept = [i for i in range(len(carriers)) if i not in shifts]
        moved = []
        for i, amount in shifts.items():
            arg = last.operands[i].op.operands[0]
            moved.append((carriers[i], ir(self._shift_kind(arg)), self._moved(arg, amount)))
        self.assign([last.operands[i] for i in kept], [carriers[i] for i in kept])
        for slot, kind, text in moved:
            self.code.set(kind, slot, text)

    def _shift_kind(self, arg: Value):
        kind = element(arg.type)
        return I64 if isinstance(kind, Pointer) else kind

    def _moved(self, arg: Value, amount: Value) -> str:
        """The next shift of a carried tensor that grows by a uniform `amount`."""
        with self.lanes_of(1), self.fresh_memo():
            lane = self.at(amount, tuple(ZERO for _ in shape(amount.type)))
            kind, now = element(arg.type), self.env[arg].shift
            if isinstance(kind, Pointer):
                lane = self.times(self._widen(lane, element(amount.type)), size_of(kind.element))
                return self.code.ins(f"add i64 {now}, {lane.ssa}")
            return self.code.ins(f"add {ir(kind)} {now}, {lane.ssa}")

    def _close(self, results: list[Value], inits: list[Value], carriers: list, shifts: dict[int, Value]) -> None:
        for i, (result, carrier) in enumerate(zip(results, carriers)):
            if i in shifts:
                self.env[result] = Shifted(inits[i], self.code.get(ir(self._shift_kind(result)), carrier))
            else:
                self._bind([result], [carrier])
                if self._lent(inits[i], carrier):
                    self.owner[carrier.offset] = inits[i]

    def _lent(self, init: Value, carrier: Buffer | str) -> bool:
        """Whether a loop took over the tile of a loop around it, which still needs it for its next iteration."""
        bound = self.env.get(init)
        same = isinstance(carrier, Buffer) and isinstance(bound, Buffer) and bound.ptr == carrier.ptr
        return init.op is None and same

    def emit_if(self, op: Op) -> None:
        condition = self.scalar(op.operands[0])
        carriers = [self._carrier(result) for result in op.results]
        labels = [self.code.fresh(hint) for hint in ("then", "else", "endif")]
        self.code.branch(condition, labels[0], labels[1])
        for label, region in zip(labels, op.regions + [None] * (2 - len(op.regions))):
            self.code.start(label)
            if region is not None and region.blocks:
                with self.fresh_memo():
                    self.emit_ops(region.entry, region.entry.ops[:-1])
                    self.assign(region.entry.terminator.operands, carriers)
            self.code.jump(labels[2])
        self.code.start(labels[2])
        self._bind(op.results, carriers)

    def emit_while(self, op: Op) -> None:
        before, after = (region.entry for region in op.regions)
        carriers = self._enter(op, op.operands, before.args, {})
        head, body, exit = (self.code.fresh(hint) for hint in ("while", "do", "done"))
        passed = before.terminator.operands[1:]
        tiles = [self._carrier(value) if isinstance(value.type, Tensor) else None for value in passed]
        self.code.jump(head)
        self.code.start(head)
        self._open(before.args, op.operands, carriers, {})
        with self.fresh_memo():
            self.emit_ops(before, before.ops[:-1])
            for value, tile in zip(passed, tiles):
                if tile is not None:
                    self.materialise(value, tile)
        self.code.branch(self.scalar(before.terminator.operands[0]), body, exit)
        self.code.start(body)
        for arg, value, tile in zip(after.args, passed, tiles):
            self.env[arg] = self.scalar(value) if tile is None else tile
        with self.fresh_memo():
            self.emit_ops(after, after.ops[:-1])
            self.assign(after.terminator.operands, carriers)
        self.code.jump(head)
        self.code.start(exit)
        for init, carrier in zip(op.operands, carriers):
            if self._lent(init, carrier):
                self.owner[carrier.offset] = init
            elif isinstance(carrier, Buffer):
                self.owner.pop(carrier.offset, None)
                self.free_buffer(carrier)
        for result, value, tile in zip(op.results, passed, tiles):
            if tile is None:
                self.env[result] = self.scalar(value)
            else:
                self.bind_buffer(result, tile)

    # ---- small things -----------------------------------------------------------------------------------------------

    def emit_program_id(self, op: Op) -> None:
        self.env[op.result] = self.program[op.attrs["axis"]]

    def emit_num_programs(self, op: Op) -> None:
        self.env[op.result] = ("%gx", "%gy", "%gz")[op.attrs["axis"]]

    def emit_assert(self, op: Op) -> None:
        """Leaves the message and the program id in the arena's header; the launcher raises."""
        message = str(op.attrs.get("message", "device assertion failed"))
        text = self.module.string(f"{message}{f' at {op.loc}' if op.loc else ''}")

        def body(point: tuple[Lane, ...]) -> None:
            lane = self.at(op.operands[0], point)
            good = lane.ssa
            if lane.kind == "v":
                name = f"llvm.vector.reduce.and.v{self.width}i1"
                good = self.code.intrinsic(name, "i1", [ir(I1, self.width)], [lane.ssa])
            with self.code.when(self.code.ins(f"xor i1 {good}, true")):
                self.fail(1, text)

        self.nest(shape(op.operands[0].type), body)

    def fail(self, status: int, text: str, details: tuple[str, ...] = ()) -> None:
        """Records this thread's first failure in the control block before the arena (runtime.py), ends the program."""
        def place(offset: int) -> str:
            return self.code.ins(f"getelementptr i8, ptr %arena, i64 {offset}")

        where = place(-256)
        with self.code.when(self.code.ins(f"icmp eq i64 {self.code.get('i64', where)}, 0")):
            self.code.set("i64", where, str(status))
            self.code.set("ptr", place(-248), text)
            self.code.set("i64", place(-240), self.program[3])
            for i, detail in enumerate(details):
                self.code.set("i64", place(-232 + 8 * i), detail)
        self.code.jump(self.leave)
        self.code.start(self.code.fresh("dead"))

    def emit_print(self, op: Op) -> None:
        """One line an element, as Triton prints them."""
        self.module.declarations["printf"] = "declare i32 @printf(ptr, ...)"
        prefix = str(op.attrs.get("prefix", "")).replace("%", "%%")
        signs = op.attrs.get("isSigned") or [1] * len(op.operands)
        values = op.operands or [None]
        ids = [f"i32 {text}" for text in self.program[:3]]
        for value, sign in zip(values, list(signs) or [1]):
            if value is None:
                self._printf(f"pid (%d, %d, %d){prefix}\n", ids)
                continue
            extents, kind = shape(value.type), element(value.type)

            def body(point, value=value, sign=sign, extents=extents, kind=kind) -> None:
                lane = self.at(value, point)
                form, arg = self._printable(op, lane, kind, bool(sign), bool(op.attrs.get("hex")))
                index = ", ".join("%lld" for _ in extents)
                place = [f"i64 {lane.ssa}" for lane in point]
                where = f" idx ({index})" if extents else ""
                self._printf(f"pid (%d, %d, %d){where}{prefix}{form}\n", [*ids, *place, arg])

            self.nest(extents, body, scalar=True)

    def _printf(self, form: str, args: list[str]) -> None:
        self.code.ins(f"call i32 (ptr, ...) @printf({', '.join([f'ptr {self.module.string(form)}', *args])})")

    def _printable(self, op: Op, lane: Lane | Address, kind, signed: bool, hexadecimal: bool) -> tuple[str, str]:
        if isinstance(lane, Address):
            return "%p", f"ptr {self.pointer(lane)}"
        if kind.is_float:
            return "%f", f"double {convert(self.code, op, lane.ssa, kind, F64, 1)}"
        extend = "sext" if signed and kind != I1 and not hexadecimal else "zext"
        wide = lane.ssa if kind.bits == 64 else self.code.ins(f"{extend} {ir(kind)} {lane.ssa} to i64")
        form = f"0x%0{max(kind.bits // 4, 1)}llx" if hexadecimal else "%lld" if signed else "%llu"
        return form, f"i64 {wide}"
