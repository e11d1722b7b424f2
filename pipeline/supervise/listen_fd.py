"""Listen-fd passing: the supervisor of the gateway owns the listening sockets and passes them to each gateway process.

While a gateway restarts, no connection is refused: new connections wait in a socket's queue for the successor.
A gateway without a supervisor binds its own sockets.
"""

from __future__ import annotations

import ipaddress
import os
import socket

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.supervise.unix_listener import UnixListener, listener_of, socket_path

VARIABLE = "STARLING_LISTEN_FD"
UNIX_VARIABLE = "STARLING_LISTEN_UNIX_FD"
TLS_VARIABLE = "STARLING_TLS_FD"  # memory that holds the certificate in use: pipeline/tls/kept.py
BACKLOG = 1024


def bind_listener(config: Config) -> socket.socket | None:
    """In the supervisor: bind, listen, and pass the socket to the children by the environment.

    None when the gateway must bind itself: for a host name (it may have several addresses), and when
    binding fails (the gateway reports why).
    """
    try:
        address = ipaddress.ip_address(config.server.host)  # none without TCP
    except ValueError:
        return None
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.version == 6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((config.server.host, config.server.port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return None
    os.environ[VARIABLE] = str(listener.fileno())
    return listener


def bind_unix_listener(config: Config) -> UnixListener | None:
    """In the supervisor: the same for the Unix socket. None without one, or when the gateway must report why not."""
    try:
        listener = listener_of(config)
    except ConfigError:
        return None
    if listener is not None:
        os.environ[UNIX_VARIABLE] = str(listener.socket.fileno())
    return listener


def keep_certificate(config: Config) -> int:
    """In the supervisor: make memory for the certificate, and pass it to the children; -1 without TLS."""
    if not config.server.tls_cert:
        return -1
    fd = os.memfd_create("starling-tls", os.MFD_CLOEXEC)
    os.environ[TLS_VARIABLE] = str(fd)
    return fd


def inherited_fds() -> tuple[int, ...]:
    """The descriptors that a new program must inherit."""
    given = (os.environ.get(name, "") for name in (VARIABLE, UNIX_VARIABLE, TLS_VARIABLE))
    return tuple(int(fd) for fd in given if fd.isdigit())


def claim(variable: str = VARIABLE) -> socket.socket | None:
    """In the gateway: the passed socket, or None. Removed from the environment, so that no child inherits it."""
    given = os.environ.pop(variable, "")
    if not given.isdigit():
        return None
    try:
        claimed = socket.socket(fileno=int(given))
        is_listening = claimed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        return None
    claimed.set_inheritable(False)
    claimed.setblocking(False)
    return claimed if is_listening else None


# ------------------------------------------------------------------ for clients


def reachable(host: str) -> str:
    """The address to connect to for an address to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def url(config: Config, port: int = 0) -> str:
    """The gateway's URL on this machine, unix:PATH if it listens only there. `port`: 0: the configured one."""
    if not config.server.host:
        return f"unix:{socket_path(config)}"
    host = reachable(config.server.host)
    scheme = "https" if config.server.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or config.server.port}"
