"""KV pages from another agent, for an engine here that is about to get their request, or to cache them for later ones.

The bytes are received into memory without a name, and the engine gets its address: nothing is left if a process dies.
The engine checks what they are (stages/kv/page_exchange.py).  Bounded in bytes and in time, in total and per tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from pipeline import procfs
from pipeline.api.adapter_names import base_of
from pipeline.api.page_owner import payer_of
from pipeline.errors import ModelUnavailable, NotFound, Overloaded, ResourceError, StarlingError, StorageUnavailable
from pipeline.fleet import token as tokens
from pipeline.fleet.bodies import TakePagesRequest, TakePagesResponse, TakePrefixesRequest
from pipeline.fleet.peer_tls import PeerTls
from pipeline.ipc import control
from shm.sent_pages import MAX_OF_TENANT, TENANT_SHARE
from stages.agent.disk_threads import PAGES
from stages.agent.engines.http_session import HttpSession
from stages.agent.models import Models

CONNECT_S = 2.0
CALL_S = 2.0  # of a call to the engine
MEMORY_FLOOR = 256 << 20  # bytes of the host's memory that pages leave available
# Answers of a source that concern one transfer alone: an orchestrator goes on sending others.
_REFUSALS: dict[int, Callable[[str], StarlingError]] = {404: NotFound, 429: Overloaded}


def bytes_of_request(max_bytes: int) -> int:
    """Bytes of one request's pages that an agent takes, and so gives, if it takes `max_bytes` of all."""
    return min(max_bytes // TENANT_SHARE, MAX_OF_TENANT)


class Taker:
    """One per agent. `max_bytes`: of all pages that are being received, 0: none are."""

    def __init__(
        self,
        models: Models,
        session: HttpSession,
        token: str,
        max_bytes: int,
        tls: PeerTls | None = None,
        clock: Callable[[], float] = time.monotonic,
        available_memory: Callable[[], int] = procfs.available_memory,
    ) -> None:
        """`token`: of the fleet. `tls`: this agent's certificate, if it has one. `clock`: monotonic, s."""
        self._models = models
        self._session = session
        self._token = token
        self._max_bytes = max_bytes
        self._tls = tls
        self._clock = clock
        self._available_memory = available_memory
        self._used: Counter[str] = Counter()  # bytes by tenant, or by owner where the tenant is not known

    async def take(self, asked: TakePagesRequest) -> TakePagesResponse:
        """Get pages and offer them to the engine. Raises `StarlingError`: then the engine computes them."""
        return await self._take(asked, {"op": "take", "request": asked.request_id}, asked.tenant)

    async def take_prefixes(self, asked: TakePrefixesRequest) -> TakePagesResponse:
        """Get pages, which the engine caches. Raises `StarlingError`: then the engine computes them."""
        # Who forwards for many tenants and does not name this one is one tenant: requests choose their own salts.
        account = asked.account or payer_of(asked.tenant)
        return await self._take(asked, {"op": "keep", "uses": asked.uses, "idle_s": asked.idle_s}, account)

    async def _take(
        self, asked: TakePagesRequest | TakePrefixesRequest, call: dict[str, Any], account: str
    ) -> TakePagesResponse:
        placement = self._models.find(asked.model_id)
        run_dir = placement.engine.control_dir if placement.engine is not None else None
        if placement.state != "READY" or run_dir is None:
            raise ModelUnavailable(f"no engine of {asked.model_id!r} takes KV pages here")
        begun = self._clock()
        with self._reserved(account, asked.bytes):
            try:
                async with asyncio.timeout(asked.timeout_ms / 1000):
                    pages = await self._bring(asked, run_dir, call)
            except TimeoutError:
                raise StorageUnavailable(f"the KV pages have not come within {asked.timeout_ms} ms") from None
        return TakePagesResponse(pages=pages, seconds=round(self._clock() - begun, 6))

    async def _bring(self, asked: TakePagesRequest | TakePrefixesRequest, run_dir: Path, call: dict[str, Any]) -> int:
        try:
            memory = os.memfd_create("kv-pages", os.MFD_CLOEXEC)
        except OSError as error:
            raise ResourceError(
                f"memory for {asked.bytes} bytes of KV pages cannot be made: {error.strerror}; raise the limits of the "
                "agent's process"
            ) from None
        try:
            await self._receive(asked, memory)
        except BaseException:
            os.close(memory)
            raise

        def offer() -> dict[str, Any]:
            path = f"/proc/{os.getpid()}/fd/{memory}"
            full = {**call, "model": base_of(asked.model_id), "path": path, "tenant": asked.tenant}
            try:
                return control.call(run_dir, "kv", full, CALL_S)
            finally:
                os.close(memory)

        # The thread ends by itself, also if nothing waits for it any more: until then the descriptor is its own.
        answer = await asyncio.shield(PAGES.run(offer))
        return int(answer["pages"])

    async def _receive(self, asked: TakePagesRequest | TakePrefixesRequest, memory: int) -> None:
        source = asked.source
        base = source.tls_url if self._tls is not None and source.tls_url else source.url
        name = f"agent {source.agent_id}"
        headers = {"Accept-Encoding": "identity"}
        context: ssl.SSLContext | bool = True
        if base.startswith("https://"):
            if self._tls is None:
                raise NotFound(f"{name} needs TLS: set fleet.tls on this agent, too")
            context = self._tls.client_context(source.agent_id)
        elif self._tls is not None and self._tls.is_required:
            raise NotFound(f"{name} offers no TLS, and fleet.tls.required is set here: set fleet.tls there, too")
        else:
            headers |= tokens.authorization(self._token)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                "GET",
                f"{base}/kv_pages/{asked.ticket}",
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                ssl=context,
            ) as response:
                encoding = response.headers.get("Content-Encoding", "identity")
                if response.status != 200 or response.content_length != asked.bytes or encoding != "identity":
                    response.close()  # its body need not be received
                    kind = _REFUSALS.get(response.status, StorageUnavailable)
                    raise kind(
                        f"{name} answers {response.status} with {response.content_length} bytes, expected {asked.bytes}"
                    )
                received = 0
                async for part in response.content.iter_any():
                    received += len(part)
                    if received > asked.bytes:
                        raise StorageUnavailable(f"{name} sends more than {asked.bytes} bytes")
                    _write(memory, part)
                if received != asked.bytes:
                    raise StorageUnavailable(f"{name} has sent {received} of {asked.bytes} bytes")
        except (aiohttp.ClientError, OSError, EOFError) as error:
            raise StorageUnavailable(f"{name}: {str(error) or type(error).__name__}") from None

    @contextlib.contextmanager
    def _reserved(self, tenant: str, nbytes: int) -> Iterator[None]:
        """Count `nbytes` as used. Raises `Overloaded`, `ResourceError`."""
        share = bytes_of_request(self._max_bytes) if tenant else self._max_bytes
        if self._used.total() + nbytes > self._max_bytes or self._used[tenant] + nbytes > share:
            raise Overloaded(
                f"{nbytes} bytes of KV pages exceed fleet.agent.page_mb: {self._used.total()} of {self._max_bytes} are "
                f"under way, {self._used[tenant]} of {share} of their tenant",
                retry_after_s=1.0,
            )
        if self._available_memory() - nbytes < MEMORY_FLOOR:
            raise ResourceError(f"there is no memory for {nbytes} bytes of KV pages")
        self._used[tenant] += nbytes
        try:
            yield
        finally:
            self._used[tenant] -= nbytes
            if not self._used[tenant]:
                del self._used[tenant]


def _write(memory: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(memory, view) :]
