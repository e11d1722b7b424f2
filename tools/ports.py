"""Ports for servers that benchmarks and tests start: free, and given to one process only.

A port that the kernel has chosen for port 0 and that is closed again is one of those it may give to the next socket
before the server listens, or while the server restarts. These lie below that range. While it runs, the process that
was given one holds a Unix socket in the abstract namespace named for it, so that two test processes never get the same.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

FIRST, LAST = 15_000, 31_999
_held: list[int] = []  # descriptors of the sockets that reserve this process's ports


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` that nothing uses; no other caller gets it while this process runs."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(FIRST, LAST + 1) if not low <= port <= high]
    # Not of the seeded generator: tests of one seed run in several processes.
    random.SystemRandom().shuffle(ports)
    for port in ports:
        if _reserve(port):
            if _is_free(host, port):
                return port
            os.close(_held.pop())
    with _socket(host) as probe:  # every port of the range is the kernel's to give
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def _reserve(port: int) -> bool:
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0starling-test-port-{port}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        _held.append(name.detach())
        return True


def _is_free(host: str, port: int) -> bool:
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
