"""Runs one input of a target and reports what must not happen.

    crash     an exception that is not one of the target's documented errors
    hang      more than `CPU_S` of CPU time, so that other work on the machine does not matter
    memory    more than the target's `memory_mb` at once: allocations beyond it fail, and are a finding
    leak      a descriptor stays open

A loop in C is interrupted when it returns to the interpreter; the process that fuzzes (child.py) also has a time limit
from outside.  Runs in the main thread, because it uses a timer signal.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.fuzz.target import Target

CPU_S = 1.0
ROOT = Path(__file__).resolve().parents[2]
_PAGE = resource.getpagesize()
_MAX_TRACE = 40  # lines of a stack trace in a finding


class Finding(NamedTuple):
    """Something that must not happen. Findings with the same `key` count as one."""

    kind: str
    key: str  # the kind, the error and the innermost line in the project
    text: str  # for people: the stack trace, or the amount


class _TooLong(BaseException):
    """Raised by the timer; not an `Exception`, so that code under test does not handle it."""


class Guard:
    """Checks inputs of one target. Between `arm` and `disarm` the timer's signal is in use."""

    def __init__(self, target: Target, cpu_s: float = CPU_S) -> None:
        gc.collect()  # files that earlier code left in cycles would be closed while an input runs
        self.target = target
        self.inputs = 0  # so far
        self._cpu_s = cpu_s
        self._is_running = False
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        _, self._hard = resource.getrlimit(resource.RLIMIT_DATA)
        self._previous: Any = signal.signal(signal.SIGPROF, self._on_timer)

    def close(self) -> None:
        """Give the signal back."""
        os.close(self._statm)
        signal.signal(signal.SIGPROF, self._previous)

    def check(self, data: bytes) -> Finding | None:
        """Run the target with `data`. None: nothing happened that must not."""
        self.inputs += 1
        descriptors, peak = _lowest_free_descriptor(), _peak_bytes()
        finding = self._run(data)
        if finding is None and _peak_bytes() - peak > self.target.memory_mb << 20:
            finding = Finding("memory", "memory: peak", f"more than {self.target.memory_mb} MB were in use")
        if finding is None and _lowest_free_descriptor() != descriptors:
            gc.collect()  # cycles with an error's stack trace may hold files
            if _lowest_free_descriptor() != descriptors:
                finding = Finding("leak", "leak: descriptor", "a descriptor stayed open")
        return finding

    def _run(self, data: bytes) -> Finding | None:
        bound = self._data_bytes() + (self.target.memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, self._hard))
        try:
            self._is_running = True
            signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
            self.target.run(data)
        except self.target.errors:
            return None
        except _TooLong as error:
            return _finding("hang", error)
        except MemoryError as error:
            return _finding("memory", error)
        except Exception as error:
            return _finding("crash", error)
        finally:
            self._is_running = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (self._hard, self._hard))
        return None

    def _on_timer(self, signum: int, frame: object) -> None:
        if self._is_running:
            raise _TooLong(f"more than {self._cpu_s:g} s")

    def _data_bytes(self) -> int:
        """Private writable memory of this process: what RLIMIT_DATA counts."""
        return int(os.pread(self._statm, 256, 0).split()[5]) * _PAGE


@contextlib.contextmanager
def guarded(target: Target, cpu_s: float = CPU_S) -> Iterator[Guard]:
    """A guard for the length of a block."""
    guard = Guard(target, cpu_s)
    try:
        yield guard
    finally:
        guard.close()


def _finding(kind: str, error: BaseException) -> Finding:
    where = "?"
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        # Of a loop, any line may be the one that the timer interrupts: the function is what identifies it.
        if path.is_relative_to(ROOT) and path != Path(__file__) and ".venv" not in path.parts:
            place = frame.name if kind == "hang" else f"{frame.lineno}"
            where = f"{path.relative_to(ROOT)}:{place}"
    lines = "".join(traceback.format_exception(error)).splitlines()
    return Finding(kind, f"{kind}: {type(error).__name__} at {where}", "\n".join(lines[-_MAX_TRACE:]))


def _lowest_free_descriptor() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
