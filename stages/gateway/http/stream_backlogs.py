"""Bytes of event streams that wait for their clients, bounded for each tenant (or address) and in total.

A stream that alone exceeds its bound drops its connection itself (`sinks.py`).  Here the largest backlogs of a tenant
are dropped until what waits for the tenant, whole responses included, is within its share; a client can resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pipeline.api.fair_shares import FairShares


class Backlogged(Protocol):
    """A stream that is being written."""

    @property
    def backlog(self) -> int:
        """Bytes that wait for the client."""

    def drop(self, reason: str) -> None:
        """Drop the connection."""


class StreamBacklogs:
    """One per gateway. `bounds` also counts the whole responses that wait."""

    def __init__(self, bounds: FairShares) -> None:
        self._bounds = bounds
        self._streams: dict[Backlogged, str] = {}

    @contextmanager
    def counted(self, stream: Backlogged, principal: str) -> Iterator[None]:
        """Count what waits for the stream's client meanwhile."""
        self._streams[stream] = principal
        try:
            yield
        finally:
            del self._streams[stream]

    def tick(self) -> None:
        """Call often: drop the streams that exceed the bounds."""
        waiting: dict[str, list[tuple[int, Backlogged]]] = {}
        for stream, principal in self._streams.items():
            if n := stream.backlog:
                waiting.setdefault(principal, []).append((n, stream))
        bytes_of = {name: self._bounds.held_by(name) + sum(n for n, _ in streams) for name, streams in waiting.items()}
        total = self._bounds.held + sum(n for streams in waiting.values() for n, _ in streams)
        for streams in waiting.values():
            streams.sort(key=lambda one: one[0])
        while waiting:
            name = max(waiting, key=lambda one: bytes_of[one])
            if bytes_of[name] <= self._bounds.share and total <= self._bounds.total:
                return
            n, stream = waiting[name].pop()
            bytes_of[name] -= n
            total -= n
            stream.drop(f"too many bytes wait for this client's connections (server.response_buffer_mb): {n} here")
            if not waiting[name]:
                del waiting[name]
