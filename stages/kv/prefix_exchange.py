"""Prefixes that many requests share: those that go to other engines of the same version, and those that come.

    {"op": "prefixes", "model", "limit"}     the most used ones: the hash of the last page of each, the names of all its
                                             pages, its tenant, and how it was used
    {"op": "keep", "model", "path", "tenant", "uses", "idle_s"}
                                             a file of pages (shm/sent_pages.py), which are cached for no request

The agent reads the pages that it sends from the arena, and brings those of the second call.  They are copied one at a
time, when nothing else is to be done: into free pages, or instead of cached pages that were not used for longer than
those.  A page is copied only behind the page before it in its prefix, which its header names, and a sequence finds it
only by the hash of its own tokens and salt.  Whatever is damaged, late or has no room is left out.  Bounded in number,
bytes and time, in total and per tenant.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.api.page_names import name_of
from pipeline.api.page_owner import key_owner
from pipeline.errors import InvalidRequest, NotFound, Overloaded
from shm.pages import PAGE_FULL
from shm.prefix_hash import PageHash
from shm.sent_pages import MAX_KEPT_BYTES, TENANT_SHARE, version_of
from stages.kv.loaded_versions import LoadedVersion
from stages.kv.manager import Manager
from stages.kv.page_exchange import Offer
from stages.kv.pool.page_headers import PageIdentity
from stages.kv.pool.page_pool import PageUse
from stages.kv.storage.page_ranking import most_used

log = logging.getLogger("starling.kv")

MIN_USES = 2  # sequences that have held a page of a prefix that is worth sending
MAX_CANDIDATES = 2048  # pages that are ranked: some ms of the loop
MAX_PREFIXES = 64  # of one model
MAX_PREFIX_PAGES = 1024  # of one prefix
MAX_NAMES = 4096  # of all of them: an answer is one line, of which a control socket takes some 200 KiB at once
MAX_KEPT = 64  # files that wait, or are being copied: each has the prefixes of one owner
KEEP_S = 30.0  # for which a file may wait for its turn
MAX_USES = 2**32 - 1  # a page's header has 32 bits for them
MAX_IDLE_S = 1e9
ARENA_SHARE = 4  # one file takes at most one n-th of the arena


class KeptPages:
    """The pages of a file, as a `PageSource`."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def __contains__(self, page_hash: object) -> bool:
        return page_hash in self._offer

    def fetch(self, page_hash: PageHash, out: np.ndarray) -> PageIdentity | None:
        """See `PageSource`."""
        identity = self._offer.identity(page_hash)
        return identity if identity is not None and self._offer.copy(page_hash, out) is not None else None


@dataclass
class _Keeping:
    """A file whose pages are being cached."""

    loaded: LoadedVersion
    manager: Manager  # of the version when the file came
    offer: Offer
    tenant: str
    use: PageUse
    until: float  # s of the clock
    rest: deque[PageHash]
    room: int  # pages that it may take
    n_cached: int = 0


