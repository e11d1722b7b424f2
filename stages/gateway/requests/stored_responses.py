"""The responses of /v1/responses that can be read again and continued: a SQLite file, used by one thread.

    responses   tenant, id, created and ends (s, steady), size (bytes), body (JSON), conversation (msgpack)
    inputs      tenant, id, items (msgpack, ids and JSON): the input of a response as items

`stored_conversations.py` has the tables of conversations in the same file, `stored_sizes.py` the bytes of each tenant.

A response is stored before its last event is sent: a client that has that event can continue the conversation, also
after a restart.  Bounded by age, by bytes of a tenant and by bytes in all; the oldest are dropped.  Each row has its
whole conversation: dropping one ends no other.  The file is opened at the first use.

Calls that wait for the thread are bounded, in all and for a tenant, which has at most half of them.  The bounds follow
the requests that the gateway admits, each of which may read and write: a disk that answers refuses none of them.
Beyond that reads and changes are refused, and requests whose response would be stored, before they are computed.  A
response that is computed is not refused: beyond the bound there are at most those of the requests that were being
computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from pipeline.api.conversation_object import TooLargeError
from pipeline.api.item_pages import Page, page_body, page_of
from pipeline.api.requests.conversations import ConversationItem
from pipeline.call_queue import CallQueue
from pipeline.config.schema import StoredResponsesConfig
from pipeline.errors import Overloaded, StarlingError
from stages.gateway.requests import stored_conversations as conversations
from stages.gateway.requests import stored_sizes as sizes

if TYPE_CHECKING:
    import sqlite3

log = logging.getLogger("starling.gateway.responses")

BUSY_S = 5.0  # how long a transaction waits for those of the predecessor of this process
MIN_CALLS = 1024  # that may wait for the thread, of all tenants, however few requests are admitted
MIN_CALLS_OF_TENANT = 256
CLOSE_S = 2.0  # `close` waits for the jobs in progress for this long
NO_ITEMS = msgspec.msgpack.encode(())
VERSION = 1  # of the schema: `PRAGMA user_version`
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (tenant TEXT NOT NULL, id TEXT NOT NULL, created REAL NOT NULL, ends REAL NOT NULL,
  size INTEGER NOT NULL, body BLOB NOT NULL, conversation BLOB NOT NULL, PRIMARY KEY (tenant, id));
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (tenant, created);
CREATE INDEX IF NOT EXISTS responses_by_end ON responses (ends);
CREATE TABLE IF NOT EXISTS inputs (tenant TEXT NOT NULL, id TEXT NOT NULL, items BLOB NOT NULL,
  PRIMARY KEY (tenant, id));
CREATE TRIGGER IF NOT EXISTS response_inputs AFTER DELETE ON responses BEGIN
  DELETE FROM inputs WHERE tenant = OLD.tenant AND id = OLD.id; END;
"""
_OLDEST = """
SELECT * FROM (SELECT 'responses', id, created AS at, rowid AS number FROM responses WHERE tenant = :tenant
  ORDER BY created, rowid LIMIT 1)
UNION ALL SELECT * FROM (SELECT 'conversations', id, used, rowid FROM conversations WHERE tenant = :tenant
  ORDER BY used, rowid LIMIT 1)
ORDER BY at, number LIMIT 1
"""
T = TypeVar("T")


def call_bounds(max_requests: int) -> tuple[int, int]:
    """The calls that may wait where `max_requests` are admitted at once: in all, and of a tenant."""
    return max(MIN_CALLS, 4 * max_requests), max(MIN_CALLS_OF_TENANT, 2 * max_requests)


class StoredResponse(NamedTuple):
    """One response. `conversation`: messages of the chat template, without instructions."""

    tenant: str
    id: str  # resp_HEX
    body: bytes
    conversation: list[dict[str, Any]]
    inputs: Sequence[tuple[str, bytes]] = ()  # ids of items, and JSON
    is_stored: bool = True  # False: only its items are added to `added_to`
    added_to: str = ""  # a conversation, conv_HEX; "": none
    added: Callable[[], Sequence[ConversationItem]] = tuple  # called in the thread: making them may take long


