# SPDX-License-Identifier: Apache-2.0
"""The TTIR parser on what Triton prints, with Triton's own walk over the module as the oracle."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda.triton_cpu import ttir
from kda.triton_cpu.ttir import Pointer, Scalar, Tensor

NAMES = ("add", "early_return", "regions", "others", "types", "descriptors", "tuples")


@pytest.fixture(scope="module")
def printed(session_programs):
    """name -> {text, bare, seen} of sample_kernels.py."""
    program = "import runpy, sample_kernels; runpy.run_path(sample_kernels.__file__, run_name='__main__')"
    return json.loads(session_programs.run(program).splitlines()[-1])


def seen_by_us(module):
    """Operations in the order of MLIR's walk: those inside an operation's regions before it."""
    found = []

    def visit(region):
        for block in region.blocks:
            for op in block.ops:
                for inner in op.regions:
                    visit(inner)
                found.append([op.name, len(op.operands), len(op.results)])

    for function in module.functions.values():
        visit(function.body)
        found.append(["tt.func", 0, 0])
    return [*found, ["builtin.module", 0, 0]]


def shape_of(module):
    """The graph without names."""
    lines = []
    for function in module.functions.values():
        number = {}
        for block in function.body.blocks:  # a block may be used before its text
            for argument in block.args:
                number[argument] = len(number)
        for op in function.body.walk():
            for region in op.regions:
                for block in region.blocks:
                    for argument in block.args:
                        number[argument] = len(number)
            for result in op.results:
                number[result] = len(number)
        for op in function.body.walk():
            attributes = {key: value for key, value in op.attrs.items() if key != "successors"}
            lines.append((op.name, [number[value] for value in op.operands], [str(value.type) for value in op.results],
                          repr(attributes)))
    return lines


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_is_seen_as_triton_sees_it(printed, name):
    module = ttir.parse(printed[name]["text"])
    assert seen_by_us(module) == printed[name]["seen"]


@pytest.mark.parametrize("name", NAMES)
def test_locations_change_nothing_else(printed, name):
    assert shape_of(ttir.parse(printed[name]["text"])) == shape_of(ttir.parse(printed[name]["bare"]))


@pytest.mark.parametrize("name", NAMES)
def test_uses_and_owners_are_consistent(printed, name):
    for function in ttir.parse(printed[name]["text"]).functions.values():
        names = [argument.name for argument in function.args]
        for op in function.body.walk():
            assert all(op in value.uses for value in op.operands)
            assert all(value.op is op and op.results[value.index] is value for value in op.results)
            names += [value.name for value in op.results]
            for region in op.regions:
                assert region.parent is op
                names += [argument.name for block in region.blocks for argument in block.args]
        assert len(names) == len(set(names))
        assert not any(name[0].isdigit() or "%" in name or "#" in name for name in names)


def test_operations_name_their_source_line(printed):
    kernel = ttir.parse(printed["add"]["text"]).kernel
    (store,) = (op for op in kernel.body.walk() if op.name == "tt.store")
    file, line, _ = store.loc.rsplit(":", 2)
    assert file.endswith("sample_kernels.py")
    source = open(file).read().splitlines()
    assert "tl.store(out" in source[int(line) - 1]
    inlined = [op.loc for op in ttir.parse(printed["others"]["text"]).kernel.body.walk() if "called from" in op.loc]
    assert inlined and all("sample_kernels.py" in loc.split("called from")[1] for loc in inlined)
    assert all("sample_kernels.py" not in loc.split("called from")[0] for loc in inlined)


def test_arguments_hold_their_attributes(printed):
    kernel = ttir.parse(printed["add"]["text"]).kernel
    assert kernel.public and kernel.name == "add"
    assert [str(value.type) for value in kernel.args] == ["!tt.ptr<f32>"] * 3 + ["i32"]
    assert kernel.args[0].type == Pointer(Scalar("f32"))
    assert kernel.attrs[kernel.args[0]].get("tt.divisibility") == 16 and kernel.attrs[kernel.args[3]] == {}


def test_bare_words_become_attributes(printed):
    def find(sample, name, **attributes):
        module = ttir.parse(printed[sample]["text"])
        for function in module.functions.values():
            for op in function.body.walk():
                if op.name == name and attributes.items() <= op.attrs.items():
                    return op
        raise AssertionError(f"no {name} with {attributes}")

    find("add", "arith.cmpi", predicate="slt")
    find("add", "tt.get_program_id", axis=0)
    assert find("add", "tt.make_range").attrs == {"start": 0, "end": 1024}
    find("others", "tt.atomic_rmw", atomic_rmw_op="fadd", sem="acq_rel", scope="gpu")
    find("others", "tt.atomic_rmw", atomic_rmw_op="max", sem="relaxed", scope="cta")
    find("others", "tt.assert", message='n must be > 0: "x" @ loc(')
    prefixed = find("others", "tt.print", hex=False)
    assert prefixed.attrs["prefix"] == ' a "quoted": ' and prefixed.attrs["isSigned"] == (0, 1)
    find("others", "tt.extern_elementwise", symbol="tanhf")
    find("others", "tt.trans", order=(1, 0))
    find("regions", "tt.scan", axis=0, reverse=True)
    find("regions", "tt.call", callee=next(name for name in ttir.parse(printed["regions"]["bare"]).functions
                                           if "larger_first" in name))  # fmt: skip
    find("types", "tt.dot")
    find("types", "tt.store", cacheModifier="cg", evictionPolicy="evict_first")
    find("types", "tt.fp_to_fp", rounding="rtne")


def test_blocks_and_their_arguments(printed):
    module = ttir.parse(printed["early_return"]["text"])
    blocks = module.kernel.body.blocks
    assert len(blocks) > 2
    for block in blocks:
        for successor, values in block.terminator.attrs.get("successors", []):
            assert successor in blocks
            assert [value.type for value in values] == [argument.type for argument in successor.args]
    (helper,) = (f for f in ttir.parse(printed["regions"]["text"]).functions.values() if not f.public)
    assert helper.options["noinline"] is True and len(helper.result_types) == 2


def test_loops_carry_values(printed):
    kernel = ttir.parse(printed["regions"]["text"]).kernel
    loops = [op for op in kernel.body.walk() if op.name == "scf.for"]
    assert loops
    for loop in loops:
        entry = loop.regions[0].entry
        assert len(entry.args) == 1 + len(loop.results) == len(loop.operands) - 2
        assert entry.terminator.name == "scf.yield" and len(entry.terminator.operands) == len(loop.results)
    (loop,) = (op for op in kernel.body.walk() if op.name == "scf.while")
    before, after = loop.regions
    assert before.entry.terminator.name == "scf.condition" and after.entry.terminator.name == "scf.yield"


def constant(text):
    body = f"    %c = arith.constant {text}\n    tt.return\n"
    module = ttir.parse(f"module {{\n  tt.func public @k() {{\n{body}  }}\n}}\n")
    return module.kernel.body.entry.ops[0].attrs["value"]


@pytest.mark.parametrize("text, value", [
    ("dense<0x7F800000> : tensor<4xf32>", math.inf), ("0xFF800000 : f32", -math.inf), ("0xFF80 : bf16", -math.inf),
    ("0x7C00 : f16", math.inf), ("0xFFF0000000000000 : f64", -math.inf), ("1.000000e-01 : f64", 0.1),
    ("1.000000e-01 : f32", struct.unpack("f", struct.pack("f", 0.1))[0]), ("1.000000e-01 : bf16", 0.10009765625),
    ("3.140630e+00 : f16", 3.140625), ("-128 : i8", -128), ("true", True), ("dense<false> : tensor<2xi1>", False),
    ("dense<[1, -2]> : tensor<2xi32>", [1, -2]),
    ("dense<[[1.0], [0x7F800000]]> : tensor<2x1xf32>", [[1.0], [math.inf]]),
    ('dense<"0x0100000002000000"> : tensor<2xi32>', [1, 2]), ('dense<"0xFF7F"> : tensor<2x1xi8>', [[-1], [127]]),
    ("0x7C : f8E5M2", math.inf), ("0x7E : f8E4M3FN", 448.0), ("-9223372036854775808 : i64", -(2**63)),
])  # fmt: skip
def test_constants_are_exact(text, value):
    got = constant(text)
    assert got == value and type(got) is type(value)


@given(st.integers(0, 2**16 - 1), st.sampled_from(["f16", "bf16"]))
def test_hexadecimal_floats_are_exact(bits, kind):
    got = constant(f"0x{bits:04X} : {kind}")
    if kind == "f16":
        (want,) = struct.unpack("e", struct.pack("H", bits))
    else:
        (want,) = struct.unpack("f", struct.pack("I", bits << 16))
    assert (math.isnan(got) and math.isnan(want)) or (got == want and math.copysign(1, got) == math.copysign(1, want))


@pytest.mark.parametrize("text, type", [
    ("tensor<4x8xbf16>", Tensor((4, 8), Scalar("bf16"))), ("!tt.ptr<f32, 3>", Pointer(Scalar("f32"), 3)),
    ("tensor<1x!tt.ptr<i64>>", Tensor((1,), Pointer(Scalar("i64")))), ("f8E4M3FN", Scalar("f8E4M3FN")),
    ("!tt.ptr<tensor<2xf16>>", Pointer(Tensor((2,), Scalar("f16")))),
])  # fmt: skip
def test_types(text, type):
    assert ttir.parse_type(text) == type and str(type) == text


@pytest.mark.parametrize("body, words", [
    ("%a = arith.addi %b, %b : i32", "%b is used before it is defined"),
    ("%a, %b = arith.constant 1 : i32", "2 results"),
    ("scf.for %i = 0", "expected a value"),
])  # fmt: skip
def test_what_is_not_ttir_is_refused_with_its_line(body, words):
    with pytest.raises(ttir.ParseError, match=words) as error:
        ttir.parse(f"module {{\n  tt.func public @k() {{\n    {body}\n    tt.return\n  }}\n}}\n")
    assert "line 3" in str(error.value)
