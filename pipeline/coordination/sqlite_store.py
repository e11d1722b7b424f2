"""The store of the processes of one machine: a SQLite file, without a server.

    meta      revision, boot (the boot id of the kernel), forgotten
    items     key, value, revision, lease
    leases    id, ttl_s, ends        on the monotonic clock, which all processes of a boot share
    events    the last changes, for watchers

Every call is one transaction, which first ends the leases that are over.  SQLite's lock orders those that write, and
the reads of watchers (`BEGIN IMMEDIATE`).  `get` and `scan` wait for none of them unless a lease is over.  A killed
process leaves no half transaction.  After a reboot the clock starts anew, so that all leases end.  If the file is
removed or replaced, every process goes on with the one that has its name: it has no leases, and watchers get a new
snapshot.

A watcher sleeps until the kernel reports a change of the file (file_changes.py), or the next lease ends, and reads the
events.  It reads at most every `READ_S`, and compares `PRAGMA data_version`, which costs microseconds, every `CHECK_S`
without a report.  Where the kernel has no descriptor for reports, or the file is a link, it reads every `POLL_S`.

A commit is reported to the watchers of all processes while its writer still holds the lock.  Each waits up to `READ_S`
more, at random, before it reads: else all would queue for the lock at once, in the threads that also renew leases.

Reads, transactions and new leases are refused while `MAX_CALLS` calls wait for the thread, because the file does not
answer: their callers treat that as any failure of the store.  Calls carry no tenant.  What keeps and ends leases, and
watchers, of which each makes one call at a time, are not refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pipeline.call_queue import CallQueue
from pipeline.coordination.file_changes import FileChanges
from pipeline.coordination.interface import (
    Change,
    Condition,
    CoordinationStore,
    Event,
    Item,
    Update,
    check_transaction,
    check_ttl,
)
from pipeline.errors import ConfigError, StorageUnavailable

log = logging.getLogger("starling.coordination")

VERSION = 1  # of the schema: `PRAGMA user_version`
KEPT_EVENTS = 10_000
BUSY_S = 5.0  # how long a transaction waits for those of other processes
MAX_CALLS = 4096  # of a process, several for each request that an orchestrator may have in flight by default
READ_S = 0.02  # between two reads of a watcher, so that many changes in a row cost few transactions
CHECK_S = 1.0  # between two checks of a watcher to which no change is reported
POLL_S = 0.02  # likewise where changes cannot be reported

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS items
  (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, lease TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_of_a_lease ON items (lease) WHERE lease != '';
CREATE TABLE IF NOT EXISTS leases (id TEXT PRIMARY KEY, ttl_s REAL NOT NULL, ends REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events
  (number INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB, revision INTEGER NOT NULL);
INSERT OR IGNORE INTO meta VALUES ('revision', '0'), ('forgotten', '0'), ('boot', '');
"""


def boot_id() -> str:
    """The kernel's id of this boot; "" where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None without it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _use_log(database: sqlite3.Connection) -> None:
    """Switch to WAL mode, in which the file stays.

    While another process switches a new file SQLite fails at once, because each of the two may wait for the other.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() >= deadline:
                raise
            time.sleep(READ_S)


