# SPDX-License-Identifier: Apache-2.0
"""Parser of printed TTIR into a typed SSA graph.

Triton's Python bindings reach operations and operands but few attributes, whereas the printed module is complete.
`parse` reads it, with or without debug locations:

    >>> module = parse(text)
    >>> for op in module.functions["add_kernel"].body.entry.ops:
    ...     print(op.name, op.attrs, op.results)

What the printed form leaves out is put back: the implicit `scf.yield`, result types, and the attributes that are
printed as bare words (a comparison's `predicate`, a program id's `axis`, ..). Value names are unique in a function and
valid LLVM identifiers.
"""
from __future__ import annotations

import ast
import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field


class ParseError(ValueError):
    """The text is not TTIR as this parser knows it; the message holds the line."""


# ---- types ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scalar:
    """`i1` .. `i64`, `f16`, `bf16`, `f32`, `f64`, `index`, and the 8-bit floats by their MLIR names (`f8E5M2`, ..)."""

    name: str

    @property
    def is_float(self) -> bool:
        return self.name[0] in "fb"

    @property
    def is_int(self) -> bool:
        return not self.is_float

    @property
    def bits(self) -> int:
        if self.name == "index":
            return 64
        if self.name.startswith("f8"):
            return 8
        return int(self.name.lstrip("uisbf"))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Pointer:
    """A pointer to elements of one type."""

    element: Type
    space: int = 1

    @property
    def bits(self) -> int:
        return 64

    def __str__(self) -> str:
        return f"!tt.ptr<{self.element}>" if self.space == 1 else f"!tt.ptr<{self.element}, {self.space}>"


