"""A published model, the server it is on, and a machine that downloads it."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from pipeline.blobs.http import HttpStore
from pipeline.blobs.interface import BlobStore
from pipeline.catalog import pulled
from pipeline.catalog.entry import Entry
from shm.checkpoint import PIECE_BYTES
from stages.agent.cache.eviction import Bounds
from stages.agent.cache.model_cache import ModelCache
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.model import Arrival, Context, Loaded, download_model
from stages.agent.downloads.transfer import Limits
from tests.fleet.range_server import RangeServer

NBYTES = 11 * PIECE_BYTES + 12345  # of two parts
PLENTY = 1 << 60


class Site:
    """A published model, the server it is on, and a machine that downloads it."""

    def __init__(self, root: Path, entry: Entry, server: RangeServer, models_dir: Path) -> None:
        self.root, self.entry, self.server, self.models_dir = root, entry, server, models_dir
        self.stores: list[BlobStore] = []
        self.bounds = Bounds(0, 0)
        self.disk_free = PLENTY
        self.expected = hashlib.sha256()
        for part in range(entry.n_parts):
            self.expected.update((root / entry.part_key(part)).read_bytes())

    def context(self) -> Context:
        cache = ModelCache(self.models_dir, self.bounds, lambda path: self.disk_free)
        return Context(cache, Bandwidth(0, time.monotonic), Limits(8, 60.0))

    async def pull(
        self, *more: BlobStore, verify: bool = False, pinned: tuple[str, ...] = (), loaded: Loaded = tuple
    ) -> Arrival:
        async with HttpStore(self.server.url) as store:
            return await download_model(
                self.context(),
                self.entry,
                [store, *more],
                lambda phase, done, total: None,
                verify=verify,
                pinned=lambda: pinned,
                loaded=loaded,
            )

    def is_right(self) -> bool:
        found = (self.models_dir / f"{self.entry.digest}.bin").read_bytes()
        return hashlib.sha256(found).digest() == self.expected.digest() and pulled.is_complete(
            self.models_dir, self.entry
        )

    @property
    def unfinished(self) -> list[str]:
        return sorted(path.name for path in (self.models_dir / ".fetch").glob("*"))
