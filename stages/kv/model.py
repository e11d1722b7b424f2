"""One version of a model as a whole: its arena, its files on disk, its manager. Files, but no sockets.

Two versions may be there at once while one takes the other's place; then only one of them has the files.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.faults import points
from pipeline.observe.metrics import Metrics
from shm.arena import Arena
from shm.checkpoint import Index, load_index
from shm.pages import KvGeometry
from stages.kv.manager import Manager
from stages.kv.pool import prefix_hash
from stages.kv.pool.arena import Home, open_arena
from stages.kv.pool.page_pool import Pool
from stages.kv.pool.token_rows import Rows
from stages.kv.pool.version_source import Sibling
from stages.kv.sessions.session_store import Sessions
from stages.kv.sessions.version_sessions import Book
from stages.kv.storage import persist
from stages.kv.storage.prune import prune_pages, prune_sessions
from stages.kv.storage.spill import PageStore

log = logging.getLogger("starling.kv")

SPILL_FACTOR = 4  # a spill file without a bound of its own: so many times the arena
SAVE_PAGES = 4  # copied in one go while the server runs, so that no frame waits for more
SAVE_PAGES_LAST = 64  # and at the end: some 20 ms


class Reserved(NamedTuple):
    """What takes time about opening a model: its index read, its arena there."""

    checkpoint: Index
    geometry: KvGeometry
    home: Home


class ModelPages:
    """Closed until `open` has found the model's index. `model.name` is the instance's own name."""

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        on_moved: Callable[[], object] = lambda: None,
        name: str = "",
        book: Book | None = None,
    ) -> None:
        """`on_moved` is called after each page that went to a disk or came from one.

        `name`: of the model that this is a version of, "" when it has no other one.
        """
        self.config = config
        self.model = model
        self.name = name or model.name
        self.slug = self.name.replace("/", "--")  # of files that outlive this version
        self.book = Book(paths.state_dir(config) / "sessions", self.slug) if book is None else book
        self._on_moved = on_moved
        self.rows = Rows()
        self.digest = self.tokenizer = ""  # hex
        self.context_length = 0
        self.geometry: KvGeometry | None = None
        self.arena: Arena | None = None
        self.manager: Manager | None = None
        self.has_files = False
        self._siblings: list[Sibling] = []
        self.saved: PageStore | None = None
        self.spilled: PageStore | None = None

    @property
    def sessions(self) -> Sessions | None:
        """Those that this version can go on with."""
        return self.book.store(self.tokenizer)

    def reserve(self, index_path: Path) -> Reserved:
        """Make or adopt the arena. Changes nothing here, so that a thread may do it.

        Raises `ArenaError`, `CheckpointError`, `OSError`.
        """
        index = load_index(index_path)
        model, hyper = self.model, index.hyper
        geometry = KvGeometry(hyper.n_layers, hyper.n_kv_heads, hyper.head_dim, model.page_tokens, model.kv_type)
        path = paths.arena_dir(self.config) / f"{model.slug}.kv"
        # The clock's ns: a generation that no earlier arena of this name has had.
        home = open_arena(
            path, geometry, bytes.fromhex(index.digest), self.config.kv_cache_bytes(model), time.time_ns()
        )
        return Reserved(index, geometry, home)

    def open(self, index_path: Path, reserved: Reserved | None = None, is_alone: bool = True) -> Manager:
        """Make or adopt the arena; with `is_alone` open the files and the sessions too.

        Raises `ArenaError`, `CheckpointError`, `OSError`.
        """
        index, geometry, home = reserved or self.reserve(index_path)
        config = self.config
        raw = bytes.fromhex(index.digest)
        self.digest, self.geometry, self.arena = index.digest, geometry, home.arena
        self.arena.populate()
        self.tokenizer, self.context_length = index.tokenizer_digest, index.hyper.context_length
        pool = Pool(
            home.views,
            policy=config.cache.eviction_policy,
            ttl_ns=config.cache.ttl_s * 1_000_000_000,
            fault=points.fault_point("kv", "page"),
            on_moved=self._on_moved,
        )
        if home.found is not None:
            pool.headers.forget_copies()
            pool.adopt(home.found.full, home.found.limbo)
        roots = prefix_hash.roots(raw, geometry)
        manager = Manager(
            pool, geometry.page_tokens, roots, self.rows.read, caching=config.cache.enabled, declared=False
        )
        self.manager = manager
        if is_alone:
            self.open_files()
            self.open_sessions()
        log.info(
            "KV arena stands",
            extra={
                "model": self.model.name,
                "pages": pool.total,
                "page_bytes": geometry.page_bytes,
                "is_adopted": home.found is not None,
                "cached": pool.cached,
                "limbo": pool.leased,
                "torn": home.found.torn if home.found else 0,
                "on_disk": sum(len(store) for store in self.stores()),
            },
        )
        return manager

    def open_files(self) -> None:
        """From now on the files of saved and spilled pages are this version's."""
        assert self.manager is not None
        config, model, pool = self.config, self.model, self.manager.pool
        self.has_files = True
        if not config.cache.enabled:
            return
        saved_dir = paths.state_dir(config) / "kv"
        self.saved = self._store(saved_dir, config.cache.persist_mb << 20, persist.IN_STATE)
        if model.spill_path:
            bound = model.spill_mb << 20 or SPILL_FACTOR * config.kv_cache_bytes(model)
            self.spilled = self._store(Path(model.spill_path).expanduser(), bound, persist.IN_SPILL)
        # In this order: what was evicted last is looked for first.
        self._arrange()
        for store in self.stores():
            persist.note_copies(pool, store)

    def share(self, older: list[ModelPages]) -> None:
        """Take pages from other versions of the same file, until this is called without them."""
        mine = (self.digest, self.geometry)
        fit = [one for one in older if (one.digest, one.geometry) == mine and one.manager is not None]
        self._siblings = [Sibling(one.manager.pool) for one in fit if one.manager is not None]
        self._arrange()

    def _arrange(self) -> None:
        """Where the pool looks for missing pages, the nearest place first."""
        if self.manager is not None and self.config.cache.enabled:
            self.manager.pool.spill = self.spilled
            self.manager.pool.tiers = [*self._siblings, *self.stores()]

    def open_sessions(self) -> None:
        """This version serves: sessions go on with it, and name its pages."""
        assert self.geometry is not None
        self.book.open(
            self.tokenizer,
            prefix_hash.roots(bytes.fromhex(self.digest), self.geometry),
            self.geometry.page_tokens,
            self.config.max_sessions(self.model),
            self.model.max_sequence_length or self.context_length,
        )

    def _store(self, directory: Path, max_bytes: int, residency: int) -> PageStore | None:
        """A file of pages; None, with a word in the log, when it cannot be used: the server runs on."""
        assert self.geometry is not None
        if not max_bytes:
            return None
        path = persist.store_path(directory, self.slug, self.digest, self.geometry)
        what = persist.identity(self.digest, self.geometry)
        try:
            for old in persist.remove_old(directory, self.slug, path):
                log.info("%s is of an older version of the model and was removed", old)
            name = "saved" if residency == persist.IN_STATE else "spill"
            return PageStore(path, what, self.geometry.page_bytes, max_bytes, residency, name=name)
        except OSError as error:
            log.error("%s cannot be used, pages are not kept there: %s", path, error.strerror or error)
            return None

    # -------------------------------------------------------------- now and then

    def expire(self) -> None:
        """Drop what has not been used for too long."""
        if self.manager is not None:
            self.manager.pool.expire()

    def save_some(self) -> bool:
        """A few pages to the state directory: that have proven themselves, or any while nothing runs.

        True: there may be more.
        """
        if self.manager is None or self.saved is None:
            return False
        pool = self.manager.pool
        if persist.save_proven(pool, self.saved, SAVE_PAGES) == SAVE_PAGES:
            return True
        # One at a time: whoever comes now should not have to wait for a disk.
        return persist.save_resting(pool, self.saved, 1) == 1

    def save_recent(self) -> bool:
        """At a clean stop: a few of the most recent pages. True: there may be more."""
        if self.manager is None or self.saved is None:
            return False
        return persist.save_recent(self.manager.pool, self.saved, SAVE_PAGES_LAST) > 0

    def compact(self) -> bool:
        """Close a few holes in one of the files. True: there are more."""
        return any(store.compact(SAVE_PAGES) for store in self.stores())

    def close_files(self) -> None:
        """Idempotent. What is saved there stays for another version that is the same."""
        self.has_files = False
        stores, self.saved, self.spilled, self._siblings = self.stores(), None, None, []
        self._arrange()
        for store in stores:
            store.close()

    def close(self) -> None:
        """Let go of everything; the arena's file stays for a successor."""
        self.close_files()
        self.rows.detach()
        if self.arena is not None:
            self.arena.close()

    # -------------------------------------------------------------- figures

    def stores(self) -> list[PageStore]:
        return [store for store in (self.spilled, self.saved) if store is not None]


