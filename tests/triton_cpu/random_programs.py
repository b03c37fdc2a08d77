# SPDX-License-Identifier: Apache-2.0
"""Random kernels, each run twice: by Triton, and as plain Python with a small `tl` of torch operations as the oracle.

A kernel is text: tiles of integers and of small whole floats (so that every order of summation is exact), through
arithmetic, views, reductions, scans, loads and stores of any layout, loops and branches that carry tiles.

    python random_programs.py [examples]     # prints the smallest kernel that goes wrong
"""

import importlib.util
import itertools
import os
import sys
import tempfile

import hypothesis
import torch
import triton  # noqa: F401 - finds the backend first
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SIZE, HALF = 16384, 8192  # elements of each array, and where loads are centred
KINDS = {"i": "int32", "l": "int64", "c": "int8", "b": "int1", "f": "float32", "h": "bfloat16"}
HELPERS = """def mix(a, b, n):
    if n > 1:
        return a - b, b
    return b, a


def fold(a, b, n):
    for k in range(n):
        a, b = b, a - b * k
    return a, b
"""


class Writer:
    """The text of one kernel; `draw` chooses."""

    def __init__(self, draw):
        self.draw = draw
        self.lines = []
        self.indent = "    "
        self.scope = []  # (name, shape, kind)
        self.count = itertools.count()
        self.extents = draw(st.sampled_from([(1, 1), (4, 8), (16, 16), (2, 32), (32, 1), (1, 64), (8, 2), (64, 4),
                                             (4, 64), (16, 128), (64, 64)]))  # fmt: skip

    def choose(self, *options):
        return self.draw(st.sampled_from(options))

    def write(self, text):
        self.lines.append(self.indent + text)

    def new(self, text, shape, kind):
        name = f"v{next(self.count)}"
        self.write(f"{name} = {text}")
        self.scope.append((name, shape, kind))
        return name

    def pick(self, kinds, shape=None):
        """A value in scope of one of `kinds`, or a new one."""
        found = [value for value in self.scope if value[2] in kinds and (shape is None or value[1] == shape)]
        if found and self.choose(True, True, True, False):
            return self.choose(*found)
        shape = shape or self.choose(self.extents, self.extents[::-1])
        kind = self.choose(*kinds)
        r, c = self.axes(shape)
        text = {
            "i": f"tl.load(x + {HALF} + {r} * s + {c} * t)", "l": f"tl.load(x + {HALF} - {c} * s - {r}).to(tl.int64)",
            "f": f"tl.load(f + {HALF} + {c} * t + {r} * s)", "b": f"({r} * 3 + {c}) % 5 < n",
            "c": f"tl.load(x + {r} * t + {c} + {HALF}).to(tl.int8)",
            "h": f"tl.load(f + {r} * {shape[1]} + {c}).to(tl.bfloat16)",
        }[kind]  # fmt: skip
        return self.new(text, shape, kind), shape, kind

    @staticmethod
    def axes(shape):
        return f"tl.arange(0, {shape[0]})[:, None]", f"tl.arange(0, {shape[1]})[None, :]"

    # -- one statement

    def statement(self, depth):
        options = [self.binary, self.binary, self.where, self.compare, self.cast, self.view, self.reduce, self.scan,
                   self.gather_load, self.masked_load, self.store_and_load, self.pair, self.table, self.product,
                   self.sort, self.call]  # fmt: skip
        if depth < 2:
            options += [self.loop, self.branch]
        step = self.choose(*options)
        step(depth) if step in (self.loop, self.branch) else step()

    def bounded(self, text, kind):
        """Small enough to stay whole; of a bfloat16 Triton 3.6 makes a float32 here."""
        text = f"tl.minimum(tl.maximum({text}, -64), 64)" if kind in "fh" else text
        return f"{text}.to(tl.bfloat16)" if kind == "h" else text

    def binary(self):
        a, shape, kind = self.pick("ilcfh")
        b = self.pick(kind, shape)[0] if self.choose(True, True, False) else self.choose("3", "n", "s")
        op = self.choose("+", "-", "*") if kind in "fh" else self.choose("+", "-", "*", "&", "|", "^")
        if kind in "cfh" and b in "ns":
            b = "2"
        self.new(self.bounded(f"{a} {op} {b}", kind), shape, kind)

    def where(self):
        a, shape, kind = self.pick("ilcfh")
        self.new(f"tl.where({self.pick('b', shape)[0]}, {a}, {self.pick(kind, shape)[0]})", shape, kind)

    def compare(self):
        a, shape, kind = self.pick("ilcfh")
        b = self.pick(kind, shape)[0]
        text = f"{a} {self.choose('<', '>=', '==', '!=')} {b}"
        if self.choose(True, False):
            text = f"({text}) {self.choose('&', '|', '^')} {self.pick('b', shape)[0]}"
        self.new(text, shape, "b")

    def cast(self):
        a, shape, kind = self.pick("ilcbfh")
        to = self.choose(*"ilcfh")
        text = f"({a} & 63)" if kind in "ilc" and to in "fh" else a
        self.new(f"{text}.to(tl.{KINDS[to]})", shape, to)

    def view(self):
        a, (m, n), kind = self.pick("ilcbfh")
        what = self.choose("trans", "reshape", "flip", "broadcast")
        if what == "trans":
            self.new(f"tl.trans({a})", (n, m), kind)
        elif what == "reshape":
            self.new(f"tl.reshape({a}, [{n}, {m}])", (n, m), kind)
        elif what == "flip" and kind != "b":
            self.new(f"tl.flip({a}, {self.choose(0, 1)})", (m, n), kind)
        elif m == 1 or n == 1:
            shape = self.choose(self.extents, self.extents[::-1])
            if all(have in (1, wanted) for have, wanted in zip((m, n), shape)):
                self.new(f"tl.broadcast_to({a}, [{shape[0]}, {shape[1]}])", shape, kind)

    def reduce(self):
        a, (m, n), kind = self.pick("ilf")
        axis, what = self.choose(0, 1), self.choose("sum", "max", "min", "xor_sum")
        if what == "xor_sum" and kind == "f":
            what = "sum"
        self.new(self.bounded(f"tl.{what}({a}, {axis}, keep_dims=True)", kind), (1, n) if axis == 0 else (m, 1), kind)
        if self.choose(True, False):
            name, _, kind = self.scope[-1]
            self.new(f"{a} - {name}" if kind != "f" else self.bounded(f"{a} - {name}", kind), (m, n), kind)

    def scan(self):
        a, shape, kind = self.pick("ilf")
        text = f"tl.cumsum({a}, {self.choose(0, 1)}, reverse={self.choose(True, False)})"
        self.new(self.bounded(text, kind), shape, kind)

    def gather_load(self):
        a, shape, kind = self.pick("il")
        base = self.choose("x", "y", "f")
        self.new(f"tl.load({base} + ({a} & {SIZE - 1}))", shape, "f" if base == "f" else "i")

    def masked_load(self):
        base = self.choose("x", "y", "f")
        mask, shape, _ = self.pick("b")
        r, c = self.axes(shape)
        at = self.choose(f"{r} * {shape[1]} + {c}", f"{c} * {shape[0]} + {r}", f"{r} * s + {c}", f"{c} * t - {r}")
        other = self.choose("", ", 7", f", {self.pick('f' if base == 'f' else 'i', shape)[0]}")
        if not other:
            self.new(f"tl.load({base} + {HALF} + {at}, {mask}, 0)", shape, "f" if base == "f" else "i")
        else:
            self.new(f"tl.load({base} + {HALF} + {at}, {mask}{other})", shape, "f" if base == "f" else "i")

    def store_and_load(self):
        """What is stored is loaded elsewhere: the order must hold."""
        a, shape, kind = self.pick("i")
        r, c = self.axes(shape)
        places = f"{r} * {shape[1]} + {c}", f"{c} * {shape[0]} + {r}"
        shift = self.choose(0, 1, 5)
        before = self.new(f"tl.load(y + {shift} + {self.choose(*places)})", shape, "i") if self.choose(0, 1) else None
        mask = f", {self.pick('b', shape)[0]}" if self.choose(True, False) else ""
        value = f"{a} + {before}" if before and self.choose(True, False) else a
        self.write(f"tl.store(y + {self.choose(*places)}, {value}{mask})")
        if self.choose(True, False):
            self.new(f"tl.load(y + {self.choose(0, 3)} + {self.choose(*places)})", shape, "i")

    def pair(self):
        a, (m, n), kind = self.pick("ilf")
        b = self.pick(kind, (m, n))[0]
        name = f"v{next(self.count)}"
        self.write(f"{name} = tl.join({a}, {b})")
        if self.choose(True, False):
            left, right = f"v{next(self.count)}", f"v{next(self.count)}"
            self.write(f"{left}, {right} = tl.split({name})")
            self.scope += [(left, (m, n), kind), (right, (m, n), kind)]
        else:
            self.new(self.bounded(f"tl.sum(tl.reshape({name}, [{m}, {n}, 2]), 2)", kind), (m, n), kind)

    def table(self):
        a, (m, n), kind = self.pick("if")
        index = self.pick("i", (m, n))[0]
        axis = self.choose(0, 1)
        self.new(f"tl.gather({a}, {index} & {(m, n)[axis] - 1}, {axis})", (m, n), kind)

    def product(self):
        a, (m, n), kind = self.pick("fh")
        b = self.pick(kind, (m, n))[0]
        left, right, shape = self.choose((f"tl.trans({a})", b, (n, n)), (a, f"tl.trans({b})", (m, m)))
        if shape[0] <= 64:
            add = f", {self.pick('f', shape)[0]}" if self.choose(True, False) else ""
            self.new(self.bounded(f"tl.dot({left}, {right}{add})", "f"), shape, "f")

    def sort(self):
        a, shape, kind = self.pick("if")
        if shape[1] <= 16:
            self.new(f"tl.sort({a}, descending={self.choose(True, False)})", shape, kind)

    def call(self):
        a, shape, kind = self.pick("ilf")
        left, right = f"v{next(self.count)}", f"v{next(self.count)}"
        self.write(f"{left}, {right} = {self.choose('mix', 'fold')}({a}, {self.pick(kind, shape)[0]}, n)")
        for name in (left, right):
            self.write(f"{name} = {self.bounded(name, kind)}")
            self.scope.append((name, shape, kind))

    # -- control flow

    def body(self, depth, targets):
        saved, outer = list(self.scope), self.indent
        self.indent += "    "
        for _ in range(self.draw(st.integers(0, 3))):
            self.statement(depth + 1)
        values = [self.pick(kind, shape)[0] for _, shape, kind in targets]
        self.write(f"{', '.join(name for name, *_ in targets)} = {', '.join(values)}")
        self.indent, self.scope = outer, saved

    def targets(self):
        first = self.pick("ilfh")
        second = self.pick("ilfh")
        found = {first[0]: first, second[0]: second}
        copies = []
        for name, shape, kind in found.values():  # a name of its own: others keep the old value
            copies.append((self.new(f"{name}", shape, kind), shape, kind))
        return copies

    def loop(self, depth):
        targets = self.targets()
        if self.choose(True, True, False):
            self.write(f"for k{depth} in range({self.choose('n', '2', '0, 7, 3')}):")
            self.body(depth, targets)
        else:
            self.write(f"k{depth} = 0")
            self.write(f"while k{depth} < n:")
            self.body(depth, targets)
            self.write(f"    k{depth} += 1")

    def branch(self, depth):
        targets = self.targets()
        some, _, _ = self.pick("i")
        self.write(f"if {self.choose('n > 1', f'tl.sum(tl.sum({some}, 1), 0) > 0')}:")
        self.body(depth, targets)
        if self.choose(True, False):
            self.write("else:")
            self.body(depth, targets)

    def text(self):
        for _ in range(self.draw(st.integers(2, 8))):
            self.statement(0)
        for i, (name, shape, kind) in enumerate(self.scope[-6:]):
            r, c = self.axes(shape)
            out, to = ("g", "float32") if kind in "fh" else ("o", "int64")
            self.write(f"tl.store({out} + {i * 4096} + {r} * {shape[1]} + {c}, {name}.to(tl.{to}))")
        return "def kernel(x, f, y, o, g, s, t, n):\n" + "\n".join(self.lines) + "\n"


