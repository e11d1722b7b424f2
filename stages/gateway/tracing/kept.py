"""Timelines of requests that have ended: encoded, and bounded in bytes for each tenant and in all; the oldest go first.

When all together take too much, the tenant that has the most loses its oldest one.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from stages.gateway.tracing.timeline import Report

ENTRY_BYTES = 200  # of the tables, for each timeline


class KeptTimelines:
    """One per gateway. `find` takes any of the names that a request is known by."""

    def __init__(self, total_bytes: int, tenant_bytes: int) -> None:
        self.bytes = 0
        self._total_bytes = total_bytes
        self._tenant_bytes = min(tenant_bytes, total_bytes)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._entries: dict[str, dict[str, tuple[str, bytes]]] = {}  # by tenant, then by id: (X-Request-Id, report)
        self._used: dict[str, int] = {}  # bytes, by tenant

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def add(self, report: Report) -> None:
        """Keep a timeline, instead of an earlier one of the same id; drop others if need be."""
        tenant = report.tenant
        self._drop(tenant, report.id)
        encoded = self._encoder.encode(report)
        size = _size(encoded)
        if size > self._tenant_bytes:
            return
        self._entries.setdefault(tenant, {})[report.id] = (report.request_id, encoded)
        self._used[tenant] = self._used.get(tenant, 0) + size
        self.bytes += size
        while self._used[tenant] > self._tenant_bytes:
            self._drop_oldest(tenant)
        while self.bytes > self._total_bytes:
            self._drop_oldest(max(self._used, key=self._used.__getitem__))

    def find(self, name: str) -> Report | None:
        """The timeline of the request `name`: its id, the latest with that X-Request-Id, or the id in an API object."""
        suffix = name.rpartition("-")[2].rpartition("_")[2]
        for request_id in (name, f"req-{suffix}"):
            for entries in self._entries.values():
                if found := entries.get(request_id):
                    return self._decoder.decode(found[1])
        latest: Report | None = None
        for encoded in self._of_client(name):
            report = self._decoder.decode(encoded)
            if latest is None or report.received >= latest.received:
                latest = report
        return latest

    def _of_client(self, name: str) -> Iterator[bytes]:
        return (encoded for one in self._entries.values() for client_id, encoded in one.values() if client_id == name)

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._entries[tenant])))

    def _drop(self, tenant: str, request_id: str) -> None:
        entries = self._entries.get(tenant)
        entry = entries.pop(request_id, None) if entries is not None else None
        if entries is None or entry is None:
            return
        size = _size(entry[1])
        self.bytes -= size
        self._used[tenant] -= size
        if not entries:
            del self._entries[tenant], self._used[tenant]


def _size(encoded: bytes) -> int:
    return len(encoded) + ENTRY_BYTES