def prune(models: list[ModelPages], now: float) -> None:
    """Remove files of versions and models that are not served any more. All `models` are open."""
    if not models:
        return
    config = models[0].config
    slugs = [model.slug for model in models]
    spills = [Path(model.model.spill_path).expanduser() for model in models if model.model.spill_path]
    gone = prune_pages([paths.state_dir(config) / "kv", *spills], slugs, now)
    in_use = [path for model in models for path in model.book.directories]
    over = prune_sessions(paths.state_dir(config) / "sessions", in_use, slugs, now)
    try:
        for path in (*gone, *over):
            log.info("%s is of a model or version that is not served and was removed", path)
    except OSError as error:
        log.warning("old files cannot be removed: %s", error)


class Past:
    """What versions that are gone have counted."""

    def __init__(self) -> None:
        self.totals: Counter[tuple[str, ...]] = Counter()  # by family and labels

    def add(self, model: ModelPages) -> None:
        self.totals.update(_counts(model))


def _counts(model: ModelPages) -> Counter[tuple[str, ...]]:
    if model.manager is None:
        return Counter()
    counters, stores = model.manager.pool.counters, model.stores()
    return Counter(
        {
            ("starling_kv_cache_hits_total", model.name): counters.hits,
            ("starling_kv_cache_misses_total", model.name): counters.misses,
            ("starling_kv_cache_evictions_total",): counters.evictions,
            ("starling_kv_cache_checksum_failures_total",): counters.checksum_failures
            + sum(store.counters.damaged for store in stores),
            ("starling_kv_cache_disk_errors_total",): sum(store.counters.errors for store in stores),
            ("starling_kv_cache_spilled_pages_total",): counters.spilled,
            ("starling_kv_cache_restored_pages_total",): counters.restored,
            ("starling_kv_cache_compacted_bytes_total",): sum(s.counters.returned_bytes for s in stores),
        }
    )


