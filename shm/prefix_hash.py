"""Page hashes: the chained hash of all tokens up to the end of a full page.

    root      = SHA-256(version, model digest, numerics, geometry, kv type, salt)[:16]
    hash(0)   = SHA-256(root + tokens of page 0)[:16]
    hash(i)   = SHA-256(hash(i - 1) + tokens of page i)[:16]

Where only some layers have a window, the page of layer group g at place i (shm/layer_groups.py) is named by hash(i)
with its last byte XOR g: group 0 has the hashes above, and the hash of one group gives those of the others.

Two pages have the same hash only if the model, the layout and all tokens up to their end are the same, so the hash
alone decides whether a page can be shared.  It is SHA-256 and not a fast hash because clients choose the tokens: no
client must be able to construct a prompt with the hash of another one.  It costs 0.4 us a page, and is the same in
every process and at every start.  This module is independent of where pages are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import NewType, cast

import numpy as np

from shm.pages import NUMERICS, KvGeometry

# 16 bytes. A type of its own, so that mypy finds a model's digest in place of a page's hash.
PageHash = NewType("PageHash", bytes)
RootHasher = Callable[[str], PageHash]  # salt -> root of the chain

HASH_BYTES = 16
_VERSION = b"starling kv chain 1"


def root_hash(model_digest: bytes, geometry: KvGeometry, salt: str) -> PageHash:
    """Return the start of a chain. `model_digest`: raw SHA-256 of the model; `salt`: separates tenants."""
    meta = geometry.as_meta()
    if "revision" in meta:  # which no other number may stand for
        meta["revision"] = f"revision {meta['revision']}"
    identity = "/".join(str(field) for field in (NUMERICS, *meta.values())).encode()
    hasher = hashlib.sha256()
    for part in (_VERSION, model_digest, identity, salt.encode("utf-8", "surrogatepass")):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return PageHash(hasher.digest()[:HASH_BYTES])


def root_hasher(model_digest: bytes, geometry: KvGeometry) -> RootHasher:
    """Return `root_hash` for a fixed model."""
    return partial(root_hash, model_digest, geometry)


def page_hashes(parent: PageHash, tokens: np.ndarray, page_tokens: int) -> list[PageHash]:
    """Return the hashes of the full pages in `tokens` (n,) int32, which follow the page `parent`."""
    text = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    step = 4 * page_tokens
    sha256 = hashlib.sha256
    hashes: list[bytes] = []
    previous: bytes = parent
    for begin in range(0, len(text) // step * step, step):
        previous = sha256(previous + text[begin : begin + step]).digest()[:HASH_BYTES]
        hashes.append(previous)
    return cast("list[PageHash]", hashes)


def group_hash(page_hash: PageHash, group: int) -> PageHash:
    """The hash of the page of layer group `group` beside the page `page_hash` of group 0; and the reverse."""
    return PageHash(page_hash[:-1] + bytes((page_hash[-1] ^ group,))) if group else page_hash
