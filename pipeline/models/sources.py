"""Where a model file can come from, as a user writes it; pure.

    /FILE, ./FILE, file:///FILE       a file of this machine
    http://HOST/FILE, https://...     a web server
    hf:ORG/REPO[/FILE][@REVISION]     a model hub (HF_ENDPOINT); ORG/REPO alone means the same
    pypi:DIST==VERSION!PATH           a file inside a wheel of the Python package index

The allow-list of the configuration (`registry.sources`) has patterns for these texts: `hf:my-org/*`, `pypi:*`,
`https://models.example.org/*`, `file:*`.  Patterns for web servers have `://`; scheme, host and path are compared one
by one, so that `https://*.example.org/*` is about hosts only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError, InvalidRequest

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_HUB = re.compile(rf"({_PART}/{_PART})(?:/([^@\0]+))?(?:@([A-Za-z0-9._/-]{{1,255}}))?")
_AUTHORITY = re.compile(r"(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]+)?")  # no user, no backslash, ASCII
_PACKAGE = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9.!+_-]+)!([^\0]+)")
EXPECTED = "expected a file, http(s)://HOST/FILE, hf:ORG/REPO[/FILE][@REVISION] or pypi:DIST==VERSION!PATH"


class FileSource(NamedTuple):
    """A file of this machine."""

    path: Path

    def __str__(self) -> str:
        return f"file:{self.path}"


class WebSource(NamedTuple):
    """A file of a web server."""

    url: str

    def __str__(self) -> str:
        return self.url


class HubSource(NamedTuple):
    """A file of a repository of a model hub."""

    repository: str  # ORG/REPO
    file: str = ""  # "": chosen by its quantization
    revision: str = ""  # branch, tag or commit; "": the default branch

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        return f"hf:{self.repository}{file}" + (f"@{self.revision}" if self.revision else "")


class PackageSource(NamedTuple):
    """A file inside a wheel."""

    distribution: str
    version: str
    member: str

    def __str__(self) -> str:
        return f"pypi:{self.requirement}!{self.member}"

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.distribution}=={self.version}"


Source = FileSource | WebSource | HubSource | PackageSource


def is_remote(text: str) -> bool:
    """Does the text name something that must be fetched? ORG/REPO does unless it is a file here."""
    if text.startswith(("http://", "https://", "hf:", "pypi:")):
        return True
    return bool(_REPOSITORY.fullmatch(text)) and not text.endswith(".gguf") and not os.path.lexists(text)


def parse(text: str) -> Source:
    """Read a source. Raises `InvalidRequest`."""
    if text.startswith(("http://", "https://")):
        return _web(text)
    if text.startswith("hf:"):
        return _hub(text, text.removeprefix("hf:").removeprefix("//"))
    if text.startswith("pypi:"):
        found = _PACKAGE.fullmatch(text.removeprefix("pypi:"))
        if not found or _leaves(found[3]):
            raise InvalidRequest(f"source {text[:200]!r}: expected pypi:DIST==VERSION!PATH", "source")
        return PackageSource(found[1], found[2], found[3])
    if is_remote(text):
        return _hub(text, text)
    if not text or "\0" in text or (re.match(r"[a-z][a-z0-9+]*:", text) and not text.startswith("file:")):
        raise InvalidRequest(f"source {text[:200]!r}: {EXPECTED}", "source")
    plain = unquote(urlsplit(text).path) if text.startswith("file://") else text.removeprefix("file:")
    return FileSource(Path(os.path.abspath(expand_user(plain))))


def _web(text: str) -> WebSource:
    try:
        url = urlsplit(text)
        is_usable = bool(url.hostname) and not url.username and not url.password and (url.port or 1) > 0
    except ValueError:
        is_usable = False
    if not is_usable or any(ord(character) <= 32 for character in text):
        named = shown(text)[:200]
        raise InvalidRequest(f"source {named!r}: expected http(s)://HOST/FILE, without a user's name", "source")
    return WebSource(text)


def _hub(text: str, rest: str) -> HubSource:
    found = _HUB.fullmatch(rest)
    if not found or _leaves(found[2] or "") or ".." in (found[3] or ""):
        raise InvalidRequest(f"source {text[:200]!r}: expected hf:ORG/REPO[/FILE][@REVISION]", "source")
    return HubSource(found[1], found[2] or "", found[3] or "")


def _leaves(path: str) -> bool:
    """Does the path lead out of its repository or archive?"""
    pure = PurePosixPath(path)
    return pure.is_absolute() or ".." in pure.parts


def shown(source: str) -> str:
    """A source as messages name it: without the query of a URL, which may be a signature, or user and password."""
    if not source.startswith(("http://", "https://")):
        return source
    address, query, _ = source.partition("#")[0].partition("?")
    scheme, _, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}{'?...' if query else ''}"


def check_allowed(source: str, patterns: Sequence[str]) -> None:
    """Raise `ConfigError` unless a pattern of `registry.sources` matches the source or the address of a redirect."""
    if any(_matches(source, pattern) for pattern in patterns):
        return
    allowed = ", ".join(patterns) or "nothing"
    raise ConfigError(
        f"{shown(source)} is not allowed: registry.sources allows {allowed}; add a pattern, or take another source",
        "registry.sources",
    )


class _Address(NamedTuple):
    """The parts of a URL, or of a pattern for URLs, that are compared one by one."""

    scheme: str
    authority: str  # host, and the port unless it is the scheme's own
    path: str  # and what follows


def _matches(source: str, pattern: str) -> bool:
    """Does the pattern allow the source? In a URL no `*` reaches from the host into the path."""
    if pattern == "*":
        return True
    if not source.startswith(("http://", "https://")):
        return fnmatchcase(source, pattern)
    address, allowed = _address(source), _split(pattern)
    if address is None or allowed is None:
        return False
    return all(fnmatchcase(part, wanted) for part, wanted in zip(address, allowed, strict=True))


def _split(text: str) -> _Address | None:
    """The parts of a URL or of a pattern; None without `://`. A pattern without a path allows every path."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return None
    authority, slash, path = rest.partition("/")
    default = {"http": ":80", "https": ":443"}.get(scheme.lower(), "")
    authority = authority.lower()
    return _Address(scheme.lower(), authority.removesuffix(default) if default else authority, slash + path or "/*")


def _address(url: str) -> _Address | None:
    """The parts of a URL; None if programs might read them in different ways, or if its path has `..`."""
    found = _split(url.partition("#")[0])
    if found is None or not _AUTHORITY.fullmatch(found.authority) or any(ord(letter) <= 32 for letter in url):
        return None
    path = unquote(found.path.partition("?")[0])
    return None if ".." in re.split(r"[/\\]", path) else found


def default_name(source: Source, file: str) -> str:
    """The name of a model whose file is called `file`: without its suffix, and with allowed characters only."""
    stem = PurePosixPath(urlsplit(file).path if isinstance(source, WebSource) else file).name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", unquote(stem)).removesuffix(".gguf").strip(".-_")
    return stem[:128] or "model"