class StoredResponses:
    """One per gateway."""

    def __init__(
        self, path: Path | None, config: StoredResponsesConfig, clock: Callable[[], float], max_requests: int = 0
    ) -> None:
        """`path` None: in memory. `clock` is in s since 1970 and steady. `max_requests`: that are admitted at once."""
        self._path = path
        self._ttl_s = config.ttl_s
        self._tenant_bytes = config.tenant_mb << 20
        self._max_bytes = config.max_size_mb << 20
        self._row_bytes = min(self._tenant_bytes, self._max_bytes)  # a larger one would only drop all others
        self._clock = clock
        self._db: sqlite3.Connection | None = None
        self.calls = CallQueue("responses", *call_bounds(max_requests), _full)
        self.errors = 0  # failed operations on the file

    # ---------------------------------------------------------------- from the event loop

    def put(self, response: StoredResponse, on_stored: Callable[[StarlingError | None], None]) -> None:
        """Store a response; then call `on_stored`, in the event loop, with the error if there was one."""
        loop = asyncio.get_running_loop()

        def store() -> StarlingError | None:
            error = None
            try:
                self._safely(lambda: self._put(response))
            except TooLargeError as problem:
                error = problem.of_response()
            except StarlingError as problem:
                error = problem
            except Exception as problem:
                self.errors += 1
                log.error("a response could not be stored", extra={"reason": str(problem)})
                error = StarlingError(
                    "STORAGE_UNAVAILABLE",
                    f"the response could not be stored ({problem}); check the disk of server.state_dir, or send "
                    f'"store": false',
                    "store",
                )
            return error

        def stored(done: Future[StarlingError | None]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, at the end of the process
                loop.call_soon_threadsafe(on_stored, done.result())

        try:
            self.calls.add(store, response.tenant).add_done_callback(stored)
        except RuntimeError:  # closed, at the end of the process
            on_stored(StarlingError("STORAGE_UNAVAILABLE", "the gateway ends; send the request again", "store"))

    def check_room(self, tenant: str) -> None:
        """Raises `StarlingError` while too many calls wait for the file: a further response would wait as well."""
        self.calls.check(tenant)

    def check_fits(self, size: int) -> None:
        """Raises `StarlingError` for a response of `size` bytes that its tenant can never store."""
        if size > self._row_bytes:
            raise StarlingError(
                "INSUFFICIENT_RESOURCES",
                f"the response has {size} bytes with its conversation; a tenant may store {self._row_bytes} "
                f'(stored_responses.tenant_mb and max_size_mb): send a shorter conversation, or "store": false',
                "store",
            )

    async def has(self, tenant: str, response_id: str) -> bool:
        """Whether there is such a response, after every `put` before this call."""
        return await self._run(lambda: self._get("id", tenant, response_id), tenant) is not None

    async def flushed(self) -> None:
        """Every `put` before this call has been stored, or has failed."""
        await asyncio.wrap_future(self.calls.add(lambda: None))

    async def body(self, tenant: str, response_id: str) -> bytes | None:
        """The JSON of a response; None: there is none."""
        row = await self._run(lambda: self._get("body", tenant, response_id), tenant)
        return bytes(row) if row is not None else None

    async def conversation(self, tenant: str, response_id: str) -> list[dict[str, Any]] | None:
        """The messages up to a response, with its own; None: there is none."""
        row = await self._run(lambda: self._get("conversation", tenant, response_id), tenant)
        return msgspec.msgpack.decode(row, type=list[dict[str, Any]]) if row is not None else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Drop a response. False: there is none."""
        return await self._run(lambda: self._delete(tenant, response_id), tenant)

    async def inputs(self, tenant: str, response_id: str, page: Page) -> bytes | None:
        """The body with a page of the items of a response's input; None: there is no such response.

        Raises `InvalidRequest`.
        """

        def find() -> bytes | None:
            if self._get("id", tenant, response_id) is None:
                return None
            where = "WHERE tenant = ? AND id = ?"
            row = self._open().execute(f"SELECT items FROM inputs {where}", (tenant, response_id)).fetchone()
            items = row[0] if row is not None else NO_ITEMS
            if items.startswith(b"["):  # JSON, as earlier versions store it
                return page_body(items, page)
            return page_of(msgspec.msgpack.decode(items, type=list[tuple[str, bytes]]), page)

        return await self._run(find, tenant)

    async def transact(self, job: Callable[[sqlite3.Connection, float], T], tenant: str = "", caller: str = "") -> T:
        """Run a job of `stored_conversations.py` as one transaction, with the time; `tenant`: keep its bounds.

        caller: the tenant whose call it is, if it is not `tenant`.
        Raises what the job raises, and `StarlingError` if the file cannot be used.
        """

        def run() -> T:
            db, now = self._open(), self._clock()
            with db:
                db.execute("BEGIN IMMEDIATE")
                result = job(db, now)
                if tenant:
                    self._keep_bounds(db, tenant, now)
            return result

        return await self._run(run, caller or tenant)

    @property
    def ttl_s(self) -> float:
        """How long a conversation is kept after its last use."""
        return self._ttl_s

    @property
    def tenant_bytes(self) -> int:
        """Most bytes of a conversation: those of a tenant."""
        return self._row_bytes

    async def _run(self, job: Callable[[], T], tenant: str) -> T:
        """Run a job in the thread. Raises what it raises, and `StarlingError` if the file cannot be used now."""
        import sqlite3

        try:
            return await self.calls.call(lambda: self._safely(job), tenant)
        except (OSError, sqlite3.Error) as problem:
            self.errors += 1
            log.error("stored responses cannot be used", extra={"reason": str(problem)})
            raise StarlingError(
                "STORAGE_UNAVAILABLE",
                f"responses and conversations cannot be stored or read ({problem}); check the disk of server.state_dir",
            ) from None

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End the thread after its jobs, waiting at most `timeout_s`."""
        wait([self.calls.add(self._close)], timeout_s)
        self.calls.close(wait=False)

    # ---------------------------------------------------------------- in the thread

    def _put(self, response: StoredResponse) -> None:
        db, now = self._open(), self._clock()
        conversation = msgspec.msgpack.encode(response.conversation)
        inputs = msgspec.msgpack.encode(response.inputs)  # a page is found in it without reading what the items hold
        size = len(response.body) + len(conversation) + len(inputs)
        tenant, name = response.tenant, response.id
        added = response.added()
        if response.is_stored:
            self.check_fits(size)
        with db:
            db.execute("BEGIN IMMEDIATE")
            if response.is_stored:
                # REPLACE would call no trigger of what it drops.
                db.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, name))
                db.execute(
                    "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (tenant, name, now, now + self._ttl_s, size, response.body, conversation),
                )
                db.execute("INSERT OR REPLACE INTO inputs VALUES (?, ?, ?)", (tenant, name, inputs))
            if response.added_to and added:
                room = self._row_bytes - (size if response.is_stored else 0)  # neither drops the other
                conversations.add(db, tenant, response.added_to, added, now, self._ttl_s, room)
            self._keep_bounds(db, tenant, now)

    def _keep_bounds(self, db: sqlite3.Connection, tenant: str, now: float) -> None:
        """Drop what has expired, and the oldest beyond the bounds. Reads no other rows."""
        sizes.count(db)
        db.execute("DELETE FROM responses WHERE ends < ?", (now,))
        db.execute("DELETE FROM conversations WHERE ends < ?", (now,))
        self._shrink(db, tenant, self._tenant_bytes)
        while (excess := sizes.of_all(db) - self._max_bytes) > 0:
            largest = sizes.largest(db)
            self._shrink(db, largest, max(0, sizes.of_tenant(db, largest) - excess))

    @staticmethod
    def _shrink(db: sqlite3.Connection, tenant: str, bound: int) -> None:
        """Drop the oldest responses and conversations of a tenant until the rest has at most `bound` bytes."""
        while sizes.of_tenant(db, tenant) > bound:
            place, name, _, _ = db.execute(_OLDEST, {"tenant": tenant}).fetchone()
            db.execute(f"DELETE FROM {place} WHERE tenant = ? AND id = ?", (tenant, name))

    def _get(self, column: str, tenant: str, response_id: str) -> Any:
        found = (
            self._open()
            .execute(
                f"SELECT {column} FROM responses WHERE tenant = ? AND id = ? AND ends >= ?",
                (tenant, response_id, self._clock()),
            )
            .fetchone()
        )
        return found[0] if found else None

    def _delete(self, tenant: str, response_id: str) -> bool:
        with self._open() as db:
            where = "WHERE tenant = ? AND id = ?"
            return db.execute(f"DELETE FROM responses {where}", (tenant, response_id)).rowcount > 0

    def _open(self) -> sqlite3.Connection:
        if self._db is not None:
            return self._db
        self._db = self._connect()
        return self._db

    def _safely(self, job: Callable[[], T]) -> T:
        """Run a job; a damaged file is renamed, and the job has an empty one."""
        import sqlite3  # most servers never store a response

        try:
            return job()
        except sqlite3.DatabaseError as error:
            if self._path is None or isinstance(error, sqlite3.OperationalError):
                raise  # the disk is full or locked
            log.error(
                "stored responses are damaged: the file was renamed",
                extra={"path": str(self._path), "reason": str(error)},
            )
            self._close()
            self._path.replace(self._path.with_name(f"{self._path.name}.unreadable"))
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            return job()

    def _connect(self) -> sqlite3.Connection:
        import sqlite3

        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        db = sqlite3.connect(self._path or ":memory:", timeout=BUSY_S, isolation_level=None)
        try:
            if self._path is not None:
                self._path.chmod(0o600)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            if db.execute("PRAGMA user_version").fetchone()[0] not in (0, VERSION):
                raise sqlite3.DatabaseError("it is of another release")
            db.executescript(_SCHEMA + conversations.SCHEMA + conversations.TRIGGERS + sizes.SCHEMA)
            db.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            db.close()
            raise
        return db

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _full(n: int, whose: str) -> Overloaded:
    return Overloaded(
        f"{n} calls wait for stored responses and conversations, the most {whose}; try again later, or send "
        '"store": false without a conversation, and check the disk of server.state_dir',
        "store",
        retry_after_s=1.0,
    )
