"""KV pages from agent to agent over sockets: who gets them, how much at once, and what a bad source does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pipeline.config.load import resolve
from pipeline.config.schema import AgentConfig
from pipeline.errors import (
    ModelUnavailable,
    NotFound,
    Overloaded,
    ResourceError,
    StarlingError,
    TooLarge,
)
from pipeline.fleet.bodies import (
    GivePagesRequest,
    GivePagesResponse,
    GivePrefixesRequest,
    ListPrefixesRequest,
    TakePagesRequest,
    TakePrefixesRequest,
)
from pipeline.fleet.records import AgentRecord
from pipeline.fleet.token import authorization
from pipeline.ipc.control_asyncio import ControlServer
from shm.sent_pages import HEAD_BYTES, IDENTITY_BYTES
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.http_api import AgentApi, _open_to
from stages.agent.kv_pages.giving import LEFT_S, MAX_TICKETS, TICKET_S, Giver
from stages.agent.kv_pages.http_api import MAX_SENDING, KvPageApi
from stages.agent.kv_pages.taking import Taker
from stages.agent.metrics import AgentMetrics
from stages.agent.peers.http_api import PieceApi
from stages.kv.prefix_exchange import PrefixExchange
from tests.kv.engine_side import REQUEST, TOKENS, Side
from tests.kv.world import PAGE_BYTES, PAGE_TOKENS

MEGABYTE = 1 << 20
COPY = "req-" + "1" * 24
NBYTES = HEAD_BYTES + 6 * (IDENTITY_BYTES + PAGE_BYTES)


class Member:
    """An agent: the calls of KV pages on a loopback port, and an engine with a real control socket."""

    def __init__(self, folder: Path, name: str, session: aiohttp.ClientSession, max_bytes: int) -> None:
        self.now = 0.0
        self.memory = 1 << 40
        self.side = Side(folder, name)
        self.prefixes = PrefixExchange(lambda model: self.side.loaded, lambda: self.now)
        self.engine: Any = SimpleNamespace(kv_arenas=folder, control_dir=folder / name)
        self.engine.control_dir.mkdir()
        placement = SimpleNamespace(model_id="tiny", engine=self.engine, state="READY")
        models: Any = SimpleNamespace(find=lambda model: placement)
        self.giver = Giver(models, max_bytes, lambda: self.now)
        self.taker = Taker(models, session, "t" * 32, max_bytes, available_memory=lambda: self.memory)
        self.api = KvPageApi(self.giver, self.taker, Bandwidth(0, lambda: 0.0))
        self.record = AgentRecord(agent_id=name, url="", incarnation="1")
        self.before: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The control socket of the kv stage."""
        exchange, prefixes = self.side.exchange, self.prefixes
        calls = {"tails": exchange.tails, "take": exchange.take}
        calls |= {"prefixes": prefixes.prefixes, "keep": prefixes.keep}
        return calls[request["op"]](request)

    async def offer(self, to: str = "target", request: str = REQUEST, max_bytes: int = 0) -> GivePagesResponse:
        asked = GivePagesRequest(model_id="tiny", request_id=request, agent_id=to, max_bytes=max_bytes)
        return await self.giver.offer(asked)

    def asked(self, given: GivePagesResponse, **more: Any) -> TakePagesRequest:
        """What an orchestrator sends to the target."""
        fields = {"source": self.record, "bytes": given.bytes, "timeout_ms": 30_000, "ticket": given.ticket, **more}
        return TakePagesRequest(model_id="tiny", request_id=COPY, **fields)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        @web.middleware
        async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
            if self.before is not None and (made := await self.before(request)) is not None:
                return made
            try:
                return await handler(request)  # type: ignore[no-any-return]
            except StarlingError as error:
                return web.Response(status=error.status)

        app = web.Application(middlewares=[middleware])
        self.api.add_routes(app, lambda request: request.read())
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        control = ControlServer(self.engine.control_dir, "kv", self.answer)
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.record = AgentRecord(
                agent_id=self.record.agent_id, url=f"http://127.0.0.1:{runner.addresses[0][1]}", incarnation="1"
            )
            await control.start()
            yield
        finally:
            await control.close()
            await runner.cleanup()
            self.side.exchange.close()
            self.prefixes.close()


@contextlib.asynccontextmanager
async def two(folder: Path, max_bytes: int = MEGABYTE) -> AsyncIterator[tuple[Member, Member]]:
    """The agents "source", which runs a request of six full pages, and "target"."""
    async with aiohttp.ClientSession() as session:
        source, target = (Member(folder, name, session, max_bytes) for name in ("source", "target"))
        source.side.compute(f"{REQUEST}/0~1", TOKENS)
        async with source.running(), target.running():
            yield source, target


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A directory; afterwards no memory of a transfer is left open."""
    yield tmp_path
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # other threads close files
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    assert not [link for link in links if "kv-pages" in link]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents and engines of a test share its event loop: a loaded machine may take longer than the limits."""
    for limit in ("giving.CALL_S", "taking.CALL_S", "taking.CONNECT_S"):
        monkeypatch.setattr(f"stages.agent.kv_pages.{limit}", 600.0)


