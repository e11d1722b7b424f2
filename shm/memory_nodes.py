"""Memory nodes (NUMA): parts of a machine's memory, each near to some of its cores, usually one for each socket.

The kernel takes a page of memory from the node of the core that touches or reserves it first.  So memory is placed by
a thread that may run only on the cores beside its node; no system call that containers forbid is needed.  Where a node
has no room, the kernel takes another one: placement changes the speed, never a byte.

A machine with one node, or of which the kernel says nothing, has one entry in `of`, and nothing is placed.
`STARLING_NODES` names another folder in place of the kernel's, for tests of machines that are emulated.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from shm.arena import Arena

FOLDER = Path("/sys/devices/system/node")
TURN_BYTES = 2 << 20  # of memory that nodes take in turns, unless a buffer is small: a huge page

Part = tuple[int, Sequence[int]]  # end of a part, in bytes of an arena's contents, and the CPUs beside its node


def of(cpus: Iterable[int], folder: Path | None = None) -> list[list[int]]:
    """These CPUs by node, each node's in the given order; nodes of none of them are left out.

    CPUs that the kernel assigns to no node are put to the first one.
    """
    folder = folder or Path(os.environ.get("STARLING_NODES") or FOLDER)
    wanted = list(dict.fromkeys(cpus))
    places: dict[int, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for path in folder.glob("node[0-9]*"):
            number = int(path.name.removeprefix("node"))
            places |= dict.fromkeys(_parse((path / "cpulist").read_text()), number)
    first = min(places.values(), default=0)
    found: dict[int, list[int]] = {}
    for cpu in wanted:
        found.setdefault(places.get(cpu, first), []).append(cpu)
    return [found[number] for number in sorted(found)]


def _parse(text: str) -> list[int]:
    """The CPUs of a list such as "0-3,8". Raises `ValueError`."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            begin, _, end = part.partition("-")
            found += range(int(begin), int(end or begin) + 1)
    return found


def stay_on(cpus: Collection[int]) -> None:
    """Restrict this thread to these CPUs; all may be forbidden by now, then it stays where it is."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


def in_turns(begin: int, end: int, nodes: Sequence[Sequence[int]], turn_bytes: int = TURN_BYTES) -> list[Part]:
    """The bytes `begin` .. `end` - 1 in parts that the nodes take in turns, whatever was placed before them."""
    ends = [*range((begin // turn_bytes + 1) * turn_bytes, end, turn_bytes), end]
    return [(at, nodes[(at - 1) // turn_bytes % len(nodes)]) for at in ends]


def reserve(arena: Arena, parts: Sequence[Part], huge: bool = False) -> bool:
    """Reserve the memory of an arena, each part beside the CPUs that it names; for the owner.

    `huge`, and what is returned: as of `Arena.reserve`.  Raises `OSError`: then nothing changed.
    """
    from concurrent.futures import ThreadPoolExecutor  # of a worker alone, and every process imports this module

    before = arena.reserved
    try:
        with ThreadPoolExecutor(1, "place") as pool:  # a thread of its own, because it moves from node to node
            return pool.submit(_reserve, arena, parts, huge).result()
    except OSError:
        arena.give_back(before)
        raise


def _reserve(arena: Arena, parts: Sequence[Part], huge: bool) -> bool:
    is_granted = True
    for end, cpus in parts:
        stay_on(cpus)
        is_granted &= arena.reserve(end, huge)
    return is_granted
