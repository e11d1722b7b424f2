"""Agents that download a published model, as far as their pieces go: files, announcements and the calls, no engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web

from pipeline.blobs.http import HttpStore
from pipeline.catalog import pulled
from pipeline.config.schema import AgentConfig
from pipeline.coordination.interface import CoordinationStore
from pipeline.fleet.records import AgentRecord
from stages.agent.cache.model_cache import ModelCache
from stages.agent.downloads.model import Arrival, download_model
from stages.agent.peers.announcements import Announcements
from stages.agent.peers.holdings import Holdings
from stages.agent.peers.http_api import PieceApi
from stages.agent.peers.sharing import Exchange
from tests.fleet.site import Site

TOKEN = "t" * 32


class Lease:
    """A lease of the store, as the agent's own lease shows it."""

    def __init__(self, lease_id: str) -> None:
        self.lease_id = lease_id


class Member:
    """One agent of a site. `holdings` may be replaced by one that misbehaves."""

    def __init__(self, site: Site, name: str, holdings: Holdings, exchange: Exchange, written: Announcements) -> None:
        self.name = name
        self.holdings = holdings
        self.exchange = exchange
        self.announcements = written
        self._site = site

    async def pull(self) -> Arrival:
        """Download the site's model."""
        cache = ModelCache(self.models_dir, self._site.bounds)
        context = self._site.context()._replace(cache=cache, exchange=self.exchange)
        async with HttpStore(self._site.server.url) as store:
            arrival = await download_model(context, self._site.entry, [store], lambda phase, done, total: None)
        await self.announcements.write()
        return arrival

    @property
    def models_dir(self) -> Path:
        return self.holdings.models_dir

    def is_right(self) -> bool:
        """Whether the model is here, with the published bytes."""
        site = self._site
        found = b"".join((site.root / site.entry.part_key(part)).read_bytes() for part in range(site.entry.n_parts))
        path = self.models_dir / f"{site.entry.digest}.bin"
        return path.read_bytes() == found and pulled.is_complete(self.models_dir, site.entry)


@contextlib.asynccontextmanager
async def member(
    site: Site,
    store: CoordinationStore,
    name: str,
    kind: type[Holdings] = Holdings,
    api: type[PieceApi] = PieceApi,
    peer_connections: int = 8,
) -> AsyncIterator[Member]:
    """A member with its calls on a loopback port."""
    holdings = kind(site.models_dir.parent / name)
    app = web.Application()
    api(AgentConfig(peer_connections=peer_connections), holdings).add_routes(app)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        listener = web.TCPSite(runner, "127.0.0.1", 0)
        await listener.start()
        port = runner.addresses[0][1]
        record = AgentRecord(agent_id=name, url=f"http://127.0.0.1:{port}", incarnation="1")
        lease = Lease(await store.grant(600.0))
        written = Announcements(store, lease, record, holdings)
        keeping = asyncio.create_task(written.keep())
        try:
            async with aiohttp.ClientSession() as session:
                yield Member(site, name, holdings, Exchange(holdings, written, session, TOKEN, name), written)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
    finally:
        await runner.cleanup()
