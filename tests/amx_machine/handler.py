"""The handler of traps: decodes an AMX instruction that this CPU does not have, executes it, and steps over it.

    python -m tests.amx_machine.handler DIRECTORY NAME      compile it to an object file (object_file.py)

A handler of SIGILL and SIGSYS, as jitted code: `handle(signal, siginfo, ucontext)`.  It calls libc's `getpid`,
`gettid`, `write`, `signal` and `raise`, all of which are safe in signal handlers, `pthread_getspecific` and
`pthread_setspecific` of a key for which libc allocates nothing (`layout.KEYS`), and nothing of Python.  Linux saves all
vector registers before it calls a handler.  SIGSYS comes from a filter for arch_prctl's request of tiles
(site/sitecustomize.py).

AMX-TILE and AMX-INT8 as in the Intel SDM: volume 1, chapter 18; volume 2, the instructions and their exception classes
AMX-E1 to E6.  A tile is 16 rows of 64 bytes; those outside of its shape are zero.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from pipeline.native import link_once, object_file
from shm.atomics import atomic_add, compare_exchange
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    Builder,
    get_i32,
    get_i64,
    get_s8,
    get_u8,
    get_u16,
    load_i32,
    put_8,
    put_i32,
    put_i64,
    splat_i32,
    store_i32,
)
from stages.worker.kernels.simd.vectors import I32, I64, call, operation
from tests.amx_machine import layout as at

_SIGILL, _SIGSEGV, _SIGSYS = 4, 11, 31
_ARCH_REQ_XCOMP_PERM, _XTILEDATA = 0x1023, 18

# ucontext_t: the offset of its registers, and which of them RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15 are.
_REGISTERS = 40
_ORDER = (13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7)
_RAX, _RSI, _RDI, _RIP = (_REGISTERS + 8 * number for number in (13, 9, 8, 16))

# Prefixes of VEX (pp), and the opcodes of map 0F38.
_NO_PREFIX, _66, _F3, _F2 = range(4)
_CONFIGURE, _MOVE, _MULTIPLY = 0x49, 0x4B, 0x5E


# ------------------------------------------------------------------ libc, and the address of the state


def _libc(name: str, arguments: int, result: ir.Type = I32) -> Any:
    """A function of int64 of libc that returns an int, or a `result`."""

    def emit(builder: Builder, *values: Any) -> Any:
        found = call(builder, name, result, list(values))
        return builder.sext(found, I64) if result is I32 else found

    return operation(name, types.int64, (types.int64,) * arguments, emit, f"libc's {name}.")


_getpid, _gettid, _write = _libc("getpid", 0), _libc("gettid", 0), _libc("write", 3)
_signal, _raise = _libc("signal", 2), _libc("raise", 1)
_getspecific, _setspecific = _libc("pthread_getspecific", 1, I64), _libc("pthread_setspecific", 2)


def _emit_state(builder: Builder) -> Any:
    name = "amx_machine_state"
    found = builder.module.globals.get(name)
    if found is None:
        found = cgutils.add_global_variable(builder.module, I64, name)
        found.linkage, found.initializer = "linkonce_odr", ir.Constant(I64, 0)
    return builder.ptrtoint(found, I64)


_state_word = operation(
    "state_word", types.int64, (), _emit_state, "Address of the word with the address of the state."
)


# ------------------------------------------------------------------ the threads of this process


@njit(**INNER)
def _clear(address, end):
    while address < end:
        store_i32(address, splat_i32(0))
        address += 64


@njit(**INNER)
def _release(thread):
    _clear(thread + at.CONFIGURATION, thread + at.THREAD_BYTES)


@njit(**INNER)
def _row_of(log, thread, process):
    """The address of a new row of the log; 0: it is full."""
    for i in range(at.ROWS):
        row = log + at.ROW_BYTES * i
        if compare_exchange(row + at.ROW_THREAD, 0, thread) == 0:
            put_i64(row + at.ROW_PROCESS, process)
            put_i64(row + at.ROW_REASON, -1)
            return row
    return 0


@njit(**INNER)
def _thread_of(state):
    """The state of the calling thread; 0: there are too many threads."""
    number, key = _gettid(), get_i64(state + at.KEY)
    thread = _getspecific(key)
    if thread != 0 and get_i64(thread + at.THREAD_ID) == number:
        return thread
    # Its first instruction. A state with its number is that of a thread that has ended.
    for i in range(at.THREADS):
        thread = state + at.THREADS_AT + at.THREAD_BYTES * i
        owner = get_i64(thread + at.THREAD_ID)
        if owner == 0:
            owner = compare_exchange(thread + at.THREAD_ID, 0, number)
        if owner == 0 or owner == number:
            _release(thread)
            put_i64(thread + at.ROW_AT, _row_of(get_i64(state + at.LOG_AT), number, _getpid()))
            _setspecific(key, thread)
            return thread
    return 0


@njit(**INNER)
def _end(state, thread, reason, code):
    """End this process as Linux does when the CPU refuses an instruction; the log gets the reason."""
    row = get_i64(thread + at.ROW_AT) if thread != 0 else 0
    if row != 0:
        put_i64(row + at.ROW_REASON, reason)
        put_i64(row + at.ROW_ADDRESS, code)
        put_i64(row + at.ROW_CODE, get_i64(code))
    _write(2, get_i64(state + at.MESSAGES_AT) + at.MESSAGE_BYTES * reason, at.MESSAGE_BYTES)
    if at.FIRST_GENERAL_PROTECTION <= reason <= at.LAST_GENERAL_PROTECTION:
        _signal(_SIGSEGV, 0)
        _raise(_SIGSEGV)
    _signal(_SIGILL, 0)  # the instruction is executed again


# ------------------------------------------------------------------ tiles


@njit(**INNER)
def _rows(thread, tile):
    return get_u8(thread + at.CONFIGURATION + 48 + tile)


@njit(**INNER)
def _row_bytes(thread, tile):
    return get_u16(thread + at.CONFIGURATION + 16 + 2 * tile)


@njit(**INNER)
def _tile(thread, tile):
    return thread + at.TILES + at.TILE_BYTES * tile


@njit(**INNER)
def _zero(thread, tile):
    _clear(_tile(thread, tile), _tile(thread, tile + 1))


@njit(**INNER)
def _configure(thread, source):
    """LDTILECFG; returns the reason to refuse it, or -1."""
    palette = get_u8(source)
    if palette == 0:
        _release(thread)
        return -1
    if palette != 1:
        return at.PALETTE
    for i in range(2, 64):
        if (i < 16 or 32 <= i < 48 or i >= 56) and get_u8(source + i) != 0:
            return at.RESERVED
    for tile in range(at.N_TILES):
        row_bytes, rows = get_u16(source + 16 + 2 * tile), get_u8(source + 48 + tile)
        if row_bytes > 64 or rows > 16:
            return at.LARGE
        if (row_bytes == 0) != (rows == 0):
            return at.HALF_TILE
    _release(thread)
    store_i32(thread + at.CONFIGURATION, load_i32(source))
    return -1


@njit(**INNER)
def _start_row(thread):
    """Where an interrupted load or store continues; zero after it."""
    start = get_u8(thread + at.CONFIGURATION + 1)
    put_8(thread + at.CONFIGURATION + 1, 0)
    return start


@njit(**INNER)
def _load(thread, tile, source, stride):
    rows, row_bytes, to = _rows(thread, tile), _row_bytes(thread, tile), _tile(thread, tile)
    start = _start_row(thread)
    _clear(to + 64 * start, to + at.TILE_BYTES)
    for r in range(start, rows):
        if row_bytes == 64:
            store_i32(to + 64 * r, load_i32(source + stride * r))
        else:
            for i in range(0, row_bytes, 4):
                put_i32(to + 64 * r + i, get_i32(source + stride * r + i))


@njit(**INNER)
def _store(thread, tile, to, stride):
    rows, row_bytes, source = _rows(thread, tile), _row_bytes(thread, tile), _tile(thread, tile)
    for r in range(_start_row(thread), rows):
        if row_bytes == 64:
            store_i32(to + stride * r, load_i32(source + 64 * r))
        else:
            for i in range(0, row_bytes, 4):
                put_i32(to + stride * r + i, get_i32(source + 64 * r + i))


@njit(**INNER)
def _byte(lanes, shift, signed):
    """A byte of each lane."""
    byte = (lanes >> splat_i32(shift)) & splat_i32(255)
    return (byte ^ splat_i32(128)) - splat_i32(128) if signed else byte


@njit(**INNER)
def _multiply(thread, sums, a, b, a_signed, b_signed):
    """sums[r, n] += a[r, 4 k + i] * b[k, 4 n + i] over all k and i, modulo 2**32."""
    total, values, codes = _tile(thread, sums), _tile(thread, a), _tile(thread, b)
    for k in range(_rows(thread, b)):
        lanes = load_i32(codes + 64 * k)
        first, second = _byte(lanes, 0, b_signed), _byte(lanes, 8, b_signed)
        third, fourth = _byte(lanes, 16, b_signed), _byte(lanes, 24, b_signed)
        for r in range(_rows(thread, sums)):
            four = values + 64 * r + 4 * k
            if a_signed:
                p, q, s, t = get_s8(four), get_s8(four + 1), get_s8(four + 2), get_s8(four + 3)
            else:
                p, q, s, t = get_u8(four), get_u8(four + 1), get_u8(four + 2), get_u8(four + 3)
            line = load_i32(total + 64 * r) + first * splat_i32(p) + second * splat_i32(q)
            store_i32(total + 64 * r, line + third * splat_i32(s) + fourth * splat_i32(t))
    _start_row(thread)


# ------------------------------------------------------------------ instructions


@njit(**INNER)
def _register(context, number):
    return get_i64(context + _REGISTERS + 8 * _ORDER[number])


@njit(**INNER)
def _execute(thread, context, code, permitted):
    """Execute the AMX instruction at `code`, and set RIP behind it; returns the reason to refuse it, or -1."""
    if get_u8(code) != 0xC4:
        return at.UNKNOWN
    first, second, opcode, modrm = get_u8(code + 1), get_u8(code + 2), get_u8(code + 3), get_u8(code + 4)
    if first & 31 != 2 or (opcode != _CONFIGURE and opcode != _MOVE and opcode != _MULTIPLY):
        return at.UNKNOWN
    if second & 0x84 != 0:  # W, L
        return at.ENCODING
    prefix, third = second & 3, (second >> 3 & 15) ^ 15
    mod, reg, rm = modrm >> 6, modrm >> 3 & 7 | (first >> 4 & 8 ^ 8), modrm & 7
    x, b = (first >> 3 & 8) ^ 8, (first >> 2 & 8) ^ 8
    after = code + 5

    # The operand in memory: base + displacement, and the index, which is a stride for tiles.
    address, stride, is_sib = 0, 0, False
    if mod != 3:
        base = rm
        if rm == 4:
            is_sib = True
            sib = get_u8(after)
            after += 1
            base = sib & 7
            index = sib >> 3 & 7 | x
            if index != 4:
                stride = _register(context, index) << (sib >> 6)
        is_relative = mod == 0 and base == 5
        if not is_relative:
            address = _register(context, base | b)
        if mod == 1:
            address += get_s8(after)
            after += 1
        elif mod == 2 or is_relative:
            address += get_i32(after)
            after += 4
            if is_relative and not is_sib:
                address += after

    if opcode == _MULTIPLY:
        if mod != 3:
            return at.ENCODING
        kind = at.TDPBUUD if prefix == _NO_PREFIX else at.TDPBUSD if prefix == _66 else at.TDPBSUD
        if prefix == _F2:
            kind = at.TDPBSSD
    elif opcode == _MOVE:
        if mod == 3 or not is_sib or prefix == _NO_PREFIX:
            return at.ENCODING
        kind = at.TILELOADDT1 if prefix == _66 else at.TILELOADD if prefix == _F2 else at.TILESTORED
    elif mod == 3:
        if prefix == _NO_PREFIX and modrm == 0xC0:
            kind = at.TILERELEASE
        elif prefix == _F2 and rm == 0:
            kind = at.TILEZERO
        else:
            return at.ENCODING
    else:
        if prefix > _66 or reg & 7 != 0:
            return at.ENCODING
        kind = at.LDTILECFG if prefix == _NO_PREFIX else at.STTILECFG
    if opcode != _MULTIPLY and third != 0:
        return at.ENCODING

    if kind == at.LDTILECFG:
        reason = _configure(thread, address + stride)
        if reason >= 0:
            return reason
    elif kind == at.STTILECFG:
        store_i32(address + stride, load_i32(thread + at.CONFIGURATION))
    elif kind == at.TILERELEASE:
        _release(thread)
    else:
        if not permitted:
            return at.NOT_PERMITTED
        if get_u8(thread + at.CONFIGURATION) == 0:
            return at.NOT_CONFIGURED
        if reg > 7 or (opcode == _MULTIPLY and (b != 0 or third > 7)):
            return at.ENCODING
        if _rows(thread, reg) == 0:
            return at.NO_TILE
        if kind == at.TILEZERO:
            _zero(thread, reg)
            _start_row(thread)
        elif opcode == _MOVE:
            if _row_bytes(thread, reg) % 4 != 0:
                return at.ODD_ROW
            if kind == at.TILESTORED:
                _store(thread, reg, address, stride)
            else:
                _load(thread, reg, address, stride)
        else:
            if reg == rm or reg == third or rm == third:
                return at.ONE_TILE
            if _rows(thread, rm) == 0 or _rows(thread, third) == 0:
                return at.NO_TILE
            sum_bytes, value_bytes = _row_bytes(thread, reg), _row_bytes(thread, rm)
            if sum_bytes % 4 != 0 or value_bytes % 4 != 0 or _row_bytes(thread, third) % 4 != 0:
                return at.ODD_ROW
            is_equal = _rows(thread, reg) == _rows(thread, rm) and sum_bytes == _row_bytes(thread, third)
            if not is_equal or value_bytes // 4 != _rows(thread, third):
                return at.SHAPES
            a_signed, b_signed = kind == at.TDPBSSD or kind == at.TDPBSUD, kind == at.TDPBSSD or kind == at.TDPBUSD
            _multiply(thread, reg, rm, third, a_signed, b_signed)

    row = get_i64(thread + at.ROW_AT)
    atomic_add(row + at.ROW_COUNTERS + 8 * kind, 1)
    put_i64(context + _RIP, after)
    return -1


@njit(**INNER)
def _handle(signal, info, context):
    if signal == at.STATE_CALL:
        put_i64(_state_word(), info)
        return
    state = get_i64(_state_word())
    if signal == _SIGSYS:
        is_for_tiles = get_i64(context + _RDI) == _ARCH_REQ_XCOMP_PERM and get_i64(context + _RSI) == _XTILEDATA
        if is_for_tiles:
            put_i64(state + at.IS_PERMITTED, 1)
        put_i64(context + _RAX, 0 if is_for_tiles else -22)  # EINVAL
        return
    thread, code = _thread_of(state), get_i64(context + _RIP)
    reason = at.THREADS_FULL
    if thread != 0 and get_i64(thread + at.ROW_AT) != 0:
        reason = _execute(thread, context, code, get_i64(state + at.IS_PERMITTED) != 0)
    if reason >= 0:
        _end(state, thread, reason, code)


def _emit_handler(builder: Builder) -> None:
    """Define the function that Linux calls, beside the one that calls this: with room for its result and its error."""
    function = builder.function
    handler = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [I64] * 3), at.HANDLER)
    within = ir.IRBuilder(handler.append_basic_block())
    within.call(function, [*(within.alloca(out.type.pointee) for out in function.args[:2]), *handler.args])
    within.ret_void()


_define_handler = operation("define_handler", types.void, (), _emit_handler, "Define `HANDLER`.")


@njit(**INNER)
def handle(signal, info, context):
    """Handle a trap; see the top of the file."""
    _define_handler()
    _handle(signal, info, context)


def main() -> None:
    directory, name = sys.argv[1:]
    link_once.install()
    code, _ = link_once.entry_object(handle, 3, INNER)
    object_file.store(Path(directory), name, code, at.HANDLER)


if __name__ == "__main__":
    main()
