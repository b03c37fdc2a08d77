# SPDX-License-Identifier: Apache-2.0
"""How TTIR types look in LLVM IR, and literals of them.

A bf16 or 8-bit float is held as its bits (i16, i8): arithmetic on it goes through fp32. An i1 takes a byte in memory.
"""
from __future__ import annotations

import struct
from collections.abc import Callable

from kda.triton_cpu.ttir import Op, Pointer, Scalar, Tensor, Type

I1, I8, I16, I32, I64 = (Scalar(f"i{bits}") for bits in (1, 8, 16, 32, 64))
F16, BF16, F32, F64, INDEX = (Scalar(name) for name in ("f16", "bf16", "f32", "f64", "index"))
_FLOATS = {"f16": "half", "bf16": "i16", "f32": "float", "f64": "double"}


class Unsupported(Exception):
    """An operation that cannot be lowered: its name, where the source has it, and why."""

    def __init__(self, op: str, loc: str, why: str):
        super().__init__(f"{op}{f' at {loc}' if loc else ''}: {why}")
        self.op, self.loc, self.why = op, loc, why


def unsupported(op: Op, why: str) -> Unsupported:
    return Unsupported(op.name, op.loc, why)


def element(type: Type) -> Scalar | Pointer:
    """The element of a tensor; a scalar is its own."""
    return type.element if isinstance(type, Tensor) else type


def shape(type: Type) -> tuple[int, ...]:
    return type.shape if isinstance(type, Tensor) else ()


def ir(type: Scalar | Pointer, width: int = 1) -> str:
    """The LLVM type of `width` lanes (one lane: the scalar)."""
    if isinstance(type, Pointer):
        name = "ptr"
    elif type.is_float:
        name = _FLOATS.get(type.name, "i8")
    else:
        name = f"i{type.bits}"
    return name if width == 1 else f"<{width} x {name}>"


def stored(type: Scalar | Pointer) -> Scalar:
    """What memory holds for one element: i1 as a byte, a pointer as its address."""
    return I64 if isinstance(type, Pointer) else I8 if type == I1 else type


def size_of(type: Scalar | Pointer) -> int:
    """Bytes of one element in memory."""
    return stored(type).bits // 8


def literal(value: float | int | bool, type: Scalar | Pointer) -> str:
    """A scalar constant of `type`."""
    if isinstance(type, Pointer):
        return "null" if not value else f"inttoptr (i64 {int(value)} to ptr)"
    if type.is_int:
        bits = type.bits
        value = int(value) & ((1 << bits) - 1)
        return str(value - (1 << bits) if value >> (bits - 1) and bits > 1 else value)
    if type.name in ("f32", "f64"):
        value = float(value)
        if type == F32:  # LLVM writes a float as the double of the same value
            value = to_f32(value)
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    if type == F16:
        return f"0xH{struct.unpack('<H', struct.pack('<e', float(value)))[0]:04X}"
    if type == BF16:
        return str(bf16_bits(float(value)))
    return str(f8_bits(float(value), type.name))


def to_f32(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def bf16_bits(value: float) -> int:
    """The bits of `value` (exact in bf16 where TTIR comes from), rounded to nearest even."""
    bits = struct.unpack("<I", struct.pack("<f", to_f32(value)))[0]
    if value != value:
        return 0x7FC0
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


# Name: (exponent bits, mantissa bits, bias, has infinities, NaN is the negative zero)
F8 = {
    "f8E5M2": (5, 2, 15, True, False),
    "f8E4M3FN": (4, 3, 7, False, False),
    "f8E4M3FNUZ": (4, 3, 8, False, True),
    "f8E5M2FNUZ": (5, 2, 16, False, True),
    "f8E4M3B11FNUZ": (4, 3, 11, False, True),
}


def f8_value(bits: int, name: str) -> float:
    """The value of an 8-bit float."""
    exponent_bits, mantissa_bits, bias, infinities, negative_zero_nan = F8[name]
    sign = -1.0 if bits & 0x80 else 1.0
    exponent, mantissa = (bits & 0x7F) >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    if negative_zero_nan and bits == 0x80:
        return float("nan")
    if infinities and exponent == (1 << exponent_bits) - 1:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if not infinities and not negative_zero_nan and bits & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def f8_bits(value: float, name: str) -> int:
    """The 8-bit float nearest to `value`; only for constants."""
    if value != value:
        return 0x80 if F8[name][4] else 0x7F
    finite: Callable[[int], bool] = lambda bits: f8_value(bits, name) - f8_value(bits, name) == 0  # noqa: E731
    if value == 0:
        return 0
    if value in (float("inf"), float("-inf")) and F8[name][3]:
        return 0x7C | (0x80 if value < 0 else 0)
    return min((bits for bits in range(256) if finite(bits)), key=lambda bits: abs(f8_value(bits, name) - value))
