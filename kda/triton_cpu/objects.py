# SPDX-License-Identifier: Apache-2.0
"""Object code on disk and in memory: the sealed form that the cache holds, and loading it.

On x86-64 Linux the sections go into one block of memory, so that code and constants lie within reach of each other
whatever the process has mapped, and an unknown symbol is an exception. Elsewhere LLVM's own loader is used.
"""
from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
import json
import mmap
import struct

# ---- the sealed form ------------------------------------------------------------------------------------------------

_MAGIC = b"TRITONCPU\0obj1\n\0"


class DamagedObject(ValueError):
    """Bytes that are not an object of this backend for this kernel."""


def seal(code: bytes, key: str, isa: str) -> bytes:
    """Object code with a header that ties it to a cache key and a processor path."""
    head = json.dumps({"key": key, "isa": isa}).encode()
    body = struct.pack("<I", len(head)) + head + code
    return _MAGIC + hashlib.sha256(body).digest() + body


def unseal(data: bytes, key: str | None) -> tuple[bytes, str]:
    """(object code, processor path) of what `seal` made for `key`; of any key if None.

    Raises:
        DamagedObject: the bytes are damaged, or were made for another kernel.
    """
    start = len(_MAGIC) + 32
    if not data.startswith(_MAGIC) or len(data) < start + 4:
        raise DamagedObject("not an object of this backend")
    body = data[start:]
    if hashlib.sha256(body).digest() != data[len(_MAGIC):start]:
        raise DamagedObject("the digest does not match")
    (length,) = struct.unpack_from("<I", body)
    head = json.loads(body[4:4 + length])
    if key is not None and head["key"] != key:
        raise DamagedObject("made for another kernel")
    return body[4 + length:], head["isa"]


# ---- loading --------------------------------------------------------------------------------------------------------


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """Where external symbols are looked for: the process (the C library), then libm and the compiler's own."""
    found = [ctypes.CDLL(None)]
    for name in ("libm.so.6", ctypes.util.find_library("m"), "libgcc_s.so.1"):
        try:
            found += [ctypes.CDLL(name)] if name else []
        except OSError:
            continue
    return tuple(found)


def external(symbol: str) -> int:
    """The address of a function of the process.

    Raises:
        LookupError: nothing defines it.
    """
    for library in _libraries():
        try:
            return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
        except AttributeError:
            continue
    raise LookupError(f"compiled code asks for {symbol}, which no library of this process has")


def load(code: bytes):
    """Object code in memory; the result has `address(symbol)` and owns the memory."""
    if code[:6] == b"\x7fELF\x02\x01" and struct.unpack_from("<HH", code, 16) == (1, 62):  # relocatable, x86-64
        return Image(code)
    return _EngineImage(code)


class _EngineImage:
    """Object code in the care of LLVM's loader."""

    def __init__(self, code: bytes):
        import llvmlite.binding as llvm

        from kda.triton_cpu import codegen, runtime

        machine = codegen.target_machine(runtime.features(runtime.best_isa()))
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly("", llvm.create_context()), machine)
        self._engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, symbol: str) -> int:
        return self._engine.get_function_address(symbol) or self._engine.get_global_value_address(symbol)


_ALLOC, _WRITE, _EXEC = 2, 1, 4
_NOBITS, _RELA, _SYMTAB, _X86_UNWIND = 8, 4, 2, 0x70000001
_R_64, _R_PC32, _R_PLT32, _R_PC64 = 1, 2, 4, 24
_R_GOT = (9, 41, 42)  # GOTPCREL, GOTPCRELX, REX_GOTPCRELX
_PAGE = mmap.PAGESIZE


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


