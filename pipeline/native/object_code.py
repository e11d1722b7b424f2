"""Loads compiled functions into a process that has no compiler: ELF relocatable objects, as LLVM's JIT emits them.

    code = ObjectCode(path.read_bytes())
    code.address("name of a function")

Numba needs 100 MB and half a second to load what it has compiled, because it loads its compiler, too.  An object file
needs little: its sections are copied into anonymous memory, addresses are written where the code names symbols, and the
memory of code becomes executable.  Children of a `fork` share it.

LLVM emits code for a JIT in the large code model, so that the only relocation is a 64-bit address (R_X86_64_64).
Anything else is refused.  Symbols that the object does not define are libc's.

Sources: System V ABI, chapters 4 and 5; its AMD64 supplement, section 4.4.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import NamedTuple

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_MAGIC = b"\x7fELF\x02\x01"  # 64-bit, little endian
_RELOCATABLE, _X86_64 = 1, 62
_SYMBOLS, _RELOCATIONS_WITH_ADDEND, _NO_BYTES, _UNWIND = 2, 4, 8, 0x70000001
_WRITABLE, _LOADED, _EXECUTABLE = 1, 2, 4
_UNDEFINED, _ABSOLUTE, _COMMON = 0, 0xFFF1, 0xFFF2
_FUNCTION = 2
_ADDRESS64 = 1  # R_X86_64_64
_PAGE = mmap.PAGESIZE
_FRAMES = ".eh_frame"

_libc = ctypes.CDLL(None, use_errno=True)


class ObjectCodeError(RuntimeError):
    """An object file cannot be loaded; the message gives the reason."""


class _Section(NamedTuple):
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


class _Symbol(NamedTuple):
    name: str
    type: int
    section: int
    value: int
    size: int


class ObjectCode:
    """The functions of one object file, in memory of this process. Must live as long as they are called."""

    def __init__(self, raw: bytes) -> None:
        """Raises `ObjectCodeError`."""
        self.digest = ""  # SHA-256 of the object file, hex; set by object_file.py
        try:
            self._sections = _read_sections(raw)
            self._symbols = _read_symbols(raw, self._sections)
            self._load(raw)
        except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
            raise ObjectCodeError(f"the object file is damaged: {error}") from None

    def address(self, name: str) -> int:
        """The address of a defined function. Raises `ObjectCodeError`."""
        for symbol in self._symbols:
            if symbol.name == name and symbol.type == _FUNCTION and symbol.section != _UNDEFINED:
                return self._begins[symbol.section] + symbol.value
        raise ObjectCodeError(f"the object file has no function {name!r}")

    def _load(self, raw: bytes) -> None:
        loaded = {
            i: section
            for i, section in enumerate(self._sections)
            if section.flags & _LOADED and section.type != _UNWIND and section.name != _FRAMES and section.size
        }
        # Code in pages of its own, which lose the permission to be written.
        order = sorted(loaded, key=lambda i: not loaded[i].flags & _EXECUTABLE)
        at, places, code_bytes = 0, {}, 0
        for i in order:
            is_code = bool(loaded[i].flags & _EXECUTABLE)
            if not is_code and not code_bytes:
                code_bytes = at = _align(at, _PAGE)
            at = _align(at, max(1, loaded[i].alignment))
            places[i] = at
            at += loaded[i].size
        code_bytes = code_bytes or at
        commons = {}
        for number, symbol in enumerate(self._symbols):
            if symbol.section == _COMMON:
                at = _align(at, max(1, symbol.value))  # of a common symbol the value is the alignment
                commons[number] = at
                at += symbol.size
        self._memory = mmap.mmap(-1, max(_PAGE, _align(at, _PAGE)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for i, place in places.items():
            section = loaded[i]
            if section.type != _NO_BYTES:
                content = raw[section.offset : section.offset + section.size]
                if len(content) != section.size:
                    raise ValueError(f"section {section.name} exceeds the file")
                self._memory[place : place + section.size] = content
        self._begins = {i: base + place for i, place in places.items()}
        self._commons = {number: base + place for number, place in commons.items()}
        for section in self._sections:
            if section.type == _RELOCATIONS_WITH_ADDEND and section.info in places:
                self._relocate(raw, section, places[section.info])
        if code_bytes and _libc.mprotect(
            ctypes.c_void_p(base), ctypes.c_size_t(_align(code_bytes, _PAGE)), mmap.PROT_READ | mmap.PROT_EXEC
        ):
            raise ObjectCodeError("the system permits no executable memory (mprotect)")

    def _relocate(self, raw: bytes, section: _Section, place: int) -> None:
        """Write the addresses that one section of relocations names into the section that is loaded at `place`."""
        size = self._sections[section.info].size
        for at, info, addend in _RELOCATION.iter_unpack(raw[section.offset : section.offset + section.size]):
            symbol, kind = info >> 32, info & 0xFFFFFFFF
            if kind != _ADDRESS64:
                raise ObjectCodeError(f"relocation type {kind} is not supported, only {_ADDRESS64} (R_X86_64_64)")
            if at + 8 > size:
                raise ValueError(f"a relocation at {at} exceeds its section of {size} bytes")
            address = self._resolve(symbol)
            struct.pack_into("<Q", self._memory, place + at, (address + addend) & 0xFFFFFFFFFFFFFFFF)

    def _resolve(self, number: int) -> int:
        """Address of a symbol."""
        symbol = self._symbols[number]
        if symbol.section == _COMMON:
            return self._commons[number]
        if symbol.section == _ABSOLUTE:
            return symbol.value
        if symbol.section != _UNDEFINED:
            if symbol.section not in self._begins:
                raise ObjectCodeError(f"symbol {symbol.name!r} is in a section that is not loaded")
            return self._begins[symbol.section] + symbol.value
        try:
            return ctypes.cast(getattr(_libc, symbol.name), ctypes.c_void_p).value or 0
        except AttributeError:
            raise ObjectCodeError(f"symbol {symbol.name!r} is not defined") from None


def _align(n: int, to: int) -> int:
    return -(-n // to) * to


def _read_sections(raw: bytes) -> list[_Section]:
    """The section table. Raises `ObjectCodeError` for anything but a relocatable x86-64 object."""
    ident, kind, machine, _, _, _, table, _, _, _, _, entry_bytes, count, names = _HEADER.unpack_from(raw)
    if not ident.startswith(_MAGIC) or (kind, machine) != (_RELOCATABLE, _X86_64) or entry_bytes != _SECTION.size:
        raise ObjectCodeError("not a relocatable x86-64 object file")
    fields = [_SECTION.unpack_from(raw, table + i * _SECTION.size) for i in range(count)]
    begin, size = fields[names][4], fields[names][5]
    strings = raw[begin : begin + size]
    return [
        _Section(_string(strings, name), type_, flags, offset, size, link, info, alignment)
        for name, type_, flags, _, offset, size, link, info, alignment, _ in fields
    ]


def _read_symbols(raw: bytes, sections: list[_Section]) -> list[_Symbol]:
    """The symbol table; empty if there is none."""
    for section in sections:
        if section.type == _SYMBOLS:
            strings = sections[section.link]
            names = raw[strings.offset : strings.offset + strings.size]
            return [
                _Symbol(_string(names, name), info & 15, index, value, size)
                for name, info, _, index, value, size in _SYMBOL.iter_unpack(
                    raw[section.offset : section.offset + section.size]
                )
            ]
    return []


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
