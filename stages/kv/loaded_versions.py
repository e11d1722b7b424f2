"""The model versions that the kv stage has loaded: follows the record of versions, opens their arenas, removes them.

    loading    the arena is created on a thread, because reserving and freeing hundreds of MB takes as long as tens of
               steps; missing pages are copied from older versions of the same file
    serving    also the page files and sessions are open
    (removed)  the page files are closed at once, for the next version; the thread unmaps and removes the arena

Knows no peers and sends no frames: `on_opened` tells the stage when a version has an arena, or why it has none.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from pipeline.runtime.steady_clock import SteadyClock, clock_path
from shm.arena import ArenaError, remove_stale_arenas
from shm.checkpoint import CheckpointError
from stages.kv.cache_metrics import RemovedVersions
from stages.kv.manager import Manager
from stages.kv.model import ModelPages, ReservedArena, prune
from stages.kv.page_import import PageImports
from stages.kv.page_ins import PageIns
from stages.kv.sessions.model_sessions import ModelSessions
from stages.kv.sessions.session_thread import SessionResult, SessionThread
from stages.kv.warming import Warming

log = logging.getLogger("starling.kv")

RETRY_S = 0.2  # between attempts to open a version whose model is not prepared, or whose arena does not fit
MAX_STALL_S = 120.0  # reserving and scanning a large arena takes at most this long
PRUNE_S = 3600.0  # between removals of old files
CLOSE_WAIT_S = 1.0  # at the end: for the thread of each model's sessions
NOTE_USES_S = 30.0  # between additions of uses to the records of saved pages: after a crash those since are missing
RETRY_FILES_S = 10.0  # between attempts to open state files that could not be used


class Loop(Protocol):
    """The part of the stage's loop that is used here."""

    ready: bool
    reason: str

    def mark_active(self) -> None:
        """The stage has work."""

    def report_progress(self) -> None:
        """The stage's work has progressed."""

    def wake(self) -> None:
        """Run the next iteration at once."""

    def allow_stall(self, seconds: float) -> AbstractContextManager[None]:
        """Inside the context, up to `seconds` without progress are expected."""
        ...


class LoadedVersion:
    """A version of a model, and the scheduler that uses it."""

    def __init__(self, version: ModelVersion, pages: ModelPages) -> None:
        self.version = version
        self.pages = pages
        self.page_ins = PageIns(pages)
        self.imports = PageImports()
        self.warming = Warming(pages, pages.config.cache.warm_mb << 20 if pages.config.cache.enabled else 0)
        self.reserving: Future[ReservedArena] | None = None  # the thread creates its arena
        self.error = "not prepared yet"  # why there is no manager
        # Being loaded without an error so far: `error` is only progress. A scheduler that attaches before the first
        # attempt to open the arena waits for that, too: it would ask again only after a while.
        self.is_opening = version.state == "loading"
        self.peer: bytes | None = None  # the scheduler
        self.frame: m.KvAttach | None = None
        self.is_answered = False  # the scheduler has received the KvReady for its step arena
        self.last_state: m.KvState | None = None

    @property
    def name(self) -> str:
        """The version's id: the `model` of its frames."""
        return self.pages.model.name

    @property
    def manager(self) -> Manager | None:
        """None until the arena is open."""
        return self.pages.manager