# ---- the oracle: `tl` on torch tensors ------------------------------------------------------------------------------


class Pointer:
    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def __add__(self, offset):
        return Pointer(self.memory, self.at + offset)

    def __sub__(self, offset):
        return Pointer(self.memory, self.at - offset)


class Oracle:
    int1, int8, int32, int64, float32, bfloat16 = (
        torch.bool, torch.int8, torch.int32, torch.int64, torch.float32, torch.bfloat16)  # fmt: skip
    maximum = staticmethod(lambda a, b: torch.clamp(a, min=b))
    minimum = staticmethod(lambda a, b: torch.clamp(a, max=b))
    where, trans, reshape = staticmethod(torch.where), staticmethod(torch.t), staticmethod(torch.reshape)
    broadcast_to = staticmethod(torch.broadcast_to)
    flip = staticmethod(lambda a, axis: a.flip(axis))
    join = staticmethod(lambda a, b: torch.stack([a, b], -1))
    split = staticmethod(lambda a: a.unbind(-1))
    gather = staticmethod(lambda a, index, axis: a.gather(axis, index.long()))

    @staticmethod
    def arange(low, high):
        return torch.arange(low, high, dtype=torch.int32)

    @staticmethod
    def load(pointer, mask=None, other=0):
        at = pointer.at.long()
        if mask is None:
            return pointer.memory[at]
        value = pointer.memory[torch.where(mask, at, 0)]
        return torch.where(mask, value, torch.as_tensor(other, dtype=value.dtype))

    @staticmethod
    def store(pointer, value, mask=None):
        mask = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
        pointer.memory[pointer.at.long()[mask]] = value[mask].to(pointer.memory.dtype)

    @staticmethod
    def sum(a, axis, keep_dims=False):
        return a.sum(axis, keepdim=keep_dims, dtype=a.dtype)

    @staticmethod
    def max(a, axis, keep_dims=False):
        return a.amax(axis, keepdim=keep_dims)

    @staticmethod
    def min(a, axis, keep_dims=False):
        return a.amin(axis, keepdim=keep_dims)

    @staticmethod
    def dot(a, b, add=0):
        return a.float() @ b.float() + add

    @staticmethod
    def sort(a, descending):
        return a.sort(1, descending=descending).values

    @staticmethod
    def xor_sum(a, axis, keep_dims=False):
        total = torch.zeros_like(a.select(axis, 0))
        for part in a.unbind(axis):
            total = total ^ part
        return total.unsqueeze(axis)

    @staticmethod
    def cumsum(a, axis, reverse=False):
        if reverse:
            return a.flip(axis).cumsum(axis, dtype=a.dtype).flip(axis)
        return a.cumsum(axis, dtype=a.dtype)


