"""The listening socket of a supervised gateway: held by its supervisor, lent to each of its lives.

So nobody is refused while a gateway restarts: who connects then waits in the socket's queue and is served
by the successor.  A gateway that was started bare binds its own.
"""

from __future__ import annotations

import ipaddress
import os
import socket

from pipeline.config.schema import Config

VARIABLE = "STARLING_LISTEN_FD"
BACKLOG = 1024


def hold(config: Config) -> socket.socket | None:
    """In the supervisor: bind, listen, and lend it to the children by the environment.

    None when the gateway has to do it: for a host that is a name (it may have several addresses), and
    when it is not possible (the gateway says why).
    """
    try:
        address = ipaddress.ip_address(config.server.host)
    except ValueError:
        return None
    held = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.version == 6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.bind((config.server.host, config.server.port))
        held.listen(BACKLOG)
    except OSError:
        held.close()
        return None
    os.environ[VARIABLE] = str(held.fileno())
    return held


def lent() -> tuple[int, ...]:
    """The descriptor that a new program must inherit, if there is one."""
    given = os.environ.get(VARIABLE, "")
    return (int(given),) if given.isdigit() else ()


def claim() -> socket.socket | None:
    """In the gateway: the socket it was lent, None when it was not. No child of ours finds it again."""
    given = lent()
    os.environ.pop(VARIABLE, None)
    if not given:
        return None
    try:
        claimed = socket.socket(fileno=given[0])
        is_listening = claimed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        return None
    claimed.set_inheritable(False)
    claimed.setblocking(False)
    return claimed if is_listening else None


# ------------------------------------------------------------------ for those who connect


def reachable(host: str) -> str:
    """An address to connect to for one to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def url(config: Config) -> str:
    """Where the gateway is, as seen from this machine."""
    host = reachable(config.server.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.server.port}"
