"""An engine with the kv stage's own manager, and a worker that compares every position that attention reads.

For models whose layers all have a sliding window, and for those in which only the layers of some groups have one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.protocol import messages as m
from shm import prefix_hash
from shm.layer_groups import ONE_GROUP, LayerGroups
from shm.pages import PAGE_HEADER, KvArena, first_read
from shm.step_ring import SERIAL, Steps, StepsGeometry
from stages.kv.lease import Denial, LeaseClaim
from stages.kv.manager import Manager
from stages.kv.pool.arena import scan
from stages.kv.pool.page_headers import PageHeaders
from stages.kv.pool.page_pool import PagePool
from tests.kv.world import DIGEST, GEOMETRY

from .peers import Pages, Worker, mix
from .world import World

WINDOW = 40
PAGE_TOKENS = 16
CONTEXT = 1400


class ManagerKv:
    """The kv stage without its sockets. Its arena is that of the worker; it outlives a restart."""

    def __init__(self, steps: Steps, pages: Pages, groups: LayerGroups) -> None:
        self.steps = steps
        self.groups = groups
        self.arena = KvArena(
            np.zeros((pages.total, PAGE_HEADER), np.uint8), pages.states.view(np.uint8).reshape(pages.total, -1)
        )
        self.refused: list[str] = []
        self.now = 0
        self.fresh()

    def clock_ns(self) -> int:
        self.now += 1
        return self.now

    def fresh(self) -> None:
        """As after a restart: only the arena is left."""
        pool = PagePool(self.arena, clock_ns=self.clock_ns)
        found = scan(PageHeaders(self.arena.headers), len(self.arena.pages))
        pool.table.adopt(found.full, found.unclaimed)
        root_hash_of = prefix_hash.root_hasher(DIGEST, GEOMETRY)
        self.manager = Manager(pool, PAGE_TOKENS, root_hash_of, self._read, is_reconciled=False, groups=self.groups)

    def _read(self, row: int, serial: int, begin: int, end: int) -> np.ndarray | None:
        same = int(self.steps.row_ints[row, SERIAL]) == serial
        return self.steps.tokens[row, begin:end].copy() if same else None

    @property
    def leases(self) -> dict[str, Any]:
        return dict(self.manager.leases)

    def ready(self) -> m.KvReady:
        total = len(self.arena.pages)
        return m.KvReady("m", "", "", total, PAGE_TOKENS, 1, self.manager.is_reconciled, generation=1)

    def handle(self, frame: m.Frame) -> m.Frame | None:
        answer = self._handle(frame)
        self.manager.check()
        return answer

    def _handle(self, frame: Any) -> m.Frame | None:
        manager = self.manager
        if isinstance(frame, m.Reconcile):
            self.refused += manager.reconcile(LeaseClaim(*lease) for lease in frame.leases)
            return self.ready()
        if isinstance(frame, m.Commit):
            manager.commit(frame.sequence, frame.n_tokens, frame.unread)
            return None
        if isinstance(frame, m.Release):
            manager.release(frame.sequence, frame.n_tokens)
            return None
        if isinstance(frame, m.Acquire):
            tokens = self.steps.tokens[frame.row, : frame.n_tokens].copy()
            serial = int(self.steps.row_ints[frame.row, SERIAL])
            how = frame.row, serial, frame.salt, frame.sharable, frame.window, frame.ahead
            found = manager.acquire(frame.sequence, tokens, frame.want_tokens, *how)
        else:
            found = manager.extend(frame.sequence, frame.want_tokens)
        if isinstance(found, Denial):
            return m.Denied(frame.id, frame.sequence, *found, frame.model)
        return m.Granted(frame.id, frame.sequence, found.pages, found.cached_tokens, frame.model)


class WindowWorker(Worker):
    """Reads what attention reads: every position from `first_read` on must hold its own state, in each group's page.

    Groups without a window read all positions.
    """

    def __init__(self, steps: Steps, geometry: StepsGeometry, pages: Pages, groups: LayerGroups) -> None:
        # To the base class a row's table is that of the first group.
        super().__init__(steps._replace(tables=steps.tables[:, :: groups.n_groups]), geometry, pages)
        self._tables = steps.tables
        self._groups = groups

    def _entry(self, slot: int, row: int, start: int, count: int, *rest: int) -> None:
        states, tokens, size, groups = self.pages.states, self.s.tokens[row], self.pages.page_tokens, self._groups
        tables = [self._tables[row, group :: groups.n_groups] for group in range(groups.n_groups)]
        state, low = 0, first_read(start, WINDOW)
        for p in range(start + count):
            state = mix(state, int(tokens[p]))
            for group, table in enumerate(tables):
                if p < start and (p >= low or group < groups.full):
                    found = int(states[table[p // size], p % size])
                    assert found == state ^ group, f"position {p} in group {group} of a step from {start}"
                elif p >= start and group:
                    states[table[p // size], p % size] = state ^ group
        super()._entry(slot, row, start, count, *rest)


def windowed(pages: int, groups: LayerGroups = ONE_GROUP, **options: Any) -> World:
    """A world with a window in all layers, or in those of some groups."""
    world = World(
        pages=pages,
        page_tokens=PAGE_TOKENS,
        context=CONTEXT,
        batch=2,
        max_step_tokens=32,
        speculate=4,
        groups=groups,
        **options,
    )
    world.kv = ManagerKv(world.steps, world.pages, groups)  # type: ignore[assignment]
    world.engine.leases.frames.clear()
    world.engine.leases.is_up = False
    period, world.worker = world.period, WindowWorker(world.steps, world.geometry, world.pages, groups)
    world.worker.period = period
    world.window = WINDOW
    world.attach()
    world.kv_up()
    return world