@dataclass(frozen=True)
class Tensor:
    """A tile of scalars or pointers."""

    shape: tuple[int, ...]
    element: Scalar | Pointer

    @property
    def size(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{extent}x' for extent in self.shape)}{self.element}>"


@dataclass(frozen=True)
class Opaque:
    """A type that has no meaning here (a tensor descriptor, a token); kept as text for error messages."""

    name: str

    def __str__(self) -> str:
        return self.name


Type = Scalar | Pointer | Tensor | Opaque


# ---- the graph ------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Value:
    """The result of `op`, or an argument of `block` where `op` is None."""

    name: str
    type: Type
    op: Op | None = None
    index: int = 0
    block: Block | None = None
    uses: list[Op] = field(default_factory=list)  # an operation that uses the value twice is listed twice

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(eq=False, slots=True)
class Block:
    """Arguments and operations; the last operation is the terminator."""

    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    parent: Region | None = None
    label: str = ""

    @property
    def terminator(self) -> Op:
        return self.ops[-1]


@dataclass(eq=False, slots=True)
class Region:
    """Blocks; the first is the entry. `parent` is the operation or function that holds the region."""

    blocks: list[Block] = field(default_factory=list)
    parent: Op | Function | None = None

    @property
    def entry(self) -> Block:
        return self.blocks[0]

    def walk(self) -> Iterator[Op]:
        """Every operation in order of text, an operation before those inside its regions."""
        for block in self.blocks:
            for op in block.ops:
                yield op
                for region in op.regions:
                    yield from region.walk()


@dataclass(eq=False, slots=True)
class Op:
    """One operation. Attributes are Python values: numbers, bools, strings (enumerations too), tuples, dicts, types.

    A terminator with successors holds them in `attrs["successors"]` as a list of (Block, list of Values); those values
    are in `operands` too.
    """

    name: str
    operands: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    attrs: dict[str, object] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    parent: Block | None = None
    where: str = ""
    locations: Locations | None = None

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    @property
    def loc(self) -> str:
        """`file:line:column` of the source, with ` (called from ..)` for an inlined call; "" where unknown."""
        return self.locations.resolve(self.where) if self.locations and self.where else ""

    def __repr__(self) -> str:
        return f"<{', '.join('%' + r.name for r in self.results)} = {self.name} {self.operands} {self.attrs}>"


@dataclass(eq=False, slots=True)
class Function:
    """A function; `attrs[argument]` holds an argument's attributes, such as `{"tt.divisibility": 16}`."""

    name: str
    args: list[Value]
    attrs: dict[Value, dict[str, object]]
    result_types: list[Type]
    body: Region | None
    public: bool
    options: dict[str, object] = field(default_factory=dict)  # the function's own attributes, such as noinline
    where: str = ""
    locations: Locations | None = None

    @property
    def loc(self) -> str:
        return self.locations.resolve(self.where) if self.locations and self.where else ""


@dataclass(eq=False, slots=True)
class Module:
    functions: dict[str, Function] = field(default_factory=dict)
    attrs: dict[str, object] = field(default_factory=dict)

    @property
    def kernel(self) -> Function:
        """The only public function."""
        public = [function for function in self.functions.values() if function.public]
        if len(public) != 1:
            raise ParseError(f"a module must have one public function, this one has {len(public)}")
        return public[0]


class Locations:
    """The `#loc = loc(..)` table at the module's ends, resolved on demand."""

    def __init__(self, text: str):
        self.table = dict(re.findall(r"^#(loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    @functools.lru_cache(maxsize=None)  # noqa: B019 - lives as long as one compilation
    def resolve(self, where: str) -> str:
        where = where.strip()
        if alias := re.fullmatch(r"#(loc\d*)", where):
            return self.resolve(self.table.get(alias[1], "unknown"))
        if place := re.fullmatch(r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)(?: to .*)?', where):
            return f"{_unescape(place[1])}:{place[2]}:{place[3]}"
        if where.startswith("callsite("):
            callee, caller = _split_top(where[len("callsite("):-1], " at ")[:2]
            inner, outer = self.resolve(callee), self.resolve(caller)
            if inner and outer:
                source = inner.split(" (called from ")[0]
                return f"{source} (called from {outer.split(' (called from ')[-1].rstrip(')')})"
            return inner or outer
        if where.startswith("fused"):
            parts = _split_top(where[where.index("[") + 1:where.rindex("]")], ",")
            return next((found for found in map(self.resolve, parts) if found), "")
        if name := re.match(r'"(?:[^"\\]|\\.)*"\(', where):
            return self.resolve(where[name.end():-1])
        return ""


def _split_top(text: str, separator: str) -> list[str]:
    """Splits at separators that stand outside brackets and strings."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        char = text[position]
        if char == '"':
            position = _STRING.match(text, position).end()
            continue
        if char in "([{<":
            depth += 1
        elif char in ")]}>":
            depth -= 1
        elif depth == 0 and text.startswith(separator, position):
            parts.append(text[start:position])
            position += len(separator)
            start = position
            continue
        position += 1
    return [*parts, text[start:]]


# ---- text to values -------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t]*")
_BLANK = re.compile(r"(?:\s+|//[^\n]*)*")
_VALUE = re.compile(r"%([\w$.\-]+)(?:#(\d+))?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SYMBOL = re.compile(r'@(?:"((?:[^"\\]|\\.)*)"|([\w$.\-]+))')
_BLOCK = re.compile(r"\^([\w$.\-]+)")
_NUMBER = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)")
_WORD = re.compile(r"[A-Za-z_][\w$.]*")
_TYPE_START = re.compile(r"tensor<|!|(?:[su]?i\d+|index|none|b?f\d+(?:E\w+)?|tf32)\b|\(")
_SHAPE = re.compile(r"((?:\d+x)*)(.*)", re.DOTALL)
_OPEN, _CLOSE = "([{<", ")]}>"


@functools.lru_cache(maxsize=4096)
def parse_type(text: str) -> Type:
    """The type that `text` prints."""
    text = text.strip()
    if text.startswith("tensor<"):
        extents, element = _SHAPE.fullmatch(_split_top(text[len("tensor<"):-1], ",")[0]).groups()
        return Tensor(tuple(int(extent) for extent in extents.split("x") if extent), parse_type(element))
    if text.startswith("!tt.ptr<"):
        parts = _split_top(text[len("!tt.ptr<"):-1], ",")
        return Pointer(parse_type(parts[0]), int(parts[1]) if len(parts) > 1 else 1)
    if re.fullmatch(r"[su]?i\d+|index|b?f\d+(?:E\w+)?", text):
        return Scalar(text)
    return Opaque(text)


def _unescape(text: str) -> str:
    def one(match: re.Match) -> bytes:
        code = match[1]
        known = {b"n": b"\n", b"t": b"\t", b"\\": b"\\", b'"': b'"'}
        return known[code] if code in known else bytes([int(code, 16)])

    raw = re.sub(rb'\\([nt\\"]|[0-9A-Fa-f]{2})', one, text.encode())
    return raw.decode(errors="replace")


def _round_float(value: float, kind: str) -> float:
    """`value` rounded to nearest even in a float type, as MLIR rounds the decimals that it reads."""
    if value != value or value in (float("inf"), float("-inf")) or kind == "f64":
        return value
    if kind == "f32":
        return struct.unpack("<f", struct.pack("<f", value))[0]
    if kind == "f16":
        return struct.unpack("<e", struct.pack("<e", value))[0]
    if kind == "bf16":
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


# Exponent bits, mantissa bits, exponent bias, "only NaN" (no infinity), "unsigned zero, so -0 is NaN".
_FLOAT8 = {
    "f8E5M2": (5, 2, 15, False, False),
    "f8E4M3": (4, 3, 7, False, False),
    "f8E4M3FN": (4, 3, 7, True, False),
    "f8E4M3FNUZ": (4, 3, 8, True, True),
    "f8E5M2FNUZ": (5, 2, 16, True, True),
    "f8E4M3B11FNUZ": (4, 3, 11, True, True),
}


def float_from_bits(bits: int, kind: str) -> float:
    """The value of a bit pattern of a float type, exactly (a NaN loses its payload)."""
    if kind == "f64":
        return struct.unpack("<d", struct.pack("<Q", bits))[0]
    if kind == "f32":
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    if kind == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    if kind == "f16":
        return struct.unpack("<e", struct.pack("<H", bits))[0]
    if kind not in _FLOAT8:
        raise ParseError(f"constants of type {kind} are not known")
    exponent_bits, mantissa_bits, bias, only_nan, no_negative_zero = _FLOAT8[kind]
    sign = -1.0 if bits >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    top = (1 << exponent_bits) - 1
    if no_negative_zero:
        if bits == 1 << (exponent_bits + mantissa_bits):
            return float("nan")
    elif exponent == top:
        if only_nan and mantissa == (1 << mantissa_bits) - 1:
            return float("nan")
        if not only_nan:
            return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def _number(text: str, element: Type) -> int | float | bool:
    """A literal of an element type."""
    if text in ("true", "false"):
        return text == "true"
    if isinstance(element, Scalar) and element.is_float:
        if "0x" in text:
            return float_from_bits(int(text, 16), element.name)
        return _round_float(float(text), element.name)
    value = int(text, 0)
    return bool(value) if element == Scalar("i1") else value


def _dense(text: str, type: Type) -> object:
    """`dense<..>` as a scalar for a splat, else nested lists."""
    element = type.element if isinstance(type, Tensor) else type
    if text.startswith('"'):  # raw little-endian bytes
        raw = bytes.fromhex(text.strip('"')[2:])
        width = max(element.bits // 8, 1)
        flat = []
        for start in range(0, len(raw), width):
            bits = int.from_bytes(raw[start:start + width], "little")
            if element.is_float:
                flat.append(float_from_bits(bits, element.name))
            elif element.bits == 1:
                flat.append(bool(bits))
            else:
                flat.append(bits - (1 << element.bits) if bits >> (element.bits - 1) else bits)
        if len(flat) == 1:
            return flat[0]
        for extent in reversed(type.shape[1:]):
            flat = [flat[start:start + extent] for start in range(0, len(flat), extent)]
        return flat
    if not text.startswith("["):
        return _number(text, element) if text else []
    literal = re.sub(r"[^\[\],\s]+", lambda match: repr(match[0]), text)

    def convert(item):
        return [convert(part) for part in item] if isinstance(item, list) else _number(item, element)

    return convert(ast.literal_eval(literal))


# ---- the parser -----------------------------------------------------------------------------------------------------

# Bare words of an operation, in order, and the attributes that they are.
_WORDS = {
    "arith.cmpi": ("predicate",),
    "arith.cmpf": ("predicate",),
    "tt.get_program_id": ("axis",),
    "tt.get_num_programs": ("axis",),
    "tt.atomic_rmw": ("atomic_rmw_op", "sem", "scope"),
    "tt.atomic_cas": ("sem", "scope"),
    "tt.atomic_load": ("sem", "scope"),
    "tt.atomic_store": ("sem", "scope"),
    "tt.atomic_poll": ("sem", "scope"),
    "arith.truncf": ("roundingmode",),
}
_FLAGS = ("allow_reorder", "efficient_layout", "unsigned", "disjoint", "nneg", "exact", "volatile")
_AXES = {"x": 0, "y": 1, "z": 2}
_IMPLICIT_YIELD = ("scf.for", "scf.if", "scf.while", "scf.execute_region")


def parse(text: str) -> Module:
    """Parses a printed module.

    Raises:
        ParseError: the text is not TTIR, or has a form that is not known here.
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.locations = Locations(text)
        self.scopes: list[dict[str, list[Value]]] = []
        self.taken: set[str] = set()
        self.blocks: list[dict[str, Block]] = []

    # -- tokens

    def fail(self, why: str):
        start = self.text.rfind("\n", 0, self.at) + 1
        end = self.text.find("\n", self.at)
        line = self.text[start:end if end >= 0 else None].strip()
        raise ParseError(f"TTIR line {self.text.count(chr(10), 0, self.at) + 1}: {why}: {line[:300]}")

    def space(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()

    def blank(self) -> None:
        self.at = _BLANK.match(self.text, self.at).end()

    def peek(self, token: str) -> bool:
        self.space()
        return self.text.startswith(token, self.at)

    def accept(self, token: str) -> bool:
        if self.peek(token):
            self.at += len(token)
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(f"expected {token!r}")

    def match(self, pattern: re.Pattern) -> re.Match | None:
        self.space()
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def need(self, pattern: re.Pattern, what: str) -> re.Match:
        found = self.match(pattern)
        if not found:
            self.fail(f"expected {what}")
        return found

    def word(self, token: str) -> bool:
        """Accepts `token` as a whole word."""
        self.space()
        found = _WORD.match(self.text, self.at)
        if found and found[0] == token:
            self.at = found.end()
            return True
        return False

    def balanced(self) -> str:
        """What stands between the bracket here and its partner."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at = _STRING.match(self.text, self.at).end()
                continue
            self.at += 1
            if char in _OPEN:
                depth += 1
            elif char in _CLOSE and not (char == ">" and self.text[self.at - 2] == "-"):
                depth -= 1
                if depth == 0:
                    return self.text[start + 1:self.at - 1]
        self.fail("unbalanced bracket")

    def location(self) -> str:
        self.space()
        if self.text.startswith("loc(", self.at):
            self.at += len("loc")
            return self.balanced()
        return ""

    # -- types and attributes

    def type(self) -> Type:
        self.space()
        start = self.at
        if self.text.startswith("!", start):
            self.at += 1
            self.need(_WORD, "a type")
        elif not self.match(_WORD):
            self.fail("expected a type")
        if self.text.startswith("<", self.at):
            self.balanced()
        return parse_type(self.text[start:self.at])

    def types(self) -> list[Type]:
        """`T`, `T, U` or `(T, U)`."""
        if self.accept("("):
            found = []
            while not self.accept(")"):
                found.append(self.type())
                self.accept(",")
            return found
        found = [self.type()]
        while self.accept(","):
            found.append(self.type())
        return found

    def attribute(self) -> object:
        self.space()
        char = self.text[self.at]
        if char == '"':
            return _unescape(self.need(_STRING, "a string")[0][1:-1])
        if char == "[":
            return tuple(_Parser(part).attribute() for part in _split_top(self.balanced(), ",") if part.strip())
        if char == "{":
            return self.dictionary()
        if char == "@":
            found = self.need(_SYMBOL, "a symbol")
            return found[1] or found[2]
        if char == "#":
            self.at += 1
            start = self.at
            self.need(_WORD, "an attribute")
            if not self.text.startswith("<", self.at):
                return self.text[start:self.at]
            inside = self.balanced()
            if re.match(r"\s*\w+ = ", inside):
                return _Parser("{" + inside + "}").dictionary()
            return inside.strip()
        if found := self.match(_NUMBER):
            kind = self.type() if self.accept(":") else None
            literal = found[0]
            if kind is None:
                kind = Scalar("f64" if re.search(r"[.eE]", literal) and "0x" not in literal else "i64")
            return _number(literal, kind)
        if char == "!":
            return self.type()
        found = self.need(_WORD, "an attribute")
        word = found[0]
        if self.text.startswith("<", self.at):
            if word == "tensor":
                self.at = found.start()
                return self.type()
            inside = self.balanced()
            if word == "array":
                _, _, items = inside.partition(":")
                return tuple(_Parser(item).attribute() for item in items.split(",") if item.strip())
            if word == "dense":
                kind = self.type() if self.accept(":") else Scalar("i64")
                return _dense(inside.strip(), kind)
            return tuple(part.strip() for part in _split_top(inside, ","))
        if word in ("true", "false"):
            return word == "true"
        if word == "unit":
            return True
        return parse_type(word) if re.fullmatch(r"[su]?i\d+|index|b?f\d+(?:E\w+)?", word) else word

    def dictionary(self) -> dict[str, object]:
        self.expect("{")
        found: dict[str, object] = {}
        self.blank()
        while not self.accept("}"):
            key = self.match(_STRING)
            name = _unescape(key[0][1:-1]) if key else self.need(_WORD, "an attribute name")[0]
            found[name] = self.attribute() if self.accept("=") else True
            self.accept(",")
            self.blank()
        return found

    # -- values

    def unique(self, name: str) -> str:
        base = f"v{name}" if name[0].isdigit() else name
        candidate, count = base, 0
        while candidate in self.taken:
            count += 1
            candidate = f"{base}.{count}"
        self.taken.add(candidate)
        return candidate

    def define(self, name: str, values: list[Value]) -> None:
        self.scopes[-1][name] = values

    def lookup(self, found: re.Match) -> Value:
        name, index = found[1], int(found[2] or 0)
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name][index]
        self.fail(f"%{name} is used before it is defined")

    def operand(self, op: Op) -> Value:
        value = self.lookup(self.need(_VALUE, "a value"))
        self.use(op, value)
        return value

    @staticmethod
    def use(op: Op, value: Value) -> None:
        op.operands.append(value)
        value.uses.append(op)

    def argument(self, block: Block, name: str, type: Type) -> Value:
        value = Value(self.unique(name), type, index=len(block.args), block=block)
        block.args.append(value)
        self.define(name, [value])
        return value

    # -- structure

    def module(self) -> Module:
        module = Module()
        found = re.search(r"^module\b", self.text, re.MULTILINE)
        if not found:
            self.fail("no module")
        self.at = found.end()
        self.match(_SYMBOL)
        if self.word("attributes"):
            module.attrs = self.dictionary()
        self.expect("{")
        while True:
            self.blank()
            if self.accept("}"):
                return module
            if self.word("tt.func"):
                function = self.function()
                module.functions[function.name] = function
            else:
                self.fail("only functions are expected in a module")

    def function(self) -> Function:
        public = True
        if self.word("private") or self.word("nested"):
            public = False
        else:
            self.word("public")
        symbol = self.need(_SYMBOL, "the function's name")
        function = Function(symbol[1] or symbol[2], [], {}, [], None, public, locations=self.locations)
        self.scopes, self.taken, self.blocks = [{}], set(), []
        entry = Block()
        self.expect("(")
        while not self.accept(")"):
            name = self.match(_VALUE)
            if name:
                self.expect(":")
            value = self.argument(entry, name[1] if name else f"arg{len(entry.args)}", self.type())
            function.attrs[value] = self.dictionary() if self.peek("{") else {}
            self.location()
            self.accept(",")
        function.args = entry.args
        if self.accept("->"):
            function.result_types = self.types()
        if self.word("attributes"):
            function.options = self.dictionary()
        if self.peek("{"):
            function.body = self.region(function, entry)
        function.where = self.location()
        return function

    def region(self, parent: Op | Function, entry: Block | None = None) -> Region:
        """`{ .. }`; `entry` is a first block whose arguments are already declared."""
        region = Region(parent=parent)
        self.expect("{")
        self.scopes.append({})
        self.blocks.append({})
        if entry is not None:
            entry.parent = region
            region.blocks.append(entry)
        while True:
            self.blank()
            if self.accept("}"):
                break
            if self.peek("^"):
                label = self.need(_BLOCK, "a block")[1]
                block = self.block(label)
                block.parent = region
                region.blocks.append(block)
                if self.accept("("):
                    while not self.accept(")"):
                        name = self.need(_VALUE, "a block argument")[1]
                        self.expect(":")
                        self.argument(block, name, self.type())
                        self.location()
                        self.accept(",")
                self.expect(":")
                continue
            if not region.blocks:
                region.blocks.append(Block(parent=region))
            self.operation(region.blocks[-1])
        self.scopes.pop()
        self.blocks.pop()
        if not region.blocks:
            region.blocks.append(Block(parent=region))
        last = region.blocks[-1]
        if isinstance(parent, Op) and parent.name in _IMPLICIT_YIELD:
            if not last.ops or last.ops[-1].name not in ("scf.yield", "scf.condition"):
                last.ops.append(Op("scf.yield", parent=last, where=parent.where, locations=self.locations))
        return region

    def block(self, label: str) -> Block:
        return self.blocks[-1].setdefault(label, Block(label=label))

    def operation(self, block: Block) -> None:
        names: list[tuple[str, int]] = []
        while self.peek("%"):
            found = re.compile(r"%([\w$.\-]+)(?::(\d+))?").match(self.text, self.at)
            self.at = found.end()
            names.append((found[1], int(found[2] or 1)))
            self.accept(",")
        if names:
            self.expect("=")
        quoted = self.match(_STRING)
        op = Op(quoted[0][1:-1] if quoted else self.need(_WORD, "an operation")[0], parent=block,
                locations=self.locations)
        if quoted:
            types = self.generic(op)
        else:
            special = getattr(self, "op_" + op.name.replace(".", "_"), None)
            types = special(op) if special else self.pretty(op)
        where = self.location()
        if where:
            op.where = where
            for region in op.regions:  # implicit terminators
                for inner in region.blocks:
                    if inner.ops and inner.ops[-1].name == "scf.yield" and not inner.ops[-1].where:
                        inner.ops[-1].where = where
        count = sum(number for _, number in names)
        if count != len(types):
            self.fail(f"{op.name} has {count} results and {len(types)} result types")
        position = 0
        for name, number in names:
            values = []
            for index in range(number):
                own = name if number == 1 else f"{name}.{index}"
                values.append(Value(self.unique(own), types[position], op, position, block))
                position += 1
            self.define(name, values)
            op.results += values
        block.ops.append(op)

    def generic(self, op: Op) -> list[Type]:
        """`"name"(operands) <{attributes}> ({regions}) {attributes} : (types) -> types`."""
        self.expect("(")
        while not self.accept(")"):
            self.operand(op)
            self.accept(",")
        if self.accept("["):
            op.attrs["successors"] = self.successors(op, "]")
        if self.accept("<"):
            op.attrs.update(self.dictionary())
            self.expect(">")
        if self.accept("("):
            while not self.accept(")"):
                op.regions.append(self.region(op))
                self.accept(",")
        if self.peek("{"):
            op.attrs.update(self.dictionary())
        self.expect(":")
        self.types()
        self.expect("->")
        return self.types()

    def pretty(self, op: Op) -> list[Type]:
        """An operation in its own syntax, without regions: operands, words, attributes, then types, on one line."""
        words: list[str] = []
        while True:
            self.space()
            char = self.text[self.at:self.at + 1]
            if char in ("\n", "", "}") or self.text.startswith("loc(", self.at):
                break
            if char == "%":
                self.operand(op)
            elif char == ":":
                self.at += 1
                break
            elif char in ",()[]*":
                self.at += 1
            elif char == "{":
                op.attrs.update(self.dictionary())
            elif char == '"':
                op.attrs.setdefault("message", _unescape(self.need(_STRING, "a string")[0][1:-1]))
            elif char == "@":
                op.attrs["callee"] = self.attribute()
            elif char == "^":
                self.fail(f"{op.name} has successors")
            elif char.isalpha() or char == "_":
                word = self.need(_WORD, "a word")[0]
                if self.text.startswith("<", self.at):
                    op.attrs[word] = tuple(part.strip() for part in _split_top(self.balanced(), ","))
                elif self.accept("="):
                    op.attrs[word] = self.attribute()
                else:
                    words.append(word)
            elif self.text.startswith("->", self.at):  # no operands, so no types of them
                self.at += 2
                self.name_words(op, words)
                return self.types()
            elif char == "-" or char.isdigit():
                words.append(self.need(_NUMBER, "a number")[0])
            else:
                self.fail(f"{op.name}: {char!r} is not known here")
        self.name_words(op, words)
        if self.text[self.at - 1] != ":":
            return []
        return self.signature(op)

    @staticmethod
    def name_words(op: Op, words: list[str]) -> None:
        names = list(_WORDS.get(op.name, ()))
        for word in words:
            if word in _FLAGS:
                op.attrs[word] = True
            elif names:
                op.attrs[names.pop(0)] = word
            else:
                op.attrs["words"] = (*op.attrs.get("words", ()), word)
        if "axis" in op.attrs and op.attrs["axis"] in _AXES:
            op.attrs["axis"] = _AXES[op.attrs["axis"]]
        if isinstance(policy := op.attrs.pop("cachePolicy", None), dict):  # 3.9 holds in one what 3.6 has in two
            for new, old in (("cache_modifier", "cacheModifier"), ("eviction_policy", "evictionPolicy")):
                if new in policy:
                    op.attrs[old] = policy[new]

    def signature(self, op: Op) -> list[Type]:
        """Result types, from what follows the colon."""
        before = [self.types()]
        while self.accept("*"):
            before.append(self.types())
        if self.accept("->") or self.word("to"):
            after = self.types()
            return after * 2 if op.name == "tt.split" else after
        types = [kind for group in before for kind in group]
        name, first = op.name, types[0]
        if name in ("arith.cmpi", "arith.cmpf"):
            return [_like(first, Scalar("i1"))]
        if name == "arith.select":
            return [types[-1]]
        if name == "tt.load":
            return [_pointee(first)]
        if name == "arith.addui_extended":
            return types
        if name in ("arith.mulsi_extended", "arith.mului_extended"):
            return [first, first]
        if name in _NO_RESULT:
            return []
        return [first]

    # -- operations with a syntax of their own

    def op_arith_constant(self, op: Op) -> list[Type]:
        if self.peek("{"):
            op.attrs.update(self.dictionary())
        if self.word("dense"):
            inside = self.balanced()
            self.expect(":")
            kind = self.type()
            op.attrs["value"] = _dense(inside.strip(), kind)
            return [kind]
        for word in ("true", "false"):
            if self.word(word):
                op.attrs["value"] = word == "true"
                return [Scalar("i1")]
        literal = self.need(_NUMBER, "a number")[0]
        self.expect(":")
        kind = self.type()
        op.attrs["value"] = _number(literal, kind)
        return [kind]

    def op_tt_print(self, op: Op) -> list[Type]:
        op.attrs["prefix"] = _unescape(self.need(_STRING, "a string")[0][1:-1])
        if self.peek("{"):
            op.attrs.update(self.dictionary())
        if self.accept(":"):
            while self.peek("%"):
                self.operand(op)
                self.accept(",")
            self.expect(":")
            self.types()
        return []

    def op_scf_for(self, op: Op) -> list[Type]:
        if self.word("unsigned"):
            op.attrs["unsigned"] = True
        induction = self.need(_VALUE, "the induction variable")[1]
        self.expect("=")
        self.operand(op)
        self.word("to")
        self.operand(op)
        self.word("step")
        self.operand(op)
        carried: list[str] = []
        types: list[Type] = []
        if self.word("iter_args"):
            carried = self.assignments(op)
            self.expect("->")
            types = self.types()
        kind = self.type() if self.accept(":") else Scalar("index")
        entry = Block()
        self.scopes.append({})
        for name, type in zip([induction, *carried], [kind, *types], strict=True):
            self.argument(entry, name, type)
        op.regions.append(self.region(op, entry))
        self.scopes.pop()
        if self.peek("{"):
            op.attrs.update(self.dictionary())
        return types

    def op_scf_if(self, op: Op) -> list[Type]:
        self.operand(op)
        types = self.types() if self.accept("->") else []
        op.regions.append(self.region(op))
        if self.word("else"):
            op.regions.append(self.region(op))
        if self.peek("{"):
            op.attrs.update(self.dictionary())
        return types

    def op_scf_while(self, op: Op) -> list[Type]:
        names = self.assignments(op) if self.peek("(") else []
        self.expect(":")
        inputs = self.types()
        self.expect("->")
        types = self.types()
        entry = Block()
        self.scopes.append({})
        for name, kind in zip(names, inputs, strict=True):
            self.argument(entry, name, kind)
        op.regions.append(self.region(op, entry))
        self.scopes.pop()
        if not self.word("do"):
            self.fail("expected 'do'")
        op.regions.append(self.region(op))
        if self.word("attributes") or self.peek("{"):
            op.attrs.update(self.dictionary())
        return types

    def assignments(self, op: Op) -> list[str]:
        """`(%name = %value, ..)`: the values become operands."""
        names = []
        self.expect("(")
        while not self.accept(")"):
            names.append(self.need(_VALUE, "a name")[1])
            self.expect("=")
            self.operand(op)
            self.accept(",")
        return names

    def op_cf_br(self, op: Op) -> list[Type]:
        op.attrs["successors"] = self.successors(op, "")
        return []

    def op_cf_cond_br(self, op: Op) -> list[Type]:
        self.operand(op)
        if self.word("weights"):
            self.space()
            self.balanced()
        self.expect(",")
        op.attrs["successors"] = self.successors(op, "")
        return []

    def successors(self, op: Op, end: str) -> list[tuple[Block, list[Value]]]:
        found = []
        while self.peek("^"):
            block = self.block(self.need(_BLOCK, "a block")[1])
            values = []
            if self.accept("("):
                while self.peek("%"):
                    values.append(self.operand(op))
                    self.accept(",")
                self.accept(":")
                while not self.accept(")"):
                    self.type()
                    self.accept(",")
            found.append((block, values))
            self.accept(",")
        if end:
            self.expect(end)
        return found


# Operations whose types are those of their operands and that define nothing.
_NO_RESULT = frozenset((
    "tt.store", "tt.assert", "tt.return", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return",
    "scf.yield", "scf.condition", "llvm.intr.assume", "ttg.barrier", "gpu.barrier", "tt.descriptor_store",
    "tt.atomic_store",
))  # fmt: skip


def _like(type: Type, element: Scalar) -> Type:
    return Tensor(type.shape, element) if isinstance(type, Tensor) else element


def _pointee(type: Type) -> Type:
    if isinstance(type, Tensor) and isinstance(type.element, Pointer):
        return Tensor(type.shape, type.element.element)
    if isinstance(type, Pointer):
        return type.element
    raise ParseError(f"{type} is not a pointer")
