# SPDX-License-Identifier: Apache-2.0
"""Mathematical functions on one scalar or one vector of fp32 or fp64.

exp, exp2, log and log2 of fp32 are polynomials (Cephes' reductions and coefficients) within 2 ulp, right at infinities,
NaN, zeros and subnormal numbers. Square roots, rounding and fma are instructions; the rest calls libm lane by lane.
"""
from __future__ import annotations

from collections.abc import Callable

from kda.triton_cpu.lowering.casts import suffix
from kda.triton_cpu.lowering.emit import Code, splat
from kda.triton_cpu.lowering.types import F32, I32, ir, literal
from kda.triton_cpu.ttir import Scalar

_INTRINSIC = {"sqrt": "sqrt", "absf": "fabs", "fma": "fma", "floor": "floor", "ceil": "ceil", "trunc": "trunc",
              "round": "round", "roundeven": "roundeven", "copysign": "copysign"}  # fmt: skip
_LIBM = {"exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
         "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "cbrt", "atan2", "powf"}  # fmt: skip


def emit(code: Code, name: str, kind: Scalar, args: list[str], width: int) -> str | None:
    """The function's value, None if there is no such function."""
    vector = ir(kind, width)
    if name in _INTRINSIC:
        function = f"llvm.{_INTRINSIC[name]}.{suffix(kind, width)}"
        return code.intrinsic(function, vector, [vector] * len(args), args)
    if name == "rsqrt":
        root = emit(code, "sqrt", kind, args, width)
        return code.ins(f"fdiv {vector} {splat(code, ir(kind), literal(1.0, kind), width)}, {root}")
    if name in ("isnan", "isinf", "isfinite"):
        return _classify(code, name, kind, args[0], width)
    if name == "fpowi":
        return None
    if kind == F32 and name in _POLYNOMIALS:
        write = _POLYNOMIALS[name]
        helper = code.module.helper(
            f"{name}.{suffix(kind, width)}", vector, f"{vector} %x", lambda inner: write(_Lanes(inner, width)),
            "alwaysinline",
        )  # fmt: skip
        return code.call(vector, helper, f"{vector} {args[0]}")
    if name in _LIBM:
        return libm(code, {"powf": "pow"}.get(name, name) + ("f" if kind == F32 else ""), kind, args, width)
    return None


def _classify(code: Code, name: str, kind: Scalar, arg: str, width: int) -> str:
    vector = ir(kind, width)
    if name == "isnan":
        return code.ins(f"fcmp uno {vector} {arg}, {arg}")
    size = code.intrinsic(f"llvm.fabs.{suffix(kind, width)}", vector, [vector], [arg])
    infinity = splat(code, ir(kind), literal(float("inf"), kind), width)
    return code.ins(f"fcmp {'oeq' if name == 'isinf' else 'olt'} {vector} {size}, {infinity}")


def libm(code: Code, function: str, kind: Scalar, args: list[str], width: int) -> str:
    """A function of the C library, lane by lane."""
    scalar, vector = ir(kind), ir(kind, width)
    code.module.declare(function, scalar, ", ".join([scalar] * len(args)))
    if width == 1:
        return code.call(scalar, f"@{function}", ", ".join(f"{scalar} {arg}" for arg in args))

    def write(inner: Code) -> None:  # a loop over the lanes in memory
        slots = [inner.slot(vector, f"%x{i}") for i in range(len(args))]
        out = inner.slot(vector)
        with inner.loop("0", str(width)) as i:
            lanes = []
            for slot in slots:
                lanes.append(inner.get(scalar, inner.ins(f"getelementptr {scalar}, ptr {slot}, i64 {i}")))
            value = inner.call(scalar, f"@{function}", ", ".join(f"{scalar} {lane}" for lane in lanes))
            inner.set(scalar, inner.ins(f"getelementptr {scalar}, ptr {out}, i64 {i}"), value)
        inner.do(f"ret {vector} {inner.get(vector, out)}")

    parameters = ", ".join(f"{vector} %x{i}" for i in range(len(args)))
    helper = code.module.helper(f"{function}.v{width}", vector, parameters, write, "noinline")
    return code.call(vector, helper, ", ".join(f"{vector} {arg}" for arg in args))


class _Lanes:
    """Arithmetic on fp32 lanes of one width, to write a polynomial as one reads it."""

    def __init__(self, code: Code, width: int):
        self.code, self.width = code, width
        self.float, self.int, self.mask = ir(F32, width), ir(I32, width), "i1" if width == 1 else f"<{width} x i1>"
        self.suffix = suffix(F32, width)

    def c(self, value: float) -> str:
        return splat(self.code, "float", literal(value, F32), self.width)

    def ci(self, value: int) -> str:
        return splat(self.code, "i32", str(value), self.width)

    def op(self, name: str, a: str, b: str) -> str:
        return self.code.ins(f"{name} {self.float if name[0] == 'f' else self.int} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        return self.code.intrinsic(f"llvm.fmuladd.{self.suffix}", self.float, [self.float] * 3, [a, b, c])

    def test(self, predicate: str, a: str, b: str) -> str:
        return self.code.ins(f"fcmp {predicate} {self.float} {a}, {b}")

    def select(self, test: str, a: str, b: str) -> str:
        return self.code.ins(f"select {self.mask} {test}, {self.float} {a}, {self.float} {b}")

    def bits(self, value: str) -> str:
        return self.code.ins(f"bitcast {self.float} {value} to {self.int}")

    def floats(self, bits: str) -> str:
        return self.code.ins(f"bitcast {self.int} {bits} to {self.float}")

    def horner(self, x: str, coefficients: list[float]) -> str:
        total = self.c(coefficients[0])
        for coefficient in coefficients[1:]:
            total = self.fma(total, x, self.c(coefficient))
        return total

    def clamp(self, x: str, low: float, high: float) -> str:
        """A NaN passes."""
        x = self.select(self.test("ogt", x, self.c(high)), self.c(high), x)
        return self.select(self.test("olt", x, self.c(low)), self.c(low), x)

    def ret(self, value: str) -> None:
        self.code.do(f"ret {self.float} {value}")


_MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, in the low bits
_EXP = [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1]
_LOG = [7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1]  # fmt: skip


def _exp_of(v: _Lanes, r: str, n: str) -> str:
    """exp(r) * 2**n for |r| <= ln(2) / 2; `n` as the bits of _MAGIC + n. Scaled twice: the result may be subnormal."""
    p = v.fma(v.op("fmul", r, r), v.horner(r, _EXP), v.op("fadd", r, v.c(1.0)))
    whole = v.op("sub", n, v.ci(0x4B400000))
    half = v.op("ashr", whole, v.ci(1))
    for part in (half, v.op("sub", whole, half)):
        p = v.op("fmul", p, v.floats(v.op("shl", v.op("add", part, v.ci(127)), v.ci(23))))
    return p


def _exp(v: _Lanes) -> None:
    x = v.clamp("%x", -104.5, 89.0)
    t = v.fma(x, v.c(1.44269504088896341), v.c(_MAGIC))
    n = v.op("fsub", t, v.c(_MAGIC))
    r = v.fma(n, v.c(-0.693359375), x)
    r = v.fma(n, v.c(2.12194440e-4), r)
    v.ret(_exp_of(v, r, v.bits(t)))


def _exp2(v: _Lanes) -> None:
    x = v.clamp("%x", -151.0, 129.0)
    t = v.op("fadd", x, v.c(_MAGIC))
    f = v.op("fsub", x, v.op("fsub", t, v.c(_MAGIC)))
    v.ret(_exp_of(v, v.op("fmul", f, v.c(0.693147180559945309)), v.bits(t)))


def _log_parts(v: _Lanes) -> tuple[str, str, str]:
    """x = 2**e (1 + m), sqrt(1/2) <= 1 + m < sqrt(2); returns m, log(1 + m) - m and e."""
    small = v.test("olt", "%x", v.c(1.17549435e-38))
    x = v.select(small, v.op("fmul", "%x", v.c(8388608.0)), "%x")
    shifted = v.op("sub", v.bits(x), v.ci(0x3F3504F3))  # sqrt(1/2): the mantissa's cut
    whole = v.op("ashr", shifted, v.ci(23))
    e = v.code.ins(f"sitofp {v.int} {whole} to {v.float}")
    e = v.op("fsub", e, v.select(small, v.c(23.0), v.c(0.0)))
    mantissa = v.op("add", v.op("and", shifted, v.ci(0x7FFFFF)), v.ci(0x3F3504F3))
    m = v.op("fsub", v.floats(mantissa), v.c(1.0))
    square = v.op("fmul", m, m)
    rest = v.op("fmul", v.op("fmul", v.horner(m, _LOG), square), m)
    return m, v.fma(square, v.c(-0.5), rest), e


def _log_edges(v: _Lanes, result: str) -> None:
    infinity, nan = float("inf"), float("nan")
    result = v.select(v.test("oeq", "%x", v.c(infinity)), "%x", result)
    result = v.select(v.test("oeq", "%x", v.c(0.0)), v.c(-infinity), result)
    v.ret(v.select(v.test("ult", "%x", v.c(0.0)), v.c(nan), result))


def _log(v: _Lanes) -> None:
    m, rest, e = _log_parts(v)
    rest = v.fma(e, v.c(-2.12194440e-4), rest)
    _log_edges(v, v.fma(e, v.c(0.693359375), v.op("fadd", m, rest)))


def _log2(v: _Lanes) -> None:
    m, rest, e = _log_parts(v)
    excess = v.c(0.44269504088896340736)  # log2(e) - 1
    total = v.fma(rest, excess, v.op("fmul", m, excess))
    total = v.op("fadd", v.op("fadd", total, rest), m)
    _log_edges(v, v.op("fadd", total, e))


_POLYNOMIALS: dict[str, Callable[[_Lanes], None]] = {"exp": _exp, "exp2": _exp2, "log": _log, "log2": _log2}
