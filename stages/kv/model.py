"""One model's pages as a whole: its arena, its files on disk, its manager. Files, but no sockets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from pipeline import faultpoints, paths
from pipeline.config_schema import Config, ModelConfig
from pipeline.telemetry import Metrics
from shm.arena import Arena
from shm.checkpoint import load_index
from shm.pages import KvGeometry
from stages.kv import persist, prefix
from stages.kv.adopt import open_arena
from stages.kv.manager import Manager
from stages.kv.pool import Pool
from stages.kv.prune import prune_pages, prune_sessions
from stages.kv.rows import Rows
from stages.kv.session_files import SessionFiles
from stages.kv.sessions import Sessions
from stages.kv.spill import PageStore

log = logging.getLogger("starling.kv")

SPILL_FACTOR = 4  # a spill file without a bound of its own: so many times the arena
SAVE_PAGES = 4  # copied in one go while the server runs, so that no frame waits for more
SAVE_PAGES_LAST = 64  # and at the end: some 20 ms


class ModelPages:
    """Closed until `open` has found the model's index."""

    def __init__(
        self, config: Config, model: ModelConfig, on_moved: Callable[[], object] = lambda: None
    ) -> None:
        """`on_moved` is called after each page that went to a disk or came from one."""
        self.config = config
        self.model = model
        self._on_moved = on_moved
        self.rows = Rows()
        self.digest = ""  # hex
        self.geometry: KvGeometry | None = None
        self.arena: Arena | None = None
        self.manager: Manager | None = None
        self.saved: PageStore | None = None
        self.spilled: PageStore | None = None
        self.sessions: Sessions | None = None

    def open(self, index_path: Path) -> Manager:
        """Make or adopt the arena, open the files. Raises `ArenaError`, `CheckpointError`, `OSError`."""
        index = load_index(index_path)
        config, model, hyper = self.config, self.model, index.hyper
        geometry = KvGeometry(
            hyper.n_layers, hyper.n_kv_heads, hyper.head_dim, model.page_tokens, model.kv_type
        )
        raw = bytes.fromhex(index.digest)
        path = paths.arena_dir(config) / f"{model.slug}.kv"
        budget = config.kv_cache_bytes(model)
        # The clock's ns: a generation that no earlier arena of this name has had.
        home = open_arena(path, geometry, raw, budget, time.time_ns())
        self.digest, self.geometry, self.arena = index.digest, geometry, home.arena

        if config.cache.enabled:
            saved_dir = paths.state_dir(config) / "kv"
            self.saved = self._store(saved_dir, config.cache.persist_mb << 20, persist.IN_STATE)
            if model.spill_path:
                bound = model.spill_mb << 20 or SPILL_FACTOR * budget
                self.spilled = self._store(Path(model.spill_path).expanduser(), bound, persist.IN_SPILL)
        stores = [store for store in (self.spilled, self.saved) if store is not None]
        pool = Pool(
            home.views,
            policy=config.cache.eviction_policy,
            ttl_ns=config.cache.ttl_s * 1_000_000_000,
            spill=self.spilled,
            tiers=stores,
            fault=faultpoints.point("kv", "page"),
            on_moved=self._on_moved,
        )
        if home.found is not None:
            pool.headers.forget_copies()
            pool.adopt(home.found.full, home.found.limbo)
            for store in stores:
                persist.note_copies(pool, store)
        roots = prefix.roots(raw, geometry)
        manager = Manager(
            pool, geometry.page_tokens, roots, self.rows.read, caching=config.cache.enabled, declared=False
        )
        self.manager = manager
        self.sessions = self._open_sessions(index.hyper.context_length)
        log.info(
            "KV arena stands",
            extra={
                "model": model.name, "pages": pool.total, "page_bytes": geometry.page_bytes,
                "is_adopted": home.found is not None, "cached": pool.cached, "limbo": pool.leased,
                "torn": home.found.torn if home.found else 0,
                "on_disk": sum(len(store) for store in stores),
            },
        )  # fmt: skip
        return manager

    def _store(self, directory: Path, max_bytes: int, residency: int) -> PageStore | None:
        """A file of pages; None, with a word in the log, when it cannot be used: the server runs on."""
        assert self.geometry is not None
        if not max_bytes:
            return None
        path = persist.store_path(directory, self.model.slug, self.digest, self.geometry)
        what = persist.identity(self.digest, self.geometry)
        try:
            for old in persist.remove_old(directory, self.model.slug, path):
                log.info("%s is of an older version of the model and was removed", old)
            name = "saved" if residency == persist.IN_STATE else "spill"
            return PageStore(path, what, self.geometry.page_bytes, max_bytes, residency, name=name)
        except OSError as error:
            log.error("%s cannot be used, pages are not kept there: %s", path, error.strerror or error)
            return None

    def _open_sessions(self, context_length: int) -> Sessions | None:
        """The sessions of this version of the model; None when their files cannot be used."""
        assert self.geometry is not None
        directory = self.sessions_dir
        roots = prefix.roots(bytes.fromhex(self.digest), self.geometry)
        try:
            return Sessions(
                SessionFiles(directory), roots, self.geometry.page_tokens,
                self.config.max_sessions(self.model), self.model.max_sequence_length or context_length,
            )  # fmt: skip
        except OSError as error:
            log.error("%s cannot be used, there are no sessions: %s", directory, error.strerror or error)
            return None

    @property
    def sessions_dir(self) -> Path:
        """Of this version of the model."""
        return paths.state_dir(self.config) / "sessions" / f"{self.model.slug}-{self.digest[:12]}"

    # -------------------------------------------------------------- now and then

    def expire(self) -> None:
        """Drop what has not been used for too long."""
        if self.manager is not None:
            self.manager.pool.expire()
        if self.sessions is not None:
            self.sessions.expire()
            self.free_sessions()

    def free_sessions(self) -> None:
        """Free the pages of sessions that are gone."""
        if self.sessions is not None and self.manager is not None and self.sessions.freed:
            self.manager.pool.discard(self.sessions.freed)
            self.sessions.freed.clear()

    def save_proven(self) -> bool:
        """A few pages that have proven themselves to the state directory. True: there may be more."""
        if self.manager is None or self.saved is None:
            return False
        return persist.save_proven(self.manager.pool, self.saved, SAVE_PAGES) == SAVE_PAGES

    def save_recent(self) -> bool:
        """At a clean stop: a few of the most recent pages. True: there may be more."""
        if self.manager is None or self.saved is None:
            return False
        return persist.save_recent(self.manager.pool, self.saved, SAVE_PAGES_LAST) > 0

    def compact(self) -> bool:
        """Close a few holes in one of the files. True: there are more."""
        return any(store.compact(SAVE_PAGES) for store in self.stores())

    def close(self) -> None:
        """Let go of everything; the arena's file stays for a successor."""
        for store in (self.saved, self.spilled):
            if store is not None:
                store.close()
        self.rows.detach()
        if self.arena is not None:
            self.arena.close()

    # -------------------------------------------------------------- figures

    def stores(self) -> list[PageStore]:
        return [store for store in (self.spilled, self.saved) if store is not None]