async def test_a_target_gets_the_pages_of_a_request(folder: Path) -> None:
    async with two(folder) as (source, target):
        given = await source.offer()
        assert (given.pages, given.of_pages, given.bytes) == (6, 6, NBYTES)
        taken = await target.taker.take(source.asked(given))
        assert taken.pages == 6 and taken.seconds > 0
        target.side.use(f"{COPY}/0~1")
        grant = target.side.acquire("s", TOKENS)
        assert grant.cached_tokens == 6 * PAGE_TOKENS
        target.side.check_shared(grant, TOKENS)
        # A ticket is used once.
        with pytest.raises(NotFound, match="answers 404"):
            await target.taker.take(source.asked(given))


async def test_a_target_caches_the_prefixes_of_another_agent(folder: Path) -> None:
    async with two(folder) as (source, target):
        listing = ListPrefixesRequest(model_id="tiny", limit=100)
        assert (await source.giver.list_prefixes(listing)).prefixes == ()  # one request alone has it
        source.side.acquire("again", TOKENS)
        found = await source.giver.list_prefixes(listing)
        (prefix,) = found.prefixes
        assert (prefix.uses, len(prefix.names), found.page_bytes) == (2, 8 * 6, PAGE_BYTES + IDENTITY_BYTES)
        assert source.giver.prefixes_left("tiny") == 1
        asked = GivePrefixesRequest(model_id="tiny", tails=(prefix.tail,), agent_id="target", max_bytes=MEGABYTE)
        given = await source.giver.offer_prefixes(asked)
        assert (given.pages, given.bytes) == (6, NBYTES)
        with pytest.raises(TooLarge):
            await source.giver.offer_prefixes(GivePrefixesRequest(**{**_fields(asked), "max_bytes": HEAD_BYTES}))
        with pytest.raises(NotFound, match="no KV pages here"):
            await source.giver.offer_prefixes(GivePrefixesRequest(**{**_fields(asked), "tails": ("ab" * 16,)}))
        fields: Any = {"source": source.record, "ticket": given.ticket, "bytes": given.bytes, "timeout_ms": 30_000}
        take = TakePrefixesRequest(model_id="tiny", tenant="", uses=prefix.uses, idle_s=0.0, **fields)
        assert (await target.taker.take_prefixes(take)).pages == 6
        while target.prefixes.step():
            pass
        grant = target.side.acquire("s", TOKENS)
        # A prefix takes a quarter of the arena at most.
        assert grant.cached_tokens == 4 * PAGE_TOKENS
        target.side.check_shared(grant, TOKENS)
        # What is left to be sent ends with its time, or when an orchestrator says so.
        source.now += LEFT_S
        assert source.giver.prefixes_left("tiny") == 0
        await source.giver.list_prefixes(listing)
        assert source.giver.prefixes_left("tiny") == 1
        await source.giver.list_prefixes(ListPrefixesRequest(model_id="tiny", limit=0))
        assert source.giver.prefixes_left("tiny") == 0


def _fields(asked: GivePrefixesRequest) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in asked.__struct_fields__}


async def test_tickets_are_for_one_agent_and_end(folder: Path) -> None:
    async with two(folder) as (source, _):
        ticket = (await source.offer()).ticket
        with pytest.raises(NotFound):
            source.giver.redeem(ticket, "other")
        assert len(source.giver.redeem(ticket, "target").places) == 6
        late = (await source.offer()).ticket
        source.now += TICKET_S
        with pytest.raises(NotFound):
            source.giver.redeem(late, "target")


async def test_unused_tickets_stop_no_later_ones(folder: Path) -> None:
    """As in a drain of many streams, of which the orchestrator computes most."""
    async with two(folder) as (source, _):
        tickets = [(await source.offer(to=f"agent-{n}")).ticket for n in range(MAX_TICKETS + 2)]
        for n, ticket in enumerate(tickets):
            if n < 2:
                with pytest.raises(NotFound):
                    source.giver.redeem(ticket, f"agent-{n}")
            else:
                assert len(source.giver.redeem(ticket, f"agent-{n}").places) == 6
        # Another one for the same request and agent takes the place of the first one.
        first = (await source.offer()).ticket
        other = (await source.offer(to="other")).ticket
        second = (await source.offer()).ticket
        with pytest.raises(NotFound):
            source.giver.redeem(first, "target")
        assert len(source.giver.redeem(second, "target").places) == 6
        assert len(source.giver.redeem(other, "other").places) == 6


