"""The bytes of each tenant's stored responses and conversations, and of all, kept beside the rows.

Temporary tables of a connection to the file of `stored_responses.py`, which triggers keep equal to the sums over the
rows; a transaction that is rolled back takes them along.  They are counted from the rows at the first use, and again
after another connection, such as that of this process's predecessor, has changed the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

_PLACES = ("responses", "conversations")
_TABLES = """
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE sums (tenant TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX temp.sums_by_size ON sums (size);
CREATE TEMP TABLE totals (size INTEGER NOT NULL, data_version INTEGER NOT NULL);
INSERT INTO totals VALUES (0, -1);
"""
_ADD = """
  INSERT INTO sums VALUES (NEW.tenant, NEW.size) ON CONFLICT (tenant) DO UPDATE SET size = size + excluded.size;
  UPDATE totals SET size = size + NEW.size;"""
_SUBTRACT = """
  UPDATE sums SET size = size - OLD.size WHERE tenant = OLD.tenant;
  DELETE FROM sums WHERE tenant = OLD.tenant AND size = 0;
  UPDATE totals SET size = size - OLD.size;"""
_TRIGGERS = "".join(
    f"""
CREATE TEMP TRIGGER {place}_added AFTER INSERT ON main.{place} BEGIN {_ADD} END;
CREATE TEMP TRIGGER {place}_changed AFTER UPDATE OF size ON main.{place} BEGIN {_SUBTRACT} {_ADD} END;
CREATE TEMP TRIGGER {place}_dropped AFTER DELETE ON main.{place} BEGIN {_SUBTRACT} END;
"""
    for place in _PLACES
)
SCHEMA = _TABLES + _TRIGGERS  # of each connection, after the tables of the file


def count(db: sqlite3.Connection) -> None:
    """Count the rows, unless the sums are those of the file. In a transaction that may write."""
    (version,) = db.execute("PRAGMA main.data_version").fetchone()
    if db.execute("SELECT data_version FROM totals").fetchone()[0] == version:
        return
    rows = " UNION ALL ".join(f"SELECT tenant, size FROM {place}" for place in _PLACES)
    db.execute("DELETE FROM sums")
    db.execute(f"INSERT INTO sums SELECT tenant, SUM(size) FROM ({rows}) GROUP BY tenant")
    db.execute("UPDATE totals SET size = (SELECT COALESCE(SUM(size), 0) FROM sums), data_version = ?", (version,))


def of_tenant(db: sqlite3.Connection, tenant: str) -> int:
    """The bytes of a tenant."""
    row = db.execute("SELECT size FROM sums WHERE tenant = ?", (tenant,)).fetchone()
    return int(row[0]) if row is not None else 0


def of_all(db: sqlite3.Connection) -> int:
    """The bytes of all tenants."""
    return int(db.execute("SELECT size FROM totals").fetchone()[0])


def largest(db: sqlite3.Connection) -> str:
    """The tenant with the most bytes. There must be one."""
    return str(db.execute("SELECT tenant FROM sums ORDER BY size DESC LIMIT 1").fetchone()[0])