def measure(models: list[ModelPages], metrics: Metrics, past: Past | None = None, names: Iterable[str] = ()) -> None:
    """Enter the figures of all models; of a model those of its versions together. `names`: all ever known."""
    names = {*names, *(model.name for model in models)}
    counts: Counter[tuple[str, ...]] = Counter(past.totals if past is not None else ())
    levels: Counter[tuple[str, ...]] = Counter()
    levels.update({("starling_kv_cache_pages", name, s): 0 for name in names for s in ("free", "cached", "leased")})
    levels.update({("starling_kv_cache_bytes", s): 0 for s in ("allocated", "resident", "spilled", "saved")})
    levels.update({("starling_sessions", name): 0 for name in names})
    for model in models:
        if model.manager is None or model.geometry is None:
            continue
        counts.update(_counts(model))
        pool, page_bytes = model.manager.pool, model.geometry.page_bytes
        levels["starling_kv_cache_bytes", "allocated"] += pool.total * page_bytes
        levels["starling_kv_cache_bytes", "resident"] += (pool.cached + pool.leased) * page_bytes
        for kind, store in (("spilled", model.spilled), ("saved", model.saved)):
            if store is not None:
                levels["starling_kv_cache_bytes", kind] += len(store) * page_bytes
                holes = store.hole_bytes / store.file_bytes
                metrics.set("starling_kv_cache_fragmentation_ratio", holes, model.name, kind)
        if model.has_files:  # of versions side by side, the one that stays
            metrics.set("starling_kv_cache_fragmentation_ratio", model.manager.fragmentation(), model.name, "arena")
        for state in ("free", "cached", "leased"):
            levels["starling_kv_cache_pages", model.name, state] += getattr(pool, state)
        levels["starling_sessions", model.name] = len(model.book)
        for seconds in pool.counters.restore_s:
            metrics.observe("starling_kv_cache_restore_seconds", seconds)
        pool.counters.restore_s.clear()
    for (family, *labels), value in (*counts.items(), *levels.items()):
        metrics.set(family, value, *labels)
