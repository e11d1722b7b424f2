"""Connections to agents and engines, by aiohttp. stage.py opens the session."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import aiohttp

from pipeline.fleet.peer_tls import PeerTls
from stages.orchestrator.upstream import Answer, Unreachable


class _Answer:
    """An `Answer` of aiohttp's client."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._aborted = ""

    async def read(self) -> bytes:
        if self._aborted:
            raise Unreachable(self._aborted)
        try:
            data = await self._response.content.readany()
        except Unreachable:
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(self._aborted or str(error) or type(error).__name__) from None
        if self._aborted:
            raise Unreachable(self._aborted)
        return data

    def abort(self, reason: str) -> None:
        self._aborted = reason
        self._response.content.set_exception(Unreachable(reason))
        self._response.close()

    def close(self) -> None:
        # A connection whose answer was not read to its end is closed, which cancels the engine's work.
        if self._response.content.at_eof() and not self._aborted:
            self._response.release()
        else:
            self._response.close()


class Session(Protocol):
    """What is needed of aiohttp's session, with its pool of connections."""

    @property
    def request(self) -> Any:
        """`request(method, url, headers=, data=, ssl=, ...)`: the response."""

    async def close(self) -> None:
        """Close all connections."""


class HttpClient:
    """A `Client` on aiohttp's."""

    def __init__(self, open_session: Callable[[], Session], tls: PeerTls | None = None) -> None:
        """`open_session`: is called once, in the event loop."""
        self.tls = tls
        self._open_session = open_session
        self._session: Session | None = None

    async def open(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float = 0.0, *, agent_id: str
    ) -> Answer:
        """The response to a request. Raises `Unreachable`."""
        if self._session is None:
            self._session = self._open_session()
        try:
            context = self._context(url, agent_id)
            async with asyncio.timeout(timeout_s or None):
                response = await self._session.request(
                    method,
                    url,
                    headers=headers,
                    data=body if method == "POST" else None,
                    allow_redirects=False,
                    ssl=context,
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(str(error) or type(error).__name__) from None
        return _Answer(response)

    def _context(self, url: str, agent_id: str) -> ssl.SSLContext | bool:
        """That of a connection to an agent's host. Connections of one context are not used for another one."""
        if url.startswith("https://"):
            if self.tls is None:
                raise Unreachable("it needs TLS: set fleet.tls on this orchestrator, too")
            return self.tls.client_context(agent_id)
        if self.tls is not None and self.tls.is_required:
            raise Unreachable("it offers no TLS, and fleet.tls.required is set here: set fleet.tls there, too")
        return True

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
