"""Pages that go to other engines of the same version, and pages that come from them; both by the control socket.

    {"op": "tails", "model", "request"}           where the pages of a running request are: the arena's file, and the
                                                  hashes of the last computed pages of each of its sequences, one for
                                                  each layer group, with the first place that is needed of it
    {"op": "take", "model", "request", "path", "tenant"}
                                                  a file of pages (shm/sent_pages.py) for a request that will come

The agent reads the pages of the first call from the arena, and brings those of the second.  A file is an offer for one
request: when its sequences acquire pages, those that their own tokens name are copied into the arena, and verified
(page_import.py); their grants wait for that.  What is wrong, missing or late is computed.  Offers are bounded in
number, bytes and time, in total and per tenant; one whose request has come gives its place to the next one.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, KeysView
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import InvalidRequest, NotFound, Overloaded
from pipeline.protocol import messages as m
from pipeline.protocol.messages import request_of
from shm.pages import KV_SPLIT
from shm.prefix_hash import PageHash, group_hash
from shm.sent_pages import (
    HEAD_BYTES,
    IDENTITY_BYTES,
    MAX_OF_TENANT,
    TENANT_SHARE,
    SentHead,
    decode_head,
    read_identity,
    version_of,
)
from stages.kv.frame_names import frame_names
from stages.kv.loaded_versions import LoadedVersion
from stages.kv.manager import Manager
from stages.kv.page_import import PageImport
from stages.kv.pool.page_headers import PageIdentity, checksum, unpack_identity

log = logging.getLogger("starling.kv")

MAX_TAILS = 64  # sequences of one request
MAX_OFFERS = 8
MAX_OFFERED_BYTES = TENANT_SHARE * MAX_OF_TENANT  # of all offers, whose memory this process keeps
STEP_BYTES = 16 << 20  # copied and verified in one turn of the loop: some 10 ms
OFFER_S = 30.0  # for which an offer waits for its request
USED_S = 2.0  # after its request has come, for further sequences of it


class Offer:
    """The pages in a file. Raises `OSError`, or `ValueError` with what is wrong with the file."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise ValueError("it is not a file")
            self.head: SentHead = decode_head(os.pread(self._fd, HEAD_BYTES, 0))
            if info.st_size != self.head.nbytes:
                raise ValueError(f"it has {info.st_size} bytes, expected {self.head.nbytes}")
            raw = os.pread(self._fd, self.head.n_pages * IDENTITY_BYTES, HEAD_BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        self._raw = raw
        self._places: dict[PageHash, tuple[int, int]] = {}  # number and checksum
        for number in range(self.head.n_pages):
            page = read_identity(raw[number * IDENTITY_BYTES : (number + 1) * IDENTITY_BYTES])
            if page is not None:
                self._places[page.page_hash] = number, page.checksum

    def __contains__(self, page_hash: object) -> bool:
        return page_hash in self._places

    @property
    def is_open(self) -> bool:
        """See `SentPages.is_open`."""
        return self._fd >= 0

    @property
    def hashes(self) -> KeysView[PageHash]:
        """Of its pages, in their order."""
        return self._places.keys()

    def identity(self, page_hash: PageHash) -> PageIdentity | None:
        """What a page's header says."""
        at = self._places[page_hash][0] * IDENTITY_BYTES
        return unpack_identity(self._raw[at : at + IDENTITY_BYTES])

    def copy(self, page_hash: PageHash, out: np.ndarray) -> int | None:
        """See `SentPages.copy`."""
        number, expected = self._places[page_hash]
        try:
            # Not mapped: a file that its writer shortens would end this process.
            n_read = os.preadv(self._fd, [out.data], self.head.contents_at + number * self.head.page_bytes)
        except OSError:
            return None
        return expected if n_read == len(out) and checksum(out) == expected else None

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass
class _Waiting:
    offer: Offer
    tenant: str  # whose pages they are; "": of none in particular
    until: float  # s of the clock
    is_used: bool = False  # a sequence of its request has had its pages


class PageExchange:
    """One per stage. `find(name)`: the version of a model that serves. `clock`: monotonic, s."""

    def __init__(
        self, find: Callable[[str], LoadedVersion | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find = find
        self._clock = clock
        self._offers: dict[str, _Waiting] = {}  # by request

    def __len__(self) -> int:
        return len(self._offers)

    # -------------------------------------------------------------- pages that go

    def tails(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer `tails`. Raises `NotFound`."""
        loaded, manager = self._version(request)
        arena, name = loaded.pages.arena, str(request.get("request", ""))
        leases = [one for one in manager.leases.values() if request_of(one.sequence) == name and not one.is_suspect]
        # A window may begin up to a KV split before the last released page.
        split = KV_SPLIT // manager.page_tokens
        ends = {
            one.hashes[one.n_final - 1]: max(0, one.n_unread - split)
            for one in leases
            if 0 < one.n_final <= len(one.hashes)
        }
        if arena is None or not ends:
            raise NotFound(f"request {name[:80]!r} has no computed pages here")
        groups = range(manager.groups.n_groups)
        pairs = [(end, group) for end in sorted(ends) for group in groups][:MAX_TAILS]
        return {
            "arena": arena.path.name,
            "digest": loaded.pages.digest,
            "tails": [group_hash(end, group).hex() for end, group in pairs],
            "lowest": [ends[end] if group >= manager.groups.full > 0 else 0 for end, group in pairs],
        }

    # -------------------------------------------------------------- pages that come

    def take(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer `take`. Raises `NotFound`, `InvalidRequest`, `Overloaded`."""
        loaded, _ = self._version(request)
        name, geometry = str(request.get("request", "")), loaded.pages.geometry
        tenant = str(request.get("tenant", ""))
        assert geometry is not None
        try:
            offer = Offer(str(request.get("path", "")))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"these pages cannot be used: {error}", "path") from None
        expected = version_of(loaded.pages.digest, geometry)
        try:
            if offer.head.version != expected or offer.head.page_bytes != geometry.page_bytes:
                raise InvalidRequest(f"these pages are of {offer.head.version}, expected {expected}", "path")
            self._end(name)
            self._make_place(tenant, offer.head.nbytes)
        except BaseException:
            offer.close()
            raise
        self._offers[name] = _Waiting(offer, tenant, self._clock() + OFFER_S)
        return {"pages": offer.head.n_pages}

    def _make_place(self, tenant: str, nbytes: int) -> None:
        """End used offers, oldest first, until there is a place. Raises `Overloaded`.

        For a place in its own share a tenant's used offers end, and no other tenant's.
        """
        shares = [(TENANT_SHARE, tenant)] if tenant else []
        for share, whose in (*shares, (1, "")):
            while refusal := self._refusal(share, whose, nbytes):
                used = [name for name, one in self._offers.items() if one.is_used and whose in ("", one.tenant)]
                if not used:
                    raise Overloaded(refusal, retry_after_s=1.0)
                self._end(used[0])

    def _refusal(self, share: int, tenant: str, nbytes: int) -> str:
        """Why the n-th `share` of all places has none for an offer of the tenant, or of any; "" if there is one."""
        those = [one for one in self._offers.values() if tenant in ("", one.tenant)]
        n_used = sum(one.offer.head.nbytes for one in those)
        if len(those) < MAX_OFFERS // share and n_used + nbytes <= MAX_OFFERED_BYTES // share:
            return ""
        return f"{len(those)} offers of pages {'of its tenant ' if tenant else ''}wait, with {n_used} bytes"

    def begin(self, loaded: LoadedVersion, frame: m.Acquire) -> bool:
        """A sequence is about to acquire its pages: begin to copy those that are offered for its request.

        False: there are none.  Else call `step` until it returns the frame.  Call `end` after the grant in either case.
        """
        waiting = self._offers.get(request_of(frame.sequence))
        manager, geometry = loaded.manager, loaded.pages.geometry
        if waiting is None or manager is None or geometry is None:
            return False
        known = loaded.pages.rows.known(frame.row, frame.n_tokens)
        if known is None or waiting.offer.head.version != version_of(loaded.pages.digest, geometry):
            return False
        is_waiting = loaded.imports.begin(manager, frame, known[0], waiting.offer)
        if is_waiting:  # it must stay until they are copied
            waiting.is_used, waiting.until = False, self._clock() + OFFER_S
        else:
            self._after_use(loaded, request_of(frame.sequence))
        return is_waiting

    def step(self, versions: Iterable[LoadedVersion]) -> list[tuple[LoadedVersion, m.Acquire]]:
        """Copy at most `STEP_BYTES`, and return the requests whose pages are there, to be granted now."""
        rest, done = STEP_BYTES, []
        for loaded in versions:
            n_bytes, ended = loaded.imports.step(rest)
            rest -= n_bytes
            for one in ended:
                self._log(loaded, one)
                done.append((loaded, one.frame))
                self._after_use(loaded, request_of(one.frame.sequence))
        return done

    def _after_use(self, loaded: LoadedVersion, name: str) -> None:
        """End an offer whose pages are all in the arena; others wait for further sequences of their request."""
        waiting, manager = self._offers.get(name), loaded.manager
        if waiting is None or manager is None or loaded.imports.uses(waiting.offer):
            return
        if all(manager.pool.table.get_cached_page(page_hash) is not None for page_hash in waiting.offer.hashes):
            self._end(name)
        else:
            waiting.is_used = True
            waiting.until = min(waiting.until, self._clock() + USED_S)

    @staticmethod
    def _log(loaded: LoadedVersion, one: PageImport) -> None:
        extra = {
            **frame_names(one.frame),
            "pages": one.n_imported,
            "damaged": one.n_damaged,
        }
        if one.n_damaged:
            log.warning("pages of another engine are damaged and are computed", extra=extra)
        else:
            log.info("pages of another engine are used", extra=extra)

    def expire(self) -> None:
        """Forget offers whose time has passed."""
        now = self._clock()
        for name in [name for name, one in self._offers.items() if one.until <= now]:
            self._end(name)

    def close(self) -> None:
        """Forget all offers; imports from them end."""
        for name in list(self._offers):
            self._end(name)

    # -------------------------------------------------------------- parts

    def _version(self, request: dict[str, Any]) -> tuple[LoadedVersion, Manager]:
        loaded = self._find(str(request.get("model", "")))
        if loaded is None or loaded.manager is None:
            raise NotFound(f"model {str(request.get('model', ''))[:128]!r} has no pages here")
        return loaded, loaded.manager

    def _end(self, name: str) -> None:
        waiting = self._offers.pop(name, None)
        if waiting is not None:
            waiting.offer.close()