def test_over_tls_only_orchestrators_decide_and_only_agents_read() -> None:
    assert _open_to("/give_pages") == _open_to("/take_pages") == ("orchestrator",)
    assert _open_to("/kv_pages/" + "t" * 32) == ("agent",)


async def test_the_log_has_no_ticket(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a ticket that is shown to the agent but not redeemed, as by a caller without the token."""
    caplog.set_level(logging.INFO, "starling.agent")
    none: Any = None
    async with two(folder) as (source, _), aiohttp.ClientSession() as session:
        given = await source.offer()
        pieces = PieceApi(AgentConfig(), None)
        api = AgentApi(
            resolve({}, {}), "t" * 32, none, none, none, AgentMetrics(), session, pieces, kv_pages=source.api
        )
        runner = web.AppRunner(api.app(), shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            base = f"http://127.0.0.1:{runner.addresses[0][1]}/kv_pages/{given.ticket}"
            headers = authorization("t" * 32)
            for path, shown, status in (("", {}, 401), ("/", headers, 404), ("", headers, 500)):
                if status == 500:
                    source.api._giver = none
                async with session.get(base + path, headers=shown) as answer:
                    assert answer.status == status
        finally:
            await runner.cleanup()
    found = [(record.message, record.__dict__["path"]) for record in caplog.records if "path" in record.__dict__]
    route = "/kv_pages/{ticket}"
    refused = "request refused"
    assert found == [(refused, route), (refused, "other"), ("internal error", route), (refused, route)]
    assert given.ticket not in repr([record.__dict__ for record in caplog.records])


async def test_what_is_not_there_is_not_given(folder: Path) -> None:
    async with two(folder) as (source, _):
        with pytest.raises(StarlingError, match="no computed pages"):
            await source.offer(request="req-other")
        source.engine.control_dir = None
        with pytest.raises(NotFound, match="gives no KV pages"):
            await source.offer()
    (folder / "none").mkdir()
    async with two(folder / "none", 0) as (source, _):
        with pytest.raises(NotFound, match="page_mb"):
            await source.offer()


async def test_a_request_over_the_bound_gives_its_beginning(folder: Path) -> None:
    async with two(folder, 3 * (PAGE_BYTES + IDENTITY_BYTES) + HEAD_BYTES) as (source, target):
        given = await source.offer()
        assert given.pages == 3
        await target.taker.take(source.asked(given))
        target.side.use(f"{COPY}/0~1")
        assert target.side.acquire("s", TOKENS).cached_tokens == 3 * PAGE_TOKENS


async def test_no_more_is_given_than_the_target_takes(folder: Path) -> None:
    async with two(folder) as (source, target):
        target.taker._max_bytes = 4 * (PAGE_BYTES + IDENTITY_BYTES) + HEAD_BYTES
        given = await source.offer(max_bytes=target.taker._max_bytes)
        assert (given.pages, given.of_pages, given.bytes) == (4, 6, target.taker._max_bytes)
        assert (await target.taker.take(source.asked(given))).pages == 4
        with pytest.raises(TooLarge, match="page_mb"):
            await source.offer(max_bytes=HEAD_BYTES + PAGE_BYTES)
        assert (await source.offer(max_bytes=1 << 40)).pages == 6


@pytest.mark.parametrize("tenant", ["", "mine"])
async def test_bytes_under_way_are_bounded_per_tenant_and_in_total(folder: Path, tenant: str) -> None:
    async with two(folder, 3 * NBYTES if tenant else 2 * NBYTES - 1) as (source, target):
        held = asyncio.Event()
        arrived = asyncio.Event()

        async def hold(request: web.Request) -> None:
            arrived.set()
            await held.wait()

        source.before = hold
        given = [await source.offer(to=name) for name in ("a", "b", "c")]
        first = asyncio.create_task(target.taker.take(source.asked(given[0], tenant=tenant)))
        await arrived.wait()
        with pytest.raises(Overloaded, match="page_mb"):
            await target.taker.take(source.asked(given[1], tenant=tenant))
        if tenant:  # another one still has room
            other = asyncio.create_task(target.taker.take(source.asked(given[2], tenant="other")))
        held.set()
        assert (await first).pages == 6
        if tenant:
            assert (await other).pages == 6
        source.before = None
        assert (await target.taker.take(source.asked(given[1], tenant=tenant))).pages == 6


async def test_streams_prefixes_and_sessions_of_a_tenant_have_one_share(folder: Path) -> None:
    """Streams come with the tenant's name; prefixes and sessions with it besides the owner that the engine checks."""
    async with two(folder, 3 * NBYTES) as (source, target):
        held, arrived = asyncio.Event(), asyncio.Event()

        async def hold(request: web.Request) -> None:
            arrived.set()
            await held.wait()

        source.before = hold
        given = await source.offer()
        fields: Any = {"source": source.record, "ticket": given.ticket, "bytes": NBYTES, "timeout_ms": 30_000}
        fields |= {"model_id": "tiny", "uses": 2, "idle_s": 0.0}
        mine, other = (f"\x01fleet\0{digit * 32}" for digit in "12")
        first = asyncio.create_task(target.taker.take(source.asked(given, tenant="mine")))
        await arrived.wait()
        used = f"{NBYTES} of {3 * NBYTES} are under way, {NBYTES} of {3 * NBYTES // 2} of their tenant"
        with pytest.raises(Overloaded, match=used):
            await target.taker.take_prefixes(TakePrefixesRequest(tenant=mine, account="mine", **fields))
        # Owners that are not known as tenants are one, whatever their requests have for a salt.
        fields["ticket"] = (await source.offer("else")).ticket
        second = asyncio.create_task(target.taker.take_prefixes(TakePrefixesRequest(tenant=mine, **fields)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=f"{2 * NBYTES} of {3 * NBYTES} are under way, {NBYTES} of"):
            await target.taker.take_prefixes(TakePrefixesRequest(tenant=other, **fields))
        held.set()
        assert ((await first).pages, (await second).pages) == (6, 6)


async def test_pages_take_no_memory_that_the_host_needs(folder: Path) -> None:
    async with two(folder) as (source, target):
        given = await source.offer()
        target.memory = 256 << 20
        with pytest.raises(ResourceError, match="memory"):
            await target.taker.take(source.asked(given))
        target.memory = 1 << 40
        assert (await target.taker.take(source.asked(given))).pages == 6


async def test_a_host_without_descriptors_is_an_error_of_the_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(folder) as (source, target):
        given = await source.offer()

        def refuse(name: str, flags: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patched:
            patched.setattr(os, "memfd_create", refuse)
            with pytest.raises(ResourceError, match="Too many open files"):
                await target.taker.take(source.asked(given))
        assert (await target.taker.take(source.asked(given))).pages == 6


async def test_a_source_sends_to_few_at_once(folder: Path) -> None:
    async with two(folder, 100 * NBYTES) as (source, target):
        source.api._sending = MAX_SENDING
        with pytest.raises(Overloaded, match="answers 429"):
            await target.taker.take(source.asked(await source.offer()))


async def bad_status(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500)


async def too_long(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(NBYTES + 1))


async def too_short(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(NBYTES - 1))


async def encoded(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(NBYTES), headers={"Content-Encoding": "gzip"})


async def nonsense(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(NBYTES))


async def redirect(request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "/elsewhere"})


async def cut_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_length = NBYTES
    await response.prepare(request)
    await response.write(bytes(NBYTES // 2))
    assert request.transport is not None
    request.transport.abort()
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("bad", [bad_status, too_long, too_short, encoded, nonsense, redirect, cut_off, silent])
async def test_a_bad_source_costs_nothing_but_time(folder: Path, bad: Any) -> None:
    async with two(folder, NBYTES) as (source, target):
        source.before = bad
        given = await source.offer()
        with pytest.raises(StarlingError) as refused:
            await target.taker.take(source.asked(given, timeout_ms=100 if bad is silent else 30_000))
        # Not a code with which an orchestrator would go on asking this source for other streams.
        assert refused.value.code in ("STORAGE_UNAVAILABLE", "INVALID_REQUEST")
        assert len(target.side.exchange) == 0
        # Its bytes are free again, and the next source is used.
        source.before = None
        assert (await target.taker.take(source.asked(await source.offer()))).pages == 6


async def test_a_source_that_has_ended_and_an_engine_that_has(folder: Path) -> None:
    async with two(folder) as (source, target):
        given = await source.offer()
        gone = source.asked(given, source=AgentRecord(agent_id="source", url="http://127.0.0.1:1", incarnation="1"))
        with pytest.raises(StarlingError, match="agent source"):
            await target.taker.take(gone)
        target.engine.control_dir = folder / "nothing"
        with pytest.raises(StarlingError, match="does not answer"):
            await target.taker.take(source.asked(given))
        target.engine.control_dir = None
        with pytest.raises(ModelUnavailable):
            await target.taker.take(source.asked(given))


async def test_a_page_that_is_damaged_in_the_arena_ends_the_transfer(folder: Path) -> None:
    async with two(folder) as (source, target):
        given = await source.offer()
        source.side.views.pages[2, 100] ^= 1
        with pytest.raises(StarlingError):
            await target.taker.take(source.asked(given))
        assert len(target.side.exchange) == 0
