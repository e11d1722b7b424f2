"""The bytes of stored responses and conversations of each tenant: always the sums over the rows, within the bounds."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.conversation_object import Conversation, TooLargeError
from pipeline.api.requests.conversations import ConversationItem
from pipeline.config.schema import StoredResponsesConfig
from pipeline.errors import StarlingError
from stages.gateway.requests import stored_conversations as conversations
from stages.gateway.requests import stored_sizes
from stages.gateway.requests.stored_responses import StoredResponse, StoredResponses
from tests.gateway.test_stored_responses import Clock
from tests.properties import examples

TENANTS, NAMES = ("a", "b", "c"), ("1", "2", "3", "4")
TENANT_BYTES, ALL_BYTES, TTL_S = 12_000, 20_000, 60
ROWS = "SELECT tenant, size FROM responses UNION ALL SELECT tenant, size FROM conversations"
WRITES = ("put", "create", "metadata", "add", "drop item")
OPERATIONS = st.tuples(
    st.sampled_from((*WRITES, *WRITES, "delete", "drop", "fail", "wait", "reopen", "other process")),
    st.sampled_from(TENANTS),
    st.sampled_from(NAMES),
    st.integers(0, 4000),
)


class Failed(Exception):
    """What a transaction is rolled back with."""


class Store:
    """A store with small bounds that is opened again and again."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, Clock()
        self.open()

    def open(self) -> None:
        self.store = StoredResponses(self.path, StoredResponsesConfig(ttl_s=TTL_S), self.clock)
        self.store._tenant_bytes = self.store._row_bytes = TENANT_BYTES
        self.store._max_bytes = ALL_BYTES

    async def put(self, tenant: str, name: str, size: int) -> None:
        done: asyncio.Future[StarlingError | None] = asyncio.get_running_loop().create_future()
        item = ConversationItem(f"item_{size}", b"x" * (size // 2), {"role": "user", "content": ""})
        response = StoredResponse(tenant, name, b"x" * size, [], added_to=name, added=lambda: (item,))
        self.store.put(response, done.set_result)
        error = await done
        assert error is None or error.code == "INSUFFICIENT_RESOURCES", error

    async def do(self, what: str, tenant: str, name: str, size: int) -> None:
        """One operation. Those of a conversation name it as the response."""

        def job(db: sqlite3.Connection, now: float) -> None:
            match what:
                case "create":
                    with suppress(sqlite3.IntegrityError):
                        conversations.create(db, tenant, Conversation(name, 0, b"x" * (size // 4)), now, TTL_S)
                case "metadata":
                    conversations.set_metadata(db, tenant, name, b"x" * (size // 4))
                case "add":
                    item = ConversationItem(f"item_{size}", b"x" * size, {"role": "user", "content": ""})
                    conversations.add(db, tenant, name, [item], now, TTL_S, TENANT_BYTES)
                case "drop item":
                    found = db.execute("SELECT id FROM items WHERE tenant = ? AND conversation = ?", (tenant, name))
                    for (item_id,) in found.fetchmany(1):
                        conversations.delete_item(db, tenant, name, item_id)
                case "drop":
                    conversations.delete(db, tenant, name, now)
                case "fail":
                    db.execute("DELETE FROM responses WHERE tenant = ?", (tenant,))
                    stored_sizes.count(db)
                    raise Failed

        match what:
            case "put":
                await self.put(tenant, name, size)
            case "delete":
                await self.store.delete(tenant, name)
            case "wait":
                self.clock.now += size / 50
            case "reopen":
                self.store.close(timeout_s=60)
                self.open()
            case "other process":
                with closing(sqlite3.connect(self.path)) as db, db, suppress(sqlite3.OperationalError):  # no table yet
                    db.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, name))
                    db.execute("UPDATE conversations SET size = size + 1 WHERE tenant = ?", (tenant,))
            case _:
                with suppress(Failed, StarlingError, TooLargeError):
                    await self.store.transact(job, tenant if what in WRITES else "")

    async def check(self, *, is_bounded: bool) -> None:
        """The sums are those of the rows."""

        def read(db: sqlite3.Connection, now: float) -> tuple[dict[str, int], dict[str, int], int]:
            stored_sizes.count(db)
            kept = dict(db.execute("SELECT tenant, size FROM sums"))
            return (
                kept,
                dict(db.execute(f"SELECT tenant, SUM(size) FROM ({ROWS}) GROUP BY tenant")),
                stored_sizes.of_all(db),
            )

        kept, counted, total = await self.store.transact(read)
        assert kept == counted and total == sum(counted.values())
        if is_bounded:
            assert max(counted.values(), default=0) <= TENANT_BYTES and total <= ALL_BYTES


@settings(max_examples=examples(30))
@given(st.lists(OPERATIONS, max_size=25))
def test_the_sums_are_those_of_the_rows_after_any_operations(operations: list[tuple[str, str, str, int]]) -> None:
    async def run(path: Path) -> None:
        store = Store(path)
        try:
            is_bounded = True
            for operation in operations:
                await store.do(*operation)
                # What another process adds is bounded by the next write.
                is_bounded = is_bounded and operation[0] != "other process"
                await store.check(is_bounded=is_bounded)
        finally:
            store.store.close(timeout_s=60)

    with tempfile.TemporaryDirectory() as home:
        asyncio.run(run(Path(home) / "responses.db"))


def test_a_write_reads_no_row_that_it_does_not_drop(tmp_path: Path) -> None:
    """SQLite's plans have no scan of a table of the file, also of one that an older release made."""
    plans: list[str] = []

    def explained(db: sqlite3.Connection) -> Any:
        def trace(statement: str) -> None:
            if statement.startswith(("SELECT", "DELETE", "\nSELECT")):
                seen.append(statement)

        seen: list[str] = []
        db.set_trace_callback(trace)
        return seen

    async def run() -> None:
        store = Store(tmp_path / "responses.db")
        await store.do("put", "a", "1", 8000)

        def begin(db: sqlite3.Connection, now: float) -> Any:
            return explained(db)

        seen = await store.store.transact(begin)
        await store.do("put", "a", "2", 8000)  # drops the first

        def end(db: sqlite3.Connection, now: float) -> None:
            db.set_trace_callback(None)
            for statement in list(seen):
                plans.extend(row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}"))

        await store.store.transact(end)
        assert await store.store.body("a", "1") is None and await store.store.body("a", "2") is not None
        store.store.close(timeout_s=60)

    asyncio.run(run())
    assert any("responses_by_age" in plan for plan in plans) and any("conversations_by_use" in plan for plan in plans)
    assert any("responses_by_end" in plan for plan in plans) and any("conversations_by_end" in plan for plan in plans)
    tables = ("responses", "conversations", "inputs", "items", "sums")
    assert not [plan for plan in plans for table in tables if plan == f"SCAN {table}"]
