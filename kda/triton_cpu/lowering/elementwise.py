# SPDX-License-Identifier: Apache-2.0
"""Elementwise operations of the arith, math and tt dialects on one scalar or one vector.

Integers wrap around; a division by zero gives some value and never traps; shifts past the width give zero (sign bits);
a float out of an integer's range saturates. bf16 and fp16 arithmetic is done in fp32 and rounded once.
"""
from __future__ import annotations

from kda.triton_cpu.lowering import casts, mathfn
from kda.triton_cpu.lowering.emit import Code, splat
from kda.triton_cpu.lowering.types import F32, I1, element, ir, literal, unsupported
from kda.triton_cpu.ttir import Op, Pointer, Scalar

_INT = {"addi": "add", "subi": "sub", "muli": "mul", "andi": "and", "ori": "or", "xori": "xor"}
_MINMAX = {"maxsi": "smax", "minsi": "smin", "maxui": "umax", "minui": "umin"}
_DIVIDE = {"divsi": "sdiv", "remsi": "srem", "divui": "udiv", "remui": "urem"}
_SHIFT = {"shli": "shl", "shrsi": "ashr", "shrui": "lshr"}
_FLOAT = {"addf": "fadd contract", "subf": "fsub contract", "mulf": "fmul contract", "divf": "fdiv", "remf": "frem"}
_FLOAT_MINMAX = {"maxnumf": "maxnum", "minnumf": "minnum", "maximumf": "maximum", "minimumf": "minimum"}
_CASTS = {"extsi", "extui", "trunci", "extf", "truncf", "sitofp", "uitofp", "fptosi", "fptoui", "bitcast", "index_cast",
          "index_castui", "fp_to_fp"}  # fmt: skip
_TT = {"tt.precise_divf": "divf", "tt.approx_divf": "divf", "tt.precise_sqrt": "sqrt", "tt.bitcast": "bitcast",
       "tt.fp_to_fp": "fp_to_fp", "tt.mulhiui": "mulhiui"}  # fmt: skip


def emit(code: Code, op: Op, args: list[str], width: int, ranges: list[tuple[int, int] | None]) -> list[str]:
    """The results of `op` on `width` lanes; `ranges` are what is known of the operands' values."""
    name = _TT.get(op.name, op.name.split(".", 1)[-1])
    source = element(op.operands[0].type) if op.operands else None
    kind = element(op.results[0].type)
    if name in ("addui_extended", "mulsi_extended", "mului_extended"):
        return _extended(code, name, kind, args, width)
    if name == "extern_elementwise":
        if not kind.is_float or kind.bits < 32 or any(element(v.type) != kind for v in op.operands):
            raise unsupported(op, "only functions of the C library on fp32 or fp64")
        return [mathfn.libm(code, str(op.attrs["symbol"]), kind, args, width)]
    if name == "select":
        return [_select(code, op, args, width)]
    if name in _CASTS:
        return [casts.cast(code, op, name, args[0], source, kind, width)]
    if name == "cmpi":
        return [code.ins(f"icmp {op.attrs['predicate']} {ir(source, width)} {args[0]}, {args[1]}")]
    if isinstance(source, Pointer):
        raise unsupported(op, "not an operation on pointers")
    if source.is_float:
        return [_float(code, op, name, source, kind, args, width)]
    return [_integer(code, op, name, kind, args, width, ranges)]


def _select(code: Code, op: Op, args: list[str], width: int) -> str:
    kind = ir(element(op.results[0].type), width)
    return code.ins(f"select {ir(I1, width)} {args[0]}, {kind} {args[1]}, {kind} {args[2]}")


