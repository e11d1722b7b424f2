"""The list of entries (entries.py), their compilation in parallel processes, and their addresses.

    python -m stages.worker.kernels.build f16 PID      compile the entries named on stdin, one a line

PID is the parent process, with which the compiler ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from pipeline.runtime import process
from stages.worker.kernels import attention, dequantize_row, features, matmul, rank_loop, sampler
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.entries import entry_address

Progress = Callable[[str, int, int], None]  # entry, done, of


class Entry(NamedTuple):
    """A jitted function that is compiled apart."""

    name: str
    word: int  # of the parameter block; -1: called from Python
    arguments: int
    get: Callable[[str], Any]  # the jitted function for a kv type


# Those that take longest to compile come first.
ENTRIES = (
    Entry("matmul", pb.MATMUL, matmul.ENTRY_ARGUMENTS, lambda kv_type: matmul.matmul),
    Entry("attend", pb.ATTEND, attention.ENTRY_ARGUMENTS, lambda kv_type: attention.ENTRIES[kv_type]),
    Entry("steps", -1, rank_loop.ENTRY_ARGUMENTS, lambda kv_type: rank_loop.run_steps),
    Entry("draw", pb.DRAW, sampler.ENTRY_ARGUMENTS, lambda kv_type: sampler.draw),
    Entry("embed", pb.EMBED_ROW, dequantize_row.ENTRY_ARGUMENTS, lambda kv_type: dequantize_row.dequantize_row),
)
# Kernels write out vectors and unrolled loops: LLVM's further passes take a tenth of the time and gain nothing.
COMPILER = {"NUMBA_OPT": "2", "NUMBA_LOOP_VECTORIZE": "0"}


def _marker(entry: Entry, kv_type: str) -> Any:
    name = f"{entry.name}-{kv_type if entry.name == 'attend' else 'any'}.compiled"
    return features.cache_dir() / name


def compile_entry(entry: Entry, kv_type: str) -> int:
    """Compile one entry in this process, or load it from the cache; returns its address."""
    address = entry_address(entry.get(kv_type), entry.arguments)
    _marker(entry, kv_type).touch()
    return address


def is_compiled(kv_type: str) -> bool:
    """Whether all entries for a type of KV cache are in the cache."""
    return all(_marker(e, kv_type).exists() for e in ENTRIES)


class _Compiler:
    """A process that compiles one entry after the other: shared callees are typed once."""

    def __init__(self, kv_type: str) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stages.worker.kernels.build", kv_type, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            env=COMPILER | os.environ,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self.answers = self._process.stdin, self._process.stdout
        self.entry = ""

    def begin(self, entry: str) -> None:
        self.entry = entry
        self._stdin.write(entry + "\n")
        self._stdin.flush()

    def finish(self) -> None:
        """Read the answer to `begin`. Raises `RuntimeError` when the process has ended instead."""
        if self.answers.readline().strip() != self.entry:
            code = self._process.wait()
            self._words.seek(0)
            words = self._words.read().decode(errors="replace").strip()
            raise RuntimeError(f"compiling kernel {self.entry!r} failed ({code}): {words[-2000:]}")

    def close(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self.answers.close()
        self._words.close()


def build(kv_type: str, jobs: int = 0, progress: Progress = lambda name, done, of: None) -> None:
    """Compile the entries that the cache lacks in `jobs` processes (0: one a CPU).

    Raises `RuntimeError` with the end of a compiler's stderr when one fails.
    """
    waiting = [e.name for e in ENTRIES if not _marker(e, kv_type).exists()]
    done = len(ENTRIES) - len(waiting)
    jobs = min(len(waiting), jobs or len(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as busy:
        for _ in range(jobs):
            compiler = _Compiler(kv_type)
            stack.callback(compiler.close)
            compiler.begin(waiting.pop(0))
            busy.register(compiler.answers, selectors.EVENT_READ, compiler)
        while busy.get_map():
            for key, _ in busy.select():
                compiler = key.data
                compiler.finish()
                done += 1
                progress(compiler.entry, done, len(ENTRIES))
                if waiting:
                    compiler.begin(waiting.pop(0))
                else:
                    busy.unregister(compiler.answers)


def addresses(kv_type: str) -> dict[int, int]:
    """The entries' addresses in this process, by word of the parameter block."""
    return {e.word: compile_entry(e, kv_type) for e in ENTRIES if e.word >= 0}


def main(arguments: list[str]) -> None:
    """Compile entries until stdin ends, without garbage collection, which would cost an eighth of the time."""
    kv_type, parent = arguments
    process.die_with_parent(int(parent))
    gc.disable()
    entries = {e.name: e for e in ENTRIES}
    for line in sys.stdin:
        compile_entry(entries[line.strip()], kv_type)
        print(line.strip(), flush=True)
        gc.collect()  # the next one starts from little


if __name__ == "__main__":
    main(sys.argv[1:])