class SqliteStore(CoordinationStore):
    """The store in the file `path`, which is created. Used in one event loop; its calls run in one other thread."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        boot: Callable[[], str] = boot_id,
        kept_events: int = KEPT_EVENTS,
        check_s: float = CHECK_S,
        jitter: Callable[[], float] = random.random,
        max_calls: int = MAX_CALLS,
    ) -> None:
        """`clock`: the same for all processes of a boot. `jitter`: a share of `READ_S`, for each read of a watcher.

        max_calls: that wait before further ones are refused.

        Raises `ConfigError`, `StorageUnavailable`.
        """
        self.path = path
        self._clock = clock
        self._boot = boot()
        self._kept_events = kept_events
        self._check_s = check_s
        self._jitter = jitter
        self._has_said_that_it_polls = False
        self._changes = FileChanges(path)
        self._file: tuple[int, int] | None = None  # device and inode of the open file
        self._n_opened = 0
        self._calls = CallQueue("coordination", max_calls, max_calls, self._full)
        try:
            self._database = self._calls.add(self._connect).result()
        except BaseException:
            self._calls.close(wait=True)
            self._changes.close()
            raise
        self._is_closed = False

    def _connect(self) -> sqlite3.Connection:
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
            try:
                _use_log(database)
                database.execute(
                    "PRAGMA synchronous = NORMAL"
                )  # a power cut may lose the last moments, never consistency
                database.execute("BEGIN IMMEDIATE")
                (version,) = database.execute("PRAGMA user_version").fetchone()
                if version not in (0, VERSION):
                    raise ConfigError(
                        f"{self.path} has version {version}, expected {VERSION}: another release wrote it"
                    )
                for statement in _SCHEMA.strip().split(";\n"):
                    database.execute(statement.rstrip(";"))
                database.execute(f"PRAGMA user_version = {VERSION}")
                (boot,) = database.execute("SELECT value FROM meta WHERE name = 'boot'").fetchone()
                if boot != self._boot:
                    database.execute("UPDATE leases SET ends = -1e300")  # their clock has started anew
                    database.execute("UPDATE meta SET value = ? WHERE name = 'boot'", (self._boot,))
                database.execute("COMMIT")
                self._file = _identity(self.path)
                self._n_opened += 1
            except BaseException:
                database.close()
                raise
            return database

    def _reopen_if_replaced(self) -> None:
        if _identity(self.path) != self._file:
            self._database.close()
            self._database = self._connect()

    async def close(self) -> None:
        """Close the file. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await self._call(self._database.close)
            self._calls.close(wait=True)
            self._changes.close()

    # ------------------------------------------------------------------ values

    async def get(self, key: str) -> Item | None:
        """The value of a key."""

        def read(db: sqlite3.Connection) -> Item | None:
            row = db.execute("SELECT key, value, revision FROM items WHERE key = ?", (key,)).fetchone()
            return Item(*row) if row else None

        return await self._read(read)

    async def scan(self, prefix: str) -> tuple[list[Item], int]:
        """All values below a prefix, and the revision."""
        return await self._read(lambda db: (self._below(db, prefix), self._revision(db)))

    async def transact(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> int | None:
        """Apply all changes or none."""
        check_transaction(conditions, changes)

        def apply(db: sqlite3.Connection) -> int | None:
            for key, revision in conditions:
                row = db.execute("SELECT revision FROM items WHERE key = ?", (key,)).fetchone()
                if (row[0] if row else 0) != revision:
                    return None
            for lease in {change.lease for change in changes if change.lease}:
                if db.execute("SELECT 1 FROM leases WHERE id = ?", (lease,)).fetchone() is None:
                    return None
            self._apply(db, changes)
            return self._revision(db)

        self._calls.check()
        return await self._transaction(apply)

    # ------------------------------------------------------------------ leases

    async def grant(self, ttl_s: float) -> str:
        """A new lease."""
        check_ttl(ttl_s)
        lease = secrets.token_hex(8)
        ends = self._clock() + ttl_s
        self._calls.check()
        await self._transaction(lambda db: db.execute("INSERT INTO leases VALUES (?, ?, ?)", (lease, ttl_s, ends)))
        return lease

    async def renew(self, lease: str) -> bool:
        """Prolong a lease."""

        def prolong(db: sqlite3.Connection) -> bool:
            done = db.execute("UPDATE leases SET ends = ? + ttl_s WHERE id = ?", (self._clock(), lease))
            return done.rowcount == 1

        return await self._transaction(prolong)

    async def revoke(self, lease: str) -> None:
        """End a lease."""
        await self._transaction(lambda db: self._end(db, [lease]))

    # ------------------------------------------------------------------ watching

    async def watch(self, prefix: str, after: int = 0) -> AsyncIterator[Update]:
        """Updates without end."""
        seen = after or None
        n_opened = self._n_opened
        loop = asyncio.get_running_loop()
        if not self._changes.has_descriptor and not self._has_said_that_it_polls:
            self._has_said_that_it_polls = True
            facts = {"path": str(self.path), "every_s": POLL_S, "limit": "fs.inotify.max_user_instances"}
            log.info("the kernel has no descriptor for changes of the store, which is polled", extra=facts)
        while True:
            serial, read_at = self._changes.serial, loop.time()  # a change from now on is a reason to read again
            is_armed = await self._call(self._changes.arm)
            version, ends = await self._call(self._glance)
            if self._n_opened != n_opened:
                n_opened, seen = self._n_opened, None
            update = await self._transaction(lambda db, seen=seen: self._update(db, prefix, seen))  # type: ignore[misc]
            if update is not None:
                seen = update.revision
                if update.events or update.is_snapshot:
                    yield update
            while (await self._call(self._glance))[0] == version:
                left_s = math.inf if ends is None else ends - self._clock()
                if left_s <= 0:
                    break
                if not is_armed:
                    await asyncio.sleep(min(POLL_S, left_s))
                elif await self._changes.wait(serial, min(self._check_s, left_s)):
                    break
            await asyncio.sleep(max(0.0, read_at + READ_S - loop.time()) + self._jitter() * READ_S)

    def _glance(self) -> tuple[int, float | None]:
        """A number that changes with the file, and when the next lease ends. Reads only."""
        with self._errors():
            self._reopen_if_replaced()
            (version,) = self._database.execute("PRAGMA data_version").fetchone()
            (ends,) = self._database.execute("SELECT min(ends) FROM leases").fetchone()
            # `data_version` does not count this connection's own changes.
            return version * 1_000_003 + self._database.total_changes + self._n_opened * (1 << 40), ends

    def _update(self, db: sqlite3.Connection, prefix: str, seen: int | None) -> Update | None:
        """What a watcher has not seen; None if it has seen everything."""
        revision = self._revision(db)
        if seen is None or seen < self._meta(db, "forgotten") or seen > revision:
            return Update(revision, tuple(Event(*item) for item in self._below(db, prefix)), True)
        if seen == revision:
            return None
        rows = db.execute("SELECT key, value, revision FROM events WHERE revision > ? ORDER BY number", (seen,))
        return Update(revision, tuple(Event(*row) for row in rows if row[0].startswith(prefix)), False)

    # ------------------------------------------------------------------ inside a transaction

    def _apply(self, db: sqlite3.Connection, changes: Sequence[Change]) -> None:
        revision = self._revision(db) + 1
        changed = False
        for key, value, lease in changes:
            if value is not None:
                db.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?)", (key, value, revision, lease))
            elif not db.execute("DELETE FROM items WHERE key = ?", (key,)).rowcount:
                continue
            db.execute("INSERT INTO events (key, value, revision) VALUES (?, ?, ?)", (key, value, revision))
            changed = True
        if not changed:
            return
        self._set_meta(db, "revision", revision)
        (last,) = db.execute("SELECT max(number) FROM events").fetchone()
        row = db.execute("SELECT max(revision) FROM events WHERE number <= ?", (last - self._kept_events,)).fetchone()
        if row[0] is not None:
            db.execute("DELETE FROM events WHERE number <= ?", (last - self._kept_events,))
            self._set_meta(db, "forgotten", row[0])

    def _end(self, db: sqlite3.Connection, leases: Sequence[str]) -> None:
        keys = []
        for lease in leases:
            if db.execute("DELETE FROM leases WHERE id = ?", (lease,)).rowcount:
                keys += [key for (key,) in db.execute("SELECT key FROM items WHERE lease = ? ORDER BY key", (lease,))]
        if keys:
            self._apply(db, [Change(key, None) for key in sorted(keys)])

    def _expire(self, db: sqlite3.Connection) -> None:
        self._end(db, [lease for (lease,) in db.execute("SELECT id FROM leases WHERE ends <= ?", (self._clock(),))])

    @staticmethod
    def _below(db: sqlite3.Connection, prefix: str) -> list[Item]:
        rows = db.execute(
            "SELECT key, value, revision FROM items WHERE key >= ? AND key < ? ORDER BY key",
            (prefix, prefix + "\U0010ffff"),
        )
        return [Item(*row) for row in rows]

    @staticmethod
    def _meta(db: sqlite3.Connection, name: str) -> int:
        return int(db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()[0])

    def _revision(self, db: sqlite3.Connection) -> int:
        return self._meta(db, "revision")

    @staticmethod
    def _set_meta(db: sqlite3.Connection, name: str, value: int) -> None:
        db.execute("UPDATE meta SET value = ? WHERE name = ?", (str(value), name))

    # ------------------------------------------------------------------ the thread

    async def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction, after the end of leases that are over."""

        def run() -> T:
            with self._errors():
                self._reopen_if_replaced()
                db = self._database
                db.execute("BEGIN IMMEDIATE")
                try:
                    self._expire(db)
                    result = work(db)
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
                return result

        return await self._call(run)

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`, which only reads, on what is committed. It waits for no writer unless a lease is over."""

        self._calls.check()

        def run() -> list[T] | None:
            with self._errors():
                self._reopen_if_replaced()
                db = self._database
                db.execute("BEGIN")
                try:
                    over = db.execute("SELECT 1 FROM leases WHERE ends <= ?", (self._clock(),)).fetchone()
                    return None if over else [work(db)]
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")

        found = await self._call(run)
        return await self._transaction(work) if found is None else found[0]

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._calls.add(work))

    def _full(self, n: int, whose: str) -> StorageUnavailable:
        return StorageUnavailable(
            f"{n} calls wait for the coordination store {self.path}, the most {whose}; try again later, and check its "
            "disk and the processes that have it open",
            retry_after_s=1.0,
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorname", "")
            if code.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_CANTOPEN", "SQLITE_READONLY")):
                raise ConfigError(f"{self.path}: {error}; remove it, or name another file") from None
            raise StorageUnavailable(f"{self.path}: {error}") from None
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from None