def _float(code: Code, op: Op, name: str, source: Scalar, kind: Scalar, args: list[str], width: int) -> str:
    if name in ("clampf",):
        return _clamp(code, op, source, args, width)
    if source.name not in ("f32", "f64"):  # narrow: through fp32
        args = [casts.to_f32(code, op, arg, source, width) for arg in args]
        result = _float(code, op, name, F32, F32, args, width)
        return casts.from_f32(code, op, result, kind, width) if kind.is_float else result
    vector = ir(source, width)
    if name == "cmpf":
        predicate = {"alwaysTrue": "true", "alwaysFalse": "false"}.get(op.attrs["predicate"], op.attrs["predicate"])
        return code.ins(f"fcmp {predicate} {vector} {args[0]}, {args[1]}")
    if name in _FLOAT:
        return code.ins(f"{_FLOAT[name]} {vector} {args[0]}, {args[1]}")
    if name == "negf":
        return code.ins(f"fneg {vector} {args[0]}")
    if name in _FLOAT_MINMAX:
        return _minmax(code, _FLOAT_MINMAX[name], source, args, width)
    result = mathfn.emit(code, name, source, args, width)
    if result is None:
        raise unsupported(op, "no such function here")
    return result


def _minmax(code: Code, name: str, kind: Scalar, args: list[str], width: int) -> str:
    """maximum/minimum give NaN if either is NaN, maxnum/minnum the other operand. Zeros of either sign are equal."""
    vector, (a, b) = ir(kind, width), args
    best = code.ins(f"fcmp {'ogt' if name.startswith('max') else 'olt'} {vector} {a}, {b}")
    if name.endswith("num"):  # keep b where a is NaN, a where b is NaN
        lost = code.ins(f"fcmp uno {vector} {b}, {b}")
    else:
        lost = code.ins(f"fcmp uno {vector} {a}, {a}")
    keep = code.ins(f"or {ir(I1, width)} {best}, {lost}")
    return code.ins(f"select {ir(I1, width)} {keep}, {vector} {a}, {vector} {b}")


def _clamp(code: Code, op: Op, kind: Scalar, args: list[str], width: int) -> str:
    family = "imum" if "all" in str(op.attrs.get("propagateNan", "none")).lower() else "num"
    if kind.name not in ("f32", "f64"):
        wide = [casts.to_f32(code, op, arg, kind, width) for arg in args]
        return casts.from_f32(code, op, _clamp(code, op, F32, wide, width), kind, width)
    low = _minmax(code, "max" + family, kind, args[:2], width)
    return _minmax(code, "min" + family, kind, [low, args[2]], width)


def _integer(code: Code, op: Op, name: str, kind: Scalar, args: list[str], width: int, ranges: list) -> str:
    vector = ir(kind, width)
    if name in _INT:
        return code.ins(f"{_INT[name]} {vector} {args[0]}, {args[1]}")
    if name in _MINMAX:
        function = f"llvm.{_MINMAX[name]}.{mathfn.suffix(kind, width)}"
        return code.intrinsic(function, vector, [vector, vector], args)
    if name in _DIVIDE:
        return _divide(code, _DIVIDE[name], kind, args, width, ranges)
    if name in _SHIFT:
        return _shift(code, _SHIFT[name], kind, args, width, ranges)
    if name in ("ceildivsi", "floordivsi", "ceildivui"):
        return _rounded_divide(code, name, kind, args, width, ranges)
    if name == "mulhiui":
        return _extended(code, "mului_extended", kind, args, width)[1]
    if name == "absi":
        negative = code.ins(f"sub {vector} {splat(code, ir(kind), '0', width)}, {args[0]}")
        return code.intrinsic(f"llvm.smax.{mathfn.suffix(kind, width)}", vector, [vector] * 2, [args[0], negative])
    if name in ("ctpop", "ctlz", "cttz"):
        types, values = ([vector, "i1"], [args[0], "false"]) if name != "ctpop" else ([vector], args)
        return code.intrinsic(f"llvm.{name}.{mathfn.suffix(kind, width)}", vector, types, values)
    raise unsupported(op, "no such integer operation here")


