"""Arenas: `populate` maps all of it, measured in a separate process; stale files are removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shm.arena import Arena, remove_stale_arenas

SCRIPT = """
import sys, threading
from pathlib import Path
from shm.arena import Arena

arena = Arena.attach(Path(sys.argv[1]), "test", 1)
def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["RssShmem"].split()[0]) << 10
before = resident()
arena.populate()
for thread in threading.enumerate():
    if thread.name == "populate":
        thread.join()
print(resident() - before, arena.buffer.nbytes)
arena.close()
arena.populate()  # a closed arena: no effect
"""


def test_a_populated_arena_is_mapped_whole_before_it_is_touched() -> None:
    path = Path("/dev/shm") / f"starling-test-arena-{id(SCRIPT)}"
    arena = Arena.create(path, "test", 1, 10 << 20, {})
    try:
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        mapped, size = map(int, done.stdout.split())
        assert mapped >= size - 4096
    finally:
        arena.close()
        arena.unlink()


def test_stale_and_partial_arenas_are_removed(tmp_path: Path) -> None:
    names = ["a.kv", "b.kv", ".b.kv.123", "b.steps", "notes.txt"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    remove_stale_arenas(tmp_path, "kv", {"a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kv", "b.steps", "notes.txt"]
