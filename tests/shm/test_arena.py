"""Arenas: `populate` maps all of it, measured in a separate process; stale files are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shm import arena as arena_module
from shm import pages, step_ring
from shm.arena import Arena, ArenaError, remove_stale_arenas
from shm.pages import KvGeometry
from shm.step_ring import StepsGeometry

SCRIPT = """
import sys, threading
from pathlib import Path
from shm.arena import Arena

arena = Arena.attach(Path(sys.argv[1]), "test", 1)
def resident():
    # Page by page: the kernel adds up RssShmem of /proc/self/status for each CPU, and may be some pages behind.
    total, is_arena = 0, False
    for line in open("/proc/self/smaps"):
        name, *values = line.split()
        if not name.endswith(":"):
            is_arena = values[-1] == sys.argv[1]
        elif is_arena and name == "Rss:":
            total += int(values[0]) << 10
    return total
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


def test_a_closed_arena_keeps_no_memory_for_those_that_refer_to_it(tmp_path: Path) -> None:
    path = tmp_path / "test"
    arena = Arena.create(path, "test", 1, 1 << 20, {}, reserved=4096)
    assert str(path) in Path("/proc/self/maps").read_text()
    reserved = arena.reserved
    arena.close()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert (arena.reserved, arena.is_closed) == (reserved, True)


def test_the_memory_of_a_closed_arena_is_free_at_once(tmp_path: Path) -> None:
    """Its successor may need it, so the thread that will map it must not keep it."""
    path = tmp_path / "m.kv"
    Arena.create(path, "test", 1, 1 << 20, {}).close()
    arena = Arena.attach(path, "test", 1)
    arena.populate()
    arena.close()
    del arena
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_an_arena_whose_file_was_replaced_or_removed_is_not_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    first = Arena.create(path, "test", 1, 4096, {})
    attached = Arena.attach(path, "test", 1)
    assert [arena.is_in_place for arena in (first, attached)] == [True, True]
    second = Arena.create(path, "test", 1, 4096, {})
    assert [arena.is_in_place for arena in (first, attached, second)] == [False, False, True]
    attached.close()
    second.unlink()
    assert [arena.is_in_place for arena in (first, attached, second)] == [False, False, False]
    first.close()
    second.close()


def test_stale_and_partial_arenas_are_removed(tmp_path: Path) -> None:
    names = ["a.kv", "b.kv", ".b.kv.123", "b.steps", "notes.txt"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    remove_stale_arenas(tmp_path, "kv", {"a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kv", "b.steps", "notes.txt"]


def replace_geometry(path: Path, geometry: bytes) -> None:
    """Write another geometry into an arena's header, which gives its length."""
    raw = bytearray(path.read_bytes())
    raw[96:100] = len(geometry).to_bytes(4, "little")
    raw[100 : 100 + len(geometry)] = geometry
    path.write_bytes(raw)


STEPS = StepsGeometry(2, 2, 2, 32, 2)
KV = KvGeometry(1, 1, 16, 16, "f16")
KV_META: dict[str, Any] = {**KV._asdict(), "pages": 1, "numerics": pages.NUMERICS}


@pytest.mark.parametrize(
    "geometry",
    [
        b"\xc1",
        b"\x91\xa1\xff",
        b"\x80",
        b"\x01",
        msgspec.msgpack.encode({**STEPS._asdict(), "max_rows": "x"}),
        msgspec.msgpack.encode({**STEPS._asdict(), "max_rows": float("inf")}),
        msgspec.msgpack.encode({**STEPS._asdict(), "max_rows": -1}),
        msgspec.msgpack.encode({**STEPS._asdict(), "max_rows": 1 << 62}),
    ],
)
def test_a_step_ring_of_unusable_geometry_is_refused(tmp_path: Path, geometry: bytes) -> None:
    path = tmp_path / "m.steps"
    arena, _ = step_ring.create_steps(path, STEPS, bytes(32))
    arena.close()
    step_ring.attach_steps(path)[0].close()
    replace_geometry(path, geometry)
    with pytest.raises(ArenaError, match=r"m\.steps"):
        step_ring.attach_steps(path)


@pytest.mark.parametrize(
    "changes",
    [{"pages": 1 << 62}, {"pages": -1}, {"pages": float("inf")}, {"n_layers": -5}, {"head_dim": "x"}, {"kv_type": []}],
)
def test_a_kv_arena_of_unusable_geometry_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "m.kv"
    arena, _ = pages.create_kv(path, KV, 1, bytes(32), 1)
    arena.close()
    pages.attach_kv(path)[0].close()
    replace_geometry(path, msgspec.msgpack.encode({**KV_META, **changes}))
    with pytest.raises(ArenaError, match=r"m\.kv|head_dim|kv_type"):
        pages.attach_kv(path)


def test_the_file_of_a_dead_process_is_removed_before_memory_is_reserved(tmp_path: Path) -> None:
    """The file system may not have room for both."""
    arena = Arena.create(tmp_path / "a.act", "test", 1, 4096, {})
    arena.close()
    (tmp_path / ".a.act.123").write_bytes(b"half of an arena")
    with pytest.raises(ArenaError, match=r"needs [0-9,]+ bytes but .* has [0-9,]+ free"):
        Arena.create(tmp_path / "a.act", "test", 1, 1 << 50, {})
    assert list(tmp_path.iterdir()) == []


def test_an_arena_that_cannot_be_created_names_file_and_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArenaError, match=r"file/a\.act cannot be created: File exists"):
        Arena.create(tmp_path / "file" / "a.act", "test", 1, 4096, {})


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_thread_that_populates_stays_on_its_cores_unless_others_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    cores, ended = sorted(os.sched_getaffinity(0)), threading.Event()
    path = Path("/dev/shm") / f"starling-test-arena-cores-{os.getpid()}"
    arena = Arena.create(path, "test", 1, 1 << 20, {})

    def look(reference: weakref.ref[Arena], _offset: int) -> bool:
        if reference() is arena:  # not of the thread of an earlier test, which has waited until now
            seen.append(sorted(os.sched_getaffinity(0)))
            ended.set()
        return False

    monkeypatch.setattr(arena_module, "_populate_slice", look)
    monkeypatch.setattr(arena_module, "_POPULATE_AFTER_S", 0.0)
    try:
        os.sched_setaffinity(0, cores[:1])
        for given in ((), cores):
            ended.clear()
            arena_module.populate([arena], given)
            assert ended.wait(60.0)
    finally:
        os.sched_setaffinity(0, cores)
        arena.close()
        arena.unlink()
    assert seen == [cores[:1], cores]