def _divide(code: Code, name: str, kind: Scalar, args: list[str], width: int, ranges: list) -> str:
    """A divisor of zero is taken as one, and x / -1 as -x: the processor would trap on 0 and on the smallest / -1."""
    (a, b), vector, mask = args, ir(kind, width), ir(I1, width)
    known = ranges[1]
    if not (known and (known[0] > 0 or known[1] < 0)):
        zero = code.ins(f"icmp eq {vector} {b}, {splat(code, ir(kind), '0', width)}")
        b = code.ins(f"select {mask} {zero}, {vector} {splat(code, ir(kind), '1', width)}, {vector} {b}")
    if name[0] == "s" and not (known and (known[0] > -1 or known[1] < -1)):
        minus = splat(code, ir(kind), "-1" if kind != I1 else "1", width)
        negate = code.ins(f"icmp eq {vector} {b}, {minus}")
        b = code.ins(f"select {mask} {negate}, {vector} {splat(code, ir(kind), '1', width)}, {vector} {b}")
        result = code.ins(f"{name} {vector} {a}, {b}")
        zeros = splat(code, ir(kind), "0", width)
        negated = code.ins(f"sub {vector} {zeros}, {a}") if name == "sdiv" else zeros
        return code.ins(f"select {mask} {negate}, {vector} {negated}, {vector} {result}")
    return code.ins(f"{name} {vector} {a}, {b}")


def _rounded_divide(code: Code, name: str, kind: Scalar, args: list[str], width: int, ranges: list) -> str:
    sign, vector, mask = name[-2], ir(kind, width), ir(I1, width)
    zero, one = (splat(code, ir(kind), text, width) for text in "01")
    quotient = _divide(code, f"{sign}div", kind, args, width, ranges)
    product = code.ins(f"mul {vector} {quotient}, {args[1]}")
    inexact = code.ins(f"icmp ne {vector} {product}, {args[0]}")
    if sign == "s":
        mixed = code.ins(f"xor {vector} {args[0]}, {args[1]}")
        apart = code.ins(f"icmp {'slt' if name[0] == 'f' else 'sge'} {vector} {mixed}, {zero}")
        inexact = code.ins(f"and {mask} {inexact}, {apart}")
    moved = code.ins(f"{'sub' if name[0] == 'f' else 'add'} {vector} {quotient}, {one}")
    return code.ins(f"select {mask} {inexact}, {vector} {moved}, {vector} {quotient}")


def _shift(code: Code, name: str, kind: Scalar, args: list[str], width: int, ranges: list) -> str:
    (a, b), vector, mask, bits = args, ir(kind, width), ir(I1, width), kind.bits
    known = ranges[1]
    if known and 0 <= known[0] and known[1] < bits:
        return code.ins(f"{name} {vector} {a}, {b}")
    last = splat(code, ir(kind), literal(bits - 1, kind), width)
    past = code.ins(f"icmp ugt {vector} {b}, {last}")
    amount = code.ins(f"select {mask} {past}, {vector} {last}, {vector} {b}")
    result = code.ins(f"{name} {vector} {a}, {amount}")
    if name == "ashr":
        return result
    return code.ins(f"select {mask} {past}, {vector} {splat(code, ir(kind), '0', width)}, {vector} {result}")


def _extended(code: Code, name: str, kind: Scalar, args: list[str], width: int) -> list[str]:
    """(low half, high half) of a product; (sum, carry) of an addition."""
    vector = ir(kind, width)
    if name == "addui_extended":
        total = code.ins(f"add {vector} {args[0]}, {args[1]}")
        return [total, code.ins(f"icmp ult {vector} {total}, {args[0]}")]
    wide_scalar = f"i{2 * kind.bits}"
    wide = wide_scalar if width == 1 else f"<{width} x {wide_scalar}>"
    extend = "sext" if name[3] == "s" else "zext"
    a, b = (code.ins(f"{extend} {vector} {arg} to {wide}") for arg in args)
    product = code.ins(f"mul {wide} {a}, {b}")
    high = code.ins(f"lshr {wide} {product}, {splat(code, wide_scalar, str(kind.bits), width)}")
    return [code.ins(f"trunc {wide} {part} to {vector}") for part in (product, high)]

