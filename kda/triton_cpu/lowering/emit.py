# SPDX-License-Identifier: Apache-2.0
"""Text of LLVM IR: a module of functions, and one function written instruction by instruction.

Values that change around a loop live in stack slots, which LLVM turns into registers: no phi is written by hand.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kda.triton_cpu.lowering.types import F32, literal


class Module:
    """Functions, globals and declarations, each once."""

    def __init__(self, vector_bytes: int, native_half: bool = True):
        self.vector_bytes = vector_bytes
        self.native_half = native_half  # the processor converts fp16 itself
        self.declarations: dict[str, str] = {}
        self.globals: list[str] = []
        self.functions: dict[str, str] = {}
        self.strings: dict[bytes, str] = {}
        self.tables: dict[str, str] = {}

    def declare(self, name: str, result: str, args: str) -> None:
        self.declarations[name] = f"declare {result} @{name}({args})"

    def constant(self, text: str, align: int = 64) -> str:
        """A private constant array; returns its name."""
        name = f"@const.{len(self.globals)}"
        self.globals.append(f"{name} = private unnamed_addr constant {text}, align {align}")
        return name

    def helper_table(self, name: str, values: list[float]) -> str:
        """A constant array of fp32, once under its name."""
        if name not in self.tables:
            texts = ", ".join(f"float {literal(value, F32)}" for value in values)
            self.tables[name] = self.constant(f"[{len(values)} x float] [{texts}]")
        return self.tables[name]

    def string(self, text: str) -> str:
        data = text.encode() + b"\0"
        if data not in self.strings:
            escaped = "".join(chr(c) if 32 <= c < 127 and c not in (34, 92) else f"\\{c:02X}" for c in data)
            self.strings[data] = self.constant(f'[{len(data)} x i8] c"{escaped}"', 1)
        return self.strings[data]

    def helper(self, name: str, result: str, args: str, write: Callable[[Code], None], attrs: str = "") -> str:
        """An internal function, written once: `write` fills its body. Returns its name with the @."""
        if name not in self.functions:
            self.functions[name] = ""  # a helper may call itself or be asked for while it is written
            code = Code(self)
            write(code)
            self.functions[name] = f"define internal {result} @{name}({args}) #0 {attrs} {{\n{code.text()}}}\n"
        return f"@{name}"

    def text(self) -> str:
        parts = ["\n".join(self.globals), "\n".join(self.declarations.values()), *self.functions.values()]
        prefer = self.vector_bytes * 8
        width = f'"prefer-vector-width"="{prefer}" "min-legal-vector-width"="{prefer}"'
        return "\n\n".join(parts) + f"\nattributes #0 = {{ nounwind {width} }}\n"


class Code:
    """The body of one function."""

    def __init__(self, module: Module):
        self.module = module
        self.entry: list[str] = []  # stack slots and addresses that every block may use
        self.lines: list[str] = []
        self.count = 0
        self.block = "entry"

    def text(self) -> str:
        return "\n".join(["entry:", *self.entry, "  br label %start", "start:", *self.lines]) + "\n"

    def name(self) -> str:
        self.count += 1
        return f"%.{self.count}"

    def ins(self, text: str) -> str:
        """One instruction that has a result."""
        name = self.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def at_entry(self, text: str) -> str:
        name = self.name()
        self.entry.append(f"  {name} = {text}")
        return name

    def slot(self, type: str, value: str | None = None) -> str:
        """A stack slot, stored to here if there is a value."""
        name = self.at_entry(f"alloca {type}, align 64")
        if value is not None:
            self.do(f"store {type} {value}, ptr {name}")
        return name

    def get(self, type: str, slot: str) -> str:
        return self.ins(f"load {type}, ptr {slot}")

    def set(self, type: str, slot: str, value: str) -> None:
        self.do(f"store {type} {value}, ptr {slot}")

    def call(self, result: str, function: str, args: str) -> str:
        return self.ins(f"call {result} {function}({args})")

    def intrinsic(self, name: str, result: str, types: list[str], args: list[str]) -> str:
        self.module.declare(name, result, ", ".join(types))
        return self.call(result, f"@{name}", ", ".join(f"{t} {a}" for t, a in zip(types, args)))

    def fresh(self, hint: str) -> str:
        self.count += 1
        return f"{hint}.{self.count}"

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def jump(self, label: str) -> None:
        self.do(f"br label %{label}")

    def branch(self, condition: str, then: str, other: str) -> None:
        self.do(f"br i1 {condition}, label %{then}, label %{other}")

    @contextlib.contextmanager
    def loop(self, low: str, high: str, step: str = "1", type: str = "i64", compare: str = "slt") -> Iterator[str]:
        """`for i in range(low, high, step)`; yields i."""
        head, body, exit = self.fresh("for"), self.fresh("body"), self.fresh("end")
        slot = self.slot(type, low)
        self.jump(head)
        self.start(head)
        i = self.get(type, slot)
        self.branch(self.ins(f"icmp {compare} {type} {i}, {high}"), body, exit)
        self.start(body)
        yield i
        self.set(type, slot, self.ins(f"add {type} {i}, {step}"))
        self.jump(head)
        self.start(exit)

    @contextlib.contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """The body runs if `condition` holds."""
        then, end = self.fresh("then"), self.fresh("end")
        self.branch(condition, then, end)
        self.start(then)
        yield
        self.jump(end)
        self.start(end)


def constant(text: str) -> int | None:
    """The value of an integer literal, None for a register."""
    return int(text) if text.lstrip("-").isdigit() else None


def splat(code: Code, type: str, value: str, width: int) -> str:
    """`value` in every lane; `type` is the lane's."""
    if width == 1:
        return value
    if not value.startswith(("%", "@")):
        return f"splat ({type} {value})"
    vector = f"<{width} x {type}>"
    first = code.ins(f"insertelement {vector} poison, {type} {value}, i64 0")
    return code.ins(f"shufflevector {vector} {first}, {vector} poison, <{width} x i32> zeroinitializer")


def iota(type: str, width: int, stride: int = 1) -> str:
    """<0, stride, 2 stride, ..> of an integer type."""
    half = 1 << (int(type[1:]) - 1)
    return "<" + ", ".join(f"{type} {(stride * i + half) % (2 * half) - half}" for i in range(width)) + ">"


def shuffle(code: Code, vector: str, value: str, other: str, lanes: list[int]) -> str:
    mask = ", ".join(f"i32 {lane}" for lane in lanes)
    return code.ins(f"shufflevector {vector} {value}, {vector} {other}, <{len(lanes)} x i32> <{mask}>")
