# SPDX-License-Identifier: Apache-2.0
"""`triton.language.extra.libdevice` on the CPU: what Triton has an operation for, else the C library's function.

Functions take fp32 and fp64; a function that is missing here is a compile error that names it.
"""
from __future__ import annotations

from triton.language import core, math

_FLOATS = (("fp32", "f"), ("fp64", ""))
_C_UNARY = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cbrt", "cosh", "erfc", "exp10", "expm1", "j0", "j1", "lgamma",
    "log10", "log1p", "logb", "nearbyint", "rint", "round", "sinh", "tan", "tanh", "tgamma", "trunc", "y0", "y1",
)  # fmt: skip
_C_BINARY = ("atan2", "copysign", "fdim", "fmod", "hypot", "nextafter", "pow", "remainder")
_OPERATIONS = {
    "abs": "abs", "ceil": "ceil", "cos": "cos", "erf": "erf", "exp": "exp", "exp2": "exp2",
    "fast_cosf": "cos", "fast_expf": "exp", "fast_log2f": "log2", "fast_logf": "log", "fast_sinf": "sin",
    "floor": "floor", "fma": "fma", "fma_rn": "fma", "log": "log", "log2": "log2", "mulhi": "umulhi", "rsqrt": "rsqrt",
    "rsqrt_rn": "rsqrt", "sin": "sin", "sqrt": "sqrt", "sqrt_rn": "sqrt",
}  # fmt: skip
_SAME = {"fast_tanhf": "tanh", "fast_tanf": "tan", "fast_exp10f": "exp10", "fast_log10f": "log10", "fast_powf": "pow"}


def _c_function(name: str, arity: int):
    symbols = {
        (core.dtype(kind),) * arity: (name + suffix, core.dtype(kind)) for kind, suffix in _FLOATS
    }

    def unary(arg0, _semantic=None):
        return core.extern_elementwise("libm", "", [arg0], symbols, is_pure=True, _semantic=_semantic)

    def binary(arg0, arg1, _semantic=None):
        return core.extern_elementwise("libm", "", [arg0, arg1], symbols, is_pure=True, _semantic=_semantic)

    return _named((unary, binary)[arity - 1], name)


def _operation(name: str, operation: str):
    function = getattr(math, operation)

    def call(*args, _semantic=None):
        return function(*args, _semantic=_semantic)

    return _named(call, name)


def _named(function, name: str):
    function.__name__ = function.__qualname__ = name
    return core.extern(function)


for _name in _C_UNARY:
    globals()[_name] = _c_function(_name, 1)
for _name in _C_BINARY:
    globals()[_name] = _c_function(_name, 2)
for _name, _op in _OPERATIONS.items():
    globals()[_name] = _operation(_name, _op)
for _name, _other in _SAME.items():
    globals()[_name] = globals()[_other]


@core.extern
def isnan(arg0, _semantic=None):
    return _semantic.not_equal(_semantic.to_tensor(arg0), _semantic.to_tensor(arg0))


@core.extern
def isinf(arg0, _semantic=None):
    return _semantic.equal(math.abs(arg0, _semantic=_semantic), _semantic.to_tensor(float("inf")))


@core.extern
def finitef(arg0, _semantic=None):
    return _semantic.less_than(math.abs(arg0, _semantic=_semantic), _semantic.to_tensor(float("inf")))


isfinited = finitef


@core.extern
def div_rn(arg0, arg1, _semantic=None):
    return _semantic.truediv(_semantic.to_tensor(arg0), _semantic.to_tensor(arg1))


@core.extern
def rcp_rn(arg0, _semantic=None):
    return _semantic.truediv(_semantic.to_tensor(1.0), _semantic.to_tensor(arg0))


@core.extern
def signbit(arg0, _semantic=None):
    bits = core.dtype(f"int{arg0.dtype.primitive_bitwidth}")
    return _semantic.less_than(_semantic.bitcast(arg0, bits), _semantic.to_tensor(0))


def _bits_as(name: str, kind: core.dtype):
    def call(arg0, _semantic=None):
        return _semantic.bitcast(_semantic.to_tensor(arg0), kind)

    return _named(call, name)


for _name, _kind in (
    ("float_as_int", core.int32), ("float_as_uint", core.uint32), ("int_as_float", core.float32),
    ("uint_as_float", core.float32), ("double_as_longlong", core.int64), ("longlong_as_double", core.float64),
):  # fmt: skip
    globals()[_name] = _bits_as(_name, _kind)


def __getattr__(name: str):
    raise AttributeError(f"libdevice.{name} is not available on the CPU")
