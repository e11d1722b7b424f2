"""Names of full pages: the chained digest of all tokens up to a page's end.

    root      = SHA-256(version, model digest, numerics, geometry, kv type, salt)[:16]
    digest(0) = SHA-256(root + tokens of page 0)[:16]
    digest(i) = SHA-256(digest(i - 1) + tokens of page i)[:16]

Two pages have one name only if the model, the layout and every token before them are the same, so
a page can be shared by its name alone.  SHA-256 and not a fast hash, because the tokens come from
strangers: nobody may construct a prompt that has another's name.  It costs 0.4 us a page.  The same in
every process and at every start.  Knows nothing of where pages are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import NewType, cast

import numpy as np

from shm.pages import NUMERICS, KvGeometry

# 16 bytes. A type of its own, because a root, a digest and a model's digest must not be mixed up.
PageDigest = NewType("PageDigest", bytes)
RootOf = Callable[[str], PageDigest]  # salt -> root of the chain

DIGEST_BYTES = 16
_VERSION = b"starling kv chain 1"


def root(model_digest: bytes, geometry: KvGeometry, salt: str) -> PageDigest:
    """Where a chain starts. `model_digest`: raw SHA-256 of the model; `salt`: separates tenants."""
    identity = "/".join(str(field) for field in (NUMERICS, *geometry)).encode()
    hasher = hashlib.sha256()
    for part in (_VERSION, model_digest, identity, salt.encode("utf-8", "surrogatepass")):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return PageDigest(hasher.digest()[:DIGEST_BYTES])


def roots(model_digest: bytes, geometry: KvGeometry) -> RootOf:
    """`root` with the model fixed."""
    return partial(root, model_digest, geometry)


def chain(parent: PageDigest, tokens: np.ndarray, page_tokens: int) -> list[PageDigest]:
    """Digests of the full pages in `tokens` (n,) int32; what fills no page has no name."""
    text = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    step = 4 * page_tokens
    sha256 = hashlib.sha256
    digests: list[bytes] = []
    digest: bytes = parent
    for begin in range(0, len(text) // step * step, step):
        digest = sha256(digest + text[begin : begin + step]).digest()[:DIGEST_BYTES]
        digests.append(digest)
    return cast("list[PageDigest]", digests)
