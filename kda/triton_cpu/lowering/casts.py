# SPDX-License-Identifier: Apache-2.0
"""Conversions between element types, on one scalar or one vector.

Floats round to nearest even, subnormal numbers are kept, a NaN stays one.
"""
from __future__ import annotations

from kda.triton_cpu.lowering.emit import Code, splat
from kda.triton_cpu.lowering.types import BF16, F8, F16, F32, F64, I16, f8_value, ir, unsupported
from kda.triton_cpu.ttir import Op, Pointer, Scalar


def suffix(kind: Scalar | Pointer, width: int) -> str:
    """How an intrinsic's name writes the type."""
    name = {"half": "f16", "float": "f32", "double": "f64", "ptr": "p0"}.get(ir(kind), ir(kind))
    return name if width == 1 else f"v{width}{name}"


def cast(code: Code, op: Op, name: str, arg: str, source: Scalar | Pointer, kind: Scalar | Pointer, width: int) -> str:
    before, after = ir(source, width), ir(kind, width)
    if name == "bitcast":
        return arg if before == after else code.ins(f"bitcast {before} {arg} to {after}")
    if name in ("extsi", "extui", "trunci", "index_cast", "index_castui"):
        if source.bits == kind.bits:
            return arg
        if source.bits > kind.bits:
            return code.ins(f"trunc {before} {arg} to {after}")
        return code.ins(f"{'zext' if name in ('extui', 'index_castui') else 'sext'} {before} {arg} to {after}")
    if name in ("sitofp", "uitofp"):
        return _from_integer(code, op, name, arg, source, kind, width)
    if name in ("fptosi", "fptoui"):
        if source.name not in ("f32", "f64"):
            arg, source, before = to_f32(code, op, arg, source, width), F32, ir(F32, width)
        function = f"llvm.{name}.sat.{suffix(kind, width)}.{suffix(source, width)}"
        return code.intrinsic(function, after, [before], [arg])
    return convert(code, op, arg, source, kind, width)


def _from_integer(code: Code, op: Op, name: str, arg: str, source: Scalar, kind: Scalar, width: int) -> str:
    to = kind
    if kind.name not in ("f32", "f64"):
        # 24 bits are exact in fp32; of more, the double keeps what decides the rounding (64 bits: all but a few ties).
        to = F32 if source.bits <= 16 else F64
    value = code.ins(f"{name[:1]}itofp {ir(source, width)} {arg} to {ir(to, width)}")
    return value if to is kind else convert(code, op, value, to, kind, width)


def convert(code: Code, op: Op, arg: str, source: Scalar, kind: Scalar, width: int) -> str:
    """Between any two floats."""
    if source == kind:
        return arg
    if source == F64 and kind == F32:
        return code.ins(f"fptrunc {ir(F64, width)} {arg} to {ir(F32, width)}")
    if source == F64:
        return from_f32(code, op, _odd_f32(code, arg, width), kind, width)
    wide = to_f32(code, op, arg, source, width)
    if kind == F64:
        return code.ins(f"fpext {ir(F32, width)} {wide} to {ir(F64, width)}")
    if op.attrs.get("rounding", "rtne") not in ("rtne", None) and kind != F32:
        raise unsupported(op, f"rounding {op.attrs['rounding']}")
    return from_f32(code, op, wide, kind, width)


def to_f32(code: Code, op: Op, arg: str, source: Scalar, width: int) -> str:
    """A float of at most 32 bits, exactly."""
    single = ir(F32, width)
    if source == F32:
        return arg
    if source == F16 and code.module.native_half:
        return code.ins(f"fpext {ir(F16, width)} {arg} to {single}")
    integer = "i32" if width == 1 else f"<{width} x i32>"
    if source == F16:
        arg = code.ins(f"bitcast {ir(F16, width)} {arg} to {ir(I16, width)}")
    bits = code.ins(f"zext {ir(I16 if source == F16 else source, width)} {arg} to {integer}")
    if source == F16:
        return _half_to_f32(code, bits, width)
    if source == BF16:
        bits = code.ins(f"shl {integer} {bits}, {splat(code, 'i32', '16', width)}")
        return code.ins(f"bitcast {integer} {bits} to {single}")
    return _f8_to_f32(code, bits, source, width)


