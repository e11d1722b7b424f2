"""Makes the machine of this process one with AMX: found through PYTHONPATH by every Python process of a server.

STARLING_AMX_MACHINE names the object file of the handler of traps (handler.py), and the log (layout.py).  Without it
this module does nothing, but as a program it shows whether the system permits the filter: then SIGSYS ends it, else
it ends with FORBIDDEN.

The CPU raises #UD for an AMX instruction, and Linux SIGILL, whose handler executes it.  A request of tiles by
arch_prctl is not answered by this machine's Linux: a seccomp filter turns it into SIGSYS, and the handler permits the
tiles to this process.  What Linux and LLVM report of the CPU is extended where Python reads it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib.util
import mmap
import os
import signal
import struct
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "STARLING_AMX_MACHINE"
FLAGS = ("amx_tile", "amx_int8")  # of /proc/cpuinfo
FORBIDDEN = 77  # exit code
_PROHIBITIONS = (errno.EPERM, errno.EACCES, errno.ENOSYS)  # of the filter; any other error is a fault
_SA_SIGINFO = 4
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_ARCH_X86_64, _ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM = 0xC000003E, 158, 0x1023
_ALLOW, _TRAP = 0x7FFF0000, 0x00030000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of classic BPF
# seccomp_data: the system call's number at 0, the architecture at 4, the first argument at 16.
_FILTER = b"".join(
    struct.pack("<HBBI", *instruction)
    for instruction in (
        (_LOAD, 0, 0, 4),
        (_JUMP_IF_EQUAL, 0, 5, _ARCH_X86_64),
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 3, _ARCH_PRCTL),
        (_LOAD, 0, 0, 16),
        (_JUMP_IF_EQUAL, 0, 1, _ARCH_REQ_XCOMP_PERM),
        (_RETURN, 0, 0, _TRAP),
        (_RETURN, 0, 0, _ALLOW),
    )
)
_kept: list[Any] = []  # memory and code that the handler uses: as long as this process lives


class _SignalAction(ctypes.Structure):
    """libc's `struct sigaction`."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _layout() -> ModuleType:
    """tests/amx_machine/layout.py, without the package's folder on the path."""
    spec = importlib.util.spec_from_file_location("amx_machine_layout", Path(__file__).parents[1] / "layout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _install(directory: Path, name: str, log: Path) -> None:
    """Install the handler. Raises `OSError` where the system forbids filters of system calls."""
    from pipeline.native import object_file

    layout = _layout()
    code, handler = object_file.load(directory, name)
    with log.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), layout.LOG_BYTES)
    state = mmap.mmap(-1, layout.STATE_BYTES + layout.MESSAGE_BYTES * len(layout.REASONS), flags=mmap.MAP_PRIVATE)
    texts = (f"AMX machine: {text} ({number})\n" for number, text in layout.REASONS)
    state[layout.STATE_BYTES :] = b"".join(text.encode().rjust(layout.MESSAGE_BYTES) for text in texts)
    state_at, shared_at = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (state, shared))
    libc, key = ctypes.CDLL(None, use_errno=True), ctypes.c_uint()
    if error := libc.pthread_key_create(ctypes.byref(key), None):
        raise OSError(error, "pthread_key_create")
    assert key.value < layout.KEYS, key
    struct.pack_into("<QQQ", state, layout.LOG_AT, shared_at, state_at + layout.STATE_BYTES, key.value)
    _kept.extend((code, shared, state))
    ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 3)(handler)(layout.STATE_CALL, state_at, 0)
    action = _SignalAction(handler=handler, flags=_SA_SIGINFO)
    for number in (signal.SIGILL, signal.SIGSYS):
        if libc.sigaction(int(number), ctypes.byref(action), None):
            raise OSError(ctypes.get_errno(), "sigaction")
    filter_calls(_FILTER)


def filter_calls(instructions: bytes) -> None:
    """Filter the system calls of this thread, and of those that it starts. Raises `OSError` where that is forbidden."""
    libc, program = ctypes.CDLL(None, use_errno=True), _Program(len(instructions) // 8, instructions)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def _extend_cpu(cpu: ModuleType) -> None:
    read = cpu.fields.__wrapped__
    cpu.fields.cache_clear()

    def fields() -> dict[str, str]:
        found: dict[str, str] = dict(read())
        found["flags"] = " ".join([found.get("flags", ""), *FLAGS])
        return found

    cpu.fields = functools.cache(fields)


def _extend_llvm(llvm: ModuleType) -> None:
    """LLVM compiles for, and schedules as on, the first CPU with AMX, with no other instruction than this CPU has."""
    read = llvm.get_host_cpu_features

    def get_host_cpu_features() -> Any:
        found = read()
        found.update({name.replace("_", "-"): True for name in FLAGS})
        return found

    llvm.get_host_cpu_features = get_host_cpu_features
    llvm.get_host_cpu_name = lambda: "sapphirerapids"


_EXTENDED = {"pipeline.runtime.cpu": _extend_cpu, "llvmlite.binding": _extend_llvm}


class _Finder(MetaPathFinder):
    """Finds the modules that are extended."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _EXTENDED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _EXTENDED[name](module)

            loader.exec_module = exec_module  # of this loader alone: resources of a package are found by its class
        return spec


if __name__ == "__main__":
    try:
        filter_calls(_FILTER)
    except OSError as error:
        if error.errno not in _PROHIBITIONS:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(FORBIDDEN)
    ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, 0)
elif found := os.environ.get(VARIABLE):
    _directory, _name, _log = found.split(os.pathsep)
    sys.meta_path.insert(0, _Finder())
    _install(Path(_directory), _name, Path(_log))