def prune(models: list[ModelPages], now: float) -> None:
    """Remove files of versions and models that are not served any more. All `models` are open."""
    config = models[0].config
    slugs = [model.model.slug for model in models]
    spills = [Path(model.spill_path).expanduser() for model in config.models if model.spill_path]
    gone = prune_pages([paths.state_dir(config) / "kv", *spills], slugs, now)
    over = prune_sessions(
        paths.state_dir(config) / "sessions", [model.sessions_dir for model in models], slugs, now
    )
    try:
        for path in (*gone, *over):
            log.info("%s is of a model or version that is not served and was removed", path)
    except OSError as error:
        log.warning("old files cannot be removed: %s", error)


def measure(models: list[ModelPages], metrics: Metrics) -> None:
    """Enter the figures of all models."""
    allocated = resident = evictions = failures = restored = spilled_pages = returned = 0
    on_disk = {"spilled": 0, "saved": 0}
    for model in models:
        if model.manager is None or model.geometry is None:
            continue
        pool = model.manager.pool
        counters, page_bytes, name = pool.counters, model.geometry.page_bytes, model.model.name
        allocated += pool.total * page_bytes
        resident += (pool.cached + pool.leased) * page_bytes
        for kind, store in (("spilled", model.spilled), ("saved", model.saved)):
            if store is not None:
                on_disk[kind] += len(store) * page_bytes
                holes = store.hole_bytes / store.file_bytes
                metrics.set("starling_kv_cache_fragmentation_ratio", holes, name, kind)
                returned += store.counters.returned_bytes
        metrics.set(
            "starling_kv_cache_fragmentation_ratio", model.manager.fragmentation(), name, "arena"
        )
        spilled_pages += counters.spilled
        evictions += counters.evictions
        failures += counters.checksum_failures + sum(s.counters.damaged for s in model.stores())
        restored += counters.restored
        metrics.set("starling_kv_cache_hits_total", counters.hits, name)
        metrics.set("starling_kv_cache_misses_total", counters.misses, name)
        for state in ("free", "cached", "leased"):
            metrics.set("starling_kv_cache_pages", getattr(pool, state), name, state)
        if model.sessions is not None:
            metrics.set("starling_sessions", len(model.sessions), name)
        for seconds in counters.restore_s:
            metrics.observe("starling_kv_cache_restore_seconds", seconds)
        counters.restore_s.clear()
    for state, value in (("allocated", allocated), ("resident", resident), *on_disk.items()):
        metrics.set("starling_kv_cache_bytes", value, state)
    metrics.set("starling_kv_cache_evictions_total", evictions)
    metrics.set("starling_kv_cache_checksum_failures_total", failures)
    metrics.set("starling_kv_cache_spilled_pages_total", spilled_pages)
    metrics.set("starling_kv_cache_restored_pages_total", restored)
    metrics.set("starling_kv_cache_compacted_bytes_total", returned)
