"""Compiles the entries of a model, in parallel the first time, and gives their addresses.

    python -m stages.worker.kernels.build f16 matmul       compile one entry into the cache

Knows which entries there are; `linkage.py` says what an entry is.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from stages.worker.kernels import attention, features, forward, matmul, sampling, turns
from stages.worker.kernels import context as c
from stages.worker.kernels.linkage import entry_address

Progress = Callable[[str, int, int], None]  # entry, done, of


class Entry(NamedTuple):
    name: str
    word: int  # of the context; -1: called from Python
    arguments: int
    get: Callable[[str], Any]  # the jitted function for a kv type


# The longest to compile first.
ENTRIES = (
    Entry("matmul", c.MATMUL, 11, lambda kv_type: matmul.matmul),
    Entry("attend", c.ATTEND, attention.ENTRY_ARGUMENTS, lambda kv_type: attention.ENTRIES[kv_type]),
    Entry("turns", -1, turns.ENTRY_ARGUMENTS, lambda kv_type: turns.take_turns),
    Entry("draw", c.DRAW, sampling.ENTRY_ARGUMENTS, lambda kv_type: sampling.draw),
    Entry("embed", c.EMBED_ROW, 5, lambda kv_type: matmul.embed_row),
)
PHASES = forward.PHASES


def _marker(entry: Entry, kv_type: str) -> Any:
    name = f"{entry.name}-{kv_type if entry.name == 'attend' else 'any'}.compiled"
    return features.cache_dir() / name


def compile_entry(entry: Entry, kv_type: str) -> int:
    """Compile (or load) one entry in this process; its address."""
    address = entry_address(entry.get(kv_type), entry.arguments)
    _marker(entry, kv_type).touch()
    return address


def is_compiled(kv_type: str) -> bool:
    """Whether everything is in the cache."""
    return all(_marker(e, kv_type).exists() for e in ENTRIES)


def build(kv_type: str, jobs: int = 0, progress: Progress = lambda name, done, of: None) -> None:
    """Compile what the cache lacks, `jobs` at a time (0: as many as there are CPUs) in processes of their own.

    Raises `RuntimeError` with a compiler's last words when one fails.
    """
    waiting = [e for e in ENTRIES if not _marker(e, kv_type).exists()]
    running: dict[str, subprocess.Popen[bytes]] = {}
    done = len(ENTRIES) - len(waiting)
    jobs = jobs or len(os.sched_getaffinity(0))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0).name
                command = [sys.executable, "-m", "stages.worker.kernels.build", kv_type, name]
                running[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                words = process.communicate()[1].decode(errors="replace").strip()
                del running[name]
                if process.returncode:
                    raise RuntimeError(f"compiling kernel {name!r} failed ({process.returncode}): {words[-2000:]}")
                done += 1
                progress(name, done, len(ENTRIES))
            time.sleep(0.02)
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def addresses(kv_type: str) -> dict[int, int]:
    """The entries' addresses in this process, by word of the context."""
    return {e.word: compile_entry(e, kv_type) for e in ENTRIES if e.word >= 0}


def main(arguments: list[str]) -> None:
    """This process lives for one entry: looking for cycles among a compiler's objects costs an eighth of the time."""
    gc.disable()
    kv_type, name = arguments
    compile_entry(next(e for e in ENTRIES if e.name == name), kv_type)


if __name__ == "__main__":
    main(sys.argv[1:])