class LoadedVersions:
    """All versions in the record, by id. `on_opened` is called with one that opened or failed for a new reason."""

    def __init__(self, config: Config, loop: Loop, on_opened: Callable[[LoadedVersion], None]) -> None:
        self.by_id: dict[str, LoadedVersion] = {}
        self.sessions: dict[str, SessionThread] = {}  # by model name; also without a version
        self.removed = RemovedVersions()
        self._config = config
        self._loop = loop
        self._on_opened = on_opened
        self._thread = ThreadPoolExecutor(1, "arenas")
        self._prune_thread = ThreadPoolExecutor(1, "prune")
        self._follower = versions.VersionFollower(config)
        self._clock = SteadyClock(clock_path(paths.state_dir(config), "kv"))
        self._next_open = self._next_prune = self._next_retry = self._next_note = float("-inf")
        # Arenas of versions that were removed while no kv stage ran.
        kept = {version.slug for version in self._follower.table.versions}
        remove_stale_arenas(paths.arena_dir(config), "kv", kept)
        self._apply_record()

    def close(self) -> None:
        """Close all versions; their arenas stay for a successor."""
        self._thread.shutdown()
        self._prune_thread.shutdown(wait=False, cancel_futures=True)
        for sessions in self.sessions.values():
            sessions.close(CLOSE_WAIT_S)
        for loaded in self.by_id.values():
            loaded.pages.close()

    def pages(self) -> list[ModelPages]:
        """The pages of all versions."""
        return [loaded.pages for loaded in self.by_id.values()]

    def find(self, name: str, version_id: str) -> LoadedVersion | None:
        """The version with this id; without an id, the one of the model that serves."""
        if version_id in self.by_id:
            return self.by_id[version_id]
        return min(self._versions_of(name), key=lambda loaded: loaded.version.state != "serving", default=None)

    def sessions_of(self, name: str) -> SessionThread:
        """The sessions of a model, whether a version of it is loaded or not."""
        sessions = self.sessions.get(name)
        if sessions is None:
            directory = paths.state_dir(self._config) / "sessions"
            longest_turn_s = self._config.server.request_timeout_ms / 1000
            own = ModelSessions(directory, name.replace("/", "--"), self._clock.seconds, longest_turn_s)
            sessions = self.sessions[name] = SessionThread(own, self._loop.wake)
        return sessions

    def _versions_of(self, name: str) -> list[LoadedVersion]:
        return [loaded for loaded in self.by_id.values() if loaded.version.name == name]

    # -------------------------------------------------------------- the record

    def poll_record(self) -> None:
        """Load and remove versions if the record has changed."""
        if self._follower.poll():
            self._apply_record()

    def _apply_record(self) -> None:
        self._loop.mark_active()
        recorded = {version.id: version for version in self._follower.table.versions}
        for version_id in [version_id for version_id in self.by_id if version_id not in recorded]:
            self._remove(self.by_id.pop(version_id))
        for version in recorded.values():
            loaded = self.by_id.get(version.id)
            if loaded is None:
                self._add(version)
                continue
            starts_serving = version.state == "serving" != loaded.version.state
            loaded.version, loaded.pages.model = version, version.model
            if starts_serving and loaded.manager is not None:
                loaded.pages.open_sessions()
        for loaded in self.by_id.values():
            if loaded.manager is not None and not loaded.pages.has_files and self._may_open_files(loaded):
                loaded.pages.open_files()
        self._set_older_versions()

    def _add(self, version: ModelVersion) -> None:
        name = version.name
        loop, sessions = self._loop, self.sessions_of(name)
        pages = ModelPages(self._config, version.model, loop.report_progress, name, sessions, loop.wake, self._clock.ns)
        self.by_id[version.id] = LoadedVersion(version, pages)
        self._next_open = float("-inf")

    def _remove(self, loaded: LoadedVersion) -> None:
        log.info("model version is removed", extra={"version": loaded.version.id})
        self.removed.add(loaded.pages)
        loaded.pages.close_files()  # at once: the next version opens them
        # What goes on step by step ends: nothing may use the arena while the thread closes it.
        manager, loaded.pages.manager = loaded.pages.manager, None
        self._thread.submit(_remove_arena, loaded, manager)

    def _set_older_versions(self) -> None:
        """Let each version copy missing pages from older versions of the same model."""
        for loaded in self.by_id.values():
            name, serial = loaded.version.name, loaded.version.serial
            older = [other.pages for other in self._versions_of(name) if other.version.serial < serial]
            loaded.pages.use_older_versions(older)
            loaded.warming.forget_removed()

    def _may_open_files(self, loaded: LoadedVersion) -> bool:
        """Whether no other version of the model has the page files open or takes precedence."""
        others = [other for other in self._versions_of(loaded.version.name) if other is not loaded]
        is_serving = loaded.version.state == "serving"
        if not is_serving and any(other.version.state == "serving" for other in others):
            return False
        return not any(other.pages.has_files for other in others)

    # -------------------------------------------------------------- opening

    def open_missing(self, now: float) -> list[LoadedVersion]:
        """Try to open the versions without an arena, every RETRY_S. Returns those that had none."""
        missing = [loaded for loaded in self.by_id.values() if loaded.manager is None]
        if missing and now >= self._next_open:
            self._next_open = now + RETRY_S
            for loaded in missing:
                self._open(loaded)
        return missing

    @property
    def next_open(self) -> float:
        """When `open_missing` tries again, s of the monotonic clock."""
        return self._next_open

    def _open(self, loaded: LoadedVersion) -> None:
        """Create or adopt the arena once the model is prepared."""
        before, loaded.is_opening = loaded.error, loaded.version.state == "loading"
        try:
            loaded.error = self._try_open(loaded)
            if not loaded.error:
                self._set_older_versions()
                gc.freeze()  # the page table of a large arena lives long: garbage collections need not scan it
        except (ArenaError, CheckpointError, OSError) as error:
            loaded.error, loaded.is_opening = str(error), False
            if loaded.error != before:
                log.error("a KV arena cannot be opened", extra={"model": loaded.name, "reason": str(error)})
        if loaded.error != before and (loaded.manager is not None or not loaded.is_opening):
            self._on_opened(loaded)
        self.update_readiness()

    def _try_open(self, loaded: LoadedVersion) -> str:
        """Open a version; returns why it is not open yet, or ""."""
        is_loading = loaded.version.state == "loading"
        if is_loading and not loaded.version.digest:
            return f"model {loaded.name!r} is being prepared"
        index_path = versions.find_index(loaded.version, paths.models_dir())
        if index_path is None:
            return f"model {loaded.name!r} is not prepared yet"
        if not is_loading:
            with self._loop.allow_stall(MAX_STALL_S):
                reserving, loaded.reserving = loaded.reserving, None  # another attempt must not find its error again
                reserved = reserving.result() if reserving is not None else None
                loaded.pages.open(index_path, reserved, is_alone=self._may_open_files(loaded))
                if loaded.version.state == "serving":
                    loaded.pages.open_sessions()
        elif loaded.reserving is None:
            # With memory for the first pages: the request or the self-test that the version is loaded for needs them.
            loaded.reserving = self._thread.submit(loaded.pages.reserve, index_path, 1)
            loaded.reserving.add_done_callback(self._on_reserved)
            return f"the arena of model {loaded.name!r} is being created"
        elif not loaded.reserving.done():
            return loaded.error
        else:
            reserving, loaded.reserving = loaded.reserving, None
            loaded.pages.open(index_path, reserving.result(), is_alone=self._may_open_files(loaded))
        return ""

    def _on_reserved(self, _: Future[ReservedArena]) -> None:
        """Called on the thread."""
        self._next_open = float("-inf")
        self._loop.wake()

    def update_readiness(self) -> None:
        """The stage is ready when all serving versions have an arena; loading and retiring ones do not count."""
        serving = [loaded for loaded in self.by_id.values() if loaded.version.state == "serving"]
        errors = [loaded.error for loaded in serving if loaded.manager is None]
        self._loop.ready, self._loop.reason = not errors, errors[0] if errors else ""

    # -------------------------------------------------------------- periodic work

    def prune_files(self, now: float) -> None:
        """Remove files that are no longer served, every PRUNE_S, on a thread. All versions are open."""
        if now >= self._next_prune and all(sessions.is_complete for sessions in self.sessions.values()):
            self._next_prune = now + PRUNE_S
            self._prune_thread.submit(_prune_files, self.pages(), dict(self.sessions), self._clock.seconds())

    def do_chores(self) -> bool:
        """Expire, save and compact a few pages of each version; expire sessions. Returns whether pages remain."""
        more = False
        now = time.monotonic()
        is_retry_due = now >= self._next_retry
        if is_retry_due:
            self._next_retry = now + RETRY_FILES_S
        is_note_due = now >= self._next_note
        if is_note_due:
            self._next_note = now + NOTE_USES_S
        for loaded in self.by_id.values():
            if is_retry_due and loaded.version.state == "serving" and loaded.manager is not None:
                loaded.pages.retry_files()
        for pages in self.pages():
            pages.expire()
            if is_note_due:
                pages.note_uses()
            more |= pages.save_some()
            more |= pages.compact()
        for sessions in self.sessions.values():
            sessions.expire()
        return more

    def warm_some(self) -> bool:
        """While no sequence holds pages: load a page of the most used prefixes. True: call again."""
        if any(len(loaded.page_ins) or _is_leasing(loaded) for loaded in self.by_id.values()):
            return False
        return any(loaded.warming.step() for loaded in self.by_id.values())

    def pause_warming(self) -> None:
        """A request needs pages."""
        for loaded in self.by_id.values():
            loaded.warming.pause()

    def poll_sessions(self) -> Iterator[SessionResult]:
        """What the threads of the sessions have done; pages of sessions that were closed are freed in every version."""
        for name, sessions in self.sessions.items():
            for result in sessions.poll():
                for loaded in self._versions_of(name) if result.freed else ():
                    if loaded.manager is not None:
                        loaded.manager.remove(result.freed)
                yield result

    @property
    def is_writing_sessions(self) -> bool:
        """Whether turns of sessions are under way on the disk."""
        return any(sessions.is_busy for sessions in self.sessions.values())


def _is_leasing(loaded: LoadedVersion) -> bool:
    return loaded.manager is not None and loaded.manager.pool.leased > 0


def _prune_files(models: list[ModelPages], sessions: dict[str, SessionThread], now: float) -> None:
    try:
        prune(models, sessions, now)
    except Exception:
        log.exception("old files cannot be removed")


def _remove_arena(loaded: LoadedVersion, manager: Manager | None) -> None:
    """Close a removed version and remove its arena. Called on the thread, because freeing the memory takes time.

    manager: of the version, which refers to the arena; it ends here, too.
    """
    try:
        if loaded.reserving is not None:
            loaded.reserving.result().opened.arena.unlink()
        if loaded.pages.arena is not None:
            loaded.pages.arena.unlink()
        loaded.pages.close()
    except Exception:
        log.exception("the arena of a removed version cannot be removed", extra={"version": loaded.version.id})
