"""The KV manager of an in-process engine: the scheduler's requests for pages, answered at once.

It owns one model's KV arena and answers frames with the server's own `stages.kv.manager`, without sockets, spill
files, saved pages or sessions: all of those change speed only, never an output.
"""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.protocol import messages as m
from shm.pages import KvGeometry
from shm.prefix_hash import root_hasher
from stages.kv.lease import Grant
from stages.kv.manager import Manager
from stages.kv.pool.arena import open_arena
from stages.kv.pool.page_pool import PagePool
from stages.kv.pool.token_rows import TokenRows


class LocalKv:
    """The pages of one model in an arena of its own at `path`.

    `views` are the arena's headers and pages, `pool` has the counters and the numbers of free, cached and leased
    pages.
    """

    def __init__(
        self, path: Path, geometry: KvGeometry, digest: bytes, budget_bytes: int, *, policy: str, caching: bool
    ) -> None:
        """`budget_bytes` bounds the arena's file; without `caching` prompts share no pages.

        Raises `ArenaError` when not one page fits or the file system is too small.
        """
        opened = open_arena(path, geometry, digest, budget_bytes, time.time_ns())
        self.geometry, self.views = geometry, opened.views
        self.pool = PagePool(opened.views, policy=policy, memory=opened.memory)
        self._arena = opened.arena
        self._rows = TokenRows()
        root_hash_of = root_hasher(digest, geometry)
        self._manager = Manager(
            self.pool, geometry.page_tokens, root_hash_of, self._rows.read, caching=caching, groups=geometry.groups
        )

    def attach_rows(self, steps_path: Path, digest: bytes) -> None:
        """Read the tokens of running sequences from the scheduler's steps arena at `steps_path`."""
        self._rows.attach(steps_path, digest)

    def answer(self, frame: m.Frame) -> m.Granted | m.Denied | None:
        """Carry out one frame of the scheduler; returns the answer that it expects, if any."""
        match frame:
            case m.Acquire():
                known = self._rows.known(frame.row, frame.n_tokens)
                if known is None:
                    return self._denied(frame, fits=False, needed=0)
                tokens, serial = known
                found = self._manager.acquire(
                    frame.sequence,
                    tokens,
                    frame.want_tokens,
                    frame.row,
                    serial,
                    frame.salt,
                    window=frame.window,
                    ahead=frame.ahead,
                )
            case m.Extend():
                found = self._manager.extend(frame.sequence, frame.want_tokens)
            case m.Commit():
                self._manager.commit(frame.sequence, frame.n_tokens, frame.unread)
                return None
            case m.Release():
                self._manager.release(frame.sequence, frame.n_tokens)
                return None
            case _:
                raise TypeError(f"{type(frame).__name__} is not a request for pages")
        if isinstance(found, Grant):
            return m.Granted(frame.id, frame.sequence, found.pages, found.cached_tokens)
        return self._denied(frame, found.fits, found.needed)

    def _denied(self, frame: m.Acquire | m.Extend, fits: bool, needed: int) -> m.Denied:
        pool = self.pool
        return m.Denied(frame.id, frame.sequence, fits, needed, pool.free + pool.cached, pool.total)

    def ready(self, model: str, digest: str) -> m.KvReady:
        """The frame that gives the scheduler the arena's size."""
        g = self.geometry
        return m.KvReady(model, digest, "", self.pool.total, g.page_tokens, g.page_bytes, generation=1)

    def state(self, model: str) -> m.KvState:
        """The frame that tells the scheduler how many pages are free."""
        pool = self.pool
        return m.KvState(model, pool.total, pool.free, pool.cached, pool.leased, self.geometry.page_bytes)

    def check(self) -> None:
        """Raises `AssertionError` when the accounts of the pages do not agree; for tests."""
        self._manager.check()

    def close(self) -> None:
        """Unmap the arenas."""
        self._rows.detach()
        self._arena.close()
