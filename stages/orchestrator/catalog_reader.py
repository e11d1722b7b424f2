"""Reads the catalog now and then, and when a request names what is not known yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from pipeline.blobs.interface import BlobStore
from pipeline.catalog import contents
from pipeline.catalog.adapter_entry import AdapterEntry
from pipeline.catalog.adapters import entries as published_adapters
from pipeline.catalog.adapters import usable
from pipeline.catalog.entry import Entry
from pipeline.errors import ModelUnavailable, StarlingError
from stages.orchestrator.router import Published, ScoreRouter
from stages.orchestrator.signed_urls import UrlSigner

log = logging.getLogger("starling.orchestrator")

READ_S = 30.0  # between two reads of the catalog
FIRST_S = 30.0  # for the first one to end: then models are placed without it
MISS_S = 1.0  # between two reads for requests that name unknown models


class CatalogReader:
    """Keeps `published`, what routing uses of it, and the signer's entries up to date."""

    def __init__(
        self,
        blobs: BlobStore,
        published: dict[str, Published],
        signer: UrlSigner,
        router: ScoreRouter,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`clock`: monotonic, s."""
        self._blobs = blobs
        self._published = published
        self._signer = signer
        self._router = router
        self._clock = clock
        self._sleep = sleep
        self._adapters: list[AdapterEntry] = []
        self._has_read_adapters = False
        self._read_at = -READ_S
        self._reading: asyncio.Task[bool] | None = None  # whether it could be read
        self._is_known = asyncio.Event()  # it has been read, or could not be

    async def follow(self) -> None:
        """Read it now and then."""
        while True:
            await self._read()
            await asyncio.sleep(READ_S)

    async def learn(self, model: str) -> None:
        """A request names a model: if it is not known, it may have been published lately.

        Afterwards it is known, or was not there at a read that began after the call, or the catalog cannot be read.
        Raises `ModelUnavailable` for an adapter while none could be read.
        """
        asked_at = self._clock()
        while not self._knows(model):
            if self._reading is not None and not self._reading.done():
                if not await asyncio.shield(self._reading):
                    break
            elif self._read_at >= asked_at:
                break
            elif (left_s := self._read_at + MISS_S - self._clock()) > 0:
                await self._sleep(left_s)
            else:
                await self._read()
        if ":" in model and not self._has_read_adapters and not self._knows(model):
            reason = "the adapters of the catalog cannot be read now; try again"
            raise ModelUnavailable(reason, "model", retry_after_s=1.0)

    def _knows(self, model: str) -> bool:
        return self._router.resolve(model) in self._published or self._router.has(model)

    async def until_known(self) -> None:
        """Wait until it has been read, could not be, or takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await self._is_known.wait()

    async def close(self) -> None:
        """End a read that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> bool:
        """Read it, or wait for the read that is under way."""
        if self._reading is None or self._reading.done():
            self._read_at = self._clock()
            self._reading = asyncio.get_running_loop().create_task(self._read_entries())
        return await asyncio.shield(self._reading)

    async def _read_entries(self) -> bool:
        try:
            entries = await contents.entries(self._blobs)
        except StarlingError as error:
            log.warning("the catalog cannot be read", extra={"reason": error.message})
            self._is_known.set()
            return False
        self._use(entries)
        try:
            self._adapters = await published_adapters(self._blobs)
        except StarlingError as error:  # those that are known stay
            log.warning("the adapters of the catalog cannot be read", extra={"reason": error.message})
            return False
        else:
            self._has_read_adapters = True
            self._use(entries)
            return True
        finally:
            self._is_known.set()

    def _use(self, entries: list[Entry]) -> None:
        """Route by these entries, and by what is known of adapters."""
        found = {entry.name: Published(entry.digest, entry.weights_bytes, at=entry.published) for entry in entries}
        adapters = usable(self._adapters, entries)
        for one, model in adapters:
            found[one.name] = Published(model.digest, model.weights_bytes + one.bytes, one.digest, one.published)
        self._published.clear()
        self._published.update(found)
        self._signer.set_entries(entries, [one for one, _ in adapters])
