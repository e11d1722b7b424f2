"""Follows the certificate's files while a server runs: a thread checks them, so that a slow disk delays no stream.

New files are read once they have stood unchanged from one check to the next, since certificate and key are seldom
replaced together.  Files that cannot be used change nothing, and are logged once: the certificate that was good stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

from pipeline.errors import ConfigError
from pipeline.tls.certificate import Certificate, CertificateFiles, Contents, check_contents, read_certificate
from pipeline.tls.kept import KeptCertificate

log = logging.getLogger("starling.tls")

CHECK_S = 2.0  # between two checks

_State = tuple[tuple[int, int, int, int, int] | None, ...]
_UNREAD: _State = (None,) * 9  # of no files: they are read again at each check


class CertificateFollower:
    """Holds the certificate in use. Call `tick` often, in an event loop."""

    def __init__(
        self,
        files: CertificateFiles,
        on_change: Callable[[bytes], object] = lambda leaves: None,
        clock: Callable[[], float] = time.monotonic,
        kept: KeptCertificate | None = None,
        check: Callable[[Contents], object] = lambda contents: None,
    ) -> None:
        """Read the files. Raises `ConfigError`.

        check: raises `ConfigError` for contents that must not be used.
        on_change(leaves): before a certificate is used, with it and the one before it, as PEM; first here, then in the
        thread.
        """
        self._files = files
        self._on_change = on_change
        self._clock = clock
        self._check = check
        self._state = self._seen = _state(files)
        self._refusal = ""  # the last one, which is logged
        self._kept = kept or KeptCertificate()
        self.certificate = first = self._first()
        if first.outdated:
            log.error(
                "the certificate is outdated: most clients refuse it",
                extra={"file": files.cert, "reason": first.outdated},
            )
        on_change(first.leaf)
        self._kept.store(first.contents)
        self._next_check = clock() + CHECK_S
        self._task: asyncio.Task[None] | None = None

    def _first(self) -> Certificate:
        try:
            found = read_certificate(self._files)
            if found is not None:
                self._check(found.contents)
        except ConfigError as error:
            contents = self._kept.read()
            found = check_contents(contents, self._files) if contents is not None else None
            if found is None:
                raise
            self._refusal = error.message
            log.error("the certificate in use stays", extra={"reason": error.message})
        assert found is not None
        return found

    def tick(self) -> None:
        """Check the files if it is time, unless a check is under way."""
        if self._task is None and self._clock() >= self._next_check:
            self._task = asyncio.get_running_loop().create_task(self._look())

    def look_soon(self) -> None:
        """Let the next tick check and read the files as they are."""
        self._next_check = 0.0
        self._state = ()

    async def _look(self) -> None:
        try:
            found = await asyncio.to_thread(self._read_changed)
            if found is not None:
                self.certificate = found
                log.info("took a new certificate", extra={"file": self._files.cert, "not_after": found.not_after})
        finally:
            if self._state:  # otherwise another one was requested meanwhile, and is due
                self._next_check = self._clock() + CHECK_S
            self._task = None

    def _read_changed(self) -> Certificate | None:
        """In a thread: the new certificate, or None if there is none or it cannot be used."""
        state, before = _state(self._files), self._seen
        self._seen = state
        is_requested = not self._state
        if state == self._state or (state != before and not is_requested):
            return None
        self._state = state
        try:
            found = read_certificate(self._files, self.certificate.digest)
            if found is not None:
                self._check(found.contents)
            if found is not None and found.outdated:
                raise ConfigError(
                    f"{self._files.params.cert}: {self._files.cert} {found.outdated}; the present one stays"
                )
        except (ConfigError, OSError) as error:
            reason = error.message if isinstance(error, ConfigError) else str(error)
            if reason != self._refusal:
                log.error("the certificate in use stays", extra={"reason": reason})
            self._refusal = reason
            self._state = _UNREAD  # what was wrong may be outside of the files, as a lack of descriptors
            return None
        self._refusal = ""
        if found is not None:
            self._on_change(found.leaf + self.certificate.leaf)
            self._kept.store(found.contents)
        return found


def _state(files: CertificateFiles) -> _State:
    """What changes when a file is replaced, written or given other permissions; links are followed."""
    found: list[tuple[int, int, int, int, int] | None] = []
    for path in files.paths:
        try:
            info = os.stat(path)
            found.append((info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns))
        except OSError:
            found.append(None)
    return tuple(found)