def from_f32(code: Code, op: Op, arg: str, kind: Scalar, width: int) -> str:
    """An fp32 rounded to a narrower float."""
    if kind == F32:
        return arg
    if kind == F16 and code.module.native_half:
        return code.ins(f"fptrunc {ir(F32, width)} {arg} to {ir(F16, width)}")
    if kind == BF16:
        return _to_bf16(code, arg, width)
    return _to_small(code, op, arg, kind, width)


def _to_bf16(code: Code, arg: str, width: int) -> str:
    integer, mask = ("i32", "i1") if width == 1 else (f"<{width} x i32>", f"<{width} x i1>")
    c = {n: splat(code, "i32", str(n), width) for n in (1, 16, 0x7FFF)}
    bits = code.ins(f"bitcast {ir(F32, width)} {arg} to {integer}")
    high = code.ins(f"lshr {integer} {bits}, {c[16]}")
    odd = code.ins(f"and {integer} {high}, {c[1]}")
    up = code.ins(f"add {integer} {odd}, {c[0x7FFF]}")
    rounded = code.ins(f"lshr {integer} {code.ins(f'add {integer} {bits}, {up}')}, {c[16]}")
    nan = code.ins(f"fcmp uno {ir(F32, width)} {arg}, {arg}")
    quiet = code.ins(f"or {integer} {high}, {splat(code, 'i32', '64', width)}")
    chosen = code.ins(f"select {mask} {nan}, {integer} {quiet}, {integer} {rounded}")
    return code.ins(f"trunc {integer} {chosen} to {ir(BF16, width)}")


def _odd_f32(code: Code, arg: str, width: int) -> str:
    """An fp64 rounded to odd in fp32: a second rounding to fewer bits is then right."""
    single, integer, mask = ir(F32, width), *(("i32", "i1") if width == 1 else (f"<{width} x i32>", f"<{width} x i1>"))
    double = ir(F64, width)
    near = code.ins(f"fptrunc {double} {arg} to {single}")
    back = code.ins(f"fpext {single} {near} to {double}")
    magnitude = [code.intrinsic(f"llvm.fabs.{suffix(F64, width)}", double, [double], [v]) for v in (arg, back)]
    bits = code.ins(f"bitcast {single} {near} to {integer}")
    one, zero = splat(code, "i32", "1", width), splat(code, "i32", "0", width)
    over = code.ins(f"fcmp olt {double} {magnitude[0]}, {magnitude[1]}")  # rounded away from zero: one step back
    step = code.ins(f"select {mask} {over}, {integer} {one}, {integer} {zero}")
    bits = code.ins(f"sub {integer} {bits}, {step}")
    inexact = code.ins(f"fcmp one {double} {arg}, {back}")
    odd = code.ins(f"select {mask} {inexact}, {integer} {one}, {integer} {zero}")
    bits = code.ins(f"or {integer} {bits}, {odd}")
    return code.ins(f"bitcast {integer} {bits} to {single}")


def _f8_to_f32(code: Code, bits: str, source: Scalar, width: int) -> str:
    """By a table of all 256 values."""
    table = code.module.helper_table(f"f8.{source.name}", [f8_value(i, source.name) for i in range(256)])
    if width == 1:
        return code.ins(f"load float, ptr {code.ins(f'getelementptr float, ptr {table}, i32 {bits}')}")
    pointers = code.ins(f"getelementptr float, ptr {table}, <{width} x i32> {bits}")
    vector, mask = f"<{width} x float>", f"<{width} x i1>"
    return code.intrinsic(
        f"llvm.masked.gather.v{width}f32.v{width}p0", vector, [f"<{width} x ptr>", "i32", mask, vector],
        [pointers, "4", splat(code, "i1", "true", width), "zeroinitializer"],
    )  # fmt: skip


