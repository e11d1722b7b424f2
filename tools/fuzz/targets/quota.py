"""The quota file: opened, charged, and opened again.

byte 0   bit 0: the rest is the file. Otherwise it is records without their checksums, 48 bytes each
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import xxhash

from pipeline.api.error_response import error_response
from pipeline.api.quota_file import MAGIC, RECORD_BYTES, QuotaFile, bucket_key
from pipeline.api.quotas import REQUESTS, TOKENS, Quotas
from pipeline.config.schema import RateLimitsConfig
from pipeline.errors import RateLimited
from tools.fuzz.parts import written
from tools.fuzz.target import Target

NOW = 1e9
TENANT = "tenant"
BODY = struct.Struct("<16sqdd8s")


def _checked(body: bytes) -> bytes:
    body = body.ljust(56, b"\0")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def run(data: bytes) -> None:
    """Charge requests and tokens to a tenant whose levels are in the file."""
    raw = data[1:]
    if data[:1] and not data[0] & 1:
        records = [_checked(raw[at : at + BODY.size]) for at in range(0, len(raw), BODY.size)]
        raw = MAGIC.ljust(RECORD_BYTES, b"\0") + b"".join(records)
    path = written("quotas", raw)
    file = QuotaFile(path)
    try:
        quotas = Quotas(RateLimitsConfig(requests_per_minute=5, tokens_per_minute=100), lambda: 1.0, file, lambda: NOW)
        for charge in (lambda: quotas.take_request(TENANT), lambda: quotas.take_prompt(TENANT, 7)):
            refusal = None
            try:
                charge()
            except RateLimited as limited:
                refusal = limited
            if refusal is not None:
                assert 0 < refusal.retry_after_s < math.inf
                error_response(refusal)
        quotas.charge_output(TENANT, 3)
        quotas.take_request("another")
        levels = dict(file.levels)
    finally:
        file.close()
    again = QuotaFile(path)
    again.close()
    assert {key: repr(level) for key, level in again.levels.items()} == {
        key: repr(level) for key, level in levels.items()
    }


def seeds() -> Iterator[bytes]:
    """Levels of the tenant and of others."""
    records = [
        BODY.pack(bucket_key(kind, tenant), 5, level, at, bytes(8))
        for kind, tenant, level, at in (
            (REQUESTS, TENANT, 0.5, NOW - 1),
            (TOKENS, TENANT, -50.0, NOW - 2),
            (REQUESTS, "x", 1.0, NOW + 9),
        )
    ]
    yield b"\0" + b"".join(records)
    yield b"\1" + MAGIC.ljust(RECORD_BYTES, b"\0") + b"".join(_checked(record) for record in records)
    yield b"\1"
    yield b"\1another file"


TARGET = Target(run, seeds, errors=(), modules=("pipeline.api.quota_file", "pipeline.api.quotas"), memory_mb=16)
