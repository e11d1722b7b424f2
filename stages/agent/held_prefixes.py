"""The prefixes that engines hold in their KV caches, as orchestrators ask for them: names of pages, and their changes.

Names are read from the page headers in an engine's arenas (shm/pages.py), which the engine keeps up to date.  A header
that is being written may give a name that is no page's: an estimate is a little wrong, until the next look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from pathlib import Path

import numpy as np

from pipeline.fleet.bodies import PrefixUpdate
from shm.arena import ArenaError
from shm.pages import HEADER, PAGE_FULL, attach_kv, unpack_ordinal

MAX_PUBLISHED = 16_384  # pages of an engine, the most recently used ones: 128 KiB
MAX_REMOVED = 16_384  # removals that are remembered; who has missed more gets all names


def read_names(folder: Path) -> set[int]:
    """Names of the full pages in the KV arenas of `folder`, at most `MAX_PUBLISHED`."""
    names: set[int] = set()
    for path in sorted(folder.glob("*.kv")):
        try:
            arena, views, _ = attach_kv(path)
        except (ArenaError, OSError):
            continue  # it is being made or removed
        names.update(_names_in(views.headers))
        del views
        arena.close()
    return set(sorted(names)[:MAX_PUBLISHED]) if len(names) > MAX_PUBLISHED else names


def _names_in(headers: np.ndarray) -> list[int]:
    """`headers`: (n_pages, PAGE_HEADER) u8."""
    fields = headers.view(HEADER)[:, 0]
    # Of a model with layer groups, those of the first group: the others have the same names.
    rows = np.flatnonzero((fields["state"] == PAGE_FULL) & (unpack_ordinal(fields["ordinal"])[1] == 0))
    if len(rows) > MAX_PUBLISHED:
        rows = rows[np.argpartition(fields["last_use"][rows], -MAX_PUBLISHED)[-MAX_PUBLISHED:]]
    halves = np.frombuffer(fields["hash"][rows].tobytes(), "<u8").reshape(-1, 2)
    found: list[int] = halves[:, 0].tolist()
    return found


class PrefixLog:
    """What one start of an engine has held. Changes are numbered."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self._number = 0
        self._held: dict[int, int] = {}  # the change that added each name, in order
        self._removed: deque[tuple[int, int]] = deque()  # change and name, in order
        self._forgotten = 0  # removals up to this change are not remembered

    def __len__(self) -> int:
        return len(self._held)

    def observe(self, names: Collection[int]) -> None:
        """The engine holds these now."""
        current = set(names)
        gone, new = self._held.keys() - current, current - self._held.keys()
        if not gone and not new:
            return
        self._number += 1
        for name in gone:
            del self._held[name]
            self._removed.append((self._number, name))
        while len(self._removed) > MAX_REMOVED:
            self._forgotten = self._removed.popleft()[0]
        self._held.update(dict.fromkeys(new, self._number))

    def since(self, number: int) -> PrefixUpdate:
        """What has changed after the change `number`; 0: everything. Everything, too, if it is not remembered."""
        if not self._forgotten <= number <= self._number:
            number = 0
        added = []
        for name, at in reversed(self._held.items()):
            if at <= number:
                break
            added.append(name)
        removed = []
        for at, name in reversed(self._removed) if number else ():
            if at <= number:
                break
            removed.append(name)
        return PrefixUpdate(after=number, number=self._number, added=_packed(added), removed=_packed(removed))


def _packed(names: list[int]) -> bytes:
    return np.array(names, "<u8").tobytes()