@st.composite
def kernels(draw):
    return Writer(draw).text(), draw(st.sampled_from([1, 3, 40, -16])), draw(st.sampled_from([1, 2, -1])), draw(
        st.integers(0, 3))  # fmt: skip


def arrays():
    torch.manual_seed(0)
    x, f = torch.randint(-100, 100, (SIZE,), dtype=torch.int32), torch.randint(-8, 9, (SIZE,)).float()
    return x, f, x.flip(0).clone(), torch.zeros(6 * 4096, dtype=torch.int64), torch.zeros(6 * 4096)


FOLDER = tempfile.mkdtemp()
number = itertools.count()


def compiled(text):
    """`text` as a Triton kernel: Triton reads the source from a file."""
    path = os.path.join(FOLDER, f"kernel{next(number)}.py")
    helpers = HELPERS.replace("def ", "@triton.jit\ndef ")
    with open(path, "w") as file:
        file.write(f"import triton\nimport triton.language as tl\n\n\n{helpers}\n\n"
                   f"@triton.jit(do_not_specialize=['s', 't', 'n'])\n{text}")  # fmt: skip
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def check(program):
    text, s, t, n = program
    wanted, got = arrays(), arrays()
    scope = {"tl": Oracle}
    exec(HELPERS + text, scope)  # noqa: S102 - written above
    scope["kernel"](*map(Pointer, wanted), s, t, n)
    compiled(text)[(1,)](*got, s, t, n)
    for name, a, b in zip("xfyog", got, wanted):
        wrong = (a != b).nonzero().flatten()
        assert not len(wrong), f"{name}: {a[wrong][:4].tolist()} for {b[wrong][:4].tolist()} at {wrong[:4].tolist()}"