def _half_to_f32(code: Code, bits: str, width: int) -> str:
    """fp16 bits in i32 lanes to fp32, for processors without the instruction."""
    single = ir(F32, width)
    integer, mask = ("i32", "i1") if width == 1 else (f"<{width} x i32>", f"<{width} x i1>")
    c = {n: splat(code, "i32", str(n), width) for n in (13, 16, 0x8000, 0x7FFF, 0x7C00, 0x7F800000, 0x77800000)}
    sign = code.ins(f"shl {integer} {code.ins(f'and {integer} {bits}, {c[0x8000]}')}, {c[16]}")
    size = code.ins(f"and {integer} {bits}, {c[0x7FFF]}")
    shifted = code.ins(f"shl {integer} {size}, {c[13]}")
    scale = code.ins(f"bitcast {integer} {c[0x77800000]} to {single}")  # 2**112 for the exponents' biases
    finite = code.ins(f"fmul {single} {code.ins(f'bitcast {integer} {shifted} to {single}')}, {scale}")
    special = code.ins(f"icmp uge {integer} {size}, {c[0x7C00]}")
    other = code.ins(f"or {integer} {shifted}, {c[0x7F800000]}")
    finite = code.ins(f"bitcast {single} {finite} to {integer}")
    result = code.ins(f"select {mask} {special}, {integer} {other}, {integer} {finite}")
    return code.ins(f"bitcast {integer} {code.ins(f'or {integer} {result}, {sign}')} to {single}")


def _to_small(code: Code, op: Op, arg: str, kind: Scalar, width: int) -> str:
    """Nearest even by integer arithmetic; past the largest value: infinity if the format has one, else NaN."""
    if kind != F16 and kind.name not in F8:
        raise unsupported(op, f"no conversion to {kind}")
    layout = (5, 10, 15, True, False) if kind == F16 else F8[kind.name]
    exponent_bits, mantissa_bits, bias, infinities, zero_nan = layout
    top = 1 << (exponent_bits + mantissa_bits)  # the sign's bit
    single = ir(F32, width)
    integer, mask = ("i32", "i1") if width == 1 else (f"<{width} x i32>", f"<{width} x i1>")

    def c(value: int) -> str:
        return splat(code, "i32", str(value), width)

    def select(condition: str, yes: str, no: str) -> str:
        return code.ins(f"select {mask} {condition}, {integer} {yes}, {integer} {no}")

    bits = code.ins(f"bitcast {single} {arg} to {integer}")
    sign = code.ins(f"and {integer} {code.ins(f'lshr {integer} {bits}, {c(16 if kind == F16 else 24)}')}, {c(top)}")
    size = code.ins(f"and {integer} {bits}, {c(0x7FFFFFFF)}")
    # Normal results: shift the exponent's bias, round off the low bits.
    drop = 23 - mantissa_bits
    low = code.ins(f"and {integer} {code.ins(f'lshr {integer} {size}, {c(drop)}')}, {c(1)}")
    rounded = code.ins(f"add {integer} {code.ins(f'add {integer} {size}, {low}')}, {c((1 << (drop - 1)) - 1)}")
    shifted = code.ins(f"lshr {integer} {rounded}, {c(drop)}")
    normal = code.ins(f"sub {integer} {shifted}, {c((127 - bias) << mantissa_bits)}")
    # Subnormal results: adding a power of two lets the processor round to the format's smallest step.
    anchor = (127 + 23 + 1 - bias - mantissa_bits) << 23
    absolute = code.ins(f"bitcast {integer} {size} to {single}")
    anchor_float = code.ins(f"bitcast {integer} {c(anchor)} to {single}")
    summed = code.ins(f"bitcast {single} {code.ins(f'fadd {single} {absolute}, {anchor_float}')} to {integer}")
    subnormal = code.ins(f"sub {integer} {summed}, {c(anchor)}")
    small = code.ins(f"icmp ult {integer} {size}, {c((128 - bias) << 23)}")
    result = select(small, subnormal, normal)
    infinity = top - (1 << mantissa_bits)  # where the format has one
    largest = infinity - 1 if infinities else top - 1 if zero_nan else top - 2
    not_a_number = top if zero_nan else top - 1
    over = code.ins(f"icmp sgt {integer} {result}, {c(largest)}")
    result = select(over, c(infinity if infinities else not_a_number), result)
    nan = code.ins(f"fcmp uno {single} {arg}, {arg}")
    result = select(nan, c(not_a_number), result)
    if zero_nan:
        plain = code.ins(f"icmp eq {integer} {result}, {c(0)}")
        sign = select(plain, c(0), sign)
    result = code.ins(f"or {integer} {result}, {sign}")
    if kind == F16:
        half = code.ins(f"trunc {integer} {result} to {ir(I16, width)}")
        return code.ins(f"bitcast {ir(I16, width)} {half} to {ir(F16, width)}")
    return code.ins(f"trunc {integer} {result} to {ir(kind, width)}")

