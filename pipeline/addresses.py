"""IP addresses of a host."""

from __future__ import annotations

import asyncio
import socket
from typing import Any


async def resolve(host: str, port: int) -> list[str]:
    """The IP addresses that the name service has for the host, in its order, each once. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(_address(info[4]) for info in found))


def _address(found: tuple[Any, ...]) -> str:
    """An IP address of `getaddrinfo`: a link-local one of IPv6 is that of one interface."""
    if len(found) == 4 and found[3]:
        return f"{found[0]}%{socket.if_indextoname(found[3])}"  # uvloop reads no number there
    return str(found[0])
