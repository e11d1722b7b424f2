"""`Arena.populate` maps the whole arena, measured by the resident memory of a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    from shm.arena import Arena

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
