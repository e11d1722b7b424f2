"""Gives a stopped server's KV cache the pages of a long prompt of which it has computed the beginning alone.

To compute 130,000 positions takes hours, and how long it takes to read their K and V does not depend on the values.  So
the pages behind the computed ones get copies of these: with the hashes of the prompt's tokens, and checksums that the
server verifies.
"""

from __future__ import annotations

import time
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np

from shm.pages import PAGE_FREE, PAGE_FULL, attach_kv, pack_ordinal
from shm.prefix_hash import page_hashes
from stages.kv.pool.extents import Extents
from stages.kv.pool.page_headers import PageHeaders, PageIdentity


def fill(path: Path, tokens: np.ndarray) -> tuple[int, int]:
    """Fill the arena at `path`, whose kv stage has ended, with all full pages of `tokens`, (n,) int32.

    Returns the positions that were there, and those that are there now.  Raises `RuntimeError` if the first page of the
    prompt is not there, or not all pages have room, `ArenaError` if another process writes to the arena.
    """
    arena, views, geometry = attach_kv(path, own=True)
    try:
        if geometry.n_windowed:
            raise RuntimeError(
                f"{geometry.n_windowed} of the model's layers have a window: it has no page for each place"
            )
        headers, memory = PageHeaders(views.headers), Extents(arena, geometry, len(views.pages))
        states = headers.states_and_refs()[0][: memory.n_pages]
        full = {page: headers.identity(page) for page in np.flatnonzero(states == PAGE_FULL).tolist()}
        page_of = {identity.page_hash: page for page, identity in full.items() if identity is not None}
        for root in {identity.root for identity in full.values() if identity is not None}:
            hashes = page_hashes(root, tokens, geometry.page_tokens)
            if hashes and hashes[0] in page_of:
                break
        else:
            raise RuntimeError(f"{path} has no page of the prompt's first {geometry.page_tokens} tokens")
        computed = [page_of[page_hash] for page_hash in hashes if page_hash in page_of]
        missing = len(hashes) - len(computed)
        memory.grow(len(states) + missing - int(np.count_nonzero(states == PAGE_FREE)))
        free = np.flatnonzero(headers.states_and_refs()[0][: memory.n_pages] == PAGE_FREE).tolist()
        if len(free) < missing:
            raise RuntimeError(f"{path} has {len(free)} free pages of {len(views.pages)}, and {missing} are missing")
        sources, now = cycle(computed), time.time_ns()
        for place, (parent, page_hash) in enumerate(pairwise([root, *hashes])):
            if page_hash in page_of:
                continue
            page, source = free.pop(), next(sources)
            identity = full[source]
            assert identity is not None
            views.pages[page] = views.pages[source]
            headers.lease([page], root, 0, now, now)
            ordinal = pack_ordinal(place, 0)
            headers.mark_full(page, PageIdentity(root, parent, page_hash, identity.checksum, ordinal, identity.tokens))
            headers.set_refs([page], [0])
        return len(computed) * geometry.page_tokens, len(hashes) * geometry.page_tokens
    finally:
        arena.close()
