"""The conversations of /v1/conversations: two tables in the file of the stored responses, used by the same thread.

    conversations  tenant, id, created and used (s since 1970), ends (s, steady), size (bytes), metadata (JSON)
    items          tenant, conversation, position, id, item (JSON), message (msgpack, of the chat template)

Functions of a connection, each one transaction.  A conversation ends when it was not used for the time of a response;
its bytes count with those of the responses, and it is dropped as a whole.  Items are known by their ids: adding one
again has no effect, so that an answer that is finished by the successor of this process is added once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.api.conversation_object import CONVERSATION_BYTES, Conversation, check_bounds
from pipeline.api.requests.conversations import ENTRY_BYTES, ConversationItem

if TYPE_CHECKING:
    import sqlite3

SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (tenant TEXT NOT NULL, id TEXT NOT NULL, created INTEGER NOT NULL,
  used REAL NOT NULL, ends REAL NOT NULL, size INTEGER NOT NULL, metadata BLOB NOT NULL, PRIMARY KEY (tenant, id));
CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (tenant, used);
CREATE INDEX IF NOT EXISTS conversations_by_end ON conversations (ends);
CREATE TABLE IF NOT EXISTS items (tenant TEXT NOT NULL, conversation TEXT NOT NULL, position INTEGER NOT NULL,
  id TEXT NOT NULL, item BLOB NOT NULL, message BLOB NOT NULL, PRIMARY KEY (tenant, conversation, id));
CREATE INDEX IF NOT EXISTS items_by_position ON items (tenant, conversation, position);
"""
TRIGGERS = """
CREATE TRIGGER IF NOT EXISTS conversation_items AFTER DELETE ON conversations BEGIN
  DELETE FROM items WHERE tenant = OLD.tenant AND conversation = OLD.id; END;
"""


def create(db: sqlite3.Connection, tenant: str, made: Conversation, now: float, ttl_s: float) -> None:
    """Store a conversation without items."""
    size = len(made.metadata) + CONVERSATION_BYTES
    row = (tenant, made.id, made.created, now, now + ttl_s, size, made.metadata)
    db.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def find(db: sqlite3.Connection, tenant: str, name: str, now: float) -> Conversation | None:
    """A conversation; None: there is none."""
    row = db.execute(
        "SELECT created, metadata FROM conversations WHERE tenant = ? AND id = ? AND ends >= ?", (tenant, name, now)
    ).fetchone()
    return Conversation(name, row[0], bytes(row[1])) if row is not None else None


def set_metadata(db: sqlite3.Connection, tenant: str, name: str, metadata: bytes) -> None:
    """Replace the metadata of a conversation."""
    db.execute(
        "UPDATE conversations SET size = size + ? - LENGTH(metadata), metadata = ? WHERE tenant = ? AND id = ?",
        (len(metadata), metadata, tenant, name),
    )


def delete(db: sqlite3.Connection, tenant: str, name: str, now: float) -> bool:
    """Drop a conversation with its items. False: there is none."""
    is_found = find(db, tenant, name, now) is not None
    db.execute("DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, name))
    return is_found


def add(
    db: sqlite3.Connection,
    tenant: str,
    name: str,
    items: Sequence[ConversationItem],
    now: float,
    ttl_s: float,
    max_bytes: int,
) -> None:
    """Add items to a conversation; none if it is gone. Raises `TooLargeError`."""
    where = (tenant, name)
    row = db.execute("SELECT size FROM conversations WHERE tenant = ? AND id = ?", where).fetchone()
    if row is None:
        return
    count, last = db.execute(
        "SELECT COUNT(*), COALESCE(MAX(position), -1) FROM items WHERE tenant = ? AND conversation = ?", where
    ).fetchone()
    size = row[0]
    for item in items:
        message = msgspec.msgpack.encode(item.message)
        values = (*where, last + 1, item.id, item.item, message)
        if db.execute("INSERT OR IGNORE INTO items VALUES (?, ?, ?, ?, ?, ?)", values).rowcount:
            last, count, size = last + 1, count + 1, size + item.size
    check_bounds(count, size, max_bytes)
    db.execute(
        "UPDATE conversations SET used = ?, ends = ?, size = ? WHERE tenant = ? AND id = ?",
        (now, now + ttl_s, size, *where),
    )


def item(db: sqlite3.Connection, tenant: str, name: str, item_id: str) -> bytes | None:
    """The JSON of an item; None: the conversation has none of this id."""
    row = db.execute(
        "SELECT item FROM items WHERE tenant = ? AND conversation = ? AND id = ?", (tenant, name, item_id)
    ).fetchone()
    return bytes(row[0]) if row is not None else None


def delete_item(db: sqlite3.Connection, tenant: str, name: str, item_id: str) -> bool:
    """Drop an item. False: the conversation has none of this id."""
    where = (tenant, name, item_id)
    row = db.execute(
        "SELECT LENGTH(item) + LENGTH(message) FROM items WHERE tenant = ? AND conversation = ? AND id = ?", where
    ).fetchone()
    if row is None:
        return False
    db.execute("DELETE FROM items WHERE tenant = ? AND conversation = ? AND id = ?", where)
    db.execute(
        "UPDATE conversations SET size = size - ? WHERE tenant = ? AND id = ?", (row[0] + ENTRY_BYTES, tenant, name)
    )
    return True


def page(
    db: sqlite3.Connection, tenant: str, name: str, after: str, limit: int, *, is_ascending: bool
) -> tuple[list[tuple[str, bytes]], bool] | None:
    """Ids and JSON of up to `limit` items after an item ("": from the first on), and whether there are more.

    None: there is no item `after`.
    """
    where, values = "tenant = ? AND conversation = ?", [tenant, name]
    bound: list[int] = []
    if after:
        row = db.execute(f"SELECT position FROM items WHERE {where} AND id = ?", (*values, after)).fetchone()
        if row is None:
            return None
        where, bound = f"{where} AND position {'>' if is_ascending else '<'} ?", [row[0]]
    order = "ASC" if is_ascending else "DESC"
    rows = db.execute(
        f"SELECT id, item FROM items WHERE {where} ORDER BY position {order} LIMIT ?", (*values, *bound, limit + 1)
    ).fetchall()
    return [(row[0], bytes(row[1])) for row in rows[:limit]], len(rows) > limit


def messages(db: sqlite3.Connection, tenant: str, name: str) -> list[dict[str, Any]]:
    """The messages of the items, one for each."""
    rows = db.execute(
        "SELECT message FROM items WHERE tenant = ? AND conversation = ? ORDER BY position", (tenant, name)
    ).fetchall()
    return [msgspec.msgpack.decode(row[0], type=dict[str, Any]) for row in rows]
