"""ZeroMQ addresses of edges: where they come from and which are allowed. Nothing is created."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError

SOCKET_PATH_MAX = 106  # bytes; sun_path has 108 including the final zero, and ZeroMQ needs one more


def edge_address(config: Config, edge: str, env: Mapping[str, str] = os.environ) -> str:
    """The address of an edge. Raises `ConfigError` when the path of its socket is too long."""
    given = config.edges.get(edge)
    address = given or f"ipc://{paths.run_dir(config, env) / edge}.sock"
    if address.startswith("ipc://"):
        length = len(os.fsencode(address.removeprefix("ipc://")))
        if length > SOCKET_PATH_MAX:
            key = f"edges.{edge}" if given else "server.run_dir"
            raise ConfigError(
                f"{key}: the socket path {address.removeprefix('ipc://')!r} has {length} bytes, and the "
                f"system allows {SOCKET_PATH_MAX}; choose a shorter directory",
                param=key,
            )
    return address


def check_address(address: str, allow_remote: bool = False) -> None:
    """Raise `ConfigError` unless `address` is `ipc:///PATH` of allowed length or `tcp://HOST:PORT` on a loopback host.

    `allow_remote` admits other hosts. Frames over tcp:// are encrypted, and both sides prove their keys
    (pipeline/ipc/curve.py).
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        if not rest.startswith("/"):
            raise ConfigError(f"address {address!r}: the path must be absolute")
        length = len(os.fsencode(rest))
        if length > SOCKET_PATH_MAX:
            raise ConfigError(f"address {address!r}: path of {length} bytes, a socket's may have {SOCKET_PATH_MAX}")
        return
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"address {address!r}: expected ipc:///PATH or tcp://HOST:PORT")
    if allow_remote or host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"address {address!r}: {host} is not a loopback address; set server.remote_edges: true to allow edges "
            f"between machines"
        )