class PrefixExchange:
    """One per stage. `find(name)`: the version of a model that serves. `clock`: monotonic, s."""

    def __init__(
        self, find: Callable[[str], LoadedVersion | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find = find
        self._clock = clock
        self._kept: deque[_Keeping] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    # -------------------------------------------------------------- prefixes that go

    def prefixes(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer `prefixes`: the most used ones first. Raises `NotFound`."""
        loaded, manager = self._version(request)
        arena, geometry = loaded.pages.arena, loaded.pages.geometry
        if arena is None or geometry is None:
            raise NotFound(f"model {loaded.name!r} has no pages here")
        limit = max(0, min(MAX_CANDIDATES, int(request.get("limit", 0))))
        answer = {"arena": arena.path.name, "digest": loaded.pages.digest, "page_bytes": geometry.page_bytes}
        # Where the pages are is all that was asked for, or prefixes are not of pages of one layer group.
        if not limit or manager.groups.n_groups > 1:
            return {**answer, "prefixes": []}
        records = manager.pool.headers.snapshot()
        records = records[(records["state"] == PAGE_FULL) & (records["uses"] >= MIN_USES)]
        records = _candidates(records, MAX_CANDIDATES)
        now_ns = manager.pool.clock_ns()
        chosen = [one.page_hash for one in most_used(records, limit, now_ns)]
        row_of = {record["hash"].tobytes(): record for record in records}
        parents = {row_of[one]["parent"].tobytes() for one in chosen}
        found: list[dict[str, Any]] = []
        of_owner: Counter[str] = Counter()
        n_names: Counter[str] = Counter()  # by owner
        for tail in chosen:
            if len(found) >= MAX_PREFIXES:
                break
            record = row_of[tail]
            n_pages = int(record["ordinal"]) + 1
            owner = manager.owners.owner(PageHash(record["root"].tobytes()), manager.root_hash_of)
            if tail in parents or owner is None or n_pages > MAX_PREFIX_PAGES:
                continue
            share = TENANT_SHARE if owner else 1
            if of_owner[owner] >= MAX_PREFIXES // share or n_names[owner] + n_pages > MAX_NAMES // share:
                continue
            if n_names.total() + n_pages > MAX_NAMES:
                continue
            of_owner[owner] += 1
            n_names[owner] += n_pages
            found.append(
                {
                    "tail": tail.hex(),
                    "names": _names(tail, row_of),
                    "tenant": owner,
                    "uses": int(record["uses"]),
                    "idle_s": round(max(0, now_ns - int(record["last_use"])) / 1e9, 3),
                }
            )
        return {**answer, "prefixes": found}

    # -------------------------------------------------------------- prefixes that come

    def keep(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer `keep`: the number of pages. Raises `NotFound`, `InvalidRequest`, `Overloaded`."""
        loaded, manager = self._version(request)
        geometry, tenant = loaded.pages.geometry, str(request.get("tenant", ""))
        assert geometry is not None
        if not manager.is_caching:
            raise NotFound(f"model {loaded.name!r} caches no pages (cache.enabled)")
        now_ns = manager.pool.clock_ns()
        try:
            uses = max(1, min(MAX_USES, int(request.get("uses", 1))))
            idle_ns = int(1e9 * max(0.0, min(MAX_IDLE_S, float(request.get("idle_s", 0.0)))))
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the use of these pages is not given in numbers: {error}", "uses") from None
        use = PageUse(uses, max(0, now_ns - idle_ns), now_ns)
        try:
            offer = Offer(str(request.get("path", "")))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"these pages cannot be used: {error}", "path") from None
        try:
            expected = version_of(loaded.pages.digest, geometry)
            if offer.head.version != expected or offer.head.page_bytes != geometry.page_bytes:
                raise InvalidRequest(f"these pages are of {offer.head.version}, expected {expected}", "path")
            self._check_room(tenant, offer.head.nbytes)
        except BaseException:
            offer.close()
            raise
        room = max(1, manager.pool.total // ARENA_SHARE)
        until, rest = self._clock() + KEEP_S, deque(offer.hashes)
        self._kept.append(_Keeping(loaded, manager, offer, tenant, use, until, rest, room))
        return {"pages": offer.head.n_pages}

    def _check_room(self, tenant: str, nbytes: int) -> None:
        for share, whose in ((TENANT_SHARE, tenant), (1, "")) if tenant else ((1, ""),):
            those = [one for one in self._kept if whose in ("", one.tenant)]
            n_used = sum(one.offer.head.nbytes for one in those)
            if len(those) >= MAX_KEPT // share or n_used + nbytes > MAX_KEPT_BYTES // share:
                raise Overloaded(
                    f"{len(those)} files of prefixes {'of their tenant ' if whose else ''}wait, with {n_used} bytes",
                    retry_after_s=1.0,
                )

    def step(self) -> bool:
        """Cache at most one page. True: there is another one. Call when nothing else is to be done."""
        if not self._kept:
            return False
        one = self._kept[0]
        if not one.rest or one.room <= 0 or one.loaded.manager is not one.manager or self._clock() >= one.until:
            self._end(self._kept.popleft())
        elif not one.manager.is_reconciled:
            return False  # its pages may be leased
        else:
            self._cache(one, one.rest.popleft())
        return bool(self._kept)

    def _cache(self, one: _Keeping, page_hash: PageHash) -> None:
        manager, identity = one.manager, one.offer.identity(page_hash)
        table = manager.pool.table
        if identity is None or identity.tokens != manager.page_tokens or not self._is_next(one, identity):
            return
        page = table.get_cached_page(page_hash)
        if page is not None:  # no page behind it must take its place
            table.acquire_ref((page,))
            table.release_ref((page,), manager.pool.clock_ns())
        elif manager.pool.keep(KeptPages(one.offer), page_hash, one.use):
            manager.owners.learn_owner(identity.root, one.tenant)
            one.n_cached += 1
            one.room -= 1

    @staticmethod
    def _is_next(one: _Keeping, identity: PageIdentity) -> bool:
        """Whether the page before it is here, and no other tenant's."""
        manager = one.manager
        known = manager.owners.owner(identity.root, manager.root_hash_of)
        # Engines of older releases tell only the owners of API keys apart: either name may be without the rest.
        if known not in (None, one.tenant, key_owner(one.tenant)) and one.tenant != key_owner(known or ""):
            return False
        if identity.ordinal == 0:
            return identity.parent == identity.root
        before = manager.pool.table.get_cached_page(identity.parent)
        return before is not None and manager.pool.headers.lease_of(before)[0] == identity.root

    def close(self) -> None:
        """Forget all files."""
        while self._kept:
            self._kept.popleft().offer.close()

    # -------------------------------------------------------------- parts

    @staticmethod
    def _end(one: _Keeping) -> None:
        one.offer.close()
        facts = {"model": one.loaded.name, "pages": one.n_cached, "of": one.offer.head.n_pages}
        log.info("prefixes of another engine are cached", extra=facts)

    def _version(self, request: dict[str, Any]) -> tuple[LoadedVersion, Manager]:
        loaded = self._find(str(request.get("model", "")))
        if loaded is None or loaded.manager is None:
            raise NotFound(f"model {str(request.get('model', ''))[:128]!r} has no pages here")
        return loaded, loaded.manager


def _candidates(records: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of the records (n,), the most used ones first, and of equal ones the first in their prefixes.

    Those of one root (a tenant, or a `cache_salt`) are at most half of them while those of others want the rest.
    """
    if len(records) <= most:
        return records
    order = np.lexsort((records["ordinal"], -records["uses"].astype(np.int64)))
    # Half of each root's hash tells them apart.
    roots = np.ascontiguousarray(records["root"]).view(np.uint64)[::2]
    _, root_of = np.unique(roots[order], return_inverse=True)
    by_root = np.argsort(root_of, kind="stable")
    counts = np.bincount(root_of)
    place = np.empty(len(order), np.int64)  # among those of its root
    place[by_root] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_within = place < most // TENANT_SHARE
    return records[np.concatenate((order[is_within], order[~is_within]))[:most]]


def _names(tail: bytes, row_of: dict[bytes, np.void]) -> list[int]:
    """The names of a prefix's pages, the first one first."""
    names: list[int] = []
    at = tail
    while (record := row_of.get(at)) is not None and len(names) < MAX_PREFIX_PAGES:
        names.append(name_of(at))
        at = record["parent"].tobytes()
    return names[::-1]
