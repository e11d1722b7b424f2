"""One version of a model: its arena, its page files and its lease manager. Files, but no sockets.

While a new version replaces an old one both are loaded, and only one of them has the page files open.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.api.key_file import key_path
from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.faults import points
from pipeline.models import worker_groups
from pipeline.models.arena_sizes import most_tokens
from shm.arena import Arena
from shm.checkpoint import Index, load_index
from shm.pages import KvGeometry
from shm.prefix_hash import PageHash, root_hasher
from stages.kv.manager import Manager
from stages.kv.pool.arena import OpenedArena, open_arena
from stages.kv.pool.older_version import OlderVersion
from stages.kv.pool.page_pool import PagePool
from stages.kv.pool.token_rows import TokenRows
from stages.kv.sessions.model_sessions import ModelSessions
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_store import SessionStore
from stages.kv.sessions.session_thread import SessionThread
from stages.kv.storage import persist
from stages.kv.storage.disk_store import DiskPageStore
from stages.kv.storage.prune import prune_pages, prune_sessions
from stages.kv.storage.threaded_store import ThreadedPageStore

log = logging.getLogger("starling.kv")

SPILL_FACTOR = 4  # bound of a spill file without a configured one: this many times the arena
SAVE_PAGES = 4  # saved or moved in one call while the server runs, so that frames do not wait longer
SAVE_PAGES_AT_STOP = 64  # saved in one call at a clean stop: about 20 ms
OPEN_WAIT_S = 0.5  # at the start: for page files, whose pages are then found by the first requests
CLOSE_WAIT_S = 1.0  # at the end: for the thread of each page file


class ReservedArena(NamedTuple):
    """The slow part of opening a model: its index is read, its arena exists."""

    checkpoint: Index
    geometry: KvGeometry
    opened: OpenedArena


class ModelPages:
    """Closed until `open` has the model's index. `model.name` is the version's own name."""

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        on_moved: Callable[[], object] = lambda: None,
        name: str = "",
        model_sessions: ModelSessions | SessionThread | None = None,
        wake: Callable[[], object] = lambda: None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`on_moved` is called after each page that was copied and each extent of memory, `wake` by threads of disks.

        `name`: of the model that this is a version of; "" when it has only one version.  `clock_ns`: ns since 1970, the
        same clock after a restart.
        """
        self.config = config
        self.clock_ns = clock_ns
        self.model = model
        self.name = name or model.name
        self.slug = self.name.replace("/", "--")  # in the names of files that outlive this version
        directory = paths.state_dir(config) / "sessions"
        self.model_sessions = ModelSessions(directory, self.slug) if model_sessions is None else model_sessions
        self._on_moved = on_moved
        self.wake = wake
        self.rows = TokenRows()
        self.digest = self.tokenizer = ""  # hex
        self.most_tokens = 0  # of a sequence
        self.geometry: KvGeometry | None = None
        self.arena: Arena | None = None
        self.manager: Manager | None = None
        self.has_files = False
        self.older_versions: list[OlderVersion] = []
        self.saved: ThreadedPageStore | None = None
        self.spilled: ThreadedPageStore | None = None
        self.missing_stores: set[Path] = set()  # page files that could not be opened
        self._unmarked: set[Path] = set()  # page files whose pages are not noted in the page headers yet

    @property
    def sessions(self) -> SessionStore | None:
        """The sessions that can continue with this version; None also if a thread has them."""
        sessions = self.model_sessions
        return sessions.store(self.tokenizer) if isinstance(sessions, ModelSessions) else None

    # -------------------------------------------------------------- opening

    def reserve(self, index_path: Path, n_pages: int = 0) -> ReservedArena:
        """Create or adopt the arena. Changes nothing in this object, so that a thread may call it.

        n_pages: that get memory now, of which there is as little as possible at first.
        Raises `ArenaError`, `CheckpointError`, `OSError`.
        """
        index = load_index(index_path)
        model = self.model
        geometry = KvGeometry.of(index.hyper, model.page_tokens, model.kv_type)
        path = paths.arena_dir(self.config) / f"{model.slug}.kv"
        # A generation from the clock: no earlier arena at this path has had it.
        cpus = worker_groups.cores_of_ranks(self.config, model, self.name)
        budget, generation = self.config.kv_cache_bytes(model), time.time_ns()
        opened = open_arena(path, geometry, bytes.fromhex(index.digest), budget, generation, cpus)
        opened.memory.grow(n_pages)
        return ReservedArena(index, geometry, opened)

    def open(self, index_path: Path, reserved: ReservedArena | None = None, is_alone: bool = True) -> Manager:
        """Create or adopt the arena; with `is_alone` open the page files and the sessions too.

        Raises `ArenaError`, `CheckpointError`, `OSError`.
        """
        index, geometry, opened = reserved or self.reserve(index_path)
        config = self.config
        self.digest, self.geometry, self.arena = index.digest, geometry, opened.arena
        self.arena.populate()
        self.tokenizer, self.most_tokens = index.tokenizer_digest, most_tokens(config, self.model, index.hyper)
        pool = PagePool(
            opened.views,
            policy=config.cache.eviction_policy,
            ttl_ns=config.cache.ttl_s * 1_000_000_000,
            clock_ns=self.clock_ns,
            memory=opened.memory,
            fault=points.fault_point("kv", "page"),
            on_moved=self._on_moved,
            name=self.model.name,
        )
        if opened.adopted is not None:
            pool.headers.clear_copies()
            pool.table.adopt(opened.adopted.full, opened.adopted.unclaimed)
        root_hash_of = root_hasher(bytes.fromhex(index.digest), geometry)
        manager = Manager(
            pool,
            geometry.page_tokens,
            root_hash_of,
            self.rows.read,
            caching=config.cache.enabled,
            is_reconciled=False,
            groups=geometry.groups,
        )
        self.manager = manager
        if is_alone:
            self.open_files()
            deadline = time.monotonic() + OPEN_WAIT_S
            for store in self.stores():
                store.wait_opened(max(0.0, deadline - time.monotonic()))
            self.poll_stores()
            self.open_sessions()
        log.info(
            "KV arena opened",
            extra={
                "model": self.model.name,
                "pages": pool.total,
                "page_bytes": geometry.page_bytes,
                "reserved": pool.table.reserved,
                "is_adopted": opened.adopted is not None,
                "cached": pool.cached,
                "unclaimed": pool.leased,
                "torn": opened.adopted.n_torn if opened.adopted else 0,
                "on_disk": sum(len(store) for store in self.stores()),
            },
        )
        return manager

    def open_files(self) -> None:
        """Open the files of saved and spilled pages that are not open; from now on this version writes them.

        Threads open them: `poll_stores` completes it.
        """
        assert self.manager is not None
        config, model = self.config, self.model
        self.has_files = True
        if not config.cache.enabled:
            return
        if self.saved is None:
            saved_dir = paths.state_dir(config) / "kv"
            self.saved = self._open_store(saved_dir, config.cache.persist_mb << 20, persist.IN_STATE)
        if model.spill_path and self.spilled is None:
            max_bytes = model.spill_mb << 20 or SPILL_FACTOR * config.kv_cache_bytes(model)
            self.spilled = self._open_store(expand_user(model.spill_path), max_bytes, persist.IN_SPILL)
        self._set_sources()

    def retry_files(self) -> None:
        """Open the page files and sessions that could not be used; the disk may work again."""
        if self.has_files and self.missing_stores:
            self.open_files()
        if self.model_sessions.is_missing and self.tokenizer:
            self.open_sessions()

    def _open_store(self, directory: Path, max_bytes: int, residency: int) -> ThreadedPageStore | None:
        """Begin to open a file of pages; None if its bound is 0."""
        assert self.geometry is not None
        if not max_bytes:
            return None
        slug, page_bytes = self.slug, self.geometry.page_bytes
        path = persist.store_path(directory, slug, self.digest, self.geometry)
        identity = persist.file_identity(self.digest, self.geometry)
        name = "saved" if residency == persist.IN_STATE else "spill"

        def open_file() -> DiskPageStore:
            for old in persist.remove_old_versions(directory, slug, path):
                log.info("a file of an older version of the model was removed", extra={"path": str(old)})
            return DiskPageStore(path, identity, page_bytes, max_bytes, residency, wall_ns=self.clock_ns, name=name)

        self._unmarked.add(path)
        return ThreadedPageStore(path, residency, open_file, self.wake, lambda page: self._unmark_copy(page, residency))

    def _complete_opening(self, store: ThreadedPageStore) -> None:
        """A thread has opened a page file, or could not, which is logged: the server runs without it."""
        path = store.path
        if store.error is not None:
            if path not in self.missing_stores:
                self.missing_stores.add(path)
                log.error(
                    "a page file cannot be used: pages are not saved there",
                    extra={"path": str(path), "reason": str(store.error)},
                )
            if store is self.saved:
                self.saved = None
            else:
                self.spilled = None
            self._set_sources()
        elif store.is_open and path in self._unmarked:
            self._unmarked.discard(path)
            if path in self.missing_stores:
                self.missing_stores.discard(path)
                log.warning("a page file can be used again", extra={"path": str(path)})
            if self.manager is not None:
                persist.mark_copies(self.manager.pool, store)

    def _unmark_copy(self, page_hash: PageHash, residency: int) -> None:
        """A page that was queued for a page file could not be written."""
        page = self.manager.pool.table.get_cached_page(page_hash) if self.manager is not None else None
        if self.manager is not None and page is not None:
            self.manager.pool.headers.unmark_copy(page, residency)

    def open_sessions(self) -> None:
        """This version serves: sessions continue with it and have its page hashes."""
        assert self.geometry is not None
        has_key_file = key_path(paths.state_dir(self.config)).exists()
        n_tenants = max(1, len(self.config.tenants), 2 * has_key_file)  # keys may be added while the server runs
        self.model_sessions.open(
            self.tokenizer,
            root_hasher(bytes.fromhex(self.digest), self.geometry),
            self.geometry.page_tokens,
            SessionBounds(
                self.config.max_sessions(self.model),
                self.most_tokens,
                self.config.sessions_per_tenant(self.model, n_tenants),
                n_tenants,
                self.config.cache.session_mb << 20,
            ),
        )

    # -------------------------------------------------------------- sources of pages

    def use_older_versions(self, older: list[ModelPages]) -> None:
        """Copy missing pages from those of the `older` versions that have the same file and geometry."""
        own = (self.digest, self.geometry)
        managers = [pages.manager for pages in older if (pages.digest, pages.geometry) == own]
        self.older_versions = [OlderVersion(manager.pool) for manager in managers if manager is not None]
        self._set_sources()

    def _set_sources(self) -> None:
        """Tell the pool where to look for missing pages: the fastest source first."""
        if self.manager is not None and self.config.cache.enabled:
            pool = self.manager.pool
            pool.spill = self.spilled
            pool.older_versions, pool.stores = self.older_versions, self.stores()

    def stores(self) -> list[ThreadedPageStore]:
        """The open page files: the one of evicted pages first, which a missing page was in last."""
        return [store for store in (self.spilled, self.saved) if store is not None]

    def poll_stores(self) -> None:
        """Take the results of the page files' threads."""
        for store in self.stores():
            store.poll()
            if store.path in self._unmarked or store.error is not None:
                self._complete_opening(store)

    @property
    def is_writing(self) -> bool:
        """Whether pages wait to be written."""
        return any(store.is_busy for store in self.stores())

    # -------------------------------------------------------------- periodic work

    def expire(self) -> None:
        """Drop pages that were not used for the time to live."""
        if self.manager is not None:
            self.manager.pool.expire()

    def save_some(self) -> bool:
        """Save a few pages to the state directory: proven ones, or any while no sequence runs. True: call again."""
        if self.manager is None or self.saved is None:
            return False
        pool = self.manager.pool
        if persist.save_proven(pool, self.saved, SAVE_PAGES) == SAVE_PAGES:
            return True
        # One at a time, so that a new request does not wait for the disk.
        return persist.save_idle(pool, self.saved, 1) == 1

    def note_uses(self) -> None:
        """Add uses of pages since the last call to the records of their copies."""
        if self.manager is not None:
            persist.note_uses(self.manager.pool, self.stores())

    def save_recent(self) -> bool:
        """At a clean stop: save some of the most recently used pages. True: call again."""
        if self.manager is None or self.saved is None:
            return False
        return persist.save_recent(self.manager.pool, self.saved, SAVE_PAGES_AT_STOP) > 0

    def compact(self) -> bool:
        """Move a few pages into holes of their file. True: call again."""
        return any(store.compact(SAVE_PAGES) for store in self.stores())

    # -------------------------------------------------------------- closing

    def close_files(self) -> list[ThreadedPageStore]:
        """Close the page files, for another version to open. Idempotent. Returns those whose threads may still run."""
        self.has_files = False
        self.missing_stores.clear()
        self._unmarked.clear()
        stores, self.saved, self.spilled, self.older_versions = self.stores(), None, None, []
        self._set_sources()
        for store in stores:
            store.close()
        return stores

    def close(self) -> None:
        """Close everything; the arena's file stays for a successor. Idempotent."""
        for store in self.close_files():
            store.join(CLOSE_WAIT_S)
        self.rows.detach()
        if self.arena is not None:
            self.arena.close()


def prune(models: list[ModelPages], sessions: Mapping[str, ModelSessions | SessionThread], now: float) -> None:
    """Remove files of versions and models that are not served. All `models` are open.

    `sessions`: of all models that were loaded since the start, by name; those that were unloaded are kept in memory.
    """
    if not models:
        return
    config = models[0].config
    served = [model.slug for model in models]
    known = {name.replace("/", "--") for name in sessions} | {model.slug for model in config.models}
    loadable = known.union(served, paths.pulled_names())
    every = (*config.models, *(one.model for one in models))
    spills = [expand_user(model.spill_path) for model in every if model.spill_path]
    old_pages = prune_pages([paths.state_dir(config) / "kv", *spills], loadable, now)
    in_use = [path for one in sessions.values() for path in one.directories]
    old_sessions = prune_sessions(paths.state_dir(config) / "sessions", in_use, served, loadable, now)
    try:
        for path in (*old_pages, *old_sessions):
            log.info("a file of a model or version that is not served was removed", extra={"path": str(path)})
    except OSError as error:
        log.warning("old files cannot be removed", extra={"reason": str(error)})