class Image:
    """An x86-64 ELF object, its sections in one block: code, constants and addresses of externals, data."""

    def __init__(self, code: bytes):
        (offset,) = struct.unpack_from("<Q", code, 40)
        size, count, strings = struct.unpack_from("<HHH", code, 58)
        # (name, type, flags, address, offset, size, link, info, align, entry size)
        sections = [struct.unpack_from("<IIQQQQIIQQ", code, offset + size * index) for index in range(count)]
        text = sections[strings][4]
        # Nothing unwinds through a kernel: the tables for it stay behind.
        skipped = {index for index, section in enumerate(sections)
                   if section[1] == _X86_UNWIND or code.startswith(b".eh_frame\0", text + section[0])}  # fmt: skip
        symbols, names = self._symbols(code, sections)
        unknown = [name for (_, _, _, index, _, _), name in zip(symbols, names, strict=True) if index == 0 and name]

        # Places: first code with a jump for each external, then constants with its address, then data.
        groups: list[list[int]] = [[], [], []]
        for index, (_, _, flags, *_rest) in enumerate(sections):
            if flags & _ALLOC and sections[index][5] and index not in skipped:
                groups[0 if flags & _EXEC else 2 if flags & _WRITE else 1].append(index)
        place: dict[int, int] = {}
        ends, at = [], 0
        extra = (len(unknown) * 8, len(unknown) * 8, 0)
        starts = []
        for group, more in zip(groups, extra, strict=True):
            for index in group:
                at = _up(at, max(sections[index][8], 1))
                place[index] = at
                at += sections[index][5]
            at = _up(at, 8)
            starts.append(at)
            at = _up(at + more, _PAGE)
            ends.append(at)
        self._memory = mmap.mmap(-1, max(at, _PAGE))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for index in place:
            if sections[index][1] != _NOBITS:
                start, length = sections[index][4], sections[index][5]
                self._memory[place[index]:place[index] + length] = code[start:start + length]
        jumps, slots = {}, {}
        for number, name in enumerate(unknown):
            jump, slot = starts[0] + 8 * number, starts[1] + 8 * number
            struct.pack_into("<Q", self._memory, slot, external(name))
            struct.pack_into("<Hi2x", self._memory, jump, 0x25FF, slot - (jump + 6))  # jmp [rip + ..]
            jumps[name], slots[name] = base + jump, slot

        values = []
        for (_, _, _, index, value, _), name in zip(symbols, names, strict=True):
            if index == 0:
                values.append(jumps.get(name, 0))
            else:
                values.append(base + place[index] + value if index in place else value)
        self._relocate(code, sections, place, base, values, names, slots)
        self._table = {name: value for name, value in zip(names, values, strict=True) if name}
        self._protect(base, [0, *ends])

    @staticmethod
    def _symbols(code: bytes, sections) -> tuple[list[tuple], list[str]]:
        (table,) = (section for section in sections if section[1] == _SYMTAB)
        strings = sections[table[6]][4]
        symbols, names = [], []
        for at in range(table[4], table[4] + table[5], 24):
            # name, info, other, section, value, size
            symbol = struct.unpack_from("<IBBHQQ", code, at)
            start = strings + symbol[0]
            symbols.append(symbol)
            names.append(code[start:code.index(b"\0", start)].decode())
        return symbols, names

    def _relocate(self, code, sections, place, base, values, names, slots) -> None:
        memory = self._memory
        for _, kind, _, _, offset, size, _, target, _, _ in sections:
            if kind != _RELA or target not in place:
                continue
            for at, info, addend in struct.iter_unpack("<QQq", code[offset:offset + size]):
                number, how = info >> 32, info & 0xFFFFFFFF
                where = place[target] + at
                value = values[number] + addend
                if how in (_R_PC32, _R_PLT32):
                    struct.pack_into("<i", memory, where, value - base - where)
                elif how == _R_64:
                    struct.pack_into("<Q", memory, where, value)
                elif how == _R_PC64:
                    struct.pack_into("<q", memory, where, value - base - where)
                elif how in _R_GOT and names[number] in slots:
                    struct.pack_into("<i", memory, where, slots[names[number]] + addend - where)
                else:
                    raise NotImplementedError(f"relocation {how} of {names[number]} in compiled code")

    def _protect(self, base: int, bounds: list[int]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for start, end, rights in zip(bounds[:-1], bounds[1:], (5, 1, 3), strict=True):  # r-x, r--, rw-
            if end > start and libc.mprotect(ctypes.c_void_p(base + start), ctypes.c_size_t(end - start), rights):
                raise OSError(ctypes.get_errno(), "memory for compiled code cannot be made executable")

    def address(self, symbol: str) -> int:
        return self._table.get(symbol, 0)
