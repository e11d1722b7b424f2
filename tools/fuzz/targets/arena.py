"""Arenas that a restarted stage finds: the header and the geometry in it.

byte 0   bit 0: the rest is a whole file. Otherwise it is the geometry (msgpack) of an arena with a correct header
         bit 1: a step ring; otherwise a KV arena
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec

from shm import pages, step_ring
from shm.arena import HEADER_BYTES, Arena, ArenaError
from shm.pages import KvGeometry
from shm.step_ring import StepsGeometry
from tools.fuzz.parts import scratch, written
from tools.fuzz.target import Target

GEOMETRY = KvGeometry(1, 1, 16, 16, "f16")
STEPS = StepsGeometry(2, 2, 2, 32, 2)
META_BYTES_AT, META_AT = 96, 100  # in a header
MAX_META = HEADER_BYTES - META_AT


@cache
def _empty(kind: str, layout: int, nbytes: int) -> bytes:
    path = scratch() / "made"
    Arena.create(path, kind, layout, nbytes, {}).close()
    return path.read_bytes()


def _file(is_steps: bool, geometry: bytes) -> bytes:
    """An arena whose header is right for any geometry."""
    if is_steps:
        raw = _empty(step_ring.KIND, step_ring.LAYOUT, step_ring.steps_bytes(STEPS))
    else:
        raw = _empty(pages.KIND, pages.LAYOUT, pages.kv_arena_bytes(GEOMETRY, 1))
    geometry = geometry[:MAX_META]
    head = raw[:META_BYTES_AT] + len(geometry).to_bytes(4, "little") + geometry
    return head + raw[len(head) :]


def run(data: bytes) -> None:
    """Attach to the arena and read its views."""
    flags, rest = (data[:1] or b"\0")[0], data[1:]
    is_steps = bool(flags & 2)
    if not flags & 1:
        rest = _file(is_steps, rest)
    path = written("arena", rest)
    if is_steps:
        arena, steps, _ = step_ring.attach_steps(path)
        total = sum(int(view.nbytes) for view in steps)
    else:
        arena, kv, _ = pages.attach_kv(path)
        total = kv.headers.nbytes + kv.pages.nbytes
    assert total <= len(rest)
    arena.close()


def seeds() -> Iterator[bytes]:
    """Good geometries, and whole files."""
    meta = msgspec.msgpack.encode({**GEOMETRY._asdict(), "pages": 1, "numerics": pages.NUMERICS})
    steps = msgspec.msgpack.encode(STEPS.as_meta())
    yield b"\0" + meta
    yield b"\2" + steps
    yield b"\1" + _file(False, meta)[:8192]
    yield b"\1STRL"


TARGET = Target(
    run,
    seeds,
    errors=(ArenaError,),
    modules=("shm.arena", "shm.pages", "shm.step_ring"),
    max_bytes=8192,
)
