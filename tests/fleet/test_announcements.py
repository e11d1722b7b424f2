"""Agents announce the files that others may fetch from them, for as long as they have them and a lease."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from pipeline.coordination.interface import Item
from pipeline.coordination.memory import MemoryStore
from pipeline.fleet import records
from stages.agent.peers import announcements as announcing
from stages.agent.peers.announcements import Announcements
from stages.agent.peers.holdings import FileKey, Holdings
from tests.fleet.members import Lease, member
from tests.fleet.site import Site


async def keys(store: MemoryStore) -> list[Item]:
    return (await store.scan(announcing.PREFIX))[0]


async def test_a_file_is_announced_while_it_is_here(site: Site, records_store: MemoryStore) -> None:
    async with member(site, records_store, "a") as one:
        await one.pull()
        ((key, _, _),) = await keys(records_store)
        assert key == f"pieces/{site.entry.digest}/{site.entry.weights_checksum}/a"
        assert site.entry.name not in key
        (one.models_dir / f"{site.entry.digest}.idx").unlink()
        await one.announcements.write()
        assert await keys(records_store) == []


async def test_announcements_end_with_the_lease_and_come_back_with_the_next(
    site: Site, records_store: MemoryStore
) -> None:
    async with member(site, records_store, "a") as one:
        await one.pull()
        lease = one.announcements._lease
        assert isinstance(lease, Lease)
        await records_store.revoke(lease.lease_id)
        assert await keys(records_store) == []
        await one.announcements.write()  # with a lease that has ended
        lease.lease_id = ""
        await one.announcements.write()
        assert await keys(records_store) == []
        lease.lease_id = await records_store.grant(60.0)
        await one.announcements.write()
        assert len(await keys(records_store)) == 1


async def test_files_are_announced_after_an_error_of_the_disk(
    tmp_path: Path, records_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = records.AgentRecord(agent_id="a", url="http://127.0.0.1:1", incarnation="1")
    key = FileKey("d" * 64, "c" * 32)
    holdings = Holdings(tmp_path)
    looks = iter((OSError(errno.EMFILE, "Too many open files"), [key]))

    def look() -> list[FileKey]:
        found = next(looks)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(holdings, "keys", look)
    written = Announcements(records_store, Lease(await records_store.grant(60.0)), own, holdings)
    keeping = asyncio.create_task(written.keep())
    try:
        for _ in range(2):
            await written.announced()
        assert not keeping.done()
        assert [item.key for item in await keys(records_store)] == [f"pieces/{key.digest}/{key.checksum}/a"]
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_records_of_others_are_checked(tmp_path: Path, records_store: MemoryStore) -> None:
    own = records.AgentRecord(agent_id="a", url="http://127.0.0.1:1", incarnation="1")
    written = Announcements(records_store, Lease("1"), own, Holdings(tmp_path))
    key = FileKey("d" * 64, "c" * 32)
    folder = f"pieces/{key.digest}/{key.checksum}/"
    await records_store.put(folder + "a", records.encode(own))
    await records_store.put(folder + "x", records.encode(own))  # under the key of another agent
    await records_store.put(folder + "y", b"{")
    newer = records.AgentRecord(agent_id="z", url="http://127.0.0.1:1", incarnation="1", version=99)
    await records_store.put(folder + "z", records.encode(newer))
    assert await written.others(key) == []
    for number in range(20):
        one = records.AgentRecord(agent_id=f"b{number}", url="http://127.0.0.1:1", incarnation="1")
        await records_store.put(folder + one.agent_id, records.encode(one))
    assert len(await written.others(key)) == announcing.MAX_PEERS
