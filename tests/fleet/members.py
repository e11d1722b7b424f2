"""Agents that download a published model, as far as their pieces go: files, announcements and the calls, no engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from pipeline.blobs.http import HttpStore
from pipeline.catalog import pulled
from pipeline.config.schema import AgentConfig
from pipeline.coordination.interface import CoordinationStore
from pipeline.fleet.peer_tls import PeerTls
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
    tls: PeerTls | None = None,
    shown: PeerTls | None = None,
    received: list[dict[str, str]] | None = None,
) -> AsyncIterator[Member]:
    """A member with its calls on a loopback port, and another one for TLS. `shown`: of another host's certificate."""
    holdings = kind(site.models_dir.parent / name)

    @web.middleware
    async def note(request: web.Request, handler: Any) -> Any:
        if received is not None:
            received.append(dict(request.headers) | {"Scheme": request.scheme})
        return await handler(request)

    app = web.Application(middlewares=[note])
    api(AgentConfig(peer_connections=peer_connections), holdings).add_routes(app)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        listener = web.TCPSite(runner, "127.0.0.1", 0)
        await listener.start()
        url, tls_url = f"http://127.0.0.1:{runner.addresses[0][1]}", ""
        if tls is not None:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=(shown or tls).server_context("agent")).start()
            tls_url = f"https://127.0.0.1:{runner.addresses[1][1]}"
            url = tls_url if tls.is_required else url
        record = AgentRecord(agent_id=name, url=url, incarnation="1", tls_url=tls_url)
        lease = Lease(await store.grant(600.0))
        written = Announcements(store, lease, record, holdings)
        keeping = asyncio.create_task(written.keep())
        try:
            async with aiohttp.ClientSession() as session:
                exchange = Exchange(holdings, written, session, TOKEN, name, tls=tls)
                yield Member(site, name, holdings, exchange, written)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
    finally:
        await runner.cleanup()
