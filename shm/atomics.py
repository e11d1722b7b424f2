"""Atomic operations, futexes and clocks for jitted code, on words given by their address.

Numba intrinsics: call them inside `@njit` functions.  An address is an i64 (`array.ctypes.data`), 8-byte aligned for
the 64-bit operations.  Processes that share the words may map them at different addresses: futexes here are the
shared kind.  Plain Python uses `shm/words.py`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_SYS_FUTEX = 202
_SYS_SENDTO, _DONTWAIT_NOSIGNAL = 44, 0x4040
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1


def _pointer(builder, address, to):
    return builder.inttoptr(address, to.as_pointer())


@intrinsic
def load_acquire(typingctx, address):
    """Load the u64 at `address`, as i64; no later memory access moves before it."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0], _I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Store an i64; no earlier memory access moves after it."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0], _I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """Add to the i64 at `address` and return the value before. Sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchange(typingctx, address, value):
    """Store an i64 and return the value before. A full fence."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", _pointer(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_exchange(typingctx, address, expected, value):
    """Store an i64 if the word at `address` is `expected`; returns the value before. Sequentially consistent."""

    def codegen(context, builder, signature, args):
        word = _pointer(builder, args[0], _I64)
        return builder.extract_value(builder.cmpxchg(word, args[1], args[2], "seq_cst", "seq_cst"), 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def prefetch_line(typingctx, address):
    """Prefetch the cache line at an address (i64) into all levels; an invalid address is harmless."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *[ir.IntType(32)] * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        flags = [ir.Constant(ir.IntType(32), n) for n in (0, 3, 1)]  # read, into all levels, data
        builder.call(function, [builder.inttoptr(args[0], ir.IntType(8).as_pointer()), *flags])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def pause(typingctx):
    """Hint to the core that this is a spin loop (PAUSE)."""

    def codegen(context, builder, signature, args):
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
        )
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def cycles(typingctx):
    """Return the time stamp counter (constant rate, same on all cores), as i64."""

    def codegen(context, builder, signature, args):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I64, []), "llvm.readcyclecounter")
        return builder.call(function, [])

    return types.int64(), codegen


def _syscall(builder, *args):
    """Call libc's `syscall`: an external symbol, so that Numba can cache the calling code."""
    function_type = ir.FunctionType(_I64, [_I64], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, function_type, "syscall")
    return builder.call(function, [a if isinstance(a, ir.Value) else _I64(a) for a in args])


@intrinsic
def futex_wait(typingctx, address, expected, timeout_ns):
    """Sleep while the u32 at `address` equals `expected`, at most `timeout_ns` (below one second)."""

    def codegen(context, builder, signature, args):
        timeout = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        builder.store(ir.Constant(ir.ArrayType(_I64, 2), [0, 0]), timeout)
        builder.store(args[2], builder.gep(timeout, [_I32(0), _I32(1)]))
        return _syscall(
            builder,
            _SYS_FUTEX,
            args[0],
            _FUTEX_WAIT,
            builder.and_(args[1], _I64(0xFFFFFFFF)),
            builder.ptrtoint(timeout, _I64),
            0,
            0,
        )

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def futex_wake(typingctx, address):
    """Wake all waiters of the u32 at `address`; returns their number."""

    def codegen(context, builder, signature, args):
        return _syscall(builder, _SYS_FUTEX, args[0], _FUTEX_WAKE, 0x7FFFFFFF, 0, 0, 0)

    return types.int64(types.int64), codegen


@intrinsic
def send_nothing(typingctx, fd):
    """Send an empty datagram over the connected socket `fd` without blocking; negative when it cannot be sent now."""

    def codegen(context, builder, signature, args):
        return _syscall(builder, _SYS_SENDTO, args[0], 0, 0, _DONTWAIT_NOSIGNAL, 0, 0)

    return types.int64(types.int64), codegen


@intrinsic
def monotonic_ns(typingctx):
    """Return CLOCK_MONOTONIC in ns, as `time.monotonic_ns()` does."""

    def codegen(context, builder, signature, args):
        # libc's `clock_gettime` reads the clock without entering the kernel.
        now = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        function_type = ir.FunctionType(_I32, [_I32, now.type])
        function = cgutils.get_or_insert_function(builder.module, function_type, "clock_gettime")
        builder.call(function, [_I32(1), now])
        seconds = builder.load(builder.gep(now, [_I32(0), _I32(0)]))
        nanoseconds = builder.load(builder.gep(now, [_I32(0), _I32(1)]))
        return builder.add(builder.mul(seconds, _I64(1_000_000_000)), nanoseconds)

    return types.int64(), codegen
