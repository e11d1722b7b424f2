"""A machine with AMX, for tests on a CPU without it: the compiled tile instructions themselves are executed.

    with machine() as amx:
        subprocess.run(..., env=os.environ | amx.environment | {"STARLING_ISA": "amx"})
        amx.threads()

A CPU without AMX refuses a tile instruction, and Linux sends SIGILL.  In every Python process with this environment a
handler of that signal executes the instruction on tiles of the thread, and ends the process where an AMX CPU would do
so (layout.REASONS).  So what runs is what was compiled: encodings, registers, strides, configurations in memory, and
the order of all of it.  It says nothing about speed: a trap takes microseconds.

layout.py    memory that the handler shares with Python
handler.py   the handler, compiled by Numba to an object file, which needs no compiler where it is loaded
site/        sitecustomize.py, which installs the handler and extends what Python reads of the CPU

Where filters of system calls are forbidden, as in some containers, there is no such machine (`refusal`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.runtime import cpu
from tests.amx_machine import layout

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"
FORBIDDEN = 77  # exit code of `sitecustomize.py` where filters are
NEEDS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}  # of the kernels of AMX, without tiles


class Thread(NamedTuple):
    """What the log has of a thread that has executed a tile instruction."""

    thread: int
    process: int
    reason: str  # why it was ended; "" if it was not
    address: int  # of the instruction that ended it
    code: bytes  # the first 8 bytes of that
    instructions: dict[str, int]  # how often, by name; none that were not executed


class Machine(NamedTuple):
    """A machine with AMX."""

    environment: dict[str, str]  # of its processes
    log: Path

    def threads(self) -> list[Thread]:
        """All threads of all processes that have executed tile instructions until now."""
        data, found = self.log.read_bytes(), []
        for row in range(0, layout.LOG_BYTES, layout.ROW_BYTES):
            thread, process, reason, address = struct.unpack_from("<4q", data, row)
            code = data[row + layout.ROW_CODE :][:8]
            counts = struct.unpack_from(f"<{len(layout.INSTRUCTIONS)}q", data, row + layout.ROW_COUNTERS)
            if thread:
                executed = {name: n for name, n in zip(layout.INSTRUCTIONS, counts, strict=True) if n}
                why = layout.REASONS[reason][1] if reason >= 0 else ""
                found.append(Thread(thread, process, why, address, code, executed))
        return found

    def clear(self) -> None:
        """Forget all threads. No process of the machine may live."""
        self.log.write_bytes(bytes(layout.LOG_BYTES))


def has_amx() -> bool:
    """Whether this CPU executes tile instructions itself: then no trap comes, and no log."""
    return _flags() >= cpu.AMX_FLAGS


def is_possible() -> bool:
    """Whether this CPU lacks AMX and has the other instructions that its kernels use."""
    return not has_amx() and _flags() >= NEEDS


@functools.cache
def refusal() -> str:
    """Why this system lets no machine be emulated; "" if it does.

    Raises `RuntimeError` if that cannot be said: then the emulation has a fault, for which no test may be skipped.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SITE / "sitecustomize.py")], stderr=subprocess.PIPE, text=True
    )
    if -done.returncode == signal.SIGSYS:
        return ""
    if done.returncode != FORBIDDEN:
        raise RuntimeError(
            f"the program that tries filters of system calls ended with {done.returncode}: {done.stderr}"
        )
    return f"needs filters of system calls, and this system refuses them: {done.stderr.strip()}"


def _flags() -> set[str]:
    return set(cpu.fields().get("flags", "").split())


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    """A machine with AMX. The handler is compiled at the first use of these sources."""
    from stages.worker.kernels import build, features

    directory = features.cache_dir()
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    name = f"amx-machine-{sources.hexdigest()[:16]}"
    if not (directory / f"{name}.symbol").exists():
        command = [sys.executable, "-m", "tests.amx_machine.handler", str(directory), name]
        subprocess.run(command, cwd=ROOT, env=build.COMPILER | os.environ, check=True)
    with tempfile.TemporaryDirectory(prefix="amx-machine-") as folder:
        log = Path(folder) / "log"
        log.write_bytes(bytes(layout.LOG_BYTES))
        paths = os.pathsep.join((str(SITE), str(ROOT)))
        variable = os.pathsep.join((str(directory), name, str(log)))
        yield Machine({"PYTHONPATH": paths, "STARLING_AMX_MACHINE": variable}, log)
