"""The blobs of a published model behind URLs that an orchestrator has signed: for an agent without credentials.

A URL reads one blob for some minutes.  `wanted` names the blobs whose URLs are missing or end soon: the agent's
heartbeats carry it to the orchestrators, and theirs bring new URLs (`take`).  A read waits for its URL, and for
another one if the store refuses it, as it does when its time is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from yarl import URL

from pipeline.blobs.interface import BlobInfo, BlobStore, Data
from pipeline.blobs.ranged_get import RangeReader, UrlRefused
from pipeline.catalog.entry import Entry, checked
from pipeline.errors import ConfigError, InvalidRequest, NotFound, StorageUnavailable
from pipeline.fleet.bodies import MAX_URLS, SignedUrls, WantedUrls

log = logging.getLogger("starling.download")

WAIT_S = 30.0  # of one read, for a URL
KEPT = 256  # URLs of a model
AHEAD = 32  # parts from the one that was read last whose URLs are kept fresh: 1 GiB
RENEW_S = 60.0  # before its end, or half of its time if that is less
REFUSALS = 3  # of one read; then new URLs are of no use

Clock = Callable[[], float]


class _Signed(NamedTuple):
    """A URL, and the clock's time from which another one is asked for, and at which it ends."""

    url: URL
    renew_at: float
    ends_at: float


class SignedStore(BlobStore):
    """The blobs of one model. `clock`: monotonic, s. `wait_s`: of one read, for a URL."""

    can_list = False
    can_write = False

    def __init__(
        self, entry: Entry, reader: RangeReader, clock: Clock = time.monotonic, wait_s: float = WAIT_S
    ) -> None:
        """`reader`: is closed by its owner."""
        self.address = "the URLs that an orchestrator signs"
        self.entry = entry
        self._reader = reader
        self._clock = clock
        self._wait_s = wait_s
        self._urls: OrderedDict[str, _Signed] = OrderedDict()
        self._awaited: Counter[str] = Counter()  # keys of reads that wait for a URL
        self._last = 0  # part that was read last
        self._changed = asyncio.Event()

    def take(self, given: SignedUrls) -> None:
        """Use these URLs from now on. Those of another model are dropped."""
        if not given.entry.same_model(self.entry):
            return
        now = self._clock()
        for key, url in given.urls.items():
            try:
                parsed = URL(url, encoded=True)  # as it was signed
            except ValueError:
                continue
            if self.entry.has(key):
                early_s = min(RENEW_S, given.valid_s / 2)
                self._urls[key] = _Signed(parsed, now + given.valid_s - early_s, now + given.valid_s)
                self._urls.move_to_end(key)
        while len(self._urls) > KEPT:
            self._urls.popitem(last=False)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def wanted(self) -> tuple[str, ...]:
        """Keys of the blobs whose URLs are missing or end soon: first those that reads wait for."""
        now = self._clock()
        ahead = range(self._last, min(self._last + AHEAD, self.entry.n_parts))
        keys = dict.fromkeys([*self._awaited, *(self.entry.part_key(part) for part in ahead)])
        found = [key for key in keys if key not in self._urls or now >= self._urls[key].renew_at]
        return tuple(found[:MAX_URLS])

    async def size(self, key: str) -> int:
        """Bytes of a blob, as the entry says."""
        nbytes = self.entry.blobs().get(key)
        if nbytes is None:
            raise NotFound(f"{key} is no blob of {self.entry.name!r}")
        return nbytes

    async def get(self, key: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`."""
        self._last = self.entry.part_of(key) or 0
        for _ in range(REFUSALS):
            url = await self._url(key)
            try:
                return await self._reader.get(url, offset, nbytes)
            except UrlRefused as error:
                log.info("a signed URL is refused", extra={"blob": key, "reason": error.message})
                if key in self._urls and self._urls[key].url == url:  # otherwise there is a new one already
                    del self._urls[key]
                refusal = error
        raise ConfigError(
            f"{refusal.message}: {REFUSALS} signed URLs of {key} were refused; check the orchestrator's credentials, "
            "and its clock",
            "fleet.blobs",
        )

    async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
        """Refused."""
        raise ConfigError(f"{key}: signed URLs only read", "fleet.agent.signed_urls")

    async def scan(self, folder: str) -> list[BlobInfo]:
        """Refused."""
        raise ConfigError(f"{folder}: signed URLs list nothing", "fleet.agent.signed_urls")

    async def delete(self, key: str) -> None:
        """Refused."""
        await self.put(key, b"")

    async def _url(self, key: str) -> URL:
        """A URL that has time left. Waits for one; raises `StorageUnavailable`."""
        self._awaited[key] += 1
        try:
            async with asyncio.timeout(self._wait_s):
                while (found := self._urls.get(key)) is None or self._clock() >= found.ends_at:
                    await self._changed.wait()
                return found.url
        except TimeoutError:
            raise StorageUnavailable(
                f"{key}: no orchestrator has sent a signed URL within {self._wait_s:g} s; check that one runs, and "
                "that it can read fleet.blobs"
            ) from None
        finally:
            self._awaited[key] -= 1
            if not self._awaited[key]:
                del self._awaited[key]


class SignedModels:
    """The models that an agent loads by signed URLs, by name. `mirrors`: stores that need no credentials."""

    def __init__(self, mirrors: list[BlobStore], clock: Clock = time.monotonic) -> None:
        self._mirrors = mirrors
        self._clock = clock
        self._reader = RangeReader(is_signed=True)
        self._stores: dict[str, SignedStore] = {}

    def begin(self, given: SignedUrls) -> None:
        """A model is to be loaded with these URLs. Those of another one that had its name are forgotten."""
        name = given.entry.name
        if name not in self._stores or not self._stores[name].entry.same_model(given.entry):
            self._stores[name] = SignedStore(given.entry, self._reader, self._clock)
        self._stores[name].take(given)

    def take(self, given: SignedUrls) -> None:
        """New URLs for a model that is loading; those for others are dropped."""
        store = self._stores.get(given.entry.name)
        if store is not None:
            store.take(given)

    def stores_of(self, entry: Entry) -> list[BlobStore]:
        """Where a model is read from; [] if there were no URLs with the request to load it."""
        store = self._stores.get(entry.name)
        # A mirror is asked first: a signed URL may have to be waited for.
        return [*self._mirrors, store] if store is not None and store.entry.same_model(entry) else []

    def end(self, name: str) -> None:
        """A model is here, or its load has ended: its URLs are forgotten."""
        self._stores.pop(name, None)

    def wanted(self) -> tuple[WantedUrls, ...]:
        """What the next heartbeats are to bring."""
        found = [(name, store.wanted()) for name, store in self._stores.items()]
        return tuple(WantedUrls(model_id=name, keys=keys) for name, keys in found if keys)

    async def read(self, url: URL, offset: int, nbytes: int) -> bytes:
        """A range of another blob behind a signed URL. Raises `StarlingError`."""
        return await self._reader.get(url, offset, nbytes)

    async def close(self) -> None:
        """Close the connections."""
        await self._reader.close()


def entry_of(given: SignedUrls, name: str) -> Entry:
    """The entry that URLs for the model `name` belong to. Raises `InvalidRequest`, `ConfigError`."""
    if given.entry.name != name:
        raise InvalidRequest(f"signed.entry.name is {given.entry.name[:80]!r}, expected {name!r}", "signed")
    return checked(given.entry, "the request to load it")