# Kernels that once went wrong, made smaller.
FOUND = {
    "a while loop takes over a tile that the loop around it still needs": """
    for k in range(n):
        j = 0
        while j < k:
            a = tl.cumsum(a, 0) - tl.trans(a)
            j += 1
        a = a + tl.cumsum(tl.cumsum(b, 1), 0)
        b = b - k
""",
    "so does a for loop, whose result then dies": """
    for k in range(n):
        d = b
        for j in range(k):
            a, d = d, tl.cumsum(a, 0) - tl.trans(d)
        m = tl.cumsum(b, 1)
        b = d + tl.cumsum(m, 0) + m
        a = tl.trans(m) + tl.cumsum(b, 0)
""",
    "a store of what it overwrites, in fewer elements than a vector has": """
    r, c = tl.arange(0, 8)[:, None], tl.arange(0, 2)[None, :]
    tl.store(y + c * 8 + r, tl.load(x + r * 2 + c) + tl.load(y + r * 2 + c))
""",
    "a tile loaded row by row in the loop of a store that overwrites it": """
    for k in range(n):
        m = (r * 3 + c) % 5 < n
        a = tl.load(y + c * 16 + r)
        tl.store(y + r * 16 + c, b + a, m)
""",
}
FRAME = """def kernel(x, f, y, o, g, s, t, n):
    r, c = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    a, b = tl.load(x + r * 16 + c), tl.load(x + c * 16 + r)
{}
    tl.store(o + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], a.to(tl.int64))
    tl.store(o + 256 + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], b.to(tl.int64))
"""


def run_found():
    for body in FOUND.values():
        for n in range(5):
            check((FRAME.format(body), 1, 1, n))


def run(examples=40, seed=None):
    failed = []

    def search(program):
        try:
            check(program)
        except Exception:
            failed[:] = [program]
            raise

    limits = settings(max_examples=examples, deadline=None, database=None, derandomize=seed is None,
                      report_multiple_bugs=False, suppress_health_check=list(HealthCheck))  # fmt: skip
    found = limits(given(kernels())(search))
    try:
        (found if seed is None else hypothesis.seed(seed)(found))()
    except Exception:
        for text, *arguments in failed:
            print(f"{text}\ns, t, n = {arguments}\n")
        raise


if __name__ == "__main__":
    run_found()
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 40, int(sys.argv[2]) if len(sys.argv) > 2 else None)
