"""Full KV pages on their way to another engine of the same version, as one run of bytes.

    0       4096            head: magic "STARSENT", layout u32, length u32 and XXH3-64 u64 of the identity, the identity
                            (msgpack: model digest, numerics, geometry, page_bytes, pages), zeros
    4096    pages x 72      each page's identity and its check: the first bytes of its header (shm/pages.py)
    ...     pages x page_bytes

The receiver takes from it only what it finds by hashes that it has computed itself, from the tokens and the salt of its
own sequence.  A hash covers model, numerics, geometry, KV type and salt (shm/prefix_hash.py); the identity in the head
repeats them so that a mismatch has a name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import xxhash

from shm.identity_block import BLOCK_BYTES, decode_identity, encode_identity
from shm.pages import IDENTITY, NUMERICS, KvGeometry
from shm.prefix_hash import PageHash

HEAD_BYTES = BLOCK_BYTES
IDENTITY_BYTES = IDENTITY.size + 8  # with its check
MAX_PAGES = 65_536
MAX_OF_TENANT = 512 << 20  # bytes of a tenant that a receiver keeps at once
MAX_KEPT_BYTES = 256 << 20  # of files of prefixes and sessions that an engine keeps until it has cached their pages
TENANT_SHARE = 2  # a tenant gets at most one n-th of what a receiver takes

_MAGIC = b"STARSENT"
_LAYOUT = 1


class SentPage(NamedTuple):
    """A page, as its identity describes it."""

    parent: PageHash
    page_hash: PageHash
    checksum: int  # XXH3-64 of the page's bytes


class SentHead(NamedTuple):
    """The head of a run of pages."""

    version: dict[str, Any]  # as `version_of` returns it
    page_bytes: int
    n_pages: int

    @property
    def contents_at(self) -> int:
        """Offset of the first page's bytes."""
        return HEAD_BYTES + self.n_pages * IDENTITY_BYTES

    @property
    def nbytes(self) -> int:
        """Of the whole run."""
        return self.contents_at + self.n_pages * self.page_bytes

    def encode(self) -> bytes:
        """Return the first `HEAD_BYTES`."""
        identity = {**self.version, "page_bytes": self.page_bytes, "pages": self.n_pages}
        return encode_identity(_MAGIC, _LAYOUT, identity).ljust(HEAD_BYTES, b"\0")


def version_of(digest: str, geometry: KvGeometry) -> dict[str, Any]:
    """What pages must have in common to be exchanged. `digest`: of the model, hex."""
    return {"digest": digest, "numerics": NUMERICS, **geometry.as_meta()}


def decode_head(head: bytes) -> SentHead:
    """Read the first `HEAD_BYTES`. Raises `ValueError` with what is wrong."""
    version = decode_identity(head, _MAGIC, _LAYOUT)
    try:
        page_bytes, n_pages = int(version.pop("page_bytes")), int(version.pop("pages"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"its head does not decode: {error!r}") from None
    if page_bytes < HEAD_BYTES or page_bytes % HEAD_BYTES or not 0 <= n_pages <= MAX_PAGES:
        raise ValueError(f"it has {n_pages} pages of {page_bytes} bytes")
    return SentHead(version, page_bytes, n_pages)


def read_identity(raw: bytes) -> SentPage | None:
    """Read `IDENTITY_BYTES`, of a run or of a page header; None if they are torn."""
    if xxhash.xxh3_64_intdigest(raw[: IDENTITY.size]) != int.from_bytes(raw[IDENTITY.size : IDENTITY_BYTES], "little"):
        return None
    _, parent, page_hash, checksum, _, _ = IDENTITY.unpack_from(raw)
    return SentPage(PageHash(parent), PageHash(page_hash), checksum)
