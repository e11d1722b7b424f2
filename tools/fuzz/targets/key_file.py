"""The file of API keys: read, and followed by a server.

byte 0   bit 0: the rest is the file. Otherwise it is the keys as JSON, and the digest is right
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from pipeline.api.key_file import KeyFile, StoredKey, contents_digest, digest_of, parse
from pipeline.api.keys import Keys
from pipeline.api.quotas import Quotas
from pipeline.config.schema import Config, RateLimitsConfig
from pipeline.errors import ConfigError, StorageUnavailable, Unauthenticated
from shm.decoding import DECODE_ERRORS
from tools.fuzz.parts import written
from tools.fuzz.target import Target

KEY = "sk-one"


def _with_digest(raw: bytes) -> bytes:
    try:
        digest = contents_digest(msgspec.json.decode(raw, type=list[StoredKey]))
    except DECODE_ERRORS:
        digest = ""
    return b'{"version": 1, "digest": "%b", "keys": %b}' % (digest.encode(), raw)


def run(data: bytes) -> None:
    """A server with the file admits only keys that are in it, and no client without a key."""
    raw = data[1:] if data[:1] and data[0] & 1 else _with_digest(data[1:])
    keys = Keys(Config(), KeyFile(written("keys.json", raw)))
    assert keys
    try:
        stored = {digest for key in parse(raw) for digest in (key.sha256, key.previous)}
    except ConfigError:
        stored = set()
    try:
        caller = keys.caller(f"Bearer {KEY}")
    except (Unauthenticated, StorageUnavailable):
        caller = None
    if caller is not None:
        assert digest_of(KEY) in stored
        quotas = Quotas(RateLimitsConfig(), lambda: 1.0, None, lambda: 1e9, keys.limits)
        quotas.charge_output(caller.tenant, 5, caller.key_id)
        quotas.headers(caller.tenant, caller.key_id)
        keys.concurrent(caller.principal)
    try:
        keys.caller(None)
    except Unauthenticated:
        return
    raise AssertionError("a server with a key file admits a client without a key")


def seeds() -> Iterator[bytes]:
    """A file with two keys, its keys alone, and files of other kinds."""
    one = {"name": "a", "id": "0" * 16, "tenant": "t", "sha256": digest_of(KEY), "created": 1.0}
    two = {"name": "b", "id": "1" * 16, "tenant": "t", "sha256": "f" * 64, "created": 2.0, "scopes": ["admin"]}
    two |= {"limits": {"tokens_per_day": 5, "max_concurrent": 1}, "previous": digest_of(KEY), "previous_until": 1e11}
    for keys in ([one], [one, two], [two], []):
        raw = json.dumps(keys).encode()
        yield b"\0" + raw
        yield b"\1" + _with_digest(raw)
    yield b"\1"
    yield b"\1{}"


TARGET = Target(run, seeds, errors=(), modules=("pipeline.api.key_file", "pipeline.api.keys"), memory_mb=16)
