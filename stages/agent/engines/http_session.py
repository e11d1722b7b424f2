"""What the agent needs of an HTTP client. `stage.py` makes the client and gives it to all who need it."""

from __future__ import annotations

from typing import Any, Protocol


class HttpSession(Protocol):
    """A client with a pool of connections, as aiohttp has one."""

    @property
    def request(self) -> Any:
        """`request(method, url, headers=, timeout=, ...)`: an asynchronous context manager with the response."""
